"""Results of an inspection of shards: plain values for the terminal, the HTML page and JSON."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from clipkit.samples import Decoding, TraitCounts

# of the values of deep images
PERCENTILES = (1, 50, 99)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The location of a sample."""

    shard: str
    key: str


@dataclass(frozen=True, kw_only=True)
class Broken:
    """An unreadable shard; the beginning of a truncated one is intact."""

    shard: str
    cause: str
    truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class ShardsFound:
    """The shards.

    Attributes:
        beginnings: inspected shards of which only the first samples were read.
        missing: gaps in the shard numbers, as ranges.
        missing_count: number of missing shards; may exceed what ``missing`` lists.
        samples: usable samples of all shards.
        samples_known: whether ``samples`` is exact rather than extrapolated.
    """

    count: int
    bytes: int
    looked_into: int
    beginnings: int
    missing: tuple[str, ...]
    missing_count: int
    broken: tuple[Broken, ...]
    samples: int
    samples_known: bool


@dataclass(frozen=True, kw_only=True)
class Member:
    """Members with one name.

    Attributes:
        count: their number, repeated ones included.
        repeated: how many of them are not the first with this name in their sample; training ignores these.
        used_as: "image", "caption" or "json"; "" if training ignores them.
        setting: the setting with which training would use them; "" without one.
    """

    name: str
    count: int
    repeated: int
    used_as: str
    setting: str


@dataclass(frozen=True, kw_only=True)
class Names:
    """Samples and members in the inspected shards.

    Attributes:
        without_picture: samples with other members but no image.
        without_caption: samples with an image but no caption.
    """

    groups: int
    members: tuple[Member, ...]
    without_picture: int
    without_caption: int


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Number of values per bin."""

    title: str
    labels: tuple[str, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, title: str, values: Iterable[int], edges: Sequence[int]) -> "Histogram":
        """Count values in bins that begin at the given ascending edges; the last bin is open."""
        counts = Counter(sum(value >= edge for edge in edges[1:]) for value in values)
        labels = [f"{low}–{high - 1}" for low, high in pairwise(edges)]
        return cls(
            title=title,
            labels=(*labels, f"{edges[-1]} and more"),
            counts=tuple(counts[i] for i in range(len(edges))),
        )

    @property
    def bins(self) -> list[tuple[str, int]]:
        """Label and count of the bins from the first to the last that is not empty."""
        filled = [i for i, count in enumerate(self.counts) if count]
        if not filled:
            return []
        return [(self.labels[i], self.counts[i]) for i in range(filled[0], filled[-1] + 1)]


@dataclass(frozen=True, kw_only=True)
class BadCause:
    """A cause of bad samples, their number, and the first of them."""

    cause: str
    count: int
    first: tuple[Place, ...]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The decoded samples."""

    tried: int
    bad: int
    causes: tuple[BadCause, ...]


@dataclass(frozen=True, kw_only=True)
class Captions:
    """Captions of the samples read.

    Attributes:
        tokens: their lengths in CLIP tokens, including start and end.
        empty: samples without a caption, or with whitespace only.
        not_utf8: samples whose caption is not UTF-8; training replaces them.
        longest: tokens of the longest caption, up to a limit.
        repeated: captions that occurred before.
        unknown: messages about caption fields that no sample has.
    """

    read: int
    tokens: Histogram
    median: float
    cut: int
    empty: int
    not_utf8: int
    not_utf8_at: tuple[Place, ...]
    longest: int
    repeated: int
    frequent: tuple[tuple[str, int], ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Field:
    """A json field: the types of its values, the number of samples that have it, and a summary of the values."""

    name: str
    kind: str
    count: int
    values: str


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The json of the samples read, and the most frequent fields."""

    read: int
    with_json: int
    fields: tuple[Field, ...]


@dataclass(frozen=True, kw_only=True)
class Filtered:
    """How many of the samples read pass the filters.

    Attributes:
        unknown: messages about fields that no sample has.
        left_out: removed samples by reason.
    """

    unknown: tuple[str, ...]
    read: int
    passed: int
    left_out: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class ChannelValues:
    """The smallest and the largest value of a channel, and ``PERCENTILES`` of a sample of the values."""

    low: float
    high: float
    percentiles: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class DeepImages:
    """Images whose depth or channels need settings, with the same number of channels.

    Attributes:
        kinds: number of images per type of values, such as "16-bit".
        channels: the values of each channel.
        settings: suggestion for ``pixels.channels``, ``pixels.range``, ``pixels.mean`` and ``pixels.std``.
    """

    count: int
    kinds: dict[str, int]
    channels: tuple[ChannelValues, ...]
    settings: str


@dataclass(frozen=True, kw_only=True)
class Images:
    """The decoded images.

    Attributes:
        small: images with a shorter side below the model's image size.
        depths: number of images by depth and number of channels, such as "8-bit, 3 channels".
        traits_at: the first images with each trait.
        deep: the images that need a pixel range, by number of channels.
        same: files that are identical to others.
    """

    read: int
    formats: dict[str, int]
    width: Histogram
    height: Histogram
    median_bytes: int
    small: int
    depths: dict[str, int]
    traits: TraitCounts
    traits_at: dict[str, tuple[Place, ...]]
    deep: tuple[DeepImages, ...]
    same: int
    same_groups: tuple[tuple[Place, ...], ...]


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Images of the test split that were read, and how many of them are also in the training split."""

    read: int
    trained_on: int


@dataclass(frozen=True, kw_only=True, repr=False)
class Example:
    """A sample on the page.

    Attributes:
        picture: the image as WebP; empty if it cannot be decoded.
        tokens: of the caption; 0 for a bad sample.
        cause: why the sample is bad; empty for a good one.
    """

    picture: bytes
    caption: str
    tokens: int
    cause: str
    place: Place


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of an inspection.

    Attributes:
        split: which files of dataset folders were read, besides those that state no split.
        decoding: how transparency and orientation were handled.
        max_bad: fraction of bad samples above which training stops.
        batch_size: assumed pairs per step over all GPUs.
        filtered: None without filters.
        held_out: None if the sources have no local test split.
        sheet: crops of evenly spread samples, as the model sees them.
        bad_shown: whole images of some bad samples.
    """

    sources: tuple[str, ...]
    split: str
    image_size: int
    context_length: int
    decoding: Decoding
    max_bad: float
    batch_size: int
    shards: ShardsFound
    names: Names
    sampled: Sampled
    captions: Captions
    fields: Fields
    filtered: Filtered | None
    pictures: Images
    held_out: HeldOut | None
    sheet: tuple[Example, ...]
    bad_shown: tuple[Example, ...]
    seconds: float

    @property
    def all_decoded(self) -> bool:
        """Whether every sample was decoded."""
        return self.shards.samples_known and self.sampled.tried >= self.shards.samples

    @property
    def all_read(self) -> bool:
        """Whether every sample's caption and json were read."""
        return self.shards.samples_known and self.fields.read >= self.shards.samples

    @property
    def left(self) -> int:
        """Samples that pass the filters, extrapolated if not all were read."""
        if self.filtered is None:
            return self.shards.samples
        return round(self.shards.samples * self.filtered.passed / max(1, self.filtered.read))

    def to_dict(self) -> dict[str, Any]:
        """Return the findings without images, for JSON."""
        return asdict(self, dict_factory=_without_bytes)


def _without_bytes(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if not isinstance(value, bytes)}
