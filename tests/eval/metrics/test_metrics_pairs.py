"""Tests of retrieval and compositional metrics and comparisons against SciPy, scikit-learn and others."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from clipkit.inference import wilson_interval
from eval.metrics import intervals, ranks
from eval.metrics.classes import (
    mean_of_top1_and_top5,
    mean_per_class_recall,
    roc_auc_statistic,
    top_k_accuracy,
)
from eval.metrics.intervals import (
    compare_correct,
    compare_means,
    compare_statistics,
    estimate_mean,
    mcnemar,
)
from eval.metrics.pairs import (
    jaccard_index,
    mean_rank,
    median_rank,
    pairwise_correct,
    recall_at_k,
    score_winoground,
)
from eval.metrics.ranks import class_ranks, match_ranks

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_BLOCK", 64)  # so that small inputs need several blocks
    monkeypatch.setattr(intervals, "_RESAMPLES", 50)
    monkeypatch.setattr(intervals, "_RESAMPLES", 400)


@given(
    places=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3)), min_size=1, max_size=40),
    weighted=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_statistics_of_ranks_equal_numpy(places: list[tuple[int, int]], weighted: bool) -> None:
    rank = torch.tensor([place for place, _ in places])
    weight = torch.tensor([copies for _, copies in places]) if weighted else None
    whole = rank if weight is None else rank.repeat_interleave(weight)
    for k in (1, 5, 10):
        found = recall_at_k(rank, k, weight)
        assert found.value == (whole < k).double().mean() and found.n == len(whole)
    for one, value in (
        (mean_rank(rank, weight), np.mean(whole.numpy() + 1)),
        (median_rank(rank, weight), np.median(whole.numpy() + 1)),
    ):
        assert one.value == pytest.approx(value) and one.n == len(whole)
        assert 1 <= one.low <= one.value <= one.high


def test_recall_interval_of_clustered_captions_is_that_of_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intervals, "_RESAMPLES", 1000)
    of_images = torch.arange(200) % 4 * 3  # a quarter has rank 0
    place, image = of_images.repeat_interleave(5), torch.arange(200).repeat_interleave(5)
    alone, together = recall_at_k(place, 1), recall_at_k(place, 1, cluster=image)
    of_few = recall_at_k(of_images, 1)
    assert together.value == alone.value == of_few.value == 0.25 and together.n == alone.n == 1000
    assert (together.low, together.high) == pytest.approx((of_few.low, of_few.high), abs=0.01)
    assert together.high - together.low > 2 * (alone.high - alone.low)
    weighted = recall_at_k(of_images, 1, torch.full((200,), 5), cluster=torch.arange(200))
    assert weighted == together
    for k in (1, 20):
        found = recall_at_k(place.clamp(min=1), k, cluster=image)
        assert (found.low, found.high) == pytest.approx(wilson_interval(200 * (k == 20), 200))


def test_median_rank_interval_is_binomial() -> None:
    stats = pytest.importorskip("scipy.stats")
    for n in (1, 2, 5, 6, 7, 25, 100, 5000):
        found = median_rank(torch.arange(n))
        left_off = int(found.low) - 1
        assert found.high == n - left_off
        if left_off:
            assert stats.binom.cdf(left_off - 1, n, 0.5) <= 0.025
        assert stats.binom.cdf(left_off, n, 0.5) > 0.025


@given(seed=SEEDS, ties=st.booleans(), broken=st.booleans())
@settings(max_examples=60, deadline=None)
def test_winoground_equals_paper_definition(seed: int, ties: bool, broken: bool) -> None:
    similarity = torch.randn(12, 2, 2, generator=torch.Generator().manual_seed(seed))
    similarity = similarity.round() if ties else similarity
    if broken:
        similarity[0, 0, 1] = torch.nan
    text, image = [], []
    for (a, b), (c, d) in similarity.tolist():  # one row per image
        text.append(a > b and d > c)
        image.append(a > c and d > b)
    found = score_winoground(similarity)
    assert found.text.value == pytest.approx(np.mean(text))
    assert found.image.value == pytest.approx(np.mean(image))
    assert found.group.value == pytest.approx(np.mean(np.logical_and(text, image)))
    assert not (broken and (text[0] or image[0]))


def test_ties_and_nan_are_wrong() -> None:
    assert score_winoground(torch.zeros(3, 2, 2)).group.value == 0
    assert not pairwise_correct(torch.ones(4), torch.ones(4, 1)).any()
    right = torch.tensor([1.0, 1.0, torch.nan, 1.0])
    wrong = torch.tensor([[0.0, 0.5], [0.0, 1.0], [0.0, 0.0], [torch.nan, 0.0]])
    assert pairwise_correct(right, wrong).tolist() == [True, False, False, False]


@given(
    seed=SEEDS,
    cases=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=8),
    ties=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_jaccard_equals_scikit_learn(seed: int, cases: list[tuple[int, int]], ties: bool) -> None:
    from sklearn.metrics import jaccard_score

    generator = torch.Generator().manual_seed(seed)
    case = torch.cat([torch.full((a + b,), 3 * i) for i, (a, b) in enumerate(cases)])
    right = torch.cat([torch.arange(a + b) < a for a, b in cases])
    similarity = torch.randn(len(case), generator=generator)
    similarity = similarity.round() if ties else similarity
    expected = []
    for i, (picks, _) in enumerate(cases):
        own, score = right[case == 3 * i].tolist(), similarity[case == 3 * i].tolist()
        order = sorted(range(len(own)), key=lambda one: (-score[one], own[one]))[:picks]
        expected.append(jaccard_score(own, [one in order for one in range(len(own))]))
    mixed = torch.randperm(len(case), generator=generator)
    assert jaccard_index(similarity, right, case) == pytest.approx(expected)
    assert jaccard_index(similarity[mixed], right[mixed], case[mixed]) == pytest.approx(expected)
    found = estimate_mean(torch.tensor(expected, dtype=torch.float64))
    assert found.value == pytest.approx(np.mean(expected)) and found.n == len(cases)
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_nan_never_improves_jaccard() -> None:
    right, case = torch.tensor([True, False, False]), torch.zeros(3, dtype=torch.int64)
    for broken, expected in ((0, 0), (1, 0), (None, 1)):
        similarity = torch.tensor([0.9, 0.1, 0.2])
        if broken is not None:
            similarity[broken] = torch.nan
        assert jaccard_index(similarity, right, case).tolist() == [expected]


@given(st.integers(0, 400), st.integers(0, 400))
def test_mcnemar_equals_scipy_binomial_test(first: int, second: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
    assert mcnemar(first, second) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_of_large_counts() -> None:
    assert mcnemar(500_000, 500_000) == 1
    assert mcnemar(0, 100_000) == 0
    assert 0.04 < mcnemar(49_690, 50_310) < 0.06


@given(seed=SEEDS, n=st.integers(1, 80))
@settings(max_examples=40, deadline=None)
def test_compare_correct_is_antisymmetric(seed: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.rand(2, n, generator=generator) < 0.6
    one, other = compare_correct(first, second), compare_correct(second, first)
    assert one.difference == pytest.approx(second.double().mean() - first.double().mean())
    assert one.low <= one.difference <= one.high and 0 < one.p <= 1 and one.n == n
    assert (other.low, other.high) == pytest.approx((-one.high, -one.low))
    assert (other.difference, other.p) == pytest.approx((-one.difference, one.p))


def test_only_real_differences_are_beyond_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "_RESAMPLES", 1000)
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 3
    hard = torch.rand(600, generator=generator)
    scores = torch.randn(600, generator=generator) + (labels == 1)
    for gain, beyond in ((0.0, False), (0.08, True)):
        first = hard < 0.6
        second = (hard < 0.57 + gain) | (torch.rand(600, generator=generator) < 0.05)
        found = compare_correct(first, second), compare_means(first, second)
        for one in found:
            assert (one.p < 0.05) == beyond == (one.low > 0)
            assert one.low <= one.difference <= one.high
        assert found[1].difference == pytest.approx(found[0].difference)
        less, more = (roc_auc_statistic(scores + gain * 20 * i * (labels == 1), labels == 1) for i in (0, 1))
        assert (compare_statistics(less, more, 600).p < 0.05) == beyond
    same = compare_correct(first, first)
    assert same.p == 1 and same.low < 0 < same.high
    assert compare_means(first, first).p == 1


@given(st.integers(1, 40), st.floats(0, 0.5), st.floats(0, 0.5))
def test_interval_of_equal_differences_has_a_width(count: int, value: float, difference: float) -> None:
    first = torch.full((count,), value)
    found = compare_means(first, first + difference)
    same = compare_correct(first > 2, first > 2)
    assert found.high - found.difference == pytest.approx(min(same.high, 1 - found.difference))
    assert found.low < found.difference < found.high


def test_equal_distributions_are_rarely_beyond_chance() -> None:
    random = np.random.default_rng(0)
    found = 0
    for _ in range(100):
        first, second = torch.from_numpy(random.random((2, 200)))
        found += compare_means(first, second).p < 0.05
    assert found <= 12  # 5 expected


class Identity:
    """A model for CLIP_benchmark's functions that returns its inputs as features."""

    def encode_image(self, images: Tensor) -> Tensor:
        return images.flatten(1)

    def encode_text(self, texts: Tensor) -> Tensor:
        return texts


