"""Tests of the contrastive loss in one process: value and gradients equal open_clip's, in full precision."""

import math
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

import clipkit.objectives.tiles
from clipkit.objectives.clip import clip_loss
from tests.clipkit.plain_losses import LOSSES, compare, given as given_batch, ours, plain


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
def test_value_and_gradients_equal_open_clip(rows: int, dtype: torch.dtype, bound: float) -> None:
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
def test_equal_features_have_the_chance_loss(rows: int, scale: float) -> None:
    same = F.normalize(torch.ones(rows, 8), dim=-1)
    loss = clip_loss(same, same, torch.tensor(scale))
    assert loss.item() == pytest.approx(math.log(rows), abs=1e-4)


def test_loss_of_matching_and_swapped_pairs() -> None:
    eye = torch.eye(8)
    assert clip_loss(eye, eye, torch.tensor(100.0)) < 1e-6
    assert clip_loss(eye, eye.roll(1, 0), torch.tensor(100.0)) > 99


def test_loss_is_symmetric_in_images_and_texts() -> None:
    image, text, scale = features(9)
    assert clip_loss(image, text, scale).item() == pytest.approx(
        clip_loss(text, image, scale).item(), abs=1e-6
    )


def test_gradient_equals_finite_differences() -> None:
    assert torch.autograd.gradcheck(clip_loss, features(5, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_float32_under_autocast_and_for_low_precision(dtype: torch.dtype) -> None:
    image, text, scale = (x.detach().to(dtype) for x in features(32))
    want = clip_loss(image.float(), text.float(), scale.float())
    with torch.autocast("cpu", torch.bfloat16):
        loss = clip_loss(image, text, scale)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, want)


@pytest.mark.parametrize(
    ("a", "b"), [((4, 8), (5, 8)), ((4, 8), (4, 9)), ((8,), (8,)), ((2, 4, 8), (2, 4, 8))]
)
def test_wrong_shapes_are_rejected(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="two matrices of one shape"):
        clip_loss(torch.zeros(a), torch.zeros(b), torch.tensor(1.0))


@settings(deadline=None, max_examples=120)
@given(
    rows=st.integers(1, 33),
    tile=st.integers(1, 400),
    scale=st.floats(0.1, 100),
    seed=st.integers(0, 99),
    numbers=st.integers(1, 3),
    loss=st.sampled_from([name for name in LOSSES if name.startswith(("clip", "siglip"))]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_tiled_loss_with_identities_equals_plain_formula(
    rows: int, tile: int, scale: float, seed: int, numbers: int, loss: str, dtype: torch.dtype
) -> None:
    exact = given_batch(rows, seed=seed, scale=scale, numbers=numbers)
    batch = given_batch(rows, seed=seed, scale=scale, numbers=numbers, dtype=dtype)
    with patch.multiple(clipkit.objectives.tiles, _TILE=tile, _LEAST_ROWS=1):
        compare(ours(loss, batch), batch, plain(loss, exact), exact, rounded=plain(loss, batch))


def test_distinct_identities_have_the_plain_loss() -> None:
    image, text, scale = features(9, dtype=torch.float64)
    alone = torch.arange(18).reshape(9, 2)
    for same in ("positives", "ignored"):
        loss = clip_loss(image, text, scale, identities=alone, same=same)
        torch.testing.assert_close(loss, clip_loss(image, text, scale), rtol=1e-14, atol=0)


def test_loss_of_equal_identities() -> None:
    image, text, scale = features(9)
    alike = torch.zeros(9, 1, dtype=torch.int64)
    loss = clip_loss(image, text, scale, identities=alike, same="ignored")
    assert loss == 0
    assert all((one == 0).all() for one in torch.autograd.grad(loss, (image, text, scale)))
    equal = F.normalize(torch.ones(9, 8, dtype=torch.float64), dim=-1)
    found = clip_loss(equal, equal, scale.double(), identities=alike)
    assert found.item() == pytest.approx(math.log(9), abs=1e-12)


def test_shared_identities_are_not_transitive() -> None:
    """Pairs 0 and 1 share an image, 1 and 2 a caption: the middle one has three texts, the others two."""
    image, text, scale = features(3, dtype=torch.float64)
    logits = scale * image @ text.T
    targets = torch.tensor([[1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 2, 1 / 2]], dtype=torch.float64)
    want = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
    loss = clip_loss(image, text, scale, identities=torch.tensor([[7, 1], [7, 2], [8, 2]]))
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("identities", "message"),
    [
        (torch.zeros(4, dtype=torch.int64), "identities must be"),
        (torch.zeros(3, 2, dtype=torch.int64), "of 4 rows"),
        (torch.zeros(4, 0, dtype=torch.int64), "identities must be"),
        (torch.zeros(4, 2), "must be int64"),
    ],
)
def test_invalid_identities_are_rejected(identities: Tensor, message: str) -> None:
    image, text, scale = features(4)
    with pytest.raises(ValueError, match=message):
        clip_loss(image, text, scale, identities=identities)
    with pytest.raises(ValueError, match="same must be one of negatives, positives, ignored, not 'twins'"):
        clip_loss(image, text, scale, same="twins")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("trained", [(0, 1, 1, 1), (1, 0, 1, 0), (0, 0, 1, 1), (1, 1, 0, 0), (0, 1, 0, 0)])
def test_frozen_inputs_change_no_other_gradient(loss: str, trained: tuple[int, ...]) -> None:
    whole, part = given_batch(12), given_batch(12)
    for leaf, wanted in zip(part.leaves(), trained, strict=True):
        leaf.requires_grad_(bool(wanted))
    torch.autograd.backward([ours(loss, whole), ours(loss, part)])
    for a, b, wanted in zip(whole.leaves(), part.leaves(), trained, strict=True):
        assert (b.grad is not None) == (bool(wanted) and a.grad is not None)
        if b.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_without_gradients_and_with_repeated_backward(loss: str) -> None:
    batch = given_batch(7)
    value = ours(loss, batch)
    with torch.no_grad():
        assert torch.equal(ours(loss, batch), value.detach())
    once = torch.autograd.grad(value, batch.leaves()[:3], retain_graph=True)
    again = torch.autograd.grad(3 * value, batch.leaves()[:3])
    for a, b in zip(once, again, strict=True):
        torch.testing.assert_close(3 * a, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_nonfinite_feature_gives_nonfinite_loss(loss: str, lost: float) -> None:
    """So that divergence is detected."""
    batch = given_batch(7, dtype=torch.float32)
    with torch.no_grad():
        batch.texts[3, 5] = lost
    assert not ours(loss, batch).isfinite()


def test_one_element_scale_has_a_one_element_gradient() -> None:
    """FSDP requires parameters with at least one dimension."""
    image, text, scale = features(7)
    row = scale.detach().reshape(1).requires_grad_()
    torch.autograd.backward([loss := clip_loss(image, text, row), clip_loss(image, text, scale)])
    assert loss.shape == ()
    assert row.grad is not None and scale.grad is not None
    assert torch.equal(row.grad, scale.grad.reshape(1))


def test_memory_is_linear_in_rows() -> None:
    """All logits of 6,000 rows would take 144 MB."""
    program = """
import resource, torch
import clipkit.objectives.clip
from clipkit.objectives.clip import clip_loss
given = [torch.nn.functional.normalize(torch.randn(6000, 16), dim=-1).requires_grad_() for _ in range(2)]
clip_loss(given[0][:64], given[1][:64], torch.tensor(14.3)).backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
clip_loss(*given, torch.tensor(14.3)).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100_000  # KiB
