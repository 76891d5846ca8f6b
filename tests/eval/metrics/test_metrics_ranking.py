"""Tests of average precision and ROC AUC against scikit-learn, VOC's definition and CLIP_benchmark."""

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from clipkit.errors import DataError
from eval.metrics import intervals, ranks
from eval.metrics.classes import (
    average_precisions,
    map_11_point,
    mean_average_precision,
    mean_average_precision_statistic,
    roc_auc,
    roc_auc_macro,
    roc_auc_macro_statistic,
    roc_auc_one_vs_one,
    roc_auc_one_vs_one_statistic,
    roc_auc_statistic,
)
from eval.metrics.intervals import Statistic, evaluate_statistic
from eval.metrics.ranks import class_scores

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_BLOCK", 64)  # so that small inputs need several blocks
    monkeypatch.setattr(intervals, "_RESAMPLES", 30)


def some_scores(seed: int, n: int, classes: int, *, ties: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(n, classes, generator=generator)
    if ties:
        scores = (2 * scores).round()
    return scores, torch.rand(n, classes, generator=generator) < 0.3


@given(seed=SEEDS, n=st.integers(1, 40), classes=st.integers(1, 4), ties=st.booleans())
@settings(max_examples=60, deadline=None)
def test_average_precision_equals_scikit_learn(seed: int, n: int, classes: int, ties: bool) -> None:
    from sklearn.metrics import average_precision_score

    scores, labels = some_scores(seed, n, classes, ties=ties)
    present = labels.any(dim=0)
    if not present.any():
        with pytest.raises(DataError, match="average precision"):
            mean_average_precision(scores, labels)
        return
    each = average_precisions(scores, labels)
    assert np.isnan(each[~present.numpy()]).all()
    expected = [average_precision_score(labels[:, c], scores[:, c]) for c in present.nonzero()[:, 0]]
    assert each[present.numpy()] == pytest.approx(expected)
    found = mean_average_precision(scores, labels)
    assert found.value == pytest.approx(np.mean(expected)) and found.n == n
    assert 0 <= found.low <= found.value <= found.high <= 1


def eleven_points_by_hand(scores: list[float], labels: list[bool]) -> float:
    """Compute the best precision at each recall over all thresholds, with exact fractions."""
    best = [0.0] * 11
    total = sum(labels)
    for threshold in set(scores):
        taken = [own for score, own in zip(scores, labels, strict=True) if score >= threshold]
        for tenths in range(11):
            if 10 * sum(taken) >= tenths * total:
                best[tenths] = max(best[tenths], sum(taken) / len(taken))
    return sum(best) / 11


@given(seed=SEEDS, n=st.integers(1, 40), classes=st.integers(1, 3), ties=st.booleans())
@settings(max_examples=60, deadline=None)
def test_eleven_point_precision_equals_voc(seed: int, n: int, classes: int, ties: bool) -> None:
    scores, labels = some_scores(seed, n, classes, ties=ties)
    present = labels.any(dim=0)
    each = average_precisions(scores, labels, interpolated=True)
    assert np.isnan(each[~present.numpy()]).all()
    for c in present.nonzero()[:, 0].tolist():
        expected = eleven_points_by_hand(scores[:, c].tolist(), labels[:, c].tolist())
        assert each[c] == pytest.approx(expected)
    if present.any():
        found = map_11_point(scores, labels)
        assert found.value == pytest.approx(each[present.numpy()].mean())
        assert 0 <= found.low <= found.value <= found.high <= 1


@given(seed=SEEDS, n=st.integers(2, 30), interpolated=st.booleans())
@settings(max_examples=40, deadline=None)
def test_statistics_of_draws_equal_values_of_copies(seed: int, n: int, interpolated: bool) -> None:
    scores, labels = some_scores(seed, n, 3, ties=True)
    labels[0] = True
    generator = np.random.default_rng(seed)
    drawn = np.bincount(generator.integers(n, size=n), minlength=n)[None]
    copies = torch.from_numpy(np.repeat(np.arange(n), drawn[0]))
    statistic = mean_average_precision_statistic(scores, labels, interpolated=interpolated)
    own = labels[copies]
    if own.any():
        each = average_precisions(scores[copies], own, interpolated=interpolated)
        assert statistic(drawn)[0] == pytest.approx(np.nanmean(each))
    else:
        assert math.isnan(statistic(drawn)[0])
    area = roc_auc_statistic(scores[:, 0], torch.arange(n) % 2)
    odd = copies % 2
    if 0 < odd.sum() < n:
        assert area(drawn)[0] == pytest.approx(roc_auc(scores[copies, 0], odd).value)
    else:
        assert math.isnan(area(drawn)[0])


@given(seed=SEEDS, n=st.integers(2, 60), ties=st.booleans())
@settings(max_examples=60, deadline=None)
def test_roc_auc_equals_scikit_learn(seed: int, n: int, ties: bool) -> None:
    from sklearn.metrics import roc_auc_score

    scores, labels = some_scores(seed, n, 1, ties=ties)
    labels[:2, 0] = torch.tensor([True, False])
    found = roc_auc(scores[:, 0], labels[:, 0])
    assert found.value == pytest.approx(roc_auc_score(labels[:, 0], scores[:, 0]))
    assert 0 <= found.low <= found.value <= found.high <= 1 and found.low < found.high


@given(seed=SEEDS, n=st.integers(2, 40), classes=st.integers(2, 5), ties=st.booleans())
@settings(max_examples=50, deadline=None)
def test_mean_areas_equal_scikit_learn(seed: int, n: int, classes: int, ties: bool) -> None:
    from sklearn.metrics import roc_auc_score

    scores, labels = some_scores(seed, n, classes, ties=ties)
    counted = labels.any(dim=0) & ~labels.all(dim=0)
    if counted.any():
        area = roc_auc_macro(scores, labels)
        oracle = roc_auc_score(labels[:, counted], scores[:, counted], average="macro")
        assert area.value == pytest.approx(oracle)
        assert 0 <= area.low <= area.value <= area.high <= 1
    else:
        with pytest.raises(DataError, match="ROC AUC"):
            roc_auc_macro(scores, labels)

    single = torch.arange(n) % classes  # every class has images, if there are enough
    if n < classes:
        return
    probabilities = scores.double().softmax(dim=1)
    truth = single if classes > 2 else (single == 1).long()
    for mode, compute in (("ovr", roc_auc_macro), ("ovo", roc_auc_one_vs_one)):
        given = probabilities if classes > 2 else probabilities[:, 1]
        oracle = roc_auc_score(truth, given, average="macro", multi_class=mode)
        assert compute(probabilities, single).value == pytest.approx(oracle)


@pytest.mark.parametrize("statistic", [roc_auc_macro_statistic, roc_auc_one_vs_one_statistic])
def test_mean_area_of_draws_equals_that_of_copies(statistic: Callable[[Tensor, Tensor], Statistic]) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(60, 4, generator=generator)
    labels = torch.arange(60) % 4
    drawn = np.bincount(torch.randint(60, (60,), generator=generator).numpy(), minlength=60)[None]
    copies = torch.from_numpy(np.repeat(np.arange(60), drawn[0]))
    expected = evaluate_statistic(statistic(scores[copies], labels[copies]), 60)
    assert statistic(scores, labels)(drawn)[0] == pytest.approx(expected)


def test_mean_area_of_a_perfect_model_has_an_interval() -> None:
    labels = torch.arange(30) % 3
    scores = torch.nn.functional.one_hot(labels).double()
    for area in (
        roc_auc_macro(scores, labels),
        roc_auc_macro(scores, scores.bool()),
        roc_auc_one_vs_one(scores, labels),
    ):
        assert area.value == area.high == 1 and 0.7 < area.low < 0.99


def test_roc_auc_of_one_class_is_rejected() -> None:
    for labels in (torch.zeros(4), torch.ones(4)):
        with pytest.raises(DataError, match="both classes"):
            roc_auc(torch.arange(4.0), labels)


def test_roc_auc_interval_covers_true_value_and_has_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intervals, "_RESAMPLES", 300)
    stats = pytest.importorskip("scipy.stats")
    truth = stats.norm.cdf(1 / math.sqrt(2))
    random, labels = np.random.default_rng(0), torch.arange(120) % 3 == 0
    held = 0
    for _ in range(60):
        scores = random.normal(size=120) + labels.numpy()
        found = roc_auc(torch.from_numpy(scores), labels)
        held += found.low <= truth <= found.high
    assert held >= 52  # 57 expected at 95%
    perfect = roc_auc(labels.double(), labels)
    assert perfect.value == perfect.high == 1 and 0.9 < perfect.low < 0.99


