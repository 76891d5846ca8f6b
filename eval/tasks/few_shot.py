"""Few-shot classification: what a linear classifier makes of 1, 2, 4, 8 and 16 pictures a class.

Features are those before the projection, not normalized, as in both sources of the two ways to learn from them:

* ridge: least squares with a strong penalty in closed form (see ridge.py); nothing is tuned. Its setting is
  "4-shot".
* logistic: logistic regression as for the linear probe. C is fixed at 1, scikit-learn's own default, and its
  setting is "4-shot logistic". With ``tuned`` C is chosen on the whole split ``val``, as in figure 6 of the CLIP
  paper; that takes more labelled pictures than it learns from, so its setting is "4-shot logistic tuned on val".

The pictures are drawn anew with each seed, by the training split's revision and the seed alone, so that every model
gets the same ones; those of a smaller k are among those of a greater one.

Letters in shape comments: N pictures, W width of a feature, C classes, S seeds.
"""

import logging
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clipkit.errors import ConfigError, DataError
from eval.results import Score
from eval.subject import Subject
from eval.tasks.classification import Answers, classification_scores, fitting_metrics, labels_of
from eval.tasks.feature_rows import Rows
from eval.tasks.linear_probe import learned, sweep, tuning_metric, with_ones
from eval.tasks.logistic import LogisticProblem
from eval.tasks.ridge import ridge_classifier
from eval.tasks.sampling import draw_shots, shuffled_classes

__all__ = ["ESTIMATORS", "SHOTS", "few_shot", "interval_over_seeds"]

SHOTS = (1, 2, 4, 8, 16)
ESTIMATORS = ("ridge", "logistic")
_C = 1.0
_log = logging.getLogger("eval")


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
    same test pictures, and is left out for one seed. The deviation is that of a sample (S - 1), 0 for one seed; its
    ``n`` is S.

    Args:
        subject: with a split ``train`` of one label a picture.
        shots: pictures a class. One that the smallest class cannot give is left out, which is logged.
        seeds: draws.
        estimators: of ``ESTIMATORS``.
        tuned: choose C of "logistic" on the split ``val``.

    Raises:
        DataError: no such split, several labels a picture, or fewer pictures a class than any of ``shots``.
        ConfigError: no seeds, shots below 1, or an unknown estimator.
    """
    _check(shots, seeds, estimators)
    dataset = subject.dataset
    train = learned(subject, "train", "few-shot classification")
    labels, classes = labels_of(train), len(dataset.class_names)
    if labels.ndim != 1:
        raise DataError(
            f"dataset {dataset.name} has several labels a picture, few-shot classification takes one"
        )
    features = subject.images("train").before_projection
    tested = with_ones(subject.images().before_projection)
    possible = _possible(subject, labels, shots)
    draws = [shuffled_classes(labels, classes, revision=train.revision, seed=seed) for seed in seeds]
    scores = []
    for estimator in estimators:
        metrics = list(fitting_metrics(dataset, subject.metrics))
        if estimator == "ridge":  # its scores are no logits, which a calibration error is of
            metrics = [one for one in metrics if one != "ece"]
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


def _check(shots: Sequence[int], seeds: Sequence[int], estimators: Sequence[str]) -> None:
    if not seeds:
        raise ConfigError("few-shot classification needs at least one seed")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds = {list(seeds)} does not fit: a draw that is taken twice says nothing new")
    if not shots or min(shots) < 1:
        raise ConfigError(f"shots = {list(shots)} does not fit: one picture a class or more")
    for estimator in estimators:
        if estimator not in ESTIMATORS:
            raise ConfigError(f"unknown estimator {estimator!r}: known are {', '.join(ESTIMATORS)}")


def _possible(subject: Subject, labels: Tensor, shots: Sequence[int]) -> list[int]:
    """The shots that every class with pictures can give; a line tells of the others."""
    dataset = subject.dataset
    counts = torch.bincount(labels, minlength=len(dataset.class_names))
    if int((counts > 0).sum()) < 2:
        raise DataError(
            f"dataset {dataset.name}: few-shot classification takes pictures of two classes or more"
        )
    least = int(counts[counts > 0].min())
    name = dataset.class_names[int((counts == least).nonzero()[0])]
    why = f"class {name!r} has {least} picture{'s' * (least > 1)} to learn from"
    possible = sorted({k for k in shots if k <= least})
    if not possible:
        raise DataError(f"dataset {dataset.name}: {why}, ask for as few shots")
    if left_out := sorted({k for k in shots if k > least}):
        _log.warning("dataset %s: %s-shot left out, %s", dataset.name, ", ".join(map(str, left_out)), why)
    return possible


def _classifier(
    subject: Subject, estimator: str, features: Tensor, labels: Tensor, classes: int, *, tuned: bool
) -> Tensor:
    """(W + 1, C) float32 from the (N, W) features of a few pictures."""
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
