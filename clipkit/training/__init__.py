"""What train.py calls; here, optimizers and learning rate schedules by name. Imports no torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipkit.config import OptimConfig, late

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from clipkit.model.clip import CLIP

__all__ = ["OPTIMIZERS", "SCHEDULES", "OptimizerEntry", "Schedule"]


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """What other code needs to know about an optimizer.

    An optimizer whose state is not AdamW's has a method ``expected_state``, see ``clipkit.training.optim``.

    Attributes:
        make: builds it for a model on its device, sharded or not.
        matrix_bytes: of state for each trained number of the matrices in blocks.
        other_bytes: the same of all other parameters.
        parameters_join_late: whether parameters may get their first gradient after others, as with
            ``lock.unfreeze_every``.
    """

    make: Callable[["CLIP", OptimConfig], "Optimizer"]
    matrix_bytes: int = 8
    other_bytes: int = 8
    parameters_join_late: bool = True


OPTIMIZERS: dict[str, OptimizerEntry] = {
    "adamw": OptimizerEntry(make=late("clipkit.training.optim:adamw")),
    "stable_adamw": OptimizerEntry(make=late("clipkit.training.optim:stable_adamw")),
    # counts steps by group: parameters that join later would start without bias correction
    "lamb": OptimizerEntry(make=late("clipkit.training.optim:lamb"), parameters_join_late=False),
    "muon": OptimizerEntry(make=late("clipkit.training.optim:muon"), matrix_bytes=4),
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the learning rate changes after the warm-up.

    Attributes:
        shape: from the fraction of the remaining steps that are made, 0 to 1, to the fraction of the way from
            ``optim.min_lr`` up to ``optim.lr``.
        decays: whether it falls by itself; otherwise ``optim.cooldown`` applies.
    """

    shape: Callable[[float], float]
    decays: bool = True


SCHEDULES: dict[str, Schedule] = {
    "cosine": Schedule(shape=lambda progress: (1 + math.cos(math.pi * progress)) / 2),
    "linear": Schedule(shape=lambda progress: 1 - progress),
    "constant": Schedule(shape=lambda progress: 1.0, decays=False),
}
