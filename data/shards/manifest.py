"""The manifest of a training run: its shards, their numbers of samples, and the detection of changes.

It is created once for a list of shards: each is indexed (or its index is read from the cache folder) and its used
samples are counted. If img2dataset left a ``NNNNN_stats.json`` next to a shard that was never indexed, its
count is used, so that training can start before everything is downloaded.
"""

import hashlib
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError
from clipkit.files import end_with_parent, printable
from clipkit.samples import (
    IMAGE_EXTENSIONS,
    INDEX_VERSION,
    Shard,
    ShardIndex,
    Strings,
    decode_text,
    find_image,
    image_format,
    is_indexable,
    is_indexed,
    is_json,
    pack_arrays,
    read_arrays,
    stored_index,
    unpack_arrays,
    value_at,
    write_arrays,
)
from clipkit.samples.remote import ShardCache, ShardFile, index_folder, read_range, read_text
from data.captions import (
    TEXT,
    CaptionRule,
    Fields,
    field_hint,
    find_value,
    is_utf8,
    join_names,
    leaf_fields,
    parse_number,
    texts_at,
)
from data.selection import OUTSIDE, Chosen, SelectedShard, Selection, choose_unread

# --------------------------------------------------------------------------------------------------------------
# Reject names of json fields that no sample has, before training finds only bad samples. One sample with the
# field is enough, so usually a single sample is read; only if it lacks the field are more samples of several
# shards read.

_LOOKED_SHARDS = 8
_LOOKED_REMOTE = 2  # besides the first, since each may take minutes to download
# members in a message, characters of their names
_SHOWN_MEMBERS = 8
_MAX_NAME = 40
_MANY_NAMES = 50  # of members
_SUGGESTED = 4  # samples of which all members are read to find image and text
# per shard; the latter if each is a request over the network
_LOOKED_SAMPLES = 1000
_LOOKED_REQUESTS = 32


@dataclass(kw_only=True)
class _Examined:
    """The content of the first used samples of a few shards.

    Attributes:
        samples: number of samples that can be read.
        members: numbers of their members by name.
        fields: the fields of their json, each with whether any sample has text there.
        settings: from ``suggest_members``.
    """

    samples: int = 0
    members: Counter[str] = field(default_factory=Counter)
    fields: dict[str, bool] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        return [name for name, has_text in self.fields.items() if has_text]


def _examine(
    opened: Iterable[SelectedShard],
    rule: CaptionRule,
    cache: ShardCache | None,
    is_enough: Callable[[Sequence[str], Fields], bool],
) -> _Examined | None:
    """Read the first samples of shards; None as soon as ``is_enough`` for the members and fields of one of them.

    Unreadable samples are skipped; also None if there is no other.
    """
    examined = _Examined()
    for shard in opened:
        most = _LOOKED_REQUESTS if shard.file.is_remote and cache is None else _LOOKED_SAMPLES
        for row in shard.chosen.rows[:most].tolist():
            members = shard.index.members(row)
            try:
                fields = rule.parse(shard.read_present(row, rule.members_and_json(members)))
            except DataError:
                continue
            if is_enough(members, fields):
                return None
            examined.samples += 1
            examined.members.update(members)
            for name, value in leaf_fields(fields):
                if name in members:
                    continue
                values = value if isinstance(value, list) else [value]
                has_text = any(isinstance(text, str) for text in values)
                examined.fields[name] = examined.fields.get(name, False) or has_text
        examined.settings = examined.settings or suggest_members(shard, rule)
    return examined if examined.samples else None


def _reject_unknown_fields(
    shards: Sequence[ShardFile], selection: Selection, cache: ShardCache | None
) -> None:
    plain = Selection(need=selection.need, image=selection.image)
    missing = {condition.name for condition in selection.json_filters} | set(
        filter(None, [selection.balance])
    )

    def has_rest(_: Sequence[str], fields: Fields) -> bool:
        missing.difference_update([name for name in missing if find_value(fields, name) is not None])
        return not missing

    examined = None
    if missing:
        examined = _examine(_open_some(shards, plain, cache), selection.content, cache, has_rest)
    if examined is not None:
        name = min(missing)
        setting = "data.balance" if name == selection.balance else "data.filters"
        raise DataError(
            f"{setting} names the json field {name!r}, which none of {examined.samples:,} samples examined "
            f"has: {field_hint(name, examined.fields)}"
        )
    if "caption" in selection.need and (selection.reads_json or TEXT not in selection.captions.fields):
        reject_unknown_captions(_open_some(shards, plain, cache), selection.captions, cache)


