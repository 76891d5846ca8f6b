"""Tests of few-shot: draws, ridge regression against scikit-learn, Student's interval, and scores."""

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from clipkit import CLIP
from clipkit.errors import DataError
from eval.results.records import Score
from eval.tasks import Options
from eval.tasks.probe import draw_shots, few_shot, interval_over_seeds, ridge_classifier, shuffle_classes
from tests.eval.conftest import subject_of

WriteDataset = Callable[..., Path]


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_draws_are_nested_and_independent_of_other_classes(sizes: list[int], seed: int) -> None:
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    shuffled = shuffle_classes(labels, len(sizes), revision="r", seed=seed)
    draws = [set(draw_shots(shuffled, k).tolist()) for k in (1, 2, 4, 8)]
    for k, fewer, more in zip((1, 2, 4), draws, draws[1:], strict=False):
        assert fewer <= more
        assert torch.equal(
            torch.bincount(labels[list(fewer)], minlength=len(sizes)), torch.tensor(sizes).clamp(max=k)
        )
    first = shuffle_classes(labels[: sizes[0]], 1, revision="r", seed=seed)
    assert torch.equal(first[0], shuffled[0])


def test_draws_differ_by_seed_and_revision() -> None:
    labels = torch.zeros(64, dtype=torch.int64)
    draws = [
        tuple(shuffle_classes(labels, 1, revision=revision, seed=seed)[0].tolist())
        for revision in ("a", "b")
        for seed in range(3)
    ]
    assert len(set(draws)) == 6


@given(n=st.integers(2, 40), width=st.integers(1, 30), penalty=st.floats(1e-2, 1e4), seed=st.integers(0, 999))
def test_ridge_scores_equal_scikit_learn(n: int, width: int, penalty: float, seed: int) -> None:
    """With fewer and with more rows than features."""
    from sklearn.linear_model import Ridge

    g = torch.Generator().manual_seed(seed)
    features, labels = torch.randn(n, width, generator=g) * 3 + 1, torch.randint(3, (n,), generator=g)
    new = torch.randn(5, width, generator=g)
    scores = torch.nn.functional.pad(new, (0, 1), value=1.0) @ ridge_classifier(
        features, labels, 3, penalty=penalty
    )
    mean, deviation = features.double().mean(0), features.double().std(0, correction=0) + 1e-5

    def scaled(one: Tensor) -> Tensor:
        return torch.nn.functional.pad((one.double() - mean) / deviation, (0, 1), value=100.0)

    model = Ridge(alpha=penalty, fit_intercept=False, solver="svd")
    model.fit(scaled(features).numpy(), (2 * torch.nn.functional.one_hot(labels, 3) - 1).double().numpy())
    expected = torch.from_numpy(model.predict(scaled(new).numpy()))
    torch.testing.assert_close(scores.double(), expected, rtol=1e-3, atol=1e-3)


def test_interval_over_seeds_equals_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")

    assert interval_over_seeds([0.5]) is None
    for n in (2, 3, 4, 11, 12, 40):
        values = [0.5 + 0.001 * (i % 3) for i in range(n)]
        low, high = stats.t.interval(0.95, n - 1, statistics.fmean(values), stats.sem(values))
        assert interval_over_seeds(values) == pytest.approx((low, high), abs=1e-6)
    assert interval_over_seeds([0.0, 1.0]) == (0.0, 1.0)
    low, high = interval_over_seeds([-0.10, -0.11, -0.12], lowest=-1.0) or (0, 0)
    assert low < -0.11 < high < 0
    assert interval_over_seeds([-1.0, 1.0], lowest=-1.0) == (-1.0, 1.0)


