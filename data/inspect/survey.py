"""The course of an inspection: list the shards, look into some, read samples spread evenly over them, sum up."""

import io
import math
import re
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from clipkit.config import Config, DataConfig
from clipkit.errors import ConfigError, DataError
from clipkit.files.decode import decode_image, jpeg_size
from clipkit.files.terminal import shown
from clipkit.files.traits import Decoding
from clipkit.model.tokenizer import CONTEXT_LENGTH, END_OF_TEXT, tokenize
from data.augment import Augmentation
from data.captions import NOT_UTF8, TEXT, CaptionRule, Filter, Selection, field_hint, leaf_fields
from data.inspect.findings import (
    Captions,
    Duplicates,
    Field,
    Fields,
    Filtered,
    Findings,
    HeldOut,
    Histogram,
    Pictures,
    Place,
    SheetEntry,
    Thumbnail,
    WithTrait,
)
from data.inspect.samples import (
    MOST_COMPARED,
    OpenBeginning,
    Picture,
    Trial,
    groups_alike,
    groups_equal,
    list_shards,
    read_all,
)
from data.inspect.timing import Course, Progress, Trials, bad_samples, names_of, shards_of
from data.shards.shard import OpenShard

if TYPE_CHECKING:
    from data.remote.cache import ShardCache

__all__ = [
    "CaptionSurvey",
    "FieldSurvey",
    "PictureSurvey",
    "inspect",
    "sheet_entry",
    "some_of_each_cause",
    "thumbnail",
    "token_counts",
]


# --------------------------------------------------------------------------------------------------------------
# What captions are like: their lengths in tokens, which come more than once, the longest.

_MOST_TOKENS = 1024  # that are counted of one caption
_AT_ONCE = 256
_FREQUENT = 10
_TOKEN_EDGES = (0, 8, 16, 24, 32, 48, 64, 78, 128, 256)
_SHOWN_CHARACTERS = 200
_PLACES = 3  # examples of captions that are not UTF-8


def token_counts(texts: list[str]) -> list[int]:
    """Tokens of each, with start and end, up to a limit."""
    ids = tokenize(texts, _MOST_TOKENS, trim=True).numpy()
    # the last end of text ends it: a text may say "<end_of_text>" itself, and zeros stand for "!" too
    counts: list[int] = (ids.shape[1] - np.argmax(ids[:, ::-1] == END_OF_TEXT, axis=1)).tolist()
    return counts


class CaptionSurvey:
    """Takes captions one by one.

    Args:
        context_length: tokens that the model sees.
    """

    def __init__(self, context_length: int) -> None:
        self._context_length = context_length
        self._waiting: list[tuple[str, Place]] = []
        self._counts: list[int] = []
        self._texts: Counter[str] = Counter()
        self._empty = self._not_utf8 = 0
        self._not_utf8_at: list[Place] = []
        self._longest: tuple[int, int, Place | None] = (0, 0, None)

    def add(self, caption: str | None, place: Place, cause: str) -> None:
        """Take a sample's caption.

        Args:
            caption: "" if there is none that can be used, None if it was not read.
            place: where it is.
            cause: why the sample is bad; "" if it is not.
        """
        if caption is None:
            return
        if cause == NOT_UTF8:
            self._not_utf8 += 1
            self._not_utf8_at = [*self._not_utf8_at, place][:_PLACES]
            return
        if not caption.strip():
            self._empty += 1
            return
        self._texts[caption] += 1
        self._waiting.append((caption, place))
        if len(self._waiting) >= _AT_ONCE:
            self._count()

    def _count(self) -> None:
        if not self._waiting:
            return
        counts = token_counts([caption for caption, _ in self._waiting])
        self._counts += counts
        for count, (caption, place) in zip(counts, self._waiting, strict=True):
            if (count, len(caption)) > self._longest[:2]:
                self._longest = (count, len(caption), place)
        self._waiting.clear()

    def found(self) -> Captions:
        """What was found."""
        self._count()
        frequent = [(text, count) for text, count in self._texts.most_common(_FREQUENT) if count > 1]
        return Captions(
            read=len(self._counts),
            tokens=Histogram.of("tokens of a caption", self._counts, _TOKEN_EDGES),
            median=float(np.median(self._counts)) if self._counts else 0.0,
            cut=sum(count > self._context_length for count in self._counts),
            empty=self._empty,
            not_utf8=self._not_utf8,
            not_utf8_at=tuple(self._not_utf8_at),
            longest=self._longest[0],
            longest_at=self._longest[2],
            repeated=self._texts.total() - len(self._texts),
            frequent=tuple((text[:_SHOWN_CHARACTERS], count) for text, count in frequent),
        )


