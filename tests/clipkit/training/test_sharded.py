"""Tests of optimizers and averaged weights under sharding: updates equal those of unsharded weights.

Includes a training under FSDP2 with unfreezing and evaluations of the averaged weights.
"""

import pytest

from tests.forked import Forked


@pytest.mark.slow
def test_sharded_adafactor_equals_unsharded(forked: Forked) -> None:
    said = "".join(
        ended.stdout for ended in forked.ranks("tests/clipkit/sharded_program.py", "adafactor", world=2)
    )
    for text in ("full adafactor", "hybrid adafactor", "training with adafactor"):
        assert said.count(f"{text} the same") == 2


@pytest.mark.long
def test_sharded_updates_and_averages_equal_unsharded(forked: Forked) -> None:
    said = "".join(ended.stdout for ended in forked.ranks("tests/clipkit/sharded_program.py", world=2))
    for layout in ("full", "hybrid"):
        for name in ("adamw", "sgd", "stable_adamw", "lamb", "lion", "muon", "adafactor"):
            assert said.count(f"{layout} {name} the same") == 2
    for name in ("adamw", "sgd", "stable_adamw", "lamb", "lion", "adafactor"):
        assert said.count(f"training with {name} the same") == 2
