"""The only place besides ``train.py`` that knows torch.distributed: who we are, and collectives.

Everything works without a process group too, as the single process of a world of one.
"""

import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from clipkit.errors import ConfigError
from clipkit.failure import Failures, failing_together

__all__ = [
    "background_group", "barrier", "buffers_of_chief", "bytes_of_chief", "check_launch",
    "counts_of_rows", "gather_objects", "gather_rows", "greatest_over_ranks", "rank", "rank_and_world",
    "ranks_of_host", "scatter_sums_of_rows", "start", "stop", "sum_over_ranks", "together", "world_size",
]  # fmt: skip

_TIMEOUT = timedelta(minutes=10)
_LONG_TIMEOUT = timedelta(hours=6)  # of what a thread waits for while shards of many gigabytes are joined
_POLL_SECONDS = 0.1
_failures: Failures | None = None  # of the process group
_store: Store | None = None  # that its ranks met in
_messages = count()  # of the chief


def check_launch() -> None:
    """See that the environment names all that a process needs to find the others, as torchrun sets it.

    Raises:
        ConfigError: it names several processes, but not which one this is, or is no number.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT") if world != "1" else ()
    missing = [name for name in needed if not os.environ.get(name)]
    numbers = [
        name for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if not os.environ.get(name, "0").isdecimal()
    ]
    if missing or numbers:
        wrong = f"{', '.join(missing)} not set" if missing else f"{numbers[0]} = {os.environ[numbers[0]]!r}"
        raise ConfigError(
            f"the environment says WORLD_SIZE = {world}, but has {wrong}: start with torchrun, or unset WORLD_SIZE"
        )
    rank_and_world()


def rank_and_world() -> tuple[int, int]:
    """This process's number and how many there are, as torchrun says; 0 and 1 where nothing is said.

    Raises:
        ConfigError: the environment says something impossible.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    rank = os.environ.get("RANK", "0" if world == "1" else "not set")
    if rank.isdecimal() and world.isdecimal() and int(rank) < int(world):
        return int(rank), int(world)
    raise ConfigError(
        f"the environment says RANK = {rank} and WORLD_SIZE = {os.environ.get('WORLD_SIZE', 'not set')}: "
        "start with torchrun, or unset both"
    )


def start() -> torch.device:
    """Join the process group that ``torchrun`` announces, if any, and choose this process's device.

    Raises:
        ConfigError: the machine has fewer GPUs than processes.
    """
    global _failures, _store
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda, gpus = torch.cuda.is_available(), torch.cuda.device_count()
    if cuda and local_rank < gpus:
        torch.cuda.set_device(local_rank)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        store, rank, world = next(rendezvous("env://", timeout=_TIMEOUT))
        _store = PrefixStore(f"attempt {_attempt()}", store)
        _failures = Failures(_store, rank=rank, host=rank == 0 and not _store_is_torchruns())
        # tensors on the CPU go by gloo, so that agreeing on a flag never waits for a GPU's queue
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=PrefixStore("clipkit", _store),
            rank=rank,
            world_size=world,
            timeout=_TIMEOUT,
        )
    if cuda and local_rank >= gpus:  # said only now, when it can be said once
        raise ConfigError(
            f"{os.environ.get('LOCAL_WORLD_SIZE')} processes on a machine with {gpus} GPUs: "
            "set --nproc-per-node to the number of GPUs"
        )
    return torch.device("cuda", local_rank) if cuda else torch.device("cpu")


def stop() -> None:
    """Leave the process group, all ranks together: one that leaves early can abort one that still talks to it."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        if _failures is not None:
            _failures.close()
        dist.destroy_process_group()


def together(command: Callable[[], int]) -> Callable[[], int]:
    """A program's main function, after whose ``start`` no rank fails alone, see clipkit/failure.py."""
    return failing_together(command, lambda: _failures)


