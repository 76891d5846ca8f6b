"""Tests of training on several ranks: sharding, evaluation, resuming on one and on three ranks, stopping.

Each test runs a real ``train.py``; tests/clipkit/test_distributed.py compares gradients.
"""

import json
import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import open_clip
import pytest
import simplejpeg
import torch
from safetensors.torch import load_file

import clipkit
from data.shards.writer import DatasetWriter, Record
from tests.small_trainings import (
    Trainings,
    checkpoint,
    ends,
    go_back,
    latest_step,
    metrics,
    pairs,
    process_of,
    trainings,
    wait_until,
)

__all__ = ["pairs", "trainings"]  # fixtures

pytestmark = pytest.mark.slow

STEPS, SAVED_EVERY = 6, 3
SETTINGS = (
    f"steps={STEPS}", f"checkpoint.every_steps={SAVED_EVERY}", "batch_size=8", "optim.average=0.9",
    "eval.every_steps=4", "eval.batch_size=2", "lock.unfreeze_every=2",
    "distill.teacher=average", "distill.weight=0.4", "optim.name=muon",
)  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five labelled test images: an odd number, so that one rank evaluates more than the other."""
    out, noise = tmp_path_factory.mktemp("data") / "images", np.random.default_rng(1)
    with DatasetWriter(out) as writer:
        for i in range(5):
            pixels = np.ascontiguousarray(noise.integers(0, 256, (16, 16, 3), dtype=np.uint8))
            image = simplejpeg.encode_jpeg(pixels)
            writer.write("test", Record(key=f"{i}", image=image, extension="jpg", label=i % 2))
        writer.finish({"name": "images"}, class_names=["zero", "one"], templates=["{c}"])
    return out


@pytest.fixture(scope="module")
def whole(trainings: Trainings, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run on one rank, uninterrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    trainings.run(out, *SETTINGS, f"eval.data=[{str(images)!r}]")
    return out


@pytest.fixture(scope="module")
def sharded(trainings: Trainings, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run on two ranks with full sharding."""
    out = tmp_path_factory.mktemp("sharded") / "run"
    said = trainings.run_ranks(2, out, *SETTINGS, f"eval.data=[{str(images)!r}]", "sharding=full")
    assert "done: " in said[0] and said[1] == ""
    return out


def test_sharded_training_equals_one_rank(whole: Path, sharded: Path) -> None:
    assert numbers(sharded, "loss") == pytest.approx(numbers(whole, "loss"), rel=1e-4)
    assert numbers(sharded, "grad_norm") == pytest.approx(numbers(whole, "grad_norm"), rel=1e-3)
    assert [line["image_to_text_R@1"] for line in metrics(sharded)] == [
        line["image_to_text_R@1"] for line in metrics(whole)
    ]
    for line in metrics(sharded):
        assert line["samples_per_second_per_gpu"] == line["samples_per_second"] / 2
    scored = [json.loads(line) for line in (sharded / "results.jsonl").read_text().splitlines()]
    assert {line["step"] for line in scored} == {4, 6}
    assert {line["n"] for line in scored} == {5}


def test_sharded_run_saves_ordinary_checkpoints(whole: Path, sharded: Path) -> None:
    theirs = set(open_clip.create_model("ViT-B-32", load_weights=False).state_dict())
    for step in (SAVED_EVERY, STEPS):
        folder = checkpoint(sharded, step)
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            path.name for path in checkpoint(whole, step).iterdir()
        )
        weights = load_file(folder / "model.safetensors")
        assert weights.keys() <= theirs and weights.keys() == clipkit.create("ViT-test").state_dict().keys()
        for file in ("model", "trained", "optimizer"):
            own = load_file(folder / f"{file}.safetensors")
            plain = load_file(checkpoint(whole, step) / f"{file}.safetensors")
            assert {name: tensor.shape for name, tensor in own.items()} == {
                name: tensor.shape for name, tensor in plain.items()
            }
        # the checkpoint contains this step and no later one, though training continued while it was written
        trained = load_file(folder / "trained.safetensors")["logit_scale/trained"]
        assert trained.shape == () and weights["logit_scale"].shape == () and weights["logit_scale"] > 1
        assert trained.exp().item() == pytest.approx(metrics(sharded)[step - 1]["scale"], rel=1e-6)
        made = load_file(folder / "optimizer.safetensors")
        assert made["logit_scale/step"].item() == made["visual.proj/step"].item() == step
    assert math.isfinite(clipkit.load(sharded).logit_scale.item())


