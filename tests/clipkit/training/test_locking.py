"""Tests of locking: locked parameters get no gradient, and gradual unfreezing follows the step."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from clipkit.config import LockConfig, OptimConfig
from clipkit.errors import ConfigError
from clipkit.model import Architecture, OpenClipVision, TextTower, TimmVision, VisionTower
from clipkit.model.clip import CLIP, create
from clipkit.objectives.clip import clip_loss
from clipkit.training.build import Unfreezing, evaluate_locked_modules, lock, places, tower_of
from clipkit.training.optim import make_optimizer

TEXT = TextTower(width=16, layers=2, heads=2, context_length=8, vocab_size=50)
TINY = Architecture(
    embed_dim=16, vision=VisionTower(image_size=16, patch_size=8, width=24, layers=3, heads=2), text=TEXT
)
RESNET = Architecture(
    embed_dim=16,
    vision=OpenClipVision(
        image_size=64, config={"layers": [1, 1, 1, 1], "width": 8, "patch_size": None, "head_width": 8}
    ),
    text=TEXT,
)


def batch(side: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    images = torch.rand(4, 3, side, side, generator=random)
    return images, torch.randint(1, 50, (4, 8), generator=random)


def trained(model: CLIP) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@settings(max_examples=40, deadline=None)
@given(image=st.integers(0, 5), text=st.sampled_from(["", "all", 0, 1, 2, 4]))
def test_lock_leaves_the_top_depths_trainable(image: int, text: str | int) -> None:
    model = create(TINY, seed=0)
    free = {"image": image, "text": 4 if text == "" else 0 if text == "all" else int(text), "": 1}
    wanted = {name for name, place in places(model).items() if place.above < free[place.tower]}
    if wanted == {"logit_scale"}:
        with pytest.raises(ConfigError, match=r"lock.image = 0 and lock.text = .* leave nothing to train"):
            lock(model, image=image, text=text)
        return
    lock(model, image=image, text=text)
    assert trained(model) == wanted
    assert "logit_scale" in wanted


def test_locked_tower_gets_no_gradient_and_is_not_updated() -> None:
    model = create(TINY, seed=0)
    lock(model, image="all")
    optimizer = make_optimizer(model, OptimConfig(lr=0.1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.autograd.backward(clip_loss(*model(*batch())))
    optimizer.step()
    for name, parameter in model.named_parameters():
        locked = tower_of(name) == "image"
        assert (parameter.grad is None) == locked == torch.equal(parameter, before[name]), name


def test_tower_without_known_blocks_can_only_be_locked_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Architecture(embed_dim=16, vision=TimmVision(image_size=64, name="test_convnext"), text=TEXT)
    model = create(shape, seed=0)
    trunk = model.visual.get_submodule("trunk")
    monkeypatch.setattr(trunk, "group_matcher", lambda coarse: lambda name: (0,))
    lock(model, image="all")
    assert not any(name.startswith("visual.") for name in trained(model))
    with pytest.raises(ConfigError, match="the blocks of the image tower are not recognized"):
        lock(model, image=2)


def test_batch_norm_statistics_of_a_tower_with_locked_layers_are_fixed() -> None:
    model = create(RESNET, seed=0)
    lock(model, image=2)  # the pooling and the last stage are trained
    model.train()
    evaluate_locked_modules(model)
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(*batch(64))
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert not any(module.training for module in model.modules() if isinstance(module, nn.BatchNorm2d))


@pytest.mark.parametrize(
    ("image", "text", "message"),
    [
        ("all", "all", "leave nothing to train"),
        ("all", 0, "leave nothing to train"),
        (7, "", "lock.image = 7 is invalid: expected at most 5"),
        ("", 5, "lock.text = 5 is invalid: expected at most 4"),
    ],
)
def test_invalid_lock_settings_are_rejected(image: str | int, text: str | int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lock(create(TINY, seed=0), image=image, text=text)


# --- gradual unfreezing -------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(every=st.integers(1, 7), steps=st.lists(st.integers(0, 40), max_size=6))
def test_trained_parameters_depend_only_on_the_step(every: int, steps: list[int]) -> None:
    model = create(TINY, seed=0)
    lock(model, text=2)
    free = trained(model)
    where = places(model)
    unfreezing = Unfreezing(model, LockConfig(unfreeze_every=every))
    for step in steps:
        before = trained(model)
        changed = unfreezing.lock_for_step(step)
        depths = 1 + step // every
        assert trained(model) == {n for n in free if not where[n].tower or where[n].above < depths}
        assert changed == (trained(model) != before)


@settings(max_examples=25, deadline=None)
@given(image=st.integers(0, 9), text=st.integers(0, 9), every=st.integers(0, 3), step=st.integers(0, 12))
def test_towers_are_locked_below_their_top_layer_until_a_step(
    image: int, text: int, every: int, step: int
) -> None:
    model = create(TINY, seed=0)
    where = places(model)
    locks = LockConfig(image_until=image, text_until=text, unfreeze_every=every)
    unfreezing = Unfreezing(model, locks)
    unfreezing.lock_for_step(step)
    until = {"image": image, "text": text, "": 0}
    assert trained(model) == {
        name
        for name, place in where.items()
        if not place.above or (step >= until[place.tower] and step >= place.above * every)
    }
    assert unfreezing.has_locked_layers == bool(image or text or every)


def test_optimizer_updates_parameters_unlocked_later() -> None:
    model = create(TINY, seed=0)
    optimizer = make_optimizer(model, OptimConfig(lr=0.01))
    unfreezing = Unfreezing(model, LockConfig(unfreeze_every=2))
    moved_at: dict[str, int] = {}
    for step in range(10):
        changed = unfreezing.lock_for_step(step)
        assert changed == (step in (0, 2, 4, 6, 8) and step // 2 <= 4)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(clip_loss(*model(*batch())))
        optimizer.step()
        for name, parameter in model.named_parameters():
            if not torch.equal(parameter, before[name]):
                moved_at.setdefault(name, step)
    where = places(model)
    assert {name: 2 * where[name].above for name in moved_at} == moved_at
    assert moved_at.keys() == where.keys()
