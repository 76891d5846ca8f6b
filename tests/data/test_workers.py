"""Tests of killed loader processes, and of programs that exit early: nothing hangs or is left behind."""

import io
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from clipkit.errors import DataError
from data.shards.writer import DatasetWriter, Record
from data.workers import Workers, ignore_signals

ROOT = Path(__file__).parents[2]


class Squares(Dataset[torch.Tensor]):
    """Returns square numbers slowly."""

    def __init__(self, seconds: float = 0.002) -> None:
        self.seconds = seconds

    def __getitem__(self, number: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((1000,), number * number)


def squares(workers: int = 2, *, steps: int = 10_000, seconds: float = 0.002) -> Workers[torch.Tensor]:
    return Workers(
        DataLoader(
            Squares(seconds),
            batch_size=None,
            sampler=range(steps),
            num_workers=workers,
            worker_init_fn=ignore_signals,
        )
    )


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_return_the_batches_of_the_loader(workers: int) -> None:
    before = signal.getsignal(signal.SIGCHLD)
    numbers = squares(workers, steps=7)
    assert len(multiprocessing.active_children()) == workers
    found = []
    while (batch := numbers.next()) is not None:
        found.append(int(batch[0]))
    numbers.close()
    numbers.close()
    assert found == [number**2 for number in range(7)]
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGCHLD) == before


def test_killed_worker_raises_error_at_any_moment() -> None:
    moments = random.Random(0)
    for turn in range(6):
        numbers = squares()
        numbers.next()
        victim = multiprocessing.active_children()[turn % 2].pid
        assert victim is not None
        timer = threading.Timer(moments.random() * 0.05, os.kill, (victim, signal.SIGKILL))
        timer.start()
        began = time.monotonic()
        with pytest.raises(DataError) as caught:
            while numbers.next() is not None:
                pass
        numbers.close()
        timer.join()
        assert time.monotonic() - began < 30
        assert str(caught.value).startswith("a loader process was killed (signal 9), probably out of memory")
        assert multiprocessing.active_children() == []


def test_killed_worker_raises_error_only_in_next() -> None:
    numbers = squares()
    numbers.next()
    victim = multiprocessing.active_children()[0]
    victim.kill()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:  # torch alone would raise it here
        time.sleep(0.01)
    with pytest.raises(DataError, match="signal 9"):
        numbers.next()
    numbers.close()
    assert multiprocessing.active_children() == []


def test_signal_does_not_interrupt_the_cleanup_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = squares()
    numbers.next()
    cleared = []

    def broken() -> Iterator[torch.Tensor]:
        try:
            raise EOFError  # as from the connection of a dying worker
        except EOFError:
            multiprocessing.active_children()[0].kill()
            time.sleep(0.5)  # SIGCHLD arrives
            cleared.append(True)
            raise
        yield torch.zeros(0)

    with monkeypatch.context() as patch:
        patch.setattr(numbers, "_iterator", broken())
        with pytest.raises(DataError, match="signal 9"):
            numbers.next()
    assert cleared
    numbers.close()


def test_close_after_unnoticed_kill() -> None:
    numbers = squares()
    numbers.next()
    for victim in multiprocessing.active_children():
        victim.kill()
    began = time.monotonic()
    numbers.close()
    assert time.monotonic() - began < 30
    assert multiprocessing.active_children() == []


def test_ctrl_c_while_worker_is_busy() -> None:
    numbers = squares(1, seconds=2)
    timer = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        numbers.next()
    began = time.monotonic()
    numbers.close()
    timer.join()
    assert time.monotonic() - began < 60
    assert multiprocessing.active_children() == []


PROGRAM = """
import multiprocessing, os, sys, time
from pathlib import Path
from clipkit.errors import run_command
from clipkit.model.tokenizer import ClipTokenizer
from data.loader import Loader
from data.order import Order
from data.shards.samples import Shards
from data.shards.samples import find_shards

def main():
    shards = Shards.of(find_shards(sys.argv[1]))
    order = Order(shards.counts, seed=0, batch_size=8)
    tokenizer = ClipTokenizer(context_length=20)
    loader = Loader(shards=shards, order=order, image_size=16, tokenize=tokenizer, num_workers=2)
    batches = loader.batches(0, 1_000_000)
    next(batches)
    print(*(one.pid for one in multiprocessing.active_children()), flush=True)
    if len(sys.argv) > 2:
        return int(sys.argv[2])  # while the workers are at work, and ignore SIGTERM
    for _ in batches:
        time.sleep(0.01)

run_command(main)
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one shard and return its folder."""
    file = io.BytesIO()
    Image.new("RGB", (20, 20), "red").save(file, "png")
    folder = tmp_path_factory.mktemp("red") / "set"
    with DatasetWriter(folder) as writer:
        for number in range(64):
            writer.write(
                "train", Record(key=f"{number}", image=file.getvalue(), extension="png", caption="red")
            )
        writer.finish({})
    return folder / "train"


def start(shards: Path, *arguments: str) -> tuple[subprocess.Popen[str], list[int]]:
    command = [sys.executable, "-c", PROGRAM, str(shards), *arguments]
    environment = os.environ | {"CLIPKIT_CACHE": str(shards.parent / "cache")}
    program = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    return program, [int(pid) for pid in program.stdout.readline().split()]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("moment", [0.0, pytest.param(0.2, marks=pytest.mark.long)])
def test_program_with_killed_worker_prints_one_line_and_exits(moment: float, shards: Path) -> None:
    program, workers = start(shards)
    time.sleep(moment)
    os.kill(workers[0], signal.SIGKILL)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 1
    assert errors == (
        "error: a loader process was killed (signal 9), probably out of memory: lower data.workers or "
        "batch_size\n"
    )
    assert not any(map(is_running, workers))


def test_program_that_exits_early_stops_its_workers(shards: Path) -> None:
    program, workers = start(shards, "3")
    _, errors = program.communicate(timeout=60)
    assert (program.returncode, errors) == (3, "")
    assert not any(map(is_running, workers))
