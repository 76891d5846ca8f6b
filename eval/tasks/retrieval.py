"""Retrieval between images and captions: recall among the first 1, 5 and 10, in both directions.

Every caption of the dataset stands in the list, also one that stands there twice. Equal captions mean the same,
so a caption is right for every image that bears it, whichever of its copies is meant. Without equal captions
this is the usual recall: an image is found by any of its own captions, a caption by its one image.

Captions are read as they stand, unless the dataset was given a prompt for them: of Table 13 the CLIP paper (Radford
et al. 2021) says that "a photo of" stands before each.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.datasets.dataset import captions_of
from eval.metrics import DIRECTIONS, METRICS, Direction, match_ranks
from eval.results.details import retrieval_details
from eval.results.scores import Score
from eval.tasks import Options
from eval.tasks.classify import report_captions
from eval.tasks.subject import Outcome, Subject, metric_score

__all__ = ["Retrieved", "retrieval", "run_retrieval"]

_TOP = (1, 5, 10)


@dataclass(frozen=True, kw_only=True, eq=False)
class Retrieved:
    """What came of retrieval.

    Attributes:
        scores: R@k (k = 1, 5, 10), mean and median rank, as ``image_to_text_…`` and ``text_to_image_…``; and
            ``mean_R@1``. A k that is not below the number of things to find is left out. Where images have
            several captions, these are resampled together for the interval of ``text_to_image_R@k``.
        right: by the name of each R@k, (Q,) bool of its queries: images, or captions, equal ones together.
        ranks: by the name of each mean rank, (Q,) int64, from 1.
        captions: the T distinct ones, as they stand.
        texts: (T, D) float32, unit norm: the features of these, with the prompt if they were given one.
        pairs: (P, 2) int64, (image, number of a caption of its own), sorted.
    """

    scores: list[Score]
    right: Mapping[str, Tensor]
    ranks: Mapping[str, Tensor]
    captions: tuple[str, ...]
    texts: Tensor
    pairs: Tensor


def retrieval(subject: Subject) -> Retrieved:
    """Find captions by images and images by captions.

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
    )  # (P, 2) image, text
    by_text = pairs[pairs[:, 1].argsort(stable=True)].flip(1)  # (P, 2) text, image
    texts = subject.texts([dataset.caption_prompt(caption) for caption in copies])  # (T, D)
    images = subject.images().projected.to(subject.device)
    once = torch.ones(len(dataset), dtype=torch.int64)
    total = int(text_counts.sum())
    right = torch.zeros_like(once).index_add(0, pairs[:, 0], text_counts[pairs[:, 1]])
    first = by_text[torch.searchsorted(by_text[:, 0].contiguous(), torch.arange(len(copies)))][:, 1]
    directions = {
        "image_to_text": Direction(match_ranks(images, texts, pairs, text_counts), once, right, total),
        "text_to_image": Direction(
            match_ranks(texts, images, by_text),
            text_counts,
            torch.bincount(by_text[:, 0]),
            len(dataset),
            cluster=first if total > len(dataset) else None,
        ),
    }
    names = [
        name
        for name, metric in METRICS.items()
        if metric.kind == "retrieval"
        and all(metric.least <= directions[way].candidates for way in DIRECTIONS if name.startswith(way))
    ]
    scores = [
        metric_score(dataset, name, directions, task="retrieval", prompt_set=dataset.caption_prompt_set)
        for name in names
    ]
    each = {way: directions[way].ranks.repeat_interleave(directions[way].weight) for way in DIRECTIONS}
    return Retrieved(
        scores=[score for score in scores if score is not None],
        right={f"{way}_R@{k}": ranks < k for way, ranks in each.items() for k in _TOP},
        ranks={f"{way}_mean_rank": ranks + 1 for way, ranks in each.items()},
        captions=tuple(copies),
        texts=texts,
        pairs=pairs,
    )


def run_retrieval(subject: Subject, options: Options) -> Outcome:
    """The task ``retrieval``."""
    report_captions(subject)
    found = retrieval(subject)
    if not options.details:
        return Outcome(scores=found.scores)
    details = retrieval_details(
        subject.dataset,
        subject.images().projected,
        found.captions,
        found.texts,
        found.pairs,
        right=found.right,
        values={name: ranks.float() for name, ranks in found.ranks.items()},
        seed=options.seed,
    )
    return Outcome(scores=found.scores, details=[details])
