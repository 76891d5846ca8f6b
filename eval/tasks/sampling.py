"""Which pictures a task draws from a split: a function of the split's revision and a seed, of no model.

Letters in shape comments: N pictures, C classes.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

__all__ = ["carve", "draw_shots", "shuffled_classes"]

CARVED = 5  # one picture in so many is taken away to tune on


def shuffled_classes(labels: Tensor, classes: int, *, revision: str, seed: int) -> list[Tensor]:
    """The pictures of each class in a random order: C tensors of int64, empty for a class without pictures.

    The order within a class depends on its pictures, its number, the revision and the seed alone.
    """
    order = torch.argsort(labels, stable=True)
    ends = torch.bincount(labels, minlength=classes).cumsum(0).tolist()
    starts = [0, *ends][:-1]
    return [
        _shuffled(order[start:end], f"{revision} {seed} {label}")
        for label, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def draw_shots(shuffled: list[Tensor], k: int) -> Tensor:
    """The first k pictures of each shuffled class, sorted; those of a smaller k are among those of a greater."""
    return torch.cat([own[:k] for own in shuffled]).sort().values


def carve(labels: Tensor, *, revision: str, seed: int) -> tuple[Tensor, Tensor]:
    """Split a training set in four fifths to learn from and one fifth to tune on.

    Of pictures with one label, each class gives a fifth of its own, at least one; a class with a single picture
    keeps it to learn from. Of pictures with several labels, (N, C) bool, it is a fifth of all.

    Returns:
        The numbers of the pictures, sorted, both int64; the second is empty where no class has two pictures.
    """
    if not len(labels):
        return torch.arange(0), torch.arange(0)
    if labels.ndim == 1:
        of = shuffled_classes(labels, int(labels.max()) + 1, revision=revision, seed=seed)
    else:
        of = [_shuffled(torch.arange(len(labels)), f"{revision} {seed}")]
    taken = [min(max(1, round(len(own) / CARVED)), max(0, len(own) - 1)) for own in of]
    learn = torch.cat([own[n:] for own, n in zip(of, taken, strict=True)])
    tune = torch.cat([own[:n] for own, n in zip(of, taken, strict=True)])
    return learn.sort().values, tune.sort().values


def _shuffled(numbers: Tensor, key: str) -> Tensor:
    digest = hashlib.sha256(key.encode()).digest()
    random = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return numbers[torch.from_numpy(random.permutation(len(numbers)))]
