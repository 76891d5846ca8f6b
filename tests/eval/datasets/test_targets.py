"""Tests of finding datasets by name: missing or invalid ones, and known scores of models."""

import json
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clipkit.errors import ConfigError, DataError, Unavailable
from clipkit.samples.remote.transfer import PATIENCE
from eval.datasets.catalog import new_card
from eval.datasets.targets import find_targets, open_available, open_suites
from eval.metrics import Answers
from eval.tasks.subject import metric_scores
from eval.verify import explain_no_checks, list_expected_tasks, open_expected_datasets

WriteDataset = Callable[..., Path]
KNOWN = "open_clip:ViT-B-32/openai"


def test_unreachable_root_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "clipkit.samples.remote.transfer.PATIENCE", replace(PATIENCE, contact_waits=(0.01, 0.02))
    )
    with socket.socket() as closed:  # bound, not listening: connections are refused
        closed.bind(("127.0.0.1", 0))
        root = f"http://127.0.0.1:{closed.getsockname()[1]}/sets"
        targets, trouble = open_suites(["vtab19"], root=root)
        known = open_expected_datasets([], KNOWN, root=root)
    assert str(trouble[0]).startswith(f"{root}: the connection failed (Connection refused)")
    assert str(trouble[0]).endswith("19 datasets not available: caltech101, cifar100, dtd and 16 more")
    assert (len(trouble), len(known.errors), targets + known.targets) == (1, 1, [])


