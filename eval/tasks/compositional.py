"""Whether a model tells captions apart that differ in the order or choice of words, and what belongs to a cue.

Winoground          ``text``, ``image`` and ``group``: datasets with ``choices`` and two images an item
SugarCrepe, ARO     ``accuracy``: other datasets with ``choices``; where the metadata says the relation or the pair
                    of attributes that an image tests, ``mean_per_group_accuracy`` of all of them, and
                    ``macro_accuracy`` as ARO's authors take it: without relations that they call symmetric, and
                    of pairs with at least 25 images
WinoGAViL           ``jaccard``, by the number of candidates ``jaccard_5`` …, and ``jaccard_10-12``, which DataComp
                    counts: datasets with an ``association``

A tie is counted as wrong everywhere. Equal captions are encoded once.

Letters in shape comments: N images, T distinct texts, D embedding dimension, I items.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from clipkit.errors import DataError
from eval.datasets.dataset import choices_of
from eval.metrics import METRICS, Choices, Winoground, jaccard_index, pairwise_correct, winoground
from eval.results.scores import Score
from eval.tasks import Options
from eval.tasks.classify import report_choices
from eval.tasks.subject import Outcome, Subject, metric_score

__all__ = ["compositional", "run_compositional"]

_GROUPS = ("relation", "attribute")
_ENOUGH = 25  # images, for a pair of attributes to count
_BLOCK = 16_384  # images whose similarities are computed at a time


def compositional(subject: Subject) -> list[Score]:
    """The scores named above, of the dataset's kind.

    Raises:
        DataError: the dataset has no choices, or its items are not pairs of images.
    """
    dataset = choices_of(subject.dataset)
    if dataset.choices is None:
        found = _associations(subject)
    elif dataset.items is not None:
        found = Choices(winoground=_winoground(subject, dataset.choices))
    else:
        found = _pairwise(subject, dataset.choices)
    names = [name for name, metric in METRICS.items() if metric.kind == "compositional"]
    names[names.index("jaccard") + 1 : -1] = [f"jaccard_{size}" for size in found.sizes.unique().tolist()]
    scores = (metric_score(dataset, name, found, task="compositional") for name in names)
    return [score for score in scores if score is not None]


def run_compositional(subject: Subject, options: Options) -> Outcome:
    """The task ``compositional``."""
    report_choices(subject)
    return Outcome(scores=compositional(subject))


def _pairwise(subject: Subject, choices: Sequence[Sequence[str]]) -> Choices:
    """Each image with its own captions, of which the first is right; by group as ARO's authors count them."""
    metadata = subject.dataset.metadata
    similarity = _similarities(subject, choices)  # (N, longest), -inf where an image has fewer
    correct = pairwise_correct(similarity[:, 0], similarity[:, 1:])  # (N,)
    chance = float(torch.tensor([1 / len(own) for own in choices], dtype=torch.float64).mean())
    name = next((name for name in _GROUPS if name in metadata and similarity.shape[1] == 2), None)
    if name is None:
        return Choices(chance=chance, correct=correct)
    _, group = metadata[name].unique(return_inverse=True)
    count = torch.bincount(group)
    right = torch.bincount(group, correct.double()) / count
    if name == "attribute":
        counted = count >= _ENOUGH
    else:
        counted = torch.bincount(group, metadata.get("symmetric", torch.zeros_like(group))) == 0
    return Choices(chance=chance, correct=correct, groups=right, counted_groups=right[counted])


def _winoground(subject: Subject, choices: Sequence[Sequence[str]]) -> Winoground:
    """Items of two images, each with its own caption first and then the other's."""
    dataset = subject.dataset
    assert dataset.items is not None
    order = dataset.items.argsort(stable=True)  # (N,)
    items, counts = dataset.items.unique(return_counts=True)
    first, second = order[0::2].tolist(), order[1::2].tolist()
    if not bool((counts == 2).all()) or any(
        tuple(choices[a]) != tuple(reversed(choices[b])) or len(choices[a]) != 2
        for a, b in zip(first, second, strict=True)
    ):
        raise DataError(f"dataset {dataset.name}: its items are not two images with each other's captions")
    similarity = _similarities(subject, choices)[order].reshape(len(items), 2, 2)  # (I, image, own or other)
    return winoground(torch.stack([similarity[:, 0], similarity[:, 1].flip(1)], dim=1))  # (I, image, caption)


def _associations(subject: Subject) -> Choices:
    """Candidates of all cues; a model picks as many as belong to each cue."""
    dataset = subject.dataset
    assert dataset.items is not None and dataset.captions is not None
    similarity = _similarities(subject, dataset.captions)[:, 0]  # (N,)
    right = dataset.metadata["association"].bool()
    _, case, sizes = dataset.items.unique(return_inverse=True, return_counts=True)
    return Choices(
        jaccard=torch.from_numpy(jaccard_index(similarity, right, dataset.items)),
        jaccard_of_chance=_jaccard_of_chance(sizes, torch.bincount(case, right.double())),
        sizes=sizes,
    )


def _jaccard_of_chance(sizes: Tensor, picks: Tensor) -> Tensor:
    """(I,) the mean Jaccard index of random picks of k among n, of which k are right: hypergeometric."""
    found = {}
    for n, k in {(int(n), int(k)) for n, k in zip(sizes, picks, strict=True)}:
        hits = torch.arange(max(0, 2 * k - n), k + 1, dtype=torch.float64)
        log = _log_choose(k, hits) + _log_choose(n - k, k - hits) - _log_choose(n, torch.tensor(float(k)))
        found[n, k] = float((log.exp() * hits / (2 * k - hits)).sum())
    return torch.tensor([found[int(n), int(k)] for n, k in zip(sizes, picks, strict=True)])


def _log_choose(n: int, k: Tensor) -> Tensor:
    k = k.double()
    return (
        torch.lgamma(torch.tensor(n + 1.0, dtype=torch.float64))
        - torch.lgamma(k + 1)
        - torch.lgamma(n - k + 1)
    )


def _similarities(subject: Subject, texts: Sequence[Sequence[str]]) -> Tensor:
    """(N, K) float32 cosines of each image with its own texts, -inf where it has fewer than the longest list."""
    number: dict[str, int] = {}
    for own in texts:
        for text in own:
            number.setdefault(text, len(number))
    longest = max(map(len, texts))
    column = torch.tensor(
        [[number[text] for text in own] + [-1] * (longest - len(own)) for own in texts]
    )  # (N, K)
    features = subject.texts(list(number)).to(subject.device)  # (T, D)
    images = subject.images().projected  # (N, D)
    found = torch.empty(column.shape)
    for start in range(0, len(column), _BLOCK):
        part = column[start : start + _BLOCK].to(subject.device)  # (B, K)
        own_images = images[start : start + _BLOCK].to(subject.device).float()  # (B, D)
        for k in range(longest):  # a gathered (B, K, D) would take K times the memory
            cosine = (own_images * features[part[:, k].clamp(min=0)]).sum(dim=1)  # (B,)
            found[start : start + _BLOCK, k] = cosine.masked_fill(part[:, k] < 0, -torch.inf).cpu()
    return found
