"""Tests of linear probes: logistic regression against scikit-learn, the search for C, and scores."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import eval as evaluation
from clipkit import CLIP
from clipkit.errors import ConfigError, DataError
from eval import Subject
from eval.metrics.classes import map_11_point
from eval.tasks import Options, logistic
from eval.tasks.logistic import LogisticFit, LogisticProblem, Rows
from eval.tasks.probe import (
    carve_validation,
    get_penalty,
    halving_search,
    learn_and_tune,
    linear_probe,
    linear_probes,
    sweep_penalties,
)
from tests.eval.conftest import subject_of

WriteDataset = Callable[..., Path]


def made_up(n: int, width: int, classes: int, *, apart: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Make features around one center per class, with unequal variances and a nonzero mean."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.arange(classes), torch.randint(classes, (n - classes,), generator=g)])
    scale = torch.logspace(0, -1, width)
    centres = apart * torch.randn(classes, width, generator=g)
    return (centres[labels] + torch.randn(n, width, generator=g)) * scale + 2, labels


def theirs(features: Tensor, labels: Tensor, C: float) -> tuple[Tensor, Tensor]:
    """Return scikit-learn's weights and biases by Newton's method, which converges to machine precision."""
    from sklearn.linear_model import LogisticRegression

    # it computes in the dtype of the features, and biases are more precise for centered features
    mean = features.double().mean(dim=0)
    model = LogisticRegression(C=C, solver="newton-cholesky", tol=1e-11, max_iter=1000)
    model.fit((features.double() - mean).numpy(), labels.numpy())
    weight, bias = torch.from_numpy(model.coef_), torch.from_numpy(model.intercept_)
    return weight, bias - weight @ mean


def logits(fit: LogisticFit, features: Tensor) -> Tensor:
    return features.double() @ fit.weight.T + fit.bias


@settings(max_examples=15, deadline=None)
@given(
    width=st.integers(1, 8),
    classes=st.integers(2, 5),
    exponent=st.floats(-6, 6),
    seed=st.integers(0, 999),
)
def test_weights_equal_scikit_learn(width: int, classes: int, exponent: float, seed: int) -> None:
    features, labels = made_up(40 * classes, width, classes, apart=0.3, seed=seed)  # classes overlap
    C = 10**exponent
    fit = LogisticProblem(Rows(features), labels, classes).fit(C, tolerance=1e-9)
    weight, bias = theirs(features, labels, C)
    assert fit.converged
    if classes == 2:  # scikit-learn has one logit, clipkit two halves of it
        weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
    else:
        bias = bias - bias.mean()
        weight = weight - weight.mean(dim=0)
    torch.testing.assert_close(fit.weight, weight, rtol=1e-5, atol=1e-6 * float(weight.abs().max()))
    torch.testing.assert_close(
        fit.bias, bias, rtol=1e-5, atol=1e-6 * float(weight.abs().max() + bias.abs().max())
    )


@pytest.mark.parametrize("C", [1e-6, 1e-2, 1e2, 1e6])
def test_predictions_equal_scikit_learn_from_any_start(C: float) -> None:
    features, labels = made_up(300, 20, 6, apart=1.5)
    new, _ = made_up(300, 20, 6, apart=1.5, seed=1)
    problem = LogisticProblem(Rows(features), labels, 6)
    fit = problem.fit(C)
    assert fit.converged
    weight, bias = theirs(features, labels, C)
    expected = (new.double() @ weight.T + bias).argmax(dim=1)
    assert torch.equal(logits(fit, new).argmax(dim=1), expected)
    again = problem.fit(C, start=problem.fit(C * 100))
    assert torch.equal(logits(again, new).argmax(dim=1), expected)
    assert problem.fit(C, start=fit).iterations <= 2  # already at the minimum
    same = LogisticProblem(Rows(features), labels, 6).fit(C)
    assert torch.equal(same.weight, fit.weight) and torch.equal(same.bias, fit.bias)


def test_separable_classes_reach_the_minimum() -> None:
    """With a weak penalty the errors of the probabilities are below float32's resolution at 1."""
    features, labels = made_up(60, 30, 3, apart=3)
    C = 1e5
    fit = LogisticProblem(Rows(features), labels, 3).fit(C, tolerance=1e-6)
    weight, bias = fit.weight.requires_grad_(), fit.bias.requires_grad_()
    loss = torch.nn.functional.cross_entropy(features.double() @ weight.T + bias, labels)
    value = loss + weight.square().sum() / (2 * C * len(labels))
    assert value.item() == pytest.approx(fit.objective, rel=1e-9)
    gradient = torch.autograd.grad(value, [weight, bias])
    assert max(float(one.abs().max()) for one in gradient) < 1e-11
    assert loss < 1e-4


