"""Image formats that Pillow does not read: DICOM, numpy arrays, HEIC, and TIFFs of many channels or of floats.

Except for arrays, their libraries are in the extra ``formats``. Values are those that the files mean: in DICOM the
rescale slope and intercept are applied. The window that a DICOM file suggests is not, because it differs between
images, so that the same value would get different grays; ``pixels.range`` is the window. Of several frames or pages
the first is read. Sizes are checked before anything is decoded, and no code is executed.

Letters: H height, W width, B bands.
"""

import io
import zipfile
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError
from clipkit.samples.depth import Bands
from clipkit.samples.traits import upright_array

MAX_PIXELS = 178_956_970  # Pillow's limit against decompression bombs
MAX_TILE = 2**24  # pixels per TIFF tile, unless the image has at least a quarter as many
_MAX_VALUES = 3 * MAX_PIXELS
_DEFLATED_DICOM = (
    b"1.2.840.10008.1.2.1.99"  # transfer syntax whose size is not known before it is decompressed
)


def refuse_too_large(height: int, width: int, bands: int = 1) -> None:
    """Raise DataError if an image has too many pixels or values."""
    if height * width > MAX_PIXELS or height * width * bands > _MAX_VALUES:
        raise DataError(f"image has more than {MAX_PIXELS} pixels")


def read_bands(data: bytes, name: str, *, channels: int) -> Bands | None:
    """Read an image in a format that Pillow does not read; return None for other formats.

    Args:
        data: the file's bytes.
        name: its format, see ``clipkit.samples.image_types.image_format``.
        channels: C, which tells (H, W, C) from (C, H, W).
    """
    readers: dict[str, Callable[[], Bands]] = {
        "DICOM": lambda: _read_dicom(data),
        "NPY": lambda: _read_array(io.BytesIO(data), channels),
        "NPZ": lambda: _read_archive(data, channels),
        "TIFF": lambda: _read_tiff(data, channels),
    }
    if name not in readers:
        return None
    try:
        bands = readers[name]()
    except DataError:
        raise
    except Exception as error:  # the libraries document no exceptions for damaged files
        raise DataError(f"image does not decode: {' '.join(str(error).split())[:200]}") from error
    if not bands.values.size:
        raise DataError("image has no pixels")
    return bands


def register_heif() -> None:
    """Let Pillow open HEIC; its rotation is part of the format and always applied."""
    _import_extra("pillow_heif", "HEIC").register_heif_opener()


def _import_extra(module: str, name: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.replace("_", "-")
        raise DataError(f"{name} images need {package}: pip install -e '.[formats]'") from error


def _read_dicom(data: bytes) -> Bands:
    pydicom = _import_extra("pydicom", "DICOM")
    pixels = import_module("pydicom.pixels")
    if _DEFLATED_DICOM in data[:4096]:
        raise DataError("a deflated DICOM file cannot be read: convert it to another transfer syntax")
    dataset = pydicom.dcmread(io.BytesIO(data))
    photometric = str(dataset.get("PhotometricInterpretation", ""))
    if photometric == "PALETTE COLOR":
        raise DataError("DICOM images with a palette cannot be read: convert them to RGB")
    refuse_too_large(int(dataset.Rows), int(dataset.Columns), int(dataset.get("SamplesPerPixel", 1)))
    values = pixels.pixel_array(dataset, index=0)
    if (dataset.get("RescaleSlope", 1), dataset.get("RescaleIntercept", 0)) != (1, 0):
        values = pixels.apply_rescale(values, dataset)
    return Bands(
        values if values.ndim == 3 else values[..., None],
        white_zero=photometric == "MONOCHROME1",
        several=int(dataset.get("NumberOfFrames", None) or 1) > 1,
    )


def _read_archive(data: bytes, channels: int) -> Bands:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        if len(names) != 1:
            raise DataError(f"an .npz file of {len(names)} arrays is not an image: expected one array")
        with archive.open(names[0]) as file:
            return _read_array(file, channels)


def _read_array(file: Any, channels: int) -> Bands:
    start = file.tell()
    version = np.lib.format.read_magic(file)
    read_header = (
        np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read_header(file)
    if dtype.kind not in "uif" or len(shape) not in (2, 3) or 0 in shape:
        raise DataError(
            f"an array {shape} of {dtype} is not an image: expected (H, W), (H, W, C) or (C, H, W) of integers or "
            "floats"
        )
    first = len(shape) == 3 and _has_channels_first(shape, channels)
    height, width = shape[1:] if first else shape[:2]
    refuse_too_large(height, width, int(np.prod(shape)) // (height * width))
    file.seek(start)
    values = np.lib.format.read_array(file, allow_pickle=False)
    if values.ndim == 2:
        values = values[..., None]
    return Bands(np.moveaxis(values, 0, 2) if first else values)


def _has_channels_first(shape: tuple[int, ...], channels: int) -> bool:
    if channels in (shape[0], shape[2]):
        return shape[2] != channels
    if shape[0] == shape[1]:  # a square image
        return False
    return shape[1] == shape[2] or shape[0] < shape[2]


def _read_tiff(data: bytes, channels: int) -> Bands:
    """Read the first page of a TIFF with all channels and bits, or the pages if each has one of the channels."""
    tifffile = _import_extra(
        "tifffile", "TIFF images that are damaged, of floats, planes or many channels; such"
    )
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        page = file.pages[0]
        height = page.imagelength
        width = page.imagewidth
        bands = page.samplesperpixel
        pages = [page]
        if bands == 1 and len(file.pages) == channels > 1:
            pages = list(file.pages)
        refuse_too_large(height, width, bands * len(pages))
        if page.tilewidth * page.tilelength > max(MAX_TILE, 4 * height * width):
            raise DataError(f"tiles of {page.tilewidth} x {page.tilelength} pixels are larger than the image")
        if page.imagedepth != 1 or page.photometric == tifffile.PHOTOMETRIC.PALETTE:
            raise DataError("TIFF images with a palette or several planes in depth cannot be read")
        if any(other.shape != page.shape for other in pages):
            raise DataError("the pages of a TIFF with one channel each have different sizes")
        arrays = [other.asarray() for other in pages]
        if page.axes == "SYX":
            values = np.moveaxis(arrays[0], 0, 2)
        else:
            values = np.concatenate([array.reshape(height, width, bands) for array in arrays], axis=2)
        if page.bitspersample < 8 and values.dtype.kind in "bu":
            values = _to_8_bits(values, page.bitspersample)
        if values.dtype.kind not in "uif":
            raise DataError(f"a TIFF of {values.dtype} is not an image: expected integers or floats")
        orientation = page.tags.get("Orientation")
        values = upright_array(values, 1 if orientation is None else int(orientation.value))
        return Bands(
            values,
            white_zero=page.photometric == tifffile.PHOTOMETRIC.MINISWHITE,
            several=len(file.pages) > len(pages) and not file.pages[1].is_reduced,
        )


def _to_8_bits(values: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    """Scale values of fewer than 8 bits to 0–255, as Pillow does."""
    scaled: npt.NDArray[np.uint8] = (values.astype(np.uint16) * 255 // (2**bits - 1)).astype(np.uint8)
    return scaled
