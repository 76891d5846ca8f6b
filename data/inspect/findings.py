"""What an inspection of shards finds, as plain values that the table, the page and JSON are made of."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any

__all__ = [
    "BadCause", "Broken", "Captions", "Duplicates", "Findings", "Histogram", "Names", "Pictures", "Place",
    "Sampled", "ShardsFound", "SheetEntry", "Speed", "wilson",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a sample is."""

    shard: str
    key: str


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How many values lie in each bin; ``labels`` and ``counts`` are of one length."""

    title: str
    labels: tuple[str, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, title: str, values: Iterable[int], edges: Sequence[int]) -> "Histogram":
        """Bins that begin at each of the edges (rising) and end before the next; the last is open."""
        counts = Counter(sum(value >= edge for edge in edges[1:]) for value in values)
        labels = [f"{low}–{high - 1}" for low, high in pairwise(edges)]
        return cls(
            title=title,
            labels=(*labels, f"{edges[-1]} and more"),
            counts=tuple(counts[number] for number in range(len(edges))),
        )


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A shard that cannot be read."""

    shard: str
    cause: str


@dataclass(frozen=True, kw_only=True)
class ShardsFound:
    """The shards.

    Attributes:
        count: how many there are.
        bytes: of those whose size is known.
        looked_into: how many were opened.
        beginnings: of how many of these only the first samples were seen.
        ends_checked: of how many the first and last bytes were looked at.
        suspicious: how many of these do not begin or end as a tar does.
        missing: the numbers that lack between the first and the last one, as ranges.
        missing_count: how many shards these are; more than ``missing`` shows.
        refused: what a training would say of the list itself.
        broken: those among the opened ones that cannot be read.
        empty: shards without a sample that counts, among the opened sound ones.
        least, median, greatest: samples of a shard, among those that are known and sound.
        samples: that count, in all shards.
        samples_known: whether that was counted (or stated by ``_stats.json``) for every shard, not extrapolated.
        counted: shards whose samples are known.
    """

    count: int
    bytes: int
    looked_into: int
    beginnings: int
    ends_checked: int
    suspicious: int
    missing: tuple[str, ...]
    missing_count: int
    refused: tuple[str, ...]
    broken: tuple[Broken, ...]
    empty: tuple[str, ...]
    least: int
    median: float
    greatest: int
    samples: int
    samples_known: bool
    counted: int


@dataclass(frozen=True, kw_only=True)
class Names:
    """Keys and members of the shards looked into.

    Attributes:
        groups: samples, whether they count or not.
        patterns: forms of keys and how many of those looked at have each; # is a digit.
        extensions: members by extension, the most frequent first.
        upper_case: extensions written in capitals, of local shards.
        second_dot: members whose file name has a dot in the key, so that their extension is not known.
        hidden: members that belong to no sample, as they are hidden or have no extension.
        without_picture: samples that have a caption but no picture.
        without_caption: samples that have a picture but no caption.
        apart: keys that come back later in their shard: files of one sample do not lie together.
        apart_example: one of them.
        repeated: members whose name comes twice in a sample; the first counts.
        across: keys that are in more than one shard.
        across_example: one of them.
    """

    groups: int
    patterns: dict[str, int]
    extensions: dict[str, int]
    upper_case: dict[str, int]
    second_dot: int
    hidden: int
    without_picture: int
    without_caption: int
    apart: int
    apart_example: Place | None
    repeated: int
    across: int
    across_example: str


