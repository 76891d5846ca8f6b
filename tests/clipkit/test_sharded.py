"""Weights that are spread over ranks take the same updates, and have the same averages, as whole ones.

So does a training under FSDP2 in which layers are unfrozen and averaged weights are scored.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_updates_and_averages_of_spread_weights_are_those_of_whole_ones() -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(HERE / "sharded_program.py"),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-12000:]
    for layout in ("full", "hybrid"):
        for name in ("adamw", "stable_adamw", "lamb"):
            assert done.stdout.count(f"{layout} {name} the same") == 2
            assert done.stdout.count(f"training with {name} the same") == 2
        assert done.stdout.count(f"{layout} muon refused: optim.name = 'muon' needs whole matrices") == 2
