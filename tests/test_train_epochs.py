"""Numbers of steps that are given in epochs."""

import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from clipkit.config import IN_EPOCHS, Config, load_config
from clipkit.errors import ConfigError
from tests.forked import Forked
from tests.small_trainings import BATCH, SAMPLES, Trainings, error_of, latest_step, metrics, pairs, trainings

__all__ = ["pairs", "trainings"]  # fixtures

QUICKSTART = Path("configs/quickstart.toml")


@given(st.floats(0.01, 1000), st.floats(1, 1e6))
def test_epochs_become_steps(epochs: float, length: float) -> None:
    text = f"{epochs:.3f}"
    given_epochs = [f"{name}={text} epochs" for name in IN_EPOCHS if name != "optim.cooldown"]
    config = load_config(QUICKSTART, given_epochs, count_epoch=lambda _: length)
    steps = max(1, round(float(text) * length)) if float(text) else 0
    assert (config.steps, config.optim.warmup, config.lock.unfreeze_every) == (steps, steps, steps)
    assert (config.eval.every_steps, config.checkpoint.every_steps) == (steps, steps)


def test_the_data_are_counted_once_and_only_for_epochs() -> None:
    counted: list[Config] = []

    def count_epoch(config: Config) -> float:
        counted.append(config)
        return 40.0

    load_config(QUICKSTART, ["steps=5"], count_epoch=count_epoch)
    assert not counted
    settings = [
        "steps=1 epoch",
        "optim.warmup=0.5 epochs",
        "optim.schedule=constant",
        "optim.cooldown=.25 epochs",
    ]
    config = load_config(QUICKSTART, settings, count_epoch=count_epoch)
    assert len(counted) == 1 and (config.steps, config.optim.warmup, config.optim.cooldown) == (40, 20, 10)
    with pytest.raises(ConfigError, match=r"steps = '1 epochs': only train.py converts epochs to steps"):
        load_config(QUICKSTART, ["steps=1 epoch"])
    for wrong in ("ten epochs", "-1 epochs", "1 epochs of data"):
        with pytest.raises(ConfigError, match=f"steps = '{wrong}' is invalid: expected a whole number"):
            load_config(QUICKSTART, [f"steps={wrong}"], count_epoch=lambda _: 7.0)


@pytest.mark.slow
def test_a_run_of_epochs_is_resumed_and_extended(trainings: Trainings, tmp_path: Path) -> None:
    epoch = SAMPLES // BATCH
    run = tmp_path / "run"
    settings = ("steps=1 epochs", "optim.warmup=0.25 epochs", "checkpoint.every_steps=0.5 epochs")
    trainings.run(run, *settings)
    assert latest_step(run) == len(metrics(run)) == epoch
    config = load_config(run / "config.toml")
    assert (config.steps, config.optim.warmup) == (epoch, math.ceil(epoch / 4))
    said = trainings.run(run, "steps=1.5 epochs", *settings[1:])
    assert latest_step(run) == len(metrics(run)) == epoch * 3 // 2
    assert f"resuming {run} at step {epoch}" in said


def test_missing_data_are_named_with_the_setting(trainings: Trainings, tmp_path: Path) -> None:
    said = trainings.run(tmp_path / "run", "data.train=missing_pairs", "steps=1 epoch", status=1)
    assert "steps = '1 epochs' depends on the number of pairs" in error_of(said)


def test_a_dry_run_counts_epochs(trainings: Trainings, forked: Forked, tmp_path: Path) -> None:
    settings = trainings.settings(tmp_path / "run", ["steps=10 epochs"])
    ended = forked.run("train.py", [*settings, "--dry-run"], {})
    assert ended.returncode == 0 and f"steps = {10 * SAMPLES // BATCH}\n" in ended.stdout
    assert not (tmp_path / "run").exists()
