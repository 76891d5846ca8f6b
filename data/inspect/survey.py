"""The course of an inspection: list the shards, look into some, read samples spread evenly over them, sum up."""

import json
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from clipkit.errors import ConfigError, DataError
from clipkit.tokenizer import CONTEXT_LENGTH, tokenize
from data.augment import preload, random_of
from data.captions import CaptionRule
from data.index import CAPTION, IMAGE, META, stored_index
from data.inspect.caption_survey import CaptionSurvey
from data.inspect.findings import Findings, Place, Speed
from data.inspect.look import Look, OpenBeginning, look_into
from data.inspect.one_sample import Making, Trial, caption_of, try_sample
from data.inspect.picture_survey import PictureSurvey
from data.inspect.refusal import no_pair, seen
from data.inspect.shard_list import ShardList, check_ends, list_shards
from data.inspect.sheet import sheet_entry
from data.inspect.summary import bad_samples, names_of, shards_of, speed_of
from data.open_shard import OpenShard
from data.remote.patience import shown
from data.selection import Selection
from data.shard_file import ShardFile

if TYPE_CHECKING:
    from data.remote.shard_cache import ShardCache

__all__ = ["RATE", "REMOTE_SHARDS", "SHARDS", "inspect"]

SHARDS = 64  # looked into, if there are more
REMOTE_SHARDS = 32
RATE = 1000.0
_FIRST_SHARDS = 8  # among which a pair must be found
_FIRST_SAMPLES = 64  # of which one must be good
_PATIENCE = 20.0  # seconds for that
_ENDS_SECONDS = 5.0
_COUNT_SECONDS = 5.0
_SUSPICIOUS = 20  # shards that seem broken and are opened beside the others
_MORE_CAPTIONS = 20_000  # that are read beside those of decoded samples, where reading is cheap
_KEYS = 20_000  # whose form is looked at, in all
_REMOTE_READERS, _LOCAL_READERS = 16, 8
_SHEET = 24  # samples on the contact sheet
_MAX_STATS_BYTES = 1 << 20
_SEED = 0
_TIMED, _TIMED_SECONDS = 256, 2.0  # samples that are read to see how fast that goes

Progress = Callable[[str, int, int, int], None]


