"""The only place besides ``train.py`` that knows torch.distributed: who we are, and collectives.

Everything works without a process group too, as the single process of a world of one.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import count
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from clipkit.errors import ClipkitError, ConfigError, tell_torchrun

__all__ = [
    "Failures",
    "KeyValueStore",
    "background_group",
    "barrier",
    "broadcast_buffers",
    "broadcast_bytes",
    "check_launch",
    "counts_of_rows",
    "failing_together",
    "gather_objects",
    "gather_rows",
    "greatest_over_ranks",
    "rank",
    "rank_and_world",
    "ranks_of_host",
    "scatter_sums_of_rows",
    "start",
    "stop",
    "sum_over_ranks",
    "together",
    "totals",
    "world_size",
]


# --------------------------------------------------------------------------------------------------------------
# When one rank fails, all end, and the mistake is told once: through the store that the ranks met in.
#
# A rank that fails leaves a note. Those that then lose the connection to it, or wait for it in vain, read the
# note and end without a word. A mistake that all ranks make is told by the chief alone; one that only some
# make, by them.

Answer = TypeVar("Answer")

_NOTE = "clipkit/failed"
_POLL_SECONDS = 0.1  # while a rank that has failed waits for others
_WATCH_SECONDS = 2.0  # between looks for a note while all is well
_CHIEF_FIRST_SECONDS = 3.0  # for the chief to meet the same mistake
_NOTE_SECONDS = 5.0  # for the note of a rank whose connection has closed
_END_SECONDS = 5.0  # from the note until a rank that still waits for the others is ended
_END_CHIEF_SECONDS = 30.0  # it may be saving; torchrun gives as long
_NO_WORD = (
    "the connection to another process was lost, and it has left no word: it was killed, often for want of memory; "
    "the last checkpoint is kept, and the same command resumes"
)
_NO_ANSWER = (
    "another process does not answer: it was stopped, or its machine is lost; the last checkpoint is kept, and the "
    "same command resumes"
)
_SILENT = re.compile("(gloo|nccl).*timed out", re.I | re.S)
_LOST = re.compile(
    "(gloo|nccl).*(closed by peer|reset by peer|broken pipe|remote process exited)", re.I | re.S
)


class KeyValueStore(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def add(self, key: str, value: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...
    def get(self, key: str) -> bytes: ...


class Failures:
    """The notes that ranks leave for each other.

    Args:
        store: which all ranks share. One that cannot be reached any more holds no notes.
        rank: of this process.
        host: whether the store ends with this process, which then waits a while for the others when it fails.
    """

    def __init__(self, store: KeyValueStore, *, rank: int, host: bool) -> None:
        self._store, self._rank, self._host = store, rank, host
        self._note = ""
        # whether the store is: asked then, torch writes a long C++ stack to stderr each time
        self._gone = False
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="failures", daemon=True).start()

    def close(self) -> None:
        """All has gone well: look for notes no longer."""
        self._over.set()

    def note(self, seconds: float = 0.0) -> str:
        """What the first rank that failed has said; empty where none has within some seconds."""
        self._until(seconds, self._look)
        return self._note

    def leave(self, message: str) -> None:
        """Leave a note that this rank has failed, unless another was before it."""
        who = "error" if self._rank == 0 else f"error (rank {self._rank})"
        self._ask(lambda: self._store.compare_set(_NOTE, "", f"{who}: {message}"))

    def tells(self, message: str) -> bool:
        """Whether it is this rank that tells the user of a mistake: the chief, if it makes the same one soon."""
        key = f"clipkit/told/{message}"
        if self._rank:
            self._until(_CHIEF_FIRST_SECONDS, lambda: bool(self._ask(lambda: self._store.check([key]))))
        times = self._ask(lambda: self._store.add(key, 1))
        return times is None or times == 1

    def wait_for_readers(self) -> None:
        """Before a store ends with this process, let the others see the note."""
        if self._host:
            time.sleep(2 * _WATCH_SECONDS)

    def _look(self) -> bool:
        if not self._note and self._ask(lambda: self._store.check([_NOTE])):
            note = self._ask(lambda: self._store.get(_NOTE))
            self._note = note.decode(errors="replace") if note else ""
        return bool(self._note)

    def _ask(self, question: Callable[[], Answer]) -> Answer | None:
        """What the store answers; None for good once it cannot be reached, as it ended with the chief."""
        if self._gone:
            return None
        try:
            return question()
        except RuntimeError:
            self._gone = True
            return None

    def _until(self, seconds: float, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while not holds() and not self._gone and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)

    def _watch(self) -> None:
        """End a process that waits for one that has failed, as NCCL does for many minutes."""
        while not self._gone and not self._over.wait(_WATCH_SECONDS):
            if self._look():
                if not self._over.wait(_END_SECONDS if self._rank else _END_CHIEF_SECONDS):
                    tell_torchrun(self._note, late=True)
                    os._exit(1)
                return


def failing_together(
    command: Callable[[], int], failures: Callable[[], Failures | None]
) -> Callable[[], int]:
    """A program's main function, with whose failure on one rank all ranks end.

    Args:
        command: raises what ``clipkit.errors.run_command`` tells of.
        failures: the notes, or None as long as there is no other rank.
    """

    def program() -> int:
        with _FailingTogether(failures):
            return command()

    return program


class _FailingTogether:
    def __init__(self, failures: Callable[[], Failures | None]) -> None:
        self._failures = failures

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        failures = self._failures()
        if isinstance(error, KeyboardInterrupt):
            # perhaps by torchrun, because another has ended; then nothing more need be said
            _end_if_another_failed(failures, 0.0)
            return
        # torchrun ends the others as soon as one has ended, and what is left to do here takes seconds
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        told = error
        if failures is not None and isinstance(error, RuntimeError):
            lost = _LOST.search(str(error))
            if lost or _SILENT.search(str(error)):
                _end_if_another_failed(failures, _NOTE_SECONDS)
                told = ClipkitError(_NO_WORD if lost else _NO_ANSWER)
        # what is no user's mistake is ours, and each rank shows its traceback
        mistake = isinstance(told, ClipkitError | OSError)
        message = " ".join((str(told) if mistake else f"{type(told).__name__}: {told}").split())
        tell_torchrun(f"error: {message}")
        if failures is not None:
            failures.leave(message)
            tells = not mistake or failures.tells(message)
            failures.wait_for_readers()
            if not tells:
                tell_torchrun(f"error: {message}", late=True)
                raise SystemExit(1)
        if told is not error:
            raise told from None


def _end_if_another_failed(failures: Failures | None, seconds: float) -> None:
    if failures is not None and (note := failures.note(seconds)):
        tell_torchrun(note, late=True)
        raise SystemExit(1)


# --------------------------------------------------------------------------------------------------------------

_TIMEOUT = timedelta(minutes=10)
_LONG_TIMEOUT = timedelta(hours=6)  # of what a thread waits for while shards of many gigabytes are joined
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
    """A program's main function, after whose ``start`` no rank fails alone, see clipkit/distributed.py."""
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


def broadcast_buffers(buffers: Iterable[Tensor]) -> None:
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


def totals(**counts: int) -> dict[str, int]:
    """The sum of every rank's counts by name, on each rank; a bool counts as 0 or 1."""
    values = torch.tensor([int(count) for count in counts.values()], dtype=torch.int64)
    return dict(zip(counts, sum_over_ranks(values).tolist(), strict=True))


def gather_objects(value: Any) -> list[Any]:
    """Every rank's value of plain kinds (numbers, strings, lists), in the order of ranks."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_bytes(content: bytes) -> bytes:
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
