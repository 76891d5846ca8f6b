"""Gradients of one contrastive batch computed in parts, exactly (GradCache, Gao et al. 2021,
https://arxiv.org/abs/2101.06983).

The loss needs all features at once, the towers' activations do not fit at once: features are computed without
a graph, the loss gives the gradient at the features, and a second pass carries it through the towers part by
part. The loss, and every gradient with it, is that of the whole batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from clipkit.errors import ConfigError
from clipkit.parallel import local_gradients
from clipkit.running_statistics import RunningStatistics
from clipkit.stopwatch import Stopwatch

__all__ = ["Features", "backward", "check_rows"]

Loss = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Features:
    """What one backward pass leaves besides gradients: detached, the loss and this rank's features."""

    loss: Tensor  # ()
    images: Tensor  # (B, O)
    texts: Tensor  # (B, O), or (C, O) of all classes


def check_rows(model: nn.Module, *, batch_size: int, world: int, parts: int) -> None:
    """See that batch norms get at least two rows at a time: one has no variance.

    Args:
        model: in training mode; a batch norm that is locked is not in it, and takes any number.
        batch_size: of the global batch.
        world: how many ranks share it.
        parts: how many pieces each rank computes its share in.

    Raises:
        ConfigError: the smallest piece has fewer.
    """
    rows = batch_size // world // parts
    if rows < 2 and any(isinstance(one, _BatchNorm) and one.training for one in model.modules()):
        least = 2 * world * parts
        raise ConfigError(
            f"batch_size = {batch_size} over {world} processes × accumulate = {parts} leaves pieces of one row, "
            f"and the batch norms of this model need two: set batch_size={least} or more, or a smaller accumulate"
        )


def backward(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    loss: Loss,
    parts: int,
    autocast: bool,
    seeds: Sequence[int] = (),
    watch: Stopwatch | None = None,
) -> Features:
    """Add the gradient of ``loss`` to the model's parameters.

    Args:
        model: a CLIP, possibly wrapped in DistributedDataParallel or sharded.
        inputs: arguments of the model by name, each a tensor or a sequence of B rows; or C rows, of all classes,
            for the text tower.
        loss: of what the model returns: image features (B, O), text features (B, O), exp(t), and the bias of a
            model that has one; such as ``clip_loss``.
        parts: how many pieces of the batch are computed one after the other, of sizes that differ by one at
            most; 1 keeps everything in one pass. At most B.
        autocast: whether the towers run in bfloat16.
        seeds: of each piece's random numbers, if the towers draw any; both passes then draw the same.
        watch: told which phase begins.
    """
    watch = watch or Stopwatch()
    images = inputs["images"]
    precision = torch.autocast(images.device.type, torch.bfloat16, enabled=autocast)
    assert 1 <= parts <= len(images), (len(images), parts)
    pieces = _pieces(inputs, parts)
    watch.begin("forward")
    if parts == 1:
        _draw(seeds, 0)
        with precision:
            outputs = model(**pieces[0])
        watch.begin("loss")
        value = loss(*outputs)
        watch.begin("backward")
        torch.autograd.backward(value)
        return Features(loss=value.detach(), images=outputs[0].detach(), texts=outputs[1].detach())
    bare: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    first: list[tuple[Tensor, ...]] = []
    statistics = RunningStatistics(bare)
    for number, piece in enumerate(pieces):
        _draw(seeds, number)
        with torch.no_grad(), precision:
            first.append(bare(**piece))
    statistics.put_back()  # the second pass counts
    watch.begin("loss")
    whole = [torch.cat([one[i] for one in first]).requires_grad_() for i in (0, 1)]
    numbers = [one.detach().clone().requires_grad_() for one in first[0][2:]]  # exp(t), and the bias
    value = loss(*whole, *numbers)
    torch.autograd.backward(value)
    watch.begin("backward")
    sizes = [[len(one[i]) for one in first] for i in (0, 1)]
    gradients = zip(*(_gradient(one).split(own) for one, own in zip(whole, sizes, strict=True)), strict=True)
    for number, (piece, of_features) in enumerate(zip(pieces, gradients, strict=True)):
        _draw(seeds, number)
        with local_gradients(model, last=number == parts - 1):
            with precision:
                outputs = model(**piece)
            of_numbers = [_gradient(one) / parts for one in numbers]
            _backward(outputs, [*of_features, *of_numbers])
    return Features(loss=value.detach(), images=whole[0].detach(), texts=whole[1].detach())


def _pieces(inputs: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
    """The inputs cut into pieces of rows."""
    pieces: list[dict[str, Any]] = [{} for _ in range(parts)]
    for name, value in inputs.items():
        if value is not None:
            cuts = [len(value) * number // parts for number in range(parts + 1)]
            for piece, span in zip(pieces, pairwise(cuts), strict=True):
                piece[name] = value[slice(*span)]
    return pieces


def _draw(seeds: Sequence[int], number: int) -> None:
    if seeds:
        torch.manual_seed(seeds[number])


def _gradient(tensor: Tensor) -> Tensor:
    """Of a tensor that nothing depends on, zeros."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Carry gradients on through what has a graph: a locked tower has none."""
    pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
