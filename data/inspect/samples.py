"""Samples of an inspection: read, decode and crop them as training does, and summarize their images."""

import hashlib
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from clipkit.errors import DataError
from clipkit.files import CountProgress, counted
from clipkit.model import END_OF_TEXT, MAX_CHARACTERS, one_core_each, tokenize
from clipkit.samples import (
    Decoding,
    TraitCounts,
    Traits,
    are_integers,
    decode_image,
    describe_depth,
    gray_values,
    image_format,
    is_deep,
    is_json,
    jpeg_size,
    open_image,
    parse_fields,
    pillow_errors,
    read_values,
    suggest_pixel_range,
    value_extrema,
)
from data.augment import Augmentation, empty_batch, preload, random_of, training_pixels
from data.inspect.findings import (
    PERCENTILES,
    BadCause,
    ChannelValues,
    DeepImages,
    Example,
    Histogram,
    Images,
    Place,
    Sampled,
)
from data.inspect.shards import FIRST_PLACES, ShardSurvey
from data.shards.manifest import reject_unknown_captions

__all__ = [
    "DeepValues", "ImageInfo", "Sample", "SampleChecker", "bad_example", "encode_webp", "group_equal",
    "image_digest",
    "read_sample", "sheet_entry", "summarize_deep", "summarize_images", "token_counts",
]  # fmt: skip

