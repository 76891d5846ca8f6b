"""Tests of LoRA adapters: merged and unmerged models agree, checkpoints omit the base, resume is exact."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import clipkit
from clipkit.errors import CheckpointError, ConfigError
from clipkit.formats.checkpoint import model_hash, save_model
from clipkit.model.architectures import Adapters, Architecture, TextTower, VisionTower
from clipkit.model.clip import CLIP, create
from clipkit.model.lora import add_adapters, is_adapter, merge_adapters
from clipkit.model.names import create_architecture
from tests.forked import Forked
from tests.small_trainings import write_pairs

ALL = Adapters(rank=2, alpha=4.0, image=True, text=True, source="", hash="")
OWN = Architecture(
    embed_dim=24,
    vision=VisionTower(image_size=32, patch_size=8, width=32, layers=2, heads=2),
    text=TextTower(width=32, layers=2, heads=2, context_length=8, vocab_size=60),
)


def trained(model: CLIP) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def randomize(model: CLIP) -> None:
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(parameter, std=0.2)


@pytest.mark.parametrize("image", ["", "timm:vit_tiny_patch16_224", "timm:resnet10t"])
def test_merged_and_unmerged_models_agree(image: str) -> None:
    shape = OWN if not image else replace(OWN, vision=create_architecture("ViT-test", image=image).vision)
    model = create(shape, seed=0).eval()
    images = torch.randint(
        0, 256, (2, 3, shape.vision.image_size, shape.vision.image_size), dtype=torch.uint8
    )
    tokens = torch.randint(1, 59, (3, 8))
    before = model.encode_image(images), model.encode_text(tokens)
    if image.endswith("resnet10t"):
        with pytest.raises(
            ConfigError, match=r"lora\.image = True: the image tower has no blocks with matrices"
        ):
            add_adapters(model, ALL)
        return
    with pytest.raises(ConfigError, match="exceeds the rank of the matrices"):
        add_adapters(model, replace(ALL, rank=10_000))
    add_adapters(model, ALL)
    for own, other in zip(before, (model.encode_image(images), model.encode_text(tokens)), strict=True):
        assert torch.equal(own, other)  # adapters are initially zero
    randomize(model)
    changed = model.encode_image(images), model.encode_text(tokens)
    assert not torch.allclose(changed[0], before[0], atol=1e-3)
    merge_adapters(model)
    for own, other in zip(changed, (model.encode_image(images), model.encode_text(tokens)), strict=True):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=0)
    assert model.state_dict().keys() == create(shape, seed=0).state_dict().keys()


def test_only_adapters_and_temperature_are_trained() -> None:
    model = create(OWN, seed=0)
    add_adapters(model, replace(ALL, text=False))
    assert trained(model) - {"logit_scale"} == {
        name for name, _ in model.named_parameters() if is_adapter(name)
    }
    adapted = {name.partition(".parametrizations")[0] for name in trained(model)} - {"logit_scale"}
    assert adapted == {
        f"visual.transformer.resblocks.{block}.{part}"
        for block in range(2)
        for part in ("attn", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_pairs(folder / "pairs")
    save_model(clipkit.create("ViT-test", seed=3).eval(), folder / "model")
    return folder


def run(forked: Forked, base: Path, out: Path, *more: str) -> str:
    settings = [
        f"out={out}", f"model.weights={base / 'model'}", "model.name=ViT-test", "lora.rank=2",
        f"data.train={base / 'pairs'}", "batch_size=8", "data.workers=0", "eval.data=[]", "optim.warmup=1",
        "optim.lr=0.01", "checkpoint.every_steps=2", "log.every_steps=1", *more,
    ]  # fmt: skip
    done = forked.run("train.py", settings, {}, timeout=300)
    return done.stderr if done.returncode == 0 else f"failed: {done.stderr}"


@pytest.mark.slow
def test_resume_is_bit_exact_and_checkpoints_omit_the_base(
    forked: Forked, base: Path, tmp_path: Path
) -> None:
    extra = ("optim.average=0.9", "accumulate=2")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert "done" in run(forked, base, whole, "steps=4", *extra)
    assert "done" in run(forked, base, parts, "steps=4", "optim.schedule=cosine", *extra)
    newest = parts / "checkpoints" / "step_00000004"
    for path in newest.iterdir():
        path.unlink()  # as if it had not been written
    newest.rmdir()
    (parts / "report.html").unlink()
    resumed = run(forked, base, parts, "steps=4", *extra)
    assert "resuming" in resumed and "is not read" not in resumed
    for name in ("model.safetensors", "trained.safetensors", "optimizer.safetensors"):
        one = whole / "checkpoints" / "step_00000004" / name
        assert one.read_bytes() == (newest / name).read_bytes(), name
    stored = load_file(newest / "model.safetensors")
    assert all(is_adapter(name) or name == "logit_scale" for name in stored)

    loaded = clipkit.load(whole)
    start = clipkit.load(base / "model")
    assert loaded.adapters is None and loaded.state_dict().keys() == start.state_dict().keys()
    name = "visual.transformer.resblocks.0.mlp.c_fc"
    adapter = f"{name}.parametrizations.weight.0"
    difference = loaded.state_dict()[f"{name}.weight"] - start.state_dict()[f"{name}.weight"]
    torch.testing.assert_close(
        difference, stored[f"{adapter}.up"] @ stored[f"{adapter}.down"], atol=1e-6, rtol=1e-4
    )
    assert difference.abs().max() > 1e-4


@pytest.mark.slow
def test_missing_and_changed_bases_are_rejected(forked: Forked, base: Path, tmp_path: Path) -> None:
    moved = tmp_path / "base"
    moved.mkdir()
    for name in ("model", "pairs"):
        (base / name).rename(moved / name)
    try:
        assert "done" in run(forked, moved, tmp_path / "run", "steps=1")
        card = json.loads((tmp_path / "run/checkpoints/step_00000001/model.json").read_text())
        assert card["adapters"]["hash"] == model_hash(clipkit.load(moved / "model"))
    finally:
        for name in ("model", "pairs"):
            (moved / name).rename(base / name)
    with pytest.raises(
        CheckpointError, match=r"has adapters of .*base/model, which cannot be loaded: no model at"
    ):
        clipkit.load(tmp_path / "run")
    save_model(clipkit.create("ViT-test", seed=4).eval(), moved / "model")
    with pytest.raises(CheckpointError, match="whose weights have changed since: restore them"):
        clipkit.load(tmp_path / "run")
    shutil.copytree(base / "pairs", moved / "pairs")
    assert "whose weights have changed since: restore them" in run(forked, moved, tmp_path / "run", "steps=2")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lora.alpha=2", "has no effect unless lora.rank is set"),
        (
            "lora.image=false lora.text=false lora.rank=2 model.weights=x",
            "expected true with lora.image=false",
        ),
        ("lora.rank=2", "has no effect unless model.weights is set"),
        ("lora.rank=2 model.weights=x lock.image=all", "cannot be combined with lora.rank"),
    ],
)
def test_invalid_lora_settings_are_rejected(setting: str, message: str) -> None:
    from clipkit.config import load_config

    with pytest.raises(ConfigError, match=message):
        load_config(Path("configs/quickstart.toml"), setting.split())
