"""What a training reads: its shards, how many samples each gives, and how to tell whether they are still the
same.

It is made once for a list of shards: each is indexed (or its index found in the cache folder), and what counts is
counted. Where img2dataset has left a ``NNNNN_stats.json`` beside a shard that was never indexed, its count is
taken, so that a training can begin before all is fetched.
"""

import hashlib
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError
from data.captions import TEXT, CaptionRule, Selection, field_hint, leaf_fields, listed, value_at
from data.corpora.builtin import end_with_parent
from data.remote.cache import cache_folder
from data.remote.store import ShardFile
from data.shards.index import (
    CAPTION,
    META,
    Strings,
    pack_arrays,
    read_arrays,
    stored_index,
    unpack_arrays,
    write_arrays,
)
from data.shards.shard import OpenShard, meta_of, text_of

if TYPE_CHECKING:
    from data.remote.cache import ShardCache

__all__ = [
    "Census",
    "Manifest",
    "make_manifest",
    "no_caption",
    "note_texts",
    "refuse_unknown_caption",
    "refuse_unknown_fields",
    "stated_count",
    "take_census",
]


# --------------------------------------------------------------------------------------------------------------
# Refuses names of json fields that no sample has, before a training finds nothing but bad samples.
#
# A field that is rare is none of these: one sample that has it is enough. So as a rule a single sample is read;
# only where the first have nothing, more are, of several shards.

_SHARDS = 8
_FETCHED = 2  # besides the first, where each may take minutes to fetch
_SAMPLES, _REQUESTED = 1000, 32  # of each shard; where each is a request over the network


def refuse_unknown_caption(
    first: OpenShard, shards: Sequence[ShardFile], selection: Selection, cache: "ShardCache | None"
) -> None:
    """Do nothing if any sample has a caption where the selection says that captions are.

    Args:
        first: of the shards, opened.
        shards: all.
        selection: which samples count.
        cache: where remote shards are kept.

    Raises:
        DataError: none of those looked at, spread over all shards, has one.
    """
    if (
        "caption" in selection.need and selection.captions.choice != "all"
    ):  # samples without one count, as bad
        most = _FETCHED if any(one.is_remote for one in shards) else _SHARDS - 1
        others = _opened(shards[1:], selection, cache, most=most)
        _refuse_caption(chain([first], others), selection.captions, cache)


def refuse_unknown_fields(
    shards: Sequence[ShardFile], selection: Selection, cache: "ShardCache | None"
) -> None:
    """Of shards that give no sample: say so if that is as filters or captions name a field that none has.

    Raises:
        DataError: that is so.
    """
    by_json = "caption" in selection.need and TEXT not in selection.captions.fields
    if not (selection.reads_json or by_json):
        return
    plain = Selection(need=selection.need)
    looked = 0
    known: Counter[str] = Counter()
    missing = {one.name for one in selection.filters}
    for opened in _opened(shards, plain, cache):
        for _, meta in _contents(opened, cache):
            looked += 1
            known.update(name for name, _ in leaf_fields(meta))
            missing = {name for name in missing if value_at(meta, name) is None}
    if looked and missing:
        name = min(missing)
        raise DataError(
            f"data.filters names the json field {name!r}, which no sample of {looked:,} looked at has: "
            f"{field_hint(name, known)}"
        )
    if "caption" in selection.need:
        _refuse_caption(_opened(shards, plain, cache), selection.captions, cache)


def _refuse_caption(opened: Iterable[OpenShard], rule: CaptionRule, cache: "ShardCache | None") -> None:
    known: dict[str, bool] = {}
    looked = files = 0
    for one in opened:
        for text, meta in _contents(one, cache):
            if _may_have_caption(rule, text, meta):
                return
            looked, files = looked + 1, files + (text is not None)
            note_texts(known, meta)
    if looked:
        raise DataError(no_caption(rule, looked, files, known))


