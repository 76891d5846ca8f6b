"""Scores models on many datasets and tasks: everything is encoded once, and lines are appended as they come."""

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from clipkit import CLIP
from clipkit.errors import ClipkitError, ConfigError, DataError
from clipkit.files.traits import TraitCounts
from clipkit.formats.checkpoint import is_complete, model_hash
from clipkit.model.flops import counted_flops, image_flops
from clipkit.model.tokenizer import ClassTokenizer
from eval.datasets.dataset import EvalDataset, Lacks, NoSplit, by_class_names
from eval.datasets.targets import Target
from eval.features.encoder import ONE_RANK, Encoder, Ranks
from eval.readers import open_dataset
from eval.results.details import take_snapshot
from eval.results.records import write_details, write_snapshot
from eval.results.scores import Score, append_results, provenance, read_results, time_now, weights_id
from eval.tasks import TASKS, Options, task_of
from eval.tasks.subject import Subject

__all__ = ["Scored", "Scorer", "check_tasks", "evaluate", "run_model"]


def check_tasks(
    dataset: EvalDataset, tasks: Sequence[str] | None = None, *, classes: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the tasks, or those of the dataset, after checking that it has what they need.

    Args:
        dataset: to score on.
        tasks: None for the dataset's own.
        classes: all texts that the model can read, if it has a classification head; empty for any text.

    Raises:
        DataError: the dataset lacks labels, class names or captions for a task, or the model cannot read its texts.
        ConfigError: a task is unknown.
    """
    chosen = dataset.tasks if tasks is None else tuple(tasks)
    for name in chosen:
        task = task_of(name)
        task.check(dataset)
        for texts in task.texts_of(by_class_names(dataset)) if classes else ():
            try:
                ClassTokenizer(names=tuple(classes))(texts)
            except DataError as error:
                advice = (
                    "fine-tune the model that this one was initialized from"
                    if name == "fine-tune"
                    else "linear-probe, few-shot and knn need no names"
                )
                raise Lacks(
                    f"dataset {dataset.name} cannot be scored by {name}: {error}; {advice}"
                ) from error
    return chosen


# --------------------------------------------------------------------------------------------------------------
# ``eval.evaluate``: one model on one dataset, from Python.


def evaluate(
    model: CLIP | Subject,
    data: str | Path | EvalDataset | None = None,
    *,
    tasks: Sequence[str] | None = None,
    batch_size: int = 256,
    ranks: Ranks = ONE_RANK,
    out: str | Path | None = None,
    step: int | None = None,
    weights: str = "",
    origin: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Score]:
    """Score a model on a dataset; the images are encoded once for all tasks.

    With several ranks all of them call this, share the work, and return the same scores. It draws no random
    numbers and leaves the model in the mode it had, so a training may call it between two steps.

    Args:
        model: to be scored; or a subject, which is a model on a dataset, what it has encoded included. Under
            autocast the towers run in its type, similarities never do.
        data: a dataset, or what ``open_dataset`` takes; None for a subject's own.
        tasks: of ``TASKS``; None for those that the dataset itself names.
        batch_size: images that the model takes at a time.
        ranks: who shares the work.
        out: a results file to which rank 0 appends a line a score.
        step: of the training, for those lines.
        weights: what the weights are, for those lines; else the model's hash tells.
        origin: further facts for them, such as the name of the model.
        progress: called with the number of images after each batch.

    Warns:
        UserWarning: images are transparent or have an EXIF orientation, and the model's preprocessing has neither a
            background nor ``upright`` (see ``clipkit.load``). Not of a subject, whose encoder has the counts.

    Raises:
        DataError: the dataset is missing or broken, or has not what a task needs.
        ConfigError: a task is unknown.
        TypeError: the model is none, or there is no dataset.
    """
    reported = isinstance(model, Subject)  # by whoever made it
    if not isinstance(model, Subject):
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a CLIP, as clipkit.load gives it, not {type(model).__name__}")
        if data is None:
            raise TypeError("a model needs data to be scored on: a dataset, its name or its folder")
        encoder = Encoder(model, ranks=ranks, batch_size=batch_size, progress=progress)
        dataset = data if isinstance(data, EvalDataset) else open_dataset(data)
        others = None if isinstance(data, EvalDataset) else lambda split: open_dataset(data, split=split)
        model = Subject(encoder, dataset, open_split=others)
    subject, facts = model, dict[str, Any]()
    tasks = check_tasks(subject.dataset, tasks)
    if out is not None and subject.encoder.ranks.rank == 0:
        named = {} if weights else {"model": "in memory", "model_hash": model_hash(subject.encoder.model)}
        facts = {
            **provenance(subject.encoder.model, subject.dataset, weights=weights),
            **named,
            **(origin or {}),
        }
    works = [_Work(subject=subject, task=task, facts=facts) for task in tasks]
    scored = Scored()
    _run_tasks(
        works, Options(details=False), out=None if out is None else Path(out), step=step, scored=scored
    )
    for (name, split), counts in () if reported else subject.encoder.counts.items():
        for line in counts.lines(
            subject.encoder.model.preprocess.decoding,
            background="background='white' in clipkit.load",
            upright="upright=True in clipkit.load",
        ).values():
            warnings.warn(f"dataset {name}, split {split}: {line}", stacklevel=2)
    return scored.scores


# --------------------------------------------------------------------------------------------------------------

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
        batch_size: images that the model takes at a time.
        origin: facts for the lines: what the user calls the model, which weights they are.
        step: of the training, for the lines.
        started: told of each dataset before its images are encoded; gives what is told of each batch.
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
    texts: dict[str, None] = {}  # of all tasks, each once, to be encoded in one pass sorted by length
    for work in works:
        for own in TASKS[work.task].texts_of(work.subject.dataset):
            texts.update(dict.fromkeys(own))
    encoder.texts(list(texts), whose="the prompts")
    _run_tasks(works, options, out=out, step=step, scored=scored, started=started, go_on=True)


def _run_tasks(
    works: list[_Work],
    options: Options,
    *,
    out: Path | None,
    step: int | None,
    scored: Scored,
    started: Callable[[EvalDataset], Callable[[int], None]] | None = None,
    go_on: bool = False,
) -> None:
    """The evaluation loop: run each task, and append its lines on rank 0 as soon as they are there.

    Args:
        works: consumed, so that the features of a dataset are released after the last of its tasks.
        options: of the tasks.
        out: a results file; None writes nothing.
        step: of the training, for the lines.
        scored: receives scores, errors and counts.
        started: called with each dataset; returns its progress callback.
        go_on: whether an error costs only its own task.
    """
    before: Subject | None = None
    while works:
        work = works.pop(0)
        encoder = work.subject.encoder
        if started is not None and work.subject is not before:
            encoder.progress, before = started(work.subject.dataset), work.subject
        begun = time.monotonic()
        try:
            outcome = TASKS[work.task].run(work.subject, options)
        except (ConfigError, DataError) as error:
            if not go_on:
                raise
            scored.trouble.append(error)
            continue
        scored.scores += outcome.scores
        scored.counts.update(encoder.counts)
        if out is None or encoder.ranks.rank > 0:
            continue
        facts = {**work.facts, "time": time_now()}
        if "inputs" in work.facts:  # by which --skip-existing finds complete results
            facts["lines"] = len(outcome.scores)
            if TASKS[work.task].learns:  # scored images that are also in the split it learned from
                facts["train_overlap"] = work.subject.overlap["train"]
        seconds = round(time.monotonic() - begun, 3)
        append_results(out, outcome.scores, step=step, provenance=facts, seconds=seconds)
        for details in outcome.details:
            write_details(out, details, weights=str(work.facts["weights"]))


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
    classes = model.architecture.text.classes
    for target in targets:
        subject = Subject(encoder, target.dataset, metrics=target.metrics, open_split=target.open_split)
        main = target.dataset.tasks if target.card is None else target.card.tasks[:1]
        for task in dict.fromkeys(tasks or main):
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
    """A digest of all that a task's scores depend on besides the model: images, labels, texts, metrics, options.

    Raises:
        Lacks: the task learns from a split that the dataset does not have.
        DataError: that split is broken.
    """
    known = [subject.metrics, subject.dataset.superclasses, options.text_of(task)]
    digest = hashlib.sha256(json.dumps(known).encode())
    splits = [subject.dataset]
    if TASKS[task].learns:
        splits += [one for one in (subject.split("train"), subject.split("val")) if one is not None]
        if len(splits) == 1 or splits[1].split != "train":
            raise NoSplit(
                f"dataset {subject.dataset.name} has no train split, which {task} learns from: put its images "
                "into FOLDER/train/CLASS and FOLDER/test/CLASS, or pack a train split beside its test shards"
            )
    for dataset in splits:
        digest.update(json.dumps([dataset.split, dataset.stamp]).encode())
        for values in (dataset.labels, dataset.items, *dataset.metadata.values()):
            digest.update(b"" if values is None else values.numpy().tobytes())
    for texts in TASKS[task].texts_of(subject.dataset):
        digest.update(json.dumps(texts).encode())
    return digest.hexdigest()[:_DIGITS]


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
    """Of one image through the image tower, in 10⁹ FLOPs; None where that cannot be counted."""
    counted = counted_flops(model)
    if counted is None:
        return None
    flops = counted.get("image") or image_flops(model.architecture)
    return float(f"{flops.forward / 1e9:.4g}")


# --------------------------------------------------------------------------------------------------------------
# Scores one model again and again while it changes, and keeps what a run's page shows of it.
#
# RUN/results.jsonl             a line a score, see eval/results/scores.py
# RUN/snapshots/                images and guesses of each moment, see eval/results/records.py

_TOLD = ("acc1", "acc5", "image_to_text_R@1", "text_to_image_R@1")


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores a model on some datasets, by all ranks together.

    Attributes:
        model: as it is at each call.
        datasets: what it is scored on.
        run: the folder that rank 0 writes to.
        ranks: who shares the work.
        batch_size: images encoded at a time on each rank.
        bf16: whether the towers run in bfloat16.
        say: is given a line for each of the main scores.
        record: is given the step and all scores of a dataset by ``dataset/task/metric``; called on rank 0 only.
        note: is given, for each dataset and split, how many of its images are transparent or rotated by EXIF.
        as_scored: puts the model into the state that is scored, and back.
    """

    model: CLIP
    datasets: Sequence[EvalDataset]
    run: Path
    ranks: Ranks
    batch_size: int
    bf16: bool
    say: Callable[[str], None]
    record: Callable[[int, Mapping[str, float]], None]
    note: Callable[[str, TraitCounts], None] = lambda whose, counts: None
    as_scored: Callable[[], AbstractContextManager[None]] = nullcontext

    def score_if_owed(self, step: int) -> None:
        """Score this step unless rank 0 finds it in the results already."""
        owed = 0.0
        if self.ranks.rank == 0:
            lines = read_results(self._results)
            done = {str(line.get("dataset")) for line in lines if line.get("step") == step}
            owed = float(any(dataset.name not in done for dataset in self.datasets))
        if self.ranks.gather(torch.tensor(owed)).item():
            self.score(step)

    def score(self, step: int) -> None:
        """Append a line a score to the results, and take a snapshot."""
        weights = self._weights(step)
        with self.as_scored():
            for dataset in self.datasets:
                self._score(dataset, step, weights)

    def _weights(self, step: int) -> str:
        """What other scores of these weights call them: the hash of their file, where it is written already.

        At the end of a training it is; before, the run and the step tell which they are.
        """
        folder = self.run / "checkpoints" / f"step_{step:08d}"
        if self.ranks.rank == 0 and is_complete(folder):
            return weights_id(str(folder))[0]
        return f"{self.run.name} at step {step}"

    @property
    def _results(self) -> Path:
        return self.run / "results.jsonl"

    def _score(self, dataset: EvalDataset, step: int, weights: str) -> None:
        with torch.autocast(self.model.logit_scale.device.type, torch.bfloat16, enabled=self.bf16):
            subject = Subject(Encoder(self.model, ranks=self.ranks, batch_size=self.batch_size), dataset)
            scores = evaluate(
                subject, out=self._results, step=step, weights=weights, origin={"model": str(self.run)}
            )
            # every rank takes it, since they share the texts; one writes it
            snapshot = take_snapshot(subject, step=step)
        for (name, split), counts in subject.encoder.counts.items():
            self.note(f"dataset {name}, split {split}", counts)
        if self.ranks.rank == 0:
            write_snapshot(self.run, snapshot)
            self._tell(scores, step)

    def _tell(self, scores: Sequence[Score], step: int) -> None:
        for score in scores:
            if score.metric in _TOLD:
                self.say(
                    f"step {step} {score.dataset} {score.task} {score.metric} {score.value:.1%} "
                    f"[{score.low or 0:.1%}, {score.high or 1:.1%}] chance {score.chance or 0:.1%}"
                )
        self.record(step, {f"{score.dataset}/{score.task}/{score.metric}": score.value for score in scores})
