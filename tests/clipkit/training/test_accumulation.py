"""Tests of gradient accumulation: loss and gradients equal those of the whole batch."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from clipkit.errors import ConfigError
from clipkit.model.clip import CLIP
from clipkit.objectives.clip import clip_loss
from clipkit.training.step import backward, check_rows

ROWS, END = 16, 99


@pytest.fixture
def model(tiny: CLIP) -> CLIP:
    """A model in float64 with a vocabulary of 100, so that the gradient of the embedding is small."""
    shape = replace(
        tiny.architecture, text=replace(tiny.architecture.get_plain_towers()[1], vocab_size=END + 1)
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CLIP(shape).initialize().double()


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(ROWS, 3, 32, 32, generator=generator, dtype=dtype)
    tokens = torch.randint(1, END, (ROWS, 20), generator=generator)
    ends = torch.randint(1, 20, (ROWS, 1), generator=generator)
    return images, tokens.scatter(1, ends, END)


def computed(model: CLIP, parts: int, *, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    model = copy.deepcopy(model)
    images, tokens = batch(model.text_projection.dtype)
    given = {"images": images, "tokens": tokens}
    loss = backward(model, given, loss=clip_loss, parts=parts, autocast=autocast).loss
    assert not loss.requires_grad
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    return loss, gradients


@pytest.mark.parametrize("parts", [2, 3, 5, 16])
def test_accumulated_gradient_equals_whole_batch(model: CLIP, parts: int) -> None:
    loss, whole = computed(model, 1)
    loss_in_parts, in_parts = computed(model, parts)
    assert (loss - loss_in_parts).abs() <= 1e-12
    for name, gradient in whole.items():
        assert name.endswith("in_proj_bias") or gradient.abs().max() > 1e-6, name
        assert (gradient - in_parts[name]).abs().max() <= 1e-10, name


def test_single_part_equals_plain_backward(model: CLIP) -> None:
    loss, gradients = computed(model, 1)
    value = clip_loss(*model(*batch(torch.float64)))
    torch.autograd.backward(value)
    assert torch.equal(loss, value.detach())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradients[name]), name


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_gradient_agrees_under_autocast(model: CLIP, parts: int) -> None:
    """The passes with and without a graph compute the same features up to rounding."""
    model = model.float()
    loss, whole = computed(model, 1, autocast=True)
    loss_in_parts, in_parts = computed(model, parts, autocast=True)
    assert loss.dtype == loss_in_parts.dtype == torch.float32
    assert (loss - loss_in_parts).abs() <= 1e-2
    for name, gradient in whole.items():
        assert in_parts[name].dtype == torch.float32
        assert (gradient - in_parts[name]).norm() <= 0.07 * gradient.norm() + 1e-6, name


def test_gradients_add_to_existing_ones(model: CLIP) -> None:
    images, tokens = batch(torch.float64)
    for _ in range(2):
        backward(model, {"images": images, "tokens": tokens}, loss=clip_loss, parts=4, autocast=False)
    _, once = computed(model, 1)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - 2 * once[name]).abs().max() <= 1e-10, name


def test_more_parts_than_rows_are_rejected(model: CLIP) -> None:
    images, tokens = batch(torch.float64)
    given = {"images": images[:2], "tokens": tokens[:2]}
    with pytest.raises(AssertionError):
        backward(model, given, loss=clip_loss, parts=3, autocast=False)


@pytest.mark.parametrize(("batch_size", "world", "parts"), [(4, 1, 3), (2, 2, 1), (7, 2, 2), (3, 1, 2)])
def test_batch_norm_requires_two_rows_in_each_part(batch_size: int, world: int, parts: int) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    with pytest.raises(
        ConfigError, match=rf"parts of one row, .* set batch_size={2 * world * parts} or more"
    ):
        check_rows(model, batch_size=batch_size, world=world, parts=parts)
    check_rows(model, batch_size=2 * world * parts, world=world, parts=parts)
    for other in (model.eval(), nn.Sequential(nn.LayerNorm(3))):  # locked, or no batch norm
        check_rows(other, batch_size=batch_size, world=world, parts=parts)
