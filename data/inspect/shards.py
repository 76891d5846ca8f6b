"""Shards of an inspection: list them, open some, and summarize what is in them.

Shards that cannot be read are recorded, and the inspection continues.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError
from clipkit.files import CountProgress
from clipkit.samples import (
    IMAGE_MEMBERS,
    OpenShards,
    Shard,
    ShardIndex,
    TruncatedError,
    index_members,
    is_json,
    list_tar_content,
    stored_index,
)
from clipkit.samples.remote import ShardCache, ShardFile, read_range
from data.inspect.findings import Broken, Member, Names, ShardsFound
from data.selection import SelectedShard, Selection
from data.shards.manifest import Census, nothing_usable, suggest_setting
from data.sources import find_all_shards

FIRST_PLACES = 3  # examples of a finding
_BLOCK = 512
_BEGINNING = 8 << 20  # bytes read of a remote shard without an index

# scanned by default
_SHARDS = 64
_REMOTE_SHARDS = 32
_FIRST_SHARDS = 8  # one of these must contain a pair
_MOST_MEMBERS = 50
_MOST_LISTED = 50


@dataclass(kw_only=True, eq=False)
class ShardScan:
    """What one shard contains.

    Attributes:
        cause: why it cannot be read; empty if it can.
        samples: number of its samples, usable or not.
        census: counts of its members, and of unusable samples by reason.
        repeated: number of members that are not the first with their name in a sample, by name.
        rows: (M,) uint32, rows of usable samples in its index.
        beginning: the index, if only the first samples were read.
        bytes_seen: size of the part that was indexed.
    """

    file: ShardFile
    cause: str = ""
    truncated: bool = False
    samples: int = 0
    census: Census | None = None
    repeated: Mapping[str, int] = field(default_factory=dict)
    rows: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    beginning: ShardIndex | None = None
    bytes_seen: int = 0


class ShardSurvey(OpenShards[Shard]):
    """The usable samples of some of the shards, spread evenly; shards that cannot be read are recorded."""

    def __init__(
        self,
        sources: Sequence[str],
        *,
        split: str,
        selection: Selection,
        cache: ShardCache | None,
        shards: int = 0,
        quiet: bool = True,
    ) -> None:
        self.cache = cache
        self.selection = selection
        self._files = find_all_shards(sources, split=split)
        self.remote = any(file.is_remote for file in self._files)
        self.scans: list[ShardScan] = []
        count = min(shards or (_REMOTE_SHARDS if self.remote else _SHARDS), len(self._files))
        with CountProgress("scanning shards", total=count, shown=not quiet) as bar:
            for i in range(count):
                self.scans.append(self._scan(self._files[i * len(self._files) // count]))
                bar.show(i + 1, sum(bool(scan.cause) for scan in self.scans))
                if i + 1 == min(_FIRST_SHARDS, count) and not any(len(scan.rows) for scan in self.scans):
                    raise DataError(self._no_pair())
        super().__init__(len(scan.rows) for scan in self.scans)

    def _scan(self, file: ShardFile) -> ShardScan:
        scan = ShardScan(file=file)
        try:
            index = self._open_part(scan).index
        except DataError as error:
            scan.cause = str(error)
            scan.truncated = isinstance(error, TruncatedError)
            return scan
        chosen = self.selection.choose(index, lambda row: {}, shard=file.name)
        scan.rows = chosen.rows
        scan.samples = len(index)
        scan.repeated = index.repeated
        scan.census = Census(
            count=len(chosen), digest="", content="", dropped=chosen.dropped, members=index.names
        )
        ends = index.member_blocks.astype(np.int64) * _BLOCK + index.member_sizes
        scan.bytes_seen = file.size if scan.beginning is None else int(ends.max(initial=0))
        return scan

    def _open_part(self, scan: ShardScan) -> Shard:
        """Open a shard; of a large remote one without an index only the beginning, unless there is a cache."""
        file = scan.file
        truncated = self.selection.truncated
        is_large = file.is_remote and self.cache is None and file.size > _BEGINNING
        if is_large and scan.beginning is None and stored_index(file, truncated=truncated) is None:
            members = list_tar_content(file.shown, read_range(file, 0, _BEGINNING))
            scan.beginning = index_members(file.shown, members, truncated="use")
        return Shard(file, self.cache, truncated=truncated, index=scan.beginning)

    def _new_shard(self, index: int) -> Shard:
        return self._open_part(self.scans[index])

    def find(self, i: int) -> tuple[Shard, int]:
        """Return the open shard of a sample, and its row in the shard's index."""
        shard_index, position = self._position(i)
        return self.open_shard(shard_index), int(self.scans[shard_index].rows[position])

    def reopen_selected(self) -> Iterator[SelectedShard]:
        """Open the first readable shards as training does."""
        readable = [scan.file for scan in self.scans if not scan.cause]
        for file in readable[:_FIRST_SHARDS]:
            yield SelectedShard(file, self.selection, self.cache)

    def _no_pair(self) -> str:
        censuses = [scan.census for scan in self.scans if scan.census is not None]
        if censuses:
            file = next(scan.file for scan in self.scans if scan.census is not None)
            return nothing_usable(censuses, file, self.selection, self.cache)
        first = self.scans[0]
        more = ""
        if len(self.scans) > 1:
            more = f" (and {len(self.scans) - 1} more are unreadable)"
        hint = ""
        if first.truncated:
            hint = "; data.truncated=use trains on the intact part"
        return f"{first.cause}{more}{hint}"

    def summarize_shards(self) -> ShardsFound:
        """Summarize the shards; the number of samples in the others is extrapolated."""
        broken = [scan for scan in self.scans if scan.cause]
        beginnings = sum(scan.beginning is not None for scan in self.scans)
        total = sum(max(0, file.size) for file in self._files)
        samples = len(self)
        seen = sum(max(0, scan.bytes_seen) for scan in self.scans)
        is_complete = len(self.scans) == len(self._files) and not beginnings
        if not is_complete and seen:
            unreadable = sum(max(0, scan.file.size) for scan in broken)
            samples = round(samples * (total - unreadable) / seen)
        missing, missing_count = missing_numbers(file.url for file in self._files)
        causes = []
        for scan in broken[:_MOST_LISTED]:
            cause = scan.cause.removeprefix(f"shard {scan.file.shown}").lstrip(": ")
            causes.append(Broken(shard=scan.file.shown, cause=cause, truncated=scan.truncated))
        return ShardsFound(
            count=len(self._files),
            bytes=total,
            looked_into=len(self.scans),
            beginnings=beginnings,
            missing=tuple(missing[:_MOST_LISTED]),
            missing_count=missing_count,
            broken=tuple(causes),
            samples=samples,
            samples_known=is_complete,
        )

    def summarize_names(self) -> Names:
        """Summarize the samples and members of the inspected shards."""
        counts: Counter[str] = Counter()
        repeated: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        for scan in self.scans:
            repeated.update(scan.repeated)
            if scan.census is not None:
                counts.update(scan.census.members)
                dropped.update(scan.census.dropped)
        members = []
        for name, count in counts.most_common(_MOST_MEMBERS):
            used_as = self._find_use(name)
            kind = ""
            if not used_as:
                kind = suggest_setting(self._first_content(name))
            setting = f"data.{kind}={name}" if kind else ""
            members.append(
                Member(name=name, count=count, repeated=repeated[name], used_as=used_as, setting=setting)
            )
        return Names(
            groups=sum(scan.samples for scan in self.scans),
            members=tuple(members),
            without_picture=dropped["without image"],
            without_caption=dropped["without caption"],
        )

    def _find_use(self, member: str) -> str:
        if member == self.selection.image or (member in IMAGE_MEMBERS and not self.selection.image):
            return "image"
        if is_json(member):
            return "json"
        if member in self.selection.captions.members([member]):
            return "caption"
        return ""

    def _first_content(self, member: str) -> bytes:
        for index, scan in enumerate(self.scans):
            if scan.census is None or member not in scan.census.members:
                continue
            with suppress(DataError):
                shard = self.open_shard(index)
                row = int(np.flatnonzero(shard.index.has_any([member]))[0])
                (content,) = shard.read(row, [member])
                return content or b""
        return b""


