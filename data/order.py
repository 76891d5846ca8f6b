"""Sample order: a function of (seed, groups, batch), computed and never stored.

An epoch permutes the shards, cuts the sequence of their samples into equal parts, one for each group, cuts the
parts into windows of a few shards, and permutes the samples within each window. A batch consists of equally many
rows of each group, the next samples of the group's part; a rank's part of the batch is a slice of the rows. With G
groups, a machine that holds 1/M of the ranks therefore reads the shards of G/M groups, about 1/M of all.

The number of groups is a setting, so the order does not depend on workers, ranks or time. Each group reads only the
shards of one or two windows at any moment. Every position is computed independently: a step costs the same at the
start and after billions of samples.

Only 64-bit integer arithmetic is used, so the order is the same on every machine and with all library versions.

With ``adjacent`` = K, runs of K samples with one value take the place of samples in all of this.

Letters: N positions or samples, S shards, G groups, K samples of a run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clipkit.errors import ConfigError
from clipkit.files import MASK, STEP, counted, mix, mix_array

_ROUND_KEY = 0xBF58476D1CE4E5B9  # added to the key of a permutation in each round
_ROUNDS = 8
# purposes of random numbers; part of their key
_SHARDS, _SAMPLES, _BATCH, _WINDOW, _SLOT, _WITHIN, _TURN, _RUN = range(8)
_KEPT_EPOCHS = 2  # for which the shard order is cached: a batch may span two

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]


def key(*numbers: int) -> int:
    """Return a 64-bit hash of non-negative integers and their order."""
    state = 0
    for number in numbers:
        assert number >= 0
        while True:  # in digits of 64 bits
            state = mix((state + STEP + (number & MASK)) & MASK)
            number >>= 64
            if not number:
                break
    return state


def hashed(keys: int | UInt64s, numbers: Int64s | UInt64s) -> UInt64s:
    """Return 64-bit hashes, (N,), of ``numbers``, (N,), with one key for all or one key each."""
    return mix_array(
        (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(STEP) + np.asarray(keys, np.uint64)
    )


def permuted(positions: Int64s, sizes: Int64s, keys: UInt64s) -> Int64s:
    """Apply a pseudorandom permutation of ``range(size)`` to each position.

    A Feistel network on (row, column) pairs of a table with about √size columns; the few cells beyond ``size``
    are permuted again (Black and Rogaway 2002).

    Args:
        positions: (N,) 0 ≤ position < size.
        sizes: (N,) size of each permutation.
        keys: (N,) random keys, equal for all positions of one permutation.
    """
    size = sizes.astype(np.uint64)
    width = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    height = (size + width - np.uint64(1)) // width

    def feistel(cells: UInt64s, width: UInt64s, height: UInt64s, keys: UInt64s) -> UInt64s:
        row, column = np.divmod(cells, width)
        for _ in range(_ROUNDS // 2):
            keys = keys + np.uint64(_ROUND_KEY)
            column = (column + mix_array(row * np.uint64(STEP) + keys)) % width
            keys = keys + np.uint64(_ROUND_KEY)
            row = (row + mix_array(column * np.uint64(STEP) + keys)) % height
        return row * width + column

    result = feistel(positions.astype(np.uint64), width, height, keys)
    while len(again := np.flatnonzero(result >= size)):
        result[again] = feistel(result[again], width[again], height[again], keys[again])
    return result.astype(np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """The samples of a batch.

    Attributes:
        ids: (N,) int64 sample numbers.
        epochs: (N,) int64, how often the source has returned the sample before; when sampling with replacement, a
            number unique among the source's draws. Determines the augmentation together with the sample number.
        first_row: index of the first sample in the global batch.
    """

    ids: Int64s
    epochs: Int64s
    first_row: int = 0

    @property
    def rows(self) -> Int64s:
        """(N,) indices in the global batch."""
        return np.arange(self.first_row, self.first_row + len(self.ids))


class Order:
    """The sample order of a training run.

    Args:
        counts: (S,) samples per shard.
        seed: random seed.
        batch_size: samples per global batch.
        window: number of shards that are mixed at a time, by all groups together; each mixes at least one.
        groups: number of parts of an epoch that are read at the same time, each for its own rows of the batch; a
            divisor of ``batch_size``.
        wrap: whether the last samples of an epoch that do not fill a batch are combined with the first ones of the
            next epoch; otherwise they are left out, different samples in each epoch.
        sources: number of shards of each source, in order; the sum is S. Default: one source.
        weights: fraction of every batch for each source, up to rounding. Each source starts its
            next epoch when it is exhausted, independently of the others. Empty: treat all sources as one.
        resample: draw with replacement: ``window`` shards at a time, each with probability proportional to its
            number of samples, and from these the number of samples that they contain on average. Every sample is
            equally likely.
        values: (N,) equal for samples that ``data.balance`` counts together; empty: do not balance.
        cap: most samples of a value in an epoch of its source; 0: equally many of each value, as many as they have
            on average.
        adjacent: K, samples of a value next to each other in each batch; a divisor of ``cap`` and of the rows of
            a group. A value has a multiple of K samples in an epoch.
    """

    def __init__(
        self,
        counts: Sequence[int] | Int64s,
        *,
        seed: int,
        batch_size: int,
        window: int = 64,
        groups: int = 1,
        wrap: bool = False,
        sources: Sequence[int] = (),
        weights: Sequence[float] = (),
        resample: bool = False,
        values: UInt64s | None = None,
        cap: int = 0,
        adjacent: int = 1,
    ) -> None:
        self.counts = np.asarray(counts, dtype=np.int64)
        parts = list(sources) if weights else [len(self.counts)]
        assert sum(parts) == len(self.counts)
        shard_ends = np.cumsum(parts)
        sample_ends = np.concatenate([[0], np.cumsum(self.counts)])[shard_ends]
        lengths: list[int] = np.diff(sample_ends, prepend=0).tolist()  # of an epoch of each source
        self._balances: list[_Balance] = []  # of each source; none without ``values``
        if values is not None and len(values):
            assert len(values) == sample_ends[-1] and not resample
            for source, source_values in enumerate(np.split(values, sample_ends[:-1])):
                self._balances.append(_Balance(source_values, cap, adjacent, seed=key(seed, source)))
                lengths[source] = self._balances[source].samples
        self.samples = sum(lengths)  # of an epoch
        if batch_size > self.samples:
            raise ConfigError(
                f"batch_size = {batch_size}, but the data have only {self.samples} samples: "
                f"set a smaller batch_size, such as {max(1, self.samples // 5)}, or add data"
            )
        if weights and len(weights) != len(sources):
            raise ConfigError(f"data.weights has {len(weights)} weights for {len(sources)} sources")
        if not all(0 < weight < math.inf for weight in weights):
            raise ConfigError(f"data.weights = {list(weights)}: expected positive, finite numbers")
        assert batch_size % (groups * adjacent) == 0 and (adjacent == 1 or self._balances)
        self.seed = seed
        self.adjacent = adjacent
        self.batch_size = batch_size
        self.groups = groups
        self.group_size = batch_size // groups
        self.batches_per_epoch = self.samples // batch_size
        self.leaves_out = not (wrap or weights or resample)  # the last samples of an epoch
        # Fraction of each source in what the previous sources leave; exact, so that errors do not accumulate.
        exact = [Fraction(repr(float(weight))) for weight in weights or (1.0,)]
        self._fractions = [weight / sum(exact[i:]) for i, weight in enumerate(exact)]
        most = self.batches_per_epoch * self.group_size if self.leaves_out else self.samples
        kind = _Resampled if resample else _Source
        self._sources: list[_Source] = []
        first_shard = first_sample = 0
        for source, shards in enumerate(parts):
            part = self.counts[first_shard : first_shard + shards]
            if not lengths[source]:
                raise ConfigError(f"source {source + 1} of data.train has no usable sample: remove it")
            if lengths[source] // adjacent < groups:
                raise ConfigError(
                    f"source {source + 1} of data.train has only {lengths[source]} samples for "
                    f"data.groups = {groups}: remove it or set a smaller data.groups"
                )
            self._sources.append(
                kind(
                    part,
                    seed=key(seed, source),
                    first=first_sample,
                    first_shard=first_shard,
                    window=max(1, window // groups),
                    groups=groups,
                    most=most,
                    balance=self._balances[source] if self._balances else None,
                )
            )
            first_shard += shards
            first_sample += int(part.sum())

    def part(self, rank: int, world_size: int) -> range:
        """Return a rank's rows of the global batch: for 16 samples, three ranks get 5, 5 and 6."""
        assert 0 <= rank < world_size
        if world_size > self.batch_size:
            raise ConfigError(
                f"batch_size = {self.batch_size} is less than the {world_size} processes, and each needs a sample: "
                "set a larger batch_size or start fewer processes"
            )
        return range(rank * self.batch_size // world_size, (rank + 1) * self.batch_size // world_size)

    def rank_rows(self, world_size: int) -> tuple[int, ...]:
        """Return the number of rows of each rank."""
        return tuple(len(self.part(rank, world_size)) for rank in range(world_size))

    def batch(self, step: int, *, rank: int = 0, world_size: int = 1) -> Draw:
        """Return a rank's part of the batch of a step (from 0); the parts of all ranks form the global batch."""
        part = self.part(rank, world_size)
        group, row = np.divmod(np.arange(part.start, part.stop), self.group_size)
        if len(self._sources) == 1:
            draw = self._sources[0].take(group, step * self.group_size + row)
            return replace(draw, first_row=part.start)
        draws = [self._mix_sources(step, i, row[group == i]) for i in np.unique(group).tolist()]
        return Draw(
            ids=np.concatenate([draw.ids for draw in draws]),
            epochs=np.concatenate([draw.epochs for draw in draws]),
            first_row=part.start,
        )

    def shards_ahead(self, step: int, *, rank: int = 0, world_size: int = 1) -> tuple[list[int], list[int]]:
        """Return the shards of the windows that a rank's part of a batch is drawn from, and of the next windows."""
        part = self.part(rank, world_size)
        now: dict[int, None] = {}  # in order, each once
        later: dict[int, None] = {}
        for group in range(part.start // self.group_size, (part.stop - 1) // self.group_size + 1):
            begins = self._count_drawn(step, group)
            ends = self._count_drawn(step + 1, group)
            for source, begin, end in zip(self._sources, begins, ends, strict=True):
                shards, following = source.windows(group, begin, end)
                now.update(dict.fromkeys(shards))
                later.update(dict.fromkeys(following))
        return list(now), list(later)

    def epoch(self, step: int) -> int:
        """Return the number of complete epochs before a step, 0 in the first.

        Of several weighted sources it is that of the source with the fewest. With replacement, an epoch is as many
        draws as there are samples.
        """
        complete = []
        for group in range(self.groups):
            for source, drawn in zip(self._sources, self._count_drawn(step, group), strict=True):
                complete.append(drawn // int(source.lengths[group]))
        return min(complete)

    @property
    def steps_per_epoch(self) -> float:
        """The number of steps in an epoch; not whole if the last samples are combined with those of the next."""
        return self.batches_per_epoch if self.leaves_out else self.samples / self.batch_size

    def describe(self, steps: int, names: Sequence[str] = ()) -> str:
        """Describe the number of epochs in ``steps`` steps, and what happens to the last samples of an epoch."""
        drawn = np.sum([self._count_drawn(steps, group) for group in range(self.groups)], axis=0)
        times = [f"{n / source.samples:.3g}" for n, source in zip(drawn, self._sources, strict=True)]
        resampled = isinstance(self._sources[0], _Resampled)
        if len(times) > 1:
            named = names or [f"source {i + 1}" for i in range(len(times))]
            each = ", ".join(f"{name} {n}" for name, n in zip(named, times, strict=True))
            how = " with replacement; draws per sample" if resampled else "; epochs"
            return f"mixed in batches of {self.batch_size}{how}: {each}"
        if resampled:
            return f"drawn with replacement in batches of {self.batch_size}, {times[0]} draws per sample"
        left = self.samples % self.batch_size
        last = "no sample left out"
        epochs = times[0]
        if self.leaves_out:
            last = f"{counted(left, 'sample')} left out of each epoch"
            epochs = f"{steps / self.batches_per_epoch:.3g}"
        batches = "1 batch" if self.batches_per_epoch == 1 else f"{self.batches_per_epoch:,} batches"
        in_all = "1 epoch" if str(epochs) == "1" else f"{epochs} epochs"
        return f"{batches} of {self.batch_size} an epoch, {last}, {in_all} in all"

    def describe_balance(self) -> list[str]:
        """Describe how many samples of the values each source uses in an epoch; empty without ``values``."""
        return [balance.describe() for balance in self._balances]

    def _mix_sources(self, step: int, group: int, rows: Int64s) -> Draw:
        """Return some rows of a group, in which the sources are permuted; (N,) 0 ≤ row < group_size."""
        sizes = np.full(len(rows), self.group_size // self.adjacent)
        keys = np.full(len(rows), key(self.seed, _BATCH, step * self.groups + group), dtype=np.uint64)
        # before the permutation, the samples of a source are contiguous in the group
        runs, within = np.divmod(rows, self.adjacent)
        positions = permuted(runs, sizes, keys) * self.adjacent + within
        ids = np.empty_like(positions)
        epochs = np.empty_like(positions)
        first = 0
        begins = self._count_drawn(step, group)
        ends = self._count_drawn(step + 1, group)
        for source, begin, end in zip(self._sources, begins, ends, strict=True):
            here = (positions >= first) & (positions < first + end - begin)
            draw = source.take(np.full(np.count_nonzero(here), group), begin + positions[here] - first)
            ids[here] = draw.ids
            epochs[here] = draw.epochs
            first += end - begin
        return Draw(ids=ids, epochs=epochs)

    def _count_drawn(self, step: int, group: int) -> list[int]:
        """Return the number of samples drawn by a group from each source before a step; never decreases."""
        drawn = step * self.group_size // self.adjacent
        taken = []
        # One group rounds to nearest: rounding down would favor the last source. Several round at different
        # thresholds, so that a rare source is not drawn by all of them in the same step.
        threshold = Fraction(2 * group + 1, 2 * self.groups)
        for fraction in self._fractions:
            taken.append(math.floor(drawn * fraction + threshold))
            drawn -= taken[-1]
        return [runs * self.adjacent for runs in taken]


class _Balance:
    """How often an epoch of a source has each of its samples, so that frequent values do not dominate.

    The samples of a value take turns: position k of its endless sequence is the sample whose turn is k modulo their
    number, and an epoch has the next positions. So no sample is drawn again before all others of its value.
    """

    def __init__(self, values: UInt64s, cap: int, adjacent: int, *, seed: int) -> None:
        self.adjacent = adjacent
        self._seed = seed
        names, self._codes, self.counts = np.unique(values, return_inverse=True, return_counts=True)
        firsts = np.cumsum(self.counts) - self.counts
        within = np.empty(len(values), dtype=np.int64)
        within[np.argsort(self._codes, kind="stable")] = np.arange(len(values)) - np.repeat(
            firsts, self.counts
        )
        keys = hashed(key(seed, _TURN), names)
        self._turns = permuted(within, self.counts[self._codes], keys[self._codes])
        if cap:
            self.drawn = np.minimum(self.counts, cap)
        else:
            self.drawn = np.full_like(self.counts, len(values) // max(1, len(names)))
        self.drawn = np.maximum(self.drawn // adjacent, 1) * adjacent
        self.samples = int(self.drawn.sum())

    def draw_epoch(self, epoch: int) -> tuple[Int64s, Int64s]:
        """Return the samples of an epoch, and how often each was drawn before.

        They are ascending; with K > 1, in runs of K samples of a value, whose first samples are ascending.
        """
        counts = self.counts[self._codes]
        drawn = self.drawn[self._codes]
        before = -((self._turns - epoch * drawn) // counts)
        times = -((self._turns - (epoch + 1) * drawn) // counts) - before
        samples = np.repeat(np.arange(len(times)), times)
        again = np.arange(len(samples)) - np.repeat(np.cumsum(times) - times, times)
        before = np.repeat(before, times) + again
        if self.adjacent > 1:  # other runs in each epoch; draws of the same sample are far from each other
            shuffled = hashed(key(self._seed, _RUN, epoch), samples)
            runs = np.lexsort((shuffled, before, self._codes[samples])).reshape(-1, self.adjacent)
            order = runs[np.argsort(samples[runs[:, 0]], kind="stable")].flatten()
            samples = samples[order]
            before = before[order]
        return samples, before

    def describe(self) -> str:
        """Describe the numbers of values and samples in one line."""
        samples = f"{len(self._codes):,} → {self.samples:,} samples an epoch"
        capped = np.count_nonzero(self.counts > self.drawn)
        repeated = np.count_nonzero(self.counts < self.drawn)
        more = f", {repeated:,} repeated" if repeated else ""
        return (
            f"{len(self.counts):,} values, {capped:,} capped{more}: {samples}, {self.drawn.min():,} to "
            f"{self.drawn.max():,} of each value"
        )


class _Epoch(NamedTuple):
    """The order of an epoch.

    Attributes:
        shards: (S,) shards in order.
        cumulative: (S,) runs up to the end of each of them; a run belongs to the shard of its first sample.
        ends: runs up to the end of each window.
        counts: (S,) runs of each shard.
        starts: (S,) runs of the shards before it.
        samples: the samples that are drawn, as ``_Balance.draw_epoch`` returns them; empty if each is drawn once.
        before: how often each of them was drawn before.
    """

    shards: Int64s
    cumulative: Int64s
    ends: Int64s
    counts: Int64s
    starts: Int64s
    samples: Int64s
    before: Int64s


class _Source:
    """The endless sequences of all groups in one source; an epoch of all contains every sample once.

    With ``balance``, it contains those samples that are drawn, and a shard as many of them as it has.
    """

    def __init__(
        self,
        counts: Int64s,
        *,
        seed: int,
        first: int,
        first_shard: int,
        window: int,
        groups: int,
        most: int,
        balance: _Balance | None = None,
    ) -> None:
        self.counts = counts
        self.seed = seed
        self.first = first
        self.first_shard = first_shard
        self.window = min(window, len(counts))  # a larger one has no effect, but may exceed int64
        self.groups = groups
        self.balance = balance
        self.samples = int(counts.sum()) if balance is None else balance.samples
        self.starts = np.cumsum(counts) - counts
        self.adjacent = 1 if balance is None else balance.adjacent
        # (G + 1,) where the part of each group in an epoch begins, and the end; may lie within a shard
        self.borders = self.samples // self.adjacent * np.arange(groups + 1) // groups * self.adjacent
        # (G,) samples that each group draws in an epoch
        self.lengths = np.minimum(np.diff(self.borders), most)
        self._recent: dict[int, _Epoch] = {}

    def take(self, group: Int64s, positions: Int64s) -> Draw:
        """Return the samples at (N,) positions of (N,) groups' sequences."""
        epochs, within = np.divmod(positions, self.lengths[group])
        within += self.borders[group]
        ids = np.empty_like(positions)
        times = epochs.copy()
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            epoch_positions = within[here] // np.int64(self.adjacent)
            shards, cumulative, ends, counts, starts, samples, before = self._order_epoch(epoch)
            window = np.searchsorted(ends, epoch_positions, side="right")
            start = np.where(window > 0, ends[window - 1], 0)
            keys = hashed(key(self.seed, _SAMPLES, epoch), window)
            mixed = start + permuted(epoch_positions - start, ends[window] - start, keys)
            slot = np.searchsorted(cumulative, mixed, side="right")
            shard = shards[slot]
            chosen = starts[shard] + mixed - (cumulative[slot] - counts[shard])
            if self.balance is not None:
                chosen = chosen * self.adjacent + within[here] % self.adjacent
                times[here] = before[chosen]
                chosen = samples[chosen]
            ids[here] = chosen
        return Draw(ids=ids + self.first, epochs=times)

    def windows(self, group: int, begin: int, end: int) -> tuple[list[int], list[int]]:
        """Return the shards of the windows with positions ``begin`` to ``end - 1`` of a group's sequence, and of
        the next window."""
        now, position = self._window_at(group, begin)
        while position < end:
            shards, position = self._window_at(group, position)
            now += shards
        following, _ = self._window_at(group, position)
        return now, following

    def _window_at(self, group: int, position: int) -> tuple[list[int], int]:
        """Return the shards of the window at a position of a group's sequence, and the next position after it."""
        length = int(self.lengths[group])
        epoch, within = divmod(position, length)
        shards, cumulative, ends, counts, starts, samples, _ = self._order_epoch(epoch)
        epoch_position = int(self.borders[group]) + within
        window = int(np.searchsorted(ends, epoch_position // self.adjacent, side="right"))
        start = ends[window - 1] if window else 0
        first = np.searchsorted(cumulative, start, side="right")
        last = np.searchsorted(cumulative, ends[window], side="left")
        following = position + min(int(ends[window]) * self.adjacent - epoch_position, length - within)
        window_shards = shards[first : last + 1]
        if self.adjacent > 1:  # samples of a run may be in any shard
            runs = [np.arange(starts[shard], starts[shard] + counts[shard]) for shard in window_shards]
            window_samples = samples.reshape(-1, self.adjacent)[np.concatenate(runs)]
            window_shards = np.unique(np.searchsorted(self.starts, window_samples, side="right") - 1)
        return (window_shards + self.first_shard).tolist(), following

    def _order_epoch(self, epoch: int) -> _Epoch:
        order = self._recent.pop(epoch, None)
        if order is None:
            counts = self.counts
            starts = self.starts
            samples = before = np.zeros(0, dtype=np.int64)
            if self.balance is not None:
                samples, before = self.balance.draw_epoch(epoch)
                starts = np.searchsorted(samples[:: self.adjacent], self.starts)
                counts = np.diff(starts, append=self.samples // self.adjacent)
            drawn = hashed(key(self.seed, _SHARDS, epoch), np.arange(len(self.counts)))
            shards = np.argsort(drawn, kind="stable")
            cumulative = np.cumsum(counts[shards])
            last = np.arange(self.window - 1, len(shards) + self.window - 1, self.window)
            ends = cumulative[np.minimum(last, len(shards) - 1)]
            # a window also ends where the part of a group does
            ends = np.sort(np.concatenate([ends, self.borders[1:-1] // self.adjacent]))
            order = _Epoch(shards, cumulative, ends, counts, starts, samples, before)
        self._recent[epoch] = order  # the most recently used is last
        while len(self._recent) > _KEPT_EPOCHS:
            del self._recent[next(iter(self._recent))]
        return order


class _Resampled(_Source):
    """The endless sequences of all groups in one source, drawn with replacement."""

    def take(self, group: Int64s, positions: Int64s) -> Draw:
        draws = positions * self.groups + group
        slot = (hashed(key(self.seed, _SLOT), draws) % np.uint64(self.window)).astype(np.int64)
        window = positions // self._window_samples() * self.groups + group
        shard = self._draw_shards(window * self.window + slot)
        within = hashed(key(self.seed, _WITHIN), draws) % self.counts[shard].astype(np.uint64)
        return Draw(ids=self.first + self.starts[shard] + within.astype(np.int64), epochs=draws)

    def _window_at(self, group: int, position: int) -> tuple[list[int], int]:
        samples = self._window_samples()
        window = position // samples
        slots = (window * self.groups + group) * self.window + np.arange(self.window)
        return (self._draw_shards(slots) + self.first_shard).tolist(), (window + 1) * samples

    def _window_samples(self) -> int:
        return max(1, self.samples * self.window // len(self.counts))

    def _draw_shards(self, slots: Int64s) -> Int64s:
        """Return the shard of each slot of each window, with probability proportional to its samples."""
        sample = hashed(key(self.seed, _WINDOW), slots) % np.uint64(self.samples)
        return np.searchsorted(self.starts, sample.astype(np.int64), side="right") - 1
