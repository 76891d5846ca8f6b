"""Optimizers, which parameters decay and how fast they learn, and sharpness-aware minimization."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from inspect import unwrap
from itertools import starmap
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from clipkit.config import OptimConfig
from clipkit.distributed import gather_rows, rank, world_size
from clipkit.model.clip import CLIP
from clipkit.model.cpu import open_core_pool
from clipkit.model.processor import has_bfloat16_products
from clipkit.training import OPTIMIZERS
from clipkit.training.build import places, tower_of
from clipkit.training.ema import RunningStatistics
from clipkit.training.parallel import (
    clip_gradients,
    drop_gathered,
    gather_stack,
    is_sharded,
    local_part,
    shard_stack,
    split_evenly,
    sums_over_parts,
)

Groups = list[dict[str, Any]]
StateShapes = Mapping[str, tuple[torch.Size, torch.dtype]]


def parameter_groups(model: CLIP, config: OptimConfig) -> Groups:
    """Group the trained parameters by weight decay and by ``lr_scale``, the factor of the schedule's rate.

    As published for CLIP, matrices decay; gains, biases, the class embedding and the temperature, all of at most
    one dimension, do not. ``params`` is in the model's order. A strong decay of the head is that of Zhai et al.
    (2022, https://arxiv.org/abs/2106.04560). Lower rates for lower layers (``layer_decay``) are
    BEiT's (Bao et al. 2021, https://arxiv.org/abs/2106.08254).
    """
    tower_scales = {"image": config.image_lr_scale, "text": config.text_lr_scale, "decoder": 1.0, "": 1.0}
    positions = {}
    if config.layer_decay < 1 or config.head_decay >= 0:  # otherwise layers need not be known
        positions = places(model)
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        tower = tower_of(name)
        scale = tower_scales[tower]
        decay = config.weight_decay
        if name in positions:
            above = positions[name].above
            scale *= config.layer_decay**above
            if config.head_decay >= 0 and tower in ("image", "text") and not above:
                decay = config.head_decay
        if parameter.ndim < 2:
            decay = 0.0
        group = {"params": [], "weight_decay": decay, "lr": config.lr * scale, "lr_scale": scale}
        # fused operations take tensors of one kind: FSDP2 does not shard the temperature, which is a scalar
        groups.setdefault((decay, scale, is_sharded(parameter)), group)["params"].append(parameter)
    return list(groups.values())


def adamw(model: CLIP, config: OptimConfig) -> Optimizer:
    """Build AdamW (Loshchilov & Hutter 2019)."""
    groups = parameter_groups(model, config)
    betas = (config.beta1, config.beta2)
    return AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def sgd(model: CLIP, config: OptimConfig) -> Optimizer:
    """Build stochastic gradient descent with the momentum ``optim.beta1``."""
    return SGD(parameter_groups(model, config), lr=config.lr, momentum=config.beta1)


def stable_adamw(model: CLIP, config: OptimConfig) -> Optimizer:
    """Build ``StableAdamW``."""
    groups = parameter_groups(model, config)
    betas = (config.beta1, config.beta2)
    return StableAdamW(groups, lr=config.lr, betas=betas, eps=config.eps)


def lion(model: CLIP, config: OptimConfig) -> Optimizer:
    """Build ``Lion``."""
    defaults = {"lr": config.lr, "betas": (config.beta1, config.beta2)}
    return Lion(parameter_groups(model, config), defaults)


def muon(model: CLIP, config: OptimConfig) -> Optimizer:
    """Build Muon for the matrices of blocks, and AdamW for embeddings, projections, convolutions and the rest."""
    positions = places(model)
    in_blocks: set[int] = set()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and 0 < positions[name].depth < positions[name].top:
            in_blocks.add(id(parameter))
    groups = []
    for group in parameter_groups(model, config):
        for matrices in (True, False):
            chosen = [parameter for parameter in group["params"] if (id(parameter) in in_blocks) == matrices]
            if chosen:
                groups.append({**group, "params": chosen, "matrices": matrices})
    return MuonWithAdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


def make_optimizer(model: CLIP, config: OptimConfig) -> Optimizer:
    """Build the optimizer of a model that is on its device and, if it is to be, sharded."""
    return OPTIMIZERS[config.name].make(model, config)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Give each group the schedule's rate times the group's ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


def make_update(optimizer: Optimizer, name: str, *, skip: Tensor) -> None:
    """Make one update unless ``skip``, a bool scalar on the device, which is not waited for if possible.

    ``name`` is the setting ``optim.name``.
    """
    if OPTIMIZERS[name].gated:
        optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
        optimizer.step()
    elif not skip:
        optimizer.step()


@contextmanager
def perturbed_weights(model: CLIP, radius: float) -> Iterator[None]:
    """Move the weights by ``radius`` along the gradient of the global batch, and restore them bit for bit.

    This is the first step of sharpness-aware minimization (Foret et al. 2021, https://arxiv.org/abs/2010.01412):
    weights become w + ρ g / ‖g‖ with complete gradients. In the context, gradients start as None, and forward
    passes do not change running statistics.
    """
    originals: list[tuple[Tensor, Tensor]] = []  # weights and their values
    statistics = RunningStatistics(model)
    with torch.no_grad():
        step = radius / clip_gradients(model, 0.0).clamp(min=1e-12)
        for parameter in model.parameters():
            if parameter.grad is not None:
                weight = local_part(parameter)
                originals.append((weight, weight.clone()))
                weight.addcmul_(local_part(parameter.grad), step.to(weight.dtype))
                parameter.grad = None
    drop_gathered(model)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, original in originals:
                weight.copy_(original)
        statistics.put_back()
        drop_gathered(model)


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


class SGD(Uncompiled, torch.optim.SGD):
    """torch's stochastic gradient descent; its weight decay is part of the gradient (L2)."""

    step = torch.no_grad()(unwrap(torch.optim.SGD.step))

    def expected_state(self, parameter: Tensor) -> StateShapes:
        """See the function of this name."""
        momentum = self.param_groups[0]["momentum"]
        return {"momentum_buffer": (parameter.shape, parameter.dtype)} if momentum else {}


class DeviceGated(Uncompiled):
    """An optimizer that does not read from an accelerator whether to make an update.

    Attributes:
        found_inf: float scalar on the device of the parameters; if it is not 0, a step changes nothing.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update and return the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skip = None if self.found_inf is None else self.found_inf > 0
        if skip is not None and skip.device.type == "cpu":  # reading it waits for nothing
            if skip:
                return loss
            skip = None
        self.update(skip)
        return loss

    def update(self, skip: Tensor | None) -> None:
        """Make one update unless ``skip``, a bool scalar on the device."""
        raise NotImplementedError


def _replace_skipped(gradients: Sequence[Tensor], averages: Sequence[Tensor], skip: Tensor) -> list[Tensor]:
    """Return the gradients, or if ``skip`` the averages, which an update with equal values does not change."""
    sizes = [gradient.numel() for gradient in gradients]
    flat_averages = torch.cat([average.reshape(-1) for average in averages])
    flat_gradients = torch.cat([gradient.reshape(-1) for gradient in gradients])
    parts = torch.where(skip, flat_averages, flat_gradients).split(sizes)
    return [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]


class Lion(DeviceGated):
    """Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675), which moves each weight up or down by the rate.

    θ ← θ − lr (sign(β1 m + (1 − β1) g) + λ θ), and then m ← β2 m + (1 − β2) g. Steps do not become smaller with the
    gradient, so the published rates are a tenth of AdamW's. Parameters may be sharded.

    State of each parameter: ``exp_avg``, of its shape and dtype, which is half of AdamW's state.
    """

    def expected_state(self, parameter: Tensor) -> StateShapes:
        """See the function of this name."""
        return {"exp_avg": (parameter.shape, parameter.dtype)}

    def update(self, skip: Tensor | None) -> None:
        """See the base class."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            sizes = [local_part(parameter).numel() for parameter in parameters]
            for chunk in _chunk_slices(sizes, _LARGE_CHUNK):
                self._update_chunk(group, parameters[chunk], skip)

    def _update_chunk(self, group: dict[str, Any], parameters: list[Tensor], skip: Tensor | None) -> None:
        beta1, beta2 = group["betas"]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        weights = [local_part(parameter) for parameter in parameters]
        averages = [local_part(self.state[parameter]["exp_avg"]) for parameter in parameters]
        gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
        rate: float | Tensor = group["lr"]
        decay: float | Tensor = 1 - group["lr"] * group["weight_decay"]
        if skip is not None:
            rate = torch.where(skip, 0.0, rate)
            decay = torch.where(skip, 1.0, decay)
            gradients = _replace_skipped(gradients, averages, skip)
        steps = torch._foreach_lerp(averages, gradients, 1 - beta1)
        torch._foreach_sign_(steps)
        torch._foreach_mul_(steps, rate)
        torch._foreach_lerp_(averages, gradients, 1 - beta2)
        torch._foreach_mul_(weights, decay)
        torch._foreach_sub_(weights, steps)


class MuonWithAdamW(DeviceGated):
    """Muon (Jordan 2024; Liu et al. 2025, https://arxiv.org/abs/2502.16982) and torch's AdamW as one optimizer.

    Muon orthogonalizes the update of a matrix, in bfloat16, and scales it to the norm of AdamW's updates (Liu et
    al., section 2.2), so both use one learning rate and weight decay. The projection of queries, keys and values is
    one matrix. Each rank orthogonalizes some of the matrices of a shape, which are gathered first if parameters are
    sharded, and ranks exchange the results. On CPUs each core orthogonalizes one matrix at a time, with the bits of
    torch's Muon if ``has_bfloat16_products``; on GPUs matrices are orthogonalized together, which is the same up to
    the rounding of bfloat16.

    Groups with ``"matrices": True`` are Muon's. State of their parameters: ``momentum_buffer``, of their shape and
    dtype; of others AdamW's ``exp_avg``, ``exp_avg_sq`` and ``step``.
    """

    def __init__(
        self, groups: Groups, *, lr: float, betas: tuple[float, float], eps: float, momentum: float = 0.95
    ) -> None:
        others = [group for group in groups if not group["matrices"]]
        self._adamw = AdamW(others, lr=lr, betas=betas, eps=eps, fused=True) if others else None
        self._momentum = momentum
        matrices = [group for group in groups if group["matrices"]]
        super().__init__([*matrices, *(self._adamw.param_groups if self._adamw else [])], {"lr": lr})

    def expected_state(self, parameter: Tensor) -> StateShapes:
        """See the function of this name."""
        matrices = [matrix for group in self.param_groups if group["matrices"] for matrix in group["params"]]
        if any(matrix is parameter for matrix in matrices):
            return {"momentum_buffer": (parameter.shape, parameter.dtype)}
        return _adamw_state(parameter)

    def update(self, skip: Tensor | None) -> None:
        """See the base class."""
        for group in self.param_groups:
            if group["matrices"]:
                self._step_matrices(group, skip)
        if self._adamw is not None:
            # groups and state are this object's, and may have been replaced by load_state_dict
            self._adamw.param_groups = [group for group in self.param_groups if not group["matrices"]]
            self._adamw.state = self.state
            if self.found_inf is not None:
                self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
            self._adamw.step()

    def _step_matrices(self, group: dict[str, Any], skip: Tensor | None) -> None:
        """Update the matrices of a group, those of one shape together."""
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape.setdefault(parameter.shape, []).append(parameter)
        parameters = [parameter for stack in by_shape.values() for parameter in stack]
        if not parameters:
            return
        device = parameters[0].device
        on_cpu = device.type == "cpu"
        most = 1 if on_cpu else _LARGE_CHUNK
        sizes = [local_part(parameter).numel() for parameter in parameters]
        directions = torch.empty(sum(sizes), dtype=torch.bfloat16, device=device)
        parts = list(directions.split(sizes))
        decay: float | Tensor = 1 - group["lr"] * group["weight_decay"]
        if skip is not None:
            decay = torch.where(skip, 1.0, decay)

        def average(chunk: slice) -> None:
            self._average_gradients(parameters[chunk], skip, out=parts[chunk])

        # small products do not scale to all cores
        with open_core_pool(torch.get_num_threads()) if on_cpu else nullcontext() as pool:
            run = map if pool is None else pool.map
            deque(run(average, _chunk_slices(sizes, most)), maxlen=0)
            if skip is not None:
                directions.masked_fill_(skip, 0)
            start = 0
            stacks = []
            for stack in by_shape.values():
                local = local_part(stack[0])
                end = start + len(stack) * local.numel()
                stacks.append((stack, directions[start:end].view(len(stack), *local.shape)))
                start = end
            _update_stacks(stacks, group["lr"], decay, pool=pool, most=most)

    def _average_gradients(self, parameters: list[Tensor], skip: Tensor | None, *, out: list[Tensor]) -> None:
        """Update the momentum, and write the direction of each local part to one of ``out``, which are flat."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        averages = [local_part(self.state[parameter]["momentum_buffer"]).view(-1) for parameter in parameters]
        gradients = [
            local_part(parameter.grad).reshape(-1) for parameter in parameters if parameter.grad is not None
        ]
        if skip is not None:
            gradients = _replace_skipped(gradients, averages, skip)
        torch._foreach_lerp_(averages, gradients, 1 - self._momentum)
        torch._foreach_copy_(out, torch._foreach_lerp(gradients, averages, self._momentum))


def _update_stacks(
    stacks: Sequence[tuple[list[Tensor], Tensor]],
    lr: float,
    decay: float | Tensor,
    *,
    pool: ThreadPoolExecutor | None,
    most: int,
) -> None:
    """Update matrices, those of one shape together.

    Args:
        stacks: N matrices (A, B) of one shape, of which this rank holds (a, B) each if they are sharded, and their
            directions, (N, a, B) bfloat16.
        lr: learning rate.
        decay: factor of the weights.
        pool: computes chunks of all stacks at the same time; None: one stack after the other, which needs less
            memory.
        most: number of values of a chunk.
    """
    run: Callable[..., Iterable[Any]] = map if pool is None else pool.map

    def split(count: int) -> list[slice]:
        return split_evenly(count, world_size())

    def chunks_of(like: Tensor, count: int) -> list[slice]:
        return list(_chunk_slices([like.numel()] * count, most))

    def orthogonalize_stack(stack: list[Tensor], directions: Tensor) -> Iterable[Tensor]:
        """Orthogonalize this rank's matrices of a stack, by chunk."""
        matrices = gather_stack(stack[0], directions)[split(len(stack))[rank()]]  # of (N, A, B)
        return run(orthogonalize, [matrices[chunk] for chunk in chunks_of(stack[0], len(matrices))])

    def update(parameters: list[Tensor], steps: Tensor) -> None:
        weights = [local_part(parameter) for parameter in parameters]
        torch._foreach_mul_(weights, decay)
        rate = lr * 0.2 * math.sqrt(max(parameters[0].shape))
        torch._foreach_add_(weights, list(steps.float().unbind()), alpha=-rate)

    results = starmap(orthogonalize_stack, stacks)
    for (stack, directions), own in zip(stacks, results if pool is None else list(results), strict=True):
        first = stack[0]
        chunks = list(own)
        result = (
            chunks[0] if len(chunks) == 1 else torch.cat([directions.new_empty(0, *first.shape), *chunks])
        )
        result = gather_rows(result, [part.stop - part.start for part in split(len(stack))])
        steps = shard_stack(first, result)  # (N, a, B)
        parts = chunks_of(first, len(stack))
        deque(run(update, [stack[part] for part in parts], [steps[part] for part in parts]), maxlen=0)


def _chunk_slices(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Divide a sequence into consecutive parts of at most ``most`` values, or of one element."""
    start = 0
    total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            yield slice(start, i)
            start = i
            total = 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replace the singular values of matrices (N, A, B) by values near 1.

    Five steps of the quintic Newton–Schulz iteration with the coefficients of Jordan (2024), as in torch's Muon;
    in float32 on CPUs without products in bfloat16.
    """
    if matrices.device.type == "cpu" and not has_bfloat16_products():
        return torch.stack([_iterate_newton_schulz(matrix.float(), torch.addmm) for matrix in matrices]).to(
            matrices.dtype
        )
    if len(matrices) == 1:  # on a CPU as torch computes it, bit for bit
        return _iterate_newton_schulz(matrices[0], torch.addmm)[None]
    return _iterate_newton_schulz(matrices, torch.baddbmm)


def _iterate_newton_schulz(matrices: Tensor, multiply: Callable[..., Tensor]) -> Tensor:
    a = 3.4445
    b = -4.7750
    c = 2.0315
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    if is_tall:
        matrices = matrices.mT
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    matrices = matrices / norm.clamp(min=1e-7)
    for _ in range(5):
        gram = matrices @ matrices.mT  # (N, A, A)
        polynomial = multiply(gram, gram, gram, beta=b, alpha=c)
        matrices = multiply(matrices, polynomial, matrices, beta=a)
    return matrices.mT if is_tall else matrices


# values that are processed at a time: those that fit in a core's cache; on GPUs to limit temporary memory
_CHUNK = {"cpu": 2**16}
_LARGE_CHUNK = 2**26


@dataclass(kw_only=True)
class _Chunk:
    """Views of parts of parameters, gradients and moments, which are processed together.

    Attributes:
        group: the parameter group.
        size: number of values.
        owners: indices of the parameters among those of this update.
        steps: number of updates of each parameter, with this one.
    """

    group: dict[str, Any]
    size: int = 0
    owners: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)


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
        ready: list[Tensor] = []
        chunks: list[_Chunk] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._add_parts(chunks, group, parameter, owner=len(ready))
                    ready.append(parameter)
        if not ready:
            return loss
        parts: list[list[Tensor]] = [[] for _ in ready]
        for chunk in chunks:
            for owner, part_sum in zip(chunk.owners, _update_moments(chunk), strict=True):
                parts[owner].append(part_sum)
        sums = sums_over_parts(ready, [torch.stack(part_sums).sum() for part_sums in parts])
        means = [total / max(1, parameter.numel()) for total, parameter in zip(sums, ready, strict=True)]
        for chunk in chunks:
            _update_parameters(chunk, means)
        return loss

    def _add_parts(
        self, chunks: list[_Chunk], group: dict[str, Any], parameter: Tensor, *, owner: int
    ) -> None:
        """Count the parameter's step up, and add what this rank holds of it to the last chunk or to new ones."""
        assert parameter.grad is not None
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        # load_state_dict moves it to the parameter's device, where reading it would synchronize at each step
        state["step"] = state["step"].cpu()
        state["step"] += 1
        tensors = list(map(local_part, (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])))
        most = _CHUNK.get(tensors[0].device.type, _LARGE_CHUNK)
        split = [[tensor] for tensor in tensors]
        if all(tensor.is_contiguous() for tensor in tensors):
            split = [list(tensor.view(-1).split(most)) for tensor in tensors]
        for weight, gradient, mean, square in zip(*split, strict=True):
            if not chunks or chunks[-1].group is not group or chunks[-1].size + weight.numel() > most:
                chunks.append(_Chunk(group=group))
            chunk = chunks[-1]
            chunk.size += weight.numel()
            chunk.owners.append(owner)
            chunk.steps.append(int(state["step"]))
            chunk.parameters.append(weight)
            chunk.gradients.append(gradient)
            chunk.means.append(mean)
            chunk.squares.append(square)


