"""Formats of images: which files are images, and formats that Pillow does not read.

These are DICOM, numpy arrays, HEIC, and TIFFs of many channels or of floats.

Except for arrays, their libraries are in the extra ``formats``. Values are those that the files mean: in DICOM the
rescale slope and intercept are applied. The window that a DICOM file suggests is not, because it differs between
images, so that the same value would get different grays; ``pixels.range`` is the window. Of several frames or pages
the first is read. Sizes are checked before anything is decoded, and no code is executed.

Letters: H height, W width, B bands.
"""

import io
import logging
import re
import stat
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from clipkit.errors import DataError
from clipkit.samples.depth import Bands
from clipkit.samples.traits import upright_array

# The order matters for messages. Stored shard indexes depend on this list.
IMAGE_EXTENSIONS = (
    "jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "jp2", "avif", "jpe", "heic", "heif",
    "dcm",
)  # fmt: skip
IMAGE_SUFFIXES = frozenset(f".{extension}" for extension in IMAGE_EXTENSIONS)
# Arrays are images only if a table or a setting names them: in folders and shards they are often features.
ARRAY_EXTENSIONS = ("npy", "npz")
# Names of members of shards that are images; the arrays only in samples without another image.
ARRAY_MEMBERS = tuple(f"image.{extension}" for extension in ARRAY_EXTENSIONS)
IMAGE_MEMBERS = (*IMAGE_EXTENSIONS, *ARRAY_MEMBERS)
# Extensions of images that can be read, besides IMAGE_EXTENSIONS.
_MORE_IMAGES = frozenset((
    "apng", "dib", "dicom", "hif", "ico", "j2k", "jfi", "jfif", "jif", "jpx", "mpo", "pbm", "pcx", "pjp", "pjpeg",
    "pnm", "qoi", "tga",
))  # fmt: skip
# Extensions of images that cannot be read. Raw formats of cameras begin like TIFF and contain a thumbnail.
_UNREADABLE_IMAGES = frozenset((
    "3fr", "arw", "cr2", "cr3", "crw", "dcr", "dng", "erf", "exr", "iiq", "jxl", "jxr", "kdc", "mef", "mos", "mrw",
    "nef", "nrw", "orf", "pef", "psb", "psd", "raf", "rw2", "rwl", "sr2", "srf", "srw", "svg", "svgz", "wdp", "x3f",
    "xcf",
))  # fmt: skip
# Extensions of files that are not images, and that often lie beside many images; they are not opened.
_OTHER_FILES = frozenset((
    "aae", "cap", "caption", "captions", "csv", "db", "html", "ini", "json", "jsonl", "log", "md", "mov", "mp4",
    "parquet", "pt", "tags", "tar", "text", "thm", "toml", "tsv", "txt", "wav", "xml", "xmp", "yaml", "zip",
))  # fmt: skip
_HEAD = 1024  # bytes of a file that its format is recognized from
# How files of a format begin.
_READABLE = {
    "JPEG": rb"\xff\xd8\xff",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "GIF": rb"GIF8[79]a",
    "WEBP": rb"RIFF.{4}WEBP",
    "BMP": rb"BM.{4}\0{4}",
    "TIFF": rb"II[*+]\0|MM\0[*+]",
    "AVIF": rb".{4}ftyp(?:mif1.{4,32})?avi[fs]",
    "JPEG 2000": rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51",
    "QOI": rb"qoif",
    "HEIC": rb".{4}ftyp(?:hei|hev|mif1|msf1)",
    "DICOM": rb".{128}DICM",
    "NPY": rb"\x93NUMPY",
    "NPZ": rb"PK\x03\x04.{26,100}\.npy",
}
_UNREADABLE = {
    "JXL": rb"\xff\x0a|\0\0\0\x0cJXL ",
    "PSD": rb"8BPS\0[\x01\x02]",
    "SVG": rb"(?:\xef\xbb\xbf)?\s*<(?:svg|(?:\?xml|!--|!DOCTYPE svg).*<svg)\b",
    "CR3": rb".{4}ftypcrx",
    "EXR": rb"v/1\x01",
    "HDR": rb"#\?(?:RADIANCE|RGBE)",
}
_SIGNATURES = {
    name: re.compile(pattern, re.DOTALL) for name, pattern in (*_READABLE.items(), *_UNREADABLE.items())
}


def image_format(data: bytes) -> str:
    """Return the format of an image from the first bytes of its file, "" if they are of no known format."""
    head = data[:_HEAD]
    return next((name for name, pattern in _SIGNATURES.items() if pattern.match(head)), "")


def describe_unreadable(data: bytes) -> str:
    """Return why an image in a format that is not decoded cannot be read."""
    name = image_format(data)
    if name == "TIFF":
        return "a TIFF that is damaged or of a kind that cannot be read: convert it to 8 or 16 bits"
    if name in _UNREADABLE:
        return _cannot_read(name)
    return "not an image in a known format"


def _cannot_read(name: str) -> str:
    return f"{name} images cannot be read: convert them to JPEG or PNG"


def check_image(path: Path) -> str | None:
    """Check whether a file is an image that can be read.

    Files with the extension of an image that can be read, and files with the extension of a text, table, video or
    similar, are not opened. Other files are recognized by their content.

    Returns:
        "" if it is an image, the cause if it cannot be read, None if it is not an image.
    """
    extension = path.suffix.lower().removeprefix(".")
    if extension in IMAGE_EXTENSIONS or extension in _MORE_IMAGES:
        return ""
    if extension in _OTHER_FILES or extension in ARRAY_EXTENSIONS:
        return None
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe or device might block
            return None
        with path.open("rb") as file:
            name = image_format(file.read(_HEAD))
    except OSError as error:
        return f"cannot read file: {error.strerror}"
    if extension in _UNREADABLE_IMAGES and (name not in _READABLE or name == "TIFF"):
        return _cannot_read(extension.upper())
    if name in _READABLE:
        return ""
    return _cannot_read(name) if name else None


# --------------------------------------------------------------------------------------------------------------
# Read formats that Pillow does not read.

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

    The number of ``channels`` tells (H, W, C) from (C, H, W).
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
        library = import_module(module)
    except ImportError as error:
        package = module.replace("_", "-")
        raise DataError(f"{name} images need {package}: pip install -e '.[formats]'") from error
    # otherwise it prints what is unusual in a file, for each image
    logging.getLogger(module).setLevel(logging.CRITICAL)
    return library


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
            # as Pillow does
            values = (values.astype(np.uint16) * 255 // (2**page.bitspersample - 1)).astype(np.uint8)
        if values.dtype.kind not in "uif":
            raise DataError(f"a TIFF of {values.dtype} is not an image: expected integers or floats")
        orientation = page.tags.get("Orientation")
        values = upright_array(values, 1 if orientation is None else int(orientation.value))
        several = len(file.pages) > len(pages) and not file.pages[1].is_reduced
        is_split = several and bands == 1 and all(other.shape == page.shape for other in file.pages)
        return Bands(
            values,
            white_zero=page.photometric == tifffile.PHOTOMETRIC.MINISWHITE,
            several=several and not is_split,
            pages=len(file.pages) if is_split else 0,
        )
