"""The log of a training: the terminal, ``metrics.jsonl``, TensorBoard, wandb, and lists of bad samples."""

import json
import sys
import textwrap
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from clipkit.batch import BadSample, Batch
from clipkit.config import Config, to_toml
from clipkit.distributed import barrier, copy_to_host, rank, world_size
from clipkit.errors import CheckpointError, ConfigError, DataError, silence_if_broken
from clipkit.files.terminal import counted, printable, redact_secrets
from clipkit.files.writing import drop_lines_after, replacing, write_lines
from clipkit.model import ARCHITECTURES
from clipkit.model.clip import CLIP
from clipkit.samples.traits import Decoding, TraitCounts
from clipkit.training import is_due, learning_rate
from clipkit.training.checkpoint import LoopState, damaged_notes, planned_steps
from clipkit.training.costs import Workload, flops_of_steps, measured_peak
from clipkit.training.guards import LAG
from clipkit.training.metrics import Profile, RankClock, StepMetrics, Stopwatch
from clipkit.training.step import TrainingStep

_PLAIN_EVERY_SECONDS = 10.0
_BAD_EVERY_SECONDS = 60.0
_BAD_ONE_BY_ONE = 5
_FIRST_SAMPLES = 1000  # draws
_SHOWN_SHARDS = 5
_SLOW_RANKS = 10  # about which lines are printed
_MAX_CAUSES = 1000  # that are counted; those with a number in them are all different


