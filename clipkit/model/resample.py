"""Position embeddings for another image size or text length: of stored weights, and while a model is trained.

Training small first and at full size for the last steps is CLIPA's schedule (Li et al. 2023, arXiv 2305.07017);
FixRes (Touvron et al. 2019, arXiv 1906.06423) is the older finish at a higher resolution.
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.errors import CheckpointError

__all__ = ["fit_positions", "fitted_grid", "smooth_grid"]

# a ViT's, a ResNet's pooling, a ViT of timm
_IMAGE = ("visual.positional_embedding", "visual.attnpool.positional_embedding", "visual.trunk.pos_embed")
_TEXT = ("positional_embedding", "text.positional_embedding")
_CLASS_AT_THE_END = "text.cls_emb"  # CoCa's text tower: its last position is not a word's
_MOST_PREFIXES = 5  # tokens before a grid: class, distillation, registers


def fit_positions(tensors: dict[str, Tensor], wanted: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The same weights with position embeddings of the wanted shapes; what cannot be resampled stays as it is.

    Images: the class token's stays, the square grid of the others is resized by antialiased bicubic, up and down
    (Dosovitskiy et al. 2021, section 3.2). Texts: a shorter length keeps the first places, so that
    texts that fit have the features they had; for a longer one they are stretched linearly.

    Raises:
        CheckpointError: the stored grid is not square.
    """
    fitted = dict(tensors)
    for name in (*_IMAGE, *_TEXT):
        if name not in tensors or name not in wanted or tensors[name].shape == wanted[name]:
            continue
        old, shape = tensors[name], wanted[name]
        last = int(name in _TEXT and _CLASS_AT_THE_END in tensors)
        same_kind = old.ndim == len(shape) and (old.shape[:-2], old.shape[-1]) == (shape[:-2], shape[-1])
        if not same_kind or shape[:-2].numel() != 1:  # timm's have a first dimension of 1
            continue  # such as another width: for the check of shapes to report
        rows, places = old.flatten(0, -2), shape[-2]
        if min(len(rows), places) <= last:
            continue
        if name in _IMAGE:
            new = _grid(rows, places)
        else:
            words = len(rows) - last
            new = torch.cat([_line(rows[:words], places - last), rows[words:]])
        fitted[name] = new.view(shape)
    return fitted


def fitted_grid(positions: Tensor, side: int) -> Tensor:
    """Position embeddings of a class token and a square grid, for another grid; (1 + P, D) → (1 + side², D).

    Differentiable, so that a tower may be trained on smaller pictures than its own (as FlexiViT's, Beyer et al.
    2023, https://arxiv.org/abs/2212.08013).
    """
    own = math.isqrt(len(positions) - 1)
    weights = _grid_weights(own, side, positions.device).to(positions.dtype)
    with torch.autocast(positions.device.type, enabled=False):
        return torch.cat([positions[:1], weights @ positions[1:]])


@torch.no_grad()
def smooth_grid(positions: Tensor, side: int) -> None:
    """Have fresh position embeddings vary no faster than a grid of ``side`` tells; in place.

    What training on smaller pictures cannot reach would else stay noise, and appear at the full size.
    """
    own = math.isqrt(len(positions) - 1)
    small = positions[1 : 1 + side**2].clone()  # as they were drawn
    positions[1:] = _grid_weights(side, own, positions.device).to(positions.dtype) @ small


@lru_cache(maxsize=16)
def _grid_weights(side: int, new_side: int, device: torch.device) -> Tensor:
    """(new_side², side²) of antialiased bicubic resizing; a product with it is the same on all devices."""
    size = (new_side, new_side)
    with torch.inference_mode(False):  # it is kept, and training cannot use what was made in that mode
        units = torch.eye(side**2).view(side**2, 1, side, side)
        resized = F.interpolate(units, size, mode="bicubic", antialias=True, align_corners=False)
        return resized.flatten(1).T.contiguous().to(device)


def _grid(old: Tensor, places: int) -> Tensor:
    """(k + g², D) → (places, D)."""
    for prefixes in range(_MOST_PREFIXES + 1):
        side, new_side = (math.isqrt(max(0, count - prefixes)) for count in (len(old), places))
        if side and new_side and side**2 + prefixes == len(old) and new_side**2 + prefixes == places:
            break
    else:
        raise CheckpointError(f"{len(old)} image positions are no class token and a square grid")
    grid = old[prefixes:].float().T.unflatten(1, (side, side))[None]  # (1, D, g, g)
    size = (new_side, new_side)
    resized = F.interpolate(grid, size, mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([old[:prefixes], resized[0].flatten(1).T.to(old.dtype)])


def _line(old: Tensor, places: int) -> Tensor:
    """(L, D) → (places, D)."""
    if places <= len(old):
        return old[:places]
    stretched = F.interpolate(old.float().T[None], places, mode="linear", align_corners=False)
    return stretched[0].T.to(old.dtype)
