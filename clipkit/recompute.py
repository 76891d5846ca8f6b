"""Activation checkpointing by block: less memory for one more forward pass of the blocks chosen.

A block that is recomputed keeps its input alone; its inner values are computed again when its gradient is due (Chen
et al. 2016, arXiv 1604.06174). Gradients are the same, bit for bit.
"""

from typing import Any

from torch import nn

from clipkit.errors import ConfigError
from clipkit.model import CLIP
from clipkit.towers import BagOfWordsTower, ClassTableTower

__all__ = ["recompute_blocks"]

_NOT_DONE = ("ModifiedResNet",)  # open_clip's takes the call and does nothing


def recompute_blocks(model: CLIP, every: int = 1) -> None:
    """Recompute every ``every``-th block of each tower in the backward pass; 0 keeps all values, as at first.

    Towers of other libraries have one switch for all their blocks, and any ``every`` from 1 sets it. Names of the
    state dict stay. May be called at any time, before or after ``compile_blocks`` and FSDP or DDP: within a block,
    recomputation lies around what is compiled, and inside what FSDP does before and after the block.

    Raises:
        ConfigError: a library's tower cannot.
    """
    if every < 0:
        raise ConfigError(f"every = {every} blocks must be 0 or more")
    for transformer in model.transformers.values():
        for number, block in enumerate(transformer.blocks):
            block.recompute = every > 0 and number % every == 0
    if "image" not in model.transformers:
        _switch(model.visual, "image", on=every > 0)
    if model.text is not None and not isinstance(model.text, BagOfWordsTower | ClassTableTower):
        _switch(model.text, "text", on=every > 0)


def _switch(tower: nn.Module, called: str, *, on: bool) -> None:
    """By what timm and open_clip, or transformers, call it; it may lie on what the tower wraps."""
    part: Any
    for part in (tower, *tower.children()):
        if type(part).__name__ in _NOT_DONE:
            continue
        try:
            if hasattr(part, "set_grad_checkpointing"):
                part.set_grad_checkpointing(on)
            elif getattr(part, "supports_gradient_checkpointing", False):
                part.gradient_checkpointing_enable() if on else part.gradient_checkpointing_disable()
            else:
                continue
        except (AssertionError, AttributeError, NotImplementedError, ValueError) as error:
            raise ConfigError(f"the {called} tower cannot recompute its blocks: {error!r}") from error
        return
    if on:
        raise ConfigError(f"the {called} tower, {type(tower).__name__}, cannot recompute its blocks")
