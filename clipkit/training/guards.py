"""Protect a run from bad samples, values that are not finite, and gradient spikes; stop it on signals.

RUN/bad_samples.jsonl         samples that were replaced; of rank 3: bad_samples-3.jsonl
RUN/not_finite.jsonl          samples of a batch with a loss or gradient that is not finite; not_finite-3.jsonl
RUN/truncated_shards.jsonl    shards of which only the intact part is used
"""

import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from clipkit.batch import BadSample, Batch
from clipkit.config import load_config
from clipkit.distributed import gather_objects, world_size
from clipkit.errors import ClipkitError, ConfigError, DataError, Stopped
from clipkit.files.atomic import write_atomic
from clipkit.formats.checkpoint import latest_checkpoint, parse_step
from clipkit.model.clip import CLIP
from clipkit.training.parallel import local_part
from clipkit.training.step import Features, TrainingStep

_SHOWN_ROWS = 10
_SHOWN_SHARDS = 5
_FIRST_SAMPLES = 1000  # draws
_ADVICE = "for a new run try a lower optim.lr, a longer optim.warmup, optim.skip_above or precision=fp32"


def _write_lines(path: Path, records: Sequence[Mapping[str, Any]], *, append: bool = False) -> None:
    try:
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from error


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


def append_bad_samples(run: Path, bad: Sequence[BadSample], step: int, *, rank: int) -> None:
    """Append the bad samples of a step to this rank's list.

    Raises:
        DataError: the file cannot be written.
    """
    if bad:
        path = run / (f"bad_samples-{rank}.jsonl" if rank else "bad_samples.jsonl")
        _write_lines(path, [{"step": step, **asdict(sample)} for sample in bad], append=True)


def drop_bad_samples_after(run: Path, step: int) -> None:
    """Remove bad samples of steps after ``step`` from the lists of all ranks, also of earlier world sizes."""
    for path in run.glob("bad_samples*.jsonl"):
        drop_lines_after(path, step)


def too_many_bad(bad: int, used: int, limit: float) -> bool:
    """Return whether more than a fraction of the samples drawn is bad.

    Repeated draws count, so the fraction does not depend on the length of the run.

    Args:
        bad: draws that could not be used, including replacements.
        used: draws that were trained on: steps × batch size.
        limit: ``data.max_bad``, a fraction of at least 1,000 draws.
    """
    return bad > limit * max(bad + used, _FIRST_SAMPLES)


def bad_fraction(bad: int, used: int, limit: float) -> str:
    """Describe the fraction of bad samples and its limit; see ``too_many_bad``."""
    drawn = bad + used
    least = f" of at least {_FIRST_SAMPLES:,} samples" if drawn < _FIRST_SAMPLES else ""
    return (
        f"{100 * bad / drawn:.3g}% of the {drawn:,} samples drawn were bad "
        f"(limit: data.max_bad = {100 * limit:.3g}%{least})"
    )


def check_bad_samples(bad: int, used: int, limit: float, run: Path) -> None:
    """Raise DataError for a saved run that has ``too_many_bad`` samples."""
    if too_many_bad(bad, used, limit):
        raise DataError(
            f"{bad:,} of {bad + used:,} samples drawn so far are bad, more than data.max_bad = {limit:g} allows: "
            f"see {run}/bad_samples*.jsonl; all steps are saved: raise data.max_bad, and the same command resumes"
        )


def list_truncated(run: Path, shards: Sequence[tuple[str, int]]) -> list[str]:
    """Write the truncated shards and their numbers of intact samples to a file, and return notes to print."""
    path = run / "truncated_shards.jsonl"
    if not shards:
        path.unlink(missing_ok=True)
        return []
    _write_lines(path, [{"shard": shard, "samples_kept": samples} for shard, samples in shards])
    notes = [
        f"note: shard {shard} is truncated: {samples:,} samples kept"
        for shard, samples in shards[:_SHOWN_SHARDS]
    ]
    if more := len(shards) - len(notes):
        notes.append(f"note: {more:,} more truncated shards are listed in {path}")
    return notes


# Values that are not finite


