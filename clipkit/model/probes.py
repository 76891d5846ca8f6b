"""Intermediate representations of an image tower, for linear probes.

Letters: B batch, S image side in pixels, W width of the image tower, O embedding dimension.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from clipkit.errors import ConfigError
from clipkit.model.attention import attention_blocks, patch_grid, reads_class_token
from clipkit.model.clip import CLIP

_projection_lock = threading.Lock()  # held while the projection of a tower of open_clip is removed


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageRepresentations:
    """Representations of B images.

    Attributes:
        projected: (B, O) float32, unit norm, as from ``encode_image``.
        before_projection: (B, W) float32, input of the last linear layer, not normalized.
        layers: (B, W) float32, by the block's number from 1: the class token after the block, or the mean of the
            patch tokens if the features do not come from a class token.
    """

    projected: Tensor
    before_projection: Tensor
    layers: Mapping[int, Tensor]


def layer_count(model: CLIP) -> int:
    """Return the number of blocks of an image tower that is a transformer; 0 for others."""
    try:
        return len(attention_blocks(model))
    except ConfigError:
        return 0


def image_representations(model: CLIP, images: Tensor, *, layers: Sequence[int] = ()) -> ImageRepresentations:
    """Encode images and keep intermediate representations, in one pass.

    If pooling and projection are one (a ResNet's attention pooling), ``before_projection`` is the features before
    normalization, as in the CLIP paper.

    Args:
        model: the model.
        images: (B, 3, S, S), as for ``CLIP.encode_image``.
        layers: numbers of blocks, from 1 to ``layer_count(model)``.

    Raises:
        ConfigError: there is no such block.
    """
    count = layer_count(model)
    for layer in layers:
        if not 1 <= layer <= count:
            raise ConfigError(f"the image tower has no layer {layer}: expected 1 to {count}")
    outputs: dict[int, list[Tensor]] = {}
    with ExitStack() as hooks:
        for layer in layers:
            outputs[layer] = hooks.enter_context(_collect_outputs(attention_blocks(model)[layer - 1]))
        raw, pooled = _encode_with_pooled(model, images)
    by_layer = {layer: _pool_tokens(model, tensors[-1]).float() for layer, tensors in outputs.items()}
    before = raw if pooled is None else pooled.float()
    if any(out.shape != before.shape for out in by_layer.values()):
        raise ConfigError(
            "the image tower's blocks have another width than its output: they cannot be probed"
        )
    return ImageRepresentations(
        projected=F.normalize(raw, dim=-1),
        before_projection=before,
        layers=by_layer,
    )


def _pool_tokens(model: CLIP, tokens: Tensor) -> Tensor:
    if tokens.dim() == 2:  # the last block of clipkit's own tower returns only the class token
        return tokens
    tokens = tokens.flatten(1, -2)  # windows keep the grid
    _, before = patch_grid(tokens.shape[1])
    if before and reads_class_token(model):
        return tokens[:, 0]
    return tokens[:, before:].mean(dim=1)


def _encode_with_pooled(model: CLIP, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return features before normalization (B, O), and before projection (B, W) or None."""
    visual: Any = model.visual
    is_plain = model.architecture.vision.plain is not None
    with _projection_lock:  # another thread may have removed it
        proj = None if is_plain else getattr(visual, "proj", None)
    if isinstance(proj, nn.Parameter):
        # open_clip's ViT pools inside its forward function: without a projection it returns the pooled features
        with _projection_lock:
            visual.proj = None
            try:
                pooled = model.encode_image(images, normalize=False)
            finally:
                visual.proj = proj
        return pooled @ proj.float(), pooled
    pooling = (visual.attn_pool or visual.ln_post) if is_plain else getattr(visual, "trunk", None)
    if not isinstance(pooling, nn.Module):
        return model.encode_image(images, normalize=False), None
    with _collect_outputs(pooling) as outs:
        raw = model.encode_image(images, normalize=False)
    if is_plain:
        return raw, _pool_tokens(model, outs[-1])
    return raw, outs[-1] if outs and outs[-1].dim() == 2 else None


@contextmanager
def _collect_outputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the outputs of a module in this thread, as others may run the same model."""
    outs: list[Tensor] = []
    here = threading.get_ident()

    def hook(_: nn.Module, __: object, out: object) -> None:
        if isinstance(out, Tensor) and threading.get_ident() == here:
            outs.append(out)

    handle = module.register_forward_hook(hook)
    try:
        yield outs
    finally:
        handle.remove()
