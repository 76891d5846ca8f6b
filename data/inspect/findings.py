"""What an inspection of shards finds, as plain values that the table, the page and JSON are made of."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any

from clipkit.files.terminal import printable
from clipkit.files.traits import Decoding

__all__ = [
    "BadCause",
    "Broken",
    "Captions",
    "Duplicates",
    "Field",
    "Fields",
    "Filtered",
    "Findings",
    "HeldOut",
    "Histogram",
    "Names",
    "Pictures",
    "Place",
    "Sampled",
    "ShardsFound",
    "SheetEntry",
    "Speed",
    "Stated",
    "Thumbnail",
    "WithTrait",
    "about",
    "name_of",
    "of_all",
    "percent",
    "place_of",
    "repeated_of",
    "size_of",
    "wilson",
]


# --------------------------------------------------------------------------------------------------------------
# What an inspection finds of the shards themselves and of how their members are named, as plain values.


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a sample is."""

    shard: str
    key: str


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A shard that cannot be read; ``truncated`` says whether a part of it is intact."""

    shard: str
    cause: str
    truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What ``_stats.json`` files say of the shards looked into, against what is there.

    Attributes:
        shards: how many have such a file.
        stated: samples that these say.
        found: samples with a picture that these shards hold.
        differ: the first shards where that is not the same, with both numbers.
    """

    shards: int
    stated: int
    found: int
    differ: tuple[tuple[str, int, int], ...]


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
        stated: what the ``_stats.json`` files say.
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
        repeated: members whose sample already has one of that kind ("picture", or the extension), by kind; training
            uses the first one.
        repeated_at: some of these samples.
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
    repeated: dict[str, int]
    repeated_at: tuple[Place, ...]
    across: int
    across_example: str


# --------------------------------------------------------------------------------------------------------------


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
        not_utf8: samples whose caption is not UTF-8, which a training replaces.
        not_utf8_at: the first of them.
        longest: tokens of the longest, up to a limit.
        longest_at: where it is.
        repeated: captions that another sample has too, the first one of each left out.
        frequent: the most frequent ones, each at least twice.
        unknown: what is said of fields that are to hold captions and that no sample read has.
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
    """A field of the samples' json.

    Attributes:
        name: as filters and ``data.captions`` name it.
        kind: "number", "text", "true or false", "list", or several of these.
        count: samples that have it.
        values: its range, or its most frequent values, or some of them, in words.
    """

    name: str
    kind: str
    count: int
    values: str


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The json of the samples read.

    Attributes:
        read: samples.
        with_json: those of them that have one that can be read.
        fields: the most frequent ones.
        more: how many others there are.
    """

    read: int
    with_json: int
    fields: tuple[Field, ...]
    more: int


@dataclass(frozen=True, kw_only=True)
class Filtered:
    """What filters leave of the samples read.

    Attributes:
        filters: in the form in which ``data.filters`` takes them.
        unknown: for each field that no sample read has, what to say of it.
        read, passed: samples.
        left_out: the others by reason.
    """

    filters: tuple[str, ...]
    unknown: tuple[str, ...]
    read: int
    passed: int
    left_out: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """Groups of pictures that are the same; ``shown`` has a few groups of a few places each."""

    groups: int
    pictures: int
    shown: tuple[tuple[Place, ...], ...]


@dataclass(frozen=True, kw_only=True)
class WithTrait:
    """How many images have a trait, and the places of the first of them."""

    count: int
    first: tuple[Place, ...]


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
        marks: how many are grey, CMYK or of 16 bits.
        transparent: those with a pixel that is less than opaque.
        rotated: those with an EXIF orientation other than upright.
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
    transparent: WithTrait
    rotated: WithTrait
    same_bytes: Duplicates
    same_look: Duplicates


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Pictures of the split that a model is scored on, beside those that it is trained on.

    Attributes:
        read: how many of the split test.
        trained_on: how many of them are, to the byte, among the pictures of the split train that were read.
    """

    read: int
    trained_on: int


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


@dataclass(frozen=True, kw_only=True, repr=False)
class Thumbnail:
    """A sample's whole picture, small, to look at.

    Attributes:
        picture: a WebP file; empty where nothing of it can be decoded.
        beginning: the first bytes of the file as text, where nothing can be decoded.
        size: bytes of the file.
        caption: beginning of it.
        cause: why the sample is bad; empty if it is not.
        place: where it is.
    """

    picture: bytes
    beginning: str
    size: int
    caption: str
    cause: str
    place: Place


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All of it.

    Attributes:
        sources: as they were given.
        image_size, context_length: of the model, in pixels and tokens.
        decoding: what was done about transparency and orientation.
        max_bad: share of bad samples beyond which a training stops.
        batch_size: pairs of a step over all GPUs, as assumed.
        filtered: None where no filters were given.
        held_out: None where the sources have no split test on a disk.
        sheet: samples as the model sees them.
        bad_shown: some bad samples.
        same, alike: groups of pictures that are the same file or look the same, a few of each.
        seconds: that the inspection took.
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
    pictures: Pictures
    held_out: HeldOut | None
    speed: Speed
    sheet: tuple[SheetEntry, ...]
    bad_shown: tuple[Thumbnail, ...]
    same: tuple[tuple[Thumbnail, ...], ...]
    alike: tuple[tuple[Thumbnail, ...], ...]
    seconds: float

    @property
    def all_decoded(self) -> bool:
        """Whether every sample was tried."""
        return self.shards.samples_known and self.sampled.tried >= self.shards.samples

    @property
    def all_read(self) -> bool:
        """Whether every sample's caption and json were read."""
        return self.shards.samples_known and self.fields.read >= self.shards.samples

    @property
    def left(self) -> int:
        """Samples that filters leave of all, estimated where not all were read."""
        if self.filtered is None:
            return self.shards.samples
        return round(self.shards.samples * self.filtered.passed / max(1, self.filtered.read))

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


# --------------------------------------------------------------------------------------------------------------
# How numbers, names and places are written in a report; text from data cannot do more than be read.


def size_of(count: float) -> str:
    """Bytes in the unit that fits."""
    for unit, worth in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= worth:
            return f"{count / worth:.3g} {unit}"
    return f"{count:.0f} bytes"


def percent(part: float, whole: float) -> str:
    share = 100 * part / max(1, whole)
    return f"{share:.2g}%" if 0 < share < 1 else f"{share:.1f}%" if 0 < share < 100 else f"{share:.0f}%"


def of_all(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({percent(part, whole)})"


def name_of(url: str) -> str:
    return printable(url.rpartition("/")[2] or url, 60)


def place_of(place: Place | None) -> str:
    return f"{name_of(place.shard)}: {printable(place.key, 60)}" if place else ""


def repeated_of(names: Names) -> str:
    """How many files there are beyond the first of their kind in a sample, with examples."""
    counts = ", ".join(
        f"{count:,} more {printable(kind, 30)}" for kind, count in list(names.repeated.items())[:5]
    )
    places = "; ".join(map(place_of, names.repeated_at))
    return f"{counts} (such as {places})" if places else counts


def about(count: float) -> str:
    """A count that was estimated, with the digits that it deserves."""
    return f"about {float(f'{count:.3g}'):,.0f}"
