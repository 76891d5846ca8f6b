"""Tests of stored images: unchanged bytes, or the image rotated upright, laid on a background and resized."""

import io
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image, ImageCms, ImageOps, JpegImagePlugin

from clipkit.errors import ConfigError
from clipkit.samples import (
    Decoding,
    PixelRangeError,
    decode_image,
    decode_pixels,
    gray_values,
    readable_formats,
)
from data.shards.images import RESIZE_MODES, BadImage, Resize, StoredImage, Storing, store_image
from tests.clipkit.deep_images import KINDS, color_png, encode_deep, tiff_of
from tests.clipkit.tiff_layouts import Layout, all_layouts

ORIENTATION = 0x0112
WHITE = (255, 255, 255)


@pytest.fixture(autouse=True, scope="module")
def all_formats() -> None:
    Image.init()


def noise(mode: str = "RGB", side: tuple[int, int] = (40, 30)) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (side[1], side[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def smooth(side: tuple[int, int] = (64, 48)) -> Image.Image:
    """Return an image that changes with every rotation and compresses well."""
    across, down = np.meshgrid(np.linspace(0, 255, side[0]), np.linspace(0, 200, side[1]))
    return Image.fromarray(np.stack([across, down, (across + down) / 2], axis=2).astype(np.uint8))


def encoded(image: Image.Image, kind: str, *, orientation: int | None = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    if orientation is not None:
        tags = Image.Exif()
        tags[ORIENTATION] = orientation
        options["exif"] = tags
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def shown(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def store(data: bytes, *, max_side: int | None = None, **how: Any) -> StoredImage:
    resize = Resize(mode="keep_ratio_largest", size=max_side) if max_side else None
    return store_image(data, Storing(resize=resize, **how))


def difference(one: Image.Image, other: Image.Image) -> float:
    """Return the mean absolute difference of two images, of 255."""
    assert one.size == other.size
    first, second = (np.asarray(image.convert("RGB"), dtype=float) for image in (one, other))
    return float(np.abs(first - second).mean())


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize(
    ("kind", "options"), [("JPEG", {}), ("PNG", {}), ("WEBP", {"lossless": True}), ("WEBP", {})]
)
def test_exif_orientation_is_applied(orientation: int, kind: str, options: dict[str, Any]) -> None:
    source = encoded(smooth(), kind, orientation=orientation, **options)
    stored = store(source)
    assert not stored.upright
    upright = ImageOps.exif_transpose(shown(source))
    result = shown(stored.data)
    assert result.format == kind
    assert ORIENTATION not in result.getexif()
    lossless = kind == "PNG" or "lossless" in options
    assert difference(result, upright) <= (0 if lossless else 1.5)
    assert difference(result, ImageOps.mirror(upright)) > 10
    assert store(stored.data) == replace(stored, upright=True)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_bytes_are_unchanged_if_nothing_applies(kind: str) -> None:
    broken_tag = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\xff\xff\xff\xff\xff\xff"
    for source in (
        encoded(noise(), kind),
        encoded(noise(), kind, orientation=1),
        encoded(noise(), kind, orientation=9),
        encoded(noise(), kind, exif=broken_tag),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stored = store(source, max_side=40, background=WHITE)
        assert stored.data == source
        assert stored.upright and not stored.transparent


def test_orientation_can_be_kept() -> None:
    source = encoded(smooth(), "JPEG", orientation=6)
    kept = store(source, keep_orientation=True)
    assert kept.data == source
    assert not kept.upright
    reduced = shown(store(source, keep_orientation=True, max_side=32).data)
    assert reduced.size == (32, 24)
    assert reduced.getexif()[ORIENTATION] == 6  # the rotation still has to be applied


def test_rotated_jpeg_keeps_its_colors() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    source = encoded(smooth(), "JPEG", orientation=8, quality=95, icc_profile=profile)
    result = shown(store(source).data)
    assert isinstance(result, JpegImagePlugin.JpegImageFile)
    assert JpegImagePlugin.get_sampling(result) == 0  # 4:4:4
    assert result.info["icc_profile"] == profile
    grey = shown(store(encoded(noise("L"), "JPEG", orientation=3)).data)
    assert grey.mode == "L"
    inks = shown(store(encoded(noise("CMYK"), "JPEG", orientation=3, icc_profile=profile)).data)
    assert (inks.mode, "icc_profile" in inks.info) == ("RGB", False)  # an RGB profile does not fit CMYK


def test_rotated_png_is_lossless() -> None:
    deep = Image.fromarray(np.random.default_rng(0).integers(0, 65536, (8, 12), dtype=np.uint16))
    turned = shown(store(encoded(deep, "PNG", orientation=6)).data)
    assert np.array_equal(np.asarray(turned), np.rot90(np.asarray(deep), -1))
    palette = noise().quantize(16)
    turned = shown(store(encoded(palette, "PNG", orientation=6)).data)
    assert np.array_equal(np.asarray(turned), np.rot90(np.asarray(palette.convert("RGB")), -1))
    clear = noise("LA")
    clear.putalpha(noise("L"))
    turned = shown(store(encoded(clear, "PNG", orientation=3)).data)
    assert np.array_equal(np.asarray(turned), np.asarray(clear)[::-1, ::-1])


def test_tiff_is_stored_upright() -> None:
    source = encoded(smooth(), "TIFF", orientation=6)
    for keep in (False, True):
        stored = store(source, keep_orientation=keep)
        assert shown(stored.data).size == (48, 64)
        assert stored.upright


def half_clear(mode: str) -> Image.Image:
    """Return a red image whose left half is transparent, with green below."""
    image = Image.new("RGBA", (20, 10), (255, 0, 0, 255))
    image.paste((0, 255, 0, 0), (0, 0, 10, 10))
    return image.convert(mode)


@pytest.mark.parametrize(
    ("kind", "extension"), [("PNG", "png"), ("WEBP", "webp"), ("GIF", "png"), ("TIFF", "png")]
)
def test_transparency_is_detected_and_replaced_by_background(kind: str, extension: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    source = encoded(half_clear("RGBA"), kind, **options)
    kept = store(source)
    assert kept.transparent
    assert (kept.data == source) == (kind in ("PNG", "WEBP"))
    assert shown(kept.data).has_transparency_data
    for background in (WHITE, (0, 0, 255)):
        laid = store(source, background=background)
        assert (laid.transparent, laid.extension) == (True, extension)
        result = shown(laid.data)
        assert result.mode == "RGB"
        assert [result.getpixel(place) for place in ((2, 5), (17, 5))] == [background, (255, 0, 0)]


def test_transparency_of_palettes_and_gray_images() -> None:
    palette = Image.new("P", (8, 8))
    palette.putpalette([0, 0, 0, 255, 0, 0])
    assert store(encoded(palette, "PNG", transparency=0)).transparent
    assert not store(
        encoded(palette, "PNG", transparency=1)
    ).transparent  # the transparent color does not occur
    assert store(encoded(Image.new("RGB", (8, 8), "red"), "PNG", transparency=(255, 0, 0))).transparent
    assert store(encoded(Image.new("LA", (8, 8), (9, 254)), "PNG")).transparent
    assert not store(encoded(Image.new("RGBA", (8, 8), "red"), "PNG"), background=WHITE).transparent
    grey = shown(store(encoded(Image.new("LA", (8, 8), (0, 0)), "PNG"), background=WHITE).data)
    assert (grey.mode, grey.getpixel((0, 0))) == ("RGB", WHITE)


def test_image_is_rotated_laid_on_white_and_reduced_at_once() -> None:
    source = encoded(half_clear("RGBA"), "PNG", orientation=6)  # the left half becomes the top
    result = shown(store(source, background=WHITE, max_side=10).data)
    assert result.size == (5, 10)
    assert [result.getpixel(place) for place in ((2, 1), (2, 8))] == [WHITE, (255, 0, 0)]


def test_max_side_reduces_only_larger_images() -> None:
    large = noise(side=(300, 100))
    for kind, orientation, size in [("JPEG", 6, (20, 60)), ("PNG", None, (60, 20)), ("WEBP", None, (60, 20))]:
        assert shown(store(encoded(large, kind, orientation=orientation), max_side=60).data).size == size
    small = encoded(noise(side=(60, 60)), "JPEG")
    assert store(small, max_side=60).data == small


def test_other_formats_become_png() -> None:
    for kind, mode, stored_mode in [
        ("GIF", "RGB", "RGB"),
        ("TIFF", "L", "L"),
        ("BMP", "1", "L"),
    ]:
        stored = store(encoded(noise(mode), kind))
        assert (stored.extension, shown(stored.data).mode) == ("png", stored_mode)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_deep_grayscale_keeps_its_values(name: str) -> None:
    container, dtype = KINDS[name]
    values = np.random.default_rng(0).integers(0, 30_000, (8, 12)).astype(dtype)
    source = encode_deep(values, container)
    stored = store(source)
    fits_png = np.dtype(dtype).str[1:] == "u2"
    assert (stored.extension, stored.size, stored.deep) == ("png" if fits_png else "tif", (12, 8), True)
    assert (stored.data == source) == (name == "png" or not fits_png)
    assert np.array_equal(gray_values(shown(stored.data)), values)
    if fits_png:
        reduced = store(source, max_side=6)
        expected = Image.fromarray(values.astype(np.uint16)).resize((6, 4), Image.Resampling.BICUBIC)
        assert np.abs(gray_values(shown(reduced.data)).astype(int) - np.asarray(expected)).max() < 3000
        border = Storing(resize=Resize(mode="border", size=6))
        with pytest.raises(BadImage, match="grayscale that cannot be changed without loss"):
            store_image(source, border)
    else:
        with pytest.raises(BadImage, match="grayscale that cannot be changed without loss"):
            store(source, max_side=6)


@pytest.mark.parametrize("kind", readable_formats())
def test_every_format_that_is_decoded_is_stored(kind: str) -> None:
    source = encoded(noise("RGB", side=(32, 32)), kind)
    stored = store(source)
    assert stored.extension == {"JPEG": "jpg", "WEBP": "webp"}.get(kind, "png")
    assert np.array_equal(decode_image(stored.data), decode_image(source))


def test_16_bit_gray_with_alpha_is_refused() -> None:
    source = color_png(np.random.default_rng(0).integers(0, 4096, (8, 8, 2)))
    for options in ({}, {"max_side": 4}):
        with pytest.raises(BadImage, match="convert it to 16-bit grayscale without alpha"):
            store(source, **options)


def test_deep_grayscale_that_would_change_is_refused() -> None:
    white_zero = tiff_of(np.arange(64, dtype="<u2").reshape(8, 8) * 1000, photometric=0)
    assert store(white_zero).data == white_zero
    with pytest.raises(BadImage, match="grayscale that cannot be changed without loss"):
        store(white_zero, max_side=4)
    signed = tiff_of(np.arange(-32, 32, dtype=np.int8).reshape(8, 8))
    assert store(signed).data == signed
    with pytest.raises(BadImage, match="grayscale that cannot be changed without loss"):
        store(signed, max_side=4)
    transparent = encoded(Image.new("I;16", (8, 8), 7), "PNG", transparency=7)
    assert store(transparent).data == transparent
    for change in ({"background": WHITE}, {"max_side": 4}):
        with pytest.raises(BadImage, match="grayscale that cannot be changed without loss"):
            store(transparent, **change)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_broken_image_has_a_cause(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]))
    options = {"orientation": 6} if kind in ("JPEG", "PNG", "WEBP") else {}
    good = bytearray(encoded(noise(side=(16, 12)), kind, **options))
    for _ in range(data.draw(st.integers(1, 8))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    broken = bytes(good[: data.draw(st.integers(1, len(good)))])
    max_side, background = data.draw(st.sampled_from([None, 8])), data.draw(st.sampled_from([None, WHITE]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            stored = store(broken, max_side=max_side, background=background)
        except BadImage as error:
            assert str(error)
        else:
            assert stored.data
            assert stored.extension in ("jpg", "png", "webp", "tif")


SIDES = st.integers(1, 90)


def waves(width: int, height: int) -> Image.Image:
    y, x = np.mgrid[:height, :width]
    levels = [128 + 100 * np.sin(x / 9 + i) * np.cos(y / 11 - i) for i in range(3)]
    return Image.fromarray(np.stack(levels, -1).astype(np.uint8))


@settings(max_examples=60)
@given(SIDES, SIDES, SIDES, st.sampled_from(RESIZE_MODES), st.booleans(), st.sampled_from(["JPEG", "PNG"]))
def test_resized_sizes(width: int, height: int, size: int, mode: Any, enlarge: bool, kind: str) -> None:
    source = encoded(waves(width, height), kind)
    stored = store_image(source, Storing(resize=Resize(mode=mode, size=size, enlarge=enlarge)))
    side = min(width, height) if mode in ("keep_ratio", "center_crop") else max(width, height)
    if side < size and not enlarge:
        assert stored.data == source
        expected = width, height
    elif mode in ("center_crop", "border"):
        expected = size, size
    else:
        expected = tuple(max(1, round(one * size / side)) for one in (width, height))  # type: ignore[assignment]
    assert stored.size == expected == Image.open(io.BytesIO(stored.data)).size
    assert stored.original_size == (width, height)


SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


@cache
def encode_waves(orientation: int, size: tuple[int, int]) -> list[bytes]:
    """Encode the same image as a JPEG, a JPEG with a color profile, and a PNG."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = waves(*size)
    return [
        encoded(image, "JPEG", exif=exif, quality=95),
        encoded(image, "JPEG", exif=exif, quality=95, icc_profile=SRGB),
        encoded(image, "PNG", exif=exif),
    ]


@pytest.mark.parametrize("mode", RESIZE_MODES)
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("size", [(300, 200), (640, 1000)])
def test_fast_path_gives_the_same_image(mode: Any, orientation: int, size: tuple[int, int]) -> None:
    """JPEGs without a color profile are resized without Pillow; JPEGs with a profile and PNGs are not."""
    how = Storing(resize=Resize(mode=mode, size=96))
    results = [store_image(content, how) for content in encode_waves(orientation, size)]
    assert len({(result.size, result.original_size, result.upright) for result in results}) == 1
    shown = [Image.open(io.BytesIO(result.data)) for result in results]
    assert [image.format for image in shown] == ["JPEG", "JPEG", "PNG"]
    assert shown[1].info["icc_profile"] == SRGB
    pixels = [np.asarray(image.convert("L"), dtype=float) for image in shown]  # colors are subsampled
    assert all(np.abs(pixels[0] - other).mean() < 1.5 for other in pixels[1:])
    assert pixels[0].std() > 20


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="choose one of"):
        Resize(mode="squash", size=8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1"):
        Resize(mode="border", size=0)


@pytest.mark.parametrize("layout", list(all_layouts()), ids=str)
def test_packed_tiff_has_the_pixels_of_the_file(layout: Layout) -> None:
    data = layout.encode()
    stored = store(data)
    for channels in range(1, 6):
        for pixel_range in ("auto", "dtype", (0.0, 40000.0)):
            rule = Decoding(channels=channels, pixel_range=pixel_range)
            try:
                expected = decode_pixels(data, rule).pixels
            except PixelRangeError:
                with pytest.raises(PixelRangeError):
                    decode_pixels(stored.data, rule)
                continue
            assert np.array_equal(decode_pixels(stored.data, rule).pixels, expected), (rule, stored.extension)


def test_tiff_of_16_bits_per_color_is_not_reduced_to_8() -> None:
    opaque = Layout(bits=16, channels=3, photometric="rgb").encode()
    assert (store(opaque).data, store(opaque).deep) == (opaque, True)
    with pytest.raises(BadImage, match="16 bits per color"):
        store(opaque, max_side=4)
    transparent = Layout(bits=16, channels=4, photometric="rgb", extra="unassalpha").encode()
    with pytest.raises(BadImage, match="16 bits per color"):
        store(transparent, background=WHITE)
    gray = Layout(bits=8, channels=2, photometric="minisblack", extra="unassalpha").encode()
    stored = store(gray, background=WHITE)
    assert (stored.extension, shown(stored.data).format) == ("png", "PNG")
