"""Metrics: from features to ranks and predictions, and from these to values with 95% intervals.

Metrics follow the dataset's authors or the CLIP paper; docstrings note where CLIP_benchmark, WILDS,
DataComp or scikit-learn differ. A NaN similarity never helps a model, and a tie between a right and a wrong
candidate counts as wrong, except among classes, where the lower index comes first, as in ``argmax``.

``METRICS`` maps the names in cards and results to their entries.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Never, TypeVar

import torch
from torch import Tensor

from clipkit.errors import DataError, nearest
from eval.metrics import captions, classes, graded, intervals, pairs
from eval.metrics.captions import Descriptions, caption_tokens
from eval.metrics.classes import calibration_bins, count_confusion, count_correct, merge_superclasses
from eval.metrics.graded import Judged, judge_ranking
from eval.metrics.intervals import (
    Comparison,
    Estimate,
    Statistic,
    compare_correct,
    compare_means,
    compare_statistics,
)
from eval.metrics.pairs import (
    DIRECTIONS,
    Choices,
    Direction,
    Judgments,
    Winoground,
    jaccard_index,
    kendall_tau,
    pairwise_correct,
    score_winoground,
)
from eval.metrics.ranks import (
    Answers,
    class_ranks,
    class_scores,
    full_float32,
    match_ranks,
    stable_top_k,
    top_classes,
)

__all__ = [
    "DIRECTIONS",
    "EVERY",
    "METRICS",
    "Answers",
    "Choices",
    "Comparison",
    "Descriptions",
    "Direction",
    "Estimate",
    "Judged",
    "Judgments",
    "Metric",
    "calibration_bins",
    "caption_tokens",
    "class_ranks",
    "class_scores",
    "compare_correct",
    "compare_means",
    "compare_statistics",
    "count_confusion",
    "count_correct",
    "full_float32",
    "get_metric",
    "is_fraction",
    "is_informative",
    "is_rank",
    "jaccard_index",
    "judge_ranking",
    "lower_is_better",
    "match_ranks",
    "merge_superclasses",
    "metric_title",
    "pairwise_correct",
    "score_winoground",
    "stable_top_k",
    "top_classes",
]

Kind = Literal["one-label", "multi-label", "retrieval", "captioning", "compositional", "judgments"]
Inputs = TypeVar("Inputs", contravariant=True)
Directions = Mapping[str, Direction]  # by DIRECTIONS
EVERY = "*"  # in a name on a card, in place of a rank or label
_MOST_AREAS = 128  # classes of which all pairs are compared


@dataclass(frozen=True, kw_only=True)
class Metric(Generic[Inputs]):
    """The registry entry of a metric.

    Attributes:
        kind: images with one or several labels, retrieval of captions, generated captions, choices between
            captions, or human judgments of captions.
        function: computes it from ``Answers``, ``Directions``, ``Descriptions``, ``Choices`` or ``Judgments``; None
            if it is undefined for them.
        chance: its value for random guessing; None if that is not a single number.
        title: name on pages and in tables; by default the key with spaces.
        larger_is_better: False for ranks, errors and perplexity.
        highest: upper bound. None for ranks and perplexity, which start at 1.
        lowest: lower bound, -1 for agreement beyond chance.
        least: minimum number of classes or candidates for it to be meaningful.
        most: maximum number of classes for which it is defined.
        by_default: whether retrieval reports it, and classification if the card names no metric.
        needs_probabilities: whether it needs logits; votes and ridge scores are not.
        needs_superclasses: whether the card must define superclasses.
        needs_order: whether the card must state that its classes are ordered.
        column: the metadata column that it needs; "" for none.
        taxon: the rank of the classes' taxonomy that it needs; "" for none, ``EVERY`` for a metric of each.
        value: computes the value alone from ``value_from`` and the labels. Required for choosing C of a linear
            probe.
        value_from: (N,) ranks, (N,) predictions or (N, C) scores.
        item_values: for paired tests, (N,) or (N, K) values for the details, from which ``item_statistic`` computes
            it.
        item_statistic: for paired tests, the statistic of the (N,) or (N, K) values in the details and the labels,
            if not the mean.
        items: for paired tests, (N,) values with this mean, from the right items of ``items_from`` and the labels.
        items_from: the metrics of the details that ``items`` takes.
    """

    kind: Kind
    function: Callable[[Inputs], Estimate | None]
    chance: Callable[[Inputs], float | None] = lambda _: None
    title: str = ""
    larger_is_better: bool = True
    highest: float | None = 1.0
    lowest: float = 0.0
    least: int = 1
    most: int | None = None
    by_default: bool = False
    needs_probabilities: bool = False
    needs_superclasses: bool = False
    needs_order: bool = False
    column: str = ""
    taxon: str = ""
    value: Callable[[Tensor, Tensor], float] | None = None
    value_from: Literal["ranks", "predictions", "scores"] = "ranks"
    item_values: Callable[[Inputs], Tensor] | None = None
    item_statistic: Callable[[Tensor, Any], Statistic] | None = None
    items: Callable[[Mapping[str, Tensor], Tensor], Tensor] | None = None
    items_from: tuple[str, ...] = ()


def _top_k(k: int) -> Metric[Answers]:
    return Metric(
        kind="one-label",
        function=lambda answers: classes.top_k_accuracy(answers.ranks, k),
        chance=lambda answers: min(1.0, k / answers.classes),
        title=f"top-{k}",
        least=1 if k == 1 else k + 1,
        by_default=True,
        value=lambda ranks, _: float((ranks < k).double().mean()),
    )


def _mean_per_class(answers: Answers) -> Estimate:
    correct = answers.ranks < 1
    low, high = classes.mean_per_class_interval(correct, answers.labels)
    value = classes.mean_per_class_recall(correct, answers.labels)
    return Estimate(value=value, low=low, high=high, n=len(correct))


def _class_weights(labels: Tensor) -> Tensor:
    """Return (N,) float64 weights with which the mean over images is the mean over classes."""
    counts = labels.bincount()  # (C,)
    return (len(labels) / (int((counts > 0).sum()) * counts.double()))[labels]


def _difference(answers: Answers) -> Tensor:
    """Return by how much the second of two classes is more similar to each image, (N,)."""
    scores = answers.scores(softmax=False)
    return scores[:, 1] - scores[:, 0]


def _prediction(
    statistic: Callable[[Tensor, Tensor], Statistic],
    estimate: Callable[[Tensor, Tensor], Estimate | None],
    *,
    title: str = "",
    chance: float | None = None,
    most: int | None = None,
    lowest: float = 0.0,
) -> Metric[Answers]:
    """Return a metric of the predicted class of each image.

    Args:
        statistic: of (N,) predictions and labels.
        estimate: its value with its interval.
    """

    def value(predicted: Tensor, labels: Tensor) -> float:
        number = intervals.evaluate_statistic(statistic(predicted, labels), len(labels))
        return lowest if math.isnan(number) else number

    return Metric(
        kind="one-label",
        function=lambda answers: estimate(answers.top.classes[:, 0], answers.labels),
        chance=lambda _: chance,
        title=title,
        most=most,
        lowest=lowest,
        value=value,
        value_from="predictions",
        item_values=lambda answers: answers.top.classes[:, 0].float(),
        item_statistic=lambda values, labels: statistic(values.long(), labels),
    )


def _agreement(statistic: Callable[[Tensor, Tensor], Statistic], title: str) -> Metric[Answers]:
    def estimate(predicted: Tensor, labels: Tensor) -> Estimate | None:
        return classes.estimate_agreement(statistic(predicted, labels), predicted, labels)

    return _prediction(statistic, estimate, title=title, chance=0.0, most=classes.LARGEST_MATRIX, lowest=-1.0)


def _weighted_kappa(power: int, title: str) -> Metric[Answers]:
    """Return Cohen's kappa in which a mistake counts as the distance of two ordered classes to a power."""

    def positions(answers: Answers) -> Tensor:
        """Return where the prediction and the label of each image are in the order, (N, 2); -1 for none."""
        order = torch.tensor([*answers.dataset.class_order, -1])
        return order[torch.stack([answers.top.classes[:, 0], answers.labels], dim=1)]

    def statistic(rows: Tensor) -> Statistic:
        predicted, labels = rows.long().unbind(dim=1)
        return classes.cohen_kappa_statistic(predicted, labels, power=power)

    def estimate(answers: Answers) -> Estimate | None:
        rows = positions(answers)
        return classes.estimate_agreement(statistic(rows), *rows.unbind(dim=1))

    return Metric(
        kind="one-label",
        function=estimate,
        chance=lambda _: 0.0,
        title=title,
        most=classes.LARGEST_MATRIX,
        lowest=-1.0,
        needs_order=True,
        item_values=lambda answers: positions(answers).float(),
        item_statistic=lambda rows, _: statistic(rows),
    )


