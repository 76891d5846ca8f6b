"""Optimizers by name, which parameters decay and how fast they learn, and the rate as a function of the step."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from timm.optim.lamb import Lamb as TimmLamb
from torch import Tensor

from clipkit.config import OptimConfig
from clipkit.errors import ConfigError
from clipkit.model.clip import CLIP
from clipkit.training import OPTIMIZERS, SCHEDULES
from clipkit.training.depth import places, tower_of
from clipkit.training.parallel import is_sharded, local_part, sums_over_parts

__all__ = [
    "Lamb",
    "MuonWithAdamW",
    "StableAdamW",
    "adamw",
    "expected_state",
    "lamb",
    "learning_rate",
    "make_optimizer",
    "muon",
    "parameter_groups",
    "stable_adamw",
]


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
    """Factors of the rate by parameter: of its tower, and of its depth there, see clipkit/training/depth.py."""
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


def stable_adamw(model: CLIP, config: OptimConfig) -> torch.optim.Optimizer:
    """``StableAdamW`` over a model's trainable parameters."""
    groups = parameter_groups(model, config)
    return StableAdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


def lamb(model: CLIP, config: OptimConfig) -> torch.optim.Optimizer:
    """``Lamb`` over a model's trainable parameters."""
    groups = parameter_groups(model, config)
    return Lamb(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


def muon(model: CLIP, config: OptimConfig) -> torch.optim.Optimizer:
    """Muon for the matrices of blocks; AdamW for embeddings, projections, convolutions and all else."""
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


def make_optimizer(model: CLIP, config: OptimConfig) -> torch.optim.Optimizer:
    """An optimizer over a model's trainable parameters, each group with its ``lr_scale``.

    Args:
        model: a CLIP, on its device, and already spread over ranks if it is to be.
        config: which one, its rate, decay, betas and eps, and how rates differ by tower and depth.

    Raises:
        ConfigError: the optimizer cannot have this model, or rates differ by depth and the depths are not known.
    """
    return OPTIMIZERS[config.name].make(model, config)


def expected_state(
    optimizer: torch.optim.Optimizer, parameter: Tensor
) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of everything that an optimizer keeps for a parameter, by name.

    An optimizer may have a method ``expected_state(parameter)``; otherwise its state is AdamW's.

    A parameter that has not had a gradient yet has no state at all.
    """
    of_parameter = (parameter.shape, parameter.dtype)
    if hasattr(optimizer, "expected_state"):
        own: Mapping[str, tuple[torch.Size, torch.dtype]] = optimizer.expected_state(parameter)
        return own
    return {"exp_avg": of_parameter, "exp_avg_sq": of_parameter, "step": (torch.Size(), torch.float32)}


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
    begin, shape = config.warmup, SCHEDULES[config.schedule].shape
    if config.cooldown and step >= (begin := max(config.warmup, steps - config.cooldown)):
        shape = SCHEDULES["linear"].shape
    progress = (step - begin) / max(1, steps - begin)
    return config.min_lr + (config.lr - config.min_lr) * shape(progress)


# --------------------------------------------------------------------------------------------------------------
# LAMB (You et al. 2020, https://arxiv.org/abs/1904.00962), as timm has it, with its whole state by parameter.
#
# It is for very large batches. On the quickstart's of 128, at a rate of 1e-2: handwriting 52.8% and unseen
# fonts 47.2%, where AdamW gives 62.3% and 84.5% (bench/options.py, one seed, no other rate tried). Loads timm:
# import it where it is chosen.


class Lamb(TimmLamb):
    """timm's LAMB: Adam's step for each tensor, made as long as its weights times the rate.

    Tensors without weight decay (gains, biases) take Adam's step as it is. The gradient is clipped outside.

    State of each parameter: ``exp_avg`` and ``exp_avg_sq``, of its shape and dtype, and ``step``, float32 on the
    CPU. timm counts steps in the group, where they are not saved with the parameters: the count is kept in both,
    and begins with the group's first gradient.
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
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=None)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns what ``closure`` gives."""
        for group in self.param_groups:
            counts = [self.state[one]["step"] for one in group["params"] if self.state.get(one)]
            if counts:
                group["step"] = counts[0].to("cpu", copy=True)
            else:
                group.pop("step", None)
        loss = super().step(closure)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            for parameter in group["params"]:
                if state := self.state.get(parameter):
                    state["step"] = group["step"].clone()
        return loss


# --------------------------------------------------------------------------------------------------------------
# Muon for the matrices of blocks, AdamW for everything else, as one optimizer.
#
# On the quickstart, at the rate that AdamW has there: handwriting 65.6% and unseen fonts 92.3%, where AdamW
# alone gives 62.3% and 84.5% (bench/options.py, one seed).


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon (Jordan 2024; Liu et al. 2025, https://arxiv.org/abs/2502.16982) and AdamW side by side.

    Muon makes the update of a matrix orthogonal. Its length is scaled to that of AdamW's updates (Liu et al.,
    section 2.2), so that both go by one learning rate and one weight decay. The projection of queries, keys and
    values is one matrix. Orthogonalization is in bfloat16, as torch has it.

    A parameter group says by ``"matrices": True`` that it is Muon's. State of its parameters: ``momentum_buffer``,
    of their shape and dtype; of the others AdamW's ``exp_avg``, ``exp_avg_sq`` and ``step``.

    Raises:
        ConfigError: parameters are spread over ranks: a part of a matrix cannot be made orthogonal alone.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float = 0.95,
    ) -> None:
        if any(is_sharded(one) for group in groups for one in group["params"]):
            raise ConfigError(
                "optim.name = 'muon' needs whole matrices on each rank: train without sharding, or set "
                "optim.name=adamw, stable_adamw or lamb"
            )
        matrices = [group for group in groups if group["matrices"]]
        others = [group for group in groups if not group["matrices"]]
        self._optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            self._optimizers.append(
                torch.optim.Muon(matrices, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
            )
        if others:
            self._optimizers.append(torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True))
        super().__init__([group for one in self._optimizers for group in one.param_groups], {"lr": lr})

    def expected_state(self, parameter: Tensor) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """As the function of that name."""
        of_parameter = (parameter.shape, parameter.dtype)
        matrices = [one for group in self.param_groups if group["matrices"] for one in group["params"]]
        if any(one is parameter for one in matrices):
            return {"momentum_buffer": of_parameter}
        return {"exp_avg": of_parameter, "exp_avg_sq": of_parameter, "step": (torch.Size(), torch.float32)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns what ``closure`` gives."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self._optimizers:
            # groups and state are ours, and may have been replaced by load_state_dict
            wanted = isinstance(optimizer, torch.optim.Muon)
            optimizer.param_groups = [group for group in self.param_groups if group["matrices"] == wanted]
            optimizer.state = self.state
            optimizer.step()
        return loss


# --------------------------------------------------------------------------------------------------------------
# AdamW with update clipping (StableAdamW; Wortsman et al. 2023, https://arxiv.org/abs/2304.13013, algorithm 2).
#
# The second moment lags behind a gradient that grows quickly, and Adam then takes steps that are too long. Each
# tensor's rate is divided by the root mean square of g / max(√v, eps) where that is above 1. On the quickstart
# it changes scores by less than seeds do (bench/options.py).

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
