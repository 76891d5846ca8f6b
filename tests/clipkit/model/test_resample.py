"""Tests of resampling position embeddings to another grid during training."""

import pytest
import torch
from hypothesis import given, strategies as st

from clipkit.formats.load import fit_positions
from clipkit.model.clip import CLIP
from clipkit.model.towers import resize_grid, smooth_grid

NAME = "visual.positional_embedding"


@given(st.integers(1, 9), st.integers(1, 9))
def test_fitted_grid_equals_fit_positions(side: int, new_side: int) -> None:
    old = torch.randn(1 + side**2, 3, generator=torch.Generator().manual_seed(side))
    wanted = torch.Size((1 + new_side**2, 3))
    fitted = resize_grid(old, new_side)
    assert fitted.shape == wanted
    assert torch.allclose(fitted, fit_positions({NAME: old}, {NAME: wanted})[NAME], atol=1e-6)


def test_gradient_reaches_all_positions() -> None:
    old = torch.randn(1 + 49, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda one: resize_grid(one, 3), old)
    resize_grid(old, 3).square().sum().backward()
    assert old.grad is not None
    assert (old.grad.abs().sum(dim=1) > 0).all()


def test_smooth_grid_removes_high_frequencies() -> None:
    positions = torch.randn(1 + 64, 200, generator=torch.Generator().manual_seed(0))
    first = positions[0].clone()
    smooth_grid(positions, 4)
    assert torch.equal(positions[0], first)
    grid = positions[1:].T.reshape(-1, 8, 8)
    spectrum = torch.fft.fft2(grid).abs()
    assert spectrum[:, 4, :].mean() < 0.25 * spectrum[:, 1, :].mean()  # the highest frequency, and a low one


def test_grid_cached_in_inference_mode_is_trainable_and_float32(tiny: CLIP) -> None:
    images = torch.randint(0, 256, (2, 3, 24, 24), dtype=torch.uint8)
    with torch.inference_mode():
        scored = tiny.encode_image(images)
    trained = tiny.encode_image(images)
    assert torch.equal(scored, trained)
    trained.sum().backward()
    positions = torch.randn(17, 8)
    with torch.autocast("cpu", torch.bfloat16):
        fitted = resize_grid(positions, 3)
    assert torch.equal(fitted, resize_grid(positions, 3)) and fitted.dtype == torch.float32


def test_tower_accepts_smaller_and_larger_images(tiny: CLIP) -> None:
    patch = tiny.visual.patch_size
    assert isinstance(patch, int)
    for side in (patch, 2 * patch, 5 * patch):
        images = torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8)
        assert tiny.encode_image(images).shape == (2, tiny.architecture.embed_dim)
    with pytest.raises(AssertionError):
        tiny.encode_image(torch.zeros(1, 3, patch + 1, patch + 1, dtype=torch.uint8))
