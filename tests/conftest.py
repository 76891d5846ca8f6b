"""Fixtures and settings of all tests."""

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.forked import Forked

# modules and tests are made once and stay
gc.disable()

# without bytecode, each worker and each process that a test starts would compile all modules again
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# small models gain nothing from threads, which contend on a busy machine
torch.set_num_threads(1)

# no deadline of hypothesis: the machine may be busy
settings.register_profile("clipkit", deadline=None)
settings.load_profile("clipkit")

# background processes and nohup ignore these signals, and child processes would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Run programs in processes that are forked after torch was imported."""
    server = Forked()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def restore_library_of_products() -> Iterator[None]:
    """Undo what commands set for their process: that oneDNN multiplies float32."""
    yield
    torch.backends.mkldnn.matmul.fp32_precision = "none"  # type: ignore[attr-defined]  # unknown to mypy


def pytest_collection_finish() -> None:
    """Keep collections in forked processes from copying the memory of all imported modules."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
