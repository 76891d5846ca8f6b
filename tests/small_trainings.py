"""Tiny real trainings for the tests of the training engine, in forked processes, with one or several ranks.

Forked ranks find each other through torchrun's environment variables and do not import torch again.
"""

import hashlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg

from data.shards.writer import DatasetWriter, Record
from data.tokenizer import train_tokenizer, write_tokenizer
from tests.forked import Ended, Forked

__all__ = [
    "BATCH", "SAMPLES", "Trainings", "checkpoint", "digests", "ends", "error_of", "go_back", "latest_step",
    "metrics", "pairs", "process_of", "trainings", "wait_until", "write_pairs",
]  # fmt: skip

SAMPLES, BATCH = 48, 4
SETTINGS = (
    "model.name=ViT-test", "data.workers=0", "optim.warmup=2", "eval.data=[]", "log.tensorboard=false",
    "log.every_steps=1", f"batch_size={BATCH}", "checkpoint.keep=0", "precision=fp32", "optim.name=adamw",
)  # fmt: skip
# settings with which a run has another tokenizer than the small one
_OTHER_TOKENIZERS = ("model.text=", "model.tokenizer=")
SECONDS = 240  # timeout of a training


class Trainings:
    """Starts ``train.py`` on images of noise."""

    def __init__(self, forked: Forked, pairs: Path, pool: ThreadPoolExecutor) -> None:
        self.pairs = pairs
        self._tokenizer = pairs.parent / "tokenizer"
        write_tokenizer(train_tokenizer(["noise"], vocab=300), self._tokenizer)
        self.program = "train.py"
        self.runs: set[Path] = set()
        self._forked, self._pool = forked, pool

    def settings(self, out: Path, more: Sequence[str]) -> list[str]:
        """Return all arguments of a run.

        Its vocabulary is small, so that weights, checkpoints and updates are.
        """
        own = [f"data.train={self.pairs}", *SETTINGS]
        if any(setting.startswith("model.weights=") for setting in more):
            own.append("model.name=")
        elif not any(setting.startswith(_OTHER_TOKENIZERS) for setting in more):
            own.append(f"model.tokenizer={self._tokenizer}")
        by_name = {setting.partition("=")[0]: setting for setting in (*own, *more)}
        return [*by_name.values(), f"out={out}"]

    def run(self, out: Path, *more: str, status: int = 0) -> str:
        """Train in one process, check the exit status and return stderr."""
        ended = self.start(out, *more).result()
        assert ended.returncode == status, ended.stderr[-3000:]
        return ended.stderr

    def start(self, out: Path, *more: str, program: str = "", **environment: str) -> "Future[Ended]":
        """Train in one process in the background, with ``train.py`` or a program that changes it."""
        settings = self.settings(out, more)
        self.runs.add(out)
        environment["CLIPKIT_CACHE"] = str(self.pairs.parent / "cache")
        return self._pool.submit(
            self._forked.run, program or self.program, settings, environment, timeout=SECONDS
        )

    def kill_after(self, step: int, out: Path, *more: str) -> None:
        """Train in one process and end it with SIGKILL once a step's checkpoint is saved."""
        running = self.start(out, *more)
        wait_until(lambda: (out / "checkpoints" / "LATEST").exists() and latest_step(out) >= step, running)
        os.kill(process_of(out), signal.SIGKILL)
        running.result()

    def clipkit(self, *arguments: str) -> None:
        """Run a clipkit command."""
        environment = {"CLIPKIT_CACHE": str(self.pairs.parent / "cache")}
        ended = self._forked.run("clipkit/__main__.py", arguments, environment, timeout=SECONDS)
        assert ended.returncode == 0, ended.stderr[-3000:]

    def start_ranks(
        self, world: int, out: Path, *more: str, program: str = "", **environment: str
    ) -> "list[Future[Ended]]":
        """Train on several ranks in the background."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        meeting = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
        }  # fmt: skip
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
        meeting |= environment
        return [self.start(out, *more, program=program, **meeting, **place) for place in places]

    def run_ranks(self, world: int, out: Path, *more: str, status: int = 0) -> list[str]:
        """Train on several ranks and return the stderr of each."""
        return ends(self.start_ranks(world, out, *more), status)


def ends(started: "Sequence[Future[Ended]]", status: int = 0) -> list[str]:
    """Wait for all ranks, check their exit status and return the stderr of each."""
    ended = [process.result() for process in started]
    said = [process.stderr for process in ended]
    assert [process.returncode for process in ended] == [status] * len(ended), "\n".join(
        text[-2000:] for text in said
    )
    return said


def write_pairs(folder: Path, samples: int = SAMPLES, *, split: str = "train") -> Path:
    """Write images of noise with captions; every fourth caption repeats the one before."""
    noise = np.random.default_rng(0)
    with DatasetWriter(folder, samples_per_shard=20) as writer:
        for i in range(samples):
            pixels = np.ascontiguousarray(noise.integers(0, 256, (20, 24, 3), dtype=np.uint8))
            caption = f"noise {i - (i % 4 == 3)}"
            image = simplejpeg.encode_jpeg(pixels)
            writer.write(split, Record(key=f"{i:04d}", image=image, extension="jpg", caption=caption))
        writer.finish({"name": folder.name})
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty-eight pairs in three shards."""
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs")


@pytest.fixture(scope="module")
def trainings(forked: Forked, pairs: Path) -> Iterator[Trainings]:
    """Return the runner of trainings on ``pairs``; delete the run folders at the end."""
    with ThreadPoolExecutor(8) as pool:
        made = Trainings(forked, pairs, pool)
        yield made
    for out in made.runs:  # a checkpoint takes 100 MB
        shutil.rmtree(out, ignore_errors=True)


def metrics(out: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def checkpoint(out: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return out / "checkpoints" / f"step_{step:08d}"


def latest_step(out: Path) -> int:
    """Return the step that LATEST names."""
    return int((out / "checkpoints" / "LATEST").read_text().removeprefix("step_"))


def digests(out: Path, step: int) -> dict[str, str]:
    """Return the SHA-256 of each tensor file of a checkpoint."""
    files = sorted(checkpoint(out, step).glob("*.safetensors"))
    assert files
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def go_back(out: Path, step: int) -> None:
    """Delete all checkpoints after ``step``, as if the run had been killed there."""
    for folder in (out / "checkpoints").glob("step_*"):
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)
    (out / "checkpoints" / "LATEST").write_text(f"step_{step:08d}\n")


def wait_until(holds: Callable[[], bool], running: "Future[Ended]") -> None:
    """Poll until a condition holds while a training runs."""
    until = time.monotonic() + SECONDS
    while not holds():
        assert not running.done(), running.result().stderr[-3000:]
        assert time.monotonic() < until
        time.sleep(0.001)


def process_of(out: Path) -> int:
    """Return the id of the process that trains in a folder."""
    pid = int((out / ".lock").read_text().split()[1])
    os.kill(pid, 0)
    return pid


def error_of(said: str) -> str:
    """Return the only error line, which must be the last line of stderr."""
    assert "Traceback" not in said, said
    errors = [line for line in said.splitlines() if line.startswith("error")]
    assert len(errors) == 1 and errors == said.splitlines()[-1:], said
    return errors[0]
