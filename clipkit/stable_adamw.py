"""AdamW with update clipping (StableAdamW; Wortsman et al. 2023, https://arxiv.org/abs/2304.13013, algorithm 2).

The second moment lags behind a gradient that grows quickly, and Adam then takes steps that are too long. Each
tensor's rate is divided by the root mean square of g / max(√v, eps) where that is above 1.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipkit.shards import local_part, sums_over_parts

__all__ = ["StableAdamW"]

_CHUNK = 2**26  # numbers of which intermediate values are held at a time


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Some tensors of one parameter group; all lists are in the same order, and of what lies here."""

    group: dict[str, Any]
    whole: list[Tensor]
    parameters: list[Tensor]
    gradients: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    steps: list[int]


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
        chunks = [chunk for group in self.param_groups for chunk in self._chunks(group)]
        sums = [value for chunk in chunks for value in _take_in(chunk)]
        if chunks:
            whole = sums_over_parts([one for chunk in chunks for one in chunk.whole], sums)
            start = 0
            for chunk in chunks:
                _update(chunk, whole[start : start + len(chunk.whole)])
                start += len(chunk.whole)
        return loss

    def _chunks(self, group: dict[str, Any]) -> Iterator[_Chunk]:
        waiting: list[Tensor] = []
        numbers = 0
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            waiting.append(parameter)
            numbers += local_part(parameter).numel()
            if numbers >= _CHUNK:
                yield self._chunk(group, waiting)
                waiting, numbers = [], 0
        if waiting:
            yield self._chunk(group, waiting)

    def _chunk(self, group: dict[str, Any], parameters: list[Tensor]) -> _Chunk:
        states = [self._state(parameter) for parameter in parameters]
        return _Chunk(
            group=group,
            whole=parameters,
            parameters=[local_part(one) for one in parameters],
            gradients=[local_part(one.grad) for one in parameters if one.grad is not None],
            means=[local_part(state["exp_avg"]) for state in states],
            squares=[local_part(state["exp_avg_sq"]) for state in states],
            steps=[int(state["step"]) for state in states],
        )

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


def _take_in(chunk: _Chunk) -> list[Tensor]:
    """Bring the moments up to date; returns for each tensor the sum of g² / max(v, eps²) over what lies here."""
    beta1, beta2 = chunk.group["betas"]
    first = [_debiased(beta1, step) for step in chunk.steps]
    second = [_debiased(beta2, step) for step in chunk.steps]
    torch._foreach_lerp_(chunk.means, chunk.gradients, [1 - beta for beta in first])
    torch._foreach_mul_(chunk.squares, second)
    torch._foreach_addcmul_(
        chunk.squares, chunk.gradients, chunk.gradients, scalars=[1 - beta for beta in second]
    )
    scale = torch._foreach_sqrt(chunk.squares)
    torch._foreach_maximum_(scale, chunk.group["eps"])
    ratios = torch._foreach_div(chunk.gradients, scale)
    return [norm.square() for norm in torch._foreach_norm(ratios)]


def _update(chunk: _Chunk, sums: list[Tensor]) -> None:
    """Change the parameters; ``sums`` are those of the whole tensors."""
    lr, eps, weight_decay = (chunk.group[name] for name in ("lr", "eps", "weight_decay"))
    steps = torch._foreach_sqrt(chunk.squares)
    torch._foreach_add_(steps, eps)
    torch._foreach_reciprocal_(steps)
    torch._foreach_mul_(steps, chunk.means)
    if weight_decay:
        torch._foreach_add_(steps, chunk.parameters, alpha=weight_decay)
    for step, parameter, whole, total in zip(steps, chunk.parameters, chunk.whole, sums, strict=True):
        rate = lr / (total / whole.numel()).sqrt_().clamp_(min=1)  # on the device: nothing waits for it
        parameter.addcmul_(step, rate.to(step.dtype), value=-1)


def _debiased(beta: float, step: int) -> float:
    """The beta of the unbiased moving average at step 1, 2, …"""
    return (
        beta * -math.expm1((step - 1) * math.log(beta)) / -math.expm1(step * math.log(beta)) if beta else 0.0
    )
