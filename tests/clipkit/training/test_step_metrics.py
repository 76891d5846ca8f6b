"""Tests of step metrics: rates, times by phase, utilization, and waiting for data."""

import time
from collections.abc import Callable, Sequence

import pytest
import torch

from clipkit.training.metrics import PHASES, RankTimes, StepMetrics, Stopwatch

CPU = torch.device("cpu")


class Training:
    """A training loop whose phases take the seconds given by the test."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        ranks: int,
        peak: float | None,
        measured: Sequence[float],
        device: torch.device,
    ) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.watch = Stopwatch(CPU)
        peaks = iter([peak, *measured])

        def measure(*, together: bool = True) -> float:
            assert together == (not self.metrics.peak)
            self.now += 0.25
            return next(peaks) or 0.0

        self.metrics = StepMetrics(self.watch, device=device, ranks=ranks)
        if peak:
            self.metrics.measure_peak(measure)

    def step(self, *, samples: int = 8, flops: int = 10**9, **seconds: float) -> None:
        for phase, spent in seconds.items():
            self.watch.begin(phase)
            self.now += spent
        self.metrics.step(samples=samples, flops=flops)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Training]:
    def training(
        ranks: int = 1,
        peak: float | None = 1e9,
        measured: Sequence[float] = (),
        device: torch.device = CPU,
    ) -> Training:
        return Training(monkeypatch, ranks=ranks, peak=peak, measured=measured, device=device)

    return training


def test_figures_are_means_since_the_last_read(make: Callable[..., Training]) -> None:
    training = make(ranks=2)
    training.step(data=1, forward=2, backward=4, other=1)
    training.step(data=3, forward=2, backward=2, other=1)
    figures = training.metrics.collect()
    assert figures["batch_time"] == 8 and figures["samples_per_second"] == 1
    assert figures["samples_per_second_per_gpu"] == 0.5
    assert (figures["data_time"], figures["forward_time"], figures["backward_time"]) == (2, 2, 3)
    assert figures["loss_time"] == 0
    assert sum(figures[f"{phase}_time"] for phase in PHASES) == figures["batch_time"]
    assert figures["mfu"] == pytest.approx(2e9 / 16 / 1e9)
    assert 0 < figures["memory_gib"] < 1024

    training.step(data=1, forward=1)
    assert training.metrics.collect()["batch_time"] == 2  # earlier steps are not counted again


def test_peak_exceeded_by_the_training_is_measured_again(make: Callable[..., Training]) -> None:
    training = make(peak=1e9, measured=[1.5e9, 4e9])
    training.step(forward=1, flops=10**9)
    assert training.metrics.collect()["mfu"] == 1
    training.step(forward=1, flops=2 * 10**9)
    assert "mfu" not in training.metrics.collect()  # still above the measured peak
    training.step(forward=1, flops=2 * 10**9)
    figures = training.metrics.collect()
    assert figures["mfu"] == 0.5 and figures["batch_time"] == 1
    training.step(forward=1, flops=10**9)
    assert training.metrics.collect()["mfu"] == 0.25


def test_peak_is_measured_at_most_three_times(make: Callable[..., Training]) -> None:
    training = make(peak=1e9, measured=[1e9] * 3)  # a fourth would fail
    for _ in range(6):
        training.step(forward=1, flops=2 * 10**9)
        assert "mfu" not in training.metrics.collect()


def test_peak_of_a_gpu_is_measured_once(make: Callable[..., Training]) -> None:
    training = make(peak=1e9, device=torch.device("cuda"))  # a second measurement would fail
    training.step(forward=1, flops=2 * 10**9)
    assert "mfu" not in training.metrics.collect()


def test_leave_out_excludes_time_between_steps(make: Callable[..., Training]) -> None:
    training = make()
    training.step(data=1, other=1)
    training.metrics.collect()
    training.now += 100  # evaluation, checkpoint
    training.metrics.leave_out()
    training.step(data=1, other=1)
    assert training.metrics.collect()["batch_time"] == 2


@pytest.mark.parametrize(("flops", "peak"), [(10**9, None), (0, 1e9)])
def test_mfu_is_omitted_without_flops_or_peak(
    make: Callable[..., Training], flops: int, peak: float | None
) -> None:
    training = make(peak=peak)
    training.step(flops=flops, forward=1)
    assert "mfu" not in training.metrics.collect()


def test_figures_before_the_first_step_are_zero(make: Callable[..., Training]) -> None:
    figures = make().metrics.collect()
    assert figures["samples_per_second"] == figures["batch_time"] == 0


def explain(training: Training, workers: int = 0) -> str:
    training.metrics.collect()
    return training.metrics.explain_waiting(workers, "s3://bucket/a.tar")


def test_waiting_for_data_is_reported_once_and_only_if_it_lasts(make: Callable[..., Training]) -> None:
    training = make()
    training.step(data=9, forward=1)
    assert not explain(training)  # of the start alone
    training.step(data=21, forward=39)
    assert explain(training).startswith("training spent 43% of its time waiting for data; ")
    training.step(data=60, forward=1)
    assert not explain(training)


def test_slow_start_is_forgotten(make: Callable[..., Training]) -> None:
    training = make()
    for data, reported in ((12, False), (6, False), (30, True)):
        training.step(data=data, forward=60 - data)
        assert explain(training).startswith("training spent 50% of its time") == reported


def test_loader_processes_that_would_keep_up_are_reported(make: Callable[..., Training]) -> None:
    training = make()
    for make_seconds in (1000.0, 250.0):  # only the last minute counts
        training.metrics.step(samples=8, flops=0, read_seconds=1.0, make_seconds=make_seconds)
        training.step(data=5 if make_seconds > 500 else 35, forward=60)
        line = explain(training, workers=2)
    assert "; about 5 loader processes per rank would keep up; decoding" in line


@pytest.mark.parametrize(
    ("read_seconds", "make_seconds", "workers", "cause"),
    [
        (8.0, 10.0, 0, "reading from s3://bucket/a.tar takes 80% of the time per batch"),
        (
            1.0,
            10.0,
            0,
            "decoding and cropping images takes 90% of the time per batch: raise data.workers = 0",
        ),
        (0.0, 0.0, 0, "raise data.workers = 0"),
        (0.1, 1.0, 10_000, "cores are in use"),
    ],
)
def test_slowest_part_of_the_input_is_explained(
    make: Callable[..., Training], read_seconds: float, make_seconds: float, workers: int, cause: str
) -> None:
    training = make()
    for _ in range(3):
        training.watch.begin("data")
        training.now += 30
        training.metrics.step(
            samples=8, flops=0, read_seconds=read_seconds / 3, make_seconds=make_seconds / 3
        )
    assert cause in explain(training, workers)


def test_slowest_rank_and_its_cause() -> None:
    names = [f"rank {i} on node{i // 2}" for i in range(4)]
    phases = {"data": [0.0, 0.01, 0.0, 0.3], "forward": [1.0, 1.1, 1.0, 1.0], "optimizer": [0.1] * 4}
    times = RankTimes(names=names, phases=phases)
    assert times.slowest == 3 and times.cause == "data" and times.is_slow
    assert times.excess == pytest.approx(0.3 / 1.1)
    assert times.waiting == pytest.approx([0.3, 0.19, 0.3, 0.0])
    line = "rank 3 on node1 takes 27% longer than the others, mostly in data: 300 ms a step instead of 0 ms"
    assert times.describe().startswith(line)
    even = RankTimes(names=names, phases={**phases, "data": [0.0] * 4})
    assert not even.is_slow and even.cause == "forward"
