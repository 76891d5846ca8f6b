"""Inspect shards: scan some, read samples spread evenly over them, and summarize captions, json and images."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from clipkit.config import DataConfig
from clipkit.errors import DataError
from clipkit.files import CountProgress, printable, redact_url
from clipkit.model import CONTEXT_LENGTH
from clipkit.samples import STRETCH, Decoding
from clipkit.samples.remote import ShardCache
from data.augment import Augmentation, random_of
from data.captions import NOT_UTF8, TEXT, CaptionRule, Filter, field_hint, leaf_fields
from data.inspect.findings import Captions, Field, Fields, Filtered, Findings, HeldOut, Histogram, Place
from data.inspect.samples import (
    FIRST_PLACES,
    Sample,
    SampleChecker,
    ShardSurvey,
    explain_bad_start,
    image_digest,
    pick_bad,
    read_sample,
    summarize_bad,
    summarize_images,
    token_counts,
)
from data.options import InspectOptions
from data.selection import Selection

_MORE_TEXTS = 20_000  # captions read in addition to those of decoded samples, where reading is cheap
_FIRST_SAMPLES = 64  # one of them must be good
_SHEET = 24  # samples on the contact sheet
_TOKEN_EDGES = (0, 8, 16, 24, 32, 48, 64, 78, 128, 256)
_FREQUENT = 10
_CHARACTERS = 200
_TOKENIZED = 256  # captions at a time
_SEED = 0


def summarize_captions(samples: Sequence[Sample], unknown: tuple[str, ...]) -> Captions:
    """Summarize the captions of the samples whose caption was read."""
    captions: list[str] = []
    not_utf8: list[Place] = []
    empty = 0
    for sample in samples:
        if sample.caption is None:
            continue
        if sample.cause == NOT_UTF8:
            not_utf8.append(sample.place)
        elif not sample.caption.strip():
            empty += 1
        else:
            captions.append(sample.caption)
    counts: list[int] = []
    for start in range(0, len(captions), _TOKENIZED):
        counts += token_counts(captions[start : start + _TOKENIZED])
    by_text = Counter(captions)
    frequent = []
    for text, count in by_text.most_common(_FREQUENT):
        if count > 1:
            frequent.append((text[:_CHARACTERS], count))
    return Captions(
        read=len(counts),
        tokens=Histogram.of("tokens per caption", counts, _TOKEN_EDGES),
        median=float(np.median(counts)) if counts else 0.0,
        cut=sum(count > CONTEXT_LENGTH for count in counts),
        empty=empty,
        not_utf8=len(not_utf8),
        not_utf8_at=tuple(not_utf8[:FIRST_PLACES]),
        longest=max(counts, default=0),
        repeated=len(captions) - len(by_text),
        frequent=tuple(frequent),
        unknown=unknown,
    )


# --------------------------------------------------------------------------------------------------------------
# Fields of the json

_MOST_FIELDS = 1000
_FIELDS_SHOWN = 40
_MOST_VALUES = 500  # distinct texts counted per field
_VALUES_SHOWN = 5
_VALUE_LENGTH = 40
_KINDS = {bool: "true or false", int: "number", float: "number", str: "text", list: "list"}


class _FieldValues:
    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self._low = math.inf
        self._high = -math.inf
        self._texts: Counter[str] = Counter()

    def add(self, value: Any) -> None:
        self.kinds[_KINDS.get(type(value), "text")] += 1
        if isinstance(value, list):
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            text = str(value).lower() if isinstance(value, bool) else printable(str(value), _VALUE_LENGTH)
            if text in self._texts or len(self._texts) < _MOST_VALUES:
                self._texts[text] += 1
        elif abs(value) < 1e300:  # Python's json also parses NaN, Infinity and integers of any length
            self._low = min(self._low, value)
            self._high = max(self._high, value)

    def summary(self) -> str:
        """Describe the values in words."""
        parts = []
        if self._low < self._high:
            parts.append(f"{self._low:,.6g} to {self._high:,.6g}")
        elif self._low == self._high:
            parts.append(f"{self._low:,.6g}")
        total = self._texts.total()
        for text, count in self._texts.most_common(_VALUES_SHOWN):
            parts.append(f'"{text}" {100 * count / total:.0f}%')
        return ", ".join(parts)


class FieldSurvey:
    """Collect the json of samples one by one, and count those that pass ``filters``."""

    def __init__(self, filters: Sequence[Filter]) -> None:
        self._selection = Selection(filters=tuple(filters))
        self._read = self._with_json = self._passed = 0
        self._fields: dict[str, _FieldValues] = {}
        self._left_out: Counter[str] = Counter()

    def add(self, meta: dict[str, Any] | None) -> None:
        """Add the fields of a sample's json; None for a sample without a readable one."""
        self._read += 1
        self._with_json += meta is not None
        reason = self._selection.refuses(meta or {})
        if reason:
            self._left_out[reason] += 1
        else:
            self._passed += 1
        for name, value in leaf_fields(meta or {}):
            if name in self._fields or len(self._fields) < _MOST_FIELDS:
                self._fields.setdefault(name, _FieldValues()).add(value)

    def summarize_fields(self) -> Fields:
        """Summarize the fields, the most frequent first."""
        fields = []
        by_count = sorted(self._fields.items(), key=lambda item: -item[1].kinds.total())
        for name, values in by_count[:_FIELDS_SHOWN]:
            kind = " or ".join(kind for kind, _ in values.kinds.most_common())
            fields.append(Field(name=name, kind=kind, count=values.kinds.total(), values=values.summary()))
        return Fields(read=self._read, with_json=self._with_json, fields=tuple(fields))

    def unknown(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return a message for each field that no sample has."""
        return tuple(
            f"no sample read has the json field {name!r}: {field_hint(name, self._fields)}"
            for name in dict.fromkeys(names)
            if name not in self._fields
        )

    def summarize_filters(self) -> Filtered | None:
        """Return how many samples pass the filters; None without filters."""
        filters = self._selection.filters
        if not filters:
            return None
        return Filtered(
            unknown=self.unknown([condition.name for condition in filters]),
            read=self._read,
            passed=self._passed,
            left_out=dict(self._left_out.most_common()),
        )


# --------------------------------------------------------------------------------------------------------------


def inspect(
    options: InspectOptions,
    *,
    decoding: Decoding | None = None,
    augmentation: Augmentation | None = None,
    max_bad: float = DataConfig.max_bad,
    cache: ShardCache | None = None,
) -> Findings:
    """Inspect shards as training would read them; errors that would stop training are recorded.

    The choice of shards and samples depends only on their numbers, so repeated inspections give the same results.
    """
    began = time.monotonic()
    decoding = decoding or Decoding()
    augmentation = augmentation or Augmentation()
    if decoding.pixel_range == "auto":  # deep images are shown and measured, although training would stop
        decoding = replace(decoding, pixel_range=STRETCH)
    fields = FieldSurvey([Filter.of(condition) for condition in options.filters])
    selection = Selection(captions=CaptionRule(fields=options.captions), image=options.image)
    survey = ShardSurvey(
        options.sources,
        split=options.split,
        selection=selection,
        cache=cache,
        shards=options.shards,
        quiet=options.quiet,
    )
    checker = SampleChecker(
        survey=survey, image_size=options.image_size, decoding=decoding, augmentation=augmentation
    )
    decoded: list[Sample] = []
    good: list[Sample] = []
    chosen = _spread(len(survey), options.samples)
    with CountProgress("decoding samples", total=len(chosen), shown=not options.quiet) as bar:
        for sample in checker.read_samples(chosen):
            decoded.append(sample)
            if not sample.cause:
                good.append(sample)
            fields.add(sample.fields)
            sample.fields = None  # saves memory
            bar.show(len(decoded), len(decoded) - len(good))
            if not good and len(decoded) >= _FIRST_SAMPLES:
                break
    if not good:
        raise explain_bad_start(survey, decoded)
    texts = list(decoded)
    more = [] if survey.remote else _spread(len(survey), _MORE_TEXTS)
    for i in sorted({*more} - {*chosen}):
        sample, _ = read_sample(survey, i)
        fields.add(sample.fields)
        sample.fields = None
        texts.append(sample)
    names = survey.summarize_names()
    members = {TEXT, *(member.name for member in names.members)}
    unknown = fields.unknown([name for name in options.captions if name.lower() not in members])
    sheet = min(_SHEET, len(good))
    held_out = None
    if options.split == "train":
        held_out = _compare_test_split(options.sources, selection, good, options.samples)
    return Findings(
        sources=tuple(map(redact_url, options.sources)),
        split=options.split,
        image_size=options.image_size,
        decoding=decoding,
        context_length=CONTEXT_LENGTH,
        max_bad=max_bad,
        batch_size=options.batch_size,
        shards=survey.summarize_shards(),
        names=names,
        sampled=summarize_bad(decoded),
        captions=summarize_captions(texts, unknown),
        fields=fields.summarize_fields(),
        filtered=fields.summarize_filters(),
        pictures=summarize_images(good, options.image_size, decoding.pixel_range),
        held_out=held_out,
        sheet=tuple(checker.show(good[i * len(good) // sheet]) for i in range(sheet)),
        bad_shown=tuple(map(checker.show, pick_bad(decoded))),
        seconds=time.monotonic() - began,
    )


def _spread(total: int, count: int) -> list[int]:
    """Choose samples spread evenly, with a fixed seed; all if there are not more."""
    if count >= total:
        return list(range(total))
    edges = np.arange(count + 1) * total // count  # one of each interval, so that none occurs twice
    chosen: list[int] = random_of(_SEED).integers(edges[:-1], edges[1:]).tolist()
    return chosen


def _compare_test_split(
    sources: Sequence[str], selection: Selection, train: Sequence[Sample], samples: int
) -> HeldOut | None:
    folders = [source for source in sources if (Path(source) / "test").is_dir()]
    if not folders:
        return None
    try:
        survey = ShardSurvey(folders, split="test", selection=selection, cache=None)
    except DataError:  # an unreadable test split is not an error of the training split
        return None
    digests = {sample.image.digest for sample in train if sample.image is not None}
    chosen = _spread(len(survey), samples)
    equal = [image_digest(read_sample(survey, i, image=True)[1]) in digests for i in chosen]
    return HeldOut(read=len(chosen), trained_on=sum(equal))
