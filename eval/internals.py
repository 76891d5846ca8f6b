"""Analysis of an image tower: filters, position embeddings, attention, and similarity of its layers.

Supports towers of clipkit, open_clip and timm. Parts that a tower does not have are skipped.

Letters in shape comments: B images, N tokens, H heads, L layers, g patches along a side, p patch side in pixels.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipkit import CLIP
from clipkit.errors import ConfigError
from clipkit.model import (
    attention_blocks,
    encode_all_tokens,
    evaluation_mode,
    patch_grid,
    reads_class_token,
    watch_attention,
)

FILTERS = 28  # as in figure 7 of Dosovitskiy et al. 2021
_LAYER = re.compile(r"Block|Bottleneck|Stage|Layer$")
_BATCH = 32  # images whose layers are compared at a time
_MAP_VALUES = 1 << 26  # attention weights in memory at a time


@dataclass(kw_only=True)
class Internals:
    """Results of ``analyze_tower``; fields that do not apply to the tower are None or empty.

    Attributes:
        filters: (K, 3, p, p) float32, the first right singular vectors of the first convolution.
        positions: (g, g, g, g) float32, cosines of position embeddings: [i, j] is the map of patch (i, j).
        distances: (L, H) float32, the mean attention distance in pixels.
        rollouts: (B, g, g) float32, 0 … 1, the attention of the output to the patches, rolled out over the layers.
        layers: names of the layers that are compared.
    """

    filters: Tensor | None = None
    positions: Tensor | None = None
    distances: Tensor | None = None
    rollouts: Tensor | None = None
    layers: list[str] = field(default_factory=list)


@torch.no_grad()
def analyze_tower(model: CLIP, images: Tensor, *, shown: int = 6) -> Internals:
    """Analyze the image tower of one model.

    Args:
        model: the model.
        images: (B, 3, S, S) uint8 on its device.
        shown: number of images for which attention is rolled out, the first ones.
    """
    found = Internals(filters=_filters(model), positions=_positions(model))
    with evaluation_mode(model):
        found.layers = list(find_layers(model))
        try:
            attention_blocks(model)
        except ConfigError:
            return found
        maps: list[list[Tensor]] = []
        sums, count = None, 0
        for part in images.split(_images_at_a_time(model, images)):
            attentions: list[Tensor] = []
            with watch_attention(model, lambda _, weights, attentions=attentions: attentions.append(weights)):  # type: ignore[misc]
                encode_all_tokens(model, part)
            if (
                not attentions
                or attentions[0].shape[0] != len(part)
                or attentions[0].shape[-1] != attentions[0].shape[-2]
            ):
                return found  # attention within windows
            distances = torch.stack(
                [attention_distances(attention, images.shape[-1]) for attention in attentions]
            ).cpu()
            sums, count = distances + (0 if sums is None else sums), count + len(part)
            if sum(map(len, maps)) < shown:
                maps.append(list(roll_out(attentions, class_token=reads_class_token(model)).cpu()))
    assert sums is not None
    found.distances = sums / count
    found.rollouts = torch.stack([image_map for part in maps for image_map in part][:shown])
    return found


def _images_at_a_time(model: CLIP, images: Tensor) -> int:
    blocks, side = attention_blocks(model), images.shape[-1]
    convolution = _first_convolution(model)
    patch = convolution.stride[0] if convolution is not None else 16
    heads = getattr(blocks[0].attn, "num_heads", getattr(blocks[0].attn, "heads", 16))
    assert isinstance(heads, int)
    return max(1, _MAP_VALUES // (len(blocks) * heads * (1 + (side // int(patch)) ** 2) ** 2))


def attention_distances(weights: Tensor, image_size: int) -> Tensor:
    """Sum the mean attention distance over images, in pixels (Dosovitskiy et al. 2021, figure 7).

    Args:
        weights: (B, H, N, N), the attention of a block. Attention to tokens that are not patches is ignored.
        image_size: side of the images in pixels.

    Returns:
        (H,) float32.
    """
    side, before = patch_grid(weights.shape[-1])
    between = weights[..., before:, before:].float()
    between = between / between.sum(dim=-1, keepdim=True).clamp(min=1e-12)
    places = (
        torch.cartesian_prod(torch.arange(side), torch.arange(side)).float().to(weights.device)
    )  # (g², 2)
    pixels = torch.cdist(places, places) * (image_size / side)
    return (between * pixels).sum(dim=-1).mean(dim=-1).sum(dim=0)


def roll_out(maps: Sequence[Tensor], *, class_token: bool = True) -> Tensor:
    """Roll attention out over layers (Abnar & Zuidema 2020, https://arxiv.org/abs/2005.00928).

    Args:
        maps: (B, H, N, N), the attention of each block.
        class_token: whether the tower's features come from its class token.

    Returns:
        (B, g, g) float32, 0 … 1: the attention of the class token, or the mean over the patches.
    """
    total: Tensor | None = None
    for weights in maps:
        mixed = weights.float().mean(dim=1)
        mixed = (mixed + torch.eye(mixed.shape[-1], device=mixed.device)) / 2
        total = mixed if total is None else mixed @ total
    assert total is not None
    side, before = patch_grid(total.shape[-1])
    row = total[:, 0] if before and class_token else total[:, before:].mean(dim=1)
    heat = row[:, before:]
    heat = heat - heat.amin(dim=1, keepdim=True)
    scaled: Tensor = heat / heat.amax(dim=1, keepdim=True).clamp(min=1e-12)
    return scaled.view(-1, side, side)


def _first_convolution(model: CLIP) -> nn.Conv2d | None:
    return next((one for one in model.visual.modules() if isinstance(one, nn.Conv2d)), None)


def _filters(model: CLIP) -> Tensor | None:
    convolution = _first_convolution(model)
    if convolution is None or convolution.in_channels != 3:
        return None
    weight: Tensor = convolution.weight.detach().float().cpu()
    _, _, rows = torch.linalg.svd(weight.flatten(1), full_matrices=False)
    first: Tensor = rows[:FILTERS]
    return first.reshape(-1, *weight.shape[1:])


def _positions(model: CLIP) -> Tensor | None:
    named = dict(model.visual.named_parameters())
    names = [name for name in ("positional_embedding", "trunk.pos_embed", "pos_embed") if name in named]
    if not names or named[names[0]].dim() > 3:
        return None
    values = named[names[0]].detach().float().cpu().flatten(0, -2)
    side, before = patch_grid(len(values))
    units = F.normalize(values[before:], dim=1)
    return (units @ units.T).view(side, side, side, side)


def find_layers(model: CLIP) -> dict[str, nn.Module]:
    """Return the layers of the image tower by name, in order: the outermost blocks and stages."""

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            if _LAYER.search(type(child).__name__):
                yield f"{prefix}{name}", child
            else:
                yield from walk(child, f"{prefix}{name}.")

    return dict(walk(model.visual, ""))


@torch.no_grad()
def compare_layers(first: CLIP, second: CLIP, images: Tensor, others: Tensor) -> Tensor:
    """Compute the centered kernel alignment of all pairs of layers (Kornblith et al. 2019; Nguyen et al. 2021).

    Unbiased HSIC is averaged over batches of images (https://arxiv.org/abs/2010.15327), so memory does not grow.

    Args:
        first, second: models; may be the same.
        images: (B, 3, S, S) uint8, preprocessed for ``first``, at least 4.
        others: the same images, preprocessed for ``second``.

    Returns:
        (L, M) float32; at most 1.
    """
    sums: list[Tensor] = []
    for part, same in zip(images.split(_BATCH), others.split(_BATCH), strict=True):
        if len(part) < 4:  # for which unbiased HSIC is not defined
            continue
        left = _grams(first, part)
        right = left if second is first else _grams(second, same)
        found = [hsic(left[:, None], right[None]), hsic(left, left), hsic(right, right)]
        sums = [one + two for one, two in zip(sums, found, strict=True)] if sums else found
    cross, own, other = sums
    scale = (own.clamp(min=1e-30)[:, None] * other.clamp(min=1e-30)[None]).sqrt()
    return (cross / scale).float().cpu()


def _grams(model: CLIP, images: Tensor) -> Tensor:
    """Compute the products of the images' activations in each layer, (L, B, B) float64."""
    found: list[Tensor] = []

    def gram(_: nn.Module, __: object, out: object) -> None:
        value = out[0] if isinstance(out, tuple) else out
        assert isinstance(value, Tensor)
        if value.shape[0] != len(images) and value.shape[1] == len(images):  # tokens come first
            value = value.transpose(0, 1)
        flat = value.flatten(1).double()
        found.append(flat @ flat.T)

    with ExitStack() as after, evaluation_mode(model):
        for layer in find_layers(model).values():
            after.callback(layer.register_forward_hook(gram).remove)
        encode_all_tokens(model, images)
    return torch.stack(found)


def hsic(left: Tensor, right: Tensor) -> Tensor:
    """Compute unbiased HSIC (Song et al. 2012) of products (…, B, B) and (…, B, B), for B of at least 4."""
    count = left.shape[-1]
    free = 1 - torch.eye(count, dtype=left.dtype, device=left.device)
    left, right = left * free, right * free
    trace = (left * right).sum(dim=(-2, -1))
    means = left.sum(dim=(-2, -1)) * right.sum(dim=(-2, -1)) / ((count - 1) * (count - 2))
    mixed = (left.sum(dim=-1) * right.sum(dim=-1)).sum(dim=-1) * 2 / (count - 2)
    return (trace + means - mixed) / (count * (count - 3))
