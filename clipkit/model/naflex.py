"""Images of variable size and aspect ratio as sequences of patches (NaFlex, SigLIP 2, https://arxiv.org/abs/2502.14786).

An image is resized to a grid of whole patches, at most ``PatchBudget.count``, with nearly its aspect ratio. Its
patches are the rows of a *strip*, a uint8 image (C, N p + 1, p): one patch below the other in raster order, then
padding, and a last row of pixels whose first four bytes are the numbers of rows and columns minus one. A batch of
strips is an ordinary batch of images of one size, so all that loads, stores, splits and sends images works with it.
The tower computes real patches only, packed as texts are (NaViT, Dehghani et al. 2023,
https://arxiv.org/abs/2307.06304).

Letters in shape comments: B images, C channels, N most patches of an image, p side of a patch in pixels, T tokens
of a packed batch, D width, O output dimension, g patches along a side of the position embeddings' grid.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipkit.errors import ConfigError, DataError
from clipkit.model.towers import (
    AttentionPooling,
    Mlp,
    Packed,
    SourceProjections,
    VisionTransformer,
    attention_by_length,
    attention_varlen,
    average_grid,
    copy_to_device,
    cut_patches,
    pack,
    supports_varlen,
)

Grids: TypeAlias = Sequence[tuple[int, int]]  # rows and columns of each image

# range and precision of the factor by which images are resized, as in transformers
_SCALES = (1e-6, 100.0)
_PRECISION = 1e-5
_HEADER = 4  # bytes


@dataclass(frozen=True, kw_only=True)
class PatchBudget:
    """How images become strips.

    Attributes:
        side: p.
        count: N.
    """

    side: int
    count: int

    def strip_shape(self, channels: int) -> tuple[int, int, int]:
        """Return the shape of a strip."""
        return channels, self.count * self.side + 1, self.side

    def fit_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of the largest grid of patches for an image, in pixels.

        The sides are rounded up to whole patches, so the aspect ratio changes by less than a patch.
        """

        def count_patches(scale: float) -> tuple[int, int]:
            rows, columns = (math.ceil(length * scale / self.side) for length in (height, width))
            return max(1, rows), max(1, columns)

        low, high = _SCALES
        while high - low >= _PRECISION:
            middle = (low + high) / 2
            if math.prod(count_patches(middle)) <= self.count:
                low = middle
            else:
                high = middle
        rows, columns = count_patches(low)
        if rows * columns > self.count:  # even at the smallest scale
            raise DataError(f"an image of {width} x {height} pixels is too long for {self.count} patches")
        return rows * self.side, columns * self.side

    def write_strip(self, pixels: Tensor, strip: Tensor) -> None:
        """Write an image (C, H, W) of a size from ``fit_size`` into a strip, both uint8."""
        patches = cut_patches(pixels[None], self.side)[0]  # (rows, columns, C, p, p)
        rows, columns = patches.shape[:2]
        strip.zero_()
        used = strip[:, : rows * columns * self.side].unflatten(1, (rows * columns, self.side))
        used.copy_(patches.flatten(0, 1).transpose(0, 1))
        header = (*divmod(rows - 1, 256), *divmod(columns - 1, 256))
        strip[0, -1, :_HEADER] = torch.tensor(header, dtype=torch.uint8)

    def read_grids(self, strips: Tensor) -> Grids:
        """Return the grid of each strip (B, C, N p + 1, p); ConfigError if these are no strips of this size."""
        if strips.dtype != torch.uint8 or strips.shape[1:] != self.strip_shape(strips.shape[1]):
            raise ConfigError(
                f"images of variable size must be uint8 of the shape {('B', *self.strip_shape(3))}, as "
                f"preprocessing makes them, not {strips.dtype} {tuple(strips.shape)}"
            )
        header = strips[:, 0, -1, :_HEADER].long()  # (B, 4)
        grids = (header[:, 0::2] * 256 + header[:, 1::2] + 1).tolist()
        return [(rows, columns) for rows, columns in grids]


