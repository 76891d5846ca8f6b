"""The settings' loss is the formula's, with and without a teacher; and chance is what a blind model comes to."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.config import DistillConfig, LossConfig
from clipkit.objective import Teaching, batch_loss, chance_level
from tests.clipkit.plain_losses import LOSSES, Given, given, plain

CONTRASTIVE = tuple(name for name in LOSSES if name != "distillation")


def settings_of(name: str) -> LossConfig:
    """Of a loss as ``plain`` calls it."""
    loss, _, same = name.partition(" ")
    return LossConfig(name=loss, same=same or "negatives")


def teaching(batch: Given) -> Teaching:
    return Teaching(images=batch.teacher_images, texts=batch.teacher_texts, scale=batch.teacher_scale)


def value(loss: Callable[..., Tensor], batch: Given, *, bias: bool) -> Tensor:
    return loss(batch.images, batch.texts, batch.scale, *([batch.bias] if bias else []))


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_without_a_teacher_it_is_the_contrastive_one(name: str) -> None:
    batch = given(12)
    for bias in {name.startswith("siglip"), True}:  # a model may have a bias that softmax does not see
        loss = batch_loss(settings_of(name), DistillConfig(), batch.identities, None)
        torch.testing.assert_close(value(loss, batch, bias=bias), plain(name, batch))


@pytest.mark.parametrize("name", CONTRASTIVE)
@pytest.mark.parametrize("weight", [0.25, 1.0])
def test_a_teacher_has_its_share(name: str, weight: float) -> None:
    batch = given(12).slice(slice(None))
    loss = batch_loss(
        settings_of(name), DistillConfig(teacher="another", weight=weight), batch.identities, teaching(batch)
    )
    found = value(loss, batch, bias=True)
    wanted = weight * plain("distillation", batch) + (1 - weight) * plain(name, batch)
    torch.testing.assert_close(found, wanted)
    trained = [batch.images, batch.texts, batch.scale]
    trained += [batch.bias] if name.startswith("siglip") else []
    gradients = torch.autograd.grad(found, trained)  # each has one, or DistributedDataParallel would wait
    for own, other in zip(gradients, torch.autograd.grad(wanted, trained, allow_unused=True), strict=True):
        torch.testing.assert_close(own, torch.zeros_like(own) if other is None else other)


@pytest.mark.parametrize("rows", [2, 7, 256])
def test_chance_is_the_least_that_a_blind_model_comes_to(rows: int) -> None:
    same = F.normalize(torch.ones(rows, 5, dtype=torch.float64), dim=-1)
    scale, ids = torch.tensor(3.0, dtype=torch.float64), torch.zeros(rows, 2, dtype=torch.int64)
    softmax, sigmoid = LossConfig(), LossConfig(name="siglip")
    blind = batch_loss(softmax, DistillConfig(), ids, None)(same, same, scale)
    assert blind.item() == pytest.approx(chance_level(softmax, rows)) == pytest.approx(math.log(rows))

    best = -3 - math.log(rows - 1)  # one of so many is a row's own
    found = [
        batch_loss(sigmoid, DistillConfig(), ids, None)(same, same, scale, torch.tensor(best + off)).item()
        for off in (-0.5, 0.0, 0.5)
    ]
    assert found[1] == pytest.approx(chance_level(sigmoid, rows), rel=1e-6)
    assert found[1] < min(found[0], found[2])
