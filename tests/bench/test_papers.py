"""The factors of figures of papers."""

import pytest

from bench.papers.objectives import images_to_reach, means


def test_images_to_reach_a_score_are_linear_in_their_logarithm() -> None:
    points = [(64, 0.1), (256, 0.3), (512, 0.3), (1024, 0.5)]
    assert images_to_reach(points, 0.2) == pytest.approx(128)
    assert images_to_reach(points, 0.3) == pytest.approx(256)
    assert images_to_reach(points, 0.4) == pytest.approx(512 * 2**0.5)
    assert images_to_reach(points, 0.05) == 64
    assert images_to_reach(points, 0.6) is None


def test_points_are_means_over_seeds_in_order_of_images() -> None:
    curves = [{128: (0.4, 0.3, 0.5), 64: (0.2, 0.1, 0.3)}, {128: (0.2, 0.1, 0.3), 64: (0.1, 0.0, 0.2)}]
    images, scores = zip(*means(curves), strict=True)
    assert images == (64, 128)
    assert scores == pytest.approx((0.15, 0.3))
