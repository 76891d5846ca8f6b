"""Retrieval between pictures and captions: recall among the first 1, 5 and 10, in both directions.

Every caption of the dataset stands in the list, also one that stands there twice. Equal captions mean the same,
so a caption is right for every picture that bears it, whichever of its copies is meant. Without equal captions
this is the usual recall: a picture is found by any of its own captions, a caption by its one picture.

Captions are read as they stand, unless the dataset was given a prompt for them: of Table 13 the CLIP paper (Radford
et al. 2021) says that "a photo of" stands before each.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clipkit.errors import DataError
from eval.datasets.dataset import EvalDataset, Lacks
from eval.metrics import Estimate, chance_of_recall, match_ranks, mean_rank, median_rank, recall_at_k
from eval.results.scores import Score
from eval.tasks.subject import Subject

__all__ = ["Retrieved", "captions_of", "retrieval"]

_TOP = (1, 5, 10)


def captions_of(dataset: EvalDataset) -> tuple[tuple[str, ...], ...]:
    """The captions of each picture.

    Raises:
        Lacks: the dataset has none.
        DataError: they are all the same.
    """
    if dataset.captions is None:
        raise Lacks(f"dataset {dataset.name} has no captions, which retrieval needs")
    if len({caption for own in dataset.captions for caption in own}) < 2:
        raise DataError(
            f"dataset {dataset.name} has one caption for all pictures: there is nothing to retrieve"
        )
    return dataset.captions


@dataclass(frozen=True, kw_only=True, eq=False)
class Retrieved:
    """What came of retrieval.

    Attributes:
        scores: R@k (k = 1, 5, 10), mean and median rank, as ``image_to_text_…`` and ``text_to_image_…``; and
            ``mean_R@1``. A k that is not below the number of things to find is left out. Where pictures have
            several captions, these are resampled together for the interval of ``text_to_image_R@k``.
        right: by the name of each R@k, (Q,) bool of its queries: pictures, or captions, equal ones together.
        ranks: by the name of each mean rank, (Q,) int64, from 1.
        captions: the T distinct ones, as they stand.
        texts: (T, D) float32, unit norm: the features of these, with the prompt if they were given one.
        pairs: (P, 2) int64, (picture, number of a caption of its own), sorted.
    """

    scores: list[Score]
    right: Mapping[str, Tensor]
    ranks: Mapping[str, Tensor]
    captions: tuple[str, ...]
    texts: Tensor
    pairs: Tensor


def retrieval(subject: Subject) -> Retrieved:
    """Find captions by pictures and pictures by captions.

    Raises:
        Lacks: the dataset has no captions.
        DataError: they are all the same.
    """
    dataset = subject.dataset
    captions = captions_of(dataset)
    copies = Counter(caption for own in captions for caption in own)
    number = {text: i for i, text in enumerate(copies)}
    text_counts = torch.tensor(list(copies.values()))  # (T,) of T distinct texts
    pairs = torch.tensor(
        [(i, text) for i, own in enumerate(captions) for text in sorted({number[one] for one in own})]
    )  # (P, 2) picture, text
    by_text = pairs[pairs[:, 1].argsort(stable=True)].flip(1)  # (P, 2) text, picture
    texts = subject.texts([dataset.caption_prompt(caption) for caption in copies])  # (T, D)
    images = subject.images().projected.to(subject.device)
    once = torch.ones(len(dataset), dtype=torch.int64)
    total = int(text_counts.sum())
    right = torch.zeros_like(once).index_add(0, pairs[:, 0], text_counts[pairs[:, 1]])
    first = by_text[torch.searchsorted(by_text[:, 0].contiguous(), torch.arange(len(copies)))][:, 1]
    directions = {
        "image_to_text": _Found(match_ranks(images, texts, pairs, text_counts), once, right, total),
        "text_to_image": _Found(
            match_ranks(texts, images, by_text),
            text_counts,
            torch.bincount(by_text[:, 0]),
            len(dataset),
            cluster=first if total > len(dataset) else None,
        ),
    }
    scores = [score for way, found in directions.items() for score in _scores(dataset, way, found)]
    each = {way: found.place.repeat_interleave(found.weight) for way, found in directions.items()}
    return Retrieved(
        scores=[*scores, _mean(scores)],
        right={f"{way}_R@{k}": ranks < k for way, ranks in each.items() for k in _TOP},
        ranks={f"{way}_mean_rank": ranks + 1 for way, ranks in each.items()},
        captions=tuple(copies),
        texts=texts,
        pairs=pairs,
    )


def _mean(scores: Sequence[Score]) -> Score:
    """``mean_R@1``, of both directions, by which DataComp ranks models; the two go together, so no interval."""
    first = [score for score in scores if score.metric.endswith("_R@1")]
    chance = sum(score.chance or 0 for score in first) / len(first)
    value = sum(score.value for score in first) / len(first)
    return replace(first[0], metric="mean_R@1", value=value, low=None, high=None, chance=chance)


@dataclass(frozen=True, eq=False)
class _Found:
    """One direction: each query's rank, how often it counts, how many candidates are right for it, and of how many.

    Queries of one ``cluster``, captions of one picture, are not independent.
    """

    place: Tensor
    weight: Tensor
    right: Tensor
    candidates: int
    cluster: Tensor | None = None

    def chance(self, k: int) -> float:
        """R@k of candidates in random order."""
        each = chance_of_recall(self.right, self.candidates, k) * self.weight
        return float(each.sum() / self.weight.sum())


def _scores(dataset: EvalDataset, direction: str, found: _Found) -> list[Score]:
    def score(metric: str, estimate: Estimate, chance: float | None) -> Score:
        return Score(
            dataset=dataset.name,
            split=dataset.split,
            task="retrieval",
            prompt_set=dataset.caption_prompt_set,
            metric=f"{direction}_{metric}",
            value=estimate.value,
            n=estimate.n,
            low=estimate.low,
            high=estimate.high,
            chance=chance,
        )

    scores = [
        score(f"R@{k}", recall_at_k(found.place, k, found.weight, cluster=found.cluster), found.chance(k))
        for k in _TOP
        if k < found.candidates or k == 1
    ]
    scores.append(score("mean_rank", mean_rank(found.place, found.weight), None))
    scores.append(score("median_rank", median_rank(found.place, found.weight), None))
    return scores
