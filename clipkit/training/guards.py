"""Protect a run from values that are not finite, from gradient spikes, and from faulty memory and processors.

Once the loss or the gradient is not finite, no further update is made. An update is also not made if the gradient
is a spike: a single update with a gradient far above the usual norm can undo much training. The usual norm is a
moving average, to which a spike contributes the largest norm that is not a spike: one spike changes little, and
norms that rise permanently, as when layers are unfrozen, soon become usual. It is part of ``LoopState``, so a
resumed run makes the same decisions.

All ranks decide alike without a message: the loss and the norm of the gradient are those of the global batch. A GPU
decides in its queue, and the host, which is some steps ahead, reads decisions when they have been made. What a rank
knows before the forward pass (bad samples, requests to stop, the clock) is summed over ranks in the meantime.

RUN/not_finite.jsonl      samples of a batch whose loss or gradient is not finite; of rank 3: not_finite-3.jsonl
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clipkit.batch import Batch
from clipkit.config import Config
from clipkit.distributed import Gathering, copy_to_host, gather_objects, rank, world_size
from clipkit.errors import ClipkitError, ConfigError, DataError
from clipkit.files.writing import write_lines
from clipkit.model.clip import CLIP
from clipkit.model.towers import widest_dtype
from clipkit.training.metrics import name_ranks
from clipkit.training.parallel import is_sharded, local_part, ranks_of_replica
from clipkit.training.step import Features, TrainingStep

LAG = {"cuda": 2}  # steps of which the host does not read the outcome yet, by type of device; 0 on others

_MEMORY = 0.98  # of the average: about fifty steps
_FIRST_UPDATES = 20  # without skipping
_SHOWN_ROWS = 10
_ADVICE = "for a new run try a lower optim.lr, a longer optim.warmup, optim.skip_above or precision=fp32"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a step; equal on all ranks except ``ids``."""

    # sums over ranks of the counts in the message of the step
    totals: Mapping[str, int]
    loss: float
    norm: float  # before clipping
    is_finite: bool  # whether loss and norm are finite, and those of all steps before
    is_spike: bool  # whether the update was skipped because the gradient is a spike
    usual_norm: float  # after this step
    ids: Tensor  # (B,) int64, numbers of the rank's samples


