"""The transformer that both towers are made of, and the image tower.

Letters in shape comments: B batch, L tokens, D width, H heads, E width of a head, P patches,
S image side in pixels, O output dimension.

Parameter names are those of OpenAI's CLIP and of open_clip, so that state dicts load with no renaming.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "Attention",
    "BagOfWordsTower",
    "QuickGELU",
    "ResidualAttentionBlock",
    "Transformer",
    "VisionTransformer",
]


class QuickGELU(nn.Module):
    """x · sigmoid(1.702 x), the approximation of GELU that OpenAI's weights were trained with."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, *, is_causal: bool) -> Tensor:
        """(B, L, D) → (B, L, D)."""
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)  # (B, L, 3D)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # three of (B, H, L, E)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def read(self, x: Tensor, query: Tensor, visible: Tensor | None) -> Tensor:
        """What the tokens ``query`` (B, 1, D) gather from ``x`` (B, L, D), of which ``visible`` (B, L) count."""
        width = x.shape[-1]
        q_weight, kv_weight = self.in_proj_weight.split((width, 2 * width))
        q_bias, kv_bias = self.in_proj_bias.split((width, 2 * width))
        q = F.linear(query, q_weight, q_bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, 1, E)
        kv = F.linear(x, kv_weight, kv_bias).unflatten(-1, (2, self.heads, -1))
        k, v = kv.permute(2, 0, 3, 1, 4)  # two of (B, H, L, E)
        mask = None if visible is None else visible[:, None, None, :]  # (B, 1, 1, L)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))  # (B, 1, D)
        return out


class Mlp(nn.Module):
    """The two linear layers of a block, ``ratio`` times as wide inside."""

    def __init__(self, width: int, *, ratio: float, quick_gelu: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, int(ratio * width))
        self.gelu = QuickGELU() if quick_gelu else nn.GELU()
        self.c_proj = nn.Linear(int(ratio * width), width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(self.gelu(self.c_fc(x)))
        return out


class ResidualAttentionBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, *, mlp_ratio: float, quick_gelu: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, ratio=mlp_ratio, quick_gelu=quick_gelu)

    def forward(self, x: Tensor, *, is_causal: bool) -> Tensor:
        """(B, L, D) → (B, L, D)."""
        x = x + self.attn(self.ln_1(x), is_causal=is_causal)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out

    def read(self, x: Tensor, at: Tensor | None) -> Tensor:
        """The block's output at one token of each row: (B, L, D) → (B, D).

        ``at`` (B,) is the token's place, and only tokens up to it are seen; None is the first token seeing all.
        Equal to ``forward(x)[row, at]``, without the work for the other tokens.
        """
        normed = self.ln_1(x)
        if at is None:
            query, residual, visible = normed[:, :1], x[:, :1], None
        else:
            place = at[:, None, None].expand(-1, 1, x.shape[-1])  # (B, 1, D)
            query, residual = normed.gather(1, place), x.gather(1, place)
            visible = torch.arange(x.shape[1], device=x.device) <= at[:, None]  # (B, L)
        out = residual + self.attn.read(normed, query, visible)
        out = out + self.mlp(self.ln_2(out))
        read: Tensor = out[:, 0]
        return read


class Transformer(nn.Module):
    """A stack of blocks of which one token is read at the end."""

    def __init__(
        self, width: int, layers: int, heads: int, *, mlp_ratio: float = 4.0, quick_gelu: bool
    ) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(
            ResidualAttentionBlock(width, heads, mlp_ratio=mlp_ratio, quick_gelu=quick_gelu)
            for _ in range(layers)
        )

    def forward(self, x: Tensor, at: Tensor | None = None) -> Tensor:
        """(B, L, D) → (B, D): causal and read at ``at`` (B,), or bidirectional and read at the first token."""
        *body, last = self.resblocks
        assert isinstance(last, ResidualAttentionBlock)
        for block in body:
            x = block(x, is_causal=at is not None)
        return last.read(x, at)


class VisionTransformer(nn.Module):
    """A ViT (Dosovitskiy et al. 2021) with CLIP's norm before the blocks, read at the class token."""

    def __init__(
        self,
        *,
        image_size: int,
        patch_size: int,
        width: int,
        layers: int,
        heads: int,
        mlp_ratio: float = 4.0,
        output_dim: int,
        quick_gelu: bool,
    ) -> None:
        super().__init__()
        self.image_size, self.patch_size = image_size, patch_size
        patches = (image_size // patch_size) ** 2
        # kept as a convolution for its parameter's name and shape; applied as one matrix product
        self.conv1 = nn.Conv2d(3, width, kernel_size=patch_size, stride=patch_size, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.positional_embedding = nn.Parameter(torch.empty(patches + 1, width))
        self.ln_pre = nn.LayerNorm(width)
        self.transformer = Transformer(width, layers, heads, mlp_ratio=mlp_ratio, quick_gelu=quick_gelu)
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Parameter(torch.empty(width, output_dim))

    def forward(self, images: Tensor) -> Tensor:
        """Normalized float images (B, 3, S, S) → features (B, O), not normalized."""
        assert images.shape[1:] == (3, self.image_size, self.image_size), tuple(images.shape)
        grid, side = self.image_size // self.patch_size, self.patch_size
        patches = images.unflatten(3, (grid, side)).unflatten(2, (grid, side))  # (B, 3, g, p, g, p)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (B, P, 3pp)
        x = F.linear(patches, self.conv1.weight.flatten(1))  # (B, P, D)
        first = self.class_embedding.to(x.dtype).expand(x.shape[0], 1, -1)
        x = torch.cat([first, x], dim=1) + self.positional_embedding.to(x.dtype)  # (B, P + 1, D)
        read = self.ln_post(self.transformer(self.ln_pre(x)))  # (B, D)
        out: Tensor = read @ self.proj
        return out


class BagOfWordsTower(nn.Module):
    """The mean of a text's token embeddings, projected; start, end and padding do not count."""

    def __init__(self, *, vocab_size: int, width: int, output_dim: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.text_projection = nn.Parameter(torch.empty(width, output_dim))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, L) int64, each row start of text, words, end of text (its largest id), padding → (B, O)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        words = (places > 0) & (places < tokens.argmax(dim=-1, keepdim=True))  # (B, L)
        words[:, 0] |= ~words.any(dim=-1)  # a text without words is its start alone
        weights = words.to(self.token_embedding.weight.dtype)
        mean = torch.einsum("bl,bld->bd", weights, self.token_embedding(tokens))
        out: Tensor = (mean / weights.sum(dim=-1, keepdim=True)) @ self.text_projection
        return out

    @torch.no_grad()
    def initialize(self) -> None:
        """Embeddings normal with std 0.02, as the transformer's; the projection normal with std width^-½."""
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.text_projection, std=self.text_projection.shape[0] ** -0.5)
