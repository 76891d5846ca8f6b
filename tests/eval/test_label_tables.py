"""Tests of several labels per image in tables, as of CheXpert and NIH, and of scores of each label."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from clipkit import CLIP
from clipkit.errors import DataError
from eval import Encoder, Subject, evaluate
from eval.compare import compare
from eval.datasets.dataset import EvalDataset
from eval.datasets.targets import find_targets
from eval.metrics import Answers, get_metric
from eval.metrics.classes import (
    mean_average_precision,
    mean_average_precision_statistic,
    roc_auc_macro,
    roc_auc_macro_statistic,
)
from eval.metrics.intervals import evaluate_statistic
from eval.results.details import take_snapshot
from eval.results.records import append_results, write_details
from eval.tasks import Options
from eval.tasks.classify import prompt_outcome
from tests.eval.conftest import png

FINDINGS = ("Atelectasis", "Edema", "Pleural Effusion")
# 1, 0, -1 (uncertain) or nothing; the columns are the findings
ROWS = ("1.0,0.0,1.0", "0.0,,1.0", "1.0,-1.0,1.0", "0.0,1.0,1.0", "0.0,0.0,1.0", "1.0,1.0,")
CARD = """
tasks = ["zero-shot"]
metric = "roc_auc_macro"
further = ["roc_auc_of_*", "average_precision_of_Edema", "any_label_acc1"]
multilabel = true
keys = ["Atelectasis", "Edema", "Pleural Effusion"]
[table]
files.test = "valid.csv"
image = "Path"
[prompts.own]
templates = ["{c}"]
negative_templates = ["no {c}"]
names = { "Pleural Effusion" = "pleural effusion" }
"""


def write_chexpert(root: Path, rows: tuple[str, ...] = ROWS, card: str = CARD) -> Path:
    """Write CheXpert's layout: the paths start with the name of the folder, which has other folders of splits."""
    folder = root / "CheXpert-v1.0-small"
    lines = ["Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding,Atelectasis,Edema,Pleural Effusion"]
    for i, row in enumerate(rows):
        path = f"valid/patient{i}/study1/view1_frontal.jpg"
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(png(i))
        lines.append(f"{folder.name}/{path},Male,{i},Frontal,AP,0.0,{row}")
    (folder / "train" / "patient9").mkdir(parents=True)
    (folder / "valid.csv").write_text("\n".join(lines) + "\n")
    (folder / "card.toml").write_text(card)
    return folder


def open_test(folder: Path) -> EvalDataset:
    (target,) = find_targets([str(folder)])
    return target.dataset


def test_uncertain_and_blank_labels_are_unknown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = open_test(write_chexpert(tmp_path))
    assert dataset.class_names == ("Atelectasis", "Edema", "pleural effusion")
    assert dataset.labels is not None and dataset.unknown is not None and dataset.known_labels is not None
    assert dataset.known_labels.tolist() == [
        [1, 0, 1],
        [0, -1, 1],
        [1, -1, 1],
        [0, 1, 1],
        [0, 0, 1],
        [1, 1, -1],
    ]
    assert "3 of 18 labels are uncertain or blank and left out of its metrics" in caplog.text
    assert dataset.images.read(3) == png(3)


