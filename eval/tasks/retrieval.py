"""The task ``retrieval``: find captions by image and images by caption, with recall among the first 1, 5 and 10.

Equal captions are interchangeable: a caption is right for every image that has it. Each copy counts, as a query and
as a candidate. Without equal captions this is the usual recall.

If the dataset grades its pairs of an image and a caption, those with a grade above 0 are right. Each distinct
caption is then one query and one candidate, however many images it belongs to; so it is in metrics of several right
candidates, such as MAP, for all datasets.

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

from clipkit.files import counted
from clipkit.model import combine_features
from eval.datasets.dataset import require_captions
from eval.metrics import METRICS, Direction, Metric, get_metric, judge_ranking, match_ranks
from eval.results.details import retrieval_details
from eval.tasks import Options
from eval.tasks.classify import report_captions
from eval.tasks.subject import Outcome, Subject, metric_scores


def retrieval(subject: Subject, options: Options) -> Outcome:
    """Run the task ``retrieval``.

    The scores are R@k (only k below the number of candidates), mean and median rank in both directions,
    ``mean_R@1``, and the metrics of the card. If images have several captions, the interval of
    ``text_to_image_R@k`` resamples these together.
    """
    report_captions(subject)
    dataset = subject.dataset
    captions = require_captions(dataset)
    copies = Counter(chain.from_iterable(captions))
    index = {text: j for j, text in enumerate(copies)}
    text_counts = torch.tensor(list(copies.values()))  # (T,)
    graded = dataset.grades is not None
    if graded:
        text_counts = torch.ones_like(text_counts)
    image_texts = {}
    for i, image_captions in enumerate(captions):
        grades = dataset.grades[i] if dataset.grades is not None else (1.0,) * len(image_captions)
        rows = {(i, index[caption]): grade for caption, grade in zip(image_captions, grades, strict=True)}
        image_texts.update({row: rows[row] for row in sorted(rows) if rows[row] > 0})
    pairs = torch.tensor(list(image_texts))  # (P, 2) image, text
    pair_grades = torch.tensor(list(image_texts.values()), dtype=torch.float64)
    order = pairs[:, 1].argsort(stable=True)
    by_text = pairs[order].flip(1)  # (P, 2) text, image
    texts = subject.texts([dataset.caption_prompt(caption) for caption in copies])  # (T, D)
    images = _combine_fields(subject)
    # queries are the images and the texts with a relevant candidate; others are only candidates
    query_images, image_rows = pairs[:, 0].unique(return_inverse=True)
    query_texts, text_rows = by_text[:, 0].unique(return_inverse=True)
    _report_ungraded(subject, len(copies) - len(query_texts), len(dataset) - len(query_images))
    image_pairs = torch.stack([image_rows, pairs[:, 1]], dim=1)
    text_pairs = torch.stack([text_rows, by_text[:, 1]], dim=1)
    image_features = images if len(query_images) == len(images) else images[query_images]
    text_features = texts if len(query_texts) == len(texts) else texts[query_texts]
    once = torch.ones(len(query_images), dtype=torch.int64)
    weight = text_counts[query_texts]
    total = int(text_counts.sum())
    position = torch.empty(len(dataset), dtype=torch.int64)  # of each image among the queries
    position[query_images] = torch.arange(len(query_images))
    first = position[by_text[torch.searchsorted(text_rows, torch.arange(len(query_texts)))][:, 1]]
    directions = {
        "image_to_text": Direction(
            match_ranks(image_features, texts, image_pairs, text_counts),
            once,
            right=torch.zeros_like(once).index_add(0, image_rows, text_counts[pairs[:, 1]]),
            candidates=total,
            image=torch.arange(len(query_images)),
            judge=lambda: judge_ranking(image_features, texts, image_pairs, pair_grades),
        ),
        "text_to_image": Direction(
            match_ranks(text_features, images, text_pairs),
            weight,
            right=torch.bincount(text_rows),
            candidates=len(dataset),
            image=first,
            judge=lambda: judge_ranking(text_features, images, text_pairs, pair_grades[order]),
            independent=graded or total <= len(dataset),
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
        images,
        tuple(copies),
        texts,
        pairs,
        right=right,
        values=values,
        seed=options.seed,
    )
    return Outcome(scores=scores, details=[details], facts=facts)


def _combine_fields(subject: Subject) -> Tensor:
    """Return the features of the images, or their sum with those of texts of each image, (N, D), unit norm."""
    images = subject.images().projected
    fields = subject.dataset.image_fields
    if not fields:
        return images.to(subject.device)
    parts = []
    for _, texts in fields.values():
        features = images.to(subject.device)
        if texts:
            distinct = {text: i for i, text in enumerate(dict.fromkeys(texts))}
            features = subject.texts(list(distinct))[[distinct[text] for text in texts]]
        parts.append(features)
    return combine_features(parts, [weight for weight, _ in fields.values()])


def _choose_metrics(
    subject: Subject, directions: Mapping[str, Direction]
) -> dict[str, Metric[Mapping[str, Direction]]]:
    """Return the default metrics and those of the card that are meaningful for the number of candidates."""
    defaults = [name for name, metric in METRICS.items() if metric.by_default]
    # tables show the first metric of a dataset
    primary = [name for name in subject.metrics[:1] if name not in defaults]
    chosen = {}
    for name in dict.fromkeys((*primary, *defaults, *subject.metrics)):
        metric = cast(Metric[Mapping[str, Direction]] | None, get_metric(name))
        candidates = [direction.candidates for way, direction in directions.items() if name.startswith(way)]
        fewest = min(candidates or [direction.candidates for direction in directions.values()])
        if metric is None or metric.kind != "retrieval":
            continue
        if metric.least <= fewest:
            chosen[name] = metric
        elif name in subject.metrics:
            subject.warn(f"{name} is left out, because there are only {counted(fewest, 'candidate')}")
    return chosen


def _report_ungraded(subject: Subject, texts: int, images: int) -> None:
    """Warn of texts and images that only have pairs of grade 0."""
    if texts or images:
        subject.warn(
            f"{counted(texts, 'text')} and {counted(images, 'image')} have no pair with a grade above 0: they are "
            "candidates, not queries"
        )


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
