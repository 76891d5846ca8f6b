"""The transformer that both towers are made of, and the image tower.

Letters in shape comments: B batch, L tokens of a row, T tokens of a packed batch, D width, H heads, E width of a
head, P patches, K of them that are kept, S image side in pixels, p side of a patch, g patches along a side, O
output dimension.

Parameter names are those of OpenAI's CLIP and of open_clip, so that state dicts load with no renaming.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipkit.packing import Packed, Padded
from clipkit.resample import fitted_grid

__all__ = [
    "Attention", "BagOfWordsTower", "ClassTableTower", "Kernel", "QuickGELU", "ResidualAttentionBlock", "Rows",
    "Transformer", "VisionTransformer",
]  # fmt: skip


Rows: TypeAlias = Padded | Packed
Kernel: TypeAlias = Callable[["ResidualAttentionBlock", Tensor, Rows], Tensor]


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

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """(B, L, D) or packed (T, D) → the same shape."""
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)  # (…, 3D)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(-3)  # three of (…, H, E)
        out: Tensor = self.out_proj(rows.attend(q, k, v).flatten(-2))
        return out

    def read(self, x: Tensor, query: Tensor, rows: Rows) -> Tensor:
        """What the tokens ``query``, one of each row of ``x``, gather: the shape of ``query``."""
        width = x.shape[-1]
        q_weight, kv_weight = self.in_proj_weight.split((width, 2 * width))
        q_bias, kv_bias = self.in_proj_bias.split((width, 2 * width))
        q = F.linear(query, q_weight, q_bias).unflatten(-1, (self.heads, -1))  # (…, H, E)
        k, v = F.linear(x, kv_weight, kv_bias).unflatten(-1, (2, self.heads, -1)).unbind(-3)
        out: Tensor = self.out_proj(rows.attend_read(q, k, v).flatten(-2))
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
    """A pre-norm transformer block.

    Attributes:
        kernels: how it is computed while it trains, for all tokens and for those that are read, if not plainly;
            see clipkit/compile.py.
        recompute: whether its inner values are computed again in the backward pass instead of kept; see
            clipkit/recompute.py.
    """

    def __init__(self, width: int, heads: int, *, mlp_ratio: float, quick_gelu: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, ratio=mlp_ratio, quick_gelu=quick_gelu)
        self.kernels: tuple[Kernel, Kernel] | None = None
        self.recompute = False

    def forward(self, x: Tensor, rows: Rows, *, read: bool = False) -> Tensor:
        """All tokens, (B, L, D) → (B, L, D); with ``read`` one of each row, (B, L, D) → (B, D).

        Packed rows are (T, D). What is read equals those tokens of the whole, without the work for the others.
        """
        # functions that take the block, not methods bound to it: a copy of the block must compute with itself
        plain = (ResidualAttentionBlock.whole, ResidualAttentionBlock.read)
        kernel = (self.kernels if self.kernels is not None and self.training else plain)[read]
        if self.recompute and torch.is_grad_enabled():
            # nothing in a block is drawn at random
            out: Tensor = checkpoint(kernel, self, x, rows, use_reentrant=False, preserve_rng_state=False)
            return out
        return kernel(self, x, rows)

    def whole(self, x: Tensor, rows: Rows) -> Tensor:
        """All tokens, computed plainly."""
        x = x + self.attn(self.ln_1(x), rows)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out

    def read(self, x: Tensor, rows: Rows) -> Tensor:
        """One token of each row, computed plainly."""
        normed = self.ln_1(x)
        out = rows.read(x) + self.attn.read(normed, rows.read(normed), rows)  # (B, 1, D), or packed (B, D)
        out = out.flatten(0, -2)  # before the sum: FSDP wants no view for an output
        read: Tensor = out + self.mlp(self.ln_2(out))
        return read


class Transformer(nn.Module):
    """A stack of blocks of which one token of each row is read at the end."""

    def __init__(
        self, width: int, layers: int, heads: int, *, mlp_ratio: float = 4.0, quick_gelu: bool
    ) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(
            ResidualAttentionBlock(width, heads, mlp_ratio=mlp_ratio, quick_gelu=quick_gelu)
            for _ in range(layers)
        )

    @property
    def blocks(self) -> list[ResidualAttentionBlock]:
        """The blocks, from the input on."""
        return [block for block in self.resblocks if isinstance(block, ResidualAttentionBlock)]

    def forward(self, x: Tensor, at: Tensor | None = None, *, packed: Packed | None = None) -> Tensor:
        """(B, L, D) → (B, D): causal and read at ``at`` (B,), or bidirectional and read at the first token.

        With ``packed``, (T, D) → (B, D): causal within each text, and read at its last token.
        """
        rows = Padded(ends=at) if packed is None else packed
        *body, last = self.resblocks
        for block in body:
            x = block(x, rows)
        out: Tensor = last(x, rows, read=True)
        return out


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

    def forward(
        self, images: Tensor, patches: Tensor | None = None, *, colours: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """(B, 3, S, S) → features (B, O), not normalized.

        Args:
            images: normalized float; or uint8, with ``colours``. Of another side than the tower's, which must be a
                multiple of the patch size, position embeddings are resized to theirs.
            patches: (B, K) int64, ascending, the patches of each image that count, of P counted along rows; the
                others cost nothing. None for all. See clipkit/patch_dropout.py.
            colours: mean and standard deviation, (3, 1, 1) each, by which images / 255 are normalized.
        """
        side = images.shape[-1]
        assert images.shape[1:] == (3, side, side) and side % self.patch_size == 0, tuple(images.shape)
        cut = self._cut(images, patches)  # (B, K, 3, p, p)
        if colours is not None:  # after the cut, where there may be fewer pixels, and in place: no copies
            mean, std = colours
            cut = cut.to(mean.dtype, copy=True).div_(255).sub_(mean).div_(std)
        weight = self.conv1.weight.flatten(1)  # (D, 3pp)
        x = F.linear(cut.flatten(2).to(weight.dtype), weight)  # (B, K, D)
        places: Tensor = self.positional_embedding
        if side != self.image_size:
            places = fitted_grid(places, side // self.patch_size)
        places = places.to(x.dtype)  # (P + 1, D)
        first = (self.class_embedding.to(x.dtype) + places[0]).expand(x.shape[0], 1, -1)
        x = x + (places[1:] if patches is None else F.embedding(patches, places[1:]))
        read = self.ln_post(self.transformer(self.ln_pre(torch.cat([first, x], dim=1))))  # (B, D)
        out: Tensor = read @ self.proj
        return out

    def _cut(self, images: Tensor, patches: Tensor | None) -> Tensor:
        """(B, 3, S, S) → its patches (B, K, 3, p, p)."""
        side = self.patch_size
        grid = images.shape[-1] // side
        # (B, 3, g, p, g, p) → (B, g, g, 3, p, p)
        tiles = images.unflatten(3, (grid, side)).unflatten(2, (grid, side)).permute(0, 2, 4, 1, 3, 5)
        if patches is None:
            whole: Tensor = tiles.flatten(1, 2)
            return whole
        rows = torch.arange(len(images), device=images.device)[:, None]
        kept: Tensor = tiles[rows, patches // grid, patches % grid]
        return kept


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


class ClassTableTower(nn.Module):
    """A learned row for each class, which stands where others encode a text."""

    def __init__(self, *, classes: int, output_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, output_dim))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, 1) int64 numbers of classes → (B, O)."""
        return F.embedding(tokens[:, 0], self.weight)

    @torch.no_grad()
    def initialize(self) -> None:
        """Normal with std output_dim^-½."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
