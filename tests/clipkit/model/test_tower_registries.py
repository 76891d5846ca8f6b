"""Tests of towers registered from outside the package: creation, training, resume and evaluation."""

import json
from pathlib import Path

import pytest
import torch

import clipkit
from clipkit.errors import CheckpointError, ConfigError
from clipkit.export import export
from clipkit.formats.checkpoint import parse_architecture, serialize_architecture
from clipkit.model import IMAGE_TOWERS, TEXT_TOWERS
from clipkit.model.architectures import Architecture
from clipkit.model.measure import image_flops, text_flops
from clipkit.model.names import create_architecture
from clipkit.training.parallel import recompute_blocks
from tests.clipkit.model.toy_towers import ToyText, ToyVision
from tests.forked import Ended, Forked
from tests.small_trainings import SETTINGS, digests, go_back, latest_step, write_pairs

PROGRAM = "tests/clipkit/model/toy_towers.py"
TOWERS = {"image": "model.image=toy:4", "text": "model.text=toy:8"}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IMAGE_TOWERS, "toy", ToyVision)
    monkeypatch.setitem(TEXT_TOWERS, "toy_text", ToyText)


def shape(tower: str) -> Architecture:
    return create_architecture("ViT-Ti-4-16", **{tower: TOWERS[tower].partition("=")[2]})  # type: ignore[arg-type]


@pytest.mark.parametrize("tower", TOWERS)
def test_model_with_registered_tower(tower: str) -> None:
    model = clipkit.create(shape(tower), seed=0).eval()
    again = clipkit.create(shape(tower), seed=0).eval()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert (
        parse_architecture(json.loads(json.dumps(serialize_architecture(model.architecture))))
        == model.architecture
    )
    assert model.architecture.is_native == (tower == "image")
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    assert torch.allclose(model.encode_image(pixels).norm(dim=-1), torch.ones(2))
    assert torch.allclose(clipkit.encode_text(["a", "b c"], model).norm(dim=-1), torch.ones(2))
    with pytest.raises(ConfigError, match="no tower like this one"):
        export(model, Path("nowhere"), to=["open_clip"])


def test_flops_of_registered_towers_are_measured() -> None:
    image, text = (clipkit.create(shape(tower), seed=0) for tower in TOWERS)
    assert image_flops(image).forward == 2 * 48 * 16 + 2 * 16 * 128
    assert text_flops(text, 5).forward >= 2 * 8 * 128


def test_default_tower_rejects_recomputation() -> None:
    recompute_blocks(clipkit.create(shape("image"), seed=0), 1)  # has no blocks
    with pytest.raises(ConfigError, match="the text tower, Sequential, cannot recompute its blocks"):
        recompute_blocks(clipkit.create(shape("text"), seed=0), 1)


def test_unknown_kinds_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"give timm:NAME.* or toy:CELLS"):
        create_architecture("ViT-Ti-4-16", image="toys:4")
    stored = {**serialize_architecture(shape("image")), "vision": {"kind": "toys"}}
    with pytest.raises(CheckpointError, match="kind = 'toys' is unknown: did you mean 'toy'"):
        parse_architecture(stored)


@pytest.mark.long
@pytest.mark.parametrize("tower", ["image", "text"])
def test_train_resume_and_evaluate(tower: str, forked: Forked, tmp_path: Path) -> None:
    pairs, out = write_pairs(tmp_path / "pairs"), tmp_path / "run"
    scored = write_pairs(tmp_path / "scored", 8, split="test")

    def run(*arguments: str) -> Ended:
        ended = forked.run(PROGRAM, arguments, {"CLIPKIT_CACHE": str(tmp_path / "cache")})
        assert ended.returncode == 0, ended.stderr[-3000:]
        return ended

    settings = [
        "train",
        f"data.train={pairs}",
        *(setting for setting in SETTINGS if not setting.startswith("model.name=")),
        "model.name=ViT-Ti-4-16",  # as ``shape``
        TOWERS[tower],
        "checkpoint.every_steps=2",
        "steps=4",
    ]
    costs = run(*settings, f"out={out}", "--dry-run").stdout
    assert "FLOPs" in costs and not out.exists()
    run(*settings, f"out={out}")
    finished = digests(out, 4)
    go_back(out, 2)
    run(*settings, f"out={out}")
    assert latest_step(out) == 4 and digests(out, 4) == finished
    model = clipkit.load(str(out))
    assert model.architecture == shape(tower)
    results = tmp_path / "results.jsonl"
    run("eval", "run", "--model", str(out), "--data", str(scored), "--out", str(results))
    scores = [json.loads(line) for line in results.read_text().splitlines()]
    assert {score["metric"] for score in scores} >= {"image_to_text_R@1", "text_to_image_R@1"}
