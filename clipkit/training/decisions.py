"""Decide on the device whether a step's update is made, and read on the host what the steps came to.

An update is not made if the loss or the gradient is not finite, after which no later step changes anything, or if
the gradient is a spike: a single update with a gradient far above the usual norm can undo much training. The usual
norm is a moving average, to which a spike contributes the largest norm that is not a spike: one spike changes
little, and norms that rise permanently, as when layers are unfrozen, soon become usual. It is part of
``LoopState``, so a resumed run makes the same decisions.

All ranks decide alike without a message: the loss and the norm of the gradient are those of the global batch. A GPU
decides in its queue, and the host, which is some steps ahead, reads decisions when they have been made. What a rank
knows before the forward pass (bad samples, requests to stop, the clock) is summed over ranks in the meantime.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from clipkit.distributed import copy_to_host
from clipkit.model.towers import widest_dtype
from clipkit.training.checkpoint import LoopState

LAG = {"cuda": 2}  # steps of which the host does not read the outcome yet, by type of device; 0 on others

_MEMORY = 0.98  # of the average: about fifty steps
_FIRST_UPDATES = 20  # without skipping


def is_spike(norm: Tensor, usual: Tensor, *, factor: float, updates: Tensor) -> Tensor:
    """Return whether the update with a gradient of this norm, before clipping, is skipped: a bool scalar.

    Args:
        norm: scalar.
        usual: scalar, the usual norm.
        factor: the multiple of the usual norm above which a gradient is a spike; 0 skips nothing.
        updates: scalar, the number of updates so far.
    """
    if not factor:
        return torch.zeros_like(norm, dtype=torch.bool)
    return (updates >= _FIRST_UPDATES) & (norm > factor * usual)


def next_usual(usual: Tensor, norm: Tensor, *, factor: float, updates: Tensor) -> Tensor:
    """Return the usual norm after one more step; arguments as for ``is_spike``."""
    norm = torch.where(is_spike(norm, usual, factor=factor, updates=updates), factor * usual, norm)
    memory = (updates / (updates + 1)).clamp(max=_MEMORY)
    return memory * usual + (1 - memory) * norm


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step came to, the same on all ranks but for ``ids``.

    Attributes:
        totals: sums over ranks of what ``Decisions.add`` was given.
        loss: of the global batch.
        norm: of its gradient before clipping.
        is_finite: whether both are finite, and those of all steps before.
        is_spike: whether the update was skipped because the gradient is a spike.
        usual_norm: after this step.
        ids: (B,) int64, numbers of the rank's samples.
    """

    totals: dict[str, int]
    loss: float
    norm: float
    is_finite: bool
    is_spike: bool
    usual_norm: float
    ids: Tensor


@dataclass(frozen=True, kw_only=True)
class _Pending:
    totals: Callable[[], dict[str, int]]
    values: Callable[[], Tensor]
    ids: Tensor


class Decisions:
    """Decides about updates on the device, and returns what the steps came to when that is known.

    Attributes:
        updates: floating-point scalar, the number of updates made.

    Args:
        state: state of the loop before the first step.
        device: the model's device.
        factor: the setting ``optim.skip_above``.
    """

    def __init__(self, state: LoopState, *, device: torch.device, factor: float) -> None:
        self._lag = LAG.get(device.type, 0)
        self._factor = factor
        dtype = widest_dtype(device)
        self._usual_norm = torch.tensor(state.usual_norm, dtype=dtype, device=device)
        self._failed = torch.tensor(False, device=device)
        self.updates = torch.tensor(state.step - state.skipped, dtype=dtype, device=device)
        self._values = torch.empty(0)
        self._pending: deque[_Pending] = deque()

    @torch.no_grad()
    def skip_update(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return whether the update of the next step is not made: a bool scalar on the device.

        Args:
            loss: scalar, of the global batch.
            norm: scalar, of its gradient before clipping.
        """
        loss = loss.detach().to(self._usual_norm.dtype)
        norm = norm.float().to(self._usual_norm.dtype)
        self._failed = self._failed | ~(loss.isfinite() & norm.isfinite())
        spike = is_spike(norm, self._usual_norm, factor=self._factor, updates=self.updates)
        self._usual_norm = next_usual(self._usual_norm, norm, factor=self._factor, updates=self.updates)
        skip = self._failed | spike
        self.updates = self.updates + ~skip
        self._values = torch.stack([loss, norm, self._usual_norm, self._failed, spike])
        return skip

    def add(self, totals: Callable[[], dict[str, int]], ids: Tensor) -> None:
        """Add the step that was decided about last, whose outcome ``next_outcome`` returns later.

        Args:
            totals: see ``clipkit.distributed.start_totals``.
            ids: numbers of this rank's samples.
        """
        self._pending.append(_Pending(totals=totals, values=copy_to_host(self._values), ids=ids))

    def next_outcome(self, *, wait: bool) -> Outcome | None:
        """Return the outcome of the first step that was not returned yet, or None.

        Args:
            wait: whether to return those of the last steps too, for which the host waits.
        """
        if len(self._pending) <= (0 if wait else self._lag):
            return None
        entry = self._pending.popleft()
        loss, norm, usual_norm, failed, spike = entry.values().tolist()
        return Outcome(
            totals=entry.totals(),
            loss=loss,
            norm=norm,
            is_finite=not failed,
            is_spike=bool(spike),
            usual_norm=usual_norm,
            ids=entry.ids,
        )

    def wait_for_messages(self) -> None:
        """Wait for the messages of all steps that were added: a process that exits before them aborts."""
        while self._pending:
            self._pending.popleft().totals()
