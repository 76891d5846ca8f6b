"""A few training steps under torch's profiler.

RUN/profile/table.txt         the own time of each operation, the longest first, 72 columns wide
RUN/profile/trace.json.gz     each operation on a time line, for https://ui.perfetto.dev
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

__all__ = ["Profile"]

_BEFORE, _ROWS = 3, 40  # steps that are let go by; lines of the table
_NAME = 44  # columns
_SILENT = "99"  # above every level


class Profile:
    """Records ``steps`` steps after the first few; with 0 nothing.

    Args:
        run: the run folder.
        steps: how many.
        device: that computes.
        say: told where the outcome lies.
    """

    def __init__(self, run: Path, steps: int, *, device: torch.device, say: Callable[[str], None]) -> None:
        self._folder, self._say = run / "profile", say
        self._cuda = device.type == "cuda"
        self._profile: Any = None
        self._written = False
        if steps:
            if (
                not self._cuda
            ):  # else the profiler's own log tells of a GPU that is missing; read when it begins
                os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
            cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *cuda],
                schedule=schedule(wait=_BEFORE - 1, warmup=1, active=steps, repeat=1),
                on_trace_ready=self._write,
                record_shapes=True,
            )

    def start(self) -> None:
        """The first step is about to begin."""
        if self._profile is not None:
            self._profile.start()

    def close(self) -> None:
        """No step follows; what was recorded so far is written."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
            if not self._written:
                self._say(f"nothing is profiled: the run ends before step {_BEFORE + 1} of this start")

    def step(self) -> None:
        """One more step is made."""
        if self._profile is not None:
            self._profile.step()

    def _table(self, operations: Iterable[Any]) -> str:
        """Each operation's own time and calls, all input shapes together, the longest first."""
        listed = sorted(operations, key=lambda one: -_own(one, self._cuda))
        whole = max(1e-9, sum(_own(one, self._cuda) for one in listed))
        where = "CUDA" if self._cuda else "CPU"
        lines = [f"{'operation':<{_NAME}}{f'{where} ms':>12}{'share':>8}{'calls':>8}"]
        for one in listed[:_ROWS]:
            name = one.key.replace("autograd::engine::evaluate_function: ", "autograd: ")
            name = name if len(name) < _NAME else name[: _NAME - 2] + "… "
            own = _own(one, self._cuda)
            lines.append(f"{name:<{_NAME}}{own / 1000:>12.2f}{own / whole:>8.1%}{one.count:>8,}")
        lines.append(f"{'all':<{_NAME}}{whole / 1000:>12.2f}{1:>8.1%}")
        return "\n".join(lines) + "\n"

    def _write(self, recorded: Any) -> None:
        self._written = True
        self._folder.mkdir(exist_ok=True)
        (self._folder / "table.txt").write_text(self._table(recorded.key_averages()), encoding="utf-8")
        recorded.export_chrome_trace(str(self._folder / "trace.json.gz"))
        self._say(f"profiled: {self._folder}/table.txt and trace.json.gz, which ui.perfetto.dev shows")


def _own(operation: Any, cuda: bool) -> float:
    """Microseconds of its own, without the operations that it calls."""
    return float(operation.self_device_time_total if cuda else operation.self_cpu_time_total)
