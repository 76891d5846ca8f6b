"""Tests of stopping a training: signals, and the death of the launcher."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from clipkit.errors import Stopped
from clipkit.training.stopping import StopRequest

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_finishes_the_step_if_there_is_something_to_save(number: signal.Signals) -> None:
    stop = StopRequest()
    stop.save_on_signal(7)
    assert not stop.number
    signal.raise_signal(number)
    assert stop.number == number
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(
        KeyboardInterrupt, match="training after step 7 is lost"
    ):  # a second Ctrl-C does not wait
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="all is saved"):
        stop.exit_on_signal("all is saved")


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_stops_immediately_if_there_is_nothing_to_save(number: signal.Signals) -> None:
    StopRequest()
    with pytest.raises(Stopped, match="no step was made") as caught:
        signal.raise_signal(number)
    assert caught.value.number == number  # the exit status is 128 plus the number


def test_closed_terminal_does_not_stop_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    StopRequest()
    signal.raise_signal(signal.SIGHUP)


# a rank, which prints its process ID: "leaving" is saving, "in a step" keeps its main thread in C code
RANK = """
import hashlib, os, sys, time
parent = os.getppid()
from clipkit.training.stopping import StopRequest, end_with_launcher
stop = StopRequest()
stop.save_on_signal(0)
stop.agreed = sys.argv[1] == "leaving"
end_with_launcher(parent, stop)
print(os.getpid(), flush=True)
if sys.argv[1] == "in a step":
    hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000_000)
time.sleep(60)
"""
LAUNCHER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
time.sleep(60)
"""
UNDER_TORCHRUN: dict[str, Any] = {"TORCHELASTIC_RUN_ID": "1", "LOCAL_RANK": "0"}


def orphan(how: str, *, number: int = 0, **environment: str) -> tuple[int, str]:
    """Send a rank a signal and kill its launcher; return its PID, 0 if it has ended, and its stderr."""
    command = [sys.executable, "-c", LAUNCHER, RANK, how]
    launcher = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    os.kill(rank, number)
    launcher.kill()
    launcher.wait()
    try:
        _, said = launcher.communicate(timeout=3)  # returns when the rank closes its pipe
    except subprocess.TimeoutExpired:
        os.kill(rank, signal.SIGKILL)  # it is still running
        launcher.communicate()
        return rank, ""
    return 0, said


def test_rank_ends_with_its_launcher() -> None:
    rank, said = orphan("working", **UNDER_TORCHRUN)
    assert rank == 0
    assert said.startswith("error: torchrun has died, so its ranks end; the last checkpoint is kept")


def test_process_without_launcher_outlives_its_parent() -> None:
    rank, _ = orphan("working")
    assert rank


def test_saving_rank_outlives_its_launcher() -> None:
    rank, _ = orphan("leaving", **UNDER_TORCHRUN)
    assert rank


def test_rank_asked_to_stop_during_a_step_outlives_its_launcher() -> None:
    rank, _ = orphan("in a step", number=signal.SIGUSR1, **UNDER_TORCHRUN)
    assert rank
    rank, said = orphan("in a step", number=signal.SIGURG, **UNDER_TORCHRUN)
    assert rank == 0 and said.startswith("error: torchrun has died")


# three ranks: rank 2 is busy in Python, and the others wait for it in C++: rank 0 in a step, rank 1 while it saves
STUCK = """
import os, sys, time
from clipkit import distributed
from clipkit.training.stopping import StopRequest, end_with_launcher
stop = StopRequest()
end_with_launcher(os.getppid(), stop)
distributed.start()
stop.save_on_signal(0)
distributed.barrier()
if sys.argv[1] != "saving":
    stop.begin_step()
print("ready", flush=True)
if os.environ["RANK"] == "2" or sys.argv[1] == "busy":
    time.sleep(60)
distributed.barrier()
"""


@pytest.mark.slow
def test_rank_that_waits_for_another_ends_after_sigterm() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    store = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", STUCK, how],
            env={**os.environ, **store, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, how in enumerate(["waiting", "saving", "busy"])
    ]  # fmt: skip
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        began = time.monotonic()
        for rank in ranks:
            rank.terminate()
        _, said = ranks[0].communicate(timeout=25)
        assert time.monotonic() - began > 19
        assert ranks[0].returncode == 128 + signal.SIGTERM
        assert "error: SIGTERM while waiting for another rank; the last checkpoint is kept" in said
        time.sleep(2)
        assert ranks[1].poll() is None  # rank 0 may write for minutes
        assert ranks[2].poll() is None  # its main thread reacts: it may be about to save
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_rank_ends_if_its_launcher_is_already_dead() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # no process listens here
        port = closed.getsockname()[1]
        store = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        done = subprocess.run(
            [sys.executable, "-c", RANK, "working"], capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, **UNDER_TORCHRUN, **store, "MASTER_PORT": str(port)},
        )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: torchrun has died")
