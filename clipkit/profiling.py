"""A few training steps under torch's profiler.

RUN/profile/table.txt         what took longest
RUN/profile/trace.json.gz     each operation on a time line, for https://ui.perfetto.dev
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

__all__ = ["Profile"]

_BEFORE, _ROWS = 3, 40  # steps that are let go by; lines of the table


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
        self._by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        self._profile: Any = None
        self._written = False
        if steps:
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

    def _write(self, recorded: Any) -> None:
        self._written = True
        self._folder.mkdir(exist_ok=True)
        table = recorded.key_averages(group_by_input_shape=True).table(
            sort_by=self._by, row_limit=_ROWS, max_name_column_width=40, max_shapes_column_width=60
        )
        (self._folder / "table.txt").write_text(table + "\n", encoding="utf-8")
        recorded.export_chrome_trace(str(self._folder / "trace.json.gz"))
        self._say(f"profiled: {self._folder}/table.txt and trace.json.gz, which ui.perfetto.dev shows")