class PackedVisionTransformer(VisionTransformer):
    """A ViT for strips; parameters are those of ``VisionTransformer``, see ``NaFlexTower``.

    Without a class token, the parameter ``class_embedding`` is missing, and its position is not used.
    """

    def __init__(self, *, budget: PatchBudget, tanh_gelu: bool, eps: float, **sizes: Any) -> None:
        super().__init__(eps=eps, **sizes)
        self.budget = budget
        if isinstance(self.attn_pool, AttentionPooling):
            width = len(self.class_embedding)
            del self.class_embedding
            self.register_buffer("class_embedding", torch.zeros(width), persistent=False)
            self.attn_pool.norm.eps = eps
        for module in self.modules():
            if tanh_gelu and isinstance(module, Mlp):
                module.gelu = nn.GELU(approximate="tanh")

    def forward(
        self,
        images: Tensor,
        patches: Tensor | None = None,
        *,
        colors: tuple[Tensor, Tensor] | None = None,
        by_source: SourceProjections | None = None,
        grids: Grids | None = None,
    ) -> Tensor:
        """Compute features (B, O), not normalized; arguments as for ``pool``."""
        return self.project(self.pool(images, patches, colors=colors, grids=grids), by_source)

    def pool(
        self,
        images: Tensor,
        patches: Tensor | None = None,
        *,
        colors: tuple[Tensor, Tensor] | None = None,
        grids: Grids | None = None,
    ) -> Tensor:
        """Compute pooled features (B, D).

        Args:
            images: strips (B, C, N p + 1, p) uint8.
            patches: must be None: patches cannot be left out.
            colors: mean and standard deviation of images, as for ``VisionTransformer.stem``.
            grids: the grids of the images, if they are known on the host; otherwise they are read, which waits for
                the device of the images.
        """
        assert patches is None and colors is not None
        x, rows = self._embed(images, self.budget.read_grids(images) if grids is None else grids, colors)
        if isinstance(self.attn_pool, AttentionPooling):
            tokens: Tensor = self.ln_post(self.transformer.compute_tokens(x, rows))
            return rows.restore_order(self.attn_pool.pool_rows(tokens, rows))
        pooled: Tensor = self.ln_post(self.transformer(x, rows))
        return rows.restore_order(pooled)

    def _embed(self, images: Tensor, grids: Grids, colors: tuple[Tensor, Tensor]) -> tuple[Tensor, Packed]:
        """Compute the tokens (T, D) before the blocks, a class token being the last of its image."""
        has_class = self.attn_pool is None
        attention = attention_by_length
        head_width = self.proj.shape[0] // self.transformer.blocks[0].attn.heads
        if supports_varlen(self.proj, head_width=head_width):
            attention = attention_varlen
        rows = pack(
            [height * width + has_class for height, width in grids],
            longest=self.budget.count + has_class,
            causal=False,
            attention=attention,
            device=images.device,
        )
        sizes = copy_to_device(torch.tensor(grids, dtype=torch.int64), images.device)[rows.rows]  # (T, 2)
        counts = sizes.prod(dim=1)
        patches = torch.minimum(rows.positions, counts - 1)  # in place of a class token any patch
        cut = images[:, :, :-1].unflatten(2, (-1, self.patch_size)).transpose(1, 2)  # (B, N, C, p, p)
        cut = cut[rows.rows, patches]  # (T, C, p, p)
        mean, std = colors
        cut = cut.to(mean.dtype).div_(255).sub_(mean).div_(std)
        weight = self.conv1.weight.flatten(1)  # (D, C p p)
        x = F.linear(cut.flatten(1).to(weight.dtype), weight)
        x = x + self._interpolate_positions(patches, sizes).to(x.dtype)
        if has_class:
            token = (self.class_embedding + self.positional_embedding[0]).to(x.dtype)
            x = torch.where((rows.positions == counts)[:, None], token, x)
        x = self.ln_pre(x)
        return x, rows

    def _interpolate_positions(self, patches: Tensor, sizes: Tensor) -> Tensor:
        """Resize the position embeddings to the grid of each image, bilinearly and antialiased, as in SigLIP 2.

        Args:
            patches: (T,) int64, number of each patch in its image.
            sizes: (T, 2) int64, rows and columns of the grid of its image.

        Returns:
            (T, D) in the dtype of the position embeddings.
        """
        table: Tensor = self.positional_embedding
        if self.positions == "learned_2d":
            table = average_grid(table)
        columns = sizes[:, 1]
        by_row, by_column = (
            weigh_grid_lines(line, count, self.image_size // self.patch_size)
            for line, count in ((patches // columns, sizes[:, 0]), (patches % columns, columns))
        )
        weights = (by_row[:, :, None] * by_column[:, None]).flatten(1).to(table.dtype)  # (T, g²)
        with torch.autocast(table.device.type, enabled=False):
            return weights @ table[1:]


def weigh_grid_lines(lines: Tensor, counts: Tensor, stored: int) -> Tensor:
    """Return the weights of antialiased bilinear resizing along one side, (T, g) float32.

    Args:
        lines: (T,) int64, the row or column of each patch.
        counts: (T,) int64, the number of rows or columns in its image.
        stored: g.
    """
    scale = stored / counts[:, None].float()  # (T, 1)
    center = (lines[:, None] + 0.5) * scale - 0.5
    distance = (torch.arange(stored, device=lines.device) - center).abs()
    weights = (1 - distance / scale.clamp(min=1)).clamp(min=0)
    return weights / weights.sum(dim=1, keepdim=True)
