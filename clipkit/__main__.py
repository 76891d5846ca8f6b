"""The command ``clipkit``, also available as ``python -m clipkit``."""

from collections.abc import Sequence
from typing import NoReturn

from clipkit.cli import build_parser, select_command
from clipkit.errors import run_command
from clipkit.options import COMMANDS


def main() -> NoReturn:
    """Run the sub-command given on the command line."""
    run_command(dispatch)


def dispatch(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command, by default the one on the process's command line; return the exit status.

    Raises:
        ClipkitError: a user error.
    """
    parser = build_parser(
        COMMANDS,
        prog="clipkit",
        description="Use CLIP models on images and texts, export and interpolate them.",
        epilog="Run clipkit COMMAND --help for the options of a command.",
    )
    return select_command(COMMANDS, parser.parse_args(arguments))()


if __name__ == "__main__":
    main()
