"""Measurements of a training: seconds of each phase of a step, rates and utilization, and a profile."""

import math
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

PHASES = ("data", "forward", "loss", "backward", "optimizer", "agreement", "other")


class Stopwatch:
    """Measures the seconds of each phase of training steps without synchronizing with the GPU at each step.

    On a GPU phases are timed by events in its queue, which ``read`` waits for; on a CPU by the clock. Communication
    that overlaps the backward pass counts as backward.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._cuda = device is not None and device.type == "cuda"
        self._phase = ""
        self._began = 0.0
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._seconds: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """End the current phase and begin another."""
        assert phase in PHASES, phase
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((phase, event))
        else:
            now = time.monotonic()
            if self._phase:
                self._add(self._phase, now - self._began)
            self._began = now
        self._phase = phase

    def read(self) -> Mapping[str, float]:
        """Return the seconds of each phase since the last call. Waits for the GPU."""
        if self._phase:
            self.begin(self._phase)
        if self._events:
            torch.cuda.synchronize()
            for (phase, start), (_, end) in zip(self._events, self._events[1:], strict=False):
                self._add(phase, start.elapsed_time(end) / 1000)
            del self._events[:-1]
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds


_STARVED = 0.2  # fraction of the time waiting for data that is reported
_STARVED_SECONDS = 60.0  # of training that the fraction is taken of
_GIB = 2**30
_MEASUREMENTS = 3  # of the peak in a run, after the first one


class StepMetrics:
    """Speed and utilization of the steps since the last reading.

    Metrics that open_clip records too have its names: ``data_time`` and ``batch_time`` (seconds of a step),
    ``samples_per_second``, ``samples_per_second_per_gpu``, ``scale``, ``lr``.

    Attributes:
        peak: FLOP/s that one rank's device reaches; 0 before ``measure_peak``: no MFU.
        phases: seconds of a step that this rank spent in each phase, of the last reading.
    """

    def __init__(self, watch: Stopwatch, *, device: torch.device, ranks: int) -> None:
        self._watch, self._device, self._ranks = watch, device, ranks
        self.peak = 0.0
        self.phases = dict.fromkeys(PHASES, 0.0)
        self._measure: Callable[..., float] | None = None
        self._measured = 0
        self._steps, self._samples, self._flops = 0, 0, 0
        self._read = self._made = 0.0
        self._waited = self._elapsed = 0.0
        self._warned = False

    def measure_peak(self, measure: Callable[..., float]) -> None:
        """Measure the peak with ``measured_peak``; on a CPU again after steps that were faster than the peak, which
        was then measured while the CPU was busy. All ranks call this."""
        self.peak = measure()
        # a busy GPU may have no memory for another measurement, and its peak is rarely measured too low
        if self._device.type == "cpu":
            self._measure = measure

    def step(self, *, samples: int, flops: int, read: float = 0.0, made: float = 0.0) -> None:
        """Count one step of all ranks' samples, with the FLOPs of this rank, 0 if not known.

        ``read`` is the time to read this rank's samples, and ``made`` to make the batch, including reading.
        """
        self._steps += 1
        self._samples += samples
        self._flops += flops
        self._read += read
        self._made += made

    def read(self) -> dict[str, float]:
        """Return the metrics of the steps since the last call.

        MFU is left out if the steps were faster than the measured peak.
        """
        phases = self._watch.read()
        elapsed = sum(phases.values())
        steps = max(1, self._steps)
        self.phases = {name: phases.get(name, 0.0) / steps for name in PHASES}
        rate = self._samples / elapsed if elapsed else 0.0
        if self._device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self._device)
        else:  # kilobytes, on macOS bytes
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            memory *= 1 if sys.platform == "darwin" else 1024
        figures = {
            "samples_per_second": rate,
            "samples_per_second_per_gpu": rate / self._ranks,
            "batch_time": elapsed / steps,
            **{f"{name}_time": seconds for name, seconds in self.phases.items()},
            "memory_gib": memory / _GIB,
        }
        if self.peak and self._flops and elapsed:
            reached = self._flops / elapsed
            if reached > self.peak and self._measure is not None and self._measured < _MEASUREMENTS:
                self._measured += 1
                self.peak = max(self.peak, self._measure(together=False))
                self._watch.read()  # the measurement is not part of a step
            if reached <= self.peak:
                figures["mfu"] = reached / self.peak
        self._waited += phases.get("data", 0.0)
        self._elapsed += elapsed
        self._steps, self._samples, self._flops = 0, 0, 0
        return figures

    def leave_out(self) -> None:
        """Do not count the time since the last step."""
        self._watch.read()

    def explain_waiting(self, workers: int, sources: str) -> str:
        """Return a line, once, if much of the time is spent waiting for data; otherwise ""."""
        if self._warned or self._elapsed < _STARVED_SECONDS:
            return ""
        fraction = self._waited / self._elapsed
        computing = self._elapsed - self._waited
        make_seconds = self._made
        reading = self._read / make_seconds if make_seconds else 0.0
        self._waited = self._elapsed = self._read = self._made = 0.0
        self._warned = fraction > _STARVED
        if not self._warned:
            return ""
        line = f"training spent {fraction:.0%} of its time waiting for data; "
        if make_seconds and computing:
            line += f"about {math.ceil(make_seconds / computing)} loader processes per rank would keep up; "
        if reading > 0.5:
            return line + (
                f"reading from {sources} takes {reading:.0%} of the time per batch: use faster storage, set "
                "data.cache_gb large enough for all shards, or raise data.workers"
            )
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        advice = f"raise data.workers = {workers} ({cores} cores here)"
        if workers >= cores:
            advice = f"all {cores} cores are in use; store smaller images"
        return line + (
            f"decoding and cropping images takes {1 - reading:.0%} of the time per batch: {advice}, or set "
            "data.scaled_decode, or with a GPU data.nvjpeg"
        )


_SKIPPED, _ROWS, _NAME = 3, 40, 44  # steps before the profile; rows of the table and columns of a name


class Profile:
    """Records some steps, after the first few, with torch's profiler.

    RUN/profile/table.txt         own time of each operation, longest first, 74 columns wide
    RUN/profile/trace.json.gz     timeline of all operations, for https://ui.perfetto.dev
    """

    def __init__(self, run: Path, steps: int, *, device: torch.device, say: Callable[[str], None]) -> None:
        self._folder, self._say = run / "profile", say
        self._cuda = device.type == "cuda"
        self._profile: Any = None
        self._written = False
        if steps:
            if not self._cuda:  # otherwise the profiler warns about a missing GPU; read when it starts
                os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])],
                schedule=schedule(wait=_SKIPPED - 1, warmup=1, active=steps, repeat=1),
                on_trace_ready=self._write,
                record_shapes=True,
            )
            self._profile.start()  # records nothing before the warm-up step

    def step(self) -> None:
        """Call this after each step."""
        if self._profile is not None:
            self._profile.step()

    def close(self) -> None:
        """Write what was recorded so far; no step follows."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
            if not self._written:
                self._say(f"nothing was profiled: the run ended before step {_SKIPPED + 1} of this start")

    def _write(self, recorded: Any) -> None:
        self._written = True
        time_name = "self_device_time_total" if self._cuda else "self_cpu_time_total"
        # annotations and, on a GPU, kernels state the time of operations a second time
        times = [
            (float(getattr(event, time_name)), event)  # microseconds
            for event in recorded.key_averages()
            if event.device_type == DeviceType.CPU and not event.is_user_annotation
        ]
        times.sort(key=lambda pair: -pair[0])
        total = max(1e-9, sum(own for own, _ in times))
        lines = [
            f"{'operation':<{_NAME}}{'CUDA ms' if self._cuda else 'CPU ms':>12}{'fraction':>10}{'calls':>8}"
        ]
        for own, one in times[:_ROWS]:
            name = one.key.replace("autograd::engine::evaluate_function: ", "autograd: ")
            name = name if len(name) < _NAME else name[: _NAME - 2] + "… "
            lines.append(f"{name:<{_NAME}}{own / 1000:>12.2f}{own / total:>10.1%}{one.count:>8,}")
        lines.append(f"{'all':<{_NAME}}{total / 1000:>12.2f}{1:>10.1%}")
        self._folder.mkdir(exist_ok=True)
        (self._folder / "table.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        recorded.export_chrome_trace(str(self._folder / "trace.json.gz"))
        self._say(f"profiled: {self._folder}/table.txt and trace.json.gz, for ui.perfetto.dev")
