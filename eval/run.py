"""Score models on datasets: images are encoded once for all tasks, and results are written at once."""

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from clipkit import CLIP
from clipkit.errors import ClipkitError, ConfigError, DataError, Unavailable
from clipkit.formats import is_complete, model_hash
from clipkit.model import ClassTokenizer, image_gflops
from clipkit.samples import MissingSplit, TraitCounts
from data.corpora.builtin import BUILTIN
from eval.datasets.dataset import EvalDataset, prompt_with_bare_names
from eval.datasets.targets import Target, find_targets
from eval.features.encoder import ONE_RANK, Encoder, Ranks
from eval.results.details import take_snapshot
from eval.results.records import write_details, write_snapshot
from eval.results.scores import PREFIX, Score, append_results, provenance, read_results, time_now, weights_id
from eval.tasks import TASKS, Options, Task, get_task
from eval.tasks.subject import Outcome, Subject

_LABELED = "of the built-in datasets, emoji and cues have a train split with labels"


def check_tasks(
    dataset: EvalDataset, tasks: Sequence[str] | None = None, *, classes: Sequence[str] = ()
) -> tuple[str, ...]:
    """Check that a dataset has what tasks need, and return the tasks.

    Args:
        dataset: the dataset to score on.
        tasks: names of tasks; None for the dataset's own.
        classes: all texts that the model can read if it has a classification head; empty for any text.

    Raises:
        DataError: the dataset lacks labels, class names or captions, or the model cannot read its texts.
        ConfigError: a task is unknown.
    """
    chosen = dataset.tasks if tasks is None else tuple(tasks)
    for name in chosen:
        task = get_task(name)
        task.check(dataset)
        for texts in task.select_texts(prompt_with_bare_names(dataset), classes) if classes else ():
            try:
                ClassTokenizer(names=tuple(classes))(texts)
            except DataError as error:
                advice = "linear-probe, few-shot, knn and fine-tune need no names"
                raise Unavailable(
                    f"dataset {dataset.name} cannot be scored by {name}: {error}; {advice}"
                ) from error
    return chosen


@dataclass(kw_only=True)
class Scored:
    """The results of scoring a model.

    Attributes:
        scores: new scores.
        found: number of scores that the results file had already.
        trouble: why a dataset or task has no scores.
        counts: number of transparent and rotated images, by dataset and split.
    """

    scores: list[Score] = field(default_factory=list)
    found: int = 0
    trouble: list[ClipkitError] = field(default_factory=list)
    counts: dict[tuple[str, str], TraitCounts] = field(default_factory=dict)


