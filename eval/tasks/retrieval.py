"""The task ``retrieval``: find captions by image and images by caption, with recall among the first 1, 5 and 10.

Equal captions are interchangeable: a caption is right for every image that has it. Each copy counts, as a query and
as a candidate. Without equal captions this is the usual recall.

Captions are encoded as they are unless the dataset has a prompt for them; the CLIP paper (Radford et al. 2021,
table 13) puts "a photo of" before each.

Dimensions: N images, T distinct captions, D embedding dimension, P pairs, Q queries.
"""

from collections import Counter, defaultdict

import torch

from eval.datasets.dataset import require_captions
from eval.metrics import DIRECTIONS, METRICS, Direction, match_ranks
from eval.results.details import retrieval_details
from eval.tasks import Options
from eval.tasks.classify import report_captions
from eval.tasks.subject import Outcome, Subject, metric_scores


def retrieval(subject: Subject, options: Options) -> Outcome:
    """Run the task ``retrieval``.

    The scores are R@k (only k below the number of candidates), mean and median rank in both directions, and
    ``mean_R@1``. If images have several captions, the interval of ``text_to_image_R@k`` resamples these together.

    Raises:
        Unavailable: the dataset has no captions.
        DataError: they are all the same.
    """
    report_captions(subject)
    dataset = subject.dataset
    captions = require_captions(dataset)
    copies = Counter(caption for own in captions for caption in own)
    number = {text: i for i, text in enumerate(copies)}
    text_counts = torch.tensor(list(copies.values()))  # (T,)
    pairs = torch.tensor(
        [(i, text) for i, own in enumerate(captions) for text in sorted({number[one] for one in own})]
    )  # (P, 2) image, text
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
        ),
        "text_to_image": Direction(
            match_ranks(texts, images, by_text),
            text_counts,
            right=torch.bincount(by_text[:, 0]),
            candidates=len(dataset),
            cluster=first if total > len(dataset) else None,
        ),
    }
    names = [
        name
        for name, metric in METRICS.items()
        if metric.kind == "retrieval"
        and all(metric.least <= directions[way].candidates for way in DIRECTIONS if name.startswith(way))
    ]
    prompt_set = dataset.caption_prompt_set
    scores = metric_scores(dataset, names, directions, task="retrieval", prompt_set=prompt_set)
    facts = {"equal_images": _count_equal_images(subject)}
    if not options.details:
        return Outcome(scores=scores, facts=facts)
    ranks = {way: one.ranks.repeat_interleave(one.weight) for way, one in directions.items()}  # (Q,) from 0
    details = retrieval_details(
        dataset,
        subject.images().projected,
        tuple(copies),
        texts,
        pairs,
        right={f"{way}_R@{k}": own < k for way, own in ranks.items() for k in (1, 5, 10)},
        values={f"{way}_mean_rank": (own + 1).float() for way, own in ranks.items()},
        seed=options.seed,
    )
    return Outcome(scores=scores, details=[details], facts=facts)


def _count_equal_images(subject: Subject) -> int:
    """Count the images whose files are also those of images with other captions, and log a warning."""
    captions = require_captions(subject.dataset)
    images = Counter[bytes]()
    texts = defaultdict[bytes, set[tuple[str, ...]]](set)
    for digest, own in zip(subject.images().digests(), captions, strict=False):  # features may have none
        images[digest] += 1
        texts[digest].add(own)
    equal = sum(count for digest, count in images.items() if len(texts[digest]) > 1)
    if equal:
        subject.warn(
            f"{equal:,} of {len(captions):,} {subject.dataset.split} images are equal to another (identical files) "
            "with other captions, which count as wrong: recall is too low. `python -m data pack` makes one image "
            "of a table's rows with the same image"
        )
    return equal
