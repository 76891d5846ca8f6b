"""Tests of the sigmoid loss in one process, against open_clip; test_loss.py covers tiles and identities."""

import math

import pytest
import torch
import torch.nn.functional as F

from clipkit.objectives.siglip import siglip_loss
from tests.clipkit.plain_losses import error, given as given_batch, gradients


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("rows", [1, 2, 17, 64])
def test_value_and_gradients_equal_open_clip(rows: int, dtype: torch.dtype, bound: float) -> None:
    from open_clip.loss import SigLipLoss

    batch, exact = given_batch(rows, dtype=dtype), given_batch(rows)
    value = siglip_loss(batch.images, batch.texts, batch.scale, batch.bias)
    want = SigLipLoss()(exact.images, exact.texts, exact.scale, exact.bias)
    assert value.dtype == dtype
    assert error(value, want) < bound
    for a, b in zip(gradients(value, batch), gradients(want, exact), strict=True):
        assert error(a, b) < bound


def test_initial_loss_is_that_of_the_bias() -> None:
    """For unrelated features, all pairs are predicted as negative, which costs 10 for the positive one."""
    images, texts = (F.normalize(torch.eye(256)[rows], dim=-1) for rows in (slice(0, 128), slice(128, 256)))
    loss = siglip_loss(images, texts, torch.tensor(10.0), torch.tensor(-10.0))
    assert loss.item() == pytest.approx(10 + 128 * math.log1p(math.exp(-10)), rel=1e-6)


def test_loss_of_confident_pairs_does_not_underflow() -> None:
    """−log σ(x) of a large x is e⁻ˣ, even where 1 + e⁻ˣ rounds to 1."""
    one = torch.ones(1, 1)
    loss = siglip_loss(one, one, torch.tensor(40.0), torch.tensor(0.0))
    assert loss.item() == pytest.approx(math.exp(-40), rel=1e-5)


def test_gradient_equals_finite_differences() -> None:
    batch = given_batch(5)
    assert torch.autograd.gradcheck(siglip_loss, batch.leaves())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_float32_under_autocast_and_for_low_precision(dtype: torch.dtype) -> None:
    given = [leaf.detach().to(dtype) for leaf in given_batch(32).leaves()]
    want = siglip_loss(*(one.float() for one in given))
    with torch.autocast("cpu", torch.bfloat16):
        loss = siglip_loss(*given)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, want)
