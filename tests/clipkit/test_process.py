"""A training is asked to stop by signals, and says what that costs."""

import signal
from collections.abc import Iterator

import pytest

from clipkit.process import StopRequest

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


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
    with pytest.raises(KeyboardInterrupt, match="no step was made"):
        signal.raise_signal(number)


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    StopRequest()
    signal.raise_signal(signal.SIGHUP)