# --------------------------------------------------------------------------------------------------------------
# Names of shards

_LAST_NUMBER = re.compile(r"[0-9]+(?=[^0-9/]*$)")  # of a file name
_MAX_DIGITS = 18
_SPARSE = 10  # with more missing shards per existing one, numbers are not meant to be consecutive


def missing_numbers(urls: Iterable[str]) -> tuple[list[str], int]:
    """Find gaps in the numbers of otherwise equal names; return them as ranges, and the number of missing names."""
    series: defaultdict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for url in urls:
        name = url.partition("?")[0]
        match = _LAST_NUMBER.search(name)
        if match is not None and len(match[0]) <= _MAX_DIGITS:
            series[name[: match.start()], name[match.end() :]][int(match[0])] = match[0]
    ranges: list[str] = []
    count = 0
    for numbers in series.values():
        gaps = []
        for low, high in pairwise(sorted(numbers)):
            if high - low > 1:
                gaps.append((low + 1, high - 1))
        missing = sum(last - first + 1 for first, last in gaps)
        if missing > _SPARSE * len(numbers):
            continue
        count += missing
        is_padded = any(text[0] == "0" for text in numbers.values())
        width = len(next(iter(numbers.values()))) if is_padded else 0
        for first, last in gaps:
            end = f"–{last:0{width}d}" if last > first else ""
            ranges.append(f"{first:0{width}d}{end}")
    return ranges, count
