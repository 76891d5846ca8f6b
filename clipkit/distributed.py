"""The process group: rank and world size, collectives, and ending all ranks when one fails.

Without a process group, all functions behave as for a single process.
"""

import os
import pickle
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from ipaddress import ip_address
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from clipkit.errors import ClipkitError, ConfigError, tell_torchrun

# When one rank fails, all ranks exit and the error is reported once. Ranks communicate through the store used for
# the rendezvous.
#
# A rank that fails writes a note to the store. Ranks that lose the connection to it, or time out waiting for it,
# read the note and exit silently. An error that occurs on all ranks is reported by rank 0, other errors by the rank
# where they occur.

Answer = TypeVar("Answer")
Built = TypeVar("Built")

# names since torch 2.14, where the others are deprecated
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout

_NOTE = "clipkit/failed"
_POLL_SECONDS = 0.1  # interval of requests while waiting for other ranks
_WATCH_SECONDS = 2.0  # interval at which the watcher looks for a note
_RANK0_FIRST_SECONDS = 3.0  # time for rank 0 to report the same error
_NOTE_SECONDS = 5.0  # time to wait for the note of a rank that closed its connection
_END_SECONDS = 5.0  # time after a note until a rank that is still running is ended
_END_RANK0_SECONDS = 30.0  # the same for rank 0, which may be saving; torchrun's own limit
_RANK_LOST = (
    "the connection to another process was lost: it died without an error, probably out of memory; the last "
    "checkpoint is kept, and the same command resumes"
)
_RANK_SILENT = (
    "another process does not respond: it was stopped, its machine failed, or it waits for data; the last "
    "checkpoint is kept, and the same command resumes"
)
_SILENT = re.compile("(gloo|nccl).*timed out", re.I | re.S)
_LOST = re.compile(
    "(gloo|nccl|DistNetworkError).*(closed by peer|reset by peer|broken pipe|remote process exited)",
    re.I | re.S,
)


class Failures:
    """The notes that ranks leave for each other.

    Args:
        store: the store shared by all ranks; once it is unreachable, notes are neither written nor read.
        rank: this process's rank.
        host: whether this process hosts the store; if so, it waits for other ranks to read the note before it
            exits.
    """

    def __init__(self, store: Store, *, rank: int, host: bool) -> None:
        self._store = store
        self._rank = rank
        self._host = host
        self._note = ""
        # whether the store is unreachable: each further request would print a long C++ stack trace to stderr
        self._gone = False
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="failures", daemon=True).start()

    def close(self) -> None:
        """Stop watching for notes."""
        self._over.set()

    def note(self, seconds: float = 0.0) -> str:
        """Wait up to ``seconds`` for a rank to fail; return the first error, or ""."""
        self._until(seconds, self._look)
        return self._note

    def leave(self, message: str) -> None:
        """Write a note that this rank has failed, unless another rank failed first."""
        who = "error" if self._rank == 0 else f"error (rank {self._rank})"
        self._ask(lambda: self._store.compare_set(_NOTE, "", f"{who}: {message}"))

    def claim_report(self, message: str) -> bool:
        """Claim to report an error; return whether no other rank has. Rank 0 goes first with the same error."""
        key = f"clipkit/error/{message}"
        if self._rank:
            self._until(_RANK0_FIRST_SECONDS, lambda: bool(self._ask(lambda: self._store.check([key]))))
        times = self._ask(lambda: self._store.add(key, 1))
        return times is None or times == 1

    def wait_for_readers(self) -> None:
        """Give other ranks time to read the note if this process hosts the store."""
        if self._host:
            time.sleep(2 * _WATCH_SECONDS)

    def _look(self) -> bool:
        if not self._note and self._ask(lambda: self._store.check([_NOTE])):
            note = self._ask(lambda: self._store.get(_NOTE))
            self._note = note.decode(errors="replace") if note else ""
        return bool(self._note)

    def _ask(self, question: Callable[[], Answer]) -> Answer | None:
        """Return the store's answer; None once it is unreachable because the process that hosted it has exited."""
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
        """End this process some seconds after another rank failed; NCCL would wait for that rank for minutes."""
        while not self._gone and not self._over.wait(_WATCH_SECONDS):
            if self._look():
                if not self._over.wait(_END_SECONDS if self._rank else _END_RANK0_SECONDS):
                    tell_torchrun(self._note, late=True)
                    os._exit(1)
                return