def reject_unknown_captions(
    opened: Iterable[SelectedShard], rule: CaptionRule, cache: ShardCache | None
) -> None:
    """Raise DataError if none of the first samples has a caption in the fields of the rule."""

    def has_caption(members: Sequence[str], fields: Fields) -> bool:
        # an empty caption file is a bad sample, but not a wrong name
        return any(name.lower() in members for name in rule.fields) or any(rule.captions_by_field(fields))

    examined = _examine(opened, rule, cache, has_caption)
    if examined is not None:
        settings = examined.settings
        if TEXT in examined.members and not examined.texts:
            settings = {**settings, "captions": TEXT}
        raise DataError(
            f"none of {examined.samples:,} samples examined has a caption in {join_names(rule.fields)} "
            f"(data.captions or --captions); members: {list_members(examined.members)}; json fields with text: "
            f"{join_names(examined.texts) or 'none'}{_write_settings(settings)}"
        )


def reject_unknown_pair_fields(
    shards: Sequence[ShardFile], selection: Selection, cache: ShardCache | None
) -> None:
    """Raise DataError if none of the first samples has a value in one of the further fields of a pair.

    Unlike other fields, these do not decide which samples are used, so they are not part of the census.
    """
    rule, pair = selection.captions, selection.fields

    def check(setting: str, name: str, expected: str, has_value: Callable[[Fields], object]) -> None:
        most = _LOOKED_REMOTE + 1 if any(shard.is_remote for shard in shards) else _LOOKED_SHARDS
        opened = _open_some(shards, selection, cache, most=most)
        examined = _examine(opened, rule, cache, lambda _, fields: bool(has_value(fields)))
        if examined is not None:
            names = examined.fields
            if expected == "text":
                names = dict.fromkeys(examined.texts, True) or names
            raise DataError(
                f"{setting} names the json field {name!r}, which has {expected} in none of "
                f"{examined.samples:,} samples examined: {field_hint(name, names)}"
            )

    if rule.negatives:
        check("data.negatives", rule.negatives, "text", rule.wrong_captions)
    if pair.same:
        check("loss.same_field", pair.same, "a value", pair.group)

    for side in ("image", "text"):
        for name in getattr(pair, side):
            check(f"data.{side}_fields", name, "text", partial(texts_at, name=name))

    def has_weight(fields: Fields) -> bool:
        if value_at(fields, pair.weight) in (None, ""):
            return False
        try:
            return pair.weigh(fields, rule, 0) > 0
        except DataError as error:
            raise DataError(f"data.weight = {pair.weight!r}: {error}") from error

    if pair.weight:
        check("data.weight", pair.weight, "a number above 0", has_weight)


