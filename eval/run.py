"""Score models on datasets: images are encoded once for all tasks, and results are written at once.

``python -m eval run`` and the commands named after tasks are at the end.
"""

import hashlib
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from clipkit import CLIP, distributed, load
from clipkit.errors import ClipkitError, ConfigError, DataError, Unavailable, nearest
from clipkit.files import counted, printable
from clipkit.formats import find_newest_epoch, model_hash, resolve_checkpoint, select_best
from clipkit.model import ClassTokenizer, apply_cpu_settings, image_gflops
from clipkit.samples import MissingSplit, TraitCounts
from clipkit.samples.remote import cache_folder
from data.corpora.builtin import BUILTIN
from eval.datasets.dataset import EvalDataset, prompt_with_bare_names
from eval.datasets.targets import Target, find_targets, open_available, open_suites, select_languages
from eval.features.adapters import TIMM, load_image_model, text_tower_error
from eval.features.encoder import ONE_RANK, Encoder, Ranks
from eval.options import ScoreOptions, ScoringOptions
from eval.readers.benchmarks import list_judgments
from eval.readers.shards import Members
from eval.report.terminal import score_table
from eval.results.records import (
    Score,
    append_results,
    check_appendable,
    provenance,
    read_results,
    time_now,
    weights_id,
    write_details,
)
from eval.tasks import TASKS, Options, Task, get_task
from eval.tasks.subject import Outcome, Subject

_MAX_SHOWN = 200  # characters of a path in a message
_LABELED = "of the built-in datasets, emoji and cues have a train split with labels"


def select_tasks(
    dataset: EvalDataset, tasks: Sequence[str] | None = None, *, classes: Sequence[str] = ()
) -> tuple[str, ...]:
    """Check that a dataset has what tasks need, and return the tasks; None for the dataset's own.

    ``classes`` are all texts that a model with a classification head can read; empty for any text.
    """
    chosen = dataset.tasks if tasks is None else tuple(tasks)
    for name in chosen:
        task = get_task(name)
        task.check(dataset)
        if not classes:
            continue
        for texts in task.select_texts(prompt_with_bare_names(dataset), classes):
            try:
                ClassTokenizer(names=tuple(classes))(texts)
            except DataError as error:
                advice = "linear-probe, few-shot, knn and fine-tune need no names"
                raise Unavailable(
                    f"dataset {dataset.name} cannot be scored by {name}: {error}; {advice}"
                ) from error
    return chosen


