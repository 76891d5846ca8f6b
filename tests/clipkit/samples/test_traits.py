"""Tests of transparency and EXIF orientation: detected in every format, applied only on request."""

import io
import json
import re
import struct
import warnings
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tifffile
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image, ImageOps

from clipkit.errors import CheckpointError, ConfigError
from clipkit.model.preprocess import Preprocess, eval_pixels, pixels_and_traits
from clipkit.samples.decode import decode_image, decode_pixels, jpeg_orientation, pillow_errors
from clipkit.samples.depth import PixelRangeError
from clipkit.samples.traits import (
    Color,
    Decoding,
    TraitCounts,
    Traits,
    color_of,
    is_transparent,
    read_orientation,
)
from tests.clipkit.made_images import DEEP, IMAGES, encoded, image_file, scene

WHITE = (255, 255, 255)
PREPROCESS = Preprocess(image_size=8)
colors = st.tuples(*[st.integers(0, 255)] * 3)
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr", "I;16")


def alpha_of(image: Image.Image) -> npt.NDArray[np.uint8]:
    """The alpha channel (H, W) uint8, by Pillow alone."""
    if image.mode == "I;16":
        return np.where(np.asarray(image) == image.info.get("transparency", -1), 0, 255).astype(np.uint8)
    return np.asarray(image.convert("RGBA").getchannel("A"))


def reference(image: Image.Image, background: Color) -> Image.Image:
    """Composite over a plain background, as Pillow's documentation does."""
    if image.mode == "I;16":
        layer = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8)).convert("RGBA")
        layer.putalpha(Image.fromarray(alpha_of(image)))
    else:
        layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, (*background, 255)), layer).convert("RGB")


@st.composite
def images(draw: st.DrawFn) -> Image.Image:
    """An image of any mode, with or without transparent pixels."""
    mode = draw(st.sampled_from(MODES))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    size = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    if mode == "I;16":
        image = Image.fromarray(random.integers(0, 4, size[::-1], dtype=np.uint16) * 20000)
        if draw(st.booleans()):
            image.info["transparency"] = draw(st.integers(0, 4)) * 20000
        return image
    rgba = random.integers(0, 256, (*size[::-1], 4), dtype=np.uint8)
    kind = draw(st.sampled_from(("opaque", "one bit", "any")))
    if kind == "opaque":
        rgba[..., 3] = 255
    elif kind == "one bit":
        rgba[..., 3] = random.integers(0, 2, size[::-1]) * 255
    image = Image.fromarray(rgba)
    if mode in ("RGBA", "LA"):
        return image.convert(mode)
    if mode == "RGBa":
        return image.convert(mode)
    if mode in ("P", "PA"):
        plain = image.convert("RGB").quantize(8)
        if mode == "P" and kind != "opaque":
            plain.info["transparency"] = draw(
                st.sampled_from((0, 3, bytes(range(8)), b"\xff" * 8, b"\xff\x80"))
            )
        return plain if mode == "P" else plain.convert("PA")
    image = image.convert("RGB").convert(mode)
    if mode in ("1", "L") and draw(st.booleans()):
        image.info["transparency"] = int(np.asarray(image).flat[0])
    elif mode == "RGB" and draw(st.booleans()):
        image.info["transparency"] = tuple(np.asarray(image)[0, 0].tolist())
    return image


@settings(deadline=None, max_examples=300)
@given(image=images(), background=colors)
def test_background_is_applied_to_transparent_images_only(image: Image.Image, background: Color) -> None:
    transparent = bool(alpha_of(image).min() < 255)
    assert is_transparent(image) == transparent
    wanted = reference(image, background) if transparent else image
    preprocess = replace(PREPROCESS, pixel_range="dtype")
    found, traits = pixels_and_traits(image, replace(preprocess, background=background))
    assert torch.equal(found, eval_pixels(wanted, preprocess))
    assert traits == Traits(transparent=transparent, cmyk=image.mode == "CMYK")
    assert pixels_and_traits(image, preprocess)[1] == traits


