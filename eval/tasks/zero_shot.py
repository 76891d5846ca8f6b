"""Zero-shot classification: pictures against the class names' prompts (Radford et al. 2021, section 3.1)."""

import torch
from torch import Tensor

from clipkit import CLIP, zero_shot_classifier
from clipkit.errors import DataError
from eval.dataset import EvalDataset
from eval.encode import ONE_RANK, Encoded, Ranks, check_finite
from eval.metrics import class_ranks, mean_per_class_interval, mean_per_class_recall, wilson_interval
from eval.results import Score

__all__ = ["class_weights", "labels_of", "zero_shot"]

_TOP = (1, 5)


def class_weights(model: CLIP, dataset: EvalDataset, *, ranks: Ranks = ONE_RANK) -> Tensor:
    """The dataset's zero-shot classifier: (D, C) float32 with unit columns, on the model's device.

    The classes are split over ranks; all ranks call this and all get the whole.

    Raises:
        DataError: it is not finite.
    """
    classes = len(dataset.class_names)
    own = slice(ranks.rank, classes, ranks.world)
    device = model.logit_scale.device
    weights = torch.zeros(model.architecture.embed_dim, classes, device=device)
    with torch.inference_mode():
        if dataset.class_names[own]:
            weights[:, own] = zero_shot_classifier(model, dataset.class_names[own], dataset.templates)
        weights = ranks.gather(weights)
    check_finite(weights, f"the class names of dataset {dataset.name}")
    return weights


def labels_of(dataset: EvalDataset) -> Tensor:
    """The labels, (N,) int64.

    Raises:
        DataError: the dataset has none, or no class names for them.
    """
    if dataset.labels is None:
        raise DataError(f"dataset {dataset.name} has no labels, which zero-shot classification needs")
    if not dataset.class_names:
        raise DataError(f"dataset {dataset.name} has no classnames.txt, which zero-shot classification needs")
    return dataset.labels


def zero_shot(model: CLIP, encoded: Encoded, *, ranks: Ranks = ONE_RANK) -> list[Score]:
    """``acc1``, ``acc5`` where there are more than 5 classes, and ``mean_per_class_recall``.

    Raises:
        DataError: the dataset has no labels or no class names.
    """
    dataset = encoded.dataset
    labels, classes = labels_of(dataset), len(dataset.class_names)
    place = class_ranks(encoded.image_features, class_weights(model, dataset, ranks=ranks), labels)  # (N,)
    n = len(labels)
    scores = []
    for k in _TOP:
        if k < classes or k == 1:
            hits = int((place < k).sum())
            low, high = wilson_interval(hits, n)
            chance = min(1.0, k / classes)
            scores.append(_score(dataset, f"acc{k}", hits / n, low=low, high=high, chance=chance))
    correct = place < 1
    low, high = mean_per_class_interval(correct, labels)
    recall = mean_per_class_recall(correct, labels)
    scores.append(_score(dataset, "mean_per_class_recall", recall, low=low, high=high, chance=1 / classes))
    return scores


def _score(
    dataset: EvalDataset, metric: str, value: float, *, low: float, high: float, chance: float
) -> Score:
    return Score(
        dataset=dataset.name,
        task="zero-shot",
        metric=metric,
        value=value,
        n=len(dataset),
        low=low,
        high=high,
        chance=chance,
    )
