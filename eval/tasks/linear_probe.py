"""Linear probe: logistic regression on what the image tower gives before its projection.

The protocol is that of the CLIP paper (Radford et al. 2021, arXiv 2103.00020, appendix A.3): L-BFGS with at most
1,000 steps; the strength λ = 1/C of the penalty from 1e-6 to 1e6 in 96 logarithmic steps, found by trying 1e-6,
1e-4, … 1e6 and halving the interval around the peak down to 8 steps a decade, by what it gives on validation
pictures; then fitted once more to training and validation pictures together, and tested once. Features are neither
projected nor normalized.

What the paper leaves open, and what is done here:

* Validation pictures are those of the dataset's split ``val``; where it has none, a fifth of each class of
  ``train``, drawn with a seed. ``LinearProbe.tuned_on`` says which.
* They are scored by the dataset's primary metric; where that needs groups or is a calibration, by top-1 accuracy.
  Of equal values the strongest penalty is taken.
* Pictures with several labels (VOC 2007): one regression a class with one C for all, by 11-point mAP. How the
  authors did it is not known.

Letters in shape comments: N pictures, W width of a feature, C classes.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.errors import ConfigError, DataError
from clipkit.representations import layer_count
from eval.dataset import EvalDataset, NoSplit, some
from eval.metrics import (
    Statistic,
    average_precisions,
    class_ranks,
    class_scores,
    f1_macro_statistic,
    mean_per_class_recall,
    roc_auc_statistic,
    top_classes,
)
from eval.results import Score
from eval.subject import Subject
from eval.tasks.classification import Answers, classification_scores, fitting_metrics, labels_of
from eval.tasks.feature_rows import Rows
from eval.tasks.logistic import LogisticFit, LogisticProblem
from eval.tasks.sampling import carve

__all__ = [
    "LinearProbe",
    "LinearSweep",
    "check_carved",
    "check_classes",
    "halving_search",
    "learned",
    "linear_probe",
    "linear_probes",
    "penalty_of",
    "sweep",
    "tuning_metric",
    "with_ones",
]

STEPS = 96  # of λ from 1e-6 to 1e6
_FIRST = 16  # steps between the points that are tried first: two decades
_COMPARED = 1e-3  # tolerance of the fits that are compared
_BLOCK = 1 << 14  # rows at a time, of those that C is tuned on
_log = logging.getLogger("eval")


def penalty_of(step: int) -> float:
    """λ of a step of 0 … 96: 1e-6 … 1e6."""
    return float(10 ** (step / 8 - 6))


def halving_search(value_at: Callable[[int], float]) -> int:
    """The step of 0 … 96 with the greatest value, as the paper looks for it; of equals the last one.

    Args:
        value_at: is called once a step, first with 96, 80, … 0.
    """
    found: dict[int, float] = {}
    width, steps = _FIRST, list(range(STEPS, -1, -_FIRST))
    while True:
        for step in steps:
            if step not in found:
                found[step] = value_at(step)
        peak = max(found, key=lambda step: (found[step], step))
        if width == 1:
            return peak
        width //= 2
        steps = [step for step in (peak + width, peak - width) if 0 <= step <= STEPS]


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearSweep:
    """A tuned classifier.

    Attributes:
        fit: with the chosen C, to training pictures, and to validation pictures unless told otherwise.
        tried: the value on the validation pictures, by C.
        unconverged: for which of the fits that were compared 1,000 steps were not enough, by C.
    """

    fit: LogisticFit
    tried: Mapping[float, float]
    unconverged: tuple[float, ...]


def sweep(
    train: Rows,
    train_labels: Tensor,
    val: Rows,
    val_labels: Tensor,
    classes: int,
    *,
    metric: str = "acc1",
    device: torch.device | None = None,
    refit: bool = True,
) -> LinearSweep:
    """Tune a logistic regression on validation pictures, and fit it to them and the training pictures together.

    Args:
        train: features to learn from, not normalized.
        train_labels: (N,) int64, or (N, C) bool.
        val: features to tune on.
        val_labels: likewise.
        classes: C.
        metric: by which to tune; what ``tuning_metric`` gives.
        device: where to compute; the CPU if not given.
        refit: whether the last fit is to the validation pictures too.

    Raises:
        DataError: fewer than two classes to learn from, or the metric is not defined for the validation labels.
    """
    device = device or torch.device("cpu")
    problem = LogisticProblem(train, train_labels, classes, device=device)
    fits: dict[int, LogisticFit] = {}
    tried: dict[float, float] = {}
    unconverged = []

    def value_at(step: int) -> float:
        nearest = min(fits, key=lambda other: (abs(other - step), other), default=None)
        start = None if nearest is None else fits[nearest]
        fit = problem.fit(1 / penalty_of(step), start=start, tolerance=_COMPARED)
        if not fit.converged:
            unconverged.append(fit.C)
        fits[step] = fit
        tried[fit.C] = _value(metric, val, val_labels, fit.classifier(), device)
        return tried[fit.C]

    step = halving_search(value_at)
    if refit:
        problem = LogisticProblem(train + val, torch.cat([train_labels, val_labels]), classes, device=device)
    fit = problem.fit(1 / penalty_of(step), start=fits[step])
    return LinearSweep(fit=fit, tried=tried, unconverged=tuple(unconverged))


def with_ones(features: Tensor) -> Tensor:
    """(N, W) features as (N, W + 1) float32 with a last column of ones, which a classifier's biases go with."""
    return F.pad(features.float(), (0, 1), value=1.0)