def list_not_finite(run: Path, names: Sequence[tuple[str, str]], *, step: int, rank: int) -> Path:
    """Write the shard and key of each sample of a batch to a file and return its path."""
    path = run / (f"not_finite-{rank}.jsonl" if rank else "not_finite.jsonl")
    _write_lines(path, [{"step": step + 1, "shard": shard, "key": key} for shard, key in names])
    return path


def failed_step(run: Path, step: int, *, causes: Sequence[str], loss: float, norm: float) -> ClipkitError:
    """Return the error of a step after ``step`` updates.

    ``causes`` has the reason why a rank has no batch, or "", for each rank. If all are "", a value is not finite.
    """
    if cause := next(filter(None, causes), ""):
        state = f"step {step} is saved; the same command resumes once this is fixed"
        return DataError(f"{cause}; {state if step else 'no step was made'}")
    name, value = ("gradient", norm) if math.isfinite(loss) else ("loss", loss)
    return ClipkitError(
        f"the {name} of step {step + 1} is {value}; step {step} is saved, and {run}/not_finite*.jsonl lists the "
        f"samples: the same command with --replay, in one process, repeats the step and reports where it starts; "
        f"{_ADVICE}"
    )


def weights_error(run: Path, step: int, name: str, *, saved: int | None) -> str:
    """Return the error message for weights that are not finite and therefore not saved.

    ``name`` is the first such tensor, and ``saved`` the step of the newest checkpoint.
    """
    if not step:
        return f"the initial weights of {run} are not finite, first {name}: set another model.weights"
    newest = "no checkpoint exists"
    if saved is not None:
        newest = (
            f"the newest checkpoint is step {saved}: model.weights={run} starts a new run from its weights"
        )
    return (
        f"the weights after step {step} are not finite, first {name}, and are not saved; {newest}; {_ADVICE}"
    )


@torch.no_grad()
def first_not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor with a value that is not finite, or ""; all ranks call this.

    Takes one fused pass and one synchronization with the device. Only tensors with a norm that is not finite are
    checked by element, since squares of large finite values overflow.

    Args:
        tensors: tensors by name, on any device, possibly sharded; integers count as finite.
    """
    parts = {name: local_part(tensor) for name, tensor in tensors.items() if tensor.is_floating_point()}
    parts = {name: part for name, part in parts.items() if part.numel()}
    bad_name = ""
    if parts:
        finite = torch.stack(torch._foreach_norm(list(parts.values()))).isfinite().tolist()
        large = (name for name, is_finite in zip(parts, finite, strict=True) if not is_finite)
        bad_name = next((name for name in large if not bool(parts[name].isfinite().all())), "")
    return next(filter(None, gather_objects(bad_name)), "")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of repeating a step.

    Attributes:
        where: the first value that is not finite; "" if all are.
        rows: rows of the batch with features that are not finite.
        loss: loss of the batch.
    """

    where: str
    rows: tuple[int, ...]
    loss: float


def replay(
    model: CLIP, compute: TrainingStep, batch: Batch, step: int, names: Sequence[tuple[str, str]]
) -> list[str]:
    """Repeat a step in its precision and in fp32 without changing weights, and report what is not finite.

    The model has the weights before the step, and its gradients are replaced. ``batch`` is the whole global batch,
    and ``names`` are shard and key of each row.

    Raises:
        ConfigError: there are several processes.
    """
    if world_size() > 1:
        raise ConfigError(
            "--replay computes the whole batch in one process: start it with python, not torchrun"
        )
    lines = []
    for bf16 in dict.fromkeys((compute.bf16, False)):
        finding = find(model, partial(replace(compute, bf16=bf16).gradients, model, batch, step))
        result = (
            f"{finding.where} is not finite"
            if finding.where
            else f"all is finite, the loss is {finding.loss:.4f}"
        )
        lines.append(f"step {step + 1} in {'bf16' if bf16 else 'fp32'}: {result}")
        bad = [names[row] for row in finding.rows[:_SHOWN_ROWS]]
        lines += [f"  its features are not finite: {key} in {shard}" for shard, key in bad]
    return lines


