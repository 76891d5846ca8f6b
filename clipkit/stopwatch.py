"""Where the time of training steps goes, phase by phase, without stopping a GPU's queue.

On a GPU each phase is timed by events in the queue, which are read when the figures are asked for; on a CPU by the
clock. Communication that overlaps the backward pass is in it.
"""

import time
from collections.abc import Mapping

import torch

__all__ = ["PHASES", "Stopwatch"]

PHASES = ("data", "forward", "loss", "backward", "optimizer", "agreement", "other")
_Mark = float | torch.cuda.Event


class Stopwatch:
    """Seconds of each phase since the last ``read``.

    Args:
        device: whose queue the work goes to.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._cuda = device is not None and device.type == "cuda"
        self._marks: list[tuple[str, _Mark]] = []
        self._seconds: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """What was done so far ends, and a phase begins."""
        assert phase in PHASES, phase
        self._marks.append((phase, self._mark()))
        if not self._cuda and len(self._marks) > 1:
            self._add_up()

    def read(self) -> Mapping[str, float]:
        """Seconds of each phase; counting begins anew. Waits for the GPU."""
        if self._marks:
            self.begin(self._marks[-1][0])
            if self._cuda:
                torch.cuda.synchronize()
            self._add_up()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _mark(self) -> _Mark:
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _add_up(self) -> None:
        for (phase, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(start, float) or isinstance(end, float):
                assert isinstance(start, float) and isinstance(end, float)
                span = end - start
            else:
                span = start.elapsed_time(end) / 1000
            self._seconds[phase] = self._seconds.get(phase, 0.0) + span
        del self._marks[:-1]
