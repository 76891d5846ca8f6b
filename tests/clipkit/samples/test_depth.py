"""Tests of deep grayscale images: training and evaluation give the documented pixels, nothing is guessed."""

import io
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

from clipkit.errors import ConfigError, DataError
from clipkit.model.preprocess import Preprocess, eval_pixels, pixels_and_traits
from clipkit.samples.decode import decode_image, decode_pixels
from clipkit.samples.depth import (
    PixelRange,
    PixelRangeError,
    format_pixel_range,
    parse_pixel_range,
    suggest_pixel_range,
)
from clipkit.samples.traits import Decoding
from tests.clipkit.deep_images import KINDS, color_png, encode_deep, tiff_of
from tests.clipkit.made_images import encoded, scene

SIDE = 8
Gray = npt.NDArray[np.uint8]


def training_gray(data: bytes, pixel_range: PixelRange, **decoding: Any) -> Gray:
    pixels = decode_pixels(data, Decoding(pixel_range=pixel_range, **decoding)).pixels
    assert (pixels == pixels[:1]).all()
    gray: Gray = pixels[0]
    return gray


def eval_gray(source: Any, pixel_range: PixelRange, size: int = SIDE) -> Gray:
    preprocess = Preprocess(image_size=size, resize_mode="squash", pixel_range=pixel_range)
    pixels = eval_pixels(source, preprocess).numpy()
    assert (pixels == pixels[:1]).all()
    gray: Gray = pixels[0]
    return gray


def formula(values: npt.NDArray[Any], low: float, high: float) -> Gray:
    clipped = np.clip(values.astype(np.float64), low, high)
    return np.rint((clipped - low) * 255 / (high - low)).astype(np.uint8)


@st.composite
def deep_files(draw: st.DrawFn) -> tuple[str, npt.NDArray[Any], tuple[float, float]]:
    """Name of the kind, values, and a window."""
    name = draw(st.sampled_from(sorted(KINDS)))
    dtype = np.dtype(KINDS[name][1])
    random = np.random.default_rng(draw(st.integers(0, 999)))
    if dtype.kind == "f":
        values = (random.normal(size=(SIDE, SIDE)) * draw(st.sampled_from((1e-3, 1, 3e4)))).astype(dtype)
    else:
        limits = np.iinfo(dtype)
        high = draw(st.sampled_from((255, 4095, limits.max)))
        low = 0 if limits.min == 0 else draw(st.sampled_from((-1024, limits.min)))
        values = random.integers(low, high, (SIDE, SIDE), endpoint=True).astype(dtype)
    ends = sorted(
        {float(draw(st.sampled_from(values.ravel().tolist()))), float(draw(st.integers(-2000, 70000)))}
    )
    window = (ends[0], ends[-1]) if len(ends) == 2 else (ends[0], ends[0] + 1)
    return name, values, window


