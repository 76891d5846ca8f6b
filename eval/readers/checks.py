"""Whether what a reader has found goes together."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clipkit.count_progress import counted
from clipkit.errors import DataError
from eval.dataset import EvalDataset, some

__all__ = ["checked_set", "shown_name"]

_log = logging.getLogger("eval")
_LONGEST = 60  # characters of a caption in a message


def checked_set(dataset: EvalDataset) -> EvalDataset:
    """The dataset, if its labels, names, templates and choices go together; what is merely odd is logged.

    Raises:
        DataError: labels without a name, templates without a place for it, or a picture without a choice.
    """
    for template in dataset.templates:
        if "{c}" not in template:
            raise DataError(
                f"dataset {dataset.name}: the template {template!r} has no {{c}} for the class name"
            )
    if dataset.labels is not None and len(dataset.class_names) == 1:
        dataset = _of_one_class(dataset)
    if dataset.labels is not None:
        if dataset.labels.ndim == 1:
            _check_labels(dataset, dataset.labels)
        if dataset.class_names:
            _tell_odd_classes(dataset, dataset.labels)
    if dataset.choices is not None:
        _check_choices(dataset, dataset.choices)
    return dataset


def _of_one_class(dataset: EvalDataset) -> EvalDataset:
    """Whoever classifies is always right; so it is captions that such pictures are scored on."""
    if dataset.captions is None and dataset.choices is None:
        raise DataError(
            f"dataset {dataset.name} has one class only, {dataset.class_names[0]!r}: classification takes two "
            "or more"
        )
    return replace(dataset, tasks=("retrieval",)) if dataset.tasks == ("zero-shot",) else dataset


def _check_labels(dataset: EvalDataset, labels: Tensor) -> None:
    classes = len(dataset.class_names)
    wrong = ((labels < 0) | ((labels >= classes) & (classes > 0))).nonzero()
    if not len(wrong):
        return
    first = int(wrong[0])
    label = int(labels[first])
    if label < 0:
        raise DataError(
            f"{dataset.where(first)} has label {label}: labels begin at 0, and sets whose labels are kept secret "
            "cannot be scored"
        )
    raise DataError(
        f"{dataset.where(first)} has label {label}, but there are {classes} class names, for labels 0 to "
        f"{classes - 1}; blank lines in classnames.txt count"
    )


def _tell_odd_classes(dataset: EvalDataset, labels: Tensor) -> None:
    names = dataset.class_names
    doubled = [repr(name) for name, count in Counter(names).items() if count > 1]
    if doubled:
        _log.warning(
            "dataset %s: class names that stand for several classes: %s", dataset.name, some(doubled)
        )
    counts = labels.sum(dim=0) if labels.ndim == 2 else torch.bincount(labels, minlength=len(names))  # (C,)
    if empty := [shown_name(names, i) for i in (counts == 0).nonzero().flatten().tolist()]:
        _log.warning("dataset %s: classes without a picture: %s", dataset.name, some(empty))


def shown_name(names: Sequence[str], number: int) -> str:
    """A class in a message."""
    return repr(names[number]) if number < len(names) else str(number)


def _check_choices(dataset: EvalDataset, choices: Sequence[Sequence[str]]) -> None:
    for number, own in enumerate(choices):
        if len(own) < 2:
            raise DataError(
                f"{dataset.where(number)} has {counted(len(own), 'caption')} to choose from, it takes 2 or more"
            )
    equal = [own[0] for own in choices if own[0] in own[1:]]
    if equal:
        _log.warning(
            "dataset %s: %s whose right caption is among the wrong ones too, which counts as wrong: %s",
            dataset.name,
            counted(len(equal), "picture"),
            some([repr(one[:_LONGEST]) for one in equal]),
        )
