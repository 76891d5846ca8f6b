"""Results of an inspection of shards: plain values for the terminal, the HTML page and JSON."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from clipkit.samples import Decoding

__all__ = [
    "BadCause", "Broken", "Captions", "Duplicates", "Field", "Fields", "Filtered", "Findings", "HeldOut",
    "Histogram", "Images", "Names", "Place", "Sampled", "ShardsFound", "SheetEntry", "Speed", "Stated",
    "Thumbnail", "WithTrait", "wilson",
]  # fmt: skip


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
class Stated:
    """Sample counts in ``_stats.json`` files, compared with the inspected shards.

    Attributes:
        shards: inspected shards with such a file.
        stated: samples according to these files.
        found: samples with an image in these shards.
        differ: the first shards for which the two differ, with both counts.
    """

    shards: int
    stated: int
    found: int
    differ: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class ShardsFound:
    """The shards.

    Attributes:
        count: number of shards.
        bytes: total size of those with a known size.
        looked_into: inspected shards.
        beginnings: inspected shards of which only the first samples were read.
        ends_checked: shards whose first and last bytes were checked.
        suspicious: checked shards that do not begin or end like a tar.
        missing: gaps in the shard numbers, as ranges.
        missing_count: number of missing shards; may exceed what ``missing`` lists.
        refused: errors that training would raise for this list of shards.
        broken: inspected shards that are unreadable.
        empty: readable inspected shards without a usable sample.
        least, median, greatest: samples per shard, over readable shards with a known count.
        samples: usable samples of all shards.
        samples_known: whether ``samples`` is exact rather than extrapolated.
        counted: shards with a known number of samples.
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
    stated: Stated


@dataclass(frozen=True, kw_only=True)
class Names:
    """Keys and member names in the inspected shards.

    Attributes:
        groups: samples, usable or not.
        patterns: number of keys of each form; # is a digit.
        extensions: number of members per extension, most frequent first.
        upper_case: the same for uppercase extensions, in local shards.
        second_dot: members with a dot in the key, which hides their extension.
        hidden: members that belong to no sample: hidden files and files without an extension.
        without_picture: samples with a caption but no image.
        without_caption: samples with an image but no caption.
        apart: keys that occur again later in their shard.
        repeated: surplus members by kind ("picture", or the extension); training uses the first member
            of each kind.
        repeated_at: some of these samples.
        across: keys in more than one shard.
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
    repeated: dict[str, int]
    repeated_at: tuple[Place, ...]
    across: int
    across_example: str


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
            counts=tuple(counts[number] for number in range(len(edges))),
        )


@dataclass(frozen=True, kw_only=True)
class BadCause:
    """A cause of bad samples, their number, and the first of them."""

    cause: str
    count: int
    first: tuple[Place, ...]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The decoded samples; ``low`` and ``high`` are the 95% confidence interval of the fraction of bad ones."""

    tried: int
    bad: int
    low: float
    high: float
    causes: tuple[BadCause, ...]

    @property
    def bad_fraction(self) -> float:
        """Bad samples as a fraction of those decoded."""
        return self.bad / max(1, self.tried)


@dataclass(frozen=True, kw_only=True)
class Captions:
    """Captions of the samples read.

    Attributes:
        read: valid captions.
        tokens: their lengths in CLIP tokens, including start and end.
        cut: captions longer than the context length.
        empty: samples without a caption, or with whitespace only.
        not_utf8: samples whose caption is not UTF-8; training replaces them.
        longest: tokens of the longest caption, up to a limit.
        repeated: captions that occurred before.
        frequent: the most frequent repeated captions.
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
    longest_at: Place | None
    repeated: int
    frequent: tuple[tuple[str, int], ...]
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Field:
    """A json field: the types of its values, the number of samples that have it, and a summary of the values."""

    name: str
    kind: str
    count: int
    values: str


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The json of the samples read: the most frequent fields, and the number of other fields."""

    read: int
    with_json: int
    fields: tuple[Field, ...]
    more: int


@dataclass(frozen=True, kw_only=True)
class Filtered:
    """How many of the samples read pass the filters.

    Attributes:
        filters: in the syntax of ``data.filters``.
        unknown: messages about fields that no sample has.
        left_out: removed samples by reason.
    """

    filters: tuple[str, ...]
    unknown: tuple[str, ...]
    read: int
    passed: int
    left_out: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """Groups of equal images, and the places of a few of them."""

    groups: int
    pictures: int
    shown: tuple[tuple[Place, ...], ...]