@settings(deadline=None, max_examples=300)
@given(deep_files())
def test_training_and_evaluation_give_the_documented_pixels(
    drawn: tuple[str, npt.NDArray[Any], tuple[float, float]],
) -> None:
    name, values, window = drawn
    data = encode_deep(values, KINDS[name][0])
    expected = formula(values, *window)
    decoded = decode_pixels(data, Decoding(pixel_range=window))
    assert np.array_equal(training_gray(data, window), expected)
    assert decoded.traits.clamped == bool((values < window[0]).any() or (values > window[1]).any())
    with Image.open(io.BytesIO(data)) as opened:
        for source in (data, opened, values, values.astype(values.dtype.newbyteorder("="))):
            assert np.array_equal(eval_gray(source, window), expected)
    if values.dtype.itemsize == 2:
        limits = np.iinfo(values.dtype)
        expected = formula(values, limits.min, limits.max)
        assert np.array_equal(training_gray(data, "dtype"), expected)
        assert np.array_equal(eval_gray(data, "dtype"), expected)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_without_a_range_the_error_names_depth_values_and_setting(name: str) -> None:
    container, dtype = KINDS[name]
    values = np.linspace(0, 3000, SIDE * SIDE).reshape(SIDE, SIDE).astype(dtype)
    depth = {"u2": "16-bit", "i2": "signed 16-bit", "f4": "32-bit float"}.get(values.dtype.str[1:], "32-bit")
    advice = "the values of black and white" if values.dtype.kind == "f" else "values such as 0,4095"
    data = encode_deep(values, container)
    for read in (decode_pixels, lambda data: eval_pixels(data, Preprocess(image_size=SIDE))):
        with pytest.raises(PixelRangeError) as raised:
            read(data)
        message = str(raised.value)
        assert message.startswith(
            f"{depth} grayscale image with values from 0 to 3000, and no known black and white"
        )
        assert "set pixels.range (training), --pixel-range (commands)" in message
        assert f"to {advice};" in message and "\n" not in message
    if values.dtype.itemsize > 2:
        with pytest.raises(PixelRangeError, match="pixel range dtype: that is for 16-bit integers"):
            training_gray(data, "dtype")
    shown = decode_image(data)  # from the minimum to the maximum, for display
    assert (shown.min(), shown.max()) == (0, 255)


def test_eight_bit_image_and_deep_copy_give_equal_pixels_after_resizing() -> None:
    gray = scene(90, 120, 1)[..., 0]
    plain = encoded(Image.fromarray(gray), "PNG")
    deep = encoded(Image.fromarray(gray.astype(np.uint16) * 200 + 8000), "PNG")
    window = (8000.0, 59000.0)
    for size in (32, 224):
        for mode in ("shortest", "longest", "squash"):
            preprocess = Preprocess(image_size=size, resize_mode=mode, pixel_range=window)
            assert torch.equal(eval_pixels(deep, preprocess), eval_pixels(plain, preprocess))
    assert np.array_equal(training_gray(deep, window), gray)


