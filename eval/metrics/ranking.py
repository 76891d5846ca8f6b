"""Metrics that rank images: average precision by two definitions, and the area under the ROC curve.

Images of equal score are taken together, so no metric here depends on the order of a file. A score that is not a
number never helps: it ranks last for a positive image and first for a negative one.

Letters in shape comments: N images, C classes, R resamples, K positive images of a class.
"""

import numpy as np
from torch import Tensor

from clipkit.errors import DataError
from eval.metrics.classes import counting_of
from eval.metrics.intervals import Bools, Estimate, Floats, Ints, Statistic, estimate

__all__ = [
    "average_precisions",
    "map_11_point",
    "mean_average_precision",
    "mean_average_precision_statistic",
    "roc_auc",
    "roc_auc_statistic",
]


def mean_average_precision(scores: Tensor, labels: Tensor, difficult: Tensor | None = None) -> Estimate:
    """mAP without interpolation: the mean over classes of the mean precision at each positive image.

    This is scikit-learn's ``average_precision_score`` with ``average="macro"`` and CLIP_benchmark's
    ``mean_average_precision``, where these have no equal scores (CLIP_benchmark takes them in any order) and every
    class has a positive image (there a class without any counts as 0; here it does not count). It is VOC's
    definition from 2010 on but for the interpolation. The number of the CLIP paper is ``map_11_point``.

    Args:
        scores: (N, C) of ``class_scores``; with its ``softmax_scale`` images rank otherwise than without.
        labels: (N, C) bool or 0 and 1, what each image shows.
        difficult: (N, C) bool, the images left out of a class's ranking, as VOC marks them; none if not given.

    Raises:
        DataError: no class has a positive image.
    """
    return _mean(scores, labels, difficult, interpolated=False)


def map_11_point(scores: Tensor, labels: Tensor, difficult: Tensor | None = None) -> Estimate:
    """VOC 2007's mAP: the mean over classes of the mean of eleven interpolated precisions.

    A class's eleven are the best precision at a recall of at least 0, 0.1, … 1 (Everingham et al. 2010, "The PASCAL
    Visual Object Classes Challenge"). This is the number of the CLIP paper (Radford et al. 2021,
    table 9) and of "11-point" elsewhere. CLIP_benchmark has no such metric; its VOC 2007 number is the plain
    ``mean_average_precision`` with the difficult images in. Recalls are compared as whole numbers: a recall of 3
    in 10 reaches 0.3, which it misses in floating point code.

    Args:
        scores: (N, C) of ``class_scores``; with its ``softmax_scale`` images rank otherwise than without.
        labels: (N, C) bool or 0 and 1, what each image shows.
        difficult: (N, C) bool, the images left out of a class's ranking, as VOC does; none if not given.

    Raises:
        DataError: no class has a positive image.
    """
    return _mean(scores, labels, difficult, interpolated=True)


def _mean(scores: Tensor, labels: Tensor, difficult: Tensor | None, *, interpolated: bool) -> Estimate:
    statistic = mean_average_precision_statistic(scores, labels, difficult, interpolated=interpolated)
    kept = labels.bool() if difficult is None else labels.bool() & ~difficult.bool()
    positives = kept.sum(dim=0).cpu().numpy()
    counting = counting_of(positives[positives > 0])
    return estimate(statistic, len(scores), counting=counting, cost=scores.shape[1])


def average_precisions(
    scores: Tensor, labels: Tensor, difficult: Tensor | None = None, *, interpolated: bool = False
) -> Floats:
    """The average precision of each class, (C,) in 0 … 1; not a number for a class without a positive image.

    Args:
        scores: (N, C).
        labels: (N, C) bool or 0 and 1.
        difficult: (N, C) bool, the images left out of a class's ranking; none if not given.
        interpolated: at eleven points, as VOC 2007; else plain.
    """
    each = np.ones((1, len(scores)), dtype=np.int64)
    return np.array([of(each)[0] for of in _by_class(scores, labels, difficult, interpolated=interpolated)])


def mean_of_precisions(scores: Tensor, labels: Tensor, *, interpolated: bool) -> float:
    """The mean of ``average_precisions`` over the classes that have a positive image.

    Raises:
        DataError: no class has one.
    """
    precisions = average_precisions(scores, labels, interpolated=interpolated)
    if np.isnan(precisions).all():
        raise DataError("average precision needs an image of at least one of the classes")
    return float(np.nanmean(precisions))


