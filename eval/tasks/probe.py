"""Linear probe: logistic regression on what the image tower gives before its projection.

The protocol is that of the CLIP paper (Radford et al. 2021, arXiv 2103.00020, appendix A.3): L-BFGS with at most
1,000 steps; the strength λ = 1/C of the penalty from 1e-6 to 1e6 in 96 logarithmic steps, found by trying 1e-6,
1e-4, … 1e6 and halving the interval around the peak down to 8 steps a decade, by what it gives on validation
images; then fitted once more to training and validation images together, and tested once. Features are neither
projected nor normalized.

What the paper leaves open, and what is done here:

* Validation images are those of the dataset's split ``val``; where it has none, a fifth of each class of
  ``train``, drawn with a seed. ``LinearProbe.tuned_on`` says which.
* They are scored by the dataset's primary metric; where that needs groups or is a calibration, by top-1 accuracy.
  Of equal values the strongest penalty is taken.
* Images with several labels (VOC 2007): one regression a class with one C for all, by 11-point mAP. How the
  authors did it is not known.

Letters in shape comments: N images, W width of a feature, C classes.
"""

import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.errors import ConfigError, DataError
from clipkit.files.terminal import counted
from clipkit.model.probes import layer_count
from eval.datasets.dataset import EvalDataset, NoSplit, labels_of, some
from eval.metrics import METRICS, Answers, class_ranks, class_scores, top_classes
from eval.metrics.ranks import full_float32
from eval.results.details import prediction_details
from eval.results.records import Details
from eval.results.scores import Score
from eval.tasks import ESTIMATORS, KS, SHOTS, Options
from eval.tasks.classify import classification_scores, fitting_metrics
from eval.tasks.logistic import (
    LogisticFit,
    LogisticProblem,
    Rows,
    carve,
    draw_shots,
    ridge_classifier,
    shuffled_classes,
)
from eval.tasks.subject import Outcome, Subject

