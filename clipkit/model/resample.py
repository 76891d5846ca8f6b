"""Resample position embeddings for another image size or text length, of stored weights and during training.

Training on small images first is CLIPA's schedule (Li et al. 2023, arXiv 2305.07017); finishing at a higher
resolution is that of FixRes (Touvron et al. 2019, arXiv 1906.06423).
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.errors import CheckpointError

# of a ViT, of a ResNet's pooling, of a ViT of timm
_IMAGE = ("visual.positional_embedding", "visual.attnpool.positional_embedding", "visual.trunk.pos_embed")
_TEXT = ("positional_embedding", "text.positional_embedding")
_CLASS_AT_THE_END = "text.cls_emb"  # of CoCa's text tower, whose last position belongs to a class token
_KEPT = 20  # text positions that are kept in a longer table
_MAX_PREFIXES = 5  # tokens before a grid: class, distillation, registers


def fit_positions(tensors: dict[str, Tensor], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Resample the position embeddings to the wanted shapes; others of another shape are kept.

    Image positions: the class token's is kept, the square grid is resized by antialiased bicubic interpolation
    (Dosovitskiy et al. 2021, section 3.2). Text positions: a shorter length keeps the first ones. A longer one
    keeps the first 20, the best trained ones, and stretches the others linearly (Long-CLIP, Zhang et al. 2024,
    https://arxiv.org/abs/2403.15378). In both cases short texts keep their features, unless the text tower reads
    padding (see ``TextArchitecture.reads_padding``).
    """
    fitted = dict(tensors)
    for name in (*_IMAGE, *_TEXT):
        if name not in tensors or name not in shapes or tensors[name].shape == shapes[name]:
            continue
        old = tensors[name]
        shape = shapes[name]
        same_kind = old.ndim == len(shape) and (old.shape[:-2], old.shape[-1]) == (shape[:-2], shape[-1])
        if not same_kind or shape[:-2].numel() != 1:  # timm's have a first dimension of 1
            continue  # for example another width, which the check of shapes reports
        rows = old.flatten(0, -2)
        length = shape[-2]
        last = int(name in _TEXT and _CLASS_AT_THE_END in tensors)
        if min(len(rows), length) <= last:
            continue
        if name in _IMAGE:
            new = _resize_image_positions(rows, length)
        else:
            words = _resize_text_positions(rows[: len(rows) - last], length - last)
            new = torch.cat([words, rows[len(rows) - last :]])
        fitted[name] = new.view(shape)
    return fitted


def _resize_text_positions(old: Tensor, length: int) -> Tensor:
    """Keep the first positions, and stretch those after the first 20 if there are too few."""
    if length <= len(old):
        return old[:length]
    first = min(_KEPT, len(old) - 1)
    stretched = F.interpolate(old[first:].float().T[None], length - first, mode="linear", align_corners=True)
    return torch.cat([old[:first], stretched[0].T.to(old.dtype)])


def resize_grid(positions: Tensor, side: int) -> Tensor:
    """Resize position embeddings of a class token and a square grid, (1 + P, D) → (1 + side², D).

    Differentiable, for training on smaller images (as in FlexiViT, Beyer et al. 2023,
    https://arxiv.org/abs/2212.08013).
    """
    stored_side = math.isqrt(len(positions) - 1)
    weights = grid_weights(stored_side, side, positions.device).to(positions.dtype)
    with torch.autocast(positions.device.type, enabled=False):
        return torch.cat([positions[:1], weights @ positions[1:]])


@torch.no_grad()
def smooth_grid(positions: Tensor, side: int) -> None:
    """Replace fresh position embeddings by the interpolation of a grid of ``side``, in place.

    Otherwise the details that training on smaller images cannot reach would remain noise at the full size.
    """
    full_side = math.isqrt(len(positions) - 1)
    small = positions[1 : 1 + side**2].clone()
    positions[1:] = grid_weights(side, full_side, positions.device).to(positions.dtype) @ small


@lru_cache(maxsize=16)
def grid_weights(side: int, new_side: int, device: torch.device) -> Tensor:
    """Return the matrix (new_side², side²) of antialiased bicubic resizing, which is equal on all devices."""
    size = (new_side, new_side)
    with torch.inference_mode(False):  # the cached matrix is used in training too
        units = torch.eye(side**2).view(side**2, 1, side, side)
        resized = F.interpolate(units, size, mode="bicubic", antialias=True, align_corners=False)
        return resized.flatten(1).T.contiguous().to(device)


def _resize_image_positions(old: Tensor, length: int) -> Tensor:
    """Resize a grid after k other tokens: (k + g², D) → (length, D)."""
    for prefixes in range(_MAX_PREFIXES + 1):
        side = math.isqrt(max(0, len(old) - prefixes))
        new_side = math.isqrt(max(0, length - prefixes))
        if side and new_side and side**2 + prefixes == len(old) and new_side**2 + prefixes == length:
            break
    else:
        raise CheckpointError(f"{len(old)} image positions are not a class token and a square grid")
    grid = old[prefixes:].float().T.unflatten(1, (side, side))[None]  # (1, D, g, g)
    size = (new_side, new_side)
    resized = F.interpolate(grid, size, mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([old[:prefixes], resized[0].flatten(1).T.to(old.dtype)])