def mean_average_precision_statistic(
    scores: Tensor, labels: Tensor, difficult: Tensor | None = None, *, interpolated: bool = False
) -> Statistic:
    """``mean_average_precision``, or ``map_11_point`` if interpolated, as a statistic of the drawn images.

    Raises:
        DataError: no class has a positive image.
    """
    by_class = _by_class(scores, labels, difficult, interpolated=interpolated)
    each = np.ones((1, len(scores)), dtype=np.int64)
    present = [of for of in by_class if not np.isnan(of(each)[0])]
    if not present:
        raise DataError("average precision needs an image that shows one of the classes")

    def mean(drawn: Ints) -> Floats:
        total, number = np.zeros(len(drawn)), np.zeros(len(drawn))
        for of in present:
            precision = of(drawn)  # (R,)
            defined = ~np.isnan(precision)
            total[defined] += precision[defined]
            number += defined
        result: Floats = np.divide(total, number, out=np.full(len(drawn), np.nan), where=number > 0)
        return result

    return mean


def _by_class(
    scores: Tensor, labels: Tensor, difficult: Tensor | None, *, interpolated: bool
) -> list[Statistic]:
    score, label = scores.cpu().numpy(), labels.bool().cpu().numpy()
    left_out = np.zeros_like(label) if difficult is None else difficult.bool().cpu().numpy()
    return [
        _class_statistic(score[:, c], label[:, c], ~left_out[:, c], interpolated=interpolated)
        for c in range(score.shape[1])
    ]


def _class_statistic(score: Floats, label: Bools, kept: Bools, *, interpolated: bool) -> Statistic:
    """The average precision of one class; (N,) each."""
    chosen = np.flatnonzero(kept)
    own = label[chosen]
    ordered = -_unhelpful(score[chosen], own)
    order = np.argsort(ordered, kind="stable")
    ordered, own = ordered[order], own[order]
    order = chosen[order]
    positive = np.flatnonzero(own)  # (K,) places in the order
    last = np.searchsorted(ordered, ordered[positive], side="right") - 1  # of those with an equal score
    last_positive = np.searchsorted(positive, last, side="right") - 1

    def precision(drawn: Ints) -> Floats:
        if not len(positive):
            return np.full(len(drawn), np.nan)
        ranked = drawn[:, order]
        weight = ranked[:, positive]  # (R, K)
        found = weight.cumsum(axis=1)[:, last_positive]
        precisions = found / np.maximum(ranked.cumsum(axis=1)[:, last], 1)
        total = found[:, -1]
        if interpolated:
            value = _eleven_points(precisions, found, total)
        else:
            value = (weight * precisions).sum(axis=1) / np.maximum(total, 1)
        result: Floats = np.where(total > 0, value, np.nan)
        return result

    return precision


def _eleven_points(precisions: Floats, found: Ints, total: Ints) -> Floats:
    """The mean of the best (R, K) precision at a recall of 0, 0.1, … 1, given (R, K) found of (R,) positives."""
    best = np.maximum.accumulate(precisions[:, ::-1], axis=1)[:, ::-1]  # at this recall or more
    value = np.zeros(len(best))
    for tenths in range(11):
        first = (10 * found < tenths * total[:, None]).sum(axis=1, keepdims=True)
        value += np.take_along_axis(best, np.minimum(first, best.shape[1] - 1), axis=1)[:, 0]
    return value / 11


def roc_auc(scores: Tensor, labels: Tensor) -> Estimate:
    """The area under the ROC curve: how often a positive image's score is above a negative one's.

    Equal scores count half, as in scikit-learn's ``roc_auc_score``. This is Hateful Memes' metric (Kiela et al.
    2020, arXiv 2005.04790); its score of an image is the difference of the two logits, class 1 minus class 0,
    which orders images as the probability of class 1 does. CLIP_benchmark has neither.

    Args:
        scores: (N,), higher for positive; for two classes ``s[:, 1] - s[:, 0]`` of ``class_scores``.
        labels: (N,) bool or 0 and 1.

    Raises:
        DataError: all images are of one class.
    """
    statistic = roc_auc_statistic(scores, labels)
    positive = int(labels.bool().sum())
    negative = len(labels) - positive
    value = float(statistic(np.ones((1, len(labels)), dtype=np.int64))[0])
    # the trials of a proportion with the variance that Newcombe (2006, "Confidence intervals for an effect size
    # measure based on the Mann-Whitney statistic", method 5) gives the area
    shape = (1 - value) / (2 - value) + value / (1 + value)
    counting = positive * negative / (1 + (len(labels) / 2 - 1) * shape)
    return estimate(statistic, len(labels), counting=counting)


def roc_auc_statistic(scores: Tensor, labels: Tensor) -> Statistic:
    """``roc_auc`` as a statistic of the drawn images.

    Raises:
        DataError: all images are of one class.
    """
    label = labels.bool().cpu().numpy()
    if label.all() or not label.any():
        raise DataError("ROC AUC needs images of both classes; all of these are of one")
    score = _unhelpful(scores.cpu().numpy(), label)
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


def _unhelpful(score: Floats, positive: Bools) -> Floats:
    """Scores with those that are no numbers put where they do not help."""
    result: Floats = np.where(np.isnan(score), np.where(positive, -np.inf, np.inf), score)
    return result
