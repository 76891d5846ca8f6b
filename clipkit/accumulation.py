"""Gradients of one contrastive batch computed in parts, exactly (GradCache, Gao et al. 2021).

The loss needs all features at once, the towers' activations do not fit at once: features are computed without
a graph, the loss gives the gradient at the features, and a second pass carries it through the towers part by
part. The loss, and every gradient with it, is that of the whole batch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["backward"]

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def backward(
    model: nn.Module, images: Tensor, tokens: Tensor, *, loss: Loss, parts: int, autocast: bool
) -> Tensor:
    """Add the gradient of ``loss`` to the model's parameters; returns the loss, detached.

    Args:
        model: a CLIP, possibly wrapped in DistributedDataParallel.
        images: (B, 3, S, S), see ``CLIP.forward``.
        tokens: (B, L) int64.
        loss: of image features (B, O), text features (B, O) and exp(t), such as ``clip_loss``.
        parts: how many equal pieces of the batch are computed one after the other; 1 keeps everything in one
            pass. A divisor of B.
        autocast: whether the towers run in bfloat16.
    """
    precision = torch.autocast(images.device.type, torch.bfloat16, enabled=autocast)
    if parts == 1:
        with precision:
            features = model(images, tokens)
        value = loss(*features)
        torch.autograd.backward(value)
        return value.detach()
    assert len(images) % parts == 0, (len(images), parts)  # else there would be fewer pieces, or unequal ones
    pieces = list(zip(images.chunk(parts), tokens.chunk(parts), strict=True))
    bare: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    with torch.no_grad(), precision:
        outputs = [bare(*piece) for piece in pieces]
    whole = [torch.cat([one[i] for one in outputs]).requires_grad_() for i in (0, 1)]
    scale = outputs[0][2].clone().requires_grad_()
    value = loss(whole[0], whole[1], scale)
    torch.autograd.backward(value)
    assert whole[0].grad is not None and whole[1].grad is not None and scale.grad is not None
    gradients = zip(whole[0].grad.chunk(parts), whole[1].grad.chunk(parts), strict=True)
    for number, (piece, (image_gradient, text_gradient)) in enumerate(zip(pieces, gradients, strict=True)):
        # ranks average their gradients once, with the last piece
        alone: AbstractContextManager[Any] = nullcontext()
        if isinstance(model, DistributedDataParallel) and number < parts - 1:
            alone = model.no_sync()
        with alone:
            with precision:
                features = model(*piece)
            torch.autograd.backward(features, [image_gradient, text_gradient, scale.grad / parts])
    return value.detach()
