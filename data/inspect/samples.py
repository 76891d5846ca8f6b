"""Samples of an inspection: read, decode and crop them as training does, and compare their images."""

import hashlib
import io
import os
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.model import CONTEXT_LENGTH, END_OF_TEXT, MAX_CHARACTERS, tokenize
from clipkit.samples import (
    Decoding,
    Shard,
    Traits,
    are_integers,
    decode_image,
    describe_depth,
    find_image,
    gray_values,
    is_deep,
    is_json,
    jpeg_size,
    open_image,
    parse_fields,
    pillow_errors,
    suggest_pixel_range,
    value_extrema,
)
from data.augment import Augmentation, empty_batch, preload, random_of, training_pixels
from data.captions import TEXT, CaptionRule
from data.inspect.findings import (
    PERCENTILES,
    BadCause,
    DeepImages,
    Duplicates,
    Histogram,
    Images,
    Place,
    Sampled,
    SheetEntry,
    Speed,
    Thumbnail,
    WithTrait,
    wilson,
)
from data.inspect.shards import (
    FIRST_PLACES,
    Progress,
    SampleRef,
    ShardSurvey,
    list_extensions,
)
from data.shards.manifest import no_caption, note_texts

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "ImageInfo", "Sample", "SampleChecker", "group_equal", "group_similar", "read_sample", "sheet_entry",
    "similarity_code", "summarize_images", "thumbnail", "token_counts",
]  # fmt: skip

