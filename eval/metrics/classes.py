"""Accuracies of single-label classification: over images, over classes, and by class.

Letters in shape comments: N images, C classes, R resamples.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from clipkit.errors import DataError
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
    "CalibrationBins",
    "Confusion",
    "GroupAccuracy",
    "PerClass",
    "calibration_bins",
    "confusion",
    "expected_calibration_error",
    "f1_macro",
    "f1_macro_statistic",
    "group_accuracy",
    "mean_of_top1_and_top5",
    "mean_per_class_interval",
    "mean_per_class_recall",
    "mean_per_class_statistic",
    "per_class_accuracy",
    "superclass_confusion",
    "top_k_accuracy",
    "worst_group_accuracy",
]


def top_k_accuracy(ranks: Tensor, k: int = 1) -> Estimate:
    """The fraction of images whose right class is among the first k; ``acc1`` and ``acc5`` in CLIP_benchmark.

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
    """The mean over classes of the fraction of their images that are right; classes without an image do not count.

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

    At each end the wider of two: percentiles over 1,000 resamples of the images, and Wilson's interval at the
    number of images that counts, C² / Σ 1/nᵢ. The first alone is far too narrow where most classes are all right
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

    # drawing images with replacement is drawing from the (class, right or wrong) cells
    low, high = bootstrap_interval(mean, np.concatenate([right, total - right]).astype(np.int64))
    return min(low, wilson[0]), max(high, wilson[1])


def counting_of(sizes: Floats | Ints) -> float:
    """How many trials a mean over classes of these sizes is about as sure as: C² / Σ 1/nᵢ."""
    return len(sizes) ** 2 / float((1 / sizes).sum())


def mean_per_class_statistic(correct: Tensor, labels: Tensor) -> Statistic:
    """``mean_per_class_recall`` as a statistic of the drawn images, for a comparison of two models.

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
    """Right and all images of every class that has any."""
    label = labels.cpu().numpy()
    total = np.bincount(label)
    right = np.bincount(label, weights=correct.cpu().numpy(), minlength=len(total))
    present = total > 0
    return right[present].astype(np.float64), total[present].astype(np.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class PerClass:
    """How each class does.

    Attributes:
        right: (C,) int64, images of the class that are right.
        total: (C,) int64, images of the class.
        accuracy: (C,) float64 in 0 … 1; not a number for a class without images.
        low: (C,) float64, lower end of Wilson's 95% interval; 0 for a class without images.
        high: (C,) float64, upper end; 1 for a class without images.
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
        classes: how many there are, those without images too.
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

    Only classes that have an image count, as in WILDS and DataComp (``F1-macro_all``). scikit-learn's own
    ``average="macro"`` also counts a class that was only predicted, with 0; a rare animal that no image of the
    split shows would then cost a model a whole share of the mean.

    Args:
        predicted: (N,) int64; -1 where nothing was predicted.
        labels: (N,) int64, at least 0, N ≥ 1.
    """
    sizes = np.unique(labels.cpu().numpy(), return_counts=True)[1]
    return estimate(f1_macro_statistic(predicted, labels), len(labels), counting=counting_of(sizes))


def f1_macro_statistic(predicted: Tensor, labels: Tensor) -> Statistic:
    """``f1_macro`` as a statistic of the drawn images."""
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


# --------------------------------------------------------------------------------------------------------------
# Calibration: whether a model that is 80% sure is right 80% of the time.
#
# Letters in shape comments: N images, B bins, R resamples.


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibrationBins:
    """The bars of a reliability diagram; bins without images do not appear.

    Attributes:
        low: (B,) float64, where the bin begins; with equal mass, its least confidence.
        high: (B,) float64, where it ends; with equal mass, its greatest confidence.
        count: (B,) int64, images, at least 1.
        confidence: (B,) float64, their mean confidence.
        accuracy: (B,) float64, the fraction of them that is right.
    """

    low: Floats
    high: Floats
    count: Ints
    confidence: Floats
    accuracy: Floats


def calibration_bins(
    confidence: Tensor, correct: Tensor, *, bins: int = 15, equal_mass: bool = False
) -> CalibrationBins:
    """Images grouped by how sure the model is.

    Args:
        confidence: (N,) in 0 … 1, the probability of the predicted class, as ``top_classes`` gives it. What is not
            a number counts as sure and wrong.
        correct: (N,) bool.
        bins: how many; an edge belongs to the bin below it, as in Guo et al. (2017).
        equal_mass: as many images in every bin, but for those of equal confidence, which stay together (Nguyen
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
    """ECE: how far confidence and accuracy are apart, as a mean over bins weighted by their images.

    (Guo et al. 2017, "On Calibration of Modern Neural Networks", arXiv 1706.04599: 15 bins of equal width. With
    bins of equal mass it is the adaptive one, which does not put a sure model's images all in one bin.) Also of a
    perfect model it is above 0, the more so the fewer images a bin has, and resampling adds to that once more. So
    the interval is the basic bootstrap's: it lies as far below the value as resamples lie above it.

    Args:
        confidence: (N,) in 0 … 1, N ≥ 1; see ``calibration_bins``.
        correct: (N,) bool.
        bins: how many.
        equal_mass: as many images in every bin, else bins of equal width.

    Returns:
        A value in 0 … 1, lower is better.
    """
    found = estimate(_statistic(confidence, correct, bins, equal_mass=equal_mass), len(confidence))
    low, high = max(0.0, 2 * found.value - found.high), 2 * found.value - found.low
    return replace(found, low=low, high=high)


def _statistic(confidence: Tensor, correct: Tensor, bins: int, *, equal_mass: bool) -> Statistic:
    """ECE of the drawn images, the bins staying as all images made them."""
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
    """The bin of each image, 0 … bins-1."""
    if equal_mass:
        first = np.searchsorted(np.sort(sure), sure, side="left")  # the place of the first that is as sure
        return first * bins // len(sure)
    edges = np.linspace(0, 1, bins + 1)
    return np.searchsorted(edges[1:-1], sure, side="left").astype(np.int64)


# --------------------------------------------------------------------------------------------------------------
# What is taken for what: confusion by class and by superclass, kept as the pairs that occur.
#
# Thousands of classes would make a matrix of millions, nearly all zeros; there are at most as many pairs as
# images.
#
# Letters in shape comments: N images, C classes, P pairs that occur.

_LARGEST = 1 << 12  # classes that a whole matrix is made for: 128 MiB


@dataclass(frozen=True, kw_only=True, eq=False)
class Confusion:
    """How often an image of one class was taken for another, the most frequent first.

    Attributes:
        label: (P,) int64, the class of the images.
        predicted: (P,) int64, what they were taken for; -1 where nothing was predicted.
        count: (P,) int64, how many, at least 1; their sum is N.
    """

    label: Ints
    predicted: Ints
    count: Ints

    def accuracy(self) -> Estimate:
        """Top-1 accuracy, or the accuracy by superclass."""
        return proportion(int(self.count[self.label == self.predicted].sum()), int(self.count.sum()))

    def mistakes(self, most: int) -> list[tuple[int, int, int]]:
        """The most frequent mistakes: (class, taken for, how often), at most so many."""
        wrong = np.flatnonzero(self.label != self.predicted)[:most]
        columns = (self.label[wrong].tolist(), self.predicted[wrong].tolist(), self.count[wrong].tolist())
        return list(zip(*columns, strict=True))

    def matrix(self, classes: int) -> Ints:
        """The whole (classes, classes) matrix, a row a true class, as scikit-learn has it.

        An image without a prediction is not in it.

        Args:
            classes: at most 4,096; more would not be looked at, see ``mistakes``.
        """
        assert classes <= _LARGEST, f"a matrix of {classes:,} classes is not for looking at"
        whole = np.zeros((classes, classes), dtype=np.int64)
        made = self.predicted >= 0
        whole[self.label[made], self.predicted[made]] = self.count[made]
        return whole


def confusion(predicted: Tensor, labels: Tensor) -> Confusion:
    """Count what is taken for what.

    Args:
        predicted: (N,) int64 class numbers; -1 where nothing was predicted.
        labels: (N,) int64 class numbers, at least 0.
    """
    label, guess = labels.cpu().numpy(), predicted.cpu().numpy()
    base = int(guess.max(initial=0)) + 2
    code, count = np.unique(label * base + guess + 1, return_counts=True)
    order = np.argsort(-count, kind="stable")
    code = code[order]
    return Confusion(label=code // base, predicted=code % base - 1, count=count[order])


def superclass_confusion(of_classes: Confusion, superclass: Tensor) -> Confusion:
    """The same images by superclass: with "dog" for every breed, a breed for another is no mistake.

    Its ``accuracy`` is top-1 accuracy in the hierarchy (as of CIFAR-100's 20 superclasses); less the accuracy by
    class, it is the fraction of images whose mistake stays within the family.

    Args:
        of_classes: of the classes.
        superclass: (C,) int64, at least 0, the superclass of each class.
    """
    family = np.append(superclass.cpu().numpy(), -1)  # a prediction of -1 stays one
    label, guess = family[of_classes.label], family[of_classes.predicted]
    base = int(family.max(initial=0)) + 2
    code, index = np.unique(label * base + guess + 1, return_inverse=True)
    count = np.bincount(index, of_classes.count, minlength=len(code)).astype(np.int64)
    order = np.argsort(-count, kind="stable")
    code = code[order]
    return Confusion(label=code // base, predicted=code % base - 1, count=count[order])


# --------------------------------------------------------------------------------------------------------------
# Accuracy by group of images and in the worst one: WILDS, and DataComp's fairness datasets.
#
# Letters in shape comments: N images, G groups that have images.


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupAccuracy:
    """How each group does, in the order of their numbers.

    Attributes:
        group: (G,) int64, their numbers in the metadata.
        right: (G,) int64, images that are right.
        total: (G,) int64, images, at least 1.
        accuracy: (G,) float64 in 0 … 1.
    """

    group: Ints
    right: Ints
    total: Ints
    accuracy: Floats


def group_accuracy(correct: Tensor, groups: Tensor, *, ignore: Collection[int] = ()) -> GroupAccuracy:
    """Accuracy by group; groups without images do not appear.

    Args:
        correct: (N,) bool; ``ranks < 5`` for a top-5 accuracy.
        groups: (N,) whole numbers, what group each image is of.
        ignore: numbers of groups to leave out.
    """
    number = groups.cpu().numpy().astype(np.int64)
    kept = ~np.isin(number, list(ignore))
    group, index = np.unique(number[kept], return_inverse=True)
    total = np.bincount(index, minlength=len(group))
    right = np.bincount(index[correct.cpu().numpy()[kept]], minlength=len(group))
    return GroupAccuracy(group=group, right=right, total=total, accuracy=right / total)


def worst_group_accuracy(correct: Tensor, groups: Tensor, *, ignore: Collection[int] = ()) -> Estimate:
    """The accuracy of the group that does worst; ``acc_worst_region`` of FMoW, ``acc_wg`` elsewhere in WILDS.

    The datasets that are scored by it: FMoW by region (WILDS, Koh et al. 2021, arXiv 2012.07421), GeoDE by region,
    Dollar Street by income group in top-5 (``acc_top5_wg``; Gadre et al. 2023, DataComp, arXiv 2304.14108).

    WILDS leaves FMoW's region "Other" out, by its name. DataComp calls the same code without the names, so that
    nothing is left out, and a region of 4 images can decide the number: one of them moves it by 0.25. Give
    ``ignore`` for WILDS' number, nothing for DataComp's.

    Args:
        correct: (N,) bool; ``ranks < 5`` for a top-5 accuracy.
        groups: (N,) whole numbers, what group each image is of.
        ignore: numbers of groups to leave out.

    Returns:
        The worst group's accuracy; ``n`` is its number of images. The interval is of the worst group's true
        accuracy, whichever that is: from the lowest lower end of the groups' Wilson intervals, to the lowest upper
        end, each taken wide enough for all groups together.

    Raises:
        DataError: no group is left.
    """
    by_group = group_accuracy(correct, groups, ignore=ignore)
    number = len(by_group.group)
    if not number:
        raise DataError("the accuracy of the worst group needs an image in one of the groups")
    worst = int(by_group.accuracy.argmin())
    pairs = list(zip(by_group.right.tolist(), by_group.total.tolist(), strict=True))
    return Estimate(
        value=float(by_group.accuracy[worst]),
        low=min(wilson_interval(right, n)[0] for right, n in pairs),
        high=min(wilson_interval(right, n, miss=0.05 / number)[1] for right, n in pairs),
        n=int(by_group.total[worst]),
    )
