"""Shards of an inspection: list them, scan some, check and count the others, and summarize the result.

Errors for which training would reject the shards are recorded, and the inspection continues.
"""

import os
import re
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError
from clipkit.files import expand_braces, user_path
from clipkit.samples import (
    IMAGE_EXTENSIONS,
    Content,
    Shard,
    ShardIndex,
    TruncatedError,
    index_of_members,
    join_place,
    keep_index,
    list_files,
    sample_name,
    stored_index,
    tar_files,
    tar_files_of,
    with_content,
)
from clipkit.samples.remote import ShardFile, describe, is_remote
from data.augment import random_of
from data.captions import CaptionRule
from data.inspect.findings import Broken, Names, Place, ShardsFound, Stated
from data.selection import Selection
from data.shards.manifest import stated_count
from data.sources import find_shards

if TYPE_CHECKING:
    from clipkit.samples.remote import ShardCache

__all__ = [
    "FIRST_PLACES", "Progress", "SampleRef", "ShardScan", "ShardSurvey", "key_pattern",
    "list_extensions", "missing_numbers",
]  # fmt: skip

FIRST_PLACES = 3  # examples of a finding
_BEGINNING = 8 << 20  # bytes read of a remote shard without an index
_BLOCK = 512
_KINDS = {"picture": IMAGE_EXTENSIONS, "txt": ("txt",), "cls": ("cls",), "json": ("json",)}
_SEED = 0

Progress = Callable[
    [str, int, int, int], None
]  # called with the task, items done, items failed, and all items


# --------------------------------------------------------------------------------------------------------------
# One shard

_CLOCK_INTERVAL = 16_384  # members
_MOST_HASHES = 50_000  # key hashes per shard


