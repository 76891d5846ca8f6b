"""What an image tower knows of a picture on the way to its embedding, for probes that look inside.

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
from clipkit.model.towers import VisionTransformer

__all__ = ["ImageRepresentations", "image_representations", "layer_count"]


_unprojected = threading.Lock()  # held while a tower of open_clip's has no projection


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageRepresentations:
    """Of B pictures.

    Attributes:
        projected: (B, O) float32, unit norm; what ``encode_image`` gives.
        before_projection: (B, W) float32, what the tower gives before its last linear map, not normalized.
        layers: by the number of a block, from 1, (B, W) float32, the class token behind it.
    """

    projected: Tensor
    before_projection: Tensor
    layers: Mapping[int, Tensor]


def layer_count(model: CLIP) -> int:
    """How many blocks ``image_representations`` can look behind; 0 for an image tower of another library."""
    return len(model.visual.transformer.blocks) if isinstance(model.visual, VisionTransformer) else 0


def image_representations(model: CLIP, images: Tensor, *, layers: Sequence[int] = ()) -> ImageRepresentations:
    """Encode pictures and keep what is seen on the way, in one pass.

    A tower whose pooling is its projection (a ResNet's attention pooling) has nothing before it: its features
    before normalization stand for that, as in the CLIP paper.

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
            assert isinstance(model.visual, VisionTransformer)
            block = model.visual.transformer.blocks[layer - 1]
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
    own = isinstance(visual, VisionTransformer)
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
    """What a module gives in this thread; others may run the same model meanwhile."""
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
