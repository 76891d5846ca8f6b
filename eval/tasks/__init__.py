"""What a model is asked to do with a dataset, by name."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clipkit.errors import ConfigError, DataError, nearest
from clipkit.model.tokenizer import ClassTokenizer
from eval.datasets.dataset import TASKS, EvalDataset, Lacks, by_class_names
from eval.features.image_models import TIMM, no_text_tower
from eval.results.details import prediction_details, retrieval_details, zero_shot_details
from eval.results.records import Details
from eval.results.scores import Score
from eval.tasks.classify import labels_of, report_captions, report_choices, report_classes, zero_shot
from eval.tasks.compositional import choices_of, compositional
from eval.tasks.fine_tune import RATES, fine_tune
from eval.tasks.probe import ESTIMATORS, KS, SHOTS, few_shot, knn, linear_probes
from eval.tasks.retrieval import captions_of, retrieval
from eval.tasks.subject import Subject

__all__ = ["KNOWN_TASKS", "Options", "Outcome", "Task", "check_image_tasks", "check_tasks"]

_log = logging.getLogger("eval")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may choose of the tasks.

    Attributes:
        seed: of whatever is drawn: examples shown, validation pictures carved from the training ones.
        layers: blocks of the image tower whose class token is probed too, from 1; True for all.
        shots: pictures a class that few-shot learning gets.
        seeds: of its draws.
        estimators: that it learns with.
        tuned: whether C of its logistic regression is chosen on all validation pictures, as the CLIP paper did.
        neighbours: how many vote.
        epochs: of fine-tuning.
        rates: learning rates that fine-tuning chooses from.
        fine_tune_batch: pictures of its steps.
        runs: where its trainings lie; None for the cache folder.
        details: whether what a page shows beside the scores is made too.
    """

    seed: int = 0
    layers: bool | tuple[int, ...] = False
    shots: tuple[int, ...] = SHOTS
    seeds: tuple[int, ...] = (0, 1, 2)
    estimators: tuple[str, ...] = ESTIMATORS
    tuned: bool = False
    neighbours: tuple[int, ...] = KS
    epochs: float = 10
    rates: tuple[float, ...] = RATES
    fine_tune_batch: int = 128
    runs: Path | None = None
    details: bool = True

    def text_of(self, task: str) -> str:
        """The options that the scores of a task depend on, for its lines."""
        return " ".join(f"{name}={getattr(self, name)}" for name in _OPTIONS_OF.get(task, ()))


