"""Tests of averaged weights: formula, bit-exact swap, and bit-exact resume."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from clipkit.errors import CheckpointError
from clipkit.model.architectures import Architecture, TextTower, VisionTower
from clipkit.model.clip import CLIP, create
from clipkit.training.ema import AveragedWeights

TINY = Architecture(
    embed_dim=8,
    vision=VisionTower(image_size=16, patch_size=8, width=8, layers=1, heads=2),
    text=TextTower(width=8, layers=1, heads=2, context_length=8, vocab_size=20),
)


@torch.no_grad()
def move(model: CLIP, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=random))


@settings(max_examples=20, deadline=None)
@given(decay=st.sampled_from([0.0, 0.3, 0.9999]), updates=st.integers(1, 12))
def test_average_equals_the_weighted_sum(decay: float, updates: int) -> None:
    model = create(TINY, seed=0).double()
    average = AveragedWeights(model, decay)
    seen = [model.visual.get_parameter("proj").detach().clone()]
    shares = [1.0]
    for step in range(1, updates + 1):
        move(model, step)
        average.update(step)
        seen.append(model.visual.get_parameter("proj").detach().clone())
        keep = min(decay, (1 + step) / (10 + step))
        shares = [keep * share for share in shares] + [1 - keep]
    wanted = sum(
        (share * values for share, values in zip(shares, seen, strict=True)), torch.zeros_like(seen[0])
    )
    assert sum(shares) == pytest.approx(1)
    torch.testing.assert_close(average.tensors()["visual.proj"], wanted, rtol=1e-12, atol=1e-12)


def test_applied_swaps_averages_in_and_out() -> None:
    model = create(TINY, seed=0)
    average = AveragedWeights(model, 0.9)
    move(model, 1)
    average.update(1)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    averaged = {name: value.clone() for name, value in average.tensors().items()}
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(KeyError), average.applied():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, averaged[name]) and not torch.equal(parameter, own[name])
            assert parameter.data_ptr() == places[name]  # in place, so that other references see it
        raise KeyError
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, averaged[name]) for name, value in average.tensors().items())


def test_restored_averages_continue_bit_for_bit() -> None:
    first, second = create(TINY, seed=0), create(TINY, seed=5)
    average = AveragedWeights(first, 0.99)
    for step in range(1, 4):
        move(first, step)
        average.update(step)
    second.load_state_dict(first.state_dict())
    again = AveragedWeights(second, 0.99)
    again.restore({name: value.clone() for name, value in average.tensors().items()}, origin="run")
    for step in range(4, 8):
        for model, its in ((first, average), (second, again)):
            move(model, step)
            its.update(step)
    assert all(torch.equal(value, again.tensors()[name]) for name, value in average.tensors().items())


def test_locked_weights_and_buffers_are_not_averaged() -> None:
    model = create(TINY, seed=0)
    model.visual.requires_grad_(False)
    average = AveragedWeights(model, 0.9)
    average.restore(model.state_dict(), origin="run")  # including locked ones
    assert average.tensors().keys() == {n for n, _ in model.named_parameters() if not n.startswith("visual.")}
    buffer = model.get_buffer("_mean")
    with average.applied():
        assert model.get_buffer("_mean") is buffer


def test_invalid_decay_and_tensors_are_rejected() -> None:
    model = create(TINY, seed=0)
    for decay in (-0.1, 1.0, float("nan")):
        with pytest.raises(AssertionError):
            AveragedWeights(model, decay)
    average = AveragedWeights(model, 0.9)
    good = {name: value.clone() for name, value in average.tensors().items()}
    with pytest.raises(CheckpointError, match="run: the averaged weights lack logit_scale, which is trained"):
        average.restore({name: good[name] for name in good if name != "logit_scale"}, origin="run")
    for bad in (good["visual.proj"].double(), good["visual.proj"][1:]):
        with pytest.raises(
            CheckpointError, match=r"run: the average of visual\.proj is \(.*instead of \(8, 8\)"
        ):
            average.restore({**good, "visual.proj": bad}, origin="run")
    assert all(torch.equal(value, good[name]) for name, value in average.tensors().items())
