"""The samples of an inspection that are read and decoded, and how long that takes."""

import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch

from clipkit.errors import DataError
from clipkit.image_traits import Decoding
from clipkit.tokenizer import tokenize
from data.captions import TEXT
from data.index import CAPTION, IMAGE, META
from data.inspect.course import Course, Progress, Spot
from data.inspect.findings import Speed
from data.inspect.look import OpenBeginning
from data.inspect.one_sample import EMPTY_CAPTION, Making, Trial, try_sample
from data.inspect.refusal import seen
from data.inspect.summary import speed_of
from data.open_shard import OpenShard
from data.unknown_fields import no_caption, note_texts

__all__ = ["Trials"]

_FIRST_SAMPLES = 64  # of which one must be good
_REMOTE_READERS, _LOCAL_READERS = 16, 8
_SHEET = 24  # samples on the contact sheet
_TIMED, _TIMED_SECONDS = 256, 2.0  # samples that are read to see how fast that goes


class Trials:
    """Samples tried one after the other, read and decoded by several threads."""

    def __init__(
        self, course: Course, spots: list[Spot], image_size: int, decoding: Decoding | None = None
    ) -> None:
        self.course, self.spots = course, spots
        self.how = Making(
            image_size=image_size, captions=course.selection.captions, decoding=decoding or Decoding()
        )
        self.tried = 0
        self.bad: list[Trial] = []
        self.good: list[Trial] = []
        self.sheet: list[Trial] = []
        self._known: dict[str, bool] = {}  # fields in the json of the first bad ones
        self.read, self.bytes_read, self.read_seconds = 0, 0, 0.0

    def run(self, progress: Progress | None) -> Iterator[Trial]:
        """Each of them in order; DataError if the first are all bad."""
        import simplejpeg  # noqa: F401
        from PIL import Image

        Image.init()  # and no more: what changes colours would take seconds to import, and nothing here does
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
