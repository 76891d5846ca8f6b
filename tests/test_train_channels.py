"""Tests of training on multispectral and 12-bit images, by real trainings and evaluations."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import clipkit
from clipkit.formats.checkpoint import save_model
from clipkit.model.clip import create
from data.pack import pack
from tests.clipkit.format_images import bands_of, dicom_of
from tests.forked import Forked
from tests.small_trainings import SETTINGS, error_of

BANDS, CLASSES = 12, ("field", "forest", "town", "water")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12-band images by class, packed for training, and a folder of others; only band 11 depends on the class."""
    folder = tmp_path_factory.mktemp("scenes")
    random = np.random.default_rng(0)
    for split, count in (("train", 24), ("test", 10)):
        for label, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                values = random.integers(0, 3000, (16, 16, BANDS)).astype(np.uint16)
                values[..., 11] = 700 * (label + 1) + random.integers(0, 200, (16, 16))
                path = folder / split / name / f"{number}.tif"
                path.write_bytes(bands_of(values, compression="zlib", planarconfig="separate"))
    report = pack(folder / "train", folder / "packed", progress=False)
    assert (report.marks["deep"], report.bad) == (24 * len(CLASSES), {})
    return folder


def train(forked: Forked, folder: Path, *more: str, status: int = 0) -> str:
    names = {setting.partition("=")[0] for setting in more}
    settings = [setting for setting in SETTINGS if setting.partition("=")[0] not in names]
    done = forked.run("train.py", [*settings, *more], {"CLIPKIT_CACHE": str(folder / "cache")})
    assert done.returncode == status, done.stderr[-3000:]
    return done.stderr


def test_training_learns_from_an_added_band(forked: Forked, scenes: Path, tmp_path: Path) -> None:
    save_model(create("ViT-test", seed=0), tmp_path / "rgb")
    templates = json.dumps(["a satellite image of {}"])
    settings = (
        f"data.train={scenes / 'packed/train'}", "model.name=ViT-test", f"model.weights={tmp_path / 'rgb'}",
        "pixels.range=0,3000", f"data.caption_templates={templates}",
        "loss.same=positives", "batch_size=24", "steps=60", "optim.warmup=5", "optim.lr=1e-3", "optim.min_lr=0",
        f"eval.data={json.dumps([str(scenes / 'test')])}", "eval.every_steps=0",
    )  # fmt: skip
    train(forked, scenes, *settings, f"pixels.channels={BANDS}", f"out={tmp_path / 'run'}")
    lines = [json.loads(line) for line in (tmp_path / "run/results.jsonl").read_text().splitlines()]
    scores = {line["metric"]: line["value"] for line in lines if line.get("step") == 60}
    assert scores["acc1"] >= 0.9
    model = clipkit.load(tmp_path / "run")
    assert model.preprocess.channels == BANDS and model.preprocess.pixel_range == (0.0, 3000.0)
    paths = sorted((scenes / "test/water").iterdir())
    probabilities = clipkit.classify(paths, CLASSES, model, templates=["a satellite image of {}"])
    assert (probabilities.argmax(dim=1) == CLASSES.index("water")).float().mean() >= 0.9
    error = error_of(
        train(forked, scenes, *settings, f"out={tmp_path / 'rgb_run'}", "pixels.channels=3", status=1)
    )
    assert "image with 12 channels, and the model has 3: set pixels.channels = 12" in error


@pytest.mark.parametrize("kind", ["png", "tif", "dcm"])
def test_grays_of_12_bits_are_trained_and_evaluated_with_the_same_pixels(
    forked: Forked, tmp_path: Path, kind: str
) -> None:
    random = np.random.default_rng(0)
    for number in range(16):
        values = random.integers(0, 4096, (16, 16)).astype(np.uint16)
        path = tmp_path / "images" / CLASSES[number % 2] / f"{number}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "dcm":
            path.write_bytes(dicom_of(values, bits=12))
        else:
            Image.fromarray(values).save(path)
    pack(tmp_path / "images", tmp_path / "packed", progress=False)
    settings, out = (f"data.train={tmp_path / 'packed/train'}", "steps=2"), f"out={tmp_path / 'run'}"
    error = error_of(train(forked, tmp_path, *settings, out, status=1))
    assert "16-bit grayscale image with values from" in error and "`python -m data inspect` reports" in error
    assert not list((tmp_path / "run").glob("**/*.safetensors"))  # before the first step
    said = train(forked, tmp_path, *settings, out, "pixels.range=0,4095")
    assert (
        "values from 0 to 4095 of deep images become 0 to 255" in said
        and "outside the pixel range" not in said
    )
    model = clipkit.load(tmp_path / "run")
    features = clipkit.encode_image(sorted((tmp_path / "images/field").iterdir()), model)
    assert torch.isfinite(features).all()
    said = train(forked, tmp_path, *settings, f"out={tmp_path / 'clamped'}", "pixels.range=0,2000")
    assert re.search(r"8 of 8 images have values outside the pixel range 0,2000", said)
