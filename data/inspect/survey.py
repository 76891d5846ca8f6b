"""Inspect shards: scan some, read samples spread evenly over them, and summarize captions, json and images."""

import math
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clipkit.config import Config, DataConfig
from clipkit.errors import ConfigError, DataError
from clipkit.files import shown
from clipkit.model import CONTEXT_LENGTH
from clipkit.samples import STRETCH, Decoding
from data.augment import Augmentation
from data.captions import NOT_UTF8, TEXT, field_hint, leaf_fields
from data.filters import Filter
from data.inspect.findings import Captions, Field, Fields, Filtered, Findings, HeldOut, Histogram, Place
from data.inspect.samples import (
    Sample,
    SampleChecker,
    read_sample,
    sheet_entry,
    summarize_images,
    thumbnail,
    token_counts,
)
from data.inspect.shards import FIRST_PLACES, Progress, ShardSurvey
from data.selection import Selection

if TYPE_CHECKING:
    from clipkit.samples.remote import ShardCache

__all__ = ["CaptionSurvey", "FieldSurvey", "inspect"]

_MORE_TEXTS = 20_000  # captions read in addition to those of decoded samples, where reading is cheap


class CaptionSurvey:
    """Collect captions one by one."""

    _TOKEN_EDGES = (0, 8, 16, 24, 32, 48, 64, 78, 128, 256)
    _FREQUENT, _CHARACTERS = 10, 200
    _BATCH = 256

    def __init__(self) -> None:
        self._captions: list[str] = []
        self._places: list[Place] = []
        self._empty = 0
        self._not_utf8: list[Place] = []

    def add(self, sample: Sample) -> None:
        """Add a sample whose caption was read."""
        if sample.caption is None:
            return
        if sample.cause == NOT_UTF8:
            self._not_utf8.append(sample.place)
        elif not sample.caption.strip():
            self._empty += 1
        else:
            self._captions.append(sample.caption)
            self._places.append(sample.place)

    def found(self) -> Captions:
        """Summarize the captions."""
        captions = self._captions
        starts = range(0, len(captions), self._BATCH)
        counts = [count for at in starts for count in token_counts(captions[at : at + self._BATCH])]
        by_text = Counter(captions)
        frequent = [(text, count) for text, count in by_text.most_common(self._FREQUENT) if count > 1]
        longest = max(range(len(counts)), key=lambda at: (counts[at], len(captions[at])), default=None)
        return Captions(
            read=len(counts),
            tokens=Histogram.of("tokens per caption", counts, self._TOKEN_EDGES),
            median=float(np.median(counts)) if counts else 0.0,
            cut=sum(count > CONTEXT_LENGTH for count in counts),
            empty=self._empty,
            not_utf8=len(self._not_utf8),
            not_utf8_at=tuple(self._not_utf8[:FIRST_PLACES]),
            longest=0 if longest is None else counts[longest],
            longest_at=None if longest is None else self._places[longest],
            repeated=len(captions) - len(by_text),
            frequent=tuple((text[: self._CHARACTERS], count) for text, count in frequent),
        )


# --------------------------------------------------------------------------------------------------------------
# Fields of the json

_MOST_FIELDS, _FIELDS_SHOWN = 1000, 40
_MOST_VALUES = 500  # distinct texts counted per field
_FEW_VALUES = 8  # distinct texts that are all shown
_VALUES_SHOWN, _VALUE_LENGTH = 3, 40
_MOST_NUMBERS = 4096  # numbers sampled per field for the median
_KINDS = {bool: "true or false", int: "number", float: "number", str: "text", list: "list"}


class _Numbers:
    """The range of numbers, and an evenly spread sample of them."""

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


