"""Every loss on real gloo ranks with equal and unequal numbers of rows: value and gradients of one process."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import clipkit.loss_tiles
from tests.clipkit.loss_program import SPREADS, found
from tests.clipkit.plain_losses import LOSSES, error, given, gradients, plain

HERE = Path(__file__).parent
NAMES = ("value", "images", "texts", "scale", "bias")
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}


def launched(out: Path, world: int) -> list[dict[str, Tensor]]:
    """What each of so many processes found."""
    if world == 1:
        with patch.multiple(clipkit.loss_tiles, _TILE=40, _LEAST_ROWS=2):
            return [found()]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run(
        [*launch, str(HERE / "loss_program.py"), str(out)],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-12000:]
    return [load_file(out / f"{rank}.safetensors") for rank in range(world)]


@pytest.mark.slow
@pytest.mark.parametrize("world", SPREADS)
def test_values_and_gradients_are_those_of_one_process(world: int, tmp_path: Path) -> None:
    ranks = launched(tmp_path, world)
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
    """See that the ranks' values and gradients of a loss come to those of one process."""
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
