"""Child processes, and tasks on a Ray cluster, whose results are returned as they complete.

A task whose worker or node dies runs again elsewhere. Errors are reported in one line, as without Ray.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from clipkit.errors import ClipkitError, ConfigError, DataError

_RETRIES = 3  # of a task whose worker or node died
_CONNECT_SECONDS = 10.0
_LOOK_SECONDS = 10.0  # after which resources are counted again

Result = TypeVar("Result")


def end_with_parent() -> None:
    """End this process, a child of ``multiprocessing``, as soon as its parent ends."""
    from multiprocessing import parent_process

    def wait() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


@contextmanager
def ray_cluster(address: str, packages: Iterable[Path]) -> Iterator[Any]:
    """Connect to a cluster, yield the module ``ray``, and disconnect.

    Args:
        address: as for ``ray.init``, such as "10.0.0.1:6379", or "local" for a cluster on this machine.
        packages: folders of Python packages that tasks import.
    """
    import logging
    import socket

    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs ray: pip install -e '.[ray]'") from None
    try:
        host, _, port = address.rpartition("/")[2].rpartition(":")
        if host:  # ray.init waits forever for a server that does not exist, even after Ctrl-C
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        environment = {"py_modules": [str(package) for package in packages]}
        ray.init(address, runtime_env=environment, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--ray {address}: no Ray cluster ({str(error).partition(chr(10))[0]})") from error
    try:
        yield ray
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ClipkitError | OSError):
            raise cause from None
        raise
    except ray.exceptions.RayError as error:
        raise DataError(
            f"a task of the Ray cluster failed ({type(error).__name__}): run the same command to resume"
        ) from error
    finally:
        ray.shutdown()


def ray_tasks(
    ray: Any, function: Callable[..., Result], arguments: Iterable[tuple[Any, ...]], *, resource: str = "CPU"
) -> Iterator[Result]:
    """Call a function in one task for each tuple of arguments; yield results in the order of completion.

    Twice as many tasks are submitted as the cluster can run, so arguments may be produced on demand.

    Args:
        function: a function of an importable module.
        resource: "CPU" or "GPU", of which each task takes one.
    """
    task = ray.remote(max_retries=_RETRIES, num_cpus=1, num_gpus=int(resource == "GPU"))(function)
    pending: list[Any] = []

    def capacity() -> int:
        if (count := int(ray.cluster_resources().get(resource, 0))) < 1:
            raise DataError(
                f"the Ray cluster has no {resource}: add a node, and run the same command to resume"
            )
        return count

    def first() -> Result:
        while True:
            done, _ = ray.wait(pending, num_returns=1, timeout=_LOOK_SECONDS)
            if done:
                pending.remove(done[0])
                result: Result = ray.get(done[0])
                return result
            capacity()

    for values in arguments:
        while len(pending) >= 2 * capacity():
            yield first()
        pending.append(task.remote(*values))
    while pending:
        yield first()
