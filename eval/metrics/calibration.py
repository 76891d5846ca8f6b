"""Calibration: whether a model that is 80% sure is right 80% of the time.

Letters in shape comments: N pictures, B bins, R resamples.
"""

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from eval.metrics.intervals import Estimate, Floats, Ints, Statistic, estimate

__all__ = ["CalibrationBins", "calibration_bins", "expected_calibration_error"]


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibrationBins:
    """The bars of a reliability diagram; bins without pictures do not appear.

    Attributes:
        low: (B,) float64, where the bin begins; with equal mass, its least confidence.
        high: (B,) float64, where it ends; with equal mass, its greatest confidence.
        count: (B,) int64, pictures, at least 1.
        confidence: (B,) float64, their mean confidence.
        accuracy: (B,) float64, the share of them that is right.
    """

    low: Floats
    high: Floats
    count: Ints
    confidence: Floats
    accuracy: Floats


def calibration_bins(
    confidence: Tensor, correct: Tensor, *, bins: int = 15, equal_mass: bool = False
) -> CalibrationBins:
    """Pictures grouped by how sure the model is.

    Args:
        confidence: (N,) in 0 … 1, the probability of the predicted class, as ``top_classes`` gives it. What is not
            a number counts as sure and wrong.
        correct: (N,) bool.
        bins: how many; an edge belongs to the bin below it, as in Guo et al. (2017).
        equal_mass: as many pictures in every bin, but for those of equal confidence, which stay together (Nguyen
            and O'Connor 2015, arXiv 1508.05154); else bins of equal width.
    """
    sure, right = _sure_and_right(confidence, correct)
    index = _bin_of(sure, bins, equal_mass=equal_mass)
    used, place, count = np.unique(index, return_inverse=True, return_counts=True)
    if equal_mass:
        low, high = np.full(len(used), np.inf), np.full(len(used), -np.inf)
        np.minimum.at(low, place, sure)
        np.maximum.at(high, place, sure)
    else:
        low, high = used / bins, (used + 1) / bins
    return CalibrationBins(
        low=low,
        high=high,
        count=count,
        confidence=np.bincount(place, sure) / count,
        accuracy=np.bincount(place, right) / count,
    )


def expected_calibration_error(
    confidence: Tensor, correct: Tensor, *, bins: int = 15, equal_mass: bool = False
) -> Estimate:
    """ECE: how far confidence and accuracy are apart, as a mean over bins weighted by their pictures.

    (Guo et al. 2017, "On Calibration of Modern Neural Networks", arXiv 1706.04599: 15 bins of equal width. With
    bins of equal mass it is the adaptive one, which does not put a sure model's pictures all in one bin.) Also of a
    perfect model it is above 0, the more so the fewer pictures a bin has, and resampling adds to that once more. So
    the interval is the basic bootstrap's: it lies as far below the value as resamples lie above it.

    Args:
        confidence: (N,) in 0 … 1, N ≥ 1; see ``calibration_bins``.
        correct: (N,) bool.
        bins: how many.
        equal_mass: as many pictures in every bin, else bins of equal width.

    Returns:
        A value in 0 … 1, lower is better.
    """
    found = estimate(_statistic(confidence, correct, bins, equal_mass=equal_mass), len(confidence))
    low, high = max(0.0, 2 * found.value - found.high), 2 * found.value - found.low
    return replace(found, low=low, high=high)


def _statistic(confidence: Tensor, correct: Tensor, bins: int, *, equal_mass: bool) -> Statistic:
    """ECE of the drawn pictures, the bins staying as all pictures made them."""
    sure, right = _sure_and_right(confidence, correct)
    index = _bin_of(sure, bins, equal_mass=equal_mass)
    order = np.argsort(index, kind="stable")
    starts = np.unique(index[order], return_index=True)[1]
    excess = (sure - right)[order]

    def error(drawn: Ints) -> Floats:
        by_bin = np.add.reduceat(drawn[:, order] * excess, starts, axis=1)  # (R, B)
        result: Floats = np.abs(by_bin).sum(axis=1) / drawn.sum(axis=1)
        return result

    return error


def _sure_and_right(confidence: Tensor, correct: Tensor) -> tuple[Floats, Floats]:
    sure = confidence.double().cpu().numpy()
    broken = np.isnan(sure)
    right = np.where(broken, 0.0, correct.cpu().numpy())
    return np.where(broken, 1.0, sure), right


def _bin_of(sure: Floats, bins: int, *, equal_mass: bool) -> Ints:
    """The bin of each picture, 0 … bins-1."""
    if equal_mass:
        first = np.searchsorted(np.sort(sure), sure, side="left")  # the place of the first that is as sure
        return first * bins // len(sure)
    edges = np.linspace(0, 1, bins + 1)
    return np.searchsorted(edges[1:-1], sure, side="left").astype(np.int64)
