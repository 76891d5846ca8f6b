"""Tests of every loss over gloo ranks, with equal and unequal numbers of rows."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import clipkit.objectives.tiles
from tests.clipkit.loss_program import SPREADS, found
from tests.clipkit.plain_losses import LOSSES, error, given, gradients, plain
from tests.forked import Forked

NAMES = ("value", "images", "texts", "scale", "bias")
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}


def launched(forked: Forked, out: Path, world: int) -> list[dict[str, Tensor]]:
    """Return the tensors that each rank computed."""
    if world == 1:
        with patch.multiple(clipkit.objectives.tiles, _TILE=40, _LEAST_ROWS=2):
            return [found()]
    forked.ranks("tests/clipkit/loss_program.py", str(out), world=world)
    return [load_file(out / f"{rank}.safetensors") for rank in range(world)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=pytest.mark.long) if world > 2 else world for world in SPREADS]
)
def test_values_and_gradients_equal_single_process(world: int, tmp_path: Path, forked: Forked) -> None:
    ranks = launched(forked, tmp_path, world)
    for spread in SPREADS[world]:
        for dtype, bound in BOUNDS.items():
            for loss in LOSSES:
                start = f"{spread}/{dtype}/{loss}"
                _compare(loss, sum(spread), bound, {name: _all(ranks, f"{start}/{name}") for name in NAMES})
            batch = given(sum(spread))
            cosines, own = batch.images @ batch.texts.T, torch.arange(sum(spread))
            right = torch.stack([(cosines.argmax(by) == own).double().mean() for by in (1, 0)])
            for recall in _all(ranks, f"{spread}/{dtype}/recall"):
                torch.testing.assert_close(recall, right.to(dtype))


def _all(ranks: list[dict[str, Tensor]], name: str) -> list[Tensor]:
    return [rank[name] for rank in ranks]


def _compare(loss: str, rows: int, bound: float, of: dict[str, list[Tensor]]) -> None:
    """Assert that the ranks' values and gradients of a loss equal those of one process."""
    batch = given(rows)
    want = plain(loss, batch)
    values = of["value"]
    assert all(torch.equal(value, values[0]) for value in values)
    assert error(values[0], want) < bound, loss
    by_images, by_texts, by_scale, by_bias = gradients(want, batch)
    for name, gradient in (("images", by_images), ("texts", by_texts)):
        assert error(torch.cat(of[name]) / len(values), gradient) < bound, (loss, name)
    for name, gradient in (("scale", by_scale), ("bias", by_bias)):
        assert error(torch.stack(of[name]).mean(0), gradient) < bound, (loss, name)
