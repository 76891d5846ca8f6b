"""Which samples make up batch b: a function of (seed, b), computed and never stored.

An epoch permutes the shards, cuts that sequence into windows of a few shards, and permutes the samples inside
each window. A batch is a slice of the outcome, a rank's part is a slice of the batch. So the order does not
depend on workers, ranks or time, and only the shards of one or two windows are read at any moment. Every place
is computed by itself: a step costs the same at the start and after billions of samples.

Letters: N places or samples at once, S shards.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from clipkit.errors import ConfigError
from clipkit.files.splitmix import MASK, STEP, mix, mix_array

__all__ = ["Draw", "Order", "Position", "hashed", "key", "permuted"]


# --------------------------------------------------------------------------------------------------------------
# Numbers that look random and are computed from their place: hashes, and permutations without a table.
#
# Only 64-bit integer arithmetic is used, so that the outcome is the same on every machine and in every release
# of every library. Letters: N numbers asked for at once.

_ROUND_KEY = 0xBF58476D1CE4E5B9  # added to the key of a permutation at each round
_ROUNDS = 8

Integers = npt.NDArray[np.int64] | npt.NDArray[np.uint64]


def key(*numbers: int) -> int:
    """64 bits that depend on all of ``numbers`` (non-negative) and on their order."""
    state = 0
    for number in numbers:
        assert number >= 0
        while True:  # by digits of 64 bits
            state = mix((state + STEP + (number & MASK)) & MASK)
            number >>= 64
            if not number:
                break
    return state


def hashed(keys: int | npt.NDArray[np.uint64], numbers: Integers) -> npt.NDArray[np.uint64]:
    """(N,) 64 bits for each of (N,) ``numbers``, under one key or a key for each."""
    return mix_array(
        (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(STEP) + np.asarray(keys, np.uint64)
    )


def permuted(
    positions: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """Where a permutation of ``range(size)`` sends each position; the key says which permutation.

    A Feistel network on pairs (row, column) of a table with about √size columns; the few of its cells that are
    no number below ``size`` are sent on until one is (Black and Rogaway 2002).

    Args:
        positions: (N,) 0 ≤ position < size.
        sizes: (N,) the size that each position belongs to.
        keys: (N,) well mixed, and the same for all positions of one permutation.
    """
    size = sizes.astype(np.uint64)
    width = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    height = (size + width - np.uint64(1)) // width
    outcome = _sent(positions.astype(np.uint64), width, height, keys)
    while len(again := np.flatnonzero(outcome >= size)):
        outcome[again] = _sent(outcome[again], width[again], height[again], keys[again])
    return outcome.astype(np.int64)


def _sent(
    cells: npt.NDArray[np.uint64],
    width: npt.NDArray[np.uint64],
    height: npt.NDArray[np.uint64],
    keys: npt.NDArray[np.uint64],
) -> npt.NDArray[np.uint64]:
    row, column = np.divmod(cells, width)
    for _ in range(_ROUNDS // 2):
        keys = keys + np.uint64(_ROUND_KEY)
        column = (column + mix_array(row * np.uint64(STEP) + keys)) % width
        keys = keys + np.uint64(_ROUND_KEY)
        row = (row + mix_array(column * np.uint64(STEP) + keys)) % height
    return row * width + column


# --------------------------------------------------------------------------------------------------------------

# what random numbers are for; part of their key
_SHARDS, _SAMPLES, _BATCH, _WINDOW, _SLOT, _WITHIN = range(6)
_KEPT_EPOCHS = 2  # whose shard order is kept: a batch may span two


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """A batch's place in the training: how many batches lie before it, its epoch, its number in the epoch."""

    step: int
    epoch: int
    batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Samples of a batch.

    Attributes:
        ids: (N,) int64 sample numbers.
        epochs: (N,) int64, which time its source gives this sample; where samples are drawn with replacement, a
            number that no other draw of that source has. With the sample's number it says how it is augmented.
        first_row: the place of the first of them in the global batch.
    """

    ids: npt.NDArray[np.int64]
    epochs: npt.NDArray[np.int64]
    first_row: int = 0

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """(N,) places in the global batch."""
        return np.arange(self.first_row, self.first_row + len(self.ids))


class Order:
    """The order of a training.

    Args:
        counts: (S,) samples by shard.
        seed: of the whole order.
        batch_size: samples of a global batch.
        window: how many shards are mixed at a time.
        wrap: what becomes of the last samples of an epoch that fill no batch: the next epoch's first ones
            complete it, or (False) they are left out of that epoch, others in each.
        sources: how many shards belong to each source, in order; their sum is S. Default: one source.
        weights: of each source, its share of every batch, up to rounding. A source that is through begins its
            next epoch, whatever the others do, so nothing is left out. Empty: all sources are one.
        resample: draw with replacement: ``window`` shards at a time, each by its number of samples, and
            samples of these, as many as they hold on average. Every sample is as likely as any other.

    Raises:
        ConfigError: the data hold fewer samples than one batch, weights do not fit the sources, or one of the
            sources holds no sample.
    """

    def __init__(
        self,
        counts: Sequence[int] | npt.NDArray[np.int64],
        *,
        seed: int,
        batch_size: int,
        window: int = 64,
        wrap: bool = False,
        sources: Sequence[int] = (),
        weights: Sequence[float] = (),
        resample: bool = False,
    ) -> None:
        self.counts = np.asarray(counts, dtype=np.int64)
        self.samples = int(self.counts.sum())
        if batch_size > self.samples:
            raise ConfigError(
                f"batch_size = {batch_size}, but the data hold {self.samples} samples: "
                "set a smaller batch_size or give more data"
            )
        if weights and len(weights) != len(sources):
            raise ConfigError(f"data.weights names {len(weights)} weights for {len(sources)} sources")
        self.seed, self.batch_size = seed, batch_size
        self.batches_per_epoch = self.samples // batch_size
        self.leaves_out = not (wrap or weights or resample)  # an epoch's last samples
        parts = list(sources) if weights else [len(self.counts)]
        assert sum(parts) == len(self.counts)
        self._shares = _shares(weights or (1.0,))
        kind = _Resampled if resample else _Source
        self._sources: list[_Source] = []
        first_shard = first_sample = 0
        for number, shards in enumerate(parts):
            part = self.counts[first_shard : first_shard + shards]
            self._sources.append(kind(part, key(seed, number), first_sample, first_shard, window))
            first_shard += shards
            first_sample += int(part.sum())
            if not part.sum():
                raise ConfigError(
                    f"source {number + 1} of data.train holds no sample that counts: leave it out"
                )

    def position(self, step: int) -> Position:
        """Where the batch after ``step`` consumed ones lies; of a mixture, as if its sources were one."""
        epoch, batch = divmod(step, self.batches_per_epoch)
        return Position(step=step, epoch=epoch, batch=batch)

    def part(self, rank: int, world: int) -> range:
        """The places of the global batch that a rank takes: of 16 samples three ranks take 5, 5 and 6.

        Raises:
            ConfigError: there are more ranks than samples in a batch, so that one would have none.
        """
        assert 0 <= rank < world
        if world > self.batch_size:
            raise ConfigError(
                f"batch_size = {self.batch_size} is less than the {world} processes, and each takes a part: "
                "set a larger batch_size or start fewer"
            )
        return range(rank * self.batch_size // world, (rank + 1) * self.batch_size // world)

    def batch(self, step: int, *, rank: int = 0, world: int = 1) -> Draw:
        """A rank's part of the batch after ``step`` others; those of all ranks, one after the other, are the batch.

        Raises:
            ConfigError: as for ``part``.
        """
        part = self.part(rank, world)
        places = np.arange(part.start, part.stop)
        if len(self._sources) == 1:
            draw = self._sources[0].take(self._start(step) + places)
        else:
            size = np.full(len(part), self.batch_size)
            batch_key = np.full(len(part), key(self.seed, _BATCH, step), dtype=np.uint64)
            draw = self._mixed(step, permuted(places, size, batch_key))
        return replace(draw, first_row=part.start)

    def shards_ahead(self, step: int) -> tuple[list[int], list[int]]:
        """The shards of the windows from which the batch after ``step`` others is drawn, and of the next ones."""
        mixed = len(self._sources) > 1
        places = _taken(step * self.batch_size, self._shares) if mixed else [self._start(step)]
        ends = _taken((step + 1) * self.batch_size, self._shares) if mixed else [places[0] + self.batch_size]
        near = [source.windows(*part) for source, *part in zip(self._sources, places, ends, strict=True)]
        return [shard for now, _ in near for shard in now], [shard for _, later in near for shard in later]

    def describe(self, steps: int, names: Sequence[str] = ()) -> str:
        """How often so many steps go through the data, and what becomes of an epoch's last samples.

        Args:
            steps: of the whole training.
            names: of the sources, as they may be shown; by default their numbers.
        """
        drawn = _taken(steps * self.batch_size, self._shares)
        times = [f"{n / source.samples:.3g}" for n, source in zip(drawn, self._sources, strict=True)]
        resampled = isinstance(self._sources[0], _Resampled)
        if len(times) > 1:
            named = names or [f"source {number + 1}" for number in range(len(times))]
            of_each = ", ".join(f"{name} {n} times" for name, n in zip(named, times, strict=True))
            how = "with replacement, as many as in" if resampled else "and gone through:"
            return f"mixed in batches of {self.batch_size}, {how} {of_each}"
        if resampled:
            return f"drawn with replacement in batches of {self.batch_size}, {times[0]} times as many"
        left = self.samples % self.batch_size
        last = f"{left} samples left out of each" if self.leaves_out else "no sample left out"
        return f"{self.batches_per_epoch} batches of {self.batch_size} an epoch, {last}, {times[0]} epochs in all"

    def _start(self, step: int) -> int:
        """How many places of the only source's endless sequence lie before a step."""
        if not self.leaves_out:
            return step * self.batch_size
        at = self.position(step)
        return at.epoch * self.samples + at.batch * self.batch_size

    def _mixed(self, step: int, places: npt.NDArray[np.int64]) -> Draw:
        """The samples at places of a batch in which the sources lie one after the other."""
        before = _taken(step * self.batch_size, self._shares)
        after = _taken((step + 1) * self.batch_size, self._shares)
        ids, epochs = np.empty_like(places), np.empty_like(places)
        first = 0
        for source, begin, end in zip(self._sources, before, after, strict=True):
            here = (places >= first) & (places < first + end - begin)
            draw = source.take(begin + places[here] - first)
            ids[here], epochs[here] = draw.ids, draw.epochs
            first += end - begin
        return Draw(ids=ids, epochs=epochs)