# How long ranks wait for each other in a message.
_TIMEOUT = timedelta(minutes=10)  # until the first step is made, which may compile
_STEP_TIMEOUT = timedelta(minutes=5)  # between steps: only for the data of another rank
_SAVE_TIMEOUT = timedelta(hours=1)  # while rank 0 saves or scores
_LONG_TIMEOUT = timedelta(hours=6)  # for a background thread that waits while large shards are joined
_groups: list[dist.ProcessGroup] = []  # further groups, whose timeout changes too
_is_long = True  # whether the timeout is one of those that are longer than a step's
_failures: Failures | None = None  # notes of the process group
_store: Store | None = None  # store of the rendezvous
_messages = count()  # numbers of messages broadcast by rank 0


def together(command: Callable[[], int]) -> Callable[[], int]:
    """Wrap a main function so that all ranks end when one fails after ``start``.

    Args:
        command: the main function; ``clipkit.errors.run_command`` reports its exceptions.
    """

    def program() -> int:
        try:
            return command()
        except SystemExit:
            raise
        except KeyboardInterrupt:  # exit silently if torchrun sent the signal because another rank failed
            _end_if_another_failed(0.0)
            raise
        except BaseException as error:
            _report(error)
            raise

    return program


def _report(error: BaseException) -> None:
    """Write a note of this rank's error; exit silently if another rank reports it."""
    # torchrun ends the remaining ranks when one has exited, but reporting takes seconds
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reported = error
    failures = _failures
    if failures is not None and isinstance(error, RuntimeError):
        lost = _LOST.search(f"{type(error).__name__}: {error}")
        if lost or _SILENT.search(str(error)):
            _end_if_another_failed(_NOTE_SECONDS)
            reported = ClipkitError(_RANK_LOST if lost else _RANK_SILENT)
    # anything else is a bug: each rank prints its traceback
    users = isinstance(reported, ClipkitError | OSError)
    message = " ".join((str(reported) if users else f"{type(reported).__name__}: {reported}").split())
    tell_torchrun(f"error: {message}")
    if failures is not None:
        failures.leave(message)
        reports = not users or failures.claim_report(message)
        failures.wait_for_readers()
        if not reports:
            tell_torchrun(f"error: {message}", late=True)
            raise SystemExit(1)
    if reported is not error:
        raise reported from None


def _end_if_another_failed(seconds: float) -> None:
    if _failures is not None and (note := _failures.note(seconds)):
        tell_torchrun(note, late=True)
        raise SystemExit(1)


def check_launch() -> None:
    """Check the environment variables for the rendezvous, which torchrun sets.

    Raises:
        ConfigError: there are several processes and a variable is missing or not a number.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT") if world != "1" else ()
    missing = [name for name in needed if not os.environ.get(name)]
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    invalid = [name for name in names if not os.environ.get(name, "0").isdecimal()]
    if missing or invalid:
        wrong = f"{', '.join(missing)} not set" if missing else f"{invalid[0]} = {os.environ[invalid[0]]!r}"
        raise ConfigError(
            f"the environment has WORLD_SIZE = {world}, but {wrong}: start with torchrun, or unset WORLD_SIZE"
        )
    rank_and_world()


def rank_and_world() -> tuple[int, int]:
    """Return rank and world size from torchrun's environment variables; 0 and 1 without them.

    Raises:
        ConfigError: the values are invalid.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    rank = os.environ.get("RANK", "0" if world == "1" else "not set")
    if rank.isdecimal() and world.isdecimal() and int(rank) < int(world):
        return int(rank), int(world)
    raise ConfigError(
        f"the environment has RANK = {rank} and WORLD_SIZE = {os.environ.get('WORLD_SIZE', 'not set')}: "
        "start with torchrun, or unset both"
    )


