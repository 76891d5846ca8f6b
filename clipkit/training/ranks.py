"""Compare the ranks of a training: whether their weights are the same, and which rank the others wait for.

Ranks exchange what is compared in the background and read it some steps later, so no step waits for it.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median

import torch
from torch import Tensor, nn

from clipkit.distributed import Gathering, gather_objects, world_size
from clipkit.errors import ClipkitError
from clipkit.training.parallel import is_sharded, local_part

# Phases without communication, whose time depends on this rank alone. In the others, a rank waits for the slowest
# one. The forward pass of a sharded model gathers weights, so only the others tell its slow ranks.
_LOCAL = ("data", "forward", "optimizer")
_LOCAL_IF_SHARDED = ("data", "optimizer")


def name_ranks() -> list[str]:
    """Return names such as "rank 3 on node7", ordered by rank; all ranks call this."""
    hosts = gather_objects(os.uname().nodename)
    return [f"rank {i} on {host}" for i, host in enumerate(hosts)]


# --------------------------------------------------------------------------------------------------------------
# The weights

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_READ_AFTER = 2  # steps, by which the computation of a step is over
_SHOWN = 4  # ranks in a message


@torch.no_grad()
def checksums(model: nn.Module) -> Tensor:
    """Return (2,) int64 on the device: the sum of the bits of weights that each rank has whole, and of its shards.

    A single flipped bit always changes the sum. Takes one reading of the weights.
    """
    sums: dict[bool, list[Tensor]] = {False: [], True: []}
    for parameter in model.parameters():
        part = local_part(parameter)
        bits = part.contiguous().view(_INTEGERS[part.element_size()])
        sums[is_sharded(parameter)].append(bits.sum(dtype=torch.int64))
    zero = torch.zeros((), dtype=torch.int64, device=next(model.parameters()).device)
    return torch.stack([torch.stack([zero, *part]).sum() for part in sums.values()])


def count_shards(model: nn.Module) -> int:
    """Return over how many consecutive ranks a model is divided: 1 if each rank has the whole model."""
    sharded = next((parameter for parameter in model.parameters() if is_sharded(parameter)), None)
    if sharded is None:
        return 1
    return prod(
        sharded.device_mesh.size(dim)
        for dim, placement in enumerate(sharded.placements)
        if placement.is_shard()
    )


def find_odd_ranks(sums: Sequence[Sequence[int]], shards: int) -> list[int]:
    """Return the ranks whose weights differ from those of most ranks that should have the same.

    Args:
        sums: ``checksums`` of all ranks.
        shards: from ``count_shards``; ranks with equal remainders have the same shard.
    """
    odd: set[int] = set()
    for column, step in ((0, 1), (1, shards)):
        for first in range(step):
            ranks = range(first, len(sums), step)
            counts = Counter(sums[i][column] for i in ranks)
            (value, count), *others = counts.most_common(2)
            # of two ranks, nobody knows which one is right
            is_tie = any(count == other for _, other in others)
            odd.update(i for i in ranks if len(counts) > 1 and (is_tie or sums[i][column] != value))
    return sorted(odd)


class WeightComparison:
    """Compares the weights of all ranks at regular steps; a difference means a faulty memory or processor.

    Args:
        every: steps between two comparisons; 0 compares nothing.
    """

    def __init__(self, model: nn.Module, *, every: int) -> None:
        self._model = model
        self._every = every if world_size() > 1 else 0
        self._shards = count_shards(model)
        self._pending: tuple[int, Gathering] | None = None

    def finish_step(self, step: int, *, now: bool) -> None:
        """Compare the weights after a step if it is due; all ranks call this after each update.

        Args:
            step: number of updates so far.
            now: whether to wait for the result, as before the weights are saved; otherwise a later call reads it.

        Raises:
            ClipkitError: ranks have different weights.
        """
        if not self._every:
            return
        if self._pending is not None and step >= self._pending[0] + _READ_AFTER:
            self._read()
        if now or step % self._every == 0:
            self._read()
            self._pending = step, Gathering(checksums(self._model))
        if now:
            self._read()

    def _read(self) -> None:
        if self._pending is None:
            return
        step, gathering = self._pending
        self._pending = None
        if odd := find_odd_ranks(gathering.read().tolist(), self._shards):
            names = name_ranks()
            differing = [names[i] for i in odd[:_SHOWN]]
            if len(odd) > _SHOWN:
                differing.append(f"{len(odd) - _SHOWN} more")
            others = "those of the other ranks" if len(odd) < len(names) else "each other"
            raise ClipkitError(
                f"after step {step} the weights of {' and '.join(differing)} differ from {others}: memory or a "
                "processor there is faulty; nothing since the last checkpoint, if there is one, is saved: the same "
                "command on other machines resumes from there"
            )


# --------------------------------------------------------------------------------------------------------------
# The time that each rank works

_SLOW = 0.15  # excess over the median of the other ranks' time
_MEMORY = 0.7  # of the averages over logged steps, so that a single delay is not reported


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Seconds per step of all ranks, averaged over the last logged steps.

    Attributes:
        names: from ``name_ranks``.
        phases: of each phase that depends on the rank alone, by rank.
    """

    names: Sequence[str]
    phases: Mapping[str, Sequence[float]]

    @property
    def local(self) -> list[float]:
        """Time that each rank works."""
        return [sum(seconds) for seconds in zip(*self.phases.values(), strict=True)]

    @property
    def waiting(self) -> list[float]:
        """Time that each rank waits for the slowest one."""
        slowest = max(self.local)
        return [slowest - seconds for seconds in self.local]

    @property
    def slowest(self) -> int:
        return max(range(len(self.names)), key=self.local.__getitem__)

    @property
    def excess(self) -> float:
        """By which fraction the slowest rank works longer than the median of the others."""
        others = _median_of_others(self.local, self.slowest)
        return (self.local[self.slowest] - others) / others if others else 0.0

    @property
    def cause(self) -> str:
        """The phase in which the slowest rank loses most time."""
        i = self.slowest

        def lost(name: str) -> float:
            return self.phases[name][i] - _median_of_others(self.phases[name], i)

        return max(self.phases, key=lost)

    @property
    def is_slow(self) -> bool:
        """Whether the slowest rank delays the others by much."""
        return self.excess > _SLOW

    def describe(self) -> str:
        """Return a line about the slowest rank."""
        seconds = self.phases[self.cause]
        others = _median_of_others(seconds, self.slowest)
        return (
            f"{self.names[self.slowest]} takes {self.excess:.0%} longer than the others, mostly in {self.cause}: "
            f"{1000 * seconds[self.slowest]:.3g} ms a step instead of {1000 * others:.3g} ms; all ranks wait for it"
        )

    def record(self) -> dict[str, object]:
        """Return what is recorded of all ranks, in milliseconds."""

        def milliseconds(seconds: Sequence[float]) -> list[float]:
            return [round(1000 * value, 1) for value in seconds]

        phases = {name: milliseconds(seconds) for name, seconds in self.phases.items()}
        return {
            "cause": self.cause,
            **phases,
            "waiting": milliseconds(self.waiting),
            "names": list(self.names),
        }


def _median_of_others(seconds: Sequence[float], i: int) -> float:
    return median(value for j, value in enumerate(seconds) if j != i)


class RankClock:
    """Exchanges the seconds of phases among ranks; all ranks create and use it together."""

    def __init__(self, *, sharded: bool) -> None:
        self._phases = _LOCAL_IF_SHARDED if sharded else _LOCAL
        self._names = name_ranks()
        self._calls = 0
        self._pending: Gathering | None = None
        self._averages: Tensor | None = None  # (W, P) of W ranks and P phases

    def exchange(self, phases: Mapping[str, float]) -> RankTimes | None:
        """Send this rank's seconds per step, and return those of all ranks up to the last call; None at first.

        The first steps, which compile and allocate, are left out.
        """
        self._calls += 1
        if world_size() == 1 or self._calls == 1:
            return None
        arrived = self._pending
        self._pending = Gathering(torch.tensor([phases[name] for name in self._phases]))
        if arrived is None:
            return None
        seconds = arrived.read()
        self._averages = seconds if self._averages is None else self._averages.lerp(seconds, 1 - _MEMORY)
        by_phase = zip(self._phases, self._averages.T.tolist(), strict=True)
        return RankTimes(names=self._names, phases=dict(by_phase))
