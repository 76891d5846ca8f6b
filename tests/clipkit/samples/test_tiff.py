"""Tests of TIFFs in all layouts, compared with the values that were written."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tifffile
from PIL import Image

from clipkit.errors import DataError
from clipkit.samples.decode import decode_pixels
from clipkit.samples.depth import PixelRangeError
from clipkit.samples.traits import Decoding
from tests.clipkit.tiff_layouts import Layout, all_layouts

RANGE = (0.0, 40000.0)
EVERY_LAYOUT = pytest.mark.parametrize("layout", list(all_layouts()), ids=str)


def map_values(values: npt.NDArray[Any], layout: Layout) -> npt.NDArray[np.uint8]:
    """Map values to 8 bits with ``RANGE``."""
    if layout.bits == 16:
        values = np.rint(np.clip(values, *RANGE) * 255 / RANGE[1])
    pixels = values.astype(np.uint8)
    if layout.bits == 1:
        pixels = pixels * 255
    return 255 - pixels if layout.photometric == "miniswhite" else pixels


@pytest.mark.parametrize("layout", [layout for layout in all_layouts() if layout.channels != 3], ids=str)
def test_every_channel_has_the_values_of_the_file(layout: Layout) -> None:
    pixels = decode_pixels(layout.encode(), Decoding(channels=layout.channels, pixel_range=RANGE)).pixels
    assert np.array_equal(np.moveaxis(pixels, 0, 2), map_values(layout.values(), layout))


def expected_colors(layout: Layout, *, pixel_range: object) -> npt.NDArray[np.uint8]:
    """Return the pixels of three channels, or of one for grayscale."""
    pixels = map_values(layout.values(), layout)
    if layout.bits == 16 and (layout.extra or layout.channels > 3 or pixel_range == "auto"):
        # Pillow reduces colors to the upper 8 bits
        pixels = (layout.values() >> 8).astype(np.uint8)
    if layout.photometric == "separated":
        return np.asarray(
            Image.frombytes("CMYK", pixels.shape[1::-1], pixels[..., :4].tobytes()).convert("RGB")
        )
    if layout.extra == "assocalpha":
        premultiplied = Image.frombytes("RGBa", pixels.shape[1::-1], pixels.tobytes())
        return np.asarray(premultiplied.convert("RGBA"))[..., :3]
    return pixels[..., :3] if layout.channels >= 3 and not layout.pages else pixels[..., :1]


@EVERY_LAYOUT
@pytest.mark.parametrize("pixel_range", ["auto", RANGE])
def test_colors_are_those_of_the_file_or_an_error(layout: Layout, pixel_range: Any) -> None:
    rule = Decoding(pixel_range=pixel_range)
    is_gray = layout.photometric.startswith("min") and (layout.channels == 1 or layout.pages)
    try:
        pixels = decode_pixels(layout.encode(), rule).pixels
    except PixelRangeError:
        assert is_gray or layout.channels != 3 or (layout.bits == 16 and pixel_range == "auto")
        assert layout.bits == 16 or layout.channels not in (1, 3)
        return
    if is_gray and layout.bits == 16:
        assert np.array_equal(pixels[0], map_values(layout.values(), layout)[..., 0])
        return
    expected = expected_colors(layout, pixel_range=pixel_range)
    assert np.array_equal(np.moveaxis(pixels, 0, 2), np.broadcast_to(expected, (*expected.shape[:2], 3)))


@pytest.mark.parametrize("big_endian", [False, True])
def test_planes_of_16_bits_need_tifffile(big_endian: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(bits=16, channels=3, photometric="rgb", planes=True, big_endian=big_endian)
    with pytest.raises(PixelRangeError, match="16-bit image of 3 channels"):
        decode_pixels(layout.encode())
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(DataError, match="need tifffile"):
        decode_pixels(layout.encode())


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int16", "uint32", "int32", "float32", "float64"])
@pytest.mark.parametrize("compression", [None, "zlib", "lzw"])
@pytest.mark.parametrize("byte_order", "<>")
def test_grays_of_all_types_have_the_values_of_the_file(
    dtype: str, compression: Any, byte_order: Any
) -> None:
    values = np.random.default_rng(0).integers(0, 120, (6, 9)).astype(dtype)
    file = io.BytesIO()
    tifffile.imwrite(file, values, photometric="minisblack", compression=compression, byteorder=byte_order)
    pixels = decode_pixels(file.getvalue(), Decoding(pixel_range=(0.0, 255.0))).pixels
    assert np.array_equal(pixels, np.broadcast_to(values.astype(np.uint8), (3, 6, 9)))


@pytest.mark.parametrize("orientation", [0, 9])
def test_invalid_orientation_is_ignored(orientation: int, caplog: pytest.LogCaptureFixture) -> None:
    values = np.random.default_rng(0).integers(0, 256, (6, 9, 5), dtype=np.uint8)
    file = io.BytesIO()
    tag = (274, "H", 1, orientation, True)
    tifffile.imwrite(file, values, photometric="minisblack", planarconfig="contig", extratags=[tag])
    pixels = decode_pixels(file.getvalue(), Decoding(channels=5)).pixels
    assert np.array_equal(np.moveaxis(pixels, 0, 2), values)
    assert caplog.text == ""


def test_libraries_print_nothing_about_each_image(tmp_path: Path) -> None:
    files: dict[str, Any] = {
        "bands": np.zeros((6, 9, 12), np.uint16),
        "orientation": np.zeros((6, 9, 5), np.uint8),
    }
    tag = (274, "H", 1, 9, True)
    for name, values in files.items():
        path = tmp_path / f"{name}.tif"
        tifffile.imwrite(path, values, photometric="minisblack", planarconfig="contig", extratags=[tag])
    program = (
        "import sys; from pathlib import Path; from clipkit.samples.decode import read_beyond_pillow, Decoding\n"
        "for path in sys.argv[1:]: print(read_beyond_pillow(Path(path).read_bytes(), Decoding()).values.shape)"
    )
    command = [sys.executable, "-c", program, *sorted(map(str, tmp_path.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("(6, 9, 12)\n(6, 9, 5)\n", "")
