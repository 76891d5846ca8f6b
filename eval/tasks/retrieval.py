"""Retrieval between pictures and captions: recall among the first 1, 5 and 10, in both directions.

Every caption of the dataset stands in the list, also one that stands there twice. Equal captions mean the same,
so a caption is right for every picture that bears it, whichever of its copies is meant. Without equal captions
this is the usual recall: a picture is found by any of its own captions, a caption by its one picture.
"""

from collections import Counter

import torch
from torch import Tensor

from clipkit import CLIP
from clipkit.errors import DataError
from eval.dataset import EvalDataset
from eval.encode import ONE_RANK, Encoded, Ranks, encode_texts
from eval.metrics import chance_of_recall, match_ranks, wilson_interval
from eval.results import Score

__all__ = ["captions_of", "retrieval"]

_TOP = (1, 5, 10)


def captions_of(dataset: EvalDataset) -> tuple[tuple[str, ...], ...]:
    """The captions of each picture.

    Raises:
        DataError: the dataset has none, or they are all the same.
    """
    if dataset.captions is None:
        raise DataError(f"dataset {dataset.name} has no captions, which retrieval needs")
    if len({caption for own in dataset.captions for caption in own}) < 2:
        raise DataError(
            f"dataset {dataset.name} has one caption for all pictures: there is nothing to retrieve"
        )
    return dataset.captions


def retrieval(model: CLIP, encoded: Encoded, *, ranks: Ranks = ONE_RANK) -> list[Score]:
    """``image_to_text_R@k`` over pictures and ``text_to_image_R@k`` over captions, k = 1, 5, 10.

    A k that is not below the number of things to find is left out. The intervals take queries as independent;
    several captions of one picture are not quite.

    Raises:
        DataError: the dataset has no captions, or they are all the same.
    """
    dataset = encoded.dataset
    captions = captions_of(dataset)
    copies = Counter(caption for own in captions for caption in own)
    number = {text: i for i, text in enumerate(copies)}
    text_counts = torch.tensor(list(copies.values()))  # (T,) of T distinct texts
    pairs = torch.tensor(
        [(i, text) for i, own in enumerate(captions) for text in sorted({number[one] for one in own})]
    )  # (P, 2) picture, text
    by_text = pairs[pairs[:, 1].argsort(stable=True)].flip(1)  # (P, 2) text, picture
    texts = encode_texts(model, list(copies), ranks=ranks)  # (T, D)
    once = torch.ones(len(dataset), dtype=torch.int64)

    place = match_ranks(encoded.image_features, texts, pairs, text_counts)
    right = torch.zeros_like(once).index_add(0, pairs[:, 0], text_counts[pairs[:, 1]])
    found = _recalls(dataset.name, "image_to_text", place, once, right, int(text_counts.sum()))
    place = match_ranks(texts, encoded.image_features, by_text)
    right = torch.bincount(by_text[:, 0])
    return found + _recalls(dataset.name, "text_to_image", place, text_counts, right, len(dataset))


def _recalls(
    name: str, direction: str, place: Tensor, weight: Tensor, right: Tensor, candidates: int
) -> list[Score]:
    """Scores of one direction from each query's rank, how often it counts, and how many candidates are right."""
    n = int(weight.sum())
    scores = []
    for k in _TOP:
        if k >= candidates and k > 1:
            continue
        hits = int(weight[place < k].sum())
        low, high = wilson_interval(hits, n)
        chance = float((chance_of_recall(right, candidates, k) * weight).sum() / n)
        scores.append(
            Score(
                dataset=name,
                task="retrieval",
                metric=f"{direction}_R@{k}",
                value=hits / n,
                n=n,
                low=low,
                high=high,
                chance=chance,
            )
        )
    return scores
