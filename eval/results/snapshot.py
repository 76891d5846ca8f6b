"""Takes what the report shows of one moment in training, from features that an evaluation has already encoded.

Which images and queries are taken depends only on the dataset and the seed, so that they can be followed from
step to step.

Shapes: N images, D feature dimensions, C classes, E examples, M pairs of the similarity matrix, Q queries.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.model.zero_shot import fill_template
from eval.datasets.dataset import EvalDataset
from eval.results.details import thumbnail
from eval.results.records import (
    Example,
    Guess,
    Hit,
    Matrix,
    Picture,
    Query,
    Snapshot,
    read_snapshots,
    write_snapshot,
)
from eval.tasks.subject import Subject

__all__ = ["Snapshot", "read_snapshots", "take_snapshot", "write_snapshot"]

EXAMPLES = 8
GUESSES = 5
PAIRS = 16
QUERIES = 6
HITS = 8
_MAX_QUERIES = 32  # keeps the file below 16 MB, whatever the images
_MAX_TEXT = 300  # characters of a caption or class name that a page can use


@torch.no_grad()
def take_snapshot(
    subject: Subject, *, step: int, queries: Sequence[str] | None = None, seed: int = 0
) -> Snapshot:
    """What the report shows of a dataset at ``step``.

    Only texts are encoded that were not yet: the queries, and the captions of the similarity matrix. No random
    numbers are drawn from the global generator.

    Args:
        subject: the model and the dataset.
        step: of the training.
        queries: at most 32 texts to look for. By default class names spread over the list in the first template, or
            captions where there are no classes.
        seed: chooses the images; the same at each step, so that they can be followed.

    Raises:
        DataError: the dataset is empty, the features are not finite numbers, or the queries are too many.
    """
    if queries is not None and len(queries) > _MAX_QUERIES:
        raise DataError(f"{len(queries)} queries are too many for a snapshot: give at most {_MAX_QUERIES}")
    dataset, features = subject.dataset, subject.images().projected  # (N, D)
    if len(features) == 0:
        raise DataError(f"dataset {dataset.name} has no images to take a snapshot of")
    if not bool(torch.isfinite(features).all()):
        raise DataError(f"the features of dataset {dataset.name} are not finite: the training has diverged")
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed)).tolist()
    pairs = _distinct_pairs(dataset, order)
    wanted = _default_queries(dataset, order) if queries is None else _known_classes(dataset, queries)
    captions = subject.texts([text for _, text in pairs]).cpu()  # (M, D)
    searched = subject.texts([text for text, _ in wanted]).cpu()  # (Q, D)
    # a training may call this under autocast, and similarities are float32
    with torch.autocast("cpu", enabled=False):
        examples: tuple[Example, ...] = ()
        if dataset.class_names:
            logits = (
                subject.logit_scale * features[order[:EXAMPLES]] @ subject.class_weights().cpu()
            )  # (E, C)
            examples = _examples(dataset, order[:EXAMPLES], logits.softmax(dim=1))
        matrix = _matrix(features, pairs, captions)
        found = _nearest(dataset, features, wanted, searched)
    named = {example.picture for example in examples} | {hit.picture for query in found for hit in query.hits}
    named.update(matrix.pictures if matrix else ())
    return Snapshot(
        step=step,
        dataset=dataset.name,
        samples=len(features),
        classes=len(dataset.class_names),
        examples=examples,
        matrix=matrix,
        queries=found,
        pictures={name: _picture(dataset, int(name)) for name in sorted(named, key=int)},
    )


def _examples(dataset: EvalDataset, picked: list[int], probabilities: Tensor) -> tuple[Example, ...]:
    """CLIP's own figure: the five likeliest labels of each image. ``probabilities`` is (E, C)."""
    names, labels = dataset.class_names, dataset.labels
    examples = []
    for number, row in zip(picked, probabilities, strict=True):
        truth = None if labels is None else int(labels[number])
        # among equals the lower index comes first, as in the scores
        likeliest = row.sort(descending=True, stable=True).indices.tolist()
        guesses = tuple(
            Guess(label=_short(names[label]), probability=_rounded(float(row[label])), right=label == truth)
            for label in likeliest[:GUESSES]
        )
        examples.append(
            Example(
                picture=str(number),
                guesses=guesses,
                truth=None if truth is None else _short(names[truth]),
                rank=None if truth is None else 1 + likeliest.index(truth),
                probability=None if truth is None else _rounded(float(row[truth])),
            )
        )
    return tuple(examples)