class Log:
    """Decides what a training prints, writes and leaves out. Rank 0 prints; each rank lists its own bad samples.

    The loop states the facts of a step when it knows them. ``add_bad_samples`` and ``count_batch`` take what this
    rank knows as soon as the step is launched. ``record_step`` takes what all ranks have agreed on, which may
    arrive some steps later, and ``write`` the metrics of the step that was recorded last.

    Args:
        config: configuration of the run.
        state: the state before the first step. Rank 0 removes what a killed run wrote about later steps; no rank
            goes on before that is done.
        opening: lines to print first; empty ones are left out.
        device: the training device.
        decoding: how training decodes images.
        profile: number of steps that rank 0 profiles.

    Attributes:
        bad_samples: lists of the samples that were replaced, and their limit.
        watch: times the phases of a step.

    Raises:
        DataError: the state has too many bad samples.
    """

    def __init__(
        self,
        config: Config,
        state: LoopState,
        opening: Iterable[str] = (),
        *,
        device: torch.device,
        decoding: Decoding,
        profile: int = 0,
    ) -> None:
        rank0 = rank() == 0
        self._config = config
        self._decoding = decoding
        self._run = Path(config.out)
        self.bad_samples = BadSamples(run=self._run, batch_size=config.batch_size, limit=config.data.max_bad)
        self.bad_samples.check(state)
        self._losses = SampleLosses(self._run, state.step, lag=LAG.get(device.type, 0))
        if rank0:
            self._losses.drop_later()
            later = [self._run / "metrics.jsonl", self._run / "results.jsonl", *self.bad_samples.paths()]
            for path in later:
                drop_lines_after(path, state.step)
        barrier()
        self._progress = ProgressLine(steps=config.steps, done=state.step, shown=rank0)
        for line in filter(None, opening):
            self.print_line(line)
        self._began = time.monotonic() - state.seconds
        self._state = state
        self._results: dict[str, float] = {}  # of the step that was recorded last
        self._file: TextIO | None = None
        self._writers: list[Callable[[int, Mapping[str, float]], None]] = []
        self._closers: list[Callable[[], object]] = []
        if rank0:
            self._file = (self._run / "metrics.jsonl").open("a", encoding="utf-8")
            if config.log.tensorboard:
                with suppress(ImportError):  # it is optional
                    self._add_tensorboard(state.step)
            if config.log.wandb:
                self._add_wandb(config.log.wandb)
        self._bad_causes: Counter[str] = Counter()
        self._bad_printed = 0
        self._bad_reported = state.bad_samples
        self._bad_time = time.monotonic()
        self._noted_traits: set[tuple[str, str]] = set()
        self._profile: Profile | None = None
        if rank0 and profile:
            self._profile = Profile(self._run, profile, device=device, print_line=self.print_line)
        self._flops: Callable[..., int] | None = None
        self.watch = Stopwatch(device)
        self._rates = StepMetrics(self.watch, device=device, ranks=world_size())
        self._rank_clock = RankClock(sharded=config.sharding != "none")
        self._reported_ranks: set[tuple[int, str]] = set()  # slow ranks and causes that were printed

    def leave_out(self) -> None:
        """Do not count the time since the last step in the rates."""
        self._rates.leave_out()

    def print_line(self, line: str) -> None:
        """Print a line on rank 0."""
        self._progress.print_line(line)

    def note_traits(self, images: str, counts: TraitCounts) -> None:
        """Print a note for each trait that some of these images have, unless it was printed for them before."""
        pixels = self._config.pixels
        advice = {"background": "pixels.background=white", "upright": "pixels.upright=true"}
        if pixels.background:
            advice["background"] = ""
        if pixels.upright != "auto":
            advice["upright"] = ""
        for trait, line in counts.lines(self._decoding, **advice).items():
            if (images, trait) not in self._noted_traits:
                self._noted_traits.add((images, trait))
                self.print_line(f"note: {images}: {line}")

    def count_flops(self, model: CLIP, compute: TrainingStep, step: int) -> None:
        """Count the FLOPs of the steps from ``step`` on, for the MFU; call it again after a change of what is
        trained, on all ranks."""
        terms = {name: term for name, term in compute.terms.items() if term.after <= step}
        self._flops = flops_of_steps(Workload(model=model, config=self._config, terms=terms))
        if self._flops is not None and not self._rates.peak:
            dtype = torch.bfloat16 if compute.bf16 else torch.float32
            self._rates.measure_peak(partial(measured_peak, model.logit_scale.device, dtype))

    def add_bad_samples(self, step: int, bad: Sequence[BadSample]) -> None:
        """List the samples that this rank has replaced in a step, and print the first ones."""
        self.bad_samples.append(bad, step, rank=rank())
        for sample in bad:
            if sample.cause in self._bad_causes or len(self._bad_causes) < _MAX_CAUSES:
                self._bad_causes[sample.cause] += 1
            if self._bad_printed < _BAD_ONE_BY_ONE:
                self._bad_printed += 1
                self._bad_reported += 1
                self.print_line(f"bad sample replaced: {sample.key} in {sample.shard}: {sample.cause}")

    def count_batch(self, batch: Batch, pairs: Tensor | None = None) -> None:
        """Count a step of this rank for the rates, and record the losses and margins of its pairs, if any."""
        if pairs is not None:
            self._losses.add(batch, pairs)
        if self._profile is not None:
            self._profile.step()
        flops = 0
        if self._flops is not None:
            further = batch.more_lengths + batch.negative_lengths + batch.field_lengths
            size = batch.images.shape[-1]
            flops = self._flops(batch.lengths, size, further, batch.grids)
        self._rates.step(
            samples=self._config.batch_size,
            flops=flops,
            read_seconds=batch.read_seconds,
            make_seconds=batch.make_seconds,
        )

    def list_truncated(self, shards: Sequence[tuple[str, int]]) -> None:
        """List the truncated shards, of which only the intact samples are used, in a file, and print the first."""
        if rank():
            return
        path = self._run / "truncated_shards.jsonl"
        path.unlink(missing_ok=True)
        if shards:
            write_lines(path, [{"shard": shard, "samples_kept": samples} for shard, samples in shards])
        for shard, samples in shards[:_SHOWN_SHARDS]:
            self.print_line(f"note: shard {shard} is truncated: {samples:,} samples kept")
        if len(shards) > _SHOWN_SHARDS:
            self.print_line(
                f"note: {len(shards) - _SHOWN_SHARDS:,} more truncated shards are listed in {path}"
            )

    def record_step(self, state: LoopState, *, loss: float, grad_norm: float) -> None:
        """Set the state and results of a completed step, and update the progress bar."""
        self._state = state
        self._results = {"loss": loss, "grad_norm": grad_norm}
        self.note_traits("drawn so far, repeats counted", state.trait_counts(self._drawn))
        self._progress.advance(state.step)

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before a resume included."""
        return time.monotonic() - self._began

    @property
    def _drawn(self) -> int:
        return self._state.step * self._config.batch_size

    def is_due(self, step: int) -> bool:
        """Return whether the metrics of a step are wanted even if nothing else is due after it."""
        return step == 1 or is_due(step, self._config.log.every_steps)

    def write(self, figures: Mapping[str, float], *, write_samples: bool = False) -> None:
        """Print and write the metrics of the step that was recorded last, with the rates since the last call.

        ``write_samples``: whether to write the losses of pairs too, which must be done before the step is saved.
        """
        step = self._state.step
        if write_samples:
            self._losses.write(step)
        metrics = {"samples": self._drawn, **self._results, **figures, **self._state.figures()}
        if self._config.select.fraction < 1:
            metrics["samples_trained"] = step * self._config.trained_pairs
        metrics |= self._rates.collect()
        record: dict[str, object] = {}
        slow = ""
        ranks = self._rank_clock.exchange(self._rates.phases)
        if ranks is not None:
            metrics |= {"slowest_rank": ranks.slowest, "slowest_excess": ranks.excess}
            record["ranks"] = ranks.record()
            if ranks.is_slow:
                slow = f"rank {ranks.slowest} +{ranks.excess:.0%} {ranks.cause}"
                fault = (ranks.slowest, ranks.cause)
                if fault not in self._reported_ranks and len(self._reported_ranks) < _SLOW_RANKS:
                    self._reported_ranks.add(fault)
                    self.print_line(ranks.describe())
        self._progress.update(step, metrics, slow)
        data = self._config.data
        if line := self._rates.explain_waiting(data.workers, ", ".join(data.redacted_sources)):
            self.print_line(line)
        if time.monotonic() - self._bad_time >= _BAD_EVERY_SECONDS:
            self._print_bad_samples()
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"step": step, **metrics, **record}) + "\n")
            self._file.flush()
        except OSError as error:
            raise DataError(f"{self._file.name} cannot be written: {error.strerror}") from error
        self.write_scores(step, {f"train/{name}": value for name, value in metrics.items()})

    def write_scores(self, step: int, scores: Mapping[str, float]) -> None:
        """Send scores to TensorBoard and wandb; evaluation writes its own file."""
        for write in self._writers:
            write(step, scores)

    def close(self) -> None:
        """Print the last metrics, write what is buffered, and close all loggers."""
        self._losses.write(self._state.step)
        if self._profile is not None:
            self._profile.close()
        self._print_bad_samples()
        self._progress.close()
        with suppress(OSError):  # ``write`` has reported it
            if self._file is not None:
                self._file.close()
        for close in self._closers:
            close()

    def print_data_summary(self, *, context_length: int) -> None:
        """Print bad samples, image traits, truncated captions and samples without a group of the run."""
        state = self._state
        if state.bad_samples:
            self.print_line(self.bad_samples.describe(state))
        self.note_traits("drawn in all, repeats counted", state.trait_counts(self._drawn))
        if state.cut_captions:
            captions = counted(self._drawn * self._config.data.caption_count, "caption")
            self.print_line(
                f"note: {state.cut_captions:,} of {captions} drawn in all, "
                f"repeats counted, had more than {context_length} tokens and were cut; a larger "
                "model.context_length reads them whole"
            )
        if state.without_group:
            self.print_line(
                f"note: {state.without_group:,} of {counted(self._drawn, 'sample')} drawn in all, repeats counted, "
                f"had no value of loss.same_field = {self._config.loss.same_field!r}, and no other sample in their "
                "group"
            )

    def _print_bad_samples(self) -> None:
        total = self._state.bad_samples
        if total <= self._bad_reported:
            return
        self._bad_reported = total
        self._bad_time = time.monotonic()
        line = f"{total:,} bad samples so far, all in {self._run}/bad_samples*.jsonl"
        for cause, _ in self._bad_causes.most_common(1):
            line += f"; most often: {cause}"
        self.print_line(line)

    def _add_tensorboard(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(self._run / "tensorboard")
        purged = step + 1 if step else None
        writer: Any = SummaryWriter(folder, purge_step=purged)

        def write(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        self._writers.append(write)
        self._closers.append(writer.close)

    def _add_wandb(self, project: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("log.wandb is set but wandb is missing: pip install -e '.[log]'") from error
        identity = self._run / "wandb_id"
        if not identity.is_file():
            identity.write_text(f"{self._run.name}-{time.time_ns():x}\n")
        try:
            job: Any = wandb.init(
                project=project,
                name=self._run.name,
                id=identity.read_text().strip(),
                resume="allow",
                dir=str(self._run),
                config={"toml": redact_secrets(to_toml(self._config))},
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"log.wandb = {project!r}, but wandb does not start: {error}: run `wandb login`, or set "
                f"WANDB_MODE=offline to keep its files in {self._run}"
            ) from error
        self._writers.append(lambda step, values: job.log(dict(values), step=step))
        self._closers.append(job.finish)


@dataclass(frozen=True, kw_only=True)
class BadSamples:
    """Samples that were replaced: RUN/bad_samples.jsonl, of rank 3 RUN/bad_samples-3.jsonl; and their limit.

    Repeated draws count, so the fraction of bad samples does not depend on the length of the run.

    Attributes:
        run: the run folder.
        batch_size: samples of a step that are trained on; bad samples are drawn in addition.
        limit: ``data.max_bad``, a fraction of at least 1,000 draws.
    """

    run: Path
    batch_size: int
    limit: float

    def append(self, bad: Sequence[BadSample], step: int, *, rank: int) -> None:
        """Append the bad samples of a step to a rank's list."""
        if bad:
            path = self.run / "bad_samples.jsonl"
            if rank:
                path = self.run / f"bad_samples-{rank}.jsonl"
            write_lines(path, [{"step": step, **asdict(sample)} for sample in bad], append=True)

    def paths(self) -> list[Path]:
        """Return the lists of all ranks, also of earlier world sizes."""
        return list(self.run.glob("bad_samples*.jsonl"))

    def count_drawn(self, state: LoopState) -> int:
        """Return the number of draws of a run, bad ones included."""
        return state.bad_samples + state.step * self.batch_size

    def exceeds_limit(self, state: LoopState) -> bool:
        """Return whether more than the limit of the samples drawn is bad."""
        return state.bad_samples > self.limit * max(self.count_drawn(state), _FIRST_SAMPLES)

    def check(self, state: LoopState) -> None:
        """Raise DataError for a saved run that has too many bad samples."""
        if self.exceeds_limit(state):
            raise DataError(
                f"{state.bad_samples:,} of {self.count_drawn(state):,} samples drawn so far are bad, more than "
                f"data.max_bad = {self.limit:g} allows: see {self.run}/bad_samples*.jsonl; all steps are saved: "
                "raise data.max_bad, and the same command resumes"
            )

    def describe(self, state: LoopState) -> str:
        """Describe the fraction of bad samples and its limit."""
        drawn = self.count_drawn(state)
        least = ""
        if drawn < _FIRST_SAMPLES:
            least = f" of at least {_FIRST_SAMPLES:,} samples"
        return (
            f"{100 * state.bad_samples / drawn:.3g}% of the {drawn:,} samples drawn were bad "
            f"(limit: data.max_bad = {100 * self.limit:.3g}%{least})"
        )


