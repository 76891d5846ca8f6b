"""Tests of gradient spike detection and its running average of norms."""

from hypothesis import given, strategies as st

from clipkit.training.guards import is_spike, next_usual

norms = st.just(0.0) | st.floats(1e-300, 1e6)  # not so small that rounding matters


def skipped(found: list[float], factor: float) -> list[int]:
    """Return the steps skipped in a training with these gradient norms."""
    usual, updates, spikes = 0.0, 0, []
    for step, norm in enumerate(found):
        spike = is_spike(norm, usual, factor=factor, updates=updates)
        usual = next_usual(usual, norm, factor=factor, updates=updates)
        updates += not spike
        spikes += [step] * spike
    return spikes


@given(st.lists(norms, max_size=60))
def test_no_step_is_skipped_by_default(found: list[float]) -> None:
    assert skipped(found, 0) == []


@given(st.lists(norms, max_size=20))
def test_first_updates_are_never_skipped(found: list[float]) -> None:
    assert skipped(found, 1.01) == []


def test_spike_is_skipped_and_the_next_step_is_not() -> None:
    assert skipped([1.0] * 30 + [100.0] + [1.0] * 30, 3) == [30]
    assert skipped([1.0] * 30 + [2.9] + [1.0] * 30, 3) == []
    assert skipped([1.0] * 30 + [100.0, 100.0] + [1.0] * 30, 3) == [30, 31]


@given(st.floats(1.5, 10), st.floats(2, 1e3))
def test_permanently_higher_norms_become_usual(factor: float, rise: float) -> None:
    left_out = skipped([1.0] * 50 + [rise] * 900, factor)
    assert left_out == list(range(50, 50 + len(left_out)))  # and none later
    assert len(left_out) < 900


@given(norms, st.floats(0.5, 2), st.integers(0, 10_000))
def test_usual_norm_is_constant_for_constant_norms(norm: float, other: float, updates: int) -> None:
    assert abs(next_usual(norm, norm, factor=3, updates=updates) - norm) <= 1e-9 * norm
    between = sorted((norm, norm * other))
    moved = next_usual(norm, norm * other, factor=3, updates=updates)
    assert between[0] * (1 - 1e-9) <= moved <= between[1] * (1 + 1e-9)


def test_first_norms_have_equal_weights() -> None:
    usual = 0.0
    for updates, norm in enumerate([1.0, 2.0, 3.0, 6.0]):
        usual = next_usual(usual, norm, factor=3, updates=updates)
    assert abs(usual - 3.0) < 1e-12
