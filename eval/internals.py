"""Analysis of an image tower: filters, position embeddings, attention, and similarity of its layers; and its page.

Supports towers of clipkit, open_clip and timm. Parts that a tower does not have are skipped.

Letters in shape comments: B images, N tokens, H heads, L layers, g patches along a side, p patch side in pixels.
"""

import base64
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from markupsafe import Markup
from PIL import Image
from torch import Tensor, nn

import clipkit
from clipkit import CLIP
from clipkit.distributed import select_device
from clipkit.errors import ConfigError, DataError
from clipkit.files import check_page, write_page
from clipkit.inference import enlarged, heat_colors, overlay
from clipkit.model import (
    attention_blocks,
    encode_all_tokens,
    eval_pixels,
    evaluation_mode,
    patch_grid,
    reads_class_token,
    watch_attention,
)
from eval.datasets.dataset import EvalDataset
from eval.datasets.targets import find_targets
from eval.features.adapters import TIMM, ImageModel, load_image_model
from eval.features.encoder import Encoder
from eval.options import InternalsOptions
from eval.report.charts import TEMPLATES
from eval.results.records import Score
from eval.tasks import Options
from eval.tasks.classify import zero_shot
from eval.tasks.subject import Subject

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
    """Analyze the image tower of a model on (B, 3, S, S) uint8 images; roll attention out for the first ones."""
    internals = Internals(filters=_find_filters(model), positions=_compare_positions(model))
    internals.layers = list(find_layers(model))
    with evaluation_mode(model):
        try:
            attention_blocks(model)
        except ConfigError:
            return internals
        rollouts: list[Tensor] = []
        sums: Tensor | None = None
        for part in images.split(_images_at_a_time(model, images)):
            attentions: list[Tensor] = []
            with watch_attention(model, lambda _, weights, attentions=attentions: attentions.append(weights)):  # type: ignore[misc]
                encode_all_tokens(model, part)
            shape = attentions[0].shape if attentions else ()
            # attention within windows has other shapes
            if not shape or shape[0] != len(part) or shape[-1] != shape[-2]:
                return internals
            rows = [attention_distances(attention, images.shape[-1]) for attention in attentions]
            distances = torch.stack(rows).cpu()
            sums = distances if sums is None else sums + distances
            if len(rollouts) < shown:
                rollouts += roll_out(attentions, class_token=reads_class_token(model)).cpu()
    assert sums is not None
    internals.distances = sums / len(images)
    internals.rollouts = torch.stack(rollouts[:shown])
    return internals


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
    patches = torch.cartesian_prod(torch.arange(side), torch.arange(side))  # (g², 2)
    patches = patches.float().to(weights.device)
    pixels = torch.cdist(patches, patches) * (image_size / side)
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
    return next((module for module in model.visual.modules() if isinstance(module, nn.Conv2d)), None)


def _find_filters(model: CLIP) -> Tensor | None:
    convolution = _first_convolution(model)
    if convolution is None or convolution.in_channels != 3:
        return None
    weight: Tensor = convolution.weight.detach().float().cpu()
    _, _, rows = torch.linalg.svd(weight.flatten(1), full_matrices=False)
    first: Tensor = rows[:FILTERS]
    return first.reshape(-1, *weight.shape[1:])


def _compare_positions(model: CLIP) -> Tensor | None:
    parameters = dict(model.visual.named_parameters())
    names = [name for name in ("positional_embedding", "trunk.pos_embed", "pos_embed") if name in parameters]
    if not names or parameters[names[0]].dim() > 3:
        return None
    values = parameters[names[0]].detach().float().cpu().flatten(0, -2)
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
    sums: list[Tensor] | None = None
    for part, same in zip(images.split(_BATCH), others.split(_BATCH), strict=True):
        if len(part) < 4:  # for which unbiased HSIC is not defined
            continue
        left = _multiply_activations(first, part)
        right = left if second is first else _multiply_activations(second, same)
        terms = [hsic(left[:, None], right[None]), hsic(left, left), hsic(right, right)]
        if sums is not None:
            terms = [total + term for total, term in zip(sums, terms, strict=True)]
        sums = terms
    assert sums is not None, "at least 4 images"
    cross, first_norms, second_norms = sums
    scale = (first_norms.clamp(min=1e-30)[:, None] * second_norms.clamp(min=1e-30)[None]).sqrt()
    return (cross / scale).float().cpu()


def _multiply_activations(model: CLIP, images: Tensor) -> Tensor:
    """Compute the products of the images' activations in each layer, (L, B, B) float64."""
    products: list[Tensor] = []

    def append_product(_: nn.Module, __: object, out: object) -> None:
        value = out[0] if isinstance(out, tuple) else out
        assert isinstance(value, Tensor)
        if value.shape[0] != len(images) and value.shape[1] == len(images):  # tokens come first
            value = value.transpose(0, 1)
        flat = value.flatten(1).double()
        products.append(flat @ flat.T)

    with ExitStack() as after, evaluation_mode(model):
        for layer in find_layers(model).values():
            after.callback(layer.register_forward_hook(append_product).remove)
        encode_all_tokens(model, images)
    return torch.stack(products)


