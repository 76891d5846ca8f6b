"""The shards of an inspection: which are looked into, how many samples all have, which samples are read."""

import os
import re
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from clipkit.errors import DataError
from clipkit.files.patterns import IMAGE_EXTENSIONS
from clipkit.files.traits import Decoding
from clipkit.model.tokenizer import tokenize
from data.augment import Augmentation, preload, random_of
from data.captions import TEXT, CaptionRule, Selection
from data.inspect.findings import BadCause, Broken, Names, Place, Sampled, ShardsFound, Speed, Stated, wilson
from data.inspect.samples import (
    EMPTY_CAPTION,
    Look,
    Making,
    OpenBeginning,
    ShardList,
    Texts,
    Trial,
    check_ends,
    look_into,
    no_pair,
    read_texts,
    seen,
    try_sample,
)
from data.shards.index import CAPTION, IMAGE, META, stored_index
from data.shards.manifest import no_caption, note_texts, stated_count
from data.shards.shard import OpenShard

if TYPE_CHECKING:
    from data.remote.cache import ShardCache

__all__ = [
    "Course",
    "Progress",
    "Spot",
    "Trials",
    "bad_samples",
    "key_pattern",
    "names_of",
    "shards_of",
    "speed_of",
]

_SHARDS = 64  # looked into, if there are more
_REMOTE_SHARDS = 32
_FIRST_SHARDS = 8  # among which a pair must be found
_PATIENCE = 20.0  # seconds for that
_ENDS_SECONDS = 5.0
_COUNT_SECONDS = 5.0
_SUSPICIOUS = 20  # shards that seem broken and are opened beside the others
_MORE_TEXTS = 20_000  # captions that are read beside those of decoded samples, where reading is cheap
_KEYS = 20_000  # whose form is looked at, in all
_OPEN = 4  # shards that stay open
_SEED = 0

Progress = Callable[[str, int, int, int], None]


@dataclass(kw_only=True)
class Spot:
    """A sample that is to be read: which look saw it, and its row there."""

    look: Look
    row: int


