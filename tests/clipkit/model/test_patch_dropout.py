"""Tests of patch dropout: distribution of kept patches, and features of those patches alone."""

import itertools
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor

from clipkit.errors import ConfigError
from clipkit.model import Architecture, TextTower, TimmVision
from clipkit.model.clip import CLIP
from clipkit.model.towers import Padded, VisionTransformer, draw_patches


@given(
    seed=st.integers(-(2**70), 2**70),
    rows=st.lists(st.integers(0, 2**40), min_size=1, max_size=6),
    patches=st.integers(1, 50),
    data=st.data(),
)
def test_kept_patches_are_a_function_of_seed_and_row(
    seed: int, rows: list[int], patches: int, data: st.DataObject
) -> None:
    keep = data.draw(st.integers(1, patches))
    kept = draw_patches(seed=seed, rows=torch.tensor(rows), patches=patches, keep=keep)
    assert kept.shape == (len(rows), keep)
    assert kept.dtype == torch.int64
    assert all(row == sorted(set(row)) for row in kept.tolist())
    assert kept.min() >= 0 and kept.max() < patches
    for row, whole in zip(rows, kept, strict=True):  # independent of the other rows
        alone = draw_patches(seed=seed, rows=torch.tensor([row]), patches=patches, keep=keep)
        assert torch.equal(alone[0], whole)


def test_kept_patches_are_uniform() -> None:
    """Over rows and seeds: chi-squared test with 19 degrees of freedom of the 20 ways to keep 3 of 6."""
    rows = torch.arange(20_000)
    over_rows = draw_patches(seed=7, rows=rows, patches=6, keep=3)
    over_seeds = torch.cat(
        [draw_patches(seed=seed, rows=torch.tensor([5]), patches=6, keep=3) for seed in range(2000)]
    )
    for kept in (over_rows, over_seeds):
        counts = Counter(map(tuple, kept.tolist()))
        expected = len(kept) / math.comb(6, 3)
        assert sum((counts[c] - expected) ** 2 / expected for c in itertools.combinations(range(6), 3)) < 50


def test_kept_patches_of_rows_and_steps_are_independent() -> None:
    """The fraction of patches that two draws have in common is the expected one."""
    rows = torch.arange(4000)

    def chosen(seed: int, rows: Tensor) -> Tensor:
        kept = draw_patches(seed=seed, rows=rows, patches=16, keep=8)
        return torch.zeros(len(rows), 16).scatter(1, kept, 1.0)

    first = chosen(3, rows)
    for other in (chosen(4, rows), chosen(3, rows + 1), chosen(4, rows - 1), chosen(3 + 2**64, rows)):
        assert float((first * other).sum() / first.sum()) == pytest.approx(0.5, abs=0.01)


def test_kept_patches_have_fixed_values() -> None:
    kept = draw_patches(seed=1, rows=torch.tensor([0, 1, 2**33]), patches=16, keep=4)
    assert kept.tolist() == [[2, 3, 6, 12], [2, 8, 13, 15], [1, 3, 4, 9]]


@pytest.mark.gpu
def test_kept_patches_are_equal_on_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    rows = torch.arange(1000) * 977
    for keep in (1, 98, 195, 196):
        here, there = (draw_patches(seed=3, rows=one, patches=196, keep=keep) for one in (rows, rows.cuda()))
        assert torch.equal(here, there.cpu())


def masked(model: CLIP, images: Tensor, patches: Tensor) -> Tensor:
    """Reference: embed all patches, then select those that are kept."""
    visual = model.visual
    assert isinstance(visual, VisionTransformer)
    x = (
        F.conv2d(images, visual.conv1.weight, stride=visual.patch_size).flatten(2).mT
        + visual.positional_embedding[1:]
    )
    x = x.gather(1, patches[..., None].expand(-1, -1, x.shape[-1]))
    first = (visual.class_embedding + visual.positional_embedding[0]).expand(len(x), 1, -1)
    read = visual.ln_post(visual.transformer(visual.ln_pre(torch.cat([first, x], dim=1)), Padded()))
    return F.normalize(read @ visual.proj, dim=-1)


def gradients(model: CLIP, features: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.autograd.backward((features * features.detach().roll(1, 0)).sum())
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("keep", [1, 7, 16])
def test_image_tower_uses_only_kept_patches(tiny: CLIP, keep: int) -> None:
    model = tiny.double()
    pixels = torch.randint(
        0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    images = (pixels.double() / 255 - model.get_buffer("_mean")) / model.get_buffer("_std")
    patches = draw_patches(seed=0, rows=torch.arange(5), patches=16, keep=keep)
    ours, want = model.encode_image(pixels, patches=patches), masked(model, images, patches)
    assert (ours - want).abs().max() <= 1e-12
    assert (model.encode_image(images, patches=patches) - want).abs().max() <= 1e-12
    own, wanted = gradients(model, ours), gradients(model, want)
    assert own.keys() == wanted.keys()
    for name, gradient in own.items():
        assert (gradient - wanted[name]).abs().max() <= 1e-12 * max(1.0, float(wanted[name].abs().max())), (
            name
        )
    if keep == 16:
        assert (ours - model.encode_image(pixels)).abs().max() <= 1e-12


def test_model_passes_patches_to_the_image_tower(tiny: CLIP) -> None:
    pixels = torch.randint(
        0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    patches = draw_patches(seed=0, rows=torch.arange(2), patches=16, keep=5)
    image, _, _ = tiny(pixels, torch.full((2, 3), 5), patches)
    assert torch.equal(image, tiny.encode_image(pixels, patches=patches))


def test_library_tower_rejects_patch_dropout() -> None:
    shape = Architecture(
        embed_dim=16,
        vision=TimmVision(image_size=32, name="resnet10t"),
        text=TextTower(width=32, layers=1, heads=2, vocab_size=64),
    )
    model = CLIP(shape)
    with pytest.raises(ConfigError, match="patch dropout needs"):
        model.encode_image(torch.zeros(1, 3, 32, 32), patches=torch.zeros(1, 1, dtype=torch.int64))
