"""Takes what a page and a paired test need beside the scores, from features or predictions that are there already.

Letters in shape comments: N images, D embedding dimension, C classes, E examples, T distinct captions, P pairs.
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor

from clipkit.errors import DataError
from eval.datasets.dataset import EvalDataset
from eval.metrics import (
    calibration_bins,
    class_ranks,
    class_scores,
    confusion,
    per_class_accuracy,
    superclass_confusion,
    top_classes,
)
from eval.results.records import (
    Bin,
    Details,
    Example,
    Guess,
    Packed,
    Picture,
    details_folder,
    pack,
    read_details,
    write_details,
)

__all__ = [
    "THUMBNAIL_SIZE",
    "Bin",
    "Details",
    "Packed",
    "details_folder",
    "item_details",
    "pack",
    "prediction_details",
    "read_details",
    "retrieval_details",
    "thumbnail",
    "write_details",
    "zero_shot_details",
]


# --------------------------------------------------------------------------------------------------------------
# Small copies of images for a page that carries everything in itself.

THUMBNAIL_SIZE = 96  # pixels of the longer side


def thumbnail(data: bytes) -> str:
    """A base64 PNG of at most 96 pixels a side; "" if the image does not decode (it is then shown as missing)."""
    from PIL import Image

    from clipkit.files.decode import decode_image

    try:
        image = Image.fromarray(decode_image(data))
    except DataError:
        return ""
    image.thumbnail((THUMBNAIL_SIZE, THUMBNAIL_SIZE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


# --------------------------------------------------------------------------------------------------------------

EXAMPLES = 6
GUESSES = 5
MISTAKES = 30
_WHOLE_MATRIX = 64  # classes; of more, only the most frequent mistakes
_MAX_TEXT = 300  # characters of a class name or caption that a page can use


@torch.no_grad()
def zero_shot_details(
    dataset: EvalDataset,
    image_features: Tensor,
    class_weights: Tensor,
    logit_scale: float,
    *,
    seed: int = 0,
    device: torch.device | None = None,
) -> Details:
    """What zero-shot classification did, image by image, class by class.

    The examples are shown as in figure 21 of the CLIP paper (Radford et al. 2021), five labels with their
    probabilities. Each is a random one of the right or of the wrong predictions: a coin decides which kind comes
    first, then the kinds alternate while both last.

    An image with several labels is right if the first class is one of them. It has no place in a confusion matrix
    or a count by class, and its metrics are no means over images: of these datasets there are examples alone.

    Memory is bounded by blocks of similarities and a few numbers per image.

    Args:
        dataset: of N images with labels and C class names.
        image_features: (N, D) unit norm, perhaps memory-mapped.
        class_weights: (D, C) unit columns.
        logit_scale: exp(t) of the model.
        seed: chooses the examples. The order in which images are taken follows from it and N alone.
        device: where to take the products; where the features are if not given.

    Raises:
        DataError: the dataset has no images, labels or class names.
    """
    labels, classes = dataset.labels, len(dataset.class_names)
    if labels is None or not classes or not len(labels):
        raise DataError(f"dataset {dataset.name} has no labelled images with class names to take details of")
    top = top_classes(image_features, class_weights, k=GUESSES, logit_scale=logit_scale, device=device)
    is_right = _is_right(top.classes, labels)  # (N, k)
    if labels.ndim == 1:
        right = {"acc1": is_right[:, 0]}
        if classes > GUESSES:
            right["acc5"] = is_right.any(dim=1)
        values = {}
        if classes == 2:  # what ROC AUC ranks by
            scores = class_scores(image_features, class_weights, device=device)  # (N, 2)
            values["roc_auc"] = scores[:, 1] - scores[:, 0]
        details = prediction_details(
            dataset, top.classes[:, 0], task="zero-shot", confidence=top.probabilities[:, 0]
        )
        details = replace(details, right=_packed(right), values=_packed(values))
    else:
        details = item_details(dataset, task="zero-shot", n=len(labels))
    chosen = _choose_examples(is_right[:, 0], seed)
    examples = []
    for number in chosen:
        features = image_features[number : number + 1].to(torch.float32).cpu()  # (1, D)
        examples.append(_example(dataset, number, features, class_weights.cpu(), logit_scale))
    pictures = {str(number): _picture(dataset, number) for number in chosen}
    return replace(details, examples=tuple(examples), pictures=pictures)


def prediction_details(
    dataset: EvalDataset,
    predicted: Tensor,
    *,
    task: str,
    setting: str = "",
    confidence: Tensor | None = None,
    chosen_c: float | None = None,
) -> Details:
    """What predictions of one class per image say: by class, what was taken for what, and calibration.

    Args:
        dataset: with (N,) labels, N ≥ 1, and class names.
        predicted: (N,) int64 class numbers, -1 where nothing was predicted.
        task: as in the scores.
        setting: as in the scores.
        confidence: (N,) in 0 … 1, the probability of the predicted class, if there is one.
        chosen_c: of a probe, the C that validation chose.
    """
    labels, classes = dataset.labels, len(dataset.class_names)
    assert labels is not None and labels.ndim == 1, "one label per image"
    predicted = predicted.cpu()
    correct = predicted == labels  # (N,)
    by_class = per_class_accuracy(correct, labels, classes)
    taken = confusion(predicted, labels)
    matrix = torch.from_numpy(taken.matrix(classes)) if classes <= _WHOLE_MATRIX else None  # (C, C)
    groups = tuple(dict.fromkeys(dataset.superclasses))
    by_group = (
        superclass_confusion(taken, dataset.superclass_numbers()).matrix(len(groups)) if groups else None
    )
    return replace(
        item_details(dataset, task=task, setting=setting, n=len(labels), right={"acc1": correct}),
        superclass_names=tuple(_short(name) for name in groups),
        superclass_matrix=None if by_group is None else pack(torch.from_numpy(by_group).flatten()),
        class_counts=tuple(by_class.total.tolist()),
        class_right=tuple(by_class.right.tolist()),
        mistakes=tuple(one for one in taken.mistakes(MISTAKES) if one[1] >= 0),
        matrix=None if matrix is None else pack(matrix.flatten()),
        bins=() if confidence is None else _bins(confidence, correct),
        labels=pack(labels),
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
    """What retrieval did, query by query, and examples: images with the five captions most similar to them.

    The examples are chosen as those of ``zero_shot_details``. An image is right if the first caption that is found
    is its own; a wrong caption goes before a right one of the same similarity, as in the scores. Ranks are of
    distinct captions, so they may be lower than those of the scores, where each copy counts.

    Only the examples are compared again: memory is a few numbers a caption.

    Args:
        dataset: of N images with captions.
        image_features: (N, D) unit norm, perhaps memory-mapped.
        captions: the T distinct ones, as they stand.
        text_features: (T, D) unit norm.
        pairs: (P, 2) int64, (image, number of a caption of its own).
        right: by metric, (queries,) bool; "image_to_text_R@1" of the N images.
        values: by metric that is a mean of them, (queries,) float.
        seed: chooses the examples. The order in which images are taken follows from it and N alone.
    """
    chosen = _choose_examples(right["image_to_text_R@1"], seed)
    similarity = class_scores(image_features[chosen], text_features.T, device=text_features.device)  # (E, T)
    examples = [
        _found_captions(number, captions, row, pairs[pairs[:, 0] == number, 1])
        for number, row in zip(chosen, similarity, strict=True)
    ]
    return replace(
        item_details(dataset, task="retrieval", n=len(dataset), right=right, values=values),
        examples=tuple(examples),
        candidates=len(captions),
        pictures={str(number): _picture(dataset, number) for number in chosen},
    )


def _found_captions(number: int, captions: Sequence[str], similarity: Tensor, own: Tensor) -> Example:
    """An image's five most similar captions; (T,) similarities, and the numbers of those of its own."""
    is_own = torch.zeros(len(captions), dtype=torch.bool).index_fill(0, own, True)  # (T,)
    wrong_first = is_own.long().argsort(stable=True)
    order = wrong_first[similarity[wrong_first].argsort(descending=True, stable=True)]  # (T,)
    rank = int(is_own[order].long().argmax())
    *guesses, best = [
        Guess(label=_caption(captions[i]), probability=_share(float(similarity[i])), right=bool(is_own[i]))
        for i in (*order[:GUESSES].tolist(), int(order[rank]))
    ]
    return Example(
        picture=str(number),
        guesses=tuple(guesses),
        truth=best.label,
        rank=1 + rank,
        probability=best.probability,
    )


