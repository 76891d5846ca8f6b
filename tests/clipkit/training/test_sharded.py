"""Weights that are spread over ranks take the same updates, and have the same averages, as whole ones.

So does a training under FSDP2 in which layers are unfrozen and averaged weights are scored.
"""

import pytest

from tests.forked import Forked


@pytest.mark.slow
def test_adafactor_of_spread_weights_is_that_of_whole_ones(forked: Forked) -> None:
    said = "".join(
        one.stdout for one in forked.ranks("tests/clipkit/sharded_program.py", "adafactor", world=2)
    )
    for text in ("full adafactor", "hybrid adafactor", "training with adafactor"):
        assert said.count(f"{text} the same") == 2


@pytest.mark.long
def test_updates_and_averages_of_spread_weights_are_those_of_whole_ones(forked: Forked) -> None:
    said = "".join(one.stdout for one in forked.ranks("tests/clipkit/sharded_program.py", world=2))
    for layout in ("full", "hybrid"):
        for name in ("adamw", "stable_adamw", "lamb", "muon", "adafactor"):
            assert said.count(f"{layout} {name} the same") == 2
    for name in ("adamw", "stable_adamw", "lamb", "adafactor"):
        assert said.count(f"training with {name} the same") == 2
