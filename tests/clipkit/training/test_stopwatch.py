"""Tests of the stopwatch: consecutive phases, with no time counted twice or omitted."""

import itertools
import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given, settings, strategies as st

from clipkit.training.metrics import PHASES, Stopwatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock set by the test, in seconds."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_seconds_are_counted_by_phase(clock: list[float]) -> None:
    watch = Stopwatch()
    for phase, seconds in (("data", 1.0), ("forward", 2.0), ("data", 0.5), ("other", 4.0)):
        watch.begin(phase)
        clock[0] += seconds
    assert watch.read() == {"data": 1.5, "forward": 2.0, "other": 4.0}
    clock[0] += 8
    assert watch.read() == {"other": 8.0}  # the last phase still runs
    watch.begin("data")
    clock[0] += 16
    assert watch.read() == {"other": 0.0, "data": 16.0}


def test_time_before_the_first_phase_is_not_counted(clock: list[float]) -> None:
    watch = Stopwatch()
    clock[0] += 5
    assert watch.read() == {}


def test_unknown_phase_fails_an_assertion() -> None:
    with pytest.raises(AssertionError, match="lunch"):
        Stopwatch().begin("lunch")


@settings(max_examples=50)
@given(st.lists(st.sampled_from((*PHASES, "read")), max_size=30))
def test_phases_add_up_to_the_total_time(events: list[str]) -> None:
    ticks = itertools.count(100.0)
    with patch("clipkit.training.metrics.time", SimpleNamespace(monotonic=lambda: next(ticks))):
        watch, total = Stopwatch(), 0.0
        begun = False
        for event in (*events, "read"):
            if event == "read":
                total += sum(watch.read().values())
            else:
                watch.begin(event)
                begun = True
    if begun:
        assert total == next(ticks) - 1 - 100  # from the first to the last reading of the clock
    else:
        assert total == 0