@dataclass(kw_only=True)
class Results:
    """The results of scoring models.

    Attributes:
        scores: new scores.
        existing: number of scores that the results file had already.
        errors: why a dataset or task has no scores.
        counts: number of transparent and rotated images, by dataset and split.
    """

    scores: list[Score] = field(default_factory=list)
    existing: int = 0
    errors: list[ClipkitError] = field(default_factory=list)
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
    tasks = select_tasks(subject.dataset, tasks)
    encoder = subject.encoder
    facts: dict[str, Any] = {}
    if out is not None and encoder.ranks.rank == 0:
        facts = provenance(encoder.model, subject.dataset, weights=weights)
        if not weights:
            facts |= {"model": "in memory", "model_hash": model_hash(encoder.model)}
        facts |= origin or {}
    jobs = [_Job(subject=subject, task=task, facts=facts) for task in tasks]
    results = Results()
    path = None if out is None else Path(out)
    _run_jobs(jobs, Options(details=False, dims=tuple(dims)), out=path, step=step, results=results)
    if subject is not model:
        settings = {
            "background": "background='white' in clipkit.load",
            "upright": "upright=True in clipkit.load",
        }
        for line in _describe_traits(results.counts, encoder.model, **settings):
            warnings.warn(line, stacklevel=2)
    return results.scores


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
    show_progress: Callable[[EvalDataset], Callable[[int], None]] | None = None,
    results: Results,
) -> None:
    """Score one model on datasets, and append the results of each task as soon as they are computed.

    An error of a dataset or task is recorded in ``results.errors``; the others are scored.

    Args:
        model: the model to score, perhaps under autocast.
        out: a results file, to which rank 0 appends.
        tasks: tasks on each dataset; empty for its main ones.
        skip_existing: skip results of the same weights, data, prompts and options that are in the file.
        store: folder of encoded features; None keeps them in memory.
        origin: provenance for the results: name and identity of the weights.
        step: training step, for the results.
        show_progress: called with each dataset before its images are encoded; returns a progress callback.
        results: receives the results, so that they are available if the run ends early.
    """
    options = options or Options()
    encoder = Encoder(model, store=store, ranks=ranks, batch_size=batch_size)
    origin = {**(origin or {}), "model_hash": model_hash(model), "gflops": image_gflops(model)}
    jobs: list[_Job] = []
    classes = model.architecture.text.classes
    for target in targets:
        subject = Subject(encoder, target.dataset, metrics=target.metrics, open_split=target.open_split)
        for task in dict.fromkeys(tasks or target.main_tasks):
            try:
                select_tasks(subject.dataset, [task], classes=classes)
                TASKS[task].check_model(model)
                facts = {**provenance(model, subject.dataset, weights=""), **origin}
                facts["options"] = options.describe_options(task)
                facts["inputs"] = _hash_inputs(subject, task, options)
            except (ConfigError, DataError) as error:
                results.errors.append(error)
            else:
                jobs.append(_Job(subject=subject, task=task, facts=facts))
    if skip_existing:
        jobs = _skip_complete(jobs, out, ranks, results)
    texts: dict[str, None] = {}
    for job in jobs:
        for task_texts in _select_texts(job.task, job.subject.dataset, classes):
            texts.update(dict.fromkeys(task_texts))
    encoder.texts(list(texts), description="the prompts")  # in one pass, sorted by length
    _run_jobs(
        jobs,
        options,
        out=out,
        step=step,
        results=results,
        show_progress=show_progress,
        continue_on_error=True,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    """One task on one dataset, and the provenance of its results."""

    subject: Subject
    task: str
    facts: Mapping[str, Any]


def _run_jobs(
    jobs: list[_Job],
    options: Options,
    *,
    out: Path | None,
    step: int | None,
    results: Results,
    show_progress: Callable[[EvalDataset], Callable[[int], None]] | None = None,
    continue_on_error: bool = False,
) -> None:
    """The evaluation loop: run each task, and append its results on rank 0 as soon as they are computed.

    Jobs are consumed, so that the features of a dataset are released after the last of its tasks.
    """
    subject: Subject | None = None
    while jobs:
        job = jobs.pop(0)
        encoder = job.subject.encoder
        if show_progress is not None and job.subject is not subject:
            encoder.progress = show_progress(job.subject.dataset)
        subject = job.subject
        started = time.monotonic()
        try:
            outcomes = _run_task(job, options)
        except (ConfigError, DataError) as error:
            if not continue_on_error:
                raise
            results.errors.append(error)
            continue
        scores = list(chain.from_iterable(outcome.scores for _, outcome in outcomes))
        results.scores += scores
        results.counts.update(encoder.counts)
        if out is None or encoder.ranks.rank > 0:
            continue
        facts = {**job.facts, "time": time_now()}
        if "inputs" in job.facts:  # by which --skip-existing finds complete results
            facts["lines"] = len(scores)
            if TASKS[job.task].learns:  # scored images that are also in the split it learned from
                facts["train_overlap"] = job.subject.overlap["train"]
        seconds = round(time.monotonic() - started, 3)
        for outcome_facts, outcome in outcomes:
            all_facts = {**facts, **outcome_facts, **outcome.facts}
            append_results(out, outcome.scores, step=step, provenance=all_facts, seconds=seconds)
            for details in outcome.details:
                write_details(out, details, weights=str(job.facts["weights"]))


def _select_texts(task: str, dataset: EvalDataset, classes: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the texts that a task encodes, in all languages."""
    if not (dataset.languages and TASKS[task].scores_languages):
        yield from TASKS[task].select_texts(dataset, classes)
        return
    for language in dataset.languages:
        yield from TASKS[task].select_texts(dataset.select_language(language)[0])


_Outcomes = list[tuple[dict[str, Any], Outcome]]


def _run_task(job: _Job, options: Options) -> _Outcomes:
    """Run a task, also with prefixes of the embedding if there are any; return provenance and outcomes."""
    task = TASKS[job.task]
    outcomes = _run_languages(task, job.subject, options)
    if not task.scores_prefixes:
        return outcomes
    for dim in options.dims:
        subject = job.subject.select_prefix(dim)
        for facts, outcome in _run_languages(task, subject, replace(options, details=False)):
            scores = []
            for score in outcome.scores:
                setting = f"dim {dim}, {score.setting}" if score.setting else f"dim {dim}"
                scores.append(replace(score, setting=setting))
            outcomes.append(({**facts, "dim": dim}, replace(outcome, scores=scores)))
    return outcomes


def _run_languages(task: Task, subject: Subject, options: Options) -> _Outcomes:
    """Run a task, in each language if the dataset has several, and average; return provenance and outcomes."""
    languages = subject.dataset.languages
    if not (languages and task.scores_languages):
        return [({}, task.run(subject, options))]
    outcomes = _Outcomes()
    by_metric: dict[str, list[Score]] = {}
    for language in languages:
        translated = subject.select_language(language)
        outcome = task.run(translated, options)
        details = [replace(part, setting=language) for part in outcome.details]
        for score in outcome.scores:
            by_metric.setdefault(score.metric, []).append(score)
        facts = provenance(translated.encoder.model, translated.dataset, weights="")
        facts = {key: facts[key] for key in ("prompts", "prompt_count", "captions")}
        outcomes.append(({"language": language, **facts}, replace(outcome, details=details)))
    if len(languages) > 1:
        names = f"{len(languages)} languages" if len(languages) > 4 else ", ".join(languages)
        complete = [scores for scores in by_metric.values() if len(scores) == len(languages)]
        means = [_average_scores(scores, f"mean of {names}") for scores in complete]
        outcomes.append(({"language": ",".join(languages)}, Outcome(scores=means)))
    return outcomes


def _average_scores(scores: Sequence[Score], setting: str) -> Score:
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


def _hash_inputs(subject: Subject, task: str, options: Options) -> str:
    """Hash what a task's scores depend on besides the model: images, labels, texts, metrics, options."""
    scored = subject.dataset
    settings: list[Any] = [subject.metrics, scored.superclasses, options.describe_options(task)]
    settings += [
        part for part in (scored.grades, scored.ratings, scored.image_fields, scored.taxonomy) if part
    ]
    digest = hashlib.sha256(json.dumps(settings).encode())
    splits = [scored]
    if TASKS[task].learns:
        train, val = subject.split("train"), subject.split("val")
        is_builtin = scored.name in BUILTIN
        if train is None:
            hint = (
                "put its images into FOLDER/train/CLASS and FOLDER/test/CLASS, or pack a train split next to its "
                "test shards"
            )
            if is_builtin:
                hint = _LABELED
            raise MissingSplit(f"dataset {scored.name} has no train split, which {task} learns from: {hint}")
        if train.labels is None:
            hint = _LABELED if is_builtin else "add a label to each sample"
            raise Unavailable(
                f"split train of dataset {scored.name} has no labels, which {task} learns from: {hint}"
            )
        splits.append(train)
        if val is not None:
            splits.append(val)
    for dataset in splits:
        digest.update(json.dumps([dataset.split, dataset.stamp]).encode())
        for values in (dataset.labels, dataset.unknown, dataset.items, *dataset.metadata.values()):
            if values is not None:
                digest.update(values.numpy().tobytes())
    for texts in _select_texts(task, scored, subject.encoder.model.architecture.text.classes):
        digest.update(json.dumps(texts).encode())
    if TASKS[task].describes:
        digest.update(json.dumps([scored.captions, scored.prompts()]).encode())
    return digest.hexdigest()[:16]


def _skip_complete(jobs: Sequence[_Job], out: Path, ranks: Ranks, results: Results) -> list[_Job]:
    """Return the jobs with incomplete results in the file, as rank 0 reads it: others may see another file."""

    def key(line: Mapping[str, Any]) -> tuple[str, ...]:
        names = ("dataset", "split", "task", "model_hash", "dtype", "inputs")
        return tuple(str(line.get(name)) for name in names)

    counts = torch.zeros(len(jobs))
    if ranks.rank == 0:
        # by job, the stated number of lines of each of its lines
        lines_by_job: dict[tuple[str, ...], dict[tuple[str, str], Any]] = {}
        for line in read_results(out):
            lines = lines_by_job.setdefault(key(line), {})
            lines[str(line.get("setting")), str(line.get("metric"))] = line.get("lines")
        for i, job in enumerate(jobs):
            dataset = job.subject.dataset
            facts = {"dataset": dataset.name, "split": dataset.split, "task": job.task, **job.facts}
            lines = lines_by_job.get(key(facts), {})
            if len(lines) in lines.values():
                counts[i] = len(lines)
    incomplete = []
    for job, count in zip(jobs, ranks.gather(counts).tolist(), strict=True):
        results.existing += int(count)
        if not count:
            incomplete.append(job)
    return incomplete


def _describe_traits(
    counts: Mapping[tuple[str, str], TraitCounts], model: CLIP, *, background: str, upright: str
) -> Iterator[str]:
    """Yield a line for each trait of the scored images; the arguments are how to set the model's preprocessing."""
    for (name, split), split_counts in counts.items():
        lines = split_counts.lines(model.preprocess.decoding, background=background, upright=upright)
        for line in lines.values():
            yield printable(f"dataset {name}, split {split}: {line}")


# --------------------------------------------------------------------------------------------------------------
# The commands that score models.


def run_evaluation(options: ScoreOptions) -> int:
    """Score every model on every dataset, and print the scores even if the run ends early."""
    with join_ranks(options.device) as device:
        if not options.data and not options.suite:
            raise ConfigError("no dataset given: use --data or --suite")
        check_towers(options.model, options.task)
        members = Members(image=options.image, captions=options.captions)
        data = options.data
        if options.task == ("judgments",):
            data = tuple(chain.from_iterable(map(list_judgments, data)))
        targets, errors = open_available(
            data, root=options.data_root, prompts=options.prompts, members=members
        )
        if not targets and not options.suite:
            print_errors(errors[1:])
            raise errors[0]
        print_errors(errors)
        all_errors: list[ClipkitError] = [*errors]
        if not options.suite:
            _check_any_task(targets, options.task)
        suite_targets, errors = open_suites(options.suite, root=options.data_root, prompts=options.prompts)
        selected = []
        for target in _merge_targets(targets, suite_targets, options.prompts):
            try:
                selected.append(select_languages(target, options.language))
            except DataError as error:
                errors.append(error)
        if errors and not selected and targets:
            raise errors[0]
        all_errors += errors
        models = [find_model(name, options.out) for name in dict.fromkeys(options.model)]
        results = Results()
        for model in models:
            if len(models) > 1 and distributed.rank() == 0:
                print(f"\n{model.name}")
            before = len(results.errors)
            try:
                score_model(model, selected, options.task, options, device, results)
            except ClipkitError as error:  # continue with the other models
                if len(models) == 1:
                    raise
                results.errors.append(error)
            if len(models) > 1 and len(results.errors) > before and distributed.rank() == 0:
                print(f"some scores of {model.name} are missing:", file=sys.stderr)
            print_errors(results.errors[before:])
        print_errors(errors)
        return compute_exit_status([*all_errors, *results.errors], results)


@contextmanager
def join_ranks(device_name: str) -> Iterator[str]:
    """Join the ranks that torchrun started, and yield this rank's device."""
    started = distributed.start()
    try:
        if device_name == "auto":
            device_name = str(started)
        else:
            try:
                device = torch.device(device_name)
            except RuntimeError as error:
                raise ConfigError(
                    f"unknown --device {device_name!r}: expected auto, cpu, cuda, mps or xpu"
                ) from error
            if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
                raise ConfigError(
                    f"--device {device_name}: this machine has {torch.cuda.device_count()} CUDA devices"
                )
        yield device_name
    finally:
        distributed.stop()


def current_ranks() -> Ranks:
    """Return the ranks that ``join_ranks`` joined."""
    return Ranks(rank=distributed.rank(), world=distributed.world_size(), gather=distributed.sum_over_ranks)


def check_towers(models: Sequence[str], tasks: Sequence[str]) -> None:
    """Raise ConfigError if a task needs a text tower and a model's name shows that it has none.

    Without ``tasks`` the datasets' own tasks run, which need texts.
    """
    for model in models:
        if model.startswith(TIMM) and (not tasks or any(TASKS[task].needs_text for task in tasks)):
            raise text_tower_error(model)


def _check_any_task(targets: Sequence[Target], tasks: Sequence[str]) -> None:
    """Raise the first error, before a model is loaded, if no task fits any dataset."""
    errors: list[ClipkitError] = []
    for target in targets:
        for task in tasks or target.dataset.tasks:
            try:
                select_tasks(target.dataset, [task])
            except DataError as error:
                errors.append(error)
            else:
                return
    if errors:
        raise errors[0]


def _merge_targets(targets: Sequence[Target], suite_targets: Sequence[Target], prompts: str) -> list[Target]:
    merged = {target.dataset.name: target for target in targets}
    for target in suite_targets:
        if merged.setdefault(target.dataset.name, target).card is not target.card:
            raise DataError(
                f"two datasets would both be named {target.dataset.name} (yours and the suite's): rename the folder"
            )
    used: set[str] = set()
    defined: set[str] = set()
    for target in merged.values():
        used |= {target.dataset.prompt_set, target.dataset.caption_prompt_set}
        if target.card is not None:
            defined |= {*target.card.prompt_sets, *target.card.caption_prompts}
    if prompts and merged and prompts not in used:
        hint = "cards define prompt sets in [prompts.NAME], and for captions in [caption_prompts]"
        if defined:
            hint = nearest(prompts, defined)
        raise ConfigError(f"--prompts {prompts}: no dataset has this prompt set ({hint})")
    return list(merged.values())


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model as the user names it, its checkpoint, and the results file."""

    name: str
    source: str
    out: Path


def find_model(name: str, out: Path | None = None) -> ModelSource:
    """Resolve a run of clipkit or open_clip to one checkpoint; training may write another meanwhile."""
    source = name
    try:
        path = Path(source).expanduser()
        best = select_best(path)
        if path.is_dir() and (path.name == "checkpoints" or (path / "checkpoints").is_dir()):
            path = find_newest_epoch(path) or resolve_checkpoint(path)
            source = str(path)
        elif best != path:
            path = best
            source = str(path)
    except RuntimeError as error:
        raise ConfigError(f"no model at {source[:_MAX_SHOWN]!r}: there is no such user") from error
    except OSError as error:
        raise ConfigError(f"no model at {source[:_MAX_SHOWN]!r}: {error.strerror}") from error
    if out is None:
        in_run = path.absolute().parent.name == "checkpoints"
        out = (path.parent.parent if in_run else Path()) / "results.jsonl"
    return ModelSource(name=name, source=source, out=out)


def score_model(
    source: ModelSource,
    targets: Sequence[Target],
    tasks: Sequence[str],
    options: ScoringOptions,
    device: str,
    results: Results,
) -> None:
    """Load a model, score it, and print its scores; errors of datasets and tasks are added to the results."""
    model = load_scored(source, options, device)
    weights, step = weights_id(source.source)
    ranks = current_ranks()
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty() or ranks.rank > 0,
    )

    def show_progress(dataset: EvalDataset) -> Callable[[int], None]:
        bar = progress.add_task(dataset.name, total=len(dataset))
        return lambda images: progress.advance(bar, images * ranks.world)

    model_results = Results(errors=results.errors)
    try:
        with progress, tower_autocast(options, device):
            run_model(
                model,
                targets,
                out=source.out,
                tasks=tasks,
                options=options,
                skip_existing=options.skip_existing,
                store=feature_folder(options),
                ranks=ranks,
                batch_size=options.batch_size,
                origin={"model": source.name, "weights": weights},
                step=step,
                show_progress=show_progress,
                results=model_results,
            )
    finally:
        results.scores += model_results.scores
        results.existing += model_results.existing
        if model_results.scores and ranks.rank == 0:
            Console(highlight=False).print(score_table(model_results.scores))
    if ranks.rank > 0:
        return
    print_traits(model_results.counts, model, options)
    skipped = f", skipped {model_results.existing} existing" if options.skip_existing else ""
    print(f"wrote {counted(len(model_results.scores), 'line')} to {source.out.absolute()}{skipped}")


def load_scored(source: ModelSource, options: ScoringOptions, device: str, *, writes: bool = True) -> CLIP:
    """Load a model with the preprocessing of the options; check that results can be written if it ``writes``."""
    apply_cpu_settings()
    if source.source.startswith(TIMM):
        if options.dims:
            raise ConfigError(f"--dim requires a CLIP, not {source.source}")
        model: CLIP = load_image_model(source.source, device=device)
    else:
        model = load(source.source, name=options.name, device=device)
    if max(options.dims, default=0) >= model.dim:
        raise ConfigError(
            f"--dim {options.dims[-1]}: expected numbers below {model.dim}, the whole embedding"
        )
    model.preprocess = model.preprocess.replace_decoding(
        background=options.background, upright=options.upright, pixel_range=options.pixel_range
    )
    if writes:
        check_appendable(source.out)  # before anything is computed
    return model


def feature_folder(options: ScoringOptions) -> Path | None:
    """Return the folder in which features are stored; None to keep them in memory."""
    if options.features is None:
        return cache_folder() / "features"
    return Path(options.features).expanduser() if options.features else None


def tower_autocast(options: ScoringOptions, device: str) -> AbstractContextManager[Any]:
    """Return the context in which towers compute in the dtype of the options."""
    if options.precision == "fp32":
        return nullcontext()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.precision]
    return torch.autocast(torch.device(device).type, dtype)


def print_traits(counts: Mapping[tuple[str, str], TraitCounts], model: CLIP, options: ScoringOptions) -> None:
    """Print a line for each trait of the scored images, such as transparency, with the option that handles it."""
    settings = {
        "background": "--background white" if options.background is None else "",
        "upright": "--upright" if options.upright is None else "",
    }
    for line in _describe_traits(counts, model, **settings):
        print(line, file=sys.stderr)


def print_errors(errors: Sequence[ClipkitError]) -> None:
    """Print each distinct reason why a dataset or task has no scores, on rank 0."""
    if distributed.rank() > 0:
        return
    lines: dict[str, None] = {}
    for error in errors:
        is_missing = isinstance(error, Unavailable) and error.cause == "missing"
        lines[f"{'not found' if is_missing else 'not scored'}: {error}"] = None
    for line in lines:
        print(printable(line), file=sys.stderr)


def compute_exit_status(errors: Sequence[ClipkitError], results: Results) -> int:
    """Return the exit status: 1 if something was damaged, or there is no score at all."""
    if not all(isinstance(error, Unavailable) for error in errors):
        return 1
    return 0 if results.scores or results.existing else 1