def replay_parts(run: Path, accumulate: int, batch_size: int) -> int:
    """Return ``accumulate`` with which one process computes a failed step in the same parts as all ranks did.

    The number of ranks is that of the not_finite files of the step.
    """
    checkpoint = latest_checkpoint(run)
    if checkpoint is None:
        raise ConfigError(f"--replay requires a saved run: there is no checkpoint in {run}")
    ranks = 0
    failed = parse_step(checkpoint.name) + 1
    for path in run.glob("not_finite*.jsonl"):
        with suppress(OSError, ValueError, AttributeError), path.open(encoding="utf-8") as file:
            ranks += json.loads(file.readline()).get("step") == failed
    parts = load_config(checkpoint / "config.toml").accumulate * max(1, ranks)
    return min(max(parts, accumulate), batch_size)


def find(model: nn.Module, compute: Callable[[], Features]) -> Finding:
    """Compute a step's loss and gradients again, and find the first value that is not finite."""
    for parameter in model.parameters():
        parameter.grad = None
    origins = [
        f"the weight {name}"
        for name, parameter in model.named_parameters()
        if not bool(parameter.isfinite().all())
    ]

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not bool(output.isfinite().all()):
            origins.append(f"the output of {name or 'the model'}")

    hooks = [module.register_forward_hook(partial(look, name)) for name, module in model.named_modules()]
    try:
        features = compute()
    finally:
        for hook in hooks:
            hook.remove()
    if not bool(features.loss.isfinite()):
        origins.append("the loss")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            origins.append(f"the gradient of {name}")
    finite = features.images.isfinite().all(dim=1) & features.texts.isfinite().all(dim=1)  # (B,)
    rows = tuple((~finite).nonzero().flatten().tolist())
    return Finding(where=origins[0] if origins else "", rows=rows, loss=float(features.loss))


# Stopping: signals ask to save and exit, and a rank ends with its launcher.

_PARENT_SECONDS = 0.2  # between two checks that the launcher is alive
_ARRIVAL_SECONDS = 0.5  # within which a signal that was sent before the launcher died has arrived
_STUCK_SECONDS = 20.0  # after SIGTERM until a rank that does not react is ended
_PROBE_SECONDS = 1.0  # between two checks that it reacts


def loss_after(saved: int) -> str:
    """Return the message about lost work if the process exits with a newest checkpoint of step ``saved``."""
    return f"training after step {saved} is lost; the same command resumes from there"


