"""How a model in training is spread over ranks: whole on each (DDP), or in shards (FSDP2); what follows from it.

Sharded parameters are DTensors (S): each rank holds some of the rows. The temperature and SigLIP's bias are single
numbers and stay whole (W); what the wrappers do for the others, is done for them here.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from clipkit.distributed import ranks_of_host, sum_over_ranks, world_size
from clipkit.errors import ConfigError
from clipkit.model.clip import CLIP
from clipkit.model.towers import Kernel, ResidualAttentionBlock

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "clip_gradients",
    "compile_blocks",
    "complete_gradients",
    "gathered",
    "is_sharded",
    "local_gradients",
    "local_part",
    "put",
    "recompute_blocks",
    "replicated",
    "shard",
    "single_numbers",
    "sums_over_parts",
    "without_values",
]


def without_values(model: CLIP) -> CLIP:
    """The same model on the meta device, in training mode, what is trained marked likewise."""
    with torch.device("meta"):
        empty = CLIP(
            model.architecture, name=model.name, preprocess=model.preprocess, tokenizer=model.tokenizer
        )
    empty.origin = model.origin
    for parameter, own in zip(empty.parameters(), model.parameters(), strict=True):
        parameter.requires_grad_(own.requires_grad)
    return empty.train()


def shard(
    model: CLIP,
    weights: Mapping[str, Tensor],
    sharding: str,
    *,
    device: torch.device,
    reshard: bool = True,
) -> None:
    """Split a model's parameters over ranks (FSDP2, Zhao et al. 2023, https://arxiv.org/abs/2304.11277), in place.

    Every block is gathered when it is computed, in float32, so that the maths is that of the whole model. Gradients
    are the mean over ranks. No device ever holds the whole.

    Args:
        model: see ``without_values``; locked, compiled and recomputed as it is to be.
        weights: what it is to hold, whole, by name; the same on all ranks.
        sharding: "full": over all ranks; "hybrid": over the ranks of a host, and the same on every host.
        device: where the shards go.
        reshard: whether blocks are let go after the forward pass and gathered again for the backward one.

    Raises:
        ConfigError: the towers are another library's, or there is one process, or hosts differ in size.
    """
    if not model.architecture.is_own:
        raise ConfigError(f"sharding = {sharding!r} splits clipkit's own towers; {model.name} has others")
    if world_size() == 1:
        raise ConfigError(f"sharding = {sharding!r} needs several processes: start with torchrun")
    mesh = _mesh(sharding, device.type)
    for block in [module for module in model.modules() if isinstance(module, ResidualAttentionBlock)]:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, ignored_params=set(single_numbers(model)))
    for method in ("encode_image", "encode_text"):
        register_fsdp_forward_method(model, method)
    model.to_empty(device=device)
    model.reset_constants()
    for name, own in model.state_dict().items():
        put(own, weights[name])


def _mesh(sharding: str, device: str) -> DeviceMesh:
    world, ranks_per_host = world_size(), ranks_of_host()
    if sharding == "full":
        return init_device_mesh(device, (world,))
    if world % ranks_per_host:
        raise ConfigError(
            f"sharding = 'hybrid' needs hosts of equal size: {world} ranks, {ranks_per_host} here"
        )
    if ranks_per_host == 1:
        raise ConfigError(
            "sharding = 'hybrid' splits over the ranks of a host, and torchrun started one: set 'full'"
        )
    shape = (world // ranks_per_host, ranks_per_host)
    return init_device_mesh(device, shape, mesh_dim_names=("hosts", "ranks"))


def replicated(model: CLIP) -> nn.Module:
    """The model as a module whose backward pass leaves the mean gradient on every rank."""
    if world_size() == 1 or isinstance(model, FSDPModule):
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def single_numbers(model: CLIP) -> list[nn.Parameter]:
    """The temperature, and SigLIP's bias where there is one."""
    return [parameter for parameter in (model.logit_scale, model.logit_bias) if parameter is not None]


