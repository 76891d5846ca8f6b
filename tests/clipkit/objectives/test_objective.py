"""Tests of objectives: losses by settings equal plain formulas, with and without a teacher; chance levels."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.config import DistillConfig, LossConfig
from clipkit.objectives import OBJECTIVES, Objective, Outputs, Targets
from clipkit.objectives.distill import Teaching
from clipkit.training.step import batch_loss
from tests.clipkit.plain_losses import LOSSES, Given, given, plain

# the loss "global" needs estimates of earlier steps
CONTRASTIVE = tuple(name for name in LOSSES if name not in ("distillation", "global"))


def objective(name: str, identities: Tensor) -> Callable[..., Tensor]:
    """The configured loss by its name in ``plain``."""
    loss, wanted = OBJECTIVES[name.split()[0]]().loss, targets(name, identities)
    return lambda *outputs: loss(Outputs(*outputs), wanted)


def targets(name: str, identities: Tensor) -> Targets:
    unweighted = name.removesuffix(" weighted")
    smoothing = 0.3 if unweighted.endswith(" smoothed") else 0.0
    return Targets(
        identities=identities,
        tokens=torch.zeros(len(identities), 1),
        same=unweighted.removesuffix(" smoothed").partition(" ")[2] or "negatives",
        smoothing=smoothing,
        weights=None if unweighted == name else given(len(identities)).weights,
    )


def teaching(batch: Given) -> Teaching:
    return Teaching(images=batch.teacher_images, texts=batch.teacher_texts, scale=batch.teacher_scale)


def value(loss: Callable[..., Tensor], batch: Given, *, bias: bool) -> Tensor:
    return loss(batch.images, batch.texts, batch.scale, *([batch.bias] if bias else []))


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_loss_without_teacher_equals_plain_formula(name: str) -> None:
    batch = given(12)
    for bias in {name.startswith("siglip"), True}:  # a model may have a bias that softmax losses ignore
        loss = objective(name, batch.identities)
        torch.testing.assert_close(value(loss, batch, bias=bias), plain(name, batch))


@pytest.mark.parametrize("name", CONTRASTIVE)
@pytest.mark.parametrize("weight", [0.25, 1.0])
def test_teacher_is_weighted(name: str, weight: float) -> None:
    batch = given(12).slice(slice(None))
    settings = DistillConfig(teacher="any", weight=weight)
    loss = partial(
        batch_loss,
        objective=OBJECTIVES[name.split()[0]](),
        targets=targets(name, batch.identities),
        settings=LossConfig(),
        teaching=teaching(batch),
        distill=settings,
    )
    found = value(loss, batch, bias=True)
    wanted = weight * plain("distillation", batch) + (1 - weight) * plain(name, batch)
    torch.testing.assert_close(found, wanted)
    trained = [batch.images, batch.texts, batch.scale]
    trained += [batch.bias] if name.startswith("siglip") else []
    gradients = torch.autograd.grad(found, trained)  # DistributedDataParallel waits for all gradients
    for own, other in zip(gradients, torch.autograd.grad(wanted, trained, allow_unused=True), strict=True):
        torch.testing.assert_close(own, torch.zeros_like(own) if other is None else other)


@pytest.mark.parametrize("rows", [2, 7, 64])
@pytest.mark.parametrize("name", CONTRASTIVE)
@pytest.mark.parametrize("alike", ["some", "none", "all"])
def test_chance_is_the_minimum_loss_of_a_constant_model(name: str, rows: int, alike: str) -> None:
    """The optimal bias is the logit of the fraction of positive pairs; 0.5 away, the loss is larger."""
    batch, same_is = given(rows), targets(name, given(rows).identities).same
    ids = {
        "some": batch.identities,
        "none": torch.arange(2 * rows).view(rows, 2),
        "all": torch.zeros(rows, 2, dtype=torch.int64),
    }[alike]
    level = OBJECTIVES[name.split()[0]]().chance(targets(name, ids), rows)
    blind = F.normalize(torch.ones(rows, 5, dtype=torch.float64), dim=-1)

    def of_bias(bias: float) -> float:
        scale, shift = torch.tensor(3.0, dtype=torch.float64), torch.tensor(bias - 3.0, dtype=torch.float64)
        return objective(name, ids)(blind, blind, scale, shift).item()

    if name.startswith("clip"):
        assert of_bias(0.0) == pytest.approx(level, abs=1e-9)
        assert same_is == "ignored" or level == pytest.approx(math.log(rows))
        return
    same, eye = (ids[:, None] == ids[None]).any(2), torch.eye(rows, dtype=torch.bool)
    weights = batch.weights if name.endswith("weighted") else torch.ones(rows, dtype=torch.float64)
    cells = weights[:, None] + weights
    own = cells[same if same_is == "positives" else eye].sum().item()
    questions = (cells * (eye | ~same) if same_is == "ignored" else cells).sum().item()
    if own == pytest.approx(questions):  # all pairs are positive: the infimum is 0
        assert level == 0
        return
    best = math.log(own / (questions - own))
    assert of_bias(best) == pytest.approx(level)
    assert of_bias(best) < min(of_bias(best - 0.5), of_bias(best + 0.5))


# Letters: N pairs, C texts. Images are unit vectors, so that the logits are the entries of the texts' matrix.


def minimum(loss: Callable[[Tensor, Tensor], Tensor], images: int, texts: int) -> float:
    """Minimize a loss over all (N, C) logits."""
    logits = torch.zeros(texts, images, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=400, line_search_fn="strong_wolfe", tolerance_change=0)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        value = loss(torch.eye(images, dtype=torch.float64), logits)
        value.backward()
        return value

    optimizer.step(evaluate)
    return evaluate().item()


def floor_of(name: str, batch: Targets, rows: int) -> float:
    return OBJECTIVES[name]().floor(batch, rows)


ONE = torch.ones((), dtype=torch.float64)


@pytest.mark.parametrize("same", ["positives", "ignored", "negatives"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("captions", [[0] * 8, [0, 0, 0, 0, 0, 1, 1, 2], [*range(8)]])
@pytest.mark.parametrize("weights", [None, torch.arange(1.0, 9.0)])
def test_floor_is_the_minimum_of_clip_over_all_logits(
    same: str, smoothing: float, captions: list[int], weights: Tensor | None
) -> None:
    if same == "ignored" and smoothing:
        return
    identities = torch.stack([torch.arange(8), torch.tensor(captions)], dim=1)
    batch = Targets(
        identities=identities, tokens=torch.zeros(8, 1), same=same, smoothing=smoothing, weights=weights
    )
    least = minimum(lambda images, texts: OBJECTIVES["clip"]().loss(Outputs(images, texts, ONE), batch), 8, 8)
    assert floor_of("clip", batch, 8) == pytest.approx(least, abs=2e-3)


def test_floor_without_transitive_identities() -> None:
    """The first two have the same image, the last two the same caption."""
    identities = torch.tensor([[0, 0], [0, 1], [1, 1]])
    batch = Targets(identities=identities, tokens=torch.zeros(3, 1), same="positives")
    least = minimum(lambda images, texts: OBJECTIVES["clip"]().loss(Outputs(images, texts, ONE), batch), 3, 3)
    expected = (2 * math.log(2) + math.log(3)) / 3
    assert floor_of("clip", batch, 3) == pytest.approx(expected) == pytest.approx(least, abs=2e-3)


def test_floor_of_few_captions() -> None:
    """The floor of CIFAR-10's ten captions in a batch of 128."""
    captions = torch.arange(128) % 10
    batch = Targets(
        identities=torch.stack([torch.arange(128), captions], dim=1),
        tokens=torch.zeros(128, 1),
        same="positives",
    )
    assert floor_of("clip", batch, 128) == pytest.approx(2.55, abs=0.005)
    assert floor_of("siglip", batch, 128) == 0