@given(seed=SEEDS, captions=st.lists(st.integers(1, 4), min_size=10, max_size=16))
@settings(max_examples=15, deadline=None)
def test_recall_equals_clip_benchmark(seed: int, captions: list[int]) -> None:
    theirs_of = pytest.importorskip("clip_benchmark.metrics.zeroshot_retrieval")

    generator = torch.Generator().manual_seed(seed)
    owner = torch.arange(len(captions)).repeat_interleave(torch.tensor(captions))
    images = torch.randn(len(captions), 6, generator=generator)
    texts = torch.randn(len(owner), 6, generator=generator)
    scores = texts @ images.T
    positive = torch.zeros_like(scores, dtype=torch.bool)
    positive[torch.arange(len(owner)), owner] = True
    to_text = torch.stack([owner, torch.arange(len(owner))], dim=1)
    for queries, candidates, pairs, own, right in (
        (texts, images, to_text.flip(1), scores, positive),
        (images, texts, to_text, scores.T, positive.T),
    ):
        place = match_ranks(queries, candidates, pairs)
        for k in (1, 5, 10):
            theirs = theirs_of.batchify(theirs_of.recall_at_k, own, right, 4, "cpu", k=k) > 0
            assert recall_at_k(place, k).value == pytest.approx(theirs.double().mean().item())


