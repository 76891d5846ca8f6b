"""Tests of decisions about updates: spikes, values that are not finite, and outcomes read some steps later."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from clipkit.training import guards
from clipkit.training.guards import Decisions

CPU = torch.device("cpu")
IDS = torch.arange(2)
norms = st.just(0.0) | st.floats(1e-30, 1e6)  # not so small that rounding matters


def decide(losses: list[float], values: list[float], factor: float) -> list[bool]:
    """Return which steps are skipped in a training with these losses and gradient norms."""
    deciding = Decisions(0.0, 0, device=CPU, factor=factor)
    return [
        bool(deciding.skip_update(torch.tensor(loss), torch.tensor(norm)))
        for loss, norm in zip(losses, values, strict=True)
    ]


def skipped(values: list[float], factor: float) -> list[int]:
    return [step for step, skip in enumerate(decide([1.0] * len(values), values, factor)) if skip]


@given(st.lists(norms, max_size=60))
def test_no_step_is_skipped_by_default(values: list[float]) -> None:
    assert skipped(values, 0) == []


@given(st.lists(norms, max_size=20))
def test_first_updates_are_never_skipped(values: list[float]) -> None:
    assert skipped(values, 1.01) == []


def test_spike_is_skipped_and_the_next_step_is_not() -> None:
    assert skipped([1.0] * 30 + [100.0] + [1.0] * 30, 3) == [30]
    assert skipped([1.0] * 30 + [2.9] + [1.0] * 30, 3) == []
    assert skipped([1.0] * 30 + [100.0, 100.0] + [1.0] * 30, 3) == [30, 31]


@given(st.floats(1.5, 10), st.floats(2, 1e3))
def test_permanently_higher_norms_become_usual(factor: float, rise: float) -> None:
    left_out = skipped([1.0] * 50 + [rise] * 900, factor)
    assert left_out == list(range(50, 50 + len(left_out)))  # and none later
    assert len(left_out) < 900


@given(st.lists(norms, max_size=60), st.floats(1.01, 10))
def test_decisions_equal_those_of_plain_arithmetic(values: list[float], factor: float) -> None:
    usual = 0.0
    updates = 0
    expected = []
    for value in torch.tensor(values).tolist():
        spike = updates >= 20 and value > factor * usual
        memory = min(0.98, updates / (updates + 1))
        usual = memory * usual + (1 - memory) * (factor * usual if spike else value)
        updates += not spike
        expected.append(spike)
    assert decide([1.0] * len(values), values, factor) == expected


@given(norms, st.floats(0.5, 2), st.integers(0, 10_000))
def test_usual_norm_is_constant_for_constant_norms(norm: float, other: float, updates: int) -> None:
    def following(usual: float, norm: float) -> float:
        deciding = Decisions(usual, updates, device=CPU, factor=3)
        deciding.skip_update(torch.tensor(1.0), torch.tensor(norm))
        deciding.add(dict, IDS)
        outcome = deciding.next_outcome(wait=True)
        assert outcome is not None
        return outcome.usual_norm

    norm, other_norm = torch.tensor([norm, norm * other]).tolist()  # rounded to float32
    assert abs(following(norm, norm) - norm) <= 1e-9 * norm
    between = sorted((norm, other_norm))
    assert between[0] * (1 - 1e-9) <= following(norm, other_norm) <= between[1] * (1 + 1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("of", ["loss", "norm"])
def test_no_update_follows_a_value_that_is_not_finite(of: str, value: float) -> None:
    losses, values = [1.0] * 6, [1.0] * 6
    (losses if of == "loss" else values)[2] = value
    assert decide(losses, values, 0) == [False, False, True, True, True, True]


@pytest.mark.parametrize("lag", [0, 2])
def test_outcomes_are_returned_in_order(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(guards.LAG, "cpu", lag)
    deciding = Decisions(2.0, 2, device=CPU, factor=0)
    outcomes = []
    waited = []
    for step in range(4):
        deciding.skip_update(torch.tensor(step + 0.5), torch.tensor(2.0))
        deciding.add(lambda step=step: waited.append(step) or {"faults": step}, IDS)  # type: ignore[misc, func-returns-value]
        while (outcome := deciding.next_outcome(wait=False)) is not None:
            outcomes.append(outcome)
        assert len(outcomes) == len(waited) == max(0, step + 1 - lag)
    while (outcome := deciding.next_outcome(wait=True)) is not None:
        outcomes.append(outcome)
    assert [outcome.loss for outcome in outcomes] == [0.5, 1.5, 2.5, 3.5]
    assert [outcome.totals for outcome in outcomes] == [{"faults": step} for step in range(4)]
    assert all(outcome.is_finite and not outcome.is_spike for outcome in outcomes)
    assert outcomes[-1].usual_norm == 2.0 and deciding.updates == 6
