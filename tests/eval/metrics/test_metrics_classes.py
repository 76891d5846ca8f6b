"""Tests of single-label classification metrics against scikit-learn and plain loops."""

import math
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from eval.metrics import intervals, ranks
from eval.metrics.classes import (
    calibration_bins,
    cohen_kappa_statistic,
    count_confusion,
    count_correct,
    estimate_agreement,
    expected_calibration_error,
    f1_macro,
    f1_macro_statistic,
    f1_weighted,
    f1_weighted_statistic,
    matthews_statistic,
    mean_of_top1_and_top5,
    merge_superclasses,
    shape_bias,
    top_k_accuracy,
    worst_group_accuracy,
)
from eval.metrics.intervals import Estimate, Statistic, evaluate_statistic
from eval.metrics.ranks import class_ranks, top_classes

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_BLOCK", 64)  # so that small inputs need several blocks
    monkeypatch.setattr(intervals, "_RESAMPLES", 50)
    monkeypatch.setattr(intervals, "_DRAWN", 400)


def some_features(seed: int, n: int, classes: int, *, ties: bool) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, 4, generator=generator)
    classifier = torch.randn(4, classes, generator=generator)
    if ties:
        features, classifier = features.sign(), classifier.sign()
    return features, classifier, torch.randint(classes, (n,), generator=generator)


@given(seed=SEEDS, n=st.integers(1, 40), classes=st.integers(1, 30), k=st.integers(1, 7), ties=st.booleans())
@settings(max_examples=60, deadline=None)
def test_top_classes_equal_stable_sort_and_agree_with_ranks(
    seed: int, n: int, classes: int, k: int, ties: bool
) -> None:
    features, classifier, labels = some_features(seed, n, classes, ties=ties)
    top = top_classes(features, classifier, k=k, logit_scale=3.0)
    logits = (features @ classifier).numpy()
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    assert np.array_equal(top.classes.numpy(), order)
    probabilities = torch.softmax(3.0 * torch.from_numpy(logits).double(), 1).numpy()
    assert top.probabilities.numpy() == pytest.approx(np.take_along_axis(probabilities, order, 1), abs=1e-5)
    place = class_ranks(features, classifier, labels)
    assert torch.equal((top.classes == labels[:, None]).any(dim=1), place < k)


def test_nan_gives_no_prediction() -> None:
    features, classifier = torch.eye(3), torch.eye(3)
    classifier[:, 1] = torch.nan
    labels = torch.tensor([0, 1, 2])
    top = top_classes(features, classifier, k=2)
    assert top.classes.tolist() == [[-1, 0], [-1, 0], [-1, 2]]
    assert top.probabilities.isnan().all()
    place = class_ranks(features, classifier, labels)
    assert torch.equal((top.classes == labels[:, None]).any(dim=1), place < 2)
    assert count_confusion(top.classes[:, 0], labels).predicted.tolist() == [-1, -1, -1]
    assert f1_macro(top.classes[:, 0], labels).value == 0


@given(seed=SEEDS, n=st.integers(1, 40), classes=st.integers(1, 12), ties=st.booleans())
@settings(max_examples=50, deadline=None)
def test_accuracies_and_f1_equal_scikit_learn(seed: int, n: int, classes: int, ties: bool) -> None:
    from sklearn.metrics import confusion_matrix, f1_score, recall_score

    features, classifier, labels = some_features(seed, n, classes, ties=ties)
    place = class_ranks(features, classifier, labels)
    predicted = top_classes(features, classifier).classes[:, 0]
    assert top_k_accuracy(place).value == pytest.approx((predicted == labels).double().mean().item())
    both = mean_of_top1_and_top5(place)
    halves = top_k_accuracy(place, 1).value / 2 + top_k_accuracy(place, 5).value / 2
    assert both.value == pytest.approx(halves) and both.low <= both.value <= both.high and both.n == n

    present = labels.unique()
    f1 = f1_macro(predicted, labels)
    oracle = f1_score(labels, predicted, average="macro", labels=present)
    assert f1.value == pytest.approx(oracle)
    assert 0 <= f1.low <= f1.value <= f1.high <= 1

    right, total = count_correct(predicted == labels, labels, classes)
    recalls = recall_score(labels, predicted, average=None, labels=present, zero_division=0)
    assert right[present.numpy()] / total[present.numpy()] == pytest.approx(recalls)
    absent = np.setdiff1d(np.arange(classes), present.numpy())
    assert len(total) == classes and (total[absent] == 0).all()
    assert right.sum() == (predicted == labels).sum() and total.sum() == n
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # warns about a single class
        matrix = confusion_matrix(labels, predicted, labels=np.arange(classes))
    assert np.array_equal(count_confusion(predicted, labels).matrix(classes), matrix)