def test_zero_shot_metrics_equal_clip_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    zeroshot_classification = pytest.importorskip("clip_benchmark.metrics.zeroshot_classification")
    from sklearn.metrics import balanced_accuracy_score

    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(90, 8, generator=generator), torch.randint(9, (90,), generator=generator)
    classifier = torch.nn.functional.normalize(torch.randn(8, 9, generator=generator), dim=0)
    batches = list(zip(images.split(40), labels.split(40), strict=True))
    # CLIP_benchmark calls float() on arrays of one element, which NumPy 2.4 rejects
    monkeypatch.setattr(zeroshot_classification, "float", lambda one: one.item(), raising=False)
    logits, target = zeroshot_classification.run_classification(
        Identity(), classifier, batches, "cpu", amp=False
    )
    acc1, acc5 = zeroshot_classification.accuracy(logits, target, topk=(1, 5))
    features = torch.nn.functional.normalize(images, dim=1)
    place = class_ranks(features, classifier, labels)
    assert top_k_accuracy(place, 1).value == pytest.approx(acc1)
    assert top_k_accuracy(place, 5).value == pytest.approx(acc5)
    assert mean_of_top1_and_top5(place).value == pytest.approx((acc1 + acc5) / 2)
    theirs = balanced_accuracy_score(target, logits.argmax(1))
    assert mean_per_class_recall(place < 1, labels) == pytest.approx(theirs)