def item_details(
    dataset: EvalDataset,
    *,
    task: str,
    n: int,
    setting: str = "",
    right: Mapping[str, Tensor] | None = None,
    values: Mapping[str, Tensor] | None = None,
) -> Details:
    """What a paired test needs, of any task.

    Args:
        dataset: that was scored.
        task: as in the scores.
        n: items.
        setting: as in the scores.
        right: by metric, (items,) bool; of retrieval's "text_to_image_R@1" the items are captions.
        values: by metric that is a mean of them, (items,) float.
    """
    prompt_sets = {"zero-shot": dataset.prompt_set, "retrieval": dataset.caption_prompt_set}
    return Details(
        dataset=dataset.name,
        task=task,
        n=n,
        split=dataset.split,
        prompt_set=prompt_sets.get(task, ""),
        setting=setting,
        data_revision=dataset.revision,
        class_names=tuple(_short(name) for name in dataset.class_names),
        right=_packed(right or {}),
        values=_packed(values or {}),
    )


def _choose_examples(right: Tensor, seed: int) -> list[int]:
    """At most six images, right and wrong ones in turn, each kind in random order; (N,) bool, whether right."""
    generator = torch.Generator().manual_seed(seed)
    first = bool(torch.randint(2, (), generator=generator))
    order = torch.randperm(len(right), generator=generator)
    one, other = (order[right.cpu()[order] == kind][:EXAMPLES].tolist() for kind in (first, not first))
    in_turn = [number for pair in zip_longest(one, other) for number in pair if number is not None]
    return in_turn[:EXAMPLES]


