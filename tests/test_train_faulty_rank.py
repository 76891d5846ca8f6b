"""Trainings with a faulty rank: a slow one is named, and one with other weights than the others stops the run."""

import json
import os
from pathlib import Path

import pytest

from tests.small_trainings import Trainings, ends, error_of, latest_step, pairs, trainings

__all__ = ["pairs", "trainings"]  # fixtures

pytestmark = pytest.mark.slow

PROGRAM = "tests/faulty_rank_program.py"
SHORT = ("optim.name=adamw", "batch_size=12")


def test_slow_rank_is_named_with_the_cause(trainings: Trainings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    started = trainings.start_ranks(3, out, *SHORT, "steps=20", program=PROGRAM, FAULT="slow")
    said, *others = ends(started)
    name = f"rank 2 on {os.uname().nodename}"
    described = [line for line in said.splitlines() if f"{name} takes " in line]
    assert any("% longer than the others, mostly in forward: " in line for line in described), said[-3000:]
    assert not any("takes" in line for line in others)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert "ranks" not in lines[0]  # the first step allocates and compiles
    named = [line for line in lines[3:] if line["slowest_rank"] == 2 and line["slowest_excess"] > 0.15]
    assert len(named) >= 5  # not in each of them, on a busy machine
    ranks = named[-1]["ranks"]
    assert ranks["names"][2] == name and ranks["forward"][2] > 510 and ranks["forward"][0] > 390, described
    assert ranks["waiting"][2] == 0 and ranks["waiting"][0] > 10 and ranks["waiting"][1] > 10
    assert "forward" in {line["ranks"]["cause"] for line in named}
    page = (out / "report.html").read_text()
    assert name in page


def test_flipped_bit_in_the_weights_of_a_rank_stops_the_run(trainings: Trainings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = (*SHORT, "steps=40", "checkpoint.every_steps=2", "checkpoint.compare_every_steps=4")
    started = trainings.start_ranks(3, out, *settings, program=PROGRAM, FAULT="bit")
    errors = [error_of(text) for text in ends(started, 1) if "error" in text]
    assert len(errors) == 1
    assert (
        f"after step 4 the weights of rank 2 on {os.uname().nodename} differ from those of the oth"
        in errors[0]
    )
    assert latest_step(out) == 2  # nothing is saved after the bit flipped


def test_ranks_wait_long_for_rank_0_that_saves_or_scores(trainings: Trainings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    # the second checkpoint waits for the first one, and the end for the second one
    settings = ("steps=3", "checkpoint.every_steps=1", "eval.every_steps=2")
    ends(trainings.start_ranks(2, out, *SHORT, *settings, program=PROGRAM, FAULT="saving"))
    assert latest_step(out) == 3
