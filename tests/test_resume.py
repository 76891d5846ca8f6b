"""Tests of resuming: after kill -9 or SIGTERM, weights equal those of an uninterrupted run bit for bit."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import simplejpeg

from data.shards.writer import DatasetWriter, Record
from data.tokenizer import train_tokenizer, write_tokenizer
from tests.forked import Forked

ROOT = Path(__file__).parent.parent
STEPS = 24


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty images of noise with captions, in three shards."""
    out = tmp_path_factory.mktemp("data") / "pairs"
    noise = np.random.default_rng(0)
    with DatasetWriter(out, samples_per_shard=20) as writer:
        for i in range(60):
            pixels = noise.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            image = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels))
            writer.write("train", Record(key=f"{i:04d}", image=image, extension="jpg", caption=f"noise {i}"))
        writer.finish({"name": "pairs"})
    write_tokenizer(train_tokenizer(["noise"], vocab=300), out.parent / "tokenizer")
    return out


def _settings(pairs: Path, out: Path, *more: str) -> list[str]:
    settings = [
        f"data.train={pairs}", f"out={out}", f"steps={STEPS}", "batch_size=8", "model.name=ViT-Ti-4-16",
        "data.workers=1", "optim.warmup=4", "eval.data=[]", "log.tensorboard=false", "log.every_steps=1",
        "checkpoint.every_steps=5", "checkpoint.keep=2", "shape.image_layers=1", "shape.text_layers=1",
        "shape.text_width=64", f"model.tokenizer={pairs.parent / 'tokenizer'}",
    ]  # fmt: skip
    by_name = {setting.partition("=")[0]: setting for setting in (*settings, *more)}
    return [*by_name.values()]


def _command(pairs: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *_settings(pairs, out, *more)]


class Train(Protocol):
    def __call__(self, out: Path, *more: str) -> str:
        """Train to the end on ``pairs`` and return stderr."""


@pytest.fixture(scope="module")
def train(pairs: Path, forked: Forked) -> Train:
    def run(out: Path, *more: str) -> str:
        done = forked.run("train.py", _settings(pairs, out, *more), {}, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stderr

    return run


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _stop(pairs: Path, out: Path, *, at: int, how: signal.Signals) -> int:
    """Start a run, send it a signal after ``at`` steps and return the exit status."""
    run = subprocess.Popen(
        _command(pairs, out),
        cwd=ROOT,
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.poll() is None:
        if metrics.is_file() and metrics.read_text().count("\n") >= at:
            run.send_signal(how)
            break
        time.sleep(0.002)
    return run.wait(timeout=120)


def _weights(out: Path) -> bytes:
    return (out / "checkpoints" / f"step_{STEPS:08d}" / "model.safetensors").read_bytes()


def _losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    train(out)
    return out


@pytest.mark.slow
def test_resume_after_sigkill_gives_identical_weights(
    pairs: Path, train: Train, uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    # saving the second checkpoint waits until the first one is complete
    at = random.SystemRandom().randint(11, STEPS - 2)
    assert _stop(pairs, out, at=at, how=signal.SIGKILL) == -signal.SIGKILL
    said = train(out, "data.workers=0")  # the number of workers may change
    assert "resuming" in said
    assert _weights(out) == _weights(uninterrupted), f"killed at step {at}"
    assert _losses(out) == _losses(uninterrupted)


@pytest.mark.slow
@pytest.mark.long
def test_sigterm_saves_exits_with_status_143_and_resumes(
    pairs: Path, train: Train, uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "terminated"
    assert _stop(pairs, out, at=7, how=signal.SIGTERM) == 128 + signal.SIGTERM
    saved = int((out / "checkpoints" / "LATEST").read_text().removeprefix("step_"))
    assert 7 <= saved < STEPS
    train(out)
    assert _weights(out) == _weights(uninterrupted)


@pytest.mark.long
@pytest.mark.parametrize("groups", [1, 4])
def test_two_processes_have_the_same_losses_as_one(
    groups: int, pairs: Path, train: Train, tmp_path: Path
) -> None:
    first, out, exact = tmp_path / "one", tmp_path / "two", ("precision=fp32", f"data.groups={groups}")
    train(first, *exact)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, *_command(pairs, out, *exact)[1:]]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert _losses(out) == pytest.approx(_losses(first), rel=2e-3)
    assert _losses(out)[0] == pytest.approx(_losses(first)[0], rel=1e-6)
    assert len(list((out / "checkpoints").glob("step_*"))) == 2  # checkpoint.keep


@pytest.mark.long
def test_closed_output_pipe_saves_and_missing_checkpoints_are_an_error(pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "piped"
    command = shlex.join(_command(pairs, out, "checkpoint.every_steps=0", "steps=100000"))
    piped = subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", f"{command} 2>&1 | tee {tmp_path}/log"],
        cwd=ROOT,
        env=_environment(),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and piped.poll() is None:
        if metrics.is_file() and metrics.read_text().count("\n") >= 3:
            break
        time.sleep(0.01)
    os.killpg(
        piped.pid, signal.SIGINT
    )  # like Ctrl-C: tee exits at once, and nothing reads the output any more
    piped.wait(timeout=120)
    while (out / ".lock").exists():  # until the training has exited
        time.sleep(0.01)
    saved = int((out / "checkpoints" / "LATEST").read_text().removeprefix("step_"))
    history = metrics.read_text()
    assert saved == history.count("\n") >= 3

    (out / "checkpoints").rename(tmp_path / "another disk")
    again = subprocess.run(
        _command(pairs, out, "checkpoint.every_steps=0", "steps=100000"),
        cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert again.returncode == 1
    assert again.stderr.splitlines()[-1].startswith(f"error: {out} has been trained, but its checkpoints")
    assert metrics.read_text() == history


@pytest.mark.long
def test_run_with_groups_resumes_and_keeps_their_number(train: Train, tmp_path: Path, pairs: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "resumed"
    train(whole, "data.groups=4")
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / f"step_{STEPS:08d}")
    assert f"resuming {out} at step 20" in train(out, "data.groups=4")
    assert _weights(out) == _weights(whole)
    assert _losses(out) == _losses(whole)
    for groups, cause in (("2", "data.groups"), ("3", "data.groups = 3 is invalid: expected a divisor of")):
        refused = subprocess.run(
            _command(pairs, out, f"data.groups={groups}"),
            cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert refused.returncode == 1
        assert refused.stderr.startswith("error: ") and cause in refused.stderr
        assert len(refused.stderr.splitlines()) == 1


@pytest.mark.slow
def test_resume_falls_back_to_older_checkpoint_if_newest_is_damaged(
    train: Train, uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "damaged"
    shutil.copytree(uninterrupted, out)
    with (out / "checkpoints" / f"step_{STEPS:08d}" / "model.safetensors").open("r+b") as file:
        file.seek(100_000)
        file.write(b"??")
    said = train(out)
    assert f"resuming {out} at step 20" in said
    assert f"note: step_{STEPS:08d} is damaged or missing; using step_00000020 instead" in said
    assert _weights(out) == _weights(uninterrupted)
    assert _losses(out) == _losses(uninterrupted)