# --------------------------------------------------------------------------------------------------------------
# The json of samples: which fields it has and what is in them, and how many samples pass the filters.

_MOST_FIELDS = 1000  # that are counted
_TOLD_FIELDS = 40
_MOST_VALUES = 500  # different ones of a field that are counted
_FEW = 8  # different values that are all told
_MOST_NUMBERS = 4096  # of a field that the median is taken of
_TOLD_VALUES, _LONGEST = 3, 40
_KINDS = {bool: "true or false", int: "number", float: "number", str: "text", list: "list"}


class _Numbers:
    """The range of numbers, and some of them, spread evenly."""

    def __init__(self) -> None:
        self.low, self.high = math.inf, -math.inf
        self.some = array("d")
        self._count, self._every = 0, 1

    def add(self, number: float) -> None:
        self.low, self.high = min(self.low, number), max(self.high, number)
        if self._count % self._every == 0:
            self.some.append(number)
            if len(self.some) >= _MOST_NUMBERS:
                self.some, self._every = self.some[::2], 2 * self._every
        self._count += 1


class _Seen:
    """What was seen of one field."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.numbers = _Numbers()
        self.lengths = _Numbers()
        self.values: Counter[str] = Counter()
        self.more = 0  # values beyond those that are counted

    def add(self, value: Any) -> None:
        self.kinds[_KINDS.get(type(value), "text")] += 1
        if isinstance(value, list):
            self.lengths.add(len(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if (
                abs(value) < 1e300
            ):  # JSON of Python also knows NaN and Infinity, and whole numbers of any length
                self.numbers.add(value)
        else:
            shown = str(value).lower() if isinstance(value, bool) else str(value)[: _LONGEST + 1]
            if shown in self.values or len(self.values) < _MOST_VALUES:
                self.values[shown] += 1
            else:
                self.more += 1

    def told(self) -> str:
        """In words."""
        parts = []
        if self.numbers.some:
            low, high, middle = self.numbers.low, self.numbers.high, float(np.median(self.numbers.some))
            parts.append(f"{low:,.6g} to {high:,.6g}, median {middle:,.6g}" if low < high else f"{low:,.6g}")
        if self.values:
            parts.append(self._texts())
        if self.lengths.some:
            least, most = int(self.lengths.low), int(self.lengths.high)
            parts.append(f"{least} to {most} items" if least < most else f"{least} items")
        return "; ".join(parts)

    def _texts(self) -> str:
        total = self.values.total() + self.more
        several = len(self.values) <= _FEW and not self.more and total > len(self.values)
        if len(self.values) == 1 and not self.more:
            return (
                f"always {_short(next(iter(self.values)))}" if total > 1 else _short(next(iter(self.values)))
            )
        if several:
            return ", ".join(f"{_short(one)} {100 * n / total:.0f}%" for one, n in self.values.most_common())
        some = ", ".join(_short(one) for one, _ in self.values.most_common(_TOLD_VALUES))
        return some if total <= _TOLD_VALUES else f"such as {some}"


def _short(value: str) -> str:
    return f'"{value[:_LONGEST]}{"…" * (len(value) > _LONGEST)}"'


class FieldSurvey:
    """Takes the json of samples one by one.

    Args:
        filters: which samples are to count.
    """

    def __init__(self, filters: Sequence[Filter]) -> None:
        self._selection = Selection(filters=tuple(filters))
        self._read = self._with_json = self._more = self._passed = 0
        self._fields: dict[str, _Seen] = {}
        self._left_out: Counter[str] = Counter()

    def add(self, meta: dict[str, Any] | None) -> None:
        """The json of a sample; None if it has none that can be read."""
        self._read += 1
        self._with_json += meta is not None
        if reason := self._selection.refuses(meta or {}):
            self._left_out[reason] += 1
        else:
            self._passed += 1
        for name, value in leaf_fields(meta or {}):
            if name in self._fields or len(self._fields) < _MOST_FIELDS:
                self._fields.setdefault(name, _Seen()).add(value)

    def found(self) -> Fields:
        """What was found."""
        by_count = sorted(self._fields.items(), key=lambda one: -one[1].kinds.total())
        fields = [
            Field(
                name=name,
                kind=" or ".join(kind for kind, _ in seen.kinds.most_common()),
                count=seen.kinds.total(),
                values=seen.told(),
            )
            for name, seen in by_count[:_TOLD_FIELDS]
        ]
        return Fields(
            read=self._read, with_json=self._with_json, fields=tuple(fields), more=len(by_count) - len(fields)
        )

    def unknown(self, names: Sequence[str]) -> tuple[str, ...]:
        """What is said of fields that no sample read has, a line each."""
        return tuple(
            f"no sample read has the json field {name!r}: {field_hint(name, self._fields)}"
            for name in dict.fromkeys(names)
            if name not in self._fields
        )

    def filtered(self) -> Filtered | None:
        """What the filters leave; None if there are none."""
        filters = self._selection.filters
        if not filters:
            return None
        return Filtered(
            filters=tuple(map(str, filters)),
            unknown=self.unknown([one.name for one in filters]),
            read=self._read,
            passed=self._passed,
            left_out=dict(self._left_out.most_common()),
        )


# --------------------------------------------------------------------------------------------------------------
# Small whole pictures of samples to look at: bad ones, and those that are the same as others.

_SIDE = 128  # pixels
_QUALITY = 75
_MOST_BAD, _OF_ONE_CAUSE = 16, 4
_BEGINNING = 60  # bytes
_CAPTION = 120  # characters
_PARTLY = 4 << 20, 1 << 24  # bytes and pixels of a broken picture whose beginning is shown


def some_of_each_cause(bad: Iterable[Trial]) -> list[Trial]:
    """A few bad samples to look at, not all of the most frequent cause."""
    taken: Counter[str] = Counter()
    some: list[Trial] = []
    for trial in bad:
        cause = re.sub(r"[0-9]+", "#", trial.cause)
        taken[cause] += 1
        if taken[cause] <= _OF_ONE_CAUSE and len(some) < _MOST_BAD:
            some.append(trial)
    return sorted(some, key=lambda trial: -taken[re.sub(r"[0-9]+", "#", trial.cause)])


def thumbnail(shard: OpenShard | OpenBeginning, row: int, rule: CaptionRule, *, cause: str = "") -> Thumbnail:
    """A sample's picture as far as it can be decoded, and its caption.

    Args:
        shard: where it is.
        row: of the shard's index.
        rule: where captions are.
        cause: why it is bad, if it is.
    """
    data, texts = read_all(shard, row, rule)
    pixels = _pixels(data, cause)
    return Thumbnail(
        picture=b"" if pixels is None else _webp(pixels),
        beginning="" if pixels is not None else data[:_BEGINNING].decode("utf-8", "replace"),
        size=len(data),
        caption=texts.caption[:_CAPTION] + "…" * (len(texts.caption) > _CAPTION),
        cause=cause,
        place=texts.place,
    )


def _pixels(data: bytes, cause: str) -> npt.NDArray[np.uint8] | None:
    size = jpeg_size(data)
    reduce = next((by for by in (8, 4, 2) if size and min(size) >= by * _SIDE), 1)
    with suppress(DataError):
        return decode_image(data, reduce=reduce)
    most_bytes, most_pixels = _PARTLY
    if size and "truncated" in cause and len(data) <= most_bytes and size[0] * size[1] <= most_pixels:
        import simplejpeg

        with suppress(ValueError):
            part: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, strict=False)  # the rest becomes grey
            return part
    return None


def _webp(pixels: npt.NDArray[np.uint8]) -> bytes:
    """(H, W, 3) uint8 → a WebP file of at most 128 pixels a side."""
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    image.save(file, "WEBP", quality=_QUALITY)
    return file.getvalue()


# --------------------------------------------------------------------------------------------------------------
# What pictures are like: formats, sizes, what is special about them, and which are the same.

_PIXEL_EDGES = (0, 32, 64, 128, 224, 256, 384, 512, 768, 1024, 2048)
_SHOWN_GROUPS, _SHOWN_OF_GROUP = 6, 4
_SHOWN_OF_TRAIT = 3
_FORMATS = {
    "jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "bmp": "BMP", "tif": "TIFF",
    "tiff": "TIFF", "ppm": "PPM", "pgm": "PPM", "jp2": "JPEG 2000", "avif": "AVIF",
}  # fmt: skip


class PictureSurvey:
    """Takes samples that were tried, one by one.

    Args:
        image_size: of the model, in pixels.
    """

    def __init__(self, image_size: int) -> None:
        self._image_size = image_size
        self._pictures: list[Picture] = []
        self._at: list[tuple[Place, int, int]] = []  # with shard and row
        self._alike: list[list[int]] | None = None

    def add(self, trial: Trial) -> None:
        """A sample; one whose picture was not decoded is left out."""
        if trial.picture is not None:
            self._pictures.append(trial.picture)
            self._at.append((trial.place, trial.shard, trial.row))

    def digests(self) -> set[bytes]:
        """Of the pictures' bytes."""
        return {one.digest for one in self._pictures}

    def found(self) -> Pictures:
        """What was found."""
        many = self._pictures
        misnamed: Counter[str] = Counter()
        marks: Counter[str] = Counter()
        for one in many:
            marks.update(one.marks)
            if one.extension and _FORMATS.get(one.extension) != one.format:
                misnamed[f".{one.extension} is {one.format}"] += 1
        ratios = [one.width / one.height for one in many]
        widest = max(range(len(many)), key=ratios.__getitem__, default=None)
        tallest = min(range(len(many)), key=ratios.__getitem__, default=None)
        return Pictures(
            read=len(many),
            formats=dict(Counter(one.format for one in many).most_common()),
            misnamed=dict(misnamed.most_common()),
            width=Histogram.of("width in pixels", (one.width for one in many), _PIXEL_EDGES),
            height=Histogram.of("height in pixels", (one.height for one in many), _PIXEL_EDGES),
            median_bytes=int(np.median([one.file_bytes for one in many])) if many else 0,
            small=sum(min(one.width, one.height) < self._image_size for one in many),
            widest=0.0 if widest is None else ratios[widest],
            widest_at=None if widest is None else self._at[widest][0],
            tallest=0.0 if tallest is None else 1 / ratios[tallest],
            tallest_at=None if tallest is None else self._at[tallest][0],
            marks=dict(marks.most_common()),
            transparent=self._with_trait([one.traits.transparent for one in many]),
            rotated=self._with_trait([one.traits.rotated for one in many]),
            same_bytes=self._duplicates(groups_equal([one.digest for one in many])),
            same_look=self._duplicates(self._groups_alike()),
        )

    def _with_trait(self, has: Sequence[bool]) -> WithTrait:
        places = [place for (place, _, _), one in zip(self._at, has, strict=True) if one]
        return WithTrait(count=len(places), first=tuple(places[:_SHOWN_OF_TRAIT]))

    def same_shown(self) -> list[list[tuple[int, int]]]:
        """Shard and row of the pictures of a few groups that are the same file, to show them."""
        return self._shown(groups_equal([one.digest for one in self._pictures]))

    def alike_shown(self) -> list[list[tuple[int, int]]]:
        """The same of pictures that look the same."""
        return self._shown(self._groups_alike())

    def _shown(self, groups: list[list[int]]) -> list[list[tuple[int, int]]]:
        return [
            [self._at[number][1:] for number in group[:_SHOWN_OF_GROUP]] for group in groups[:_SHOWN_GROUPS]
        ]

    def _groups_alike(self) -> list[list[int]]:
        """Groups that look the same and are not all the same file."""
        if self._alike is None:
            groups = groups_alike([one.code for one in self._pictures[:MOST_COMPARED]])
            self._alike = [
                group for group in groups if len({self._pictures[number].digest for number in group}) > 1
            ]
        return self._alike

    def _duplicates(self, groups: list[list[int]]) -> Duplicates:
        shown = [
            tuple(self._at[number][0] for number in group[:_SHOWN_OF_GROUP])
            for group in groups[:_SHOWN_GROUPS]
        ]
        return Duplicates(groups=len(groups), pictures=sum(map(len, groups)), shown=tuple(shown))


