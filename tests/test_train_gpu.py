"""Trainings on a GPU repeat bit for bit, with every kind of loss and term; those that resume, too."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from tests.forked import Ended
from tests.small_trainings import Trainings, digests, ends, pairs, trainings

__all__ = ["pairs", "trainings"]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

# 577 tokens an image, so that the backward pass of attention adds the gradients of several blocks of keys
LONG = ("model.image_size=96", "precision=bf16", "batch_size=16")
SETTINGS = {
    "bf16": (),
    "fp32": ("precision=fp32",),
    "accumulate": ("accumulate=2",),
    "recompute": ("recompute=1",),
    "compile": ("compile=true",),
    "patch dropout": ("model.patch_dropout=0.5",),
    "siglip": ("loss.name=siglip",),
    "equal captions": ("loss.same=positives",),
    "prefixes": ("loss.dims=[8,16]",),
    "captions": ("caption.weight=1",),
    "captions, all tokens at once": ("caption.weight=1", "caption.parallel=0.5"),
    "masked": ("masked.weight=1",),
    "masked features": ("masked.weight=1", "masked.target=features", "optim.average=0.99"),
    "views": ("views.weight=1", "optim.average=0.99"),
    "average as teacher": ("distill.teacher=average", "optim.average=0.99"),
    "map pool": ("shape.pool=map",),
    "adamw": ("optim.name=adamw",),
    "stable_adamw": ("optim.name=stable_adamw",),
    "lamb": ("optim.name=lamb",),
    "lion": ("optim.name=lion",),
    "adafactor": ("optim.name=adafactor",),
    "sam": ("optim.name=adamw", "optim.sam=0.05"),
}


@pytest.fixture(scope="module")
def runs(
    trainings: Trainings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, int], tuple[Path, "Future[Ended]"]]]:
    """Start two runs with all settings."""
    folder = tmp_path_factory.mktemp("runs")
    started = {}
    for name, settings in SETTINGS.items():
        for attempt in (0, 1):
            out = folder / f"{name}-{attempt}"
            started[name, attempt] = out, trainings.start(out, *LONG, "steps=4", *settings)
    yield started


@pytest.mark.parametrize("name", list(SETTINGS))
def test_two_runs_are_equal(runs: dict[tuple[str, int], tuple[Path, "Future[Ended]"]], name: str) -> None:
    (first, _), (second, _) = pair = runs[name, 0], runs[name, 1]
    for error in ends([future for _, future in pair]):
        assert "deterministic" not in error
    assert digests(first, 4) == digests(second, 4)


def test_resumed_run_equals_one_that_never_stopped(trainings: Trainings, tmp_path: Path) -> None:
    settings = (*LONG, "optim.schedule=constant")
    trainings.run(tmp_path / "whole", *settings, "steps=8", "checkpoint.every_steps=2")
    trainings.run(tmp_path / "parts", *settings, "steps=4")
    trainings.run(tmp_path / "parts", *settings, "steps=8")
    assert digests(tmp_path / "whole", 8) == digests(tmp_path / "parts", 8)
