"""``python -m data index``: index shards now, so that a training can begin at once."""

import argparse
import tempfile
import textwrap
import time

from clipkit.arguments import Parser, number
from clipkit.count_progress import CountProgress
from clipkit.errors import DataError
from clipkit.tar import TruncatedError
from data.cache import cache_folder, shard_cache
from data.manifest import Manifest, make_manifest
from data.selection import Selection
from data.sources import find_shards

__all__ = ["add_index"]

TEXT = """\
SOURCE is what data.train takes: a folder, a tar, a brace pattern, a built-in
corpus, or one of these at s3://, gs://, https:// or hf://. The index goes to
the cache folder ($CLIPKIT_CACHE), never beside the data. Training indexes what
is not indexed yet; this does it before, by all cores.
"""


def add_index(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "index",
        help="index shards, so that a training can begin at once",
        description="Index shards: which samples they hold, and where their bytes lie.\n\n" + TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    parser.set_defaults(command=_index)


def _index(parsed: argparse.Namespace) -> int:
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


def _print(manifest: Manifest, seconds: float) -> None:
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
