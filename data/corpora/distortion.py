"""Distort batches of printed characters as handwriting and photography do.

First the strokes, as distance fields: shear, rotation, stretch, warp, pen width. Then the frame: the em box,
or a crop to the ink. Then the camera: uneven ink, blur, low resolution, few gray levels, noise, contrast,
inversion. Each distortion has its own random strength, and some images stay nearly clean.

N images, S pixels per side of the result, W pixels per side of the working canvas, K knots of a grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from data.corpora.fonts import CANVAS, EM

_WORK = 64  # W
_GLYPH = 40.0  # pixels of a glyph's longer side on the working canvas
_EM_STEP = CANVAS / _WORK * 1.1  # canvas pixels per working pixel if the em box is the frame
_LOW_SIDES = (8, 10, 12, 14, 16, 20)
_KNOTS = (3, 5, 9)

_Array: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Distortion:
    """Random numbers for N images; arrays are float32 of shape (N,) unless noted."""

    pen: NDArray[np.bool_]  # drawn along the skeleton with a pen rather than filled
    crop: NDArray[np.bool_]  # framed by the ink rather than by the em box
    width: _Array  # pen: stroke width / glyph size; filled: growth on each side / glyph size
    pressure: _Array  # variation of the width along the strokes
    rotation: _Array  # radians
    shear: _Array  # shift of the top to the right
    aspect: _Array  # log of width / height, relative to the original
    zoom: _Array  # log of the size; em box only
    margin: _Array  # empty border / side
    shift: _Array  # (N, 2) of the frame / side
    warp: _Array  # (N, 3) displacement at the coarse, middle and fine grid / glyph size
    knots: tuple[_Array, ...]  # the displacements themselves, (N, 2, K, K) for K of _KNOTS, standard normal
    unevenness: _Array  # local fading of the ink
    blur: _Array  # sigma / side
    low_side: NDArray[np.int64]  # camera resolution in pixels per side; 0: that of the image
    upscale: NDArray[np.int64]  # 0 box, 1 bilinear, 2 bicubic
    levels: NDArray[np.int64]  # gray levels; 0: all
    noise: _Array  # sigma, for a range of 1
    contrast: _Array  # ink minus paper, in (0, 1]
    brightness: _Array  # position of the range, in [0, 1]
    slope: _Array  # (N, 2) gradient of the light
    dark: NDArray[np.bool_]  # light ink on dark paper


def _apply_sometimes(
    rng: np.random.Generator, count: int, chance: float, values: NDArray[np.float64]
) -> _Array:
    return np.where(rng.random(count) < chance, values, 0).astype(np.float32)


def draw_distortions(
    rng: np.random.Generator, *, pen: NDArray[np.bool_], crop: NDArray[np.bool_]
) -> Distortion:
    """Draw distortions of training images; ``pen`` and ``crop`` are (N,) bool."""
    n = len(pen)
    f32 = np.float32
    # one image in eight is nearly clean
    strength = np.where(rng.random(n) < 0.125, 0.1, rng.uniform(0.3, 1.0, n))
    loose = strength * np.where(crop, 1.0, 0.6)  # with the em box, letter case must remain visible
    width = np.where(
        pen, np.exp(rng.uniform(np.log(0.05), np.log(0.2), n)), rng.normal(0, 0.012, n) * strength
    )
    bold = loose * np.where(pen, 1.0, 0.6)  # handwriting varies more than print
    warp = rng.uniform(0, 1, (n, 3)) * np.array([0.13, 0.07, 0.02]) * bold[:, None]
    low = np.where(rng.random(n) < 0.4 * strength, rng.choice(_LOW_SIDES, n), 0)
    low = np.where(crop | (low == 0), low, np.maximum(low, 14))  # with the em box, a character has few pixels
    harm = (
        np.where((low > 0) & (low < 12), 0.4, 1.0) * strength
    )  # at low resolution, stronger distortions make characters illegible
    unevenness = _apply_sometimes(rng, n, 0.4, rng.uniform(0, 0.6, n) * harm)
    blur = _apply_sometimes(rng, n, 0.5, rng.uniform(0, 0.06, n) * harm)
    levels = np.where(rng.random(n) < 0.25 * strength, rng.choice([2, 4, 8, 16, 17], n), 0)
    soft = (blur > 0) | (low > 0) | (unevenness > 0.4)  # soft strokes need gray levels
    levels = np.where(soft & (levels == 2), 4, levels)
    return Distortion(
        pen=pen,
        crop=crop,
        width=width.astype(f32),
        pressure=(rng.uniform(0, 0.4, n) * strength).astype(f32),
        rotation=(np.deg2rad(rng.normal(0, 10, n).clip(-25, 25)) * loose).astype(f32),
        shear=(rng.normal(0.04, 0.22, n).clip(-0.5, 0.6) * loose).astype(f32),
        aspect=(rng.normal(0, 0.3, n).clip(-0.7, 0.5) * bold).astype(f32),
        zoom=(rng.normal(0, 0.1, n).clip(-0.25, 0.2) * strength).astype(f32),
        margin=np.where(crop, np.where(rng.random(n) < 0.5, 0.0, rng.uniform(0, 0.2, n)), 0.04).astype(f32),
        shift=(rng.normal(0, 0.035, (n, 2)).clip(-0.1, 0.1) * strength[:, None]).astype(f32),
        warp=warp.astype(f32),
        knots=tuple(rng.standard_normal((n, 2, k, k), dtype=f32) for k in _KNOTS),
        unevenness=unevenness,
        blur=blur,
        low_side=low.astype(np.int64),
        upscale=rng.integers(0, 3, n),
        levels=levels,
        noise=_apply_sometimes(rng, n, 0.5, rng.uniform(0, 0.12, n) * harm),
        contrast=(1 - _apply_sometimes(rng, n, 0.5, rng.uniform(0, 0.6, n) * harm)).astype(f32),
        brightness=rng.uniform(0, 1, n).astype(f32),
        slope=(rng.normal(0, 0.12, (n, 2)) * (strength * (rng.random(n) < 0.3))[:, None]).astype(f32),
        dark=rng.random(n) < 0.5,
    )


def soften_distortion(distortion: Distortion) -> Distortion:
    """Weaken distortions for the test split, which measures unseen fonts."""
    n = len(distortion.pen)
    return replace(
        distortion,
        width=distortion.width * 0.3,
        pressure=distortion.pressure * 0.2,
        rotation=distortion.rotation * 0.4,
        shear=distortion.shear * 0.2,
        aspect=distortion.aspect * 0.3,
        zoom=distortion.zoom * 0.5,
        shift=distortion.shift * 0.5,
        warp=distortion.warp * 0.2,
        unevenness=distortion.unevenness * 0.3,
        blur=distortion.blur * 0.4,
        low_side=np.zeros(n, np.int64),
        levels=np.zeros(n, np.int64),
        noise=distortion.noise * 0.5,
        slope=distortion.slope * 0.5,
    )


def visible_words(distortion: Distortion, index: int) -> list[str]:
    """Return words for the visible distortions of image ``index``."""
    d = distortion
    words = []
    if d.pen[index]:
        words.append("handwritten")
        if d.width[index] > 0.15 or d.width[index] < 0.065:
            words.append("thick" if d.width[index] > 0.1 else "thin")
    if abs(d.rotation[index]) > 0.2:
        words.append("tilted")
    if 0 < d.low_side[index] <= 12:
        words.append("pixelated" if d.upscale[index] == 0 else "low-resolution")
    elif d.blur[index] > 0.04:
        words.append("blurred")
    if d.noise[index] > 0.08:
        words.append("noisy")
    if d.contrast[index] < 0.55:
        words.append("faint")
    words.append("white on black" if d.dark[index] else "black on white")
    return words


def draw_images(
    rng: np.random.Generator,
    fields: _Array,
    reach: _Array,
    boxes: _Array,
    distortion: Distortion,
    *,
    size: int,
) -> NDArray[np.uint8]:
    """Draw N distorted glyphs.

    Args:
        rng: random generator of noise and unevenness.
        fields: (N, CANVAS, CANVAS) float32 distances in canvas pixels, to the outline or (pen) the skeleton.
        reach: (N,) float32, the largest distance from the outline within the ink.
        boxes: (N, 4) float32, left, top, right and bottom of the ink on the canvas.
        distortion: strengths.
        size: S.

    Returns:
        (N, S, S) uint8, grayscale.
    """
    cover = _strokes(rng, fields, reach, boxes, distortion, size=size)
    images = _photograph(rng, cover, distortion)
    return (images * 255).round().clamp(0, 255).to(torch.uint8).numpy()


def _column(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))[:, None, None]


@cache
def _spline(knots: int, size: int) -> Tensor:
    """Weights (size, knots) that interpolate values at knots smoothly along a line."""
    eye = torch.eye(knots)[None, :, :, None]
    return F.interpolate(eye, size=(size, 1), mode="bicubic", align_corners=True)[0, :, :, 0].T.contiguous()


def _spread(knots: Tensor, size: int) -> Tensor:
    """Interpolate knots of a coarse grid: (…, K, K) → (…, size, size)."""
    weights = _spline(knots.shape[-1], size)
    return weights @ knots @ weights.T


def _strokes(
    rng: np.random.Generator,
    fields: _Array,
    reach: _Array,
    boxes: _Array,
    d: Distortion,
    *,
    size: int,
) -> Tensor:
    """The coverage of each pixel by the warped strokes: (N, S, S) in [0, 1]."""
    n = len(fields)
    longer = np.maximum(boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1])
    # canvas pixels per working pixel; cropped glyphs have equal sizes on the working canvas
    step = np.where(d.crop, longer / _GLYPH, _EM_STEP).astype(np.float32)
    warped = _warp(fields, boxes, d, step=step, glyph=longer / step)
    # pen: half the width; filled: grow or shrink, but keep hairlines
    pen = np.maximum(d.width * longer / 2, 0.5 * step)
    half = np.where(d.pen, pen, np.maximum(d.width * longer, -0.55 * reach))
    knots = torch.from_numpy(rng.standard_normal((n, 4, 4), dtype=np.float32)).clamp(-1.2, 1.2)
    edge = warped - _spread(
        _column(half) * (1 + _column(d.pressure) * knots), _WORK
    )  # (N, W, W), ink below 0
    center, side = _frame(edge, d)
    line = (torch.arange(size, dtype=torch.float32) + 0.5) / size - 0.5
    ends = (center + 0.5)[:, :, None] + line * side[:, None, None]  # (N, 2, S): columns, then rows
    ends = ends * (2 / _WORK) - 1
    grid = torch.empty(n, size, size, 2)
    grid[..., 0] = ends[:, 0, None, :]
    grid[..., 1] = ends[:, 1, :, None]
    framed = F.grid_sample(edge[:, None], grid, padding_mode="border", align_corners=False)[:, 0]
    return (0.5 - framed * (size / side[:, None, None] / _column(step))).clamp(0, 1)


def _warp(fields: _Array, boxes: _Array, d: Distortion, *, step: _Array, glyph: _Array) -> Tensor:
    n = len(fields)
    finest = _KNOTS[-1]
    bend = torch.zeros(n, 2, finest, finest)  # displacements in working pixels
    for scale, knots in enumerate(d.knots):
        amount = torch.from_numpy(d.warp[:, scale] * glyph)[:, None, None, None]
        bend += _spread(torch.from_numpy(knots).clamp(-2, 2) * amount, finest)
    # working pixel → canvas pixel: rotate, then shear, then stretch
    cosine = np.cos(d.rotation)
    sine = np.sin(d.rotation)
    zoom = step * np.where(d.crop, 1, np.exp(-d.zoom))
    wide = zoom * np.exp(-d.aspect / 2)
    high = zoom * np.exp(d.aspect / 2)
    lean = np.array([[cosine - d.shear * sine, sine + d.shear * cosine], [-sine, cosine]])
    affine = torch.from_numpy((lean * np.array([wide, high])[:, None]).transpose(2, 0, 1).astype(np.float32))
    middle = np.stack([boxes[:, 0] + boxes[:, 2], boxes[:, 1] + boxes[:, 3]], axis=1) / 2
    middle = np.where(d.crop[:, None], middle, CANVAS / 2).astype(np.float32)
    # warp and affine map in one product: a constant and a slope follow the spline's weights
    line = torch.arange(_WORK, dtype=torch.float32) + 0.5 - _WORK / 2
    weights = torch.cat([_spline(finest, _WORK), torch.ones(_WORK, 1), line[:, None]], dim=1)
    terms = torch.zeros(n, 2, finest + 2, finest + 2)
    terms[:, :, :finest, :finest] = torch.einsum("nij,njyx->niyx", affine, bend)
    terms[:, :, finest, finest] = torch.from_numpy(middle)
    terms[:, :, finest, finest + 1] = affine[:, :, 0]
    terms[:, :, finest + 1, finest] = affine[:, :, 1]
    coordinates = weights @ (terms * (2 / CANVAS)) @ weights.T - 1  # (N, 2, W, W)
    source = torch.from_numpy(fields)[:, None]
    grid = coordinates.permute(0, 2, 3, 1).contiguous()
    return F.grid_sample(source, grid, padding_mode="border", align_corners=False)[:, 0]


def _frame(edge: Tensor, d: Distortion) -> tuple[Tensor, Tensor]:
    """Center (N, 2) and side (N,) of the square in the image, in working pixels."""
    where = torch.arange(_WORK, dtype=torch.float32)

    def ends(line: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.where(line, where, _WORK).amin(1)
        last = torch.where(line, where, -1).amax(1)
        return torch.where(last < 0, 0, first), torch.where(
            last < 0, _WORK - 1, last
        )  # without ink, everything

    left, right = ends(edge.amin(1) < 0)
    top, bottom = ends(edge.amin(2) < 0)
    crop = torch.from_numpy(d.crop)
    tight = torch.maximum(right - left, bottom - top) + 1.5
    margin = torch.from_numpy(d.margin)
    side = torch.where(crop, tight, EM * 1.25 / _EM_STEP) * (1 + 2 * margin)
    middle = torch.stack([left + right, top + bottom], dim=1) / 2
    middle = torch.where(crop[:, None], middle, (_WORK - 1) / 2)
    room = torch.where(crop, margin, 1.0)  # a tight crop has no room to move
    return middle + torch.from_numpy(d.shift) * (side * room)[:, None], side


def _photograph(rng: np.random.Generator, cover: Tensor, d: Distortion) -> Tensor:
    """Convert ink to brightness: (N, S, S) in [0, 1]."""
    n, size = cover.shape[:2]
    knots = torch.from_numpy(rng.uniform(0, 1, (n, 5, 5)).astype(np.float32))
    ink = cover * (1 - _column(d.unevenness) * _spread(knots, size).clamp(0, 1))
    ink = _blur(ink, d.blur * size)
    ink = _reduce(ink, d)
    line = torch.linspace(-1, 1, size)
    slope = torch.from_numpy(d.slope)
    light = slope[:, 0, None, None] * line + slope[:, 1, None, None] * line[:, None]
    contrast = _column(d.contrast)
    low = (1 - contrast) * _column(d.brightness)
    image = torch.where(torch.from_numpy(d.dark)[:, None, None], ink, 1 - ink) + light * 0.5
    noise = torch.from_numpy(rng.standard_normal((n, size, size), dtype=np.float32))
    image = (image + noise * _column(d.noise)).clamp(0, 1)
    levels = _column((d.levels - 1).clip(1))
    few = torch.from_numpy(d.levels > 0)[:, None, None]
    image = torch.where(few, (image * levels).round() / levels, image)
    return low + contrast * image  # last, because few levels could make a faint image blank


def _blur(images: Tensor, sigmas: NDArray[np.float32]) -> Tensor:
    """Blur each image with its own sigma in pixels; sigmas up to 0.25 have no effect."""
    rows = np.flatnonzero(sigmas > 0.25)
    if not len(rows):
        return images
    reach = 5
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float32)
    kernels = torch.exp(-0.5 * (offsets / torch.from_numpy(sigmas[rows])[:, None]) ** 2)
    kernels = kernels / kernels.sum(1, keepdim=True)
    some = F.pad(images[rows][None], (reach,) * 4, mode="replicate")
    some = F.conv2d(some, kernels[:, None, :, None], groups=len(rows))
    some = F.conv2d(some, kernels[:, None, None, :], groups=len(rows))
    blurred = images.clone()
    blurred[rows] = some[0]
    return blurred


def _reduce(images: Tensor, d: Distortion) -> Tensor:
    size = images.shape[-1]
    result = images.clone()
    modes: Sequence[str] = ("nearest", "bilinear", "bicubic")
    for side in _LOW_SIDES:
        for kind, mode in enumerate(modes):
            rows = np.flatnonzero((d.low_side == side) & (d.upscale == kind))
            if not len(rows) or side >= size:
                continue
            small = F.interpolate(images[rows][:, None], size=(side, side), mode="area")
            corners = None if mode == "nearest" else False
            large = F.interpolate(small, size=(size, size), mode=mode, align_corners=corners)
            result[rows] = large[:, 0].clamp(0, 1)
    return result