def test_twelve_bit_tiff() -> None:
    values = np.arange(64, dtype=np.uint16).reshape(SIDE, SIDE) * 65
    bits = "".join(f"{value:012b}" for value in values.ravel())
    content = int(bits, 2).to_bytes(len(bits) // 8, "big")
    data = tiff_of(values, bits=12, content=content)
    assert np.array_equal(training_gray(data, (0.0, 4095.0)), formula(values, 0, 4095))
    assert np.array_equal(eval_gray(data, (0.0, 4095.0)), formula(values, 0, 4095))


def test_tiff_whose_zero_is_white_is_inverted() -> None:
    values = np.arange(64, dtype="<u2").reshape(SIDE, SIDE) * 1000
    data = tiff_of(values, photometric=0)
    expected = 255 - formula(values, 0, 65535)
    assert np.array_equal(training_gray(data, "dtype"), expected)
    assert np.array_equal(eval_gray(data, "dtype"), expected)


def test_values_that_are_not_numbers_are_black_and_counted() -> None:
    values = np.linspace(0, 1, SIDE * SIDE, dtype=np.float32).reshape(SIDE, SIDE)
    values[0, 1], values[0, 2], values[0, 3] = np.nan, np.inf, -np.inf
    decoded = decode_pixels(tiff_of(values), Decoding(pixel_range=(0.0, 1.0)))
    assert decoded.pixels[0, 0, 1:4].tolist() == [0, 255, 0]
    assert decoded.traits.clamped
    with pytest.raises(PixelRangeError, match=r"values from 0 to 1, .* such as 0,1;"):
        decode_pixels(tiff_of(values))
    with pytest.raises(PixelRangeError, match="values from 0 to 0"):
        decode_pixels(tiff_of(np.full((2, 2), np.nan, np.float32)))


@pytest.mark.parametrize("background", [None, (1, 2, 3)])
def test_transparent_color_of_a_16_bit_png(background: tuple[int, int, int] | None) -> None:
    values = np.array([[0, 1, 300, 65535]], dtype=np.uint16)
    data = encoded(Image.fromarray(values), "PNG", transparency=1)
    window = (0.0, 300.0)
    decoding = Decoding(background=background, pixel_range=window)
    decoded = decode_pixels(data, decoding)
    behind = (1, 1, 1) if background is None else background
    assert decoded.pixels[:, 0].T.tolist() == [[0, 0, 0], list(behind), [255] * 3, [255] * 3]
    assert decoded.traits.transparent and decoded.traits.clamped
    preprocess = Preprocess(image_size=4, resize_mode="squash", background=background, pixel_range=window)
    pixels, traits = pixels_and_traits(data, preprocess)
    assert np.array_equal(pixels.numpy()[:, :1], decoded.pixels) and traits == decoded.traits


def test_other_images_do_not_depend_on_the_range() -> None:
    gray = Image.fromarray(scene(SIDE, SIDE, 1)[..., 0])
    files = [encoded(gray, "PNG", bits=bits) for bits in (1, 2, 4)]
    files += [encoded(gray.convert("1"), "TIFF"), encoded(gray, "TIFF"), encoded(gray, "PPM")]
    files += [encoded(gray.convert(mode), "PNG") for mode in ("1", "LA", "RGB", "RGBA", "P")]
    files += [encoded(gray, "JPEG2000"), encoded(gray, "JPEG")]
    random = np.random.default_rng(0)
    files += [color_png(random.integers(0, 65536, (SIDE, SIDE, bands))) for bands in (3, 4)]
    for data in files:
        plain = Preprocess(image_size=SIDE)
        for pixel_range in ("dtype", (0.0, 1.0)):
            decoded = decode_pixels(data, Decoding(pixel_range=pixel_range))
            assert np.array_equal(decoded.pixels, decode_pixels(data).pixels) and not decoded.traits.clamped
            windowed = replace(plain, pixel_range=pixel_range)
            assert torch.equal(eval_pixels(data, windowed), eval_pixels(data, plain))


@pytest.mark.parametrize("pixel_range", ["auto", "dtype", (0, 4095)])
def test_16_bit_gray_with_alpha_is_refused(pixel_range: PixelRange) -> None:
    data = color_png(np.random.default_rng(0).integers(0, 4096, (SIDE, SIDE, 2)))
    preprocess = Preprocess(image_size=SIDE, pixel_range=pixel_range)
    for source in (data, Image.open(io.BytesIO(data))):
        with pytest.raises(PixelRangeError, match="convert it to 16-bit grayscale without alpha"):
            eval_pixels(source, preprocess)
    with pytest.raises(PixelRangeError, match="convert it to 16-bit grayscale without alpha"):
        decode_pixels(data, preprocess.decoding)


def test_deep_colors_are_counted() -> None:
    values = np.random.default_rng(0).integers(0, 65536, (SIDE, SIDE, 4))
    colors = values[..., :3]
    ppm = b"P6 8 8 %d\n" + colors.astype(">u2").tobytes()
    plain_ppm = b"P3 8 8 65535\n" + b" ".join(b"%d" % value for value in colors.flat) + b"\n"
    deep = [
        color_png(values),
        color_png(colors),
        tiff_of(colors.astype("<u2")),
        tiff_of(colors.astype(">u2")),
    ]
    deep += [ppm % 65535, plain_ppm]
    image = Image.fromarray((colors >> 8).astype(np.uint8))
    shallow = [
        encoded(image, container) for container in ("PNG", "TIFF", "PPM", "BMP", "WEBP", "JPEG", "GIF")
    ]
    shallow += [encoded(image.convert("L"), "TIFF"), encode_deep(values[..., 0].astype("u2"), "PNG")]
    decoding = Decoding(pixel_range="dtype")
    preprocess = Preprocess(image_size=SIDE, pixel_range="dtype")
    for files, expected in ((deep, True), (shallow, False)):
        for data in files:
            with_all_bits = expected and data[:2] in (b"II", b"MM")  # a TIFF for which a range is given
            for source in (data, Image.open(io.BytesIO(data))):
                traits = pixels_and_traits(source, preprocess)[1]
                assert traits.deep_colors == (expected and not (with_all_bits and source is data))
            decoded = decode_pixels(data, decoding)
            assert decoded.traits.deep_colors == (expected and not with_all_bits)
            pixels = decoded.pixels.transpose(1, 2, 0)
            if with_all_bits:
                assert np.array_equal(pixels, formula(colors, 0, 65535))
            elif expected:
                assert np.array_equal(pixels, colors >> 8) or data in (ppm % 65535, plain_ppm)


@pytest.mark.parametrize("pixel_range", [(-128, 127), (-100, 50)])
def test_signed_8_bit_tiff_is_deep(pixel_range: tuple[int, int]) -> None:
    values = np.random.default_rng(0).integers(-128, 128, (SIDE, SIDE), dtype=np.int8)
    data = tiff_of(values)
    with pytest.raises(
        PixelRangeError, match=r"signed 8-bit grayscale image with values from -1\d\d to 1\d\d"
    ):
        decode_pixels(data)
    expected = formula(values, *pixel_range)
    assert np.array_equal(training_gray(data, pixel_range), expected)
    assert np.array_equal(eval_gray(data, pixel_range), expected)
    assert np.array_equal(eval_gray(values, pixel_range), expected)


@pytest.mark.parametrize(
    "data",
    [
        tiff_of(np.zeros((SIDE, SIDE), dtype="<f8")),
        tiff_of(np.zeros((SIDE, SIDE), dtype="<f2")),
        tiff_of(np.zeros((SIDE, SIDE), dtype=">u4")),
        tiff_of(np.zeros((SIDE, SIDE, 3), dtype="<f4")),
        tiff_of(np.zeros((SIDE, SIDE), dtype=">u2"), bits=12, content=bytes(SIDE * SIDE * 3 // 2)),
    ],
)
def test_a_tiff_that_pillow_cannot_read(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PixelRangeError, match="with values from 0 to 0, and no known black and white"):
        decode_pixels(data)
    assert not decode_pixels(data, Decoding(pixel_range=(0.0, 1.0))).pixels.any()
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(DataError, match=r"need tifffile: pip install -e '.\[formats\]'"):
        decode_pixels(data)


def test_arrays_and_tensors_of_deep_values() -> None:
    values = np.arange(64).reshape(SIDE, SIDE) * 60
    expected = formula(values, 0, 3780)
    for dtype in ("uint16", "int16", "int32", "uint32", "int64", "float16", "float32", "float64"):
        array = values.astype(dtype)
        assert np.array_equal(eval_gray(array, (0.0, 3780.0)), expected), dtype
        with pytest.raises(PixelRangeError):
            eval_pixels(array, Preprocess(image_size=SIDE))
        assert np.array_equal(eval_gray(torch.from_numpy(array), (0.0, 3780.0)), expected), dtype
    rounded = torch.from_numpy(values).bfloat16()
    expected_of_rounded = formula(rounded.float().numpy(), 0, 3780)
    assert np.array_equal(eval_gray(rounded, (0.0, 3780.0)), expected_of_rounded)
    for mode in ("I", "F", "I;16", "I;16B"):
        image = Image.fromarray(values.astype(np.int32)).convert("I")
        if mode != "I":
            image = image.convert(mode)
        assert np.array_equal(eval_gray(image, (0.0, 3780.0)), expected), mode
    for source, description in (
        (values.astype(bool), r"bool \(8, 8\)"),
        (torch.from_numpy(values.astype(bool)), r"torch.bool \(8, 8\)"),
        (values.astype(complex), r"complex128 \(8, 8\)"),
        (np.zeros((3, 4, 4), np.float32), r"float32 \(3, 4, 4\)"),
        (torch.zeros(4, 4, 5).bfloat16(), r"torch.bfloat16 \(4, 4, 5\)"),
        (torch.zeros(0, 5), r"torch.float32 \(0, 5\)"),
    ):
        accepted = r"(\(3, H, W\), )?\(H, W, 3\) or \(H, W\) of integers or floats"
        with pytest.raises(DataError, match=f"must be {accepted}; this one is {description}"):
            eval_gray(source, (0.0, 1.0))
    for tensor in (
        torch.zeros(8, 8).to_sparse(),
        torch.zeros(8, 8, device="meta"),
        torch.zeros(8, 8).to(torch.complex64),
    ):
        with pytest.raises(DataError, match="must be a dense tensor of integers or floats"):
            eval_gray(tensor, (0.0, 1.0))


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_pixel_ranges_are_parsed_as_formatted(low: float, high: float) -> None:
    if low >= high:
        with pytest.raises(ConfigError, match="in ascending order"):
            parse_pixel_range((low, high))
        return
    assert parse_pixel_range(format_pixel_range((low, high))) == (low, high)
    assert parse_pixel_range([low, high]) == (low, high)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Auto",
        "0",
        "0,",
        "1,0",
        "0,0",
        "0,nan",
        "0,inf",
        "a,b",
        "0,1,2",
        7,
        None,
        [],
        [1],
        np.array([0, 4095]),
    ],
)
def test_invalid_pixel_ranges_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"data\.pixel_range = .* is invalid: expected auto, dtype, or"):
        parse_pixel_range(value, setting="data.pixel_range")


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ([3, 3911], "values such as 0,4095;"),
        ([0, 1], "values such as 0,1;"),
        ([0.25, 0.75], "values such as 0,1;"),
        ([0.5, 3911], "the values of black and white;"),
        ([-1024, 3071], "the values of black and white;"),
    ],
)
def test_the_range_of_one_float_image_is_not_suggested(values: list[float], advice: str) -> None:
    with pytest.raises(
        PixelRangeError, match=rf"to {advice} `python -m data inspect` reports the values of all"
    ):
        decode_pixels(tiff_of(np.array([values], dtype=np.float32)))