@pytest.mark.parametrize("same", ["positives", "negatives"])
def test_sigmoid_loss_has_no_floor(same: str) -> None:
    identities = torch.stack([torch.arange(6), torch.tensor([0, 0, 0, 1, 1, 2])], dim=1)
    batch = Targets(identities=identities, tokens=torch.zeros(6, 1), same=same)

    def loss(images: Tensor, texts: Tensor) -> Tensor:
        return OBJECTIVES["siglip"]().loss(Outputs(images, texts, ONE, 0 * ONE), batch)

    assert minimum(loss, 6, 6) < 1e-3


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_floor_of_classes(smoothing: float) -> None:
    batch = Targets(
        identities=torch.zeros(4, 2, dtype=torch.int64),
        tokens=torch.tensor([[0], [2], [2], [4]]),
        same="negatives",
        smoothing=smoothing,
    )
    least = minimum(
        lambda images, texts: OBJECTIVES["classes"]().loss(Outputs(images, texts, ONE), batch), 4, 5
    )
    assert floor_of("classes", batch, 5) == pytest.approx(least, abs=2e-3)


def test_floor_of_words() -> None:
    tokens = torch.tensor([[1, 5, 3, 5, 8], [1, 4, 8, 0, 0], [1, 3, 4, 5, 8]])  # between start 1 and end 8
    batch = Targets(identities=torch.zeros(3, 2, dtype=torch.int64), tokens=tokens, same="negatives")
    least = minimum(
        lambda images, texts: OBJECTIVES["words"]().loss(Outputs(images, texts, ONE), batch), 3, 9
    )
    assert 0.5 < floor_of("words", batch, 9) == pytest.approx(least, abs=2e-3)


class Cosine(Objective):
    """An objective that uses neither scale nor bias."""

    def loss(self, outputs: Outputs, targets: Targets) -> Tensor:
        return -(outputs.images * outputs.texts).sum()


def test_unused_scale_and_bias_have_gradients_of_zero() -> None:
    """DistributedDataParallel waits for a gradient of every parameter."""
    batch = given(12)
    leaves = [batch.images, batch.texts, batch.scale, batch.bias]
    loss = batch_loss(
        *leaves, objective=Cosine(), targets=targets("clip", batch.identities), settings=LossConfig()
    )
    assert torch.equal(loss, -(batch.images * batch.texts).sum())
    grad_images, _, grad_scale, grad_bias = torch.autograd.grad(loss, leaves)
    assert torch.equal(grad_images, -batch.texts)
    assert grad_scale == grad_bias == 0
