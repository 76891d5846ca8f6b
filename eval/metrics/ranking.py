"""Metrics that rank images: average precision (plain and 11-point) and the area under the ROC curve.

Images with equal scores are grouped, so no metric depends on file order. A NaN ranks last for a
positive image and first for a negative one.

Dimensions: N images, C classes, K positive images of a class, R resamples.
"""

import math

import numpy as np
from torch import Tensor

from clipkit.errors import DataError
from eval.metrics.classes import effective_trials
from eval.metrics.intervals import (
    Bools,
    Estimate,
    Floats,
    Ints,
    Statistic,
    estimate_statistic,
    evaluate_statistic,
)


def mean_average_precision(scores: Tensor, labels: Tensor) -> Estimate:
    """Compute mAP without interpolation: the mean over classes of the mean precision at each positive image.

    Equals scikit-learn's ``average_precision_score(average="macro")`` and CLIP_benchmark's
    ``mean_average_precision``, except that CLIP_benchmark orders ties arbitrarily and counts a class without
    positive images as 0. The CLIP paper reports ``map_11_point``.

    Args:
        scores: (N, C) of ``class_scores``; its ``softmax_scale`` changes the ranking.
        labels: (N, C) bool or 0 and 1.
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
    positives = labels.bool().sum(dim=0).cpu().numpy()
    trials = effective_trials(positives[positives > 0])
    return estimate_statistic(statistic, len(scores), trials=trials, cost=scores.shape[1])


def average_precisions(scores: Tensor, labels: Tensor, *, interpolated: bool = False) -> Floats:
    """Compute the average precision of each class, (C,) in 0 … 1; NaN for a class without positive images.

    Args:
        scores: (N, C).
        labels: (N, C) bool or 0 and 1.
        interpolated: use VOC 2007's eleven points.
    """
    statistics = _class_statistics(scores, labels, interpolated=interpolated)
    return np.array([evaluate_statistic(statistic, len(scores)) for statistic in statistics])


def mean_of_precisions(scores: Tensor, labels: Tensor, *, interpolated: bool) -> float:
    """Return the mean of ``average_precisions`` over classes with positive images; DataError if there are none."""
    precisions = average_precisions(scores, labels, interpolated=interpolated)
    if np.isnan(precisions).all():
        raise DataError("average precision needs an image of at least one of the classes")
    return float(np.nanmean(precisions))


def mean_average_precision_statistic(
    scores: Tensor, labels: Tensor, *, interpolated: bool = False
) -> Statistic:
    """Return mAP, 11-point if interpolated, as a statistic of the drawn images; DataError as for mAP."""
    statistics = _class_statistics(scores, labels, interpolated=interpolated)
    present = [
        statistic for statistic in statistics if not math.isnan(evaluate_statistic(statistic, len(scores)))
    ]
    if not present:
        raise DataError("average precision needs an image of at least one of the classes")

    def mean(drawn: Ints) -> Floats:
        total = np.zeros(len(drawn))
        count = np.zeros(len(drawn))
        for statistic in present:
            precision = statistic(drawn)  # (R,)
            defined = ~np.isnan(precision)
            total[defined] += precision[defined]
            count += defined
        result: Floats = np.divide(total, count, out=np.full(len(drawn), np.nan), where=count > 0)
        return result

    return mean


def _class_statistics(scores: Tensor, labels: Tensor, *, interpolated: bool) -> list[Statistic]:
    """Return each class's average precision as a statistic."""
    columns = zip(scores.cpu().numpy().T, labels.bool().cpu().numpy().T, strict=True)
    return [_average_precision(score, label, interpolated=interpolated) for score, label in columns]


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
    """
    statistic = roc_auc_statistic(scores, labels)
    positive = int(labels.bool().sum())
    value = evaluate_statistic(statistic, len(labels))
    # the number of trials at which a proportion has the variance of the area by Newcombe (2006, "Confidence
    # intervals for an effect size measure based on the Mann-Whitney statistic", method 5)
    shape = (1 - value) / (2 - value) + value / (1 + value)
    trials = positive * (len(labels) - positive) / (1 + (len(labels) / 2 - 1) * shape)
    return estimate_statistic(statistic, len(labels), trials=trials)


def roc_auc_statistic(scores: Tensor, labels: Tensor) -> Statistic:
    """Return ``roc_auc`` as a statistic of the drawn images; DataError if all images are of one class."""
    label = labels.bool().cpu().numpy()
    if label.all() or not label.any():
        raise DataError("ROC AUC needs images of both classes; all of these are of one")
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


def _replace_nan(score: Floats, positive: Bools) -> Floats:
    """Replace NaN by the least favorable value."""
    result: Floats = np.where(np.isnan(score), np.where(positive, -np.inf, np.inf), score)
    return result
