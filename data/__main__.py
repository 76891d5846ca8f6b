"""Create, pack, download, index and inspect datasets: ``python -m data COMMAND``."""

import argparse
import json
import signal
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clipkit.cli import (
    MOST_BATCH,
    MOST_WORKERS,
    Command,
    Parser,
    add_decoding_options,
    add_model_options,
    chosen_command,
    command_parser,
    number,
    whole,
)
from clipkit.config import Config
from clipkit.errors import DataError, nearest, run_command
from clipkit.files import counted, printable, size_of, user_path
from clipkit.samples import CLASS_NAMES, are_ids, color_of, parse_pixel_range
from clipkit.samples.remote import cache_folder, shard_cache

if TYPE_CHECKING:
    from data.pack import PackReport

SOURCES = """\
SOURCE is any value that data.train accepts: a folder, a tar, a brace pattern,
a table of images and captions, a built-in dataset, or a URL (s3://, gs://,
https://, hf://)."""
INDEX_TEXT = f"""\
{SOURCES}

The index is stored in the cache folder ($CLIPKIT_CACHE), not next to the data.
Training indexes shards that have no index; this command does so in advance, on
all cores.
"""
INSPECT_TEXT = f"""\
{SOURCES}

Shards that cannot be read are reported and skipped. If there are many shards,
an evenly spread subset is inspected. Augmentation and decoding settings change
the crops.

  python -m data inspect pairs --html pairs.html
  python -m data inspect pairs data.crop_scale=0.4 data.color_jitter=0.4
  python -m data inspect 'shards/{{00000..00331}}.tar' --samples 10000
  python -m data inspect pairs --filters 'width >= 256' --filters 'lang = en'
"""
MAKE_TEXT = """\
  glyphs   characters from matplotlib's fonts, for training; some font
           families are held out as the test split
  digits   8 x 8 handwritten digits from scikit-learn, for evaluation only
  emoji    emoji by seven artists, with names in 27 languages; two artists and
           a tenth of the concepts are held out. Downloads 32 MB with npm pack
           unless --packages names a folder with the .tgz files
  cues     digits filled with textures; in the test split shape and texture
           are of different digits, which measures shape bias
"""
SPEED_TEXT = f"""\
Runs the training loader without a model: reads shards, decodes and crops
images, tokenizes captions, and collates batches. Accepts augmentation and
decoding settings.

{SOURCES}

  python -m data speed pairs --workers 0,2,4,8
  python -m data speed pairs data.crop_scale=0.4 data.color_jitter=0.4
"""
_PACKED = "a .csv, .tsv, .jsonl, .json or .parquet file, or a folder of images with captions or by class"
TOKENIZER_TEXT = f"""\
Train a byte-level BPE tokenizer on the captions of shards, for any languages. A
small vocabulary saves memory and time of a small model.

{SOURCES}

  python -m data tokenizer pairs --out tokenizer --vocab 8192
  python train.py CONFIG model.tokenizer=tokenizer
"""
PALETTE_TEXT = f"""\
Choose a palette by k-means over pixels of the images, for Image GPT.

{SOURCES}

  python -m data palette glyphs --colors 16 --out palette.safetensors
  python train.py CONFIG model.image=pixels:Ti model.image_options='{{"colors": 16}}' \\
    model.image_weights=palette.safetensors image_gpt.weight=1 loss.name=none
"""
PACK_TEXT = """\
The first line of the table names its columns, or has the path of an image;
then columns are called 'column 1' and so on. Paths are relative to the table's
folder. Other columns become fields of each sample's json, for data.filters and
data.captions in training (--fields selects columns). Rows of the same image
become one sample with a list of captions (see --group-by and --no-group);
training uses the first, or draws one with data.captions=captions
data.caption_choice=random. Rows that cannot be used (a missing file, a broken
image, an empty caption) are counted and listed in OUT/bad_rows.jsonl.

  python -m data pack photos.csv photos
  python -m data pack photos.csv photos --test 0.1
  python -m data pack table.parquet out --image-column file --caption-column alt

With --test, train on one split and evaluate on the other:
  python train.py data.train=photos eval.data=photos
"""

