"""What is taken for what: confusion by class and by superclass, kept as the pairs that occur.

Thousands of classes would make a matrix of millions, nearly all zeros; there are at most as many pairs as pictures.

Letters in shape comments: N pictures, C classes, P pairs that occur.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from eval.metrics.intervals import Estimate, Ints, proportion

__all__ = ["Confusion", "confusion", "superclass_confusion"]

_LARGEST = 1 << 12  # classes that a whole matrix is made for: 128 MiB


@dataclass(frozen=True, kw_only=True, eq=False)
class Confusion:
    """How often a picture of one class was taken for another, the most frequent first.

    Attributes:
        label: (P,) int64, the class of the pictures.
        predicted: (P,) int64, what they were taken for; -1 where nothing was predicted.
        count: (P,) int64, how many, at least 1; their sum is N.
    """

    label: Ints
    predicted: Ints
    count: Ints

    def accuracy(self) -> Estimate:
        """The share of pictures taken for what they are: top-1 accuracy, in the hierarchy where of superclasses."""
        return proportion(int(self.count[self.label == self.predicted].sum()), int(self.count.sum()))

    def mistakes(self, most: int) -> list[tuple[int, int, int]]:
        """The most frequent mistakes: (class, taken for, how often), at most so many."""
        wrong = np.flatnonzero(self.label != self.predicted)[:most]
        columns = (self.label[wrong].tolist(), self.predicted[wrong].tolist(), self.count[wrong].tolist())
        return list(zip(*columns, strict=True))

    def matrix(self, classes: int) -> Ints:
        """The whole (classes, classes) matrix, a row a true class, as scikit-learn has it.

        A picture without a prediction is not in it.

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
    """The same pictures by superclass: with "dog" for every breed, a breed for another is no mistake.

    Its ``accuracy`` is top-1 accuracy in the hierarchy (as of CIFAR-100's 20 superclasses); less the accuracy by
    class, it is the share of pictures whose mistake stays within the family.

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