_PAIR_COLUMNS = ("image_loss", "text_loss", "image_margin", "text_margin")
_MOST_ROWS = 1 << 22  # that a rank keeps in memory


class SampleLosses:
    """Losses and margins of each pair in each step, with ``log.samples``, see ``clipkit.objectives.compare_pairs``.

    RUN/samples/00000500.npy      rows of rank 0 up to step 500, from the step after the previous file
    RUN/samples/00000500-3.npy    rows of rank 3

    Files are written before checkpoints. A run that resumes removes the rows of later steps, so that each pair of
    each step has one row. Rows of substitutes are left out.

    Args:
        run: the run folder.
        step: steps before the first one.
        lag: number of steps after which the device has computed a step.
    """

    def __init__(self, run: Path, step: int, *, lag: int) -> None:
        self._folder = run / "samples"
        self._step = step
        self._lag = lag
        # step, samples, rows of substitutes, losses and margins
        self._pending: deque[tuple[int, Tensor, tuple[int, ...], Callable[[], Tensor]]] = deque()
        self._rows: list[npt.NDArray[Any]] = []

    def drop_later(self) -> None:
        """Remove what a killed run wrote about later steps, on any number of ranks."""
        for path in self._folder.glob("[0-9]*.npy"):
            last, dash, number = path.stem.partition("-")
            if int(last) > self._step:
                try:
                    rows = np.load(path, allow_pickle=False)
                except (OSError, ValueError, EOFError) as error:
                    raise CheckpointError(
                        f"{path} is damaged ({error}): remove it to resume without it"
                    ) from error
                self._write(rows[rows["step"] <= self._step], dash + number)
                path.unlink()

    def add(self, batch: Batch, pairs: Tensor) -> None:
        """Record the (4, B) losses and margins of the next step; does not wait for the device."""
        self._step += 1
        self._pending.append((self._step, batch.ids, batch.substitutes, copy_to_host(pairs)))
        while len(self._pending) > self._lag:
            self._read()
        if sum(map(len, self._rows)) >= _MOST_ROWS:
            self._write_rows()

    def write(self, step: int) -> None:
        """Write the rows up to a step, which the device has computed."""
        while self._pending and self._pending[0][0] <= step:
            self._read()
        self._write_rows()

    def _read(self) -> None:
        step, samples, substitutes, pairs = self._pending.popleft()
        columns = [(name, "<f4") for name in _PAIR_COLUMNS]
        rows = np.empty(len(samples), [("step", "<i4"), ("sample", "<i8"), *columns])
        rows["step"] = step
        rows["sample"] = samples.numpy()
        for name, values in zip(_PAIR_COLUMNS, pairs().numpy(), strict=True):
            rows[name] = values
        self._rows.append(np.delete(rows, substitutes))

    def _write_rows(self) -> None:
        if self._rows:
            self._write(np.concatenate(self._rows), f"-{rank()}" if rank() else "")
            self._rows = []

    def _write(self, rows: npt.NDArray[Any], suffix: str) -> None:
        if not len(rows):
            return
        path = self._folder / f"{rows['step'][-1]:08d}{suffix}.npy"
        try:
            path.parent.mkdir(exist_ok=True)
            with replacing(path, durable=True) as temporary, temporary.open("wb") as file:
                np.save(file, rows)
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror}") from error