def test_scores_of_positive_and_negative_prompts_by_hand(
    model: CLIP, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Areas are those of the softmax over each label's two prompts, of the images with a known label."""
    (target,) = find_targets([str(write_chexpert(tmp_path))])
    subject = Subject(Encoder(model), target.dataset, metrics=target.metrics)
    scores = {score.metric: score for score in evaluate(subject)}
    images = subject.images().projected
    known = target.dataset.known_labels
    assert known is not None
    areas = []
    for i, name in enumerate(("Atelectasis", "Edema", "pleural effusion")):
        pair = subject.texts([name, f"no {name}"]).cpu()
        probability = (subject.logit_scale * images @ pair.T).softmax(dim=1)[:, 0]
        positive = probability[known[:, i] == 1]
        negative = probability[known[:, i] == 0]
        if not len(negative):
            continue
        won = (positive[:, None] > negative).float() + (positive[:, None] == negative).float() / 2
        areas.append(float(won.mean()))
        score = scores[f"roc_auc_of_{name}"]
        assert score.value == pytest.approx(areas[-1])
        assert score.n == len(positive) + len(negative) and score.chance == 0.5
        assert (
            score.low is not None
            and score.high is not None
            and score.low < score.value + 1e-9 < score.high + 1
        )
    assert len(areas) == 2
    assert scores["roc_auc_macro"].value == pytest.approx(sum(areas) / 2)
    assert "average_precision_of_Edema" in scores
    # no image lacks the third finding, and an unknown label may be right
    assert {"roc_auc_of_pleural effusion", "any_label_acc1"}.isdisjoint(scores)
    assert "any_label_acc1, roc_auc_of_pleural effusion undefined for zero-shot, and left out" in caplog.text


def test_names_of_labels_in_one_column_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "nih"
    folder.mkdir()
    cells = ("Edema|Atelectasis", "No Finding", "Edema | Pleural Effusion", "Hernia|Edema", "No Finding", "")
    for i in range(len(cells)):
        (folder / f"{i}.png").write_bytes(png(i))
    lines = [f"{i}.png,{cell},{i}" for i, cell in enumerate(cells)]
    (folder / "Data_Entry_2017.csv").write_text("\n".join(["Image Index,Finding Labels,Age", *lines]))
    table = '[table]\nimage = "Image Index"\nlabel = "Finding Labels"\n'
    card = re.sub(r"\[table\][^[]*", table, CARD)
    (folder / "card.toml").write_text(card)
    dataset = open_test(folder)
    assert dataset.labels is not None and dataset.unknown is None
    assert dataset.labels.int().tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 1], [0, 1, 0], [0, 0, 0]]
    assert "dataset nih: 1 image cannot be used: 1 × empty caption" in caplog.text
    assert "labels that are none of the card's keys: 2 × 'No Finding', 1 × 'Hernia'" in caplog.text
    # without multilabel, the cells are classes
    (folder / "card.toml").write_text(f'tasks = ["zero-shot"]\nmetric = "acc1"\n{table}')
    assert open_test(folder).class_names == tuple(sorted(set(cells[:-1])))


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 40), ties=st.booleans())
@settings(max_examples=40, deadline=None)
def test_means_over_labels_equal_scikit_learn_on_known_labels(seed: int, n: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(n, 4, generator=generator)
    scores = scores.round() if ties else scores
    labels = torch.randint(-1, 2, (n, 4), generator=generator)
    areas, precisions = [], []
    for score, label in zip(scores.T, labels.T, strict=True):
        known = label >= 0
        if label[known].any():
            precisions.append(average_precision_score(label[known], score[known]))
            if not label[known].all():
                areas.append(roc_auc_score(label[known], score[known]))
    for expected, estimate, statistic in (
        (areas, roc_auc_macro, roc_auc_macro_statistic),
        (precisions, mean_average_precision, mean_average_precision_statistic),
    ):
        if not expected:
            with pytest.raises(DataError):
                estimate(scores, labels)
            continue
        found = estimate(scores, labels)
        assert found.value == pytest.approx(np.mean(expected)) and found.low <= found.value <= found.high
        drawn = np.bincount(torch.randint(n, (n,), generator=generator).numpy(), minlength=n)
        copies = torch.from_numpy(np.repeat(np.arange(n), drawn))
        value = statistic(scores, labels)(drawn[None])[0]
        try:
            expected_value = evaluate_statistic(statistic(scores[copies], labels[copies]), n)
        except DataError:
            expected_value = math.nan
        assert value == pytest.approx(expected_value, nan_ok=True)


def test_labels_of_two_models_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.results.details._draw_thumbnails", lambda *_: {})
    data = open_test(write_chexpert(tmp_path, rows=ROWS * 10))
    results = tmp_path / "results.jsonl"
    metrics = ("roc_auc_macro", "mean_average_precision", "roc_auc_of_*", "average_precision_of_*")
    generator = torch.Generator().manual_seed(0)
    assert data.labels is not None
    for model, noise in (("first", 1.0), ("second", 0.3)):
        images = F.normalize(data.labels.float() + noise * torch.randn(60, 3, generator=generator), dim=1)
        subject = SimpleNamespace(dataset=data, metrics=metrics, device=torch.device("cpu"))
        outcome = prompt_outcome(cast(Subject, subject), Options(), images, torch.eye(3), 20.0)
        append_results(results, outcome.scores, step=None, provenance={"model": model, "weights": model})
        for details in outcome.details:
            write_details(results, details, weights=model)
    found = {one.metric: one for one in compare([results], "first", "second").differences}
    assert {*found} == {
        "roc_auc_macro",
        "mean_average_precision",
        *(f"roc_auc_of_{name}" for name in FINDINGS[:2]),
        *(f"average_precision_of_{name}" for name in (*FINDINGS[:2], "pleural effusion")),
    }
    for difference in found.values():
        change = difference.second - difference.first
        assert difference.test.difference == pytest.approx(change, abs=1e-6)
        assert difference.test.low <= change <= difference.test.high
    assert found["roc_auc_of_Atelectasis"].test.low > 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"Edema",',
            '"Oedema",',
            r"valid.csv has no column 'Oedema' \(did you mean 'Edema'",
        ),
        ('keys = ["Atelectasis", "Edema", "Pleural Effusion"]\n', "", "multilabel needs keys"),
        ('"Path"', '"path"', "valid.csv has no column 'path'"),
        ('image = "Path"', 'image = "Path"\nlabel = "Labels"', "valid.csv has no column 'Labels'"),
        ("multilabel = true", "", "metric: 'roc_auc_macro' does not apply"),
        ("roc_auc_of_*", "acc1", "'acc1' does not apply to zero-shot; metrics that do: .*roc_auc_of_"),
    ],
)
def test_mistakes_of_a_card_of_labels_are_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    card = CARD.replace("names = {", "# names = {").replace(old, new, 1)
    with pytest.raises(DataError, match=message) as error:
        open_test(write_chexpert(tmp_path, card=card))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cell", ["2", "positive", "nan"])
