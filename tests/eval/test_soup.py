"""Tests of the greedy soup against the published recipe on plain state dicts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import clipkit
from clipkit import CLIP
from clipkit.errors import ConfigError, DataError
from clipkit.formats import save_model
from eval import evaluate, open_dataset
from eval.__main__ import main

WriteDataset = Callable[..., Path]
LABELS = [i % 7 for i in range(59, -1, -1)]


@pytest.fixture
def models(model: CLIP, tmp_path: Path) -> list[str]:
    """Paths of models with slightly different weights, as after fine-tuning."""
    sources = []
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    for seed in range(5):
        random = torch.Generator().manual_seed(seed)
        for value in model.state_dict().values():
            value.add_(0.2 * value.std() * torch.randn(value.shape, generator=random) if value.ndim else 0)
        save_model(model, tmp_path / f"m{seed}")
        model.load_state_dict(kept)
        sources.append(str(tmp_path / f"m{seed}"))
    return sources


def accuracy(weights: dict[str, torch.Tensor], model: CLIP, data: Path) -> float:
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    (found,) = (one for one in evaluate(model, open_dataset(data, split="val")) if one.metric == "acc1")
    return found.value


def soup(models: list[str], data: Path, out: Path, *more: str) -> int:
    named = [argument for model in models for argument in ("--model", model)]
    return main(["soup", *named, "--data", str(data), "--out", str(out), "--device", "cpu", *more])


def test_soup_equals_recipe_on_plain_state_dicts(
    models: list[str], write_dataset: WriteDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_dataset()
    (write_dataset("other", labels=LABELS, split="val") / "val").rename(data / "val")
    model = clipkit.load(models[0])
    weights = {one: {k: v.double() for k, v in clipkit.load(one).state_dict().items()} for one in models}
    alone = {one: accuracy(weights[one], model, data) for one in models}
    order = sorted(models, key=alone.__getitem__, reverse=True)
    kept, best = [order[0]], alone[order[0]]
    for one in order[1:]:
        tried = [*kept, one]
        mean = {k: torch.stack([weights[name][k] for name in tried]).mean(dim=0) for k in weights[one]}
        if (score := accuracy(mean, model, data)) >= best:
            kept, best = tried, score
    assert 1 < len(kept) < len(models)  # some models are kept, some are not

    assert soup(models, data, tmp_path / "out") == 0
    made = json.loads((tmp_path / "out" / "model.json").read_text())["made_from"]
    assert (
        made["mean"] == kept
        and made["score"] == pytest.approx(best)
        and made["scores"] == pytest.approx(alone)
    )
    assert made["data"] == ["colours, split val"]
    for name, value in clipkit.load(tmp_path / "out").state_dict().items():
        wanted = torch.stack([weights[one][name] for one in kept]).mean(dim=0).float()
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith(f"wrote {tmp_path / 'out'}: the mean of {len(kept)} of 5")
    )


def test_invalid_soups_are_rejected(
    models: list[str], model: CLIP, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    data, out = write_dataset(), tmp_path / "out"
    with pytest.raises(ConfigError, match="two or more models: repeat --model"):
        soup(models[:1], tmp_path / "missing", out)
    with pytest.raises(ConfigError, match="are the same model: name each model once"):
        soup([models[0], models[1], models[0]], data, out)
    save_model(clipkit.create("ViT-Ti-4-16", seed=0), tmp_path / "other")
    with pytest.raises(ConfigError, match="differ in their architecture"):
        soup([models[0], str(tmp_path / "other")], data, out)
    with pytest.raises(DataError, match="split"):
        soup(models[:2], data, out, "--split", "val")
    with pytest.raises(ConfigError, match="already exists and is not empty"):
        soup(models[:2], data, tmp_path / "m0")
    assert not out.exists()
    assert soup(models[:2], data, out) == 0  # without a validation split
    assert json.loads((out / "model.json").read_text())["made_from"]["data"] == ["colours, split test"]
