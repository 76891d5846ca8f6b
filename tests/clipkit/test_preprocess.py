"""Pictures of every kind become what open_clip's evaluation makes of them, and broken ones one clear error."""

import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from clipkit.errors import CheckpointError, DataError
from clipkit.preprocess import (
    MAX_PIXELS,
    OPENAI_MEAN,
    OPENAI_STD,
    Preprocess,
    batch_of,
    decode_image,
    eval_transform,
    load_image,
)

Pixels = npt.NDArray[np.uint8]


def scene(height: int, width: int, channels: int = 3) -> Pixels:
    """Smooth waves with some noise, as in a photograph."""
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


PHOTO = Image.fromarray(scene(240, 321))
CLEAR = Image.fromarray(scene(200, 150, 4), "RGBA")
PICTURES: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: encoded(PHOTO, "JPEG"),
    "jpeg 4:4:4": lambda: encoded(PHOTO, "JPEG", subsampling=0, quality=95),
    "progressive jpeg": lambda: encoded(PHOTO, "JPEG", progressive=True),
    "grey jpeg": lambda: encoded(PHOTO.convert("L"), "JPEG"),
    "cmyk jpeg": lambda: encoded(PHOTO.convert("CMYK"), "JPEG"),
    "jpeg turned by exif": turned_by_exif,
    "png": lambda: encoded(PHOTO, "PNG"),
    "grey png": lambda: encoded(PHOTO.convert("L"), "PNG"),
    "black and white png": lambda: encoded(PHOTO.convert("1"), "PNG"),
    "palette png": lambda: encoded(PHOTO.quantize(64), "PNG"),
    "palette png with one clear colour": lambda: encoded(PHOTO.quantize(64), "PNG", transparency=3),
    "palette png with alpha": lambda: encoded(PHOTO.quantize(64), "PNG", transparency=bytes(range(64))),
    "png with alpha": lambda: encoded(CLEAR, "PNG"),
    "grey png with alpha": lambda: encoded(PHOTO.convert("LA"), "PNG"),
    "webp": lambda: encoded(PHOTO, "WEBP"),
    "webp with alpha": lambda: encoded(CLEAR, "WEBP", lossless=True),
    "gif": lambda: encoded(PHOTO, "GIF"),
    "moving gif": lambda: encoded(PHOTO, "GIF", save_all=True, append_images=[PHOTO.rotate(180)]),
    "bmp": lambda: encoded(PHOTO, "BMP"),
    "tiff": lambda: encoded(PHOTO, "TIFF", compression="tiff_lzw"),
    "cmyk tiff": lambda: encoded(PHOTO.convert("CMYK"), "TIFF"),
    "ppm": lambda: encoded(PHOTO, "PPM"),
}
RESIZED_IN_RGB = {  # open_clip resizes these before they are RGB, by nearest neighbour or weighed by alpha
    "black and white png", "palette png", "palette png with one clear colour", "palette png with alpha",
    "png with alpha", "webp with alpha", "gif", "moving gif",
}  # fmt: skip
SHAPES = [
    (1, 1), (2, 2), (1, 50), (50, 1), (1, 400), (400, 1), (3, 700), (700, 3), (37, 53), (223, 224), (225, 224),
    (224, 224), (224, 500), (600, 400), (32, 33), (31, 32),
]  # fmt: skip


def open_clips_pixels(image: Image.Image, size: int) -> torch.Tensor:
    """(3, S, S) in 0–255 by open_clip's evaluation transform, its normalization undone."""
    import open_clip

    normalized = open_clip.image_transform(size, is_train=False)(image)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (OPENAI_MEAN, OPENAI_STD))
    pixels: torch.Tensor = (normalized * std + mean) * 255
    return pixels


def difference(data: bytes, size: int, *, rgb_first: bool) -> float:
    ours = eval_transform(decode_image(data), Preprocess(image_size=size))
    assert ours.shape == (3, size, size)
    assert ours.dtype == torch.uint8
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = Image.open(BytesIO(data))
        theirs = open_clips_pixels(image.convert("RGB") if rgb_first else image, size)
    return float((ours.float() - theirs).abs().mean())


