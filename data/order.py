"""Which samples make up batch b: a function of (seed, epoch, b), computed and never stored.

An epoch permutes the shards, cuts that sequence into windows of a few shards, and permutes the samples inside
each window. A batch is a slice of the outcome, a rank's part is a slice of the batch. So the order does not
depend on workers, ranks or time, and only the shards of one or two windows are read at any moment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from clipkit.errors import ConfigError

__all__ = ["Order", "Position"]

_T = TypeVar("_T")
_SHARDS, _SAMPLES = 0, 1  # what a stream of random numbers is for; part of its seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """A batch's place in the training: how many batches lie before it, its epoch, its number in the epoch."""

    step: int
    epoch: int
    batch: int


class Order:
    """The order of a training.

    Args:
        counts: samples by shard.
        seed: of the whole order.
        batch_size: samples of a global batch. The last ``len % batch_size`` samples of an epoch's order
            are left out of that epoch (others in each epoch).
        window: how many shards are mixed at a time.

    Raises:
        ConfigError: the data hold fewer samples than one batch.
    """

    def __init__(self, counts: Sequence[int], *, seed: int, batch_size: int, window: int = 64) -> None:
        self.counts = np.asarray(counts, dtype=np.int64)
        self.samples = int(self.counts.sum())
        if batch_size > self.samples:
            raise ConfigError(
                f"batch_size = {batch_size}, but the data hold {self.samples} samples: "
                "set a smaller batch_size or give more data"
            )
        self.seed, self.batch_size = seed, batch_size
        self.window = min(window, len(self.counts))  # more is the same, but may be beyond an int64
        self.batches_per_epoch = self.samples // batch_size
        self._starts = np.concatenate([[0], np.cumsum(self.counts)])
        self._recent: dict[tuple[int, ...], Any] = {}

    def position(self, step: int) -> Position:
        """Where the batch after ``step`` consumed ones lies."""
        epoch, batch = divmod(step, self.batches_per_epoch)
        return Position(step=step, epoch=epoch, batch=batch)

    def batch(self, step: int, *, rank: int = 0, world: int = 1) -> npt.NDArray[np.int64]:
        """(batch_size / world,) the sample numbers of a rank's part of the batch after ``step`` others."""
        assert self.batch_size % world == 0, "every rank takes an equal part"
        at = self.position(step)
        part = self.batch_size // world
        first = at.batch * self.batch_size + rank * part
        return self._slice(at.epoch, first, first + part)

    def _slice(self, epoch: int, first: int, last: int) -> npt.NDArray[np.int64]:
        _, ends = self._shards(epoch)
        pieces = []
        while first < last:
            window = int(np.searchsorted(ends, first, side="right"))
            start = int(ends[window - 1]) if window else 0
            stop = min(last, int(ends[window]))
            pieces.append(self._window(epoch, window)[first - start : stop - start])
            first = stop
        return np.concatenate(pieces)

    def _shards(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return self._remember((epoch,), lambda: self._permute_shards(epoch))

    def _window(self, epoch: int, window: int) -> npt.NDArray[np.int64]:
        return self._remember((epoch, window), lambda: self._permute_window(epoch, window))

    def _remember(self, key: tuple[int, ...], make: Callable[[], _T]) -> _T:
        value = cast(_T, self._recent.pop(key) if key in self._recent else make())
        self._recent[key] = value  # the last used comes last
        while len(self._recent) > 6:  # two epochs' shard orders and the windows around a batch
            del self._recent[next(iter(self._recent))]
        return value

    def _permute_shards(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The epoch's order of shards, and behind how many samples each window ends."""
        shards = self._random(epoch, _SHARDS).permutation(len(self.counts))
        behind = np.cumsum(self.counts[shards])
        last_of_window = np.arange(self.window - 1, len(shards) + self.window - 1, self.window)
        return shards, behind[np.minimum(last_of_window, len(shards) - 1)]

    def _permute_window(self, epoch: int, window: int) -> npt.NDArray[np.int64]:
        shards, _ = self._shards(epoch)
        chosen = shards[window * self.window : (window + 1) * self.window]
        numbers = np.concatenate([np.arange(self._starts[s], self._starts[s + 1]) for s in chosen])
        return self._random(epoch, _SAMPLES, window).permutation(numbers)

    def _random(self, *stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, *stream])))
