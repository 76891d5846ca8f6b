"""The selection of a shard's samples: required members, filters, a fraction, one or all captions."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError
from clipkit.samples import (
    IMAGE_MEMBERS,
    Shard,
    ShardIndex,
    index_path,
    read_arrays,
    write_arrays,
)
from clipkit.samples.remote import ShardCache, ShardFile
from data.captions import (
    TEXT,
    CaptionRule,
    Fields,
    Filter,
    PairFields,
    find_value,
    hash_text,
    json_members,
    parse_number,
)
from data.scores.table import Scores

OUTSIDE = "outside data.fraction"  # why a sample is not used
_MAX_CAPTIONS = 2**16 - 1  # of one sample


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen:
    """The samples of a shard that are used.

    Attributes:
        rows: (M,) uint32, rows of the shard's index.
        captions: (M,) uint16, index of each sample's caption; None unless each caption is a sample.
        dropped: number of unused samples by reason.
        values: (M,) hash of each sample's value of ``Selection.balance``; None without it.
    """

    rows: npt.NDArray[np.uint32]
    captions: npt.NDArray[np.uint16] | None
    dropped: dict[str, int]
    values: npt.NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        return len(self.rows)


def _hash_to_fraction(shard: str, key: str, occurrence: int) -> float:
    sample = f"{shard}\0{key}\0{occurrence}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(sample, digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which samples are used.

    Attributes:
        need: members that a sample must have: "image", "caption" or both.
        filters: conditions that must all hold.
        captions: where captions are, and whether each is a sample.
        truncated: "error", or "use" to use the samples of the intact part of truncated shards.
        scores: the scores that filters refer to as ``score.COLUMN``.
        fraction: of the samples with the members in ``need``, those used, by a hash of shard and key: keys may
            repeat between shards. The shard counts by its name without the folder, so data may be moved.
        image: the member with the image; "" for the first one with the extension of an image.
        fields: further fields to read; they do not decide which samples are used.
        balance: the field or text member by which samples are counted, see ``Order``; "" for none.
    """

    need: tuple[str, ...] = ("image", "caption")
    filters: tuple[Filter, ...] = ()
    captions: CaptionRule = field(default_factory=CaptionRule)
    truncated: str = "error"
    scores: Scores | None = None
    fraction: float = 1.0
    image: str = ""
    fields: PairFields = field(default_factory=PairFields)
    balance: str = ""

    @property
    def reads_json(self) -> bool:
        """Whether the samples' json or scores decide which are used."""
        return bool(self.filters or self.balance) or (
            "caption" in self.need and self.captions.choice == "all"
        )

    @property
    def counts_stated(self) -> bool:
        """Whether the numbers in ``_stats.json`` are those of the used samples."""
        return not self.reads_json and self.fraction == 1

    @property
    def json_filters(self) -> tuple[Filter, ...]:
        """The filters on the json rather than on scores."""
        return tuple(
            filter_
            for filter_ in self.filters
            if self.scores is None or not filter_.name.startswith("score.")
        )

    @property
    def needs_content(self) -> bool:
        """Whether scores are not enough to decide which samples are used."""
        return bool(self.json_filters or self.balance) or self.captions.choice == "all"

    @cached_property
    def content(self) -> CaptionRule:
        """The rule that reads captions and the value to balance by."""
        return replace(self.captions, fields=(*self.captions.fields, *filter(None, [self.balance])))

    @property
    def unbalanced(self) -> tuple[str, ...]:
        """Why samples are not used that have no value to balance by."""
        return (f"without {self.balance}", f"with several values of {self.balance}") if self.balance else ()

    def members(self, names: Collection[str]) -> list[str]:
        """Return those of a sample's members that decide whether it is used."""
        filtered = json_members([filter_.name for filter_ in self.json_filters], names)
        return [*dict.fromkeys([*self.content.select_members(names), *filtered])]

    @property
    def identity(self) -> str:
        """16 hexadecimal digits that change when the selection from a complete shard may change."""
        identity = [sorted(self.need), sorted(map(str, self.filters)), self.captions.which()]
        # Earlier versions compared these integers as floats; do not use the selections that they stored.
        large = []
        for filter_ in self.filters:
            value = parse_number(filter_.value)
            if isinstance(value, int) and abs(value) >= 2**53:
                large.append(filter_)
        if large:
            identity.append(sorted(map(str, large)))
        if self.scores is not None:
            identity.append(self.scores.digest)
        if self.fraction < 1:
            identity.append([f"fraction {self.fraction} by shard and key"])  # earlier versions: by key
        if self.image:
            identity.append([f"image {self.image}"])
        if self.balance:
            identity.append([f"balance {self.balance}"])
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

    def choose(self, index: ShardIndex, content: Callable[[int], Fields], *, shard: str) -> Chosen:
        """Choose the samples of one shard.

        Args:
            index: index of the shard.
            shard: its ``ShardFile.name``.
            content: returns the fields of a row that filters and captions need; may raise DataError.
        """
        images = (self.image,) if self.image else IMAGE_MEMBERS
        captions = self.captions.select_members(index.names)
        if TEXT in self.captions.fields:  # in samples without a caption file
            captions.append("json")
        members = {"image": images, "caption": captions}
        usable = np.ones(len(index), dtype=np.bool_)
        dropped: Counter[str] = Counter()
        for member in self.need:
            present = index.has_any(members[member])
            dropped[f"without {member}"] += int((usable & ~present).sum())
            usable &= present
        rows = np.flatnonzero(usable).astype(np.uint32)
        if self.fraction < 1:
            drawn: list[bool] = []
            occurrences: Counter[str] = Counter()
            for row in rows.tolist():
                key = index.key(row)
                occurrences[key] += 1
                drawn.append(_hash_to_fraction(shard, key, occurrences[key]) < self.fraction)
            dropped[OUTSIDE] += drawn.count(False)
            rows = rows[np.array(drawn, dtype=np.bool_)]
        if not self.reads_json:
            return Chosen(rows=rows, captions=None, dropped=dict(+dropped))
        used_rows: list[int] = []
        caption_numbers: list[int] = []
        values: list[int] = []
        for row in rows.tolist():
            try:
                fields = content(row)
            except DataError:
                dropped["unreadable"] += 1
                continue
            reason = self.refuses(fields)
            if reason:
                dropped[reason] += 1
                continue
            numbers: Sequence[int] = (0,)
            if self.captions.choice == "all":
                count = sum(map(len, self.captions.captions_by_field(fields)))
                if not count:
                    dropped["without caption"] += 1
                numbers = range(min(count, _MAX_CAPTIONS))
            used_rows += [row] * len(numbers)
            caption_numbers += numbers
            if self.balance:
                value = str(find_value(fields, self.balance)).strip()  # equal for a number and its text
                values += [hash_text(value)] * len(numbers)
        separate = None
        if self.captions.choice == "all":
            separate = np.array(caption_numbers, dtype=np.uint16)
        return Chosen(
            rows=np.array(used_rows, dtype=np.uint32),
            captions=separate,
            dropped=dict(+dropped),
            values=np.array(values, dtype=np.uint64) if self.balance else None,
        )

    def refuses(self, fields: Fields) -> str:
        """Return why a sample with these fields fails the filters or cannot be balanced; empty if it passes."""
        for filter_ in self.filters:
            passes = filter_.passes(fields)
            if not passes:
                if passes is None:
                    return f"without {filter_.name}"
                return f"not {filter_}"
        if self.balance:
            value = find_value(fields, self.balance)
            without, several = self.unbalanced
            if isinstance(value, list | dict):
                return several
            if value is None or value != value or not str(value).strip():  # NaN is no value
                return without
        return ""


