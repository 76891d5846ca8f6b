"""The commands of this room: ``python -m data make | pack | index …``."""

import argparse
import json
import signal
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clipkit.arguments import Parser, number, whole
from clipkit.errors import DataError, nearest, run_command
from data.index_command import add_index
from data.inspect_command import add_inspect
from data.json_fields import listed
from data.speed import add_speed

if TYPE_CHECKING:
    from data.pack import PackReport

_TOLD = 8  # columns that are left out
SETS = """\
  glyphs   characters from matplotlib's fonts, for training; some font
           families are held out as split test
  digits   8 x 8 handwritten digits (scikit-learn's), for evaluation only
  icons    the icon themes installed on this machine, captions from their
           names; one theme is held out as split test
"""
COLUMNS = """\
The table's first line names its columns. Paths are relative to the table's
folder. Columns besides path and caption become fields of the samples' json,
for data.filters and data.captions in training (--fields chooses some). Rows
that cannot be used (a missing file, a broken picture, an empty caption) are
counted and listed in OUT/bad_rows.jsonl.

  python -m data pack photos.csv photos
  python -m data pack photos.csv photos --test 0.1
  python -m data pack table.parquet out --image-column file --caption-column alt

With --test, train on the one split and score on the other by
  python train.py data.train=photos eval.data=photos
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
        what = f"cannot make {parsed.out}" if hasattr(parsed, "out") else "stopped"
        raise DataError(f"{what}: {error}") from error
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m data",
        description="Make, pack, index and look into data sets of WebDataset shards.",
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
        "--fields",
        metavar="A,B",
        help="other columns to keep as fields of the samples' json, '' for none (default: all but bytes)",
    )
    pack.add_argument(
        "--test",
        metavar="SHARE",
        type=number(0, 1),
        default=0.0,
        help="hold this share of the pairs out as split test, to score on, e.g. 0.1 (default: 0)",
    )
    pack.add_argument(
        "--samples-per-shard",
        metavar="N",
        type=whole(1, 10_000_000),
        default=10_000,
        help="samples of a shard (default: 10000)",
    )
    pack.add_argument(
        "--max-side",
        metavar="PIXELS",
        type=whole(1, 1_000_000),
        help="reduce larger pictures to this side (default: keep)",
    )
    pack.add_argument(
        "--keep-orientation",
        action="store_true",
        help="leave pictures as they lie in their files (default: turn upright those that an EXIF tag says to)",
    )
    pack.add_argument(
        "--background",
        metavar="COLOR",
        help="lay partly transparent pictures on this colour, e.g. white (default: keep them)",
    )
    pack.add_argument("--quiet", action="store_true", help="no progress bar")
    pack.set_defaults(command=_pack)
    add_index(commands)
    add_inspect(commands)
    add_speed(commands)
    return parser


def _make(parsed: argparse.Namespace) -> int:
    from data.corpora.builtin import BUILTIN

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
        fields=None if parsed.fields is None else [one for one in parsed.fields.split(",") if one],
        test=parsed.test,
        samples_per_shard=parsed.samples_per_shard,
        max_side=parsed.max_side,
        keep_orientation=parsed.keep_orientation,
        background=parsed.background,
        progress=not parsed.quiet,
    )
    print(f"made {parsed.out} in {time.monotonic() - start:.1f} s")
    print(f"  columns  {report.image_column} (picture), {report.caption_column} (caption)")
    for line in _found(report, kept=parsed.keep_orientation, background=parsed.background):
        print(textwrap.fill(line, 79, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    if report.bad:
        print("  bad rows, by cause:")
        for cause, count in report.bad.items():
            print(f"  {count:>9,}  {cause}")
    for line in _outcome(report, parsed.test):
        print(line)
    return 0


def _found(report: "PackReport", *, kept: bool, background: str | None) -> Iterator[str]:
    """What a user should know of the other columns and of the pictures, and can do about it."""
    if report.fields:
        names = [name if name == column else f"{column} as {name}" for column, name in report.fields.items()]
        yield f"kept as fields for data.filters and data.captions: {listed(names)}"
    if report.left_out:
        left_out = [f"{name!r} ({why})" for name, why in report.left_out.items()]
        yield f"columns left out: {', '.join(left_out[:_TOLD])}{', …' if len(left_out) > _TOLD else ''}"
    if count := report.several_captions:
        yield f"{_counted(count)} several captions: training takes the first, scoring all of them"
    tag = f"{_counted(report.not_upright)} an EXIF tag that says to turn them:"
    if report.not_upright and kept:
        yield f"{tag} they are kept as they lie in their files, as CLIP sees them"
    elif report.not_upright:
        yield f"{tag} they are stored upright (--keep-orientation would leave them)"
    if (count := report.transparent) and background:
        yield f"{_counted(count)} transparent parts: they are laid on {background}"
    elif count:
        yield (
            f"{_counted(count)} transparent parts, where CLIP sees whatever colours are hidden beneath: "
            "--background white lays them on white"
        )


def _counted(pictures: int) -> str:
    return "1 picture has" if pictures == 1 else f"{pictures:,} pictures have"


def _outcome(report: "PackReport", test: float) -> Iterator[str]:
    """The last lines: how many pairs went where, and how many rows were bad."""
    train, held_out, bad = (
        report.splits.get("train", 0),
        report.splits.get("test", 0),
        sum(report.bad.values()),
    )
    line = f"packed {train:,} pair{'' if train == 1 else 's'} into train"
    if test:
        line += f" and {held_out:,} into test"
    if test and not held_out:
        line += ": too few pictures for that share"
    yield line
    if bad:
        mostly = "warning: " if bad >= report.packed else ""
        yield f"{mostly}{bad:,} of {bad + report.packed:,} rows were bad: see {report.bad_rows}"


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