_OPTIONS_OF: Mapping[str, tuple[str, ...]] = {
    "linear-probe": ("seed", "layers"),
    "few-shot": ("shots", "seeds", "estimators", "tuned"),
    "knn": ("neighbours",),
    "fine-tune": ("seed", "epochs", "rates", "fine_tune_batch"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What a task gives: its scores, and what a page shows beside them."""

    scores: list[Score]
    details: Sequence[Details] = ()


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something a model can be scored on.

    Attributes:
        what: it is, in a few words.
        run: scores a model on a dataset.
        check: raises DataError where a dataset lacks what it needs.
        texts: those of a dataset that it will have encoded, by class or by picture.
        needs_text: whether it needs a text tower.
        by_prompts: whether classes are told by their prompts, or captions may have one.
        learns: whether it needs the training split.
    """

    what: str
    run: Callable[[Subject, Options], Outcome]
    check: Callable[[EvalDataset], object]
    texts: Callable[[EvalDataset], Iterable[Sequence[str]]] = lambda _: ()
    needs_text: bool = False
    by_prompts: bool = False
    learns: bool = False


def _zero_shot(subject: Subject, options: Options) -> Outcome:
    report_classes(subject)
    if not options.details:
        return Outcome(scores=zero_shot(subject))
    details = zero_shot_details(
        subject.dataset,
        subject.images().projected,
        subject.class_weights(),
        subject.logit_scale,
        seed=options.seed,
        device=subject.device,
    )
    return Outcome(scores=zero_shot(subject, calibration=True), details=[details])


def _retrieval(subject: Subject, options: Options) -> Outcome:
    report_captions(subject)
    found = retrieval(subject)
    if not options.details:
        return Outcome(scores=found.scores)
    details = retrieval_details(
        subject.dataset,
        subject.images().projected,
        found.captions,
        found.texts,
        found.pairs,
        right=found.right,
        values={name: ranks.float() for name, ranks in found.ranks.items()},
        seed=options.seed,
    )
    return Outcome(scores=found.scores, details=[details])


def _compositional(subject: Subject, options: Options) -> Outcome:
    report_choices(subject)
    return Outcome(scores=compositional(subject))


def _linear_probe(subject: Subject, options: Options) -> Outcome:
    scores: list[Score] = []
    details: list[Details] = []
    for probe in linear_probes(subject, layers=options.layers, seed=options.seed):
        scores += probe.scores
        if options.details and probe.answers.labels.dim() == 1:
            top = probe.answers.top
            own = prediction_details(
                subject.dataset,
                top.classes[:, 0],
                task="linear-probe",
                setting=probe.setting,
                confidence=top.probabilities[:, 0],
                chosen_c=probe.chosen_c,
            )
            details.append(replace(own, tuned_on=probe.tuned_on))
    return Outcome(scores=scores, details=details)


def _few_shot(subject: Subject, options: Options) -> Outcome:
    scores = few_shot(
        subject,
        shots=options.shots,
        seeds=options.seeds,
        estimators=options.estimators,
        tuned=options.tuned,
    )
    return Outcome(scores=scores)


def _fine_tune(subject: Subject, options: Options) -> Outcome:
    found = fine_tune(
        subject,
        epochs=options.epochs,
        rates=options.rates,
        batch_size=options.fine_tune_batch,
        seed=options.seed,
        runs=options.runs,
    )
    _log.warning("dataset %s: the fine-tuned model is %s", subject.dataset.name, found.run)
    top = found.answers.top
    own = prediction_details(
        subject.dataset,
        top.classes[:, 0],
        task="fine-tune",
        setting=found.setting,
        confidence=top.probabilities[:, 0],
    )
    return Outcome(
        scores=list(found.scores),
        details=[replace(own, tuned_on=found.tuned_on, chosen_rate=found.rate)] if options.details else [],
    )


def _prompts(dataset: EvalDataset) -> Iterable[Sequence[str]]:
    return dataset.prompts()


def _captions(dataset: EvalDataset) -> Iterable[Sequence[str]]:
    return dataset.caption_prompts()


def _choices(dataset: EvalDataset) -> Iterable[Sequence[str]]:
    yield from dataset.choices or ()
    yield from dataset.captions or ()


KNOWN_TASKS: Mapping[str, Task] = {
    "zero-shot": Task(
        what="classify pictures by the prompts of their class names",
        run=_zero_shot,
        check=labels_of,
        texts=_prompts,
        needs_text=True,
        by_prompts=True,
    ),
    "retrieval": Task(
        what="find captions by pictures and pictures by captions",
        run=_retrieval,
        check=captions_of,
        texts=_captions,
        needs_text=True,
        by_prompts=True,
    ),
    "linear-probe": Task(
        what="logistic regression on the image tower's features, as in the CLIP paper",
        run=_linear_probe,
        check=labels_of,
        learns=True,
    ),
    "few-shot": Task(
        what="learn classes from 1, 2, 4, 8 and 16 pictures each", run=_few_shot, check=labels_of, learns=True
    ),
    "knn": Task(
        what="classify pictures by their nearest neighbours in the training split",
        run=lambda subject, options: Outcome(scores=knn(subject, ks=options.neighbours)),
        check=labels_of,
        learns=True,
    ),
    "compositional": Task(
        what="tell a right caption from wrong ones (Winoground, SugarCrepe, ARO, WinoGAViL)",
        run=_compositional,
        check=choices_of,
        texts=_choices,
        needs_text=True,
    ),
    "fine-tune": Task(
        what="train the whole image tower and a head of classes on the training split, by train.py",
        run=_fine_tune,
        check=labels_of,
        texts=_prompts,
        needs_text=True,
        by_prompts=True,
        learns=True,
    ),
}
assert set(KNOWN_TASKS) == set(TASKS)


def check_tasks(
    dataset: EvalDataset, tasks: Sequence[str] | None = None, *, classes: Sequence[str] = ()
) -> tuple[str, ...]:
    """The tasks, or those that the dataset names, after making sure that it has what they need.

    Args:
        dataset: what is to be scored on.
        tasks: None for those that the dataset names.
        classes: all that the model can read, where it has a head of classes; none for any text.

    Raises:
        DataError: the dataset lacks labels, class names or captions for one of them, or its texts cannot be read.
        ConfigError: a task is unknown.
    """
    chosen = dataset.tasks if tasks is None else tuple(tasks)
    for task in chosen:
        if task not in KNOWN_TASKS:
            raise ConfigError(f"unknown task {task!r}: {nearest(task, KNOWN_TASKS)}")
        KNOWN_TASKS[task].check(dataset)
        for texts in KNOWN_TASKS[task].texts(by_class_names(dataset)) if classes else ():
            try:
                ClassTokenizer(names=tuple(classes))(texts)
            except DataError as error:
                advice = (
                    "fine-tune the model that this one began from"
                    if task == "fine-tune"
                    else "linear-probe, few-shot and knn need no names"
                )
                raise Lacks(
                    f"dataset {dataset.name} cannot be scored by {task}: {error}; {advice}"
                ) from error
    return chosen


def check_image_tasks(models: Sequence[str], tasks: Sequence[str]) -> None:
    """Make sure that models can do all tasks, as far as it can be told by name before any of them is loaded.

    Args:
        models: as the user names them.
        tasks: none for those that datasets name.

    Raises:
        ConfigError: a model has no text tower, and a task needs one.
    """
    for model in models:
        if model.startswith(TIMM) and (not tasks or any(KNOWN_TASKS[task].needs_text for task in tasks)):
            raise no_text_tower(model)
