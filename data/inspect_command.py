"""``python -m data inspect``: what shards hold, before a training reads them."""

import argparse
import json
import os
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from clipkit.arguments import Parser, number, whole
from clipkit.config import Config
from clipkit.errors import ConfigError, DataError
from clipkit.image_traits import Decoding, add_decoding_options, color_of

if TYPE_CHECKING:
    from data.inspect.findings import Findings

__all__ = ["add_inspect"]

TEXT = """\
SOURCE is what data.train takes: a folder, a tar, a brace pattern, a built-in
corpus, or one of these at s3://, gs://, https:// or hf://. Where training
would refuse a shard, this says so and goes on. Of many shards it looks into
some, spread evenly, and says so.

  python -m data inspect pairs --html pairs.html
  python -m data inspect 'shards/{00000..00331}.tar' --samples 10000
  python -m data inspect pairs --filters 'width >= 256' --filters 'lang = en'
"""


def add_inspect(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "inspect",
        help="look into shards: what is missing, broken, bad, double, slow",
        description="Look into shards before training on them.\n\n" + TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    parser.set_defaults(command=_inspect)


def _inspect(parsed: argparse.Namespace) -> int:
    for out in (parsed.html, parsed.json):
        if out is not None and (not out.parent.is_dir() or out.is_dir()):
            raise DataError(f"cannot write {out}: name a file in a folder that exists")
    from data.cache import shard_cache
    from data.inspect import inspect
    from data.inspect.page import page_of
    from data.inspect.table import print_table
    from data.inspect.wording import plain

    with _Bars(shown=not parsed.quiet) as bars:
        found = inspect(
            parsed.sources,
            split=parsed.split,
            samples=parsed.samples,
            shards=parsed.shards,
            image_size=parsed.image_size,
            decoding=Decoding(
                background=color_of(parsed.background) if parsed.background else None,
                upright=bool(parsed.upright),
            ),
            rate=parsed.rate,
            captions=[one.strip() for one in parsed.captions.split(",") if one.strip()] or ["txt"],
            filters=_filters(parsed.filters),
            batch_size=parsed.batch_size,
            cache=shard_cache(parsed.sources, parsed.cache_gb),
            progress=bars.show,
        )
    print_table(found)
    if parsed.html is not None:
        _write(parsed.html, page_of(found))
        print(f"\nwrote {plain(str(parsed.html))}")
    elif found.bad_shown or found.same or found.alike:
        print("\nto look at bad and double pictures: --html PAGE.html")
    if parsed.json is not None:
        _write(parsed.json, _json(found))
    return 0


def _write(out: Path, text: str) -> None:
    """A file that appears whole or not at all; half of a surrogate pair becomes a question mark."""
    aside = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        aside.write_bytes(text.encode("utf-8", "replace"))
        aside.replace(out)
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror}") from error
    finally:
        aside.unlink(missing_ok=True)


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
        from clipkit.count_progress import CountProgress

        if what != self._what:
            self._stack.close()
            self._what = what
            self._bar = self._stack.enter_context(CountProgress(what, total=total, shown=self._shown))
        self._bar.show(done, failed)


def _json(found: "Findings") -> str:
    return json.dumps(found.to_dict(), ensure_ascii=False, indent=1) + "\n"
