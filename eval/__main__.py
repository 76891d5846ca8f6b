"""``python -m eval``: score models on datasets and build pages of the results. Imports torch only after parsing."""

from collections.abc import Sequence

from clipkit.cli import Parser, build_parser, select_command
from clipkit.errors import run_command
from eval.options import COMMANDS

_EPILOG = """examples:
  python -m eval zero-shot --model runs/quickstart --data digits --data glyphs
  python -m eval retrieval --model runs/emoji --data emoji --data my_folder
  python -m eval run --suite builtin --model runs/quickstart
  python -m eval run --suite clip27 --data-root hf://datasets/clip-benchmark \\
      --model open_clip:ViT-B-32/openai --model runs/mine --skip-existing
  python -m eval report runs/quickstart
  python -m eval report A/results.jsonl B/results.jsonl --out compared.html
  python -m eval compare A/results.jsonl B/results.jsonl
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status; raises ClipkitError for user errors."""
    return select_command(COMMANDS, _parser().parse_args(arguments))()


def _parser() -> Parser:
    return build_parser(
        COMMANDS,
        prog="python -m eval",
        description="Score models on datasets and build pages of the results.",
        epilog=_EPILOG,
    )


def _program() -> int:
    command = select_command(COMMANDS, _parser().parse_args())
    from clipkit import distributed

    return distributed.together(command)()


if __name__ == "__main__":
    run_command(_program)