def test_nan_scores_never_improve_metrics() -> None:
    labels = torch.tensor([[True], [False], [False]])
    for broken in range(3):
        scores = torch.tensor([[0.9], [0.1], [0.2]])
        scores[broken] = torch.nan
        assert mean_average_precision(scores, labels).value == pytest.approx(0.5 if broken else 1 / 3)
        assert map_11_point(scores, labels).value == pytest.approx(0.5 if broken else 1 / 3)
        assert roc_auc(scores[:, 0], labels[:, 0]).value == (0.5 if broken else 0)


@given(seed=SEEDS, n=st.integers(1, 30), classes=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_class_scores_equal_similarities_or_log_probabilities(seed: int, n: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.nn.functional.normalize(torch.randn(n, 5, generator=generator), dim=1)
    classifier = torch.nn.functional.normalize(torch.randn(5, classes, generator=generator), dim=0)
    plain = class_scores(features, classifier)
    assert torch.allclose(plain, features @ classifier, atol=1e-6)
    scores = class_scores(features, classifier, softmax_scale=20.0)
    expected = torch.softmax(20 * (features.double() @ classifier.double()), dim=1)
    assert torch.allclose(scores.double().exp(), expected, atol=1e-5)


def test_softmax_before_ranking_changes_map() -> None:
    """An image similar to all classes outranks one that is similar to a single class, except after the softmax."""
    scores = torch.tensor([[0.30, 0.30], [0.28, 0.10]])
    labels = torch.tensor([[False, True], [True, False]])
    plain = class_scores(scores, torch.eye(2))
    softmax = class_scores(scores, torch.eye(2), softmax_scale=100.0)
    assert mean_average_precision(plain, labels).value == 0.75
    assert mean_average_precision(softmax, labels).value == 1.0


def test_roc_auc_of_logit_difference_equals_that_of_probability() -> None:
    from sklearn.metrics import roc_auc_score

    generator = torch.Generator().manual_seed(0)
    features, classifier = torch.randn(80, 6, generator=generator), torch.randn(6, 2, generator=generator)
    labels = torch.arange(80) % 2
    scores = class_scores(features, classifier)
    found = roc_auc(scores[:, 1] - scores[:, 0], labels)
    probability = torch.softmax((features @ classifier).double(), dim=1)[:, 1]
    assert found.value == pytest.approx(roc_auc_score(labels, probability))


@given(seed=SEEDS, n=st.integers(1, 40), classes=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_map_equals_clip_benchmark_if_every_class_has_images(seed: int, n: int, classes: int) -> None:
    clip_benchmark = pytest.importorskip("clip_benchmark.metrics.zeroshot_classification")

    scores, labels = some_scores(seed, n, classes, ties=False)
    labels[0] = True
    theirs = clip_benchmark.average_precision_per_class(scores, labels.long())
    assert average_precisions(scores, labels) == pytest.approx(theirs.numpy(), abs=1e-5)
    assert mean_average_precision(scores, labels).value == pytest.approx(theirs.mean().item(), abs=1e-5)


def test_map_differs_from_clip_benchmark_for_empty_classes_and_ties() -> None:
    clip_benchmark = pytest.importorskip("clip_benchmark.metrics.zeroshot_classification")

    scores, labels = torch.tensor([[0.9, 0.1], [0.1, 0.9]]), torch.tensor([[1, 0], [0, 0]])
    assert clip_benchmark.average_precision_per_class(scores, labels).mean() == 0.5
    assert mean_average_precision(scores, labels).value == 1
    same, first = torch.zeros(4, 1), torch.tensor([[1], [0], [0], [0]])
    orders = {clip_benchmark.average_precision_per_class(same, first.roll(i, 0)).item() for i in range(4)}
    assert len(orders) > 1  # depends on the position of the image
    assert {mean_average_precision(same, first.roll(i, 0)).value for i in range(4)} == {0.25}


def test_eleven_point_map_differs_from_plain_map() -> None:
    scores = torch.arange(10.0).flip(0)[:, None]
    labels = torch.tensor([1, 0, 1, 0, 0, 1, 0, 0, 0, 1])[:, None]
    plain, eleven = mean_average_precision(scores, labels), map_11_point(scores, labels)
    assert plain.value == pytest.approx((1 + 2 / 3 + 3 / 6 + 4 / 10) / 4)
    assert eleven.value == pytest.approx((3 * 1 + 3 * 2 / 3 + 2 * 1 / 2 + 3 * 4 / 10) / 11)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no division by zero
        none_of_one = torch.cat([labels, torch.zeros_like(labels)], dim=1)
        assert map_11_point(scores.repeat(1, 2), none_of_one).value == eleven.value
