"""Tests of the mean of several models' predictions."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score

import clipkit
from clipkit import CLIP
from clipkit.errors import ConfigError
from clipkit.formats import save_model
from eval import Encoder, Subject
from eval.__main__ import main
from eval.datasets.targets import find_targets
from eval.results.records import read_results
from tests.eval.test_label_tables import write_chexpert

WriteDataset = Callable[..., Path]


@pytest.fixture
def models(model: CLIP, tmp_path: Path) -> list[str]:
    """Paths of models with different weights and scales."""
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    sources = []
    for seed in range(3):
        random = torch.Generator().manual_seed(seed)
        for value in model.state_dict().values():
            value.add_(0.5 * value.std() * torch.randn(value.shape, generator=random) if value.ndim else seed)
        save_model(model, tmp_path / f"m{seed}")
        model.load_state_dict(kept)
        sources.append(str(tmp_path / f"m{seed}"))
    return sources


def evaluate_models(command: str, models: list[str], data: Path, out: Path) -> dict[str, dict[str, Any]]:
    named = [argument for model in models for argument in ("--model", model)]
    assert main([command, *named, "--data", str(data), "--out", str(out), "--device", "cpu"]) == 0
    return {line["metric"]: line for line in read_results(out)}


def predict(source: str, data: Path) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return cosines with the positive and negative prompts of classes, and the scale of the model."""
    (target,) = find_targets([str(data)])
    subject = Subject(Encoder(clipkit.load(source)), target.dataset)
    images = subject.images().projected.double()
    positive = subject.encoder.classifier(target.dataset.prompts(), description="").double()
    denying = target.dataset.negative_prompts()
    negative = (
        subject.encoder.classifier(denying, description="").double()
        if denying
        else torch.zeros_like(positive)
    )
    return images @ positive, images @ negative, subject.logit_scale


def test_pairs_of_prompts_are_averaged_as_in_chexzero(models: list[str], tmp_path: Path) -> None:
    data = write_chexpert(tmp_path)
    lines = evaluate_models("ensemble", models, data, tmp_path / "results.jsonl")
    predictions = []
    for source in models:  # CheXzero's run_softmax_eval
        positive, negative, _ = predict(source, data)
        predictions.append(positive.exp() / (positive.exp() + negative.exp()))
    mean = torch.stack(predictions).mean(dim=0)
    (target,) = find_targets([str(data)])
    known = target.dataset.known_labels
    assert known is not None
    for label, name in enumerate(("Atelectasis", "Edema")):
        rows = known[:, label] >= 0
        expected = roc_auc_score(known[rows, label], mean[rows, label])
        assert lines[f"roc_auc_of_{name}"]["value"] == pytest.approx(expected, abs=1e-9)


def test_probabilities_of_classes_are_averaged(
    models: list[str], write_dataset: WriteDataset, tmp_path: Path
) -> None:
    data = write_dataset(labels=tuple(i % 7 for i in range(60)))
    lines = evaluate_models("ensemble", models, data, tmp_path / "results.jsonl")
    total = torch.zeros(60, 7, dtype=torch.float64)
    for source in models:
        similarities, _, scale = predict(source, data)
        total += (similarities * scale).softmax(dim=1)
    labels = torch.arange(60) % 7
    right = (total.argmax(dim=1) == labels).double().mean().item()
    assert lines["acc1"]["value"] == pytest.approx(right)
    line = lines["acc1"]
    assert line["low"] < line["value"] < line["high"] and line["chance"] == pytest.approx(1 / 7)
    assert line["model"] == "ensemble of 3 models" and line["weights"].startswith("ensemble:")
    assert all(f"{model} (sha256:" in line["ensemble"] for model in models)


@pytest.mark.parametrize("several", [False, True])
def test_ensemble_of_equal_models_has_their_scores(
    several: bool, models: list[str], write_dataset: WriteDataset, tmp_path: Path
) -> None:
    data = write_chexpert(tmp_path) if several else write_dataset(labels=tuple(i % 7 for i in range(60)))
    copy = tmp_path / "copy"
    copy.symlink_to(models[0])
    alone = evaluate_models("zero-shot", models[:1], data, tmp_path / "alone.jsonl")
    both = evaluate_models("ensemble", [models[0], str(copy)], data, tmp_path / "both.jsonl")
    assert alone.keys() == both.keys() and len(alone) > 2
    for metric, line in alone.items():
        for name in ("value", "low", "high"):
            assert line[name] == both[metric][name] or math.isclose(
                line[name], both[metric][name], rel_tol=1e-6
            )


def test_ensemble_is_compared_with_its_models(
    models: list[str], write_dataset: WriteDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_dataset(labels=tuple(i % 7 for i in range(60)))
    for command, sources in (("zero-shot", models[:1]), ("ensemble", models)):
        evaluate_models(command, sources, data, tmp_path / "results.jsonl")
    capsys.readouterr()
    names = ["m0", "ensemble of 3 models"]
    assert main(["compare", *names, "--results", str(tmp_path / "results.jsonl")]) == 0
    assert "acc1" in capsys.readouterr().out


def test_an_ensemble_needs_several_models_and_labels(
    models: list[str], write_dataset: WriteDataset, tmp_path: Path
) -> None:
    data = write_dataset()
    with pytest.raises(ConfigError, match="an ensemble needs two or more models: repeat --model"):
        main(["ensemble", "--model", models[0], "--data", str(data)])
    with pytest.raises(ConfigError, match="no dataset given: use --data"):
        main(["ensemble", "--model", models[0], "--model", models[1]])
