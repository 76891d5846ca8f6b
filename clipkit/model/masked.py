"""Prediction of masked patches: the self-supervision of ViT (Dosovitskiy et al. 2021, appendix B.1.2).

Some patches of an image are replaced before the blocks, and a linear head predicts them from the tokens after the
blocks: one of ``TARGETS``.

Letters in shape comments: B images, P patches of an image, K chosen patches of an image, p side of a patch in
pixels, D width of the image tower.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipkit.model.architectures import COLORS
from clipkit.model.towers import VisionTransformer, at_least_float32, cut_patches, draw_numbers, draw_patches

_CELLS = 4  # of a patch along each side, for the target "small"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A quantity that is predicted for patches.

    Attributes:
        labels: uint8 patches (B, K, C, p, p) → labels (B, K, …); None if they are not made of pixels.
        loss: outputs (N, outputs) and labels (N, …) of N patches → a scalar, the sum over patches.
    """

    labels: Callable[[Tensor], Tensor] | None
    loss: Callable[[Tensor, Tensor], Tensor]


def _classify_colors(cells: Tensor) -> Tensor:
    """Compute the class of the mean color, three bits a channel: uint8 (…, 3, h, w) → (…) int64, below 512."""
    pixels = cells.shape[-1] * cells.shape[-2]
    bits = cells.sum(dim=(-2, -1), dtype=torch.int64) // (32 * pixels)  # (…, 3)
    return bits[..., 0] * 64 + bits[..., 1] * 8 + bits[..., 2]


def _classify_cells(patches: Tensor) -> Tensor:
    """Compute the classes of the colors of 4 × 4 cells: (B, K, 3, p, p) → (B, K, 16)."""
    cells = patches.unflatten(-1, (_CELLS, -1)).unflatten(-3, (_CELLS, -1))  # (B, K, 3, 4, h, 4, w)
    return _classify_colors(cells.permute(0, 1, 3, 5, 2, 4, 6)).flatten(-2)


def _normalize_pixels(patches: Tensor) -> Tensor:
    """Normalize each patch by its mean and deviation (He et al. 2022, https://arxiv.org/abs/2111.06377)."""
    values = patches.flatten(-3).float()
    # the variance of MAE is of values in [0, 1]
    return (values - values.mean(-1, keepdim=True)) / (values.var(-1, keepdim=True) + 255**2 * 1e-6).sqrt()


def _sum_cross_entropies(outputs: Tensor, labels: Tensor) -> Tensor:
    """Sum over patches the mean over cells of the cross-entropy."""
    total = F.cross_entropy(
        outputs.unflatten(-1, (-1, COLORS)).flatten(0, -2), labels.flatten(), reduction="sum"
    )
    return total * len(labels) / max(labels.numel(), 1)


def _sum_cosine_distances(outputs: Tensor, labels: Tensor) -> Tensor:
    return (1 - F.cosine_similarity(outputs, labels.to(outputs.dtype), dim=-1)).sum()


def _sum_squared_errors(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels.to(outputs.dtype)).square().mean(dim=-1).sum()


TARGETS: dict[str, Target] = {
    "color": Target(labels=_classify_colors, loss=_sum_cross_entropies),
    "small": Target(labels=_classify_cells, loss=_sum_cross_entropies),
    "pixels": Target(labels=_normalize_pixels, loss=_sum_squared_errors),
    "features": Target(labels=None, loss=_sum_cosine_distances),
}


class MaskedPatchHead(nn.Module):
    """The embedding of [mask] and the linear prediction, see the module's description."""

    def __init__(self, target: str, *, width: int, outputs: int) -> None:
        super().__init__()
        self.target = target
        self.mask_embedding = nn.Parameter(torch.empty(width))
        self.head = nn.Linear(width, outputs)

    def sum_losses(
        self,
        visual: VisionTransformer,
        images: Tensor,
        *,
        colors: tuple[Tensor, Tensor],
        sources: Tensor,
        chosen: Tensor,
        labels: Tensor,
    ) -> Tensor:
        """Sum the loss of the target over all chosen patches: a scalar, at least float32.

        Args:
            images: (B, 3, S, S) uint8.
            colors: see ``VisionTransformer.stem``.
            sources: (B, P) int64, see ``corrupt_patches``.
            chosen: (B, K) int64.
            labels: (B, K, …), see ``Target``.
        """
        tokens = visual.encode_with_tokens(images, colors=colors, replaced=(sources, self.mask_embedding))[1]
        index = (chosen + 1)[..., None].expand(-1, -1, tokens.shape[-1])  # token 0 is the class token
        outputs = self.head(tokens.gather(1, index)).flatten(0, 1)  # (N, outputs)
        with torch.autocast(images.device.type, enabled=False):  # losses are computed in at least float32
            return TARGETS[self.target].loss(at_least_float32(outputs), labels.flatten(0, 1))

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw weights with std 0.02 and zero biases."""
        nn.init.normal_(self.mask_embedding, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)


def corrupt_patches(
    images: Tensor, *, target: str, side: int, fraction: float, seed: int, rows: Tensor
) -> dict[str, Tensor]:
    """Choose patches and their replacements: [mask] for 80%, another patch of the image for 10%, itself for 10%.

    Args:
        images: (B, 3, S, S) uint8.
        side: p.
        fraction: fraction of the patches that is chosen; at least one is.
        seed: any integer, different in each step.
        rows: (B,) int64, positions of the images in the global batch.

    Returns:
        ``chosen`` (B, K) int64, ascending; ``sources`` (B, P) int64, the number of the patch to be used in place of
        each patch, P for [mask]; ``labels`` of the chosen patches, see ``Target``, if they are made of pixels.
    """
    assert images.dtype == torch.uint8, images.dtype
    cut = cut_patches(images, side).flatten(1, 2)  # (B, P, 3, p, p)
    patches = cut.shape[1]
    keep = max(1, round(fraction * patches))
    chosen = draw_patches(seed=seed, rows=rows, patches=patches, keep=keep)
    # draw_patches uses the first P numbers
    numbers = draw_numbers(seed=seed, rows=rows, count=3 * patches)[:, patches:]
    kinds, offsets = numbers.split(patches, dim=1)
    kind = kinds.gather(1, chosen).remainder(10)
    offset = offsets.gather(1, chosen).remainder(max(patches - 1, 1))
    another = (chosen + 1 + offset) % patches
    replacement = torch.where(kind < 8, patches, torch.where(kind == 8, another, chosen))
    sources = torch.arange(patches, device=rows.device).repeat(len(images), 1).scatter(1, chosen, replacement)
    corruption = {"chosen": chosen, "sources": sources}
    compute_labels = TARGETS[target].labels
    if compute_labels is not None:
        index = torch.arange(len(images), device=images.device)[:, None]
        corruption["labels"] = compute_labels(cut[index, chosen])
    return corruption