class ProgressLine:
    """A progress bar on a terminal, otherwise a line every ten seconds; silent unless ``shown``.

    The last metrics stay as a separate line. Errors of the output are ignored: training continues if nobody reads
    it, as when Ctrl-C ends the ``tee`` behind a pipe.
    """

    def __init__(self, *, steps: int, done: int, shown: bool) -> None:
        output: Any = StringIO()
        if sys.stderr is not None:
            output = _Output(sys.stderr)
        self.console = Console(file=output, soft_wrap=True, highlight=False)
        self._steps = steps
        self._shown = shown
        self._first: tuple[float, int] | None = None  # time and step of the first metrics
        self._last_line = 0.0
        self._newest = ""  # the line about the last metrics
        self._printed = True
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

    def print_line(self, line: str) -> None:
        """Print a line above the bar; control characters, which keys may contain, are escaped."""
        if not self._shown:
            return
        line = printable(line)
        if self._live:  # in files a line stays one line, for searching
            line = textwrap.fill(
                line,
                self.console.width,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        self.console.print(line, markup=False)

    def advance(self, step: int) -> None:
        """Show that ``step`` updates are made."""
        if self._live:
            self._bar.update(self._task, completed=step)

    def update(self, step: int, metrics: Mapping[str, float], slow: str = "") -> None:
        """Show the metrics of a step, and the rank that the others wait for, if any."""
        waiting = 0.0
        if metrics["batch_time"]:
            waiting = metrics["data_time"] / metrics["batch_time"]
        text = f"loss {metrics['loss']:.3f}"
        levels = [f"{name} {metrics[name]:.2f}" for name in ("chance", "floor") if name in metrics]
        if levels:
            text += f" ({', '.join(levels)})"
        text += f" {metrics['samples_per_second']:.0f}/s data {waiting:.0%} scale {metrics['scale']:.1f}"
        if slow:
            text += f" {slow}"
        now = time.monotonic()
        self._newest = f"step {step}/{self._steps} {text}"
        self._printed = False
        if self._live:
            self._bar.update(self._task, completed=step, description=text)
        elif now - self._last_line >= _PLAIN_EVERY_SECONDS and step < self._steps:
            self._last_line = now
            left = ""
            if self._first is not None and step > self._first[1]:  # the first step is not representative
                pace = (now - self._first[0]) / (step - self._first[1])
                left = f" left {_clock(pace * (self._steps - step))}"
            self._print(left)
        if step >= self._steps:
            self._print()
        self._first = self._first or (now, step)

    def _print(self, more: str = "") -> None:
        self.print_line(self._newest + more)
        self._printed = True

    def close(self) -> None:
        """Remove the bar and print the last metrics."""
        if self._live:
            self._bar.stop()
        if not self._printed:
            self._print()


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
            silence_if_broken(self._stream)
            return len(text)

    def flush(self) -> None:
        silence_if_broken(self._stream)


def _clock(seconds: float) -> str:
    """Format 101.3 as "1m41s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s"


def describe_model(model: CLIP, *, device: torch.device, bf16: bool) -> str:
    """Return the model's name and size, the precision and the devices, as a line."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    precision = "bf16" if bf16 else "fp32"
    name = model.name or "the model of model.weights"
    named = ARCHITECTURES.get(name)
    description = model.architecture.vision.description
    if named is not None and description != named.vision.description:
        name += f" ({description})"
    return f"{name}, {parameters / 1e6:.1f} M parameters, {precision} on {world_size()} × {device.type}"


def describe_start(config: Config, step: int, newest: Path | None) -> list[str]:
    """Return lines on how training starts, or resumes from its newest checkpoint at ``step``."""
    run = Path(config.out)
    steps = config.steps
    damaged = [] if newest is None else damaged_notes(newest)
    if step >= steps:
        return [*damaged, f"{run} has made all its {steps} steps"]
    if newest is None or not step:
        return [*damaged, f"starting {run}"]
    lines = [*damaged, f"resuming {run} at step {step}"]
    planned = planned_steps(newest, otherwise=steps)
    if steps != planned:
        length = "longer" if steps > planned else "shorter"
        lines.append(
            f"steps = {steps} now, and was {planned}: from here on the learning rate follows the schedule of the "
            f"{length} run, {learning_rate(step - 1, planned, config.optim):.3g} at step {step} and "
            f"{learning_rate(step, steps, config.optim):.3g} at step {step + 1}"
        )
    return lines
