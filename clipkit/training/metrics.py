"""Records of a training: terminal output, ``metrics.jsonl``, TensorBoard, wandb, timings and a profile."""

import json
import os
import resource
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from clipkit.config import LogConfig, OptimConfig, PixelsConfig
from clipkit.errors import ConfigError, DataError, let_go_if_broken
from clipkit.files.atomic import write_atomic
from clipkit.files.terminal import counted, printable, without_secrets
from clipkit.model import ARCHITECTURES
from clipkit.model.clip import CLIP
from clipkit.samples.traits import Decoding, TraitCounts
from clipkit.training import learning_rate

_PLAIN_EVERY_SECONDS = 10.0
_BAD_EVERY_SECONDS = 60.0
_BAD_ONE_BY_ONE = 5
_MAX_CAUSES = 1000  # that are counted; those with a number in them are all different


class ProgressLine:
    """A progress bar on a terminal, otherwise a line every ten seconds; silent unless ``shown``.

    The last metrics stay as a separate line. Errors of the output are ignored: training continues if nobody reads
    it, as when Ctrl-C ends the ``tee`` behind a pipe.
    """

    def __init__(self, *, steps: int, done: int, shown: bool) -> None:
        output = cast(TextIO, _Output(sys.stderr)) if sys.stderr is not None else StringIO()
        self.console = Console(file=output, soft_wrap=True, highlight=False)
        self._steps, self._shown = steps, shown
        self._first: tuple[float, int] | None = None  # time and step of the first metrics
        self._last_line = 0.0
        self._newest, self._printed = "", True
        columns = (
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=12),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
        )
        self._bar = Progress(*columns, console=self.console, transient=True, disable=not shown)
        self._live = shown and self.console.is_terminal
        self._task = self._bar.add_task("starting", total=steps, completed=done)
        if self._live:
            self._bar.start()

    def say(self, line: str) -> None:
        """Print a line above the bar; control characters, which keys may contain, are escaped."""
        if not self._shown:
            return
        line = printable(line)
        if self._live:  # in files a line stays one line, for searching
            width, indent = self.console.width, "  "
            line = textwrap.fill(
                line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        self.console.print(line, markup=False)

    def advance(self, step: int) -> None:
        """Show that ``step`` updates are made."""
        if self._live:
            self._bar.update(self._task, completed=step)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step."""
        waiting = metrics["data_time"] / metrics["batch_time"] if metrics["batch_time"] else 0.0
        levels = [f"{name} {metrics[name]:.2f}" for name in ("chance", "floor") if name in metrics]
        chance = f" ({', '.join(levels)})" if levels else ""
        text = (
            f"loss {metrics['loss']:.3f}{chance} "
            f"{metrics['samples_per_second']:.0f}/s data {waiting:.0%} "
            f"scale {metrics['scale']:.1f}"
        )
        now = time.monotonic()
        self._newest, self._printed = f"step {step}/{self._steps} {text}", False
        if self._live:
            self._bar.update(self._task, completed=step, description=text)
        elif now - self._last_line >= _PLAIN_EVERY_SECONDS and step < self._steps:
            self._last_line, left = now, ""
            if self._first is not None and step > self._first[1]:  # the first step is not representative
                pace = (now - self._first[0]) / (step - self._first[1])
                left = f" left {_clock(pace * (self._steps - step))}"
            self._print(left)
        if step >= self._steps:
            self._print()
        self._first = self._first or (now, step)

    def _print(self, more: str = "") -> None:
        self.say(self._newest + more)
        self._printed = True

    def close(self) -> None:
        """Remove the bar and print the last metrics."""
        if self._live:
            self._bar.stop()
        if not self._printed:
            self._print()


class BadSampleLines:
    """Prints the first bad samples one by one, then their number at most once a minute.

    Args:
        progress: prints the lines.
        run: the run folder, which contains the lists.
        total: number of bad samples before this process started.
    """

    def __init__(self, progress: ProgressLine, run: Path, *, total: int) -> None:
        self._progress, self._run = progress, run
        self._reported, self._shown = total, 0
        self._last_line = time.monotonic()
        self._causes: Counter[str] = Counter()

    def found(self, bad: Sequence[Mapping[str, str]]) -> None:
        """Report bad samples of this rank, each with ``key``, ``shard`` and ``cause``."""
        for one in bad:
            if one["cause"] in self._causes or len(self._causes) < _MAX_CAUSES:
                self._causes[one["cause"]] += 1
            if self._shown < _BAD_ONE_BY_ONE:
                self._shown += 1
                self._reported += 1
                self._progress.say(f"bad sample replaced: {one['key']} in {one['shard']}: {one['cause']}")

    def sum_up(self, total: int, *, at_once: bool = False) -> None:
        """Print the total of all ranks if it has grown and a minute has passed, or ``at_once``."""
        now = time.monotonic()
        if total <= self._reported or not (at_once or now - self._last_line >= _BAD_EVERY_SECONDS):
            return
        self._reported, self._last_line = total, now
        often = self._causes.most_common(1)
        cause = f"; most often: {often[0][0]}" if often else ""
        self._progress.say(f"{total:,} bad samples so far, all in {self._run}/bad_samples*.jsonl{cause}")


class TraitLines:
    """Prints how many transparent and how many rotated images are used unchanged, once for each kind.

    Args:
        progress: prints the lines.
        decoding: how training decodes images.
        pixels: if ``background`` or ``upright`` is set, such images are not reported.
    """

    def __init__(self, progress: ProgressLine, decoding: Decoding, pixels: PixelsConfig) -> None:
        self._progress, self._decoding = progress, decoding
        self._options = {
            "background": "" if pixels.background else "pixels.background=white",
            "upright": "pixels.upright=true" if pixels.upright == "auto" else "",
        }
        self._printed: set[tuple[str, str]] = set()

    def say(self, images: str, counts: TraitCounts) -> None:
        """Print a note for each trait that some of these images have, unless it was printed for them before."""
        for trait, line in counts.lines(self._decoding, **self._options).items():
            if (images, trait) not in self._printed:
                self._printed.add((images, trait))
                self._progress.say(f"note: {images}: {line}")


def cut_captions_line(cut: int, captions: int, context_length: int) -> str:
    """Return a note on captions that were cut; "" if there are none."""
    if not cut:
        return ""
    return (
        f"note: {cut:,} of {counted(captions, 'caption')} drawn in all, repeats counted, had more than "
        f"{context_length} tokens and were cut; a larger model.context_length reads them whole"
    )


class _Output:
    """A stream that becomes silent when writing fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            let_go_if_broken(self._stream)
            return len(text)

    def flush(self) -> None:
        let_go_if_broken(self._stream)


def _clock(seconds: float) -> str:
    """Format 101.3 as "1m41s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s"


class MetricsLog:
    """Writes metrics to ``metrics.jsonl``, and to TensorBoard and wandb if they are enabled.

    Args:
        run: the run folder.
        log: which loggers are enabled.
        settings: the run's configuration as TOML, for wandb.
        step: updates made so far; metrics of later steps, left by a killed run, are removed.
        kept: whether anything is recorded; true on one rank only.
    """

    def __init__(self, run: Path, log: LogConfig, settings: str, *, step: int, kept: bool = True) -> None:
        self._file: TextIO | None = None
        self._writers: list[Callable[[int, Mapping[str, float]], None]] = []
        self._closers: list[Callable[[], object]] = []
        if not kept:
            return
        path = run / "metrics.jsonl"
        drop_lines_after(path, step)
        self._file = path.open("a", encoding="utf-8")
        if log.tensorboard:
            with suppress(ImportError):  # it is optional
                self._add_tensorboard(run, step)
        if log.wandb:
            self._add_wandb(run, log.wandb, settings)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of one step.

        Raises:
            DataError: the file cannot be written, for example on a full disk.
        """
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise DataError(f"{self._file.name} cannot be written: {error.strerror}") from error
        self.write_scores(step, {f"train/{name}": value for name, value in values.items()})

    def write_scores(self, step: int, scores: Mapping[str, float]) -> None:
        """Send scores to the loggers; evaluation writes its own file."""
        for write in self._writers:
            write(step, scores)

    def close(self) -> None:
        """Write what is buffered and close all loggers."""
        with suppress(OSError):  # ``write`` has reported it
            if self._file is not None:
                self._file.close()
        for close in self._closers:
            close()

    def _add_tensorboard(self, run: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else None)

        def write(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        self._writers.append(write)
        self._closers.append(writer.close)

    def _add_wandb(self, run: Path, project: str, settings: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("log.wandb is set but wandb is missing: pip install -e '.[log]'") from error
        identity = run / "wandb_id"
        if not identity.is_file():
            identity.write_text(f"{run.name}-{time.time_ns():x}\n")
        try:
            job: Any = wandb.init(
                project=project,
                name=run.name,
                id=identity.read_text().strip(),
                resume="allow",
                dir=str(run),
                config={"toml": without_secrets(settings)},
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"log.wandb = {project!r}, but wandb does not start: {error}: run `wandb login`, or set "
                f"WANDB_MODE=offline to keep its files in {run}"
            ) from error
        self._writers.append(lambda step, values: job.log(dict(values), step=step))
        self._closers.append(job.finish)


def drop_lines_after(path: Path, step: int) -> None:
    """Remove lines of steps after ``step``, and lines cut short by a kill, from a JSONL file."""
    if not path.is_file():
        return
    kept = []
    # split at "\n" only: text in a line may contain other separators, at which splitlines would cut
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError, AttributeError, TypeError):
            if (json.loads(line).get("step") or 0) <= step:
                kept.append(line + "\n")
    write_atomic(path, "".join(kept))


_SKIPPED, _ROWS, _NAME = 3, 40, 44  # steps before the profile; rows of the table and columns of a name


class Profile:
    """Records some steps, after the first few, with torch's profiler.

    RUN/profile/table.txt         own time of each operation, longest first, 74 columns wide
    RUN/profile/trace.json.gz     timeline of all operations, for https://ui.perfetto.dev

    Args:
        run: the run folder.
        steps: number of steps; 0 records nothing.
        device: the training device.
        say: prints where the files are.
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

    def start(self) -> None:
        """Call this before the first step."""
        if self._profile is not None:
            self._profile.start()

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


def model_line(model: CLIP, *, world: int, device: torch.device, bf16: bool) -> str:
    """Return the model's name and size, the precision and the devices, as a line."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    precision = "bf16" if bf16 else "fp32"
    named, vision = ARCHITECTURES.get(model.name), model.architecture.vision
    is_named = named is None or vision.resized(named.vision.image_size) == named.vision
    other = "" if is_named else f" ({vision.description})"
    return f"{model.name}{other}, {parameters / 1e6:.1f} M parameters, {precision} on {world} × {device.type}"


def beginning(run: Path, step: int, steps: int, planned: int, optim: OptimConfig) -> list[str]:
    """Return lines on how training starts or resumes.

    Args:
        run: the run folder.
        step: updates made so far.
        steps: number of steps of the whole run.
        planned: ``steps`` of the run before it was resumed.
        optim: for the learning rates, if ``steps`` has changed.
    """
    if step >= steps:
        return [f"{run} has made all its {steps} steps"]
    lines = [f"resuming {run} at step {step}" if step else f"starting {run}"]
    if steps != planned:
        lines.append(
            f"steps = {steps} now, and was {planned}: from here on the learning rate follows the schedule of the "
            f"{'longer' if steps > planned else 'shorter'} run, "
            f"{learning_rate(step - 1, planned, optim):.3g} at step {step} and "
            f"{learning_rate(step, steps, optim):.3g} at step {step + 1}"
        )
    return lines


PHASES = ("data", "forward", "loss", "backward", "optimizer", "agreement", "other")


class Stopwatch:
    """Measures the seconds of each phase of training steps without synchronizing with the GPU at each step.

    On a GPU phases are timed by events in its queue, which ``read`` waits for; on a CPU by the clock. Communication
    that overlaps the backward pass counts as backward.

    Args:
        device: the training device.
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

    Args:
        watch: the stopwatch that times the loop's phases.
        device: the training device.
        ranks: number of ranks.
        peak: FLOP/s that one rank's device reaches; None: no MFU.
        measure: ``measured_peak`` of the device, called again after steps that were faster than the peak, which was
            then measured while the CPU was busy.
    """

    def __init__(
        self,
        watch: Stopwatch,
        *,
        device: torch.device,
        ranks: int,
        peak: float | None,
        measure: Callable[..., float] | None = None,
    ) -> None:
        self._watch, self._device, self._ranks, self._peak = watch, device, ranks, peak
        # a busy GPU may have no memory for another measurement, and its peak is rarely measured too low
        self._measure = measure if device.type == "cpu" else None
        self._measured = 0
        self._steps, self._samples, self._flops = 0, 0, 0
        self._waited = self._elapsed = 0.0
        self._warned = False
        watch.read()  # the time before does not count

    def step(self, *, samples: int, flops: int | None) -> None:
        """Count one step.

        Args:
            samples: size of the global batch.
            flops: model FLOPs of this rank; None if not known.
        """
        self._steps += 1
        self._samples += samples
        self._flops += flops or 0

    def read(self) -> dict[str, float]:
        """Return the metrics of the steps since the last call.

        MFU is left out if the steps were faster than the measured peak.
        """
        phases = self._watch.read()
        elapsed = sum(phases.values())
        steps = max(1, self._steps)
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
            **{f"{name}_time": phases.get(name, 0.0) / steps for name in PHASES},
            "memory_gib": memory / _GIB,
        }
        if self._peak and self._flops and elapsed:
            reached = self._flops / elapsed
            if reached > self._peak and self._measure is not None and self._measured < _MEASUREMENTS:
                self._measured += 1
                self._peak = max(self._peak, self._measure(together=False))
                self._watch.read()  # the measurement is not part of a step
            if reached <= self._peak:
                figures["mfu"] = reached / self._peak
        self._waited += phases.get("data", 0.0)
        self._elapsed += elapsed
        self._steps, self._samples, self._flops = 0, 0, 0
        return figures

    def leave_out(self) -> None:
        """Do not count the time since the last step."""
        self._watch.read()

    def starved(self) -> float:
        """Return the fraction of time spent waiting for data, once, when it is worth reporting; otherwise 0."""
        if self._warned or self._elapsed < _STARVED_SECONDS:
            return 0.0
        fraction = self._waited / self._elapsed
        self._waited = self._elapsed = 0.0
        self._warned = fraction > _STARVED
        return fraction if self._warned else 0.0
