"""torch.compile by block: what one block computes is compiled once for each tower and used by all its blocks.

The blocks of a tower are alike, so this compiles two short functions a tower instead of one long graph, in a
fraction of the time, and leaves everything around them as it was: names, hooks, DDP, FSDP, recomputation.
"""

from inspect import signature
from typing import Any

import torch

from clipkit.errors import ConfigError
from clipkit.model import CLIP
from clipkit.towers import Kernel, ResidualAttentionBlock

__all__ = ["compile_blocks"]

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
