"""Tests of scores of public runs: the study's grid, interpolation without extrapolation, and learning curves."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from bench.import_curves import count_flops
from clipkit.config import Config, LossConfig, ModelConfig, OptimConfig, SmallConfig, to_toml
from clipkit.expected import (
    GRID,
    SAMPLES,
    PublicCurve,
    PublicRuns,
    _read_curves,
    describe_nearest_curve,
    expected_score,
    find_curves,
)
from clipkit.model.clip import CLIP
from clipkit.objectives.caption import Caption
from clipkit.options import Target
from clipkit.training.build import shape_of
from clipkit.training.costs import GPUS, dry_run
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


def describe(seen: float, *, batch_size: int, name: str = "ViT-B-32") -> str:
    config = Config(model=ModelConfig(name=name), batch_size=batch_size, steps=round(seen / batch_size))
    return describe_nearest_curve(config)


# ViT-B/32 on 400M pairs in batches of 86,016
PUBLISHED = {1: 33.5, 2: 42.3, 4: 46.6, 8: 50.7, 16: 54.8, 32: 63.3}


@pytest.mark.parametrize("epoch", PUBLISHED)
def test_published_scores_of_a_curve_are_reproduced(epoch: int) -> None:
    text = describe(413e6 * epoch, batch_size=86_016)
    assert f"had {PUBLISHED[epoch]}% zero-shot top-1 on ImageNet" in text
    assert "ViT-B-32 (LAION-400M, 13.2B samples, batch size 86,016;" in text
    assert ("a run that ends there reaches another score" in text) == (epoch < 32)
    assert "412 images/s per A100 (MFU 5%), the fastest run of ViT-B-32 at 850 (11%)" in text


def test_curves_are_not_extrapolated() -> None:
    first = describe(1e6, batch_size=1000)
    assert "11.6% zero-shot top-1 on ImageNet at its first evaluation, after 80M samples seen" in first
    last = describe(1e12, batch_size=32_768)
    assert "64.1% zero-shot top-1 on ImageNet at its end, after 34.2B samples seen" in last
    assert "another score" not in first + last


@given(curve=st.sampled_from(_read_curves()), seen=st.floats(1e5, 1e12), batch_size=st.integers(100, 200_000))
def test_curves_interpolate_between_their_scores(curve: PublicCurve, seen: float, batch_size: int) -> None:
    score = curve.interpolate_score(seen)
    later = [y for x, y in zip(curve.samples, curve.scores, strict=True) if x >= seen][:1] or [
        curve.scores[-1]
    ]
    earlier = [y for x, y in zip(curve.samples, curve.scores, strict=True) if x <= seen][-1:] or [
        curve.scores[0]
    ]
    assert min(earlier + later) - 1e-9 <= score <= max(earlier + later) + 1e-9
    assert all(curve.interpolate_score(x) == y for x, y in zip(curve.samples, curve.scores, strict=True))
    # a curve that has a score there is nearer than one that has none, and then one of the same batch size
    config = Config(batch_size=batch_size, steps=max(1, round(seen / batch_size)))
    keys = [each.measure_distance(batch_size, config.steps * batch_size)[:2] for each in find_curves(config)]
    assert len(keys) == 9 and keys == sorted(keys)


def test_curves_have_at_most_40_scores_in_order() -> None:
    curves = _read_curves()
    assert len(curves) == 29
    for curve in curves:
        assert 2 <= len(curve.samples) == len(curve.scores) <= 40
        assert list(curve.samples) == sorted(set(curve.samples))


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-H-14", "ViT-g-14"])
def test_utilization_of_public_runs_is_by_the_count_of_flops(name: str) -> None:
    curves = [curve for curve in _read_curves() if curve.architecture == name]
    flops = count_flops(name)
    for curve in curves:
        assert curve.mfu == pytest.approx(curve.speed * flops / GPUS["A100"].bf16, abs=1e-4)
    fastest = {"ViT-B-32": 850, "ViT-B-16": 396, "ViT-L-14": 178}
    if name in fastest:
        assert round(max(curve.speed for curve in curves)) == fastest[name]


@pytest.mark.parametrize(
    "change",
    [
        {"model": ModelConfig(name="ViT-S-32")},
        {"model": ModelConfig(name="ViT-B-32-quickgelu")},
        {"model": ModelConfig(name="ViT-B-32", image_size=256)},
        {"model": ModelConfig(name="ViT-B-32", weights="runs/other")},
        {"loss": LossConfig(name="siglip")},
        {"objectives": {"caption": Caption(weight=1.0)}},
    ],
)
def test_other_models_have_no_curves(change: dict[str, Any]) -> None:
    config = Config(batch_size=1000, steps=1000)
    assert find_curves(config) and not find_curves(replace(config, **change))
    assert describe_nearest_curve(replace(config, **change)) == ""


def test_names_of_open_clip_have_curves() -> None:
    assert len(find_curves(Config(model=ModelConfig(name="open_clip:ViT-g-14")))) == 1


def test_dry_run_prints_the_nearest_curve() -> None:
    config = Config(batch_size=86_016, steps=4801, accumulate=16)
    lines = dry_run(config, torch.device("cpu"), Target(gpu="A100", gpus=64))
    start = next(
        i for i, line in enumerate(lines) if line.startswith("you are here    the nearest public run")
    )
    assert "had 33.5% zero-shot top-1 on ImageNet" in " ".join(line[16:] for line in lines[start:])
    assert max(map(len, lines[start:])) <= 80


def test_report_draws_public_curves_and_this_run(tmp_path: Path) -> None:
    result = {"dataset": "imagenet1k", "task": "zero-shot", "metric": "acc1", "step": 500, "value": 0.123}
    (tmp_path / "results.jsonl").write_text(json.dumps(result))
    for name, runs in (("ViT-H-14", 1), ("ViT-L-14", 9), ("ViT-S-32", 0)):
        config = Config(model=ModelConfig(name=name), batch_size=100_000, steps=1000)
        (tmp_path / "config.toml").write_text(to_toml(config))
        page = build_report(tmp_path).read_text()
        assert page.count("ImageNet zero-shot top-1</b>") == (runs > 0)
        assert page.count('<polyline class="line') == page.count(" thin") + (runs > 0)
        assert page.count(" thin") == runs
        assert ("this run: 100M</span>" in page) == ("You are here: the nearest" in page) == (runs > 0)
        assert ("this run </i>" in page or "this run <b>12.3%</b>" in page) == (runs > 0)
    (tmp_path / "results.jsonl").unlink()
    (tmp_path / "config.toml").write_text(to_toml(replace(config, model=ModelConfig(name="ViT-H-14"))))
    assert "LAION-2B, 34.7B samples, batch size 79,104 <b>77.9%</b>" in build_report(tmp_path).read_text()
