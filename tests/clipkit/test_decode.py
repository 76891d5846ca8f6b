"""Pictures of every kind become RGB as Pillow makes it, and broken or hostile ones one clear error."""

import warnings
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from clipkit.decode import decode_image
from clipkit.errors import DataError
from tests.clipkit.made_pictures import PHOTO, PICTURES, encoded, picture, scene


def test_training_reads_what_pillow_makes_rgb() -> None:
    deep = {"16-bit grey png", "16-bit grey tiff", "32-bit grey tiff", "float tiff"}
    for name in PICTURES.keys() - deep:
        data = picture(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert np.array_equal(decode_image(data), np.asarray(Image.open(BytesIO(data)).convert("RGB"))), (
                name
            )


def test_training_scales_sixteen_bits_of_grey() -> None:
    grey = scene(40, 50, 1)[..., 0]
    for kind in ("PNG", "TIFF"):
        data = encoded(Image.fromarray(grey.astype(np.uint16) * 257), kind)
        assert np.array_equal(decode_image(data), np.repeat(grey[..., None], 3, axis=2))


def test_postscript_is_never_run() -> None:
    with pytest.raises(DataError, match="not a picture in a known format"):
        decode_image(encoded(PHOTO, "EPS"))


def test_deep_grey_is_scaled_where_its_range_is_known_and_refused_elsewhere() -> None:
    deep = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    for kind in ("PNG", "PPM", "TIFF"):
        file = BytesIO()
        Image.fromarray(deep).save(file, kind)
        assert np.array_equal(decode_image(file.getvalue())[..., 0], deep >> 8), kind
    for values in (deep.astype(np.int32), deep.astype(np.float32) / 65535):
        file = BytesIO()
        Image.fromarray(values).save(file, "TIFF")
        with pytest.raises(DataError, match="no known range"):
            decode_image(file.getvalue())