_OF_RANKS: Mapping[str, Callable[[Tensor, Tensor], float]] = {
    "acc1": lambda ranks, labels: float((ranks < 1).double().mean()),
    "acc5": lambda ranks, labels: float((ranks < 5).double().mean()),
    "mean_top1_top5": lambda ranks, labels: float(((ranks < 1).double() + (ranks < 5).double()).mean() / 2),
    "mean_per_class_recall": lambda ranks, labels: mean_per_class_recall(ranks < 1, labels),
}


def tuning_metric(metrics: Sequence[str], labels: Tensor) -> str:
    """By what to tune, given the metrics of a dataset's card: the first, where it can be had of any pictures."""
    if labels.ndim == 2:
        return "mean_average_precision" if metrics[:1] == ("mean_average_precision",) else "map_11_point"
    return metrics[0] if metrics and metrics[0] in (*_OF_RANKS, "f1_macro", "roc_auc") else "acc1"


def _value(metric: str, rows: Rows, labels: Tensor, classifier: Tensor, device: torch.device) -> float:
    """A metric of a (W + 1, C) classifier without an interval, which takes longer than the value."""
    blocks = ((places, with_ones(block)) for places, block in rows.blocks(_BLOCK))
    if metric in _OF_RANKS:
        ranks = [class_ranks(block, classifier, labels[places], device=device) for places, block in blocks]
        return _OF_RANKS[metric](torch.cat(ranks), labels)
    if metric == "f1_macro":
        tops = [top_classes(block, classifier, device=device).classes[:, 0] for _, block in blocks]
        return _at_all(f1_macro_statistic(torch.cat(tops), labels), len(labels))
    scores = torch.cat([class_scores(block, classifier, device=device) for _, block in blocks])
    if metric == "roc_auc":
        return _at_all(roc_auc_statistic(scores[:, 1] - scores[:, 0], labels), len(labels))
    precisions = average_precisions(scores, labels, interpolated=metric == "map_11_point")
    if np.isnan(precisions).all():
        raise DataError("average precision needs a picture to tune on that shows one of the classes")
    return float(np.nanmean(precisions))


