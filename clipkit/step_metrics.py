"""What is recorded of training steps: how fast they are, and where their time goes.

Names are open_clip's where the thing is the same: ``data_time`` and ``batch_time`` (seconds of a step),
``samples_per_second``, ``samples_per_second_per_gpu``, ``scale``, ``lr``.
"""

import resource
import sys
from collections.abc import Callable, Mapping

import torch

from clipkit.stopwatch import PHASES, Stopwatch

__all__ = ["StepMetrics"]

_STARVED = 0.2  # share of the time waiting for data that a word is said of
_STARVED_SECONDS = 60.0  # of training that the word is about
_GIB = 2**30
_MEASUREMENTS = 3  # of the peak in a run, after the first one


class StepMetrics:
    """Figures of the steps since the last that were read, and of the run so far.

    Args:
        watch: which the loop tells its phases.
        device: that computes.
        ranks: how many processes train.
        peak: FLOP/s that one rank's device reaches; None where MFU is not wanted.
        measure: measures the peak again, on this rank alone. It is called where steps were faster than the peak,
            which was then measured while the device was busy.
    """

    def __init__(
        self,
        watch: Stopwatch,
        *,
        device: torch.device,
        ranks: int,
        peak: float | None,
        measure: Callable[[], float] | None = None,
    ) -> None:
        self._watch, self._device, self._ranks, self._peak = watch, device, ranks, peak
        self._measure, self._measured = measure, 0
        self._steps, self._samples, self._flops = 0, 0, 0
        self._waited = self._elapsed = 0.0
        self._warned = False
        watch.read()  # what was before does not count

    def step(self, *, samples: int, flops: int | None) -> None:
        """One more step is made.

        Args:
            samples: of the global batch.
            flops: model FLOPs of this rank's share; None where they are not known.
        """
        self._steps += 1
        self._samples += samples
        self._flops += flops or 0

    def read(self) -> dict[str, float]:
        """Figures of the steps since the last call; counting begins anew.

        MFU is left out where the steps were faster than any measurement of the peak: it cannot be above 1.
        """
        phases = self._watch.read()
        elapsed = sum(phases.values())
        steps = max(1, self._steps)
        rate = self._samples / elapsed if elapsed else 0.0
        figures = {
            "samples_per_second": rate,
            "samples_per_second_per_gpu": rate / self._ranks,
            "batch_time": elapsed / steps,
            **{f"{name}_time": phases.get(name, 0.0) / steps for name in PHASES},
            "memory_gib": self._memory(),
        }
        if self._peak and self._flops and elapsed:
            reached = self._flops / elapsed
            if reached > self._peak and self._measure is not None and self._measured < _MEASUREMENTS:
                self._measured += 1
                self._peak = max(self._peak, self._measure())
                self._watch.read()  # the measurement is no part of a step
            if reached <= self._peak:
                figures["mfu"] = reached / self._peak
        self._count_waiting(phases, elapsed)
        self._steps, self._samples, self._flops = 0, 0, 0
        return figures

    def leave_out(self) -> None:
        """What was done since the last step is no part of one."""
        self._watch.read()

    def starved(self) -> float:
        """The share of the time that was spent waiting for data, once it is worth a word; 0 otherwise."""
        if self._warned or self._elapsed < _STARVED_SECONDS:
            return 0.0
        share = self._waited / self._elapsed
        self._waited = self._elapsed = 0.0
        self._warned = share > _STARVED
        return share if self._warned else 0.0

    def _count_waiting(self, phases: Mapping[str, float], elapsed: float) -> None:
        self._waited += phases.get("data", 0.0)
        self._elapsed += elapsed

    def _memory(self) -> float:
        """The most so far, of the GPU, or of this process where there is none."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / _GIB
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB
