"""Decay only where it belongs, and the learning rate's shape."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clipkit.config import OptimConfig
from clipkit.model import CLIP
from clipkit.optim import adamw, learning_rate


def test_gains_biases_class_embedding_and_temperature_do_not_decay(tiny: CLIP) -> None:
    config = OptimConfig(lr=1e-3, weight_decay=0.3, beta1=0.8, beta2=0.95, eps=1e-7)
    optimizer = adamw(tiny, config)
    names = {parameter: name for name, parameter in tiny.named_parameters()}
    groups = {group["weight_decay"]: {names[p] for p in group["params"]} for group in optimizer.param_groups}
    assert groups.keys() == {0.0, 0.3}
    still = {
        name
        for name in names.values()
        if name.endswith(
            ("bias", "ln_1.weight", "ln_2.weight", "ln_pre.weight", "ln_post.weight", "ln_final.weight")
        )
    } | {"logit_scale", "visual.class_embedding"}
    assert groups[0.0] == still
    assert groups[0.3] == set(names.values()) - still
    assert "token_embedding.weight" in groups[0.3]
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"], group["lr"]) == ((0.8, 0.95), 1e-7, 1e-3)


def test_without_a_gradient_only_weights_shrink(tiny: CLIP) -> None:
    optimizer = adamw(tiny, OptimConfig(lr=0.1, weight_decay=0.5))
    before = {name: parameter.detach().clone() for name, parameter in tiny.named_parameters()}
    for parameter in tiny.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in tiny.named_parameters():
        factor = 0.95 if parameter.ndim >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_frozen_parameters_are_left_out(tiny: CLIP) -> None:
    tiny.visual.requires_grad_(False)
    optimizer = adamw(tiny, OptimConfig())
    given_ones = {p for group in optimizer.param_groups for p in group["params"]}
    assert given_ones == {p for p in tiny.parameters() if p.requires_grad}


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, OptimConfig]:
    lr = draw(st.floats(1e-9, 1e3))
    config = OptimConfig(lr=lr, min_lr=lr * draw(st.floats(0, 1)), warmup=draw(st.integers(0, 60)))
    return draw(st.integers(1, 100)), config


@given(schedule=schedules())
def test_the_rate_rises_in_a_line_to_its_peak_and_falls_to_its_floor(
    schedule: tuple[int, OptimConfig],
) -> None:
    steps, config = schedule
    rates = [learning_rate(step, steps, config) for step in range(steps)]
    assert all(0 < rate <= config.lr * (1 + 1e-12) for rate in rates)
    rising, falling = rates[: config.warmup], rates[config.warmup :]
    for step, rate in enumerate(rising):
        assert rate == pytest.approx(config.lr * (step + 1) / config.warmup)
    assert all(a >= b * (1 - 1e-12) for a, b in pairwise(falling))
    assert all(rate >= config.min_lr * (1 - 1e-12) for rate in falling)
    if falling:
        assert falling[0] == pytest.approx(config.lr)
    half = (steps - config.warmup) / 2
    if half >= 1 and half == int(half):
        middle = learning_rate(config.warmup + int(half), steps, config)
        assert middle == pytest.approx((config.lr + config.min_lr) / 2)
    assert learning_rate(max(steps, config.warmup), steps, config) == pytest.approx(
        config.min_lr if steps > config.warmup else config.lr, abs=config.lr * 1e-9
    )