@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("name", PICTURES)
def test_every_kind_of_file_gives_open_clips_pixels(name: str, size: int) -> None:
    assert difference(PICTURES[name](), size, rgb_first=name in RESIZED_IN_RGB) <= 0.05  # of 255


@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_gives_open_clips_pixels(shape: tuple[int, int], size: int) -> None:
    assert difference(encoded(Image.fromarray(scene(*shape)), "PNG"), size, rgb_first=False) <= 0.05


@settings(deadline=None, max_examples=50)
@given(height=st.integers(1, 90), width=st.integers(1, 90), size=st.integers(8, 48))
def test_any_size_gives_open_clips_pixels(height: int, width: int, size: int) -> None:
    assert difference(encoded(Image.fromarray(scene(height, width)), "PNG"), size, rgb_first=False) <= 0.5


@pytest.mark.parametrize(("height", "width"), [(1, 65_000), (65_000, 1), (2, 40_001), (7, 30_011)])
def test_a_very_long_picture_does_not_fill_memory(height: int, width: int) -> None:
    """Resized whole, the longest would have ten gigabytes."""
    pixels = scene(height, width)
    ours = eval_transform(pixels, Preprocess(image_size=224))
    # open_clip's on the middle, cut by whole squares as far as both ends are alike
    short = min(height, width)
    end = (max(height, width) - 40 * short) // 2 // short * short
    middle = pixels[end:-end] if height > width else pixels[:, end:-end]
    theirs = open_clips_pixels(Image.fromarray(middle), 224)
    assert (ours.float() - theirs).abs().mean() <= 0.5


def test_sixteen_bits_of_grey_are_scaled_not_cut_off() -> None:
    grey = scene(40, 50, 1)[..., 0]
    for kind in ("PNG", "TIFF"):
        data = encoded(Image.fromarray(grey.astype(np.uint16) * 257), kind)
        assert np.array_equal(decode_image(data), np.repeat(grey[..., None], 3, axis=2))