def hsic(left: Tensor, right: Tensor) -> Tensor:
    """Compute unbiased HSIC (Song et al. 2012) of products (…, B, B) and (…, B, B), for B of at least 4."""
    count = left.shape[-1]
    free = 1 - torch.eye(count, dtype=left.dtype, device=left.device)
    left = left * free
    right = right * free
    trace = (left * right).sum(dim=(-2, -1))
    means = left.sum(dim=(-2, -1)) * right.sum(dim=(-2, -1)) / ((count - 1) * (count - 2))
    mixed = (left.sum(dim=-1) * right.sum(dim=-1)).sum(dim=-1) * 2 / (count - 2)
    return (trace + means - mixed) / (count * (count - 3))


# --------------------------------------------------------------------------------------------------------------
# The page: one self-contained file for one or two models.

_SIDE = 192  # of an image, in pixels
_TILE = 34  # side of a filter, in pixels
_COLUMNS = 7  # of filters
_IMAGES = 6  # with heatmaps and rollouts
Pixels = npt.NDArray[np.uint8]


def run_internals(options: InternalsOptions) -> int:
    """Run the command and return its exit status."""
    if not 1 <= len(options.model) <= 2:
        raise ConfigError(f"{len(options.model)} models: internals shows one, or two side by side")
    out = options.out
    check_page("--out", out)
    (target,) = find_targets([options.data], root=options.data_root)
    device = str(select_device()) if options.device == "auto" else options.device
    models: list[CLIP] = []
    for source in options.model:
        if source.startswith(TIMM):
            models.append(load_image_model(source, device=device))
        else:
            models.append(clipkit.load(source, name=options.name, device=device))
    for model in models:
        model.preprocess = model.preprocess.replace_decoding(
            background=options.background, upright=options.upright, pixel_range=options.pixel_range
        )
    page = build_internals(models, options.model, target.dataset, options.images)
    print(f"wrote {write_page(out, page)}")
    return 0


def build_internals(models: Sequence[CLIP], names: Sequence[str], dataset: EvalDataset, count: int) -> str:
    """Return the page of one model or two for ``count`` images of a dataset, evenly spaced."""
    spaced = np.linspace(0, len(dataset) - 1, min(count, len(dataset)))
    indices = sorted(set(map(round, spaced)))
    if len(indices) < 4:
        raise DataError(f"dataset {dataset.name} has {len(dataset)} images: internals needs at least 4")
    prompts = _choose_prompts(dataset, indices[:_IMAGES])
    views = []
    pixels = []
    for model, name in zip(models, names, strict=True):
        if model.architecture.vision.budget is not None:
            raise ConfigError(f"{name} reads images of variable size, which internals cannot show")
        images = _preprocess_images(dataset, indices, model).to(model.logit_scale.device)
        pixels.append(images)
        internals = analyze_tower(model, images, shown=_IMAGES)
        view = {
            "name": name,
            "filters": _draw_filters(internals.filters),
            "positions": _draw_positions(internals.positions),
            "distances": _place_heads(internals.distances, images.shape[-1]),
            "rollouts": _draw_rollouts(internals.rollouts, images),
            "heat": _draw_heatmaps(model, images[:_IMAGES], prompts),
            "similarity": _draw_matrix(compare_layers(model, model, images, images)),
            "bias": _score_shape_bias(model, dataset),
            "layers": internals.layers,
            "side": images.shape[-1],
        }
        views.append(view)
    between = None
    if len(models) == 2:
        between = _draw_matrix(compare_layers(models[0], models[1], pixels[0], pixels[1]))
    tower = "towers" if len(models) > 1 else "tower"
    return TEMPLATES.get_template("internals.html").render(
        title=" and ".join(names),
        lead=f"Analysis of the image {tower} on {len(indices):,} images of {dataset.name}.",
        notes=[],
        views=views,
        between=between,
        images=len(indices),
    )


def _preprocess_images(dataset: EvalDataset, indices: Sequence[int], model: CLIP) -> Tensor:
    pixels = []
    for i in indices:
        try:
            pixels.append(eval_pixels(dataset.images.read(i), model.preprocess))
        except DataError as error:
            raise DataError(f"{dataset.describe_image(i)}: {error}") from error
    return torch.stack(pixels)


