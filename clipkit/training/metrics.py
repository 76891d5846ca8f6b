"""What a training prints and records: a progress bar or lines, ``metrics.jsonl``, TensorBoard and wandb."""

import json
import os
import resource
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.profiler import ProfilerActivity, profile, schedule

from clipkit.config import Config, to_toml
from clipkit.errors import ConfigError, DataError, let_go_if_broken
from clipkit.files.atomic import write_atomic
from clipkit.files.terminal import printable, without_secrets
from clipkit.files.traits import Decoding, TraitCounts
from clipkit.model.clip import CLIP
from clipkit.objectives import OBJECTIVES
from clipkit.training.optim import learning_rate

__all__ = [
    "PHASES",
    "BadSampleLines",
    "MetricsLog",
    "Profile",
    "ProgressLine",
    "StepMetrics",
    "Stopwatch",
    "TraitLines",
    "beginning",
    "drop_lines_after",
    "model_line",
    "notes",
]

_PLAIN_EVERY_SECONDS = 10.0
_BAD_EVERY_SECONDS = 60.0
_BAD_ONE_BY_ONE = 5
_MOST_CAUSES = 1000  # that are counted: some hold numbers, and each is another


class ProgressLine:
    """A live progress bar on a terminal, a line every ten seconds elsewhere; silent where not ``shown``.

    The figures of the last step stay, as a line of their own.

    It also falls silent where nobody reads any more, as when a Ctrl-C has ended the ``tee`` behind a pipe: what is
    shown is never a reason to end a training.
    """

    def __init__(self, *, steps: int, done: int, shown: bool) -> None:
        output = cast(TextIO, _Output(sys.stderr)) if sys.stderr is not None else StringIO()
        self.console = Console(file=output, soft_wrap=True, highlight=False)
        self._steps, self._shown = steps, shown
        self._known: tuple[float, int] | None = None  # when the first figures came, and of which step
        self._last_line = 0.0
        self._newest, self._told = "", True
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
        """Print a line above the bar; characters that would move the cursor (keys may hold any) are escaped."""
        if self._shown:
            line = printable(line)
            if self._live:  # else a line stays one, for who searches a file for it
                line = textwrap.fill(
                    line,
                    self.console.width,
                    subsequent_indent="  ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            self.console.print(line, markup=False)

    def advance(self, step: int) -> None:
        """``step`` updates are made."""
        if self._live:
            self._bar.update(self._task, completed=step)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the newest figures."""
        waiting = metrics["data_time"] / metrics["batch_time"] if metrics["batch_time"] else 0.0
        chance = f" (chance {metrics['chance']:.2f})" if "chance" in metrics else ""
        text = (
            f"loss {metrics['loss']:.3f}{chance} "
            f"{metrics['samples_per_second']:.0f}/s data {waiting:.0%} "
            f"scale {metrics['scale']:.1f}"
        )
        now = time.monotonic()
        self._newest, self._told = f"step {step}/{self._steps} {text}", False
        if self._live:
            self._bar.update(self._task, completed=step, description=text)
        elif now - self._last_line >= _PLAIN_EVERY_SECONDS and step < self._steps:
            self._last_line = now
            self._tell(self._left(step, now))
        if step >= self._steps:
            self._tell()
        self._known = self._known or (now, step)

    def _left(self, step: int, now: float) -> str:
        """How long it will take at the pace since the first figures; the first step's tells nothing."""
        if self._known is None or step == self._known[1]:
            return ""
        since, first = self._known
        return f" left {_clock((now - since) / (step - first) * (self._steps - step))}"

    def _tell(self, more: str = "") -> None:
        self.say(self._newest + more)
        self._told = True

    def close(self) -> None:
        """Take the bar away; the newest figures stay."""
        if self._live:
            self._bar.stop()
        if not self._told:
            self._tell()


class BadSampleLines:
    """Tells of bad samples: of the first few one by one, then how many there are, a line a minute at most.

    Args:
        progress: where the lines go.
        total: bad samples before this process began.
        listed: what they are listed in, for the lines.
    """

    def __init__(self, progress: ProgressLine, *, total: int, listed: str) -> None:
        self._progress, self._listed = progress, listed
        self._told, self._shown = total, 0
        self._last_line = time.monotonic()
        self._causes: Counter[str] = Counter()

    def found(self, bad: Sequence[Mapping[str, str]]) -> None:
        """This rank has met bad samples, each with ``key``, ``shard`` and ``cause``."""
        for one in bad:
            if one["cause"] in self._causes or len(self._causes) < _MOST_CAUSES:
                self._causes[one["cause"]] += 1
            if self._shown < _BAD_ONE_BY_ONE:
                self._shown += 1
                self._told += 1
                self._progress.say(f"bad sample replaced: {one['key']} in {one['shard']}: {one['cause']}")

    def sum_up(self, total: int, *, at_once: bool = False) -> None:
        """There are ``total`` bad samples on all ranks; said if some are not told of and it is time, or at once."""
        now = time.monotonic()
        if total <= self._told or not (at_once or now - self._last_line >= _BAD_EVERY_SECONDS):
            return
        self._told, self._last_line = total, now
        often = self._causes.most_common(1)
        cause = f"; most often: {often[0][0]}" if often else ""
        self._progress.say(f"{total:,} bad samples so far, all in {self._listed}{cause}")


class TraitLines:
    """Prints how many transparent and how many rotated images are used as they are, once per kind.

    Args:
        progress: where the lines go.
        decoding: of the training.
        background: ``data.background`` of the run; where it is set, transparent images are not reported.
        upright: ``data.upright`` likewise.
    """

    def __init__(
        self, progress: ProgressLine, decoding: Decoding, *, background: str, upright: bool | str
    ) -> None:
        self._progress, self._decoding = progress, decoding
        self._options = {
            "background": "" if background else "data.background=white",
            "upright": "data.upright=true" if upright == "auto" else "",
        }
        self._told: set[tuple[str, str]] = set()

    def say(self, whose: str, counts: TraitCounts) -> None:
        """Print a note for each trait that some images have, once for each ``whose``."""
        for trait, line in counts.lines(self._decoding, **self._options).items():
            if (whose, trait) not in self._told:
                self._told.add((whose, trait))
                self._progress.say(f"note: {whose}: {line}")


class _Output:
    """A stream that falls silent when it cannot be written; all else is the stream's own."""

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
    """101.3 → "1m41s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s"


class Sink(Protocol):
    """Where scalars of a step go."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step."""

    def close(self) -> None:
        """Bring everything out."""


class MetricsLog:
    """Every logged step as a line of ``metrics.jsonl``, and in TensorBoard and wandb where they are wanted.

    Args:
        run: the run folder.
        config: of the run.
        step: updates made so far; figures of later steps, left by a run that was killed, are taken out.
        kept: whether anything is recorded; only one process of a run does.
    """

    def __init__(self, run: Path, config: Config, *, step: int, kept: bool = True) -> None:
        self._file: TextIO | None = None
        self._sinks: list[Sink] = []
        if not kept:
            return
        path = run / "metrics.jsonl"
        drop_lines_after(path, step)
        self._file = path.open("a", encoding="utf-8")
        if config.log.tensorboard:
            with suppress(ImportError):  # an extra; its absence is said in README, not at each start
                self._sinks.append(_TensorBoard(run, step))
        if config.log.wandb:
            self._sinks.append(_Wandb(run, config))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the figures of one step.

        Raises:
            DataError: the file cannot be written, for example for want of space.
        """
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise DataError(f"{self._file.name} cannot be written: {error.strerror}") from error
        for sink in self._sinks:
            sink.write(step, {f"train/{name}": value for name, value in values.items()})

    def write_scores(self, step: int, scores: Mapping[str, float]) -> None:
        """Scores go to the loggers; their own file is the evaluation's."""
        for sink in self._sinks:
            sink.write(step, scores)

    def close(self) -> None:
        """Bring everything out."""
        with suppress(OSError):  # all lines are out, but for one that ``write`` has complained of
            if self._file is not None:
                self._file.close()
        for sink in self._sinks:
            sink.close()


def drop_lines_after(path: Path, step: int) -> None:
    """Take lines of steps beyond ``step``, and a last line that a kill has cut short, out of a JSONL file."""
    if not path.is_file():
        return
    kept = []
    # split at "\n" alone: text inside a line may hold other separators that splitlines would cut at
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError, AttributeError, TypeError):
            if (json.loads(line).get("step") or 0) <= step:
                kept.append(line + "\n")
    write_atomic(path, "".join(kept))