@settings(deadline=None, max_examples=200)
@given(image=images(), background=colors, kind=st.sampled_from(("PNG", "WEBP", "GIF", "TIFF")))
def test_background_of_encoded_files_equals_pillow(image: Image.Image, background: Color, kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    if "transparency" in image.info:
        options["transparency"] = image.info["transparency"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of a transparent color that is not in the palette
            data = encoded(image, kind, **options)
    except (OSError, KeyError, ValueError, TypeError):  # the format does not support the mode
        return
    with Image.open(io.BytesIO(data)) as opened:
        opened.load()
        transparent = bool(alpha_of(opened).min() < 255)
        cmyk = opened.mode == "CMYK"
        plain = decode_pixels(data, Decoding(pixel_range="dtype")).pixels.transpose(1, 2, 0)
        wanted = np.asarray(reference(opened, background)) if transparent else plain
    decoded = decode_pixels(data, Decoding(background=background, pixel_range="dtype"))
    assert decoded.traits == Traits(transparent=transparent, cmyk=cmyk)
    assert np.array_equal(decoded.pixels.transpose(1, 2, 0), wanted)


def png(bits: int, color: int, row: bytes, width: int, key: bytes) -> bytes:
    """Encode a one-row PNG with a transparent color, in forms that Pillow does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        ends = struct.pack(">I", len(content)), struct.pack(">I", zlib.crc32(kind + content))
        return ends[0] + kind + content + ends[1]

    header = struct.pack(">IIBBBBB", width, 1, bits, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(kind, content)
        for kind, content in (
            (b"IHDR", header), (b"tRNS", key), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b""),
        )
    )  # fmt: skip


GREY, RGB = 0, 2


@pytest.mark.parametrize(
    ("data", "wanted"),  # expected RGB of the row's pixels on background (1, 2, 3)
    [
        (png(1, GREY, b"\x40", 2, b"\0\1"), [(0, 0, 0), (1, 2, 3)]),
        (png(2, GREY, b"\x1b", 4, b"\0\1"), [(0,) * 3, (1, 2, 3), (170,) * 3, (255,) * 3]),
        (png(2, GREY, b"\x1b", 4, b"\0\3"), [(0,) * 3, (85,) * 3, (170,) * 3, (1, 2, 3)]),
        (png(4, GREY, b"\x12", 2, b"\0\1"), [(1, 2, 3), (34,) * 3]),
        (png(4, GREY, b"\xf0", 2, b"\0\x0f"), [(1, 2, 3), (0,) * 3]),
        (png(4, GREY, b"\x12", 2, b"\0\x11"), [(1, 2, 3), (34,) * 3]),  # only the lowest bits are compared
        (png(4, GREY, b"\x12", 2, b"\0\3"), None),
        (png(8, GREY, b"\1\x11", 2, b"\0\1"), [(1, 2, 3), (17,) * 3]),
        (png(16, RGB, b"\xff" * 6 + b"\1\2\3\4\5\6", 2, b"\1\2\3\4\5\6"), [(255,) * 3, (1, 2, 3)]),
        (png(16, RGB, b"\xff" * 6 + b"\1\2\3\4\5\6", 2, b"\xff" * 6), [(1, 2, 3), (1, 3, 5)]),
        (png(16, RGB, b"\xff" * 6 + b"\1\2\3\4\5\6", 2, b"\0" * 6), None),
        (png(8, RGB, b"\xff" * 3 + b"\1\3\5", 2, b"\0\1\0\3\0\5"), [(255,) * 3, (1, 2, 3)]),
    ],
)  # fmt: skip
def test_transparent_png_color_applies_at_every_bit_depth(data: bytes, wanted: list[Color] | None) -> None:
    plain = decode_image(data)
    decoded = decode_pixels(data, Decoding(background=(1, 2, 3)))
    assert decoded.pixels[:, 0].T.tolist() == (
        plain[0].tolist() if wanted is None else [list(one) for one in wanted]
    )
    deep_colors = data[24:26] == b"\x10\x02"  # 16 bits, RGB
    traits = Traits(transparent=wanted is not None, deep_colors=deep_colors)
    assert decoded.traits == decode_pixels(data).traits == traits
    assert np.array_equal(decode_pixels(data).pixels.transpose(1, 2, 0), plain)
    squash = Preprocess(image_size=8, resize_mode="squash", background=(1, 2, 3))
    opened = Image.open(io.BytesIO(data))
    expected = eval_pixels(Image.fromarray(decoded.pixels.transpose(1, 2, 0)), squash)
    for _ in range(2):  # an image opened by the caller may be read repeatedly
        for source in (data, opened):
            found, traits = pixels_and_traits(source, squash)
            assert torch.equal(found, expected) and traits.transparent == decoded.traits.transparent


@pytest.mark.parametrize("name", sorted(IMAGES.keys() - DEEP))
def test_traits_are_ignored_by_default(name: str) -> None:
    data = image_file(name)
    plain = decode_image(data)
    decoded = decode_pixels(data)
    assert np.array_equal(decoded.pixels.transpose(1, 2, 0), plain)
    clear = "alpha" in name or "clear" in name
    assert decoded.traits.rotated == (name == "jpeg turned by exif")
    assert decoded.traits.transparent <= clear
    assert decoded.traits == pixels_and_traits(data, PREPROCESS)[1]
    if not any(decoded.traits):
        changed = decode_pixels(data, Decoding(background=(1, 2, 3), upright=True))
        assert np.array_equal(changed.pixels.transpose(1, 2, 0), plain)


def rotated(kind: str, orientation: int, mode: str = "RGB") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(Image.fromarray(scene(40, 64)).convert(mode), kind, exif=exif, **QUALITY.get(kind, {}))


QUALITY: dict[str, dict[str, Any]] = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "CMYK JPEG", "RGBA PNG", "P PNG"])
@pytest.mark.parametrize("orientation", range(10))
def test_orientation_is_applied_as_by_pillow(kind: str, orientation: int) -> None:
    mode, _, form = kind.rpartition(" ")
    data = rotated(form, orientation, mode or "RGB")
    with Image.open(io.BytesIO(data)) as opened:
        upright = ImageOps.exif_transpose(opened)
    decoded = decode_pixels(data, Decoding(upright=True))
    apart = np.abs(decoded.pixels.transpose(1, 2, 0).astype(int) - np.asarray(upright.convert("RGB")))
    assert decoded.pixels.transpose(1, 2, 0).flags.c_contiguous
    assert apart.max() <= (3 if form == "JPEG" else 0)
    turned = 2 <= orientation <= 8 and form != "TIFF"  # Pillow rotates TIFFs when it loads them
    assert decoded.traits == decode_pixels(data).traits == Traits(rotated=turned, cmyk=mode == "CMYK")
    preprocess = replace(PREPROCESS, upright=True)
    found, traits = pixels_and_traits(data, preprocess)
    assert torch.equal(found, eval_pixels(upright, PREPROCESS))
    assert torch.equal(found, eval_pixels(Image.open(io.BytesIO(data)), preprocess))
    assert traits == decoded.traits


def test_orientation_and_background_combine() -> None:
    image = Image.fromarray(scene(40, 64, 4), "RGBA")
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(image, "PNG", exif=exif)
    wanted = reference(image, WHITE).transpose(Image.Transpose.ROTATE_270)
    decoded = decode_pixels(data, Decoding(background=WHITE, upright=True))
    assert np.array_equal(decoded.pixels.transpose(1, 2, 0), np.asarray(wanted))
    assert decoded.traits == Traits(transparent=True, rotated=True)
    both = replace(PREPROCESS, background=WHITE, upright=True)
    assert torch.equal(eval_pixels(data, both), eval_pixels(wanted, PREPROCESS))


def by_pillow(data: bytes) -> int:
    with pillow_errors(), Image.open(io.BytesIO(data)) as image:
        return read_orientation(image)


def with_segment(content: bytes) -> bytes:
    """A JPEG with an APP1 segment of this content."""
    plain = encoded(Image.new("RGB", (8, 8)), "JPEG")
    return plain[:2] + b"\xff\xe1" + (len(content) + 2).to_bytes(2, "big") + content + plain[2:]


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_jpeg_orientation_equals_pillow(data: st.DataObject) -> None:
    exif = Image.Exif()
    exif.endian = data.draw(st.sampled_from("<>"))
    for tag, values in (
        (0x0112, st.integers(0, 9)),
        (0x010F, st.text("abc", max_size=9)),
        (0x011A, st.just(72.0)),
    ):
        if data.draw(st.booleans()):
            exif[tag] = data.draw(values)
    content = bytearray(exif.tobytes())
    for _ in range(data.draw(st.integers(0, 2))):  # damage
        content[data.draw(st.integers(6, len(content) - 1))] = data.draw(st.integers(0, 255))
    jpeg = with_segment(bytes(content[: data.draw(st.integers(6, len(content)) | st.just(len(content)))]))
    assert jpeg_orientation(jpeg) == by_pillow(jpeg)


@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize("form", ['<x tiff:Orientation="{}"/>', "<tiff:Orientation>{}</tiff:Orientation>"])
def test_xmp_orientation_is_applied(form: str, orientation: int) -> None:
    data = with_segment(b"http://ns.adobe.com/xap/1.0/\0" + form.format(orientation).encode())
    assert jpeg_orientation(data) == by_pillow(data) == orientation
    assert decode_pixels(data).traits.rotated == (orientation != 1)


def test_default_preprocess_is_stored_without_decoding_options() -> None:
    plain = {
        "image_size": 8, "mean": PREPROCESS.mean, "std": PREPROCESS.std, "interpolation": "bicubic",
        "resize_mode": "shortest", "fill_color": 0,
    }  # fmt: skip
    assert PREPROCESS.to_dict() == plain
    assert "background" not in repr(PREPROCESS) and "upright" not in repr(PREPROCESS)
    assert Preprocess.from_dict(plain) == PREPROCESS


def test_decoding_options_round_trip() -> None:
    chosen = PREPROCESS.replace_decoding(background="white", upright=True)
    assert chosen.decoding == Decoding(background=WHITE, upright=True)
    assert Preprocess.from_dict(json.loads(json.dumps(chosen.to_dict()))) == chosen
    assert chosen.replace_decoding() == chosen
    assert chosen.replace_decoding(background="none", upright=False) == PREPROCESS
    for wrong in (
        {"background": [1, 2]},
        {"background": [0, 0, 256]},
        {"background": "white"},
        {"upright": 1},
    ):
        with pytest.raises(CheckpointError, match=r"background|upright"):
            Preprocess.from_dict({"image_size": 8, **wrong})


def test_colors_are_names_hex_or_tuples() -> None:
    assert color_of("white") == color_of("#fff") == color_of("#FFFFFF") == WHITE
    assert color_of("none") is color_of("None") is None
    with pytest.raises(ConfigError, match="background = 'wite' is not a color: use a color such as white"):
        color_of("wite")
    assert color_of((1, 2, 255)) == (1, 2, 255)
    assert color_of("#ff0000ff") == color_of("#f00f") == (255, 0, 0)


@pytest.mark.parametrize("color", ["#ff000000", "#ff0000fe", "#f000", "rgba(255, 0, 0, 0)"])
def test_transparent_background_color_is_rejected(color: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(f'background = {color!r}')} is not opaque: .+$"):
        color_of(color)


@pytest.mark.parametrize(
    "color",
    [255, (1, 2), (0, 0, 256), (0, 0, -1), (0.5, 0, 0), (True, 0, 0), [0, 0, 0], b"white", "rgb(300,0,0)"],
)
def test_invalid_color_raises_one_line_error(color: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(f'background = {color!r}')} is not a color: .+$"):
        color_of(color)


def tiff_of(*pages: npt.NDArray[Any], **options: Any) -> bytes:
    file = io.BytesIO()
    with tifffile.TiffWriter(file, byteorder=options.pop("byteorder", "<")) as writer:
        for page in pages:
            writer.write(page, **options)
    return file.getvalue()


@given(st.integers(2, 12), st.sampled_from(["uint8", "uint16", "float32"]), st.booleans())
def test_pages_of_one_channel_are_counted(count: int, dtype: str, big: bool) -> None:
    pages = [np.full((8, 9), value, dtype) for value in range(count)]
    data = tiff_of(*pages, byteorder=">" if big else "<")
    rule = Decoding(pixel_range=(0.0, 255.0))
    traits = decode_pixels(data, rule).traits
    assert traits == Traits(pages=True, file_channels=count)
    counts = TraitCounts()
    counts.add(traits, Traits(), traits)
    line = counts.lines(rule, background="", upright="")["pages"]
    assert line.startswith(f"2 of 3 images have {count} pages, of which the first is used")
    assert (f"train with pixels.channels={count}," in line) == (count != 3)
    with pytest.raises(PixelRangeError, match=f"image with {count} channels?, and the model has 13"):
        decode_pixels(data, replace(rule, channels=13))
    if count != 3:
        pixels = decode_pixels(data, replace(rule, channels=count)).pixels
        assert pixels[:, 0, 0].tolist() == [*range(count)]
    counts.add(Traits(pages=True, file_channels=count + 1))
    line = counts.lines(rule, background="", upright="")["pages"]
    assert "have several pages" in line and "pixels.channels" not in line


def test_other_pages_and_channels_beyond_rgb() -> None:
    gray, small = np.zeros((8, 9), np.uint8), np.zeros((4, 4), np.uint8)
    rgb = np.zeros((8, 9, 3), np.uint8)
    assert decode_pixels(tiff_of(gray, small, small)).traits == Traits()
    assert decode_pixels(tiff_of(gray, small, gray)).traits == Traits(frames=True)
    assert decode_pixels(tiff_of(rgb, rgb, photometric="rgb")).traits == Traits(frames=True)
    six = decode_pixels(tiff_of(np.zeros((8, 9, 6), np.uint8), photometric="rgb")).traits
    assert six == Traits(extra_channels=True, file_channels=6)
    near_infrared = tiff_of(np.zeros((8, 9, 4), np.uint8), photometric="rgb", extrasamples=["unspecified"])
    assert decode_pixels(near_infrared).traits == Traits(extra_channels=True, file_channels=4)
    counts = TraitCounts()
    counts.add(six)
    line = counts.lines(Decoding(), background="", upright="")["extra_channels"]
    assert line.startswith("1 of 1 image has 6 channels") and "train with pixels.channels=6," in line
    # a damaged second page does not make the first unreadable
    assert decode_pixels(tiff_of(gray, gray)[:-30]).pixels.shape == (3, 8, 9)


def test_unapplied_traits_are_reported() -> None:
    counts = TraitCounts()
    counts.add(Traits(transparent=True), Traits(rotated=True), Traits(rotated=True), Traits())
    lines = counts.lines(Decoding(), background="--background white", upright="--upright")
    assert lines == {
        "transparent": "1 of 4 images is transparent and without a background: the colors hidden under the "
        "transparent parts are used, as open_clip does; set --background white",
        "rotated": "2 of 4 images are rotated by an EXIF tag that is not applied, as in open_clip; set --upright",
    }
    deep = TraitCounts()
    deep.add(Traits(deep_colors=True), Traits())
    assert deep.lines(Decoding(), background="", upright="") == {
        "deep_colors": "1 of 2 images has 16 bits per color, of which the upper 8 are used"
    }
    assert not counts.lines(Decoding(background=WHITE, upright=True), background="x", upright="y")
    assert not counts.lines(Decoding(), background="", upright="")
    assert not TraitCounts(images=4).lines(Decoding(), background="x", upright="y")