def _if_defined(
    estimate: Callable[[Tensor, Tensor], Estimate], scores: Tensor, labels: Tensor
) -> Estimate | None:
    """Return an area or a precision; None if no class has the images that it needs."""
    try:
        return estimate(scores, labels)
    except classes.UndefinedMetric:
        return None


def _areas(
    kind: Kind,
    statistic: Callable[[Tensor, Tensor], Statistic],
    estimate: Callable[[Tensor, Tensor], Estimate],
    *,
    title: str,
) -> Metric[Answers]:
    """Return a mean of areas under ROC curves, of log-probabilities if each image has one label."""
    softmax = kind == "one-label"

    def scores(answers: Answers) -> Tensor:
        return answers.scores(softmax=softmax)

    return Metric(
        kind=kind,
        function=lambda answers: _if_defined(estimate, scores(answers), answers.known_labels),
        chance=lambda _: 0.5,
        title=title,
        least=2,
        most=_MOST_AREAS,
        needs_probabilities=softmax,
        item_values=scores,
        item_statistic=statistic,
    )


def _superclass(answers: Answers) -> Estimate:
    by_class = count_confusion(answers.top.classes[:, 0], answers.labels)
    return merge_superclasses(by_class, answers.dataset.number_superclasses()).accuracy()


def _rank_accuracy(rank: str) -> Metric[Answers]:
    """Return top-1 accuracy where a class counts as another one that equals it up to a rank of their taxonomy."""

    def correct(answers: Answers) -> Tensor:
        predicted = answers.top.classes[:, 0]
        taxon = answers.dataset.number_taxa(rank)  # (C,)
        return (taxon[predicted] == taxon[answers.labels]) & (predicted >= 0)

    def chance(answers: Answers) -> float:
        taxon = answers.dataset.number_taxa(rank)  # (C,)
        return float(taxon.bincount()[taxon[answers.labels]].double().mean() / answers.classes)

    def estimate(answers: Answers) -> Estimate:
        right = correct(answers)
        return intervals.estimate_proportion(int(right.sum()), len(right))

    return Metric(
        kind="one-label",
        function=estimate,
        chance=chance,
        title=f"top-1 {rank}",
        taxon=rank,
        item_values=correct,
    )