_EMPTY_CAPTION = "empty caption"
_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeepValues:
    """The values of an image with more than 8 bits, or another number of channels than 1 or 3.

    Attributes:
        kind: such as "16-bit" or "32-bit float".
        extrema: smallest and largest value of each channel.
        sample: evenly spaced pixels, (N, C), for percentiles.
    """

    kind: str
    is_integer: bool
    extrema: tuple[tuple[float, float], ...]
    sample: npt.NDArray[np.float64]

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> "DeepValues":
        """Summarize the values of an image, (H, W, C)."""
        pixels = values.reshape(-1, values.shape[2])
        return cls(
            kind=describe_depth(values),
            is_integer=are_integers(values),
            extrema=tuple(value_extrema(channel) for channel in pixels.T),
            sample=pixels[:: max(1, len(pixels) // _VALUES)].astype(np.float64),
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
        crop: (C, S, S) uint8, as the model sees it.
    """

    i: int
    place: Place
    cause: str = ""
    caption: str | None = None
    fields: dict[str, Any] | None = None
    image: ImageInfo | None = None
    crop: Tensor | None = None


def read_sample(samples: ShardSurvey, i: int, *, image: bool = False) -> tuple[Sample, bytes]:
    """Read a sample's caption and json, and with ``image`` its image file; errors are recorded in ``cause``."""
    selection, rule = samples.selection, samples.selection.captions
    shard, row = samples.find(i)
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
        needed = rule.members(members)
        caption = rule.caption(rule.parse({name: members[name] for name in needed}), 0, None)
        if caption is None:
            raise DataError(_EMPTY_CAPTION)
        if len(caption) > MAX_CHARACTERS:
            raise DataError(f"caption of {len(caption)} characters")
        sample.caption = caption
    except DataError as error:
        sample.cause = str(error)
    return sample, data or b""


# --------------------------------------------------------------------------------------------------------------
# Decoding

_VALUES = 1000  # of each deep image
_FIRST_SAMPLES = 64  # one of them must be good
_READERS = 16  # threads, most of which wait for a store if samples are remote
_AHEAD = 256  # samples that the threads work on
_SHEET = 24  # samples on the contact sheet
_MOST_CAUSES = 20
_BAD_SHOWN, _BAD_PER_CAUSE = 16, 4


class SampleChecker:
    """Read and decode samples in several threads.

    Attributes:
        tried: number of samples so far.
        good, bad: these samples; their json and most crops are dropped.
        sheet: evenly spread good samples, with their crops.
    """

    def __init__(
        self,
        samples: ShardSurvey,
        chosen: Sequence[int],
        *,
        image_size: int,
        decoding: Decoding,
        augmentation: Augmentation,
    ) -> None:
        self._samples, self._chosen = samples, chosen
        self._image_size, self._decoding, self._augmentation = image_size, decoding, augmentation
        self.tried = 0
        self.bad: list[Sample] = []
        self.good: list[Sample] = []
        self.sheet: list[Sample] = []

    def run(self, bar: CountProgress) -> Iterator[Sample]:
        """Yield each sample in order; DataError if the first are all bad."""
        preload(self._augmentation)
        for sample in self._in_order():
            self.tried += 1
            if sample.cause:
                self.bad.append(sample)
                if not self.good and self.tried >= _FIRST_SAMPLES:
                    break
            else:
                self.good.append(sample)
                due = len(self.sheet) * len(self._chosen) <= (self.tried - 1) * _SHEET
                if due and len(self.sheet) < _SHEET:
                    self.sheet.append(sample)
                else:
                    sample.crop = None
            bar.show(self.tried, len(self.bad))
            yield sample
            sample.fields = None  # saves memory
        if not self.good:
            raise DataError(self._all_bad())

    def _in_order(self) -> Iterator[Sample]:
        with one_core_each(_READERS) as pool:
            for start in range(0, len(self._chosen), _AHEAD):
                yield from pool.map(self._check, self._chosen[start : start + _AHEAD])

    def _check(self, i: int) -> Sample:
        sample, data = read_sample(self._samples, i, image=True)
        if sample.cause:
            return sample
        crop = empty_batch(1, self._image_size, self._decoding.channels)[0]
        try:
            traits = training_pixels(
                data,
                image_size=self._image_size,
                augmentation=self._augmentation,
                random=random_of(_SEED, i),
                out=crop,
                decoding=self._decoding,
            )
            sample.image, sample.crop = _describe(data, traits, self._decoding), crop
        except DataError as error:
            sample.cause = str(error)
        return sample

    def _all_bad(self) -> str:
        survey = self._samples
        if all(sample.cause == _EMPTY_CAPTION for sample in self.bad):
            reject_unknown_captions(survey.reopen_selected(), survey.selection.captions, survey.cache)
        causes = Counter(sample.cause for sample in self.bad).most_common(2)
        counts = "; ".join(f"{cause} ({count})" for cause, count in causes)
        return f"none of the first {self.tried} samples can be used: {counts}"

    def _by_cause(self) -> list[list[Sample]]:
        """Group bad samples by cause, most frequent first; causes that differ only in numbers are merged."""
        groups: defaultdict[str, list[Sample]] = defaultdict(list)
        for sample in self.bad:
            groups[re.sub(r"[0-9]+", "#", sample.cause)].append(sample)
        return sorted(groups.values(), key=len, reverse=True)

    def sampled(self) -> Sampled:
        """Summarize the bad samples."""
        causes = tuple(
            BadCause(
                cause=group[0].cause,
                count=len(group),
                first=tuple(sample.place for sample in group[:FIRST_PLACES]),
            )
            for group in self._by_cause()[:_MOST_CAUSES]
        )
        return Sampled(tried=self.tried, bad=len(self.bad), causes=causes)

    def bad_shown(self) -> list[Sample]:
        """Return a few bad samples of each cause."""
        return [sample for group in self._by_cause() for sample in group[:_BAD_PER_CAUSE]][:_BAD_SHOWN]


# --------------------------------------------------------------------------------------------------------------
# Images

_PIXEL_EDGES = (0, 32, 64, 128, 224, 256, 384, 512, 768, 1024, 2048)
_GROUPS_SHOWN, _SHOWN_PER_GROUP = 3, 4


def image_digest(data: bytes) -> bytes:
    """Return a digest that is equal for identical files."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _describe(data: bytes, traits: Traits, decoding: Decoding) -> ImageInfo:
    bits, channels = "16-bit" if traits.deep_colors else "8-bit", 3
    bands = read_values(data, decoding)
    values = None if bands is None else bands.values
    if values is not None:
        height, width = values.shape[:2]
    else:
        try:
            with pillow_errors(), open_image(data) as image:
                (width, height), channels = image.size, len(image.getbands())
                if is_deep(image):
                    image.load()
                    values = gray_values(image)[..., None]
        except DataError:  # simplejpeg reads some JPEGs that Pillow does not
            height, width = jpeg_size(data) or (0, 0)
    if values is not None:
        bits, channels = describe_depth(values), values.shape[2]
    needs_settings = values is not None and (values.dtype != np.uint8 or channels not in (1, 3))
    return ImageInfo(
        format=image_format(data) or "unknown",
        depth=f"{bits}, {counted(channels, 'channel')}",
        width=width,
        height=height,
        file_bytes=len(data),
        traits=traits,
        digest=image_digest(data),
        deep=DeepValues.of(values) if values is not None and needs_settings else None,
    )


def summarize_deep(images: Sequence[DeepValues]) -> DeepImages:
    """Summarize images with the same number of channels."""
    pixels = np.concatenate([image.sample for image in images])  # (N, C)
    is_integer = all(image.is_integer for image in images)
    channels, ranges = [], []
    for number, values in enumerate(pixels.T):
        low = min(image.extrema[number][0] for image in images)
        high = max(image.extrema[number][1] for image in images)
        finite = values[np.isfinite(values)]
        percentiles = np.percentile(finite, PERCENTILES).tolist() if len(finite) else [low, low, low]
        channels.append(ChannelValues(low=low, high=high, percentiles=tuple(percentiles)))
        ranges.append(suggest_pixel_range(low, high, is_integer=is_integer))
    kinds = Counter(image.kind for image in images)
    settings = [] if len(channels) in (1, 3) else [f"pixels.channels={len(channels)}"]
    if kinds.keys() != {"8-bit"}:
        settings.append(
            f"pixels.range={ranges[0]}" if len({*ranges}) == 1 else f"pixels.range='{';'.join(ranges)}'"
        )
    return DeepImages(
        count=len(images),
        kinds=dict(kinds.most_common()),
        channels=tuple(channels),
        settings=" ".join(settings),
    )


def group_equal(digests: Sequence[bytes]) -> list[list[int]]:
    """Return groups of indices with equal digests, largest first."""
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for number, one in enumerate(digests):
        groups[one].append(number)
    return sorted((group for group in groups.values() if len(group) > 1), key=len, reverse=True)


def summarize_images(samples: Sequence[Sample], image_size: int) -> Images:
    """Summarize decoded images."""
    images = [sample.image for sample in samples if sample.image is not None]
    assert len(images) == len(samples)
    traits = TraitCounts()
    traits.add(*(image.traits for image in images))
    places: dict[str, tuple[Place, ...]] = {}
    for name in Traits._fields:
        having = [sample.place for sample in samples if sample.image and getattr(sample.image.traits, name)]
        places[name] = tuple(having[:FIRST_PLACES])
    equal = group_equal([image.digest for image in images])
    deep: defaultdict[int, list[DeepValues]] = defaultdict(list)  # by number of channels
    for image in images:
        if image.deep is not None:
            deep[len(image.deep.extrema)].append(image.deep)
    return Images(
        read=len(images),
        formats=dict(Counter(image.format for image in images).most_common()),
        depths=dict(Counter(image.depth for image in images).most_common()),
        width=Histogram.of("width in pixels", (image.width for image in images), _PIXEL_EDGES),
        height=Histogram.of("height in pixels", (image.height for image in images), _PIXEL_EDGES),
        median_bytes=int(np.median([image.file_bytes for image in images])),
        small=sum(min(image.width, image.height) < image_size for image in images),
        traits=traits,
        traits_at=places,
        deep=tuple(summarize_deep(deep[channels]) for channels in sorted(deep)),
        same=sum(map(len, equal)),
        same_groups=tuple(
            tuple(samples[i].place for i in group[:_SHOWN_PER_GROUP]) for group in equal[:_GROUPS_SHOWN]
        ),
    )


# --------------------------------------------------------------------------------------------------------------
# Samples for the page

_SIDE, _QUALITY = 224, 80
_CAPTION_SHOWN, _MOST_COUNTED = 500, 5000  # characters
_MOST_TOKENS = 1024  # counted per caption


def token_counts(texts: list[str]) -> list[int]:
    """Count the tokens of each text with start and end, up to a limit."""
    ids = tokenize(texts, _MOST_TOKENS, trim=True).numpy()
    # the last end of text counts: a text may contain "<end_of_text>", and 0 is "!" as well as padding
    counts: list[int] = (ids.shape[1] - np.argmax(ids[:, ::-1] == END_OF_TEXT, axis=1)).tolist()
    return counts


def sheet_entry(sample: Sample) -> Example:
    """Prepare a good sample with its crop for the contact sheet."""
    assert sample.crop is not None and sample.caption is not None
    pixels = sample.crop[:3] if len(sample.crop) > 2 else sample.crop[:1].expand(3, -1, -1)
    return Example(
        picture=encode_webp(pixels.permute(1, 2, 0).contiguous().numpy()),
        caption=_shortened(sample.caption),
        tokens=token_counts([sample.caption[:_MOST_COUNTED]])[0],
        cause="",
        place=sample.place,
    )


def bad_example(samples: ShardSurvey, sample: Sample) -> Example:
    """Read a bad sample again to show it."""
    again, data = read_sample(samples, sample.i, image=True)
    webp = b""
    with suppress(DataError):
        webp = encode_webp(decode_image(data))
    caption = _shortened(again.caption or "")
    return Example(picture=webp, caption=caption, tokens=0, cause=sample.cause, place=sample.place)


def _shortened(text: str) -> str:
    return text[:_CAPTION_SHOWN] + "…" * (len(text) > _CAPTION_SHOWN)


def encode_webp(pixels: npt.NDArray[np.uint8], side: int = _SIDE) -> bytes:
    """Encode an image, (H, W, 3), whose longer side is at most ``side`` pixels."""
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.save(file, "WEBP", quality=_QUALITY)
    return file.getvalue()
