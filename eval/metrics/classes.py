"""Classification: accuracies over images, classes and groups, F1, calibration error, confusion, AP, and ROC AUC.

Metrics that rank images group those with equal scores, so no metric depends on file order. A NaN ranks last for a
positive image and first for a negative one.

Dimensions: N images, C classes, G groups, B bins, P pairs of classes, K positive images of a class, R resamples.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.inference import wilson_interval
from eval.metrics.intervals import (
    Bools,
    Estimate,
    Floats,
    Ints,
    Statistic,
    bootstrap_interval,
    estimate_mean,
    estimate_proportion,
    estimate_statistic,
    evaluate_statistic,
)


class UndefinedMetric(DataError):
    """A metric of images that lack what it needs, such as labels of both kinds."""


def top_k_accuracy(ranks: Tensor, k: int = 1) -> Estimate:
    """Compute top-k accuracy; ``acc1`` and ``acc5`` in CLIP_benchmark, where ``topk`` orders ties arbitrarily.

    Args:
        ranks: (N,) int64 of ``class_ranks``, from 0; N ≥ 1.
        k: at least 1.
    """
    return estimate_proportion(int((ranks < k).sum()), len(ranks))


def mean_of_top1_and_top5(ranks: Tensor) -> Estimate:
    """Compute the mean of top-1 and top-5 accuracy, the CLIP paper's metric for Kinetics-700 (table 9).

    Args:
        ranks: (N,) int64 of ``class_ranks``, from 0; N ≥ 1.
    """
    return estimate_mean(((ranks < 1).double() + (ranks < 5).double()) / 2)


def mean_per_class_recall(correct: Tensor, labels: Tensor) -> float:
    """Compute the mean over classes of recall; classes without images do not count.

    Also called mean per class accuracy, macro recall and balanced accuracy; ``mean_per_class_recall`` in
    CLIP_benchmark and ``recall-macro_all`` in WILDS.

    Args:
        correct: (N,) bool.
        labels: (N,) int64, at least 0.
    """
    right, total = _count_correct_in_present_classes(correct, labels)
    return float((right / total).mean())


def mean_per_class_interval(correct: Tensor, labels: Tensor) -> tuple[float, float]:
    """Compute the 95% interval of ``mean_per_class_recall``.

    Each end is the wider of the bootstrap's and of Wilson's at the effective number of images, C² / Σ 1/nᵢ. The
    bootstrap is far too narrow if most classes are all right or all wrong, and Wilson's if only small classes vary.

    Args:
        correct: (N,) bool.
        labels: (N,) int64, at least 0.
    """
    right, total = _count_correct_in_present_classes(correct, labels)
    value = float((right / total).mean())
    trials = effective_trials(total)
    wilson = wilson_interval(value * trials, trials)

    def mean(drawn: Ints) -> Floats:
        hits, misses = np.split(drawn, 2, axis=1)
        count = hits + misses  # (R, C)
        result: Floats = (hits / np.maximum(count, 1)).sum(axis=1) / (count > 0).sum(axis=1)
        return result

    # drawing images with replacement is drawing from the (class, right or wrong) cells
    low, high = bootstrap_interval(mean, np.concatenate([right, total - right]).astype(np.int64))
    return min(low, wilson[0]), max(high, wilson[1])


def effective_trials(sizes: Floats | Ints) -> float:
    """Return the number of trials with about the variance of a mean over classes of these sizes: C² / Σ 1/nᵢ."""
    return len(sizes) ** 2 / float((1 / sizes).sum())


def _count_correct_in_present_classes(correct: Tensor, labels: Tensor) -> tuple[Floats, Floats]:
    label = labels.cpu().numpy()
    total = np.bincount(label)
    right = np.bincount(label, weights=correct.cpu().numpy(), minlength=len(total))
    present = total > 0
    return right[present].astype(np.float64), total[present].astype(np.float64)


def count_correct(correct: Tensor, labels: Tensor, classes: int) -> tuple[Ints, Ints]:
    """Count the correct images and all images of each class, both (C,) int64.

    Args:
        correct: (N,) bool.
        labels: (N,) int64 in 0 … C-1.
        classes: C, including classes without images.
    """
    label = labels.cpu().numpy()
    right = np.bincount(label[correct.cpu().numpy()], minlength=classes)
    return right, np.bincount(label, minlength=classes)


def f1_macro(predicted: Tensor, labels: Tensor) -> Estimate:
    """Compute the mean over classes of 2 TP / (2 TP + FP + FN), iWildCam's metric (WILDS, arXiv 2012.07421).

    Only classes with images count, as in WILDS and DataComp (``F1-macro_all``). scikit-learn's ``average="macro"``
    also counts classes that were only predicted, as 0.

    Args:
        predicted: (N,) int64; -1 for no prediction.
        labels: (N,) int64; N ≥ 1.
    """
    sizes = np.unique(labels.cpu().numpy(), return_counts=True)[1]
    return estimate_statistic(
        f1_macro_statistic(predicted, labels), len(labels), trials=effective_trials(sizes)
    )


def f1_macro_statistic(predicted: Tensor, labels: Tensor) -> Statistic:
    """Return ``f1_macro`` as a statistic of the drawn images."""
    return _f1_statistic(predicted, labels, weighted=False)


def f1_weighted(predicted: Tensor, labels: Tensor) -> Estimate:
    """Compute the mean over images of their class's F1; scikit-learn's ``f1_score(average="weighted")``.

    Args:
        predicted: (N,) int64; -1 for no prediction.
        labels: (N,) int64; N ≥ 1.
    """
    return estimate_statistic(f1_weighted_statistic(predicted, labels), len(labels), trials=len(labels))


def f1_weighted_statistic(predicted: Tensor, labels: Tensor) -> Statistic:
    """Return ``f1_weighted`` as a statistic of the drawn images."""
    return _f1_statistic(predicted, labels, weighted=True)


def _f1_statistic(predicted: Tensor, labels: Tensor, *, weighted: bool) -> Statistic:
    label = labels.cpu().numpy()
    guess = predicted.cpu().numpy()
    classes = int(label.max()) + 1
    count_labels = _class_counter(label, classes)
    count_guesses = _class_counter(np.where(guess < classes, guess, -1), classes)
    right: Bools = label == guess

    def f1(drawn: Ints) -> Floats:
        total = count_labels(drawn)  # (R, C), TP + FN
        hits = count_labels(drawn * right)  # TP
        claimed = count_guesses(drawn)  # TP + FP
        score = np.where(total > 0, 2 * hits / np.maximum(total + claimed, 1), 0.0)
        weight = total if weighted else total > 0
        result: Floats = (score * weight).sum(axis=1) / weight.sum(axis=1)
        return result

    return f1


def _class_counter(index: Ints, classes: int) -> Callable[[Ints], Ints]:
    """Return a function from (R, N) draws to the number of drawn images of each class, (R, C).

    Args:
        index: (N,) classes; -1 for none.
        classes: C.
    """
    order = np.argsort(index, kind="stable")
    order = order[index[order] >= 0]
    present, starts = np.unique(index[order], return_index=True)

    def count(drawn: Ints) -> Ints:
        counts = np.zeros((len(drawn), classes), dtype=np.int64)
        if len(present):
            counts[:, present] = np.add.reduceat(drawn[:, order], starts, axis=1)
        return counts

    return count


# --------------------------------------------------------------------------------------------------------------
# Agreement of predictions and labels beyond chance. Their range starts at -1, and random guessing has 0.


def estimate_agreement(statistic: Statistic, predicted: Tensor, labels: Tensor) -> Estimate | None:
    """Estimate ``cohen_kappa_statistic`` or ``matthews_statistic``; None if it is undefined.

    Args:
        predicted: (N,) int64; -1 for no prediction.
        labels: (N,) int64; N ≥ 1.
    """
    n = len(labels)
    classes = int(max(labels.max(), predicted.max())) + 1
    claimed = predicted[predicted >= 0].bincount(minlength=classes).double()
    by_chance = float(claimed @ labels.bincount(minlength=classes).double()) / n**2
    value = evaluate_statistic(statistic, n)
    if math.isnan(value) or by_chance == 1:
        return None
    # near 1 the statistic is 1 - (1 - accuracy) / (1 - by_chance)
    trials = n * (1 - by_chance)
    if value >= 0:
        return estimate_statistic(statistic, n, trials=trials)
    mirrored = estimate_statistic(lambda drawn: -statistic(drawn), n, trials=trials)
    return Estimate(value=value, low=-mirrored.high, high=-mirrored.low, n=n)


def cohen_kappa_statistic(predicted: Tensor, labels: Tensor, *, power: int = 0) -> Statistic:
    """Return Cohen's kappa (1960; weighted 1968) as a statistic of the drawn images.

    It is 1 - (observed disagreement) / (disagreement of independent predictions with the same frequencies), as in
    scikit-learn's ``cohen_kappa_score``; undefined if all labels and predictions are of one class.

    Args:
        predicted: (N,) int64; -1 for no prediction.
        labels: (N,) int64; N ≥ 1.
        power: 0 if all mistakes count the same. For ordered classes, such as grades of a disease, 1 or 2: a mistake
            counts as the distance of the classes to this power. No prediction counts as the farthest class.
    """
    label = labels.cpu().numpy()
    last = int(max(labels.max(), predicted.max()))
    absent = np.where(2 * label > last, 0, last) if power else last + 1
    guess = np.where(predicted.cpu().numpy() >= 0, predicted.cpu().numpy(), absent)
    number = np.arange(last + 2)
    distance = np.abs(number[:, None] - number).astype(np.float64)
    cost = distance**power if power else np.minimum(distance, 1)  # (C, C)
    item_cost = cost[label, guess]
    count_labels = _class_counter(label, len(number))
    count_guesses = _class_counter(guess, len(number))

    def kappa(drawn: Ints) -> Floats:
        total = drawn.sum(axis=1)
        observed = drawn @ item_cost / total
        expected = ((count_labels(drawn) @ cost) * count_guesses(drawn)).sum(axis=1) / total**2
        undefined = np.full(len(drawn), np.nan)
        result: Floats = 1 - np.divide(observed, expected, out=undefined, where=expected > 0)
        return result

    return kappa


def matthews_statistic(predicted: Tensor, labels: Tensor) -> Statistic:
    """Return Matthews's correlation coefficient of several classes (Gorodkin 2004) as a statistic.

    Equals scikit-learn's ``matthews_corrcoef``: 0 if all predictions or all labels are equal.

    Args:
        predicted: (N,) int64; -1, no prediction, counts as a class of its own.
        labels: (N,) int64; N ≥ 1.
    """
    label = labels.cpu().numpy()
    classes = int(max(labels.max(), predicted.max())) + 2
    guess = predicted.cpu().numpy() % classes
    count_labels = _class_counter(label, classes)
    count_guesses = _class_counter(guess, classes)
    right: Bools = label == guess

    def correlation(drawn: Ints) -> Floats:
        total = drawn.sum(axis=1).astype(np.float64)
        true = count_labels(drawn).astype(np.float64)  # (R, C)
        claimed = count_guesses(drawn).astype(np.float64)
        covariance = total * (drawn @ right) - (true * claimed).sum(axis=1)
        spread = (total**2 - (claimed**2).sum(axis=1)) * (total**2 - (true**2).sum(axis=1))
        result: Floats = np.divide(covariance, np.sqrt(spread), out=np.zeros(len(drawn)), where=spread > 0)
        return result

    return correlation


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibrationBins:
    """The bars of a reliability diagram, without empty bins.

    Attributes:
        low: (B,) float64, lower edge.
        high: (B,) float64, upper edge.
        count: (B,) int64, number of images, at least 1.
        confidence: (B,) float64, their mean confidence.
        accuracy: (B,) float64, the fraction that is right.
    """

    low: Floats
    high: Floats
    count: Ints
    confidence: Floats
    accuracy: Floats


def calibration_bins(confidence: Tensor, correct: Tensor, *, bins: int = 15) -> CalibrationBins:
    """Group images by confidence into bins of equal width.

    Args:
        confidence: (N,) in 0 … 1, the probability of the predicted class of ``top_classes``; NaN counts as
            confident and wrong.
        correct: (N,) bool.
        bins: number of bins; an edge belongs to the bin below it, as in Guo et al. (2017).
    """
    sure, right, index = _assign_bins(confidence, correct, bins)
    used, bar, count = np.unique(index, return_inverse=True, return_counts=True)
    return CalibrationBins(
        low=used / bins,
        high=(used + 1) / bins,
        count=count,
        confidence=np.bincount(bar, sure) / count,
        accuracy=np.bincount(bar, right) / count,
    )


def expected_calibration_error(confidence: Tensor, correct: Tensor, *, bins: int = 15) -> Estimate:
    """Compute ECE, the mean over images of the gap between confidence and accuracy of their bin; lower is better.

    (Guo et al. 2017, arXiv 1706.04599.) ECE is biased upward, especially with few images per bin, and resampling
    adds the same bias again. The interval is therefore the basic bootstrap's: it extends as far below the value as
    the resamples lie above it.

    Args:
        confidence: (N,) in 0 … 1; see ``calibration_bins``. N ≥ 1.
        correct: (N,) bool.
    """
    sure, right, index = _assign_bins(confidence, correct, bins)
    order = np.argsort(index, kind="stable")
    starts = np.unique(index[order], return_index=True)[1]
    excess = (sure - right)[order]

    def error(drawn: Ints) -> Floats:
        by_bin = np.add.reduceat(drawn[:, order] * excess, starts, axis=1)  # (R, B)
        result: Floats = np.abs(by_bin).sum(axis=1) / drawn.sum(axis=1)
        return result

    percentile = estimate_statistic(error, len(confidence))
    twice = 2 * percentile.value
    return replace(percentile, low=max(0.0, twice - percentile.high), high=twice - percentile.low)


def _assign_bins(confidence: Tensor, correct: Tensor, bins: int) -> tuple[Floats, Floats, Ints]:
    sure = confidence.double().cpu().numpy()
    broken = np.isnan(sure)
    right = np.where(broken, 0.0, correct.cpu().numpy())
    sure = np.where(broken, 1.0, sure)
    edges = np.linspace(0, 1, bins + 1)
    return sure, right, np.searchsorted(edges[1:-1], sure, side="left").astype(np.int64)


LARGEST_MATRIX = 1 << 12  # classes of a full confusion matrix: 128 MiB


@dataclass(frozen=True, kw_only=True, eq=False)
class Confusion:
    """A sparse confusion matrix, the most frequent entry first.

    Attributes:
        label: (P,) int64, the true class.
        predicted: (P,) int64; -1 for no prediction.
        count: (P,) int64, at least 1; the sum is N.
    """

    label: Ints
    predicted: Ints
    count: Ints

    def accuracy(self) -> Estimate:
        """Return top-1 accuracy, by class or superclass."""
        return estimate_proportion(int(self.count[self.label == self.predicted].sum()), int(self.count.sum()))

    def mistakes(self, most: int) -> list[tuple[int, int, int]]:
        """Return up to ``most`` of the most frequent mistakes as (true class, predicted class, count)."""
        wrong = np.flatnonzero(self.label != self.predicted)[:most]
        columns = (self.label[wrong].tolist(), self.predicted[wrong].tolist(), self.count[wrong].tolist())
        return list(zip(*columns, strict=True))

    def matrix(self, classes: int) -> Ints:
        """Return the (classes, classes) matrix, true class × prediction, for at most 4,096 classes.

        Images without a prediction are left out.
        """
        assert classes <= LARGEST_MATRIX, f"a confusion matrix of {classes:,} classes"
        matrix = np.zeros((classes, classes), dtype=np.int64)
        has_class = self.predicted >= 0
        matrix[self.label[has_class], self.predicted[has_class]] = self.count[has_class]
        return matrix


def count_confusion(predicted: Tensor, labels: Tensor) -> Confusion:
    """Count the pairs of true and predicted class.

    Args:
        predicted: (N,) int64; -1 for no prediction.
        labels: (N,) int64, at least 0.
    """
    label = labels.cpu().numpy()
    return _sum_pairs(label, predicted.cpu().numpy(), np.ones(len(label), dtype=np.int64))


def merge_superclasses(class_confusion: Confusion, superclass: Tensor) -> Confusion:
    """Merge the classes of each superclass, so that confusing two breeds of dog is not a mistake.

    Args:
        superclass: (C,) int64, at least 0, the superclass of each class.
    """
    group = np.append(superclass.cpu().numpy(), -1)  # a prediction of -1 stays -1
    return _sum_pairs(group[class_confusion.label], group[class_confusion.predicted], class_confusion.count)


def _sum_pairs(label: Ints, predicted: Ints, weight: Ints) -> Confusion:
    base = int(max(label.max(initial=0), predicted.max(initial=0))) + 2
    code, index = np.unique(label * base + predicted + 1, return_inverse=True)
    count = np.bincount(index, weight, minlength=len(code)).astype(np.int64)
    order = np.argsort(-count, kind="stable")
    code = code[order]
    return Confusion(label=code // base, predicted=code % base - 1, count=count[order])


def any_label_accuracy(predicted: Tensor, labels: Tensor) -> Estimate | None:
    """Compute the fraction of images for which the most probable class is one of the labels.

    This is the ReaL accuracy (Beyer et al. 2020, https://arxiv.org/abs/2006.07159): images without a label do not
    count. Returns None if no image has a label, or if some labels are unknown.

    Args:
        predicted: (N,) int64; -1 for no prediction.
        labels: (N, C) as for ``mean_average_precision``.
    """
    if bool((labels < 0).any()):
        return None
    has_label = labels.bool()
    right = _is_any_label(predicted, has_label)[has_label.any(dim=1)]
    return estimate_proportion(int(right.sum()), len(right)) if len(right) else None


def _is_any_label(predicted: Tensor, labels: Tensor) -> Tensor:
    """Return whether the predicted class is one of the labels, (N,) bool; False for a prediction of -1."""
    return labels.gather(1, predicted[:, None].clamp(min=0))[:, 0] & (predicted >= 0)


def anchor_accuracy(predicted: Tensor, labels: Tensor, anchors: Tensor, *, nearby: bool) -> Estimate:
    """Compute the fraction of anchor frames for which a label is predicted: pm-0, or pm-k with nearby frames.

    (Shankar et al. 2021, https://arxiv.org/abs/1906.02168.)

    Args:
        predicted: (N,) int64, classes.
        labels: (N, C) bool.
        anchors: (N,) int64, the number of each image's anchor frame; an anchor's is its own.
        nearby: whether labels must be predicted for all images of an anchor.
    """
    right = _is_any_label(predicted, labels)
    is_anchor = anchors == torch.arange(len(anchors))  # (N,)
    counted = right
    if nearby:
        counted = torch.ones_like(right).scatter_reduce(0, anchors, right, "amin")
    return estimate_proportion(int(counted[is_anchor].sum()), int(is_anchor.sum()))


def shape_bias(predicted: Tensor, shapes: Tensor, textures: Tensor) -> Estimate | None:
    """Compute the fraction of decisions for the shape among those for the shape or the texture.

    (Geirhos et al. 2019, https://arxiv.org/abs/1811.12231.) Images whose shape and texture are of the same class do
    not count. Returns None if no image counts.

    Args:
        predicted, shapes, textures: (N,) int64, classes.
    """
    conflict = shapes != textures
    by_shape = conflict & (predicted == shapes)
    by_texture = conflict & (predicted == textures)
    count = int((by_shape | by_texture).sum())
    return estimate_proportion(int(by_shape.sum()), count) if count else None


def worst_group_accuracy(correct: Tensor, groups: Tensor) -> Estimate:
    """Compute the accuracy of the worst group; WILDS calls it ``acc_worst_region`` (FMoW) or ``acc_wg``.

    (WILDS, Koh et al. 2021, arXiv 2012.07421; DataComp, Gadre et al. 2023, arXiv 2304.14108.) WILDS ignores FMoW's
    region "Other"; DataComp includes it, as here, so that a region of 4 images can determine the value.

    The interval is that of the true accuracy of the worst group, whichever it is: from the lowest lower end of the
    groups' Wilson intervals to the lowest upper end, the latter corrected for the number of groups.

    Args:
        correct: (N,) bool; ``ranks < 5`` for top-5 accuracy. N ≥ 1.
        groups: (N,) integers, the group of each image.

    Returns:
        The accuracy; ``n`` is the number of images of the worst group.
    """
    names, index = np.unique(groups.cpu().numpy(), return_inverse=True)
    right, total = count_correct(correct, torch.from_numpy(index), len(names))
    worst = int((right / total).argmin())
    counts = list(zip(right.tolist(), total.tolist(), strict=True))
    return Estimate(
        value=counts[worst][0] / counts[worst][1],
        low=min(wilson_interval(hits, n)[0] for hits, n in counts),
        high=min(wilson_interval(hits, n, miss=0.05 / len(names))[1] for hits, n in counts),
        n=counts[worst][1],
    )


# --------------------------------------------------------------------------------------------------------------
# Metrics that rank images: average precision (plain and 11-point) and the area under the ROC curve.


def mean_average_precision(scores: Tensor, labels: Tensor) -> Estimate:
    """Compute mAP without interpolation: the mean over classes of the mean precision at each positive image.

    Equals scikit-learn's ``average_precision_score(average="macro")`` and CLIP_benchmark's
    ``mean_average_precision``, except that CLIP_benchmark orders ties arbitrarily and counts a class without
    positive images as 0. The CLIP paper reports ``map_11_point``.

    Args:
        scores: (N, C) of ``class_scores``; its ``softmax_scale`` changes the ranking.
        labels: (N, C) bool, or 1, 0, and -1 where it is unknown: these images do not count for the class.

    Raises:
        UndefinedMetric: no class has a positive image.
    """
    return _estimate_mean_precision(scores, labels, interpolated=False)


def map_11_point(scores: Tensor, labels: Tensor) -> Estimate:
    """Compute VOC 2007's mAP: the mean over classes of eleven interpolated precisions.

    These are the best precision at a recall of at least 0, 0.1, … 1 (Everingham et al. 2010), the metric of the
    CLIP paper (table 9). Recalls are compared as integers: 3 of 10 reaches 0.3, which floating point would miss.
    Arguments and errors as for ``mean_average_precision``.
    """
    return _estimate_mean_precision(scores, labels, interpolated=True)


def _estimate_mean_precision(scores: Tensor, labels: Tensor, *, interpolated: bool) -> Estimate:
    statistic = mean_average_precision_statistic(scores, labels, interpolated=interpolated)
    positives = (labels > 0).sum(dim=0).cpu().numpy()
    trials = effective_trials(positives[positives > 0])
    return estimate_statistic(statistic, len(scores), trials=trials, cost=scores.shape[1])


def average_precisions(scores: Tensor, labels: Tensor, *, interpolated: bool = False) -> Floats:
    """Compute the average precision of each class, (C,) in 0 … 1; NaN for a class without positive images.

    Arguments as for ``mean_average_precision``.
    """
    statistics = _class_statistics(scores, labels, interpolated=interpolated)
    return np.array([evaluate_statistic(statistic, len(scores)) for statistic in statistics])


def mean_of_precisions(scores: Tensor, labels: Tensor, *, interpolated: bool) -> float:
    """Return the mean of ``average_precisions`` over classes with positive images; UndefinedMetric without any."""
    precisions = average_precisions(scores, labels, interpolated=interpolated)
    if np.isnan(precisions).all():
        raise UndefinedMetric("average precision needs an image of at least one of the classes")
    return float(np.nanmean(precisions))


def mean_average_precision_statistic(
    scores: Tensor, labels: Tensor, *, interpolated: bool = False
) -> Statistic:
    """Return mAP, 11-point if interpolated, as a statistic of the drawn images; UndefinedMetric as for mAP."""
    statistics = _class_statistics(scores, labels, interpolated=interpolated)
    present = [
        statistic for statistic in statistics if not math.isnan(evaluate_statistic(statistic, len(scores)))
    ]
    if not present:
        raise UndefinedMetric("average precision needs an image of at least one of the classes")
    return _mean_statistic(present)


def _class_statistics(scores: Tensor, labels: Tensor, *, interpolated: bool) -> list[Statistic]:
    statistics = []
    for column in _class_columns(scores, labels):
        score = column.scores.cpu().numpy()
        precision = _average_precision(score, column.labels.cpu().numpy(), interpolated=interpolated)
        statistics.append(_select_rows(precision, column.rows))
    return statistics


@dataclass(frozen=True, kw_only=True, eq=False)
class _ClassColumn:
    """The images whose label of one class is known: their numbers, scores, and whether they have the label."""

    rows: Ints | slice
    scores: Tensor
    labels: Tensor

    def area(self) -> Statistic:
        """Return ``roc_auc`` of the class as a statistic of all images."""
        return _select_rows(roc_auc_statistic(self.scores, self.labels), self.rows)


def _class_columns(scores: Tensor, labels: Tensor) -> Iterator[_ClassColumn]:
    if labels.dim() == 1:
        labels = torch.nn.functional.one_hot(labels, scores.shape[1])
    for score, label in zip(scores.T, labels.T, strict=True):
        is_known = label >= 0
        rows: Ints | slice = slice(None)
        if not is_known.all():
            rows = is_known.nonzero()[:, 0].cpu().numpy()
        yield _ClassColumn(rows=rows, scores=score[is_known], labels=label[is_known] > 0)


def _average_precision(score: Floats, label: Bools, *, interpolated: bool) -> Statistic:
    """Return the average precision of one class as a statistic; arguments are (N,)."""
    descending = -_replace_nan(score, label)
    order = np.argsort(descending, kind="stable")
    descending = descending[order]
    positive = np.flatnonzero(label[order])  # (K,) ranks of the positive images
    # the last rank with an equal score
    last = np.searchsorted(descending, descending[positive], side="right") - 1
    last_positive = np.searchsorted(positive, last, side="right") - 1

    def precision(drawn: Ints) -> Floats:
        if not len(positive):
            return np.full(len(drawn), np.nan)
        ranked = drawn[:, order]
        weight = ranked[:, positive]  # (R, K)
        hits = weight.cumsum(axis=1)[:, last_positive]
        precisions = hits / np.maximum(ranked.cumsum(axis=1)[:, last], 1)
        total = hits[:, -1]
        if interpolated:
            best = np.maximum.accumulate(precisions[:, ::-1], axis=1)[:, ::-1]  # at this recall or more
            value = np.zeros(len(best))
            for tenths in range(11):
                first = (10 * hits < tenths * total[:, None]).sum(axis=1, keepdims=True)
                value += np.take_along_axis(best, np.minimum(first, best.shape[1] - 1), axis=1)[:, 0]
            value /= 11
        else:
            value = (weight * precisions).sum(axis=1) / np.maximum(total, 1)
        result: Floats = np.where(total > 0, value, np.nan)
        return result

    return precision


def roc_auc(scores: Tensor, labels: Tensor) -> Estimate:
    """Compute the area under the ROC curve; equal scores count half, as in scikit-learn's ``roc_auc_score``.

    The metric of Hateful Memes (Kiela et al. 2020, arXiv 2005.04790).

    Args:
        scores: (N,), higher for positive; for two classes ``s[:, 1] - s[:, 0]`` of ``class_scores``.
        labels: (N,) bool or 0 and 1.

    Raises:
        UndefinedMetric: all images are of one class.
    """
    statistic = roc_auc_statistic(scores, labels)
    value = evaluate_statistic(statistic, len(labels))
    return estimate_statistic(statistic, len(labels), trials=_area_trials(value, labels))


def _area_trials(value: float, labels: Tensor) -> float:
    """Return the number of trials at which a proportion has about the variance of an area under the ROC curve.

    (Newcombe 2006, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic",
    method 5.)
    """
    positive = int(labels.bool().sum())
    shape = (1 - value) / (2 - value) + value / (1 + value)
    return positive * (len(labels) - positive) / (1 + (len(labels) / 2 - 1) * shape)


def roc_auc_statistic(scores: Tensor, labels: Tensor) -> Statistic:
    """Return ``roc_auc`` as a statistic of the drawn images; UndefinedMetric if all images are of one class."""
    label = labels.bool().cpu().numpy()
    if label.all() or not label.any():
        raise UndefinedMetric("ROC AUC needs images of both classes; all of these are of one")
    score = _replace_nan(scores.cpu().numpy(), label)
    order = np.argsort(score, kind="stable")
    starts = np.unique(score[order], return_index=True)[1]
    positive = label[order]

    def area(drawn: Ints) -> Floats:
        ranked = drawn[:, order]
        above = np.add.reduceat(ranked * positive, starts, axis=1)  # by score
        below = np.add.reduceat(ranked * ~positive, starts, axis=1)
        pairs = above.sum(axis=1) * below.sum(axis=1)
        won = (above * (below.cumsum(axis=1) - below / 2)).sum(axis=1)
        result: Floats = np.divide(won, pairs, out=np.full(len(drawn), np.nan), where=pairs > 0)
        return result

    return area


def roc_auc_macro(scores: Tensor, labels: Tensor) -> Estimate:
    """Compute the mean over classes of the area under the ROC curve, each against all other images.

    Equals scikit-learn's ``roc_auc_score(average="macro")`` for several labels per image, and for one label with
    ``multi_class="ovr"``, except that classes that none or all of the images have do not count.

    Args:
        scores: (N, C) of ``class_scores``.
        labels: (N, C) as for ``mean_average_precision``, or (N,) int64.

    Raises:
        UndefinedMetric: no class counts.
    """
    statistics = []
    trials = []
    for column in _counted_classes(scores, labels):
        statistics.append(column.area())
        area = evaluate_statistic(statistics[-1], len(scores))
        trials.append(_area_trials(area, column.labels))
    statistic = _mean_statistic(statistics)
    cost = scores.shape[1]
    return estimate_statistic(statistic, len(scores), trials=effective_trials(np.array(trials)), cost=cost)


def roc_auc_macro_statistic(scores: Tensor, labels: Tensor) -> Statistic:
    """Return ``roc_auc_macro`` as a statistic of the drawn images; UndefinedMetric if no class counts."""
    return _mean_statistic([column.area() for column in _counted_classes(scores, labels)])


def _counted_classes(scores: Tensor, labels: Tensor) -> list[_ClassColumn]:
    """Return the classes that some images have and some do not."""
    columns = _class_columns(scores, labels)
    counted = [column for column in columns if column.labels.any() and not column.labels.all()]
    if not counted:
        raise UndefinedMetric("ROC AUC needs a class that some images have and some do not")
    return counted


def roc_auc_one_vs_one(scores: Tensor, labels: Tensor) -> Estimate:
    """Compute the mean over pairs of classes of the area under the ROC curve between them (Hand and Till 2001).

    Equals scikit-learn's ``roc_auc_score(average="macro", multi_class="ovo")``; classes without images do not
    count. Of a pair, the images of both classes are ranked by the score of either class, and the mean is taken.

    Args:
        scores: (N, C) of ``class_scores``; scikit-learn demands probabilities.
        labels: (N,) int64.

    Raises:
        UndefinedMetric: all images are of one class.
    """
    statistic = roc_auc_one_vs_one_statistic(scores, labels)
    sizes = labels.unique(return_counts=True)[1].numpy()
    cost = 2 * scores.shape[1]  # twice per pair of classes, for their images
    return estimate_statistic(statistic, len(scores), trials=effective_trials(sizes), cost=cost)


def roc_auc_one_vs_one_statistic(scores: Tensor, labels: Tensor) -> Statistic:
    """Return ``roc_auc_one_vs_one`` as a statistic of the drawn images; UndefinedMetric if all are of one class."""
    present = labels.unique().tolist()
    if len(present) < 2:
        raise UndefinedMetric("ROC AUC needs images of two classes; all of these are of one")
    statistics = []
    for i, other in permutations(present, 2):
        rows = ((labels == i) | (labels == other)).nonzero()[:, 0]
        area = roc_auc_statistic(scores[rows, i], labels[rows] == i)
        statistics.append(_select_rows(area, rows.numpy()))
    return _mean_statistic(statistics)


def _select_rows(statistic: Statistic, rows: Ints | slice) -> Statistic:
    """Return a statistic of some of the images as one of all images."""
    return lambda drawn: statistic(drawn[:, rows])


def _mean_statistic(statistics: Sequence[Statistic]) -> Statistic:
    """Return the mean of the statistics that are defined for a draw; NaN if none is."""

    def mean(drawn: Ints) -> Floats:
        total = np.zeros(len(drawn))
        count = np.zeros(len(drawn))
        for statistic in statistics:
            value = statistic(drawn)  # (R,)
            defined = ~np.isnan(value)
            total[defined] += value[defined]
            count += defined
        result: Floats = np.divide(total, count, out=np.full(len(drawn), np.nan), where=count > 0)
        return result

    return mean


def _replace_nan(score: Floats, positive: Bools) -> Floats:
    """Replace NaN by the least favorable value."""
    result: Floats = np.where(np.isnan(score), np.where(positive, -np.inf, np.inf), score)
    return result
