"""Values that are not finite, gradient spikes, and stopping: what protects a run.

RUN/not_finite.jsonl          the samples of that batch, a line each; of rank 3: not_finite-3.jsonl
"""

import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from clipkit.distributed import gather_objects, world_size
from clipkit.errors import ClipkitError, ConfigError, DataError, Stopped
from clipkit.model.clip import CLIP
from clipkit.training.parallel import local_part
from clipkit.training.step import Features, PairBatch, TrainingStep

__all__ = [
    "Finding",
    "StopRequest",
    "end_with_launcher",
    "failed_step",
    "find",
    "is_spike",
    "launcher_of",
    "line",
    "line_of_weights",
    "loss_after",
    "next_usual",
    "replayed",
    "spoilt_weight",
    "write_down",
]

_SHOWN_ROWS = 10
_ADVICE = "for a new run try a lower optim.lr, a longer optim.warmup, optim.skip_above or precision=fp32"


def write_down(run: Path, names: Sequence[tuple[str, str]], *, step: int, rank: int) -> Path:
    """List a batch's samples, each by its shard and key.

    Raises:
        DataError: it cannot be written.
    """
    path = run / (f"not_finite-{rank}.jsonl" if rank else "not_finite.jsonl")
    lines = [json.dumps({"step": step + 1, "shard": shard, "key": key}) + "\n" for shard, key in names]
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from error
    return path


def line(run: Path, step: int, loss: float, norm: float) -> str:
    """Return the error message for a loss or gradient that is not finite, after ``step`` updates."""
    what = f"the loss of step {step + 1} is {loss}"
    if math.isfinite(loss):
        what = f"the gradient of step {step + 1} is {norm}"
    return (
        f"{what}; step {step} is saved, and {run}/not_finite*.jsonl lists the samples: the same command with "
        f"--replay, in one process, repeats the step and reports where it starts; {_ADVICE}"
    )


def failed_step(run: Path, step: int, *, causes: Sequence[str], loss: float, norm: float) -> ClipkitError:
    """Return the error of a step without a batch (the ranks' ``causes``, empty without one), or not finite."""
    if cause := next(filter(None, causes), ""):
        kept = (
            f"step {step} is saved; the same command resumes once this is fixed"
            if step
            else "no step was made"
        )
        return DataError(f"{cause}; {kept}")
    return ClipkitError(line(run, step, loss, norm))


def line_of_weights(run: Path, step: int, name: str, *, saved: int | None) -> str:
    """Return the error message for weights that are not saved because they are not finite.

    Args:
        run: the run folder.
        step: updates made.
        name: of the first such tensor.
        saved: the step of the newest checkpoint; None where there is none.
    """
    if not step:
        return f"the weights that {run} begins with are not finite, first {name}: give other model.weights"
    kept = "no step before it was"
    if saved is not None:
        kept = f"step {saved} was the last: a new run goes on from its weights with model.weights={run}"
    return f"the weights after step {step} are not finite, first {name}; it is not saved, {kept}; {_ADVICE}"