def _store_is_torchruns() -> bool:
    """Whether the store that the ranks meet in outlives them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _attempt() -> str:
    """Which start of the ranks this is, as far as one torchrun can say it.

    Torchrun keeps its store when it starts the ranks again (torch 2.15): addresses and notes of the former ones are
    still there. With several torchruns each counts for itself, and the numbers differ.
    """
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone and _store_is_torchruns() else "0"


def rank() -> int:
    """This process's number, 0 ≤ rank < world_size."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def buffers_of_chief(buffers: Iterable[Tensor]) -> None:
    """Have every rank hold the chief's values."""
    if world_size() > 1:
        for buffer in buffers:
            dist.broadcast(buffer, src=0)


def ranks_of_host() -> int:
    """How many processes this machine has, as torchrun says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def background_group() -> dist.ProcessGroup:
    """A group of all ranks for what a thread does beside the training; all ranks call this."""
    group = dist.new_group(backend="gloo", timeout=_LONG_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def sum_over_ranks(values: Tensor) -> Tensor:
    """The elementwise sum of every rank's tensor, on each rank; no gradient."""
    if world_size() == 1:
        return values
    total = values.detach().clone()
    dist.all_reduce(total)
    return total


def gather_objects(value: Any) -> list[Any]:
    """Every rank's value of plain kinds (numbers, strings, lists), in the order of ranks."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def bytes_of_chief(content: bytes) -> bytes:
    """Rank 0's bytes, on each rank; what the others give is ignored.

    The others wait for them as long as it takes, so that the chief may count shards for hours.
    """
    if world_size() == 1:
        return content
    assert _store is not None
    ready = f"clipkit/bytes/{next(_messages)}"
    if rank() == 0:
        _store.set(ready, "")
    else:
        while not _store.check([ready]):  # wait() would keep others from the store
            time.sleep(_POLL_SECONDS)
    size = torch.tensor(len(content))
    dist.broadcast(size, src=0)
    if not size:
        return b""
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8) if rank() == 0 else None
    data = torch.empty(int(size), dtype=torch.uint8) if data is None else data
    dist.broadcast(data, src=0)
    return data.numpy().tobytes()


def greatest_over_ranks(values: Tensor) -> Tensor:
    """The elementwise maximum of every rank's tensor, on each rank; no gradient."""
    if world_size() == 1:
        return values
    greatest = values.detach().clone()
    dist.all_reduce(greatest, op=dist.ReduceOp.MAX)
    return greatest


def counts_of_rows(own: int) -> list[int]:
    """How many rows each rank has, in the order of ranks; no GPU is waited for."""
    if world_size() == 1:
        return [own]
    # a group that someone else made may have no way for tensors on the CPU
    device = "cpu" if "cpu:" in dist.get_backend_config() else "cuda"
    counts = torch.empty(world_size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(counts, torch.tensor([own], device=device))
    return [int(count) for count in counts.tolist()]


def gather_rows(rows: Tensor, counts: list[int]) -> Tensor:
    """Every rank's (B, …) rows as (N, …), in the order of ranks; no gradient.

    Args:
        rows: this rank's; of the same shape and dtype on all ranks, but for B.
        counts: every rank's B, see ``counts_of_rows``.
    """
    if world_size() == 1:
        return rows.detach()
    own, most = rows.detach().contiguous(), max(counts)
    if len(own) < most:
        own = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
    gathered = own.new_empty(len(counts) * most, *own.shape[1:])
    dist.all_gather_into_tensor(gathered, own)
    if min(counts) == most:
        return gathered
    return torch.cat([one[:count] for one, count in zip(gathered.split(most), counts, strict=True)])


def scatter_sums_of_rows(rows: Tensor, counts: list[int]) -> Tensor:
    """This rank's (B, …) rows of the sum over all ranks' (N, …); no gradient.

    Args:
        rows: of the same shape and dtype on all ranks.
        counts: every rank's B, see ``counts_of_rows``.
    """
    if world_size() == 1:
        return rows
    most, given = max(counts), rows.contiguous()
    if min(counts) < most:
        given = rows.new_zeros(len(counts) * most, *rows.shape[1:])
        for place, part in zip(given.split(most), rows.split(counts), strict=True):
            place[: len(part)] = part
    own = rows.new_empty(most, *rows.shape[1:])
    dist.reduce_scatter_tensor(own, given)
    return own[: counts[rank()]]
