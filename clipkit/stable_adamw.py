"""AdamW with update clipping (StableAdamW; Wortsman et al. 2023, https://arxiv.org/abs/2304.13013, algorithm 2).

The second moment lags behind a gradient that grows quickly, and Adam then takes steps that are too long. Each
tensor's rate is divided by the root mean square of g / max(√v, eps) where that is above 1. On the quickstart it
changes scores by less than seeds do (bench/options.py).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipkit.shards import local_part, sums_over_parts

__all__ = ["StableAdamW"]

# numbers that are worked on at a time: what a core keeps beside it, and elsewhere what intermediate values may take
_CHUNK = {"cpu": 2**16}
_LARGE_CHUNK = 2**26


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A part of a tensor, or all of what lies here of it, with what belongs to it; views of the same shape."""

    owner: int  # place of the tensor among those of this update
    step: int
    parameter: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Pieces of tensors of one parameter group."""

    group: dict[str, Any]
    pieces: list[_Piece]


class StableAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) whose rate is cut, for each tensor, where its update would be too long.

    θ ← θ − η (λ θ + m / (√v + eps)) with η = lr / max(1, RMS) and RMS = √mean(g² / max(v, eps²)). Bias correction
    is in the betas, so that m and v are unbiased as they are stored: β ← β (1 − β^(t−1)) / (1 − β^t). Where RMS ≤ 1
    that is AdamW's step. Parameters may be spread over ranks; RMS is that of the whole tensor.

    State of each parameter: ``exp_avg`` and ``exp_avg_sq``, of its shape and dtype, and ``step``, float32 on the
    CPU. Parameters without a gradient are left as they are, and their step does not count.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns what ``closure`` gives."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ready = [
            (group, one) for group in self.param_groups for one in group["params"] if one.grad is not None
        ]
        if not ready:
            return loss
        chunks = list(
            _chunks([(group, self._pieces(owner, one)) for owner, (group, one) in enumerate(ready)])
        )
        parts: list[list[Tensor]] = [[] for _ in ready]
        for chunk in chunks:
            for piece, part in zip(chunk.pieces, _take_in(chunk), strict=True):
                parts[piece.owner].append(part)
        here = [torch.stack(own).sum() for own in parts]
        sums = sums_over_parts([one for _, one in ready], here)
        means = [total / max(1, one.numel()) for total, (_, one) in zip(sums, ready, strict=True)]
        for chunk in chunks:
            _update(chunk, means)
        return loss

    def _pieces(self, owner: int, parameter: Tensor) -> list[_Piece]:
        assert parameter.grad is not None
        state = self._state(parameter)
        tensors = [
            local_part(one) for one in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        ]
        split = [[one] for one in tensors]
        if all(one.is_contiguous() for one in tensors):
            size = _CHUNK.get(tensors[0].device.type, _LARGE_CHUNK)
            split = [list(one.view(-1).split(size)) for one in tensors]
        step = int(state["step"])
        return [
            _Piece(owner=owner, step=step, parameter=own, gradient=gradient, mean=mean, square=square)
            for own, gradient, mean, square in zip(*split, strict=True)
        ]

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        """A parameter's state, its step counted up."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if (
            state["step"].device.type != "cpu"
        ):  # restored to the parameter's device, which must not be waited for
            state["step"] = state["step"].cpu()
        state["step"] += 1
        return state


def _chunks(tensors: list[tuple[dict[str, Any], list[_Piece]]]) -> Iterator[_Chunk]:
    """Pieces together as far as they are of one group and not too many numbers."""
    waiting, numbers, last = list[_Piece](), 0, tensors[0][0]
    for group, pieces in tensors:
        for piece in pieces:
            size = piece.parameter.numel()
            most = _CHUNK.get(piece.parameter.device.type, _LARGE_CHUNK)
            if waiting and (group is not last or numbers + size > most):
                yield _Chunk(group=last, pieces=waiting)
                waiting, numbers = [], 0
            waiting.append(piece)
            numbers, last = numbers + size, group
    yield _Chunk(group=last, pieces=waiting)


def _take_in(chunk: _Chunk) -> list[Tensor]:
    """Bring the moments up to date; returns for each piece the sum of g² / max(v, eps²)."""
    beta1, beta2 = chunk.group["betas"]
    first = [_debiased(beta1, piece.step) for piece in chunk.pieces]
    second = [_debiased(beta2, piece.step) for piece in chunk.pieces]
    gradients = [piece.gradient for piece in chunk.pieces]
    squares = [piece.square for piece in chunk.pieces]
    torch._foreach_lerp_([piece.mean for piece in chunk.pieces], gradients, [1 - beta for beta in first])
    torch._foreach_mul_(squares, second)
    torch._foreach_addcmul_(squares, gradients, gradients, scalars=[1 - beta for beta in second])
    scale = torch._foreach_sqrt(squares)
    torch._foreach_maximum_(scale, chunk.group["eps"])
    ratios = torch._foreach_div(gradients, scale)
    return [norm.square() for norm in torch._foreach_norm(ratios)]


def _update(chunk: _Chunk, means: list[Tensor]) -> None:
    """Change the parameters; ``means`` are those of g² / max(v, eps²) over whole tensors, by owner."""
    lr, eps, weight_decay = (chunk.group[name] for name in ("lr", "eps", "weight_decay"))
    parameters = [piece.parameter for piece in chunk.pieces]
    steps = torch._foreach_sqrt([piece.square for piece in chunk.pieces])
    torch._foreach_add_(steps, eps)
    torch._foreach_reciprocal_(steps)
    torch._foreach_mul_(steps, [piece.mean for piece in chunk.pieces])
    if weight_decay:
        torch._foreach_add_(steps, parameters, alpha=weight_decay)
    for piece, step in zip(chunk.pieces, steps, strict=True):
        rate = lr / means[piece.owner].sqrt().clamp_(min=1)  # on the device: nothing waits for it
        piece.parameter.addcmul_(step, rate, value=-1)


def _debiased(beta: float, step: int) -> float:
    """The beta of the unbiased moving average at step 1, 2, …"""
    return (
        beta * -math.expm1((step - 1) * math.log(beta)) / -math.expm1(step * math.log(beta)) if beta else 0.0
    )
