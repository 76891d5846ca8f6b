"""``python -m eval``: score models on datasets, and build the pages of what came out."""

import argparse
from collections.abc import Sequence

from clipkit.errors import Parser, leaving_at_once, run_command

with leaving_at_once("nothing was scored"):
    from clipkit import distributed
    from eval.commands import add_page_commands, add_score_commands
    from eval.datasets.new import add_new_command

_EPILOG = """examples:
  python -m eval zero-shot --model runs/quickstart --data digits --data glyphs
  python -m eval retrieval --model runs/icons --data icons --data my_folder
  python -m eval run --suite builtin --model runs/quickstart
  python -m eval run --suite clip27 --data-root hf://datasets/clip-benchmark \\
      --model open_clip:ViT-B-32/openai --model runs/mine --skip-existing
  python -m eval report runs/quickstart
  python -m eval report A/results.jsonl B/results.jsonl --out compared.html
  python -m eval compare A/results.jsonl B/results.jsonl
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m eval",
        description="Score models on datasets, and build the pages of what came out.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_score_commands(commands)
    add_page_commands(commands)
    add_new_command(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    options = _parser().parse_args(arguments)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    run_command(distributed.together(main))
