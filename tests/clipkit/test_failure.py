"""Tests of failing ranks: all ranks end soon and each error is printed once, with torchrun and without."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from clipkit.distributed import _RANK_LOST, _RANK_SILENT, Failures, _check_own_address, together
from clipkit.errors import ClipkitError, ConfigError
from tests.forked import Forked

PROGRAM = str(Path(__file__).parent / "failing_program.py")
# how the ranks fail, and the errors printed; the other ranks print none
FAILURES = {
    "none": [],
    "all alike": ["error: no such setting"],
    "each its own": ["error (rank 1): no such setting as 1", "error: no such setting as 0"],
    "the last": ["error (rank 1): the last one's shard is gone"],
    "rank 0": ["error: rank 0's shard is gone"],
    "rank 0, the others are busy": ["error: rank 0's shard is gone"],
    "a mistake of ours": [],
    "killed": [f"error: {_RANK_LOST}"],
    "rank 0 is killed": [f"error (rank 1): {_RANK_LOST}"],
    "silent in a step": [f"error: {_RANK_SILENT}"],
}  # fmt: skip


@pytest.fixture(scope="module")
def ends(forked: Forked) -> dict[str, Any]:
    """Exit statuses and stderr of the two ranks of each failure, all run at the same time."""
    done = forked.run(PROGRAM, [*FAILURES], {}, timeout=180)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def errors_in(said: str) -> list[str]:
    return sorted(line for line in said.splitlines() if line.startswith("error"))


@pytest.mark.slow
@pytest.mark.parametrize("how", FAILURES)
def test_failing_rank_ends_all_ranks_and_prints_once(how: str, ends: dict[str, Any]) -> None:
    said, status = ends[how]["said"], ends[how]["status"]
    assert errors_in("\n".join(said)) == FAILURES[how], said
    assert ["Traceback" in one for one in said] == [False, how == "a mistake of ours"]
    special = {"none": [0, 0], "killed": [1, -9], "rank 0 is killed": [-9, 1]}
    assert status == special.get(how, [1, 1])
    assert sum(one.count("frame #0") for one in said) <= 2  # one stack trace per call of torch's lost store
    assert ends[how]["seconds"] < 30


@pytest.mark.long
@pytest.mark.parametrize("how", ["all alike", "the last"])
def test_torchrun_report_ends_with_the_error(how: str) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, PROGRAM, how], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    assert errors_in(done.stderr) == FAILURES[how]
    cause = done.stderr.partition("Root Cause")[2]
    told = re.findall(r"traceback : (.*)", cause)
    assert [line.removeprefix("error: ") for line in told] == [FAILURES[how][0].partition(": ")[2]]
    assert cause.rstrip().splitlines()[-2].endswith(told[0])


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError(
                "[/pytorch/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 600000ms for send"
            ),
            _RANK_SILENT,
        ),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2143"),
            _RANK_LOST,
        ),
        (DistNetworkError("Connection reset by peer"), _RANK_LOST),  # while the process group is set up
    ],
)
def test_lost_connection_raises_one_line_error(
    error: RuntimeError, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lose() -> int:
        raise error

    monkeypatch.setattr("clipkit.distributed._NOTE_SECONDS", 0.0)
    monkeypatch.setattr("clipkit.distributed._RANK0_FIRST_SECONDS", 0.0)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    store, _, _ = next(rendezvous(f"file://{tmp_path}/store", rank=0, world_size=1))
    failures = Failures(PrefixStore("notes", store), rank=1, host=False)
    monkeypatch.setattr("clipkit.distributed._failures", failures)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(ClipkitError) as caught:
            together(lose)()
    finally:
        signal.signal(signal.SIGTERM, before)
        failures.close()
    assert str(caught.value) == told


def test_host_whose_name_is_a_loopback_address_needs_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"first-host": "10.0.0.1", "own": "127.0.1.1", "127.0.0.1": "127.0.0.1"}

    def resolve(host: str, port: object) -> list[Any]:
        return [(2, 1, 6, "", (addresses[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "gethostname", lambda: "own")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "first-host")
    with pytest.raises(ConfigError, match=r"own, stands for a loopback address.*set GLOO_SOCKET_IFNAME"):
        _check_own_address()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    _check_own_address()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # all ranks are on this host
    _check_own_address()
    monkeypatch.setenv("MASTER_ADDR", "first-host")
    addresses["own"] = "10.0.0.2"
    _check_own_address()
