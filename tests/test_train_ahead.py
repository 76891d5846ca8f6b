"""A host that is two steps ahead of the decisions makes the same run as one that reads each at once."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.small_trainings import (
    BATCH,
    Trainings,
    checkpoint,
    digests,
    error_of,
    latest_step,
    metrics,
    pairs,
    process_of,
    trainings,
    wait_until,
    write_pairs,
)

__all__ = ["pairs", "trainings"]  # fixtures

pytestmark = pytest.mark.slow

# the learning rate is too small to change gradient norms, so about half of them are above the mean
SPIKES = ("optim.skip_above=1.01", "seed=1", "optim.lr=1e-7", "optim.clip_norm=0", "optim.average=0.9")


@pytest.fixture
def ahead(trainings: Trainings, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which runs read outcomes two steps later."""
    return lambda: monkeypatch.setattr(trainings, "program", "tests/lagging_program.py")


def results(out: Path, step: int) -> tuple[Any, ...]:
    """Return the bits of a checkpoint, the state of the loop and the values of all logged steps."""
    state = json.loads((checkpoint(out, step) / "state.json").read_text())
    names = ("step", "loss", "grad_norm", "scale", "lr", "skipped", "bad_samples")
    values = [tuple(line[name] for name in names) for line in metrics(out)]
    return digests(out, step), {**state, "seconds": 0}, values


OPTIMIZERS = ("adamw", "lion", "muon", "sgd", "stable_adamw")
LAUNCHES = [
    *((optimizer, 1) for optimizer in OPTIMIZERS),
    ("muon", 2),  # whose ranks divide the matrices; the others update all on each rank
    ("adamw", 2),
    *(pytest.param(optimizer, 4, marks=pytest.mark.long) for optimizer in OPTIMIZERS),
]


@pytest.mark.parametrize(("optimizer", "world"), LAUNCHES)
def test_runs_are_equal(
    optimizer: str, world: int, trainings: Trainings, ahead: Callable[[], None], tmp_path: Path
) -> None:
    settings = (
        "steps=27", "checkpoint.every_steps=23", "log.every_steps=9", f"optim.name={optimizer}", *SPIKES
    )  # fmt: skip

    def run(out: Path) -> tuple[Any, ...]:
        if world == 1:
            trainings.run(out, *settings)
        else:
            trainings.run_ranks(world, out, *settings)
        return results(out, 27)

    at_once = run(tmp_path / "at_once")
    ahead()
    later = run(tmp_path / "later")
    assert later == at_once
    assert at_once[1]["skipped"] > 0 and results(tmp_path / "later", 23)[1]["skipped"] > 0


@pytest.mark.parametrize("steps", [2, 6])
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_loss_that_is_not_finite_changes_nothing(
    world: int, steps: int, trainings: Trainings, ahead: Callable[[], None], tmp_path: Path
) -> None:
    settings = (f"steps={steps}", "optim.lr=1e30", "optim.warmup=0", "optim.clip_norm=0", "log.every_steps=9")

    def run(out: Path) -> tuple[Any, ...]:
        if world == 1:
            said = trainings.run(out, *settings, status=1)
        else:
            said = max(trainings.run_ranks(world, out, *settings, status=1), key=len)
        lists = [
            json.loads(line)
            for path in sorted(out.glob("not_finite*"))
            for line in path.read_text().splitlines()
        ]
        assert len(lists) == BATCH
        return error_of(said).replace(str(out), ""), lists, results(out, 1)

    at_once = run(tmp_path / "at_once")
    assert at_once[0].startswith("error: the loss of step 2 is nan; step 1 is saved, and ")
    ahead()
    assert run(tmp_path / "later") == at_once


def test_stopped_run_resumes(trainings: Trainings, ahead: Callable[[], None], tmp_path: Path) -> None:
    settings = ("steps=40", *SPIKES)
    trainings.run(tmp_path / "whole", *settings)
    ahead()
    out = tmp_path / "stopped"
    running = trainings.start(out, *settings)
    wait_until(lambda: (out / "metrics.jsonl").exists() and len(metrics(out)) > 2, running)
    os.kill(process_of(out), signal.SIGTERM)
    assert running.result().returncode == 128 + signal.SIGTERM
    assert 0 < latest_step(out) < 40
    trainings.run(out, *settings)
    assert results(out, 40)[:2] == results(tmp_path / "whole", 40)[:2]


def test_signal_to_one_rank_in_the_last_step_stops_all(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trainings, "program", "tests/signalled_program.py")
    said = trainings.run_ranks(2, tmp_path / "run", "steps=3", status=128 + signal.SIGTERM)
    assert "stopped and saved at step 3 of 3; the same command scores and reports" in said[0]
    assert latest_step(tmp_path / "run") == 3


def test_bad_samples_of_a_failed_batch_are_listed_once(
    trainings: Trainings, ahead: Callable[[], None], tmp_path: Path
) -> None:
    data = tmp_path / "data"
    write_pairs(data, 8)
    for shard in data.rglob("*.tar"):
        shard.write_bytes(
            shard.read_bytes().replace(b"JFIF", b"xxxx").replace(b"\xff\xd8\xff", b"\x00\x00\x00")
        )
    ahead()
    settings = (f"data.train={data}", "steps=6", "log.every_steps=9")
    error = error_of(trainings.run(tmp_path / "run", *settings, status=1))
    assert "samples in a row are bad" in error
    lines = (tmp_path / "run" / "bad_samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in lines} == {1}