# --------------------------------------------------------------------------------------------------------------
# Samples as the model sees them: the picture after the training's crop, the caption up to where it is cut.

_MAX_SIDE = 224  # pixels of a picture on the page
_SHEET_QUALITY = 80
_MAX_CAPTION, _MAX_REST = 500, 160  # characters


def sheet_entry(trial: Trial) -> SheetEntry:
    """A good sample, with its crop, as a page shows it."""
    assert trial.crop is not None and trial.caption is not None
    caption = trial.caption[: 10 * _MAX_CAPTION]
    tokens = token_counts([caption])[0]
    seen = _seen(caption) if tokens > CONTEXT_LENGTH else caption
    rest = caption[len(seen) :]
    return SheetEntry(
        picture=_crop_webp(trial.crop),
        caption=seen[:_MAX_CAPTION] + "…" * (len(seen) > _MAX_CAPTION),
        rest=rest[:_MAX_REST] + "…" * (len(rest) > _MAX_REST),
        tokens=tokens,
        place=trial.place,
    )


def _seen(caption: str) -> str:
    """The longest beginning of a caption that the model sees whole, by bisection."""
    low, high = 0, len(caption)
    while low < high:
        middle = (low + high + 1) // 2
        if token_counts([caption[:middle]])[0] <= CONTEXT_LENGTH:
            low = middle
        else:
            high = middle - 1
    return caption[:low]


