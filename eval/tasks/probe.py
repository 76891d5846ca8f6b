"""Tasks that learn classes from the features of training images: linear-probe, few-shot and knn.

Features are those before the projection, not normalized, for linear-probe and few-shot; projected, of unit norm,
for knn. Images to learn from and to tune on are a function of the training split's revision and the seed, not of
the model.

Dimensions: N training images, Q images to classify, W features before the projection, D embedding dimension,
C classes.
"""

import hashlib
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.errors import ConfigError, DataError
from clipkit.files import counted
from clipkit.model import layer_count
from clipkit.samples import MissingSplit
from eval.datasets.dataset import EvalDataset, list_some, require_labels
from eval.metrics import (
    METRICS,
    Answers,
    class_ranks,
    class_scores,
    full_float32,
    get_metric,
    stable_top_k,
    top_classes,
)
from eval.results.details import prediction_details
from eval.results.records import Details, Score
from eval.tasks import Options
from eval.tasks.classify import add_items, classification_scores, fitting_metrics
from eval.tasks.logistic import LogisticFit, LogisticProblem, Part, Rows
from eval.tasks.subject import Outcome, Subject

_log = logging.getLogger("eval")

# Which images a task learns from and tunes on.

CARVED = 5  # one of this many training images is used for tuning


class NothingToTuneOn(DataError):
    """There is no split ``val``, and no class of ``train`` has an image to spare for one."""


def training_split(
    subject: Subject, split: str, learner: str, *, unseen: str = "which are never predicted"
) -> EvalDataset:
    """Return a split to learn from, with the classes of the one that is scored."""
    dataset, train = subject.dataset, subject.split(split)
    if train is None:
        raise MissingSplit(f"dataset {dataset.name} has no {split} split, which {learner} learns from")
    if train.split == dataset.split:
        raise DataError(
            f"dataset {dataset.name}: {learner} learns from {split}, so score it on another split"
        )
    labels = _check_classes(dataset, train)
    subject.count_overlap(split)
    if labels.ndim == 1:
        counts = torch.bincount(labels, minlength=len(dataset.class_names)).tolist()
        empty = [repr(name) for name, n in zip(dataset.class_names, counts, strict=True) if not n]
        if empty:
            _log.warning(
                "dataset %s: classes without training images, %s: %s",
                dataset.name,
                unseen,
                list_some(empty),
            )
    return train


def _check_classes(dataset: EvalDataset, other: EvalDataset) -> Tensor:
    labels = require_labels(other)
    if other.class_names != dataset.class_names or labels.ndim != require_labels(dataset).ndim:
        raise DataError(
            f"dataset {dataset.name}: its {other.split} split has other classes than {dataset.split}"
        )
    if other.unknown is not None:
        raise DataError(
            f"dataset {dataset.name}: its {other.split} split has uncertain or blank labels, which cannot be "
            "learned from"
        )
    return labels


def _check_one_label(dataset: EvalDataset, labels: Tensor, learner: str) -> None:
    if labels.ndim != 1:
        raise DataError(f"dataset {dataset.name} has several labels per image, but {learner} needs one")


Chosen = tuple[EvalDataset, Tensor | None]  # a split, and the numbers of its images or None for all


def learn_and_tune(
    subject: Subject, train: EvalDataset, seed: int, examples: int = 0
) -> tuple[Chosen, Chosen, str]:
    """Choose the images to learn from and to tune on: the split ``val``, else a fifth of each class of ``train``.

    With ``examples``, it is a fifth of so many random images of ``train``, of which no others are used: the
    protocol of VTAB-1k (Zhai et al. 2019, https://arxiv.org/abs/1910.04867).

    Returns:
        Both, and "val", "a fifth of train", or "a fifth of N images of train".
    """
    dataset, labels = subject.dataset, require_labels(train)
    if examples:
        drawn = draw_examples(train, examples, seed)
        if len(drawn) < CARVED:
            raise NothingToTuneOn(f"dataset {train.name}: {len(drawn)} training images leave none to tune on")
        tuned = round(len(drawn) / CARVED)
        learn = drawn[tuned:].sort().values
        tune = drawn[:tuned].sort().values
        return (train, learn), (train, tune), f"a fifth of {len(drawn):,} images of train"
    # images that are scored are not tuned on
    val = subject.split("val") if dataset.split != "val" else None
    if val is not None:
        _check_classes(dataset, val)
        return (train, None), (val, None), "val"
    learn, tune = carve_validation(labels, revision=train.revision, seed=seed)
    if not len(tune):
        raise NothingToTuneOn(
            f"dataset {train.name} has no val split, and no class of {train.split} can spare an image for one"
        )
    if labels.ndim == 1:
        alone = (torch.bincount(labels) == 1).nonzero()[:, 0].tolist()
        if alone:
            _log.warning(
                "dataset %s: classes with one image, which is learned from and not tuned on: %s",
                train.name,
                list_some([repr(train.class_names[i]) for i in alone]),
            )
    return (train, learn), (train, tune), "a fifth of train"


