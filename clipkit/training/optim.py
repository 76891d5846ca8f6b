"""Optimizers, and which parameters decay and how fast they learn."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from clipkit.config import OptimConfig
from clipkit.model.clip import CLIP
from clipkit.model.cpu import one_core_each
from clipkit.training import OPTIMIZERS
from clipkit.training.build import places, tower_of
from clipkit.training.parallel import is_sharded, local_part, sharded_like, sums_over_parts, whole

Groups = list[dict[str, Any]]
StateShapes = Mapping[str, tuple[torch.Size, torch.dtype]]


def parameter_groups(model: CLIP, config: OptimConfig) -> Groups:
    """Group the trained parameters by weight decay and by ``lr_scale``, the factor of the schedule's rate.

    As published for CLIP, matrices decay; gains, biases, the class embedding and the temperature, all of at most
    one dimension, do not. ``params`` is in the model's order. A strong decay of the head is that of Zhai et al.
    (2022, https://arxiv.org/abs/2106.04560). Lower rates for lower layers (``layer_decay``) are
    BEiT's (Bao et al. 2021, https://arxiv.org/abs/2106.08254).
    """
    of_tower = {"image": config.image_lr_scale, "text": config.text_lr_scale, "decoder": 1.0, "": 1.0}
    scales = {name: of_tower[tower_of(name)] for name, _ in model.named_parameters()}
    decays = dict.fromkeys(scales, config.weight_decay)
    if config.layer_decay < 1 or config.head_decay >= 0:  # otherwise layers need not be known
        for name, position in places(model).items():
            scales[name] *= config.layer_decay**position.above
            if config.head_decay >= 0 and position.tower in ("image", "text") and not position.above:
                decays[name] = config.head_decay
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = decays[name] if parameter.ndim >= 2 else 0.0
            scale = scales[name]
            group = {"params": [], "weight_decay": decay, "lr": config.lr * scale, "lr_scale": scale}
            # fused operations take tensors of one kind: FSDP2 does not shard the temperature, which is a scalar
            groups.setdefault((decay, scale, is_sharded(parameter)), group)["params"].append(parameter)
    return list(groups.values())


def adamw(model: CLIP, config: OptimConfig) -> Optimizer:
    """Build AdamW (Loshchilov & Hutter 2019)."""
    groups = parameter_groups(model, config)
    betas = (config.beta1, config.beta2)
    return AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def stable_adamw(model: CLIP, config: OptimConfig) -> Optimizer:
    """Build ``StableAdamW``."""
    groups = parameter_groups(model, config)
    betas = (config.beta1, config.beta2)
    return StableAdamW(groups, lr=config.lr, betas=betas, eps=config.eps)


def muon(model: CLIP, config: OptimConfig) -> Optimizer:
    """Build Muon for the matrices of blocks, and AdamW for embeddings, projections, convolutions and the rest."""
    parameters = dict(model.named_parameters())
    blocks = {
        id(parameters[name])
        for name, position in places(model).items()
        if 0 < position.depth < position.top and parameters[name].ndim == 2
    }
    groups = []
    for group in parameter_groups(model, config):
        for matrices in (True, False):
            chosen = [parameter for parameter in group["params"] if (id(parameter) in blocks) == matrices]
            if chosen:
                groups.append({**group, "params": chosen, "matrices": matrices})
    return MuonWithAdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


def make_optimizer(model: CLIP, config: OptimConfig) -> Optimizer:
    """Build the optimizer that settings select, each parameter group with its ``lr_scale``.

    Args:
        model: a CLIP, on its device, and already sharded if it is to be.
        config: name, rate, decay, betas and eps, and how rates differ by tower and layer.
    """
    return OPTIMIZERS[config.name].make(model, config)


def expected_state(optimizer: Optimizer, parameter: Tensor) -> StateShapes:
    """Return shape and dtype of everything that an optimizer keeps for a parameter after its first gradient.

    An optimizer with other state than AdamW's has a method ``expected_state(parameter)``.
    """
    if hasattr(optimizer, "expected_state"):
        shapes: StateShapes = optimizer.expected_state(parameter)
        return shapes
    return _adamw_state(parameter)


def _adamw_state(parameter: Tensor) -> StateShapes:
    moment = (parameter.shape, parameter.dtype)
    return {"exp_avg": moment, "exp_avg_sq": moment, "step": (torch.Size(), torch.float32)}


class Uncompiled(Optimizer):
    """torch's Optimizer without the wrappers that import ``torch._dynamo``, which takes as long as importing torch.

    The wrappers only prevent torch.compile from tracing these methods, and clipkit compiles no optimizer.
    """

    zero_grad = unwrap(Optimizer.zero_grad)
    add_param_group = unwrap(Optimizer.add_param_group)


class AdamW(Uncompiled, torch.optim.AdamW):
    """torch's AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101)."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class Muon(Uncompiled, torch.optim.Muon):
    """torch's Muon (Jordan 2024; Liu et al. 2025, https://arxiv.org/abs/2502.16982)."""


class MuonWithAdamW(Uncompiled):
    """torch's Muon (Jordan 2024; Liu et al. 2025, https://arxiv.org/abs/2502.16982) and AdamW as one optimizer.

    Muon orthogonalizes the update of a matrix, in bfloat16, and scales it to the norm of AdamW's updates (Liu et
    al., section 2.2), so both use one learning rate and weight decay. The projection of queries, keys and values is
    one matrix. If parameters are sharded, so is their state, and each rank orthogonalizes the gathered matrices.
    On CPUs each core orthogonalizes one matrix at a time; the result is bit-identical to torch's. On GPUs, matrices
    of one shape are orthogonalized together, which equals torch's result up to the rounding of bfloat16.

    Groups with ``"matrices": True`` are Muon's. State of their parameters: ``momentum_buffer``, of their shape and
    dtype; of others AdamW's ``exp_avg``, ``exp_avg_sq`` and ``step``.
    """

    def __init__(
        self, groups: Groups, *, lr: float, betas: tuple[float, float], eps: float, momentum: float = 0.95
    ) -> None:
        matrices = [group for group in groups if group["matrices"]]
        others = [group for group in groups if not group["matrices"]]
        self._optimizers: list[Optimizer] = []
        if matrices:
            self._optimizers.append(Muon(matrices, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw"))
        if others:
            self._optimizers.append(AdamW(others, lr=lr, betas=betas, eps=eps, fused=True))
        super().__init__(
            [group for optimizer in self._optimizers for group in optimizer.param_groups], {"lr": lr}
        )

    def expected_state(self, parameter: Tensor) -> StateShapes:
        """See the function of this name."""
        matrices = [matrix for group in self.param_groups if group["matrices"] for matrix in group["params"]]
        if any(matrix is parameter for matrix in matrices):
            return {"momentum_buffer": (parameter.shape, parameter.dtype)}
        return _adamw_state(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update and return the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self._optimizers:
            # groups and state are this object's, and may have been replaced by load_state_dict
            takes_matrices = isinstance(optimizer, torch.optim.Muon)
            optimizer.param_groups = [
                group for group in self.param_groups if group["matrices"] == takes_matrices
            ]
            optimizer.state = self.state
            if not takes_matrices:
                optimizer.step()
                continue
            pairs = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
            if any(is_sharded(parameter) for _, parameter in pairs):
                self._step_sharded(optimizer.param_groups)
            elif pairs[0][1].device.type == "cpu":  # small products do not scale to all cores
                with one_core_each(torch.get_num_threads()) as pool:
                    deque(pool.map(self._step_matrix, *zip(*pairs, strict=True)), maxlen=0)
            else:
                for group in optimizer.param_groups:
                    self._step_stacked(group)
        return loss

    def _step_stacked(self, group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape.setdefault(parameter.shape, []).append(parameter)
        for shape, parameters in by_shape.items():
            rate = group["lr"] * 0.2 * math.sqrt(max(shape))
            size = max(1, _LARGE_CHUNK // shape.numel())
            for start in range(0, len(parameters), size):
                chunk = parameters[start : start + size]
                steps = orthogonalize(self._average_gradients(chunk, group["momentum"]))
                torch._foreach_mul_(chunk, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(chunk, list(steps.float().unbind()), alpha=-rate)

    def _average_gradients(self, parameters: list[Tensor], momentum: float) -> Tensor:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        averages = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        stack = parameters[0].new_empty((len(parameters), *parameters[0].shape), dtype=torch.bfloat16)
        torch._foreach_copy_(list(stack.unbind()), torch._foreach_lerp(gradients, averages, momentum))
        return stack

    def _step_matrix(self, group: dict[str, Any], parameter: Tensor) -> None:
        optimizer = Muon([{**group, "params": [parameter]}])
        optimizer.state = self.state
        optimizer.step()  # type: ignore[no-untyped-call]

    def _step_sharded(self, groups: Groups) -> None:
        for group in groups:
            momentum, rate, decay = (group[name] for name in ("momentum", "lr", "weight_decay"))
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                average = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                gradient = whole(parameter.grad.lerp(average, momentum))
                step = torch.nn.Parameter(torch.zeros_like(gradient))
                step.grad = gradient
                Muon(
                    [step],
                    lr=rate,
                    momentum=0,
                    nesterov=False,
                    weight_decay=0,
                    adjust_lr_fn=group["adjust_lr_fn"],
                ).step()  # type: ignore[no-untyped-call]
                parameter.mul_(1 - rate * decay).add_(sharded_like(parameter, step.detach()))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replace the singular values of matrices (N, A, B) by values near 1.

    Five steps of the quintic Newton–Schulz iteration with the coefficients of Jordan (2024), as in torch's Muon.
    """
    a = 3.4445
    b = -4.7750
    c = 2.0315
    is_tall = matrices.shape[1] > matrices.shape[2]
    if is_tall:
        matrices = matrices.mT
    matrices = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = matrices @ matrices.mT  # (N, A, A)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        matrices = torch.baddbmm(matrices, polynomial, matrices, beta=a)
    return matrices.mT if is_tall else matrices


# values that are processed at a time: those that fit in a core's cache; on GPUs to limit temporary memory
_CHUNK = {"cpu": 2**16}
_LARGE_CHUNK = 2**26


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Views of the same part of a parameter, its gradient and its state."""

    owner: int  # index of the parameter among those of this update
    step: int
    parameter: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor


class StableAdamW(Uncompiled):
    """AdamW with update clipping (Wortsman et al. 2023, https://arxiv.org/abs/2304.13013, algorithm 2).

    The second moment lags behind a gradient that grows quickly, and Adam's steps are then too long. Here
    θ ← θ − η (λ θ + m / (√v + eps)) with η = lr / max(1, RMS) and RMS = √mean(g² / max(v, eps²)) for each tensor.
    Bias correction is in the betas, so m and v are stored unbiased: β ← β (1 − β^(t−1)) / (1 − β^t). With RMS ≤ 1
    it is AdamW. Parameters may be sharded; RMS is that of the whole tensor.

    State of each parameter: ``exp_avg`` and ``exp_avg_sq``, of its shape and dtype, and ``step``, float32 on the
    CPU. Parameters without a gradient do not change, and their step does not count.
    """

    def __init__(
        self, groups: Groups, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update and return the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ready = [
            (group, parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not ready:
            return loss
        chunks = list(
            _chunks(
                [(group, self._pieces(owner, parameter)) for owner, (group, parameter) in enumerate(ready)]
            )
        )
        parts: list[list[Tensor]] = [[] for _ in ready]
        for group, pieces in chunks:
            for piece, part in zip(pieces, _update_moments(group, pieces), strict=True):
                parts[piece.owner].append(part)
        here = [torch.stack(sums_of_pieces).sum() for sums_of_pieces in parts]
        sums = sums_over_parts([parameter for _, parameter in ready], here)
        means = [total / max(1, parameter.numel()) for total, (_, parameter) in zip(sums, ready, strict=True)]
        for group, pieces in chunks:
            _update_parameters(group, pieces, means)
        return loss

    def _pieces(self, owner: int, parameter: Tensor) -> list[_Piece]:
        """Count the parameter's step up and divide what this rank holds of it into pieces."""
        assert parameter.grad is not None
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        # load_state_dict moves it to the parameter's device, where reading it would synchronize at each step
        state["step"] = state["step"].cpu()
        state["step"] += 1
        tensors = [
            local_part(tensor)
            for tensor in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        ]
        split = [[tensor] for tensor in tensors]
        if all(tensor.is_contiguous() for tensor in tensors):
            size = _CHUNK.get(tensors[0].device.type, _LARGE_CHUNK)
            split = [list(tensor.view(-1).split(size)) for tensor in tensors]
        step = int(state["step"])
        return [
            _Piece(owner=owner, step=step, parameter=weight, gradient=gradient, mean=mean, square=square)
            for weight, gradient, mean, square in zip(*split, strict=True)
        ]


def _chunks(
    tensors: list[tuple[dict[str, Any], list[_Piece]]],
) -> Iterator[tuple[dict[str, Any], list[_Piece]]]:
    waiting = list[_Piece]()
    numbers = 0
    last = tensors[0][0]
    for group, pieces in tensors:
        for piece in pieces:
            size = piece.parameter.numel()
            most = _CHUNK.get(piece.parameter.device.type, _LARGE_CHUNK)
            if waiting and (group is not last or numbers + size > most):
                yield last, waiting
                waiting = []
                numbers = 0
            waiting.append(piece)
            numbers = numbers + size
            last = group
    yield last, waiting


def _update_moments(group: dict[str, Any], pieces: list[_Piece]) -> list[Tensor]:
    """Update the moments and return for each piece the sum of g² / max(v, eps²)."""

    def unbiased(beta: float, step: int) -> float:
        """Return the beta with which the moving average is unbiased at step 1, 2, …"""
        if not beta:
            return 0.0
        return beta * -math.expm1((step - 1) * math.log(beta)) / -math.expm1(step * math.log(beta))

    first, second = ([unbiased(beta, piece.step) for piece in pieces] for beta in group["betas"])
    gradients = [piece.gradient for piece in pieces]
    squares = [piece.square for piece in pieces]
    torch._foreach_lerp_([piece.mean for piece in pieces], gradients, [1 - beta for beta in first])
    torch._foreach_mul_(squares, second)
    torch._foreach_addcmul_(squares, gradients, gradients, scalars=[1 - beta for beta in second])
    scale = torch._foreach_sqrt(squares)
    torch._foreach_maximum_(scale, group["eps"])
    ratios = torch._foreach_div(gradients, scale)
    return [norm.square() for norm in torch._foreach_norm(ratios)]


def _update_parameters(group: dict[str, Any], pieces: list[_Piece], means: list[Tensor]) -> None:
    """Update the parameters; ``means`` are those of g² / max(v, eps²) over whole tensors, by owner."""
    steps = torch._foreach_sqrt([piece.square for piece in pieces])
    torch._foreach_add_(steps, group["eps"])
    torch._foreach_reciprocal_(steps)
    torch._foreach_mul_(steps, [piece.mean for piece in pieces])
    if group["weight_decay"]:
        torch._foreach_add_(steps, [piece.parameter for piece in pieces], alpha=group["weight_decay"])
    for piece, step in zip(pieces, steps, strict=True):
        rate = group["lr"] / means[piece.owner].sqrt().clamp_(min=1)  # on the device, without synchronization
        piece.parameter.addcmul_(step, rate, value=-1)
