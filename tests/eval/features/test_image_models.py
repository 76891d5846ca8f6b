"""Tests of timm models: features and pixels as in timm, rejected tasks and weights, page baselines."""

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from clipkit.errors import ConfigError
from clipkit.model import TimmVision
from clipkit.model.measure import image_flops
from clipkit.model.preprocess import eval_pixels
from eval import Encoder, open_dataset, read_results
from eval.__main__ import main
from eval.features.adapters import CroppedPreprocess, ImageModel, load_image_model
from eval.report import build_comparison
from tests.eval.made_up_results import DATASETS, EVIL, line, made_up, write
from tests.eval.web_page import Page

WriteDataset = Callable[..., Path]
DATA: Any = timm.data
NAMES = ("test_resnet.r160_in1k", "test_vit.r160_in1k")  # bilinear, bicubic


@pytest.fixture(scope="session")
def weights() -> dict[str, dict[str, torch.Tensor]]:
    """Random weights by model name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {name: timm.create_model(name, pretrained=False).state_dict() for name in NAMES}


@pytest.fixture
def hub(tmp_path: Path, weights: dict[str, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with the weights of both models, without a network."""
    for name, state in weights.items():
        save_file(state, snapshot(tmp_path / "hub", name) / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def snapshot(hub: Path, name: str) -> Path:
    repository = hub / f"models--timm--{name}"
    folder = repository / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text("0" * 40)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_features_equal_timm(name: str, hub: Path, write_dataset: WriteDataset) -> None:
    dataset = open_dataset(write_dataset(labels=[0] * 5))
    before = torch.random.get_rng_state()
    model = load_image_model(f"timm:{name.partition('.')[0]}")  # the tag is timm's default
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.name == f"timm:{name}" and not model.training
    theirs = timm.create_model(name, pretrained=True, num_classes=0).eval()
    transform = DATA.create_transform(**DATA.resolve_model_data_config(theirs))
    images = [Image.open(io.BytesIO(dataset.images.read(i))) for i in range(5)]
    with torch.inference_mode():
        want = theirs(torch.stack([transform(image) for image in images]))
    got = Encoder(model).images(dataset)
    torch.testing.assert_close(got.before_projection, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.projected, nn.functional.normalize(want, dim=-1), rtol=1e-4, atol=1e-4)
    assert image_flops(model).forward > 1e6


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 50),
    height=st.integers(1, 50),
    sizes=st.sampled_from([(8, 8), (8, 12), (6, 14), (8, 10), (8, 9), (7, 12)]),
    interpolation=st.sampled_from(["bilinear", "bicubic"]),
    mode=st.sampled_from(["center", "squash"]),
)
def test_pixels_equal_timm(
    width: int, height: int, sizes: tuple[int, int], interpolation: str, mode: str
) -> None:
    """Exactly if the margin is a multiple of 4, else with a shift of up to one pixel."""
    size, prepared = sizes
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    transform = DATA.create_transform(
        (3, size, size),
        interpolation=interpolation,
        crop_mode=mode,
        crop_pct=size / (prepared + 0.01),
        normalize=False,
    )
    want = transform(Image.fromarray(pixels))
    resize = {"center": "shortest", "squash": "squash"}[mode]
    preprocess = CroppedPreprocess(
        image_size=prepared, crop_size=size, interpolation=interpolation, resize_mode=resize
    )
    tower = TimmVision(image_size=size, name="none")
    model = ImageModel(nn.Identity(), name="none", tower=tower, width=1, preprocess=preprocess)
    whole = eval_pixels(pixels, preprocess)
    got = model.visual(whole[None])[0]
    if (prepared - size) % 4 == 0 or mode == "squash":
        assert torch.equal(got, want)
        return
    start = round((prepared - size) / 2)
    near = [
        whole[:, max(0, start + down) :, max(0, start + across) :][:, :size, :size]
        for down in (-1, 0, 1)
        for across in (-1, 0, 1)
    ]
    assert any(torch.equal(one, want) for one in near)