_EMPTY_CAPTION = "empty caption"
_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GrayValues:
    """The values of a deep grayscale image.

    Attributes:
        kind: such as "16-bit" or "32-bit float".
        low, high: smallest and largest value.
        sample: evenly spaced values, for percentiles.
    """

    kind: str
    is_integer: bool
    low: float
    high: float
    sample: npt.NDArray[np.float64]

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> "GrayValues":
        """Summarize the values of an image, (H, W)."""
        low, high = value_extrema(values)
        sample = values.ravel()[:: max(1, values.size // _GRAY_VALUES)].astype(np.float64)
        return cls(
            kind=describe_depth(values),
            is_integer=are_integers(values),
            low=low,
            high=high,
            sample=sample[np.isfinite(sample)],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageInfo:
    """Properties of a decoded image; ``code`` is its ``similarity_code``."""

    format: str
    extension: str
    width: int
    height: int
    file_bytes: int
    marks: tuple[str, ...]
    traits: Traits
    digest: bytes
    code: npt.NDArray[np.int8]
    gray: "GrayValues | None" = None


@dataclass(kw_only=True, slots=True, eq=False)
class Sample:
    """A sample that was read and possibly decoded.

    Attributes:
        cause: why it is bad; empty for a good one.
        caption: "" if there is no usable one; None if it was not read.
        meta: its json; None if there is no readable one.
        has_text: whether it has a caption file.
        image: None if it was not decoded.
        crop: (3, S, S) uint8, as the model sees it.
        make, text: seconds of CPU time for the image, from file to crop, and for the caption.
    """

    ref: SampleRef
    place: Place
    cause: str = ""
    caption: str | None = None
    meta: dict[str, Any] | None = None
    has_text: bool = False
    image: ImageInfo | None = None
    crop: Tensor | None = None
    make: float = 0.0
    text: float = 0.0


def read_sample(
    shard: Shard, ref: SampleRef, rule: CaptionRule, *, image: bool = False
) -> tuple[Sample, bytes]:
    """Read a sample's caption and json, and with ``image`` its image file; errors are recorded in ``cause``."""
    sample = Sample(ref=ref, place=Place(shard=shard.file.shown, key=shard.index.key(ref.row)))
    names = shard.index.members(ref.row)
    texts = [*dict.fromkeys([*rule.members(names), *filter(is_json, names)])]
    try:
        data, *contents = shard.read(ref.row, ["" if image else TEXT, *texts])
    except DataError as error:
        sample.cause = str(error)
        return sample, b""
    members = {name: content for name, content in zip(texts, contents, strict=True) if content is not None}
    sample.caption, sample.has_text = "", TEXT in names
    with suppress(DataError):
        if any(map(is_json, members)):
            sample.meta = parse_fields(members)
    begin = time.thread_time()
    try:
        needed = rule.members(names)
        caption = rule.caption(rule.parse({name: members[name] for name in needed}), 0, None)
        if caption is None:
            raise DataError(_EMPTY_CAPTION)
        if len(caption) > MAX_CHARACTERS:
            raise DataError(f"caption of {len(caption)} characters")
        sample.caption = caption
    except DataError as error:
        sample.cause = str(error)
    sample.text = time.thread_time() - begin
    return sample, data or b""


# --------------------------------------------------------------------------------------------------------------
# Decoding

_GRAY_VALUES = 1000  # of each deep image
_FIRST_SAMPLES = 64  # one of them must be good
_REMOTE_READERS, _LOCAL_READERS = 16, 8
_SHEET = 24  # samples on the contact sheet
_TIMED, _TIMED_SECONDS = 256, 2.0  # samples read to measure the speed of reading
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
        survey: ShardSurvey,
        refs: list[SampleRef],
        *,
        image_size: int,
        decoding: Decoding,
        augmentation: Augmentation,
    ) -> None:
        self._survey, self._refs = survey, refs
        self._rule = survey.selection.captions
        self._image_size, self._decoding, self._augmentation = image_size, decoding, augmentation
        self.tried = 0
        self.bad: list[Sample] = []
        self.good: list[Sample] = []
        self.sheet: list[Sample] = []
        self._known: dict[str, bool] = {}  # json fields of the first bad samples
        self._read, self._bytes_read, self._read_seconds = 0, 0, 0.0

    def run(self, progress: Progress | None = None) -> Iterator[Sample]:
        """Yield each sample in order; DataError if the first are all bad."""
        preload(self._augmentation)
        tokenize(["the first text loads the vocabulary"])
        self._time_reading()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # to measure one core
        try:
            for sample in self._in_order():
                self.tried += 1
                if sample.cause:
                    self.bad.append(sample)
                    if not self.good:
                        note_texts(self._known, sample.meta or {})
                        if self.tried >= _FIRST_SAMPLES:
                            break
                else:
                    self.good.append(sample)
                    due = len(self.sheet) * len(self._refs) <= (self.tried - 1) * _SHEET
                    if due and len(self.sheet) < _SHEET:
                        self.sheet.append(sample)
                    else:
                        sample.crop = None
                if progress is not None:
                    progress("decoding samples", self.tried, len(self.bad), len(self._refs))
                yield sample
                sample.meta = None  # saves memory
            if not self.good:
                raise DataError(self._all_bad())
        finally:
            torch.set_num_threads(threads)

    def _time_reading(self) -> None:
        """Read some samples with a single thread."""
        most, until = min(_TIMED, len(self._refs)), time.monotonic() + _TIMED_SECONDS
        begin = time.perf_counter()
        for number in range(most):
            ref = self._refs[number * len(self._refs) // most]
            with suppress(DataError):
                members = self._survey.opened(ref.scan).read(ref.row, ("", TEXT, "json"))
                self._bytes_read += sum(len(one or b"") for one in members)
            self._read += 1
            if time.monotonic() > until:
                break
        self._read_seconds = max(1e-9, time.perf_counter() - begin)

    def _in_order(self) -> Iterator[Sample]:
        cores = len(os.sched_getaffinity(0))
        readers = _REMOTE_READERS if self._survey.remote else min(_LOCAL_READERS, cores)
        waiting: deque[Future[Sample]] = deque()
        pool = ThreadPoolExecutor(readers, initializer=torch.set_num_threads, initargs=(1,))
        try:
            for ref in self._refs:
                waiting.append(pool.submit(self._check, self._survey.opened(ref.scan), ref))
                if len(waiting) > 2 * readers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _check(self, shard: Shard, ref: SampleRef) -> Sample:
        sample, data = read_sample(shard, ref, self._rule, image=True)
        if sample.cause:
            return sample
        assert sample.caption is not None
        begin = time.thread_time()
        tokenize([sample.caption], CONTEXT_LENGTH)
        sample.text += time.thread_time() - begin
        crop = empty_batch(1, self._image_size)[0]
        begin = time.thread_time()
        try:
            with torch.inference_mode():
                traits = training_pixels(
                    data,
                    image_size=self._image_size,
                    augmentation=self._augmentation,
                    random=random_of(_SEED, ref.row),
                    out=crop,
                    decoding=self._decoding,
                )
            sample.make = time.thread_time() - begin
            extension = find_image(shard.index.members(ref.row))
            sample.image, sample.crop = _describe(data, extension, traits), crop
        except DataError as error:
            sample.cause = str(error)
        return sample

    def _all_bad(self) -> str:
        if all(sample.cause == _EMPTY_CAPTION for sample in self.bad):
            files = sum(sample.has_text for sample in self.bad)
            if not files or TEXT not in self._rule.fields:
                return no_caption(self._rule, self.tried, files, self._known)
        causes = Counter(sample.cause for sample in self.bad).most_common(2)
        return (
            f"none of the first {self.tried} samples can be used: "
            f"{'; '.join(f'{cause} ({count})' for cause, count in causes)}; "
            f"extensions found: {list_extensions(self._survey.extensions())}"
        )

    def speed(self, rate: float) -> Speed:
        """Return the speed of reading and preprocessing; ``rate`` is the samples/s that one GPU processes."""
        make, text = (
            sum(getattr(one, name) for one in self.good) / len(self.good) for name in ("make", "text")
        )
        speed = Speed(
            per_core=1 / max(1e-9, make + text),
            make=1000 * make,
            text=1000 * text,
            read=self._read / self._read_seconds,
            read_bytes=self._bytes_read / self._read_seconds,
            remote=self._survey.remote,
            rate=rate,
            workers=0,
            cores=len(os.sched_getaffinity(0)),
        )
        return replace(speed, workers=speed.workers_for(rate))

    def _by_cause(self) -> list[list[Sample]]:
        """Group bad samples by cause, most frequent first; causes that differ only in numbers are merged."""
        groups: defaultdict[str, list[Sample]] = defaultdict(list)
        for sample in self.bad:
            groups[re.sub(r"[0-9]+", "#", sample.cause)].append(sample)
        return sorted(groups.values(), key=len, reverse=True)

    def sampled(self) -> Sampled:
        """Summarize the bad samples."""
        low, high = wilson(len(self.bad), self.tried)
        causes = tuple(
            BadCause(
                cause=group[0].cause,
                count=len(group),
                first=tuple(sample.place for sample in group[:FIRST_PLACES]),
            )
            for group in self._by_cause()[:_MOST_CAUSES]
        )
        return Sampled(tried=self.tried, bad=len(self.bad), low=low, high=high, causes=causes)

    def bad_shown(self) -> list[Sample]:
        """Return a few bad samples of each cause."""
        return [sample for group in self._by_cause() for sample in group[:_BAD_PER_CAUSE]][:_BAD_SHOWN]


# --------------------------------------------------------------------------------------------------------------
# Images
#
# The similarity code of an image consists of the signs of the differences between neighbors among 17 x 16 mean gray
# values. Differences near zero count as zero, so that encoder noise does not separate copies.
#
# N images, C = 256 differences.

_GRAY = ("1", "L", "LA")
_PILLOW_NAMES = {"MPO": "JPEG", "JPEG2000": "JPEG 2000", "DIB": "BMP"}
_FORMATS = {
    "jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "bmp": "BMP", "tif": "TIFF",
    "tiff": "TIFF", "ppm": "PPM", "pgm": "PPM", "jp2": "JPEG 2000", "avif": "AVIF",
}  # fmt: skip
_PIXEL_EDGES = (0, 32, 64, 128, 224, 256, 384, 512, 768, 1024, 2048)
_GROUPS_SHOWN, _SHOWN_PER_GROUP = 6, 4
_MOST_COMPARED = 10_000  # images compared pairwise
_CODE_SIDE = 16
_NEAR_ZERO = 6  # of 255
_MIN_SIGNS = 40  # of 256; an image with fewer is too plain to compare
_MIN_AGREEMENT = 0.92  # fraction of signs that copies have in common
_ROWS = 512  # compared at a time


def _reduction(size: tuple[int, int], side: int) -> int:
    """Return the factor by which a JPEG can be reduced in decoding and keep ``side`` pixels on each side."""
    return next((by for by in (8, 4, 2) if min(size) >= by * side), 1)


def _describe(data: bytes, extension: str, traits: Traits) -> ImageInfo:
    gray = None
    try:
        with pillow_errors(), open_image(data) as image:
            if is_deep(image):
                image.load()
                gray = GrayValues.of(gray_values(image))
            kind = _PILLOW_NAMES.get(image.format or "", image.format or "")
            mode, (width, height) = image.mode, image.size
        marks = {
            "grey": mode in _GRAY or gray is not None,
            "CMYK": mode in ("CMYK", "YCCK"),
            "16 bits": mode.startswith("I;16") or (kind == "PNG" and data[24:25] == b"\x10"),
        }
    except DataError:  # simplejpeg reads some JPEGs that Pillow does not
        kind, marks = "JPEG", {}
        height, width = jpeg_size(data) or decode_image(data).shape[:2]
    return ImageInfo(
        format=kind,
        extension=extension,
        width=width,
        height=height,
        file_bytes=len(data),
        marks=tuple(name for name, there in marks.items() if there),
        traits=traits,
        digest=hashlib.blake2b(data, digest_size=16).digest(),
        gray=gray,
        code=similarity_code(decode_image(data, reduce=_reduction((width, height), 4 * _CODE_SIDE))),
    )


def _summarize_deep(images: Sequence[GrayValues]) -> DeepImages:
    low, high = min(gray.low for gray in images), max(gray.high for gray in images)
    values = np.concatenate([gray.sample for gray in images])
    return DeepImages(
        count=len(images),
        kinds=dict(Counter(gray.kind for gray in images).most_common()),
        low=low,
        high=high,
        percentiles=tuple(np.percentile(values, PERCENTILES).tolist()),
        pixel_range=suggest_pixel_range(low, high, is_integer=all(gray.is_integer for gray in images)),
    )


def similarity_code(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """(H, W, 3) uint8 → (C,) int8, each -1, 0 or 1."""
    from PIL import Image

    size = (_CODE_SIDE + 1, _CODE_SIDE)
    gray = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX).convert("L"), dtype=np.int16)
    steps = np.diff(gray, axis=1).ravel()
    return (np.sign(steps) * (np.abs(steps) > _NEAR_ZERO)).astype(np.int8)


def group_equal(digests: Sequence[bytes]) -> list[list[int]]:
    """Return groups of indices with equal digests, largest first."""
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for number, one in enumerate(digests):
        groups[one].append(number)
    return sorted((group for group in groups.values() if len(group) > 1), key=len, reverse=True)


def group_similar(codes: Sequence[npt.NDArray[np.int8]]) -> list[list[int]]:
    """Return groups of indices with similar codes, largest first."""
    if not codes:
        return []
    signs = np.stack(codes[:_MOST_COMPARED]).astype(np.float32)  # (N, C)
    count = np.abs(signs).sum(axis=1)
    parent = list(range(len(signs)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    for start in range(0, len(signs), _ROWS):
        agreement = signs[start : start + _ROWS] @ signs.T
        most = np.maximum(count[start : start + _ROWS, None], count[None])
        rows, columns = np.nonzero((agreement >= _MIN_AGREEMENT * most) & (most >= _MIN_SIGNS))
        for row, column in zip((rows + start).tolist(), columns.tolist(), strict=True):
            if column > row:
                parent[root(column)] = root(row)
    return group_equal([str(root(number)).encode() for number in range(len(signs))])


def summarize_images(
    samples: Sequence[Sample], image_size: int
) -> tuple[Images, list[list[Sample]], list[list[Sample]]]:
    """Summarize decoded images; also return a few groups of identical files and of similar images."""
    images = [sample.image for sample in samples if sample.image is not None]
    assert len(images) == len(samples)
    ratios = [one.width / one.height for one in images]
    widest = max(range(len(images)), key=ratios.__getitem__)
    tallest = min(range(len(images)), key=ratios.__getitem__)
    misnamed = Counter(
        f".{one.extension} is {one.format}"
        for one in images
        if one.extension and _FORMATS.get(one.extension) != one.format
    )

    def with_trait(name: str) -> WithTrait:
        places = [
            sample.place for sample, one in zip(samples, images, strict=True) if getattr(one.traits, name)
        ]
        return WithTrait(count=len(places), first=tuple(places[:FIRST_PLACES]))

    def duplicates(groups: list[list[int]]) -> tuple[Duplicates, list[list[Sample]]]:
        shown = [[samples[at] for at in group[:_SHOWN_PER_GROUP]] for group in groups[:_GROUPS_SHOWN]]
        places = tuple(tuple(sample.place for sample in group) for group in shown)
        return Duplicates(groups=len(groups), pictures=sum(map(len, groups)), shown=places), shown

    same_bytes, same = duplicates(group_equal([one.digest for one in images]))
    similar = group_similar([one.code for one in images])
    different = [group for group in similar if len({images[at].digest for at in group}) > 1]
    same_look, alike = duplicates(different)
    deep = [one.gray for one in images if one.gray is not None]
    found = Images(
        read=len(images),
        formats=dict(Counter(one.format for one in images).most_common()),
        misnamed=dict(misnamed.most_common()),
        width=Histogram.of("width in pixels", (one.width for one in images), _PIXEL_EDGES),
        height=Histogram.of("height in pixels", (one.height for one in images), _PIXEL_EDGES),
        median_bytes=int(np.median([one.file_bytes for one in images])),
        small=sum(min(one.width, one.height) < image_size for one in images),
        widest=ratios[widest],
        widest_at=samples[widest].place,
        tallest=1 / ratios[tallest],
        tallest_at=samples[tallest].place,
        marks=dict(Counter(mark for one in images for mark in one.marks).most_common()),
        transparent=with_trait("transparent"),
        rotated=with_trait("rotated"),
        clamped=with_trait("clamped"),
        deep_colors=with_trait("deep_colors"),
        deep=_summarize_deep(deep) if deep else None,
        same_bytes=same_bytes,
        same_look=same_look,
    )
    return found, same, alike


# --------------------------------------------------------------------------------------------------------------
# Samples for the page

_CROP_SIDE, _CROP_QUALITY = 224, 80
_CAPTION_SHOWN, _REST_SHOWN = 500, 160  # characters
_MOST_TOKENS = 1024  # counted per caption
_THUMBNAIL_SIDE, _THUMBNAIL_QUALITY = 128, 75
_THUMBNAIL_CAPTION = 120  # characters
_BYTES_SHOWN = 60
_PARTLY_DECODED = (
    4 << 20,
    1 << 24,
)  # largest broken image of which the beginning is decoded, in bytes and pixels


def token_counts(texts: list[str]) -> list[int]:
    """Count the tokens of each text with start and end, up to a limit."""
    ids = tokenize(texts, _MOST_TOKENS, trim=True).numpy()
    # the last end of text counts: a text may contain "<end_of_text>", and 0 is "!" as well as padding
    counts: list[int] = (ids.shape[1] - np.argmax(ids[:, ::-1] == END_OF_TEXT, axis=1)).tolist()
    return counts


def sheet_entry(sample: Sample) -> SheetEntry:
    """Prepare a good sample with its crop for the contact sheet."""
    from PIL import Image

    assert sample.crop is not None and sample.caption is not None
    caption = sample.caption[: 10 * _CAPTION_SHOWN]
    tokens = token_counts([caption])[0]
    low, high = (0 if tokens > CONTEXT_LENGTH else len(caption)), len(caption)
    while low < high:  # the longest beginning that fits into the context, by bisection
        middle = (low + high + 1) // 2
        fits = token_counts([caption[:middle]])[0] <= CONTEXT_LENGTH
        low, high = (middle, high) if fits else (low, middle - 1)
    image = Image.fromarray(sample.crop.permute(1, 2, 0).contiguous().numpy())
    if image.width > _CROP_SIDE:
        image = image.resize((_CROP_SIDE, _CROP_SIDE), Image.Resampling.BICUBIC)
    return SheetEntry(
        picture=_webp(image, _CROP_QUALITY),
        caption=_shortened(caption[:low], _CAPTION_SHOWN),
        rest=_shortened(caption[low:], _REST_SHOWN),
        tokens=tokens,
        place=sample.place,
    )


def thumbnail(survey: ShardSurvey, sample: Sample) -> Thumbnail:
    """Read a sample again and shrink its image, or the part of it that can be decoded."""
    from PIL import Image

    again, data = read_sample(
        survey.opened(sample.ref.scan), sample.ref, survey.selection.captions, image=True
    )
    webp, size = b"", jpeg_size(data)
    most_bytes, most_pixels = _PARTLY_DECODED
    pixels: npt.NDArray[np.uint8] | None = None
    try:
        pixels = decode_image(data, reduce=_reduction(size or (0, 0), _THUMBNAIL_SIDE))
    except DataError:
        truncated = size and "truncated" in sample.cause and size[0] * size[1] <= most_pixels
        if truncated and len(data) <= most_bytes:
            import simplejpeg

            with suppress(ValueError):
                pixels = simplejpeg.decode_jpeg(data, strict=False)  # the missing part is gray
    if pixels is not None:
        image = Image.fromarray(pixels)
        image.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
        webp = _webp(image, _THUMBNAIL_QUALITY)
    return Thumbnail(
        picture=webp,
        beginning="" if webp else data[:_BYTES_SHOWN].decode("utf-8", "replace"),
        size=len(data),
        caption=_shortened(again.caption or "", _THUMBNAIL_CAPTION),
        cause=sample.cause,
        place=sample.place,
    )


def _shortened(text: str, most: int) -> str:
    return text[:most] + "…" * (len(text) > most)


def _webp(image: "Image", quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "WEBP", quality=quality)
    return file.getvalue()