class Course:
    """The shards of an inspection and what was seen of them."""

    def __init__(self, listed: ShardList, captions: Sequence[str], cache: "ShardCache | None") -> None:
        self.listed, self.cache = listed, cache
        self.selection = Selection(captions=CaptionRule(fields=tuple(captions)))
        self.until = time.monotonic() + _PATIENCE
        self.files = listed.files
        self.remote = any(file.is_remote for file in self.files)
        self.looks: list[Look] = []
        self.counts: npt.NDArray[np.int64] = np.full(len(self.files), -1, dtype=np.int64)
        self.ends: tuple[int, int] = (0, 0)
        self._open: OrderedDict[int, OpenShard] = OrderedDict()

    def look(self, most: int, progress: Progress | None) -> None:
        """Look into ``most`` shards spread over all, and some that seem broken; DataError if there is no pair."""
        count = len(self.files)
        most = most or (_REMOTE_SHARDS if self.remote else _SHARDS)
        wanted = sorted({number * count // min(most, count) for number in range(min(most, count))})
        order = [wanted[number] for number in _coarse_first(len(wanted))]
        found = 0
        for done, number in enumerate(order, start=1):
            look = self._look(number, keys=max(1, _KEYS // len(order)))
            found += len(look.rows)
            if progress is not None:
                progress("looking into shards", done, sum(bool(one.cause) for one in self.looks), len(order))
            late = time.monotonic() > self.until
            if not found and (done >= min(_FIRST_SHARDS, len(order)) or late):
                raise DataError(no_pair(self.looks, self.selection))
        self.ends = self._check_ends({*wanted})
        self.looks.sort(key=lambda look: look.number)
        self._count_others()

    def _look(self, number: int, *, keys: int) -> Look:
        look = look_into(
            number, self.files[number], self.selection, cache=self.cache, keys=keys, until=self.until
        )
        self.looks.append(look)
        with suppress(DataError):  # a store that does not answer says so elsewhere
            look.stated = stated_count(look.file)
        if look.beginning is None:
            self.counts[number] = len(look.rows)
        elif look.stated is not None:
            self.counts[number] = look.stated
        return look

    def _check_ends(self, looked: set[int]) -> tuple[int, int]:
        checked, suspicious = check_ends(self.files, seconds=_ENDS_SECONDS)
        for number in [one for one in suspicious if one not in looked][:_SUSPICIOUS]:
            self._look(number, keys=1)
        return checked, len(suspicious)

    def _count_others(self) -> None:
        """Take counts from where they are stored, for as long as that is quick."""
        until = time.monotonic() + _COUNT_SECONDS
        unknown = np.flatnonzero(self.counts < 0).tolist()
        for at in _coarse_first(len(unknown)):  # if time runs out they are spread over all
            if time.monotonic() > until:
                return
            file = self.files[unknown[at]]
            if (index := stored_index(file)) is not None:
                rows = self.selection.choose(index, lambda row: (None, {})).rows
                self.counts[unknown[at]] = len(rows)
            elif not file.is_remote and (stated := stated_count(file)) is not None:
                self.counts[unknown[at]] = stated

    def spread(self, samples: int) -> list[Spot]:
        """So many samples, spread evenly over the shards looked into, by a fixed seed; all if there are no more."""
        ends = np.cumsum([len(look.rows) for look in self.looks])
        total = int(ends[-1])
        if samples >= total:
            places = np.arange(total)
        else:
            edges = np.arange(samples + 1) * total // samples  # one of each stretch, so that none comes twice
            places = random_of(_SEED).integers(edges[:-1], edges[1:])
        spots = []
        for place in places.tolist():
            at = int(np.searchsorted(ends, place, side="right"))
            look = self.looks[at]
            spots.append(Spot(look=look, row=int(look.rows[place - int(ends[at])])))
        return spots

    def opened(self, look: Look) -> OpenShard | OpenBeginning:
        """The shard, opened; a few stay open."""
        if look.beginning is not None:
            return OpenBeginning(look.file, look.beginning)
        opened = self._open.get(look.number)
        if opened is None:
            opened = self._open[look.number] = OpenShard(look.file, self.selection, self.cache)
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return opened

    def more_texts(self, read: list[Spot]) -> Iterator[Texts]:
        """Captions and json of other samples too, where that costs no request each."""
        known = {(spot.look.number, spot.row) for spot in read}
        for spot in [] if self.remote else self.spread(_MORE_TEXTS):
            if (spot.look.number, spot.row) in known:
                continue
            shard = self.opened(spot.look)
            yield read_texts(shard, spot.row, self.selection.captions)

    def shard(self, number: int) -> OpenShard | OpenBeginning:
        """One of those looked into, opened."""
        return self.opened(next(look for look in self.looks if look.number == number))


def _coarse_first(count: int) -> list[int]:
    """0 to count - 1, so that each beginning of the list is spread over all: numbers by their reversed bits."""
    bits = max(1, (count - 1).bit_length())
    turned = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [number for number in turned if number < count]


# --------------------------------------------------------------------------------------------------------------
# From what was seen of shards and samples to the values that are told.

_MOST_PATTERNS = 8
_MOST_EXTENSIONS = 200
_RUN = 12  # of digits or letters that are written out in a pattern
_FIRST_PLACES = 3
_MOST_CAUSES = 20
_MOST_LISTED = 50  # shards
_PART = re.compile(r"(?P<hex>(?<![^\W_])[0-9a-f]{16,}(?![^\W_]))|[0-9]+|[^\W\d_]+")  # of a key


def shards_of(
    listed: ShardList, looks: Sequence[Look], counts: npt.NDArray[np.int64], ends: tuple[int, int]
) -> ShardsFound:
    """The shards; samples that nobody counted are taken to be as large as the others."""
    sound = [look for look in looks if not look.cause]
    broken = {look.number for look in looks if look.cause}
    known = np.delete(counts, sorted(broken))
    known = known[known >= 0]
    unknown = np.flatnonzero(counts < 0)
    sizes = np.array([max(0, file.size) for file in listed.files], dtype=np.int64)
    seen, within = sum(len(look.rows) for look in sound), sum(max(0, look.bytes_seen) for look in sound)
    total = int(known.sum()) + (round(float(sizes[unknown].sum()) * seen / within) if within else 0)
    return ShardsFound(
        count=len(counts),
        bytes=int(sizes.sum()),
        looked_into=len(looks),
        beginnings=sum(look.beginning is not None for look in looks),
        ends_checked=ends[0],
        suspicious=ends[1],
        missing=listed.missing[:_MOST_LISTED],
        missing_count=listed.missing_count,
        refused=listed.refused,
        broken=tuple(
            Broken(
                shard=look.file.shown,
                cause=look.cause.removeprefix(f"shard {look.file.shown}").lstrip(": "),
                truncated=look.truncated,
            )
            for look in looks
            if look.cause
        )[:_MOST_LISTED],
        empty=tuple(look.file.shown for look in sound if not len(look.rows))[:_MOST_LISTED],
        least=int(known.min()) if len(known) else 0,
        median=float(np.median(known)) if len(known) else 0.0,
        greatest=int(known.max()) if len(known) else 0,
        samples=total,
        samples_known=len(unknown) == 0,
        counted=len(counts) - len(unknown),
        stated=_stated(sound),
    )


def _stated(looks: Sequence[Look]) -> Stated:
    """What ``_stats.json`` says of shards that were seen whole, against the samples with a picture in them."""
    both = [
        (look.file.shown, look.stated, look.groups - look.without_picture)
        for look in looks
        if look.stated is not None and look.beginning is None
    ]
    return Stated(
        shards=len(both),
        stated=sum(stated for _, stated, _ in both),
        found=sum(found for _, _, found in both),
        differ=tuple(one for one in both if one[1] != one[2])[:_MOST_LISTED],
    )


def names_of(looks: Sequence[Look]) -> Names:
    """Keys and members of the shards looked into."""
    extensions: Counter[str] = Counter()
    upper: Counter[str] = Counter()
    repeated: Counter[str] = Counter()
    for look in looks:
        extensions.update(look.names.extensions)
        upper.update(look.names.upper_case)
        repeated.update(look.names.repeated)
    known = {*IMAGE_EXTENSIONS, "txt", "json", "cls"}
    across, example = _across(looks)
    return Names(
        groups=sum(look.groups for look in looks),
        patterns=_patterns([key for look in looks for key in look.keys]),
        extensions=dict(extensions.most_common(_MOST_EXTENSIONS)),
        upper_case=dict(upper.most_common(_MOST_EXTENSIONS)),
        second_dot=sum(
            count for name, count in extensions.items() if "." in name and name.rpartition(".")[2] in known
        ),
        hidden=sum(look.names.hidden for look in looks),
        without_picture=sum(look.without_picture for look in looks),
        without_caption=sum(look.without_caption for look in looks),
        apart=sum(look.apart for look in looks),
        apart_example=next((look.apart_example for look in looks if look.apart_example), None),
        repeated=dict(repeated.most_common(_MOST_EXTENSIONS)),
        repeated_at=tuple(
            Place(shard=look.file.shown, key=key) for look in looks for key in look.names.repeated_keys
        )[:_FIRST_PLACES],
        across=across,
        across_example=example,
    )


def _patterns(keys: Sequence[str]) -> dict[str, int]:
    exact = Counter(map(key_pattern, keys))
    if len(exact) > _MOST_PATTERNS:  # words in keys: they are not told apart
        exact = Counter(key_pattern(key, words=False) for key in keys)
    return dict(exact.most_common(_MOST_PATTERNS))


def key_pattern(key: str, *, words: bool = True) -> str:
    """The form of a key: each digit as #, long runs by their length; without ``words`` letters as ``abc``."""

    def form(match: re.Match[str]) -> str:
        part = match[0]
        if part.isdecimal():
            long = f"#×{len(part)}" if words else "#…"
            return "#" * len(part) if len(part) <= _RUN and words else long
        if match["hex"]:
            return f"hex×{len(part)}"
        return part if words else "abc"

    return _PART.sub(form, key)


def _across(looks: Sequence[Look]) -> tuple[int, str]:
    """How many keys are in more than one shard, and one of them."""
    if not looks:
        return 0, ""
    values, counts = np.unique(np.concatenate([look.key_hashes for look in looks]), return_counts=True)
    twice = values[counts > 1]
    some = {key for look in looks for key in look.keys}
    repeated = set(twice.tolist())
    example = next((key for key in sorted(some) if hash(key.encode("utf-8", "replace")) in repeated), "")
    return len(twice), example


def bad_samples(tried: int, bad: Sequence[Trial]) -> Sampled:
    """Bad samples by cause; causes that differ by numbers only are one."""
    by_cause: defaultdict[str, list[Trial]] = defaultdict(list)
    for trial in bad:
        by_cause[re.sub(r"[0-9]+", "#", trial.cause)].append(trial)
    causes = [
        BadCause(
            cause=trials[0].cause,
            count=len(trials),
            first=tuple(trial.place for trial in trials[:_FIRST_PLACES]),
        )
        for trials in sorted(by_cause.values(), key=len, reverse=True)
    ]
    low, high = wilson(len(bad), tried)
    return Sampled(tried=tried, bad=len(bad), low=low, high=high, causes=tuple(causes[:_MOST_CAUSES]))


def speed_of(good: Sequence[Trial], *, read: float, read_bytes: float, remote: bool, rate: float) -> Speed:
    """How fast one core makes samples, from the time that each good sample took; there is one at least.

    Args:
        good: samples.
        read: samples a second that one reader got.
        read_bytes: bytes a second of these.
        remote: whether they came from a store.
        rate: samples a second that one GPU takes.
    """
    make, text = (sum(getattr(trial, name) for trial in good) / len(good) for name in ("make", "text"))
    speed = Speed(
        per_core=1 / max(1e-9, make + text),
        make=1000 * make,
        text=1000 * text,
        read=read,
        read_bytes=read_bytes,
        remote=remote,
        rate=rate,
        workers=0,
        cores=len(os.sched_getaffinity(0)),
    )
    return replace(speed, workers=speed.workers_for(rate))


# --------------------------------------------------------------------------------------------------------------
# The samples of an inspection that are read and decoded, and how long that takes.

_FIRST_SAMPLES = 64  # of which one must be good
_REMOTE_READERS, _LOCAL_READERS = 16, 8
_SHEET = 24  # samples on the contact sheet
_TIMED, _TIMED_SECONDS = 256, 2.0  # samples that are read to see how fast that goes


class Trials:
    """Samples tried one after the other, read and decoded by several threads."""

    def __init__(
        self,
        course: Course,
        spots: list[Spot],
        image_size: int,
        decoding: Decoding | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.course, self.spots = course, spots
        self.how = Making(
            image_size=image_size,
            captions=course.selection.captions,
            decoding=decoding or Decoding(),
            augmentation=augmentation or Augmentation(),
        )
        self.tried = 0
        self.bad: list[Trial] = []
        self.good: list[Trial] = []
        self.sheet: list[Trial] = []
        self._known: dict[str, bool] = {}  # fields in the json of the first bad ones
        self.read, self.bytes_read, self.read_seconds = 0, 0, 0.0

    def run(self, progress: Progress | None) -> Iterator[Trial]:
        """Each of them in order; DataError if the first are all bad."""
        preload(self.how.augmentation)
        tokenize(["the first text loads the vocabulary"])
        self._time_reading()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # what is measured is one core
        try:
            for trial in self._in_order():
                self.tried += 1
                self._sort(trial)
                if progress is not None:
                    progress("decoding samples", self.tried, len(self.bad), len(self.spots))
                yield trial
            if not self.good:
                raise DataError(self._all_bad())
        finally:
            torch.set_num_threads(threads)

    def _time_reading(self) -> None:
        """Read some samples by one reader, with nothing else going on."""
        most, until = min(_TIMED, len(self.spots)), time.monotonic() + _TIMED_SECONDS
        begin = time.perf_counter()
        for number in range(most):
            spot = self.spots[number * len(self.spots) // most]
            with suppress(DataError):
                members = self.course.opened(spot.look).read(spot.row, (IMAGE, CAPTION, META))
                self.bytes_read += sum(len(one or b"") for one in members)
            self.read += 1
            if time.monotonic() > until:
                break
        self.read_seconds = time.perf_counter() - begin

    def speed(self, rate: float) -> Speed:
        """How fast all that was."""
        seconds = max(1e-9, self.read_seconds)
        return speed_of(
            self.good,
            read=self.read / seconds,
            read_bytes=self.bytes_read / seconds,
            remote=self.course.remote,
            rate=rate,
        )

    def _in_order(self) -> Iterator[Trial]:
        readers = _REMOTE_READERS if self.course.remote else min(_LOCAL_READERS, len(os.sched_getaffinity(0)))
        waiting: deque[Future[Trial]] = deque()
        pool = ThreadPoolExecutor(readers, initializer=torch.set_num_threads, initargs=(1,))
        try:
            for number, spot in enumerate(self.spots):
                waiting.append(pool.submit(self._try, self.course.opened(spot.look), spot, number))
                if len(waiting) > 2 * readers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _try(self, shard: OpenShard | OpenBeginning, spot: Spot, number: int) -> Trial:
        extension = spot.look.extension_at(int(shard.index.blocks[spot.row][0]))
        trial = try_sample(shard, spot.row, self.how, extension=extension)
        trial.shard = spot.look.number
        return trial

    def _sort(self, trial: Trial) -> None:
        if trial.cause:
            self.bad.append(trial)
            if not self.good:
                note_texts(self._known, trial.meta or {})
            if not self.good and self.tried >= _FIRST_SAMPLES:
                raise DataError(self._all_bad())
            return
        due = len(self.sheet) * len(self.spots) <= (self.tried - 1) * _SHEET
        if due and len(self.sheet) < _SHEET:
            self.sheet.append(trial)
        else:
            trial.crop = None
        self.good.append(trial)

    def _all_bad(self) -> str:
        if all(trial.cause == EMPTY_CAPTION for trial in self.bad):
            files = sum(trial.has_text for trial in self.bad)
            if not files or TEXT not in self.how.captions.fields:
                return no_caption(self.how.captions, self.tried, files, self._known)
        causes = Counter(trial.cause for trial in self.bad).most_common(2)
        told = "; ".join(f"{cause} ({count})" for cause, count in causes)
        extensions: Counter[str] = Counter()
        for look in self.course.looks:
            extensions.update(look.names.extensions)
        return (
            f"none of the first {self.tried} samples can be used: {told}; extensions seen: {seen(extensions)}"
        )
