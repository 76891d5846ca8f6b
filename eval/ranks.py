"""How processes share the work of an evaluation: process groups themselves are known elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["ONE_RANK", "Gather", "Ranks"]

Gather = Callable[[Tensor], Tensor]  # the elementwise sum of every rank's tensor, on each rank


def _alone(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How many processes share the work, which one this is, and how they add up tensors.

    Attributes:
        rank: this process's number, below ``world``.
        world: how many processes there are.
        gather: sums a tensor over ranks; ``clipkit.distributed.sum_over_ranks`` where there are several.
    """

    rank: int = 0
    world: int = 1
    gather: Gather = _alone


ONE_RANK = Ranks()
