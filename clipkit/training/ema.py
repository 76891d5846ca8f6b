"""Averaged weights: an exponential moving average of the weights over the updates of a training.

The average may be scored and published in place of the last weights (averaging iterates: Polyak & Juditsky 1992;
of networks' weights: Izmailov et al. 2018, https://arxiv.org/abs/1803.05407). With a decay of 0.99 it changes the
quickstart's scores by less than seeds do (bench/options.py): its rate has fallen to nothing by the end anyway.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from clipkit.distributed import broadcast_buffers
from clipkit.errors import CheckpointError, ConfigError
from clipkit.model.clip import CLIP
from clipkit.training.parallel import local_part

__all__ = ["AveragedWeights", "RunningStatistics"]


class AveragedWeights:
    """A moving average of a model's weights: average ← average + (1 − d) (weights − average) after each update.

    After update s = 1, 2, … d is min(decay, (1 + s) / (10 + s)), so that the first weights are soon forgotten.
    The average costs the memory of the weights once. Of weights that are spread over ranks each rank averages its
    part. Buffers, such as the statistics of batch norms, are the model's own.

    Only weights that require a gradient when this is made are averaged: make it after what is locked for good is
    locked, and before anything is locked for a while.
    """

    def __init__(self, model: CLIP, decay: float) -> None:
        """The average begins as the weights are.

        Raises:
            ConfigError: ``decay`` is not from 0 up to 1.
        """
        if not 0 <= decay < 1:
            raise ConfigError(f"the decay of averaged weights must be 0 up to 1, not {decay}")
        self.decay, self._model = decay, model
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # an average in half precision would not move
        assert all(p.dtype in (torch.float32, torch.float64) for p in self._weights.values())
        self._averages = {name: p.detach().clone() for name, p in self._weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights in; ``step`` is how many updates they have had, at least 1."""
        assert step >= 1, step
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._parts(self._averages), self._parts(self._weights), weight)

    def tensors(self) -> dict[str, Tensor]:
        """The averages by parameter name, of the parameters' kind and shape; not copies."""
        return dict(self._averages)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], *, origin: object) -> None:
        """Put back what ``tensors`` gave.

        Args:
            tensors: whole ones, whether the weights are spread over ranks or not; others beside are left aside,
                such as weights that are locked.
            origin: where they come from, for messages.

        Raises:
            CheckpointError: one is missing, or of another shape or dtype; nothing is changed then.
        """
        from clipkit.training.parallel import put

        if missing := [name for name in self._averages if name not in tensors]:
            raise CheckpointError(f"{origin}: the averaged weights lack {missing[0]}, which is trained")
        for name, own in self._averages.items():
            given = tensors[name]
            if given.shape != own.shape or given.dtype != own.dtype:
                raise CheckpointError(
                    f"{origin}: the average of {name} is {tuple(given.shape)} {given.dtype} "
                    f"instead of {tuple(own.shape)} {own.dtype}"
                )
        for name, own in self._averages.items():
            put(own, tensors[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the averaged weights; afterwards it has its own again, to the bit.

        Values change places, so that this takes no memory. Not to be used around an update.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """In place, as others hold the memory of the weights: what gathers or replicates them."""
        for weight, average in zip(self._parts(self._weights), self._parts(self._averages), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
        for module in self._model.modules():
            if (reshard := getattr(module, "reshard", None)) is not None:
                reshard()  # FSDP2 may still hold whole weights that it gathered before

    @staticmethod
    def _parts(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return [local_part(one) for one in tensors.values()]


# --------------------------------------------------------------------------------------------------------------
# The running means and variances of batch norms, which a forward pass changes though no update is made.
#
# Only towers of other libraries have any. A pass that is not to count, as the first of two or that of a step
# whose update is left out, takes them back.


class RunningStatistics:
    """Those of a model, as they were when they were last kept; false where it has none."""

    def __init__(self, model: nn.Module) -> None:
        norms = [one for one in model.modules() if isinstance(one, _NormBase) and one.track_running_stats]
        self._buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self._kept = [buffer.clone() for buffer in self._buffers]

    def __bool__(self) -> bool:
        return bool(self._buffers)

    @torch.no_grad()
    def keep(self) -> None:
        """Remember them as they are."""
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            kept.copy_(buffer)

    @torch.no_grad()
    def put_back(self) -> None:
        """Have them again as they were kept."""
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            buffer.copy_(kept)

    def broadcast(self) -> None:
        """Each rank has its own, of its part of the batches: have those of the first, which are saved."""
        broadcast_buffers(self._buffers)