@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.long)])
def test_sharded_run_resumes_unsharded(
    world: int, trainings: Trainings, whole: Path, sharded: Path, tmp_path: Path
) -> None:
    """Each rank holds the whole model; of three ranks, each has 2 or 3 of the 8 rows, in two parts."""
    out = tmp_path / "run"
    shutil.copytree(sharded, out)
    go_back(out, SAVED_EVERY)
    if world == 1:
        trainings.run(out, *SETTINGS, "accumulate=2")
    else:
        trainings.run_ranks(world, out, *SETTINGS, "accumulate=2")
    assert latest_step(out) == STEPS
    assert numbers(out, "loss") == pytest.approx(numbers(whole, "loss"), rel=1e-4)
    assert numbers(out, "scale") == pytest.approx(numbers(whole, "scale"), rel=1e-4)
    for name, tensor in load_file(checkpoint(whole, STEPS) / "model.safetensors").items():
        assert torch.allclose(
            load_file(checkpoint(out, STEPS) / "model.safetensors")[name], tensor, rtol=0, atol=2e-3
        ), name


def numbers(out: Path, name: str) -> list[float]:
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line[name] for line in lines]


@pytest.mark.long
def test_signal_to_one_rank_stops_all_ranks(trainings: Trainings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    running = trainings.start_ranks(2, out, "steps=1000", "loss.name=siglip", "sharding=hybrid")
    wait_until(lambda: (out / "metrics.jsonl").is_file() and len(metrics(out)) > 2, running[0])
    os.kill(process_of(out), signal.SIGUSR1)
    asked_at = len(metrics(out))
    said = ends(running, 128 + signal.SIGUSR1)  # also of the rank without a signal
    assert latest_step(out) == len(metrics(out)) <= asked_at + 2
    assert f"stopped and saved at step {latest_step(out)} of 1000" in said[0].splitlines()[-1]
    assert said[1] == ""
    assert clipkit.load(out).logit_scale.exp().item() == pytest.approx(metrics(out)[-1]["scale"], rel=1e-6)


@pytest.mark.long
def test_two_ranks_print_non_finite_loss_once(trainings: Trainings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = ("steps=6", "optim.lr=1e30", "optim.warmup=0", "optim.clip_norm=0", "batch_size=5")
    said = trainings.run_ranks(2, out, *settings, "sharding=full", status=1)
    lines = [line for line in "".join(said).splitlines() if line.startswith("error")]
    assert len(lines) == 1 and lines[0].startswith("error: the loss of step 2 is nan; step 1 is saved, and ")
    assert "the same command with --replay accumulate=2, in one process, repeats the step" in lines[0]
    assert latest_step(out) == 1
    listed = [
        [json.loads(line)["key"] for line in (out / name).read_text().splitlines()]
        for name in ("not_finite.jsonl", "not_finite-1.jsonl")
    ]
    assert [len(keys) for keys in listed] == [2, 3] and len(set(listed[0] + listed[1])) == 5

    said = trainings.run_ranks(2, out, *settings, "sharding=full", "--replay", status=1)
    lines = [line for line in "".join(said).splitlines() if line.startswith("error")]
    assert lines == [
        "error: --replay computes the whole batch in one process: start it with python, not torchrun"
    ]
    # the same command in one process, in as many parts as both ranks
    replay = trainings.start(out, *settings, "sharding=full", "--replay", "accumulate=2").result()
    assert replay.returncode == 0, replay.stderr
    first, *rows = replay.stdout.splitlines()
    assert first.startswith("step 2 in fp32: the output of ") and first.endswith(" is not finite")
    assert [row.split()[-3] for row in rows] == listed[0] + listed[1]
