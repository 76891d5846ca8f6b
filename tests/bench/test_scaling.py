"""Tests of the communication formula against the collectives of real trainings."""

from pathlib import Path

import pytest

from bench import scaling
from clipkit.config import load_config
from clipkit.training.costs import communication_of


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("adamw", ()),
        ("muon", ()),
        ("adamw", ("sharding=full",)),
        ("adamw", ("sharding=full", "accumulate=2")),
    ],
)
def test_measured_bytes_of_two_ranks_equal_formula(
    optimizer: str, settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [setting for setting in scaling.SETTINGS if not setting.startswith("optim.name=")]
    monkeypatch.setattr(scaling, "SETTINGS", (*others, f"optim.name={optimizer}"))
    steps = ("steps=5", "log.every_steps=1000", "--profile", "1")
    scaling.train(tmp_path / "run", 2, *settings, *steps)
    measured = scaling.collectives(tmp_path / "run" / "profile" / "trace.json.gz", 2)["bytes"]
    expected = communication_of(
        scaling.workload(load_config(scaling.CONFIG, [*scaling.SETTINGS, *settings]), 2)
    )
    assert measured["features"] == expected.features
    assert abs(measured["weights and gradients"] - expected.weights - expected.gradients) <= 8
    assert measured["few numbers"] < 1000