def _at_all(statistic: Statistic, n: int) -> float:
    return float(statistic(np.ones((1, n), dtype=np.int64))[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearProbe:
    """What came of one probe.

    Attributes:
        scores: of the pictures that it was tested on.
        answers: what the classifier says of them.
        setting: "", or "layer K".
        tuned_on: "val", or "a fifth of train".
        tuned_by: the metric.
        sweep: how C was chosen.
    """

    scores: tuple[Score, ...]
    answers: Answers
    setting: str
    tuned_on: str
    tuned_by: str
    sweep: LinearSweep

    @property
    def chosen_c(self) -> float:
        """1/λ."""
        return self.sweep.fit.C


def linear_probe(subject: Subject, *, layers: bool | Sequence[int] = False, seed: int = 0) -> list[Score]:
    """The subject's metrics of a linear probe.

    Args:
        subject: with a split ``train``, and ``val`` or not.
        layers: besides, of which blocks of the image tower to probe the class token, from 1; True for all.
        seed: draws the pictures to tune on, where the dataset has none for it.

    Raises:
        DataError: nothing to learn from, or labels that a metric cannot be had of.
        ConfigError: the image tower has no such layer.
    """
    return [score for probe in linear_probes(subject, layers=layers, seed=seed) for score in probe.scores]


def linear_probes(
    subject: Subject, *, layers: bool | Sequence[int] = False, seed: int = 0
) -> Iterator[LinearProbe]:
    """One probe after another, the final representation's first; arguments and errors as for ``linear_probe``."""
    if isinstance(layers, bool):
        layers = range(1, layer_count(subject.encoder.model) + 1) if layers else ()
    known = layer_count(subject.encoder.model)
    if wrong := [layer for layer in layers if not 1 <= layer <= known]:
        raise ConfigError(f"layer {wrong[0]} does not fit: the image tower has {known} that can be probed")
    for layer in (None, *dict.fromkeys(layers)):
        yield _probe(subject, layer, seed)


def _probe(subject: Subject, layer: int | None, seed: int) -> LinearProbe:
    dataset = subject.dataset
    metrics = fitting_metrics(dataset, subject.metrics)
    train = learned(subject, "train", "a linear probe")
    labels, classes = labels_of(train), len(dataset.class_names)
    features = subject.images("train", layer=layer).before_projection
    # pictures that are scored are not tuned on
    val = subject.split("val") if dataset.split != "val" else None
    if val is not None:
        check_classes(dataset, val)
        subject.count_overlap("val")
        tuned_on = "val"
        parts = (
            Rows(features),
            labels,
            Rows(subject.images("val", layer=layer).before_projection),
            labels_of(val),
        )
    else:
        tuned_on = "a fifth of train"
        learn, tune = carve(labels, revision=train.revision, seed=seed)
        check_carved(train, labels, tune)
        parts = (Rows((features, learn)), labels[learn], Rows((features, tune)), labels[tune])
    metric = tuning_metric(metrics if subject.metrics else (), labels)
    try:
        found = sweep(*parts, classes, metric=metric, device=subject.device)
    except DataError as error:
        raise DataError(f"dataset {dataset.name}: {error}") from error
    if found.unconverged or not found.fit.converged:
        _log.warning("dataset %s: some fits of the linear probe took all of their 1,000 steps", dataset.name)
    answers = Answers(
        dataset,
        with_ones(subject.images(layer=layer).before_projection),
        found.fit.classifier(),
        1.0,
        subject.device,
    )
    setting = "" if layer is None else f"layer {layer}"
    scores = classification_scores(answers, task="linear-probe", metrics=metrics, setting=setting)
    return LinearProbe(
        scores=tuple(scores),
        answers=answers,
        setting=setting,
        tuned_on=tuned_on,
        tuned_by=metric,
        sweep=found,
    )


def learned(
    subject: Subject, split: str, who: str, *, unseen: str = "which are never predicted"
) -> EvalDataset:
    """A split to learn from, with the labels and classes of the one that is scored.

    Args:
        subject: whose dataset it is of.
        split: its name.
        who: learns from it, for a message.
        unseen: what becomes of classes without a picture in it, likewise.

    Raises:
        DataError: there is none, or its classes are others.
    """
    dataset, train = subject.dataset, subject.split(split)
    if train is None:
        raise NoSplit(f"dataset {dataset.name} has no {split} split, which {who} learns from")
    if train.split == dataset.split:
        raise DataError(f"dataset {dataset.name}: {who} learns from {split}, so score it on another split")
    labels = check_classes(dataset, train)
    subject.count_overlap(split)
    if labels.ndim == 1:
        counts = torch.bincount(labels, minlength=len(dataset.class_names)).tolist()
        empty = [repr(name) for name, count in zip(dataset.class_names, counts, strict=True) if not count]
        if empty:
            _log.warning(
                "dataset %s: classes without a picture to learn from, %s: %s",
                dataset.name,
                unseen,
                some(empty),
            )
    return train


def check_classes(dataset: EvalDataset, other: EvalDataset) -> Tensor:
    """The labels of another split, after making sure that they mean the same."""
    labels = labels_of(other)
    if other.class_names != dataset.class_names or labels.ndim != labels_of(dataset).ndim:
        raise DataError(
            f"dataset {dataset.name}: its {other.split} split has other classes than {dataset.split}"
        )
    return labels


def check_carved(train: EvalDataset, labels: Tensor, tune: Tensor) -> None:
    if not len(tune):
        raise DataError(
            f"dataset {train.name} has no val split, and no class of {train.split} can spare a picture for one"
        )
    if labels.ndim == 1:
        alone = (torch.bincount(labels) == 1).nonzero()[:, 0].tolist()
        if alone:
            _log.warning(
                "dataset %s: classes with one picture, which is learned from and not tuned on: %s",
                train.name,
                some([repr(train.class_names[i]) for i in alone]),
            )
