"""Scores models on many datasets and tasks: everything is encoded once, and lines are appended as they come."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from clipkit import CLIP
from clipkit.architectures import ClassTable, VisionTower
from clipkit.encode import model_hash
from clipkit.errors import ClipkitError, ConfigError, DataError
from clipkit.flops import counted_flops, image_flops
from clipkit.image_traits import TraitCounts
from eval.dataset import EvalDataset, NoSplit
from eval.details_file import write_details
from eval.encode import Encoder
from eval.ranks import ONE_RANK, Ranks
from eval.results import Score, append_results, provenance, read_results, time_now
from eval.subject import Subject
from eval.targets import Target
from eval.tasks import KNOWN_TASKS, Options, Outcome, check_tasks

__all__ = ["Scored", "run_model"]

_DIGITS = 16


@dataclass(kw_only=True)
class Scored:
    """What came of scoring a model.

    Attributes:
        scores: new ones.
        found: how many scores the results file had already.
        trouble: why a dataset, or a task on one, has no scores.
        counts: how many images are transparent or rotated by EXIF, by dataset and split.
    """

    scores: list[Score] = field(default_factory=list)
    found: int = 0
    trouble: list[ClipkitError] = field(default_factory=list)
    counts: dict[tuple[str, str], TraitCounts] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Work:
    """One task on one dataset, with the facts that go into its lines."""

    subject: Subject
    task: str
    facts: Mapping[str, Any]

    @property
    def key(self) -> tuple[str, ...]:
        """What tells its lines from those of other work."""
        dataset = self.subject.dataset
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
    works = _planned(encoder, targets, tasks, options, origin, scored)
    if skip_existing:
        works = _not_done(works, out, ranks, scored)
    _encode_prompts(encoder, works)
    before: Subject | None = None
    while works:  # a dataset's features go with the last of its tasks
        work = works.pop(0)
        if started is not None and work.subject is not before:
            encoder.progress, before = started(work.subject.dataset), work.subject
        begun = time.monotonic()
        try:
            outcome = KNOWN_TASKS[work.task].run(work.subject, options)
        except (ConfigError, DataError) as error:
            scored.trouble.append(error)
            continue
        scored.scores += outcome.scores
        scored.counts.update(encoder.counts)
        if ranks.rank == 0:
            _write(out, work, outcome, step=step, seconds=time.monotonic() - begun)


def _planned(
    encoder: Encoder,
    targets: Sequence[Target],
    tasks: Sequence[str],
    options: Options,
    origin: Mapping[str, Any],
    scored: Scored,
) -> list[_Work]:
    """Each task on each dataset that has what it needs; the others are told in ``scored``."""
    model, works = encoder.model, []
    text = model.architecture.text
    classes = text.names if isinstance(text, ClassTable) else ()
    for target in targets:
        subject = Subject(encoder, target.dataset, metrics=target.metrics, open_split=target.open_split)
        for task in dict.fromkeys(tasks or _main_task(target)):
            try:
                check_tasks(subject.dataset, [task], classes=classes)
                facts = {**provenance(model, subject.dataset, weights=""), **origin}
                facts |= {"options": options.text_of(task), "inputs": _inputs(subject, task, options)}
            except (ConfigError, DataError) as error:
                scored.trouble.append(error)
            else:
                works.append(_Work(subject=subject, task=task, facts=facts))
    return works


def _inputs(subject: Subject, task: str, options: Options) -> str:
    """A digest of all that a task's scores depend on besides the model: pictures, labels, texts, metrics, options.

    Raises:
        Lacks: the task learns from a split that the dataset does not have.
        DataError: that split is broken.
    """
    known = [subject.metrics, subject.dataset.superclasses, options.text_of(task)]
    digest = hashlib.sha256(json.dumps(known).encode())
    splits = [subject.dataset]
    if KNOWN_TASKS[task].learns:
        splits += [one for one in (subject.split("train"), subject.split("val")) if one is not None]
        if len(splits) == 1 or splits[1].split != "train":
            raise NoSplit(
                f"dataset {subject.dataset.name} has no train split, which {task} learns from: put its pictures "
                "into FOLDER/train/CLASS and FOLDER/test/CLASS, or pack a train split beside its test shards"
            )
    for dataset in splits:
        digest.update(json.dumps([dataset.split, dataset.stamp]).encode())
        for values in (dataset.labels, dataset.items, *dataset.metadata.values()):
            digest.update(b"" if values is None else values.numpy().tobytes())
    for texts in KNOWN_TASKS[task].texts(subject.dataset):
        digest.update(json.dumps(texts).encode())
    return digest.hexdigest()[:_DIGITS]


def _main_task(target: Target) -> tuple[str, ...]:
    return target.card.tasks[:1] if target.card is not None else target.dataset.tasks


def _write(out: Path, work: _Work, outcome: Outcome, *, step: int | None, seconds: float) -> None:
    facts = {**work.facts, "lines": len(outcome.scores), "time": time_now()}
    if KNOWN_TASKS[work.task].learns:  # scored images that are also in the split that it learned from
        facts |= {"train_overlap": work.subject.overlap["train"]}
    append_results(out, outcome.scores, step=step, provenance=facts, seconds=round(seconds, 3))
    for details in outcome.details:
        write_details(out, details, weights=str(work.facts["weights"]))


def _encode_prompts(encoder: Encoder, works: Sequence[_Work]) -> None:
    """The texts of all tasks in one pass, sorted by length, each once."""
    texts: dict[str, None] = {}
    for work in works:
        for own in KNOWN_TASKS[work.task].texts(work.subject.dataset):
            texts.update(dict.fromkeys(own))
    encoder.texts(list(texts), whose="the prompts")


def _not_done(works: Sequence[_Work], out: Path, ranks: Ranks, scored: Scored) -> list[_Work]:
    """The work whose lines are not all in the results file, as rank 0 finds it: others may see another file."""
    counts = torch.zeros(len(works))
    if ranks.rank == 0:
        there: dict[tuple[str, ...], dict[tuple[str, str], Any]] = {}
        for line in read_results(out):
            of = there.setdefault(_key(line), {})
            of[str(line.get("setting")), str(line.get("metric"))] = line.get("lines")
        whole = {key: len(lines) for key, lines in there.items() if len(lines) in lines.values()}
        counts = torch.tensor([float(whole.get(work.key, 0)) for work in works])
    found = [int(count) for count in ranks.gather(counts).tolist()]
    scored.found += sum(found)
    return [work for work, count in zip(works, found, strict=True) if not count]


def _key(line: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a line of results."""
    return tuple(
        str(line.get(name)) for name in ("dataset", "split", "task", "model_hash", "dtype", "inputs")
    )


def _gflops(model: CLIP) -> float | None:
    """Of one picture through the image tower, in 10⁹ FLOPs; None where that cannot be counted."""
    if isinstance(model.architecture.vision, VisionTower):
        flops = image_flops(model.architecture)
    elif (counted := counted_flops(model)) is not None:
        flops = counted["image"]
    else:
        return None
    return float(f"{flops.forward / 1e9:.4g}")