def draw_examples(train: EvalDataset, examples: int, seed: int) -> Tensor:
    """Return the numbers of random images of a split, int64, all of them if there are fewer than ``examples``.

    A smaller number of examples gives a subset.
    """
    return _shuffle(torch.arange(len(require_labels(train))), f"{train.revision} {seed} examples")[:examples]


def carve_validation(labels: Tensor, *, revision: str, seed: int) -> tuple[Tensor, Tensor]:
    """Split a training set into four fifths to learn from and one fifth to tune on.

    Each class gives a fifth of its images, at least one unless it has a single image. With several labels per
    image, (N, C) bool, it is a fifth of all images.

    Returns:
        The numbers of the images, sorted, both int64; the second is empty if no class has two images.
    """
    if not len(labels):
        return torch.arange(0), torch.arange(0)
    if labels.ndim == 1:
        groups = shuffle_classes(labels, int(labels.max()) + 1, revision=revision, seed=seed)
    else:
        groups = [_shuffle(torch.arange(len(labels)), f"{revision} {seed}")]
    learn: list[Tensor] = []
    tune: list[Tensor] = []
    for images in groups:
        n = min(max(1, round(len(images) / CARVED)), max(0, len(images) - 1))
        learn.append(images[n:])
        tune.append(images[:n])
    return torch.cat(learn).sort().values, torch.cat(tune).sort().values


def shuffle_classes(labels: Tensor, classes: int, *, revision: str, seed: int) -> list[Tensor]:
    """Shuffle the images of each class: C int64 tensors, empty for a class without images.

    The order depends only on the images of the class, its number, the revision and the seed.
    """
    order = torch.argsort(labels, stable=True)
    counts = torch.bincount(labels, minlength=classes).tolist()
    groups = enumerate(order.split(counts))
    return [_shuffle(images, f"{revision} {seed} {label}") for label, images in groups]


def draw_shots(shuffled: list[Tensor], k: int) -> Tensor:
    """Return the first k images of each shuffled class, sorted; a smaller k gives a subset."""
    return torch.cat([images[:k] for images in shuffled]).sort().values


def _shuffle(images: Tensor, key: str) -> Tensor:
    digest = hashlib.sha256(key.encode()).digest()
    random = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return images[torch.from_numpy(random.permutation(len(images)))]


# Linear probe, by the protocol of the CLIP paper (Radford et al. 2021, arXiv 2103.00020, appendix A.3): L-BFGS of
# at most 1,000 steps; λ = 1/C from 1e-6 to 1e6 in 96 logarithmic steps, chosen on validation images by trying
# every 16th step and halving the interval around the maximum; one final fit to training and validation images. The
# paper does not say how equal values are resolved (here by the strongest penalty), nor how it treats images with
# several labels (here one regression per class with a common C, chosen by 11-point mAP).

STEPS = 96  # of λ from 1e-6 to 1e6
_FIRST = 16  # steps between the points that are tried first: two decades
_COMPARED = 1e-3  # tolerance of the fits that are compared
_BLOCK = 1 << 14  # rows at a time, when C is chosen


def get_penalty(step: int) -> float:
    """Return λ of a step of 0 … 96: 1e-6 … 1e6."""
    return float(10 ** (step / 8 - 6))


def halving_search(value_at: Callable[[int], float]) -> int:
    """Find the step of 0 … 96 with the largest value as the paper does; of equal values, the last step."""
    values: dict[int, float] = {}
    width = _FIRST
    steps = list(range(STEPS, -1, -_FIRST))
    while True:
        for step in steps:
            if step not in values:
                values[step] = value_at(step)
        peak = max(values, key=lambda step: (values[step], step))
        if width == 1:
            return peak
        width //= 2
        steps = [step for step in (peak + width, peak - width) if 0 <= step <= STEPS]


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearSweep:
    """A tuned classifier.

    Attributes:
        fit: the final fit with the chosen C.
        tried: the metric on the validation images, by C.
        unconverged: the values of C tried for which 1,000 steps were not enough.
    """

    fit: LogisticFit
    tried: Mapping[float, float]
    unconverged: tuple[float, ...]


