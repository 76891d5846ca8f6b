"""What a chart is made of: buckets, means, and numbers as a person writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.report.charts import downsample, figure, number, smooth


@given(st.lists(st.floats(-1e12, 1e12, allow_nan=False), min_size=1, max_size=300), st.integers(1, 50))
def test_downsampling_loses_no_peak(values: list[float], count: int) -> None:
    points = list(enumerate(values))
    buckets = downsample(points, count)
    assert len(buckets) == min(count, len(values))
    assert min(low for _, _, low, _ in buckets) == min(values)
    assert max(high for _, _, _, high in buckets) == max(values)
    assert buckets[-1][:2] == points[-1]
    assert [x for x, *_ in buckets] == sorted({x for x, *_ in buckets})


def test_smoothing_has_no_pull_of_the_start() -> None:
    assert [y for _, y in smooth([(0, 4.0), (1, 4.0), (2, 4.0)], 10)] == pytest.approx([4.0] * 3)
    assert smooth([(0, 1.0), (1, 5.0)], 1) == [(0, 1.0), (1, 5.0)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1797, "1,797"),
        (5.5452, "5.55"),
        (0.5, "0.5"),
        (0.0312, "0.0312"),
        (-12.34, "-12.3"),
        (999.7, "1,000"),
        (5e-4, "5×10⁻⁴"),
        (1e20, "1e+20"),
    ],
)
def test_numbers_as_a_person_writes_them(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.0%"), (0.284, "0.28%"), (0.996, "1.0%"), (10, "10.0%"), (61.66, "61.7%"), (100, "100.0%")],
)
def test_percentages_have_the_same_digits(value: float, text: str) -> None:
    assert figure(value, "%") == text
    assert figure(value, "") == number(value)