def test_fit_of_fewer_rows_than_features_from_another_fit() -> None:
    """Weights are zero in directions in which the rows do not vary."""
    features, labels = made_up(60, 30, 3, apart=1)
    few = LogisticProblem(Rows(features[:12]), labels[:12], 3)
    expected = few.fit(1.0, tolerance=1e-8)
    start = LogisticProblem(Rows(features), labels, 3).fit(1.0)
    torch.testing.assert_close(few.fit(1.0, start=start, tolerance=1e-8).weight, expected.weight)
    weight, _ = theirs(features[:12], labels[:12], 1.0)
    torch.testing.assert_close(expected.weight, weight - weight.mean(dim=0), rtol=1e-5, atol=1e-7)


def test_absent_classes_and_several_labels_are_fitted() -> None:
    features, labels = made_up(120, 6, 3, apart=0.5)
    gaps = torch.tensor([1, 4, 5])[labels]  # three of six classes
    fit = LogisticProblem(Rows(features), gaps, 6).fit(1.0, tolerance=1e-8)
    plain = LogisticProblem(Rows(features), labels, 3).fit(1.0, tolerance=1e-8)
    torch.testing.assert_close(fit.weight[[1, 4, 5]], plain.weight)
    assert fit.bias[[0, 2, 3]].tolist() == [-math.inf] * 3
    assert bool(fit.classifier().isfinite().all())
    shown = torch.stack([labels == 0, labels != 1, torch.zeros(120).bool(), torch.ones(120).bool()], dim=1)
    several = LogisticProblem(Rows(features), shown, 4).fit(0.5, tolerance=1e-9)
    for column in (0, 1):
        weight, bias = theirs(features, shown[:, column].long(), 0.5)
        torch.testing.assert_close(several.weight[column], weight[0], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(several.bias[column], bias[0], rtol=1e-5, atol=1e-6)
    assert several.bias[2:].tolist() == [-math.inf, math.inf]
    for wrong in (torch.zeros(120).long(), torch.ones(120, 2).bool()):
        with pytest.raises(DataError, match="class"):
            LogisticProblem(Rows(features), wrong, 2)
    features[3, 2] = math.nan
    with pytest.raises(DataError, match="finite"):
        LogisticProblem(Rows(features), labels, 3)


def test_rows_in_blocks_give_the_same_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of memory-mapped and selected rows give the same fit as one table."""
    features, labels = made_up(150, 5, 4, apart=0.5)
    expected = LogisticProblem(Rows(features), labels, 4).fit(3.0, tolerance=1e-8)
    file = np.memmap(tmp_path / "features", np.float32, "w+", shape=(200, 5))
    places = torch.randperm(200, generator=torch.Generator().manual_seed(0))[:100].sort().values
    file[places.numpy()] = features[:100].numpy()
    monkeypatch.setattr(logistic, "_BLOCK", 64)
    monkeypatch.setattr("eval.tasks.logistic._HELD", 0)
    rows = Rows((torch.from_numpy(file), places)) + Rows(features[100:])
    assert len(rows) == 150 and max(len(block) for _, block in rows.blocks(16)) == 16
    fit = LogisticProblem(rows, labels, 4).fit(3.0, tolerance=1e-8)
    torch.testing.assert_close(fit.weight, expected.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_fit_gives_same_predictions() -> None:
    features, labels = made_up(400, 30, 5, apart=1.0)
    new, _ = made_up(400, 30, 5, apart=1.0, seed=1)
    expected = LogisticProblem(Rows(features), labels, 5).fit(10.0)
    fits = [
        LogisticProblem(Rows(features), labels, 5, device=torch.device("cuda")).fit(10.0) for _ in range(2)
    ]
    assert torch.equal(logits(fits[0], new).argmax(dim=1), logits(expected, new).argmax(dim=1))
    assert torch.equal(fits[0].weight, fits[1].weight)


@given(peak=st.integers(0, 96), seed=st.integers(0, 99))
def test_halving_search_finds_a_single_peak(peak: int, seed: int) -> None:
    asked: list[int] = []

    def value_at(step: int) -> float:
        asked.append(step)
        return -abs(step - peak) - (step < peak) / 2

    found = halving_search(value_at)
    assert abs(found - peak) <= 1
    assert asked[:7] == [96, 80, 64, 48, 32, 16, 0]
    assert len(asked) == len(set(asked)) <= 15


def test_halving_search_chooses_strongest_penalty_on_ties() -> None:
    assert halving_search(lambda step: 1.0) == 96
    assert [get_penalty(step) for step in (0, 48, 96)] == [1e-6, 1.0, 1e6]
    assert get_penalty(8) == pytest.approx(1e-5)


def test_sweep_equals_scikit_learn() -> None:
    features, labels = made_up(200, 8, 4, apart=0.7)
    val, val_labels = made_up(150, 8, 4, apart=0.7, seed=5)
    found = sweep_penalties(Rows(features), labels, Rows(val), val_labels, 4)

    def value_at(step: int) -> float:
        weight, bias = theirs(features, labels, 1 / get_penalty(step))
        return float(((val.double() @ weight.T + bias).argmax(dim=1) == val_labels).double().mean())

    best = halving_search(value_at)
    assert 1 / get_penalty(best) == found.fit.C
    assert found.tried[found.fit.C] == value_at(best) == max(found.tried.values())
    assert not found.unconverged
    weight, bias = theirs(torch.cat([features, val]), torch.cat([labels, val_labels]), found.fit.C)
    expected = features.double() @ weight.T + bias
    got = logits(found.fit, features)
    torch.testing.assert_close(
        got - got.mean(1, True), expected - expected.mean(1, True), rtol=1e-3, atol=1e-3
    )


@given(sizes=st.lists(st.integers(0, 40), min_size=2, max_size=6), seed=st.integers(0, 9))
def test_carve_takes_a_fifth_of_each_class(sizes: list[int], seed: int) -> None:
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    learn, tune = carve_validation(labels, revision="r", seed=seed)
    assert sorted([*learn.tolist(), *tune.tolist()]) == list(range(len(labels)))
    for label, size in enumerate(sizes):
        taken = int((labels[tune] == label).sum())
        assert taken == (0 if size < 2 else max(1, round(size / 5)))
    again = carve_validation(labels, revision="r", seed=seed)
    assert torch.equal(again[0], learn) and torch.equal(again[1], tune)


LABELS = [i % 4 for i in range(32)]


def test_linear_probe_of_dataset(
    model: CLIP, write_dataset: WriteDataset, caplog: pytest.LogCaptureFixture
) -> None:
    subject = subject_of(model, write_dataset, {"test": LABELS[:20], "train": LABELS, "val": LABELS})
    probes = list(linear_probes(subject, layers=[1]))
    assert [(probe.setting, probe.tuned_on, probe.tuned_by) for probe in probes] == [
        ("", "val", "acc1"),
        ("layer 1", "val", "acc1"),
    ]
    # train, val and test have the same images, which a weak penalty fits without errors
    assert probes[0].sweep.tried[probes[0].sweep.fit.C] == 1.0 and probes[0].sweep.fit.C > 1e-6
    scores = probes[0].scores
    assert [(score.task, score.metric, score.value) for score in scores] == [
        ("linear-probe", "acc1", 1.0),
        ("linear-probe", "acc5", 1.0),
        ("linear-probe", "mean_per_class_recall", 1.0),
    ]
    assert scores[0].low is not None and scores[0].low < 1.0
    assert (scores[0].n, scores[0].split, scores[0].prompt_set) == (20, "test", "")
    assert linear_probe(subject, Options()).scores == scores
    assert "classes without training images" in caplog.text  # three of seven
    with pytest.raises(ConfigError, match="layer 9"):
        linear_probe(subject, Options(layers=(9,)))


def test_examples_option_draws_nested_subsets_of_train(model: CLIP, write_dataset: WriteDataset) -> None:
    subject = subject_of(model, write_dataset, {"test": LABELS, "train": LABELS, "val": LABELS})
    train = subject.split("train")
    assert train is not None
    seen: set[int] = set()
    for examples in (10, 20, 32, 99):
        (_, learn), (split, tune), tuned_on = learn_and_tune(subject, train, 3, examples)
        assert learn is not None and tune is not None and split.split == "train"
        found = {*learn.tolist(), *tune.tolist()}
        used = min(examples, len(LABELS))
        assert tuned_on == f"a fifth of {used} images of train" and len(tune) == round(used / 5)
        assert len(found) == len(learn) + len(tune) == used and seen <= found  # smaller sets are subsets
        seen = found
    # the draw of this seed has several images of the classes that it is tuned on
    (score, *_) = linear_probe(subject, Options(examples=20, seed=2)).scores
    assert score.setting == "20 examples" and score.value > 0.5
    options = Options(examples=20)
    assert options.describe_options("linear-probe") == "seed=0 layers=False examples=20"
    assert Options().describe_options("linear-probe") == "seed=0 layers=False"
    with pytest.raises(DataError, match="4 training images leave none to tune on"):
        linear_probe(subject, Options(examples=4))


def test_dataset_without_val_is_tuned_on_a_fifth_of_train(
    model: CLIP, write_dataset: WriteDataset, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = ("mean_per_class_recall", "acc1")
    subject = subject_of(model, write_dataset, {"test": LABELS, "train": [*LABELS, 6]}, metrics=metrics)
    (probe,) = linear_probes(subject)
    assert (probe.tuned_on, probe.tuned_by) == ("a fifth of train", "mean_per_class_recall")
    assert [score.metric for score in probe.scores] == list(metrics)
    # fitted again to all images, including the carved-off ones
    features, labels = subject.images("train").before_projection, torch.tensor([*LABELS, 6])
    again = LogisticProblem(Rows(features), labels, 7).fit(probe.sweep.fit.C, tolerance=1e-6)
    torch.testing.assert_close(probe.answers.classifier, again.classifier(), rtol=2e-3, atol=2e-3)
    assert "classes with one image, which is learned from and not tuned on: 'grey'" in caplog.text
    assert linear_probe(subject, Options()).scores == probe.scores


def test_multi_label_probe_is_tuned_by_map(model: CLIP, write_dataset: WriteDataset) -> None:
    """C is chosen by 11-point mAP, and not on the scored split."""
    plain = subject_of(model, write_dataset, {"test": LABELS, "train": LABELS, "val": LABELS})

    def open_split(split: str) -> evaluation.EvalDataset:
        dataset = plain.split(split)
        assert dataset is not None and dataset.labels is not None
        both = torch.stack([dataset.labels == 0, dataset.labels >= 2, dataset.labels > 9], dim=1)
        return replace(dataset, labels=both, class_names=("a", "b", "nothing"))

    subject = Subject(plain.encoder, open_split("val"), open_split=open_split)
    (probe,) = linear_probes(subject)
    assert (probe.tuned_on, probe.tuned_by) == ("a fifth of train", "map_11_point")
    value = {score.metric: score.value for score in probe.scores}["map_11_point"]
    assert value == pytest.approx(
        map_11_point(probe.answers.scores(softmax=False), probe.answers.labels).value
    )
    assert value > 0.5


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"test": LABELS}, "has no train split, which a linear probe learns from"),
        ({"test": LABELS, "train": [0, 1, 2]}, "has no val split, and no class of train can spare an image"),
        ({"test": LABELS, "train": [2] * 8}, "at least two are needed"),
        ({"train": LABELS}, "learns from train, so score it on another split"),
    ],
)
def test_insufficient_training_data_is_rejected(
    model: CLIP,
    write_dataset: WriteDataset,
    splits: dict[str, list[int]],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    with pytest.raises(DataError, match=message) as caught:
        linear_probe(subject_of(model, write_dataset, splits), Options())
    assert "\n" not in str(caught.value)
