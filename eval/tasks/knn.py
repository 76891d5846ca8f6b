"""k nearest neighbours: what the pictures around a picture are, without anything learned.

By the protocol of DINO (Caron et al. 2021, arXiv 2104.14294): unit-norm features, here the projected ones; the k
training pictures of greatest cosine similarity s vote for their classes with weight exp(s / 0.07). The plain vote
counts each once. Votes that are equal go to the class of lower number, as in scikit-learn; of equal similarities at
the k-th place the training picture that comes first is taken.

Letters in shape comments: N training pictures, Q pictures to classify, D embedding dimension, C classes.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clipkit.errors import ConfigError, DataError
from eval.metrics.ranks import full_float32
from eval.results import Score
from eval.subject import Subject
from eval.tasks.classification import Answers, classification_scores, fitting_metrics, labels_of
from eval.tasks.linear_probe import learned

__all__ = ["KS", "Neighbours", "knn", "nearest_neighbours", "votes"]

KS = (10, 20)
TEMPERATURE = 0.07
_ROWS, _COLUMNS = 512, 1 << 14  # similarities at a time: 32 MiB, and a few arrays of that size beside it
_log = logging.getLogger("eval")


@dataclass(frozen=True, kw_only=True, eq=False)
class Neighbours:
    """The nearest training pictures, nearest first.

    Attributes:
        similarity: (Q, k) float32.
        index: (Q, k) int64.
    """

    similarity: Tensor
    index: Tensor


def nearest_neighbours(
    queries: Tensor, training: Tensor, k: int, *, device: torch.device | None = None
) -> Neighbours:
    """The k training pictures of greatest inner product with each query.

    Memory is bounded by blocks of both, which may be memory-mapped, and by the result.

    Args:
        queries: (Q, D), unit norm.
        training: (N, D), unit norm.
        k: 1 … N.
        device: where to take the products; where the queries are if not given.

    Returns:
        On the CPU.
    """
    device = device or queries.device
    similarity = torch.empty(len(queries), k)
    index = torch.empty(len(queries), k, dtype=torch.int64)
    with full_float32(device):
        for start in range(0, len(queries), _ROWS):
            block = slice(start, start + _ROWS)
            rows = queries[block].to(device, torch.float32)
            best = torch.empty(len(rows), 0, device=device)
            place = torch.empty(len(rows), 0, dtype=torch.int64, device=device)
            for first in range(0, len(training), _COLUMNS):
                some = rows @ training[first : first + _COLUMNS].to(device, torch.float32).T
                value, column = _first(some, k)
                best, place = torch.cat([best, value], dim=1), torch.cat([place, column + first], dim=1)
                # those of earlier columns stand first, so a stable sort keeps equals in the order of their places
                best, order = best.sort(dim=1, descending=True, stable=True)
                best, place = best[:, :k], place.gather(1, order[:, :k])
            similarity[block], index[block] = best.cpu(), place.cpu()
    return Neighbours(similarity=similarity, index=index)


def _first(similarity: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest of each row with their places, among equals those of lower place, in that order."""
    value, column = similarity.topk(min(k + 1, similarity.shape[1]), dim=1)  # takes equals in any order
    tied = (value[:, 1:] == value[:, :-1]).any(dim=1)
    value, column = value[:, :k], column[:, :k]
    if bool(tied.any()):
        all_values, all_columns = similarity[tied].sort(dim=1, descending=True, stable=True)
        value[tied], column[tied] = all_values[:, :k], all_columns[:, :k]
    return value, column


def votes(
    neighbours: Neighbours, labels: Tensor, classes: int, k: int, *, temperature: float | None = TEMPERATURE
) -> Tensor:
    """What share of the votes each class gets.

    Args:
        neighbours: at least k of each picture.
        labels: (N,) int64 of the training pictures.
        classes: C.
        k: how many of them vote.
        temperature: of the weights exp(s / temperature); None for the plain vote.

    Returns:
        (Q, C) float32, rows sum to 1.
    """
    similarity = neighbours.similarity[:, :k].double()
    if temperature is None:
        weight = torch.ones_like(similarity)
    else:  # of the nearest 1, so that none overflows
        weight = ((similarity - similarity[:, :1]) / temperature).exp()
    voted = labels[neighbours.index[:, :k]]  # (Q, k)
    shares = torch.zeros(len(similarity), classes, dtype=torch.float32)
    for start in range(0, len(shares), _ROWS):
        block = slice(start, start + _ROWS)
        counted = torch.zeros(len(voted[block]), classes, dtype=torch.float64)
        counted.scatter_add_(1, voted[block], weight[block])
        shares[block] = (counted / weight[block].sum(dim=1, keepdim=True)).float()
    return shares


def knn(subject: Subject, *, ks: Sequence[int] = KS, temperature: float = TEMPERATURE) -> list[Score]:
    """The subject's metrics by neighbours: settings "k=20" for the weighted vote and "k=20 plain" for the other.

    The shares of votes of all Q pictures, Q × C numbers, are held at a time; neighbours are found in blocks.

    Args:
        subject: with a split ``train`` of one label a picture.
        ks: how many neighbours vote. More than there are training pictures are left out, which is logged.
        temperature: of the weighted vote.

    Raises:
        DataError: no such split, several labels a picture, or fewer training pictures than any of ``ks``.
        ConfigError: no neighbours, or a temperature that is not above 0.
    """
    if not ks or min(ks) < 1:
        raise ConfigError(f"k = {list(ks)} does not fit: one neighbour or more")
    if not temperature > 0:
        raise ConfigError(f"temperature = {temperature} does not fit: it is above 0")
    dataset = subject.dataset
    metrics = [
        one for one in fitting_metrics(dataset, subject.metrics) if one != "ece"
    ]  # votes are no logits
    train = learned(subject, "train", "a vote of neighbours")
    labels, classes = labels_of(train), len(dataset.class_names)
    if labels.ndim != 1:
        raise DataError(
            f"dataset {dataset.name} has several labels a picture, a vote of neighbours takes one"
        )
    possible = sorted({k for k in ks if k <= len(labels)})
    if not possible:
        raise DataError(
            f"dataset {dataset.name} has {len(labels)} pictures to vote, ask for as few neighbours"
        )
    if left_out := sorted({k for k in ks if k > len(labels)}):
        named = ", ".join(map(str, left_out))
        _log.warning(
            "dataset %s: k=%s left out, it has %d pictures to vote", dataset.name, named, len(labels)
        )
    found = nearest_neighbours(
        subject.images().projected, subject.images("train").projected, possible[-1], device=subject.device
    )
    itself = torch.eye(classes)
    scores = []
    for k in possible:
        for setting, weight in ((f"k={k}", temperature), (f"k={k} plain", None)):
            share = votes(found, labels, classes, k, temperature=weight)
            answers = Answers(dataset, share, itself, 1.0, subject.device)
            scores += classification_scores(answers, task="knn", metrics=metrics, setting=setting)
    return scores