def test_f1_ignores_classes_without_images_unlike_scikit_learn() -> None:
    from sklearn.metrics import f1_score

    labels, predicted = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 2])
    assert f1_score(labels, predicted, average="macro") == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert f1_macro(predicted, labels).value == pytest.approx((1 + 2 / 3) / 2)


@given(seed=SEEDS, n=st.integers(1, 40), classes=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_agreement_equals_scikit_learn(seed: int, n: int, classes: int) -> None:
    from sklearn.metrics import cohen_kappa_score, f1_score, matthews_corrcoef

    generator = torch.Generator().manual_seed(seed)
    labels, predicted = torch.randint(classes, (2, n), generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of single classes, for which scikit-learn divides by 0
        weighted = f1_score(labels, predicted, average="weighted")
        correlation = matthews_corrcoef(labels, predicted)
        kappas = [
            cohen_kappa_score(labels, predicted, weights=weights, labels=range(classes))
            for weights in (None, "linear", "quadratic")
        ]
    f1 = f1_weighted(predicted, labels)
    assert f1.value == pytest.approx(weighted)
    assert 0 <= f1.low <= f1.value <= f1.high <= 1
    assert evaluate_statistic(matthews_statistic(predicted, labels), n) == pytest.approx(correlation)
    for power, expected in enumerate(kappas):
        agreement = estimate_agreement(
            cohen_kappa_statistic(predicted, labels, power=power), predicted, labels
        )
        if agreement is None:
            assert math.isnan(expected)
        else:
            assert agreement.value == pytest.approx(expected)
            assert -1 <= agreement.low <= agreement.value <= agreement.high <= 1 and agreement.n == n


STATISTICS: dict[str, Callable[[Tensor, Tensor], Statistic]] = {
    "f1_macro": f1_macro_statistic,
    "f1_weighted": f1_weighted_statistic,
    "matthews": matthews_statistic,
    **{f"kappa {power}": partial(cohen_kappa_statistic, power=power) for power in (0, 1, 2)},
}


@pytest.mark.parametrize("name", STATISTICS)
@given(seed=SEEDS, n=st.integers(1, 60))
@settings(max_examples=20, deadline=None)
def test_statistic_of_draws_equals_that_of_copies(name: str, seed: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels, predicted = torch.randint(5, (2, n), generator=generator)
    predicted[torch.rand(n, generator=generator) < 0.1] = -1
    drawn = np.bincount(torch.randint(n, (n,), generator=generator).numpy(), minlength=n)[None]
    copies = torch.from_numpy(np.repeat(np.arange(n), drawn[0]))
    every, some = (STATISTICS[name](predicted[rows], labels[rows]) for rows in (slice(None), copies))
    value = evaluate_statistic(some, n)
    if name in ("kappa 1", "kappa 2") and (predicted == -1).any():
        return  # the farthest class depends on the classes that are there
    assert every(drawn)[0] == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize("name", STATISTICS)
def test_no_prediction_is_worse_than_any(name: str) -> None:
    labels = torch.arange(60) % 5
    predicted = labels.clone()
    predicted[::7] = (labels[::7] + 1) % 5
    values = []
    for wrong in (labels[::11], (labels[::11] + 1) % 5, torch.tensor(-1)):
        predicted[::11] = wrong
        values.append(evaluate_statistic(STATISTICS[name](predicted, labels), 60))
    assert values[0] > values[1] and values[0] > values[2]
    if name in ("kappa 1", "kappa 2"):
        assert values[1] > values[2]


def test_interval_of_disagreement_is_that_of_agreement_mirrored() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (400,), generator=generator)
    predicted = torch.where(torch.rand(400, generator=generator) < 0.75, labels, 1 - labels)
    agree = estimate_agreement(cohen_kappa_statistic(predicted, labels), predicted, labels)
    opposite = estimate_agreement(cohen_kappa_statistic(1 - predicted, labels), 1 - predicted, labels)
    assert agree is not None and opposite is not None
    assert opposite.value < opposite.high < -0.3 and agree.low > 0.3
    assert opposite.value == pytest.approx(-agree.value, abs=0.02)
    assert opposite.low == pytest.approx(-agree.high, abs=0.03)


def test_agreement_on_a_single_class_is_undefined() -> None:
    same = torch.zeros(5, dtype=torch.int64)
    for statistic in (cohen_kappa_statistic(same, same), matthews_statistic(same, same)):
        assert estimate_agreement(statistic, same, same) is None


def test_intervals_of_agreement_cover_the_true_value() -> None:
    """Of 60 samples, at least 50 intervals contain the kappa of the population."""
    generator = torch.Generator().manual_seed(0)
    labels, noise = torch.randint(4, (2, 20_000), generator=generator)
    predicted = torch.where(torch.rand(20_000, generator=generator) < 0.6, labels, noise)
    true = evaluate_statistic(cohen_kappa_statistic(predicted, labels), 20_000)
    covered = 0
    for rows in torch.randperm(20_000, generator=generator)[:6000].view(60, 100):
        some = (predicted[rows], labels[rows])
        agreement = estimate_agreement(cohen_kappa_statistic(*some), *some)
        assert agreement is not None
        covered += agreement.low <= true <= agreement.high
    assert covered >= 50


@given(seed=SEEDS, n=st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_worst_group_equals_plain_loop(seed: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(5, (n,), generator=generator) * 2
    correct = torch.rand(n, generator=generator) < 0.6
    shares = {
        group: (sum(correct[groups == group].tolist()), int((groups == group).sum()))
        for group in sorted(set(groups.tolist()))
    }
    worst = worst_group_accuracy(correct, groups)
    assert worst.value == min(right / total for right, total in shares.values())
    assert (worst.value, worst.n) in [(right / total, total) for right, total in shares.values()]
    assert worst.low <= worst.value <= worst.high


def test_a_tiny_group_can_be_the_worst() -> None:
    groups = torch.tensor([0] * 700 + [1] * 900 + [5] * 4)
    correct = torch.ones(1604, dtype=torch.bool)
    correct[:350] = False
    correct[-4:] = False
    worst = worst_group_accuracy(correct, groups)
    assert (worst.value, worst.n) == (0, 4)


def test_worst_group_interval_covers_true_value() -> None:
    random = np.random.default_rng(0)
    groups = torch.arange(20).repeat_interleave(25)
    held = 0
    for _ in range(100):
        estimate = worst_group_accuracy(torch.from_numpy(random.random(500) < 0.5), groups)
        held += estimate.low <= 0.5 <= estimate.high
    assert held >= 93  # the interval of the worst group alone covers it about 10 times


@given(seed=SEEDS, n=st.integers(1, 50))
@settings(max_examples=30, deadline=None)
def test_superclass_confusion_equals_confusion_of_superclasses(seed: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(9, (n,), generator=generator)
    predicted = torch.randint(-1, 9, (n,), generator=generator)
    family = torch.randint(4, (9,), generator=generator)
    of_families = merge_superclasses(count_confusion(predicted, labels), family)
    expected = count_confusion(torch.where(predicted < 0, -1, family[predicted]), family[labels])
    for one in (of_families, expected):
        assert one.count.sum() == n and (np.diff(one.count) <= 0).all()
    cells = [zip(c.label, c.predicted, c.count, strict=True) for c in (of_families, expected)]
    assert sorted(cells[0]) == sorted(cells[1])
    within = (predicted >= 0) & (family[predicted] == family[labels])
    assert of_families.accuracy().value == pytest.approx(within.double().mean().item())
    mistakes = of_families.mistakes(3)
    assert len(mistakes) <= 3 and all(one != other for one, other, _ in mistakes)


def test_size_of_confusion_is_bounded_by_number_of_images() -> None:
    generator = torch.Generator().manual_seed(0)
    labels, predicted = torch.randint(2**20, (2, 500), generator=generator)
    found = count_confusion(predicted, labels)
    assert len(found.count) <= 500
    with pytest.raises(AssertionError, match="classes"):
        found.matrix(2**20)


@pytest.mark.parametrize(("shift", "least"), [(0.0, 10), (0.03, 20), (0.2, 32)])
def test_calibration_error_interval_covers_true_value(shift: float, least: int) -> None:
    random = torch.Generator().manual_seed(0)

    def drawn(n: int) -> Estimate:
        sure = torch.rand(n, generator=random) * 0.8 + 0.2
        right = torch.rand(n, generator=random) < (sure - shift).clamp(0, 1)
        return expected_calibration_error(sure, right)

    truth = drawn(1_000_000).value
    found = [drawn(300) for _ in range(40)]
    assert all(0 <= one.low <= one.value <= one.high for one in found)
    # of 40; a percentile interval never covers the first: errors of calibrated samples all exceed it
    assert sum(one.low <= truth <= one.high for one in found) >= least


@given(
    confidence=st.lists(
        st.sampled_from([0.0, 0.05, 0.2, 0.21, 0.5, 0.7, 1.0, math.nan]), min_size=1, max_size=40
    ),
    seed=SEEDS,
    bins=st.integers(1, 12),
)
@settings(max_examples=80, deadline=None)
def test_calibration_error_equals_plain_loop(confidence: list[float], seed: int, bins: int) -> None:
    n = len(confidence)
    correct = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.5
    sure = [1.0 if math.isnan(one) else one for one in confidence]
    right = [bool(one) and not math.isnan(own) for one, own in zip(correct.tolist(), confidence, strict=True)]
    members: dict[int, list[int]] = {}
    edges = [one / bins for one in range(1, bins)]
    for i, own in enumerate(sure):
        place = sum(own > edge for edge in edges)
        members.setdefault(place, []).append(i)
    expected = sum(abs(sum(sure[i] - right[i] for i in own)) for own in members.values()) / n
    values = torch.tensor(confidence, dtype=torch.float64)
    found = expected_calibration_error(values, correct, bins=bins)
    assert found.value == pytest.approx(expected, abs=1e-12)
    assert found.low <= found.value <= found.high
    drawn = calibration_bins(values, correct, bins=bins)
    assert drawn.count.tolist() == [len(members[place]) for place in sorted(members)]
    weighted = (drawn.count * np.abs(drawn.confidence - drawn.accuracy)).sum() / n
    assert weighted == pytest.approx(expected, abs=1e-12)
    assert (drawn.low <= drawn.confidence + 1e-12).all() and (drawn.confidence <= drawn.high + 1e-12).all()


def test_calibration_bins_equal_scikit_learn() -> None:
    from sklearn.calibration import calibration_curve

    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(500, generator=generator, dtype=torch.float64)
    correct = torch.rand(500, generator=generator) < confidence
    found = calibration_bins(confidence, correct, bins=10)
    accuracy, mean = calibration_curve(correct, confidence, n_bins=10)
    assert found.accuracy == pytest.approx(accuracy) and found.confidence == pytest.approx(mean)


def test_intervals_of_a_perfect_model_have_width() -> None:
    labels = torch.arange(3).repeat_interleave(5)
    for one in (
        f1_macro(labels, labels),
        f1_weighted(labels, labels),
        estimate_agreement(matthews_statistic(labels, labels), labels, labels),
        estimate_agreement(cohen_kappa_statistic(labels, labels, power=2), labels, labels),
        top_k_accuracy(torch.zeros(15)),
        mean_of_top1_and_top5(torch.zeros(15)),
        worst_group_accuracy(labels == labels, labels),
    ):
        assert one is not None and one.value == one.high == 1 and one.low < 0.9


def test_interval_does_not_depend_on_block_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    labels, predicted = torch.randint(4, (2, 60), generator=generator)
    first = f1_macro(predicted, labels)
    assert f1_macro(predicted, labels) == first
    monkeypatch.setattr(intervals, "_DRAWN", 1 << 20)
    assert f1_macro(predicted, labels) == first
    monkeypatch.setattr(intervals, "_MOST_DRAWN", 1)  # the fewest resamples, as for a large dataset
    assert f1_macro(predicted, labels) == first


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_shape_bias_equals_plain_loop(rows: list[tuple[int, int, int]]) -> None:
    counted = [
        predicted == shape
        for predicted, shape, texture in rows
        if shape != texture and predicted in (shape, texture)
    ]
    found = shape_bias(*torch.tensor(rows).unbind(dim=1))
    assert (found is None) == (not counted)
    if found is not None:
        assert found.value == pytest.approx(sum(counted) / len(counted))
        assert found.n == len(counted)
