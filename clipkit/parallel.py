"""How a model in training is spread over ranks: whole on each (DDP), or in shards (FSDP2); what follows from it.

Sharded parameters are DTensors (S): each rank holds some of the rows. The temperature and SigLIP's bias are single
numbers and stay whole (W); what the wrappers do for the others, is done for them here.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
from clipkit.model import CLIP
from clipkit.towers import ResidualAttentionBlock

__all__ = [
    "clip_gradients", "complete_gradients", "gathered", "local_gradients", "put", "replicated", "shard",
    "single_numbers", "without_values",
]  # fmt: skip


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