def inspect(
    sources: Sequence[str],
    *,
    split: str = "train",
    samples: int = 2000,
    shards: int = 0,
    image_size: int = 224,
    rate: float = RATE,
    captions: Sequence[str] = ("txt",),
    max_bad: float = 0.05,
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
        rate: samples a second that one GPU takes.
        captions: where they are, as ``data.captions`` names it.
        max_bad: the share of bad samples beyond which a training stops.
        cache: where copies of remote shards are kept; None reads parts of them over the network.
        progress: called with what is done, how much of it so far, how much of that failed, and how much there is.

    Raises:
        ConfigError: a number does not fit.
        DataError: there are no shards, or the first of them hold no pair of picture and caption.
    """
    _check(samples=samples, shards=shards, image_size=image_size, rate=rate)
    began = time.monotonic()
    course = _Course(list_shards(sources, split=split), captions, cache)
    course.look(shards, progress)
    chosen = course.spread(samples)
    pictures, texts = PictureSurvey(image_size), CaptionSurvey(CONTEXT_LENGTH)
    trials = _Trials(course, chosen, image_size)
    for trial in trials.run(progress):
        texts.add(trial.caption, trial.place)
        pictures.add(trial)
    course.read_more_captions(chosen, texts)
    alike = [course.again(group, trials.how) for group in pictures.groups_shown()]
    return Findings(
        sources=tuple(map(shown, sources)),
        image_size=image_size,
        context_length=CONTEXT_LENGTH,
        max_bad=max_bad,
        shards=shards_of(course.listed, course.looks, course.counts, course.ends),
        names=names_of(course.looks),
        sampled=bad_samples(trials.tried, trials.bad),
        captions=texts.found(),
        pictures=pictures.found(),
        speed=trials.speed(rate),
        sheet=tuple(map(sheet_entry, trials.sheet)),
        alike=tuple(tuple(map(sheet_entry, group)) for group in alike),
        seconds=time.monotonic() - began,
    )


def _check(*, samples: int, shards: int, image_size: int, rate: float) -> None:
    for name, value, least, most in (
        ("samples", samples, 1, 1_000_000), ("shards", shards, 0, 1_000_000), ("image_size", image_size, 1, 10_000),
        ("rate", rate, 1e-3, 1e9),
    ):  # fmt: skip
        if not least <= value <= most:
            raise ConfigError(f"{name} = {value} does not fit: {least:g} to {most:,.0f}")


@dataclass(kw_only=True)
class _Spot:
    """A sample that is to be read: which look saw it, and its row there."""

    look: Look
    row: int


class _Course:
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
        most = most or (REMOTE_SHARDS if self.remote else SHARDS)
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
        if look.beginning is None:
            self.counts[number] = len(look.rows)
        elif (stated := _stated(look.file)) is not None:
            self.counts[number] = stated
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
            elif not file.is_remote and (stated := _stated(file)) is not None:
                self.counts[unknown[at]] = stated

    def spread(self, samples: int) -> list[_Spot]:
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
            spots.append(_Spot(look=look, row=int(look.rows[place - int(ends[at])])))
        return spots

    def opened(self, look: Look) -> OpenShard | OpenBeginning:
        """The shard, opened; a few stay open."""
        if look.beginning is not None:
            return OpenBeginning(look.file, look.beginning)
        opened = self._open.get(look.number)
        if opened is None:
            opened = self._open[look.number] = OpenShard(look.file, self.selection, self.cache)
            while len(self._open) > 4:
                self._open.popitem(last=False)
        return opened

    def read_more_captions(self, read: list[_Spot], texts: CaptionSurvey) -> None:
        """Captions of other samples too, where that costs no request each."""
        known = {(spot.look.number, spot.row) for spot in read}
        for spot in [] if self.remote else self.spread(_MORE_CAPTIONS):
            if (spot.look.number, spot.row) in known:
                continue
            shard = self.opened(spot.look)
            try:
                caption = caption_of(self.selection.captions, shard.read(spot.row, (CAPTION, META)))
            except DataError:
                caption = ""
            texts.add(caption, Place(shard=spot.look.file.shown, key=shard.index.key(spot.row)))

    def again(self, group: list[tuple[int, int]], how: Making) -> Iterator[Trial]:
        """Samples that were tried before, with their crops: shard and row of each."""
        looks = {look.number: look for look in self.looks}
        for number, row in group:
            trial = try_sample(self.opened(looks[number]), row, how)
            if trial.crop is not None:
                yield trial


class _Trials:
    """Samples tried one after the other, read and decoded by several threads."""

    def __init__(self, course: _Course, spots: list[_Spot], image_size: int) -> None:
        self.course, self.spots = course, spots
        self.how = Making(image_size=image_size, captions=course.selection.captions)
        self.tried = 0
        self.bad: list[Trial] = []
        self.good: list[Trial] = []
        self.sheet: list[Trial] = []
        self.read, self.bytes_read, self.read_seconds = 0, 0, 0.0

    def run(self, progress: Progress | None) -> Iterator[Trial]:
        """Each of them in order; DataError if the first are all bad."""
        preload()
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

    def _try(self, shard: OpenShard | OpenBeginning, spot: _Spot, number: int) -> Trial:
        extension = spot.look.extension_at(int(shard.index.blocks[spot.row][0]))
        trial = try_sample(shard, spot.row, self.how, extension=extension)
        trial.shard = spot.look.number
        return trial

    def _sort(self, trial: Trial) -> None:
        if trial.cause:
            self.bad.append(trial)
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
        causes = Counter(trial.cause for trial in self.bad).most_common(2)
        told = "; ".join(f"{cause} ({count})" for cause, count in causes)
        extensions: Counter[str] = Counter()
        for look in self.course.looks:
            extensions.update(look.names.extensions)
        return (
            f"none of the first {self.tried} samples can be used: {told}; extensions seen: {seen(extensions)}"
        )


def _coarse_first(count: int) -> list[int]:
    """0 to count - 1, so that each beginning of the list is spread over all: numbers by their reversed bits."""
    bits = max(1, (count - 1).bit_length())
    turned = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [number for number in turned if number < count]


def _stated(shard: ShardFile) -> int | None:
    """How many samples the ``_stats.json`` beside a shard says that it has."""
    stem, dot, _ = shard.url.rpartition(".tar")
    if not dot or shard.url.startswith("pipe:"):
        return None
    try:
        text = _small_file(f"{stem}_stats.json", remote=shard.is_remote)
        stated = json.loads(text)["successes"] if text else None
    except (DataError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return stated if type(stated) is int and stated >= 0 else None


def _small_file(url: str, *, remote: bool) -> str | None:
    if remote:
        from data.remote import store

        return store.read_text(url, limit=_MAX_STATS_BYTES)
    with Path(url).open(encoding="utf-8", errors="replace") as file:
        return file.read(_MAX_STATS_BYTES)
