"""Fixtures with small models."""

import pytest
import torch

from clipkit.model.architectures import Architecture, TextTower, VisionTower
from clipkit.model.clip import CLIP


@pytest.fixture
def tiny() -> CLIP:
    """A CLIP of two-layer towers of width 64, with random weights, in training mode as after construction."""
    shape = Architecture(
        embed_dim=48,
        vision=VisionTower(image_size=32, patch_size=8, width=64, layers=2, heads=2),
        text=TextTower(width=64, layers=2, heads=4),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CLIP(shape).initialize()