def allow_open_files() -> None:
    """Let this process open as many files as the system allows; the usual limit is 1,024."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # no limit, which some systems refuse to set
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def select_device() -> torch.device:
    """Return the device that ``auto`` stands for: an accelerator (CUDA, MPS of Apple, XPU of Intel), else the CPU.

    Each process that torchrun starts on a machine gets its own CUDA or XPU device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "mps":
        return accelerator or torch.device("cpu")
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))


def start() -> torch.device:
    """Join the process group if torchrun started this process, and return this process's device.

    It is ``select_device``, except that several processes use CUDA or the CPU.

    Raises:
        ConfigError: the machine has fewer GPUs than processes.
    """
    global _failures, _store
    environment = os.environ
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    local_world = environment.get("LOCAL_WORLD_SIZE")
    cuda = torch.cuda.is_available()
    gpus = torch.cuda.device_count()
    if cuda and local_rank < gpus:
        torch.cuda.set_device(local_rank)
    if int(environment.get("WORLD_SIZE", "1")) > 1:
        # each group of CPU tensors takes a descriptor for each rank, and checkpoints open the shards of all ranks
        allow_open_files()
        store, rank, world = next(rendezvous("env://", timeout=_TIMEOUT))
        # torchrun's store outlives the ranks: after a restart (torch 2.15) it still contains their old addresses
        # and notes. With several torchruns, each counts its own restarts, and the counts differ.
        torchruns = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        alone = torchruns and local_world == environment.get("WORLD_SIZE")
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"
        _store = PrefixStore(f"attempt {attempt}", store)
        _failures = Failures(_store, rank=rank, host=rank == 0 and not torchruns)
        if local_world not in (None, environment["WORLD_SIZE"]):
            _check_own_address()
        # what each rank was doing when a collective timed out; TORCH_FR_DUMP_TEMP_FILE says where it is written
        environment.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        environment.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        # gloo for CPU tensors, so that agreeing on a flag does not wait for the GPU
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=PrefixStore("clipkit", _store),
            rank=rank,
            world_size=world,
            timeout=_TIMEOUT,
            device_id=select_device() if cuda and int(local_world or "1") <= gpus else None,
        )
    if cuda and local_rank >= gpus:  # checked after joining, so that it is reported once
        raise ConfigError(
            f"{local_world} processes on a machine with {gpus} GPUs: set --nproc-per-node to the number of GPUs"
        )
    return select_device() if cuda or world_size() == 1 else torch.device("cpu")


def _check_own_address() -> None:
    """Raise ConfigError if gloo would tell other hosts an address that only this host can use."""
    if os.environ.get("GLOO_SOCKET_IFNAME") or _is_loopback(os.environ.get("MASTER_ADDR", "")):
        return
    host = socket.gethostname()
    if _is_loopback(host):
        raise ConfigError(
            f"the name of this host, {host}, stands for a loopback address, which other hosts cannot reach: set "
            "GLOO_SOCKET_IFNAME to the network interface between the hosts, such as eth0 (`ip addr` lists them)"
        )