def _opened(
    shards: Sequence[ShardFile], selection: Selection, cache: "ShardCache | None", *, most: int = _SHARDS
) -> Iterator[OpenShard]:
    """A few of them, spread over all, as other sources may have other fields."""
    most = min(most, len(shards))
    for number in range(most):
        yield OpenShard(shards[number * len(shards) // most], selection, cache)


def _contents(opened: OpenShard, cache: "ShardCache | None") -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Caption file and json of a shard's first samples that count and can be read."""
    most = _REQUESTED if opened.file.is_remote and cache is None else _SAMPLES
    for row in opened.chosen.rows[:most].tolist():
        try:
            text, meta = opened.read(row, (CAPTION, META))
            content = text_of(text), meta_of(meta)
        except DataError:  # a bad sample, which is told of in training
            continue
        yield content


def _may_have_caption(rule: CaptionRule, text: str | None, meta: dict[str, Any]) -> bool:
    """Whether there is one; an empty caption file is a bad sample, but no wrong name."""
    return (TEXT in rule.fields and text is not None) or any(rule.by_field(text, meta))


def note_texts(known: dict[str, bool], meta: dict[str, Any]) -> None:
    """Add a json's fields to those known, with whether any sample has a text there."""
    for name, value in leaf_fields(meta):
        several = value if isinstance(value, list) else [value]
        known[name] = known.get(name, False) or any(isinstance(one, str) for one in several)


def no_caption(rule: CaptionRule, looked: int, files: int, known: dict[str, bool]) -> str:
    """The line that says which field there is not, and where captions may be.

    Args:
        rule: where they were looked for.
        looked: samples without one there.
        files: how many of these have a caption file.
        known: the fields of their json, by ``note_texts``.
    """
    names = [name for name in rule.fields if name != TEXT] or ["caption"]
    none = f"no sample of {looked:,} looked at has"
    texts = [name for name, has_text in known.items() if has_text]
    if present := [name for name in names if name in known]:
        others = listed(name for name in texts if name not in present)
        where = f"; texts are in: {others}" if others else ""
        return (
            f"{none} a text in the json field {present[0]!r}, where data.captions looks for captions{where}"
        )
    if TEXT in rule.fields:
        told = f"{none} a caption file (.txt) or the json field {names[0]!r}"
    else:
        told = f"data.captions names the json field {names[0]!r}, which {none}"
    instead = f"; {files:,} of them with a caption file: data.captions=txt takes it" if files else ""
    return f"{told}: {field_hint(names[0], texts or known)}{instead}"


# --------------------------------------------------------------------------------------------------------------
# Counting what shards give, several at a time.

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
    """How many samples img2dataset's ``NNNNN_stats.json`` beside a shard says that it holds; None if nothing
    does.

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


# --------------------------------------------------------------------------------------------------------------

_VERSION = 2
_SHOWN = 3  # differences that are told one by one

_STRINGS = ("urls", "versions", "digests", "contents")

Progress = Callable[[int], None]
_Line = tuple[str, int, int, str, str]  # name, bytes, samples, digest of the index, digest of the content


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """Shards and their samples.

    Attributes:
        urls: of the S shards.
        versions: of each, as ``ShardFile`` has it.
        sizes: (S,) int64 bytes, -1 where unknown.
        counts: (S,) int64 samples that count.
        digests: (S,) of each shard's index; empty where the count is only what ``_stats.json`` states.
        contents: (S,) digest of each shard's content, see ``ShardIndex``; empty where it was not read.
        sources: how many of the shards belong to each source, in order.
        selection: what counts, by ``Selection.identity``.
        dropped: how many samples do not count, by reason.
        truncated: numbers of truncated shards, each with how many samples its intact part gives.
    """

    urls: Strings
    versions: Strings
    sizes: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    digests: Strings
    contents: Strings
    sources: tuple[int, ...]
    selection: str
    dropped: dict[str, int]
    truncated: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.counts)

    def shard(self, number: int) -> ShardFile:
        """One of the shards."""
        return ShardFile(url=self.urls[number], size=int(self.sizes[number]), version=self.versions[number])

    def left_out(self, selection: Selection) -> str:
        """How many samples do not count and why, as a line tells it; empty if nothing is left out.

        Args:
            selection: by which it was made.
        """
        unusable = {f"without {what}" for what in selection.need} | {"unreadable"}
        by_filters = [f"{count} {why}" for why, count in self.dropped.items() if why not in unusable]
        others = [f"{count} {why}" for why, count in self.dropped.items() if why in unusable]
        told = [f"left out by data.filters: {', '.join(by_filters) or 'none'}"] if selection.filters else []
        return ", ".join([*told, f"left out: {', '.join(others)}"] if others else told)

    def truncated_shards(self) -> list[tuple[str, int]]:
        """Name of each truncated shard, and how many samples its intact part gives."""
        return [(self.shard(number).shown, kept) for number, kept in self.truncated]

    @property
    def stated(self) -> int:
        """How many shards were not indexed: their counts are what ``_stats.json`` states."""
        return int((np.diff(self.digests.ends, prepend=0) == 0).sum())

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change when the samples or their order do.

        Names, sizes, counts and indexes of the shards count; the folder that holds them does not, so data may be
        moved. Their content counts in ``changes_since`` only: not every shard is read.
        """
        digest = hashlib.sha256(json.dumps([self.selection, len(self)]).encode())
        digest.update(os.fsencode("\0".join(map(_name, self.urls))))
        for array in (self.sizes, self.counts, self.digests.ends, self.digests.content):
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]

    def _lines(self) -> Iterator[_Line]:
        columns = self.urls, self.sizes.tolist(), self.counts.tolist(), self.digests, self.contents
        for url, *rest in zip(*columns, strict=True):
            yield _name(url), *rest

    def to_bytes(self) -> bytes:
        """As ``from_bytes`` reads it."""
        return pack_arrays(*self._stored())

    def save(self, path: Path) -> None:
        """Write ``to_bytes`` to a file; OSError where that is not possible."""
        write_arrays(path, *self._stored())

    def _stored(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        about = {
            "sources": self.sources,
            "selection": self.selection,
            "dropped": self.dropped,
            "truncated": self.truncated,
        }
        arrays: dict[str, npt.NDArray[Any]] = {"sizes": self.sizes, "counts": self.counts}
        for name in _STRINGS:
            strings: Strings = getattr(self, name)
            arrays |= {f"{name}.content": strings.content, f"{name}.ends": strings.ends}
        return about, arrays

    @classmethod
    def from_bytes(cls, content: bytes) -> "Manifest | None":
        """What ``to_bytes`` gave; None if these are no such bytes."""
        return cls._of(unpack_arrays(content))

    @classmethod
    def load(cls, path: Path) -> "Manifest | None":
        """What ``save`` wrote; None if there is no such file, or no whole one."""
        return cls._of(read_arrays(path))

    @classmethod
    def _of(cls, stored: tuple[dict[str, Any], dict[str, npt.NDArray[Any]]] | None) -> "Manifest | None":
        if stored is None:
            return None
        about, arrays = stored
        try:
            if "contents.ends" not in arrays:  # of a run that an earlier version began
                nothing = Strings.of([""] * len(arrays["counts"]))
                arrays = arrays | {"contents.content": nothing.content, "contents.ends": nothing.ends}
            strings = {
                name: Strings(content=arrays[f"{name}.content"], ends=arrays[f"{name}.ends"])
                for name in _STRINGS
            }
            return cls(
                **strings,
                sizes=arrays["sizes"],
                counts=arrays["counts"],
                sources=tuple(about["sources"]),
                selection=about["selection"],
                dropped=about["dropped"],
                truncated=tuple((number, kept) for number, kept in about.get("truncated", ())),
            )
        except (KeyError, TypeError):
            return None

    def changes_since(self, earlier: "Manifest") -> list[str]:
        """What is known to have changed in the samples or their order, most important first."""
        changes = []
        if self.selection != earlier.selection:
            changes.append("captions or filters are chosen by other rules")
        before, now = list(earlier._lines()), list(self._lines())
        if len(before) != len(now):
            changes.append(f"{len(now)} shards, there were {len(before)}")
        names_before, names_now = Counter(line[0] for line in before), Counter(line[0] for line in now)
        changes += _listed("is gone", list((names_before - names_now).elements()))
        changes += _listed("is new", list((names_now - names_before).elements()))
        if len(changes) > 0 or len(before) != len(now):
            return changes
        if [line[0] for line in before] != [line[0] for line in now]:
            return ["the shards are in another order"]
        if self.sources != earlier.sources:
            return ["the shards are divided into sources in another way"]
        others = [_difference(old, new) for old, new in zip(before, now, strict=True)]
        return _listed("", [one for one in others if one])

    def with_counts_of(self, earlier: "Manifest") -> "Manifest":
        """This, with the counts of an earlier one: they say how a run that has begun numbers its samples."""
        contents = [then or now for then, now in zip(earlier.contents, self.contents, strict=True)]
        return replace(self, counts=earlier.counts, digests=earlier.digests, contents=Strings.of(contents))

    def not_compared(self, earlier: "Manifest") -> int:
        """How many shards may hold other captions or images of the same sizes than in an earlier manifest of
        them.

        Their versions differ or are not known, and neither is a digest of their content then or now.
        """
        versions = zip(earlier.versions, self.versions, strict=True)
        contents = zip(earlier.contents, self.contents, strict=True)
        return sum(
            not now or (then != now and not all(both))
            for (then, now), both in zip(versions, contents, strict=True)
        )


def _name(url: str) -> str:
    if url.startswith("pipe:"):
        return url
    path = url.partition("?")[0] if "://" in url else url  # a signature may hold slashes
    return path.rpartition("/")[2]


def _difference(old: _Line, new: _Line) -> str:
    name, size, count, digest, content = old
    if size != new[1]:
        return f"{name} has {new[1]} bytes, it had {size}"
    if not (digest and new[3]):  # one was counted by its _stats.json
        return ""
    if count != new[2]:
        return f"{name} gives {new[2]} samples, it gave {count}"
    if digest != new[3]:
        return f"{name} holds other samples"
    same = not (content and new[4]) or content == new[4]
    return "" if same else f"{name} holds other captions or images of the same names and sizes"


def _listed(what: str, names: Sequence[str]) -> list[str]:
    shown = [f"{name} {what}".strip() for name in names[:_SHOWN]]
    return [*shown, f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else shown


def make_manifest(
    sources: Sequence[Sequence[ShardFile]],
    selection: Selection,
    *,
    cache: "ShardCache | None" = None,
    progress: Progress | None = None,
    stats: bool = True,
) -> Manifest:
    """Count what the shards give, by the cache folder where they were counted before.

    Args:
        sources: the shards of each.
        selection: what counts.
        cache: where remote shards are kept; None reads their headers over the network.
        progress: called with how many shards are done.
        stats: take counts from ``_stats.json`` where a shard was never indexed and nothing but a picture and a
            caption file is asked for.

    Raises:
        DataError: a shard is broken, or the first ones hold nothing of what is needed.
    """
    shards = [shard for source in sources for shard in source]
    if not shards:
        raise DataError("no shards were given")
    if cache is None:
        _check_ranges(shards)
    place = _place(shards, [len(source) for source in sources], selection)
    kept = Manifest.load(place)
    if kept is not None and (stats or not kept.stated):
        return kept
    found: list[Census | None] = [None] * len(shards)
    samples = done = 0
    for number, census in take_census(shards, selection, cache=cache, stats=stats):
        found[number] = census
        samples, done = samples + census.count, done + 1
        if not samples and done >= min(_FIRST, len(shards)):
            raise DataError(_nothing_usable([one for one in found if one is not None], shards[0], selection))
        if progress is not None:
            progress(done)
    every = [one for one in found if one is not None]
    manifest = _assembled(shards, every, tuple(map(len, sources)), selection)
    with suppress(OSError):  # it will be made again
        manifest.save(place)
    return manifest


def _check_ranges(shards: Sequence[ShardFile]) -> None:
    """That the servers give parts of files, which reading without a cache needs even where all is counted."""
    places = {
        urlsplit(shard.url)[:2]: shard for shard in reversed(shards) if shard.is_remote and shard.size > 0
    }
    if places:
        from data.remote import store
    for shard in places.values():
        store.read_range(shard, 0, 1)


def _assembled(
    shards: Sequence[ShardFile], found: Sequence[Census], sources: tuple[int, ...], selection: Selection
) -> Manifest:
    dropped: Counter[str] = Counter()
    for census in found:
        dropped.update(census.dropped)
    return Manifest(
        urls=Strings.of([shard.url for shard in shards]),
        versions=Strings.of([shard.version for shard in shards]),
        sizes=np.array([shard.size for shard in shards], dtype=np.int64),
        counts=np.array([census.count for census in found], dtype=np.int64),
        digests=Strings.of([census.digest for census in found]),
        contents=Strings.of([census.content for census in found]),
        sources=sources,
        selection=selection.identity,
        dropped=dict(dropped.most_common()),
        truncated=tuple((number, one.count) for number, one in enumerate(found) if one.truncated),
    )


def _nothing_usable(found: Sequence[Census], first: ShardFile, selection: Selection) -> str:
    extensions: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for census in found:
        extensions.update(census.extensions)
        dropped.update(census.dropped)
    seen = ", ".join(f"{name} ({count})" for name, count in extensions.most_common(8)) or "none"
    where = f"shard {first.shown} holds" if len(found) == 1 else f"the first {len(found)} shards hold"
    lacking = {f"without {what}" for what in selection.need}
    if selection.filters and any(reason not in lacking for reason in dropped):
        because = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common(4))
        return f"{where} no sample that passes data.filters: {because}"
    return f"{where} no sample with {' and '.join(selection.need)}; extensions seen: {seen}"


def _place(shards: Sequence[ShardFile], sources: Sequence[int], selection: Selection) -> Path:
    rules = [selection.identity] if selection.truncated == "error" else [selection.identity, "use"]
    digest = hashlib.sha256(json.dumps([_VERSION, list(sources), *rules]).encode())
    for shard in shards:
        digest.update(repr((shard.url, shard.size, shard.version)).encode())
    return cache_folder() / "manifest" / f"{digest.hexdigest()[:32]}.manifest"