def _distinct_pairs(dataset: EvalDataset, order: list[int]) -> list[tuple[int, str]]:
    """Images with their texts: a held-out batch in which texts, and classes if there are any, differ."""
    pairs: list[tuple[int, str]] = []
    labels: set[int] = set()
    texts: set[str] = set()
    for number in order:
        label = None if dataset.labels is None else int(dataset.labels[number])
        text = _text(dataset, number)
        if text is None or text in texts or label in labels:
            continue
        pairs.append((number, text))
        texts.add(text)
        if label is not None:
            labels.add(label)
        if len(pairs) == PAIRS:
            break
    known = dataset.labels
    # in the order of the class list, as a reader expects it
    return pairs if known is None else sorted(pairs, key=lambda pair: int(known[pair[0]]))


def _matrix(features: Tensor, pairs: list[tuple[int, str]], texts: Tensor) -> Matrix | None:
    if not pairs:
        return None
    numbers, captions = [number for number, _ in pairs], [text for _, text in pairs]
    cosines = features[numbers] @ texts.T  # (M, M)
    return Matrix(
        pictures=tuple(str(number) for number in numbers),
        captions=tuple(_short(caption) for caption in captions),
        cosines=tuple(tuple(_rounded(value) for value in row) for row in cosines.tolist()),
    )


def _nearest(
    dataset: EvalDataset, features: Tensor, wanted: Sequence[tuple[str, int | None]], texts: Tensor
) -> tuple[Query, ...]:
    """The nearest images of each text; ``wanted`` pairs a text with its class, where one is known."""
    if not wanted:
        return ()
    top = (texts @ features.T).topk(min(HITS, len(features)), dim=1)
    labels = dataset.labels
    found = []
    for (text, label), values, indices in zip(wanted, top.values.tolist(), top.indices.tolist(), strict=True):
        hits = tuple(
            Hit(
                picture=str(index),
                cosine=_rounded(value),
                right=None if labels is None or label is None else int(labels[index]) == label,
            )
            for value, index in zip(values, indices, strict=True)
        )
        found.append(Query(text=_short(text), hits=hits))
    return tuple(found)


def _default_queries(dataset: EvalDataset, order: list[int]) -> list[tuple[str, int | None]]:
    """Queries that nobody chose: classes spread over the list, else captions of a few images."""
    names = dataset.class_names
    if not names:
        texts = dict.fromkeys(_text(dataset, number) for number in order[:QUERIES])
        return [(text, None) for text in texts if text]
    # a class without an image would have nothing to find
    present = list(range(len(names))) if dataset.labels is None else dataset.labels.unique().tolist()
    count = min(QUERIES, len(present))
    chosen = [present[round(i * (len(present) - 1) / max(1, count - 1))] for i in range(count)]
    return [(fill_template(dataset.templates[0], names[label]), label) for label in chosen]


def _known_classes(dataset: EvalDataset, queries: Sequence[str]) -> list[tuple[str, int | None]]:
    """Queries that somebody chose; the class is known where the text is a class name or one of its prompts."""
    known: dict[str, int] = {}
    for label, name in enumerate(dataset.class_names):
        for text in (name, *(fill_template(template, name) for template in dataset.templates)):
            known.setdefault(text, label)
    return [(text, known.get(text)) for text in queries]


def _text(dataset: EvalDataset, number: int) -> str | None:
    """The text that belongs to an image: its first caption, else the prompt of its class."""
    if dataset.captions is not None:
        return " ".join(dataset.captions[number][0].split())
    if dataset.labels is None or not dataset.class_names:
        return None
    return fill_template(dataset.templates[0], dataset.class_names[int(dataset.labels[number])])


def _picture(dataset: EvalDataset, number: int) -> Picture:
    alt = _text(dataset, number) or f"image {number}"
    return Picture(png=thumbnail(dataset.images.read(number)), alt=_short(alt))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