def _is_loopback(host: str) -> bool:
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(addresses) and all(ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def stop() -> None:
    """Leave the process group; waits for all ranks, since a rank that leaves early can abort the others."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        if _failures is not None:
            _failures.close()
        dist.destroy_process_group()
        _groups.clear()


_is_alone = ContextVar("_is_alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Compute as if there were no other process: rank 0 of 1."""
    token = _is_alone.set(True)
    try:
        yield
    finally:
        _is_alone.reset(token)


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and not _is_alone.get()


def rank() -> int:
    """Return this process's rank, 0 ≤ rank < world_size."""
    return dist.get_rank() if _has_ranks() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if _has_ranks() else 1


def broadcast_buffers(buffers: Iterable[Tensor]) -> None:
    """Copy rank 0's values to every rank, in place."""
    if world_size() > 1:
        for buffer in buffers:
            dist.broadcast(buffer, src=0)


def ranks_of_host() -> int:
    """Return the number of processes on this machine, as set by torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def count_hosts() -> int:
    """Return the number of machines, which are taken to have equally many processes."""
    return max(1, world_size() // ranks_of_host())


def background_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Return a group of ranks for collectives in a background thread, None on other ranks; all ranks call this."""
    group = dist.new_group(list(ranks), backend="gloo", timeout=_LONG_TIMEOUT)
    return group if isinstance(group, dist.ProcessGroup) else None


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def share_timeout(groups: Iterable[dist.ProcessGroup]) -> None:
    """Apply the timeouts of the group of all ranks to further groups, see ``allow_long_waits``."""
    _groups.extend(groups)


def _set_timeouts(timeout: timedelta) -> None:
    for group in (None, *_groups):
        _set_timeout(timeout, group)


def allow_long_waits() -> None:
    """Let ranks wait for each other until ``end_long_waits``, as for rank 0 that saves or scores alone."""
    global _is_long
    if world_size() > 1:
        _set_timeouts(_SAVE_TIMEOUT)
        _is_long = True


def end_long_waits() -> None:
    """Wait for all ranks if long waits were allowed, as they are at first; then notice soon if a rank hangs."""
    global _is_long
    if world_size() > 1 and _is_long:
        # on the CPU, so that a rank with a GPU sends nothing more until then
        dist.all_reduce(torch.zeros(()))
        _set_timeouts(_STEP_TIMEOUT)
        _is_long = False


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the elementwise sum over ranks, on each rank; no gradient."""
    if world_size() == 1:
        return values
    total = values.detach().clone()
    dist.all_reduce(total)
    return total


def start_totals(**counts: int) -> Callable[[], dict[str, int]]:
    """Start to sum counts by name over ranks; a bool counts as 0 or 1.

    All ranks call this with the same names. The message travels while this process goes on.

    Returns:
        a function that waits for the sums and returns them by name.
    """
    values = torch.tensor([int(count) for count in counts.values()], dtype=torch.int64)
    work = dist.all_reduce(values, async_op=True) if world_size() > 1 else None

    def wait() -> dict[str, int]:
        if work is not None:
            work.wait()
        return dict(zip(counts, values.tolist(), strict=True))

    return wait


def gather_objects(value: Any) -> list[Any]:
    """Return every rank's value (numbers, strings, lists), ordered by rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_bytes(content: bytes) -> bytes:
    """Return rank 0's bytes on every rank; ``content`` is ignored on other ranks.

    There is no timeout, since rank 0 may count shards for hours.
    """
    if world_size() == 1:
        return content
    assert _store is not None
    ready = f"clipkit/bytes/{next(_messages)}"
    if rank() == 0:
        _store.set(ready, "")
    else:
        while not _store.check([ready]):  # wait() would block other users of the store
            time.sleep(_POLL_SECONDS)
    size = torch.tensor(len(content))
    dist.broadcast(size, src=0)
    if not size:
        return b""
    if rank() == 0:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    else:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return data.numpy().tobytes()


def build_on_rank0(build: Callable[[], Built], outline: Callable[[Built], Built]) -> Built:
    """Return the object that ``build`` returns on rank 0, and its ``outline``, pickled, on other ranks."""
    if rank() == 0:
        built = build()
        if world_size() > 1:
            broadcast_bytes(pickle.dumps(outline(built)))
        return built
    received: Built = pickle.loads(broadcast_bytes(b""))
    return received


def max_over_ranks(values: Tensor) -> Tensor:
    """Return the elementwise maximum over ranks, on each rank; no gradient."""
    if world_size() == 1:
        return values
    greatest = values.detach().clone()
    dist.all_reduce(greatest, op=dist.ReduceOp.MAX)
    return greatest


def copy_to_host(values: Tensor) -> Callable[[], Tensor]:
    """Start to copy a tensor to the host, and return a function that waits for the copy and returns it."""
    if not values.is_cuda:
        return lambda: values
    copy = torch.empty_like(values, device="cpu", pin_memory=True)
    copy.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> Tensor:
        arrived.synchronize()
        return copy

    return wait


class Gathering:
    """Small tensors of all ranks on the way to each of them: neither a GPU nor the host waits until ``read``.

    Args:
        values: this rank's, of the same shape and dtype on all ranks; all ranks create this together.
    """

    def __init__(self, values: Tensor) -> None:
        self._shape = (world_size(), *values.shape)
        self._values = values.flatten()  # kept until it is sent
        gathered = values.new_empty(world_size() * values.numel())
        self._work: Any = None
        if world_size() == 1:
            gathered.copy_(self._values)
        else:
            self._work = _all_gather(gathered, self._values, async_op=True)
        if self._work is not None and values.is_cuda:
            self._work.wait()  # in the queue of the GPU
            self._work = None
        self._read = copy_to_host(gathered)

    def read(self) -> Tensor:
        """Return the values of all ranks on the host, (W, …), ordered by rank."""
        if self._work is not None:
            self._work.wait()
        return self._read().view(self._shape)


_known_rows: ContextVar[Sequence[int]] = ContextVar("_known_rows", default=())


@contextmanager
def known_rows(counts: Sequence[int]) -> Iterator[None]:
    """State how many rows of the batch each rank has, so that ``gather_row_counts`` sends no message.

    Args:
        counts: by rank, each at least 1; empty: not known.
    """
    token = _known_rows.set(counts)
    try:
        yield
    finally:
        _known_rows.reset(token)


def gather_row_counts(rows: int) -> list[int]:
    """Return the number of rows of each rank, ordered by rank, without waiting for a GPU.

    Args:
        rows: those of this rank; within ``known_rows`` a multiple of them, the same on all ranks.
    """
    if world_size() == 1:
        return [rows]
    if counts := _known_rows.get():
        factor, rest = divmod(rows, counts[rank()])
        assert not rest, (rows, counts)
        return [factor * count for count in counts]
    # a process group that was not created by start() may not support CPU tensors
    device = "cpu" if "cpu:" in dist.get_backend_config() else "cuda"
    gathered = torch.empty(world_size(), dtype=torch.int64, device=device)
    _all_gather(gathered, torch.tensor([rows], device=device))
    return [int(count) for count in gathered.tolist()]


def gather_rows(rows: Tensor, counts: list[int]) -> Tensor:
    """Return every rank's (B, …) rows as (N, …), ordered by rank; no gradient.

    Args:
        rows: this rank's rows, with the same shape (except for B) and dtype on all ranks.
        counts: every rank's B, see ``gather_row_counts``.
    """
    return start_gathering(rows, counts)()


def start_gathering(rows: Tensor, counts: list[int]) -> Callable[[], Tensor]:
    """Start ``gather_rows``, and return a function that waits for the rows and returns them.

    On a GPU, not the host waits, but what the GPU computes from then on.
    """
    if world_size() == 1:
        return rows.detach
    padded = rows.detach().contiguous()
    most = max(counts)
    if len(padded) < most:
        padded = torch.cat([padded, padded.new_zeros(most - len(padded), *padded.shape[1:])])
    gathered = padded.new_empty(len(counts) * most, *padded.shape[1:])
    work: Any = _all_gather(gathered, padded, async_op=True)

    def wait() -> Tensor:
        work.wait()
        if min(counts) == most:
            return gathered
        return torch.cat([part[:count] for part, count in zip(gathered.split(most), counts, strict=True)])

    return wait


def scatter_row_sums(rows: Tensor, counts: list[int]) -> Tensor:
    """Return this rank's (B, …) rows of the sum over ranks of (N, …); no gradient.

    Args:
        rows: (N, …), with the same shape and dtype on all ranks.
        counts: every rank's B, see ``gather_row_counts``.
    """
    if world_size() == 1:
        return rows
    most = max(counts)
    padded = rows.contiguous()
    if min(counts) < most:
        padded = rows.new_zeros(len(counts) * most, *rows.shape[1:])
        for block, part in zip(padded.split(most), rows.split(counts), strict=True):
            block[: len(part)] = part
    local_sums = rows.new_empty(most, *rows.shape[1:])
    _reduce_scatter(local_sums, padded)
    return local_sums[: counts[rank()]]


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send consecutive (B, …) rows to all ranks, and return those from all ranks, ordered by rank; no gradient.

    Args:
        rows: this rank's rows, with the same shape (except for B) and dtype on all ranks.
        sent: how many of them each rank gets.
        received: how many each rank sends to this rank.
    """
    if world_size() == 1:
        return rows
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), list(received), list(sent))
    return result
