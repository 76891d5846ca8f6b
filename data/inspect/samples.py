"""Shards and samples of an inspection: read, decode and crop samples as training does, and summarize both.

Shards that cannot be read are recorded, and the inspection continues.
"""

import hashlib
import io
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from clipkit.errors import DataError
from clipkit.files import CountProgress, counted
from clipkit.model import END_OF_TEXT, MAX_CHARACTERS, open_core_pool, tokenize
from clipkit.samples import (
    IMAGE_MEMBERS,
    STRETCH,
    Bands,
    Decoding,
    OpenShards,
    PixelRange,
    Shard,
    ShardIndex,
    TraitCounts,
    Traits,
    TruncatedError,
    are_integers,
    decode_image,
    describe_depth,
    format_pixel_range,
    gray_values,
    image_format,
    index_members,
    is_deep,
    is_json,
    jpeg_size,
    list_tar_content,
    open_image,
    parse_fields,
    parse_pixel_range,
    pillow_errors,
    read_beyond_pillow,
    stored_index,
    suggest_pixel_range,
    value_extrema,
)
from clipkit.samples.remote import ShardCache, ShardFile, read_range
from data.augment import Augmentation, empty_batch, preload, random_of, training_pixels
from data.inspect.findings import (
    PERCENTILES,
    BadCause,
    Broken,
    ChannelValues,
    DeepImages,
    Example,
    Histogram,
    Images,
    Member,
    Names,
    Place,
    Sampled,
    ShardsFound,
)
from data.selection import SelectedShard, Selection
from data.shards.manifest import Census, nothing_usable, reject_unknown_captions, suggest_setting
from data.shards.samples import find_all_shards

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
        if member in self.selection.captions.select_members([member]):
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