def _packed(by_metric: Mapping[str, Tensor]) -> dict[str, Packed]:
    return {metric: pack(values) for metric, values in by_metric.items()}


def _is_right(classes: Tensor, labels: Tensor) -> Tensor:
    """(N, k) classes, -1 where there is none, and (N,) or (N, C) labels: (N, k) bool."""
    if labels.ndim == 1:
        return classes == labels[:, None]
    return labels.bool().gather(1, classes.clamp(min=0)) & (classes >= 0)


def _bins(confidence: Tensor, correct: Tensor) -> tuple[Bin, ...]:
    bins = calibration_bins(confidence, correct)
    columns = (bins.low, bins.high, bins.count, bins.confidence, bins.accuracy)
    return tuple(
        Bin(low=low, high=high, count=count, confidence=sure, accuracy=right)
        for low, high, count, sure, right in zip(*(column.tolist() for column in columns), strict=True)
    )


def _example(
    dataset: EvalDataset, number: int, features: Tensor, class_weights: Tensor, logit_scale: float
) -> Example:
    """One image's five likeliest labels; ``features`` is (1, D)."""
    assert dataset.labels is not None
    label = dataset.labels[number]
    true = [int(label)] if label.ndim == 0 else label.nonzero()[:, 0].tolist()
    top = top_classes(features, class_weights, k=GUESSES, logit_scale=logit_scale)
    logits = class_scores(features, class_weights, softmax_scale=logit_scale)[0]  # (C,)
    ranks = [int(class_ranks(features, class_weights, torch.tensor([one]))) for one in true]
    best = min(zip(ranks, true, strict=True), default=None)  # of several labels, the one that comes first
    guesses = [
        Guess(label=_name(dataset, guess), probability=_share(probability), right=guess in true)
        for guess, probability in zip(top.classes[0].tolist(), top.probabilities[0].tolist(), strict=True)
        if guess >= 0
    ]
    return Example(
        picture=str(number),
        guesses=tuple(guesses),
        truth=_short(", ".join(_name(dataset, one) for one in true)) if true else None,
        rank=None if best is None else 1 + best[0],
        probability=None if best is None else _share(float(logits[best[1]].exp())),
    )


def _picture(dataset: EvalDataset, number: int) -> Picture:
    """A small copy; an empty one of an image that cannot be read any more."""
    try:
        png = thumbnail(dataset.images.read(number))
    except DataError:
        png = ""
    return Picture(png=png, alt=f"image {number:,} of {_short(dataset.name)}")


def _name(dataset: EvalDataset, label: int) -> str:
    return _short(dataset.class_names[label]) or f"class {label}"  # a name may be a blank line


def _caption(text: str) -> str:
    return _short(" ".join(text.split())) or "(empty)"


def _share(value: float) -> float:
    return float(f"{value:.4g}") if math.isfinite(value) else 0.0


def _short(text: str) -> str:
    """A text of at most 300 characters, which is more than a page shows."""
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
