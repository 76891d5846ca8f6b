"""Make, pack, index and inspect data sets: ``python -m data COMMAND``."""

import argparse
import json
import signal
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from clipkit.cli import (
    MOST_BATCH,
    Command,
    Parser,
    add_decoding_options,
    chosen_command,
    command_parser,
    number,
    whole,
)
from clipkit.config import Config
from clipkit.errors import ConfigError, DataError, nearest, run_command
from clipkit.files.atomic import write_atomic
from clipkit.files.terminal import counted, printable
from clipkit.files.traits import Decoding, color_of
from data.remote.cache import cache_folder, shard_cache

if TYPE_CHECKING:
    from data.inspect.findings import Findings
    from data.pack import PackReport
    from data.shards.manifest import Manifest


# --------------------------------------------------------------------------------------------------------------
# ``python -m data index``: index shards now, so that a training can begin at once.

INDEX_TEXT = """\
SOURCE is what data.train takes: a folder, a tar, a brace pattern, a built-in
corpus, or one of these at s3://, gs://, https:// or hf://. The index goes to
the cache folder ($CLIPKIT_CACHE), never beside the data. Training indexes what
is not indexed yet; this does it before, by all cores.
"""


def _index_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", metavar="SOURCE", nargs="+")
    parser.add_argument(
        "--split", metavar="NAME", default="train", help="of a dataset folder (default: train)"
    )
    parser.add_argument(
        "--cache-gb",
        metavar="GB",
        type=number(0, 1e9),
        default=0.0,
        help="keep so much of remote shards on this disk; 0 reads only their headers (default: 0)",
    )
    parser.add_argument(
        "--truncated",
        choices=("error", "use"),
        default="error",
        help="a shard that is cut short: stop, or index its intact part for data.truncated=use (default: error)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _index(parsed: argparse.Namespace) -> int:
    from clipkit.files.tar import TruncatedError
    from clipkit.files.terminal import CountProgress
    from data.captions import Selection
    from data.shards.manifest import make_manifest
    from data.shards.sources import find_shards

    began = time.monotonic()
    _check_cache_folder()
    sources = [find_shards(source, split=parsed.split) for source in parsed.sources]
    cache = shard_cache(parsed.sources, parsed.cache_gb)
    with CountProgress("indexing shards", total=sum(map(len, sources)), shown=not parsed.quiet) as progress:
        selection = Selection(truncated=parsed.truncated)
        try:
            manifest = make_manifest(sources, selection, cache=cache, progress=progress.show, stats=False)
        except TruncatedError as error:
            raise DataError(f"{error}, or index its intact part with --truncated use") from error
    _print(manifest, time.monotonic() - began)
    return 0


def _check_cache_folder() -> None:
    """That what is found can be kept, which is all that this command is for."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be written ({error.strerror}): set CLIPKIT_CACHE"
        ) from error


def _print(manifest: "Manifest", seconds: float) -> None:
    size = int(manifest.sizes.clip(min=0).sum())
    print(
        f"{len(manifest):,} shards, {int(manifest.counts.sum()):,} samples, {_bytes(size)}, {seconds:.1f} s"
    )
    counts = manifest.counts
    print(f"  a shard     {int(counts.min()):,} to {int(counts.max()):,} samples")
    for reason, count in manifest.dropped.items():
        print(textwrap.fill(f"left out    {count:,} {reason}", 79, initial_indent="  "))
    for name, kept in manifest.truncated_shards():
        print(f"  truncated   {name}: {kept:,} samples kept")
    print(f"  manifest    {manifest.fingerprint}")
    print(f"  kept in     {cache_folder()}")


def _bytes(size: int) -> str:
    for unit, worth in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= worth:
            return f"{size / worth:.3g} {unit}"
    return f"{size} bytes"


# --------------------------------------------------------------------------------------------------------------
# ``python -m data inspect``: what shards hold, before a training reads them.

INSPECT_TEXT = """\
SOURCE is what data.train takes: a folder, a tar, a brace pattern, a built-in
corpus, or one of these at s3://, gs://, https:// or hf://. Where training
would refuse a shard, this says so and goes on. Of many shards it looks into
some, spread evenly, and says so. Settings of augmentation change the crops
and how long they take.

  python -m data inspect pairs --html pairs.html
  python -m data inspect pairs data.crop_scale=0.4 data.color_jitter=0.4
  python -m data inspect 'shards/{00000..00331}.tar' --samples 10000
  python -m data inspect pairs --filters 'width >= 256' --filters 'lang = en'
"""


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", metavar="SOURCE", nargs="+")
    parser.add_argument(
        "--split", metavar="NAME", default="train", help="of a dataset folder (default: train)"
    )
    parser.add_argument(
        "--samples",
        metavar="N",
        type=whole(1, 1_000_000),
        default=2000,
        help="how many to decode (default: 2000)",
    )
    parser.add_argument(
        "--shards",
        metavar="N",
        type=whole(0, 1_000_000),
        default=0,
        help="how many to look into (default: 64, or 32 remote ones)",
    )
    parser.add_argument(
        "--image-size",
        metavar="PIXELS",
        type=whole(1, 10_000),
        default=224,
        help="of the model (default: 224)",
    )
    add_decoding_options(parser, default="neither, as open_clip")
    parser.add_argument(
        "--rate",
        metavar="R",
        type=number(1e-3, 1e9),
        default=1000.0,
        help="samples/s that one GPU takes, to tell how many workers it needs (default: 1000)",
    )
    parser.add_argument(
        "--captions",
        metavar="NAMES",
        default="txt",
        help="where captions are, as data.captions has it: txt, or fields of the json, with commas (default: txt)",
    )
    parser.add_argument(
        "--filters",
        metavar="FILTER",
        action="append",
        default=[],
        help="how many samples would pass, as data.filters has it: 'width >= 256'; may be given several times",
    )
    parser.add_argument(
        "--batch-size",
        metavar="N",
        type=whole(1, 1 << 30),
        default=Config.batch_size,
        help=f"pairs of a step, to tell the steps of an epoch (default: {Config.batch_size})",
    )
    parser.add_argument(
        "--cache-gb",
        metavar="GB",
        type=number(0, 1e9),
        default=0.0,
        help="keep so much of remote shards on this disk; 0 reads parts of them (default: 0)",
    )
    parser.add_argument("--html", metavar="OUT", type=Path, help="write one page with pictures, too")
    parser.add_argument("--json", metavar="OUT", type=Path, help="write all figures as JSON, too")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _inspect(parsed: argparse.Namespace) -> int:
    for out in (parsed.html, parsed.json):
        if out is not None and (not out.parent.is_dir() or out.is_dir()):
            raise DataError(f"cannot write {out}: name a file in a folder that exists")
    from data.augment import Augmentation
    from data.inspect import inspect
    from data.inspect.report import page_of, print_table
    from data.remote.cache import shard_cache

    augmentation, sources = Augmentation.given(parsed.sources)
    with _Bars(shown=not parsed.quiet) as bars:
        found = inspect(
            sources,
            split=parsed.split,
            samples=parsed.samples,
            shards=parsed.shards,
            image_size=parsed.image_size,
            decoding=Decoding(
                background=color_of(parsed.background) if parsed.background else None,
                upright=bool(parsed.upright),
            ),
            augmentation=augmentation,
            rate=parsed.rate,
            captions=[one.strip() for one in parsed.captions.split(",") if one.strip()] or ["txt"],
            filters=_filters(parsed.filters),
            batch_size=parsed.batch_size,
            cache=shard_cache(sources, parsed.cache_gb),
            progress=bars.show,
        )
    print_table(found)
    if parsed.html is not None:
        _write(parsed.html, page_of(found))
        print(f"\nwrote {printable(str(parsed.html))}")
    elif found.bad_shown or found.same or found.alike:
        print("\nto look at bad and double pictures: --html PAGE.html")
    if parsed.json is not None:
        _write(parsed.json, _json(found))
    return 0


def _write(out: Path, text: str) -> None:
    try:
        write_atomic(out, text)
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror}") from error


def _filters(given: list[str]) -> list[str]:
    """Each as it is, or a list of them as ``data.filters='["a > 1", "b = c"]'`` has it."""
    filters: list[str] = []
    for one in given:
        if not one.lstrip().startswith("["):
            filters.append(one)
            continue
        try:
            filters += map(str, tomllib.loads(f"filters = {one}")["filters"])
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"--filters {one!r} is no list of texts, such as '[\"width >= 256\"]': {error}"
            ) from error
    return filters


class _Bars:
    """A progress bar for each kind of work, one after the other."""

    def __init__(self, *, shown: bool) -> None:
        self._shown, self._what = shown, ""
        self._stack = ExitStack()

    def __enter__(self) -> "_Bars":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, what: str, done: int, failed: int, total: int) -> None:
        """So much of this is done."""
        from clipkit.files.terminal import CountProgress

        if what != self._what:
            self._stack.close()
            self._what = what
            self._bar = self._stack.enter_context(CountProgress(what, total=total, shown=self._shown))
        self._bar.show(done, failed)


def _json(found: "Findings") -> str:
    return json.dumps(found.to_dict(), ensure_ascii=False, indent=1) + "\n"


# --------------------------------------------------------------------------------------------------------------

_TOLD = 8  # columns that are left out
SETS = """\
  glyphs   characters from matplotlib's fonts, for training; some font
           families are held out as split test
  digits   8 x 8 handwritten digits (scikit-learn's), for evaluation only
  icons    the icon themes installed on this machine, captions from their
           names; one theme is held out as split test
"""
SPEED_TEXT = """\
Runs the training's own loader, with nothing behind it: shards are read,
pictures decoded and cropped, captions tokenized, batches put together.
SOURCE is what data.train takes; settings of augmentation may follow.

  python -m data speed pairs --workers 0,2,4,8
  python -m data speed pairs data.crop_scale=0.4 data.color_jitter=0.4
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
        ClipkitError: a user error.
    """
    parsed = make_parser().parse_args(arguments)
    try:
        return chosen_command(COMMANDS, parsed)()
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a folder without permission
        what = f"cannot make {parsed.out}" if hasattr(parsed, "out") else "stopped"
        raise DataError(f"{what}: {error}") from error


def make_parser() -> Parser:
    """Build the parser of all commands."""
    return command_parser(
        COMMANDS,
        prog="python -m data",
        description="Make, pack, index and inspect data sets of WebDataset shards.",
        epilog="python -m data COMMAND --help says more about a command.",
    )


def _make_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="glyphs, digits or icons")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to make")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _pack_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="TABLE", type=Path, help="a .csv, .tsv, .jsonl or .parquet file")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to make")
    parser.add_argument("--image-column", metavar="C", help="column with the paths (default: guessed)")
    parser.add_argument("--caption-column", metavar="C", help="column with the captions (default: guessed)")
    parser.add_argument(
        "--fields",
        metavar="A,B",
        help="other columns to keep as fields of the samples' json, '' for none (default: all but bytes)",
    )
    parser.add_argument(
        "--test",
        metavar="SHARE",
        type=number(0, 1),
        default=0.0,
        help="hold this share of the pairs out as split test, to score on, e.g. 0.1 (default: 0)",
    )
    parser.add_argument(
        "--samples-per-shard",
        metavar="N",
        type=whole(1, 10_000_000),
        default=10_000,
        help="samples of a shard (default: 10000)",
    )
    parser.add_argument(
        "--max-side",
        metavar="PIXELS",
        type=whole(1, 1_000_000),
        help="reduce larger pictures to this side (default: keep)",
    )
    parser.add_argument(
        "--keep-orientation",
        action="store_true",
        help="leave pictures as they lie in their files (default: turn upright those that an EXIF tag says to)",
    )
    parser.add_argument(
        "--background",
        metavar="COLOR",
        help="lay partly transparent pictures on this colour, e.g. white (default: keep them)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _speed_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", metavar="SOURCE", nargs="*")
    parser.add_argument(
        "--split", metavar="NAME", default="train", help="of a dataset folder (default: train)"
    )
    parser.add_argument(
        "--image-size",
        metavar="PIXELS",
        type=whole(1, 10_000),
        default=224,
        help="of the model (default: 224)",
    )
    parser.add_argument(
        "--workers",
        metavar="N,…",
        nargs="+",  # to say something of numbers with blanks between them
        default=["0,1,2"],
        help="numbers of workers to compare (default: 0,1,2)",
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=number(0, 1e6, above=True),
        default=10.0,
        help="for each, after its first batch (default: 10)",
    )
    parser.add_argument(
        "--batch-size", metavar="B", type=whole(1, MOST_BATCH), default=256, help="samples (default: 256)"
    )
    parser.add_argument(
        "--scaled-decode", action="store_true", help="decode large JPEGs smaller, as data.scaled_decode does"
    )
    parser.add_argument(
        "--cache-gb",
        metavar="GB",
        type=number(0, 1e9),
        default=100.0,
        help="how much of remote shards is kept on this disk; 0 reads over the network (default: 100)",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _speed(parsed: argparse.Namespace) -> int:
    from data.inspect.speed import speed

    return speed(parsed)


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
    from data.captions import listed

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
    line = f"packed {counted(train, 'pair')} into train"
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


COMMANDS = {
    "make": Command(
        summary="make one of the built-in data sets",
        description="Make a built-in data set; nothing is downloaded.\n\n" + SETS,
        arguments=_make_arguments,
        run=_make,
        stopped="nothing was written",
    ),
    "pack": Command(
        summary="pack your own images and captions from a table",
        description="Pack images and captions of a CSV, TSV, JSONL or Parquet table into shards.",
        epilog=COLUMNS,
        arguments=_pack_arguments,
        run=_pack,
        stopped="nothing was written",
    ),
    "index": Command(
        summary="index shards, so that a training can begin at once",
        description="Index shards: which samples they hold, and where their bytes are.\n\n" + INDEX_TEXT,
        arguments=_index_arguments,
        run=_index,
        stopped="nothing was written",
    ),
    "inspect": Command(
        summary="inspect shards: what is missing, broken, bad, duplicate, slow",
        description="Inspect shards before training on them.\n\n" + INSPECT_TEXT,
        usage="python -m data inspect [OPTIONS] SOURCE [SOURCE ...] [data.SETTING=VALUE ...]",
        arguments=_inspect_arguments,
        run=_inspect,
        stopped="nothing was written",
    ),
    "speed": Command(
        summary="measure how fast batches are made",
        description="Measure how fast batches are made.\n\n" + SPEED_TEXT,
        usage="python -m data speed [OPTIONS] SOURCE [SOURCE ...] [data.SETTING=VALUE ...]",
        arguments=_speed_arguments,
        run=_speed,
        stopped="nothing was written",
    ),
}


if __name__ == "__main__":
    for stop in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: what is half made is removed
        signal.signal(stop, signal.default_int_handler)
    run_command(main)