def _choose_prompts(dataset: EvalDataset, indices: Sequence[int]) -> list[list[str]]:
    """Return up to two texts for each image: its own, and the next one that differs from it."""
    texts: list[str] = []
    for i in indices:
        if dataset.labels is not None and dataset.labels.ndim == 1 and dataset.class_names:
            texts.append(dataset.class_names[int(dataset.labels[i])])
        elif dataset.captions is not None:
            texts.append(dataset.captions[i][0])
    prompts = []
    for i, text in enumerate(texts):
        others = [other for other in (*texts[i:], *texts[:i]) if other != text]
        prompts.append([text, *others[:1]])
    return prompts


def _encode_png(pixels: Pixels, scale: int = 1) -> Markup:
    """Return an image as a data URI, enlarged without smoothing."""
    image = Image.fromarray(pixels)
    if scale > 1:
        image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return Markup("data:image/png;base64," + base64.b64encode(file.getvalue()).decode())


def _draw_filters(filters: Tensor | None) -> Markup | None:
    if filters is None:
        return None
    low = filters.amin(dim=(1, 2, 3), keepdim=True)
    high = filters.amax(dim=(1, 2, 3), keepdim=True)
    values = (255 * (filters - low) / (high - low).clamp(min=1e-12)).permute(0, 2, 3, 1)
    rows = -(-len(values) // _COLUMNS)
    sheet = np.full((rows * _TILE, _COLUMNS * _TILE, 3), 128, np.uint8)
    for i, pixels in enumerate(values.to(torch.uint8).numpy()):
        tile = np.asarray(Image.fromarray(pixels).resize((_TILE - 2, _TILE - 2), Image.Resampling.NEAREST))
        top = i // _COLUMNS * _TILE
        left = i % _COLUMNS * _TILE
        sheet[top + 1 : top + _TILE - 1, left + 1 : left + _TILE - 1] = tile
    return _encode_png(sheet)


def _draw_positions(positions: Tensor | None) -> Markup | None:
    if positions is None:
        return None
    side = len(positions)
    padded = torch.full((side, side + 1, side, side + 1), -1.0)
    # row of the tile, row in it, column, column
    padded[:, :side, :, :side] = positions.permute(0, 2, 1, 3)
    flat = (padded.flatten(2).flatten(0, 1)[:-1, :-1] + 1) / 2
    return _encode_png(heat_colors(flat.numpy()), max(1, 384 // len(flat)))


def _place_heads(distances: Tensor | None, image_size: int) -> list[tuple[float, float, str]]:
    """Return left and top in percent, and a title, of each head."""
    if distances is None:
        return []
    heads = []
    for layer, distances_of_layer in enumerate(distances.tolist()):
        left = 100 * (layer + 0.5) / len(distances)
        for head, distance in enumerate(distances_of_layer):
            title = f"layer {layer + 1}, head {head + 1}: {distance:.1f} pixels"
            heads.append((left, 100 * (1 - distance / image_size), title))
    return heads


def _draw_rollouts(rollouts: Tensor | None, images: Tensor) -> list[tuple[Markup, Markup]]:
    if rollouts is None:
        return []
    pairs = zip(images.cpu(), rollouts.numpy(), strict=False)
    return [(_enlarge(pixels), _draw_over(pixels, heat)) for pixels, heat in pairs]


def _draw_heatmaps(
    model: CLIP, images: Tensor, prompts: Sequence[Sequence[str]]
) -> list[tuple[Markup, list[tuple[str, Markup]]]]:
    heatmaps = []
    try:
        attention_blocks(model)
        for pixels, texts in zip(images, prompts, strict=False):
            heat = clipkit.explain(pixels, texts, model)[0].numpy()
            drawn = [_draw_over(pixels.cpu(), text_heat) for text_heat in heat]
            heatmaps.append((_enlarge(pixels.cpu()), list(zip(texts, drawn, strict=True))))
    except (ConfigError, DataError):
        return []
    return heatmaps


def _score_shape_bias(model: CLIP, dataset: EvalDataset) -> Score | None:
    """Return the shape bias on all images, if the dataset has textures and the model a text tower."""
    if "texture" not in dataset.metadata or isinstance(model, ImageModel):
        return None
    subject = Subject(Encoder(model), dataset, metrics=("shape_bias",))
    return next(iter(zero_shot(subject, Options(details=False)).scores), None)


def _enlarge(pixels: Tensor) -> Markup:
    return _encode_png(np.asarray(enlarged(pixels, _SIDE)))


def _draw_over(pixels: Tensor, heat: npt.NDArray[np.float32]) -> Markup:
    return _encode_png(np.asarray(overlay(enlarged(pixels, _SIDE), heat)))


def _draw_matrix(values: Tensor) -> Markup:
    """Draw a matrix with values in 0 … 1, its first row at the bottom."""
    flat = values.flip(0).clamp(0, 1).numpy()
    return _encode_png(heat_colors(flat), max(1, 320 // max(flat.shape)))
