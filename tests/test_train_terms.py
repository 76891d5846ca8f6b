"""Tests of auxiliary losses: resuming after kill -9 bit for bit, and their curves in the report."""

from pathlib import Path
from typing import Any

import pytest

from eval.report import build_report
from tests.small_trainings import (
    Trainings,
    digests,
    latest_step,
    metrics,
    pairs,
    trainings,
)

__all__ = ["pairs", "trainings"]

SETTINGS = (
    "steps=12", "checkpoint.every_steps=4", "caption.weight=0.5", "caption.parallel=0.5", "caption.length=12",
    "accumulate=2", "optim.average=0.9",
    "masked.weight=0.5", "masked.target=features", "masked.after=5",
    "distill.teacher=average", "distill.weight=0.3",
    "views.weight=0.3", "views.count=2", "views.area=[0.1,0.5]", "views.size=8",
    "model.patch_dropout=0.25",
)  # fmt: skip


@pytest.mark.long
def test_auxiliary_losses_resume_bit_for_bit(trainings: Trainings, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    trainings.run(whole, *SETTINGS)
    trainings.kill_after(4, killed, *SETTINGS)
    assert latest_step(killed) < 12
    trainings.run(killed, *SETTINGS)
    assert digests(killed, 12) == digests(whole, 12)
    page = build_report(whole).read_text(encoding="utf-8")
    for name in ("caption", "masked", "views"):
        losses: list[Any] = [line.get(f"loss_{name}") for line in metrics(whole)]
        assert [line.get(f"loss_{name}") for line in metrics(killed)] == losses
        assert losses.count(None) == 5 * (name == "masked") and None not in losses[5:]
        assert name != "caption" or losses[-1] < losses[5]  # the targets of the other losses change too
        assert f"{name.capitalize()} loss" in page
    assert all("chance" not in line for line in metrics(whole))