class _FieldValues:
    """The values of one field."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self._numbers, self._lengths = _Numbers(), _Numbers()
        self._texts: Counter[str] = Counter()
        self._more = 0  # values beyond the distinct ones that are counted

    def add(self, value: Any) -> None:
        self.kinds[_KINDS.get(type(value), "text")] += 1
        if isinstance(value, list):
            self._lengths.add(len(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if abs(value) < 1e300:  # Python's json also parses NaN, Infinity and integers of any length
                self._numbers.add(value)
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)[: _VALUE_LENGTH + 1]
            if text in self._texts or len(self._texts) < _MOST_VALUES:
                self._texts[text] += 1
            else:
                self._more += 1

    def summary(self) -> str:
        """Describe the values in words."""
        parts = []
        numbers, lengths = self._numbers, self._lengths
        if numbers.some:
            low, high, middle = numbers.low, numbers.high, float(np.median(numbers.some))
            parts.append(f"{low:,.6g} to {high:,.6g}, median {middle:,.6g}" if low < high else f"{low:,.6g}")
        if self._texts:
            total = self._texts.total() + self._more
            texts = [
                (f'"{text[:_VALUE_LENGTH]}{"…" * (len(text) > _VALUE_LENGTH)}"', count)
                for text, count in self._texts.most_common()
            ]
            if len(texts) == 1 and not self._more:
                parts.append(f"always {texts[0][0]}" if total > 1 else texts[0][0])
            elif len(texts) <= _FEW_VALUES and not self._more and total > len(texts):
                parts.append(", ".join(f"{text} {100 * count / total:.0f}%" for text, count in texts))
            else:
                some = ", ".join(text for text, _ in texts[:_VALUES_SHOWN])
                parts.append(some if total <= _VALUES_SHOWN else f"such as {some}")
        if lengths.some:
            least, most = int(lengths.low), int(lengths.high)
            parts.append(f"{least} to {most} items" if least < most else f"{least} items")
        return "; ".join(parts)


class FieldSurvey:
    """Collect the json of samples one by one, and count those that pass ``filters``."""

    def __init__(self, filters: Sequence[Filter]) -> None:
        self._selection = Selection(filters=tuple(filters))
        self._read = self._with_json = self._passed = 0
        self._fields: dict[str, _FieldValues] = {}
        self._left_out: Counter[str] = Counter()

    def add(self, meta: dict[str, Any] | None) -> None:
        """Add a sample's json; None for a sample without a readable one."""
        self._read += 1
        self._with_json += meta is not None
        if reason := self._selection.refuses(meta or {}):
            self._left_out[reason] += 1
        else:
            self._passed += 1
        for name, value in leaf_fields(meta or {}):
            if name in self._fields or len(self._fields) < _MOST_FIELDS:
                self._fields.setdefault(name, _FieldValues()).add(value)

    def found(self) -> Fields:
        """Summarize the fields, the most frequent first."""
        by_count = sorted(self._fields.items(), key=lambda one: -one[1].kinds.total())
        fields = [
            Field(
                name=name,
                kind=" or ".join(kind for kind, _ in values.kinds.most_common()),
                count=values.kinds.total(),
                values=values.summary(),
            )
            for name, values in by_count[:_FIELDS_SHOWN]
        ]
        more = len(by_count) - len(fields)
        return Fields(read=self._read, with_json=self._with_json, fields=tuple(fields), more=more)

    def unknown(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return a message for each field that no sample has."""
        return tuple(
            f"no sample read has the json field {name!r}: {field_hint(name, self._fields)}"
            for name in dict.fromkeys(names)
            if name not in self._fields
        )

    def filtered(self) -> Filtered | None:
        """Return how many samples pass the filters; None without filters."""
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
    """Inspect shards as training would read them; errors that would stop training are recorded.

    The choice of shards and samples depends only on their numbers, so repeated inspections give the same results.

    Args:
        sources: as in ``data.train``.
        split: of a dataset folder.
        samples: number of samples to decode, spread evenly over the inspected shards.
        shards: number of shards to inspect, spread evenly over all; 0 for 64, or 32 remote ones.
        image_size: of the model, in pixels.
        decoding: handling of depth, transparency and orientation; None for the defaults.
        augmentation: for the contact sheet and the measured speed; None for the defaults.
        rate: samples per second that one GPU processes.
        captions: as in ``data.captions``.
        filters: as in ``data.filters``; only the number of samples that pass is reported.
        batch_size: pairs per step over all GPUs.
        max_bad: fraction of bad samples above which training stops.
        cache: for copies of remote shards; None reads parts of them over the network.
        progress: called with the task, items done, items failed, and all items.

    Raises:
        ConfigError: a number is out of range, or a filter is invalid.
        DataError: there are no shards, or the first of them contain no pair of image and caption.
    """
    for name, value, least, most in (
        ("samples", samples, 1, 1_000_000), ("shards", shards, 0, 1_000_000), ("image_size", image_size, 1, 10_000),
        ("rate", rate, 1e-3, 1e9), ("batch_size", batch_size, 1, 1 << 30),
    ):  # fmt: skip
        if not least <= value <= most:
            raise ConfigError(f"{name} = {value} is out of range: expected {least:g} to {most:,.0f}")
    began = time.monotonic()
    decoding, augmentation = decoding or Decoding(), augmentation or Augmentation()
    if decoding.pixel_range == "auto":  # deep images are shown and measured, although training would stop
        decoding = replace(decoding, pixel_range=STRETCH)
    texts, fields = CaptionSurvey(), FieldSurvey([Filter.of(one) for one in filters])
    survey = ShardSurvey(sources, split=split, captions=captions, cache=cache)
    survey.scan(shards, progress)
    chosen = survey.spread(samples)
    checker = SampleChecker(
        survey, chosen, image_size=image_size, decoding=decoding, augmentation=augmentation
    )
    for sample in checker.run(progress):
        texts.add(sample)
        fields.add(sample.meta)
    known = {(ref.scan.number, ref.row) for ref in chosen}
    for ref in [] if survey.remote else survey.spread(_MORE_TEXTS):
        if (ref.scan.number, ref.row) not in known:
            sample, _ = read_sample(survey.opened(ref.scan), ref, survey.selection.captions)
            texts.add(sample)
            fields.add(sample.meta)
    images, same, alike = summarize_images(checker.good, image_size)
    digests = {sample.image.digest for sample in checker.good if sample.image is not None}
    return Findings(
        sources=tuple(map(shown, sources)),
        image_size=image_size,
        decoding=decoding,
        context_length=CONTEXT_LENGTH,
        max_bad=max_bad,
        batch_size=batch_size,
        shards=survey.found(),
        names=survey.names(),
        sampled=checker.sampled(),
        captions=replace(texts.found(), unknown=fields.unknown([one for one in captions if one != TEXT])),
        fields=fields.found(),
        filtered=fields.filtered(),
        pictures=images,
        held_out=_held_out(sources, captions, digests, samples, image_size) if split == "train" else None,
        speed=checker.speed(rate),
        sheet=tuple(map(sheet_entry, checker.sheet)),
        bad_shown=tuple(thumbnail(survey, sample) for sample in checker.bad_shown()),
        same=tuple(tuple(thumbnail(survey, sample) for sample in group) for group in same),
        alike=tuple(tuple(thumbnail(survey, sample) for sample in group) for group in alike),
        seconds=time.monotonic() - began,
    )


def _held_out(
    sources: Sequence[str], captions: Sequence[str], trained: set[bytes], samples: int, image_size: int
) -> HeldOut | None:
    """Compare the test split of dataset folders with images of the training split."""
    folders = [source for source in sources if (Path(source) / "test").is_dir()]
    if not folders:
        return None
    try:
        survey = ShardSurvey(folders, split="test", captions=captions, cache=None)
        survey.scan()
        checker = SampleChecker(
            survey,
            survey.spread(samples),
            image_size=image_size,
            decoding=Decoding(pixel_range=STRETCH),
            augmentation=Augmentation(),
        )
        digests = [sample.image.digest for sample in checker.run() if sample.image is not None]
    except DataError:  # an unreadable test split is not an error of the training split
        return None
    return HeldOut(read=len(digests), trained_on=sum(digest in trained for digest in digests))