def _shares(weights: Sequence[float]) -> list[Fraction]:
    """Of what the sources before a source leave, the share that it takes; exact, so that it never drifts."""
    if not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(f"data.weights = {list(weights)} does not fit: each above 0, none infinite")
    exact = [Fraction(repr(float(weight))) for weight in weights]
    return [one / sum(exact[number:]) for number, one in enumerate(exact)]


def _taken(drawn: int, shares: Sequence[Fraction]) -> list[int]:
    """How many of the first ``drawn`` samples of a mixture each source gave: its share, rounded; never shrinks."""
    taken = []
    for share in shares:
        # to the nearest: rounded down, what is lost would add up for the last source
        taken.append((2 * drawn * share.numerator + share.denominator) // (2 * share.denominator))
        drawn -= taken[-1]
    return taken


class _Source:
    """The endless sequence of one source: epoch after epoch, each with every sample once."""

    def __init__(
        self, counts: npt.NDArray[np.int64], seed: int, first: int, first_shard: int, window: int
    ) -> None:
        self.counts, self.seed, self.first, self.first_shard = counts, seed, first, first_shard
        self.window = min(window, len(counts))  # more is the same, but may be beyond an int64
        self.samples = int(counts.sum())
        self.starts = np.cumsum(counts) - counts
        self._recent: dict[int, tuple[npt.NDArray[np.int64], ...]] = {}

    def take(self, places: npt.NDArray[np.int64]) -> Draw:
        """The samples at (N,) places of the sequence."""
        epochs, within = np.divmod(places, self.samples)
        ids = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            ids[here] = self._of_epoch(epoch, within[here])
        return Draw(ids=ids + self.first, epochs=epochs)

    def windows(self, begin: int, end: int) -> tuple[list[int], list[int]]:
        """The shards of the windows in which places ``begin`` up to ``end`` lie, and of the next window."""
        epoch, first = self._window_at(begin)
        last_epoch, last = self._window_at(max(begin, end - 1))
        if last_epoch == epoch:
            now = self._of_windows(epoch, first, last + 1)
        elif last_epoch == epoch + 1:
            now = self._of_windows(epoch, first, None) + self._of_windows(last_epoch, 0, last + 1)
        else:  # a whole epoch lies between
            now = self._of_windows(last_epoch, 0, None)
        following = self._of_windows(last_epoch, last + 1, last + 2) or self._of_windows(last_epoch + 1, 0, 1)
        return list(dict.fromkeys(now)), following

    def _window_at(self, place: int) -> tuple[int, int]:
        """The epoch that a place lies in, and the number of its window."""
        epoch, within = divmod(place, self.samples)
        return epoch, int(np.searchsorted(self._shards(epoch)[2], within, side="right"))

    def _of_windows(self, epoch: int, first: int, end: int | None) -> list[int]:
        """The shards of windows ``first`` up to ``end``, or to the epoch's last."""
        until = None if end is None else end * self.window
        shards: list[int] = (self._shards(epoch)[0][first * self.window : until] + self.first_shard).tolist()
        return shards

    def _of_epoch(self, epoch: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        shards, behind, ends = self._shards(epoch)
        window = np.searchsorted(ends, places, side="right")
        start = np.where(window > 0, ends[window - 1], 0)
        keys = hashed(key(self.seed, _SAMPLES, epoch), window)
        mixed = start + permuted(places - start, ends[window] - start, keys)
        slot = np.searchsorted(behind, mixed, side="right")
        shard = shards[slot]
        return self.starts[shard] + mixed - (behind[slot] - self.counts[shard])

    def _shards(self, epoch: int) -> tuple[npt.NDArray[np.int64], ...]:
        """The epoch's order of shards, behind how many samples each ends, and behind how many each window."""
        made = self._recent.pop(epoch, None)
        if made is None:
            drawn = hashed(key(self.seed, _SHARDS, epoch), np.arange(len(self.counts)))
            shards = np.argsort(drawn, kind="stable")
            behind = np.cumsum(self.counts[shards])
            last = np.arange(self.window - 1, len(shards) + self.window - 1, self.window)
            made = shards, behind, behind[np.minimum(last, len(shards) - 1)]
        self._recent[epoch] = made  # the last used comes last
        while len(self._recent) > _KEPT_EPOCHS:
            del self._recent[next(iter(self._recent))]
        return made


class _Resampled(_Source):
    """The endless sequence of one source of which every sample is drawn anew."""

    def take(self, places: npt.NDArray[np.int64]) -> Draw:
        slot = (hashed(key(self.seed, _SLOT), places) % np.uint64(self.window)).astype(np.int64)
        shard = self._drawn(places // self._of_window() * self.window + slot)
        within = hashed(key(self.seed, _WITHIN), places) % self.counts[shard].astype(np.uint64)
        return Draw(ids=self.first + self.starts[shard] + within.astype(np.int64), epochs=places)

    def windows(self, begin: int, end: int) -> tuple[list[int], list[int]]:
        first, last = (place // self._of_window() for place in (begin, max(begin, end - 1)))
        drawn = self._drawn(np.arange(first * self.window, (last + 2) * self.window)) + self.first_shard
        now, following = drawn[: -self.window].tolist(), drawn[-self.window :].tolist()
        return list(dict.fromkeys(now)), following

    def _of_window(self) -> int:
        """Places of a window: as many as its shards hold samples on average."""
        return max(1, self.samples * self.window // len(self.counts))

    def _drawn(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The shard of each slot of each window, drawn by how many samples it holds."""
        sample = hashed(key(self.seed, _WINDOW), slots) % np.uint64(self.samples)
        return np.searchsorted(self.starts, sample.astype(np.int64), side="right") - 1
