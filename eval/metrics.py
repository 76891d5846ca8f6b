"""The measures: ranks, accuracies, recalls, what guessing would give, and 95% intervals.

Similarities are taken in float32 whatever autocast or TF32 setting is in force, and in blocks of rows, so that
memory stays bounded for any number of pictures. A similarity that is not a number never helps the model.

Letters in shape comments: N pictures, C classes, D embedding dimension, Q queries, M candidates, P pairs.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "chance_of_recall",
    "class_ranks",
    "match_ranks",
    "mean_per_class_interval",
    "mean_per_class_recall",
    "wilson_interval",
]

_Z95 = 1.959963984540054  # the standard normal's 97.5% point
_BLOCK = 1 << 22  # similarities held at a time: 16 MiB in float32, and a few arrays of that size beside it
_RESAMPLES = 1000


@contextmanager
def _full_float32(device: torch.device) -> Iterator[None]:
    """Matrix products in IEEE float32: neither autocast nor TF32 nor bfloat16 passes."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False), torch.inference_mode():
            yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


def class_ranks(image_features: Tensor, classifier: Tensor, labels: Tensor) -> Tensor:
    """How many classes come before the right one, by picture; rank 0 is a correct prediction.

    Among classes of equal similarity the one of lower index comes first, as in ``argmax``. (A class name that a
    dataset lists twice on purpose, as ImageNet does, therefore counts as it does elsewhere.)

    Args:
        image_features: (N, D).
        classifier: (D, C), a column a class.
        labels: (N,) int64 in 0 … C-1.

    Returns:
        (N,) int64 in 0 … C, on the CPU.
    """
    classes = classifier.shape[1]
    device = image_features.device
    ranks = torch.empty(len(image_features), dtype=torch.int64)
    rows = max(1, _BLOCK // classes)
    classifier, labels = classifier.float().to(device), labels.to(device)
    index = torch.arange(classes, device=device)  # (C,)
    with _full_float32(device):
        for start in range(0, len(image_features), rows):
            block = slice(start, start + rows)
            similarity = image_features[block].float() @ classifier  # (rows, C)
            label = labels[block, None]  # (rows, 1)
            own = similarity.gather(1, label)  # (rows, 1)
            ahead = ~(similarity <= own) | ((similarity == own) & (index < label))
            ranks[block] = ahead.sum(dim=1).cpu()
    return ranks


def match_ranks(
    queries: Tensor, candidates: Tensor, pairs: Tensor, candidate_counts: Tensor | None = None
) -> Tensor:
    """How many wrong candidates are at least as similar to a query as its best right one.

    A tie between a right and a wrong candidate is counted as wrong. A query is found within the first k exactly
    if its rank is below k.

    Args:
        queries: (Q, D).
        candidates: (M, D).
        pairs: (P, 2) int64, (query, right candidate), each once and sorted by query; no query is without.
        candidate_counts: (M,) int64, how often each candidate stands in the list; once if not given.

    Returns:
        (Q,) int64, on the CPU.
    """
    device = queries.device
    ranks = torch.empty(len(queries), dtype=torch.int64)
    rows = max(1, _BLOCK // max(1, len(candidates)))
    query_of_pair = pairs[:, 0].contiguous()
    transposed = candidates.float().to(device).T
    counts = None if candidate_counts is None else candidate_counts.to(device)
    with _full_float32(device):
        for start in range(0, len(queries), rows):
            stop = min(start + rows, len(queries))
            similarity = queries[start:stop].float() @ transposed  # (rows, M)
            first, last = torch.searchsorted(query_of_pair, torch.tensor([start, stop])).tolist()
            row, column = (pairs[first:last] - torch.tensor([start, 0])).to(device).unbind(1)
            own = similarity[row, column]  # of this block's pairs
            best = own.new_full((stop - start,), -torch.inf).scatter_reduce(0, row, own, "amax")
            # counts the right ones that reach the best too, which are then taken off again
            ahead = ~(similarity < best[:, None])
            before = ahead.sum(dim=1) if counts is None else torch.where(ahead, counts, 0).sum(dim=1)
            off = (~(own < best[row])).long() if counts is None else (~(own < best[row])) * counts[column]
            before = before.index_add(0, row, off, alpha=-1)
            ranks[start:stop] = before.cpu()
    return ranks


def mean_per_class_recall(correct: Tensor, labels: Tensor) -> float:
    """The mean over classes of the share of their pictures that are right; classes without a picture do not count.

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
    n, value = int(total.sum()), float((right / total).mean())
    counting = len(total) ** 2 / float((1 / total).sum())
    wilson = wilson_interval(value * counting, counting)
    # drawing pictures with replacement is drawing from the (class, right or wrong) cells
    cells = np.concatenate([right, total - right]) / n
    random = np.random.Generator(np.random.Philox(0))
    means = np.empty(_RESAMPLES)
    rows = max(1, _BLOCK // len(cells))
    for start in range(0, _RESAMPLES, rows):
        drawn = random.multinomial(n, cells, size=min(rows, _RESAMPLES - start)).reshape(-1, 2, len(total))
        totals = drawn.sum(axis=1)  # (resamples, C)
        recall = drawn[:, 0] / np.maximum(totals, 1)
        means[start : start + rows] = recall.sum(axis=1) / (totals > 0).sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return min(float(low), wilson[0]), max(float(high), wilson[1])


def _by_class(correct: Tensor, labels: Tensor) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Right and all pictures of every class that has any."""
    label = labels.cpu().numpy()
    total = np.bincount(label)
    right = np.bincount(label, weights=correct.cpu().numpy(), minlength=len(total))
    present = total > 0
    return right[present].astype(np.float64), total[present].astype(np.float64)


def wilson_interval(hits: float, n: float) -> tuple[float, float]:
    """Wilson's 95% interval of a proportion (Wilson 1927), ``hits`` of ``n`` ≥ 1 trials, whole numbers or not."""
    share, z2 = hits / n, _Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # at 0 and n the formula gives 0 and 1 but for rounding
    return (0.0 if hits == 0 else centre - half), (1.0 if hits == n else centre + half)


def chance_of_recall(right: Tensor, candidates: int, k: int) -> Tensor:
    """The probability that a random order of the candidates has a right one among its first k.

    Args:
        right: (Q,) int64, how many of the candidates are right for each query.
        candidates: how many there are.
        k: at least 1.

    Returns:
        (Q,) float64.
    """
    missed = torch.ones(len(right), dtype=torch.float64)
    for drawn in range(min(k, candidates)):
        missed *= (candidates - drawn - right.double()).clamp(min=0) / (candidates - drawn)
    return 1 - missed
