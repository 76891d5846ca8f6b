"""Create, pack, download, index and inspect datasets: ``python -m data COMMAND``."""

import signal
from collections.abc import Sequence

from clipkit.cli import build_parser, select_command
from clipkit.errors import DataError, run_command
from data.options import COMMANDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    parser = build_parser(
        COMMANDS,
        prog="python -m data",
        description="Create, pack, download, index and inspect datasets of WebDataset shards.",
        epilog="python -m data COMMAND --help describes a command.",
    )
    parsed = parser.parse_args(arguments)
    try:
        return select_command(COMMANDS, parsed)()
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a folder without permission
        what = "stopped"
        if hasattr(parsed, "out"):
            what = f"cannot create {parsed.out}"
        raise DataError(f"{what}: {error}") from error


if __name__ == "__main__":
    for stop in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C, so that partial output is removed
        signal.signal(stop, signal.default_int_handler)
    run_command(main)
