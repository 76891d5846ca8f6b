"""The commands of this room: ``python -m data make NAME OUT`` and ``python -m data pack TABLE OUT``."""

import argparse
import json
import signal
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from clipkit.errors import DataError, nearest, run_command

SETS = """\
  glyphs   characters from matplotlib's fonts, for training; some font
           families are held out as split test
  digits   8 x 8 handwritten digits (scikit-learn's), for evaluation only
  icons    the icon themes installed on this machine, captions from their
           names; one theme is held out as split test
"""
COLUMNS = """\
The table's first line names its columns. Paths are relative to the table's
folder. Rows that cannot be used (a missing file, a broken picture, an empty
caption) are counted and listed in OUT/bad_rows.jsonl.

  python -m data pack photos.csv photos
  python -m data pack table.parquet out --image-column file --caption-column alt
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    Raises:
        ClipkitError: a mistake that the user can mend.
    """
    parsed = _parser().parse_args(arguments)
    try:
        status: int = parsed.command(parsed)
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a folder without permission
        raise DataError(f"cannot make {parsed.out}: {error}") from error
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data",
        description="Make and pack data sets: folders of WebDataset shards with a card.",
        epilog="python -m data COMMAND --help says more about a command.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    raw = argparse.RawDescriptionHelpFormatter

    make = commands.add_parser(
        "make",
        help="make one of the built-in data sets",
        description="Make a built-in data set; nothing is downloaded.\n\n" + SETS,
        formatter_class=raw,
    )
    make.add_argument("name", metavar="NAME", help="glyphs, digits or icons")
    make.add_argument("out", metavar="OUT", type=Path, help="the folder to make")
    make.add_argument("--quiet", action="store_true", help="no progress bar")
    make.set_defaults(command=_make)

    pack = commands.add_parser(
        "pack",
        help="pack your own pictures and captions from a table",
        description=textwrap.fill(
            "Pack the pictures and captions of a CSV, TSV, JSONL or Parquet table into shards.", 79
        ),
        epilog=COLUMNS,
        formatter_class=raw,
    )
    pack.add_argument("table", metavar="TABLE", type=Path, help="a .csv, .tsv, .jsonl or .parquet file")
    pack.add_argument("out", metavar="OUT", type=Path, help="the folder to make")
    pack.add_argument("--image-column", metavar="C", help="column with the paths (default: guessed)")
    pack.add_argument("--caption-column", metavar="C", help="column with the captions (default: guessed)")
    pack.add_argument(
        "--samples-per-shard",
        metavar="N",
        type=int,
        default=10_000,
        help="samples of a shard (default: 10000)",
    )
    pack.add_argument(
        "--max-side", metavar="PIXELS", type=int, help="reduce larger pictures to this side (default: keep)"
    )
    pack.add_argument("--quiet", action="store_true", help="no progress bar")
    pack.set_defaults(command=_pack)
    return parser


def _make(parsed: argparse.Namespace) -> int:
    from data.builtin import BUILTIN

    if parsed.name not in BUILTIN:
        raise DataError(f"there is no built-in data set {parsed.name!r}: {nearest(parsed.name, BUILTIN)}")
    start = time.monotonic()
    BUILTIN[parsed.name].make(parsed.out, not parsed.quiet)
    _summary(parsed.out, time.monotonic() - start)
    return 0


def _pack(parsed: argparse.Namespace) -> int:
    from data.pack import pack

    start = time.monotonic()
    report = pack(
        parsed.table,
        parsed.out,
        image_column=parsed.image_column,
        caption_column=parsed.caption_column,
        samples_per_shard=parsed.samples_per_shard,
        max_side=parsed.max_side,
        progress=not parsed.quiet,
    )
    _summary(parsed.out, time.monotonic() - start)
    print(f"  columns  {report.image_column} (picture), {report.caption_column} (caption)")
    if report.bad:
        print(f"  {sum(report.bad.values()):,} bad rows, listed in {report.bad_rows}:")
        for cause, count in report.bad.items():
            print(f"  {count:>9,}  {cause}")
    return 0


def _summary(out: Path, seconds: float) -> None:
    """Where the set is, its samples by split, and how long it took."""
    samples = json.loads((out / "card.json").read_text(encoding="utf-8"))["samples"]
    print(f"made {out} in {seconds:.1f} s")
    for split, count in samples.items():
        print(f"  {split:<7}  {count:,} samples")


if __name__ == "__main__":
    for stop in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: what is half made is removed
        signal.signal(stop, signal.default_int_handler)
    run_command(main)
