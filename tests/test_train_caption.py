"""A training that predicts captions resumes bit for bit after kill -9, and shows its loss."""

import os
import signal
from pathlib import Path

import pytest

from eval.report import build_report
from tests.small_trainings import (
    Trainings,
    digests,
    latest_step,
    metrics,
    pairs,
    process_of,
    trainings,
    wait_until,
)

__all__ = ["pairs", "trainings"]

SETTINGS = (
    "steps=12", "checkpoint.every_steps=3", "caption.weight=0.5", "caption.parallel=0.5", "caption.length=12",
    "accumulate=2", "optim.average=0.9",
)  # fmt: skip


@pytest.mark.long
def test_captions_are_trained_and_resumed_bit_for_bit(trainings: Trainings, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    trainings.run(whole, *SETTINGS)
    running = trainings.start(killed, *SETTINGS)
    wait_until(lambda: (killed / "checkpoints" / "LATEST").exists() and latest_step(killed) >= 3, running)
    os.kill(process_of(killed), signal.SIGKILL)
    running.result()
    assert latest_step(killed) < 12
    trainings.run(killed, *SETTINGS)
    assert digests(killed, 12) == digests(whole, 12)
    lines = [line for line in metrics(whole) if "loss_caption" in line]
    assert len(lines) == 12 and all("chance" not in line for line in lines)
    assert [line["loss_caption"] for line in metrics(killed)] == [line["loss_caption"] for line in lines]
    assert lines[-1]["loss_caption"] < lines[0]["loss_caption"]
    assert "Loss of caption" in build_report(whole).read_text(encoding="utf-8")
