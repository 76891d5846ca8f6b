"""Tests of the expected score: the study's grid, interpolation between its points, no extrapolation."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clipkit.config import Config, ModelConfig, OptimConfig, SmallConfig, to_toml
from clipkit.expected import GRID, SAMPLES, PublicRuns, expected_score
from clipkit.model.clip import CLIP
from clipkit.objectives.caption import Caption
from clipkit.training.build import shape_of
from eval.report import build_report

# millions of parameters according to the study's model_profile.csv
PARAMETERS = {"CLIP S/32": 63.09, "CLIP B/32": 151.28, "CLIP B/16 text-plus": 210.04, "SigLIP B/32": 151.28}


def recipe(runs: PublicRuns, seen: float) -> Config:
    model, shape, loss = runs.model()
    return Config(model=model, shape=shape, loss=loss, batch_size=1000, steps=round(seen) // 1000)


def score(config: Config) -> float:
    found = re.match(r"([\d.]+)% zero-shot", expected_score(config))
    return float(found[1]) if found else float("nan")


@pytest.mark.parametrize("runs", GRID, ids=lambda runs: runs.name)
def test_parameter_counts_equal_the_study(runs: PublicRuns) -> None:
    model, shape, loss = runs.model()
    with torch.device("meta"):
        made = CLIP(shape_of(model, replace(loss, name="clip"), SmallConfig(), sizes=shape))
    count = sum(parameter.numel() for parameter in made.parameters()) / 1e6
    assert count == pytest.approx(PARAMETERS[runs.name], abs=0.006)


@pytest.mark.parametrize("runs", GRID, ids=lambda runs: runs.name)
def test_grid_scores_are_exact_and_not_extrapolated(runs: PublicRuns) -> None:
    grid = SAMPLES[: len(runs.scores)]
    assert [score(recipe(runs, seen)) for seen in grid] == list(runs.scores)
    assert "interpolated" not in expected_score(recipe(runs, grid[2]))
    assert expected_score(recipe(runs, grid[0] - 1000)) == expected_score(recipe(runs, grid[-1] + 1000)) == ""


def test_scores_are_interpolated_in_log_samples() -> None:
    runs = GRID[1]  # B/32: 40.4% at 128M, 60.8% at 1.28B
    assert score(recipe(runs, 128e6 * 10**0.5)) == pytest.approx((40.4 + 60.8) / 2, abs=0.06)
    assert "interpolated between 128M and 1.28B" in expected_score(recipe(runs, 4e8))


@pytest.mark.parametrize(
    "change",
    [
        {"model": ModelConfig(name="ViT-L-14")},
        {"model": ModelConfig(name="ViT-B-32", patch_dropout=0.5)},
        {"model": ModelConfig(name="ViT-B-32", weights="runs/other")},
        {"objectives": {"caption": Caption(weight=1.0)}},
        {"small": SmallConfig(steps=10, image_size=64)},
        {"optim": OptimConfig(schedule="constant")},
    ],
)
def test_other_recipes_have_no_expected_score(change: dict[str, Any]) -> None:
    config = recipe(GRID[1], 128e6)
    assert expected_score(config) and not expected_score(replace(config, **change))


def test_report_shows_expected_score_of_known_recipes_only(tmp_path: Path) -> None:
    for steps, shown in ((128_000, True), (1, False)):
        (tmp_path / "config.toml").write_text(to_toml(replace(recipe(GRID[1], 128e6), steps=steps)))
        assert ("Expected: 40.4% zero-shot top-1" in build_report(tmp_path).read_text()) == shown
