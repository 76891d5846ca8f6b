"""AdamW with decay only where it belongs, and the learning rate as a function of the step."""

import math
from typing import Any

import torch
from torch import nn

from clipkit.config import OptimConfig

__all__ = ["adamw", "learning_rate"]


def adamw(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) over a model's trainable parameters.

    As published for CLIP, weights decay and gains, biases and the temperature do not. Everything of one
    dimension is a gain, a bias, the class embedding or the temperature.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The rate of update ``step`` (0 ≤ step < steps): linear warm-up, then half a cosine down to ``min_lr``."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, steps - config.warmup)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2
