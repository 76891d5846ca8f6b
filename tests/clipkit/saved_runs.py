"""Checkpoints of a small model, for the tests of saving, loading and damaged files."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clipkit.config import Config
from clipkit.model.clip import CLIP
from clipkit.model.preprocess import Preprocess
from clipkit.objectives.clip import clip_loss
from clipkit.training.checkpoint import LoopState, save_checkpoint
from clipkit.training.optim import adamw
from tests.clipkit.conftest import TINY

CONFIG = Config(out="runs/test")
NO_COUNTS: tuple[Any, ...] = ("4", -3, None, True, [], math.nan, math.inf, 10**400)
FILES = {"model.safetensors", "model.json", "optimizer.safetensors", "state.json", "config.toml", "COMPLETE"}


def step(model: CLIP, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Make one optimizer update on a batch seeded by ``number``."""
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(0, 256, (4, 3, 32, 32), generator=generator, dtype=torch.uint8)
    tokens = torch.randint(1, 99, (4, 9), generator=generator)
    tokens[:, 8] = 99
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(clip_loss(*model(images, tokens)))
    optimizer.step()


def state(number: int) -> LoopState:
    return LoopState(step=number, data="fingerprint", seconds=12.5, bad_samples=3)


def bits(model: CLIP, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(model.state_dict())
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            tensors.update({f"{name}/{key}": value for key, value in optimizer.state[parameter].items()})
    return tensors


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


@pytest.fixture
def small() -> CLIP:
    """A model like ``tiny`` with a vocabulary of 100, so that files have half a megabyte."""
    shape = replace(TINY, text=TINY.text.replace_vocabulary(100))
    preprocess = Preprocess(image_size=32, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    return CLIP(shape, preprocess=preprocess).initialize()


Save = Callable[..., Path]


@pytest.fixture
def save(small: CLIP, tmp_path: Path) -> Save:
    optimizer = adamw(small, CONFIG.optim)

    def write(*numbers: int, keep: int = 0) -> Path:
        for number in numbers:
            step(small, optimizer, number)
            save_checkpoint(tmp_path, small, optimizer, state(number), CONFIG, keep=keep)
        return tmp_path / "checkpoints"

    return write


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {"truncated": content[: len(content) // 2], "empty": b"", "longer": content + b"\n"}[how]
        )
