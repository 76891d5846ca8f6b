"""Tests of numbers derived from scores: images to reach a score, means over seeds, power laws."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bench.papers.labels import saturating_fit
from bench.papers.objectives import images_to_reach, means


def test_images_to_reach_interpolates_log_images_linearly() -> None:
    points = [(64, 0.1), (256, 0.3), (512, 0.3), (1024, 0.5)]
    assert images_to_reach(points, 0.2) == pytest.approx(128)
    assert images_to_reach(points, 0.3) == pytest.approx(256)
    assert images_to_reach(points, 0.4) == pytest.approx(512 * 2**0.5)
    assert images_to_reach(points, 0.05) == 64
    assert images_to_reach(points, 0.6) is None


def test_points_are_means_over_seeds_sorted_by_images() -> None:
    curves = [{128: (0.4, 0.3, 0.5), 64: (0.2, 0.1, 0.3)}, {128: (0.2, 0.1, 0.3), 64: (0.1, 0.0, 0.2)}]
    images, scores = zip(*means(curves), strict=True)
    assert images == (64, 128)
    assert scores == pytest.approx((0.15, 0.3))


@settings(max_examples=20, deadline=None)
@given(a=st.floats(0.3, 2), b=st.floats(0.2, 1), c=st.floats(0, 0.2), d=st.floats(0.5, 5))
def test_saturating_fit_recovers_power_law(a: float, b: float, c: float, d: float) -> None:
    pytest.importorskip("scipy.optimize")
    compute = np.array([2.0**power for power in range(1, 12)])
    found, residual = saturating_fit(compute.tolist(), (a * (compute + d) ** -b + c).tolist())
    assert residual < 1e-4
    at = np.array([3.0, 100.0])
    law = found[0] * (at + found[3]) ** -found[1] + found[2]
    np.testing.assert_allclose(law, a * (at + d) ** -b + c, atol=1e-3)
