"""The task ``compositional``: choose between similar captions, or find the images of a cue.

Winoground          ``text``, ``image`` and ``group``: datasets with ``choices`` and two images per item
SugarCrepe, ARO     ``accuracy``: other datasets with ``choices``. If the metadata names the relation or pair of
                    attributes that an image tests, also ``mean_per_group_accuracy``, and ``macro_accuracy`` as
                    ARO's authors compute it: without symmetric relations, and pairs with at least 25 images
WinoGAViL           ``jaccard``, and by number of candidates ``jaccard_5`` … and ``jaccard_10-12``, which DataComp
                    reports: datasets with an ``association``

A tie counts as wrong.

Dimensions: N images, T distinct texts, D embedding dimension, I items, K captions of an image.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from clipkit.errors import DataError
from eval.datasets.dataset import require_choices
from eval.metrics import METRICS, Choices, jaccard_index, pairwise_correct, score_winoground
from eval.tasks import Options
from eval.tasks.classify import report_choices
from eval.tasks.subject import Outcome, Subject, metric_scores

_ENOUGH = 25  # images, for a pair of attributes to count
_BLOCK = 16_384  # images whose similarities are computed at a time


def compositional(subject: Subject, options: Options) -> Outcome:
    """Run the task ``compositional``; DataError if there are no choices, or items are not pairs of images."""
    report_choices(subject)
    dataset = require_choices(subject.dataset)
    if dataset.choices is None:
        results = _associations(subject)
    elif dataset.items is not None:
        results = _winoground(subject, dataset.choices)
    else:
        results = _pairwise(subject, dataset.choices)
    names = [name for name, metric in METRICS.items() if metric.kind == "compositional"]
    names[names.index("jaccard") + 1 : -1] = [f"jaccard_{size}" for size in results.sizes.unique().tolist()]
    return Outcome(scores=metric_scores(dataset, names, results, task="compositional"))


def _pairwise(subject: Subject, choices: Sequence[Sequence[str]]) -> Choices:
    """Compare each image with its own captions, the first of which is right."""
    metadata = subject.dataset.metadata
    similarity = compute_cosines(subject, choices)  # (N, K), -inf if an image has fewer captions
    correct = pairwise_correct(similarity[:, 0], similarity[:, 1:])  # (N,)
    chance = float(torch.tensor([1 / len(captions) for captions in choices], dtype=torch.float64).mean())
    name = "relation" if "relation" in metadata else "attribute"
    if name not in metadata or similarity.shape[1] != 2:
        return Choices(chance=chance, correct=correct)
    _, group = metadata[name].unique(return_inverse=True)
    count = torch.bincount(group)
    right = torch.bincount(group, correct.double()) / count
    if name == "attribute":
        counted = count >= _ENOUGH
    else:
        counted = torch.bincount(group, metadata.get("symmetric", torch.zeros_like(group))) == 0
    return Choices(chance=chance, correct=correct, groups=right, counted_groups=right[counted])


def _winoground(subject: Subject, choices: Sequence[Sequence[str]]) -> Choices:
    """Compare the two images of each item with both captions; an image's own caption comes first."""
    dataset = subject.dataset
    assert dataset.items is not None
    order = dataset.items.argsort(stable=True)  # (N,)
    items, counts = dataset.items.unique(return_counts=True)
    is_paired = bool((counts == 2).all())
    if is_paired:
        for i, j in order.view(-1, 2).tolist():
            is_paired &= len(choices[i]) == 2 and list(choices[i]) == list(reversed(choices[j]))
    if not is_paired:
        raise DataError(f"dataset {dataset.name}: its items are not two images with each other's captions")
    similarity = compute_cosines(subject, choices)[order].reshape(
        len(items), 2, 2
    )  # (I, image, own or other)
    pairs = torch.stack([similarity[:, 0], similarity[:, 1].flip(1)], dim=1)  # (I, image, caption)
    return Choices(winoground=score_winoground(pairs))


def _associations(subject: Subject) -> Choices:
    """Let the model pick the images of each cue."""
    dataset = subject.dataset
    assert dataset.items is not None and dataset.captions is not None
    similarity = compute_cosines(subject, dataset.captions)[:, 0]  # (N,)
    right = dataset.metadata["association"].bool()
    _, case, sizes = dataset.items.unique(return_inverse=True, return_counts=True)
    return Choices(
        jaccard=torch.from_numpy(jaccard_index(similarity, right, dataset.items)),
        jaccard_of_chance=_jaccard_of_chance(sizes, torch.bincount(case, right.double())),
        sizes=sizes,
    )


def _jaccard_of_chance(sizes: Tensor, picks: Tensor) -> Tensor:
    """Return the mean Jaccard index of k random picks among n, k of which are right (hypergeometric), (I,)."""

    def log_choose(n: int, k: Tensor) -> Tensor:
        k = k.double()
        log_factorial = torch.lgamma(torch.tensor(n + 1.0, dtype=torch.float64))
        return log_factorial - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)

    means: dict[tuple[int, int], float] = {}
    cases = list(zip(sizes.tolist(), picks.long().tolist(), strict=True))
    for n, k in set(cases):
        hits = torch.arange(max(0, 2 * k - n), k + 1, dtype=torch.float64)
        log = log_choose(k, hits) + log_choose(n - k, k - hits) - log_choose(n, torch.tensor(float(k)))
        means[n, k] = float((log.exp() * hits / (2 * k - hits)).sum())
    return torch.tensor([means[case] for case in cases])


def compute_cosines(subject: Subject, texts: Sequence[Sequence[str]]) -> Tensor:
    """Return (N, K) float32 cosines of each image with its own texts, -inf if it has fewer than K.

    Equal texts are encoded once.
    """
    index: dict[str, int] = {}
    longest = max(map(len, texts))
    column = torch.full((len(texts), longest), -1)  # (N, K)
    for i, image_texts in enumerate(texts):
        for k, text in enumerate(image_texts):
            column[i, k] = index.setdefault(text, len(index))
    features = subject.texts(list(index)).to(subject.device)  # (T, D)
    images = subject.images().projected  # (N, D)
    cosines = torch.empty(column.shape)
    for start in range(0, len(column), _BLOCK):
        part = column[start : start + _BLOCK].to(subject.device)  # (B, K)
        part_images = images[start : start + _BLOCK].to(subject.device).float()  # (B, D)
        for k in range(longest):  # gathering (B, K, D) would take K times the memory
            cosine = (part_images * features[part[:, k].clamp(min=0)]).sum(dim=1)  # (B,)
            cosines[start : start + _BLOCK, k] = cosine.masked_fill(part[:, k] < 0, -torch.inf).cpu()
    return cosines