def _choice_path(file: ShardFile, index: ShardIndex, selection: Selection) -> Path:
    return index_path(file).with_suffix(f".{index.digest}.{selection.identity}")


def choose_unread(file: ShardFile, index: ShardIndex, selection: Selection) -> Chosen | None:
    """Return the used samples of a shard if its index decides, or if they are stored; None if it must be read."""
    if not selection.reads_json:
        return selection.choose(index, lambda row: {}, shard=file.name)
    with suppress(KeyError, TypeError):
        stored = read_arrays(_choice_path(file, index, selection))
        if stored is not None:
            about, arrays = stored
            return Chosen(
                rows=arrays["rows"],
                captions=arrays.get("captions"),
                dropped=about["dropped"],
                values=arrays.get("values"),
            )
    return None


class SelectedShard(Shard):
    """An open shard with a selection of its samples.

    Attributes:
        chosen: the used samples.
    """

    def __init__(self, file: ShardFile, selection: Selection, cache: ShardCache | None) -> None:
        super().__init__(file, cache, truncated=selection.truncated)
        self.chosen = self._choose(selection)
        self._rows = self.chosen.rows.data

    def __len__(self) -> int:
        return len(self.chosen)

    def row(self, index: int) -> int:
        """Return the index row of the ``index``-th used sample."""
        if index >= len(self._rows):
            raise DataError(f"its shard has only {len(self._rows)} samples, fewer than stated")
        row: int = self._rows[index]
        return row

    def caption_number(self, index: int) -> int:
        """Return the index of the caption of the ``index``-th used sample."""
        if self.chosen.captions is None:
            return 0
        return int(self.chosen.captions[index])

    def _choose(self, selection: Selection) -> Chosen:
        stored = choose_unread(self.file, self.index, selection)
        if stored is not None:
            return stored
        scores: list[dict[str, Any]] = []
        if selection.scores is not None:
            scores = selection.scores.rows(self.index, self.shown, selection.filters)

        def content(row: int) -> dict[str, Any]:
            fields = {}
            if selection.needs_content:
                members = self.read_present(row, selection.members(self.index.members(row)))
                fields = selection.content.parse(members)
            return {**fields, "score": scores[row]} if scores else fields

        chosen = selection.choose(self.index, content, shard=self.file.name)
        optional = {"captions": chosen.captions, "values": chosen.values}
        arrays: dict[str, npt.NDArray[Any]] = {"rows": chosen.rows}
        arrays |= {name: array for name, array in optional.items() if array is not None}
        with suppress(OSError):
            path = _choice_path(self.file, self.index, selection)
            write_arrays(path, {"dropped": chosen.dropped}, arrays)
        return chosen
