"""What a training shows and records: a live bar or plain lines, ``metrics.jsonl``, TensorBoard and wandb."""

import json
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from clipkit.config import Config
from clipkit.config_file import to_toml
from clipkit.errors import ConfigError, DataError, let_go_if_broken
from clipkit.image_traits import Decoding, TraitCounts
from clipkit.urls import without_secrets

__all__ = ["BadSampleLines", "MetricsLog", "ProgressLine", "TraitLines", "drop_lines_after"]

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
        """A line of its own, above the bar; marks that would move the cursor (keys may hold any) are replaced."""
        if self._shown:
            line = "".join(c if c.isprintable() else "\ufffd" for c in line)
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
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text("".join(kept), encoding="utf-8")
    aside.replace(path)


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