def test_metrics_that_are_undefined_for_some_draws_are_left_out(
    model: CLIP, write_dataset: WriteDataset, caplog: pytest.LogCaptureFixture
) -> None:
    """Cohen's kappa is undefined for draws in which the only test image is right."""
    folders = {"test": [0], "train": LABELS}
    subject = subject_of(model, write_dataset, folders, metrics=("acc1", "cohen_kappa"))
    options = Options(shots=(1,), seeds=tuple(range(12)), estimators=("ridge",))
    scores = by_key(few_shot(subject, options).scores)
    assert 0 < scores["1-shot", "acc1"].value < 1
    assert ("1-shot", "cohen_kappa") not in scores
    assert "cohen_kappa of 1-shot is undefined for some draws and left out" in caplog.text


LABELS = [i % 4 for i in range(24)]


def by_key(scores: list[Score]) -> dict[tuple[str, str], Score]:
    return {(score.setting, score.metric): score for score in scores}


def test_few_shot_scores_of_dataset(
    model: CLIP, write_dataset: WriteDataset, caplog: pytest.LogCaptureFixture
) -> None:
    subject = subject_of(model, write_dataset, {"test": LABELS[:21], "train": LABELS})
    found = few_shot(subject, Options()).scores
    scores = by_key(found)
    assert [key[0] for key in scores if key[1] == "acc1"] == [
        f"{k}-shot{kind}" for kind in ("", " logistic") for k in (1, 2, 4)
    ]
    assert "skipping 8, 16-shot, class 'red' has 6 images to learn from" in caplog.text
    # computed again: draws, classifiers, mean and deviation
    train, test = subject.images("train").before_projection, subject.images().before_projection
    labels, values = torch.tensor(LABELS), []
    dataset = subject.split("train")
    assert dataset is not None
    for seed in range(3):
        chosen = draw_shots(shuffle_classes(labels, 7, revision=dataset.revision, seed=seed), 4)
        assert torch.bincount(labels[chosen]).tolist() == [4] * 4
        classifier = ridge_classifier(train[chosen], labels[chosen], 7)
        predicted = (torch.nn.functional.pad(test, (0, 1), value=1.0) @ classifier).argmax(dim=1)
        values.append(float((predicted == labels[:21]).double().mean()))
    score, deviation = scores["4-shot", "acc1"], scores["4-shot", "acc1_std"]
    assert score.value == pytest.approx(statistics.fmean(values))
    assert (score.low, score.high) == interval_over_seeds(values)
    assert deviation.value == pytest.approx(statistics.stdev(values)) and deviation.n == 3
    assert (deviation.low, deviation.high, deviation.chance) == (None, None, None)
    assert (score.n, score.task, score.chance, score.prompt_set) == (21, "few-shot", 1 / 7, "")
    # test images are training images, so more shots give a higher accuracy
    assert scores["4-shot logistic", "acc1"].value > scores["1-shot logistic", "acc1"].value
    assert few_shot(subject, Options()).scores == found


def test_setting_says_that_c_is_tuned_on_val(model: CLIP, write_dataset: WriteDataset) -> None:
    splits = {"test": LABELS, "train": LABELS, "val": LABELS}
    options = Options(shots=(1,), seeds=(7,), estimators=("logistic",), tuned=True)
    scores = by_key(few_shot(subject_of(model, write_dataset, splits), options).scores)
    score = scores["1-shot logistic tuned on val", "acc1"]
    assert score.low is None and scores["1-shot logistic tuned on val", "acc1_std"].value == 0.0


def test_impossible_draws_are_rejected(model: CLIP, write_dataset: WriteDataset) -> None:
    subject = subject_of(model, write_dataset, {"test": LABELS, "train": LABELS})
    with pytest.raises(DataError, match="class 'red' has 6 images to learn from; use at most 6"):
        few_shot(subject, Options(shots=(8, 16)))
    with pytest.raises(DataError, match="no val split, which the choice of C learns from"):
        few_shot(subject, Options(shots=(1,), tuned=True))
    with pytest.raises(DataError, match="two or more classes"):
        few_shot(subject_of(model, write_dataset, {"test": [1] * 4, "train": [1] * 4}), Options())
