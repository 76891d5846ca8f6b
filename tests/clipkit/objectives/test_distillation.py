"""Tests of distillation in one process: value and gradients equal the plain formula, the teacher has none."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import clipkit.objectives.tiles
from clipkit.batch import Batch
from clipkit.config import DistillConfig, LossConfig, load_config
from clipkit.errors import ConfigError
from clipkit.model.architectures import ClassTable
from clipkit.model.clip import CLIP
from clipkit.model.measure import image_flops, text_flops
from clipkit.model.names import create_architecture
from clipkit.objectives import Outputs, Targets
from clipkit.objectives.classes import Classes
from clipkit.objectives.clip import Clip, clip_loss
from clipkit.objectives.distill import Teaching, distillation_loss
from clipkit.training.build import shape_of
from clipkit.training.costs import Machine, cost_table, estimate, run_costs, workloads_of
from clipkit.training.ema import AveragedWeights
from clipkit.training.step import TrainingStep
from tests.clipkit.plain_losses import compare, error, given as given_batch, gradients, ours, plain

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 33),
    tile=st.integers(1, 400),
    scale=st.floats(0.1, 100),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_tiled_distillation_equals_plain_formula(
    rows: int, tile: int, scale: float, seed: int, dtype: torch.dtype
) -> None:
    exact = given_batch(rows, seed=seed, scale=scale)
    batch = given_batch(rows, seed=seed, scale=scale, dtype=dtype)
    name = "distillation"
    with patch.multiple(clipkit.objectives.tiles, _TILE=tile, _LEAST_ROWS=1):
        compare(ours(name, batch), batch, plain(name, exact), exact, rounded=plain(name, batch))


def test_loss_equals_open_clip_minus_the_entropy_of_the_teacher() -> None:
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


def test_student_equal_to_teacher_has_zero_loss_and_gradient() -> None:
    batch = given_batch(20, dtype=torch.float32)
    student = (batch.images, batch.texts, batch.scale)
    loss = distillation_loss(*student, *student)
    assert abs(loss.item()) < 1e-6
    assert all(gradient.abs().max() < 1e-6 for gradient in gradients(loss, batch))


def test_teacher_has_no_gradient() -> None:
    batch = given_batch(6)
    teacher = [
        one.clone().requires_grad_()
        for one in (batch.teacher_images, batch.teacher_texts, batch.teacher_scale)
    ]
    torch.autograd.backward(distillation_loss(batch.images, batch.texts, batch.scale, *teacher))
    assert batch.images.grad is not None
    assert all(one.grad is None for one in teacher)


def test_gradient_equals_finite_differences() -> None:
    batch = given_batch(5)

    def distilled(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        teacher = (batch.teacher_images, batch.teacher_texts, batch.teacher_scale)
        return distillation_loss(images, texts, scale, *teacher)

    def both(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        return 0.3 * clip_loss(images, texts, scale) + 0.7 * distilled(images, texts, scale)

    assert torch.autograd.gradcheck(distilled, batch.leaves()[:3])
    assert torch.autograd.gradcheck(both, batch.leaves()[:3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_float32_under_autocast_and_for_low_precision(dtype: torch.dtype) -> None:
    batch = given_batch(32)
    student = [one.detach().to(dtype) for one in (batch.images, batch.texts, batch.scale)]
    teacher = [one.to(dtype) for one in (batch.teacher_images, batch.teacher_texts, batch.teacher_scale)]
    want = distillation_loss(*(one.float() for one in student), *(one.float() for one in teacher))
    with torch.autocast("cpu", torch.bfloat16):
        loss = distillation_loss(*student, *teacher)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, want)


def test_teacher_of_other_rows_is_rejected() -> None:
    four, five = torch.eye(4), torch.eye(5)
    one = torch.tensor(1.0)
    with pytest.raises(ValueError, match="the student's 4 rows, not 5"):
        distillation_loss(four, four, one, five, five, one)
    with pytest.raises(ValueError, match="two matrices of one shape"):
        distillation_loss(four, four, one, four, five, one)


@pytest.mark.parametrize("over_classes", [False, True])
def test_averaged_weights_teach_the_whole_batch(over_classes: bool) -> None:
    """In three parts, with the contrastive and the class loss."""
    shape = create_architecture("ViT-Ti-4-16")
    if over_classes:
        shape = replace(shape, text=ClassTable(names=("a", "b", "c")))
    model, other = (CLIP(shape).initialize().double() for _ in range(2))
    averaged = AveragedWeights(model, 0.9)
    averaged.restore(other.state_dict(), origin="the other one")
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8, generator=random)
    tokens = torch.randint(0, 3, (5, 1), generator=random)
    rows = torch.arange(5)
    identities = torch.stack([rows, tokens[:, 0]], dim=1)
    batch = Batch(images=images, tokens=tokens, lengths=(1,) * 5, ids=rows, identities=identities)
    settings = DistillConfig(teacher="average", weight=0.3)
    step = TrainingStep(
        shape=shape,
        objective=Classes() if over_classes else Clip(),
        loss=LossConfig(name="classes" if over_classes else "clip"),
        distill=settings,
        teacher=None,
        patch_dropout=0.0,
        seed=0,
        accumulate=3,
        bf16=False,
        averaged=averaged,
    )
    assert step.swaps(0)
    found = step.gradients(model, batch, 0)
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()

    texts = torch.arange(3)[:, None] if over_classes else tokens
    with torch.no_grad():
        teacher = other(images, texts)
    student = model(images, texts)
    if over_classes:
        teaching = Teaching(images=teacher[0], texts=teacher[1], scale=teacher[2])
        targets = Targets(identities=identities, tokens=tokens, same="negatives")
        own = Classes().loss(Outputs(*student), targets)
        loss = 0.7 * own + 0.3 * Classes().divergence(Outputs(*student), teaching, settings)
    else:
        loss = 0.7 * clip_loss(*student) + 0.3 * distillation_loss(*student, *teacher)
    loss.backward()
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert gradient is not None and parameter.grad is not None
        assert (gradient - parameter.grad).norm() <= 1e-10 * parameter.grad.norm() + 1e-14


def test_settings_and_costs_of_averaged_weights_as_teacher() -> None:
    for overrides, said in (
        ([], "distill.teacher = 'average' has no effect unless optim.average is set"),
        (["optim.average=0.9", "distill.weight=1"], "distill.weight = 1.0 is invalid: expected below 1 with"),
        (
            ["optim.average=0.9", "loss.name=none", "caption.weight=1"],
            "cannot be combined with loss.name=none",
        ),
        (["optim.average=0.9", "data.negatives=wrong"], "cannot be combined with distillation"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(QUICKSTART, ["distill.teacher=average", *overrides])
    config = load_config(QUICKSTART, ["distill.teacher=average", "optim.average=0.9"])
    shape = shape_of(config.model, config.loss, config.small)
    (work,) = workloads_of(config, world=1, shard_ranks=1, bf16=False)
    untaught = replace(config, distill=DistillConfig())
    added = (estimate(work).step_flops or 0) - (estimate(replace(work, config=untaught)).step_flops or 0)
    of_pair = image_flops(work.model).forward + text_flops(work.model, shape.text.context_length).forward
    assert added == config.batch_size * of_pair
    lines = "\n".join(cost_table(run_costs([work], Machine(gpu="", memory=None, peak=1e9, measured=True))))
    assert "both passes, with the teacher's" in " ".join(lines.split())
