"""Averaged weights (an exponential moving average), and the running statistics of batch norms."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from clipkit.distributed import broadcast_buffers
from clipkit.errors import CheckpointError
from clipkit.model.clip import CLIP
from clipkit.training.parallel import drop_gathered, local_part, put

_SWAPPED_BYTES = 256 << 20  # of weights that are exchanged at a time, which a copy needs as temporary memory


class AveragedWeights:
    """A moving average of a model's weights: average ← average + (1 − d) (weights − average) after each update.

    After update s = 1, 2, … d is min(decay, (1 + s) / (10 + s)), so the first weights are soon forgotten (averaging
    iterates: Polyak & Juditsky 1992; of networks: Izmailov et al. 2018, https://arxiv.org/abs/1803.05407). The
    average needs as much memory as the weights. Each rank averages its part of sharded weights. Buffers, such as
    the statistics of batch norms, are not averaged.

    Only weights that require a gradient when this object is created are averaged: create it after weights are
    locked permanently, and before any are locked temporarily.

    Args:
        decay: at least 0, below 1.
    """

    def __init__(self, model: CLIP, decay: float) -> None:
        assert 0 <= decay < 1, decay
        self.decay = decay
        self._model = model
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # an average in half precision would not change
        assert all(p.dtype in (torch.float32, torch.float64) for p in self._weights.values())
        self._averages = {name: p.detach().clone() for name, p in self._weights.items()}

    @torch.no_grad()
    def update(self, step: Tensor | int, *, skip: Tensor | bool = False) -> None:
        """Add the weights after ``step`` updates, at least 1, to the average unless ``skip``.

        Scalars on the device are not waited for.

        Args:
            step: a number, or a floating-point scalar.
            skip: bool scalar.
        """
        if not isinstance(step, Tensor):
            step = torch.tensor(step, dtype=torch.float64)
        weight = 1 - ((1 + step) / (10 + step)).clamp(max=self.decay)
        weight = torch.where(torch.as_tensor(skip), 0.0, weight)
        averages = self._local_parts(self._averages)
        weights = [weight.to(average.dtype) for average in averages]
        torch._foreach_lerp_(averages, self._local_parts(self._weights), weights)

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by parameter name, sharded like the parameters; not copies."""
        return dict(self._averages)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], *, origin: object) -> None:
        """Set the averages to what ``tensors`` returned.

        Args:
            tensors: not sharded; names that are not averaged, such as locked weights, are ignored.
            origin: source of the tensors, for error messages.
        """
        if missing := [name for name in self._averages if name not in tensors]:
            raise CheckpointError(f"{origin}: the averaged weights lack {missing[0]}, which is trained")
        for name, average in self._averages.items():
            stored = tensors[name]
            if stored.shape != average.shape or stored.dtype != average.dtype:
                raise CheckpointError(
                    f"{origin}: the average of {name} is {tuple(stored.shape)} {stored.dtype} "
                    f"instead of {tuple(average.shape)} {average.dtype}"
                )
        for name, average in self._averages.items():
            put(average, tensors[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights, and afterwards its own, bit for bit.

        Values are exchanged, which takes memory for a few weights only. Do not update the model meanwhile.
        """
        self._swap_weights()
        try:
            yield
        finally:
            self._swap_weights()

    @torch.no_grad()
    def _swap_weights(self) -> None:
        """Exchange values in place, since FSDP and DDP hold the memory of the weights; many at a time, since a GPU
        starts each operation separately."""
        pairs = list(zip(self._local_parts(self._weights), self._local_parts(self._averages), strict=True))
        chunks: list[tuple[list[Tensor], list[Tensor]]] = []
        size = 0
        for weight, average in pairs:
            size += weight.nbytes
            if not chunks or size > _SWAPPED_BYTES:
                chunks.append(([], []))
                size = weight.nbytes
            chunks[-1][0].append(weight)
            chunks[-1][1].append(average)
        for weights, averages in chunks:
            copies = [torch.empty_like(weight) for weight in weights]
            torch._foreach_copy_(copies, weights)
            torch._foreach_copy_(weights, averages)
            torch._foreach_copy_(averages, copies)
        drop_gathered(self._model)

    @staticmethod
    def _local_parts(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return [local_part(tensor) for tensor in tensors.values()]


class RunningStatistics:
    """Running means and variances of batch norms, which only towers of other libraries have; false if there are
    none.

    A forward pass changes them even without an update: they are restored after the first of two passes, and after a
    step that is skipped.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = [
            module
            for module in model.modules()
            if isinstance(module, _NormBase) and module.track_running_stats
        ]
        self._buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self._kept = [buffer.clone() for buffer in self._buffers]

    def __bool__(self) -> bool:
        return bool(self._buffers)

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the current values."""
        for saved, buffer in zip(self._kept, self._buffers, strict=True):
            saved.copy_(buffer)

    @torch.no_grad()
    def put_back(self, where: Tensor | bool = True) -> None:
        """Restore the values that were kept, if the scalar ``where`` is true."""
        condition = torch.as_tensor(where)
        for saved, buffer in zip(self._kept, self._buffers, strict=True):
            buffer.copy_(torch.where(condition, saved, buffer))

    def broadcast(self) -> None:
        """Give all ranks the values of rank 0, which are saved; each rank has those of its part of the batches."""
        broadcast_buffers(self._buffers)
