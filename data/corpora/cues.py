"""The built-in dataset ``cues``: digits whose fill is a texture, to measure shape bias.

In the splits ``train`` and ``val`` digit i always has texture i, so a model may learn either cue. In the test split
shape and texture belong to different digits, as in the cue-conflict images of Geirhos et al. (2019,
https://arxiv.org/abs/1811.12231). Its labels are the shapes; the ``npy`` of a sample is its texture.
"""

import io
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data.corpora.fonts import FACES, HELD_OUT, Glyph, list_glyphs, rasterize
from data.shards.writer import DatasetWriter, Record

REVISION = "1"  # changes whenever the images do
SIDE = 64  # pixels
_TRAIN = 20_000
_VAL = 1_000
_PER_PAIR = 20  # test images of each shape with each other texture
_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

_Plane = NDArray[np.float64]


def _stripes(angle: float) -> Callable[[_Plane, _Plane], _Plane]:
    return lambda x, y: np.sin(2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)))


# Textures by digit: functions of the distances from a random point, in periods; positive values have one color.
TEXTURES: Mapping[str, Callable[[_Plane, _Plane], _Plane]] = {
    "vertical stripes": _stripes(0),
    "horizontal stripes": _stripes(np.pi / 2),
    "rising stripes": _stripes(np.pi / 4),
    "falling stripes": _stripes(-np.pi / 4),
    "checkerboard": lambda x, y: np.sin(np.pi * x) * np.sin(np.pi * y),
    "dots": lambda x, y: np.cos(2 * np.pi * x) + np.cos(2 * np.pi * y) - 0.8,
    "grid": lambda x, y: np.maximum(np.cos(2 * np.pi * x), np.cos(2 * np.pi * y)) - 0.8,
    "rings": lambda x, y: np.sin(2 * np.pi * np.hypot(x, y)),
    "zigzag": lambda x, y: np.sin(2 * np.pi * (y + np.abs(x % 1 - 0.5))),
    "bricks": lambda x, y: np.maximum(np.cos(2 * np.pi * y), np.cos(np.pi * (x + np.floor(y))) - 0.1) - 0.7,
}


def make(out: Path) -> None:
    """Write the dataset."""
    seen, unseen = (
        {digit: _crop_digits(str(digit), held_out=held_out) for digit in range(10)}
        for held_out in (False, True)
    )
    with DatasetWriter(out) as writer:
        for split, count, fonts in (("train", _TRAIN, seen), ("val", _VAL, unseen)):
            rng = np.random.default_rng([0, count])
            for i in range(count):
                digit = i % 10
                image = _draw(rng, fonts[digit], digit)
                caption = f"the digit {_NAMES[digit]}"
                writer.write(split, _record(i, image, shape=digit, texture=digit, caption=caption))
        rng = np.random.default_rng([0, _PER_PAIR])
        pairs = [(shape, texture) for shape in range(10) for texture in range(10) if shape != texture]
        for i, (shape, texture) in enumerate(pairs * _PER_PAIR):
            image = _draw(rng, unseen[shape], texture)
            caption = f"the shape of {_NAMES[shape]} with the texture of {_NAMES[texture]}"
            writer.write("test", _record(i, image, shape=shape, texture=texture, caption=caption))
        card = {
            "name": "cues",
            "revision": REVISION,
            "license": "see glyphs",
            "source": "digits drawn with the fonts that matplotlib installs",
            "how": "digits of random size, place and colors, filled with the texture of the same digit (train and, "
            "in unseen fonts, val) or of another one (test)",
            "textures": list(TEXTURES),
        }
        writer.finish(card, class_names=_NAMES, templates=("the digit {c}", "{c}"))


def _crop_digits(digit: str, *, held_out: bool) -> list[Image.Image]:
    glyphs: list[Glyph] = [
        glyph
        for face in FACES
        if (face.family in HELD_OUT) == held_out
        for glyph in list_glyphs(face)
        if glyph.character == glyph.draw == digit
    ]
    images = [Image.fromarray(rasterize(glyph)) for glyph in glyphs]
    return [image.crop(image.getbbox()) for image in images]


def _draw(rng: np.random.Generator, inks: list[Image.Image], texture: int) -> Image.Image:
    ink = inks[int(rng.integers(len(inks)))]
    height = int(rng.integers(48, 60))
    width = int(np.clip(height * ink.width / ink.height * rng.uniform(1.0, 1.3), 16, 60))
    left = rng.integers(0, SIDE - width + 1)
    top = rng.integers(0, SIDE - height + 1)
    mask = Image.new("L", (SIDE, SIDE))
    mask.paste(ink.resize((width, height), Image.Resampling.BICUBIC), (int(left), int(top)))
    period = rng.uniform(6, 9)
    y, x = (np.mgrid[:SIDE, :SIDE] - rng.uniform(0, SIDE, (2, 1, 1))) / period
    fill = list(TEXTURES.values())[texture](x, y) > 0
    dark = rng.uniform(0, 60, 3)
    bright = rng.uniform(195, 255, 3)
    first, second = (dark, bright) if rng.random() < 0.5 else (bright, dark)
    colors = np.where(fill[..., None], first, second).astype(np.uint8)
    background = Image.new("RGB", (SIDE, SIDE), tuple(rng.integers(100, 156, 3).tolist()))
    background.paste(Image.fromarray(colors), mask=mask)
    return background


def _record(index: int, image: Image.Image, *, shape: int, texture: int, caption: str) -> Record:
    file = io.BytesIO()
    image.save(file, "png")
    return Record(
        key=f"{index:08d}",
        image=file.getvalue(),
        extension="png",
        caption=caption,
        label=shape,
        meta={"name": _NAMES[shape], "texture": list(TEXTURES)[texture]},
        columns=(texture,),
    )
