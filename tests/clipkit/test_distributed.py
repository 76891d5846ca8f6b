"""One true gradient: any number of processes and any accumulation give the single process's, by real gloo ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

PROGRAM = Path(__file__).with_name("gradient_program.py")


def _gradients(out: Path, *, world: int, parts: int, dtype: str) -> dict[str, torch.Tensor]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command = [*(launch if world > 1 else [sys.executable]), str(PROGRAM), str(out), str(parts), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(out)


@pytest.mark.parametrize(("world", "parts"), [(2, 1), (2, 4), (4, 1), (4, 2)])
def test_gradients_of_many_processes_are_those_of_one(tmp_path: Path, world: int, parts: int) -> None:
    one = _gradients(tmp_path / "one.safetensors", world=1, parts=1, dtype="float64")
    many = _gradients(tmp_path / "many.safetensors", world=world, parts=parts, dtype="float64")
    assert one.keys() == many.keys()
    for name, reference in one.items():
        difference = (many[name] - reference).norm() / reference.norm().clamp_min(1e-30)
        assert difference < 1e-10, (name, float(difference))
    assert float(one["logit_scale"].abs()) > 1e-6  # the temperature takes part
    single = _gradients(tmp_path / "single.safetensors", world=world, parts=parts, dtype="float32")
    worst = max(
        float((single[name].double() - reference).norm() / reference.norm().clamp_min(1e-30))
        for name, reference in one.items()
    )
    assert worst < 1e-4, worst
