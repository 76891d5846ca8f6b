"""Position embeddings for another image size or text length: of stored weights, and of a model that is trained.

Training small first and at full size for the last steps is CLIPA's schedule (Li et al. 2023, arXiv 2305.07017);
FixRes (Touvron et al. 2019, arXiv 1906.06423) is the older finish at a higher resolution.
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipkit.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from clipkit.model import CLIP

__all__ = ["fit_moment", "fit_positions", "resize"]

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


def fit_moment(name: str, moment: Tensor, wanted: torch.Size, *, least: float = -math.inf) -> Tensor:
    """What an optimizer knows of one position embedding, resampled as ``resize`` does with the embedding itself.

    Args:
        name: the parameter's.
        moment: of the parameter's old shape, such as Adam's ``exp_avg`` or ``exp_avg_sq``.
        wanted: its new shape.
        least: 0 for averages of squares, which bicubic resampling could take below it.
    """
    fitted = fit_positions({name: moment}, {name: wanted})[name]
    assert fitted.shape == wanted, (name, fitted.shape, wanted)
    return fitted.clamp_min(least)


@torch.no_grad()
def resize(model: "CLIP", *, image_size: int = 0, context_length: int = 0) -> dict[str, nn.Parameter]:
    """Change the size of a live model's pictures, or the length of its texts; 0 leaves as it is.

    The model is changed in place: all its other parameters stay the same objects, so that what is known by them
    (an optimizer's state, compiled blocks) need not be made again. Its architecture, preprocessing and tokenizer
    follow. DDP and FSDP must be wrapped anew; parameters that are sharded must be made whole before.

    Args:
        model: of clipkit's own towers.
        image_size: a multiple of the patch size.
        context_length: in tokens. A shorter one keeps the first positions.

    Returns:
        The parameters that were replaced, as they were before, by their names.

    Raises:
        ConfigError: a tower takes no such size, or is not clipkit's own; the model is then as before.
    """
    shape = model.architecture
    if not shape.is_own:
        raise ConfigError("only clipkit's own towers change their size while they are trained")
    shape = shape.resized(image_size=image_size, context_length=context_length)
    preprocess = replace(model.preprocess, image_size=shape.vision.image_size)
    tokenizer = model.tokenizer.of_length(context_length) if context_length else model.tokenizer
    with torch.device("meta"):
        wanted = {name: one.shape for name, one in type(model)(shape).state_dict().items()}
    own = {name: one for name, one in model.named_parameters() if one.shape != wanted[name]}
    fitted = fit_positions({name: one.detach() for name, one in own.items()}, wanted)
    for name, old in own.items():
        where, _, last = name.rpartition(".")
        assert fitted[name].shape == wanted[name], name
        value = fitted[name].clone()  # a shorter text's is a part of the old one
        setattr(model.get_submodule(where), last, nn.Parameter(value, requires_grad=old.requires_grad))
    model.visual.image_size = shape.vision.image_size  # type: ignore[assignment]
    model.architecture, model.preprocess, model.tokenizer = shape, preprocess, tokenizer
    return own


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
