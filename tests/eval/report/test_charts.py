"""Tests of charts: buckets, smoothing, number formats and geometry."""

import re

import pytest
from hypothesis import given, strategies as st

from eval.report.charts import (
    Bar,
    Dot,
    downsample_points,
    draw_scatter,
    format_number,
    format_points,
    format_value,
    load_macro,
    smooth_points,
)


@given(st.lists(st.floats(-1e12, 1e12, allow_nan=False), min_size=1, max_size=300), st.integers(1, 50))
def test_downsampling_keeps_every_peak(values: list[float], count: int) -> None:
    points = list(enumerate(values))
    buckets = downsample_points(points, count)
    assert len(buckets) == min(count, len(values))
    assert min(low for _, _, low, _ in buckets) == min(values)
    assert max(high for _, _, _, high in buckets) == max(values)
    assert buckets[-1][:2] == points[-1]
    assert [x for x, *_ in buckets] == sorted({x for x, *_ in buckets})


def test_smoothing_is_not_biased_toward_the_first_point() -> None:
    assert [y for _, y in smooth_points([(0, 4.0), (1, 4.0), (2, 4.0)], 10)] == pytest.approx([4.0] * 3)
    assert smooth_points([(0, 1.0), (1, 5.0)], 1) == [(0, 1.0), (1, 5.0)]


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
def test_number_format(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.0%"), (0.284, "0.28%"), (0.996, "1.0%"), (10, "10.0%"), (61.66, "61.7%"), (100, "100.0%")],
)
def test_percentage_format(value: float, text: str) -> None:
    assert format_value(value, "%") == text
    assert format_value(value, "") == format_number(value)


@given(st.dictionaries(st.text(max_size=5), st.floats(-1, 1), min_size=1, max_size=12))
def test_difference_bars_start_at_zero_and_stay_inside(values: dict[str, float]) -> None:
    limits = min(values.values()), max(values.values())
    bars_shown = [Bar(name=name, value=value) for name, value in values.items()]
    html = load_macro("charts.html", "difference_bars")("t", bars_shown, limits)
    zero = float(re.search(r"--zero:([\d.]+)%", html)[1])  # type: ignore[index]
    bars = re.findall(r'class="(up|down)".*?left:([\d.]+)%;width:([\d.]+)%.*?class="v">([^<]*)<', html, re.S)
    assert len(bars) == len(values)
    for side, left, width, _ in bars:
        start = float(left) if side == "up" else float(left) + float(width)
        assert start == pytest.approx(zero, abs=0.02)
        assert float(left) + float(width) <= 100.02
    assert [text for *_, text in bars] == [
        format_points(value) for value in sorted(values.values(), reverse=True)
    ]


@given(st.lists(st.tuples(st.floats(1e-3, 1e4), st.floats(0, 1)), min_size=1, max_size=20))
def test_dots_and_their_numbers_stay_inside(points: list[tuple[float, float]]) -> None:
    html = draw_scatter("t", [Dot(name="n", x=x, y=y) for x, y in points], x_unit="GFLOPs")
    for left, top in re.findall(r'class="dot t1" style="left:([-\d.]+)%;top:([-\d.]+)%"', html):
        assert 0 <= float(left) <= 100
        assert -0.01 <= float(top) <= 100.01
    assert html.count('class="nr"') == len(points)