@torch.no_grad()
def spoilt_weight(tensors: Mapping[str, Tensor]) -> str:
    """The name of the first tensor with a number that is not finite, "" where there is none; all ranks call this.

    One fused pass over the tensors on their device and one wait for it: only a tensor whose norm is not finite is
    looked at number by number, as the squares of finite ones may be too large.

    Args:
        tensors: by name, on any device; each rank may hold a part of each. Those of whole numbers count as finite.
    """
    parts = {name: local_part(one) for name, one in tensors.items() if one.is_floating_point()}
    parts = {name: part for name, part in parts.items() if part.numel()}
    found = ""
    if parts:
        finite = torch.stack(torch._foreach_norm(list(parts.values()))).isfinite().tolist()
        large = (name for name, is_finite in zip(parts, finite, strict=True) if not is_finite)
        found = next((name for name in large if not bool(parts[name].isfinite().all())), "")
    return next(filter(None, gather_objects(found)), "")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of repeating a step.

    Attributes:
        where: the first number that is not finite, in words; "" where all are.
        rows: of the batch whose features are not finite.
        loss: of the batch.
    """

    where: str
    rows: tuple[int, ...]
    loss: float


def replayed(
    model: CLIP, compute: TrainingStep, batch: PairBatch, step: int, names: Sequence[tuple[str, str]]
) -> list[str]:
    """Repeat a step in its precision and in fp32, and report what is not finite; no weight changes.

    Args:
        model: in one process, with the weights of that moment; its gradients are replaced.
        compute: the step.
        batch: the whole global batch, on the model's device.
        step: updates made before.
        names: shard and key of each row.

    Raises:
        ConfigError: there are several processes.
    """
    if world_size() > 1:
        raise ConfigError(
            "--replay computes the whole batch in one process: start it with python, not torchrun"
        )
    lines = []
    for bf16 in dict.fromkeys((compute.bf16, False)):
        found = find(model, partial(replace(compute, bf16=bf16).gradients, model, batch, step))
        said = (
            f"{found.where} is not finite" if found.where else f"all is finite, the loss is {found.loss:.4f}"
        )
        lines.append(f"step {step + 1} in {'bf16' if bf16 else 'fp32'}: {said}")
        bad = [names[row] for row in found.rows[:_SHOWN_ROWS]]
        lines += [f"  its features are not finite: {key} in {shard}" for shard, key in bad]
    return lines


def find(model: nn.Module, compute: Callable[[], Features]) -> Finding:
    """Compute a step's loss and gradients again and find where the first number is that is not finite.

    Args:
        model: a CLIP in one process; its gradients are replaced.
        compute: the step's backward pass.
    """
    for parameter in model.parameters():
        parameter.grad = None
    found = [f"the weight {name}" for name, one in model.named_parameters() if not bool(one.isfinite().all())]
    with _looking_at_outputs(model, found):
        features = compute()
    if not bool(features.loss.isfinite()):
        found.append("the loss")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            found.append(f"the gradient of {name}")
    finite = features.images.isfinite().all(dim=1) & features.texts.isfinite().all(dim=1)  # (B,)
    rows = tuple((~finite).nonzero().flatten().tolist())
    return Finding(where=found[0] if found else "", rows=rows, loss=float(features.loss))


@contextmanager
def _looking_at_outputs(model: nn.Module, found: list[str]) -> Iterator[None]:
    """Name modules whose output is not finite, inner ones before those that hold them."""

    def looking_at(name: str) -> Callable[..., None]:
        def look(module: nn.Module, given: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not bool(output.isfinite().all()):
                found.append(f"the output of {name or 'the model'}")

        return look

    handles = [one.register_forward_hook(looking_at(name)) for name, one in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --------------------------------------------------------------------------------------------------------------
# Gradients far above the usual: an update from one of them can undo much, and may be left out.
#
# The usual norm is a moving average over the steps made, in which a spike counts as the most that is borne: one
# alone changes little, and where norms rise for good, as when more layers are unfrozen, they are soon the usual
# ones. It is part of the loop's state, so a run that is resumed judges as one that never stopped.

_MEMORY = 0.98  # of the average: about fifty steps
_FIRST = 20  # updates that only tell what is usual


def is_spike(norm: float, usual: float, *, factor: float, updates: int) -> bool:
    """Whether a gradient of this norm is to be left out.

    Args:
        norm: of the gradient before clipping.
        usual: of those before, see ``next_usual``.
        factor: how many times the usual is too much; 0 leaves nothing out.
        updates: made so far.
    """
    return factor > 0 and updates >= _FIRST and norm > factor * usual


def next_usual(usual: float, norm: float, *, factor: float, updates: int) -> float:
    """The usual norm after one more step; the arguments are those of ``is_spike``."""
    if is_spike(norm, usual, factor=factor, updates=updates):
        norm = factor * usual
    memory = min(_MEMORY, updates / (updates + 1))
    return memory * usual + (1 - memory) * norm


# --------------------------------------------------------------------------------------------------------------
# Stopping: signals ask to save and exit, and a rank ends with its launcher.

_PARENT_SECONDS = 0.2  # between two checks that the launcher is alive


def loss_after(saved: int) -> str:
    """Return what exiting at once costs where the last checkpoint is of step ``saved``."""
    return f"training after step {saved} is lost; the same command resumes from there"


class StopRequest:
    """Save and exit after the current step on Ctrl-C, SIGTERM, SIGHUP (end of an ssh session) or SIGUSR1.

    SIGUSR1 is the signal that cluster schedulers are usually configured to send before the job's time is up. A
    second Ctrl-C exits at once, and so does the first signal where there is nothing to save.

    Attributes:
        number: of the signal received, or 0. The program's exit status is 128 + this number.
        otherwise: what exiting at once costs, for the message.
    """

    def __init__(self) -> None:
        self.number, self.saves = 0, False
        self.otherwise = "no step was made; the same command starts again"
        self._owner = os.getpid()  # loader processes leave signals to the trainer
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored by nohup
                signal.signal(number, self._ask)

    @property
    def asked(self) -> bool:
        """Whether a signal was received."""
        return self.number > 0

    def save_first(self, saves: bool, otherwise: str) -> None:
        """Set whether there is something to save before exiting from now on."""
        self.saves, self.otherwise = saves, otherwise
        if self.asked and not saves:
            raise Stopped(self.number, otherwise)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return
        if not self.saves or (self.asked and number == signal.SIGINT):
            raise Stopped(number, self.otherwise)
        self.number = number


def launcher_of(parent: int) -> int | None:
    """Return the process ID of torchrun (torch.distributed.elastic), or None if it did not start this process.

    Args:
        parent: ID of the parent process, read when this process started.
    """
    return parent if "TORCHELASTIC_RUN_ID" in os.environ else None


def end_with_launcher(parent: int, *, leaving: Callable[[], bool]) -> None:
    """End this process, as ``kill -9`` would, as soon as its launcher has died.

    Without its launcher a rank is neither stopped nor restarted, and it keeps its run folder locked. A process
    without a launcher is left alone: under ``nohup`` or ``setsid`` it outlives its parent on purpose. Nothing is
    saved: the next start ignores incomplete checkpoints, and resume is exact.

    Args:
        parent: ID of the parent process, read when this process started.
        leaving: whether this process is about to save and exit by itself, which it may finish.
    """
    launcher = launcher_of(parent)
    if launcher is None:
        return

    def end() -> None:
        if os.environ.get("LOCAL_RANK") == "0":
            with suppress(OSError):
                kept = "the last checkpoint is kept, and the same command resumes"
                os.write(2, f"error: torchrun has died, so its ranks end; {kept}\n".encode())
        os._exit(1)

    def watch() -> None:
        while os.getppid() == launcher or leaving():
            time.sleep(_PARENT_SECONDS)
        end()

    if _store_is_refused():
        end()
    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _store_is_refused() -> bool:
    """Whether torchrun died before ``parent`` was read: its store is then closed if it was on this host."""
    environment = os.environ
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or environment.get("GROUP_RANK") != "0":
        return False
    try:
        address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        socket.create_connection(address, timeout=10).close()
    except ConnectionRefusedError:
        return True
    except (OSError, KeyError, ValueError):  # reported when the ranks meet
        return False
    return False
