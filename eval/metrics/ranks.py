"""Ranks, scores and predictions from similarities.

Similarities are computed in float32 regardless of autocast and TF32, in blocks of rows, so memory is bounded for
any number of images. NaN similarities never help a model. Features may be a memory-mapped array in half precision;
its pages are released after use if ``map_rows`` made it.

Dimensions: N images, C classes, D embedding dimension, Q queries, M candidates, P pairs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipkit.errors import DataError
from eval.features.store import release_rows

if TYPE_CHECKING:
    from eval.datasets.dataset import EvalDataset

_BLOCK = 1 << 22  # similarities held at a time: 16 MiB in float32, plus a few arrays of that size


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Compute matrix products in IEEE float32, without autocast, TF32 and bfloat16 passes."""
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


def _similarity_blocks(
    image_features: Tensor, classifier: Tensor, device: torch.device
) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of images and their (rows, C) float32 similarities; use within ``full_float32``."""
    rows = max(1, _BLOCK // classifier.shape[1])
    classifier = classifier.to(device, torch.float32)
    for start in range(0, len(image_features), rows):
        block = slice(start, start + rows)
        yield block, image_features[block].to(device, torch.float32) @ classifier
        release_rows(image_features[block])


def class_ranks(
    image_features: Tensor, classifier: Tensor, labels: Tensor, *, device: torch.device | None = None
) -> Tensor:
    """Count the classes ranked before the right one; rank 0 is a correct prediction.

    Among classes of equal similarity the one of lower index comes first, as in ``argmax``.

    Args:
        image_features: (N, D).
        classifier: (D, C).
        labels: (N,) int64 in 0 … C-1.
        device: of the computation; by default that of the features.

    Returns:
        (N,) int64 in 0 … C, on the CPU.
    """
    device = device or image_features.device
    ranks = torch.empty(len(image_features), dtype=torch.int64)
    index = torch.arange(classifier.shape[1], device=device)  # (C,)
    with full_float32(device):
        for block, similarity in _similarity_blocks(image_features, classifier, device):
            label = labels[block, None].to(device)  # (rows, 1)
            right = similarity.gather(1, label)  # (rows, 1)
            ahead = ~(similarity <= right) | ((similarity == right) & (index < label))
            ranks[block] = ahead.sum(dim=1).cpu()
    return ranks


@dataclass(frozen=True, kw_only=True, eq=False)
class TopClasses:
    """Predictions of each image, best first, on the CPU.

    Attributes:
        classes: (N, k) int64 in 0 … C-1; -1, before all others, for a class of NaN similarity.
        probabilities: (N, k) float32, softmax over all C classes; NaN in rows with a -1.
    """

    classes: Tensor
    probabilities: Tensor


def top_classes(
    image_features: Tensor,
    classifier: Tensor,
    *,
    k: int = 1,
    logit_scale: float = 100.0,
    device: torch.device | None = None,
) -> TopClasses:
    """Return the k most similar classes of each image, ordered as in ``class_ranks``, with their probabilities.

    Args:
        image_features: (N, D), unit norm.
        classifier: (D, C), unit columns.
        k: at least 1; reduced to C.
        logit_scale: exp(t) of the model.
        device: of the computation; by default that of the features.
    """
    device = device or image_features.device
    n = len(image_features)
    k = min(k, classifier.shape[1])
    classes = torch.empty(n, k, dtype=torch.int64)
    probabilities = torch.empty(n, k)
    with full_float32(device):
        for block, similarity in _similarity_blocks(image_features, classifier, device):
            best, index = stable_top_k(similarity, k)
            total = torch.logsumexp(similarity * logit_scale, dim=1, keepdim=True)  # (rows, 1)
            probabilities[block] = (best * logit_scale - total).exp().cpu()
            classes[block] = torch.where(best.isnan(), -1, index).cpu()
    return TopClasses(classes=classes, probabilities=probabilities)


def stable_top_k(similarity: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each row and their columns: ties by column, NaN first; all if k is larger."""
    best, index = similarity.topk(min(k + 1, similarity.shape[1]), dim=1)  # orders ties arbitrarily
    tied = (best[:, 1:] == best[:, :-1]).any(dim=1)
    best = best[:, :k]
    index = index[:, :k]
    if bool(tied.any()):
        value, column = similarity[tied].sort(dim=1, descending=True, stable=True)
        best[tied] = value[:, :k]
        index[tied] = column[:, :k]
    return best, index


