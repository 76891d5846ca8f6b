"""Ranks that fail as an argument names: this process as one of torchrun's, or two forked ranks per failure.

Forked ranks share the cost of importing torch. As on separate machines, no launcher ends the remaining ranks.
"""

import atexit
import json
import os
import signal
import socket
import sys
import tempfile
import time
from datetime import timedelta
from typing import IO, Any

import torch

from clipkit import distributed
from clipkit.errors import ConfigError, DataError, run_command


def one_rank(how: str) -> int:
    distributed.start()
    rank = distributed.rank()
    if how == "all alike":
        raise ConfigError("no such setting")
    if how == "each its own":
        raise ConfigError(f"no such setting as {rank}")
    if how == "the last":
        if rank == distributed.world_size() - 1:
            raise DataError("the last one's shard is gone")
        distributed.barrier()
    if how == "rank 0":
        if rank == 0:
            raise DataError("rank 0's shard is gone")
        distributed.sum_over_ranks(torch.ones(1))
    if how == "rank 0, the others are busy":  # as in a wait for NCCL
        if rank == 0:
            raise DataError("rank 0's shard is gone")
        time.sleep(500)
    if how == "a mistake of ours":
        if rank == 1:
            raise AssertionError("ours")
        distributed.barrier()
    if how in ("killed", "rank 0 is killed"):
        if rank == (how == "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        distributed.barrier()
    if how == "silent in a step":
        distributed._STEP_TIMEOUT = timedelta(seconds=4)
        distributed.end_long_waits()
        distributed.allow_long_waits()
        time.sleep(6 * (rank == 0))  # it may save
        distributed.end_long_waits()
        time.sleep(500 * (rank == 1))
        distributed.sum_over_ranks(torch.ones(1))
    distributed.stop()
    return 0


def ranks(how: str, world: int) -> dict[int, tuple[int, IO[str]]]:
    """Start the ranks; return rank and stderr by process ID."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running: dict[int, tuple[int, IO[str]]] = {}
    for rank in range(world):
        said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it is read when the rank has ended)
        if process := os.fork():
            running[process] = rank, said
            continue
        os.dup2(said.fileno(), 2)
        given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in given.items()}, MASTER_ADDR="127.0.0.1")
        try:
            run_command(distributed.together(lambda: one_rank(how)))
        except SystemExit as end:
            atexit._run_exitfuncs()
            sys.stderr.flush()
            os._exit(int(end.code or 0))  # frees nothing, which would take a second of CPU time
    return running


def all_ends(hows: list[str], world: int = 2) -> dict[str, Any]:
    """Exit statuses and stderr of the ranks of each failure, and the seconds until its last rank ended."""
    began = time.monotonic()
    running = {how: ranks(how, world) for how in hows}
    of_process = {process: how for how, those in running.items() for process in those}
    ends: dict[str, Any] = {how: {"status": [0] * world, "said": [""] * world} for how in hows}
    while of_process:
        process, status = os.wait()
        how = of_process.pop(process)
        rank, said = running[how][process]
        said.seek(0)
        ends[how]["said"][rank] = said.read()
        ends[how]["status"][rank] = os.waitstatus_to_exitcode(status)
        ends[how]["seconds"] = time.monotonic() - began
    return ends


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_command(distributed.together(lambda: one_rank(sys.argv[1])))
    print(json.dumps(all_ends(sys.argv[1:])))
