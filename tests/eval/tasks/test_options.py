"""Tests of the options of tasks."""

from typing import Any

import pytest

from clipkit.errors import ConfigError
from eval.tasks import Options


def test_repeated_seeds_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"seeds = \(1, 1\): expected different numbers"):
        Options(seeds=(1, 1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shots": (1, 0)}, r"shots = \(1, 0\): expected 1 to 65536"),
        ({"shots": ()}, r"shots = \(\): expected one or more"),
        ({"neighbours": ()}, r"neighbours = \(\): expected one or more"),
        ({"estimators": ("ridge", "x")}, r"estimators = \('ridge', 'x'\): expected ridge or logistic"),
        ({"epochs": 0}, r"epochs = 0: expected above 0 and at most 1e\+06"),
        ({"rates": (1e-3, float("nan"))}, r"rates = \(0.001, nan\): expected above 0"),
        ({"examples": -1}, "examples = -1: expected 0 to"),
        ({"image_size": -1}, "image_size = -1: expected 1 to"),
        ({"layers": (0,)}, r"layers = \(0,\): expected 1 to"),
        ({"dims": (0,)}, r"dims = \(0,\): expected 1 to"),
    ],
)
def test_invalid_values_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^invalid value {message}"):
        Options(**values)


def test_unset_values_and_all_layers_are_valid() -> None:
    options = Options(layers=True, dims=(), examples=0, image_size=0)
    assert options == Options(layers=True)
