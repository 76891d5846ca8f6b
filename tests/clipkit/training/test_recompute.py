"""Tests of activation checkpointing: bit-identical gradients with fewer saved bytes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from clipkit.errors import ConfigError
from clipkit.model import (
    Architecture,
    BagOfWords,
    OpenClipVision,
    TextTower,
    TimmVision,
    VisionTower,
)
from clipkit.model.clip import CLIP
from clipkit.model.tokenizer import tokenize
from clipkit.training.parallel import recompute_blocks

TEXT = TextTower(width=32, layers=1, heads=2, vocab_size=64)


def pass_through(model: CLIP) -> tuple[dict[str, Tensor], int]:
    """Return the gradients, and the number of bytes saved for them."""
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    images = torch.randint(
        0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        image, text, scale = model(images, tokenize(["a cat", "", "two dogs on a beach"], trim=True))
        total = (scale * image @ text.T).square().sum()
    torch.autograd.backward(total)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    bytes_kept = sum(size for at, size in kept.items() if at not in weights)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, bytes_kept


def test_recomputed_gradients_are_bit_identical_with_fewer_saved_bytes(tiny: CLIP) -> None:
    names = list(tiny.state_dict())
    want, most = pass_through(tiny)
    kept = []
    for every in (2, 1):
        recompute_blocks(tiny, every)
        own, size = pass_through(tiny)
        kept.append(size)
        assert own.keys() == want.keys()
        assert all(torch.equal(own[name], want[name]) for name in want)
    assert kept[1] < kept[0] < most
    assert kept[1] < most / 4
    assert list(tiny.state_dict()) == names
    recompute_blocks(tiny, 0)
    assert pass_through(tiny)[1] == most


def test_copied_model_recomputes_with_its_own_weights(tiny: CLIP) -> None:
    recompute_blocks(tiny)
    other = copy.deepcopy(tiny)
    with torch.no_grad():
        for parameter in tiny.parameters():
            parameter.zero_()
    own, _ = pass_through(other)
    assert all(torch.isfinite(one).all() for one in own.values())
    assert own["visual.transformer.resblocks.0.mlp.c_fc.weight"].abs().max() > 0


def test_nothing_is_recomputed_without_gradients(tiny: CLIP) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise AssertionError

    recompute_blocks(tiny, recompute=refuse)
    with torch.no_grad():
        tiny.encode_text(tokenize(["a cat"]))


def test_timm_tower_uses_its_own_recomputation() -> None:
    shape = Architecture(embed_dim=16, vision=TimmVision(image_size=32, name="resnet10t"), text=TEXT)
    model = CLIP(shape)
    recompute_blocks(model, 2)
    trunk: Any = model.visual.get_submodule("trunk")
    assert trunk.grad_checkpointing
    assert model.transformers["text"].blocks[0].recompute
    recompute_blocks(model, 0)
    assert not trunk.grad_checkpointing


def test_tower_without_recomputation_is_rejected() -> None:
    vision = {"layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
    shape = Architecture(embed_dim=16, vision=OpenClipVision(image_size=32, config=vision), text=TEXT)
    model = CLIP(shape)
    recompute_blocks(model, 0)
    with pytest.raises(ConfigError, match="the image tower, ModifiedResNet, cannot recompute"):
        recompute_blocks(model)


def test_bag_of_words_has_no_blocks() -> None:
    tower = VisionTower(image_size=16, patch_size=8, width=32, layers=1, heads=2)
    model = CLIP(Architecture(embed_dim=16, vision=tower, text=BagOfWords(width=16, vocab_size=64)))
    recompute_blocks(model)
    assert list(model.transformers) == ["image"]