@dataclass(frozen=True, kw_only=True)
class WithTrait:
    """Number of images with a trait, and the first of them."""

    count: int
    first: tuple[Place, ...]


PERCENTILES = (1, 50, 99)


@dataclass(frozen=True, kw_only=True)
class DeepImages:
    """Grayscale images with more than 8 bits.

    Attributes:
        count: number of images.
        kinds: number of images per type of values, such as "16-bit".
        low, high: smallest and largest value.
        percentiles: ``PERCENTILES`` of a sample of the values.
        pixel_range: suggestion for ``data.pixel_range``.
    """

    count: int
    kinds: dict[str, int]
    low: float
    high: float
    percentiles: tuple[float, ...]
    pixel_range: str


@dataclass(frozen=True, kw_only=True)
class Images:
    """The decoded images.

    Attributes:
        formats: number of images per format, by content.
        misnamed: number of images per mismatch of extension and format.
        small: images with a shorter side below the model's image size.
        widest, tallest: largest width / height and height / width.
        marks: number of grayscale, CMYK and 16-bit images.
        deep: None if no image has more than 8 bits of gray.
        same_bytes: identical files.
        same_look: different files that look the same.
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
    transparent: WithTrait
    rotated: WithTrait
    clamped: WithTrait
    deep_colors: WithTrait
    deep: DeepImages | None
    same_bytes: Duplicates
    same_look: Duplicates


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Images of the test split that were read, and how many of them are also in the training split."""

    read: int
    trained_on: int


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Preprocessing speed of one core, and the workers that a GPU needs.

    Attributes:
        per_core: samples per second of CPU time, decoded, cropped and tokenized.
        make, text: milliseconds of CPU time per image and per caption.
        read, read_bytes: samples and bytes per second of a single reader.
        rate: assumed samples per second of one GPU.
        cores: number of CPU cores of this machine.
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
        """Return the number of workers needed to prepare ``rate`` samples per second.

        Reading from a remote store is not included, because training reads cached copies.
        """
        each = 1 / self.per_core + (0.0 if self.remote or not self.read else 1 / self.read)
        return max(1, math.ceil(rate * each))


@dataclass(frozen=True, kw_only=True, repr=False)
class SheetEntry:
    """A sample as the model sees it: the crop as WebP, the caption up to the context length, and the rest."""

    picture: bytes
    caption: str
    rest: str
    tokens: int
    place: Place


@dataclass(frozen=True, kw_only=True, repr=False)
class Thumbnail:
    """A sample's whole image.

    Attributes:
        picture: WebP; empty if nothing can be decoded.
        beginning: the first bytes as text if nothing can be decoded.
        size: bytes of the original file.
        caption: beginning of the caption.
        cause: why the sample is bad; empty for a good one.
    """

    picture: bytes
    beginning: str
    size: int
    caption: str
    cause: str
    place: Place


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of an inspection.

    Attributes:
        decoding: how transparency and orientation were handled.
        max_bad: fraction of bad samples above which training stops.
        batch_size: assumed pairs per step over all GPUs.
        filtered: None without filters.
        held_out: None if the sources have no local test split.
        same, alike: a few groups of identical files and of similar images.
        seconds: duration of the inspection.
    """

    sources: tuple[str, ...]
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
    speed: Speed
    sheet: tuple[SheetEntry, ...]
    bad_shown: tuple[Thumbnail, ...]
    same: tuple[tuple[Thumbnail, ...], ...]
    alike: tuple[tuple[Thumbnail, ...], ...]
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


def wilson(part: int, whole: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a fraction (Wilson 1927); (0, 1) if ``whole`` is 0."""
    if not whole:
        return 0.0, 1.0
    z = 1.959964
    fraction, spread = part / whole, z * z / whole
    middle = (fraction + spread / 2) / (1 + spread)
    half = z * math.sqrt(fraction * (1 - fraction) / whole + spread / (4 * whole)) / (1 + spread)
    return (0.0 if not part else max(0.0, middle - half)), (1.0 if part == whole else min(1.0, middle + half))
