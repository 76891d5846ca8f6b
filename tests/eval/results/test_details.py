"""Tests of details: agreement with metrics, round trips through files, and broken files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from clipkit.errors import DataError
from eval.datasets.dataset import EvalDataset
from eval.metrics import Answers, class_ranks, top_classes
from eval.metrics.classes import expected_calibration_error, top_k_accuracy
from eval.results.details import item_details, prediction_details, zero_shot_details
from eval.results.records import Packed, details_folder, pack_values, read_details, write_details
from eval.tasks.classify import add_items

N, C, D = 40, 7, 16


class NoImages:
    """Images that can no longer be read."""

    def __len__(self) -> int:
        return N

    def read(self, number: int) -> object:
        raise DataError("gone")


def dataset(labels: Tensor, classes: int = C, name: str = "colours") -> EvalDataset:
    return EvalDataset(
        name=name,
        class_names=("", *(f"class {i}" * (1 + 60 * (i == 2)) for i in range(1, classes))),
        templates=("{c}",),
        images=NoImages(),  # type: ignore[arg-type]
        labels=labels,
        captions=None,
        revision="0123",
        tasks=("zero-shot",),
    )


def features(classes: int = C, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.nn.functional.normalize(torch.randn(N, D, generator=generator), dim=1)
    weights = torch.nn.functional.normalize(torch.randn(D, classes, generator=generator), dim=0)
    return images, weights, torch.randint(classes, (N,), generator=generator)


def test_details_agree_with_the_metrics() -> None:
    images, weights, labels = features()
    details = zero_shot_details(dataset(labels), images, weights, 20.0)
    ranks = class_ranks(images, weights, labels)
    top = top_classes(images, weights, logit_scale=20.0)
    for metric, k in (("acc1", 1), ("acc5", 5)):
        assert details.right[metric].tensor().equal(ranks < k)
    assert details.calibration_error == pytest.approx(
        expected_calibration_error(top.probabilities[:, 0], ranks < 1).value
    )
    assert sum(details.class_right) == sum(ranks < 1)
    assert details.labels is not None
    assert details.labels.tensor().equal(labels)
    assert list(details.class_counts) == labels.bincount(minlength=C).tolist()
    assert details.matrix is not None
    matrix = details.matrix.tensor().view(C, C)
    assert matrix.diagonal().tolist() == list(details.class_right)
    assert matrix.sum(dim=1).tolist() == list(details.class_counts)
    off = (matrix - matrix.diagonal().diag()).flatten().tolist()
    assert [count for _, _, count in details.mistakes] == sorted(filter(None, off), reverse=True)[:30]
    for example in details.examples:
        number = int(example.picture)
        assert example.rank == ranks[number] + 1
        assert example.guesses[0].right == (example.rank == 1)
        assert [guess.probability for guess in example.guesses] == pytest.approx(
            top_classes(images[number : number + 1], weights, k=5, logit_scale=20.0)
            .probabilities[0]
            .tolist(),
            rel=1e-3,
        )
        assert details.pictures[example.picture].png == ""
    assert top_k_accuracy(ranks).value == details.right["acc1"].tensor().float().mean()


def test_examples_alternate_between_right_and_wrong_and_depend_on_the_seed() -> None:
    images, weights, labels = features()
    shown = {}
    for seed in range(8):
        details = zero_shot_details(dataset(labels), images, weights, 20.0, seed=seed)
        assert zero_shot_details(dataset(labels), images, weights, 20.0, seed=seed) == details
        kinds = [example.rank == 1 for example in details.examples]
        assert len(kinds) == 6
        assert sum(kinds) == 3
        shown[seed] = (kinds[0], tuple(example.picture for example in details.examples))
    assert len({images for _, images in shown.values()}) == 8
    assert {first for first, _ in shown.values()} == {True, False}
    always = zero_shot_details(dataset(class_ranks(images, weights, labels) * 0), images, weights[:, :1], 1.0)
    assert [example.rank for example in always.examples] == [1] * 6


def test_details_of_two_classes_and_of_several_labels() -> None:
    images, weights, labels = features(2)
    details = zero_shot_details(dataset(labels, 2), images, weights, 20.0)
    assert list(details.right) == ["acc1"]
    answers = Answers(dataset(labels, 2), images, weights, 20.0, torch.device("cpu"))
    score = add_items(details, answers, ["acc1", "roc_auc"]).values["roc_auc"].tensor()
    assert (score > 0).equal(details.right["acc1"].tensor() == (labels == 1))
    images, weights, labels = features()
    several = torch.nn.functional.one_hot(labels, C) + torch.nn.functional.one_hot((labels + 1) % C, C)
    several[3] = 0
    details = zero_shot_details(dataset(several.bool()), images, weights, 20.0)
    assert details.class_counts == ()
    assert details.labels is not None
    assert details.labels.tensor().view(-1, C).equal(several.bool())
    assert all(
        example.truth is None or ("class" in example.truth and example.rank is not None)
        for example in details.examples
    )


def test_nan_features_count_as_wrong_and_can_be_written(tmp_path: Path) -> None:
    images, weights, labels = features()
    images[:20] = torch.nan
    details = zero_shot_details(dataset(labels), images, weights, 20.0)
    assert not details.right["acc1"].tensor()[:20].any()
    write_details(tmp_path / "results.jsonl", details, weights="w")
    assert read_details(tmp_path / "results.jsonl")[0] == [replace(details, weights="w")]


def test_each_weights_dataset_and_task_has_one_file(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    images, weights, labels = features()
    details = zero_shot_details(dataset(labels, name="../a b/ü\ud800"), images, weights, 20.0)
    probe = prediction_details(
        dataset(labels), labels, task="linear-probe", setting="layer 3", chosen_c=0.316
    )
    recall = item_details(dataset(labels), task="retrieval", n=N, values={"mean_rank": torch.rand(N)})
    for one in (details, probe, recall, details):
        for name in ("sha256:1", "sha256:2"):
            path = write_details(results, one, weights=name)
            assert path.parent == details_folder(results) == tmp_path / "results.details"
    read, notes = read_details(results)
    assert len(read) == 6
    assert notes == []
    assert replace(probe, weights="sha256:2") in read
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize(
    "spoil",
    [
        {"matrix": {"kind": "uint32", "n": 48, "data": ""}},
        {"mistakes": [[0, 99, 1]]},
        {"class_counts": [1]},
        {"bins": [{"low": 0, "high": 1, "count": 1, "confidence": 9e9, "accuracy": 0}]},
        {"right": {"acc1": {"kind": "pickle", "n": 1, "data": ""}}},
        {"n": -1},
        {"class_names": 3},
        {"chosen_c": 10**400},
        {"class_counts": [10**40] * C},
        {"examples": [{"picture": "0", "guesses": [], "truth": "a", "rank": 1, "probability": float("nan")}]},
    ],
)
def test_broken_details_are_skipped_and_noted(tmp_path: Path, spoil: dict[str, object]) -> None:
    results = tmp_path / "results.jsonl"
    images, weights, labels = features()
    path = write_details(results, zero_shot_details(dataset(labels), images, weights, 20.0), weights="w")
    value = json.loads(path.read_text())
    (path.parent / "b.json").write_text(json.dumps({**value, **spoil}))
    (path.parent / "c.json").write_text(path.read_text()[:-30])
    (path.parent / "d.json").mkdir()
    read, notes = read_details(results)
    assert len(read) == 1
    assert notes == ["results.details: b.json, c.json, d.json cannot be read and are left out."]


@given(st.lists(st.booleans(), max_size=70))
def test_bits_round_trip(values: list[bool]) -> None:
    assert pack_values(torch.tensor(values, dtype=torch.bool)).tensor().tolist() == values


def test_numbers_round_trip_and_deflate_bombs_do_not() -> None:
    for values in (torch.tensor([0, 1, 2**32 - 1]), torch.tensor([0.5, -3.0])):
        assert pack_values(values).tensor().equal(values)
    whole = pack_values(torch.zeros(1_000_000))
    for wrong in (
        replace(whole, n=10),
        replace(whole, n=2_000_000),
        replace(whole, data="%"),
        replace(whole, kind="bits"),
    ):
        with pytest.raises(DataError, match="cannot unpack the values"):
            wrong.tensor()
    with pytest.raises(DataError, match="cannot unpack the values"):
        Packed(kind="bits", n=9, data="AA==").tensor()
