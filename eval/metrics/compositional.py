"""Compositional understanding: captions that differ in the order of their words, and associations of pictures.

A tie is counted as wrong everywhere: a model that cannot tell two captions apart has not understood one of them. So
is a similarity that is not a number.

Letters in shape comments: N cases, K wrong captions of a case, M candidates of all cases together.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eval.metrics.intervals import Estimate, Floats, mean_estimate, proportion

__all__ = [
    "Winoground",
    "jaccard_index",
    "mean_jaccard",
    "pairwise_accuracy",
    "pairwise_correct",
    "winoground",
]


@dataclass(frozen=True, kw_only=True)
class Winoground:
    """The three scores of Winoground; chance is 1/4, 1/4 and 1/6.

    Attributes:
        text: for both pictures, the own caption is the more similar one.
        image: for both captions, the own picture is the more similar one.
        group: both.
    """

    text: Estimate
    image: Estimate
    group: Estimate


def winoground(similarity: Tensor) -> Winoground:
    """Text, image and group score (Thrush et al. 2022, arXiv 2204.03162).

    CLIP_benchmark's ``text_acc``, ``image_acc`` and ``acc`` are these but for ties: its ``argmax`` gives them to
    whatever stands first.

    Args:
        similarity: (N, 2, 2), of picture i with caption j of each case; picture i belongs to caption i. N ≥ 1.
    """
    own = similarity.diagonal(dim1=1, dim2=2)  # (N, 2)
    text = (own[:, 0] > similarity[:, 0, 1]) & (own[:, 1] > similarity[:, 1, 0])
    image = (own[:, 0] > similarity[:, 1, 0]) & (own[:, 1] > similarity[:, 0, 1])
    n = len(similarity)
    return Winoground(
        text=proportion(int(text.sum()), n),
        image=proportion(int(image.sum()), n),
        group=proportion(int((text & image).sum()), n),
    )


def pairwise_correct(right: Tensor, wrong: Tensor) -> Tensor:
    """Whether the right caption is more similar to its picture than every wrong one.

    Args:
        right: (N,) similarity of the right caption.
        wrong: (N,) or (N, K) similarities of the wrong ones.

    Returns:
        (N,) bool.
    """
    wrong = wrong if wrong.ndim == 2 else wrong[:, None]
    return (right[:, None] > wrong).all(dim=1)


def pairwise_accuracy(right: Tensor, wrong: Tensor) -> Estimate:
    """The accuracy of SugarCrepe and ARO; chance is 1 in K + 1.

    SugarCrepe (Hsieh et al. 2023, arXiv 2306.14610) has one wrong caption and takes "more similar" strictly, as
    here. CLIP_benchmark's ``text_acc`` for it gives ties to the caption that stands first, the right one; its
    ``image_acc`` is of one picture against itself and always 1. ARO (Yuksekgonul et al. 2023, arXiv 2210.01936) has
    one wrong caption (relation, attribution) or four (order): its own code gives ties to the wrong caption in the
    first two and to the right one in the order sets, where a short caption may come out of the shuffling unchanged.

    Args:
        right: (N,) similarity of the right caption, N ≥ 1.
        wrong: (N,) or (N, K) similarities of the wrong ones.
    """
    return proportion(int(pairwise_correct(right, wrong).sum()), len(right))


def jaccard_index(similarity: Tensor, right: Tensor, case: Tensor) -> Floats:
    """WinoGAViL's score of each case: how far the pictures picked for a cue are those that belong to it.

    The model picks as many candidates as are right, the most similar first, and gets the number of those picked
    that are right over the number of those that are either (Bitton et al. 2022, arXiv 2207.12576). DataComp's
    ``jaccard_score_5`` … ``_12`` are the means of cases with so many candidates.

    Args:
        similarity: (M,) of each candidate with the cue of its case.
        right: (M,) bool, whether it belongs to the cue; at least one of each case does.
        case: (M,) int64, the case of each candidate, in any order.

    Returns:
        (N,) float64 in 0 … 1, in the order of the cases' numbers.
    """
    belongs, number = right.bool().cpu().numpy(), case.cpu().numpy()
    score = similarity.double().cpu().numpy()
    score = np.where(np.isnan(score), np.where(belongs, -np.inf, np.inf), score)
    order = np.lexsort(
        (belongs, -score, number)
    )  # by case, the most similar first, wrong ones first among equals
    belongs = belongs[order]
    _, starts, index = np.unique(number[order], return_index=True, return_inverse=True)
    picks = np.bincount(index, belongs).astype(np.int64)
    assert picks.all(), "a case without a right candidate"
    picked = np.arange(len(index)) - starts[index] < picks[index]
    found = np.bincount(index, belongs & picked)
    result: Floats = found / (2 * picks - found)
    return result


def mean_jaccard(similarity: Tensor, right: Tensor, case: Tensor) -> Estimate:
    """The mean of ``jaccard_index`` over cases; ``avg_jaccard_score`` in DataComp, there with ties in any order."""
    return mean_estimate(torch.from_numpy(jaccard_index(similarity, right, case)))
