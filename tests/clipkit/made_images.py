"""Synthetic images in every supported format, for the tests of decoding and preprocessing."""

from collections.abc import Callable
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

Pixels = npt.NDArray[np.uint8]


def scene(height: int, width: int, channels: int = 3) -> Pixels:
    """Draw smooth waves with noise, similar to a photograph."""
    y, x = np.mgrid[:height, :width]
    waves = [127 + 110 * np.sin(6 * (i + 1) * x / width + 5 * y / height) for i in range(channels)]
    noise = np.random.default_rng(0).normal(0, 10, (height, width, channels))
    return (np.stack(waves, axis=-1) + noise).clip(0, 255).astype(np.uint8)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned_by_exif() -> bytes:
    exif = Image.Exif()
    exif[0x112] = 6
    return encoded(PHOTO, "JPEG", exif=exif)


def ycck_jpeg() -> bytes:
    data = simplejpeg.encode_jpeg(scene(120, 171, 4), colorspace="CMYK", colorsubsampling="420")
    assert simplejpeg.decode_jpeg_header(data)[2] == "YCCK"
    return bytes(data)


PHOTO = Image.fromarray(scene(240, 321))
CLEAR = Image.fromarray(scene(200, 150, 4), "RGBA")
GREY_16 = Image.fromarray(scene(90, 120, 1)[..., 0].astype(np.uint16) * 5)
MOVING = {"save_all": True, "append_images": [PHOTO.rotate(180)]}
IMAGES: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: encoded(PHOTO, "JPEG"),
    "jpeg 4:2:2": lambda: encoded(PHOTO, "JPEG", subsampling=1),
    "jpeg 4:4:4": lambda: encoded(PHOTO, "JPEG", subsampling=0, quality=95),
    "progressive jpeg": lambda: encoded(PHOTO, "JPEG", progressive=True),
    "grey jpeg": lambda: encoded(PHOTO.convert("L"), "JPEG"),
    "cmyk jpeg": lambda: encoded(PHOTO.convert("CMYK"), "JPEG"),
    "ycck jpeg": ycck_jpeg,
    "jpeg turned by exif": turned_by_exif,
    "png": lambda: encoded(PHOTO, "PNG"),
    "png with one clear colour": lambda: encoded(PHOTO, "PNG", transparency=(1, 2, 3)),
    "grey png": lambda: encoded(PHOTO.convert("L"), "PNG"),
    "16-bit grey png": lambda: encoded(GREY_16, "PNG"),
    "black and white png": lambda: encoded(PHOTO.convert("1"), "PNG"),
    "palette png": lambda: encoded(PHOTO.quantize(64), "PNG"),
    "palette png with one clear colour": lambda: encoded(PHOTO.quantize(64), "PNG", transparency=3),
    "palette png with alpha": lambda: encoded(PHOTO.quantize(64), "PNG", transparency=bytes(range(64))),
    "png with alpha": lambda: encoded(CLEAR, "PNG"),
    "grey png with alpha": lambda: encoded(CLEAR.convert("LA"), "PNG"),
    "webp": lambda: encoded(PHOTO, "WEBP"),
    "lossless webp": lambda: encoded(PHOTO, "WEBP", lossless=True),
    "webp with alpha": lambda: encoded(CLEAR, "WEBP"),
    "moving webp": lambda: encoded(PHOTO, "WEBP", **MOVING),
    "gif": lambda: encoded(PHOTO, "GIF"),
    "grey gif": lambda: encoded(PHOTO.convert("L"), "GIF"),
    "moving gif": lambda: encoded(PHOTO, "GIF", **MOVING),
    "bmp": lambda: encoded(PHOTO, "BMP"),
    "palette bmp": lambda: encoded(PHOTO.quantize(16), "BMP"),
    "tiff": lambda: encoded(PHOTO, "TIFF", compression="tiff_lzw"),
    "cmyk tiff": lambda: encoded(PHOTO.convert("CMYK"), "TIFF"),
    "lab tiff": lambda: encoded(Image.merge("LAB", PHOTO.split()), "TIFF"),
    "16-bit grey tiff": lambda: encoded(GREY_16, "TIFF"),
    "32-bit grey tiff": lambda: encoded(Image.fromarray(scene(60, 80, 1)[..., 0] * np.int32(900)), "TIFF"),
    "float tiff": lambda: encoded(Image.fromarray(scene(60, 80, 1)[..., 0] * np.float32(1.2)), "TIFF"),
    "ppm": lambda: encoded(PHOTO, "PPM"),
}

DEEP = {"16-bit grey png", "16-bit grey tiff", "32-bit grey tiff", "float tiff"}


@cache
def image_file(name: str) -> bytes:
    return IMAGES[name]()