def test_cells_that_are_no_labels_are_one_line(tmp_path: Path, cell: str) -> None:
    folder = write_chexpert(tmp_path, rows=(*ROWS, f"1.0,{cell},0.0"))
    with pytest.raises(
        DataError, match=f"patient6/study1/view1_frontal.jpg has Edema '{cell}': expected 1, 0, -1"
    ):
        open_test(folder)


def test_labels_that_do_not_exist_or_are_unknown_are_one_line(model: CLIP, tmp_path: Path) -> None:
    folder = write_chexpert(tmp_path, card=CARD.replace("roc_auc_of_*", "roc_auc_of_Edma"))
    with pytest.raises(DataError, match="has no label 'Edma': did you mean 'Edema'"):
        evaluate(model, str(folder))
    card = CARD.replace('"valid.csv"', '"valid.csv"\nfiles.train = "valid.csv"')
    (folder / "card.toml").write_text(card)
    with pytest.raises(DataError, match="uncertain or blank labels"):
        evaluate(model, str(folder), tasks=["linear-probe"])


def test_undefined_areas_are_left_out_not_errors() -> None:
    def answers(labels: Tensor) -> Answers:
        names = ("a", "b")
        data = SimpleNamespace(labels=labels, known_labels=labels, class_names=names, metadata={})
        return Answers(cast(EvalDataset, data), torch.eye(2), torch.eye(2), 1.0, torch.device("cpu"))

    for name, labels in (
        ("roc_auc", torch.tensor([1, 1])),
        ("mean_average_precision", torch.zeros(2, 2, dtype=torch.bool)),
        ("map_11_point", torch.zeros(2, 2, dtype=torch.bool)),
        ("roc_auc_macro", torch.ones(2, 2, dtype=torch.bool)),
        ("roc_auc_of_a", torch.ones(2, 2, dtype=torch.bool)),
        ("average_precision_of_b", torch.zeros(2, 2, dtype=torch.bool)),
    ):
        metric = get_metric(name)
        assert metric is not None
        assert metric.function(answers(labels)) is None  # type: ignore[arg-type]


def test_metrics_of_labels_are_named_by_key_or_name(model: CLIP, tmp_path: Path) -> None:
    for number, label in enumerate(("Pleural Effusion", "pleural effusion")):
        folder = write_chexpert(
            tmp_path / str(number), card=CARD.replace("roc_auc_of_*", f"roc_auc_of_{label}")
        )
        (target,) = find_targets([str(folder)])
        assert target.metrics[1] == "roc_auc_of_pleural effusion"


def test_snapshots_of_several_labels_show_the_nearest_images_of_each(model: CLIP, tmp_path: Path) -> None:
    dataset = open_test(write_chexpert(tmp_path))
    snapshot = take_snapshot(Subject(Encoder(model), dataset), step=1)
    assert snapshot.examples == () and snapshot.matrix is None
    assert len(snapshot.queries) == len(FINDINGS)
    assert dataset.labels is not None
    for label, query in enumerate(snapshot.queries):
        assert [hit.right for hit in query.hits] == [
            bool(dataset.labels[int(hit.picture), label]) for hit in query.hits
        ]