@dataclass(kw_only=True, eq=False)
class ShardScan:
    """The content of one shard.

    Attributes:
        number: position in the list of shards.
        cause: why it cannot be read; empty if it can.
        rows: (M,) uint32, rows of usable samples in its index.
        groups: samples, usable or not.
        extensions: members by extension; known for a truncated shard, too.
        repeated: surplus members by kind, see ``Names``.
        key_hashes: (K,) int64, the lowest hashes of the keys, ascending.
        keys: some of the keys.
        beginning: the index, if only the first samples were scanned.
        bytes_seen: size of the part that was scanned.
        stated: number of samples according to its ``_stats.json``; None without one.
    """

    number: int
    file: ShardFile
    cause: str = ""
    truncated: bool = False
    rows: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    groups: int = 0
    without_image: int = 0
    without_caption: int = 0
    extensions: Counter[str] = field(default_factory=Counter)
    upper_case: Counter[str] = field(default_factory=Counter)
    hidden: int = 0
    repeated: Counter[str] = field(default_factory=Counter)
    repeated_keys: list[str] = field(default_factory=list)
    key_hashes: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    keys: list[str] = field(default_factory=list)
    apart: int = 0
    apart_example: Place | None = None
    beginning: ShardIndex | None = None
    bytes_seen: int = 0
    stated: int | None = None

    def scan(self, selection: Selection, cache: "ShardCache | None", *, keys: int, until: float) -> None:
        """Scan the shard; errors are recorded in ``cause``.

        Args:
            selection: decides which samples are usable.
            cache: for remote shards.
            keys: number of keys to keep.
            until: monotonic time after which a scan that has found no pair stops.
        """
        try:
            index = self._read_index(selection, cache, until)
        except DataError as error:
            self.cause, self.truncated = str(error), isinstance(error, TruncatedError)
            return
        self.rows = selection.choose(index, lambda row: {}, shard=self.file.name).rows
        self.groups = len(index)
        ends = index.member_blocks.astype(np.int64) * _BLOCK + index.member_sizes
        self.bytes_seen = self.file.size if self.beginning is None else int(ends.max(initial=0))
        usable = np.zeros(len(index), dtype=np.bool_)
        usable[self.rows] = True
        images = index.has_any((selection.image,) if selection.image else IMAGE_EXTENSIONS)
        captions = index.has_any(("txt", "cls", "json", *selection.captions.members(index.names)))
        self.without_caption = int((images & ~usable).sum())
        self.without_image = int((~images & captions).sum())
        if not self.extensions:  # the index was stored
            self.extensions = Counter(index.names)
            for kind, names in _KINDS.items():
                members = sum(index.names.get(name, 0) for name in names)
                if (surplus := members - int(index.has_any(names).sum())) > 0:
                    self.repeated[kind] = surplus
        self._note_keys(index, keys)

    def _read_index(self, selection: Selection, cache: "ShardCache | None", until: float) -> ShardIndex:
        """Index the shard; a local one is always scanned, because a stored index lacks the names of files."""
        file = self.file
        if not file.is_remote:
            try:
                members = self._noted(tar_files(Path(file.url)), until)
                index = with_content(index_of_members(file.shown, members), Path(file.url))
            except OSError as error:
                raise DataError(f"shard {file.shown}: {error.strerror}") from error
            keep_index(file, index)
            return index
        if cache is not None or file.size <= _BEGINNING or stored_index(file) is not None:
            return Shard(file, cache).index
        from clipkit.samples.remote import RangedBytes

        whole = _whole_samples(tar_files_of(file.shown, _Beginning(RangedBytes(file))))
        self.beginning = index_of_members(file.shown, self._noted(whole, until))
        return self.beginning

    def _noted(self, members: Iterable[tuple[str, int, int]], until: float) -> Iterator[tuple[str, int, int]]:
        """Record and yield members; DataError if no pair has appeared by ``until``."""
        key, kinds, some_pair = "", set[str](), False
        for count, member in enumerate(members, start=1):
            yield member
            found = sample_name(member[0])
            if found is None:
                self.hidden += 1
                continue
            if found[0] != key:
                key, kinds = found[0], set()
            extension = found[1]
            self.extensions[extension] += 1
            kind = "picture" if extension in IMAGE_EXTENSIONS else extension
            if kind in kinds:
                self.repeated[kind] += 1
                if len(self.repeated_keys) < FIRST_PLACES and key not in self.repeated_keys:
                    self.repeated_keys.append(key)
            kinds.add(kind)
            if not member[0].endswith(extension):
                self.upper_case[member[0][-len(extension) :]] += 1
            some_pair = some_pair or ("picture" in kinds and not kinds.isdisjoint(("txt", "json")))
            if count % _CLOCK_INTERVAL == 0 and not some_pair and time.monotonic() > until:
                raise DataError(f"shard {self.file.shown} has no pair among its first {count} members")

    def _note_keys(self, index: ShardIndex, keys: int) -> None:
        content, ends = index.key_bytes.tobytes(), index.key_ends.tolist()
        spans = list(pairwise([0, *ends]))
        hashes = [hash(content[start:end]) for start, end in spans]
        # the lowest hashes belong to the same keys in all shards, so keys in several shards are found among them
        self.key_hashes = np.unique(np.array(hashes, dtype=np.int64))[:_MOST_HASHES]
        step = max(1, len(index) // max(1, keys))
        self.keys = [index.key(row) for row in range(0, len(index), step)][:keys]
        first: dict[int, int] = {}
        for row, one in enumerate(hashes):
            before = first.setdefault(one, row)
            if before != row and content[slice(*spans[row])] == content[slice(*spans[before])]:
                self.apart += 1
                self.apart_example = self.apart_example or Place(shard=self.file.shown, key=index.key(row))


class _Beginning:
    """The first bytes of a shard."""

    def __init__(self, content: Content) -> None:
        self._content = content

    def __len__(self) -> int:
        return min(len(self._content), _BEGINNING)

    def __getitem__(self, part: slice, /) -> bytes:
        start, stop, _ = part.indices(len(self))
        return self._content[start:stop]


def _whole_samples(members: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
    """Drop the last sample, which may be truncated."""
    held: list[tuple[str, int, int]] = []
    key = ""
    with suppress(TruncatedError):
        for member in members:
            found = sample_name(member[0])
            if found is not None and found[0] != key:
                yield from held
                held, key = [], found[0]
            held.append(member)


# --------------------------------------------------------------------------------------------------------------
# All shards

_REQUESTS = 32  # at a time
_LAST_NUMBER = re.compile(r"[0-9]+(?=[^0-9]*$)")  # of a name
_MAX_DIGITS = 18
_SPARSE = 10  # with more missing shards per existing one, numbers are not meant to be consecutive
_NO_TAR = (b"\x1f\x8b", b"BZ", b"\xfd7", b"(\xb5", b"<", b"PK")  # compressed, an HTML page, a zip


def _existing(name: str) -> ShardFile | None:
    try:
        return describe([name if is_remote(name) else str(user_path(name))])[0]
    except DataError:
        return None


def missing_numbers(urls: Iterable[str], absent: Iterable[str] = ()) -> tuple[list[str], int]:
    """Find gaps in the numbers of otherwise equal names; return them as ranges, and the number of missing names.

    Args:
        urls: existing shards.
        absent: shards known to be missing, which may precede the first or follow the last existing one.
    """
    series: defaultdict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    lacking: defaultdict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for into, names in ((series, urls), (lacking, absent)):
        for url in names:
            folder, _, name = url.partition("?")[0].rpartition("/")
            match = _LAST_NUMBER.search(name)
            if match is not None and len(match[0]) <= _MAX_DIGITS:
                where = os.path.abspath(folder) if not is_remote(folder) else folder  # noqa: PTH100
                into[f"{where}/{name[: match.start()]}", name[match.end() :]][int(match[0])] = match[0]
    ranges: list[str] = []
    count = 0
    for key, there in series.items():
        known = {**lacking[key], **there}
        fence = [min(known) - 1, *sorted(there), max(known) + 1]
        gaps = [(low + 1, high - 1) for low, high in pairwise(fence) if high - low > 1]
        missing = sum(last - first + 1 for first, last in gaps)
        if missing > _SPARSE * len(there) and not lacking[key]:
            continue
        width = len(next(iter(known.values()))) if any(one[0] == "0" for one in known.values()) else 0
        count += missing
        for first, last in gaps:
            ranges.append(f"{first:0{width}d}" + (f"–{last:0{width}d}" if last > first else ""))
    return ranges, count


def _ends_like_tar(file: ShardFile) -> bool:
    """Check the first and last bytes of a local shard; a truncated tar lacks the zeros at its end."""
    if file.size < 2 * _BLOCK or file.size % _BLOCK:
        return False
    try:
        with Path(file.url).open("rb", buffering=0) as tar:
            begin = tar.read(2)
            tar.seek(file.size - _BLOCK)
            return not (begin.startswith(_NO_TAR) or any(tar.read(_BLOCK)))
    except OSError:
        return False


# --------------------------------------------------------------------------------------------------------------
# The survey of all shards

_SHARDS, _REMOTE_SHARDS = 64, 32  # scanned by default
_FIRST_SHARDS = 8  # one of these must contain a pair
_FIRST_PAIR_SECONDS = 20.0  # limit for finding the first pair
_ENDS_SECONDS = _COUNT_SECONDS = 5.0
_SUSPICIOUS = 20  # shards that seem broken and are scanned in addition
_KEYS = 20_000  # keys stored, over all shards
_OPEN = 4  # shards kept open
_MOST_PATTERNS = 8
_MOST_EXTENSIONS = 200
_MOST_LISTED = 50  # shards
_RUN = 12  # digits that a pattern writes out
_KEY_PART = re.compile(r"(?P<hex>(?<![^\W_])[0-9a-f]{16,}(?![^\W_]))|[0-9]+|[^\W\d_]+")


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleRef:
    """A sample: its shard, and its row in the index."""

    scan: ShardScan
    row: int


class ShardSurvey:
    """The shards of an inspection: scans of some, sample counts of as many as possible.

    Args:
        sources: as in ``data.train``.
        split: of dataset folders.
        captions: as in ``data.captions``.
        cache: for remote shards.

    Raises:
        DataError: a source has no shards, or cannot be listed.
    """

    def __init__(
        self, sources: Sequence[str], *, split: str, captions: Sequence[str], cache: "ShardCache | None"
    ) -> None:
        self._cache = cache
        self.selection = Selection(captions=CaptionRule(fields=tuple(captions)))
        self._files: list[ShardFile] = []
        self._refused = list[str]()
        absent = list[str]()
        for source in sources:
            try:
                self._files += find_shards(source, split=split)
            except DataError as error:
                there: list[ShardFile] = []
                if "are missing, the first is" in str(error):
                    names = list(expand_braces(source))
                    with ThreadPoolExecutor(_REQUESTS) as pool:
                        found = list(pool.map(_existing, names))
                    there = [file for file in found if file is not None]
                    absent += [name for name, file in zip(names, found, strict=True) if file is None]
                elif "nshards.txt says" in str(error):
                    folder = source if is_remote(source) else user_path(source)
                    there = list_files(join_place(folder, split), (".tar",)) or list_files(folder, (".tar",))
                if not there:
                    raise
                self._files += there
                self._refused.append(str(error))
        self._missing, self._missing_count = missing_numbers([file.url for file in self._files], absent)
        self._until = time.monotonic() + _FIRST_PAIR_SECONDS
        self.remote = any(file.is_remote for file in self._files)
        self.scans: list[ShardScan] = []
        self._counts: npt.NDArray[np.int64] = np.full(len(self._files), -1, dtype=np.int64)
        self._ends_checked = self._suspicious = 0
        self._open: OrderedDict[int, Shard] = OrderedDict()

    def scan(self, most: int = 0, progress: Progress | None = None) -> None:
        """Scan ``most`` evenly spread shards and those that seem broken; DataError if there is no pair."""
        files = self._files
        most = min(most or (_REMOTE_SHARDS if self.remote else _SHARDS), len(files))
        wanted = sorted({number * len(files) // most for number in range(most)})
        found = 0
        for done, at in enumerate(_coarse_first(len(wanted)), start=1):
            found += len(self._scan(wanted[at], keys=max(1, _KEYS // len(wanted))).rows)
            if progress is not None:
                progress("scanning shards", done, sum(bool(one.cause) for one in self.scans), len(wanted))
            late = time.monotonic() > self._until
            if not found and (done >= min(_FIRST_SHARDS, len(wanted)) or late):
                raise DataError(self._no_pair())
        until = time.monotonic() + _ENDS_SECONDS
        suspicious: list[int] = []
        for number, file in enumerate(files):
            if file.is_remote:
                continue
            if time.monotonic() > until:
                break
            self._ends_checked += 1
            if not _ends_like_tar(file):
                suspicious.append(number)
        self._suspicious = len(suspicious)
        for number in sorted({*suspicious} - {*wanted})[:_SUSPICIOUS]:
            self._scan(number, keys=1)
        self.scans.sort(key=lambda scan: scan.number)
        until = time.monotonic() + _COUNT_SECONDS
        unknown = np.flatnonzero(self._counts < 0).tolist()
        for at in _coarse_first(len(unknown)):
            if time.monotonic() > until:
                break
            file = files[unknown[at]]
            if (index := stored_index(file)) is not None:
                rows = self.selection.choose(index, lambda row: {}, shard=file.name).rows
                self._counts[unknown[at]] = len(rows)
            elif not file.is_remote and (stated := stated_count(file)) is not None:
                self._counts[unknown[at]] = stated

    def _scan(self, number: int, *, keys: int) -> ShardScan:
        scan = ShardScan(number=number, file=self._files[number])
        scan.scan(self.selection, self._cache, keys=keys, until=self._until)
        self.scans.append(scan)
        with suppress(DataError):  # a store that does not answer
            scan.stated = stated_count(scan.file)
        if scan.beginning is None:
            self._counts[number] = len(scan.rows)
        elif scan.stated is not None:
            self._counts[number] = scan.stated
        return scan

    def _no_pair(self) -> str:
        """Explain why training could not start: the extensions found and those expected."""
        extensions, first = self.extensions(), self.scans[0]
        if all(scan.cause for scan in self.scans) and (first.truncated or not extensions):
            more = f" (and {len(self.scans) - 1} more are unreadable)" if len(self.scans) > 1 else ""
            hint = "; data.truncated=use trains on the intact part" if first.truncated else ""
            return f"{first.cause}{more}{hint}"
        where = (
            f"shard {first.file.shown} contains"
            if len(self.scans) == 1
            else f"the first {len(self.scans)} scanned shards contain"
        )
        hidden = sum(scan.hidden for scan in self.scans)
        nameless = f"; {hidden} files have no extension" if hidden else ""
        fields = self.selection.captions.fields
        expected = f"KEY.json with {', '.join(fields)}"
        if "txt" in fields:
            expected = 'KEY.txt, or KEY.json with a field "caption"'
        known = (*IMAGE_EXTENSIONS, "txt", "json")
        dotted = [one for one in extensions if "." in one and one.rpartition(".")[2] in known]
        others = ("caption", "text", "cap", "captions", "tags", "description")  # names used by other tools
        hint = ""
        if dotted:
            hint = (
                f": the extension is everything after the first dot of a name, so {dotted[0][:40]!r} is not "
                "recognized: use no other dots in names"
            )
        elif other := next((one for one in others if one in extensions), ""):
            hint = f": rename the .{other} files to .txt"
        elif not extensions.keys().isdisjoint(IMAGE_EXTENSIONS) and not extensions.keys().isdisjoint(
            ("txt", "json")
        ):
            hint = ": an image and its caption must have the same name up to the dot and be consecutive"
        return (
            f"{where} no pair of image and caption; extensions found: {list_extensions(extensions)}{nameless}; "
            f"expected: KEY.{'/'.join(IMAGE_EXTENSIONS[:4])}/… with {expected}{hint}"
        )

    def extensions(self) -> Counter[str]:
        """Count the members of the scanned shards by extension."""
        return sum((scan.extensions for scan in self.scans), Counter[str]())

    def spread(self, samples: int) -> list[SampleRef]:
        """Choose samples spread evenly over the scanned shards, with a fixed seed; all if there are not more."""
        ends = np.cumsum([len(scan.rows) for scan in self.scans])
        total = int(ends[-1])
        if samples >= total:
            places = np.arange(total)
        else:
            edges = (
                np.arange(samples + 1) * total // samples
            )  # one of each interval, so that none occurs twice
            places = random_of(_SEED).integers(edges[:-1], edges[1:])
        chosen = []
        for place in places.tolist():
            at = int(np.searchsorted(ends, place, side="right"))
            scan = self.scans[at]
            chosen.append(SampleRef(scan=scan, row=int(scan.rows[place - int(ends[at])])))
        return chosen

    def opened(self, scan: ShardScan) -> Shard:
        """Open a scanned shard; the last few stay open."""
        opened = self._open.get(scan.number)
        if opened is None:
            opened = self._open[scan.number] = Shard(scan.file, self._cache, index=scan.beginning)
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return opened

    def found(self) -> ShardsFound:
        """Summarize the shards; unknown numbers of samples are extrapolated."""
        sound = [scan for scan in self.scans if not scan.cause]
        broken = [scan for scan in self.scans if scan.cause]
        known = np.delete(self._counts, [scan.number for scan in broken])
        known = known[known >= 0]
        unknown = np.flatnonzero(self._counts < 0)
        sizes = np.array([max(0, file.size) for file in self._files], dtype=np.int64)
        rows, within = sum(len(one.rows) for one in sound), sum(max(0, one.bytes_seen) for one in sound)
        stated = [
            (scan.file.shown, scan.stated, scan.groups - scan.without_image)
            for scan in sound
            if scan.stated is not None and scan.beginning is None
        ]
        return ShardsFound(
            count=len(sizes),
            bytes=int(sizes.sum()),
            looked_into=len(self.scans),
            beginnings=sum(scan.beginning is not None for scan in self.scans),
            ends_checked=self._ends_checked,
            suspicious=self._suspicious,
            missing=tuple(self._missing[:_MOST_LISTED]),
            missing_count=self._missing_count,
            refused=tuple(self._refused),
            broken=tuple(
                Broken(
                    shard=scan.file.shown,
                    cause=scan.cause.removeprefix(f"shard {scan.file.shown}").lstrip(": "),
                    truncated=scan.truncated,
                )
                for scan in broken[:_MOST_LISTED]
            ),
            empty=tuple(scan.file.shown for scan in sound if not len(scan.rows))[:_MOST_LISTED],
            least=int(known.min()) if len(known) else 0,
            median=float(np.median(known)) if len(known) else 0.0,
            greatest=int(known.max()) if len(known) else 0,
            samples=int(known.sum()) + (round(float(sizes[unknown].sum()) * rows / within) if within else 0),
            samples_known=len(unknown) == 0,
            counted=len(sizes) - len(unknown),
            stated=Stated(
                shards=len(stated),
                stated=sum(says for _, says, _ in stated),
                found=sum(found for _, _, found in stated),
                differ=tuple(one for one in stated if one[1] != one[2])[:_MOST_LISTED],
            ),
        )

    def names(self) -> Names:
        """Summarize keys and member names."""
        scans, extensions = self.scans, self.extensions()
        keys = [key for scan in scans for key in scan.keys]
        patterns = Counter(map(key_pattern, keys))
        if len(patterns) > _MOST_PATTERNS:
            patterns = Counter(key_pattern(key, words=False) for key in keys)
        hashes = np.concatenate([scan.key_hashes for scan in scans])
        values, counts = np.unique(hashes, return_counts=True)
        across = set(values[counts > 1].tolist())
        examples = (key for key in sorted({*keys}) if hash(key.encode("utf-8", "replace")) in across)
        known = {*IMAGE_EXTENSIONS, "txt", "json", "cls"}
        return Names(
            groups=sum(scan.groups for scan in scans),
            patterns=dict(patterns.most_common(_MOST_PATTERNS)),
            extensions=dict(extensions.most_common(_MOST_EXTENSIONS)),
            upper_case=_total(scan.upper_case for scan in scans),
            second_dot=sum(
                count
                for name, count in extensions.items()
                if "." in name and name.rpartition(".")[2] in known
            ),
            hidden=sum(scan.hidden for scan in scans),
            without_picture=sum(scan.without_image for scan in scans),
            without_caption=sum(scan.without_caption for scan in scans),
            apart=sum(scan.apart for scan in scans),
            apart_example=next((scan.apart_example for scan in scans if scan.apart_example), None),
            repeated=_total(scan.repeated for scan in scans),
            repeated_at=tuple(
                Place(shard=scan.file.shown, key=key) for scan in scans for key in scan.repeated_keys
            )[:FIRST_PLACES],
            across=len(across),
            across_example=next(examples, ""),
        )


def _total(counters: Iterable[Counter[str]]) -> dict[str, int]:
    return dict(sum(counters, Counter[str]()).most_common(_MOST_EXTENSIONS))


def list_extensions(extensions: Counter[str]) -> str:
    """List extensions with their number of files on one line."""
    named = [f"{name[:40]!r} ({count:,})" for name, count in extensions.most_common(8)]
    rest = len(extensions) - len(named)
    return ", ".join(named + [f"{rest} more"] * (rest > 0)) or "none"


def _coarse_first(count: int) -> list[int]:
    """Order 0 to count - 1 by reversed bits, so that every prefix is spread over the whole range."""
    bits = max(1, (count - 1).bit_length())
    turned = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [number for number in turned if number < count]


def key_pattern(key: str, *, words: bool = True) -> str:
    """Return the form of a key: digits as #, long runs by their length; without ``words`` letters as ``abc``."""

    def form(match: re.Match[str]) -> str:
        part = match[0]
        if part.isdecimal():
            long = f"#×{len(part)}" if words else "#…"
            return "#" * len(part) if len(part) <= _RUN and words else long
        if match["hex"]:
            return f"hex×{len(part)}"
        return part if words else "abc"

    return _KEY_PART.sub(form, key)
