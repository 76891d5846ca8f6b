"""``clipkit complete``: complete the lower part of an image with Image GPT, and write samples as a PNG."""

import torch
from PIL import Image
from torch import Tensor

from clipkit.errors import ConfigError
from clipkit.files.terminal import CountProgress
from clipkit.inference.explain import SIDE, check_files, sheet, write_png
from clipkit.inference.stream import load_for_inference
from clipkit.model.pixels import PixelTransformer
from clipkit.model.preprocess import eval_pixels
from clipkit.options import CompleteOptions


def run_complete(options: CompleteOptions) -> int:
    """Run the command and return its exit status."""
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
    images = [_image(sequence, visual.palette, side) for sequence in seen]
    labels = ["image", "given", *(f"sample {i}" for i in range(1, options.samples + 1))]
    write_png(sheet(images, labels), options.out)
    return 0


def _image(colors: Tensor, palette: Tensor, side: int) -> Image.Image:
    values = ((palette[colors.clamp(min=0)] + 1) * 127.5).round()
    values[colors < 0] = 255
    image = Image.fromarray(values.view(side, side, 3).to(torch.uint8).cpu().numpy())
    return image.resize((SIDE, SIDE), Image.Resampling.NEAREST)