def _precision(function: Callable[[Tensor, Tensor], Estimate], *, softmax: bool = False) -> Metric[Answers]:
    interpolated = function is classes.map_11_point
    value = None
    if not softmax:
        value = partial(classes.mean_of_precisions, interpolated=interpolated)
    return Metric(
        kind="multi-label",
        function=lambda answers: _if_defined(function, answers.scores(softmax=softmax), answers.known_labels),
        by_default=True,
        value=value,
        value_from="scores",
        item_values=lambda answers: answers.scores(softmax=softmax),
        item_statistic=partial(classes.mean_average_precision_statistic, interpolated=interpolated),
    )


_LABEL_METRICS = {
    "roc_auc": (classes.roc_auc_macro, classes.roc_auc_macro_statistic, 0.5),
    "average_precision": (classes.mean_average_precision, classes.mean_average_precision_statistic, None),
}


def _create_label_metric(kind: str, label: str) -> Metric[Answers]:
    """Return the area or the average precision of a single label."""
    estimate, statistic, chance = _LABEL_METRICS[kind]

    def columns(answers: Answers) -> Tensor:
        """Return the score and the label of each image, (N, 2)."""
        names = answers.dataset.class_names
        if label not in names:
            raise DataError(f"dataset {answers.dataset.name} has no label {label!r}: {nearest(label, names)}")
        i = names.index(label)
        return torch.stack([answers.scores(softmax=False)[:, i], answers.known_labels[:, i].float()], dim=1)

    def estimate_known(answers: Answers) -> Estimate | None:
        values = columns(answers)
        return _if_defined(estimate, *values[values[:, 1] >= 0].split(1, dim=1))

    return Metric(
        kind="multi-label",
        function=estimate_known,
        chance=lambda _: chance,
        title=f"{kind.replace('_', ' ').replace('roc auc', 'ROC AUC')} of {label}",
        item_values=columns,
        item_statistic=lambda values, _: statistic(*values.split(1, dim=1)),
    )


