"""Tests of image decoding: pixels equal Pillow's, broken and hostile files raise one clear error."""

import json
import subprocess
import sys
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from clipkit.errors import DataError
from clipkit.model.preprocess import Preprocess, eval_pixels
from clipkit.samples.decode import decode_image, decode_jpeg, jpeg_size
from tests.clipkit.hostile_images import HOSTILE, PIXELS, made, many_scans
from tests.clipkit.made_images import DEEP, IMAGES, PHOTO, encoded, image_file, scene


def test_decode_equals_pillow_rgb() -> None:
    for name in IMAGES.keys() - DEEP:
        data = image_file(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert np.array_equal(decode_image(data), np.asarray(Image.open(BytesIO(data)).convert("RGB"))), (
                name
            )


def test_postscript_is_rejected() -> None:
    with pytest.raises(DataError, match="not an image in a known format"):
        decode_image(encoded(PHOTO, "EPS"))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_image_decodes_or_raises_one_line_error(name: str) -> None:
    data, expected = made(name), HOSTILE[name][1]
    try:
        pixels = decode_image(data)
    except DataError as error:
        assert expected != PIXELS
        assert "\n" not in str(error) and len(str(error)) < 200
        if expected is not None:
            with pytest.raises(DataError, match=expected):
                raise
    else:
        assert expected in (PIXELS, None)
        assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
    try:
        seen = eval_pixels(data, Preprocess(image_size=8))
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert seen.shape == (3, 8, 8)


def test_hostile_images_are_bounded_in_time_and_memory(tmp_path: Path) -> None:
    """All are decoded in one process, whose peak memory is that of the worst."""
    for number, name in enumerate(HOSTILE):
        (tmp_path / str(number)).write_bytes(made(name))
    code = """
import json, resource, sys, time
from pathlib import Path
from PIL import Image
from clipkit.samples.decode import decode_image
from clipkit.errors import DataError

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

decode_image((Path(sys.argv[1]) / "warm").read_bytes())
began, seconds = peak(), {}
for number in range(int(sys.argv[2])):
    data = (Path(sys.argv[1]) / str(number)).read_bytes()
    start = time.process_time()
    try:
        decode_image(data)
    except DataError:
        pass
    seconds[number] = time.process_time() - start
print(json.dumps([peak() - began, max(seconds.values()), max(seconds, key=seconds.get)]))
"""
    (tmp_path / "warm").write_bytes(image_file("png"))
    run = [sys.executable, "-c", code, str(tmp_path), str(len(HOSTILE))]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=120)
    kibibytes, slowest, number = json.loads(done.stdout)
    assert slowest < 5, list(HOSTILE)[number]
    assert kibibytes < 300 << 10  # the largest file alone has 64 MiB


def test_allowed_jpeg_scans_depend_on_the_size() -> None:
    for scans, side in ((400, 300), (20, 3000)):
        assert decode_image(many_scans(scans, side)).shape == (side, side, 3)
    for scans, side in ((501, 16), (400, 3000)):
        with pytest.raises(DataError, match=f"{scans} scans"):
            decode_image(many_scans(scans, side))
        with pytest.raises(DataError, match=f"{scans} scans"):
            eval_pixels(many_scans(scans, side), Preprocess(image_size=8))


@pytest.mark.parametrize("name", sorted(name for name in IMAGES if "jpeg" in name))
def test_jpeg_is_decoded_at_reduced_size(name: str) -> None:
    data = image_file(name)
    height, width, _ = decode_image(data).shape
    assert jpeg_size(data) == (None if name in ("cmyk jpeg", "ycck jpeg") else (height, width))
    for reduce in (2, 4, 8):
        smaller = decode_image(data, reduce=reduce)
        if jpeg_size(data) is None:
            assert smaller.shape == (height, width, 3)
        else:
            assert smaller.shape == (-(-height // reduce), -(-width // reduce), 3)
            means = Image.fromarray(decode_image(data)).reduce(reduce)
            differences = np.abs(smaller.astype(int) - np.asarray(means))
            # at an eighth, libjpeg uses only half of the chroma width that 4:2:2 stores
            assert differences.mean() < (10 if (name, reduce) == ("jpeg 4:2:2", 8) else 2)


def test_jpeg_size_of_other_files_is_none() -> None:
    for data in (b"", b"\xff\xd8\xff", image_file("png"), image_file("jpeg")[:50]):
        assert jpeg_size(data) is None
        assert decode_jpeg(data) is None


FUZZED: dict[str, dict[str, Any]] = {
    "JPEG": {}, "PNG": {}, "WEBP": {}, "GIF": {}, "TIFF": {"compression": "tiff_lzw"}, "JPEG2000": {}, "AVIF": {},
}  # fmt: skip


@settings(deadline=None, max_examples=400)
@given(
    kind=st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", *FUZZED]),
    flips=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=8),
    header=st.booleans(),
    cut=st.floats(0, 1) | st.just(1.0),
    reduce=st.sampled_from([1, 2, 4, 8]),
    progressive=st.booleans(),
)
def test_damaged_image_decodes_or_raises_data_error(
    kind: str, flips: list[tuple[float, int]], header: bool, cut: float, reduce: int, progressive: bool
) -> None:
    options = {"progressive": progressive} if kind == "JPEG" else FUZZED[kind]
    data = bytearray(encoded(Image.fromarray(scene(48, 60)), kind, **options))
    reach = min(64, len(data)) if header else len(data)
    for place, value in flips:
        data[int(place * (reach - 1))] = value
    damaged = bytes(data[: int(cut * len(data))])
    with patch("clipkit.samples.decode.MAX_PIXELS", 2**20):  # larger ones would take seconds
        try:
            pixels = decode_image(damaged, reduce=reduce)
        except DataError as error:
            assert "\n" not in str(error)
        else:
            assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.size


def test_errors_of_truncated_heic_are_one_line() -> None:
    pytest.importorskip("pillow_heif").register_heif_opener()
    data = encoded(Image.fromarray(scene(48, 60)), "HEIF")
    for end in range(100, len(data), 7):
        with pytest.raises(DataError) as caught:
            decode_image(data[:end])
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sampling", [0x14, 0x41, 0x44, 0x13, 0x31, 0x24])
def test_unusual_chroma_sampling_is_decoded_by_pillow(sampling: int) -> None:
    data = bytearray(encoded(Image.fromarray(scene(48, 48)), "JPEG", quality=90))
    data[data.index(b"\xff\xc0") + 11] = sampling  # of luma
    try:
        want = np.asarray(Image.open(BytesIO(data)).convert("RGB"))
    except OSError:
        with pytest.raises(DataError):
            decode_image(bytes(data))
        return
    assert np.abs(decode_image(bytes(data)).astype(int) - want).mean() < 3