__all__ = [
    "LinearProbe",
    "LinearSweep",
    "Neighbours",
    "check_carved",
    "check_classes",
    "few_shot",
    "halving_search",
    "interval_over_seeds",
    "knn",
    "learned",
    "linear_probe",
    "linear_probes",
    "nearest_neighbours",
    "penalty_of",
    "run_few_shot",
    "run_knn",
    "run_linear_probe",
    "sweep",
    "tuning_metric",
    "votes",
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
        fit: with the chosen C, to training images, and to validation images unless told otherwise.
        tried: the value on the validation images, by C.
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
    """Tune a logistic regression on validation images, and fit it to them and the training images together.

    Args:
        train: features to learn from, not normalized.
        train_labels: (N,) int64, or (N, C) bool.
        val: features to tune on.
        val_labels: likewise.
        classes: C.
        metric: by which to tune; what ``tuning_metric`` gives.
        device: where to compute; the CPU if not given.
        refit: whether the last fit is to the validation images too.

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


def tuning_metric(metrics: Sequence[str], labels: Tensor) -> str:
    """The metric that chooses C: the first of a dataset's card, if it is defined for any split and fast."""
    first = METRICS.get(metrics[0]) if metrics else None
    if first is not None and first.value is not None:
        return metrics[0]
    return "acc1" if labels.ndim == 1 else "map_11_point"


def _value(name: str, rows: Rows, labels: Tensor, classifier: Tensor, device: torch.device) -> float:
    """The value of a metric for a (W + 1, C) classifier, without the interval, which takes longer."""
    metric = METRICS[name]
    assert metric.value is not None
    found = []
    for places, block in rows.blocks(_BLOCK):
        features = with_ones(block)
        if metric.value_from == "ranks":
            found.append(class_ranks(features, classifier, labels[places], device=device))
        elif metric.value_from == "predictions":
            found.append(top_classes(features, classifier, device=device).classes[:, 0])
        else:
            found.append(class_scores(features, classifier, device=device))
    return metric.value(torch.cat(found), labels)


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearProbe:
    """What came of one probe.

    Attributes:
        scores: of the images that it was tested on.
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
        seed: draws the images to tune on, where the dataset has none for it.

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


def run_linear_probe(subject: Subject, options: Options) -> Outcome:
    """The task ``linear-probe``."""
    scores: list[Score] = []
    details: list[Details] = []
    for probe in linear_probes(subject, layers=options.layers, seed=options.seed):
        scores += probe.scores
        if options.details and probe.answers.labels.dim() == 1:
            top = probe.answers.top
            own = prediction_details(
                subject.dataset,
                top.classes[:, 0],
                task="linear-probe",
                setting=probe.setting,
                confidence=top.probabilities[:, 0],
                chosen_c=probe.chosen_c,
            )
            details.append(replace(own, tuned_on=probe.tuned_on))
    return Outcome(scores=scores, details=details)


def _probe(subject: Subject, layer: int | None, seed: int) -> LinearProbe:
    dataset = subject.dataset
    metrics = fitting_metrics(dataset, subject.metrics)
    train = learned(subject, "train", "a linear probe")
    labels, classes = labels_of(train), len(dataset.class_names)
    features = subject.images("train", layer=layer).before_projection
    # images that are scored are not tuned on
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
        unseen: what becomes of classes without an image in it, likewise.

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
                "dataset %s: classes without an image to learn from, %s: %s",
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
            f"dataset {train.name} has no val split, and no class of {train.split} can spare an image for one"
        )
    if labels.ndim == 1:
        alone = (torch.bincount(labels) == 1).nonzero()[:, 0].tolist()
        if alone:
            _log.warning(
                "dataset %s: classes with one image, which is learned from and not tuned on: %s",
                train.name,
                some([repr(train.class_names[i]) for i in alone]),
            )


# --------------------------------------------------------------------------------------------------------------
# Few-shot classification: what a linear classifier makes of 1, 2, 4, 8 and 16 images a class.
#
# Features are those before the projection, not normalized, as in both sources of the two ways to learn from
# them:
#
# * ridge: least squares with a strong penalty in closed form (see ridge.py); nothing is tuned. Its setting is
#   "4-shot".
# * logistic: logistic regression as for the linear probe. C is fixed at 1, scikit-learn's own default, and its
#   setting is "4-shot logistic". With ``tuned`` C is chosen on the whole split ``val``, as in figure 6 of the CLIP
#   paper; that takes more labelled images than it learns from, so its setting is "4-shot logistic tuned on val".
#
# The images are drawn anew with each seed, by the training split's revision and the seed alone, so that every
# model gets the same ones; those of a smaller k are among those of a greater one.
#
# Letters in shape comments: N images, W width of a feature, C classes, S seeds.

_C = 1.0


def few_shot(
    subject: Subject,
    *,
    shots: Sequence[int] = SHOTS,
    seeds: Sequence[int] = (0, 1, 2),
    estimators: Sequence[str] = ESTIMATORS,
    tuned: bool = False,
) -> list[Score]:
    """The subject's metrics, each as the mean over seeds, and ``METRIC_std``, the deviation over them.

    The 95% interval of a mean is Student's, of the values of S draws: it says what other draws would give on the
    same test images, and is left out for one seed. The deviation is that of a sample (S - 1), 0 for one seed; its
    ``n`` is S.

    Args:
        subject: with a split ``train`` of one label per image.
        shots: images a class. One that the smallest class cannot give is left out, which is logged.
        seeds: draws.
        estimators: of ``ESTIMATORS``.
        tuned: choose C of "logistic" on the split ``val``.

    Raises:
        DataError: no such split, several labels per image, or fewer images a class than any of ``shots``.
        ConfigError: no seeds, shots below 1, or an unknown estimator.
    """
    _check(shots, seeds, estimators)
    dataset = subject.dataset
    train = learned(subject, "train", "few-shot classification")
    labels, classes = labels_of(train), len(dataset.class_names)
    if labels.ndim != 1:
        raise DataError(
            f"dataset {dataset.name} has several labels per image, few-shot classification takes one"
        )
    features = subject.images("train").before_projection
    tested = with_ones(subject.images().before_projection)
    possible = _possible(subject, labels, shots)
    draws = [shuffled_classes(labels, classes, revision=train.revision, seed=seed) for seed in seeds]
    scores = []
    for estimator in estimators:
        metrics = fitting_metrics(dataset, subject.metrics)
        if estimator == "ridge":
            metrics = _without_probabilities(metrics)
        for k in possible:
            setting = f"{k}-shot" + ("" if estimator == "ridge" else f" {estimator}")
            if estimator == "logistic" and tuned:
                setting += " tuned on val"
            of_seeds = []
            for chosen in (draw_shots(own, k) for own in draws):
                few, shown = features[chosen], labels[chosen]
                classifier = _classifier(subject, estimator, few, shown, classes, tuned=tuned)
                answers = Answers(dataset, tested, classifier, 1.0, subject.device)
                found = classification_scores(answers, task="few-shot", metrics=metrics, setting=setting)
                of_seeds.append(found)
            scores += [line for same in zip(*of_seeds, strict=True) for line in _over_seeds(same)]
    return scores


def run_few_shot(subject: Subject, options: Options) -> Outcome:
    """The task ``few-shot``."""
    scores = few_shot(
        subject,
        shots=options.shots,
        seeds=options.seeds,
        estimators=options.estimators,
        tuned=options.tuned,
    )
    return Outcome(scores=scores)


def _without_probabilities(metrics: Sequence[str]) -> tuple[str, ...]:
    """The metrics that do not need logits, which the scores of ridge regression and votes are not."""
    return tuple(one for one in metrics if one not in METRICS or not METRICS[one].needs_probabilities)


def _check(shots: Sequence[int], seeds: Sequence[int], estimators: Sequence[str]) -> None:
    if not seeds:
        raise ConfigError("few-shot classification needs at least one seed")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds = {list(seeds)} does not fit: a draw that is taken twice says nothing new")
    if not shots or min(shots) < 1:
        raise ConfigError(f"shots = {list(shots)} does not fit: one image a class or more")
    for estimator in estimators:
        if estimator not in ESTIMATORS:
            raise ConfigError(f"unknown estimator {estimator!r}: known are {', '.join(ESTIMATORS)}")


def _possible(subject: Subject, labels: Tensor, shots: Sequence[int]) -> list[int]:
    """The shots that every class with images can give; a line tells of the others."""
    dataset = subject.dataset
    counts = torch.bincount(labels, minlength=len(dataset.class_names))
    if int((counts > 0).sum()) < 2:
        raise DataError(
            f"dataset {dataset.name}: few-shot classification takes images of two classes or more"
        )
    least = int(counts[counts > 0].min())
    name = dataset.class_names[int((counts == least).nonzero()[0])]
    why = f"class {name!r} has {counted(least, 'image')} to learn from"
    possible = sorted({k for k in shots if k <= least})
    if not possible:
        raise DataError(f"dataset {dataset.name}: {why}, ask for as few shots")
    if left_out := sorted({k for k in shots if k > least}):
        _log.warning("dataset %s: %s-shot left out, %s", dataset.name, ", ".join(map(str, left_out)), why)
    return possible


def _classifier(
    subject: Subject, estimator: str, features: Tensor, labels: Tensor, classes: int, *, tuned: bool
) -> Tensor:
    """(W + 1, C) float32 from the (N, W) features of a few images."""
    if estimator == "ridge":
        return ridge_classifier(features, labels, classes)
    if not tuned:
        return LogisticProblem(Rows(features), labels, classes, device=subject.device).fit(_C).classifier()
    val = learned(subject, "val", "the choice of C")
    held = Rows(subject.images("val").before_projection)
    named = fitting_metrics(subject.dataset, subject.metrics) if subject.metrics else ()
    metric = tuning_metric(named, labels)
    found = sweep(
        Rows(features),
        labels,
        held,
        labels_of(val),
        classes,
        metric=metric,
        device=subject.device,
        refit=False,
    )
    return found.fit.classifier()


def _over_seeds(same: Sequence[Score]) -> Iterator[Score]:
    """One metric's scores of all seeds as their mean and their deviation."""
    values = [score.value for score in same]
    mean = statistics.fmean(values)
    low, high = interval_over_seeds(values) or (None, None)
    yield replace(same[0], value=mean, low=low, high=high)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    yield replace(
        same[0],
        metric=f"{same[0].metric}_std",
        value=deviation,
        n=len(values),
        low=None,
        high=None,
        chance=None,
    )


def interval_over_seeds(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95% interval of the mean of values in 0 … 1, within these; None for a single value."""
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    half = _student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return max(0.0, mean - half), min(1.0, mean + half)


_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


def _student(freedom: int) -> float:
    """The 97.5% point of Student's distribution, to 4 digits."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    # Cornish and Fisher's expansion in 1 / freedom
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / float(freedom) ** power for power, term in enumerate(terms))


# --------------------------------------------------------------------------------------------------------------
# k nearest neighbours: what the images around an image are, without anything learned.
#
# By the protocol of DINO (Caron et al. 2021, arXiv 2104.14294): unit-norm features, here the projected ones;
# the k training images of greatest cosine similarity s vote for their classes with weight exp(s / 0.07). The
# plain vote counts each once. Votes that are equal go to the class of lower number, as in scikit-learn; of
# equal similarities at the k-th place the training image that comes first is taken.
#
# Letters in shape comments: N training images, Q images to classify, D embedding dimension, C classes.

TEMPERATURE = 0.07
_ROWS, _COLUMNS = 512, 1 << 14  # similarities at a time: 32 MiB, and a few arrays of that size beside it


@dataclass(frozen=True, kw_only=True, eq=False)
class Neighbours:
    """The nearest training images, nearest first.

    Attributes:
        similarity: (Q, k) float32.
        index: (Q, k) int64.
    """

    similarity: Tensor
    index: Tensor


def nearest_neighbours(
    queries: Tensor, training: Tensor, k: int, *, device: torch.device | None = None
) -> Neighbours:
    """The k training images of greatest inner product with each query.

    Memory is bounded by blocks of both, which may be memory-mapped, and by the result.

    Args:
        queries: (Q, D), unit norm.
        training: (N, D), unit norm.
        k: 1 … N.
        device: where to take the products; where the queries are if not given.

    Returns:
        On the CPU.
    """
    device = device or queries.device
    similarity = torch.empty(len(queries), k)
    index = torch.empty(len(queries), k, dtype=torch.int64)
    with full_float32(device):
        for start in range(0, len(queries), _ROWS):
            block = slice(start, start + _ROWS)
            rows = queries[block].to(device, torch.float32)
            best = torch.empty(len(rows), 0, device=device)
            place = torch.empty(len(rows), 0, dtype=torch.int64, device=device)
            for first in range(0, len(training), _COLUMNS):
                some = rows @ training[first : first + _COLUMNS].to(device, torch.float32).T
                value, column = _first(some, k)
                best, place = torch.cat([best, value], dim=1), torch.cat([place, column + first], dim=1)
                # those of earlier columns stand first, so a stable sort keeps equals in the order of their places
                best, order = best.sort(dim=1, descending=True, stable=True)
                best, place = best[:, :k], place.gather(1, order[:, :k])
            similarity[block], index[block] = best.cpu(), place.cpu()
    return Neighbours(similarity=similarity, index=index)


def _first(similarity: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest of each row with their places, among equals those of lower place, in that order."""
    value, column = similarity.topk(min(k + 1, similarity.shape[1]), dim=1)  # takes equals in any order
    tied = (value[:, 1:] == value[:, :-1]).any(dim=1)
    value, column = value[:, :k], column[:, :k]
    if bool(tied.any()):
        all_values, all_columns = similarity[tied].sort(dim=1, descending=True, stable=True)
        value[tied], column[tied] = all_values[:, :k], all_columns[:, :k]
    return value, column


def votes(
    neighbours: Neighbours, labels: Tensor, classes: int, k: int, *, temperature: float | None = TEMPERATURE
) -> Tensor:
    """What share of the votes each class gets.

    Args:
        neighbours: at least k of each image.
        labels: (N,) int64 of the training images.
        classes: C.
        k: how many of them vote.
        temperature: of the weights exp(s / temperature); None for the plain vote.

    Returns:
        (Q, C) float32, rows sum to 1.
    """
    similarity = neighbours.similarity[:, :k].double()
    if temperature is None:
        weight = torch.ones_like(similarity)
    else:  # of the nearest 1, so that none overflows
        weight = ((similarity - similarity[:, :1]) / temperature).exp()
    voted = labels[neighbours.index[:, :k]]  # (Q, k)
    shares = torch.zeros(len(similarity), classes, dtype=torch.float32)
    for start in range(0, len(shares), _ROWS):
        block = slice(start, start + _ROWS)
        counted = torch.zeros(len(voted[block]), classes, dtype=torch.float64)
        counted.scatter_add_(1, voted[block], weight[block])
        shares[block] = (counted / weight[block].sum(dim=1, keepdim=True)).float()
    return shares


def knn(subject: Subject, *, ks: Sequence[int] = KS, temperature: float = TEMPERATURE) -> list[Score]:
    """The subject's metrics by neighbours: settings "k=20" for the weighted vote and "k=20 plain" for the other.

    The fractions of votes of all Q images, Q × C numbers, are held at a time; neighbours are found in blocks.

    Args:
        subject: with a split ``train`` of one label per image.
        ks: how many neighbours vote. More than there are training images are left out, which is logged.
        temperature: of the weighted vote.

    Raises:
        DataError: no such split, several labels per image, or fewer training images than any of ``ks``.
        ConfigError: no neighbours, or a temperature that is not above 0.
    """
    if not ks or min(ks) < 1:
        raise ConfigError(f"k = {list(ks)} does not fit: one neighbour or more")
    if not temperature > 0:
        raise ConfigError(f"temperature = {temperature} does not fit: it is above 0")
    dataset = subject.dataset
    metrics = _without_probabilities(fitting_metrics(dataset, subject.metrics))
    train = learned(subject, "train", "a vote of neighbours")
    labels, classes = labels_of(train), len(dataset.class_names)
    if labels.ndim != 1:
        raise DataError(
            f"dataset {dataset.name} has several labels per image, a vote of neighbours takes one"
        )
    possible = sorted({k for k in ks if k <= len(labels)})
    if not possible:
        raise DataError(f"dataset {dataset.name} has {len(labels)} images to vote, ask for as few neighbours")
    if left_out := sorted({k for k in ks if k > len(labels)}):
        named = ", ".join(map(str, left_out))
        _log.warning("dataset %s: k=%s left out, it has %d images to vote", dataset.name, named, len(labels))
    found = nearest_neighbours(
        subject.images().projected, subject.images("train").projected, possible[-1], device=subject.device
    )
    itself = torch.eye(classes)
    scores = []
    for k in possible:
        for setting, weight in ((f"k={k}", temperature), (f"k={k} plain", None)):
            share = votes(found, labels, classes, k, temperature=weight)
            answers = Answers(dataset, share, itself, 1.0, subject.device)
            scores += classification_scores(answers, task="knn", metrics=metrics, setting=setting)
    return scores


def run_knn(subject: Subject, options: Options) -> Outcome:
    """The task ``knn``."""
    return Outcome(scores=knn(subject, ks=options.neighbours))
