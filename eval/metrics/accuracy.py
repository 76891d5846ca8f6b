"""Accuracies of single-label classification: over pictures, over classes, and by class.

Letters in shape comments: N pictures, C classes, R resamples.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from eval.metrics.intervals import (
    Bools,
    Estimate,
    Floats,
    Ints,
    Statistic,
    bootstrap_interval,
    estimate,
    mean_estimate,
    proportion,
    wilson_interval,
)

__all__ = [
    "PerClass",
    "f1_macro",
    "f1_macro_statistic",
    "mean_of_top1_and_top5",
    "mean_per_class_interval",
    "mean_per_class_recall",
    "mean_per_class_statistic",
    "per_class_accuracy",
    "top_k_accuracy",
]


def top_k_accuracy(ranks: Tensor, k: int = 1) -> Estimate:
    """The share of pictures whose right class is among the first k; ``acc1`` and ``acc5`` in CLIP_benchmark.

    CLIP_benchmark takes equal similarities in whatever order ``topk`` gives them; here the class of lower index
    comes first.

    Args:
        ranks: (N,) int64 of ``class_ranks``, N ≥ 1.
        k: at least 1.
    """
    return proportion(int((ranks < k).sum()), len(ranks))


def mean_of_top1_and_top5(ranks: Tensor) -> Estimate:
    """The mean of top-1 and top-5 accuracy: Kinetics-700's metric in the CLIP paper.

    (Radford et al. 2021, arXiv 2103.00020, table 9.)

    Args:
        ranks: (N,) int64 of ``class_ranks``, N ≥ 1.
    """
    return mean_estimate(((ranks < 1).double() + (ranks < 5).double()) / 2)


def mean_per_class_recall(correct: Tensor, labels: Tensor) -> float:
    """The mean over classes of the share of their pictures that are right; classes without a picture do not count.

    Also called mean per class accuracy, macro recall and balanced accuracy; ``mean_per_class_recall`` in
    CLIP_benchmark, ``recall-macro_all`` in WILDS. ARO's mean accuracy by relation and by pair of attributes is this
    one too, of ``pairwise_correct`` and what each case is about (of pairs with at least 25 cases).

    Args:
        correct: (N,) bool.
        labels: (N,) int64.
    """
    right, total = _by_class(correct, labels)
    return float((right / total).mean())


def mean_per_class_interval(correct: Tensor, labels: Tensor) -> tuple[float, float]:
    """The 95% interval of ``mean_per_class_recall``, seeded: the same predictions give the same interval.

    At each end the wider of two: percentiles over 1,000 resamples of the pictures, and Wilson's interval at the
    number of pictures that counts, C² / Σ 1/nᵢ. The first alone is far too narrow where most classes are all right
    or all wrong, as of a model that always gives one answer, the second where small classes are the unsure ones.
    """
    right, total = _by_class(correct, labels)
    value, counting = float((right / total).mean()), counting_of(total)
    wilson = wilson_interval(value * counting, counting)

    def mean(drawn: Ints) -> Floats:
        hits, all_of = np.split(drawn, 2, axis=1)
        all_of = hits + all_of  # (R, C)
        result: Floats = (hits / np.maximum(all_of, 1)).sum(axis=1) / (all_of > 0).sum(axis=1)
        return result

    # drawing pictures with replacement is drawing from the (class, right or wrong) cells
    low, high = bootstrap_interval(mean, np.concatenate([right, total - right]).astype(np.int64))
    return min(low, wilson[0]), max(high, wilson[1])


def counting_of(sizes: Floats | Ints) -> float:
    """How many trials a mean over classes of these sizes is about as sure as: C² / Σ 1/nᵢ."""
    return len(sizes) ** 2 / float((1 / sizes).sum())


def mean_per_class_statistic(correct: Tensor, labels: Tensor) -> Statistic:
    """``mean_per_class_recall`` as a statistic of the drawn pictures, for a comparison of two models.

    Args:
        correct: (N,) bool.
        labels: (N,) int64.
    """
    label = labels.cpu().numpy()
    order = np.argsort(label, kind="stable")
    starts = np.unique(label[order], return_index=True)[1]
    right = correct.cpu().numpy()[order]

    def mean(drawn: Ints) -> Floats:
        ordered = drawn[:, order]
        total = np.add.reduceat(ordered, starts, axis=1)  # (R, C)
        hits = np.add.reduceat(ordered * right, starts, axis=1)
        result: Floats = (hits / np.maximum(total, 1)).sum(axis=1) / (total > 0).sum(axis=1)
        return result

    return mean


def _by_class(correct: Tensor, labels: Tensor) -> tuple[Floats, Floats]:
    """Right and all pictures of every class that has any."""
    label = labels.cpu().numpy()
    total = np.bincount(label)
    right = np.bincount(label, weights=correct.cpu().numpy(), minlength=len(total))
    present = total > 0
    return right[present].astype(np.float64), total[present].astype(np.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class PerClass:
    """How each class does.

    Attributes:
        right: (C,) int64, pictures of the class that are right.
        total: (C,) int64, pictures of the class.
        accuracy: (C,) float64 in 0 … 1; not a number for a class without pictures.
        low: (C,) float64, lower end of Wilson's 95% interval; 0 for a class without pictures.
        high: (C,) float64, upper end; 1 for a class without pictures.
    """

    right: Ints
    total: Ints
    accuracy: Floats
    low: Floats
    high: Floats


def per_class_accuracy(correct: Tensor, labels: Tensor, classes: int) -> PerClass:
    """Accuracy and counts by class; recall by class elsewhere.

    Args:
        correct: (N,) bool.
        labels: (N,) int64 in 0 … classes-1.
        classes: how many there are, those without pictures too.
    """
    label = labels.cpu().numpy()
    total = np.bincount(label, minlength=classes)
    right = np.bincount(label[correct.cpu().numpy()], minlength=classes)
    accuracy = np.divide(right, total, out=np.full(classes, np.nan), where=total > 0)
    ends = [
        wilson_interval(h, n) if n else (0.0, 1.0)
        for h, n in zip(right.tolist(), total.tolist(), strict=True)
    ]
    low, high = np.array(ends, dtype=np.float64).reshape(-1, 2).T
    return PerClass(right=right, total=total, accuracy=accuracy, low=low, high=high)


def f1_macro(predicted: Tensor, labels: Tensor) -> Estimate:
    """The mean over classes of 2 TP / (2 TP + FP + FN): iWildCam's metric (WILDS, Koh et al. 2021, 2012.07421).

    Only classes that have a picture count, as in WILDS and DataComp (``F1-macro_all``). scikit-learn's own
    ``average="macro"`` also counts a class that was only predicted, with 0; a rare animal that no picture of the
    split shows would then cost a model a whole share of the mean.

    Args:
        predicted: (N,) int64; -1 where nothing was predicted.
        labels: (N,) int64, at least 0, N ≥ 1.
    """
    sizes = np.unique(labels.cpu().numpy(), return_counts=True)[1]
    return estimate(f1_macro_statistic(predicted, labels), len(labels), counting=counting_of(sizes))


def f1_macro_statistic(predicted: Tensor, labels: Tensor) -> Statistic:
    """``f1_macro`` as a statistic of the drawn pictures."""
    label, guess = labels.cpu().numpy(), predicted.cpu().numpy()
    present = np.unique(label)
    by_label = np.argsort(label, kind="stable")
    starts = np.searchsorted(label[by_label], present)
    right: Bools = (label == guess)[by_label]
    counted = np.flatnonzero(np.isin(guess, present))
    by_guess = counted[np.argsort(guess[counted], kind="stable")]
    guessed, guess_starts = np.unique(guess[by_guess], return_index=True)
    places = np.searchsorted(present, guessed)

    def f1(drawn: Ints) -> Floats:
        ordered = drawn[:, by_label]
        total = np.add.reduceat(ordered, starts, axis=1)  # (R, C), TP + FN
        hits = np.add.reduceat(ordered * right, starts, axis=1)  # TP
        claimed = np.zeros_like(total)  # TP + FP
        if len(guessed):
            claimed[:, places] = np.add.reduceat(drawn[:, by_guess], guess_starts, axis=1)
        score = np.where(total > 0, 2 * hits / np.maximum(total + claimed, 1), 0.0)
        result: Floats = score.sum(axis=1) / (total > 0).sum(axis=1)
        return result

    return f1