def _unbias_beta(beta: float, step: int) -> float:
    """Return the beta with which the moving average is unbiased at step 1, 2, …"""
    if not beta:
        return 0.0
    return beta * -math.expm1((step - 1) * math.log(beta)) / -math.expm1(step * math.log(beta))


def _update_moments(chunk: _Chunk) -> list[Tensor]:
    """Update the moments and return for each part the sum of g² / max(v, eps²)."""
    beta1, beta2 = chunk.group["betas"]
    mean_rates = [1 - _unbias_beta(beta1, step) for step in chunk.steps]
    decays = [_unbias_beta(beta2, step) for step in chunk.steps]
    torch._foreach_lerp_(chunk.means, chunk.gradients, mean_rates)
    torch._foreach_mul_(chunk.squares, decays)
    square_rates = [1 - decay for decay in decays]
    torch._foreach_addcmul_(chunk.squares, chunk.gradients, chunk.gradients, scalars=square_rates)
    scale = torch._foreach_sqrt(chunk.squares)
    torch._foreach_maximum_(scale, chunk.group["eps"])
    ratios = torch._foreach_div(chunk.gradients, scale)
    return [norm.square() for norm in torch._foreach_norm(ratios)]


def _update_parameters(chunk: _Chunk, means: list[Tensor]) -> None:
    """Update the parameters; ``means`` are those of g² / max(v, eps²) over whole tensors, by owner."""
    steps = torch._foreach_sqrt(chunk.squares)
    torch._foreach_add_(steps, chunk.group["eps"])
    torch._foreach_reciprocal_(steps)
    torch._foreach_mul_(steps, chunk.means)
    if chunk.group["weight_decay"]:
        torch._foreach_add_(steps, chunk.parameters, alpha=chunk.group["weight_decay"])
    for owner, parameter, step in zip(chunk.owners, chunk.parameters, steps, strict=True):
        rate = chunk.group["lr"] / means[owner].sqrt().clamp_(min=1)  # on the device, without synchronization
        parameter.addcmul_(step, rate, value=-1)
