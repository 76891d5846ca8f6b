"""The task ``retrieval``: find captions by image and images by caption, with recall among the first 1, 5 and 10.

Equal captions are interchangeable: a caption is right for every image that has it. Each copy counts, as a query and
as a candidate. Without equal captions this is the usual recall.

Captions are encoded as they are unless the dataset has a prompt for them; the CLIP paper (Radford et al. 2021,
table 13) puts "a photo of" before each.

Dimensions: N images, T distinct captions, D embedding dimension, P pairs, Q queries.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from eval.datasets.dataset import require_captions
from eval.metrics import METRICS, Direction, Metric, get_metric, match_ranks
from eval.results.details import retrieval_details
from eval.tasks import Options
from eval.tasks.classify import report_captions
from eval.tasks.subject import Outcome, Subject, metric_scores


def retrieval(subject: Subject, options: Options) -> Outcome:
    """Run the task ``retrieval``.

    The scores are R@k (only k below the number of candidates), mean and median rank in both directions, and
    ``mean_R@1``. If images have several captions, the interval of ``text_to_image_R@k`` resamples these together.
    """
    report_captions(subject)
    dataset = subject.dataset
    captions = require_captions(dataset)
    copies = Counter(chain.from_iterable(captions))
    index = {text: j for j, text in enumerate(copies)}
    text_counts = torch.tensor(list(copies.values()))  # (T,)
    image_texts = []
    for i, image_captions in enumerate(captions):
        image_texts += [(i, j) for j in sorted({index[caption] for caption in image_captions})]
    pairs = torch.tensor(image_texts)  # (P, 2) image, text
    by_text = pairs[pairs[:, 1].argsort(stable=True)].flip(1)  # (P, 2) text, image
    texts = subject.texts([dataset.caption_prompt(caption) for caption in copies])  # (T, D)
    images = subject.images().projected.to(subject.device)
    once = torch.ones(len(dataset), dtype=torch.int64)
    total = int(text_counts.sum())
    first = by_text[torch.searchsorted(by_text[:, 0].contiguous(), torch.arange(len(copies)))][:, 1]
    directions = {
        "image_to_text": Direction(
            match_ranks(images, texts, pairs, text_counts),
            once,
            right=torch.zeros_like(once).index_add(0, pairs[:, 0], text_counts[pairs[:, 1]]),
            candidates=total,
            image=torch.arange(len(dataset)),
        ),
        "text_to_image": Direction(
            match_ranks(texts, images, by_text),
            text_counts,
            right=torch.bincount(by_text[:, 0]),
            candidates=len(dataset),
            image=first,
            independent=total <= len(dataset),
        ),
    }
    metrics = _choose_metrics(subject, directions)
    prompt_set = dataset.caption_prompt_set
    scores = metric_scores(dataset, metrics, directions, task="retrieval", prompt_set=prompt_set)
    facts = {"equal_images": _count_equal_images(subject)}
    if not options.details:
        return Outcome(scores=scores, facts=facts)
    right: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for way, direction in directions.items():
        ranks = direction.ranks.repeat_interleave(direction.weight)  # (Q,) from 0
        ks = [int(name.rpartition("@")[2]) for name in metrics if name.startswith(f"{way}_R@")]
        right |= {f"{way}_R@{k}": ranks < k for k in {1, *ks}}
        values[f"{way}_mean_rank"] = (ranks + 1).float()
    for name, metric in metrics.items():
        if metric.item_values is not None:
            values[name] = metric.item_values(directions).flatten()
    details = retrieval_details(
        dataset,
        subject.images().projected,
        tuple(copies),
        texts,
        pairs,
        right=right,
        values=values,
        seed=options.seed,
    )
    return Outcome(scores=scores, details=[details], facts=facts)


def _choose_metrics(
    subject: Subject, directions: Mapping[str, Direction]
) -> dict[str, Metric[Mapping[str, Direction]]]:
    """Return the default metrics and those of the card that are meaningful for the number of candidates."""
    defaults = [name for name, metric in METRICS.items() if metric.by_default]
    chosen = {}
    for name in dict.fromkeys((*defaults, *subject.metrics)):
        metric = cast(Metric[Mapping[str, Direction]] | None, get_metric(name))
        candidates = [direction.candidates for way, direction in directions.items() if name.startswith(way)]
        fewest = min(candidates or [direction.candidates for direction in directions.values()])
        if metric is not None and metric.kind == "retrieval" and metric.least <= fewest:
            chosen[name] = metric
    return chosen


def _count_equal_images(subject: Subject) -> int:
    """Count the images whose files are also those of images with other captions, and log a warning."""
    captions = require_captions(subject.dataset)
    images = Counter[bytes]()
    texts = defaultdict[bytes, set[tuple[str, ...]]](set)
    # features may have no digests
    for digest, image_captions in zip(subject.images().digests(), captions, strict=False):
        images[digest] += 1
        texts[digest].add(image_captions)
    equal = sum(count for digest, count in images.items() if len(texts[digest]) > 1)
    if equal:
        subject.warn(
            f"{equal:,} of {len(captions):,} {subject.dataset.split} images are equal to another (identical files) "
            "with other captions, which count as wrong: recall is too low. `python -m data pack` makes one image "
            "of a table's rows with the same image"
        )
    return equal
