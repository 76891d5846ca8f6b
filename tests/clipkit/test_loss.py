"""The loss in one process: open_clip's value and gradients, always in full precision."""

import math
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import clipkit.loss
from clipkit.loss import clip_loss


def features(
    rows: int, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image, text = (
        F.normalize(torch.randn(rows, 24, generator=generator, dtype=dtype), dim=-1).requires_grad_()
        for _ in range(2)
    )
    return image, text, torch.tensor(14.3, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("rows", [1, 2, 17, 64])
def test_value_and_gradients_are_open_clips(rows: int, dtype: torch.dtype, bound: float) -> None:
    from open_clip import ClipLoss

    ours, theirs = features(rows, dtype=dtype), features(rows, dtype=dtype)
    own, want = clip_loss(*ours), ClipLoss()(*theirs)
    assert own.dtype == dtype
    assert own.shape == ()
    assert (own - want).abs() <= bound * 10
    torch.autograd.backward([own, want])
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).abs().max() <= bound * max(1.0, float(b.grad.abs().max()))


@settings(deadline=None)
@given(rows=st.integers(1, 40), scale=st.floats(0.01, 100))
def test_features_that_are_all_equal_have_the_loss_of_chance(rows: int, scale: float) -> None:
    same = F.normalize(torch.ones(rows, 8), dim=-1)
    loss = clip_loss(same, same, torch.tensor(scale))
    assert loss.item() == pytest.approx(math.log(rows), abs=1e-4)


def test_matching_pairs_have_hardly_any_loss_and_swapped_ones_much() -> None:
    eye = torch.eye(8)
    assert clip_loss(eye, eye, torch.tensor(100.0)) < 1e-6
    assert clip_loss(eye, eye.roll(1, 0), torch.tensor(100.0)) > 99


def test_pictures_and_texts_have_equal_parts() -> None:
    image, text, scale = features(9)
    assert clip_loss(image, text, scale).item() == pytest.approx(
        clip_loss(text, image, scale).item(), abs=1e-6
    )


def test_the_gradient_is_that_of_finite_differences() -> None:
    assert torch.autograd.gradcheck(clip_loss, features(5, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_float32_under_autocast_and_for_low_features(dtype: torch.dtype) -> None:
    image, text, scale = (x.detach().to(dtype) for x in features(32))
    want = clip_loss(image.float(), text.float(), scale.float())
    with torch.autocast("cpu", torch.bfloat16):
        loss = clip_loss(image, text, scale)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, want)


@pytest.mark.parametrize(
    ("a", "b"), [((4, 8), (5, 8)), ((4, 8), (4, 9)), ((8,), (8,)), ((2, 4, 8), (2, 4, 8))]
)
def test_wrong_shapes_are_named(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="two matrices of one shape"):
        clip_loss(torch.zeros(a), torch.zeros(b), torch.tensor(1.0))


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 33), tile=st.integers(1, 400), scale=st.floats(0.1, 100), seed=st.integers(0, 99))
def test_tiles_change_nothing(rows: int, tile: int, scale: float, seed: int) -> None:
    image, text, _ = features(rows, dtype=torch.float64, seed=seed)
    temperature = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    logits = temperature * image @ text.T
    own = torch.arange(rows)
    want = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    gradients = torch.autograd.grad(want, (image, text, temperature))
    with patch.object(clipkit.loss, "_TILE", tile):
        loss = clip_loss(image, text, temperature)
        found = torch.autograd.grad(loss, (image, text, temperature))
    assert (loss - want).abs() < 1e-12 * max(1.0, scale)
    for a, b in zip(found, gradients, strict=True):
        assert (a - b).abs().max() < 1e-11 * max(1.0, scale)


def test_memory_grows_with_the_rows_not_with_their_square() -> None:
    """The logits of 6,000 rows would be 144 MB at once."""
    program = """
import resource, torch
import clipkit.loss
from clipkit.loss import clip_loss
given = [torch.nn.functional.normalize(torch.randn(6000, 16), dim=-1).requires_grad_() for _ in range(2)]
clip_loss(given[0][:64], given[1][:64], torch.tensor(14.3)).backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
clip_loss(*given, torch.tensor(14.3)).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100_000  # KiB
