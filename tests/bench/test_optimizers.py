"""Test of the search for a learning rate."""

from typing import Any

from hypothesis import given, strategies as st

from bench.optimizers import RATES, choose_rate


@given(best=st.integers(0, len(RATES) - 1), start=st.integers(1, len(RATES) - 2))
def test_best_rate_is_found_from_any_start(best: int, start: int) -> None:
    measured = []

    def measure_rate(rate: float) -> dict[str, Any]:
        measured.append(rate)
        return {"validation": -abs(RATES.index(rate) - best)}

    assert choose_rate(measure_rate, start) == RATES[best]
    assert len(measured) == len(set(measured))
    assert {best - 1, best + 1} & set(range(len(RATES))) <= {RATES.index(rate) for rate in measured}