def _anchors(*, nearby: bool, title: str) -> Metric[Answers]:
    return Metric(
        kind="multi-label",
        function=lambda answers: classes.anchor_accuracy(
            answers.top.classes[:, 0], answers.labels, answers.group("anchor"), nearby=nearby
        ),
        title=title,
        by_default=True,
        column="anchor",
    )


def _recall(direction: str, k: int, *, by_default: bool = False) -> Metric[Directions]:
    return Metric(
        kind="retrieval",
        function=lambda directions: directions[direction].recall(k),
        chance=lambda directions: directions[direction].chance(k),
        title=f"{direction.replace('_', ' ')} R@{k}",
        least=1 if k == 1 else k + 1,
        by_default=by_default,
    )


_ALL = 1 << 60  # candidates
# a direction, and one of R and ``graded.GRADED``, perhaps of the first k candidates, or RBP with its persistence
_RETRIEVAL = re.compile(
    rf"({'|'.join(DIRECTIONS)})_(?:(R|{'|'.join(graded.GRADED)})(?:@([1-9]\d{{0,5}}))?|RBP(?:_(0?\.\d{{1,6}}))?)"
)


def _parse_retrieval(name: str) -> Metric[Directions] | None:
    """Return the metric of one direction that a name with any k stands for, or None."""
    match = _RETRIEVAL.fullmatch(name)
    if match is None:
        return None
    direction, kind, digits, persistence = match.groups()
    k = int(digits or _ALL)
    if kind in ("R", "P") and not digits:
        return None
    if kind == "R":
        return _recall(direction, k)
    values: Callable[[Judged], intervals.Floats]
    if kind:
        values = partial(graded.GRADED[kind], k=k)
    else:
        values = partial(graded.rank_biased_precision, persistence=float(persistence or 0.8))
    return Metric(
        kind="retrieval",
        function=lambda directions: intervals.estimate_mean(values(directions[direction].judged)),
        chance=lambda directions: float(values(directions[direction].judged.at_random).mean()),
        title=name.replace(f"{direction}_", f"{direction.replace('_', ' ')} "),
        least=k if kind == "P" else 1,
        item_values=lambda directions: torch.from_numpy(values(directions[direction].judged)),
    )


def _retrieval(direction: str) -> dict[str, Metric[Directions]]:
    def rank(function: Callable[[Tensor, Tensor], Estimate]) -> Metric[Directions]:
        return Metric(
            kind="retrieval",
            function=lambda directions: function(directions[direction].ranks, directions[direction].weight),
            larger_is_better=False,
            highest=None,
            by_default=True,
        )

    metrics = {f"R@{k}": _recall(direction, k, by_default=True) for k in (1, 5, 10)}
    metrics |= {"mean_rank": rank(pairs.mean_rank), "median_rank": rank(pairs.median_rank)}
    named = {f"{direction}_{name}": metric for name, metric in metrics.items()}
    for name in (f"{direction}_{name}" for name in ("P@10", "MRR", "MAP", "nDCG@10", "ERR", "RBP")):
        metric = _parse_retrieval(name)
        assert metric is not None, name
        named[name] = metric
    return named


