"""The contestants of ``bench.gpu``: the shared batch, and a training step of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.plain_clip import plain_loss
from clipkit.config import OptimConfig
from clipkit.model.architectures import Architecture
from clipkit.model.clip import CLIP
from clipkit.model.preprocess import OPENAI_MEAN, OPENAI_STD
from clipkit.model.tokenizer import END_OF_TEXT, START_OF_TEXT
from clipkit.objectives.clip import clip_loss
from clipkit.training.optim import adamw

__all__ = ["Batch", "Contestant", "clipkit_steps", "make_batch", "open_clip_steps", "other_steps"]

CONFIG = OptimConfig(lr=1e-6, warmup=0)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch that all contestants share, on the device."""

    images: Tensor  # (B, 3, S, S) uint8
    normalized: Tensor  # (B, 3, S, S) float32
    tokens: Tensor  # (B, 77) int64
    lengths: list[int]


def make_batch(shape: Architecture, rows: int, device: torch.device) -> Batch:
    """Generate random images, and captions of 16 tokens on average, including start and end."""
    generator = torch.Generator().manual_seed(0)
    _, text = shape.get_plain_towers()
    # the sum of four exponential draws is gamma distributed
    draws = -torch.rand(rows, 4, generator=generator).clamp_min(1e-9).log().sum(1)
    lengths = (4 + 3 * draws).round().clamp(4, text.context_length).long()
    places = torch.arange(text.context_length)
    tokens = torch.randint(1, START_OF_TEXT, (rows, text.context_length), generator=generator)
    tokens = tokens.where(places < lengths[:, None], 0)
    tokens[:, 0] = START_OF_TEXT
    tokens[torch.arange(rows), lengths - 1] = END_OF_TEXT
    side = shape.vision.image_size
    on_device = torch.Generator(device).manual_seed(0)
    images = torch.randint(
        0, 256, (rows, 3, side, side), dtype=torch.uint8, device=device, generator=on_device
    )
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (OPENAI_MEAN, OPENAI_STD))
    normalized = images.float().div_(255).sub_(mean).div_(std)
    return Batch(images=images, normalized=normalized, tokens=tokens.to(device), lengths=lengths.tolist())


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A training step (forward, backward, optimizer) and the weights it trains."""

    name: str
    step: Callable[[Batch], Tensor]
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def held(self) -> int:
        """Return the bytes of the weights and the optimizer state."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        tensors = (*self.model.parameters(), *self.model.buffers(), *states)
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def clipkit_steps(model: CLIP) -> Contestant:
    optimizer = adamw(model, CONFIG)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with _autocast(batch.images.device):
            features = model(batch.images, batch.tokens, lengths=batch.lengths)
        loss = clip_loss(*features)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    return Contestant(name="clipkit", step=step, model=model, optimizer=optimizer)


def other_steps(name: str, model: nn.Module, run: Callable[..., Any]) -> Contestant:
    """Return a plain step; ``run`` is the model or its compiled version."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG.lr)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with _autocast(batch.images.device):
            loss = plain_loss(*run(batch.normalized, batch.tokens)[:3])
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    return Contestant(name=name, step=step, model=model, optimizer=optimizer)


def open_clip_steps(shape: Architecture, model: CLIP, device: torch.device) -> Contestant:
    """Return a step of open_clip's model with the same weights."""
    import open_clip

    vision, text = shape.get_plain_towers()
    reference = open_clip.CLIP(
        shape.embed_dim,
        {
            "image_size": vision.image_size, "patch_size": vision.patch_size, "width": vision.width,
            "layers": vision.layers, "head_width": vision.width // vision.heads,
        },
        {
            "context_length": text.context_length, "vocab_size": text.vocab_size, "width": text.width,
            "heads": text.heads, "layers": text.layers,
        },
    )  # fmt: skip
    reference.load_state_dict(model.state_dict())
    reference = reference.to(device).train()
    return other_steps("open_clip", reference, reference)


def _autocast(device: torch.device) -> torch.autocast:
    """Autocast to bfloat16 on a GPU; it is slow on most CPUs."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