def _crop_webp(crop: torch.Tensor) -> bytes:
    """(3, S, S) uint8 → a WebP file."""
    from PIL import Image

    image = Image.fromarray(crop.permute(1, 2, 0).contiguous().numpy())
    if image.width > _MAX_SIDE:
        image = image.resize((_MAX_SIDE, _MAX_SIDE), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "WEBP", quality=_SHEET_QUALITY)
    return file.getvalue()


# --------------------------------------------------------------------------------------------------------------


def inspect(
    sources: Sequence[str],
    *,
    split: str = "train",
    samples: int = 2000,
    shards: int = 0,
    image_size: int = 224,
    decoding: Decoding | None = None,
    augmentation: Augmentation | None = None,
    rate: float = 1000.0,
    captions: Sequence[str] = ("txt",),
    filters: Sequence[str] = (),
    batch_size: int = Config.batch_size,
    max_bad: float = DataConfig.max_bad,
    cache: "ShardCache | None" = None,
    progress: Progress | None = None,
) -> Findings:
    """Look into shards as a training would read them; what it would refuse is told, and the rest is looked at.

    Which shards and samples are read follows from their number alone, so a second look sees the same.

    Args:
        sources: as ``data.train`` takes them.
        split: of a dataset folder.
        samples: how many are decoded, spread evenly over the shards looked into.
        shards: how many are looked into at most, spread evenly over all; 0 takes 64, and 32 if they are remote.
        image_size: of the model, in pixels.
        decoding: what is done about transparency and orientation; None as open_clip.
        augmentation: of the crops on the contact sheet, and of those whose time is measured; None for the defaults.
        rate: samples a second that one GPU takes.
        captions: where they are, as ``data.captions`` names it.
        filters: conditions on the json, as ``data.filters`` has them; what they leave is counted, and nothing else
            depends on them.
        batch_size: pairs of a step over all GPUs.
        max_bad: the share of bad samples beyond which a training stops.
        cache: where copies of remote shards are kept; None reads parts of them over the network.
        progress: called with what is done, how much of it so far, how much of that failed, and how much there is.

    Raises:
        ConfigError: a number does not fit, or a filter is none.
        DataError: there are no shards, or the first of them hold no pair of picture and caption.
    """
    _check(samples=samples, shards=shards, image_size=image_size, rate=rate, batch_size=batch_size)
    began = time.monotonic()
    fields = FieldSurvey([Filter.of(one) for one in filters])
    course = Course(list_shards(sources, split=split), captions, cache)
    course.look(shards, progress)
    pictures, texts = PictureSurvey(image_size), CaptionSurvey(CONTEXT_LENGTH)
    trials = Trials(course, course.spread(samples), image_size, decoding, augmentation)
    _read(trials, pictures, texts, fields, progress)
    return Findings(
        sources=tuple(map(shown, sources)),
        image_size=image_size,
        decoding=decoding or Decoding(),
        context_length=CONTEXT_LENGTH,
        max_bad=max_bad,
        batch_size=batch_size,
        shards=shards_of(course.listed, course.looks, course.counts, course.ends),
        names=names_of(course.looks),
        sampled=bad_samples(trials.tried, trials.bad),
        captions=replace(texts.found(), unknown=fields.unknown([one for one in captions if one != TEXT])),
        fields=fields.found(),
        filtered=fields.filtered(),
        pictures=pictures.found(),
        held_out=_held_out(sources, split, captions, pictures.digests(), samples, image_size),
        speed=trials.speed(rate),
        sheet=tuple(map(sheet_entry, trials.sheet)),
        bad_shown=_thumbnails(
            course, [(one.shard, one.row, one.cause) for one in some_of_each_cause(trials.bad)]
        ),
        same=tuple(_thumbnails(course, group) for group in pictures.same_shown()),
        alike=tuple(_thumbnails(course, group) for group in pictures.alike_shown()),
        seconds=time.monotonic() - began,
    )


