"""Whether a model tells captions apart that differ in the order or choice of words, and what belongs to a cue.

Winoground          ``text``, ``image`` and ``group``: datasets with ``choices`` and two pictures an item
SugarCrepe, ARO     ``accuracy``: other datasets with ``choices``; where the metadata says the relation or the pair
                    of attributes that a picture tests, ``mean_per_group_accuracy`` of all of them, and
                    ``macro_accuracy`` as ARO's authors take it: without relations that they call symmetric, and
                    of pairs with at least 25 pictures
WinoGAViL           ``jaccard``, by the number of candidates ``jaccard_5`` …, and ``jaccard_10-12``, which DataComp
                    counts: datasets with an ``association``

A tie is counted as wrong everywhere. Equal captions are encoded once.

Letters in shape comments: N pictures, T distinct texts, D embedding dimension, I items.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from clipkit.errors import DataError
from eval.datasets.dataset import EvalDataset, Lacks
from eval.metrics import Estimate, jaccard_index, mean_estimate, pairwise_correct, proportion, winoground
from eval.results.scores import Score
from eval.tasks.subject import Subject

__all__ = ["choices_of", "compositional"]

_ASSOCIATION = "association"
_GROUPS = ("relation", "attribute")
_ENOUGH = 25  # pictures, for a pair of attributes to count
_BLOCK = 16_384  # pictures whose similarities are computed at a time


def choices_of(dataset: EvalDataset) -> EvalDataset:
    """The dataset, if it has choices between captions, or cues with candidates.

    Raises:
        Lacks: it has neither.
    """
    if dataset.choices is None and (_ASSOCIATION not in dataset.metadata or dataset.items is None):
        raise Lacks(
            f"dataset {dataset.name} has no captions to choose between, which the compositional task needs"
        )
    return dataset


def compositional(subject: Subject) -> list[Score]:
    """The scores named above, of the dataset's kind.

    Raises:
        DataError: the dataset has no choices, or its items are not pairs of pictures.
    """
    dataset = choices_of(subject.dataset)
    if dataset.choices is None:
        return _associations(subject)
    if dataset.items is not None:
        return _winoground(subject, dataset.choices)
    return _pairwise(subject, dataset.choices)


def _pairwise(subject: Subject, choices: Sequence[Sequence[str]]) -> list[Score]:
    """Each picture with its own captions, of which the first is right."""
    longest = max(map(len, choices))
    similarity = _similarities(subject, choices)  # (N, longest), -inf where a picture has fewer
    correct = pairwise_correct(similarity[:, 0], similarity[:, 1:])  # (N,)
    chance = float(torch.tensor([1 / len(own) for own in choices], dtype=torch.float64).mean())
    scores = [_score(subject.dataset, "accuracy", proportion(int(correct.sum()), len(correct)), chance)]
    for name in _GROUPS:
        if longest == 2 and name in subject.dataset.metadata:
            scores += _means_of_groups(subject.dataset, name, correct, chance)
    return scores


def _means_of_groups(dataset: EvalDataset, name: str, correct: Tensor, chance: float) -> list[Score]:
    """The mean over groups of the share of right (N,) answers: of those that ARO's authors count, and of all."""
    _, group = dataset.metadata[name].unique(return_inverse=True)
    count = torch.bincount(group)
    share = torch.bincount(group, correct.double()) / count
    if name == "attribute":
        counted = count >= _ENOUGH
    else:
        symmetric = dataset.metadata.get("symmetric", torch.zeros_like(group))
        counted = torch.bincount(group, symmetric) == 0
    means = {"macro_accuracy": share[counted], "mean_per_group_accuracy": share}
    return [_score(dataset, metric, mean_estimate(of), chance) for metric, of in means.items() if len(of)]


def _winoground(subject: Subject, choices: Sequence[Sequence[str]]) -> list[Score]:
    """Items of two pictures, each with its own caption first and then the other's."""
    dataset = subject.dataset
    assert dataset.items is not None
    order = dataset.items.argsort(stable=True)  # (N,)
    items, counts = dataset.items.unique(return_counts=True)
    first, second = order[0::2].tolist(), order[1::2].tolist()
    if not bool((counts == 2).all()) or any(
        tuple(choices[a]) != tuple(reversed(choices[b])) or len(choices[a]) != 2
        for a, b in zip(first, second, strict=True)
    ):
        raise DataError(f"dataset {dataset.name}: its items are not two pictures with each other's captions")
    own_first = _similarities(subject, choices)[order].reshape(
        len(items), 2, 2
    )  # (I, 2, 2) picture, own or other
    similarity = torch.stack([own_first[:, 0], own_first[:, 1].flip(1)], dim=1)  # (I, 2, 2) picture, caption
    found = winoground(similarity)
    return [
        _score(dataset, "text", found.text, 1 / 4),
        _score(dataset, "image", found.image, 1 / 4),
        _score(dataset, "group", found.group, 1 / 6),
    ]


def _associations(subject: Subject) -> list[Score]:
    """Candidates of all cues; a model picks as many as belong to each cue."""
    dataset = subject.dataset
    assert dataset.items is not None and dataset.captions is not None
    similarity = _similarities(subject, dataset.captions)[:, 0]  # (N,)
    right = dataset.metadata[_ASSOCIATION].bool()
    index = torch.from_numpy(jaccard_index(similarity, right, dataset.items))  # (I,)
    _, case, sizes = dataset.items.unique(return_inverse=True, return_counts=True)
    picks = torch.bincount(case, right.double())
    chance = _jaccard_of_chance(sizes, picks)
    scores = [_score(dataset, "jaccard", mean_estimate(index), float(chance.mean()))]
    parts = {f"jaccard_{size}": sizes == size for size in sizes.unique().tolist()}
    parts["jaccard_10-12"] = (sizes >= 10) & (sizes <= 12)
    for name, of in parts.items():
        if bool(of.any()):
            scores.append(_score(dataset, name, mean_estimate(index[of]), float(chance[of].mean())))
    return scores


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
    """(N, K) float32 cosines of each picture with its own texts, -inf where it has fewer than the longest list."""
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


def _score(dataset: EvalDataset, metric: str, estimate: Estimate, chance: float) -> Score:
    return Score(
        dataset=dataset.name,
        split=dataset.split,
        task="compositional",
        metric=metric,
        value=estimate.value,
        n=estimate.n,
        low=estimate.low,
        high=estimate.high,
        chance=chance,
    )
