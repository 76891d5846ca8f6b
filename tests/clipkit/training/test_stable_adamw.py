"""Tests of StableAdamW: equal to the published formula, and to AdamW without clipping, for any chunk size."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from clipkit.training import optim
from clipkit.training.optim import StableAdamW

SHAPES: tuple[tuple[int, ...], ...] = ((3, 4), (5,), (), (2, 1, 3))


def weights(seed: int) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=random, dtype=torch.float64)) for shape in SHAPES]


def published(
    parameter: Tensor,
    gradients: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> Tensor:
    """The published formula, with bias correction applied to the moments instead of the betas."""
    mean, square = torch.zeros_like(parameter), torch.zeros_like(parameter)
    for step, gradient in enumerate(gradients, start=1):
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        m, v = mean / (1 - beta1**step), square / (1 - beta2**step)
        rms = (gradient**2 / v.clamp_min(eps**2)).mean().sqrt()
        rate = lr / max(1.0, float(rms))
        parameter = parameter - rate * decay * parameter - rate * m / (v.sqrt() + eps)
    return parameter


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    beta1=st.sampled_from([0.0, 0.5, 0.9]),
    beta2=st.sampled_from([0.0, 0.9, 0.999]),
    eps=st.sampled_from([1e-8, 1e-3, 10.0]),
    decay=st.sampled_from([0.0, 0.3]),
    scales=st.lists(st.sampled_from([0.0, 1e-3, 1.0, 1e4]), min_size=1, max_size=6),
    data=st.data(),
)
def test_updates_equal_the_published_formula(
    seed: int, beta1: float, beta2: float, eps: float, decay: float, scales: list[float], data: st.DataObject
) -> None:
    parameters, random = weights(seed), torch.Generator().manual_seed(seed + 1)
    starts = [parameter.detach().clone() for parameter in parameters]
    optimizer = StableAdamW(
        [
            {"params": parameters[:2], "weight_decay": decay},
            {"params": parameters[2:], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(beta1, beta2),
        eps=eps,
    )
    seen: list[list[Tensor]] = [[] for _ in parameters]
    for scale in scales:
        for parameter, gradients in zip(parameters, seen, strict=True):
            parameter.grad = None
            if data.draw(st.booleans()):
                parameter.grad = scale * torch.randn(parameter.shape, generator=random, dtype=torch.float64)
                gradients.append(parameter.grad)
        optimizer.step()
    for place, (parameter, start, gradients) in enumerate(zip(parameters, starts, seen, strict=True)):
        wanted = published(start, gradients, 0.01, beta1, beta2, eps, decay if place < 2 else 0.0)
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-9, atol=1e-11)
        if gradients:
            assert float(optimizer.state[parameter]["step"]) == len(gradients)
        else:
            assert parameter not in optimizer.state  # not updated: the expected value is the start


def test_unclipped_updates_equal_adamw() -> None:
    """Decreasing gradients never exceed their second moment."""
    ours, theirs = weights(0), weights(0)
    betas, random = (0.9, 0.98), torch.Generator().manual_seed(1)
    mine = StableAdamW([{"params": ours}], lr=0.02, betas=betas, eps=1e-6, weight_decay=0.2)
    adamw = torch.optim.AdamW(theirs, lr=0.02, betas=betas, eps=1e-6, weight_decay=0.2)
    directions = [torch.randn(p.shape, generator=random, dtype=torch.float64) for p in ours]
    for step in range(1, 20):
        for parameters in (ours, theirs):
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.grad = direction / step
        mine.step()
        adamw.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_sudden_gradient_changes_weights_less_than_adamw() -> None:
    moved = {}
    for kind in (StableAdamW, torch.optim.AdamW):
        parameter = nn.Parameter(torch.zeros(100))
        optimizer = kind([{"params": [parameter]}], lr=0.1, betas=(0.5, 0.999), eps=1e-6, weight_decay=0.0)
        for scale in [1e-3] * 10 + [1.0]:
            before = parameter.detach().clone()
            parameter.grad = torch.full((100,), scale)
            optimizer.step()
        moved[kind] = float((parameter.detach() - before).norm())
    assert moved[StableAdamW] <= 0.1 * 10  # learning rate times the square root of the number of weights
    assert moved[torch.optim.AdamW] > 3 * moved[StableAdamW]


def test_chunk_size_changes_only_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk in (2**26, 1, 5):
        monkeypatch.setitem(optim._CHUNK, "cpu", chunk)
        parameters, random = weights(3), torch.Generator().manual_seed(4)
        optimizer = StableAdamW([{"params": parameters}], lr=0.1, betas=(0.9, 0.99), eps=1e-6)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            optimizer.step()
        results.append(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-12, atol=1e-14)