def test_missing_datasets_are_reported_in_one_line_each(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    with pytest.raises(ConfigError, match=r"--data-root .*none: no such folder$"):
        open_suites(["clip27"], root=tmp_path / "none")
    known = open_expected_datasets([], KNOWN, root=tmp_path)
    lines = list(map(str, known.errors))
    assert known.count == len(lines) > 20 and all(isinstance(error, Unavailable) for error in known.errors)
    at = "published at hf://datasets/clip-benchmark/wds_food101, or in the layout of torchvision.datasets.Food101"
    assert f"food101: not under {tmp_path}; {at}" in lines
    assert explain_no_checks(known, KNOWN) == (
        f"nothing could be checked: none of the {len(lines)} datasets with known scores for {KNOWN} is available"
    )
    with pytest.raises(DataError, match="fairface cannot be scored: Its names"):
        find_targets(["fairface"], root=tmp_path)


def test_invalid_dataset_does_not_stop_others(write_dataset: WriteDataset, tmp_path: Path) -> None:
    good, damaged = [write_dataset(f"{name}/test") for name in "AB"], write_dataset("damaged")
    next((damaged / "test").glob("*.tar")).unlink()
    wrong = write_dataset("wrong")
    (wrong / "card.toml").write_text('tasks = ["zero-shot"]\nmetric = "acc_1"\n')
    names = [str(wrong), str(good[0]), "mnist", str(damaged), str(good[1])]
    targets, trouble = open_available(names)
    assert [target.dataset.name for target in targets] == ["A-test", "B-test"]
    assert [type(one) for one in trouble] == [Unavailable, DataError, DataError]
    said = [str(one) for one in trouble]
    assert "pass its location with --data-root" in said[0] and str(damaged) in said[2]
    assert said[1].startswith(f"{wrong}/card.toml: metric: 'acc_1' does not apply to zero-shot")
    assert not any("\n" in one for one in said)
    with pytest.raises(Unavailable):
        find_targets(names)
    for slip in ("nowhere", str(tmp_path / "nowhere"), "~nouser/x"):  # an unknown name stops all
        with pytest.raises(DataError, match=f"no dataset '{slip}'"):
            open_available([str(good[0]), slip, str(damaged)])
    with pytest.raises(DataError, match="is given twice"):
        open_available([str(good[0]), str(good[0])])


def test_known_scores_are_found_from_cards_alone(tmp_path: Path) -> None:
    assert list_expected_tasks(["cifar100", "flickr30k"], KNOWN) == ("zero-shot", "linear-probe", "retrieval")
    with pytest.raises(
        ConfigError, match=r"known for 'x' on digits, or for any other model: .* as \[\[expected\]\]"
    ):
        list_expected_tasks(["digits"], "x")
    with pytest.raises(ConfigError, match=rf"known for 'x' on cifar100, .*{KNOWN}.*--as NAME"):
        open_expected_datasets(["cifar100"], "x", root=tmp_path / "none")


def test_card_in_folder_must_match_images(
    write_dataset: WriteDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_dataset(labels=[0, 1, 2] * 3, class_names=["a", "b", "c"], templates=None)
    with caplog.at_level(logging.WARNING, "eval"):
        find_targets([str(folder)])
    told = "dataset colours has no prompts (zeroshot_classification_templates.txt): using 'a photo of a {c}.'"
    assert [record.getMessage() for record in caplog.records] == [told]
    caplog.clear()
    assert new_card("Mine", folder).metric == "acc1"
    assert new_card("Mine", write_dataset("seven")).further == ("acc5", "mean_per_class_recall")
    (folder / "classnames.txt").rename(folder / "aside.txt")
    (folder / "card.toml").write_text('tasks = ["zero-shot"]\nmetric = "acc1"\nkeys = ["0", "1"]\n')
    with pytest.raises(DataError, match="card colours has 2 classes, the images of colours have 3"):
        find_targets([str(folder)])
    (folder / "aside.txt").rename(folder / "classnames.txt")
    for text, message in (
        (
            'metric = "roc_auc"',
            r"card.toml: 'roc_auc' does not apply to zero-shot; metrics that do: acc1, mean",
        ),
        ('metric = "map_11_point"\nmultilabel = true', "each image has one label, .* multilabel = false"),
        ('metric = "worst_region_acc1"\nmetadata = ["region"]', "has no npy, expected 1 column: region"),
    ):
        (folder / "card.toml").write_text(f'tasks = ["zero-shot"]\n{text}\n')
        with pytest.raises(DataError, match=message):
            find_targets([str(folder)])
    (folder / "card.toml").write_text(
        'tasks = ["zero-shot"]\nmetric = "acc1"\nclasses = 3\n[prompts.x]\nnames = "folder"\ntemplates = "folder"\n'
    )
    find_targets([str(folder)])
    assert [record.getMessage() for record in caplog.records] == [told]


def test_weighted_kappa_uses_the_order_of_the_card(write_dataset: WriteDataset) -> None:
    """The names of grades are rarely in alphabetical order, which is that of folders."""
    from sklearn.metrics import cohen_kappa_score

    folder = write_dataset("eyes", labels=[i % 4 for i in range(40)], class_names=["a", "b", "c", "d"])
    card = 'tasks = ["zero-shot"]\nmetric = "cohen_kappa_quadratic"\nfurther = ["cohen_kappa_linear"]\n'
    order = ["c", "a", "d", "b"]
    (folder / "card.toml").write_text(f"{card}ordered = true\nkeys = {json.dumps(order)}\n")
    (target,) = find_targets([str(folder)])
    assert target.dataset.class_order == (1, 3, 0, 2)
    features, weights = torch.randn(2, 40, 4, generator=torch.Generator().manual_seed(0))
    answers = Answers(target.dataset, features, weights[:4], 20.0, torch.device("cpu"))
    predicted = answers.top.classes[:, 0]
    position = torch.tensor(target.dataset.class_order)
    for score in metric_scores(target.dataset, target.metrics, answers, task="zero-shot"):
        weighting = score.metric.removeprefix("cohen_kappa_")
        oracle = cohen_kappa_score(position[answers.labels], position[predicted], weights=weighting)
        assert score.value == pytest.approx(oracle)
        assert score.value != pytest.approx(cohen_kappa_score(answers.labels, predicted, weights=weighting))
    (folder / "card.toml").write_text(f"{card}keys = {json.dumps(order)}\n")
    with pytest.raises(DataError, match="'cohen_kappa_quadratic' does not apply to zero-shot"):
        find_targets([str(folder)])
    (folder / "card.toml").write_text(f"{card}ordered = true\n")
    with pytest.raises(DataError, match="ordered needs keys, the classes in their order"):
        find_targets([str(folder)])
