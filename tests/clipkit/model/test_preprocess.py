"""Tests of preprocessing: pixels equal open_clip's evaluation transform, invalid images raise errors."""

import json
import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

from clipkit.errors import CheckpointError, ConfigError, DataError
from clipkit.model.preprocess import Preprocess, eval_pixels, preprocess_images
from clipkit.samples.decode import decode_image
from clipkit.samples.formats import MAX_PIXELS
from tests.clipkit.made_images import DEEP, IMAGES, PHOTO, Pixels, encoded, image_file, scene

SHAPES = [
    (1, 1), (2, 2), (1, 50), (50, 1), (1, 300), (300, 1), (3, 700), (700, 3), (37, 53), (223, 224), (225, 224),
    (224, 224), (224, 500), (600, 240), (32, 33), (31, 32), (90, 12_000),
]  # fmt: skip
MODES = (
    "1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "LA", "PA", "RGBX", "RGBa",
)  # fmt: skip


def in_mode(pixels: Pixels, mode: str) -> Image.Image:
    """Convert (H, W, 4) values to an image of any Pillow mode."""
    rgb = Image.fromarray(np.ascontiguousarray(pixels[..., :3]))
    if mode == "LAB":
        return Image.merge("LAB", rgb.split())
    if mode == "P":
        return rgb.convert("P", palette=Image.Palette.ADAPTIVE, colors=1 + int(pixels[0, 0, 3]) // 2)
    if mode == "PA":
        return rgb.convert("P").convert("PA")
    if mode in ("LA", "RGBA", "RGBa"):
        clear = Image.fromarray(pixels, "RGBA")
        return clear.convert("LA") if mode == "LA" else clear.convert(mode) if mode == "RGBa" else clear
    return rgb.convert(mode)


def open_clips_pixels(image: Image.Image, preprocess: Preprocess) -> torch.Tensor:
    """(3, S, S) uint8 of open_clip's evaluation transform, with normalization undone."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    stored = preprocess.to_dict()
    cfg = PreprocessCfg(size=stored.pop("image_size"), **stored)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of transparent palettes
        normalized = image_transform_v2(cfg, is_train=False)(image)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preprocess.mean, preprocess.std))
    pixels: torch.Tensor = (normalized * std + mean) * 255
    assert torch.allclose(pixels, pixels.round(), atol=1e-3)
    return pixels.round().to(torch.uint8)


def assert_same(source: bytes | Image.Image, preprocess: Preprocess) -> None:
    ours = eval_pixels(source, preprocess)
    assert ours.shape == (3, preprocess.image_size, preprocess.image_size)
    assert ours.is_contiguous()
    image = Image.open(BytesIO(source)) if isinstance(source, bytes) else source
    assert torch.equal(ours, open_clips_pixels(image, preprocess))


@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("name", sorted(IMAGES.keys() - DEEP))
def test_file_formats_equal_open_clip(name: str, size: int) -> None:
    assert_same(image_file(name), Preprocess(image_size=size))


@pytest.mark.parametrize("fill_color", [0, 127])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("resize_mode", ["longest", "squash"])
def test_resize_modes_equal_open_clip(resize_mode: str, interpolation: str, fill_color: int) -> None:
    preprocess = Preprocess(
        image_size=64, resize_mode=resize_mode, interpolation=interpolation, fill_color=fill_color
    )
    for name in IMAGES.keys() - DEEP:
        assert_same(image_file(name), preprocess)


@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_image_shapes_equal_open_clip(shape: tuple[int, int], size: int) -> None:
    image = Image.fromarray(scene(*shape))
    assert_same(image, Preprocess(image_size=size))
    assert_same(image.convert("P"), Preprocess(image_size=size))  # resized with nearest neighbor


@settings(deadline=None, max_examples=200)
@given(
    shape=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 99),
    preprocess=st.builds(
        Preprocess,
        image_size=st.integers(1, 48),
        interpolation=st.sampled_from(["bicubic", "bilinear"]),
        resize_mode=st.sampled_from(["shortest", "longest", "squash"]),
        fill_color=st.integers(0, 255),
    ),
)
def test_random_sizes_and_modes_equal_open_clip(
    shape: tuple[int, int], mode: str, seed: int, preprocess: Preprocess
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (*shape, 4), dtype=np.uint8)
    image = in_mode(pixels, mode)
    if preprocess.resize_mode == "longest" and min(shape) * preprocess.image_size * 2 <= max(shape):
        assert eval_pixels(image, preprocess).shape[0] == 3  # open_clip would resize it to a side of 0
    else:
        assert_same(image, preprocess)


@pytest.mark.parametrize("mode", ["P", "RGB", "RGBA"])
def test_long_images_resized_in_part_equal_whole_resize(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    for shape in ((1, 400), (300, 1), (3, 170), (60, 900), (900, 60), (240, 241)):
        image = in_mode(rng.integers(0, 256, (*shape, 4), dtype=np.uint8), mode)
        whole = eval_pixels(image, Preprocess(image_size=96))
        with monkeypatch.context() as patch:
            patch.setattr("clipkit.model.preprocess._MAX_RESIZED", 0)
            part = eval_pixels(image, Preprocess(image_size=96))
        differences = (whole.int() - part.int()).abs()
        if mode == "P":  # a few nearest neighbors may differ
            assert (differences > 0).float().mean() <= 0.05
        else:
            assert differences.float().mean() <= 0.01


@pytest.mark.parametrize(("height", "width"), [(1, 65_000), (65_000, 1), (2, 40_001), (7, 30_011)])
def test_very_long_image_does_not_fill_memory(height: int, width: int) -> None:
    """Resized whole, the longest would need ten gigabytes."""
    pixels = scene(height, width)
    ours = eval_pixels(pixels, Preprocess(image_size=224))
    # reference: open_clip on the middle, after cutting whole squares from both ends
    short = min(height, width)
    end = (max(height, width) - 40 * short) // 2 // short * short
    middle = pixels[end:-end] if height > width else pixels[:, end:-end]
    theirs = open_clips_pixels(Image.fromarray(middle), Preprocess(image_size=224))
    assert (ours.int() - theirs.int()).abs().float().mean() <= 0.5


def test_all_image_types_give_equal_pixels(tmp_path: Path) -> None:
    pixels = scene(30, 40)
    image = Image.fromarray(pixels)
    data = encoded(image, "PNG")
    path = tmp_path / "photo of a cat.png"
    path.write_bytes(data)
    read_only = pixels.copy()
    read_only.flags.writeable = False
    forms: list[Any] = [
        path, str(path), data, image, Image.open(path), pixels, read_only, np.asfortranarray(pixels),
        np.flip(np.flip(pixels, 1).copy(), 1), pixels[..., ::-1].copy()[..., ::-1],
        torch.from_numpy(pixels), torch.from_numpy(pixels).permute(2, 0, 1),
    ]  # fmt: skip
    want = eval_pixels(data, Preprocess(image_size=16))
    for form in forms:
        assert torch.equal(eval_pixels(form, Preprocess(image_size=16)), want)
    assert torch.equal(preprocess_images(forms, Preprocess(image_size=16)), torch.stack([want] * len(forms)))
    grey = pixels[..., 0]
    in_colour = eval_pixels(np.repeat(grey[..., None], 3, axis=2), Preprocess(image_size=16))
    for form in (grey, torch.from_numpy(grey), Image.fromarray(grey)):
        assert torch.equal(eval_pixels(form, Preprocess(image_size=16)), in_colour)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((4, 4, 3)), "64-bit float image of 3 channels with values from 0 to 0"),
        (np.zeros((4, 4, 3), bool), "(H, W, 3) or (H, W) of integers or floats; this one is bool (4, 4, 3)"),
        (np.zeros((4, 4, 4), np.uint8), "this one is uint8 (4, 4, 4)"),
        (np.zeros((0, 4, 3), np.uint8), "this one is uint8 (0, 4, 3)"),
        (np.zeros((3, 4, 4), np.uint8), "this one is uint8 (3, 4, 4)"),
        (torch.zeros(4, 4, 4), "this one is torch.float32 (4, 4, 4)"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "this one is torch.uint8 (2, 3, 4, 4)"),
        (5, "not int"),
        (None, "not NoneType"),
        ("missing.png", "image missing.png: No such file or directory"),
        ("/", "image /: not a file"),
        ("/dev/zero", "image /dev/zero: not a file"),
        ("a\0b", "embedded null byte"),
        (b"", "not an image in a known format"),
        (b"no image", "not an image in a known format"),
        (b"\xff\xd8\xff", "not an image in a known format"),
    ],
)
def test_invalid_image_raises_one_clear_error(source: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        eval_pixels(source, Preprocess(image_size=8))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_pil_image_raises_data_error() -> None:
    data = encoded(PHOTO, "PNG")
    with pytest.raises(DataError, match="does not decode: image file is truncated"):
        eval_pixels(Image.open(BytesIO(data[: len(data) // 2])), Preprocess(image_size=8))
    with_alpha = Image.open(BytesIO(image_file("palette png with alpha")))  # Pillow would warn of it
    assert eval_pixels(with_alpha, Preprocess(image_size=8)).shape == (3, 8, 8)


@pytest.mark.parametrize("name", sorted(IMAGES.keys() - {"moving gif"}))  # its first frame may be complete
def test_truncated_file_raises_data_error(name: str) -> None:
    data = image_file(name)
    for share in (0.0, 0.001, 0.01, 0.1, 0.5, 0.9):
        with pytest.raises(DataError):
            decode_image(data[: int(len(data) * share)])
        with pytest.raises(DataError):
            eval_pixels(data[: int(len(data) * share)], Preprocess(image_size=8))


@pytest.mark.parametrize(
    "kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "TGA", "ICO", "JPEG2000"]
)
def test_damaged_file_decodes_or_raises_data_error(kind: str) -> None:
    draw = random.Random(0)
    whole = encoded(Image.fromarray(scene(32, 32)), kind)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 8])):
            data[draw.randrange(min(len(data), draw.choice([32, 128, 10_000])))] = draw.choice([0, 255, 7])
        try:
            seen = eval_pixels(bytes(data), Preprocess(image_size=8))
            pixels = decode_image(bytes(data))
        except DataError:
            continue
        assert seen.shape == (3, 8, 8)
        assert pixels.dtype == np.uint8
        assert pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.size


@given(data=st.binary(max_size=200) | st.binary(max_size=100).map(lambda rest: b"\xff\xd8\xff" + rest))
def test_random_bytes_raise_data_error(data: bytes) -> None:
    with pytest.raises(DataError):
        decode_image(data)
    with pytest.raises(DataError):
        eval_pixels(data, Preprocess(image_size=8))


def test_decompression_bomb_is_rejected_before_decoding() -> None:
    side = 15_000
    assert side * side > MAX_PIXELS
    bomb = encoded(Image.new("1", (side, side)), "PNG")
    assert len(bomb) < 200_000
    for read in (decode_image, lambda data: eval_pixels(data, Preprocess(image_size=8))):
        with pytest.raises(DataError, match=f"more than {MAX_PIXELS} pixels"):
            read(bomb)
    jpeg = bytearray(encoded(PHOTO, "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = (60_000).to_bytes(2, "big") * 2
    for read in (decode_image, lambda data: eval_pixels(data, Preprocess(image_size=8))):
        with pytest.raises(DataError, match=f"more than {MAX_PIXELS} pixels"):
            read(bytes(jpeg))


def test_threads_leave_warning_filters_unchanged() -> None:
    data = image_file("palette png with alpha")
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda _: eval_pixels(data, Preprocess(image_size=8)), range(100)))
    assert all(torch.equal(seen[0], one) for one in seen)
    assert warnings.filters == before


def test_preprocess_round_trips_through_a_dict() -> None:
    own = Preprocess(
        image_size=64,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.5, 1.0),
        interpolation="bilinear",
        resize_mode="longest",
    )
    values = own.to_dict()
    assert Preprocess.from_dict(values) == own
    for same in (
        {"mean": [0.5, 0.5, 0.5]}, {"mean": 0.5}, {"image_size": (64, 64)}, {"image_size": [64, 64]},
    ):  # fmt: skip
        assert Preprocess.from_dict({**values, **same}) == own
    assert Preprocess.from_dict({**values, "interpolation": "random"}).interpolation == "bicubic"
    written_before_fill_color = {
        "image_size": 64, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic",
        "resize_mode": "shortest",
    }  # fmt: skip
    assert Preprocess.from_dict(written_before_fill_color).fill_color == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"image_size": "64"}, "image_size must be from 1 to 4096, not '64'"),
        ({"image_size": 0}, "image_size must be from 1 to 4096, not 0"),
        ({"image_size": 10**9}, "image_size must be from 1 to 4096, not 1000000000"),
        ({"image_size": True}, "image_size must be"),
        ({"image_size": [64]}, "image_size must be"),
        ({"image_size": [64, 32]}, "image_size 64 x 32 is not square"),
        ({"mean": [0.5]}, "std must be numbers above 0, as many as mean has, not"),
        ({"mean": []}, "mean must be numbers, one for each channel"),
        ({"mean": None}, "NoneType"),
        ({"std": ["a"] * 3}, "could not convert"),
        ({"std": [1, 1, 0]}, "std must be numbers above 0, as many"),
        ({"std": [1, 1, float("nan")]}, "std must be numbers above 0, as many"),
        ({"mean": [10**400] * 3}, "too large"),
        ({"interpolation": "nearest"}, "interpolation must be bicubic or bilinear, not 'nearest'"),
        ({"interpolation": ["bicubic"]}, "interpolation must be"),
        ({"resize_mode": "stretch"}, "resize_mode must be shortest or longest or squash, not 'stretch'"),
        ({"fill_color": 256}, "fill_color must be from 0 to 255, not 256"),
        ({"fill_color": 0.5}, "fill_color must be from 0 to 255, not 0.5"),
        ({"more": 1}, "'more'"),
    ],
)
def test_invalid_stored_preprocess_raises_one_clear_error(wrong: dict[str, Any], message: str) -> None:
    values = Preprocess(image_size=64).to_dict()
    with pytest.raises(CheckpointError, match=f"is not supported: .*{message}"):
        Preprocess.from_dict({**values, **wrong})


def test_preprocess_is_checked_in_the_constructor() -> None:
    with pytest.raises(ConfigError, match="resize_mode must be shortest"):
        Preprocess(image_size=32, resize_mode="crop")
    for nothing in ("{}", "null"):
        with pytest.raises(CheckpointError, match="is not supported"):
            Preprocess.from_dict(json.loads(nothing))
