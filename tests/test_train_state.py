"""Trainings whose objective and terms have state: ``loss.name=global_clip`` and ``words.weight``; with Lion."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.small_trainings import (
    Trainings,
    checkpoint,
    digests,
    go_back,
    latest_step,
    metrics,
    pairs,
    trainings,
)

__all__ = ["pairs", "trainings"]

SETTINGS = (
    "steps=12", "checkpoint.every_steps=4", "loss.name=global_clip", "accumulate=2",
    "words.weight=0.5", "words.after=3", "words.vocabulary=64", "data.resample=true", "optim.name=lion",
)  # fmt: skip


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in metrics(out)]


@pytest.mark.slow
def test_resumed_run_equals_one_that_never_stopped(trainings: Trainings, tmp_path: Path) -> None:
    whole, killed, ranks = (tmp_path / name for name in ("whole", "killed", "ranks"))
    trainings.run(whole, *SETTINGS)
    trainings.kill_after(4, killed, *SETTINGS)
    assert latest_step(killed) < 12
    trainings.run(killed, *SETTINGS)
    assert digests(killed, 12) == digests(whole, 12)
    assert losses(killed) == losses(whole)
    assert ["loss_words" in line for line in metrics(whole)] == [False] * 3 + [True] * 9
    first, last = (load_file(checkpoint(whole, step) / "objective.safetensors") for step in (4, 12))
    assert {step["words.frequencies"][-1].item() for step in (first, last)} == {4, 36}  # captions
    assert 0 < (last["words.numbers"] >= 0).sum() <= 64
    seen = [state["global_clip.estimates"].isfinite().all(dim=1).sum().item() for state in (first, last)]
    assert 0 < seen[0] <= 16 and seen[0] < seen[1] <= 48

    # two ranks continue what one has begun
    shutil.copytree(whole, ranks)
    go_back(ranks, 4)
    trainings.run_ranks(2, ranks, *SETTINGS)
    assert losses(ranks) == pytest.approx(losses(whole), rel=1e-4)
    state = load_file(checkpoint(ranks, 12) / "objective.safetensors")
    for name, values in last.items():
        torch.testing.assert_close(state[name], values, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_words_are_predicted_from_stored_features(trainings: Trainings, tmp_path: Path) -> None:
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    settings = ("steps=6", "words.weight=0.5", "lock.image=backbone", "lock.text=backbone")
    trainings.run(plain, *settings)
    trainings.run(stored, *settings, "lock.store=true")
    assert losses(stored) == pytest.approx(losses(plain), abs=1e-5)
    name = "objective.safetensors"
    states = [load_file(checkpoint(out, 6) / name)["words.frequencies"] for out in (plain, stored)]
    assert torch.equal(*states)
