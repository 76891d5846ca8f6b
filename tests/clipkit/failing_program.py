"""Ranks that fail in a way that an argument names; ``test_failure`` starts it as two ranks."""

import os
import signal
import sys
import time

import torch

from clipkit import distributed
from clipkit.errors import ConfigError, DataError, run_command


def main() -> int:
    distributed.start()
    rank, how = distributed.rank(), sys.argv[1]
    if how == "all alike":
        raise ConfigError("no such setting")
    if how == "each its own":
        raise ConfigError(f"no such setting as {rank}")
    if how == "the last":
        if rank == distributed.world_size() - 1:
            raise DataError("the last one's shard is gone")
        distributed.barrier()
    if how == "the chief":
        if rank == 0:
            raise DataError("the chief's shard is gone")
        distributed.sum_over_ranks(torch.ones(1))
    if how == "the chief, the others are busy":  # as where NCCL waits
        if rank == 0:
            raise DataError("the chief's shard is gone")
        time.sleep(500)
    if how == "a mistake of ours":
        if rank == 1:
            raise AssertionError("ours")
        distributed.barrier()
    if how == "killed":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        distributed.barrier()
    distributed.stop()
    return 0


if __name__ == "__main__":
    run_command(distributed.together(main))
