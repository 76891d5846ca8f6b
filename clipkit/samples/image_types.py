"""Recognize images in folders: by the extensions of their names, and by content if the extension is unknown."""

import re
import stat
from pathlib import Path

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
