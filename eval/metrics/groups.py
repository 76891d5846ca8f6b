"""Accuracy by group of pictures and in the worst one: WILDS, and DataComp's fairness datasets.

Letters in shape comments: N pictures, G groups that have pictures.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from clipkit.errors import DataError
from eval.metrics.intervals import Estimate, Floats, Ints, wilson_interval

__all__ = ["GroupAccuracy", "group_accuracy", "worst_group_accuracy"]


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupAccuracy:
    """How each group does, in the order of their numbers.

    Attributes:
        group: (G,) int64, their numbers in the metadata.
        right: (G,) int64, pictures that are right.
        total: (G,) int64, pictures, at least 1.
        accuracy: (G,) float64 in 0 … 1.
    """

    group: Ints
    right: Ints
    total: Ints
    accuracy: Floats


def group_accuracy(correct: Tensor, groups: Tensor, *, ignore: Collection[int] = ()) -> GroupAccuracy:
    """Accuracy by group; groups without pictures do not appear.

    Args:
        correct: (N,) bool; ``ranks < 5`` for a top-5 accuracy.
        groups: (N,) whole numbers, what group each picture is of.
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
    nothing is left out, and a region of 4 pictures can decide the number: one of them moves it by 0.25. Give
    ``ignore`` for WILDS' number, nothing for DataComp's.

    Args:
        correct: (N,) bool; ``ranks < 5`` for a top-5 accuracy.
        groups: (N,) whole numbers, what group each picture is of.
        ignore: numbers of groups to leave out.

    Returns:
        The worst group's accuracy; ``n`` is its number of pictures. The interval is of the worst group's true
        accuracy, whichever that is: from the lowest lower end of the groups' Wilson intervals, to the lowest upper
        end, each taken wide enough for all groups together.

    Raises:
        DataError: no group is left.
    """
    by_group = group_accuracy(correct, groups, ignore=ignore)
    number = len(by_group.group)
    if not number:
        raise DataError("the accuracy of the worst group needs a picture in one of the groups")
    worst = int(by_group.accuracy.argmin())
    pairs = list(zip(by_group.right.tolist(), by_group.total.tolist(), strict=True))
    return Estimate(
        value=float(by_group.accuracy[worst]),
        low=min(wilson_interval(right, n)[0] for right, n in pairs),
        high=min(wilson_interval(right, n, miss=0.05 / number)[1] for right, n in pairs),
        n=int(by_group.total[worst]),
    )