DOWNLOAD_TEXT = """\
TABLE is a .csv, .tsv, .jsonl, .json or .parquet file with a column of URLs, or
a folder of them, or a .txt file with a URL per line. Writes WebDataset shards
in img2dataset's layout to OUT, for data.train and other programs. Run the same
command again to resume an interrupted download, with --retry-failed to try
failed rows again. Hosts with private addresses and images that their server
marks as noai are skipped.

  python -m data download table.parquet images --image-size 384
  python -m data download hf://datasets/OWNER/NAME/table.parquet images
  python -m data download table.csv images --retry-failed
  python -m data download table.csv images --part 3/16
  python -m data download table.csv /shared/images --ray auto
"""


SCORE_TEXT = f"""\
{SOURCES}

Scores are stored in the cache folder ($CLIPKIT_CACHE); the data is not changed.
Run the same command again to resume. Training reads only the selected samples:

  python -m data score pairs --model open_clip:ViT-B-32/laion2b_s34b_b79k
  python train.py data.train=pairs data.scores=NAME \\
      data.filters='["score.clip >= top 30%","score.duplicate = false"]'

Presets: preset:datacomp_basic, preset:datacomp_clip_score, preset:laion2b and
preset:datacomp_text_based. data/README.md describes the columns.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    Raises:
        ClipkitError: a user error.
    """
    parsed = parse(arguments)
    try:
        return chosen_command(COMMANDS, parsed)()
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a folder without permission
        what = f"cannot create {parsed.out}" if hasattr(parsed, "out") else "stopped"
        raise DataError(f"{what}: {error}") from error


