"""What all tests share."""

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.forked import Forked

# models of this size gain nothing from threads, which wait for each other on a busy machine
torch.set_num_threads(1)

# no test depends on the clock: a busy machine is slow, not wrong
settings.register_profile("clipkit", deadline=None)
settings.load_profile("clipkit")

# what was started in the background, or by nohup, ignores these, and so would all that the tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Runs programs without waiting for torch."""
    server = Forked()
    yield server
    server.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first, so that no process is left alone with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