class _TensorBoard:
    def __init__(self, run: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, run: Path, config: Config) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("log.wandb is set but wandb is missing: pip install -e '.[log]'") from error
        identity = run / "wandb_id"
        if not identity.is_file():
            identity.write_text(f"{run.name}-{time.time_ns():x}\n")
        try:
            self._run: Any = wandb.init(
                project=config.log.wandb,
                name=run.name,
                id=identity.read_text().strip(),
                resume="allow",
                dir=str(run),
                config={"toml": without_secrets(to_toml(config))},
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"log.wandb = {config.log.wandb!r}, but wandb does not begin: {error}: run `wandb login`, or set "
                f"WANDB_MODE=offline to keep its files in {run}"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


# --------------------------------------------------------------------------------------------------------------
# A few training steps under torch's profiler.
#
# RUN/profile/table.txt         the own time of each operation, the longest first, 72 columns wide
# RUN/profile/trace.json.gz     each operation on a time line, for https://ui.perfetto.dev

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


# --------------------------------------------------------------------------------------------------------------
# What a training says before its first step: whether it starts or resumes, and which settings may not be meant.

_OFTEN = 50  # times over each pair, from where a word is said


def model_line(model: CLIP, *, world: int, device: torch.device, bf16: bool) -> str:
    """Return the model's name and size, the precision and the devices, as a line."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    precision = "bf16" if bf16 else "fp32"
    return f"{model.name}, {parameters / 1e6:.1f} M parameters, {precision} on {world} × {device.type}"


def beginning(run: Path, step: int, config: Config, *, planned: int) -> list[str]:
    """What is about to happen; ``planned`` steps were wanted so far."""
    if step >= config.steps:
        return [f"{run} has made all its {config.steps} steps"]
    lines = [f"resuming {run} at step {step}" if step else f"starting {run}"]
    if step and config.model.weights:
        lines.append(f"all weights are its own by now: model.weights = {config.model.weights!r} is not read")
    if config.steps != planned:
        lines.append(
            f"steps = {config.steps} now, and were {planned}: the rate follows the "
            f"{'longer' if config.steps > planned else 'shorter'} run's schedule from here on, "
            f"{learning_rate(step - 1, planned, config.optim):.3g} at step {step} and "
            f"{learning_rate(step, config.steps, config.optim):.3g} at step {step + 1}"
        )
    return lines


def notes(config: Config, *, step: int, samples: int, layers: int) -> list[str]:
    """What may not be meant, a line each.

    Args:
        config: of the run.
        step: updates made so far.
        samples: pairs that an epoch has.
        layers: that ``lock.unfreeze_every`` unlocks one after the other, of the tower with the most of them.
    """
    if step >= config.steps:
        return []
    return [f"note: {one}" for one in _notes(config, step=step, samples=samples, layers=layers)]


def _notes(config: Config, *, step: int, samples: int, layers: int) -> Iterator[str]:
    steps, optim = config.steps, config.optim
    if optim.warmup >= steps:
        yield (
            f"optim.warmup = {optim.warmup} is no shorter than the run of {steps} steps: the rate ends at "
            f"{learning_rate(steps - 1, steps, optim):.2g}, and optim.lr is {optim.lr:g}"
        )
    if config.small.steps >= steps:
        yield (
            f"small.steps = {config.small.steps} is no shorter than the run of {steps} steps: none is made at the "
            "model's full size"
        )
    every = config.lock.unfreeze_every
    if every and every * (layers - 1) >= steps:
        trained = 1 + (steps - 1) // every
        yield (
            f"lock.unfreeze_every = {every} unlocks {trained} of {layers} layers in {steps} steps; the others stay "
            "as they are"
        )
    seen = steps * config.batch_size / samples
    if seen > _OFTEN and not config.data.weights and not config.data.resample:
        ten = max(1, 10 * samples // config.batch_size)
        yield f"each of the {samples:,} pairs is seen {seen:,.0f} times; steps={ten} would be 10 times"
    if (note := OBJECTIVES[config.loss.name].note) and not step and not config.model.weights:
        yield note


# --------------------------------------------------------------------------------------------------------------
# Where the time of training steps goes, phase by phase, without stopping a GPU's queue.
#
# On a GPU each phase is timed by events in the queue, which are read when the figures are asked for; on a CPU
# by the clock. Communication that overlaps the backward pass is in it.

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


# --------------------------------------------------------------------------------------------------------------
# What is recorded of training steps: how fast they are, and where their time goes.
#
# Names are open_clip's where the thing is the same: ``data_time`` and ``batch_time`` (seconds of a step),
# ``samples_per_second``, ``samples_per_second_per_gpu``, ``scale``, ``lr``.

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