def _mean_recall(*ks: int, by_default: bool = False) -> Metric[Directions]:
    """Return the mean over both directions and some k; its interval and tests resample images with captions."""

    def items(directions: Directions) -> Tensor:
        return pairs.mean_recall_items(directions["image_to_text"], directions["text_to_image"], ks)

    def estimate(directions: Directions) -> Estimate:
        rows = items(directions)
        return intervals.estimate_statistic(pairs.mean_recall_statistic(rows), len(rows), trials=len(rows))

    def chance(directions: Directions) -> float:
        recalls = [directions[direction].chance(k) for direction in DIRECTIONS for k in ks]
        return sum(recalls) / len(recalls)

    return Metric(
        kind="retrieval",
        function=estimate,
        chance=chance,
        least=1 if ks == (1,) else max(ks) + 1,
        by_default=by_default,
        item_values=items,
        item_statistic=lambda values, _: pairs.mean_recall_statistic(values),
    )


def _accuracy(correct: Callable[[Choices], Tensor | None]) -> Metric[Choices]:
    """Return a metric that is the mean over images (bool) or groups of images (float)."""

    def function(choices: Choices) -> Estimate | None:
        values = correct(choices)
        if values is None or not len(values):
            return None
        if values.dtype == torch.bool:
            return intervals.estimate_proportion(int(values.sum()), len(values))
        return intervals.estimate_mean(values)

    return Metric(kind="compositional", function=function, chance=lambda choices: choices.chance)


def _winoground(part: Callable[[Winoground], Estimate], chance: float) -> Metric[Choices]:
    return Metric(
        kind="compositional",
        function=lambda choices: None if choices.winoground is None else part(choices.winoground),
        chance=lambda _: chance,
    )


def _jaccard(least: int, most: int) -> Metric[Choices]:
    def function(choices: Choices) -> Estimate | None:
        chosen = choices.select_cues(least, most)
        return intervals.estimate_mean(choices.jaccard[chosen]) if chosen.any() else None

    return Metric(
        kind="compositional",
        function=function,
        chance=lambda choices: float(choices.jaccard_of_chance[choices.select_cues(least, most)].mean()),
    )


def _kendall(variant: Literal["b", "c"]) -> Metric[Judgments]:
    return Metric(
        kind="judgments",
        function=lambda judgments: kendall_tau(judgments, variant),
        chance=lambda _: 0.0,
        title=f"Kendall's tau-{variant}",
        lowest=-1.0,
    )


