"""Tests of ranks, top-k accuracy, recall and intervals against scikit-learn, SciPy or plain loops."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from clipkit.inference import wilson_interval
from eval import metrics
from eval.metrics import ranks
from eval.metrics.classes import mean_per_class_interval, mean_per_class_recall
from eval.metrics.pairs import chance_of_recall
from eval.metrics.ranks import class_ranks, match_ranks

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_BLOCK", 64)  # so that small inputs need several blocks


def test_exported_metrics_have_docstrings() -> None:
    assert len(set(metrics.__all__)) == len(metrics.__all__)
    for name in set(metrics.__all__) - {"Statistic", "Kind", "METRICS", "DIRECTIONS"}:  # types and constants
        assert getattr(metrics, name).__doc__


def unit_rows(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(rows, columns, generator=generator), dim=1)


@given(seed=SEEDS, n=st.integers(1, 60), classes=st.integers(3, 30))
@settings(max_examples=60, deadline=None)
def test_top_k_and_per_class_recall_equal_scikit_learn(seed: int, n: int, classes: int) -> None:
    from sklearn.metrics import balanced_accuracy_score, recall_score, top_k_accuracy_score

    generator = torch.Generator().manual_seed(seed)
    features, classifier = unit_rows(n, 8, generator), unit_rows(classes, 8, generator).T
    labels = torch.randint(classes, (n,), generator=generator)
    logits = features @ classifier
    ranks = class_ranks(features, classifier, labels)
    for k in (1, 2, classes - 1):
        expected = top_k_accuracy_score(labels, logits, k=k, labels=np.arange(classes))
        assert (ranks < k).double().mean().item() == pytest.approx(expected)
    recall = mean_per_class_recall(ranks < 1, labels)
    predicted = logits.argmax(1)
    assert recall == pytest.approx(
        recall_score(labels, predicted, average="macro", labels=labels.unique(), zero_division=0)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # warns about predicted classes without images
        assert recall == pytest.approx(balanced_accuracy_score(labels, predicted))


@given(seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_tied_classes_are_ordered_as_in_argmax(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randint(0, 2, (20, 3), generator=generator).float()
    classifier = torch.randint(0, 2, (3, 6), generator=generator).float()
    labels = torch.randint(6, (20,), generator=generator)
    correct = class_ranks(features, classifier, labels) < 1
    predicted = np.argmax((features @ classifier).numpy(), axis=1)
    assert correct.tolist() == (predicted == labels.numpy()).tolist()


def recalls_by_loop(
    scores: np.ndarray[tuple[int, int], np.dtype[np.float64]], right: list[set[int]], k: int
) -> list[bool]:
    """Return whether a right candidate is among the first k; ties put wrong ones first."""
    found = []
    for row, own in zip(scores, right, strict=True):
        order = sorted(range(len(row)), key=lambda candidate: (-row[candidate], candidate in own))
        found.append(any(candidate in own for candidate in order[:k]))
    return found


@given(
    seed=SEEDS,
    right=st.lists(st.sets(st.integers(0, 11), min_size=1, max_size=5), min_size=1, max_size=25),
    ties=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_match_ranks_equal_plain_sort(seed: int, right: list[set[int]], ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries, candidates = unit_rows(len(right), 4, generator), unit_rows(12, 4, generator)
    if ties:
        queries, candidates = queries.sign(), candidates.sign()
    pairs = torch.tensor([(i, one) for i, own in enumerate(right) for one in sorted(own)])
    ranks = match_ranks(queries, candidates, pairs)
    scores = (queries @ candidates.T).double().numpy()
    for k in (1, 3, 12):
        assert (ranks < k).tolist() == recalls_by_loop(scores, right, k)


@given(seed=SEEDS, copies=st.lists(st.integers(1, 4), min_size=6, max_size=6))
@settings(max_examples=50, deadline=None)
def test_counted_candidates_equal_repeated_candidates(seed: int, copies: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries, candidates = unit_rows(9, 4, generator), unit_rows(6, 4, generator)
    own = torch.randint(6, (9,), generator=generator).tolist()
    counted = match_ranks(queries, candidates, torch.tensor(list(enumerate(own))), torch.tensor(copies))
    number = torch.repeat_interleave(torch.arange(6), torch.tensor(copies))
    pairs = [(i, j) for i, one in enumerate(own) for j, copy in enumerate(number.tolist()) if copy == one]
    assert counted.tolist() == match_ranks(queries, candidates[number], torch.tensor(pairs)).tolist()


def test_nan_features_are_never_right() -> None:
    broken, labels = torch.full((4, 3), torch.nan), torch.arange(4)
    assert (class_ranks(broken, torch.eye(3, 4), labels) >= 3).all()
    pairs = torch.stack([labels, labels], dim=1)
    assert (match_ranks(broken, torch.eye(4, 3), pairs) == 3).all()
    half = torch.eye(4)
    half[1] = torch.nan  # a NaN candidate ranks before every right one
    assert match_ranks(torch.eye(4), half, pairs).tolist() == [1, 3, 1, 1]


def test_ties_rank_matches_last_and_classes_by_index() -> None:
    same, own = torch.ones(6, 4), torch.arange(6)
    assert (match_ranks(same, same, torch.stack([own, own], dim=1)) == 5).all()
    assert (class_ranks(same, torch.ones(4, 6), own) == own).all()


def test_products_are_float32_under_autocast_and_medium_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    features, classifier = unit_rows(200, 64, generator), unit_rows(50, 64, generator).T
    labels = torch.randint(50, (200,), generator=generator)
    plain = class_ranks(features, classifier, labels)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(class_ranks(features, classifier, labels), plain)
            pairs = torch.stack([torch.arange(200), labels], dim=1)
            assert torch.equal(match_ranks(features, classifier.T, pairs) == 0, plain == 0)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@given(n=st.integers(1, 10_000), share=st.floats(0, 1))
def test_wilson_interval_contains_fraction_and_is_symmetric(n: int, share: float) -> None:
    hits = round(share * n)
    low, high = wilson_interval(hits, n)
    assert 0 <= low <= hits / n <= high <= 1
    mirrored = wilson_interval(n - hits, n)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-12)


def test_wilson_interval_equals_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for hits, n in ((0, 5), (1, 5), (3, 10), (500, 1797), (1797, 1797)):
        expected = stats.binomtest(hits, n).proportion_ci(method="wilson")
        assert wilson_interval(hits, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_mean_per_class_interval() -> None:
    labels = torch.arange(10).repeat_interleave(50)
    correct = torch.arange(500) % 4 == 0
    low, high = mean_per_class_interval(correct, labels)
    value = mean_per_class_recall(correct, labels)
    assert low < value < high
    # equal classes: the mean per class is the accuracy, so the interval is nearly that of a proportion
    assert (low, high) == pytest.approx(wilson_interval(int(correct.sum()), 500), abs=0.01)
    assert mean_per_class_interval(correct, labels) == (low, high)
    assert mean_per_class_interval(correct & False, labels) == pytest.approx(wilson_interval(0, 500))
    low, high = mean_per_class_interval(labels == 3, labels)  # a model that always predicts one class
    assert low < 0.08 and high > 0.12


def test_mean_per_class_interval_covers_true_value() -> None:
    random = np.random.default_rng(0)
    for sizes, truth in (
        (np.full(10, 100), random.uniform(0.2, 0.95, 10)),
        (np.full(50, 1), np.full(50, 0.3)),
        (np.r_[np.full(10, 200), np.full(4, 8)], np.r_[np.full(10, 0.99), np.full(4, 0.5)]),
    ):
        labels = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
        held = 0
        for _ in range(60):
            correct = torch.from_numpy(random.random(len(labels)) < np.repeat(truth, sizes))
            low, high = mean_per_class_interval(correct, labels)
            held += low <= truth.mean() <= high
        assert held >= 51  # 57 expected at 95%


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_chance_of_recall_is_hypergeometric(candidates: int, right: int, k: int) -> None:
    right, k = min(right, candidates), min(k, candidates)
    expected = 1 - math.comb(candidates - right, k) / math.comb(candidates, k)
    assert chance_of_recall(torch.tensor([right]), candidates, k).item() == pytest.approx(expected)