def test_a_picture_is_the_same_in_every_form(tmp_path: Path) -> None:
    pixels = scene(30, 40)
    image = Image.fromarray(pixels)
    data = encoded(image, "PNG")
    path = tmp_path / "picture of a cat.png"
    path.write_bytes(data)
    read_only = pixels.copy()
    read_only.flags.writeable = False
    forms: list[Any] = [
        path, str(path), data, image, Image.open(path), pixels, read_only, np.asfortranarray(pixels),
        np.flip(np.flip(pixels, 1).copy(), 1), pixels[..., ::-1].copy()[..., ::-1],
        torch.from_numpy(pixels), torch.from_numpy(pixels).permute(2, 0, 1),
    ]  # fmt: skip
    want = eval_transform(pixels, Preprocess(image_size=16))
    for form in forms:
        assert np.array_equal(load_image(form), pixels)
        assert torch.equal(eval_transform(load_image(form), Preprocess(image_size=16)), want)
    assert torch.equal(batch_of(forms, Preprocess(image_size=16)), torch.stack([want] * len(forms)))
    grey = pixels[..., 0]
    assert np.array_equal(load_image(grey), np.repeat(grey[..., None], 3, axis=2))
    assert np.array_equal(load_image(torch.from_numpy(grey)), load_image(grey))
    assert np.array_equal(load_image(Image.fromarray(grey)), load_image(grey))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((4, 4, 3)), "uint8 (H, W, 3) or (H, W), this one is float64 (4, 4, 3)"),
        (np.zeros((4, 4, 4), np.uint8), "this one is uint8 (4, 4, 4)"),
        (np.zeros((0, 4, 3), np.uint8), "this one is uint8 (0, 4, 3)"),
        (np.zeros((3, 4, 4), np.uint8), "this one is uint8 (3, 4, 4)"),
        (torch.zeros(3, 4, 4), "this one is float32 (4, 4, 3)"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "this one is uint8 (2, 3, 4, 4)"),
        (5, "not int"),
        (None, "not NoneType"),
        ("missing.png", "picture missing.png: No such file or directory"),
        ("/", "picture /: Is a directory"),
        ("a\0b", "embedded null byte"),
        (b"", "not a picture in a known format"),
        (b"not a picture", "not a picture in a known format"),
        (b"\xff\xd8\xff", "not a picture in a known format"),
    ],
)
def test_what_is_no_picture_is_one_clear_error(source: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load_image(source)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_picture_object_is_a_data_error() -> None:
    data = encoded(PHOTO, "PNG")
    with pytest.raises(DataError, match="does not decode: image file is truncated"):
        load_image(Image.open(BytesIO(data[: len(data) // 2])))
    with_alpha = Image.open(BytesIO(PICTURES["palette png with alpha"]()))
    assert load_image(with_alpha).shape == (240, 321, 3)  # of which Pillow would warn


@pytest.mark.parametrize("name", sorted(PICTURES.keys() - {"moving gif"}))  # whose first frame may be whole
def test_a_file_that_is_cut_short_is_a_data_error(name: str) -> None:
    data = PICTURES[name]()
    for share in (0.0, 0.001, 0.01, 0.1, 0.5, 0.9):
        with pytest.raises(DataError):
            decode_image(data[: int(len(data) * share)])


@pytest.mark.parametrize(
    "kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "TGA", "ICO", "JPEG2000"]
)
def test_a_damaged_file_is_a_picture_or_a_data_error(kind: str) -> None:
    draw = random.Random(0)
    whole = encoded(Image.fromarray(scene(32, 32)), kind)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 8])):
            data[draw.randrange(min(len(data), draw.choice([32, 128, 10_000])))] = draw.choice([0, 255, 7])
        try:
            pixels = decode_image(bytes(data))
        except DataError:
            continue
        assert pixels.dtype == np.uint8
        assert pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.size


@given(data=st.binary(max_size=200) | st.binary(max_size=100).map(lambda rest: b"\xff\xd8\xff" + rest))
def test_random_bytes_are_a_data_error(data: bytes) -> None:
    with pytest.raises(DataError):
        decode_image(data)


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    side = 15_000
    assert side * side > MAX_PIXELS
    bomb = encoded(Image.new("1", (side, side)), "PNG")
    assert len(bomb) < 200_000
    with pytest.raises(DataError, match=f"more than {MAX_PIXELS} pixels"):
        decode_image(bomb)
    jpeg = bytearray(encoded(PHOTO, "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = (60_000).to_bytes(2, "big") * 2
    with pytest.raises(DataError, match=f"more than {MAX_PIXELS} pixels"):
        decode_image(bytes(jpeg))


def test_postscript_is_never_run() -> None:
    with pytest.raises(DataError, match="not a picture in a known format"):
        decode_image(encoded(PHOTO, "EPS"))


def test_threads_leave_the_filters_of_warnings_as_they_were() -> None:
    data = PICTURES["palette png with alpha"]()
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        shapes = list(pool.map(lambda _: decode_image(data).shape, range(100)))
    assert set(shapes) == {(240, 321, 3)}
    assert warnings.filters == before


def test_preprocessing_is_stored_as_plain_values() -> None:
    own = Preprocess(image_size=64, mean=(0.5, 0.5, 0.5), std=(0.25, 0.5, 1.0))
    values = own.to_dict()
    assert Preprocess.from_dict(values) == own
    assert Preprocess.from_dict({**values, "mean": [0.5, 0.5, 0.5]}) == own
    for wrong in (
        {}, {"image_size": "64"}, {"image_size": 0}, {"image_size": True}, {"mean": [0.5]}, {"mean": None},
        {"std": ["a"] * 3}, {"interpolation": "bilinear"}, {"resize_mode": "longest"}, {"more": 1},
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="not one this version knows"):
            Preprocess.from_dict({**values, **wrong} if wrong else {})