METRICS: Mapping[str, Metric[Never]] = {
    "acc1": _top_k(1),
    "acc5": _top_k(5),
    "mean_per_class_recall": Metric[Answers](
        kind="one-label",
        function=_mean_per_class,
        chance=lambda answers: 1 / answers.classes,
        by_default=True,
        value=lambda ranks, labels: classes.mean_per_class_recall(ranks < 1, labels),
        items=lambda right, labels: right["acc1"] * _class_weights(labels),
        items_from=("acc1",),
    ),
    "mean_top1_top5": Metric[Answers](
        kind="one-label",
        function=lambda answers: classes.mean_of_top1_and_top5(answers.ranks),
        chance=lambda answers: (1 / answers.classes + min(1.0, 5 / answers.classes)) / 2,
        least=6,
        value=lambda ranks, _: float(((ranks < 1).double() + (ranks < 5).double()).mean() / 2),
        items=lambda right, _: (right["acc1"].double() + right["acc5"].double()) / 2,
        items_from=("acc1", "acc5"),
    ),
    "f1_macro": _prediction(classes.f1_macro_statistic, classes.f1_macro),
    "f1_weighted": _prediction(classes.f1_weighted_statistic, classes.f1_weighted),
    "cohen_kappa": _agreement(classes.cohen_kappa_statistic, "Cohen's kappa"),
    "cohen_kappa_linear": _weighted_kappa(1, "Cohen's kappa, linear weights"),
    "cohen_kappa_quadratic": _weighted_kappa(2, "Cohen's kappa, quadratic weights"),
    "matthews_correlation": _agreement(classes.matthews_statistic, "Matthews's correlation"),
    "roc_auc": Metric[Answers](
        kind="one-label",
        function=lambda answers: _if_defined(classes.roc_auc, _difference(answers), answers.labels),
        chance=lambda _: 0.5,
        least=2,
        most=2,
        value=lambda scores, labels: intervals.evaluate_statistic(
            classes.roc_auc_statistic(scores[:, 1] - scores[:, 0], labels), len(labels)
        ),
        value_from="scores",
        item_values=_difference,
        item_statistic=classes.roc_auc_statistic,
    ),
    "roc_auc_one_vs_rest": _areas(
        "one-label",
        classes.roc_auc_macro_statistic,
        classes.roc_auc_macro,
        title="ROC AUC, one class against the rest",
    ),
    "roc_auc_one_vs_one": _areas(
        "one-label",
        classes.roc_auc_one_vs_one_statistic,
        classes.roc_auc_one_vs_one,
        title="ROC AUC, pairs of classes",
    ),
    "ece": Metric[Answers](
        kind="one-label",
        function=lambda answers: classes.expected_calibration_error(
            answers.top.probabilities[:, 0], answers.ranks < 1
        ),
        larger_is_better=False,
        needs_probabilities=True,
    ),
    "superclass_acc1": Metric[Answers](
        kind="one-label",
        function=_superclass,
        title="superclass top-1",
        needs_superclasses=True,
    ),
    "shape_bias": Metric[Answers](
        kind="one-label",
        function=lambda answers: classes.shape_bias(
            answers.top.classes[:, 0], answers.labels, answers.group("texture")
        ),
        chance=lambda _: 0.5,
        by_default=True,
        column="texture",
    ),
    "mean_average_precision": _precision(classes.mean_average_precision),
    "map_11_point": _precision(classes.map_11_point),
    "mean_average_precision_softmax": _precision(classes.mean_average_precision, softmax=True),
    "map_11_point_softmax": _precision(classes.map_11_point, softmax=True),
    "roc_auc_macro": _areas(
        "multi-label",
        classes.roc_auc_macro_statistic,
        classes.roc_auc_macro,
        title="ROC AUC, mean over labels",
    ),
    "any_label_acc1": Metric[Answers](
        kind="multi-label",
        function=lambda answers: classes.any_label_accuracy(answers.top.classes[:, 0], answers.known_labels),
        chance=lambda answers: float(
            answers.labels.sum(dim=1)[answers.labels.any(dim=1)].double().mean() / answers.classes
        ),
        title="top-1 among the labels",
    ),
    "pm0": _anchors(nearby=False, title="top-1 of anchor frames"),
    "pm10": _anchors(nearby=True, title="top-1 of all frames near an anchor"),
    **_retrieval("image_to_text"),
    **_retrieval("text_to_image"),
    "mean_R@1": _mean_recall(1, by_default=True),
    "mean_recall": _mean_recall(1, 5, 10),
    "cider_d": Metric[Descriptions](
        kind="captioning",
        function=captions.mean_cider_d,
        chance=lambda descriptions: float(descriptions.chance.cider.mean()),
        title="CIDEr-D",
        highest=10.0,
    ),
    "bleu_4": Metric[Descriptions](
        kind="captioning",
        function=captions.bleu_4,
        chance=lambda descriptions: intervals.evaluate_statistic(
            captions.bleu_statistic(descriptions.chance.bleu_counts), len(descriptions.captions)
        ),
        title="BLEU-4",
        item_statistic=lambda counts, _: captions.bleu_statistic(counts.double().numpy()),
    ),
    "exact_match": Metric[Descriptions](
        kind="captioning",
        function=captions.exact_match,
        chance=lambda descriptions: descriptions.exact_chance,
    ),
    "perplexity": Metric[Descriptions](
        kind="captioning",
        function=captions.perplexity,
        larger_is_better=False,
        highest=None,
        item_statistic=lambda counts, _: captions.perplexity_statistic(counts.double().numpy()),
    ),
    "accuracy": _accuracy(lambda choices: choices.correct),
    "macro_accuracy": _accuracy(lambda choices: choices.counted_groups),
    "mean_per_group_accuracy": _accuracy(lambda choices: choices.groups),
    "text": _winoground(lambda pairs: pairs.text, 1 / 4),
    "image": _winoground(lambda pairs: pairs.image, 1 / 4),
    "group": _winoground(lambda pairs: pairs.group, 1 / 6),
    "jaccard": _jaccard(0, 1 << 30),
    "jaccard_10": _jaccard(10, 10),
    "jaccard_12": _jaccard(12, 12),
    "jaccard_10-12": _jaccard(10, 12),
    "kendall_tau_b": _kendall("b"),
    "kendall_tau_c": _kendall("c"),
}


