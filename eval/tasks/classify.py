"""Classification metrics of any linear classifier, and zero-shot classification.

Zero-shot classification compares images with the prompts of the class names (Radford et al. 2021, section 3.1).
"""

from collections.abc import Sequence

import torch

from clipkit.errors import DataError
from clipkit.files.terminal import counted
from clipkit.model.zero_shot import indistinguishable_classes, token_numbers
from eval.datasets.dataset import EvalDataset, labels_of, some
from eval.metrics import METRICS, Answers, metric_of
from eval.results.details import zero_shot_details
from eval.results.scores import Score
from eval.tasks import Options
from eval.tasks.subject import Outcome, Subject, metric_score

__all__ = [
    "classification_scores",
    "fitting_metrics",
    "report_captions",
    "report_choices",
    "report_classes",
    "run_zero_shot",
    "zero_shot",
]


def fitting_metrics(dataset: EvalDataset, metrics: Sequence[str]) -> tuple[str, ...]:
    """The classification metrics among those of a card; the default ones where there are none.

    Raises:
        Lacks: the dataset has no labels or class names.
        DataError: a metric does not apply to the dataset.
    """
    multi_label, classes = labels_of(dataset).dim() == 2, len(dataset.class_names)
    kind = "multi-label" if multi_label else "one-label"
    chosen = [
        name for name in metrics if (own := metric_of(name)) and own.kind in ("one-label", "multi-label")
    ]
    if not chosen:
        return tuple(
            name
            for name, own in METRICS.items()
            if own.kind == kind and own.by_default and classes >= own.least
        )
    for name in chosen:
        own = metric_of(name)
        assert own is not None
        if own.kind != kind:
            labels = "several labels" if multi_label else "one label"
            raise DataError(
                f"dataset {dataset.name} has {labels} per image, the metric {name} is for the other kind"
            )
        if own.most is not None and not own.least <= classes <= own.most:
            raise DataError(f"dataset {dataset.name} has {classes} classes, {name} is for {own.most}")
        if own.needs_superclasses and not dataset.superclasses:
            raise DataError(f"dataset {dataset.name} has no superclasses, which {name} needs")
    return tuple(chosen)


def classification_scores(
    answers: Answers, *, task: str, metrics: Sequence[str] = (), setting: str = ""
) -> list[Score]:
    """Score a classifier's answers.

    Args:
        answers: of one classifier on one dataset.
        task: for the scores, such as "zero-shot".
        metrics: those of a card; only classification metrics are used; none for the default ones.
        setting: for the scores, such as "4-shot".

    Raises:
        DataError: a metric does not apply to the dataset, or is not defined for these labels.
    """
    dataset, scores = answers.dataset, []
    for name in fitting_metrics(dataset, metrics):
        score = metric_score(
            dataset,
            name,
            answers,
            task=task,
            prompt_set=dataset.prompt_set if task == "zero-shot" else "",
            setting=setting,
        )
        assert score is not None, "classification metrics are always defined"
        scores.append(score)
    return scores


# --------------------------------------------------------------------------------------------------------------
# Texts that a model's tokenizer turns into the same tokens, so that no model can tell them apart.
#
# They differ in what the tokenizer drops (letter case, spacing, Unicode form) or behind the context length.
# Published class lists contain such names ("missile" is two classes of ImageNet), so scores are computed as
# elsewhere: between such texts rounding or the order of classes decides. One line per dataset says how many
# images that concerns.
#
# Letters in shape comments: N images, C classes.

_SHOWN = 60  # characters of a text in a message


def report_classes(subject: Subject) -> None:
    """Warn of classes whose prompts all have the same tokens."""
    dataset, labels = subject.dataset, subject.dataset.labels
    groups = indistinguishable_classes(subject.encoder.model.tokenizer, dataset.prompts())
    if not groups or labels is None:
        return
    numbers = torch.tensor([number for group in groups for number in group])
    affected = torch.isin(labels, numbers) if labels.dim() == 1 else labels[:, numbers].any(dim=1)  # (N,)
    named = [" = ".join(f"{dataset.class_names[i][:_SHOWN]!r} ({i})" for i in group) for group in groups]
    subject.warn(
        f"{int(affected.sum()):,} of {counted(len(dataset), 'image')} have a label that the model cannot tell from "
        f"another, because all prompts of these classes have the same tokens: {some(named)}"
    )


def report_captions(subject: Subject) -> None:
    """Warn of captions that have the same tokens as another caption of another image."""
    images: dict[str, set[int]] = {}
    for number, own in enumerate(subject.dataset.caption_prompts()):
        for text in own:
            images.setdefault(text, set()).add(number)
    same: dict[int, list[str]] = {}
    for text, tokens in zip(
        images, token_numbers(subject.encoder.model.tokenizer, list(images)), strict=True
    ):
        same.setdefault(tokens, []).append(text)
    affected = [
        text for group in same.values() for text in group if any(images[text] != images[one] for one in group)
    ]
    if affected:
        subject.warn(
            f"{len(affected):,} of {counted(len(images), 'distinct caption')} have the same tokens as a caption of "
            f"another image, so the model cannot tell them apart: {_shown(affected)}"
        )


def report_choices(subject: Subject) -> None:
    """Warn of images whose right caption has the same tokens as a different, wrong one."""
    choices = subject.dataset.choices
    if choices is None:
        return
    texts = list({text: None for own in choices for text in own})
    tokens = dict(zip(texts, token_numbers(subject.encoder.model.tokenizer, texts), strict=True))
    affected = [
        own[0] for own in choices if any(one != own[0] and tokens[one] == tokens[own[0]] for one in own[1:])
    ]
    if affected:
        subject.warn(
            f"{len(affected):,} of {counted(len(choices), 'image')} have a right caption with the same tokens as a "
            f"wrong one, so the model cannot tell them apart: {_shown(affected)}"
        )


def _shown(texts: Sequence[str]) -> str:
    return some([repr(text[:_SHOWN]) for text in texts])


def zero_shot(subject: Subject, *, calibration: bool = False) -> list[Score]:
    """The subject's metrics; where it names none, the default ones.

    Args:
        subject: the model and the dataset.
        calibration: whether to add the expected calibration error, if images have one label, and the accuracy by
            superclass, if the dataset has superclasses.

    Raises:
        DataError: the dataset has no labels or class names, or a metric does not apply to it.
    """
    dataset = subject.dataset
    answers = Answers(
        dataset, subject.images().projected, subject.class_weights(), subject.logit_scale, subject.device
    )
    metrics = fitting_metrics(dataset, subject.metrics)
    if calibration and answers.labels.dim() == 1:
        metrics += ("ece",)
    if calibration and dataset.superclasses:
        metrics += ("superclass_acc1",)
    return classification_scores(answers, task="zero-shot", metrics=tuple(dict.fromkeys(metrics)))


def run_zero_shot(subject: Subject, options: Options) -> Outcome:
    """The task ``zero-shot``."""
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
