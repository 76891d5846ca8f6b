"""Build the page of ``python -m eval internals``: one self-contained file for one or two models."""

import base64
import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from markupsafe import Markup
from PIL import Image
from torch import Tensor

import clipkit
from clipkit import CLIP
from clipkit.distributed import select_device
from clipkit.errors import ConfigError, DataError
from clipkit.files import check_page, write_page
from clipkit.inference import enlarged, heat_colors, overlay
from clipkit.model import attention_blocks, eval_pixels
from eval.datasets.dataset import EvalDataset
from eval.datasets.targets import find_targets
from eval.features.encoder import Encoder
from eval.features.image_models import TIMM, ImageModel, load_image_model
from eval.internals import Internals, analyze_tower, compare_layers
from eval.options import InternalsOptions
from eval.report.charts import TEMPLATES
from eval.results.scores import Score
from eval.tasks import Options
from eval.tasks.classify import zero_shot
from eval.tasks.subject import Subject

_SIDE, _TILE = 192, 34  # of an image and of a filter, in pixels
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
    numbers = sorted({round(place) for place in np.linspace(0, len(dataset) - 1, min(count, len(dataset)))})
    if len(numbers) < 4:
        raise DataError(f"dataset {dataset.name} has {len(dataset)} images: internals needs at least 4")
    pixels = [_pixels(dataset, numbers, model) for model in models]
    pixels = [images.to(model.logit_scale.device) for images, model in zip(pixels, models, strict=True)]
    analyses = [
        analyze_tower(model, images, shown=_IMAGES) for model, images in zip(models, pixels, strict=True)
    ]
    prompts = _prompts(dataset, numbers[:_IMAGES])
    views = []
    for model, name, inside, images in zip(models, names, analyses, pixels, strict=True):
        views.append(
            {
                "name": name,
                "filters": _filters(inside),
                "positions": _positions(inside),
                "distances": _dots(inside.distances, images.shape[-1]),
                "rollouts": _rollouts(inside, images),
                "heat": _heat(model, images[:_IMAGES], prompts),
                "similarity": _matrix(compare_layers(model, model, images, images)),
                "bias": _shape_bias(model, dataset),
                "layers": inside.layers,
                "side": images.shape[-1],
            }
        )
    between = None
    if len(models) == 2:
        between = _matrix(compare_layers(models[0], models[1], pixels[0], pixels[1]))
    tower = "towers" if len(models) > 1 else "tower"
    return TEMPLATES.get_template("internals.html").render(
        title=" and ".join(names),
        lead=f"Analysis of the image {tower} on {len(numbers):,} images of {dataset.name}.",
        notes=[],
        views=views,
        between=between,
        images=len(numbers),
    )


def _pixels(dataset: EvalDataset, numbers: Sequence[int], model: CLIP) -> Tensor:
    """Preprocess images, (B, 3, S, S) uint8."""
    pixels = []
    for number in numbers:
        try:
            pixels.append(eval_pixels(dataset.images.read(number), model.preprocess))
        except DataError as error:
            raise DataError(f"{dataset.describe_image(number)}: {error}") from error
    return torch.stack(pixels)


def _prompts(dataset: EvalDataset, numbers: Sequence[int]) -> list[list[str]]:
    """Return up to two texts for each image: its own, and the next one that differs from it."""
    texts: list[str] = []
    for number in numbers:
        if dataset.labels is not None and dataset.labels.ndim == 1 and dataset.class_names:
            texts.append(dataset.class_names[int(dataset.labels[number])])
        elif dataset.captions is not None:
            texts.append(dataset.captions[number][0])
    prompts = []
    for i, text in enumerate(texts):
        others = [other for other in (*texts[i:], *texts[:i]) if other != text]
        prompts.append([text, *others[:1]])
    return prompts


def _png(pixels: Pixels, scale: int = 1) -> Markup:
    """Return an image as a data URI, enlarged without smoothing."""
    image = Image.fromarray(pixels)
    if scale > 1:
        image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return Markup("data:image/png;base64," + base64.b64encode(file.getvalue()).decode())


