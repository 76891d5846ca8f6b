"""A training is asked to stop by signals, and refuses a launch that names only half of what it needs."""

import os
import signal
from collections.abc import Iterator

import pytest

from clipkit.errors import ConfigError
from clipkit.process import StopRequest, check_launch, rank_and_world

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_where_there_is_something_to_save_the_step_is_finished(number: signal.Signals) -> None:
    stop = StopRequest()
    stop.save_first(True, "the last steps are lost")
    signal.raise_signal(number)
    assert stop.asked
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="the last steps are lost"):  # a second Ctrl-C does not wait
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="all is saved"):
        stop.save_first(False, "all is saved")


@pytest.mark.parametrize("number", SIGNALS)
def test_where_there_is_nothing_to_save_it_leaves_at_once(number: signal.Signals) -> None:
    StopRequest()
    with pytest.raises(KeyboardInterrupt, match="before the first step"):
        signal.raise_signal(number)


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    StopRequest()
    signal.raise_signal(signal.SIGHUP)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, None),
        ({"WORLD_SIZE": "4"}, "RANK, MASTER_ADDR, MASTER_PORT not set: start with torchrun"),
        ({"WORLD_SIZE": "four", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "WORLD_SIZE = 'four'"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK = 'x'"),
    ],
)
def test_half_a_launch_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], message: str | None
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setitem(os.environ, name, value)
    if message is None:
        check_launch()
        return
    with pytest.raises(ConfigError) as caught:
        check_launch()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "world", "found"),
    [
        (None, None, (0, 1)),
        ("0", None, (0, 1)),
        (None, "1", (0, 1)),
        ("2", "3", (2, 3)),
        ("x", "2", "RANK = x and WORLD_SIZE = 2"),
        ("0", "0", "RANK = 0 and WORLD_SIZE = 0"),
        ("3", None, "RANK = 3 and WORLD_SIZE = not set"),
        ("3", "3", "RANK = 3 and WORLD_SIZE = 3"),
        (None, "2", "RANK = not set and WORLD_SIZE = 2"),
        ("-1", "2", "RANK = -1"),
    ],
)
def test_which_process_this_is(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, world: str | None, found: tuple[int, int] | str
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if isinstance(found, tuple):
        assert rank_and_world() == found
        return
    with pytest.raises(ConfigError, match=found):
        rank_and_world()