def get_metric(name: str) -> Metric[Never] | None:
    """Return the entry of a metric, or None.

    Besides ``METRICS`` these are ``worst_COLUMN_acc1`` and ``worst_COLUMN_acc5`` for a column of the metadata,
    ``acc1_RANK`` for a rank of the classes' taxonomy, ``roc_auc_of_LABEL`` and ``average_precision_of_LABEL``,
    ``image_to_text_R@K`` and ``text_to_image_R@K`` for any K, likewise ``P@K``, ``MRR``, ``MAP``, ``nDCG`` and
    ``ERR`` with or without ``@K``, ``RBP_0.9`` for a persistence of 0.9, and ``jaccard_N`` for cues with N
    candidates.
    """
    if name in METRICS:
        return METRICS[name]
    match = re.fullmatch(r"worst_(.*)_acc([15])", name, re.DOTALL)
    if match:
        column = match[1]
        k = int(match[2])
        return Metric[Answers](
            kind="one-label",
            function=lambda answers: classes.worst_group_accuracy(answers.ranks < k, answers.group(column)),
            least=1 if k == 1 else k + 1,
            column=column,
        )
    match = re.fullmatch(rf"({'|'.join(_LABEL_METRICS)})_of_(.+)", name, re.DOTALL)
    if match:
        return _create_label_metric(match[1], match[2])
    match = re.fullmatch(r"acc1_(.+)", name, re.DOTALL)
    if match:
        return _rank_accuracy(match[1])
    retrieval = _parse_retrieval(name)
    if retrieval is not None:
        return retrieval
    match = re.fullmatch(r"jaccard_(\d{1,9})", name)
    if match:
        return _jaccard(int(match[1]), int(match[1]))
    return None


_STD = "_std"  # suffix of a metric: its standard deviation over seeds


def metric_title(metric: str) -> str:
    """Format the name of a metric, such as "top-1" for "acc1"."""
    if metric.endswith(_STD):
        return f"{metric_title(metric.removesuffix(_STD))} std"
    entry = get_metric(metric)
    return (entry.title if entry is not None else "") or metric.replace("_", " ")


def is_informative(metric: str, n: int | None) -> bool:
    """Whether a score is informative: the standard deviation over a single seed is not."""
    return not metric.endswith(_STD) or n is None or n > 1


def is_rank(metric: str) -> bool:
    """Whether a metric starts at 1, as ranks and perplexity do."""
    return metric in METRICS and METRICS[metric].highest is None


def lower_is_better(metric: str) -> bool:
    """Whether the best model is the one with the lowest value."""
    return metric in METRICS and not METRICS[metric].larger_is_better


def is_fraction(metric: str, *values: float | None) -> bool:
    """Whether a metric is at most 1 and shown in percent; ranks and CIDEr-D are not, others if their values are."""
    if metric in METRICS:
        return METRICS[metric].highest == 1.0
    return all(0 <= value <= 1 for value in values if value is not None)