def make_parser() -> Parser:
    """Build the parser for all commands."""
    return command_parser(
        COMMANDS,
        prog="python -m data",
        description="Create, pack, download, index and inspect datasets of WebDataset shards.",
        epilog="python -m data COMMAND --help describes a command.",
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line; options may appear between sources and settings."""
    parser = make_parser()
    parsed, more = parser.parse_known_args(arguments)
    if more and (not hasattr(parsed, "sources") or any(word.startswith("-") for word in more)):
        parser.refuse(parsed, more)
    if more:
        parsed.sources += more
    return parsed


# --------------------------------------------------------------------------------------------------------------
# Options


def _source_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", metavar="SOURCE", nargs="+")
    parser.add_argument(
        "--split", metavar="NAME", default="train", help="split of a dataset folder (default: train)"
    )
    parser.add_argument("--quiet", action="store_true", help="print no progress")


def _filters_option(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--filters", metavar="FILTER", action="append", default=[], help=text)


def _cache_option(parser: argparse.ArgumentParser, default: float, without: str) -> None:
    parser.add_argument(
        "--cache-gb",
        metavar="GB",
        type=number(0, 1e9),
        default=default,
        help=f"size of the disk cache for remote shards; 0 {without} (default: {default:g})",
    )


def _whole_option(
    parser: argparse.ArgumentParser, name: str, metavar: str, least: int, most: int, default: int, text: str
) -> None:
    parser.add_argument(name, metavar=metavar, type=whole(least, most), default=default, help=text)


def _index_options(parser: argparse.ArgumentParser) -> None:
    _source_options(parser)
    _cache_option(parser, 0.0, "reads only their headers")
    _member_options(parser)
    parser.add_argument(
        "--truncated",
        choices=("error", "use"),
        default="error",
        help="stop at a truncated shard, or index its intact part for data.truncated=use (default: error)",
    )


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    _source_options(parser)
    _whole_option(parser, "--samples", "N", 1, 1_000_000, 2000, "samples to decode (default: 2000)")
    _whole_option(
        parser, "--shards", "N", 0, 1_000_000, 0, "shards to inspect (default: 64, or 32 remote ones)"
    )
    _whole_option(parser, "--image-size", "PIXELS", 1, 10_000, 224, "side of the crops (default: 224)")
    _whole_option(
        parser,
        *("--batch-size", "N", 1, 1 << 30, Config.batch_size),
        f"pairs per step, to compute the steps per epoch (default: {Config.batch_size})",
    )
    add_decoding_options(parser, default="as in open_clip")
    _member_options(parser)
    _filters_option(
        parser,
        "report how many samples pass a filter such as 'width >= 256' (as data.filters); may be repeated",
    )
    _cache_option(parser, 0.0, "reads parts of them")
    parser.add_argument("--html", metavar="OUT", type=user_path, help="also write a page with images")
    parser.add_argument("--json", metavar="OUT", type=user_path, help="also write all results as JSON")


def _worker_counts(text: str) -> list[int]:
    return [whole(0, MOST_WORKERS)(count) for count in dict.fromkeys(text.split(","))]


def _speed_options(parser: argparse.ArgumentParser) -> None:
    _source_options(parser)
    _whole_option(parser, "--image-size", "PIXELS", 1, 10_000, 224, "side of the crops (default: 224)")
    _whole_option(parser, "--batch-size", "B", 1, MOST_BATCH, 256, "samples per batch (default: 256)")
    parser.add_argument(
        "--workers",
        metavar="N,…",
        type=_worker_counts,
        default=[0, 1, 2],
        help="numbers of workers to compare (default: 0,1,2)",
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=number(0, 1e6, above=True),
        default=10.0,
        help="duration of each measurement after its first batch (default: 10)",
    )
    _cache_option(parser, 100.0, "reads over the network")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")


def _caption_option(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument(
        "--captions",
        metavar="NAMES",
        default="txt",
        help="sources of captions as in data.captions: txt, other members or json fields, separated by commas"
        f"{more} (default: txt)",
    )


def _fields_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fields",
        metavar="A,B",
        help="other columns to store in the samples' json, '' for none (default: all except binary columns)",
    )


def _member_options(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument(
        "--image",
        metavar="MEMBER",
        default="",
        help="member with the image, as data.image (default: the first image)",
    )
    _caption_option(parser, more)


def _tokenizer_options(parser: argparse.ArgumentParser) -> None:
    _source_options(parser)
    parser.add_argument("--out", metavar="OUT", type=user_path, required=True, help="the folder to create")
    _whole_option(parser, "--vocab", "N", 258, 1_000_000, 8192, "number of tokens (default: 8192)")
    _caption_option(parser)
    _filters_option(
        parser, "use only samples that pass a filter such as 'lang = de' (as data.filters); may be repeated"
    )
    _cache_option(parser, 100.0, "reads them over the network")


def _palette_options(parser: argparse.ArgumentParser) -> None:
    _source_options(parser)
    parser.add_argument(
        "--out", metavar="FILE", type=user_path, required=True, help="the .safetensors file to write"
    )
    _whole_option(parser, "--colors", "N", 2, 4096, 512, "number of colors (default: 512)")
    _whole_option(parser, "--images", "N", 1, 1_000_000, 2000, "images to look at (default: 2000)")
    _cache_option(parser, 100.0, "reads them over the network")


def _make_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="glyphs, digits, emoji or cues")
    parser.add_argument("out", metavar="OUT", type=user_path, help="the folder to create")
    parser.add_argument(
        "--packages",
        metavar="FOLDER",
        type=user_path,
        help="for emoji: .tgz files made by npm pack (default: download)",
    )
    parser.add_argument("--quiet", action="store_true", help="print no progress")


def _pack_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="TABLE", type=user_path, help=_PACKED)
    parser.add_argument("out", metavar="OUT", type=user_path, help="the folder to create")
    parser.add_argument("--image-column", metavar="C", help="column with the paths (default: guessed)")
    parser.add_argument("--caption-column", metavar="C", help="column with the captions (default: guessed)")
    _fields_option(parser)
    parser.add_argument(
        "--test",
        metavar="FRACTION",
        type=number(0, 1),
        default=0.0,
        help="fraction of the pairs to hold out as the test split, such as 0.1 (default: 0)",
    )
    _whole_option(
        parser, "--samples-per-shard", "N", 1, 10_000_000, 10_000, "samples per shard (default: 10000)"
    )
    parser.add_argument(
        "--max-side",
        metavar="PIXELS",
        type=whole(1, 1_000_000),
        help="shrink images whose longer side exceeds this (default: keep the size)",
    )
    parser.add_argument(
        "--keep-orientation",
        action="store_true",
        help="do not rotate images upright (default: apply the EXIF orientation)",
    )
    parser.add_argument(
        "--background",
        metavar="COLOR",
        help="blend transparent images onto this color, such as white (default: keep transparency)",
    )
    parser.add_argument(
        "--group-by",
        metavar="C",
        help="column that is the same in all rows of an image, which become one sample with several captions "
        "(default: the image column)",
    )
    parser.add_argument("--no-group", action="store_true", help="make a sample of each row")
    parser.add_argument("--quiet", action="store_true", help="print no progress")


def _download_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "table",
        metavar="TABLE",
        help="a table with a column of URLs, or a folder, local or remote (hf://, s3://)",
    )
    parser.add_argument("out", metavar="OUT", type=user_path, help="the folder for the shards")
    parser.add_argument("--url-column", metavar="C", help="column with the URLs (default: guessed)")
    parser.add_argument("--caption-column", metavar="C", help="column with the captions (default: guessed)")
    _fields_option(parser)
    parser.add_argument(
        "--resize",
        choices=("keep_ratio", "keep_ratio_largest", "center_crop", "border", "no"),
        default="keep_ratio",
        help="as in img2dataset: resize the shorter or the longer side to --image-size, crop a square, add a white "
        "border, or keep the size (default: keep_ratio)",
    )
    _whole_option(parser, "--image-size", "PIXELS", 1, 100_000, 256, "target size (default: 256)")
    parser.add_argument("--enlarge", action="store_true", help="also enlarge smaller images")
    parser.add_argument("--exif", action="store_true", help="store EXIF tags in the json")
    _whole_option(
        parser, "--samples-per-shard", "N", 1, 10_000_000, 10_000, "table rows per shard (default: 10000)"
    )
    parser.add_argument(
        "--keep-duplicates",
        action="store_true",
        help="keep an image for each row, even if its URL or bytes are in an earlier row (default: rows with the "
        "same URL become one image with several captions)",
    )
    parser.add_argument(
        "--part",
        metavar="I/N",
        default="1/1",
        help="download every N-th shard, starting at the I-th (default: 1/1)",
    )
    parser.add_argument(
        "--retry-failed",
        action="store_true",
        help="also try the rows again that failed in an earlier run; images that are found are added in new shards",
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="do not stop when nearly all of the last rows failed"
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="download on a Ray cluster, a shard per task; OUT must be on a shared disk",
    )
    _whole_option(parser, "--connections", "N", 1, 10_000, 256, "concurrent requests (default: 256)")
    _whole_option(parser, "--per-host", "N", 1, 10_000, 16, "concurrent requests per host (default: 16)")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=number(0.1, 3600),
        default=20.0,
        help="timeout of a response (default: 20)",
    )
    _whole_option(parser, "--retries", "N", 0, 20, 2, "retries after temporary errors (default: 2)")
    _whole_option(parser, "--max-mb", "MB", 1, 1024, 64, "maximum file size (default: 64)")
    parser.add_argument(
        "--allow-private", action="store_true", help="also download from hosts with private addresses"
    )
    parser.add_argument(
        "--ignore-robots", action="store_true", help="ignore the header X-Robots-Tag (noai, noindex)"
    )
    parser.add_argument("--quiet", action="store_true", help="print no progress")


def _score_options(parser: argparse.ArgumentParser) -> None:
    _source_options(parser)
    add_model_options(parser)
    _member_options(parser, "; the first caption is scored")
    parser.add_argument(
        "--against",
        metavar="SOURCE",
        action="append",
        default=[],
        help="find the images of this evaluation set (its split test) among the samples; may be repeated",
    )
    parser.add_argument(
        "--threshold",
        metavar="S",
        type=number(0, 1),
        default=0.95,
        help="similarity from which two images count as near-duplicates (default: 0.95)",
    )
    parser.add_argument(
        "--no-duplicates",
        dest="duplicates",
        action="store_false",
        help="do not compare all images with each other, which takes time in proportion to their number squared",
    )
    _cache_option(parser, 100.0, "is not possible for them")
    parser.add_argument("--html", metavar="OUT", type=user_path, help="also write a page about filters")
    _filters_option(
        parser, "filter to show on the page, as in data.filters; may be repeated (default: some common ones)"
    )


# --------------------------------------------------------------------------------------------------------------
# Commands


def _index(parsed: argparse.Namespace) -> int:
    from clipkit.files import CountProgress
    from clipkit.samples import TruncatedError
    from data.captions import CaptionRule, split_names
    from data.selection import Selection
    from data.shards.manifest import make_manifest
    from data.sources import find_shards

    began = time.monotonic()
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):  # an unwritable cache would be ignored
        pass
    sources = [find_shards(source, split=parsed.split) for source in parsed.sources]
    cache = shard_cache(parsed.sources, parsed.cache_gb)
    with CountProgress("indexing shards", total=sum(map(len, sources)), shown=not parsed.quiet) as progress:
        rule = CaptionRule(fields=split_names(parsed.captions))
        selection = Selection(truncated=parsed.truncated, image=parsed.image.lower(), captions=rule)
        try:
            manifest = make_manifest(sources, selection, cache=cache, progress=progress.show, stats=False)
        except TruncatedError as error:
            raise DataError(f"{error}, or index its intact part with --truncated use") from error
    counts, size = manifest.counts, size_of(int(manifest.sizes.clip(min=0).sum()))
    seconds = time.monotonic() - began
    print(f"{counted(len(manifest), 'shard')}, {int(counts.sum()):,} samples, {size}, {seconds:.1f} s")
    print(f"  per shard   {int(counts.min()):,} to {int(counts.max()):,} samples")
    for reason, count in manifest.dropped.items():
        print(textwrap.fill(f"left out    {count:,} {reason}", 79, initial_indent="  "))
    for name, kept in manifest.truncated_shards():
        print(f"  truncated   {name}: {kept:,} samples kept")
    print(f"  manifest    {manifest.fingerprint}")
    print(f"  stored in   {folder}")
    return 0


def _inspect(parsed: argparse.Namespace) -> int:
    from clipkit.files import check_page, write_page
    from data.augment import image_settings
    from data.captions import split_names
    from data.inspect import inspect
    from data.inspect.report import page_of, print_table

    check_page("--html", parsed.html)
    augmentation, decoding, sources = image_settings(parsed.sources)
    if parsed.background:
        decoding = replace(decoding, background=color_of(parsed.background))
    if parsed.upright is not None:
        decoding = replace(decoding, upright=parsed.upright)
    if parsed.pixel_range is not None:
        decoding = replace(decoding, pixel_range=parse_pixel_range(parsed.pixel_range))
    found = inspect(
        sources,
        split=parsed.split,
        samples=parsed.samples,
        shards=parsed.shards,
        image_size=parsed.image_size,
        decoding=decoding,
        augmentation=augmentation,
        image=parsed.image.lower(),
        captions=split_names(parsed.captions),
        filters=parsed.filters,
        batch_size=parsed.batch_size,
        cache=shard_cache(sources, parsed.cache_gb),
        quiet=parsed.quiet,
    )
    print_table(found)
    if parsed.json is not None:
        write_page(parsed.json, json.dumps(found.to_dict(), ensure_ascii=False, indent=1) + "\n")
    if parsed.html is not None:
        write_page(parsed.html, page_of(found))
        print(f"\nwrote {printable(str(parsed.html))}")
    return 0


def _make(parsed: argparse.Namespace) -> int:
    from data.corpora.builtin import BUILTIN

    if parsed.name not in BUILTIN:
        raise DataError(f"unknown built-in dataset {parsed.name!r}: {nearest(parsed.name, BUILTIN)}")
    start = time.monotonic()
    if parsed.packages is None:
        BUILTIN[parsed.name].make(parsed.out, not parsed.quiet)
    elif parsed.name == "emoji":
        from data.corpora import emoji

        emoji.make(parsed.out, packages=parsed.packages, progress=not parsed.quiet)
    else:
        raise DataError(f"--packages is for emoji only, not for {parsed.name}")
    card: dict[str, Any] = json.loads((parsed.out / "card.json").read_text(encoding="utf-8"))
    print(f"created {parsed.out} in {time.monotonic() - start:.1f} s")
    for split, count in card["samples"].items():
        print(f"  {split:<{max(map(len, card['samples']))}}  {count:,} samples")
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
        group=not parsed.no_group,
        group_by=parsed.group_by,
        progress=not parsed.quiet,
    )
    print(f"created {parsed.out} in {time.monotonic() - start:.1f} s")
    print(f"  columns  {report.image_column} (image), {report.caption_column} (caption)")
    for line in _remarks(report, kept=parsed.keep_orientation, background=parsed.background):
        print(textwrap.fill(line, 79, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    if report.bad:
        print("  bad rows, by cause:")
        for cause, count in report.bad.items():
            print(f"  {count:>9,}  {cause}")
    held_out, bad = report.splits.get("test", 0), sum(report.bad.values())
    test = f" and {held_out:,} into test" if parsed.test else ""
    pairs = report.summary == counted(report.packed, "pair")
    if not pairs:
        print(report.summary)
    noun = "pair" if pairs else "image"
    print(f"packed {counted(report.splits.get('train', 0), noun)} into train{test}")
    if bad:
        mostly = "warning: " if bad >= report.rows else ""
        print(f"{mostly}{bad:,} bad of {counted(bad + report.rows, 'row')}: see {report.bad_rows}")
    return 0


def _remarks(report: "PackReport", *, kept: bool, background: str | None) -> Iterator[str]:
    """Yield remarks about other columns and about images, with the options that apply."""
    from data.captions import DRAW_CAPTIONS, listed

    if are_ids(report.classes):
        yield (
            f"warning: the captions are names of folders that look like ids, such as {report.classes[0]!r}: write "
            f"names of classes into {CLASS_NAMES} in the folder, one per line in the order of the folders"
        )
    if report.fields:
        names = [name if name == column else f"{column} as {name}" for column, name in report.fields.items()]
        yield f"stored as fields for data.filters and data.captions: {listed(names)}"
    if report.left_out:
        left_out = [f"{name!r} ({why})" for name, why in report.left_out.items()]
        yield f"columns left out: {', '.join(left_out[:8])}{', …' if len(left_out) > 8 else ''}"
    orientation = "unchanged, and CLIP ignores it" if kept else "upright (unless --keep-orientation is given)"
    colors = "CLIP sees the colors hidden below them; --background white blends them onto white"
    if background:
        colors = f"blended onto {background}"
    remarks = {
        "several captions": f"several captions: training uses the first, or draws one with {DRAW_CAPTIONS}; "
        "evaluation uses all",
        "not upright": f"an EXIF orientation: stored {orientation}",
        "deep": "more than 8 bits of gray: stored with all bits; training needs pixels.range, for which "
        "`python -m data inspect` suggests a value",
        "transparent": f"transparent parts: {colors}",
    }
    for mark, remark in remarks.items():
        if count := report.marks[mark]:
            have = "1 image has" if count == 1 else f"{count:,} images have"
            yield f"{have} {remark}"
    if count := report.marks["equal captions"]:
        yield f"{counted(count, 'caption')} left out: equal to another caption of the same image"
    if count := report.marks["other images"]:
        rows = counted(count, "row")
        yield f"{rows} with another image than the first row of the group: only the first row's image is stored"


COMMANDS = {
    "make": Command(
        summary="create a built-in dataset",
        description="Create a built-in dataset.\n\n" + MAKE_TEXT,
        arguments=_make_options,
        run=_make,
        stopped="nothing was written",
    ),
    "pack": Command(
        summary="pack your own images and captions from a table",
        description="Pack images and captions of a CSV, TSV, JSON or Parquet table into shards.",
        epilog=PACK_TEXT,
        arguments=_pack_options,
        run=_pack,
        stopped="nothing was written",
    ),
    "download": Command(
        summary="download images from a table of URLs into shards",
        description="Download images from a table of URLs.\n\n" + DOWNLOAD_TEXT,
        arguments=_download_options,
        run="data.download:command",
        extra="pack,remote",
        stopped="complete shards are kept; run the same command to resume",
    ),
    "index": Command(
        summary="index shards in advance, so that training starts immediately",
        description="Index the samples of shards and their byte positions.\n\n" + INDEX_TEXT,
        arguments=_index_options,
        run=_index,
        stopped="nothing was written",
    ),
    "tokenizer": Command(
        summary="train a tokenizer on captions, for model.tokenizer",
        description=TOKENIZER_TEXT,
        arguments=_tokenizer_options,
        run="data.tokenizer:command",
        stopped="nothing was written",
    ),
    "palette": Command(
        summary="choose the colors of Image GPT from images",
        description=PALETTE_TEXT,
        arguments=_palette_options,
        run="data.palette:command",
        extra="eval",
        stopped="nothing was written",
    ),
    "inspect": Command(
        summary="report missing, broken, duplicate and slow data",
        description="Inspect shards before training on them.\n\n" + INSPECT_TEXT,
        usage="python -m data inspect [OPTIONS] SOURCE [SOURCE ...] [data.SETTING=VALUE ...]",
        arguments=_inspect_options,
        run=_inspect,
        stopped="nothing was written",
    ),
    "score": Command(
        summary="score samples with a model, to filter them in training",
        description="Compute CLIP scores and find duplicates and evaluation images.\n\n" + SCORE_TEXT,
        usage="python -m data score [OPTIONS] --model M SOURCE [SOURCE ...]",
        arguments=_score_options,
        run="data.scores.command:score",
        extra="score",
        stopped="scored shards are kept; run the same command to resume",
    ),
    "speed": Command(
        summary="measure the speed of the loader",
        description="Measure the speed of the loader.\n\n" + SPEED_TEXT,
        usage="python -m data speed [OPTIONS] SOURCE [SOURCE ...] [data.SETTING=VALUE ...]",
        arguments=_speed_options,
        run="data.inspect.speed:speed",
        stopped="nothing was written",
    ),
}


if __name__ == "__main__":
    for stop in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C, so that partial output is removed
        signal.signal(stop, signal.default_int_handler)
    run_command(main)
