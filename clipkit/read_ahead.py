"""Work that runs ahead of its use: threads read and decode while the model computes."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

__all__ = ["default_workers", "one_core_each", "read_ahead"]

_MAX_WORKERS = 16

Given = TypeVar("Given")
Made = TypeVar("Made")


def default_workers() -> int:
    """Threads for this process: its share of the cores, at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    here = os.environ.get("LOCAL_WORLD_SIZE", "1")  # set by torchrun
    return max(1, min(_MAX_WORKERS, cores // max(1, int(here) if here.isdecimal() else 1)))


def read_ahead(
    work: Callable[[Given], Made], items: Iterable[Given], *, workers: int, ahead: int
) -> Iterator[tuple[Given, Made]]:
    """Each item with ``work(item)``, in the order of the items.

    Args:
        work: called in threads; what it raises is raised here when the item's turn comes.
        items: taken one by one as results are taken, never more than ``ahead`` before their turn.
        workers: how many threads; 0 does the work here when its turn comes.
        ahead: how many results may lie ready or be in the making.
    """
    if workers == 0:
        for item in items:
            yield item, work(item)
        return
    waiting: deque[tuple[Given, Future[Made]]] = deque()
    with one_core_each(workers) as pool:
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) >= ahead:
                first, made = waiting.popleft()
                yield first, made.result()
        while waiting:
            first, made = waiting.popleft()
            yield first, made.result()


@contextmanager
def one_core_each(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that use one core each; torch would start as many more as there are cores for every one of them.

    What is waiting to be done is dropped in the end.
    """
    threads = torch.get_num_threads()
    # torch takes the number for the calling thread, and for all that start later
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
