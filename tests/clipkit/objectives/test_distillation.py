"""Distillation within a batch in one process: the plain formula's value and gradients, and none for the teacher."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import clipkit.objectives.tiles
from clipkit.objectives.clip import clip_loss
from clipkit.objectives.distill import distillation_loss
from tests.clipkit.plain_losses import compare, error, given as given_batch, gradients, ours, plain


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 33),
    tile=st.integers(1, 400),
    scale=st.floats(0.1, 100),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_tiles_come_to_the_plain_formula(
    rows: int, tile: int, scale: float, seed: int, dtype: torch.dtype
) -> None:
    exact = given_batch(rows, seed=seed, scale=scale)
    batch = given_batch(rows, seed=seed, scale=scale, dtype=dtype)
    name = "distillation"
    with patch.multiple(clipkit.objectives.tiles, _TILE=tile, _LEAST_ROWS=1):
        compare(ours(name, batch), batch, plain(name, exact), exact, rounded=plain(name, batch))


def test_it_is_open_clips_less_the_teachers_entropy() -> None:
    from open_clip.loss import DistillClipLoss

    batch = given_batch(17)
    teacher = (batch.teacher_images, batch.teacher_texts, batch.teacher_scale)
    student = (batch.images, batch.texts, batch.scale)
    loss = distillation_loss(*student, *teacher)
    _, crossed = DistillClipLoss()(*student, *teacher)
    _, entropy = DistillClipLoss()(*teacher, *teacher)
    torch.testing.assert_close(loss, crossed - entropy, rtol=1e-10, atol=0)
    for a, b in zip(gradients(loss, batch), gradients(crossed, batch), strict=True):
        assert error(a, b) < 1e-10


def test_a_student_that_is_its_teacher_has_neither_loss_nor_gradient() -> None:
    batch = given_batch(20, dtype=torch.float32)
    student = (batch.images, batch.texts, batch.scale)
    loss = distillation_loss(*student, *student)
    assert abs(loss.item()) < 1e-6
    assert all(one.abs().max() < 1e-6 for one in gradients(loss, batch))


def test_the_teacher_has_no_gradient() -> None:
    batch = given_batch(6)
    teacher = [
        one.clone().requires_grad_()
        for one in (batch.teacher_images, batch.teacher_texts, batch.teacher_scale)
    ]
    torch.autograd.backward(distillation_loss(batch.images, batch.texts, batch.scale, *teacher))
    assert batch.images.grad is not None
    assert all(one.grad is None for one in teacher)


def test_the_gradient_is_that_of_finite_differences() -> None:
    batch = given_batch(5)

    def distilled(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        teacher = (batch.teacher_images, batch.teacher_texts, batch.teacher_scale)
        return distillation_loss(images, texts, scale, *teacher)

    def both(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        return 0.3 * clip_loss(images, texts, scale) + 0.7 * distilled(images, texts, scale)

    assert torch.autograd.gradcheck(distilled, batch.leaves()[:3])
    assert torch.autograd.gradcheck(both, batch.leaves()[:3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_float32_under_autocast_and_for_low_features(dtype: torch.dtype) -> None:
    batch = given_batch(32)
    student = [one.detach().to(dtype) for one in (batch.images, batch.texts, batch.scale)]
    teacher = [one.to(dtype) for one in (batch.teacher_images, batch.teacher_texts, batch.teacher_scale)]
    want = distillation_loss(*(one.float() for one in student), *(one.float() for one in teacher))
    with torch.autocast("cpu", torch.bfloat16):
        loss = distillation_loss(*student, *teacher)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, want)


def test_a_teacher_of_other_rows_is_refused() -> None:
    four, five = torch.eye(4), torch.eye(5)
    one = torch.tensor(1.0)
    with pytest.raises(ValueError, match="the student's 4 rows, not 5"):
        distillation_loss(four, four, one, five, five, one)
    with pytest.raises(ValueError, match="two matrices of one shape"):
        distillation_loss(four, four, one, four, five, one)