_EMPTY_CAPTION = "empty caption"
_SEED = 0
_VALUES = 1000  # of each deep image
_READERS = 16  # threads, most of which wait for a store if samples are remote
_AHEAD = 256  # samples that the threads work on
_MOST_CAUSES = 20
_BAD_SHOWN = 16
_BAD_PER_CAUSE = 4
_PIXEL_EDGES = (0, 32, 64, 128, 224, 256, 384, 512, 768, 1024, 2048)
_GROUPS_SHOWN = 3
_SHOWN_PER_GROUP = 4
_SIDE = 224
_QUALITY = 80
# characters
_CAPTION_SHOWN = 500
_MOST_COUNTED = 5000
_MOST_TOKENS = 1024  # counted per caption


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeepValues:
    """The values of an image with more than 8 bits, or another number of channels than 1 or 3.

    Attributes:
        kind: such as "16-bit" or "32-bit float".
        extrema: smallest and largest value of each channel.
        sample: evenly spaced pixels, (N, C), for percentiles and means.
    """

    kind: str
    is_integer: bool
    extrema: tuple[tuple[float, float], ...]
    sample: npt.NDArray[Any]

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> "DeepValues":
        """Summarize the values of an image, (H, W, C)."""
        pixels = values.reshape(-1, values.shape[2])
        return cls(
            kind=describe_depth(values),
            is_integer=are_integers(values),
            extrema=tuple(value_extrema(channel) for channel in pixels.T),
            sample=pixels[:: max(1, len(pixels) // _VALUES)].copy(),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageInfo:
    """Properties of a decoded image: ``depth`` states bits and channels, ``deep`` is None for most."""

    format: str
    depth: str
    width: int
    height: int
    file_bytes: int
    traits: Traits
    digest: bytes
    deep: DeepValues | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class Sample:
    """A sample that was read and possibly decoded.

    Attributes:
        i: its number among the scanned samples.
        cause: why it is bad; empty for a good one.
        caption: "" if there is no usable one; None if it was not read.
        fields: the fields of its json; None if there is no readable one.
        image: None if it was not decoded.
    """

    i: int
    place: Place
    cause: str = ""
    caption: str | None = None
    fields: dict[str, Any] | None = None
    image: ImageInfo | None = None


def read_sample(survey: ShardSurvey, i: int, *, image: bool = False) -> tuple[Sample, bytes]:
    """Read a sample's caption and json, and with ``image`` its image file; errors are recorded in ``cause``."""
    selection = survey.selection
    rule = survey.selection.captions
    shard, row = survey.find(i)
    sample = Sample(i=i, place=Place(shard=shard.shown, key=shard.index.key(row)))
    names = rule.members_and_json(shard.index.members(row))
    try:
        contents = shard.read(row, [*names, selection.image] if image else names)
    except DataError as error:
        sample.cause = str(error)
        return sample, b""
    sample.caption = ""
    data = contents.pop() if image else None
    members = {name: content for name, content in zip(names, contents, strict=True) if content is not None}
    if any(map(is_json, members)):
        with suppress(DataError):
            sample.fields = parse_fields(members)
    try:
        needed = rule.select_members(members)
        caption = rule.caption(rule.parse({name: members[name] for name in needed}), 0, None)
        if caption is None:
            raise DataError(_EMPTY_CAPTION)
        if len(caption) > MAX_CHARACTERS:
            raise DataError(f"caption of {len(caption)} characters")
        sample.caption = caption
    except DataError as error:
        sample.cause = str(error)
    return sample, data or b""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleChecker:
    """Reads samples, decodes and crops their images as training does, and shows some of them."""

    survey: ShardSurvey
    image_size: int
    decoding: Decoding
    augmentation: Augmentation

    def read_samples(self, indices: Sequence[int]) -> Iterator[Sample]:
        """Read and decode samples in several threads; yield them in order."""
        preload(self.augmentation)
        with open_core_pool(_READERS) as pool:
            for start in range(0, len(indices), _AHEAD):
                yield from pool.map(self._check, indices[start : start + _AHEAD])

    def show(self, sample: Sample) -> Example:
        """Read a sample again to show it: the crop of a good one, otherwise the whole image."""
        again, data = read_sample(self.survey, sample.i, image=True)
        caption = again.caption or ""
        picture = b""
        tokens = 0
        with suppress(DataError):
            if sample.cause:
                picture = encode_webp(decode_image(data))
            else:
                pixels = self._crop(sample.i, data)[0]
                pixels = pixels[:3] if len(pixels) > 2 else pixels[:1].expand(3, -1, -1)
                picture = encode_webp(pixels.permute(1, 2, 0).contiguous().numpy())
                tokens = token_counts([caption[:_MOST_COUNTED]])[0]
        if len(caption) > _CAPTION_SHOWN:
            caption = f"{caption[:_CAPTION_SHOWN]}…"
        return Example(
            picture=picture, caption=caption, tokens=tokens, cause=sample.cause, place=sample.place
        )

    def _check(self, i: int) -> Sample:
        sample, data = read_sample(self.survey, i, image=True)
        if not sample.cause:
            try:
                sample.image = _describe(data, self._crop(i, data)[1], self.decoding)
            except DataError as error:
                sample.cause = str(error)
        return sample

    def _crop(self, i: int, data: bytes) -> tuple[Tensor, Traits]:
        crop = empty_batch(1, self.image_size, self.decoding.channels)[0]
        traits = training_pixels(
            data,
            image_size=self.image_size,
            augmentation=self.augmentation,
            random=random_of(_SEED, i),
            out=crop,
            decoding=self.decoding,
        )
        return crop, traits


# --------------------------------------------------------------------------------------------------------------
# Bad samples


def explain_bad_start(survey: ShardSurvey, samples: Sequence[Sample]) -> DataError:
    """Return the error for a source whose first samples are all bad; unknown caption fields raise their own."""
    if all(sample.cause == _EMPTY_CAPTION for sample in samples):
        reject_unknown_captions(survey.reopen_selected(), survey.selection.captions, survey.cache)
    causes = Counter(sample.cause for sample in samples).most_common(2)
    counts = "; ".join(f"{cause} ({count})" for cause, count in causes)
    return DataError(f"none of the first {len(samples)} samples can be used: {counts}")


def _group_by_cause(samples: Sequence[Sample]) -> list[list[Sample]]:
    groups: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.cause:
            groups[re.sub(r"[0-9]+", "#", sample.cause)].append(sample)
    return sorted(groups.values(), key=len, reverse=True)


def summarize_bad(samples: Sequence[Sample]) -> Sampled:
    """Count the bad samples by cause."""
    groups = _group_by_cause(samples)
    causes = []
    for group in groups[:_MOST_CAUSES]:
        first = tuple(sample.place for sample in group[:FIRST_PLACES])
        causes.append(BadCause(cause=group[0].cause, count=len(group), first=first))
    return Sampled(tried=len(samples), bad=sum(map(len, groups)), causes=tuple(causes))


def pick_bad(samples: Sequence[Sample]) -> list[Sample]:
    """Return a few bad samples of each cause."""
    picked: list[Sample] = []
    for group in _group_by_cause(samples):
        picked += group[:_BAD_PER_CAUSE]
    return picked[:_BAD_SHOWN]


# --------------------------------------------------------------------------------------------------------------
# Images


def image_digest(data: bytes) -> bytes:
    """Return a digest that is equal for identical files."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _describe(data: bytes, traits: Traits, decoding: Decoding) -> ImageInfo:
    bits = "16-bit" if traits.deep_colors else "8-bit"
    channels = 3
    bands = read_beyond_pillow(data, decoding)
    values = None if bands is None else bands.values
    if values is not None:
        height, width = values.shape[:2]
    else:
        try:
            with pillow_errors(), open_image(data) as image:
                (width, height) = image.size
                channels = len(image.getbands())
                if is_deep(image):
                    image.load()
                    values = gray_values(image)[..., None]
        except DataError:  # simplejpeg reads some JPEGs that Pillow does not
            height, width = jpeg_size(data) or (0, 0)
    deep = None
    if values is not None:
        bits = describe_depth(values)
        channels = values.shape[2]
        if values.dtype != np.uint8 or channels not in (1, 3):
            deep = DeepValues.of(values)
    return ImageInfo(
        format=image_format(data) or "unknown",
        depth=f"{bits}, {counted(channels, 'channel')}",
        width=width,
        height=height,
        file_bytes=len(data),
        traits=traits,
        digest=image_digest(data),
        deep=deep,
    )


def summarize_deep(images: Sequence[DeepValues], pixel_range: PixelRange = STRETCH) -> DeepImages:
    """Summarize images with the same number of channels, and suggest a range unless ``pixel_range`` is one."""
    pixels = np.concatenate([image.sample.astype(np.float64) for image in images])  # (N, C)
    is_integer = all(image.is_integer for image in images)
    channels = []
    ranges = []
    for i, values in enumerate(pixels.T):
        low = min(image.extrema[i][0] for image in images)
        high = max(image.extrema[i][1] for image in images)
        finite = values[np.isfinite(values)]
        percentiles = np.percentile(finite, PERCENTILES).tolist() if len(finite) else [low, low, low]
        channels.append(ChannelValues(low=low, high=high, percentiles=tuple(percentiles)))
        ranges.append(suggest_pixel_range(low, high, is_integer=is_integer))
    kinds = Counter(image.kind for image in images)
    settings = [] if len(channels) in (1, 3) else [f"pixels.channels={len(channels)}"]
    if pixel_range == STRETCH:
        pixel_range = parse_pixel_range(ranges[0] if len({*ranges}) == 1 else ";".join(ranges))
    if kinds.keys() != {"8-bit"}:
        text = format_pixel_range(pixel_range)
        settings.append(f"pixels.range={shlex.quote(text)}")
    if len(channels) not in (1, 3):
        samples = [
            Bands(image.sample[None]).to_8_bits(pixel_range, channels=len(channels)) for image in images
        ]
        levels = np.concatenate([sample[0] for sample, _ in samples]) / 255  # (N, C)
        for name, values in (("mean", levels.mean(axis=0)), ("std", levels.std(axis=0).clip(min=0.001))):
            settings.append(f"pixels.{name}='[{','.join(f'{value:.4f}' for value in values)}]'")
    return DeepImages(
        count=len(images),
        kinds=dict(kinds.most_common()),
        channels=tuple(channels),
        settings=" ".join(settings),
    )


def group_equal(digests: Sequence[bytes]) -> list[list[int]]:
    """Return groups of indices with equal digests, largest first."""
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for i, digest in enumerate(digests):
        groups[digest].append(i)
    return sorted((group for group in groups.values() if len(group) > 1), key=len, reverse=True)


def summarize_images(samples: Sequence[Sample], image_size: int, pixel_range: PixelRange) -> Images:
    """Summarize decoded images."""
    images = [sample.image for sample in samples if sample.image is not None]
    places = [sample.place for sample in samples if sample.image is not None]
    traits = TraitCounts()
    traits.add(*(image.traits for image in images))
    traits_at: dict[str, tuple[Place, ...]] = {}
    for name in Traits._fields:
        having = []
        for image, place in zip(images, places, strict=True):
            if getattr(image.traits, name):
                having.append(place)
        traits_at[name] = tuple(having[:FIRST_PLACES])
    # by number of channels
    deep: defaultdict[int, list[DeepValues]] = defaultdict(list)
    for image in images:
        if image.deep is not None:
            deep[len(image.deep.extrema)].append(image.deep)
    equal = group_equal([image.digest for image in images])
    groups = []
    for group in equal[:_GROUPS_SHOWN]:
        first = group[:_SHOWN_PER_GROUP]
        groups.append(tuple(places[i] for i in first))
    return Images(
        read=len(images),
        formats=dict(Counter(image.format for image in images).most_common()),
        depths=dict(Counter(image.depth for image in images).most_common()),
        width=Histogram.of("width in pixels", (image.width for image in images), _PIXEL_EDGES),
        height=Histogram.of("height in pixels", (image.height for image in images), _PIXEL_EDGES),
        median_bytes=int(np.median([image.file_bytes for image in images])),
        small=sum(min(image.width, image.height) < image_size for image in images),
        traits=traits,
        traits_at=traits_at,
        deep=tuple(summarize_deep(deep[channels], pixel_range) for channels in sorted(deep)),
        same=sum(map(len, equal)),
        same_groups=tuple(groups),
    )


def token_counts(texts: list[str]) -> list[int]:
    """Count the tokens of each text with start and end, up to a limit."""
    ids = tokenize(texts, _MOST_TOKENS, trim=True).numpy()
    # the last end of text counts: a text may contain "<end_of_text>", and 0 is "!" as well as padding
    counts: list[int] = (ids.shape[1] - np.argmax(ids[:, ::-1] == END_OF_TEXT, axis=1)).tolist()
    return counts


def encode_webp(pixels: npt.NDArray[np.uint8], side: int = _SIDE) -> bytes:
    """Encode an image, (H, W, 3), whose longer side is at most ``side`` pixels."""
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.save(file, "WEBP", quality=_QUALITY)
    return file.getvalue()