@dataclass(frozen=True, kw_only=True)
class BadCause:
    """Why samples cannot be used, how many, and the first of them."""

    cause: str
    count: int
    first: tuple[Place, ...]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The samples that were read and decoded, and which of them are bad.

    ``low`` and ``high`` bound the share of bad ones among all samples with 95% confidence (Wilson).
    """

    tried: int
    bad: int
    low: float
    high: float
    causes: tuple[BadCause, ...]

    @property
    def share(self) -> float:
        """Of the bad among the tried."""
        return self.bad / max(1, self.tried)


@dataclass(frozen=True, kw_only=True)
class Captions:
    """Captions of the samples read.

    Attributes:
        read: how many.
        tokens: their lengths with start and end, by CLIP's tokenizer.
        median: of these lengths.
        cut: how many are over the context length, so that their end is cut off.
        empty: samples without one, or with blanks only.
        longest: tokens of the longest, up to a limit.
        longest_at: where it is.
        repeated: captions that another sample has too, the first one of each left out.
        frequent: the most frequent ones, each at least twice.
    """

    read: int
    tokens: Histogram
    median: float
    cut: int
    empty: int
    longest: int
    longest_at: Place | None
    repeated: int
    frequent: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """Groups of pictures that are the same; ``shown`` has a few groups of a few places each."""

    groups: int
    pictures: int
    shown: tuple[tuple[Place, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """The pictures that could be decoded.

    Attributes:
        read: how many.
        formats: by what their bytes are.
        misnamed: ``extension: format`` of those whose extension says another one.
        width, height: in pixels.
        median_bytes: of their files.
        small: shorter side under the model's.
        widest, tallest: greatest ratio of width to height and of height to width.
        widest_at, tallest_at: where these are.
        marks: how many are grey, CMYK, transparent, of 16 bits, or carry a tag that says to turn them.
        same_bytes: exact duplicates.
        same_look: pictures that look the same but are other files.
    """

    read: int
    formats: dict[str, int]
    misnamed: dict[str, int]
    width: Histogram
    height: Histogram
    median_bytes: int
    small: int
    widest: float
    widest_at: Place | None
    tallest: float
    tallest_at: Place | None
    marks: dict[str, int]
    same_bytes: Duplicates
    same_look: Duplicates


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast one core makes training samples, and how many cores a GPU needs.

    Attributes:
        per_core: samples a second of a core's time: decoded, cropped, tokenized.
        make, text: milliseconds of a core's time for a picture, from file to crop, and for a caption.
        read: samples a second that one reader got from the store or disk.
        read_bytes: bytes a second of these.
        remote: whether that was from a store.
        rate: samples a second that one GPU takes, as assumed.
        workers: that it needs.
        cores: of this machine.
    """

    per_core: float
    make: float
    text: float
    read: float
    read_bytes: float
    remote: bool
    rate: float
    workers: int
    cores: int

    def workers_for(self, rate: float) -> int:
        """Workers that make so many samples a second; each reads, then decodes.

        Reading from a store is left out, as a training reads copies on its disk.
        """
        each = 1 / self.per_core + (0.0 if self.remote or not self.read else 1 / self.read)
        return max(1, math.ceil(rate * each))


@dataclass(frozen=True, kw_only=True, repr=False)
class SheetEntry:
    """A sample as the model sees it: the crop as a WebP file, the caption up to where it is cut, and the rest."""

    picture: bytes
    caption: str
    rest: str
    tokens: int
    place: Place


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All of it.

    Attributes:
        sources: as they were given.
        image_size, context_length: of the model, in pixels and tokens.
        max_bad: share of bad samples beyond which a training stops.
        sheet: samples as the model sees them.
        alike: groups of pictures that look the same, a few of each.
        seconds: that the inspection took.
    """

    sources: tuple[str, ...]
    image_size: int
    context_length: int
    max_bad: float
    shards: ShardsFound
    names: Names
    sampled: Sampled
    captions: Captions
    pictures: Pictures
    speed: Speed
    sheet: tuple[SheetEntry, ...]
    alike: tuple[tuple[SheetEntry, ...], ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it, without pictures."""
        told: dict[str, Any] = _plain(self)
        return told


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        named = ((one.name, getattr(value, one.name)) for one in fields(value))
        return {name: _plain(one) for name, one in named if not isinstance(one, bytes)}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return value


def wilson(part: int, whole: int) -> tuple[float, float]:
    """The 95% interval of a share by Wilson's score (1927); 0 to 1 of nothing."""
    if not whole:
        return 0.0, 1.0
    z = 1.959964
    share, spread = part / whole, z * z / whole
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / whole + spread / (4 * whole)) / (1 + spread)
    return (0.0 if not part else max(0.0, middle - half)), (1.0 if part == whole else min(1.0, middle + half))