def test_only_tasks_without_text_are_accepted(hub: Path, write_dataset: WriteDataset, tmp_path: Path) -> None:
    labels = [i % 7 for i in range(28)]
    folder = write_dataset("probed", labels=labels, split="train")
    shutil.copytree(write_dataset("aside", labels=labels[:14]) / "test", folder / "test")
    (folder / "card.json").unlink()
    out = tmp_path / "r.jsonl"
    arguments = ["--model", "timm:test_resnet", "--data", str(folder), "--out", str(out)]
    tasks = ["linear-probe", "few-shot", "knn"]
    named = [word for task in tasks for word in ("--task", task)]
    assert main(["run", *arguments, *named, "--shots", "1"]) == 0
    lines = read_results(out)
    assert {line["task"] for line in lines} == set(tasks)
    first = lines[0]
    assert (first["model"], first["architecture"]) == ("timm:test_resnet", "timm:test_resnet.r160_in1k")
    assert (first["preprocessing"]["image_size"], first["preprocessing"]["crop_size"]) == (168, 160)
    assert len(first["model_hash"]) == 32
    out.unlink()
    for refused in (
        ["zero-shot"],
        ["retrieval"],
        ["compositional"],
        ["run"],
        ["run", *named, "--task", "zero-shot"],
    ):
        with pytest.raises(ConfigError, match="timm:test_resnet has no text tower: use linear-probe"):
            main([*refused, *arguments])
    with pytest.raises(ConfigError, match="no text tower"):
        Encoder(load_image_model("timm:test_resnet")).texts(["a cat"])
    assert not out.exists()


class Trap:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


def test_pickles_are_never_executed(
    hub: Path, weights: dict[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    name = NAMES[0]
    folder = snapshot(hub, name)
    want = load_image_model(f"timm:{name}").state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(weights[name], folder / "pytorch_model.bin")
    got = load_image_model(f"timm:{name}").state_dict()
    assert all(torch.equal(got[key], want[key]) for key in want)
    torch.save({**weights[name], "more": Trap(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="timm cannot load the weights of timm:test_resnet") as raised:
        load_image_model(f"timm:{name}")
    assert "\n" not in str(raised.value) and not (tmp_path / "ran").exists()


def test_unavailable_weights_are_rejected(hub: Path, weights: dict[str, dict[str, torch.Tensor]]) -> None:
    for name in ("test_resnet.none", "hf-hub:timm/test_resnet.r160_in1k", "test_resnt", ""):
        with pytest.raises(ConfigError, match="timm has no weights"):
            load_image_model(f"timm:{name}")
    file = snapshot(hub, NAMES[0]) / "model.safetensors"
    lacking = {key: value for key, value in weights[NAMES[0]].items() if not key.startswith("layer1")}
    save_file(lacking, file)
    with pytest.raises(ConfigError, match=r"cannot load the weights .* Missing key"):
        load_image_model("timm:test_resnet")
    file.write_bytes(b"broken")
    with pytest.raises(ConfigError, match="cannot load the weights"):
        load_image_model("timm:test_resnet")
    file.unlink()
    with pytest.raises(ConfigError, match=r"r160_in1k are not on this machine.*is there a network") as raised:
        load_image_model("timm:test_resnet")
    assert "\n" not in str(raised.value)


def test_page_compares_zero_shot_with_probe_of_baseline(tmp_path: Path) -> None:
    """Each CLIP model is compared with one probe on the same datasets, if any (CLIP paper, figure 5)."""
    lines = made_up(2, DATASETS[:2], tasks=("zero-shot", "linear-probe"))

    def page(*more: dict[str, Any]) -> Page:
        out = build_comparison([write(tmp_path / "r.jsonl", [*lines, *more])], tmp_path / "page.html")
        return Page(out.read_text(encoding="utf-8"))

    def probe(dataset: str, value: float, name: str = "timm:resnet50.tv_in1k" + EVIL) -> dict[str, Any]:
        more: dict[str, Any] = {"task": "linear-probe", "prompt_set": "", "weights": name}
        return {**line(0, dataset, "acc1", value, **more), "model": name}

    assert "Zero-shot minus linear probe, in percentage points" in page().words
    words = page(probe(DATASETS[0], 0.0), probe(DATASETS[1], 1.0)).words
    assert f"Zero-shot minus the linear probe of resnet50.tv_in1k{EVIL}, in percentage points" in words
    assert words.count("zero-shot is better on 1 of 2") == 2  # for both models: above 0, below 1
    assert "Zero-shot minus linear probe, in percentage points" in page(probe("another", 0.5)).words
