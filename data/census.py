"""Counting what shards give, several at a time."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipkit.errors import DataError
from data.child_process import end_with_parent
from data.index import stored_index
from data.open_shard import OpenShard
from data.selection import Selection
from data.shard_file import ShardFile
from data.unknown_fields import refuse_unknown_caption, refuse_unknown_fields

if TYPE_CHECKING:
    from data.remote.shard_cache import ShardCache

__all__ = ["Census", "stated_count", "take_census"]

_MAX_STATS_BYTES = 1 << 20
_MOST_STATED = 1 << 31  # samples; an index holds no larger shard
_FIRST = 8  # shards among which a sample must count
_ALONE = 4  # so few shards are counted in this process
_MOST_PROCESSES = 32
_UNDER_WAY = 4  # shards given to each process ahead of its work


@dataclass(frozen=True, kw_only=True)
class Census:
    """What one shard gives.

    Attributes:
        count: samples that count.
        digest: of its index, empty if it was not indexed.
        content: digest of its content, see ``ShardIndex``; empty if that was not read.
        dropped: samples that do not count, by reason.
        extensions: members by extension.
        truncated: whether these are the samples of the intact part of a truncated shard.
    """

    count: int
    digest: str
    content: str
    dropped: dict[str, int]
    extensions: dict[str, int]
    truncated: bool = False


def take_census(
    shards: Sequence[ShardFile],
    selection: Selection,
    *,
    cache: "ShardCache | None" = None,
    stats: bool = True,
) -> Iterator[tuple[int, Census]]:
    """Number and census of each shard, as they become known; the first one comes first.

    Raises:
        DataError: a shard is broken or cannot be fetched, a process was killed, or no sample of the first shards
            has a field that captions or filters name.
    """
    done: list[int] = []
    samples = 0
    for number, census in _counted(shards, selection, cache, partial(_count, stats=stats)):
        done.append(number)
        samples += census.count
        if not samples and len(done) == min(_FIRST, len(shards)):
            refuse_unknown_fields([shards[one] for one in done], selection, cache)
        yield number, census


def _counted(
    shards: Sequence[ShardFile],
    selection: Selection,
    cache: "ShardCache | None",
    count: Callable[..., Census],
) -> Iterator[tuple[int, Census]]:
    """The first one is always looked into, so that what is wrong with all is seen at once."""
    first = OpenShard(shards[0], selection, cache)
    refuse_unknown_caption(first, shards, selection, cache)
    yield 0, _census_of(first)
    del first  # it would stay open
    one = partial(count, selection=selection, cache=cache)
    rest = range(1, len(shards))
    if len(shards) <= _ALONE:
        yield from ((number, one(shards[number])) for number in rest)
    else:
        yield from _in_processes(one, shards, rest)


def _in_processes(
    count: Callable[[ShardFile], Census], shards: Sequence[ShardFile], numbers: Sequence[int]
) -> Iterator[tuple[int, Census]]:
    processes = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    context = get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_leave_with_the_parent) as pool:
        running: dict[Future[Census], int] = {}
        ahead = iter(numbers)
        try:
            while True:
                while len(running) < processes * _UNDER_WAY and (number := next(ahead, None)) is not None:
                    running[pool.submit(count, shards[number])] = number
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        except BrokenProcessPool as error:
            raise DataError("a process that counts shards was killed, often for want of memory") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _leave_with_the_parent() -> None:
    """End this process at Ctrl-C without a traceback, and however its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()


def _count(shard: ShardFile, *, selection: Selection, cache: "ShardCache | None", stats: bool) -> Census:
    plain = not selection.reads_json and set(selection.need) <= {"image", "caption"}
    if selection.truncated == "use" and not shard.is_remote:
        stats = False  # what a truncated shard lacks would count
    if stats and plain and stored_index(shard) is None and (stated := stated_count(shard)) is not None:
        return Census(count=stated, digest="", content="", dropped={}, extensions={})
    return _census_of(OpenShard(shard, selection, cache))


def _census_of(opened: OpenShard) -> Census:
    return Census(
        count=len(opened),
        digest=opened.index.digest,
        content=opened.index.content,
        dropped=opened.chosen.dropped,
        extensions=opened.index.extensions,
        truncated=bool(opened.index.truncated),
    )


def stated_count(shard: ShardFile) -> int | None:
    """How many samples img2dataset's ``NNNNN_stats.json`` beside a shard says that it holds; None if nothing does.

    Raises:
        DataError: the store does not answer.
    """
    stem, dot, _ = shard.url.rpartition(".tar")
    if not dot or shard.url.startswith("pipe:"):
        return None
    text = _small_file(f"{stem}_stats.json", remote=shard.is_remote)
    try:
        stated: Any = json.loads(text)["successes"] if text else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return stated if type(stated) is int and 0 <= stated <= _MOST_STATED else None


def _small_file(url: str, *, remote: bool) -> str | None:
    if remote:
        from data.remote import store

        return store.read_text(url, limit=_MAX_STATS_BYTES)
    path = Path(url)
    if not path.is_file():  # opening a pipe would wait for ever
        return None
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_STATS_BYTES)
    except OSError:
        return None
