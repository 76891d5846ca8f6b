"""The training engine, which train.py drives; here the optimizers and learning rate schedules."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipkit.config import Config, OptimConfig, lazy_import, require, require_use

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from clipkit.model.clip import CLIP

__all__ = ["OPTIMIZERS", "SCHEDULES", "OptimizerEntry", "Schedule", "is_due", "learning_rate"]


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """What other code needs to know about an optimizer.

    An optimizer with other state than AdamW has a method ``expected_state``, see ``clipkit.training.optim``.

    Attributes:
        make: builds it for a model on its device, sharded or not.
        gated: whether ``step`` changes nothing if the attribute ``found_inf``, a float scalar on the device, is 1;
            with other optimizers the host waits for each decision whether to make an update.
        divides_matrices: whether ranks divide the matrices in blocks and exchange their updates in bfloat16.
        parameters_join_late: whether parameters may get their first gradient after others, as with
            ``lock.unfreeze_every``.
        ties_rows: whether rows of a matrix may be tied, as with ``shape.positions=learned_2d``.
        note: returns a note on settings of [optim] that may be unintentional, or "".
    """

    make: Callable[["CLIP", OptimConfig], "Optimizer"]
    gated: bool = False
    divides_matrices: bool = False
    parameters_join_late: bool = True
    ties_rows: bool = True
    note: Callable[[OptimConfig], str] = lambda config: ""

    def check(self, config: Config) -> None:
        """Raise ConfigError if other settings do not fit."""
        if not self.parameters_join_late:
            never = f"expected 0 with optim.name={config.optim.name}"
            for name in ("unfreeze_every", "image_until", "text_until"):
                value = getattr(config.lock, name)
                require(not value, f"lock.{name}", value, never)
            for term in config.terms.values():
                require(not term.after, f"{term.section}after", term.after, never)
        if not self.ties_rows:
            positions = config.shape.positions
            tied = (
                f"cannot be combined with optim.name={config.optim.name}, whose second moments belong to rows"
            )
            require(positions != "learned_2d", "shape.positions", positions, f"{tied} and columns")


def _note_lion(config: OptimConfig) -> str:
    if config.beta2 != OptimConfig.beta2:
        return ""
    # open_clip's pull request 432, for ViT-B/32
    usual = "Lion usually needs 0.99, a tenth of AdamW's optim.lr and ten times its optim.weight_decay"
    return f"optim.beta2 = {config.beta2:g} is usual for adamw: {usual}"


OPTIMIZERS: dict[str, OptimizerEntry] = {
    "adamw": OptimizerEntry(make=lazy_import("clipkit.training.optim:adamw"), gated=True),
    "sgd": OptimizerEntry(make=lazy_import("clipkit.training.optim:sgd")),
    "stable_adamw": OptimizerEntry(make=lazy_import("clipkit.training.optim:stable_adamw")),
    # counts steps by group: parameters that join later would start without bias correction
    "lamb": OptimizerEntry(make=lazy_import("clipkit.training.timm_optim:lamb"), parameters_join_late=False),
    "adafactor": OptimizerEntry(make=lazy_import("clipkit.training.timm_optim:adafactor"), ties_rows=False),
    "lion": OptimizerEntry(make=lazy_import("clipkit.training.optim:lion"), gated=True, note=_note_lion),
    "muon": OptimizerEntry(
        make=lazy_import("clipkit.training.optim:muon"), gated=True, divides_matrices=True
    ),
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the learning rate changes after the warm-up.

    Attributes:
        shape: maps the number of steps after the warm-up, of those after the warm-up in the whole run, and of the
            warm-up to the fraction of the way from ``optim.min_lr`` up to ``optim.lr``.
        decays: whether it ends at ``optim.min_lr``; otherwise ``optim.cooldown`` applies.
        needs_warmup: whether the warm-up is its unit of time.
    """

    shape: Callable[[int, int, int], float]
    decays: bool = True
    needs_warmup: bool = False

    def check(self, config: OptimConfig) -> None:
        """Raise ConfigError if other settings of the optimizer do not fit."""
        if self.decays:
            constant = " or ".join(name for name, schedule in SCHEDULES.items() if not schedule.decays)
            require_use("optim.cooldown", config.cooldown, f"optim.schedule={constant}", not config.cooldown)
        elif config.min_lr:
            decay = "optim.cooldown or a schedule that decays"
            require_use("optim.min_lr", config.min_lr, decay, config.cooldown > 0)
        if self.needs_warmup:
            alone = f"expected at least 1 with optim.schedule={config.schedule}, whose unit of time it is"
            require(config.warmup > 0, "optim.warmup", config.warmup, alone)


SCHEDULES: dict[str, Schedule] = {
    "cosine": Schedule(shape=lambda step, steps, _: (1 + math.cos(math.pi * (step / steps))) / 2),
    "linear": Schedule(shape=lambda step, steps, _: 1 - step / steps),
    "constant": Schedule(shape=lambda *_: 1.0, decays=False),
    # Zhai et al. 2022, https://arxiv.org/abs/2106.04560, with the warm-up as the unit of time
    "rsqrt": Schedule(
        shape=lambda step, _, warmup: math.sqrt(warmup / (warmup + step)), decays=False, needs_warmup=True
    ),
}


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Return the learning rate of update ``step`` (0 ≤ step < steps); multiply it by each group's ``lr_scale``.

    A linear warm-up, then the schedule from ``lr`` down to ``min_lr``. A constant rate, or one that falls with
    1 / √step, decays linearly over the last ``cooldown`` steps, but not before the warm-up ends, so a run can be
    extended from before them (Hu et al. 2024, https://arxiv.org/abs/2404.06395; Hägele et al. 2024,
    https://arxiv.org/abs/2405.18392).

    Args:
        step: updates made before.
        steps: number of steps of the whole run.
        config: peak, floor, warm-up, schedule and cooldown.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    begin = max(config.warmup, steps - config.cooldown)  # of the cooldown
    cooled = (step - begin) / max(1, steps - begin) if config.cooldown and step > begin else 0.0
    after = (begin if cooled else step) - config.warmup
    fraction = SCHEDULES[config.schedule].shape(after, max(1, steps - config.warmup), config.warmup)
    return config.min_lr + (config.lr - config.min_lr) * fraction * (1 - cooled)


def is_due(step: int, every: int) -> bool:
    """Return whether something that happens every ``every`` steps (0: never) happens after update ``step``."""
    return every > 0 and step > 0 and step % every == 0