class StopRequest:
    """Save and exit within a few steps on Ctrl-C, SIGTERM, SIGHUP (end of an ssh session) or SIGUSR1.

    Cluster schedulers usually send SIGUSR1 before a job's time is up. A second Ctrl-C exits at once, and so does
    the first signal if there is nothing to save.

    A rank that waits in C++ for a rank that has died cannot react to SIGTERM, which torchrun sends in this case.
    ``is_stuck`` detects this by sending SIGURG, which is handled as soon as the main thread runs Python code or
    waits in it.

    Attributes:
        number: number of the signal received, or 0. The program's exit status is 128 + this number.
        agreed: whether all ranks have agreed to stop after this step, whichever of them received a signal.
        otherwise: message about the work that exiting at once would lose.
    """

    def __init__(self) -> None:
        self.number = 0
        self.saves = False
        self.agreed = False
        self._signalled = False
        self.otherwise = "no step was made; the same command starts again"
        self._owner = os.getpid()  # loader processes leave signals to the trainer
        self._terminated = False
        self._reacted = self._probed = time.monotonic()
        self._step_began: float | None = None
        self._step_seconds = 0.0
        signal.signal(signal.SIGURG, self._react)
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if (
                signal_number != signal.SIGHUP or signal.getsignal(signal_number) != signal.SIG_IGN
            ):  # ignored by nohup
                signal.signal(signal_number, self._ask)
        # Python calls ``_ask`` only between two instructions of the main thread, which may spend seconds in a
        # backward pass; the number of a signal arrives in this pipe at once.
        self._arrived, write_end = os.pipe()
        for end in (self._arrived, write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def leaving(self) -> bool:
        """Return whether this process is about to save and exit, for the thread that watches the launcher."""
        with suppress(BlockingIOError):
            numbers = os.read(self._arrived, 4096)  # of other signals too, such as SIGCHLD
            self._signalled |= any(signal.getsignal(signal_number) == self._ask for signal_number in numbers)
            if signal.SIGTERM in numbers and not self._terminated:
                self._terminated = True
                self._reacted = time.monotonic()
        return self._signalled or self.agreed

    def begin_step(self) -> None:
        """State that a step begins, in which ranks wait for each other only briefly."""
        self._step_began = self._reacted = time.monotonic()

    def finish_step(self, *, agreed: bool) -> None:
        """State that a step is done, and whether all ranks have agreed to stop after it."""
        self.agreed = agreed
        if self._step_began is not None:
            self._step_seconds = time.monotonic() - self._step_began
        self._step_began = None

    def is_stuck(self) -> bool:
        """Return whether the main thread has not reacted since SIGTERM, for longer than three steps take.

        Never true between steps: ranks may wait for minutes while rank 0 saves or scores. The thread that watches
        the launcher calls this often, after ``leaving``.
        """
        now = time.monotonic()
        if not self._terminated or self._step_began is None:
            return False
        if now - self._probed > _PROBE_SECONDS:
            self._probed = now
            main_thread = threading.main_thread().ident
            assert main_thread is not None
            signal.pthread_kill(main_thread, signal.SIGURG)
        return now - self._reacted > max(_STUCK_SECONDS, 3 * self._step_seconds)

    @property
    def asked(self) -> bool:
        """Whether a signal was received."""
        return self.number > 0

    def save_first(self, saves: bool, otherwise: str) -> None:
        """Set whether to save before exiting from now on."""
        self.saves = saves
        self.otherwise = otherwise
        if self.asked and not saves:
            raise Stopped(self.number, otherwise)

    def _react(self, signal_number: int, frame: FrameType | None) -> None:
        self._reacted = time.monotonic()

    def _ask(self, signal_number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return
        if not self.saves or (self.asked and signal_number == signal.SIGINT):
            raise Stopped(signal_number, self.otherwise)
        self.number = signal_number


def launcher_of(parent: int) -> int | None:
    """Return the process ID of torchrun (torch.distributed.elastic), or None if it did not start this process."""
    return parent if "TORCHELASTIC_RUN_ID" in os.environ else None


def end_with_launcher(parent: int, stop: StopRequest) -> None:
    """End this process, as ``kill -9`` would, as soon as its launcher has died, or if it is stuck after SIGTERM.

    Without its launcher a rank is neither stopped nor restarted, and it keeps its run folder locked. A process
    without a launcher is not affected: under ``nohup`` or ``setsid`` it outlives its parent on purpose. Nothing is
    saved: the next start ignores incomplete checkpoints, and resume is exact.

    Args:
        parent: ID of the parent process, read when this process started.
        stop: whether this process is about to save and exit, which it may finish, and whether it is stuck.
    """
    launcher = launcher_of(parent)
    environment = os.environ
    if launcher is None and environment.get("WORLD_SIZE", "1") == "1":
        return

    def end(reason: str = "torchrun has died, so its ranks end", *, status: int = 1) -> None:
        if environment.get("LOCAL_RANK") == "0":
            with suppress(OSError):
                advice = "the last checkpoint is kept, and the same command resumes"
                os.write(2, f"error: {reason}; {advice}\n".encode())
        os._exit(status)

    def watch() -> None:
        while True:
            has_died = launcher is not None and os.getppid() != launcher
            if has_died:
                time.sleep(_ARRIVAL_SECONDS)
            if not stop.leaving() and has_died:
                end()
            if stop.is_stuck():
                end("SIGTERM while waiting for another rank", status=128 + signal.SIGTERM)
            time.sleep(_PARENT_SECONDS)

    # if torchrun died before ``parent`` was read, its store on this host is closed
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environment.get("GROUP_RANK") == "0":
        try:
            address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
            socket.create_connection(address, timeout=10).close()
        except ConnectionRefusedError:
            end()
        except (OSError, KeyError, ValueError):
            pass  # reported when the ranks meet
    threading.Thread(target=watch, name="launcher", daemon=True).start()
