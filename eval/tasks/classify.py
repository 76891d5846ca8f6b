"""The metrics of a classifier, whoever made it: each by its name, as a dataset's card gives it.

The names: acc1, acc5, mean_top1_top5, mean_per_class_recall, f1_macro, ece; superclass_acc1 where the card groups
classes; worst_GROUP_acc1 and worst_GROUP_acc5 for a column of the dataset's metadata; roc_auc for two classes; of
pictures with several labels, mean_average_precision and map_11_point, with ``_softmax`` behind them where pictures
are ranked by probabilities instead of similarities.

Letters in shape comments: N pictures, D numbers a picture, C classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.files.count import counted
from clipkit.model.zero_shot import indistinguishable_classes, token_numbers
from eval.datasets.dataset import EvalDataset, Lacks, some, superclass_numbers
from eval.metrics import (
    Estimate,
    TopClasses,
    class_ranks,
    class_scores,
    confusion,
    expected_calibration_error,
    f1_macro,
    map_11_point,
    mean_average_precision,
    mean_of_top1_and_top5,
    mean_per_class_interval,
    mean_per_class_recall,
    roc_auc,
    superclass_confusion,
    top_classes,
    top_k_accuracy,
    worst_group_accuracy,
)
from eval.results.scores import Score
from eval.tasks.subject import Subject

__all__ = [
    "Answers",
    "classification_scores",
    "fitting_metrics",
    "labels_of",
    "metric_names",
    "report_captions",
    "report_choices",
    "report_classes",
    "zero_shot",
]


@dataclass(frozen=True, eq=False)
class Answers:
    """What a linear classifier says of a dataset's pictures, each kind of answer computed when it is asked for.

    Attributes:
        dataset: with labels.
        features: (N, D) float32.
        classifier: (D, C) float32.
        logit_scale: what similarities are multiplied with to be logits.
        device: where products are taken.
    """

    dataset: EvalDataset
    features: Tensor
    classifier: Tensor
    logit_scale: float
    device: torch.device

    @cached_property
    def labels(self) -> Tensor:
        """(N,) int64, or (N, C) bool."""
        return labels_of(self.dataset)

    @cached_property
    def ranks(self) -> Tensor:
        """(N,) int64, how many classes come before the right one."""
        return class_ranks(self.features, self.classifier, self.labels, device=self.device)

    @cached_property
    def top(self) -> TopClasses:
        """The likeliest class and its probability."""
        return top_classes(self.features, self.classifier, logit_scale=self.logit_scale, device=self.device)

    def scores(self, *, softmax: bool) -> Tensor:
        """(N, C) float32, by which pictures are ranked for each class."""
        scale = self.logit_scale if softmax else None
        return class_scores(self.features, self.classifier, softmax_scale=scale, device=self.device)

    def group(self, name: str) -> Tensor:
        """A column of the metadata, (N,) int64."""
        if name not in self.dataset.metadata:
            there = ", ".join(self.dataset.metadata) or "none"
            raise DataError(
                f"dataset {self.dataset.name}: a metric needs the column {name!r} of metadata; there is {there}"
            )
        return self.dataset.metadata[name]


def _superclass(answers: Answers) -> Estimate:
    taken = confusion(answers.top.classes[:, 0], answers.labels)
    return superclass_confusion(taken, superclass_numbers(answers.dataset)).accuracy()


def _mean_per_class(answers: Answers) -> Estimate:
    correct = answers.ranks < 1
    low, high = mean_per_class_interval(correct, answers.labels)
    value = mean_per_class_recall(correct, answers.labels)
    return Estimate(value=value, low=low, high=high, n=len(correct))


def _ece(answers: Answers) -> Estimate:
    return expected_calibration_error(answers.top.probabilities[:, 0], answers.ranks < 1)


def _roc_auc(answers: Answers) -> Estimate:
    scores = answers.scores(softmax=False)
    return roc_auc(scores[:, 1] - scores[:, 0], answers.labels)


def _f1(answers: Answers) -> Estimate:
    return f1_macro(answers.top.classes[:, 0], answers.labels)


_OF_ONE_LABEL: Mapping[str, Callable[[Answers], Estimate]] = {
    "acc1": lambda answers: top_k_accuracy(answers.ranks),
    "acc5": lambda answers: top_k_accuracy(answers.ranks, 5),
    "mean_per_class_recall": _mean_per_class,
    "mean_top1_top5": lambda answers: mean_of_top1_and_top5(answers.ranks),
    "f1_macro": _f1,
    "roc_auc": _roc_auc,
    "ece": _ece,
    "superclass_acc1": _superclass,
}
_OF_SEVERAL: Mapping[str, Callable[[Answers], Estimate]] = {
    "mean_average_precision": lambda a: mean_average_precision(a.scores(softmax=False), a.labels),
    "map_11_point": lambda a: map_11_point(a.scores(softmax=False), a.labels),
    "mean_average_precision_softmax": lambda a: mean_average_precision(a.scores(softmax=True), a.labels),
    "map_11_point_softmax": lambda a: map_11_point(a.scores(softmax=True), a.labels),
}
_WORST = {"_acc1": 1, "_acc5": 5}


def metric_names() -> tuple[str, ...]:
    """The known metrics; those of groups are worst_GROUP_acc1 and worst_GROUP_acc5."""
    return (*_OF_ONE_LABEL, *_OF_SEVERAL)


def labels_of(dataset: EvalDataset) -> Tensor:
    """The labels, (N,) int64 or (N, C) bool.

    Raises:
        Lacks: the dataset has none, or no class names for them.
    """
    if dataset.labels is None:
        raise Lacks(f"dataset {dataset.name} has no labels, which classification needs")
    if not dataset.class_names:
        raise Lacks(f"dataset {dataset.name} has no classnames.txt, which classification needs")
    return dataset.labels


def fitting_metrics(dataset: EvalDataset, metrics: Sequence[str]) -> tuple[str, ...]:
    """Of a card's metrics those of classification; the usual ones where there are none.

    Raises:
        DataError: one is not for a dataset of this kind.
    """
    labels, classes = labels_of(dataset), len(dataset.class_names)
    several = labels.dim() == 2
    known = metric_names()
    chosen = tuple(metric for metric in metrics if metric in known or _group_metric(metric) is not None)
    if not chosen:
        usual = ("acc1", *(("acc5",) if classes > 5 else ()), "mean_per_class_recall")
        return tuple(_OF_SEVERAL) if several else usual
    for metric in chosen:
        if (metric in _OF_SEVERAL) != several:
            kind = "several labels a picture" if several else "one label a picture"
            raise DataError(f"dataset {dataset.name} has {kind}, the metric {metric} is for the other kind")
        if metric == "roc_auc" and classes != 2:
            raise DataError(f"dataset {dataset.name} has {classes} classes, roc_auc is for 2")
    return chosen


def classification_scores(
    answers: Answers, *, task: str, metrics: Sequence[str] = (), setting: str = ""
) -> list[Score]:
    """Score a classifier's answers.

    Args:
        answers: what it says.
        task: for the scores, such as "zero-shot".
        metrics: a card's, of which those of classification count; none for the usual ones.
        setting: for the scores, such as "4-shot".

    Raises:
        DataError: a metric is not for a dataset of this kind, or not defined for these labels.
    """
    dataset = answers.dataset
    scores = []
    for metric in fitting_metrics(dataset, metrics):
        found = _estimate(answers, metric)
        scores.append(
            Score(
                dataset=dataset.name,
                split=dataset.split,
                task=task,
                prompt_set=dataset.prompt_set if task == "zero-shot" else "",
                setting=setting,
                metric=metric,
                value=found.value,
                n=found.n,
                low=found.low,
                high=found.high,
                chance=_chance(answers, metric),
            )
        )
    return scores


def _estimate(answers: Answers, metric: str) -> Estimate:
    if (group := _group_metric(metric)) is not None:
        name, k = group
        return worst_group_accuracy(answers.ranks < k, answers.group(name))
    return (_OF_SEVERAL if metric in _OF_SEVERAL else _OF_ONE_LABEL)[metric](answers)


def _group_metric(metric: str) -> tuple[str, int] | None:
    """Of "worst_region_acc1" ("region", 1)."""
    for ending, k in _WORST.items():
        if metric.startswith("worst_") and metric.endswith(ending):
            return metric.removeprefix("worst_").removesuffix(ending), k
    return None


def _chance(answers: Answers, metric: str) -> float | None:
    """What random guessing gives on average, where that is one number."""
    classes = len(answers.dataset.class_names)
    known = {
        "acc1": 1 / classes,
        "acc5": min(1.0, 5 / classes),
        "mean_per_class_recall": 1 / classes,
        "mean_top1_top5": (1 / classes + min(1.0, 5 / classes)) / 2,
        "roc_auc": 0.5,
    }
    return known.get(metric)


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


# --------------------------------------------------------------------------------------------------------------
# Zero-shot classification: pictures against the class names' prompts (Radford et al. 2021, section 3.1).


def zero_shot(subject: Subject, *, calibration: bool = False) -> list[Score]:
    """The subject's metrics; where it names none, ``acc1``, ``acc5`` (of more than 5 classes), the mean per class.

    Args:
        subject: the model and the dataset.
        calibration: whether the expected calibration error is measured too, where a picture has one label.

    Raises:
        DataError: the dataset has no labels or no class names, or they are not what a metric needs.
    """
    answers = Answers(
        subject.dataset,
        subject.images().projected,
        subject.class_weights(),
        subject.logit_scale,
        subject.device,
    )
    metrics = fitting_metrics(subject.dataset, subject.metrics)
    if calibration and answers.labels.dim() == 1 and "ece" not in metrics:
        metrics = (*metrics, "ece")
    if calibration and subject.dataset.superclasses:
        metrics = (*metrics, "superclass_acc1")
    return classification_scores(answers, task="zero-shot", metrics=metrics)