def test_suggested_ranges() -> None:
    assert suggest_pixel_range(0, 1, is_integer=True) == "0,1"
    assert suggest_pixel_range(3, 3911, is_integer=True) == "0,4095"
    assert suggest_pixel_range(8000, 59000, is_integer=True) == "0,65535"
    assert suggest_pixel_range(0, 0, is_integer=True) == "0,255"
    assert suggest_pixel_range(-1024, 3071, is_integer=True) == "-1024,3071"
    assert suggest_pixel_range(0.1, 0.9, is_integer=False) == "0,1"
    assert suggest_pixel_range(-2.5, -2.5, is_integer=False) == "-2.5,-1.5"
    for low, high in ((0, 2**32 - 1), (-3e38, 3e38)):
        parse_pixel_range(suggest_pixel_range(low, high, is_integer=low == 0))


def test_range_is_stored_with_the_preprocessing() -> None:
    plain = Preprocess(image_size=SIDE)
    assert not {"background", "upright", "pixel_range"} & plain.to_dict().keys()
    windowed = plain.replace_decoding(pixel_range="0,4095")
    assert windowed.to_dict() == plain.to_dict() | {"pixel_range": (0.0, 4095.0)}
    for preprocess in (plain, windowed, plain.replace_decoding(pixel_range="dtype", upright=True)):
        stored = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in preprocess.to_dict().items()
        }
        assert Preprocess.from_dict(stored) == preprocess
    assert "values from 0 to 4095 of deep images become 0 to 255" in str(windowed.decoding)
    with pytest.raises(ConfigError, match="pixel_range must be"):
        Preprocess(image_size=SIDE, pixel_range=(1, 0))
