"""The running means and variances of batch norms, which a forward pass changes though no update is made.

Only towers of other libraries have any. A pass that is not to count, as the first of two or that of a step whose
update is left out, takes them back.
"""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from clipkit.distributed import buffers_of_chief

__all__ = ["RunningStatistics"]


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

    def take_chiefs(self) -> None:
        """Each rank has its own, of its part of the batches: have those of the first, which are saved."""
        buffers_of_chief(self._buffers)