def _filters(inside: Internals) -> Markup | None:
    if inside.filters is None:
        return None
    low, high = (
        inside.filters.amin(dim=(1, 2, 3), keepdim=True),
        inside.filters.amax(dim=(1, 2, 3), keepdim=True),
    )
    values = (255 * (inside.filters - low) / (high - low).clamp(min=1e-12)).permute(0, 2, 3, 1)
    rows = -(-len(values) // _COLUMNS)
    sheet = np.full((rows * _TILE, _COLUMNS * _TILE, 3), 128, np.uint8)
    for number, pixels in enumerate(values.to(torch.uint8).numpy()):
        tile = np.asarray(Image.fromarray(pixels).resize((_TILE - 2, _TILE - 2), Image.Resampling.NEAREST))
        top, left = number // _COLUMNS * _TILE, number % _COLUMNS * _TILE
        sheet[top + 1 : top + _TILE - 1, left + 1 : left + _TILE - 1] = tile
    return _png(sheet)


def _positions(inside: Internals) -> Markup | None:
    if inside.positions is None:
        return None
    side = len(inside.positions)
    padded = torch.full((side, side + 1, side, side + 1), -1.0)
    padded[:, :side, :, :side] = inside.positions.permute(
        0, 2, 1, 3
    )  # row of the tile, row in it, column, column
    flat = (padded.flatten(2).flatten(0, 1)[:-1, :-1] + 1) / 2
    return _png(heat_colors(flat.numpy()), max(1, 384 // len(flat)))


def _dots(distances: Tensor | None, image_size: int) -> list[tuple[float, float, str]]:
    """Return left and top in percent, and a title, of each head."""
    if distances is None:
        return []
    layers = len(distances)
    return [
        (
            100 * (layer + 0.5) / layers,
            100 * (1 - float(value) / image_size),
            f"layer {layer + 1}, head {head + 1}: {float(value):.1f} pixels",
        )
        for layer, heads in enumerate(distances)
        for head, value in enumerate(heads)
    ]


def _rollouts(inside: Internals, images: Tensor) -> list[tuple[Markup, Markup]]:
    if inside.rollouts is None:
        return []
    pairs = zip(images.cpu(), inside.rollouts.numpy(), strict=False)
    return [(_shown(pixels), _over(pixels, heat)) for pixels, heat in pairs]


def _heat(
    model: CLIP, images: Tensor, prompts: Sequence[Sequence[str]]
) -> list[tuple[Markup, list[tuple[str, Markup]]]]:
    """Return each image with the heatmaps of its texts; none without a text tower or without a ViT."""
    try:
        attention_blocks(model)
        heatmaps = []
        for pixels, texts in zip(images, prompts, strict=False):
            heat = clipkit.explain(pixels, texts, model)[0].numpy()
            drawn = [_over(pixels.cpu(), each) for each in heat]
            heatmaps.append((_shown(pixels.cpu()), list(zip(texts, drawn, strict=True))))
    except (ConfigError, DataError):
        return []
    return heatmaps


def _shape_bias(model: CLIP, dataset: EvalDataset) -> Score | None:
    """Return the shape bias on all images, if the dataset has textures and the model a text tower."""
    if "texture" not in dataset.metadata or isinstance(model, ImageModel):
        return None
    subject = Subject(Encoder(model), dataset, metrics=("shape_bias",))
    return next(iter(zero_shot(subject, Options(details=False)).scores), None)


def _shown(pixels: Tensor) -> Markup:
    return _png(np.asarray(enlarged(pixels, _SIDE)))


def _over(pixels: Tensor, heat: npt.NDArray[np.float32]) -> Markup:
    return _png(np.asarray(overlay(enlarged(pixels, _SIDE), heat)))


def _matrix(values: Tensor) -> Markup:
    """Draw a matrix with values in 0 … 1, its first row at the bottom."""
    flat = values.flip(0).clamp(0, 1).numpy()
    return _png(heat_colors(flat), max(1, 320 // max(flat.shape)))