@contextmanager
def local_gradients(module: nn.Module, *, last: bool) -> Iterator[None]:
    """Backward passes within add to this rank's gradients; those of the last one are brought together."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)
        yield
    elif isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
    else:
        yield


@contextmanager
def gathered(model: CLIP, *, reshard: bool = True) -> Iterator[None]:
    """The whole model on every rank, for ranks that do not call it the same number of times; not for training."""
    if not isinstance(model, FSDPModule):
        yield
        return
    split = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in split:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in split:
            module.set_reshard_after_forward(reshard and not isinstance(module, CLIP), recurse=False)
            module.reshard()


@torch.no_grad()
def complete_gradients(model: CLIP) -> None:
    """After the backward pass: the mean over ranks of what no wrapper has brought together."""
    if isinstance(model, FSDPModule):
        for parameter in single_numbers(model):
            if parameter.grad is not None:
                parameter.grad.copy_(sum_over_ranks(parameter.grad) / world_size())


@torch.no_grad()
def clip_gradients(model: CLIP, limit: float) -> Tensor:
    """Scale gradients down to a norm of ``limit`` (0: any); returns the norm that they had, on every rank."""
    parts: dict[bool, list[nn.Parameter]] = {}  # one call of torch's takes tensors of one kind
    for parameter in model.parameters():
        if parameter.grad is not None:
            parts.setdefault(isinstance(parameter.grad, DTensor), []).append(parameter)
    norms = [
        torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in parts.values()
    ]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))
    if limit:
        for part in parts.values():
            torch.nn.utils.clip_grads_with_norm_(part, limit, norm)
    return norm


@torch.no_grad()
def put(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into one of the same shape, of which this rank may hold a part."""
    if isinstance(target, DTensor):
        value = distribute_tensor(
            value.to(target.device), target.device_mesh, target.placements, src_data_rank=None
        )
    target.copy_(value)


# --------------------------------------------------------------------------------------------------------------
# torch.compile by block: what one block computes is compiled once for each tower and used by all its blocks.
#
# The blocks of a tower are alike, so this compiles two short functions a tower instead of one long graph, in a
# fraction of the time, and leaves everything around them as it was: names, hooks, DDP, FSDP, recomputation.

_MOST_SHAPES = 32  # of one function, before it runs uncompiled


def compile_blocks(model: CLIP, *, backend: str = "inductor") -> None:
    """Compute the blocks of clipkit's own towers by compiled code while the model is in training mode.

    Image blocks are compiled for the exact shapes that occur: in training there are few, one for each size of a
    part of a batch, image size and number of patches kept. Text blocks are compiled for any number of texts and
    tokens, packed or padded. In evaluation mode, where batches have many sizes, blocks run as they are.

    The order of what can be done to a block, from inside, is: compiled, recomputed (``recompute_blocks``), sharded
    (FSDP). It holds whatever is called first, since each has its own place: the compiled code is what a block's
    ``forward`` calls, ``forward`` does the recomputation, and FSDP's hooks run around ``forward``. Wrap in DDP or
    FSDP last all the same.

    Args:
        model: the model; its state dict keeps its names, and copies of it are compiled too.
        backend: of ``torch.compile``.

    Raises:
        ConfigError: no tower is clipkit's own.
    """
    if not model.transformers:
        raise ConfigError("only blocks of clipkit's own towers are compiled, and this model has none")
    for called, transformer in model.transformers.items():
        kernels = (
            _compiled(ResidualAttentionBlock.whole, backend, dynamic=called == "text"),
            _compiled(ResidualAttentionBlock.read, backend, dynamic=called == "text"),
        )
        for block in transformer.blocks:
            block.kernels = kernels


def _compiled(function: Kernel, backend: str, *, dynamic: bool) -> Kernel:
    options: dict[str, Any] = {"dynamic": dynamic, "backend": backend}
    if "isolate_recompiles" in signature(torch.compile).parameters:  # torch 2.11 does not have it
        # towers share the function, not its shapes
        options |= {"isolate_recompiles": True, "recompile_limit": _MOST_SHAPES}
    kernel: Kernel = torch.compile(function, **options)
    return kernel


# --------------------------------------------------------------------------------------------------------------
# Activation checkpointing by block: less memory for one more forward pass of the blocks chosen.
#
# A block that is recomputed keeps its input alone; its inner values are computed again when its gradient is due
# (Chen et al. 2016, arXiv 1604.06174). Gradients are the same, bit for bit.

