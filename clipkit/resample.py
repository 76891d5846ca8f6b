"""Position embeddings for another image size or text length, as fine-tuning at a higher resolution needs them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.errors import CheckpointError

__all__ = ["fit_positions"]

_IMAGE = (
    "visual.positional_embedding",
    "visual.attnpool.positional_embedding",
)  # a ViT's, a ResNet's pooling
_TEXT = ("positional_embedding", "text.positional_embedding")


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
        if old.ndim != 2 or len(shape) != 2 or old.shape[1] != shape[1]:
            continue  # of another width: a mistake for the check of shapes to report
        fitted[name] = _grid(old, shape[0]) if name in _IMAGE else _line(old, shape[0])
    return fitted


def _grid(old: Tensor, places: int) -> Tensor:
    """(1 + g², D) → (places, D)."""
    side, new_side = math.isqrt(len(old) - 1), math.isqrt(places - 1)
    if side**2 + 1 != len(old) or new_side**2 + 1 != places:
        raise CheckpointError(f"{len(old)} image positions are no class token and a square grid")
    grid = old[1:].float().T.unflatten(1, (side, side))[None]  # (1, D, g, g)
    size = (new_side, new_side)
    resized = F.interpolate(grid, size, mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([old[:1], resized[0].flatten(1).T.to(old.dtype)])


def _line(old: Tensor, places: int) -> Tensor:
    """(L, D) → (places, D)."""
    if places <= len(old):
        return old[:places].clone()
    stretched = F.interpolate(old.float().T[None], places, mode="linear", align_corners=False)
    return stretched[0].T.to(old.dtype)
