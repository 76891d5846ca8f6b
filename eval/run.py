"""Scores models on many datasets and tasks: everything is encoded once, and lines are appended as they come."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from clipkit import CLIP
from clipkit.architectures import VisionTower
from clipkit.encode import model_hash
from clipkit.errors import DataError
from clipkit.flops import counted_flops, image_flops
from eval.dataset import EvalDataset
from eval.details_file import write_details
from eval.encode import Encoder
from eval.ranks import ONE_RANK, Ranks
from eval.results import Score, append_results, provenance, read_results, time_now
from eval.subject import Subject
from eval.targets import Target
from eval.tasks import KNOWN_TASKS, Options, Outcome, check_tasks

__all__ = ["Scored", "run_model"]


@dataclass(kw_only=True)
class Scored:
    """What came of scoring a model.

    Attributes:
        scores: new ones.
        found: how many scores the results file had already.
        trouble: why a dataset, or a task on one, has no scores.
    """

    scores: list[Score] = field(default_factory=list)
    found: int = 0
    trouble: list[DataError] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Work:
    """One task on one dataset, with the facts that go into its lines."""

    target: Target
    task: str
    facts: Mapping[str, Any]

    @property
    def key(self) -> tuple[str, ...]:
        """What a score depends on: lines with the same are of the same."""
        dataset = self.target.dataset
        return _key({"dataset": dataset.name, "split": dataset.split, "task": self.task, **self.facts})


def run_model(
    model: CLIP,
    targets: Sequence[Target],
    *,
    out: Path,
    tasks: Sequence[str] = (),
    options: Options | None = None,
    skip_existing: bool = False,
    store: Path | None = None,
    ranks: Ranks = ONE_RANK,
    batch_size: int = 256,
    origin: Mapping[str, Any] | None = None,
    step: int | None = None,
    started: Callable[[EvalDataset], Callable[[int], None]] | None = None,
    scored: Scored,
) -> None:
    """Score one model on datasets, one after the other; each task's lines are appended as soon as they are there.

    A dataset that turns out to be broken costs its own scores, not those of the others.

    Args:
        model: to be scored, perhaps under autocast.
        targets: the datasets.
        out: a results file, to which rank 0 appends.
        tasks: on each dataset; none for its main one.
        options: of the tasks.
        skip_existing: whether scores that the file has of the same weights, data, prompts and options are left as
            they are.
        store: where features are kept; None keeps them in memory while this runs.
        ranks: who shares the work.
        batch_size: pictures that the model takes at a time.
        origin: facts for the lines: what the user calls the model, which weights they are.
        step: of the training, for the lines.
        started: told of each dataset before its pictures are encoded; gives what is told of each batch.
        scored: what came of it is added here, so that it is there too where something ends the work early.

    Raises:
        DataError: the results cannot be written, or the model gives numbers that are not finite for its prompts.
    """
    options = options or Options()
    encoder = Encoder(model, store=store, ranks=ranks, batch_size=batch_size)
    origin = {**(origin or {}), "model_hash": model_hash(model), "gflops": _gflops(model)}
    works: list[_Work] = []
    for target in targets:
        try:
            for task in check_tasks(target.dataset, tasks or _main_task(target)):
                own = provenance(model, target.dataset, weights="")
                facts = {**own, **origin, "options": options.text_of(task)}
                works.append(_Work(target=target, task=task, facts=facts))
        except DataError as error:
            scored.trouble.append(error)
    if skip_existing:
        works = _not_done(works, out, ranks, scored)
    _encode_prompts(encoder, works)
    for target, own_works in _by_target(works):
        encoder.progress = started(target.dataset) if started is not None else None
        subject = Subject(encoder, target.dataset, metrics=target.metrics, open_split=target.open_split)
        for work in own_works:
            begun = time.monotonic()
            try:
                outcome = KNOWN_TASKS[work.task].run(subject, options)
            except DataError as error:
                scored.trouble.append(error)
                continue
            scored.scores += outcome.scores
            if ranks.rank == 0:
                _write(out, work, outcome, step=step, seconds=time.monotonic() - begun)


def _main_task(target: Target) -> tuple[str, ...]:
    return target.card.tasks[:1] if target.card is not None else target.dataset.tasks


def _write(out: Path, work: _Work, outcome: Outcome, *, step: int | None, seconds: float) -> None:
    facts = {**work.facts, "time": time_now()}
    append_results(out, outcome.scores, step=step, provenance=facts, seconds=round(seconds, 3))
    for details in outcome.details:
        write_details(out, details, weights=str(work.facts["weights"]))


def _by_target(works: Sequence[_Work]) -> Iterator[tuple[Target, list[_Work]]]:
    for target in dict.fromkeys(work.target for work in works):
        yield target, [work for work in works if work.target is target]


def _encode_prompts(encoder: Encoder, works: Sequence[_Work]) -> None:
    """The texts of all tasks in one pass, sorted by length, each once."""
    texts: dict[str, None] = {}
    for work in works:
        texts.update(dict.fromkeys(KNOWN_TASKS[work.task].texts(work.target.dataset)))
    encoder.texts(list(texts), whose="the prompts")


def _not_done(works: Sequence[_Work], out: Path, ranks: Ranks, scored: Scored) -> list[_Work]:
    """The work without scores in the results file, as rank 0 finds it: other ranks may see another file."""
    counts = torch.zeros(len(works))
    if ranks.rank == 0:
        there: dict[tuple[str, ...], int] = {}
        for line in read_results(out):
            there[_key(line)] = there.get(_key(line), 0) + 1
        counts = torch.tensor([float(there.get(work.key, 0)) for work in works])
    found = [int(count) for count in ranks.gather(counts).tolist()]
    scored.found += sum(found)
    return [work for work, count in zip(works, found, strict=True) if not count]


def _key(line: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a line of results, what its value depends on."""
    task = str(line.get("task"))
    of = ["dataset", "split", "task", "model_hash", "dtype", "data_revision", "options"]
    if task in KNOWN_TASKS:
        of += KNOWN_TASKS[task].depends_on
    return tuple(str(line.get(name)) for name in of)


def _gflops(model: CLIP) -> float | None:
    """Of one picture through the image tower, in 10⁹ FLOPs; None where that cannot be counted."""
    if isinstance(model.architecture.vision, VisionTower):
        flops = image_flops(model.architecture)
    elif (counted := counted_flops(model)) is not None:
        flops = counted["image"]
    else:
        return None
    return float(f"{flops.forward / 1e9:.4g}")
