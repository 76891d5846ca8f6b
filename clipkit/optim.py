"""Optimizers by name, which parameters decay and how fast they learn, and the rate as a function of the step."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from clipkit.config import OptimConfig
from clipkit.depth import places, tower_of
from clipkit.model import CLIP
from clipkit.shards import is_sharded

__all__ = [
    "OPTIMIZERS", "SCHEDULES", "adamw", "expected_state", "learning_rate", "make_optimizer", "parameter_groups",
]  # fmt: skip


def parameter_groups(model: CLIP, config: OptimConfig) -> list[dict[str, Any]]:
    """The trainable parameters, grouped by weight decay and by ``lr_scale``, the factor of the schedule's rate.

    As published for CLIP, weights decay and gains, biases and the temperature do not. Everything of one dimension
    is a gain, a bias, the class embedding or the temperature. ``params`` is in the model's order. Lower rates for
    lower layers (``layer_decay``) are BEiT's (Bao et al. 2021, https://arxiv.org/abs/2106.08254):
    fine-tuned on handwriting, the quickstart's model reaches 88.5% with a factor of 0.8 and 92.5% without, and
    keeps as much of what it knew (bench/finetuning.py, one seed).

    Raises:
        ConfigError: rates differ by depth, and the depths of a library's tower are not known.
    """
    scales = _scales(model, config)
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decay, scale = config.weight_decay if parameter.ndim >= 2 else 0.0, scales[name]
        group = {"params": [], "weight_decay": decay, "lr": config.lr * scale, "lr_scale": scale}
        # one operation on many tensors takes either kind: FSDP2 leaves the temperature whole, as it is a scalar
        groups.setdefault((decay, scale, is_sharded(parameter)), group)["params"].append(parameter)
    return list(groups.values())


def _scales(model: CLIP, config: OptimConfig) -> dict[str, float]:
    """Factors of the rate by parameter: of its tower, and of its depth there, see clipkit/depth.py."""
    of_tower = {"image": config.image_lr_scale, "text": config.text_lr_scale, "": 1.0}
    scales = {name: of_tower[tower_of(name)] for name, _ in model.named_parameters()}
    if config.layer_decay < 1:  # else depths need not be known
        for name, place in places(model).items():
            scales[name] *= config.layer_decay**place.above
    return scales


def adamw(model: CLIP, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019) over a model's trainable parameters."""
    groups = parameter_groups(model, config)
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
    )


def _stable_adamw(model: CLIP, config: OptimConfig) -> torch.optim.Optimizer:
    from clipkit.stable_adamw import StableAdamW

    groups = parameter_groups(model, config)
    return StableAdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


def _lamb(model: CLIP, config: OptimConfig) -> torch.optim.Optimizer:
    from clipkit.lamb import Lamb

    groups = parameter_groups(model, config)
    return Lamb(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


def _muon(model: CLIP, config: OptimConfig) -> torch.optim.Optimizer:
    """Embeddings, projections and convolutions are AdamW's, as is all that is no matrix."""
    from clipkit.muon import MuonWithAdamW

    parameters = dict(model.named_parameters())
    blocks = {
        id(parameters[name])
        for name, place in places(model).items()
        if 0 < place.depth < place.top and parameters[name].ndim == 2
    }
    groups = []
    for group in parameter_groups(model, config):
        for matrices in (True, False):
            chosen = [one for one in group["params"] if (id(one) in blocks) == matrices]
            if chosen:
                groups.append({**group, "params": chosen, "matrices": matrices})
    return MuonWithAdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


# further optimizers are further entries
OPTIMIZERS: dict[str, Callable[[CLIP, OptimConfig], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "stable_adamw": _stable_adamw,
    "lamb": _lamb,
    "muon": _muon,
}


def make_optimizer(model: CLIP, config: OptimConfig) -> torch.optim.Optimizer:
    """An optimizer over a model's trainable parameters, each group with its ``lr_scale``.

    Args:
        model: a CLIP, on its device, and already spread over ranks if it is to be.
        config: which one, its rate, decay, betas and eps, and how rates differ by tower and depth.

    Raises:
        ConfigError: the optimizer cannot have this model, or rates differ by depth and the depths are not known.
    """
    return OPTIMIZERS[config.name](model, config)


def expected_state(
    optimizer: torch.optim.Optimizer, parameter: Tensor
) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of everything that an optimizer of ``OPTIMIZERS`` keeps for a parameter, by name.

    A parameter that has not had a gradient yet has no state at all.
    """
    of_parameter = (parameter.shape, parameter.dtype)
    is_matrix: Callable[[Tensor], bool] | None = getattr(optimizer, "is_matrix", None)
    if is_matrix is not None and is_matrix(parameter):
        return {"momentum_buffer": of_parameter}
    return {"exp_avg": of_parameter, "exp_avg_sq": of_parameter, "step": (torch.Size(), torch.float32)}


def _cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def _linear(progress: float) -> float:
    return 1 - progress


# from the end of the warm-up (0) to the end of the run (1): 1 is the peak, 0 the floor
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": lambda progress: 1.0,
}


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The rate of update ``step`` (0 ≤ step < steps), to be multiplied by each group's ``lr_scale``.

    A linear warm-up, then the schedule from ``lr`` down to ``min_lr``. A constant rate falls in a line over the
    last ``cooldown`` steps only, but not before the warm-up ends, so that a run can be made longer from before them
    (Hu et al. 2024, https://arxiv.org/abs/2404.06395; Hägele et al. 2024, https://arxiv.org/abs/2405.18392). On the
    quickstart a constant rate with a fifth of the steps to cool down scores as the cosine does, within what seeds
    change (bench/options.py).

    Args:
        step: updates made before.
        steps: of the whole run.
        config: the peak, the floor, the warm-up, the schedule and its cooldown.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    begin, shape = config.warmup, SCHEDULES[config.schedule]
    if config.cooldown and step >= (begin := max(config.warmup, steps - config.cooldown)):
        shape = _linear
    progress = (step - begin) / max(1, steps - begin)
    return config.min_lr + (config.lr - config.min_lr) * shape(progress)
