"""Fixtures with small models."""

from copy import deepcopy

import pytest
import torch

from clipkit.model.architectures import Architecture, TextTower, VisionTower
from clipkit.model.clip import CLIP

TINY = Architecture(
    embed_dim=48,
    vision=VisionTower(image_size=32, patch_size=8, width=64, layers=2, heads=2),
    text=TextTower(width=64, layers=2, heads=4),
)


@pytest.fixture(scope="session")
def untouched_tiny() -> CLIP:
    """The model that ``tiny`` copies: drawing its weights takes longer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CLIP(TINY).initialize()


@pytest.fixture
def tiny(untouched_tiny: CLIP) -> CLIP:
    """A CLIP of two-layer towers of width 64, with random weights, in training mode as after construction."""
    return deepcopy(untouched_tiny)