def test_caption_choice_equals_clip_benchmark_except_ties() -> None:
    selection = pytest.importorskip("clip_benchmark.metrics.image_caption_selection")

    def theirs(images: Tensor, captions: Tensor) -> dict[str, float]:
        batch = (images[:, :, None, None], [list(own) for own in captions])  # (N, I, 1, 1, D)
        found: dict[str, float] = selection.evaluate(Identity(), [batch], torch.stack, "cpu", amp=False)
        return found

    generator = torch.Generator().manual_seed(0)
    unit = torch.nn.functional.normalize(torch.randn(2, 50, 2, 8, generator=generator), dim=-1)
    images, captions = unit[0], unit[1]
    similarity = images @ captions.transpose(1, 2)
    found, other = score_winoground(similarity), theirs(images, captions)
    assert found.text.value == pytest.approx(other["text_acc"])
    assert found.image.value == pytest.approx(other["image_acc"])
    assert found.group.value == pytest.approx(other["acc"])
    one_image = theirs(images[:, :1], captions)
    pairs = pairwise_correct(similarity[:, 0, 0], similarity[:, 0, 1:])
    assert pairs.double().mean().item() == pytest.approx(one_image["text_acc"])
    assert one_image["image_acc"] == 1  # one image against itself

    captions[:, 1] = captions[:, 0]  # both captions have the same features
    similarity = images @ captions.transpose(1, 2)
    assert theirs(images[:, :1], captions)["text_acc"] == 1
    assert not pairwise_correct(similarity[:, 0, 0], similarity[:, 0, 1:]).any()


def test_ties_in_retrieval_are_wrong_unlike_in_clip_benchmark() -> None:
    theirs = pytest.importorskip("clip_benchmark.metrics.zeroshot_retrieval")

    same = torch.ones(4, 3)
    found = theirs.recall_at_k(same @ same.T, torch.eye(4, dtype=torch.bool), 1)
    assert found.sum() == 1  # all features are the same
    own = torch.arange(4)
    place = match_ranks(same, same, torch.stack([own, own], dim=1))
    assert recall_at_k(place, 1).value == 0 and median_rank(place).value == 4
    assert math.isclose(mean_rank(place).value, 4)


# distances of four images (rows) and eight texts, two per image, and recalls at 1, 5 and 10, of
# google-research/big_vision at 0127fb6, evaluators/proj/image_text/image_text_retrieval_test.py
NEAR = (
    (0.0, 0.0, 0.1, 0.5, 0.1, 0.2, 0.5, 0.1),
    (0.5, 0.4, 0.0, 0.0, 0.4, 0.2, 0.6, 0.4),
    (0.5, 0.4, 0.1, 0.5, 0.0, 0.0, 0.8, 0.3),
    (0.5, 0.4, 0.1, 0.5, 0.3, 0.2, 0.0, 0.0),
)
MIXED = (
    (0.8, 0.8, 0.1, 0.5, 0.1, 0.2, 0.5, 0.1),
    (0.5, 0.4, 0.0, 0.0, 0.4, 0.2, 0.6, 0.4),
    (0.5, 0.4, 0.1, 0.5, 0.0, 0.8, 0.8, 0.3),
    (0.5, 0.4, 0.1, 0.5, 0.4, 0.2, 0.3, 0.3),
)
NEAR_FIRST = ((0.8, 0.8, 0.1, 0.5, 0.1, 0.2, 0.1, 0.1), *MIXED[1:])


@pytest.mark.parametrize(
    ("distances", "to_text", "recalls"),
    [
        (NEAR, True, (1.0, 1.0, 1.0)),
        (MIXED, True, (0.5, 0.75, 1.0)),
        (NEAR, False, (1.0, 1.0, 1.0)),
        (NEAR_FIRST, False, (0.375, 1.0, 1.0)),
    ],
)
def test_retrieval_of_big_vision(
    distances: tuple[tuple[float, ...], ...], to_text: bool, recalls: tuple[float, float, float]
) -> None:
    similarity = -torch.tensor(distances)
    texts = torch.arange(8)
    pairs = torch.stack([texts // 2, texts] if to_text else [texts, texts // 2], dim=1)
    queries = similarity if to_text else similarity.T
    rank = match_ranks(queries, torch.eye(queries.shape[1]), pairs)
    assert tuple(recall_at_k(rank, k).value for k in (1, 5, 10)) == recalls
