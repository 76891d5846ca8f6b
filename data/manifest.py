"""What a training reads: its shards, how many samples each gives, and how to tell whether they are still the same.

It is made once for a list of shards: each is indexed (or its index found in the cache folder), and what counts is
counted. Where img2dataset has left a ``NNNNN_stats.json`` beside a shard that was never indexed, its count is
taken, so that a training can begin before all is fetched.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError
from data.array_file import Strings, pack_arrays, read_arrays, unpack_arrays, write_arrays
from data.cache import cache_folder
from data.census import Census, take_census
from data.selection import Selection
from data.shard_file import ShardFile

if TYPE_CHECKING:
    from data.remote.shard_cache import ShardCache

__all__ = ["Manifest", "make_manifest"]

_VERSION = 2
_FIRST = 8  # shards among which a pair must be found
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
        """How many shards may hold other captions or images of the same sizes than in an earlier manifest of them.

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
