"""Training and evaluation get the same pixels from the same file, up to crops and resizing."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from torch import Tensor

from clipkit.errors import DataError
from clipkit.model.preprocess import Preprocess, pixels_and_traits
from clipkit.samples import (
    Decoding,
    PixelRangeError,
    TraitCounts,
    Traits,
)
from data.augment import Augmentation, empty_batch, random_of, training_pixels
from tests.clipkit.deep_images import color_png, encode_deep, tiff_of
from tests.clipkit.format_images import bands_of, dicom_of, npy_of, npz_of

SIDE = 8
TWELVE_BITS = (0.0, 4095.0)
KINDS = [
    "PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "JPEG2000", "AVIF", "HEIF", "ICO", "TGA", "PCX", "deep PNG",
    "deep PPM", "deep TIFF", "color PNG", "color TIFF", "DICOM", "npy", "npz",
]  # fmt: skip


def train(data: bytes, rule: Decoding) -> tuple[Tensor, Traits]:
    """Decode an image of SIDE x SIDE as training does, without a crop."""
    out = empty_batch(1, SIDE, rule.channels)
    traits = training_pixels(
        data,
        image_size=SIDE,
        augmentation=Augmentation(crop_scale=1.0),
        random=random_of(0),
        out=out[0],
        decoding=rule,
    )
    return out[0].contiguous(), traits


def evaluate(data: bytes, rule: Decoding) -> tuple[Tensor, Traits]:
    channels = (0.5,) * rule.channels
    return pixels_and_traits(
        data,
        Preprocess(
            image_size=SIDE,
            mean=channels,
            std=channels,
            background=rule.background,
            upright=rule.upright,
            pixel_range=rule.pixel_range,
        ),
    )


def check_equal(data: bytes, rule: Decoding) -> tuple[Tensor, Traits]:
    pixels, traits = train(data, rule)
    evaluated, evaluated_traits = evaluate(data, rule)
    assert torch.equal(pixels, evaluated)
    assert traits == evaluated_traits
    return pixels, traits


def gray_of(values: Any, low: float, high: float) -> Any:
    scaled = (np.clip(values.astype(np.float64), low, high) - low) * 255 / (high - low)
    return np.rint(scaled).astype(np.uint8)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Draw an image file of any format, mode, depth, orientation and transparency."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(KINDS))
    dtype = draw(st.sampled_from(["uint16", "int16", "uint32", "float32"]))
    deep = random.integers(0, 5000, (SIDE, SIDE)).astype(dtype)
    colors = random.integers(0, 65536, (SIDE, SIDE, 3)).astype(np.uint16)
    if kind in ("deep PNG", "deep PPM"):
        return encode_deep(deep.astype(np.uint16), kind.removeprefix("deep "))
    if kind == "deep TIFF":
        return tiff_of(deep, photometric=draw(st.sampled_from([0, 1])))
    if kind == "color PNG":
        return color_png(colors)
    if kind == "color TIFF":
        planar = draw(st.sampled_from(["contig", "separate"]))
        return bands_of(colors, photometric="rgb", planarconfig=planar, compression="zlib")
    if kind == "DICOM":
        photometric = draw(st.sampled_from(["MONOCHROME1", "MONOCHROME2"]))
        slope = draw(st.sampled_from(["1", "0.5"]))
        return dicom_of(
            deep.astype(np.uint16), bits=13, PhotometricInterpretation=photometric, RescaleSlope=slope,
            RescaleIntercept="0",
        )  # fmt: skip
    if kind in ("npy", "npz"):
        shape = draw(st.sampled_from([(SIDE, SIDE), (SIDE, SIDE, 3), (3, SIDE, SIDE)]))
        array = random.integers(0, 200, shape).astype(draw(st.sampled_from(["uint8", dtype])))
        return npy_of(array) if kind == "npy" else npz_of(array)
    if kind == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    mode = draw(st.sampled_from(["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK"]))
    opacity = random.choice([0, 128, 255], (SIDE, SIDE, 1)).astype(np.uint8)
    image = Image.fromarray(np.concatenate([(colors >> 8).astype(np.uint8), opacity], axis=2), "RGBA")
    image = image.convert("RGB").convert(mode) if mode in ("1", "CMYK", "P", "PA") else image.convert(mode)
    exif = Image.Exif()
    exif[0x0112] = draw(st.integers(1, 8))
    options: dict[str, Any] = {"exif": exif} if kind in ("PNG", "JPEG", "WEBP", "AVIF", "TIFF") else {}
    if kind == "GIF" and draw(st.booleans()):
        options = {"save_all": True, "append_images": [image.rotate(90)]}
    if kind == "PNG" and mode in ("L", "P") and draw(st.booleans()):
        options["transparency"] = 0
    file = io.BytesIO()
    try:
        image.save(file, kind, **options)
    except (OSError, KeyError, ValueError, TypeError):  # the format does not support the mode
        file = io.BytesIO()
        image.convert("RGB").save(file, kind)
    return file.getvalue()


@settings(deadline=None, max_examples=300)
@given(
    data=files(),
    background=st.sampled_from([None, (255, 255, 255), (1, 2, 3)]),
    upright=st.booleans(),
    pixel_range=st.sampled_from([TWELVE_BITS, (100.0, 3000.0), ((0.0, 99.0), (5.0, 6.0), (7.0, 4000.0))]),
)
def test_training_and_evaluation_get_the_same_pixels(
    data: bytes, background: tuple[int, int, int] | None, upright: bool, pixel_range: Any
) -> None:
    check_equal(data, Decoding(background=background, upright=upright, pixel_range=pixel_range))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_grays_of_12_bits_are_equal_in_all_formats(seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 4096, (SIDE, SIDE)).astype(np.uint16)
    values[0, :2] = 0, 4095
    files = [
        encode_deep(values, "PNG"), tiff_of(values), dicom_of(values, bits=12), npy_of(values), npz_of(values),
        bands_of(values, planarconfig=None, compression="lzw"),
    ]  # fmt: skip
    for data in files:
        pixels, traits = check_equal(data, Decoding(pixel_range=TWELVE_BITS))
        assert np.array_equal(pixels[0].numpy(), gray_of(values, 0, 4095))
        assert not traits.clamped
        with pytest.raises(PixelRangeError, match="python -m data inspect"):
            train(data, Decoding())
        with pytest.raises(PixelRangeError, match="python -m data inspect"):
            evaluate(data, Decoding())
        pixels, traits = check_equal(data, Decoding(pixel_range=(10.0, 3000.0)))
        counts = TraitCounts()
        counts.add(traits, traits)
        assert (
            "2 of 2 images have values outside the pixel range 10,3000"
            in counts.lines(Decoding(pixel_range=(10.0, 3000.0)), background="", upright="")["clamped"]
        )
        windows = ((0.0, 99.0), TWELVE_BITS, (1000.0, 2000.0))
        pixels, _ = check_equal(data, Decoding(pixel_range=windows))
        for channel, (low, high) in zip(pixels.numpy(), windows, strict=True):
            assert np.array_equal(channel, gray_of(values, low, high))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"planarconfig": "separate"},
        {"compression": "lzw", "predictor": True, "planarconfig": "separate"},
        {"tile": (16, 16), "compression": "deflate"},
        {"byteorder": ">"},
    ],
)
def test_twelve_bands(dtype: str, options: dict[str, Any]) -> None:
    values = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 12)).astype(dtype)
    ranges = tuple((0.0, 200.0 + band) for band in range(12))
    rule = Decoding(channels=12, pixel_range=ranges)
    expected = np.stack([gray_of(values[..., band], *ranges[band]) for band in range(12)])
    if dtype == "uint8":
        expected = np.moveaxis(values, 2, 0)
    by_page = bands_of(np.moveaxis(values, 2, 0), planarconfig=None)
    for data in (bands_of(values, **options), by_page, npy_of(values), npz_of(np.moveaxis(values, 2, 0))):
        pixels, _ = check_equal(data, rule)
        assert np.array_equal(pixels.numpy(), expected)
        if data[:2] in (b"II", b"MM") and data is not by_page:
            with pytest.raises(
                PixelRangeError, match=r"12 channels, and the model has 3: set pixels.channels = 12 "
            ):
                train(data, Decoding(pixel_range=(0.0, 255.0)))
    if dtype != "uint8":
        with pytest.raises(PixelRangeError, match=r"12 channels, and pixels.range has 2 pairs"):
            train(npy_of(values), Decoding(channels=12, pixel_range=ranges[:2]))
        with pytest.raises(
            PixelRangeError, match=r"image of 12 channels with values from .*python -m data inspect"
        ):
            train(npy_of(values), Decoding(channels=12))


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("LA", 1), ("1", 1), ("RGBA", 4), ("CMYK", 4)])
def test_other_numbers_of_channels_of_common_formats(mode: str, channels: int) -> None:
    image = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 4), dtype=np.uint8), "RGBA"
    )
    image = image.convert("RGB").convert(mode) if mode == "CMYK" else image.convert(mode)
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(file, "TIFF" if mode == "CMYK" else "PNG", **({} if mode == "CMYK" else {"exif": exif}))
    pixels, _ = check_equal(file.getvalue(), Decoding(channels=channels, upright=True))
    expected = image if mode == "CMYK" else image.transpose(Image.Transpose.ROTATE_270)
    if channels == 1:
        expected = expected.convert("L")
    assert np.array_equal(
        pixels.numpy(), np.asarray(expected).reshape(SIDE, SIDE, channels).transpose(2, 0, 1)
    )


def test_dicom() -> None:
    values = np.random.default_rng(0).integers(-1000, 1000, (SIDE, SIDE)).astype(np.int16)
    data = dicom_of(values, RescaleSlope="2", RescaleIntercept="-24")
    window = (-1000.0, 400.0)
    pixels, traits = check_equal(data, Decoding(pixel_range=window))
    assert np.array_equal(pixels[0].numpy(), gray_of(values * 2.0 - 24, *window))
    assert traits == Traits(clamped=True)
    # the window that the file suggests is not used
    suggested = dicom_of(
        values, RescaleSlope="2", RescaleIntercept="-24", WindowCenter="40", WindowWidth="80"
    )
    assert torch.equal(check_equal(suggested, Decoding(pixel_range=window))[0], pixels)
    inverted = dicom_of(values, PhotometricInterpretation="MONOCHROME1")
    pixels, _ = check_equal(inverted, Decoding(pixel_range=window))
    assert np.array_equal(pixels[0].numpy(), 255 - gray_of(values, *window))
    frames = np.stack([values, values[::-1]])
    pixels, traits = check_equal(dicom_of(frames, NumberOfFrames=2), Decoding(pixel_range=window))
    assert np.array_equal(pixels[0].numpy(), gray_of(values, *window)) and traits.frames
    colors = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    pixels, traits = check_equal(dicom_of(colors), Decoding())
    assert np.array_equal(pixels.numpy(), colors.transpose(2, 0, 1)) and traits == Traits()


def huge_array(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (huge_array((10**6, 10**6)), "more than 178956970 pixels"),
        (huge_array((10, 10, 10**8)), "more than 178956970 pixels"),
        (huge_array((SIDE, SIDE)), "image does not decode"),
        (npy_of(np.zeros((2, 2), complex)), "of complex128 is not an image"),
        (npy_of(np.zeros((2, 2, 2, 2))), "is not an image: expected"),
        (
            npz_of(np.zeros((2, 2)), np.zeros((2, 2))),
            "an .npz file of 2 arrays is not an image: expected one array",
        ),
        (dicom_of(np.zeros((2, 2), np.uint8), Rows=60000, Columns=60000), "more than 178956970 pixels"),
        (dicom_of(np.zeros((2, 2), np.uint8), PhotometricInterpretation="PALETTE COLOR"), "with a palette"),
        (dicom_of(np.zeros((SIDE, SIDE), np.uint8))[:-20], "image does not decode"),
        (bytes(128) + b"DICM" + b"1.2.840.10008.1.2.1.99", "a deflated DICOM file cannot be read"),
        (bands_of(np.zeros((SIDE, SIDE, 7), np.uint8))[:-20], "image does not decode"),
    ],
)
def test_files_that_cannot_be_read_get_one_line(data: bytes, message: str) -> None:
    for read in (train, evaluate):
        with pytest.raises(DataError, match=message) as caught:
            read(data, Decoding())
        assert "\n" not in str(caught.value)


def test_arrays_of_objects_are_not_unpickled(tmp_path: Any) -> None:
    file = io.BytesIO()
    np.save(file, np.array([[print]], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="of object is not an image"):
        train(file.getvalue(), Decoding())


@pytest.mark.parametrize("name", ["pydicom", "tifffile", "pillow_heif"])
def test_a_missing_library_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.zeros((SIDE, SIDE, 7), np.uint16)
    files = {
        "pydicom": dicom_of(values[..., 0]), "tifffile": bands_of(values), "pillow_heif": b"\0\0\0\x18ftypheic",
    }  # fmt: skip
    monkeypatch.setitem(__import__("sys").modules, name, None)
    package = name.replace("_", "-")
    for read in (train, evaluate):
        with pytest.raises(DataError, match=rf"need {package}: pip install -e '.\[formats\]'"):
            read(files[name], Decoding(pixel_range=TWELVE_BITS))
