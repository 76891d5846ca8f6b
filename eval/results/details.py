"""Collect what pages and paired tests need besides the scores, from features or predictions already computed.

Letters in shape comments: N images, D embedding dimension, C classes, T distinct captions, P pairs of an image and
a caption, E examples, M pairs of the similarity matrix, Q queries.
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clipkit.errors import ConfigError, DataError
from clipkit.model import eval_pixels, fill_template, text_heatmaps
from eval.datasets.dataset import EvalDataset
from eval.metrics import (
    Descriptions,
    calibration_bins,
    class_ranks,
    class_scores,
    count_confusion,
    count_correct,
    merge_superclasses,
    top_classes,
)
from eval.results.records import (
    Bin,
    Description,
    Details,
    Example,
    Guess,
    Hit,
    Matrix,
    Packed,
    Query,
    Snapshot,
    Thumbnail,
    pack_values,
)
from eval.tasks.subject import Subject

if TYPE_CHECKING:
    from PIL import Image

EXAMPLES = 6  # in details
DESCRIPTIONS = 40
GUESSES = 5
MISTAKES = 30
_WHOLE_MATRIX = 64  # classes; with more, only the most frequent mistakes are stored
SNAPSHOT_EXAMPLES = 8
PAIRS = 16
QUERIES = 6
HITS = 8
_THUMBNAIL_SIZE = 96  # pixels of the longer side
_MAX_TEXT = 300  # characters of a caption or class name


@torch.no_grad()
def zero_shot_details(
    dataset: EvalDataset,
    image_features: Tensor,
    class_weights: Tensor,
    logit_scale: float,
    *,
    task: str = "zero-shot",
    seed: int = 0,
    device: torch.device | None = None,
) -> Details:
    """Collect the details of zero-shot classification in bounded memory.

    Examples are shown as in figure 21 of the CLIP paper (Radford et al. 2021). They are drawn at random and
    alternate between correct and wrong predictions. With several labels per image, a prediction is correct if it is
    one of them, and there are only examples and labels: no confusion matrix or counts by class.

    Args:
        image_features: (N, D) unit norm, possibly memory-mapped.
        class_weights: (D, C) unit columns.
        logit_scale: exp(t) of the model.
        seed: seed of the examples, which otherwise depend only on N and the predictions.
    """
    labels = dataset.labels
    classes = len(dataset.class_names)
    if labels is None or not classes or not len(labels):
        raise DataError(f"dataset {dataset.name} has no labelled images with class names")
    top = top_classes(image_features, class_weights, k=GUESSES, logit_scale=logit_scale, device=device)
    if labels.ndim == 1:
        is_right = top.classes == labels[:, None]  # (N, k)
        right = {"acc1": is_right[:, 0]}
        if classes > GUESSES:
            right["acc5"] = is_right.any(dim=1)
        details = prediction_details(
            dataset, top.classes[:, 0], task=task, confidence=top.probabilities[:, 0]
        )
        details = replace(details, right={name: pack_values(rows) for name, rows in right.items()})
    else:
        # a class of -1 means none
        is_right = labels.bool().gather(1, top.classes.clamp(min=0)) & (top.classes >= 0)
        known_labels = dataset.known_labels
        assert known_labels is not None
        details = item_details(dataset, task=task, n=len(labels))
        details = replace(details, labels=pack_values(known_labels.flatten()))
    chosen = _choose_examples(is_right[:, 0], seed)
    weights = class_weights.cpu()
    examples = []
    for i in chosen:
        features = image_features[i : i + 1].to(torch.float32).cpu()  # (1, D)
        best = top_classes(features, weights, k=GUESSES, logit_scale=logit_scale)
        probabilities = class_scores(features, weights, softmax_scale=logit_scale)[0].exp()  # (C,)
        true = [int(labels[i])] if labels.ndim == 1 else labels[i].nonzero()[:, 0].tolist()
        # the true label with the best rank, if there are several
        ranks = {label: int(class_ranks(features, weights, torch.tensor([label]))) for label in true}
        first = min(ranks, key=lambda label: (ranks[label], label), default=None)
        likeliest = zip(best.classes[0].tolist(), best.probabilities[0].tolist(), strict=True)
        guesses = [
            _build_guess(_class_name(dataset, label), probability, label in true)
            for label, probability in likeliest
            if label >= 0
        ]
        example = Example(picture=str(i), guesses=tuple(guesses), truth=None, rank=None, probability=None)
        if first is not None:
            truth = _shorten(", ".join(_class_name(dataset, label) for label in true))
            probability = _round(float(probabilities[first]))
            example = replace(example, truth=truth, rank=1 + ranks[first], probability=probability)
        examples.append(example)
    return replace(details, examples=tuple(examples), pictures=_draw_thumbnails(dataset, chosen))


def prediction_details(
    dataset: EvalDataset,
    predicted: Tensor,
    *,
    task: str,
    setting: str = "",
    confidence: Tensor | None = None,
    chosen_c: float | None = None,
) -> Details:
    """Collect accuracy by class, the confusion matrix and calibration of predictions of one class per image.

    Args:
        dataset: with (N,) labels, N ≥ 1, and class names.
        predicted: (N,) int64 classes, −1 for none.
        confidence: (N,) probability of the predicted class in [0, 1], if there is one.
        chosen_c: for a probe, C chosen on validation images.
    """
    labels = dataset.labels
    classes = len(dataset.class_names)
    assert labels is not None and labels.ndim == 1, "one label per image"
    predicted = predicted.cpu()
    correct = predicted == labels  # (N,)
    right, total = count_correct(correct, labels, classes)
    confused = count_confusion(predicted, labels)
    groups = tuple(dict.fromkeys(dataset.superclasses))
    bars: list[Bin] = []
    if confidence is not None:
        table = calibration_bins(confidence, correct)
        columns = (table.low, table.high, table.count, table.confidence, table.accuracy)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        bars = [
            Bin(low=low, high=high, count=count, confidence=mean, accuracy=accuracy)
            for low, high, count, mean, accuracy in rows
        ]
    matrix = group_matrix = None
    if classes <= _WHOLE_MATRIX:
        matrix = pack_values(torch.from_numpy(confused.matrix(classes)).flatten())
    if groups:
        group_confusion = merge_superclasses(confused, dataset.number_superclasses())
        group_matrix = pack_values(torch.from_numpy(group_confusion.matrix(len(groups))).flatten())
    return replace(
        item_details(dataset, task=task, setting=setting, n=len(labels), right={"acc1": correct}),
        superclass_names=tuple(map(_shorten, groups)),
        superclass_matrix=group_matrix,
        class_counts=tuple(total.tolist()),
        class_right=tuple(right.tolist()),
        mistakes=tuple(mistake for mistake in confused.mistakes(MISTAKES) if mistake[1] >= 0),
        matrix=matrix,
        bins=tuple(bars),
        labels=pack_values(labels),
        chosen_c=chosen_c,
    )


def retrieval_details(
    dataset: EvalDataset,
    image_features: Tensor,
    captions: Sequence[str],
    text_features: Tensor,
    pairs: Tensor,
    *,
    right: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    seed: int = 0,
) -> Details:
    """Collect the result of each query, and example images with the five captions most similar to them.

    Examples are chosen as in ``zero_shot_details``. An image is right if the first caption is its own; of equal
    similarities a wrong caption comes first, as in the scores. Ranks are among distinct captions, so they may be
    better than those of the scores. Memory is a few numbers per caption, as only the examples are compared again.

    Args:
        image_features: (N, D) unit norm, possibly memory-mapped.
        text_features: (T, D) unit norm.
        pairs: (P, 2) int64, image and the number of one of its captions.
        right: by metric, (queries,) bool; "image_to_text_R@1" of the Q images.
        values: by metric that is their mean, (queries,) float.
    """
    query_images = pairs[:, 0].unique()  # (Q,)
    chosen = query_images[_choose_examples(right["image_to_text_R@1"], seed)].tolist()
    device = text_features.device
    similarities = class_scores(image_features[chosen], text_features.T, device=device)  # (E, T)
    examples = []
    for i, row in zip(chosen, similarities, strict=True):
        is_true = torch.zeros(len(captions), dtype=torch.bool)  # (T,)
        is_true[pairs[pairs[:, 0] == i, 1]] = True
        wrong_first = is_true.long().argsort(stable=True)
        order = wrong_first[row[wrong_first].argsort(descending=True, stable=True)]  # (T,)
        rank = int(is_true[order].long().argmax())
        guesses = []
        for j in (*order[:GUESSES].tolist(), int(order[rank])):
            caption = " ".join(captions[j].split()) or "(empty)"
            guesses.append(_build_guess(caption, float(row[j]), bool(is_true[j])))
        best = guesses.pop()
        examples.append(
            Example(
                picture=str(i),
                guesses=tuple(guesses),
                truth=best.label,
                rank=1 + rank,
                probability=best.probability,
            )
        )
    return replace(
        item_details(dataset, task="retrieval", n=len(query_images), right=right, values=values),
        examples=tuple(examples),
        candidates=len(captions),
        pictures=_draw_thumbnails(dataset, chosen),
    )


def captioning_details(
    dataset: EvalDataset,
    generated: Sequence[str],
    descriptions: Descriptions,
    *,
    setting: str = "",
    seed: int = 0,
) -> Details:
    """Collect what a paired test needs, and forty random images with their generated and true captions."""
    assert dataset.captions is not None
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    chosen = order[:DESCRIPTIONS].tolist()
    values = {
        "cider_d": descriptions.cider,
        "bleu_4": descriptions.bleu_counts,
        "perplexity": descriptions.perplexity_counts,
    }
    details = item_details(
        dataset,
        task="captioning",
        n=len(dataset),
        setting=setting,
        right={"exact_match": torch.from_numpy(descriptions.exact)},
        values={name: torch.from_numpy(rows).flatten() for name, rows in values.items()},
    )
    examples = []
    for i in chosen:
        captions = [_shorten(" ".join(caption.split())) for caption in dataset.captions[i][:GUESSES]]
        examples.append(
            Description(
                picture=str(i),
                generated=_shorten(generated[i]),
                captions=tuple(captions),
                exact=bool(descriptions.exact[i]),
                cider=_round(float(descriptions.cider[i])),
            )
        )
    return replace(details, descriptions=tuple(examples), pictures=_draw_thumbnails(dataset, chosen))


def item_details(
    dataset: EvalDataset,
    *,
    task: str,
    n: int,
    setting: str = "",
    right: Mapping[str, Tensor] | None = None,
    values: Mapping[str, Tensor] | None = None,
) -> Details:
    """Collect what a paired test needs, for any task.

    Args:
        right: by metric, (items,) bool; the items of "text_to_image_R@1" are captions.
        values: by metric that is their mean, (items,) float.
    """
    prompt_sets = dict.fromkeys(("zero-shot", "likelihood"), dataset.prompt_set)
    prompt_sets["retrieval"] = dataset.caption_prompt_set
    return Details(
        dataset=dataset.name,
        task=task,
        n=n,
        split=dataset.split,
        prompt_set=prompt_sets.get(task, ""),
        setting=setting,
        data_revision=dataset.revision,
        class_names=tuple(map(_shorten, dataset.class_names)),
        right=_pack_all(right or {}),
        values=_pack_all(values or {}),
    )


def _pack_all(values: Mapping[str, Tensor]) -> dict[str, Packed]:
    return {metric: pack_values(items) for metric, items in values.items()}


def _choose_examples(right: Tensor, seed: int) -> list[int]:
    """Choose at most six images, alternating between correct and wrong ones; ``right`` is (N,) bool."""
    generator = torch.Generator().manual_seed(seed)
    first = bool(torch.randint(2, (), generator=generator))
    order = torch.randperm(len(right), generator=generator)
    starting = order[right.cpu()[order] == first].tolist()
    following = order[right.cpu()[order] != first].tolist()
    chosen: list[int] = []
    for pair in zip_longest(starting[:EXAMPLES], following[:EXAMPLES]):
        chosen += [i for i in pair if i is not None]
    return chosen[:EXAMPLES]


@torch.no_grad()
def take_snapshot(subject: Subject, *, step: int, seed: int = 0) -> Snapshot:
    """Collect what the report shows about a dataset at a training step.

    The images and queries depend only on the dataset and the seed, so that they can be followed from step to step.
    Only texts without features are encoded: queries, and captions of the similarity matrix. The global random
    number generator is not used.
    """
    dataset = subject.dataset
    features = subject.images().projected  # (N, D)
    if len(features) == 0:
        raise DataError(f"dataset {dataset.name} has no images to take a snapshot of")
    if not bool(torch.isfinite(features).all()):
        raise DataError(f"the features of dataset {dataset.name} are not finite: the training has diverged")
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed)).tolist()
    several = dataset.labels is not None and dataset.labels.ndim == 2
    pairs = [] if several else _distinct_pairs(dataset, order)
    queries = _choose_queries(dataset, order)
    captions = subject.texts([text for _, text in pairs]).cpu()  # (M, D)
    query_features = subject.texts([text for text, _ in queries]).cpu()  # (Q, D)
    examples: list[Example] = []
    matrix = None
    nearest: list[Query] = []
    # similarities are float32
    with torch.autocast("cpu", enabled=False):
        if dataset.class_names and not several:
            examples = _build_examples(subject, features, order[:SNAPSHOT_EXAMPLES])
        if pairs:
            cosines = features[[i for i, _ in pairs]] @ captions.T  # (M, M)
            matrix = Matrix(
                pictures=tuple(str(i) for i, _ in pairs),
                captions=tuple(_shorten(text) for _, text in pairs),
                cosines=tuple(tuple(map(_round, row)) for row in cosines.tolist()),
            )
        if queries:
            nearest = _find_nearest(dataset, queries, query_features @ features.T)
    shown = {example.picture for example in examples}
    for query in nearest:
        shown |= {hit.picture for hit in query.hits}
    if matrix is not None:
        shown.update(matrix.pictures)
    pictures = {}
    for name in sorted(shown, key=int):
        alt = _first_text(dataset, int(name)) or f"image {name}"
        pictures[name] = _draw_thumbnail(dataset, int(name), _shorten(alt))
    return Snapshot(
        step=step,
        dataset=dataset.name,
        samples=len(features),
        classes=len(dataset.class_names),
        examples=tuple(examples),
        matrix=matrix,
        queries=tuple(nearest),
        pictures=pictures,
    )


def _build_examples(subject: Subject, features: Tensor, images: Sequence[int]) -> list[Example]:
    names = subject.dataset.class_names
    labels = subject.dataset.labels
    logits = subject.logit_scale * features[images] @ subject.class_weights().cpu()  # (E, C)
    heats = _draw_heatmaps(subject, images)
    examples = []
    for i, row in zip(images, logits.softmax(dim=1), strict=True):
        truth = None if labels is None else int(labels[i])
        # of equal probabilities the lower class comes first, as in the scores
        ranked = row.sort(descending=True, stable=True).indices.tolist()
        guesses = [
            _build_guess(names[label], float(row[label]), label == truth) for label in ranked[:GUESSES]
        ]
        example = Example(
            picture=str(i),
            guesses=tuple(guesses),
            truth=None,
            rank=None,
            probability=None,
            heat=heats.get(i),
        )
        if truth is not None:
            probability = _round(float(row[truth]))
            rank = 1 + ranked.index(truth)
            example = replace(example, truth=_shorten(names[truth]), rank=rank, probability=probability)
        examples.append(example)
    return examples


def _find_nearest(
    dataset: EvalDataset, queries: Sequence[tuple[str, int | None]], cosines: Tensor
) -> list[Query]:
    labels = dataset.labels
    top = cosines.topk(min(HITS, cosines.shape[1]), dim=1)
    nearest = []
    for (text, label), values, images in zip(queries, top.values.tolist(), top.indices.tolist(), strict=True):
        hits = []
        for value, i in zip(values, images, strict=True):
            right = None
            if labels is not None and label is not None:
                right = bool(labels[i, label]) if labels.ndim == 2 else int(labels[i]) == label
            hits.append(Hit(picture=str(i), cosine=_round(value), right=right))
        nearest.append(Query(text=_shorten(text), hits=tuple(hits)))
    return nearest


def _draw_heatmaps(subject: Subject, images: Sequence[int]) -> dict[int, Thumbnail]:
    from clipkit.inference import enlarged, overlay

    dataset = subject.dataset
    model = subject.encoder.model
    sharded = hasattr(model, "reshard")  # a single rank cannot run it
    if dataset.labels is None or sharded or subject.encoder.ranks.rank > 0:
        return {}
    decoded: list[int] = []
    pixels: list[Tensor] = []
    for i in images:
        with suppress(DataError):
            pixels.append(eval_pixels(dataset.images.read(i), model.preprocess))  # (C, S, S)
            decoded.append(i)
    if not decoded:
        return {}
    labels = dataset.labels[decoded]
    device = model.logit_scale.device
    try:
        texts = subject.class_weights().T[labels][:, None].to(device)  # (E, 1, D)
        heats = text_heatmaps(model, torch.stack(pixels).to(device), texts)[:, 0].cpu()  # (E, g, g)
    except ConfigError:  # the tower has no attention to show
        return {}
    thumbnails = {}
    for i, label, image, heat in zip(decoded, labels.tolist(), pixels, heats, strict=True):
        heat = (heat - heat.min()) / (heat.max() - heat.min()).clamp(min=1e-30)
        title = f"where the model sees {_shorten(dataset.class_names[label])}"
        thumbnails[i] = _encode_png(overlay(enlarged(image, _THUMBNAIL_SIZE), heat.numpy()), title)
    return thumbnails


def _distinct_pairs(dataset: EvalDataset, order: list[int]) -> list[tuple[int, str]]:
    """Choose images with distinct texts, and distinct classes if there are any; sorted by class."""
    pairs: list[tuple[int, str]] = []
    classes: set[int] = set()
    texts: set[str] = set()
    labels = dataset.labels
    for i in order:
        label = None if labels is None else int(labels[i])
        text = _first_text(dataset, i)
        if text is None or text in texts or label in classes:
            continue
        pairs.append((i, text))
        texts.add(text)
        if label is not None:
            classes.add(label)
        if len(pairs) == PAIRS:
            break
    return pairs if labels is None else sorted(pairs, key=lambda pair: int(labels[pair[0]]))


def _choose_queries(dataset: EvalDataset, order: list[int]) -> list[tuple[str, int | None]]:
    """Choose prompts of classes spread over the list, with their class, or captions if there are no classes."""
    names = dataset.class_names
    if not names:
        texts = dict.fromkeys(_first_text(dataset, i) for i in order[:QUERIES])
        return [(text, None) for text in texts if text]
    present = list(range(len(names)))
    if dataset.labels is not None:
        several = dataset.labels.ndim == 2
        shown = dataset.labels.any(dim=0).nonzero() if several else dataset.labels.unique()
        present = shown.flatten().tolist() or present
    count = min(QUERIES, len(present))
    chosen = [present[round(i * (len(present) - 1) / max(1, count - 1))] for i in range(count)]
    return [(fill_template(dataset.templates[0], names[label]), label) for label in chosen]


def _first_text(dataset: EvalDataset, i: int) -> str | None:
    """Return the first caption of an image, or else the prompt of its class."""
    if dataset.captions is not None:
        return " ".join(dataset.captions[i][0].split())
    if dataset.labels is None or dataset.labels.ndim == 2 or not dataset.class_names:
        return None
    return fill_template(dataset.templates[0], dataset.class_names[int(dataset.labels[i])])


def _draw_thumbnails(dataset: EvalDataset, images: Sequence[int]) -> dict[str, Thumbnail]:
    name = _shorten(dataset.name)
    return {str(i): _draw_thumbnail(dataset, i, f"image {i:,} of {name}") for i in images}


def _draw_thumbnail(dataset: EvalDataset, i: int, alt: str) -> Thumbnail:
    """Return a thumbnail, empty if the image can no longer be read or decoded."""
    from PIL import Image

    from clipkit.samples import decode_image

    try:
        image = Image.fromarray(decode_image(dataset.images.read(i)))
    except DataError:
        return Thumbnail(png="", alt=alt)
    image.thumbnail((_THUMBNAIL_SIZE, _THUMBNAIL_SIZE), Image.Resampling.LANCZOS)
    return _encode_png(image, alt)


def _encode_png(image: "Image.Image", alt: str) -> Thumbnail:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return Thumbnail(png=base64.b64encode(buffer.getvalue()).decode("ascii"), alt=alt)


def _build_guess(label: str, probability: float, right: bool) -> Guess:
    return Guess(label=_shorten(label), probability=_round(probability), right=right)


def _class_name(dataset: EvalDataset, label: int) -> str:
    return _shorten(dataset.class_names[label]) or f"class {label}"


def _round(value: float) -> float:
    return float(f"{value:.4g}") if math.isfinite(value) else 0.0


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
