"""Tests of the GPU benchmark: a run on the CPU with a tiny model, and its plain model against open_clip."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import open_clip
import pytest
import torch

from bench.gpu_steps import make_batch
from bench.plain_clip import PlainCLIP, plain_loss
from clipkit.model.architectures import ARCHITECTURES, Architecture, TextTower, VisionTower
from clipkit.model.clip import create
from clipkit.model.tokenizer import END_OF_TEXT
from clipkit.objectives.clip import clip_loss

ROOT = Path(__file__).parents[2]
# packages that a machine with only torch, torchvision and timm may lack
ABSENT = (
    "fsspec", "ftfy", "matplotlib", "open_clip", "pyarrow", "regex", "rich", "simplejpeg", "sklearn", "tensorboard",
    "tokenizers", "torchcodec", "transformers", "wandb", "webdataset",
)  # fmt: skip


@pytest.mark.long
def test_all_parts_run_with_only_torch_torchvision_and_timm(tmp_path: Path) -> None:
    out = tmp_path / "results" / "gpu.json"
    program = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({ABSENT!r})); "
        f"sys.argv = ['gpu', '--device', 'cpu', '--small', '--out', {str(out)!r}, '--parts', "
        "'right', 'copies', 'loss', 'training']; "
        "runpy.run_module('bench.gpu', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found.keys() >= {"device", "right", "copies", "loss", "training", "minutes"}
    assert all(one["right"] for one in found["right"].values())
    training = found["training"]["ViT-Ti-4-16"]
    assert training.keys() == {"clipkit", "plain", "plain compiled"}
    for one in training.values():
        assert one["samples_per_second"] > 0 and one["mfu_of_measured_peak"] > 0
        assert len(one["seconds_by_round"]) == len(one["clipkit_faster_by_round"]) == 2
    assert training["clipkit"]["clipkit_faster"] == 1
    assert [row["rows"] for row in found["loss"]] == [64, 128]


@pytest.mark.long
def test_train_py_is_measured_resumed_and_checked_for_repeats(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [
        "bench.gpu",
        "--device",
        "cpu",
        "--small",
        "--out",
        str(out),
        "--parts",
        "exact",
        "loop",
        "resume",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, check=True, timeout=540)
    results = json.loads(out.read_text())
    for modes in results["exact"].values():
        assert modes["default"]["repeats exactly"] and modes["deterministic"]["repeats exactly"]
    assert results["loop"]["ViT-Ti-4-16"]["samples_per_second"] > 0
    assert results["resume"]["equal"]


def shapes() -> Architecture:
    return Architecture(
        embed_dim=24,
        vision=VisionTower(image_size=16, patch_size=4, width=32, layers=2, heads=2),
        text=TextTower(width=24, layers=2, heads=2, context_length=77),
    )


def test_plain_model_equals_clipkit_and_open_clip() -> None:
    shape = shapes()
    batch = make_batch(shape, 6, torch.device("cpu"))
    model, plain = create(shape, seed=0), PlainCLIP(shape)
    plain.load_state_dict(model.state_dict())
    vision, text = shape.get_plain_towers()
    theirs = open_clip.CLIP(
        24,
        {"image_size": 16, "patch_size": 4, "width": vision.width, "layers": 2, "head_width": 16},
        {"context_length": 77, "width": text.width, "heads": 2, "layers": 2},
    )
    theirs.load_state_dict(model.state_dict())
    features = model(batch.images, batch.tokens)
    for other in (plain(batch.normalized, batch.tokens), theirs(batch.normalized, batch.tokens)):
        for feature, same in zip(features, other, strict=False):
            torch.testing.assert_close(feature, same, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(clip_loss(*features), plain_loss(*features))


def test_captions_of_batches_average_sixteen_tokens() -> None:
    shape = replace(ARCHITECTURES["ViT-Ti-4-16"], text=TextTower(width=8, layers=1, heads=1))
    batch = make_batch(shape, 2000, torch.device("cpu"))
    assert batch.tokens.argmax(1).add(1).tolist() == batch.lengths
    assert (batch.tokens == END_OF_TEXT).sum(1).eq(1).all()
    assert 15 < sum(batch.lengths) / 2000 < 17
    assert min(batch.lengths) >= 4 and max(batch.lengths) > 30