class Decisions:
    """Decides about updates on the device, and returns the results of steps when they are known.

    Attributes:
        updates: floating-point scalar, the number of updates made.

    Args:
        usual_norm: usual norm of gradients before the first step.
        updates: number of updates before the first step.
        device: the model's device.
        factor: the multiple of the usual norm above which a gradient is a spike; 0 skips nothing.
    """

    def __init__(self, usual_norm: float, updates: int, *, device: torch.device, factor: float) -> None:
        self._lag = LAG.get(device.type, 0)
        self._factor = factor
        dtype = widest_dtype(device)
        self._usual_norm = torch.tensor(usual_norm, dtype=dtype, device=device)
        self._failed = torch.tensor(False, device=device)
        self.updates = torch.tensor(updates, dtype=dtype, device=device)
        self._values = torch.empty(0)
        # totals, values and samples of the steps whose outcome was not returned yet
        self._pending: deque[tuple[Callable[[], dict[str, int]], Callable[[], Tensor], Tensor]] = deque()

    @torch.no_grad()
    def skip_update(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return whether the update of the next step is not made: a bool scalar on the device.

        ``loss`` is the loss of the global batch, and ``norm`` the norm of its gradient before clipping.
        """
        loss = loss.detach().to(self._usual_norm.dtype)
        norm = norm.float().to(self._usual_norm.dtype)
        self._failed = self._failed | ~(loss.isfinite() & norm.isfinite())
        highest = self._factor * self._usual_norm
        spike = (self.updates >= _FIRST_UPDATES) & (norm > highest)
        if not self._factor:
            spike = torch.zeros_like(spike)
        memory = (self.updates / (self.updates + 1)).clamp(max=_MEMORY)
        self._usual_norm = memory * self._usual_norm + (1 - memory) * torch.where(spike, highest, norm)
        skip = self._failed | spike
        self.updates = self.updates + ~skip
        self._values = torch.stack([loss, norm, self._usual_norm, self._failed, spike])
        return skip

    def add(self, totals: Callable[[], dict[str, int]], ids: Tensor) -> None:
        """Add the step that was decided about last, with the result of ``start_totals`` and this rank's samples."""
        self._pending.append((totals, copy_to_host(self._values), ids))

    def next_outcome(self, *, wait: bool) -> Outcome | None:
        """Return the outcome of the first step that was not returned yet, or None.

        With ``wait``, outcomes of the last steps are returned too, for which the host waits.
        """
        if not self._pending or (len(self._pending) <= self._lag and not wait):
            return None
        totals, values, ids = self._pending.popleft()
        loss, norm, usual_norm, failed, spike = values().tolist()
        return Outcome(
            totals=totals(),
            loss=loss,
            norm=norm,
            is_finite=not failed,
            is_spike=bool(spike),
            usual_norm=usual_norm,
            ids=ids,
        )

    def wait_for_messages(self) -> None:
        """Wait for the messages of all steps that were added: a process that exits before them aborts."""
        while self._pending:
            totals, _, _ = self._pending.popleft()
            totals()


# Values that are not finite


def diagnose_failed_step(
    config: Config,
    outcome: Outcome,
    fault: str,
    *,
    step: int,
    names: Callable[[Tensor], Sequence[tuple[str, str]]],
) -> ClipkitError:
    """Return the error of a step after ``step`` updates that cannot be made; all ranks call this.

    Either a rank has no batch, for the reason ``fault``, or the loss or the gradient is not finite. Then the
    samples are listed by shard and key, which ``names`` returns.
    """
    if outcome.totals["faults"]:
        cause = next(filter(None, gather_objects(fault)))
        if not step:
            return DataError(f"{cause}; no step was made")
        return DataError(f"{cause}; step {step} is saved; the same command resumes once this is fixed")
    run = Path(config.out)
    list_not_finite(run, names(outcome.ids), step=step, rank=rank())
    value = f"the gradient of step {step + 1} is {outcome.norm}"
    if not math.isfinite(outcome.loss):
        value = f"the loss of step {step + 1} is {outcome.loss}"
    # in as many parts as all ranks together, so that the batch fits into the memory of one process
    replay = f"--replay accumulate={config.accumulate * world_size()}"
    return ClipkitError(
        f"{value}; step {step} is saved, and {run}/not_finite*.jsonl lists the samples: the same command with "
        f"{replay}, in one process, repeats the step and reports where it starts; {_ADVICE}"
    )


def list_not_finite(run: Path, names: Sequence[tuple[str, str]], *, step: int, rank: int) -> None:
    """Write the shard and key of each sample of a rank's batch to a file."""
    path = run / "not_finite.jsonl"
    if rank:
        path = run / f"not_finite-{rank}.jsonl"
    write_lines(path, [{"step": step + 1, "shard": shard, "key": key} for shard, key in names])


def describe_bad_weights(run: Path, step: int, name: str, *, saved: int | None) -> str:
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
def find_first_not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor with a value that is not finite, or ""; all ranks call this.

    Takes one fused pass and one synchronization with the device. Only tensors with a norm that is not finite are
    checked by element, since squares of large finite values overflow. Tensors may be sharded.
    """
    parts: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = local_part(tensor)
        if part.is_floating_point() and part.numel():
            parts[name] = part
    bad_name = ""
    if parts:
        finite = torch.stack(torch._foreach_norm(list(parts.values()))).isfinite().tolist()
        for name, is_finite in zip(parts, finite, strict=True):
            if not is_finite and not parts[name].isfinite().all():
                bad_name = name
                break
    return next(filter(None, gather_objects(bad_name)), "")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of repeating a step."""

    where: str  # the first value that is not finite; "" if all are
    rows: Sequence[int]  # rows of the batch with features that are not finite
    loss: float


def replay(
    model: CLIP, compute: TrainingStep, batch: Batch, step: int, names: Sequence[tuple[str, str]]
) -> list[str]:
    """Repeat a step in its precision and in fp32 without changing weights, and report what is not finite.

    The model has the weights before the step, and its gradients are replaced. ``batch`` is the whole global batch,
    and ``names`` are shard and key of each row.
    """
    if world_size() > 1:
        raise ConfigError(
            "--replay computes the whole batch in one process: start it with python, not torchrun"
        )
    lines = []
    for bf16 in dict.fromkeys((compute.bf16, False)):
        gradients = partial(replace(compute, bf16=bf16).gradients, model, batch, step)
        finding = find_not_finite(model, gradients, has_captions=not compute.objective.texts_are_classes)
        result = f"all is finite, the loss is {finding.loss:.4f}"
        if finding.where:
            result = f"{finding.where} is not finite"
        precision = "bf16" if bf16 else "fp32"
        lines.append(f"step {step + 1} in {precision}: {result}")
        for row in finding.rows[:_SHOWN_ROWS]:
            shard, key = names[row]
            lines.append(f"  its features are not finite: {key} in {shard}")
    return lines


def find_not_finite(
    model: nn.Module, compute: Callable[[], Features], *, has_captions: bool = True
) -> Finding:
    """Compute a step's loss and gradients again, and find the first value that is not finite.

    Args:
        model: the model, with the weights before the step.
        compute: computes the gradients of a batch of B images.
        has_captions: whether the texts are (MB, D) features of captions, M for each image, not of classes.
    """
    origins: list[str] = []
    if weight := find_first_not_finite(dict(model.named_parameters())):
        origins.append(f"the weight {weight}")

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not output.isfinite().all():
            origins.append(f"the output of {name or 'the model'}")

    for parameter in model.parameters():
        parameter.grad = None
    hooks = [module.register_forward_hook(partial(look, name)) for name, module in model.named_modules()]
    try:
        features = compute()
    finally:
        for hook in hooks:
            hook.remove()
    if not features.loss.isfinite():
        origins.append("the loss")
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if gradient := find_first_not_finite(gradients):
        origins.append(f"the gradient of {gradient}")
    finite = features.images.isfinite().all(dim=1)  # (B,)
    if has_captions:
        finite &= features.texts.isfinite().all(dim=1).view(-1, len(finite)).all(dim=0)
    rows = (~finite).nonzero().flatten().tolist()
    return Finding(where=next(iter(origins), ""), rows=rows, loss=float(features.loss))


# Weights that differ between ranks. Ranks exchange checksums in the background and read them some steps later, so
# no step waits for them.

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_READ_AFTER = 2  # steps, by which the computation of a step is over
_SHOWN_RANKS = 4


@torch.no_grad()
def sum_bits(model: nn.Module) -> Tensor:
    """Return (2,) int64 on the device: the sum of the bits of weights that each rank has whole, and of its shards.

    A single flipped bit always changes the sum. Takes one reading of the weights.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=next(model.parameters()).device)
    for parameter in model.parameters():
        part = local_part(parameter)
        bits = part.contiguous().view(_INTEGERS[part.element_size()])
        sums[int(is_sharded(parameter))] += bits.sum(dtype=torch.int64)
    return sums


def find_odd_ranks(sums: Sequence[Sequence[int]], shards: int) -> list[int]:
    """Return the ranks whose ``sum_bits`` differ from those of most ranks that should have the same weights.

    The model is divided over ``shards`` consecutive ranks: ranks with equal remainders have the same shard.
    """
    odd: set[int] = set()
    for column, step in ((0, 1), (1, shards)):
        for first in range(step):
            replicas = {i: sums[i][column] for i in range(first, len(sums), step)}
            counts = Counter(replicas.values()).most_common(2)
            usual = counts[0][0]
            # of two ranks, nobody knows which one is right
            is_tie = len(counts) == 2 and counts[0][1] == counts[1][1]
            odd |= {i for i, value in replicas.items() if is_tie or value != usual}
    return sorted(odd)


class WeightComparison:
    """Compares the weights of all ranks every ``every`` steps; a difference means a faulty memory or processor."""

    def __init__(self, model: nn.Module, *, every: int) -> None:
        self._model = model
        self._every = every if world_size() > 1 else 0
        self._shards = len(ranks_of_replica(model.parameters()) or [0])
        self._pending: tuple[int, Gathering] | None = None

    def finish_step(self, step: int, *, now: bool) -> None:
        """Compare the weights after a step if it is due; all ranks call this after each update.

        With ``now``, wait for the result, as before the weights are saved; otherwise a later call reads it.
        """
        if not self._every:
            return
        if self._pending is not None and step >= self._pending[0] + _READ_AFTER:
            self._read()
        if now or step % self._every == 0:
            self._read()
            self._pending = step, Gathering(sum_bits(self._model))
        if now:
            self._read()

    def _read(self) -> None:
        if self._pending is None:
            return
        step, gathering = self._pending
        self._pending = None
        odd = find_odd_ranks(gathering.read().tolist(), self._shards)
        if not odd:
            return
        names = name_ranks()
        differing = [names[i] for i in odd[:_SHOWN_RANKS]]
        if len(odd) > _SHOWN_RANKS:
            differing.append(f"{len(odd) - _SHOWN_RANKS} more")
        others = "each other"
        if len(odd) < len(names):
            others = "those of the other ranks"
        raise ClipkitError(
            f"after step {step} the weights of {' and '.join(differing)} differ from {others}: memory or a "
            "processor there is faulty; nothing since the last checkpoint, if there is one, is saved: the same "
            "command on other machines resumes from there"
        )
