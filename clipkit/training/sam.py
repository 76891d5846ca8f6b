"""Sharpness-aware minimization (Foret et al. 2021, https://arxiv.org/abs/2010.01412)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from clipkit.model.clip import CLIP
from clipkit.training.ema import RunningStatistics
from clipkit.training.parallel import clip_gradients, drop_gathered, local_part


@contextmanager
def perturbed_weights(model: CLIP, radius: float) -> Iterator[None]:
    """Move the weights by ``radius`` along the gradient of the global batch, and restore them bit for bit.

    In the context, gradients start as None, and forward passes do not change running statistics.

    Args:
        model: a CLIP with gradients that are complete, see ``complete_gradients``.
        radius: ρ: weights become w + ρ g / ‖g‖.
    """
    moved = [parameter for parameter in model.parameters() if parameter.grad is not None]
    weights = [local_part(parameter) for parameter in moved]
    gradients = [local_part(parameter.grad) for parameter in moved if parameter.grad is not None]
    originals = [weight.clone() for weight in weights]
    statistics = RunningStatistics(model)
    with torch.no_grad():
        step = radius / clip_gradients(model, 0.0).clamp(min=1e-12)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.addcmul_(gradient, step.to(weight.dtype))
    for parameter in moved:
        parameter.grad = None
    drop_gathered(model)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, originals, strict=True):
                weight.copy_(value)
        statistics.put_back()
        drop_gathered(model)
