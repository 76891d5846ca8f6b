"""Tests of trainings that end before their last step: with torchrun, by a signal, or without a usable batch.

Each test runs a real ``train.py``; resumed runs are compared with uninterrupted ones.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.small_trainings import (
    Trainings,
    digests,
    ends,
    go_back,
    latest_step,
    metrics,
    pairs,
    process_of,
    trainings,
    wait_until,
    write_pairs,
)  # fmt: skip

__all__ = ["pairs", "trainings"]

ROOT = Path(__file__).parent.parent
STEPS = 200  # ranks notice within some of them that torchrun has died
SECONDS = 240  # timeout of a training


class Launched:
    """A training started by torchrun."""

    def __init__(self, trainings: Trainings, world: int, out: Path, *more: str) -> None:
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(world),
        ]
        # programs that are not forked know only clipkit's architectures
        own = ("model.name=ViT-Ti-4-16", "data.workers=1", "checkpoint.every_steps=10")
        settings = trainings.settings(out, (*own, *more))
        self.out, self.log = out, out.with_name(f"{out.name}.log")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["CLIPKIT_CACHE"] = str(trainings.pairs.parent / "cache")
        with self.log.open("ab") as file:
            self.torchrun = subprocess.Popen(
                [*launch, str(ROOT / "train.py"), *settings], cwd=ROOT, env=environment, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip

    def wait_for_steps(self, steps: int) -> None:
        figures, until = self.out / "metrics.jsonl", time.monotonic() + SECONDS
        while not figures.is_file() or figures.read_text().count("\n") < steps:
            assert self.torchrun.poll() is None and time.monotonic() < until, self.log.read_text()[-3000:]
            time.sleep(0.002)

    def processes(self) -> set[int]:
        """Find all processes that train in the folder: torchrun, ranks and their loader processes."""
        children = set()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"out={self.out}".encode() in (process / "cmdline").read_bytes().split(b"\0"):
                    children.add(int(process.name))
        return children

    def wait_until_gone(self, processes: set[int]) -> None:
        until = time.monotonic() + SECONDS
        while left := processes & self.processes():
            assert time.monotonic() < until, left
            time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_ranks_exit_after_torchrun_is_killed_and_run_resumes(
    world: int, trainings: Trainings, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run = Launched(trainings, world, whole, f"steps={STEPS}")
    assert run.torchrun.wait(timeout=SECONDS) == 0, run.log.read_text()[-3000:]

    run = Launched(trainings, world, killed, f"steps={STEPS}")
    run.wait_for_steps(random.SystemRandom().randint(11, 60))
    started = run.processes()
    assert len(started) >= 1 + 2 * world
    run.torchrun.kill()
    run.torchrun.wait()
    again = Launched(trainings, world, killed, f"steps={STEPS}")  # at once: ranks may still be running
    assert again.torchrun.wait(timeout=SECONDS) == 0, again.log.read_text()[-3000:]
    run.wait_until_gone(started)
    assert "error: torchrun has died" in again.log.read_text()
    assert f"resuming {killed} at step" in again.log.read_text()
    assert digests(killed, STEPS) == digests(whole, STEPS)
    assert [line["loss"] for line in metrics(killed)] == [line["loss"] for line in metrics(whole)]
    assert not again.processes()


@pytest.mark.long
def test_signalled_ranks_save_after_torchrun_is_killed(trainings: Trainings, tmp_path: Path) -> None:
    run = Launched(trainings, 2, tmp_path / "run", "steps=100000", "checkpoint.every_steps=0")
    run.wait_for_steps(3)
    started = run.processes()
    for process in started - {run.torchrun.pid}:  # SLURM signals all processes, which kills torchrun
        os.kill(process, signal.SIGUSR1)
    run.torchrun.kill()
    run.torchrun.wait()
    run.wait_until_gone(started)
    assert latest_step(run.out) == len(metrics(run.out)) >= 3


def test_second_training_waits_for_one_that_is_stopping(trainings: Trainings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = trainings.start(out, "steps=100000", "checkpoint.every_steps=0")
    wait_until(lambda: (out / "metrics.jsonl").is_file() and len(metrics(out)) > 2, first)
    holder = process_of(out)
    second = trainings.start(out, "steps=100000", "checkpoint.every_steps=0")
    os.kill(holder, signal.SIGTERM)
    assert first.result().returncode == 128 + signal.SIGTERM
    stopped_at = latest_step(out)
    wait_until(lambda: len(metrics(out)) > stopped_at, second)
    os.kill(process_of(out), signal.SIGINT)
    ended = second.result()
    assert ended.returncode == 128 + signal.SIGINT, ended.stderr
    assert f"resuming {out} at step {stopped_at}" in ended.stderr
    assert latest_step(out) == len(metrics(out))


@pytest.fixture
def breakable(tmp_path: Path) -> Iterator[Path]:
    """A copy of ``pairs`` that a test may damage."""
    yield write_pairs(tmp_path / "breakable" / "pairs")


def break_all(data: Path) -> dict[Path, bytes]:
    """Overwrite the beginning of every image and return the previous content."""
    before = {shard: shard.read_bytes() for shard in data.rglob("*.tar")}
    for shard, content in before.items():
        assert content.count(b"\xff\xd8\xff") >= 8
        shard.write_bytes(content.replace(b"\xff\xd8\xff", b"\0\0\0"))
    return before


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_run_stopped_by_broken_data_resumes_after_repair(
    world: int, trainings: Trainings, breakable: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    settings = (f"data.train={breakable}", "data.workers=1", "steps=8", "checkpoint.every_steps=4")
    trainings.run_ranks(world, out, *settings)
    whole, losses = digests(out, 8), [line["loss"] for line in metrics(out)]
    go_back(out, 4)
    before = break_all(breakable)
    said = trainings.run_ranks(world, out, *settings, status=1)
    errors = [line for line in "".join(said).splitlines() if line.startswith("error")]
    assert len(errors) == 1 and errors[0].startswith("error: 32 samples in a row are bad, the last is ")
    assert errors[0].endswith("; step 4 is saved; the same command resumes once this is fixed")
    assert latest_step(out) == 4
    for rank in range(world):
        name = "bad_samples.jsonl" if rank == 0 else f"bad_samples-{rank}.jsonl"
        listed = [json.loads(line) for line in (out / name).read_text().splitlines()]
        assert len(listed) == 32
        assert all(line["step"] == 5 and line["cause"] and Path(line["shard"]) in before for line in listed)

    for shard, content in before.items():
        shard.write_bytes(content)
    trainings.run_ranks(world, out, *settings)
    assert digests(out, 8) == whole and [line["loss"] for line in metrics(out)] == losses
    assert not any(path.read_text() for path in out.glob("bad_samples*.jsonl"))
    assert metrics(out)[-1]["bad_samples"] == 0


def test_run_without_steps_restarts_on_other_data(
    trainings: Trainings, breakable: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    settings = ("data.workers=0", "steps=2")
    break_all(breakable)
    said = trainings.run_ranks(1, out, f"data.train={breakable}", *settings, status=1)
    assert "".join(said).rstrip().endswith("; no step was made")
    assert len((out / "bad_samples.jsonl").read_text().splitlines()) == 32
    trainings.run_ranks(1, out, *settings)
    assert len(metrics(out)) == 2 and not (out / "bad_samples.jsonl").read_text()


@pytest.mark.long
def test_killed_loader_of_one_rank_makes_all_ranks_save_and_exit(
    trainings: Trainings, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    settings = ("steps=100000", "checkpoint.every_steps=0", "data.workers=1", "sharding=full")
    running = trainings.start_ranks(2, out, *settings)
    wait_until(lambda: (out / "metrics.jsonl").is_file() and len(metrics(out)) > 2, running[0])
    trainer = process_of(out)
    (loader,) = Path(f"/proc/{trainer}/task/{trainer}/children").read_text().split()
    os.kill(int(loader), signal.SIGKILL)
    said = ends(running, 1)
    errors = [line for line in "".join(said).splitlines() if line.startswith("error")]
    step = latest_step(out)
    assert len(errors) == 1 and errors[0].startswith("error: a loader process was killed (signal 9)"), said
    assert f"; step {step} is saved" in errors[0]
    assert step == len(metrics(out)) > 2