def check_drawn_captions(
    sources: Sequence[Sequence[ShardFile]], selection: Selection, cache: ShardCache | None
) -> list[str]:
    """Return notes on the data.captions that half of the first samples lack, if one of them is drawn.

    Raises:
        DataError: none of the samples has a caption in one of them.
    """
    rule = selection.captions
    if rule.choice not in ("random", "weighted") or len(rule.fields) == 1:
        return []
    lacking = Counter(dict.fromkeys(rule.fields, 0))

    def count(_: Sequence[str], fields: Fields) -> bool:
        captions = rule.captions_by_field(fields)
        lacking.update(name for name, texts in zip(rule.fields, captions, strict=True) if not texts)
        return False

    is_remote = any(shard.is_remote for source in sources for shard in source)
    most = max(1, (_LOOKED_REMOTE + 1 if is_remote else _LOOKED_SHARDS) // len(sources))
    opened = chain.from_iterable(_open_some(source, selection, cache, most=most) for source in sources)
    examined = _examine(opened, rule, cache, count)
    notes: list[str] = []
    if examined is None:
        return notes
    for name, samples in lacking.items():
        if samples == examined.samples:
            raise DataError(
                f"data.captions names {name!r}, in which none of {samples:,} samples examined has a caption: "
                f"remove it, or correct its name; members: {list_members(examined.members)}; json fields with "
                f"text: {join_names(examined.texts) or 'none'}"
            )
        if 2 * samples >= examined.samples:
            notes.append(
                f"note: {samples:,} of {examined.samples:,} samples examined have no caption in {name}: "
                "another of data.captions is drawn for them"
            )
    return notes


def _open_some(
    shards: Sequence[ShardFile],
    selection: Selection,
    cache: ShardCache | None,
    *,
    most: int = _LOOKED_SHARDS,
) -> Iterator[SelectedShard]:
    most = min(most, len(shards))
    for i in range(most):
        yield SelectedShard(shards[i * len(shards) // most], selection, cache)


def list_members(members: Mapping[str, int]) -> str:
    """List the most frequent members of samples with their numbers."""
    frequent = Counter(members).most_common(_SHOWN_MEMBERS)
    listed = [f"{printable(name, _MAX_NAME)} ({count:,})" for name, count in frequent]
    rest = len(members) - len(frequent)
    return ", ".join(listed + [f"{rest:,} more"] * (rest > 0)) or "none"


def suggest_setting(data: bytes) -> str:
    """Return the setting that a member with this content fits: "image", "captions", or "" for neither."""
    if image_format(data):
        return "image"
    text = decode_text(data)
    return "captions" if is_utf8(text) and any(map(str.isalpha, text)) else ""


def suggest_members(shard: Shard, rule: CaptionRule, image: str = "") -> dict[str, str]:
    """Find image and text in the first samples of a shard by their content, by setting: "image" and "captions".

    Captions are all members called ``NAME.txt``, separated by commas; without any, the longest text.

    Args:
        rule: where captions were expected; captions are suggested if no sample has one of its members.
        image: where the image was expected, as in ``Selection``.
    """
    if len(shard.index.names) > _MANY_NAMES:
        return {}  # dots in keys
    settings: dict[str, str] = {}
    lengths: dict[str, int] = {}
    has_image = bool(find_image(shard.index.names)) or image in shard.index.names
    has_text = any(name.lower() in shard.index.names for name in (TEXT, *rule.fields))
    for row in range(min(_SUGGESTED, len(shard.index))):
        for name in shard.index.members(row):
            if name in IMAGE_EXTENSIONS or name == "cls" or is_json(name):
                continue
            with suppress(DataError):
                data = shard.read_present(row, [name])[name]
                kind = suggest_setting(data)
                if kind == "image" and not has_image:
                    settings.setdefault(kind, name)
                elif kind == "captions" and not has_text:
                    lengths[name] = max(len(data), lengths.get(name, 0))
    if lengths:
        captions = [name for name in lengths if name.endswith(f".{TEXT}")]
        settings["captions"] = ",".join(captions) or max(lengths, key=lengths.__getitem__)
    return {name: settings[name] for name in ("image", "captions") if name in settings}


def _write_settings(settings: Mapping[str, str]) -> str:
    texts = []
    options = []
    for name, member in settings.items():
        value = printable(member)
        options.append(f"--{name} {value}")
        if "," in value:  # as a list is written on a command line
            value = f"'{json.dumps(value.split(','), separators=(',', ':'))}'"
        texts.append(f"data.{name}={value}")
    return f": set {' '.join(texts)} (training) or {' '.join(options)} (commands)" if texts else ""


# --------------------------------------------------------------------------------------------------------------
# Count the used samples of shards, several shards at a time.

_MAX_STATS_BYTES = 1 << 20
_MAX_STATED = 1 << 31  # samples; an index cannot contain more
_FIRST = 8  # shards of which one must have a sample with the needed members
_ALONE = 4  # up to this many shards are counted in this process
_MAX_PROCESSES = 32
_REMOTE_PROCESSES = 4  # per core, since they mostly wait for a store
_MOST_UNCOUNTED = 1000  # remote shards that training counts itself
_MAX_NAMES = 1000  # of members counted per shard; with dots in file names there may be as many as members
_UNDER_WAY = 4  # shards submitted per process


@dataclass(frozen=True, kw_only=True)
class Census:
    """Counts of one shard.

    Attributes:
        count: used samples.
        digest: digest of the index; empty if the shard was not indexed.
        content: digest of the content, see ``ShardIndex``; empty if it was not read.
        dropped: unused samples by reason.
        members: number of the most frequent members by name.
        truncated: whether the shard is truncated and only its intact part counted.
        values: as in ``Chosen``.
    """

    count: int
    digest: str
    content: str
    dropped: dict[str, int]
    members: dict[str, int]
    truncated: bool = False
    values: npt.NDArray[np.uint64] | None = None


def take_census(
    shards: Sequence[ShardFile],
    selection: Selection,
    *,
    cache: ShardCache | None = None,
    stats: bool = True,
) -> Iterator[tuple[int, Census]]:
    """Yield number and census of each shard as they become known, the first shard first."""
    done: list[int] = []
    samples = 0
    for index, census in _count_shards(shards, selection, cache, stats):
        done.append(index)
        samples += census.count
        if not samples and len(done) == min(_FIRST, len(shards)):
            _reject_unknown_fields([shards[i] for i in done], selection, cache)
        yield index, census


def _count_shards(
    shards: Sequence[ShardFile], selection: Selection, cache: ShardCache | None, stats: bool
) -> Iterator[tuple[int, Census]]:
    # The first shard is always opened, so that a problem of all shards is found at once.
    first = SelectedShard(shards[0], selection, cache)
    # "all" drops samples without captions
    if "caption" in selection.need and selection.captions.choice != "all":
        most = _LOOKED_REMOTE if any(shard.is_remote for shard in shards) else _LOOKED_SHARDS - 1
        others = _open_some(shards[1:], selection, cache, most=most)
        reject_unknown_captions(chain([first], others), selection.captions, cache)
    yield 0, _census_of(first.index, first.chosen)
    del first  # close it
    if len(shards) <= _ALONE:
        for index in range(1, len(shards)):
            yield index, _count(shards[index], selection, cache, stats)
        return
    processes = len(os.sched_getaffinity(0))
    if any(shard.is_remote for shard in shards):
        processes *= _REMOTE_PROCESSES
    processes = min(processes, _MAX_PROCESSES)
    context = get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_initialize_process) as pool:
        running: dict[Future[Census], int] = {}
        ahead = iter(range(1, len(shards)))
        try:
            while True:
                while len(running) < processes * _UNDER_WAY and (index := next(ahead, 0)):
                    running[pool.submit(_count, shards[index], selection, cache, stats)] = index
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        except BrokenProcessPool as error:
            raise DataError("a process that counts shards was killed, probably out of memory") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _require_index(shards: Sequence[ShardFile], selection: Selection) -> None:
    """Raise DataError if training would have to download or scan very many shards before the first step."""
    uncounted = [
        shard
        for shard in shards
        if shard.is_remote and is_indexable(shard) and not is_indexed(shard, truncated=selection.truncated)
    ]
    if len(uncounted) <= _MOST_UNCOUNTED:
        return
    some = [uncounted[i * (len(uncounted) - 1) // 2] for i in range(3)]
    if selection.counts_stated and all(_read_stated_count(shard) is not None for shard in some):
        return
    raise DataError(
        f"{len(uncounted):,} remote shards have no index, and training would wait until all are read: run "
        "`python -m data index SOURCE` once, on one machine, with CLIPKIT_INDEX_CACHE set to a folder that all "
        "machines share"
    )


def _initialize_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()


def _count(shard: ShardFile, selection: Selection, cache: ShardCache | None, stats: bool) -> Census:
    if selection.truncated == "use" and not shard.is_remote:
        stats = False  # it includes the samples that are cut off
    index = stored_index(shard, truncated=selection.truncated)
    if index is None:
        recorded = _read_stated_count(shard) if stats and selection.counts_stated else None
        if recorded is not None:
            return Census(count=recorded, digest="", content="", dropped={}, members={})
    else:
        chosen = choose_unread(shard, index, selection)
        if chosen is not None:  # without opening the shard, which may have to be downloaded
            return _census_of(index, chosen)
    opened = SelectedShard(shard, selection, cache)
    return _census_of(opened.index, opened.chosen)


def _census_of(index: ShardIndex, chosen: Chosen) -> Census:
    return Census(
        count=len(chosen),
        digest=index.digest,
        content=index.content,
        dropped=chosen.dropped,
        members=dict(Counter(index.names).most_common(_MAX_NAMES)),
        truncated=bool(index.truncated),
        values=chosen.values,
    )


def _read_stated_count(shard: ShardFile) -> int | None:
    stem, dot, _ = shard.url.rpartition(".tar")
    if not dot or shard.url.startswith("pipe:"):
        return None
    url = f"{stem}_stats.json"
    text = None
    if shard.is_remote:
        text = read_text(url, limit=_MAX_STATS_BYTES)
    elif Path(url).is_file():  # opening a named pipe would block
        with suppress(OSError), Path(url).open(encoding="utf-8", errors="replace") as file:
            text = file.read(_MAX_STATS_BYTES)
    try:
        count: Any = json.loads(text)["successes"] if text else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return count if type(count) is int and 0 <= count <= _MAX_STATED else None


# --------------------------------------------------------------------------------------------------------------

_VERSION = 3
_SHOWN = 3  # changes in a message

_NO_VALUES = np.zeros(0, dtype=np.uint64)
_STRINGS = ("urls", "versions", "digests", "contents")


def _describe_cause(cause: str) -> str:
    """Convert a cause such as "not score.a >= 0.96928" to "by score.a >= 0.9693"."""
    start, _, value = cause.rpartition(" ")
    if not start.startswith("not "):
        return cause
    number = parse_number(value)
    shown = f"{number:.4g}" if isinstance(number, float) else value
    return f"by {start.removeprefix('not ')} {shown}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """Shards and their samples.

    Attributes:
        urls: (S,) URLs of the shards.
        versions: (S,) as in ``ShardFile``.
        sizes: (S,) int64 bytes, -1 if unknown.
        counts: (S,) int64 used samples.
        digests: (S,) digests of the indexes; empty if the count is from ``_stats.json``.
        contents: (S,) digests of the content, see ``ShardIndex``; empty if it was not read.
        sources: number of shards of each source, in order.
        selection: ``Selection.identity``.
        dropped: unused samples by reason.
        truncated: numbers of truncated shards, each with the number of used samples in its intact part.
        index_version: of the indexes whose digests these are; digests of other versions cannot be compared.
        values: (N,) uint64 hashes of the samples' values of ``Selection.balance``; empty without it.
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
    index_version: int = INDEX_VERSION
    values: npt.NDArray[np.uint64] = field(default_factory=_NO_VALUES.copy)

    def __len__(self) -> int:
        return len(self.counts)

    def shard(self, index: int) -> ShardFile:
        """Return one of the shards."""
        return ShardFile(url=self.urls[index], size=int(self.sizes[index]), version=self.versions[index])

    def left_out(self, selection: Selection) -> str:
        """Return how many samples are unused and why, in one line; empty if all are used."""
        unusable = {f"without {member}" for member in selection.need} | {"unreadable", OUTSIDE}
        unusable.update(selection.unbalanced)
        by_filters = [
            f"{count} {_describe_cause(why)}" for why, count in self.dropped.items() if why not in unusable
        ]
        others = [f"{count} {why}" for why, count in self.dropped.items() if why in unusable]
        parts = [f"left out by data.filters: {', '.join(by_filters) or 'none'}"] if selection.filters else []
        return ", ".join([*parts, f"left out: {', '.join(others)}"] if others else parts)

    def truncated_shards(self) -> list[tuple[str, int]]:
        """Return name and number of used samples of each truncated shard."""
        return [(self.shard(index).shown, samples) for index, samples in self.truncated]

    @property
    def stated(self) -> int:
        """Number of shards with counts from ``_stats.json``."""
        return int((np.diff(self.digests.ends, prepend=0) == 0).sum())

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the samples or their order.

        They depend on names, sizes, counts and indexes of the shards, not on their folder, so data may be moved.
        Only ``changes_since`` compares the content, because not every shard is read.
        """
        digest = hashlib.sha256(json.dumps([self.selection, len(self)]).encode())
        digest.update(os.fsencode("\0".join(map(_strip_folder, self.urls))))
        for array in (self.sizes, self.counts, self.digests.ends, self.digests.content, self.values):
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]

    def to_bytes(self) -> bytes:
        """Encode the manifest for ``from_bytes``."""
        return pack_arrays(*self._stored())

    def save(self, path: Path) -> None:
        """Write ``to_bytes`` to a file; may raise OSError."""
        write_arrays(path, *self._stored())

    def _stored(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        names = ("sources", "selection", "dropped", "truncated", "index_version")
        about = {name: getattr(self, name) for name in names}
        arrays: dict[str, npt.NDArray[Any]] = {"sizes": self.sizes, "counts": self.counts}
        if len(self.values):
            arrays["values"] = self.values
        for name in _STRINGS:
            strings: Strings = getattr(self, name)
            arrays |= {f"{name}.content": strings.content, f"{name}.ends": strings.ends}
        return about, arrays

    @classmethod
    def from_bytes(cls, content: bytes) -> "Manifest | None":
        """Decode ``to_bytes``; None if the bytes are invalid."""
        return cls._of(unpack_arrays(content))

    @classmethod
    def load(cls, path: Path) -> "Manifest | None":
        """Read what ``save`` wrote; None if the file is missing or damaged."""
        return cls._of(read_arrays(path))

    @classmethod
    def _of(cls, stored: tuple[dict[str, Any], dict[str, npt.NDArray[Any]]] | None) -> "Manifest | None":
        if stored is None:
            return None
        about, arrays = stored
        try:
            if "contents.ends" not in arrays:  # of a run that an earlier version started
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
                truncated=tuple((index, samples) for index, samples in about.get("truncated", ())),
                index_version=about.get("index_version", 0),
                values=arrays.get("values", _NO_VALUES),
            )
        except (KeyError, TypeError):
            return None

    def changes_since(self, earlier: "Manifest") -> list[str]:
        """Return known changes of the samples or their order, most important first."""
        changes = []
        if self.selection != earlier.selection:
            changes.append("the settings of captions or filters, data.fraction, or the scores, differ")
        before = list(map(_strip_folder, earlier.urls))
        now = list(map(_strip_folder, self.urls))
        if len(before) != len(now):
            changes.append(f"{len(now)} shards instead of {len(before)}")
        counts_before = Counter(before)
        counts_now = Counter(now)
        changes += _first([f"{name} is gone" for name in (counts_before - counts_now).elements()])
        changes += _first([f"{name} is new" for name in (counts_now - counts_before).elements()])
        if changes:
            return changes
        if before != now:
            return ["the shards are in another order"]
        if self.sources != earlier.sources:
            return ["the shards are divided into sources differently"]

        def pairs(column: str) -> Iterator[tuple[Any, Any]]:
            return zip(getattr(earlier, column), getattr(self, column), strict=True)

        comparable = self.index_version == earlier.index_version
        columns = map(pairs, ("sizes", "counts", "digests", "contents"))
        for name, size, count, digest, content in zip(now, *columns, strict=True):
            if size[0] != size[1]:
                changes.append(f"{name} has {size[1]} bytes instead of {size[0]}")
            elif not all(digest):  # counted by its _stats.json
                continue
            elif count[0] != count[1]:
                changes.append(f"{name} has {count[1]} used samples instead of {count[0]}")
            elif not comparable:
                continue
            elif digest[0] != digest[1]:
                changes.append(f"{name} has other samples")
            elif all(content) and content[0] != content[1]:
                changes.append(f"{name} has other captions or images of the same names and sizes")
        if not changes and not np.array_equal(self.values, earlier.values):
            changes.append("samples have other values of data.balance")
        return _first(changes)

    def copy_counts(self, earlier: "Manifest") -> "Manifest":
        """Return this manifest with an earlier one's counts, which define the sample numbers of a started run."""
        if self.index_version == earlier.index_version:
            contents = [then or now for then, now in zip(earlier.contents, self.contents, strict=True)]
        else:
            contents = [""] * len(self)
        return replace(
            self,
            counts=earlier.counts,
            digests=earlier.digests,
            contents=Strings.of(contents),
            index_version=earlier.index_version,
            values=earlier.values,
        )

    def not_compared(self, earlier: "Manifest") -> int:
        """Return how many shards may differ from an earlier manifest in captions or images of the same sizes.

        Their versions differ or are unknown, and there is no digest of their content then or now.
        """
        comparable = self.index_version == earlier.index_version
        versions = zip(earlier.versions, self.versions, strict=True)
        contents = zip(earlier.contents, self.contents, strict=True)
        return sum(
            not now or (then != now and not (comparable and all(both)))
            for (then, now), both in zip(versions, contents, strict=True)
        )


def _strip_folder(url: str) -> str:
    if url.startswith("pipe:"):
        return url
    path = url.partition("?")[0] if "://" in url else url  # a signature may contain slashes
    return path.rpartition("/")[2]


def _first(changes: list[str]) -> list[str]:
    return [*changes[:_SHOWN], f"{len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else changes


def make_manifest(
    sources: Sequence[Sequence[ShardFile]],
    selection: Selection,
    *,
    cache: ShardCache | None = None,
    progress: Callable[[int], None] | None = None,
    stats: bool = True,
) -> Manifest:
    """Count the used samples of shards, or read the counts from the cache folder.

    Args:
        sources: the shards of each source.
        selection: which samples are used.
        cache: cache of remote shards; None reads their headers over the network.
        progress: called with the number of counted shards.
        stats: use the counts in ``_stats.json`` for shards that were never indexed, if only image and caption
            file are needed.
    """
    shards = [shard for source in sources for shard in source]
    if not shards:
        raise DataError("no shards were given")
    if cache is None:  # servers must support ranges, even if everything is counted already
        remote = [shard for shard in reversed(shards) if shard.is_remote and shard.size > 0]
        for shard in {urlsplit(shard.url)[:2]: shard for shard in remote}.values():
            read_range(shard, 0, 1)
    rules = [selection.identity] if selection.truncated == "error" else [selection.identity, "use"]
    name = hashlib.sha256(json.dumps([_VERSION, [len(source) for source in sources], *rules]).encode())
    for shard in shards:
        name.update(f"{shard.identity}\n".encode("utf-8", "surrogateescape"))
    path = index_folder() / "manifest" / f"{name.hexdigest()[:32]}.manifest"
    stored = Manifest.load(path)
    if stored is not None and (stats or not stored.stated):
        return replace(
            stored, urls=Strings.of([shard.url for shard in shards])
        )  # signatures may have changed
    if stats:
        _require_index(shards, selection)
    by_shard: dict[int, Census] = {}
    samples = complete = 0  # ``complete`` have the needed members, but are not used
    lacking = {f"without {member}" for member in selection.need}
    for index, census in take_census(shards, selection, cache=cache, stats=stats):
        by_shard[index] = census
        samples += census.count
        complete += sum(count for reason, count in census.dropped.items() if reason not in lacking)
        if not samples and (len(by_shard) == len(shards) or (len(by_shard) >= _FIRST and not complete)):
            censuses = [by_shard[i] for i in sorted(by_shard)]
            raise DataError(nothing_usable(censuses, shards[0], selection, cache))
        if progress is not None:
            progress(len(by_shard))
    censuses = [by_shard[i] for i in range(len(shards))]
    dropped: Counter[str] = Counter()
    for census in censuses:
        dropped.update(census.dropped)
    values = [census.values for census in censuses if census.values is not None]
    manifest = Manifest(
        urls=Strings.of([shard.url for shard in shards]),
        versions=Strings.of([shard.version for shard in shards]),
        sizes=np.array([shard.size for shard in shards], dtype=np.int64),
        counts=np.array([census.count for census in censuses], dtype=np.int64),
        digests=Strings.of([census.digest for census in censuses]),
        contents=Strings.of([census.content for census in censuses]),
        sources=tuple(map(len, sources)),
        selection=selection.identity,
        dropped=dict(dropped.most_common()),
        truncated=tuple((i, census.count) for i, census in enumerate(censuses) if census.truncated),
        values=np.concatenate(values or [_NO_VALUES]),
    )
    with suppress(OSError):
        manifest.save(path)
    return manifest


def nothing_usable(
    censuses: Sequence[Census], first: ShardFile, selection: Selection, cache: ShardCache | None
) -> str:
    """Return the error message for shards without a used sample, the first of which is ``first``."""
    members: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for census in censuses:
        members.update(census.members)
        dropped.update(census.dropped)
    where = f"shard {first.shown} has" if len(censuses) == 1 else f"the first {len(censuses)} shards have"
    lacking = {f"without {member}" for member in selection.need}
    if any(reason not in lacking for reason in dropped) and (
        selection.filters or selection.balance or OUTSIDE in dropped
    ):
        because = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common(4))
        which = "passes data.filters" if selection.filters else "is used"
        return f"{where} no sample that {which}: {because}"
    shard = Shard(first, cache, truncated=selection.truncated)
    hint = _write_settings(suggest_members(shard, selection.captions, selection.image))
    return f"{where} no sample with {' and '.join(selection.need)}; members: {list_members(members)}{hint}"
