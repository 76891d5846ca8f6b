"""Intermediate representations of an image tower, for linear probes.

Letters: B batch, S image side in pixels, W width of the image tower, O embedding dimension.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from clipkit.errors import ConfigError
from clipkit.model.clip import CLIP

__all__ = ["ImageRepresentations", "image_representations", "layer_count"]


_unprojected = threading.Lock()  # held while a tower of open_clip's has no projection


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageRepresentations:
    """Representations of B images.

    Attributes:
        projected: (B, O) float32, unit norm, as from ``encode_image``.
        before_projection: (B, W) float32, before the last linear layer, not normalized.
        layers: (B, W) float32, the class token after each block, by its number from 1.
    """

    projected: Tensor
    before_projection: Tensor
    layers: Mapping[int, Tensor]


def layer_count(model: CLIP) -> int:
    """Number of blocks of which ``image_representations`` gives the output; 0 for a tower of another library."""
    return model.architecture.vision.block_count


def image_representations(model: CLIP, images: Tensor, *, layers: Sequence[int] = ()) -> ImageRepresentations:
    """Encode images and keep intermediate representations, in one pass.

    Where pooling and projection are one (a ResNet's attention pooling), ``before_projection`` holds the features
    before normalization, as in the CLIP paper.

    Args:
        model: the model.
        images: (B, 3, S, S), as ``CLIP.encode_image`` takes them.
        layers: numbers of blocks, from 1 to ``layer_count(model)``.

    Raises:
        ConfigError: there is no such block.
    """
    if wrong := [layer for layer in layers if not 1 <= layer <= layer_count(model)]:
        raise ConfigError(
            f"the image tower has no layer {wrong[0]} to look behind: 1 to {layer_count(model)}"
        )
    seen: dict[int, Tensor] = {}
    with ExitStack() as watching:
        for layer in layers:
            block = model.transformers["image"].blocks[layer - 1]
            watching.enter_context(_watched(block, partial(_keep, seen, layer)))
        raw, pooled = _raw_and_pooled(model, images)
    return ImageRepresentations(
        projected=F.normalize(raw, dim=-1),
        before_projection=raw if pooled is None else pooled.float(),
        layers={layer: seen[layer].float() for layer in layers},
    )


def _raw_and_pooled(model: CLIP, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """The features before normalization, (B, O), and before projection, (B, W), where there is such a place."""
    visual: Any = model.visual
    own = model.architecture.vision.plain is not None
    with _unprojected:  # not while another thread has it off
        proj = None if own else getattr(visual, "proj", None)
    if isinstance(proj, nn.Parameter):
        # open_clip's ViT pools in many ways, all of them inside its forward: without a projection it gives the pool
        with _unprojected:
            visual.proj = None
            try:
                pooled = model.encode_image(images, normalize=False)
            finally:
                visual.proj = proj
        return pooled @ proj.float(), pooled
    place = visual.ln_post if own else getattr(visual, "trunk", None)
    if not isinstance(place, nn.Module):
        return model.encode_image(images, normalize=False), None
    outs: list[Tensor] = []
    with _watched(place, outs.append):
        raw = model.encode_image(images, normalize=False)
    return raw, outs[-1] if outs and outs[-1].dim() == 2 else None


@contextmanager
def _watched(module: nn.Module, see: Callable[[Tensor], object]) -> Iterator[None]:
    """Call ``see`` with a module's outputs in this thread only, as others may run the same model."""
    here = threading.get_ident()

    def hook(_: nn.Module, __: object, out: object) -> None:
        if isinstance(out, Tensor) and threading.get_ident() == here:
            see(out)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _keep(seen: dict[int, Tensor], layer: int, out: Tensor) -> None:
    """Of (B, L, W) the class token; the last block gives nothing else, (B, W)."""
    seen[layer] = out if out.dim() == 2 else out[:, 0]
