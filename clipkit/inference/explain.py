"""``clipkit explain`` and ``clipkit complete``: write heatmaps or completions of an image as a PNG."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from clipkit.api import explain
from clipkit.errors import ConfigError, DataError
from clipkit.files.terminal import CountProgress, printable
from clipkit.files.writing import replacing
from clipkit.inference.stream import load_for_inference
from clipkit.model.pixels import PixelTransformer
from clipkit.model.preprocess import eval_pixels
from clipkit.options import CompleteOptions, ExplainOptions

# of an image and its label, in pixels
SIDE = 320
_MARGIN = 8
_LINE = 20
# colors of heat 0, 1/4, … 1 (Matplotlib's "inferno", every quarter)
_COLORS = np.array(
    [(0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164)], dtype=np.float32
)


def heat_colors(heat: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Map heat (H, W), 0 … 1, to RGB colors (H, W, 3) from black through red to yellow."""
    at = np.linspace(0, 1, len(_COLORS))
    colors = np.stack([np.interp(heat, at, _COLORS[:, i]) for i in range(3)], axis=-1)
    return colors.astype(np.uint8)


def overlay(image: Image.Image, heat: npt.NDArray[np.float32]) -> Image.Image:
    """Draw heat (g, g), 0 … 1, over a square image in grayscale."""
    smooth = Image.fromarray(heat.astype(np.float32)).resize(image.size, Image.Resampling.BICUBIC)
    level = np.clip(np.asarray(smooth), 0, 1)[..., None]  # (S, S, 1)
    colors = heat_colors(level[..., 0])
    grey = np.asarray(image.convert("L"), dtype=np.float32)[..., None]
    return Image.fromarray(((1 - 0.7 * level) * grey + 0.7 * level * colors).astype(np.uint8))


def run_explain(options: ExplainOptions) -> int:
    """Run ``clipkit explain`` and return its exit status."""
    check_files(options.image, options.out)
    model = load_for_inference(options)
    heat = explain(options.image, options.prompts, model)[0].numpy()  # (T, g, g)
    image = enlarged(eval_pixels(options.image, model.preprocess), SIDE)
    images = [image, *(overlay(image, heatmap) for heatmap in heat)]
    write_png(sheet(images, ["", *map(printable, options.prompts)]), options.out)
    return 0


def run_complete(options: CompleteOptions) -> int:
    """Run ``clipkit complete`` and return its exit status."""
    check_files(options.image, options.out)
    model = load_for_inference(options)
    visual = model.visual
    if not isinstance(visual, PixelTransformer) or not visual.causal:
        raise ConfigError(
            f"{options.model} does not predict the next pixel: train one with model.image=pixels:SIZE and "
            "image_gpt.weight=1"
        )
    pixels = eval_pixels(options.image, model.preprocess)[None].to(visual.palette.device)  # (1, 3, S, S)
    with torch.inference_mode():
        colors = visual.quantize_colors(pixels)  # (1, P)
        side = pixels.shape[-1]
        given_pixels = round(options.keep * side) * side  # whole rows
        random = torch.Generator(colors.device).manual_seed(options.seed)
        with CountProgress("pixels", total=side**2 - given_pixels, shown=True) as bar:
            drawn = visual.complete_pixels(
                colors[:, :given_pixels].repeat(options.samples, 1),
                temperature=options.temperature,
                generator=random,
                show=bar.show,
            )
        seen = [
            colors[0],
            torch.cat([colors[0, :given_pixels], colors.new_full((side**2 - given_pixels,), -1)]),
            *drawn,
        ]
    images = [_draw_colors(sequence, visual.palette, side) for sequence in seen]
    labels = ["image", "given", *(f"sample {i}" for i in range(1, options.samples + 1))]
    write_png(sheet(images, labels), options.out)
    return 0


def _draw_colors(colors: Tensor, palette: Tensor, side: int) -> Image.Image:
    values = ((palette[colors.clamp(min=0)] + 1) * 127.5).round()
    values[colors < 0] = 255
    image = Image.fromarray(values.view(side, side, 3).to(torch.uint8).cpu().numpy())
    return image.resize((SIDE, SIDE), Image.Resampling.NEAREST)


def check_files(image: Path, out: Path) -> None:
    """Raise ConfigError or DataError unless ``image`` is a file and ``out`` may become a PNG."""
    if out.suffix.lower() != ".png" or out.is_dir():
        raise ConfigError(f"--out {out} must be a file name ending in .png")
    if not image.is_file():
        raise DataError(f"{image} is not a file" if image.exists() else f"{image}: no such file")
    if out.exists() and out.samefile(image):
        raise ConfigError(f"--out {out} is the image itself: name another file")


def write_png(image: Image.Image, out: Path) -> None:
    """Write an image atomically and print its path; DataError if it cannot be written."""
    try:
        with replacing(out) as partial:
            image.save(partial, format="PNG")
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror or error}") from error
    print(f"wrote {out}")


def enlarged(pixels: Tensor, side: int) -> Image.Image:
    """Return pixels (C, S, S) uint8 as an RGB image: the first three channels, or the first of fewer."""
    rgb = pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, -1, -1)
    return Image.fromarray(rgb.permute(1, 2, 0).numpy()).resize((side, side), Image.Resampling.BICUBIC)


def sheet(images: Sequence[Image.Image], labels: Sequence[str]) -> Image.Image:
    """Place images of ``SIDE`` pixels in a row, each with its label below."""
    step = SIDE + _MARGIN
    row = Image.new("RGB", (_MARGIN + step * len(images), SIDE + 2 * _MARGIN + _LINE), "white")
    draw = ImageDraw.Draw(row)
    font = ImageFont.load_default(14)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        left = _MARGIN + i * step
        row.paste(image, (left, _MARGIN))
        title = label
        while title and draw.textlength(title, font) > SIDE:
            label = label[:-1]
            title = f"{label}…"
        draw.text((left, SIDE + _MARGIN + 3), title, "black", font)
    return row