_NOT_DONE = ("ModifiedResNet",)  # open_clip's takes the call and does nothing


def recompute_blocks(model: CLIP, every: int = 1) -> None:
    """Recompute every ``every``-th block of each tower in the backward pass; 0 keeps all values, as at first.

    Towers of other libraries have one switch for all their blocks, and any ``every`` from 1 sets it. Names of the
    state dict stay. May be called at any time, before or after ``compile_blocks`` and FSDP or DDP: within a block,
    recomputation lies around what is compiled, and inside what FSDP does before and after the block.

    Raises:
        ConfigError: a library's tower cannot.
    """
    if every < 0:
        raise ConfigError(f"every = {every} blocks must be 0 or more")
    for transformer in model.transformers.values():
        for number, block in enumerate(transformer.blocks):
            block.recompute = every > 0 and number % every == 0
    if "image" not in model.transformers and model.architecture.vision.has_blocks:
        _switch(model.visual, "image", on=every > 0)
    if model.text is not None and model.architecture.text.has_blocks:
        _switch(model.text, "text", on=every > 0)


def _switch(tower: nn.Module, called: str, *, on: bool) -> None:
    """By what timm and open_clip, or transformers, call it; it may lie on what the tower wraps."""
    part: Any
    for part in (tower, *tower.children()):
        if type(part).__name__ in _NOT_DONE:
            continue
        try:
            if hasattr(part, "set_grad_checkpointing"):
                part.set_grad_checkpointing(on)
            elif getattr(part, "supports_gradient_checkpointing", False):
                part.gradient_checkpointing_enable() if on else part.gradient_checkpointing_disable()
            else:
                continue
        except (AssertionError, AttributeError, NotImplementedError, ValueError) as error:
            raise ConfigError(f"the {called} tower cannot recompute its blocks: {error!r}") from error
        return
    if on:
        raise ConfigError(f"the {called} tower, {type(tower).__name__}, cannot recompute its blocks")


# --------------------------------------------------------------------------------------------------------------
# What of a tensor lies in this process, and sums over all processes that hold a part of it.
#
# FSDP2 makes parameters DTensors of which each rank holds some rows. An optimizer works on the rows that are
# here; what is a property of a whole tensor, such as its norm, is a sum over ranks. A plain tensor is its only
# part.


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is spread over processes."""
    return _sharded(tensor) is not None


def local_part(tensor: Tensor) -> Tensor:
    """The rows that are here, in the same memory; of a plain tensor all. No gradient flows through it."""
    bare = tensor.detach()
    sharded = _sharded(bare)
    return bare if sharded is None else sharded.to_local()


def sums_over_parts(tensors: Sequence[Tensor], sums: Sequence[Tensor]) -> list[Tensor]:
    """Sums over whole tensors, from those over the parts that are here; one message for all tensors of a layout.

    Args:
        tensors: N, plain or spread over processes.
        sums: of each one's local part something that adds up, scalars of one dtype on one device.

    Returns:
        N scalars, the same on all ranks.
    """
    whole = list(sums)
    layouts: dict[object, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if (sharded := _sharded(tensor)) is not None:
            layouts.setdefault((sharded.device_mesh, sharded.placements), []).append(place)
    for rows in layouts.values():
        first = _sharded(tensors[rows[0]])
        assert first is not None
        totals = _sums_like(first, torch.stack([sums[row] for row in rows]))
        for row, total in zip(rows, totals.unbind(), strict=True):
            whole[row] = total
    return whole


def _sums_like(tensor: "DTensor", parts: Tensor) -> Tensor:
    """(N,) of each rank → their (N,) sums over the ranks that the tensor is spread over."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    # ranks that hold the same rows, as in hybrid sharding, must not count them twice
    kinds = [Partial() if placement.is_shard() else Replicate() for placement in tensor.placements]
    total: Tensor = DTensor.from_local(parts, tensor.device_mesh, kinds, run_check=False).full_tensor()
    return total


def _sharded(tensor: Tensor) -> "DTensor | None":
    library = sys.modules.get(
        "torch.distributed.tensor"
    )  # takes a second to load, and is there if one was made
    return tensor if library is not None and isinstance(tensor, library.DTensor) else None
