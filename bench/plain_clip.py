"""CLIP in open_clip's formulation: the reference that ``bench.gpu`` compares clipkit with.

77 padded tokens and an additive mask, separate products for queries, keys and values, norms in the dtype of
their input, all tokens through the last block, two blocks of logits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipkit.model.architectures import Architecture

__all__ = ["PlainCLIP", "plain_loss"]


class PlainNorm(nn.LayerNorm):
    """Layer norm that returns the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


class PlainAttention(nn.Module):
    """Queries, keys and values by three products, with an additive mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        parts = zip(self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3), strict=True)
        q, k, v = (F.linear(x, *part).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mask = None if mask is None else mask.to(q.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out


class PlainMlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(self.gelu(self.c_fc(x)))
        return out


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.ln_1, self.attn = PlainNorm(width), PlainAttention(width, heads)
        self.ln_2, self.mlp = PlainNorm(width), PlainMlp(width, hidden)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class PlainTransformer(nn.Module):
    def __init__(self, tower: Any) -> None:
        super().__init__()
        hidden = int(tower.mlp_ratio * tower.width)
        self.resblocks = nn.ModuleList(
            PlainBlock(tower.width, tower.heads, hidden) for _ in range(tower.layers)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class PlainVision(nn.Module):
    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        tower, _ = shape.get_plain_towers()
        width, side = tower.width, tower.patch_size
        self.conv1 = nn.Conv2d(3, width, side, stride=side, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.positional_embedding = nn.Parameter(torch.empty((tower.image_size // side) ** 2 + 1, width))
        self.ln_pre, self.transformer, self.ln_post = (
            PlainNorm(width),
            PlainTransformer(tower),
            PlainNorm(width),
        )
        self.proj = nn.Parameter(torch.empty(width, shape.embed_dim))

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv1(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.to(x.dtype).expand(len(x), 1, -1), x], 1)
        x = self.transformer(self.ln_pre(x + self.positional_embedding.to(x.dtype)))
        out: Tensor = self.ln_post(x)[:, 0] @ self.proj
        return out


class PlainCLIP(nn.Module):
    """CLIP in open_clip's formulation; parameters are named as in clipkit, so that both load the same weights."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        _, tower = shape.get_plain_towers()
        length = tower.context_length
        self.visual, self.transformer = PlainVision(shape), PlainTransformer(tower)
        self.token_embedding = nn.Embedding(tower.vocab_size, tower.width)
        self.positional_embedding = nn.Parameter(torch.empty(length, tower.width))
        self.ln_final = PlainNorm(tower.width)
        self.text_projection = nn.Parameter(torch.empty(tower.width, shape.embed_dim))
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.register_buffer("mask", torch.full((length, length), -torch.inf).triu_(1), persistent=False)

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.token_embedding(tokens) + self.positional_embedding
        x = self.ln_final(self.transformer(x, self.get_buffer("mask")))
        rows = torch.arange(len(x), device=x.device)
        text = x[rows, tokens.argmax(-1)] @ self.text_projection
        image = self.visual(images)
        return F.normalize(image, dim=-1), F.normalize(text, dim=-1), self.logit_scale.exp()


def plain_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Contrastive loss with two blocks of logits and a cross-entropy for each."""
    targets = torch.arange(len(image), device=image.device)
    by_image, by_text = scale * image @ text.T, scale * text @ image.T
    return (F.cross_entropy(by_image, targets) + F.cross_entropy(by_text, targets)) / 2
