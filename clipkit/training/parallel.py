"""Models in training on several ranks: replicated (DDP) or sharded (FSDP2); compiled and recomputed blocks.

Sharded parameters are DTensors: each rank holds some of the rows. The temperature and SigLIP's bias are scalars and
stay whole; their gradients are averaged here instead of by FSDP2.
"""

import gc
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clipkit.config import Config
from clipkit.distributed import (
    broadcast_buffers,
    rank,
    ranks_of_host,
    share_timeout,
    sum_over_ranks,
    world_size,
)
from clipkit.errors import ConfigError
from clipkit.model.clip import CLIP, allocate
from clipkit.model.decoder import CrossAttentionBlock
from clipkit.model.lora import add_adapters
from clipkit.model.towers import Kernel, Recompute, ResidualAttentionBlock
from clipkit.objectives import Term

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

# Importing FSDP2 and DTensor takes half as long as importing torch: only runs that shard a model import them, and
# until then nothing is an instance of their classes.


def _is_sharded_module(module: object) -> "TypeIs[FSDPModule]":
    loaded = sys.modules.get("torch.distributed.fsdp")
    return loaded is not None and isinstance(module, loaded.FSDPModule)


def is_sharded(tensor: Tensor) -> "TypeIs[DTensor]":
    """Return whether the tensor is sharded over ranks."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def without_values(model: CLIP) -> CLIP:
    """Return the same model on the meta device, in training mode, with the same parameters trained."""
    with torch.device("meta"):
        empty = CLIP(
            model.architecture, name=model.name, preprocess=model.preprocess, tokenizer=model.tokenizer
        )
    empty.origin = model.origin
    if model.adapters is not None:
        add_adapters(empty, model.adapters)
    for parameter, original in zip(empty.parameters(), model.parameters(), strict=True):
        parameter.requires_grad_(original.requires_grad)
    return empty.train()


def shard(
    model: CLIP,
    weights: Mapping[str, Tensor] | None,
    sharding: str,
    *,
    device: torch.device,
    gather_bf16: bool = False,
    reshard: bool = True,
) -> None:
    """Shard a model's parameters over ranks (FSDP2, Zhao et al. 2023, https://arxiv.org/abs/2304.11277), in place.

    The linear layers of a block are gathered when it is computed, all other parameters in float32 for the whole
    step. Results are those of the whole model. Gradients are summed in float32 and are the mean over ranks.

    Args:
        model: see ``without_values``; already locked, compiled and set to recompute.
        weights: unsharded weights by name, of which rank 0's count; other ranks may pass None. None on all ranks if
            they are read later.
        sharding: "full": over all ranks; "hybrid": over the ranks of each host, replicated on the hosts.
        device: the device of the shards.
        gather_bf16: whether linear layers are gathered in bfloat16. Under autocast, which would convert them, the
            results are bit-identical if each block is computed once, see ``gathers_once``.
        reshard: whether blocks are freed after the forward pass and gathered again for the backward pass.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if not model.architecture.is_native:
        name = model.name or "those of model.weights"
        raise ConfigError(f"sharding = {sharding!r} requires clipkit's own towers, not {name}")
    world = world_size()
    per_host = ranks_of_host()
    if world == 1:
        raise ConfigError(f"sharding = {sharding!r} requires several processes: start with torchrun")
    if sharding == "full":
        mesh = init_device_mesh(device.type, (world,))
    elif world % per_host:
        raise ConfigError(f"sharding = 'hybrid' requires hosts of equal size: {world} ranks, {per_host} here")
    elif per_host == 1:
        raise ConfigError(
            "sharding = 'hybrid' shards over the ranks of a host, and torchrun started one: set 'full'"
        )
    else:
        shape = (world // per_host, per_host)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("hosts", "ranks"))
    share_timeout(mesh.get_all_groups())
    apply_fsdp(model, mesh, gather_bf16=gather_bf16, reshard=reshard)
    model.to_empty(device=device)
    model.reset_constants()
    if sum_over_ranks(torch.tensor(int(weights is not None))):
        for name, tensor in model.state_dict().items():
            if rank() == 0:
                assert weights is not None
                value = weights[name].to(device)
            else:
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            broadcast_buffers([value])
            put(tensor, value)


def apply_fsdp(model: CLIP, mesh: "DeviceMesh", *, gather_bf16: bool = False, reshard: bool = True) -> None:
    """Shard the parameters over the ranks of a mesh; arguments as for ``shard``."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if gather_bf16:
        policy = replace(policy, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = {block: linear_parameters(block) for block in blocks(model)}
    in_blocks = {parameter for parameters in layers.values() for parameter in parameters}
    # the model before its blocks, because it takes no parameters of modules that are sharded already
    fully_shard(model, mesh=mesh, ignored_params={*scalars(model), *in_blocks})
    for block, parameters in layers.items():
        others = set(block.parameters()).difference(parameters)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, ignored_params=others)
    _register_methods(model)


def _register_methods(model: CLIP) -> None:
    """Gather weights for other methods than ``forward`` too, but once for methods that call each other.

    After each call torch frees the weights outside of blocks, which would be gathered again for the backward pass.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    is_called = False

    def call_once(gather: Callable[..., Any], compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal is_called
            if is_called:
                return compute(*arguments, **options)
            is_called = True
            try:
                return gather(*arguments, **options)
            finally:
                is_called = False

        return call

    # hooks of torch run around forward
    model.forward = call_once(model.forward, model.forward)  # type: ignore[method-assign]
    for name in ("encode_image", "encode_text", "image_tokens", "text_tokens", "decoder_input"):
        compute = getattr(model, name)
        register_fsdp_forward_method(model, name)
        setattr(model, name, call_once(getattr(model, name), compute))


def gathers_once(terms: Mapping[str, Term]) -> bool:
    """Return whether each block is computed once in a step; otherwise gradients in bfloat16 would be added."""
    return not any(term.encodes_again for term in terms.values())


def blocks(model: CLIP) -> list[nn.Module]:
    """Return the blocks of clipkit's own towers and of the decoder, which are gathered one at a time."""
    kinds = (ResidualAttentionBlock, CrossAttentionBlock)
    return [module for module in model.modules() if isinstance(module, kinds)]


def linear_parameters(block: nn.Module) -> list[nn.Parameter]:
    """Return a block's parameters that autocast uses in half precision: all but those of norms."""
    norms = {
        parameter
        for module in block.modules()
        if isinstance(module, nn.LayerNorm)
        for parameter in module.parameters()
    }
    return [parameter for parameter in block.parameters() if parameter not in norms]


def prepare(
    model: CLIP,
    config: Config,
    device: torch.device,
    *,
    sharding: str,
    bf16: bool,
    terms: Mapping[str, Term],
) -> CLIP:
    """Shard the model if ``sharding`` is not "none", compile and recompute blocks, and move it to the device.

    A model without values stays without, but in memory of the device.
    """
    has_values = not model.logit_scale.is_meta
    if sharding != "none":
        weights = model.state_dict() if has_values else None
        model = without_values(model)
        gather_bf16 = bf16 and gathers_once(terms)
        shard(model, weights, sharding, device=device, gather_bf16=gather_bf16, reshard=config.reshard)
        del weights
    elif not has_values:
        allocate(model, device)
        model.reset_constants()
    if config.deterministic:
        use_deterministic_algorithms(model, device)
    if config.compile:
        compile_blocks(model)
    if config.recompute:
        recompute_blocks(model, every=config.recompute)
    return model.to(device)


_LARGE_WORLD = 64  # ranks from which all-reduces of small buckets take as long as the latency allows
_LARGE_BUCKET = 100  # MB, instead of torch's 25


def replicated(model: CLIP) -> nn.Module:
    """Return the model as a module that computes the mean gradient over ranks on every rank.

    Deletes gradients. Delete an earlier such module first: it holds as much memory as the gradients.
    """
    if world_size() == 1 or _is_sharded_module(model):
        return model
    # gradients are views of the earlier module's buckets, and the module is part of a reference cycle
    model.zero_grad(set_to_none=True)
    gc.collect()
    # buffers of clipkit's own towers do not change: without copying rank 0's, a step has one message less
    changing = not model.architecture.is_native
    option = "forward_sync_buffers"
    if option not in signature(DistributedDataParallel).parameters:
        option = "broadcast_buffers"  # its name in older torch
    bucket = _LARGE_BUCKET if world_size() >= _LARGE_WORLD else None
    return DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket,
        **{option: changing},  # type: ignore[arg-type]
    )


def scalars(model: CLIP) -> list[nn.Parameter]:
    """Return the temperature, and SigLIP's bias if there is one."""
    return [parameter for parameter in (model.logit_scale, model.logit_bias) if parameter is not None]


@contextmanager
def local_gradients(module: nn.Module, *, last: bool) -> Iterator[None]:
    """Accumulate gradients of backward passes on this rank; synchronize ranks in the ``last`` one."""
    if _is_sharded_module(module):
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
    """Gather the whole model on every rank, so that ranks may call it differently often; not for training."""
    if not _is_sharded_module(model):
        yield
        return
    split = [module for module in model.modules() if _is_sharded_module(module)]
    for module in split:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in split:
            module.set_reshard_after_forward(reshard and not isinstance(module, CLIP), recurse=False)
            module.reshard()


def drop_gathered(model: nn.Module) -> None:
    """Make FSDP2 gather weights again, whose values have changed."""
    for module in model.modules():
        if _is_sharded_module(module):
            module.reshard()


@torch.no_grad()
def complete_gradients(model: CLIP) -> None:
    """Average the gradients of scalars over ranks after the backward pass of a sharded model."""
    if _is_sharded_module(model):
        for parameter in scalars(model):
            if parameter.grad is not None:
                parameter.grad.copy_(sum_over_ranks(parameter.grad) / world_size())


@torch.no_grad()
def clip_gradients(model: CLIP, limit: float) -> Tensor:
    """Scale gradients down to a norm of ``limit`` (0: no clipping); return their norm before, on every rank."""
    parts: dict[bool, list[nn.Parameter]] = {}  # torch's functions take tensors of one kind
    for parameter in model.parameters():
        if parameter.grad is not None:
            parts.setdefault(is_sharded(parameter.grad), []).append(parameter)
    norms = [
        torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in parts.values()
    ]
    norms = [whole(norm) for norm in norms]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if limit:
        for part in parts.values():
            torch.nn.utils.clip_grads_with_norm_(part, limit, norm)
    return norm


def split_evenly(count: int, parts: int) -> list[slice]:
    """Divide ``count`` rows into consecutive parts, whose sizes differ by at most one."""
    return [slice(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


@torch.no_grad()
def put(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into one of the same shape that may be sharded."""
    if is_sharded(target):
        target.to_local().copy_(value[_local_rows(target)])
    else:
        target.copy_(value)


def _local_rows(tensor: "DTensor") -> slice:
    """Return which rows this rank holds, so that no others are read of a file that is mapped into memory."""
    for dim, placement in enumerate(tensor.placements):
        if placement.is_shard():
            count = math.ceil(len(tensor) / tensor.device_mesh.size(dim))
            start = count * tensor.device_mesh.get_local_rank(dim)
            return slice(start, start + count)
    return slice(None)


def ranks_of_replica(tensors: Iterable[Tensor]) -> list[int] | None:
    """Return the ranks that hold all rows of sharded tensors once; None if none of the tensors is sharded."""
    for tensor in tensors:
        if is_sharded(tensor):
            ranks = tensor.device_mesh.mesh
            for dim, placement in reversed(list(enumerate(tensor.placements))):
                if placement.is_replicate():
                    ranks = ranks.select(dim, 0)
            return list(map(int, ranks.flatten()))
    return None


def is_divided(tensor: Tensor) -> bool:
    """Return whether each rank holds some of the rows."""
    return is_sharded(tensor) and any(placement.is_shard() for placement in tensor.placements)


def gather_stack(like: Tensor, stack: Tensor) -> Tensor:
    """Gather (N, a, …), the local parts of N tensors that are all sharded as ``like`` (A, …), to (N, A, …)."""
    if not is_sharded(like):
        return stack
    from torch.distributed.tensor import DTensor

    shape = torch.Size((len(stack), *like.shape))
    stride = torch.empty(shape, device="meta").stride()
    placements = _stack_placements(like)
    return DTensor.from_local(
        stack, like.device_mesh, placements, run_check=False, shape=shape, stride=stride
    ).full_tensor()


def shard_stack(like: Tensor, stack: Tensor) -> Tensor:
    """Return this rank's part (N, a, …) of N tensors (N, A, …), each sharded as ``like``; no communication."""
    if not is_sharded(like):
        return stack
    from torch.distributed.tensor import distribute_tensor

    placements = _stack_placements(like)
    return distribute_tensor(stack, like.device_mesh, placements, src_data_rank=None).to_local()


def _stack_placements(like: Any) -> list[Any]:
    from torch.distributed.tensor import Shard

    return [Shard(placement.dim + 1) if placement.is_shard() else placement for placement in like.placements]


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded; all ranks call it together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


_MAX_SHAPES = 32  # of a compiled function, before it runs uncompiled


def use_deterministic_algorithms(model: CLIP, device: torch.device) -> None:
    """Make computations on a GPU repeat bit for bit; call this before the first one.

    The backward pass of attention over more than two blocks of keys otherwise adds the parts of a gradient in any
    order. Towers of other libraries may use operations without a deterministic algorithm, about which torch warns.
    """
    if device.type == "cuda":
        # read by cuBLAS when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=len(model.transformers) < 2)
        # only needed to make the use of uninitialized memory repeat
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def compile_blocks(model: CLIP, *, backend: str = "inductor") -> None:
    """Compile the blocks of clipkit's own towers for training mode.

    Blocks of a tower are alike: compiling one function for all of them is much faster than one long graph, and
    leaves names, hooks, DDP, FSDP and recomputation unchanged. Image blocks are compiled for each shape that
    occurs, of which there are few; text blocks for any number of texts and tokens, packed or padded. In evaluation
    mode, where batches have many sizes, blocks run uncompiled. With ``lock.unfreeze_every``, blocks below, at and
    above the lowest trained one have code of their own, so up to three steps that unfreeze a layer compile again.

    From inside to outside a block may be compiled, recomputed (``recompute_blocks``) and sharded, in any order of
    calls: the block's ``forward`` calls the compiled code and recomputes, and FSDP's hooks run around ``forward``.

    Args:
        model: the model; its state dict keeps its names, and copies of it are compiled too.
        backend: backend of ``torch.compile``.
    """
    if not model.transformers:
        raise ConfigError("compile requires towers of clipkit's own, and this model has none")
    for tower, transformer in model.transformers.items():
        options: dict[str, Any] = {"dynamic": tower == "text", "backend": backend}
        if "isolate_recompiles" in signature(torch.compile).parameters:  # not in torch 2.11
            # towers share the function, not its shapes
            options |= {"isolate_recompiles": True, "recompile_limit": _MAX_SHAPES}
        compute_tokens: Kernel = torch.compile(ResidualAttentionBlock.compute_tokens, **options)
        compute_readout: Kernel = torch.compile(ResidualAttentionBlock.compute_readout, **options)
        for block in transformer.blocks:
            block.kernels = (compute_tokens, compute_readout)


_WITHOUT_EFFECT = ("ModifiedResNet",)  # open_clip's accepts the call and does nothing


def recompute_function(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Call a function without random numbers, whose activations are recomputed in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    result: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result


def recompute_blocks(model: CLIP, every: int = 1, *, recompute: Recompute = recompute_function) -> None:
    """Recompute every ``every``-th block of each tower in the backward pass; 0 recomputes none.

    Activation checkpointing (Chen et al. 2016, https://arxiv.org/abs/1604.06174): the block keeps only its input.
    Gradients are the same, bit for bit. Towers of other libraries have one switch for all their blocks, which any
    ``every`` from 1 turns on. May be called at any time, see ``compile_blocks``.
    """
    assert every >= 0, every
    stacks: list[Sequence[Any]] = [transformer.blocks for transformer in model.transformers.values()]
    if model.text_decoder is not None:
        stacks += [model.text_decoder.blocks, model.text_decoder.cross_blocks]
    for stack in stacks:
        for depth, block in enumerate(stack):
            block.recompute = recompute if every and depth % every == 0 else None
    if "image" not in model.transformers and model.architecture.vision.has_blocks:
        _switch(model.visual, "image", on=every > 0)
    if model.text is not None and model.architecture.text.has_blocks:
        _switch(model.text, "text", on=every > 0)


def _switch(tower: nn.Module, name: str, *, on: bool) -> None:
    """Turn recomputation of a tower of timm, open_clip or transformers, or of the module it wraps, on or off."""
    part: Any
    for part in (tower, *tower.children()):
        if type(part).__name__ in _WITHOUT_EFFECT:
            continue
        try:
            if hasattr(part, "set_grad_checkpointing"):
                part.set_grad_checkpointing(on)
            elif getattr(part, "supports_gradient_checkpointing", False):
                # named gradient_… by transformers below 5.24
                kind = "activation" if hasattr(part, "activation_checkpointing_enable") else "gradient"
                getattr(part, f"{kind}_checkpointing_{'enable' if on else 'disable'}")()
            else:
                continue
        except (AssertionError, AttributeError, NotImplementedError, ValueError) as error:
            raise ConfigError(f"the {name} tower cannot recompute its blocks: {error!r}") from error
        return
    if on:
        raise ConfigError(f"the {name} tower, {type(tower).__name__}, cannot recompute its blocks")


def local_part(tensor: Tensor) -> Tensor:
    """Return the rows that this rank holds, in the same memory and without gradient; all of a plain tensor."""
    bare = tensor.detach()
    return bare.to_local() if is_sharded(bare) else bare


def zeros_of(tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return zeros sharded as a tensor; a sharded dimension that is reduced to 1 is held by every rank instead.

    Args:
        tensor: plain or sharded.
        shape: that of the tensor, but for reduced dimensions.
    """
    if not is_sharded(tensor):
        return torch.zeros(shape, dtype=dtype, device=tensor.device)
    from torch.distributed.tensor import Replicate, Shard, zeros

    placements = [
        Replicate()
        if isinstance(placement, Shard) and shape[placement.dim] != tensor.shape[placement.dim]
        else placement
        for placement in tensor.placements
    ]
    zero_tensor: Tensor = zeros(
        tuple(shape), dtype=dtype, device_mesh=tensor.device_mesh, placements=placements
    )
    return zero_tensor


def sums_over_parts(tensors: Sequence[Tensor], sums: Sequence[Tensor]) -> list[Tensor]:
    """Add up values of the parts of tensors over ranks, with one message for all tensors of a layout.

    Args:
        tensors: N, plain or sharded.
        sums: a value of each one's local part, scalars of one dtype on one device.

    Returns:
        N scalars, the same on all ranks.
    """
    totals = list(sums)
    layouts: dict[object, list[tuple[int, Any]]] = {}
    for index, tensor in enumerate(tensors):
        if is_sharded(tensor):
            layouts.setdefault((tensor.device_mesh, tensor.placements), []).append((index, tensor))
    if layouts:
        from torch.distributed.tensor import DTensor, Partial, Replicate
    for members in layouts.values():
        layout = members[0][1]
        # ranks that hold the same rows, as in hybrid sharding, must not count them twice
        kinds = [Partial() if placement.is_shard() else Replicate() for placement in layout.placements]
        parts = torch.stack([sums[index] for index, _ in members])
        added = DTensor.from_local(parts, layout.device_mesh, kinds, run_check=False).full_tensor()
        for (index, _), total in zip(members, added.unbind(), strict=True):
            totals[index] = total
    return totals