def evaluate(
    model: CLIP | Subject,
    data: str | Path | EvalDataset | None = None,
    *,
    tasks: Sequence[str] | None = None,
    dims: Sequence[int] = (),
    batch_size: int = 256,
    ranks: Ranks = ONE_RANK,
    out: str | Path | None = None,
    step: int | None = None,
    weights: str = "",
    origin: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Score]:
    """Score a model on a dataset.

    All ranks call it, share the work, and return the same scores. It draws no random numbers and restores the
    model's mode, so a training may call it between steps.

    Args:
        model: a model, or a subject with its dataset and encoded features. Under autocast the towers run in its
            dtype, similarities in float32.
        data: a dataset; or the name or folder of one, scored with the class names, prompts and metrics that
            ``python -m eval`` uses; None for a subject's own.
        tasks: names in ``TASKS``; None for the dataset's own.
        dims: sizes of prefixes of the embedding that are scored too, see ``loss.dims``.
        batch_size: images encoded at a time.
        ranks: the ranks that share the work.
        out: a results file to which rank 0 appends one line per score.
        step: training step, for the results.
        weights: identity of the weights, for the results; by default the model's hash.
        origin: further provenance for the results, such as the model's name.
        progress: called with the number of images after each batch.

    Warns:
        UserWarning: images are transparent or have an EXIF orientation, and the model's preprocessing has neither a
            background nor ``upright`` (see ``clipkit.load``). Not for a subject, whose encoder has the counts.

    Raises:
        DataError: the dataset is missing or damaged, or lacks what a task needs.
        ConfigError: a task is unknown.
        TypeError: the model is not a model, or there is no dataset.
    """
    if isinstance(model, Subject):
        subject = model
    else:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a CLIP, as clipkit.load returns, not {type(model).__name__}")
        if data is None:
            raise TypeError("a model needs data: a dataset, its name or its folder")
        encoder = Encoder(model, ranks=ranks, batch_size=batch_size, progress=progress)
        if isinstance(data, EvalDataset):
            subject = Subject(encoder, data)
        else:
            (target,) = find_targets([str(data)])
            subject = Subject(encoder, target.dataset, metrics=target.metrics, open_split=target.open_split)
            tasks = target.main_tasks if tasks is None else tasks
    tasks, facts = check_tasks(subject.dataset, tasks), dict[str, Any]()
    encoder = subject.encoder
    if out is not None and encoder.ranks.rank == 0:
        facts = provenance(encoder.model, subject.dataset, weights=weights)
        if not weights:
            facts |= {"model": "in memory", "model_hash": model_hash(encoder.model)}
        facts |= origin or {}
    works = [_Work(subject=subject, task=task, facts=facts) for task in tasks]
    scored = Scored()
    path = None if out is None else Path(out)
    _run_tasks(works, Options(details=False, dims=tuple(dims)), out=path, step=step, scored=scored)
    for (name, split), counts in encoder.counts.items() if subject is not model else ():
        for line in counts.lines(
            encoder.model.preprocess.decoding,
            background="background='white' in clipkit.load",
            upright="upright=True in clipkit.load",
        ).values():
            warnings.warn(f"dataset {name}, split {split}: {line}", stacklevel=2)
    return scored.scores


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
    """Score one model on datasets, and append the results of each task as soon as they are computed.

    An error of a dataset or task is recorded in ``scored.trouble``; the others are scored.

    Args:
        model: the model to score, perhaps under autocast.
        targets: the datasets.
        out: a results file, to which rank 0 appends.
        tasks: tasks on each dataset; empty for its main one.
        options: options of the tasks.
        skip_existing: skip results of the same weights, data, prompts and options that are in the file.
        store: folder of encoded features; None keeps them in memory.
        ranks: the ranks that share the work.
        batch_size: images encoded at a time.
        origin: provenance for the results: name and identity of the weights.
        step: training step, for the results.
        started: called with each dataset before its images are encoded; returns a progress callback.
        scored: receives the results, so that they are available if the run ends early.

    Raises:
        DataError: the results cannot be written, or features of the prompts are not finite.
    """
    options = options or Options()
    encoder = Encoder(model, store=store, ranks=ranks, batch_size=batch_size)
    gflops = image_gflops(model)
    origin = {**(origin or {}), "model_hash": model_hash(model), "gflops": gflops}
    works: list[_Work] = []
    classes = model.architecture.text.classes
    for target in targets:
        subject = Subject(encoder, target.dataset, metrics=target.metrics, open_split=target.open_split)
        for task in dict.fromkeys(tasks or target.main_tasks):
            try:
                check_tasks(subject.dataset, [task], classes=classes)
                TASKS[task].check_model(model)
                facts = {**provenance(model, subject.dataset, weights=""), **origin}
                facts |= {
                    "options": options.describe_options(task),
                    "inputs": _inputs(subject, task, options),
                }
            except (ConfigError, DataError) as error:
                scored.trouble.append(error)
            else:
                works.append(_Work(subject=subject, task=task, facts=facts))
    if skip_existing:
        works = _not_done(works, out, ranks, scored)
    # the texts of all tasks in one pass, sorted by length
    texts = (texts for work in works for texts in _texts(work.task, work.subject.dataset, classes))
    encoder.texts(list(dict.fromkeys(text for own in texts for text in own)), description="the prompts")
    _run_tasks(works, options, out=out, step=step, scored=scored, started=started, continue_on_error=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Work:
    """One task on one dataset, and the provenance of its results."""

    subject: Subject
    task: str
    facts: Mapping[str, Any]


def _run_tasks(
    works: list[_Work],
    options: Options,
    *,
    out: Path | None,
    step: int | None,
    scored: Scored,
    started: Callable[[EvalDataset], Callable[[int], None]] | None = None,
    continue_on_error: bool = False,
) -> None:
    """The evaluation loop: run each task, and append its results on rank 0 as soon as they are computed.

    Args:
        works: consumed, so that the features of a dataset are released after the last of its tasks.
        options: options of the tasks.
        out: a results file; None writes nothing.
        step: training step, for the results.
        scored: receives scores, errors and counts.
        started: called with each dataset; returns its progress callback.
        continue_on_error: whether to continue with the other tasks after an error.
    """
    before: Subject | None = None
    while works:
        work = works.pop(0)
        encoder = work.subject.encoder
        if started is not None and work.subject is not before:
            encoder.progress, before = started(work.subject.dataset), work.subject
        begun = time.monotonic()
        try:
            outcomes = _run_task(work, options)
        except (ConfigError, DataError) as error:
            if not continue_on_error:
                raise
            scored.trouble.append(error)
            continue
        scored.scores += (scores := [score for _, outcome in outcomes for score in outcome.scores])
        scored.counts.update(encoder.counts)
        if out is None or encoder.ranks.rank > 0:
            continue
        facts = {**work.facts, "time": time_now()}
        if "inputs" in work.facts:  # by which --skip-existing finds complete results
            facts["lines"] = len(scores)
            if TASKS[work.task].learns:  # scored images that are also in the split it learned from
                facts["train_overlap"] = work.subject.overlap["train"]
        seconds = round(time.monotonic() - begun, 3)
        for own, outcome in outcomes:
            append_results(
                out, outcome.scores, step=step, provenance={**facts, **own, **outcome.facts}, seconds=seconds
            )
            for details in outcome.details:
                write_details(out, details, weights=str(work.facts["weights"]))


def _texts(task: str, dataset: EvalDataset, classes: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the texts that a task encodes, in all languages."""
    if not (dataset.languages and TASKS[task].scores_languages):
        yield from TASKS[task].select_texts(dataset, classes)
        return
    for language in dataset.languages:
        yield from TASKS[task].select_texts(dataset.select_language(language)[0])


_Outcomes = list[tuple[dict[str, Any], Outcome]]


def _run_task(work: _Work, options: Options) -> _Outcomes:
    """Run a task, also with prefixes of the embedding if there are any; return provenance and outcomes."""
    task = TASKS[work.task]
    outcomes = _in_languages(task, work.subject, options)
    for dim in options.dims if task.scores_prefixes else ():
        subject = work.subject.select_prefix(dim)
        for facts, outcome in _in_languages(task, subject, replace(options, details=False)):
            scores = [
                replace(one, setting=f"dim {dim}{', ' * bool(one.setting)}{one.setting}")
                for one in outcome.scores
            ]
            outcomes.append(({**facts, "dim": dim}, replace(outcome, scores=scores)))
    return outcomes


def _in_languages(task: Task, whole: Subject, options: Options) -> _Outcomes:
    """Run a task, in each language if the dataset has several, and average; return provenance and outcomes."""
    languages = whole.dataset.languages
    if not (languages and task.scores_languages):
        return [({}, task.run(whole, options))]
    outcomes = _Outcomes()
    for language in languages:
        subject = whole.select_language(language)
        outcome = task.run(subject, options)
        details = [replace(one, setting=language) for one in outcome.details]
        facts = provenance(subject.encoder.model, subject.dataset, weights="")
        facts = {key: facts[key] for key in ("prompts", "prompt_count", "captions")}
        outcomes.append(({"language": language, **facts}, replace(outcome, details=details)))
    if len(languages) > 1:
        by_metric: dict[str, list[Score]] = {}
        for score in (score for _, outcome in outcomes for score in outcome.scores):
            by_metric.setdefault(score.metric, []).append(score)
        names = f"{len(languages)} languages" if len(languages) > 4 else ", ".join(languages)
        mean = [_mean(own, f"mean of {names}") for own in by_metric.values() if len(own) == len(languages)]
        outcomes.append(({"language": ",".join(languages)}, Outcome(scores=mean)))
    return outcomes


def _mean(scores: Sequence[Score], setting: str) -> Score:
    """Average scores of one metric in several languages; ``n`` is the sum, and there is no interval."""
    chances = [score.chance for score in scores if score.chance is not None]
    return replace(
        scores[0],
        setting=setting,
        value=math.fsum(score.value for score in scores) / len(scores),
        n=sum(score.n for score in scores),
        low=None,
        high=None,
        chance=math.fsum(chances) / len(chances) if len(chances) == len(scores) else None,
    )


def _inputs(subject: Subject, task: str, options: Options) -> str:
    """Return a digest of what a task's scores depend on besides the model: images, labels, texts, metrics, options.

    Raises:
        Unavailable: the task learns from a split that the dataset does not have.
        DataError: that split is damaged.
    """
    known = [subject.metrics, subject.dataset.superclasses, options.describe_options(task)]
    digest = hashlib.sha256(json.dumps(known).encode())
    splits, name = [subject.dataset], subject.dataset.name
    if TASKS[task].learns:
        splits += [one for one in (subject.split("train"), subject.split("val")) if one is not None]
        if len(splits) == 1 or splits[1].split != "train":
            hint = (
                "put its images into FOLDER/train/CLASS and FOLDER/test/CLASS, or pack a train split next to its "
                "test shards"
            )
            if name in BUILTIN:
                hint = _LABELED
            raise MissingSplit(f"dataset {name} has no train split, which {task} learns from: {hint}")
        if splits[1].labels is None:
            hint = _LABELED if name in BUILTIN else "add a label to each sample"
            raise Unavailable(
                f"split train of dataset {name} has no labels, which {task} learns from: {hint}"
            )
    for dataset in splits:
        digest.update(json.dumps([dataset.split, dataset.stamp]).encode())
        for values in (dataset.labels, dataset.items, *dataset.metadata.values()):
            digest.update(b"" if values is None else values.numpy().tobytes())
    for texts in _texts(task, subject.dataset, subject.encoder.model.architecture.text.classes):
        digest.update(json.dumps(texts).encode())
    if TASKS[task].describes:
        digest.update(json.dumps([subject.dataset.captions, subject.dataset.prompts()]).encode())
    return digest.hexdigest()[:16]


def _not_done(works: Sequence[_Work], out: Path, ranks: Ranks, scored: Scored) -> list[_Work]:
    """Return the work with incomplete results in the file, as rank 0 reads it: others may see another file."""

    def key(line: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(
            str(line.get(name)) for name in ("dataset", "split", "task", "model_hash", "dtype", "inputs")
        )

    counts = torch.zeros(len(works))
    if ranks.rank == 0:
        known: dict[tuple[str, ...], dict[tuple[str, str], Any]] = {}
        for line in read_results(out):
            of = known.setdefault(key(line), {})
            of[str(line.get("setting")), str(line.get("metric"))] = line.get("lines")
        complete = {one: len(lines) for one, lines in known.items() if len(lines) in lines.values()}
        for i, work in enumerate(works):
            dataset = work.subject.dataset
            facts = {"dataset": dataset.name, "split": dataset.split, "task": work.task, **work.facts}
            counts[i] = complete.get(key(facts), 0)
    found = [int(count) for count in ranks.gather(counts).tolist()]
    scored.found += sum(found)
    return [work for work, count in zip(works, found, strict=True) if not count]


_PRINTED = ("acc1", "acc5", "image_to_text_R@1", "text_to_image_R@1")


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores a model during training, on all ranks, into the run's ``results.jsonl`` and ``snapshots/``.

    Attributes:
        model: the model, scored in its state at each call.
        datasets: the datasets to score on.
        run: the run folder, to which rank 0 writes.
        ranks: the ranks that share the work.
        batch_size: images encoded at a time on each rank.
        bf16: whether the towers run in bfloat16.
        dims: sizes of prefixes of the embedding that are scored too.
        say: called with a line for each of the main scores.
        record: called on rank 0 with the step and the scores of a dataset by ``dataset/task/metric``, and for a
            prefix by ``dataset/task/dim64/metric``.
        note: called for each dataset and split with the number of transparent and rotated images.
        as_scored: context manager that puts the model into the state to be scored.
    """

    model: CLIP
    datasets: Sequence[EvalDataset]
    run: Path
    ranks: Ranks
    batch_size: int
    bf16: bool
    say: Callable[[str], None]
    record: Callable[[int, Mapping[str, float]], None]
    dims: Sequence[int] = ()
    note: Callable[[str, TraitCounts], None] = lambda images, counts: None
    as_scored: Callable[[], AbstractContextManager[None]] = nullcontext

    def score_if_owed(self, step: int) -> None:
        """Score this step unless rank 0 finds results of it."""
        owed = 0.0
        if self.ranks.rank == 0:
            lines = read_results(self.run / "results.jsonl")
            done = {str(line.get("dataset")) for line in lines if line.get("step") == step}
            owed = float(any(dataset.name not in done for dataset in self.datasets))
        if self.ranks.gather(torch.tensor(owed)).item():
            self.score(step)

    def score(self, step: int) -> None:
        """Append the scores to the results, and write a snapshot."""
        # the hash of the checkpoint if it is written, as other scores of it say; it is at the end of a training
        folder = self.run / "checkpoints" / f"step_{step:08d}"
        weights = f"{self.run.name} at step {step}"
        if self.ranks.rank == 0 and is_complete(folder):
            weights = weights_id(str(folder))[0]
        with self.as_scored():
            for dataset in self.datasets:
                self._score(dataset, step, weights)

    def _score(self, dataset: EvalDataset, step: int, weights: str) -> None:
        with torch.autocast(self.model.logit_scale.device.type, torch.bfloat16, enabled=self.bf16):
            subject = Subject(Encoder(self.model, ranks=self.ranks, batch_size=self.batch_size), dataset)
            scores = evaluate(
                subject,
                dims=self.dims,
                out=self.run / "results.jsonl",
                step=step,
                weights=weights,
                origin={"model": str(self.run)},
            )
            snapshot = take_snapshot(subject, step=step)  # by all ranks, which share the texts
        for (name, split), counts in subject.encoder.counts.items():
            self.note(f"dataset {name}, split {split}", counts)
        if self.ranks.rank > 0:
            return
        write_snapshot(self.run, snapshot)
        values: dict[str, float] = {}
        for score in scores:
            prefix = score.setting.replace(" ", "") if PREFIX.fullmatch(score.setting) else ""
            values["/".join(filter(None, (score.dataset, score.task, prefix, score.metric)))] = score.value
            if score.metric in _PRINTED and not prefix:
                self.say(
                    f"step {step} {score.dataset} {score.task} {score.metric} {score.value:.1%} "
                    f"[{score.low or 0:.1%}, {score.high or 1:.1%}] chance {score.chance or 0:.1%}"
                )
        self.record(step, values)