def _read(
    trials: Trials,
    pictures: PictureSurvey,
    texts: CaptionSurvey,
    fields: FieldSurvey,
    progress: Progress | None,
) -> None:
    """Hand what samples hold to those who survey it."""
    for trial in trials.run(progress):
        texts.add(trial.caption, trial.place, trial.cause)
        fields.add(trial.meta)
        pictures.add(trial)
        trial.meta = None  # many of them would take much memory
    for more in trials.course.more_texts(trials.spots):
        texts.add(more.caption, more.place, more.cause)
        fields.add(more.meta)


def _held_out(
    sources: Sequence[str],
    split: str,
    captions: Sequence[str],
    trained_on: Set[bytes],
    samples: int,
    image_size: int,
) -> HeldOut | None:
    """The split test of folders that have one, beside pictures of the split train."""
    folders = [source for source in sources if split == "train" and (Path(source) / "test").is_dir()]
    if not folders:
        return None
    try:
        course = Course(list_shards(folders, split="test"), captions, None)
        course.look(0, None)
    except DataError:  # it is not what was asked for
        return None
    tried = Trials(course, course.spread(samples), image_size).run(None)
    digests = [trial.picture.digest for trial in tried if trial.picture is not None]
    return HeldOut(read=len(digests), trained_on=sum(digest in trained_on for digest in digests))


def _thumbnails(
    course: Course, samples: Sequence[tuple[int, int] | tuple[int, int, str]]
) -> tuple[Thumbnail, ...]:
    """Pictures of samples: number of the shard, row, and why it is bad if it is."""
    rule = course.selection.captions
    return tuple(
        thumbnail(course.shard(shard), row, rule, cause="".join(cause)) for shard, row, *cause in samples
    )


def _check(*, samples: int, shards: int, image_size: int, rate: float, batch_size: int) -> None:
    for name, value, least, most in (
        ("samples", samples, 1, 1_000_000), ("shards", shards, 0, 1_000_000), ("image_size", image_size, 1, 10_000),
        ("rate", rate, 1e-3, 1e9), ("batch_size", batch_size, 1, 1 << 30),
    ):  # fmt: skip
        if not least <= value <= most:
            raise ConfigError(f"{name} = {value} does not fit: {least:g} to {most:,.0f}")
