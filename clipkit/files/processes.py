"""Child processes."""

import os
from threading import Thread


def end_with_parent() -> None:
    """End this process, a child of ``multiprocessing``, as soon as its parent ends."""
    from multiprocessing import parent_process

    def wait() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()
