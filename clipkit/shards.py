"""What of a tensor lies in this process, and sums over all processes that hold a part of it.

FSDP2 makes parameters DTensors of which each rank holds some rows. An optimizer works on the rows that are here;
what is a property of a whole tensor, such as its norm, is a sum over ranks. A plain tensor is its only part.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_sharded", "local_part", "sums_over_parts"]


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
