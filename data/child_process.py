"""Processes that work for another one: they end with it, however it ends."""

import os
from multiprocessing import parent_process
from threading import Thread

__all__ = ["end_with_parent"]


def end_with_parent() -> None:
    """From here on this process, a child of ``multiprocessing``, is gone as soon as its parent is."""
    Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
