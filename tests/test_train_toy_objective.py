"""Tests of an objective registered from outside the package: training, dry run, resuming and evaluation."""

import json
from pathlib import Path

import pytest

from tests.forked import Ended, Forked
from tests.small_trainings import Trainings, digests, error_of, go_back, metrics, pairs, trainings

__all__ = ["pairs", "trainings"]

STEPS = 6


@pytest.mark.long
def test_registered_objective_trains_resumes_and_evaluates(
    forked: Forked, trainings: Trainings, tmp_path: Path
) -> None:
    out = tmp_path / "run"

    def run(*more: str) -> Ended:
        settings = trainings.settings(out, (f"steps={STEPS}", "checkpoint.every_steps=3", *more))
        environment = {"CLIPKIT_CACHE": str(trainings.pairs.parent / "cache")}
        return forked.run("tests/toy_objective_program.py", settings, environment)

    unknown = run("loss.name=margins")
    assert error_of(unknown.stderr) == "error: loss.name = 'margins' is unknown: did you mean 'margin'?"
    refused = run("loss.name=margin", "distill.teacher=another")
    assert "cannot be combined with loss.name=margin" in error_of(refused.stderr)
    invalid = run("loss.name=margin", "margin.margin=-1")
    assert error_of(invalid.stderr) == "error: margin.margin = -1.0 is invalid: expected above 0"
    listed = run("--settings", "margin")
    assert listed.stdout.splitlines()[0].startswith("[margin] Squared hinge loss")
    assert "margin.margin = 0.2" in listed.stdout
    estimate = run("loss.name=margin", "--dry-run")
    assert estimate.returncode == 0 and 'name = "margin"' in estimate.stdout and " loss\n" in estimate.stdout

    done = run("loss.name=margin", 'eval.data=["digits"]')
    assert done.returncode == 0, done.stderr
    assert "note: this is a toy" in done.stderr
    lines = metrics(out)
    assert len(lines) == STEPS
    assert all(
        line["chance"] == pytest.approx(0.04) and "cosine" in line and "acc1" not in line for line in lines
    )
    assert all(line["scale"] <= 2.5 + 1e-6 for line in lines)
    scores = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {score["dataset"] for score in scores} == {"digits"}
    whole, losses = digests(out, STEPS), [line["loss"] for line in lines]
    assert len(set(losses)) == STEPS

    go_back(out, 3)
    again = run("loss.name=margin", 'eval.data=["digits"]')
    assert again.returncode == 0 and "at step 3" in again.stderr
    assert digests(out, STEPS) == whole and [line["loss"] for line in metrics(out)] == losses

    changed = run("loss.name=clip")
    assert 'loss.name: "margin" → "clip"' in error_of(changed.stderr)