def sweep_penalties(
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
    """Choose C of a logistic regression on validation images.

    Args:
        metric: the result of ``tuning_metric``.
        device: of the computation; the CPU by default.
        refit: whether the final fit includes the validation images.
    """
    device = device or torch.device("cpu")
    problem = LogisticProblem(train, train_labels, classes, device=device)
    fits: dict[int, LogisticFit] = {}
    tried: dict[float, float] = {}

    def value_at(step: int) -> float:
        nearest = min(fits, key=lambda other: (abs(other - step), other), default=None)
        start = None if nearest is None else fits[nearest]
        fit = fits[step] = problem.fit(1 / get_penalty(step), start=start, tolerance=_COMPARED)
        tried[fit.C] = _compute_metric(metric, val, val_labels, fit.classifier(), device)
        return tried[fit.C]

    step = halving_search(value_at)
    if refit:
        problem = LogisticProblem(train + val, torch.cat([train_labels, val_labels]), classes, device=device)
    final = problem.fit(1 / get_penalty(step), start=fits[step])
    unconverged = tuple(fit.C for fit in fits.values() if not fit.converged)
    return LinearSweep(fit=final, tried=tried, unconverged=unconverged)


def _compute_metric(name: str, rows: Rows, labels: Tensor, classifier: Tensor, device: torch.device) -> float:
    """Compute a metric of a (W + 1, C) classifier without its interval."""
    metric = METRICS[name]
    assert metric.value is not None
    outputs = []
    for part, block in rows.blocks(_BLOCK):
        features = _append_ones(block)
        if metric.value_from == "ranks":
            outputs.append(class_ranks(features, classifier, labels[part], device=device))
        elif metric.value_from == "predictions":
            outputs.append(top_classes(features, classifier, device=device).classes[:, 0])
        else:
            outputs.append(class_scores(features, classifier, device=device))
    return metric.value(torch.cat(outputs), labels)


def _append_ones(features: Tensor) -> Tensor:
    return F.pad(features.float(), (0, 1), value=1.0)


def tuning_metric(metrics: Sequence[str], labels: Tensor) -> str:
    """Return the metric that chooses C: the first of the card if it has a ``value``, else the default."""
    first = METRICS.get(metrics[0]) if metrics else None
    if first is not None and first.value is not None:
        return metrics[0]
    return "acc1" if labels.ndim == 1 else "map_11_point"


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearProbe:
    """The result of a linear probe.

    Attributes:
        scores: scores on the test images.
        answers: predictions for the test images.
        setting: "", or "layer K".
        tuned_on: "val", or "a fifth of train".
        tuned_by: the metric that chose C.
        sweep: how C was chosen.
    """

    scores: list[Score]
    answers: Answers
    setting: str
    tuned_on: str
    tuned_by: str
    sweep: LinearSweep


def linear_probes(
    subject: Subject, *, layers: bool | Sequence[int] = False, seed: int = 0, examples: int = 0
) -> Iterator[LinearProbe]:
    """Yield the probe of the final representation, then those of layers, blocks from 1 or True for all."""
    count = layer_count(subject.encoder.model)
    if isinstance(layers, bool):
        layers = range(1, count + 1) if layers else ()
    for depth in layers:
        if not 1 <= depth <= count:
            raise ConfigError(f"no layer {depth}: the image tower has {count} that can be probed")
    for layer in (None, *dict.fromkeys(layers)):
        yield _probe(subject, layer, seed, examples)


def _probe(subject: Subject, layer: int | None, seed: int, examples: int) -> LinearProbe:
    dataset = subject.dataset
    metrics = fitting_metrics(dataset, subject.metrics)
    train = training_split(subject, "train", "a linear probe")
    learn, tune, tuned_on = learn_and_tune(subject, train, seed, examples)
    if tuned_on == "val":
        subject.count_overlap("val")

    def select_rows(chosen: Chosen) -> tuple[Rows, Tensor]:
        split, images = chosen
        features: Part = (subject.images(split.split, layer=layer).before_projection, images)
        labels = require_labels(split)
        return Rows(features), labels if images is None else labels[images]

    metric = tuning_metric(metrics if subject.metrics else (), require_labels(train))
    try:
        result = sweep_penalties(
            *select_rows(learn),
            *select_rows(tune),
            len(dataset.class_names),
            metric=metric,
            device=subject.device,
        )
    except DataError as error:
        raise DataError(f"dataset {dataset.name}: {error}") from error
    if result.unconverged or not result.fit.converged:
        _log.warning("dataset %s: some fits of the linear probe took all of their 1,000 steps", dataset.name)
    tested = _append_ones(subject.images(layer=layer).before_projection)
    answers = Answers(dataset, tested, result.fit.classifier(), 1.0, subject.device)
    settings = []
    if examples:
        settings.append(f"{examples:,} examples")
    if layer is not None:
        settings.append(f"layer {layer}")
    setting = ", ".join(settings)
    return LinearProbe(
        scores=classification_scores(answers, task="linear-probe", metrics=metrics, setting=setting),
        answers=answers,
        setting=setting,
        tuned_on=tuned_on,
        tuned_by=metric,
        sweep=result,
    )


def linear_probe(subject: Subject, options: Options) -> Outcome:
    """Run the task ``linear-probe``; see ``linear_probes``."""
    scores: list[Score] = []
    details: list[Details] = []
    for probe in linear_probes(subject, layers=options.layers, seed=options.seed, examples=options.examples):
        scores += probe.scores
        if options.details and probe.answers.labels.dim() == 1:
            layer_details = prediction_details(
                subject.dataset,
                probe.answers.top.classes[:, 0],
                task="linear-probe",
                setting=probe.setting,
                confidence=probe.answers.top.probabilities[:, 0],
                chosen_c=probe.sweep.fit.C,
            )
            layer_details = add_items(layer_details, probe.answers, [score.metric for score in probe.scores])
            details.append(replace(layer_details, tuned_on=probe.tuned_on))
    return Outcome(scores=scores, details=details)


# Few-shot classification. Settings:
#
# "4-shot"                        least squares with a strong penalty, not tuned
# "4-shot logistic"               logistic regression with C = 1, scikit-learn's default
# "4-shot logistic tuned on val"  with C chosen on the whole split ``val``, as in figure 6 of the CLIP paper


def few_shot(subject: Subject, options: Options) -> Outcome:
    """Run the task ``few-shot``: each metric's mean over the draws, and ``METRIC_std``, its standard deviation.

    The 95% interval of a mean is Student's over the draws, for the same test images; None for one draw. The
    standard deviation is that of a sample, 0 for one draw.
    """
    dataset = subject.dataset
    train = training_split(subject, "train", "few-shot classification")
    labels, classes = require_labels(train), len(dataset.class_names)
    _check_one_label(dataset, labels, "few-shot classification")
    features = subject.images("train").before_projection
    tested = _append_ones(subject.images().before_projection)
    counts = torch.bincount(labels, minlength=classes)
    if int((counts > 0).sum()) < 2:
        raise DataError(
            f"dataset {dataset.name}: few-shot classification needs images of two or more classes"
        )
    least = int(counts[counts > 0].min())
    name = dataset.class_names[int((counts == least).nonzero()[0])]
    possible = _select_possible(
        subject, options.shots, least, "-shot", f"class {name!r} has {counted(least, 'image')}"
    )
    draws = [shuffle_classes(labels, classes, revision=train.revision, seed=seed) for seed in options.seeds]
    scores: list[Score] = []
    for estimator in options.estimators:
        metrics = fitting_metrics(dataset, subject.metrics)
        if estimator == "ridge":
            metrics = _drop_probability_metrics(metrics)
        for k in possible:
            setting = f"{k}-shot" + ("" if estimator == "ridge" else f" {estimator}")
            if estimator == "logistic" and options.tuned:
                setting += " tuned on val"
            scores_of_seeds = []
            for draw in draws:
                chosen = draw_shots(draw, k)
                if estimator == "ridge":
                    classifier = ridge_classifier(features[chosen], labels[chosen], classes)
                elif options.tuned:
                    classifier = _fit_tuned_on_val(subject, features[chosen], labels[chosen])
                else:
                    rows = Rows(features[chosen])
                    problem = LogisticProblem(rows, labels[chosen], classes, device=subject.device)
                    classifier = problem.fit(1.0).classifier()
                answers = Answers(dataset, tested, classifier, 1.0, subject.device)
                scores_of_seeds.append(
                    classification_scores(answers, task="few-shot", metrics=metrics, setting=setting)
                )
            scores_of_metrics: dict[str, list[Score]] = {}
            for score in chain.from_iterable(scores_of_seeds):
                scores_of_metrics.setdefault(score.metric, []).append(score)
            for name, same in scores_of_metrics.items():
                if len(same) < len(draws):
                    subject.warn(f"{name} of {setting} is undefined for some draws and left out")
                    continue
                values = [score.value for score in same]
                metric = get_metric(name)
                assert metric is not None
                low, high = interval_over_seeds(values, lowest=metric.lowest) or (None, None)
                deviation = replace(
                    same[0],
                    metric=f"{same[0].metric}_std",
                    value=statistics.stdev(values) if len(values) > 1 else 0.0,
                    n=len(values),
                    low=None,
                    high=None,
                    chance=None,
                )
                scores += [replace(same[0], value=statistics.fmean(values), low=low, high=high), deviation]
    return Outcome(scores=scores)


def _fit_tuned_on_val(subject: Subject, features: Tensor, labels: Tensor) -> Tensor:
    val = training_split(subject, "val", "the choice of C")
    metrics = fitting_metrics(subject.dataset, subject.metrics) if subject.metrics else ()
    result = sweep_penalties(
        Rows(features),
        labels,
        Rows(subject.images("val").before_projection),
        require_labels(val),
        len(subject.dataset.class_names),
        metric=tuning_metric(metrics, labels),
        device=subject.device,
        refit=False,
    )
    return result.fit.classifier()


def _select_possible(subject: Subject, values: Sequence[int], most: int, unit: str, reason: str) -> list[int]:
    """Return the numbers that are small enough, sorted; warn of the others."""
    name = subject.dataset.name
    possible = sorted({k for k in values if k <= most})
    if not possible:
        raise DataError(f"dataset {name}: {reason} to learn from; use at most {most:,}")
    left_out = sorted(set(values).difference(possible))
    if left_out:
        _log.warning(
            "dataset %s: skipping %s%s, %s to learn from", name, ", ".join(map(str, left_out)), unit, reason
        )
    return possible


def _drop_probability_metrics(metrics: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in metrics if name not in METRICS or not METRICS[name].needs_probabilities)


def interval_over_seeds(values: Sequence[float], *, lowest: float = 0.0) -> tuple[float, float] | None:
    """Return Student's 95% interval of the mean of values, clipped to ``lowest`` … 1; None for a single value."""
    freedom = len(values) - 1
    if not freedom:
        return None
    if freedom <= len(_STUDENT):
        t = _STUDENT[freedom - 1]
    else:  # Cornish and Fisher's expansion in 1 / freedom
        z = statistics.NormalDist().inv_cdf(0.975)
        terms = (
            z,
            (z**3 + z) / 4,
            (5 * z**5 + 16 * z**3 + 3 * z) / 96,
            (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        )
        t = math.fsum(term / float(freedom) ** power for power, term in enumerate(terms))
    mean = statistics.fmean(values)
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return max(lowest, mean - half), min(1.0, mean + half)


# the 97.5% quantiles of Student's distribution with 1 … 10 degrees of freedom
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)

_PENALTY = 2.0**10
_BIAS = 100.0
_LEAST = 1e-5  # added to standard deviations, some of which are 0 with one image per class


def ridge_classifier(features: Tensor, labels: Tensor, classes: int, *, penalty: float = _PENALTY) -> Tensor:
    """Fit least squares with an L2 penalty (Zhai et al. 2021, arXiv 2106.04560; big_vision's ``fewshot_lsr``).

    Features are standardized over the training images, with another feature of 100 for the bias, which is then
    hardly penalized; targets are 1 for the class and -1 for the others. The smaller of the two equivalent linear
    systems is solved.

    Args:
        features: (N, W), N ≥ 1.

    Returns:
        (W + 1, C) float32 on the CPU, for the original features with a last column of ones.
    """
    features = features.cpu().double()
    mean = features.mean(dim=0)
    deviation = features.std(dim=0, correction=0) + _LEAST
    scaled = F.pad((features - mean) / deviation, (0, 1), value=_BIAS)  # (N, W + 1)
    targets = torch.full((len(labels), classes), -1.0, dtype=torch.float64)
    targets[torch.arange(len(labels)), labels.cpu()] = 1.0

    def solve(products: Tensor, right: Tensor) -> Tensor:
        products.diagonal().add_(penalty)
        return torch.cholesky_solve(right, torch.linalg.cholesky(products))

    if len(scaled) < scaled.shape[1]:
        weights = scaled.T @ solve(scaled @ scaled.T, targets)
    else:
        weights = solve(scaled.T @ scaled, scaled.T @ targets)  # (W + 1, C)
    slopes = weights[:-1] / deviation[:, None]
    bias = _BIAS * weights[-1] - mean @ slopes
    return torch.cat([slopes, bias[None]]).float()


# k nearest neighbors, by the protocol of DINO (Caron et al. 2021, arXiv 2104.14294) with projected features: the k
# training images of largest cosine similarity s vote with weight exp(s / 0.07), or in the setting "plain" with
# weight 1. Equal votes go to the class of lower index, as in scikit-learn; of equal similarities at the k-th place
# the training image of lower index is taken.

TEMPERATURE = 0.07
# similarities at a time: 32 MiB, plus a few arrays of that size
_ROWS = 512
_COLUMNS = 1 << 14


def nearest_neighbours(
    queries: Tensor, training: Tensor, k: int, *, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Find the k training images (N, D) of largest inner product with each query (Q, D), nearest first.

    Returns:
        Their similarity, (Q, k) float32, and index, (Q, k) int64, on the CPU.
    """
    device = device or queries.device
    similarity = torch.empty(len(queries), k)
    index = torch.empty(len(queries), k, dtype=torch.int64)
    with full_float32(device):
        for start in range(0, len(queries), _ROWS):
            block = slice(start, start + _ROWS)
            rows = queries[block].to(device, torch.float32)
            best = torch.empty(len(rows), 0, device=device)
            nearest = torch.empty(len(rows), 0, dtype=torch.int64, device=device)
            for first in range(0, len(training), _COLUMNS):
                columns = training[first : first + _COLUMNS].to(device, torch.float32)
                value, column = stable_top_k(rows @ columns.T, k)
                # earlier columns come first, so a stable sort keeps ties in their order
                best, order = torch.cat([best, value], dim=1).sort(dim=1, descending=True, stable=True)
                best = best[:, :k]
                nearest = torch.cat([nearest, column + first], dim=1).gather(1, order[:, :k])
            similarity[block] = best.cpu()
            index[block] = nearest.cpu()
    return similarity, index


def count_votes(
    similarity: Tensor, voted: Tensor, classes: int, *, temperature: float | None = TEMPERATURE
) -> Tensor:
    """Return each class's fraction of the votes, (Q, C) float32.

    Args:
        similarity: (Q, k) of the neighbors of each image, nearest first.
        voted: (Q, k) int64, their labels.
        classes: C.
        temperature: T of the weights exp(s / T); None for equal weights.
    """
    similarity = similarity.double()
    if temperature is None:
        weight = torch.ones_like(similarity)
    else:  # relative to the nearest, so that none overflows
        weight = ((similarity - similarity[:, :1]) / temperature).exp()
    fractions = torch.zeros(len(similarity), classes, dtype=torch.float32)
    for start in range(0, len(fractions), _ROWS):
        block = slice(start, start + _ROWS)
        sums = torch.zeros(len(voted[block]), classes, dtype=torch.float64)
        sums.scatter_add_(1, voted[block], weight[block])
        fractions[block] = (sums / weight[block].sum(dim=1, keepdim=True)).float()
    return fractions


def knn(subject: Subject, options: Options) -> Outcome:
    """Run the task ``knn``: settings "k=20" for weighted votes and "k=20 plain" for equal ones.

    The (Q, C) fractions of votes are held in memory.
    """
    dataset = subject.dataset
    metrics = _drop_probability_metrics(fitting_metrics(dataset, subject.metrics))
    train = training_split(subject, "train", "nearest-neighbor classification")
    labels = require_labels(train)
    classes = len(dataset.class_names)
    _check_one_label(dataset, labels, "nearest-neighbor classification")
    n = len(labels)
    possible = _select_possible(
        subject, options.neighbours, n, " neighbors", f"there are {counted(n, 'image')}"
    )
    similarity, index = nearest_neighbours(
        subject.images().projected, subject.images("train").projected, possible[-1], device=subject.device
    )
    identity = torch.eye(classes)
    scores: list[Score] = []
    for k in possible:
        for setting, temperature in ((f"k={k}", TEMPERATURE), (f"k={k} plain", None)):
            fractions = count_votes(similarity[:, :k], labels[index[:, :k]], classes, temperature=temperature)
            answers = Answers(dataset, fractions, identity, 1.0, subject.device)
            scores += classification_scores(answers, task="knn", metrics=metrics, setting=setting)
    return Outcome(scores=scores)
