"""What is recorded of steps: rates, parts of the time that make up the whole, use of the device, waiting."""

import time
from collections.abc import Callable, Sequence

import pytest
import torch

from clipkit.training.metrics import PHASES, StepMetrics, Stopwatch

CPU = torch.device("cpu")


class Training:
    """A loop whose phases take the seconds that the test says."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, ranks: int, peak: float | None, measured: Sequence[float]
    ) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.watch = Stopwatch(CPU)
        peaks = iter(measured)

        def measure(*, together: bool) -> float:
            assert not together
            self.now += 0.25
            return next(peaks)

        again = measure if measured else None
        self.metrics = StepMetrics(self.watch, device=CPU, ranks=ranks, peak=peak, measure=again)

    def step(self, *, samples: int = 8, flops: int | None = 10**9, **seconds: float) -> None:
        for phase, spent in seconds.items():
            self.watch.begin(phase)
            self.now += spent
        self.metrics.step(samples=samples, flops=flops)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Training]:
    def training(ranks: int = 1, peak: float | None = 1e9, measured: Sequence[float] = ()) -> Training:
        return Training(monkeypatch, ranks=ranks, peak=peak, measured=measured)

    return training


def test_figures_are_means_of_the_steps_since_the_last(make: Callable[..., Training]) -> None:
    training = make(ranks=2)
    training.step(data=1, forward=2, backward=4, other=1)
    training.step(data=3, forward=2, backward=2, other=1)
    figures = training.metrics.read()
    assert figures["batch_time"] == 8 and figures["samples_per_second"] == 1
    assert figures["samples_per_second_per_gpu"] == 0.5
    assert (figures["data_time"], figures["forward_time"], figures["backward_time"]) == (2, 2, 3)
    assert figures["loss_time"] == 0
    assert sum(figures[f"{phase}_time"] for phase in PHASES) == figures["batch_time"]
    assert figures["mfu"] == pytest.approx(2e9 / 16 / 1e9)
    assert 0 < figures["memory_gib"] < 1024

    training.step(data=1, forward=1)
    assert training.metrics.read()["batch_time"] == 2  # what was read is done with


def test_a_peak_that_was_measured_on_a_busy_machine_is_measured_again(make: Callable[..., Training]) -> None:
    training = make(peak=1e9, measured=[1.5e9, 4e9])
    training.step(forward=1, flops=10**9)
    assert training.metrics.read()["mfu"] == 1
    training.step(forward=1, flops=2 * 10**9)
    assert "mfu" not in training.metrics.read()  # the machine is still busy: nobody knows
    training.step(forward=1, flops=2 * 10**9)
    figures = training.metrics.read()
    assert figures["mfu"] == 0.5 and figures["batch_time"] == 1
    training.step(forward=1, flops=10**9)
    assert training.metrics.read()["mfu"] == 0.25


def test_the_peak_is_not_measured_at_every_reading(make: Callable[..., Training]) -> None:
    training = make(peak=1e9, measured=[1e9] * 3)  # a fourth would fail
    for _ in range(6):
        training.step(forward=1, flops=2 * 10**9)
        assert "mfu" not in training.metrics.read()


def test_without_a_way_to_measure_again_no_use_above_1_is_told(make: Callable[..., Training]) -> None:
    training = make(peak=1e9)
    training.step(forward=1, flops=2 * 10**9)
    assert "mfu" not in training.metrics.read()


def test_what_is_no_step_is_left_out(make: Callable[..., Training]) -> None:
    training = make()
    training.step(data=1, other=1)
    training.metrics.read()
    training.now += 100  # scores, a checkpoint
    training.metrics.leave_out()
    training.step(data=1, other=1)
    assert training.metrics.read()["batch_time"] == 2


@pytest.mark.parametrize(("flops", "peak"), [(None, 1e9), (10**9, None), (0, 1e9)])
def test_where_flops_are_not_known_no_use_is_told(
    make: Callable[..., Training], flops: int | None, peak: float | None
) -> None:
    training = make(peak=peak)
    training.step(flops=flops, forward=1)
    assert "mfu" not in training.metrics.read()


def test_before_any_step_there_are_figures_too(make: Callable[..., Training]) -> None:
    figures = make().metrics.read()
    assert figures["samples_per_second"] == figures["batch_time"] == 0


def test_waiting_for_data_is_told_once_and_only_when_it_lasts(make: Callable[..., Training]) -> None:
    training = make()
    training.step(data=9, forward=1)
    training.metrics.read()
    assert training.metrics.starved() == 0  # of the start alone
    training.step(data=21, forward=39)
    training.metrics.read()
    assert training.metrics.starved() == pytest.approx(30 / 70)
    training.step(data=60, forward=1)
    training.metrics.read()
    assert training.metrics.starved() == 0


def test_a_slow_start_is_forgotten(make: Callable[..., Training]) -> None:
    training = make()
    for data, told in ((12, 0), (6, 0), (30, 0.5)):
        training.step(data=data, forward=60 - data)
        training.metrics.read()
        assert training.metrics.starved() == (pytest.approx(told) if data > 12 else 0)
