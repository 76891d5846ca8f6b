"""Measurements of a training: seconds of each phase of a step, rates, utilization, slow ranks, and a profile."""

import math
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from clipkit.distributed import Gathering, gather_objects, world_size

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
        seconds = self._seconds
        self._seconds = {}
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
        self._watch = watch
        self._device = device
        self._ranks = ranks
        self.peak = 0.0
        self.phases = dict.fromkeys(PHASES, 0.0)
        self._measure: Callable[..., float] | None = None
        self._measured = 0
        self._start_counts()
        self._start_waiting()
        self._warned = False

    def _start_counts(self) -> None:
        """Count the steps of the next reading."""
        self._steps = 0
        self._samples = 0
        self._flops = 0

    def _start_waiting(self) -> None:
        """Measure the seconds of the next minute that ``explain_waiting`` judges."""
        self._read_seconds = 0.0
        self._make_seconds = 0.0
        self._waited = 0.0
        self._elapsed = 0.0

    def measure_peak(self, measure: Callable[..., float]) -> None:
        """Measure the peak with ``measured_peak``; on a CPU again after steps that were faster than the peak, which
        was then measured while the CPU was busy. All ranks call this."""
        self.peak = measure()
        # a busy GPU may have no memory for another measurement, and its peak is rarely measured too low
        if self._device.type == "cpu":
            self._measure = measure

    def step(self, *, samples: int, flops: int, read_seconds: float = 0.0, make_seconds: float = 0.0) -> None:
        """Count one step of all ranks' samples, with the FLOPs of this rank, 0 if not known.

        ``read_seconds`` is the time to read this rank's samples, and ``make_seconds`` to make the batch, including
        reading.
        """
        self._steps += 1
        self._samples += samples
        self._flops += flops
        self._read_seconds += read_seconds
        self._make_seconds += make_seconds

    def collect(self) -> dict[str, float]:
        """Return the metrics of the steps since the last call, and start to count anew.

        MFU is left out if the steps were faster than the measured peak.
        """
        phases = self._watch.read()
        elapsed = sum(phases.values())
        steps = max(1, self._steps)
        rate = self._samples / elapsed if elapsed else 0.0
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if self._device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self._device)
        elif sys.platform != "darwin":  # where it is in bytes
            memory *= 1024
        figures = {
            "samples_per_second": rate,
            "samples_per_second_per_gpu": rate / self._ranks,
            "batch_time": elapsed / steps,
        }
        for name in PHASES:
            self.phases[name] = phases.get(name, 0.0) / steps
            figures[f"{name}_time"] = self.phases[name]
        figures["memory_gib"] = memory / _GIB
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
        self._start_counts()
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
        make_seconds = self._make_seconds
        reading = self._read_seconds / make_seconds if make_seconds else 0.0
        self._start_waiting()
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
        cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        advice = f"raise data.workers = {workers} ({cores} cores here)"
        if workers >= cores:
            advice = f"all {cores} cores are in use; store smaller images"
        return line + (
            f"decoding and cropping images takes {1 - reading:.0%} of the time per batch: {advice}, or set "
            "data.scaled_decode, or with a GPU data.nvjpeg"
        )


# Which rank the others wait for. Ranks exchange their times in the background and read them when metrics are logged
# the next time.