def class_scores(
    image_features: Tensor,
    classifier: Tensor,
    *,
    softmax_scale: float | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return the score of every image for every class, for metrics that rank images (mAP, ROC AUC).

    The result is held in memory, which is fine for these datasets (VOC 2007: 4,952 × 20).

    Args:
        image_features: (N, D), unit norm.
        classifier: (D, C), unit columns.
        softmax_scale: None for similarities, which rank images like logits; exp(t) of the model for
            log-probabilities, by which an image ranks high for a class only if no other class fits it better.
        device: of the computation; by default that of the features.

    Returns:
        (N, C) float32 on the CPU.
    """
    device = device or image_features.device
    scores = torch.empty(len(image_features), classifier.shape[1])
    with full_float32(device):
        for block, similarity in _similarity_blocks(image_features, classifier, device):
            if softmax_scale is not None:
                similarity = torch.log_softmax(similarity * softmax_scale, dim=1)
            scores[block] = similarity.cpu()
    return scores


def match_ranks(
    queries: Tensor,
    candidates: Tensor,
    pairs: Tensor,
    candidate_counts: Tensor | None = None,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Count the wrong candidates that are at least as similar to a query as its best right one.

    A tie between a right and a wrong candidate counts as wrong. A query is found among the first k if its rank is
    below k.

    Args:
        queries: (Q, D).
        candidates: (M, D).
        pairs: (P, 2) int64 of (query, right candidate), unique, sorted by query, at least one for every query.
        candidate_counts: (M,) int64, the number of copies of each candidate; 1 by default.
        device: of the computation; by default that of the queries.

    Returns:
        (Q,) int64, on the CPU.
    """
    device = device or queries.device
    ranks = torch.empty(len(queries), dtype=torch.int64)
    counts = None if candidate_counts is None else candidate_counts.to(device)
    with full_float32(device):
        for block, _, row, column, similarity in _pair_blocks(queries, candidates, pairs, device):
            right = similarity[row, column]  # of this block's pairs
            best = right.new_full((len(similarity),), -torch.inf).scatter_reduce(0, row, right, "amax")
            # includes the right candidates that reach the best; they are subtracted below
            ahead = ~(similarity < best[:, None])
            off = (~(right < best[row])).long()
            if counts is None:
                before = ahead.sum(dim=1)
            else:
                before = torch.where(ahead, counts, 0).sum(dim=1)
                off = off * counts[column]
            before = before.index_add(0, row, off, alpha=-1)
            ranks[block] = before.cpu()
    return ranks


def count_ahead(queries: Tensor, candidates: Tensor, pairs: Tensor) -> Tensor:
    """Count the candidates, itself included, that are at least as similar to a query as a right one.

    A NaN similarity is the lowest of a right candidate, and the highest of a wrong one.

    Args:
        queries: (Q, D).
        candidates: (M, D).
        pairs: (P, 2) int64 of (query, right candidate), unique, sorted by query.

    Returns:
        (P,) int64 in 1 … M, on the CPU.
    """
    device = queries.device
    ahead = torch.empty(len(pairs), dtype=torch.int64)
    with full_float32(device):
        for _, block, row, column, similarity in _pair_blocks(queries, candidates, pairs, device):
            right = similarity[row, column]
            right = torch.where(right.isnan(), -torch.inf, right)
            similarity[row, column] = right
            parts = zip(row.split(len(similarity)), right.split(len(similarity)), strict=True)
            counts = [(~(similarity[rows] < values[:, None])).sum(dim=1) for rows, values in parts]
            ahead[block] = torch.cat(counts).cpu()
    return ahead


def _pair_blocks(
    queries: Tensor, candidates: Tensor, pairs: Tensor, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Yield blocks of queries; use within ``full_float32``.

    Yields:
        Which queries and which pairs they are, the row and column of each of these pairs, and the (rows, M) float32
        similarities.
    """
    rows = max(1, _BLOCK // max(1, len(candidates)))
    query_of_pair = pairs[:, 0].contiguous()
    transposed = candidates.to(device, torch.float32).T
    for start in range(0, len(queries), rows):
        stop = min(start + rows, len(queries))
        similarity = queries[start:stop].to(device, torch.float32) @ transposed
        first, last = torch.searchsorted(query_of_pair, torch.tensor([start, stop])).tolist()
        row, column = (pairs[first:last] - torch.tensor([start, 0])).to(device).T.contiguous()
        yield slice(start, stop), slice(first, last), row, column, similarity
        release_rows(queries[start:stop])


@dataclass(frozen=True, eq=False)
class Answers:
    """The predictions of a linear classifier on a labelled dataset, each kind computed on first use.

    Attributes:
        dataset: with labels and C class names.
        features: (N, D) float32.
        classifier: (D, C) float32.
        logit_scale: factor that turns similarities into logits.
        device: of the computation.
    """

    dataset: "EvalDataset"
    features: Tensor
    classifier: Tensor
    logit_scale: float
    device: torch.device

    @property
    def classes(self) -> int:
        """C."""
        return len(self.dataset.class_names)

    @property
    def labels(self) -> Tensor:
        """(N,) int64, or (N, C) bool."""
        assert self.dataset.labels is not None, "a labelled dataset"
        return self.dataset.labels

    @property
    def known_labels(self) -> Tensor:
        """``labels``; if some are unknown, (N, C) float32 of 1, 0, and -1 for these."""
        labels = self.dataset.known_labels
        assert labels is not None, "a labelled dataset"
        return labels

    @cached_property
    def ranks(self) -> Tensor:
        """(N,) int64 of ``class_ranks``."""
        return class_ranks(self.features, self.classifier, self.labels, device=self.device)

    @cached_property
    def top(self) -> TopClasses:
        """The most probable class and its probability."""
        return top_classes(self.features, self.classifier, logit_scale=self.logit_scale, device=self.device)

    def scores(self, *, softmax: bool) -> Tensor:
        """Return (N, C) float32 scores that rank the images of each class: similarities, or log-probabilities."""
        scale = self.logit_scale if softmax else None
        return class_scores(self.features, self.classifier, softmax_scale=scale, device=self.device)

    def group(self, column: str) -> Tensor:
        """Return a column of the metadata, (N,) int64; DataError if there is none."""
        if column not in self.dataset.metadata:
            columns = ", ".join(self.dataset.metadata) or "none"
            raise DataError(
                f"dataset {self.dataset.name}: a metric needs the metadata column {column!r}; known: {columns}"
            )
        return self.dataset.metadata[column]
