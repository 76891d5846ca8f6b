"""The task ``zero-shot`` (Radford et al. 2021, section 3.1), and classification metrics of any linear classifier.

Dimensions: N images, C classes.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.files import counted
from clipkit.model import find_indistinguishable_classes, number_texts
from eval.datasets.dataset import EvalDataset, list_some, require_labels
from eval.metrics import EVERY, METRICS, Answers, Metric, get_metric
from eval.results.details import zero_shot_details
from eval.results.records import Details, Score, pack_values
from eval.tasks import Options
from eval.tasks.subject import Outcome, Subject, metric_scores, warn_once

_MOST_ITEMS = 1 << 20  # values of a metric in the details, up to 6 MB of text


def fitting_metrics(dataset: EvalDataset, metrics: Sequence[str]) -> tuple[str, ...]:
    """Return the classification metrics among those of a card, or the default ones if there are none."""
    multi_label = require_labels(dataset).dim() == 2
    kind = "multi-label" if multi_label else "one-label"
    classes = len(dataset.class_names)
    chosen = []
    names = []
    for name in metrics:
        parts = dataset.class_names if multi_label else dataset.taxonomy
        names += [name.replace(EVERY, part) for part in parts if name.endswith(EVERY)] or [name]
    for name in names:
        metric = get_metric(name)
        if metric is None or metric.kind not in ("one-label", "multi-label"):
            continue
        if metric.kind != kind:
            labels, other = ("several labels", "one") if multi_label else ("one label", "several")
            raise DataError(f"dataset {dataset.name} has {labels} per image, the metric {name} needs {other}")
        if metric.most is not None and not metric.least <= classes <= metric.most:
            needed = f"{metric.least} to {metric.most}" if metric.least < metric.most else f"{metric.most}"
            raise DataError(f"dataset {dataset.name} has {classes} classes, the metric {name} needs {needed}")
        if metric.needs_superclasses and not dataset.superclasses:
            raise DataError(f"dataset {dataset.name} has no superclasses, which the metric {name} needs")
        if metric.taxon and metric.taxon not in dataset.taxonomy:
            raise DataError(f"dataset {dataset.name} has no taxonomy with the rank of the metric {name}")
        if metric.needs_order and not dataset.class_order:
            raise DataError(
                f"dataset {dataset.name} needs ordered = true and keys in its card, for the metric {name}"
            )
        chosen.append(name)
    if chosen:
        return tuple(chosen)
    for name, metric in METRICS.items():
        has_column = not metric.column or metric.column in dataset.metadata
        if metric.kind == kind and metric.by_default and classes >= metric.least and has_column:
            chosen.append(name)
    return tuple(chosen)


def classification_scores(
    answers: Answers, *, task: str, metrics: Sequence[str] = (), setting: str = ""
) -> list[Score]:
    """Score a classifier."""
    dataset = answers.dataset
    prompt_set = dataset.prompt_set if task in ("zero-shot", "likelihood") else ""
    names = fitting_metrics(dataset, metrics)
    scores = metric_scores(dataset, names, answers, task=task, prompt_set=prompt_set, setting=setting)
    undefined = sorted({*names} - {score.metric for score in scores})
    if undefined:
        warn_once(f"dataset {dataset.name}: {', '.join(undefined)} undefined for {task}, and left out")
    return scores


def add_items(details: Details, answers: Answers, metrics: Sequence[str]) -> Details:
    """Add the values with which two models are compared by these metrics, unless there are too many."""
    values = dict(details.values)
    right = dict(details.right)
    for name in metrics:
        metric = cast(Metric[Answers] | None, get_metric(name))
        assert metric is not None, name
        if metric.item_values is not None:
            items = metric.item_values(answers).flatten()
            if items.dtype == torch.bool:
                right[name] = pack_values(items)
            elif len(items) <= _MOST_ITEMS:
                values[name] = pack_values(items)
    return replace(details, right=right, values=values)


# Texts that the model's tokenizer turns into the same tokens. They differ in what the tokenizer drops (letter case,
# spacing, Unicode form) or beyond the context length. Published class lists contain equal names ("missile" is two
# classes of ImageNet), so scores are computed as elsewhere, and a warning counts the images concerned.

_SHOWN = 60  # characters of a text in a message


def report_classes(subject: Subject) -> None:
    """Warn of classes whose prompts all have the same tokens."""
    dataset = subject.dataset
    labels = dataset.labels
    groups = find_indistinguishable_classes(subject.encoder.model.tokenizer, dataset.prompts())
    if not groups or labels is None:
        return
    classes = torch.tensor(list(chain.from_iterable(groups)))
    affected = torch.isin(labels, classes) if labels.dim() == 1 else labels[:, classes].any(dim=1)  # (N,)
    names = [" = ".join(f"{dataset.class_names[i][:_SHOWN]!r} ({i})" for i in group) for group in groups]
    subject.warn(
        f"{int(affected.sum()):,} of {counted(len(dataset), 'image')} have a label that the model cannot tell from "
        f"another, because all prompts of these classes have the same tokens: {list_some(names)}"
    )


def report_captions(subject: Subject) -> None:
    """Warn of captions that have the same tokens as another caption of another image."""
    images: dict[str, set[int]] = {}
    for i, captions in enumerate(subject.dataset.caption_prompts()):
        for text in captions:
            images.setdefault(text, set()).add(i)
    tokens = number_texts(subject.encoder.model.tokenizer, list(images))
    same: dict[int, list[str]] = {}
    for text, text_tokens in zip(images, tokens, strict=True):
        same.setdefault(text_tokens, []).append(text)
    affected: list[str] = []
    for group in same.values():
        affected += [text for text in group if any(images[text] != images[other] for other in group)]
    if affected:
        subject.warn(
            f"{len(affected):,} of {counted(len(images), 'distinct caption')} have the same tokens as a caption of "
            f"another image, so the model cannot tell them apart: {_quote(affected)}"
        )


def report_choices(subject: Subject) -> None:
    """Warn of images whose right caption has the same tokens as a wrong one that differs from it."""
    choices = subject.dataset.choices
    if choices is None:
        return
    texts = list(dict.fromkeys(chain.from_iterable(choices)))
    tokens = dict(zip(texts, number_texts(subject.encoder.model.tokenizer, texts), strict=True))
    affected = []
    for right, *wrong in choices:
        if any(text != right and tokens[text] == tokens[right] for text in wrong):
            affected.append(right)
    if affected:
        subject.warn(
            f"{len(affected):,} of {counted(len(choices), 'image')} have a right caption with the same tokens as a "
            f"wrong one, so the model cannot tell them apart: {_quote(affected)}"
        )


def _quote(texts: Sequence[str]) -> str:
    return list_some([repr(text[:_SHOWN]) for text in texts])


def zero_shot(subject: Subject, options: Options) -> Outcome:
    """Run the task ``zero-shot``."""
    report_classes(subject)
    images = subject.images().projected
    return prompt_outcome(subject, options, images, subject.class_weights(), subject.logit_scale)


def prompt_outcome(
    subject: Subject,
    options: Options,
    features: Tensor,
    weights: Tensor,
    logit_scale: float,
    *,
    task: str = "zero-shot",
) -> Outcome:
    """Score a classifier made of class prompts.

    With details, there are also the expected calibration error, if images have one label, and the accuracy by
    superclass, if the dataset has superclasses.
    """
    dataset = subject.dataset
    answers = Answers(dataset, features, weights, logit_scale, subject.device)
    metrics = fitting_metrics(dataset, subject.metrics)
    if options.details and answers.labels.dim() == 1:
        metrics += ("ece",)
    if options.details and dataset.superclasses:
        metrics += ("superclass_acc1",)
    scores = classification_scores(answers, task=task, metrics=tuple(dict.fromkeys(metrics)))
    if not options.details:
        return Outcome(scores=scores)
    details = zero_shot_details(
        dataset, features, weights, logit_scale, task=task, seed=options.seed, device=subject.device
    )
    return Outcome(scores=scores, details=[add_items(details, answers, metrics)])