_SLOW = 0.15  # excess over the median of the other ranks' time
_MEMORY = 0.7  # of the averages over logged steps, so that a single delay is not reported


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Seconds per step of all ranks, averaged over the last logged steps.

    Attributes:
        names: from ``name_ranks``.
        phases: of each phase that depends on the rank alone, by rank.
    """

    names: Sequence[str]
    phases: Mapping[str, Sequence[float]]

    @property
    def local(self) -> list[float]:
        """Time that each rank works."""
        return [sum(seconds) for seconds in zip(*self.phases.values(), strict=True)]

    @property
    def waiting(self) -> list[float]:
        """Time that each rank waits for the slowest one."""
        slowest = max(self.local)
        return [slowest - seconds for seconds in self.local]

    @property
    def slowest(self) -> int:
        return max(range(len(self.names)), key=self.local.__getitem__)

    @property
    def excess(self) -> float:
        """By which fraction the slowest rank works longer than the median of the others."""
        others = _median_of_others(self.local, self.slowest)
        if not others:
            return 0.0
        return (self.local[self.slowest] - others) / others

    @property
    def cause(self) -> str:
        """The phase in which the slowest rank loses most time."""
        i = self.slowest

        def lost(name: str) -> float:
            return self.phases[name][i] - _median_of_others(self.phases[name], i)

        return max(self.phases, key=lost)

    @property
    def is_slow(self) -> bool:
        """Whether the slowest rank delays the others by much."""
        return self.excess > _SLOW

    def describe(self) -> str:
        """Return a line about the slowest rank."""
        seconds = self.phases[self.cause]
        others = _median_of_others(seconds, self.slowest)
        return (
            f"{self.names[self.slowest]} takes {self.excess:.0%} longer than the others, mostly in {self.cause}: "
            f"{1000 * seconds[self.slowest]:.3g} ms a step instead of {1000 * others:.3g} ms; all ranks wait for it"
        )

    def record(self) -> dict[str, object]:
        """Return what is recorded of all ranks, in milliseconds."""

        seconds = {**self.phases, "waiting": self.waiting}
        milliseconds = {
            name: [round(1000 * value, 1) for value in values] for name, values in seconds.items()
        }
        return {"cause": self.cause, **milliseconds, "names": list(self.names)}


def _median_of_others(seconds: Sequence[float], i: int) -> float:
    return median([*seconds[:i], *seconds[i + 1 :]])


def name_ranks() -> list[str]:
    """Return names such as "rank 3 on node7", ordered by rank; all ranks call this."""
    hosts = gather_objects(os.uname().nodename)
    return [f"rank {i} on {host}" for i, host in enumerate(hosts)]


class RankClock:
    """Exchanges the seconds of phases among ranks; all ranks create and use it together."""

    def __init__(self, *, sharded: bool) -> None:
        # Phases without communication, whose time depends on this rank alone. In the others, a rank waits for the
        # slowest one. The forward pass of a sharded model gathers weights.
        self._phases = ["data", "optimizer"]
        if not sharded:
            self._phases.insert(1, "forward")
        self._names = name_ranks()
        self._calls = 0
        self._pending: Gathering | None = None
        self._averages: Tensor | None = None  # (W, P) of W ranks and P phases

    def exchange(self, phases: Mapping[str, float]) -> RankTimes | None:
        """Send this rank's seconds per step, and return those of all ranks up to the last call; None at first.

        The first steps, which compile and allocate, are left out.
        """
        self._calls += 1
        if world_size() == 1 or self._calls == 1:
            return None
        arrived = self._pending
        self._pending = Gathering(torch.tensor([phases[name] for name in self._phases]))
        if arrived is None:
            return None
        seconds = arrived.read()
        if self._averages is None:
            self._averages = seconds
        self._averages = self._averages.lerp(seconds, 1 - _MEMORY)
        by_phase = zip(self._phases, self._averages.T.tolist(), strict=True)
        return RankTimes(names=self._names, phases=dict(by_phase))


_SKIPPED = 3  # steps before the profile
_ROWS = 40  # of the table
_NAME = 44  # columns of a name


class Profile:
    """Records some steps, after the first few, with torch's profiler.

    RUN/profile/table.txt         own time of each operation, longest first, 74 columns wide
    RUN/profile/trace.json.gz     timeline of all operations, for https://ui.perfetto.dev
    """

    def __init__(
        self, run: Path, steps: int, *, device: torch.device, print_line: Callable[[str], None]
    ) -> None:
        self._folder = run / "profile"
        self._print_line = print_line
        self._cuda = device.type == "cuda"
        self._written = False
        activities = [ProfilerActivity.CPU]
        if self._cuda:
            activities.append(ProfilerActivity.CUDA)
        else:  # otherwise the profiler warns about a missing GPU; read when it starts
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile: Any = profile(
            activities=activities,
            schedule=schedule(wait=_SKIPPED - 1, warmup=1, active=steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
        )
        self._profile.start()  # records nothing before the warm-up step

    def step(self) -> None:
        """Call this after each step."""
        self._profile.step()

    def close(self) -> None:
        """Write what was recorded so far; no step follows."""
        self._profile.stop()
        if not self._written:
            self._print_line(f"nothing was profiled: the run ended before step {_SKIPPED + 1} of this start")

    def _write(self, recorded: Any) -> None:
        self._written = True
        device = "CUDA" if self._cuda else "CPU"
        time_name = "self_device_time_total" if self._cuda else "self_cpu_time_total"
        rows: list[tuple[float, str, int]] = []  # microseconds, name and number of calls
        for event in recorded.key_averages():
            # annotations and, on a GPU, kernels state the time of operations a second time
            if event.device_type == DeviceType.CPU and not event.is_user_annotation:
                name = event.key.replace("autograd::engine::evaluate_function: ", "autograd: ")
                if len(name) >= _NAME:
                    name = name[: _NAME - 2] + "… "
                rows.append((float(getattr(event, time_name)), name, event.count))
        rows.sort(key=lambda row: -row[0])
        total = max(1e-9, sum(row[0] for row in rows))
        lines = [f"{'operation':<{_NAME}}{f'{device} ms':>12}{'fraction':>10}{'calls':>8}"]
        for spent, name, calls in rows[:_ROWS]:
            lines.append(f"{name:<{_NAME}}{spent / 1000:>12.2f}{spent / total:>10.1%}{calls:>8,}")
        lines.append(f"{'all':<{_NAME}}{total / 1000:>12.2f}{1:>10.1%}")
        self._folder.mkdir(exist_ok=True)
        (self._folder / "table.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        recorded.export_chrome_trace(str(self._folder / "trace.json.gz"))
        self._print_line(f"profiled: {self._folder}/table.txt and trace.json.gz, for ui.perfetto.dev")
