"""Images that are broken, or made to take much time or memory, and the expected result for each."""

import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from tests.clipkit.made_images import CLEAR, MOVING, PHOTO, encoded, image_file, scene

SMALL = Image.fromarray(scene(40, 50))
HUGE = 15_000  # side of an image with too many pixels


def png(
    width: int, height: int, depth: int = 8, colour: int = 2, *, more: bytes = b"", data: bytes | None = None
) -> bytes:
    """Encode a black PNG, with ``more`` before its data."""
    row = (width * depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour] + 7) // 8 + 1
    data = zlib.compress(bytes(row * height)) if data is None else data
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + more + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def changed(data: bytes, what: bytes, at: int, by: bytes) -> bytes:
    """Replace the bytes at offset ``at`` from the first occurrence of ``what``."""
    place = data.index(what) + at
    return data[:place] + by + data[place + len(by) :]


def between(data: bytes, before: bytes, more: bytes) -> bytes:
    place = data.index(before)
    return data[:place] + more + data[place:]


def many_scans(scans: int, side: int = 500) -> bytes:
    """Encode a progressive JPEG that repeats its last scan."""
    data = encoded(Image.new("RGB", (side, side)), "JPEG", progressive=True)
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[last:end] * (scans - data.count(b"\xff\xda")) + data[end:]


def tiff(*tags: tuple[int, int, int, int], data: bytes = b"", following: int = 0) -> bytes:
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in sorted(tags))
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + directory + struct.pack("<I", following)


def grey_tiff(
    *more: tuple[int, int, int, int], data: bytes = b"", side: int = 64, following: int = 0
) -> bytes:
    """Encode a deflated grayscale TIFF; pass the tags other than size and type."""
    kind = [
        (256, 4, 1, side),
        (257, 4, 1, side),
        (258, 3, 1, 8),
        (259, 3, 1, 8),
        (262, 3, 1, 1),
        (277, 3, 1, 1),
    ]
    return tiff(*kind, *more, data=data, following=following)


def large_tile() -> bytes:
    data = zlib.compress(bytes(20_000_000))
    return grey_tiff(
        (322, 4, 1, 40_000), (323, 4, 1, 40_000), (324, 4, 1, 8), (325, 4, 1, len(data)), data=data
    )


def bmp(width: int, height: int, depth: int = 24, data: bytes = b"") -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, depth, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(data), 0, 0, 54) + header + data


def icon(data: bytes) -> bytes:
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 0, 0, 0, 0, 1, 32, len(data), 22) + data


def gif() -> bytes:
    return encoded(SMALL.convert("L"), "GIF")


def webp_header(width: int, height: int) -> bytes:
    """Encode a lossless WebP that ends after its header."""
    bits = struct.pack("<BI", 0x2F, (width - 1) | (height - 1) << 14)
    body = b"WEBPVP8L" + struct.pack("<I", len(bits)) + bits + b"\0"
    return b"RIFF" + struct.pack("<I", len(body)) + body


def jp2() -> bytes:
    return encoded(SMALL, "JPEG2000")


def end_of_text(kind: bytes, head: bytes) -> bytes:
    return png(8, 8, more=chunk(kind, head + zlib.compress(bytes(40 << 20), 9)))


ERROR = "not an image|does not decode|a TIFF that is damaged"
PIXELS = "pixels"  # unusual, but decodes
LIMIT = "more than 178956970 pixels"
# name: how it is made, and the expected error, PIXELS, or None where either is accepted
HOSTILE: dict[str, tuple[Callable[[], bytes], str | None]] = {
    "nothing": (lambda: b"", "not an image"),
    "zeros": (lambda: bytes(5000), "not an image"),
    "a web page": (lambda: b"<!DOCTYPE html><html>" + b" " * 5000, "not an image"),
    "compressed data": (lambda: b"\x1f\x8b\x08\0" + bytes(999), "not an image"),
    "postscript": (lambda: encoded(PHOTO, "EPS"), "not an image"),
    "more bytes than any photograph": (lambda: image_file("jpeg") + bytes(64 << 20), "file of more than 64 MiB"),
    "jpeg of 1000 scans": (lambda: many_scans(1000), "1000 scans"),
    "large jpeg of 400 scans": (lambda: many_scans(400, 3000), "400 scans"),
    "jpeg of 40 scans": (lambda: many_scans(40), PIXELS),
    "jpeg with 1000 scans in a remark": (
        lambda: between(image_file("jpeg"), b"\xff\xdb", b"\xff\xfe\x07\xd2" + b"\xff\xda" * 1000), PIXELS,
    ),
    "jpeg with many remarks": (lambda: between(image_file("jpeg"), b"\xff\xdb", b"\xff\xfe\0\2" * 50_000), PIXELS),
    "jpeg bomb": (lambda: changed(image_file("jpeg"), b"\xff\xc0", 5, b"\xfa\0\xfa\0"), LIMIT),
    "cmyk jpeg bomb": (lambda: changed(image_file("cmyk jpeg"), b"\xff\xc0", 5, b"\xfa\0\xfa\0"), LIMIT),
    "jpeg of no width": (lambda: changed(image_file("jpeg"), b"\xff\xc0", 7, b"\0\0"), ERROR),
    "jpeg of no height": (lambda: changed(image_file("jpeg"), b"\xff\xc0", 5, b"\0\0"), ERROR),
    "jpeg of 12 bits": (lambda: changed(image_file("jpeg"), b"\xff\xc0", 4, b"\x0c"), ERROR),
    "jpeg of 7 colours": (lambda: changed(image_file("jpeg"), b"\xff\xc0", 9, b"\x07"), ERROR),
    "jpeg said to be arithmetic": (lambda: changed(image_file("jpeg"), b"\xff\xc0", 0, b"\xff\xc9"), None),
    "jpeg said to be lossless": (lambda: changed(image_file("jpeg"), b"\xff\xc0", 0, b"\xff\xc3"), ERROR),
    "jpeg said to be progressive": (lambda: changed(image_file("jpeg"), b"\xff\xc0", 0, b"\xff\xc2"), None),
    "jpeg without Huffman tables": (lambda: image_file("jpeg").replace(b"\xff\xc4", b"\xff\xfe"), None),
    "jpeg with empty Huffman tables": (lambda: changed(image_file("jpeg"), b"\xff\xc4", 5, bytes(40)), None),
    "jpeg without its end": (lambda: image_file("jpeg")[:-2], None),
    "jpeg that ends in its header": (lambda: image_file("jpeg")[:300], ERROR),
    "jpeg with data behind": (lambda: image_file("jpeg") + bytes(100_000), PIXELS),
    "jpeg with broken exif": (
        lambda: between(image_file("jpeg"), b"\xff\xdb", b"\xff\xe1\0\x10Exif\0\0II*\0\xff\xff\xff\xff"), PIXELS,
    ),
    "jpeg with two frames": (
        lambda: between(image_file("jpeg"), b"\xff\xda", b"\xff\xc0\0\x0b\x08\0\x10\0\x10\1\1\x11\0"), None,
    ),
    "jpeg of several images": (lambda: encoded(SMALL, "MPO", save_all=True, append_images=[SMALL]), PIXELS),
    "png behind a jpeg's mark": (lambda: b"\xff\xd8\xff" + image_file("png"), ERROR),
    "png bomb": (lambda: png(HUGE, HUGE, 1, 0), LIMIT),
    "png of no size": (lambda: png(0, 0), ERROR),
    "png of one long row": (lambda: png(2_000_000, 1), PIXELS),
    "png of one long column": (lambda: png(1, 200_000), PIXELS),
    "png with a text bomb": (lambda: end_of_text(b"zTXt", b"k\0\0"), ERROR),
    "png with an international text bomb": (lambda: end_of_text(b"iTXt", b"k\0\1\0\0\0"), ERROR),
    "png with a profile bomb": (lambda: end_of_text(b"iCCP", b"k\0\0"), ERROR),
    "png of many chunks": (lambda: png(8, 8, more=chunk(b"teSt", b"") * 50_000), PIXELS),
    "png with a wrong checksum": (lambda: changed(image_file("png"), b"IHDR", 17, b"\1\2\3\4"), ERROR),
    "png without data": (lambda: png(8, 8, data=b""), ERROR),
    "png with data of another": (lambda: png(800, 800, data=zlib.compress(bytes(99))), ERROR),
    "png whose data are not deflated": (lambda: png(8, 8, data=b"\xff" * 99), ERROR),
    "png without its palette": (lambda: png(8, 8, colour=3), None),
    "png of unknown colours": (lambda: changed(png(8, 8), b"IHDR", 13, b"\5"), ERROR),
    "png of 16 bits": (lambda: png(9, 9, 16), PIXELS),
    "png that moves": (lambda: encoded(SMALL, "PNG", **MOVING), PIXELS),
    "gif bomb": (lambda: changed(gif(), b"GIF8", 6, b"\xff\xff\xff\xff"), LIMIT),
    "gif whose frame is a bomb": (lambda: changed(gif(), b",\0\0\0\0", 5, b"\xff\xff\xff\xff"), LIMIT),
    "gif without a frame": (lambda: gif()[: gif().index(b",\0\0\0\0")] + b";", ERROR),
    "gif of many remarks": (lambda: between(gif(), b",\0\0\0\0", b"!\xfe\1a\0" * 50_000), PIXELS),
    "gif with a long remark": (
        lambda: between(gif(), b",\0\0\0\0", b"!\xfe" + (b"\xff" + b"a" * 255) * 20_000 + b"\0"), PIXELS,
    ),
    "gif of wide codes": (lambda: changed(gif(), b",\0\0\0\0", 10, b"\x0d"), None),
    "gif with a remark without end": (lambda: gif()[: gif().index(b",\0\0\0\0")] + b"!\xfe\xffabc", ERROR),
    "webp bomb": (lambda: webp_header(16_383, 16_383), LIMIT),
    "webp that ends in its header": (lambda: webp_header(400, 400), ERROR),
    "webp with a wrong length": (lambda: changed(image_file("webp"), b"RIFF", 4, b"\xff\xff\xff\x7f"), None),
    "webp whose frames are missing": (lambda: image_file("moving webp")[:120], ERROR),
    "tiff bomb": (lambda: grey_tiff((273, 4, 1, 8), (279, 4, 1, 9), data=bytes(9), side=60_000), LIMIT),
    "tiff with a tile like a bomb": (large_tile, "tiles of 40000 x 40000 pixels"),
    "tiff with tiles of no number": (
        lambda: grey_tiff((322, 5, 1, 8), (323, 5, 1, 8), data=b"\1\0\0\0" * 4), "tiles",
    ),
    "tiff whose directory is its own next": (
        lambda: grey_tiff((273, 4, 1, 8), (279, 4, 1, 9), data=bytes(9), following=17), ERROR,
    ),
    "tiff without strips": (grey_tiff, ERROR),
    "tiff with a billion strips": (lambda: grey_tiff((273, 4, 10**9, 8), (279, 4, 10**9, 8)), ERROR),
    "tiff beyond the file's end": (lambda: b"II*\0\xff\xff\xff\x7f" + bytes(50), ERROR),
    "tiff of 16 bits a colour": (lambda: tiff(
        (256, 4, 1, 2), (257, 4, 1, 2), (258, 3, 3, 8), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, 1, 14),
        (277, 3, 1, 3), (278, 4, 1, 2), (279, 4, 1, 24), data=b"\x10\0" * 3 + bytes(24),
    ), None),
    "jpeg 2000 bomb": (lambda: jp2().replace(struct.pack(">II", 40, 50), struct.pack(">II", HUGE, HUGE)), LIMIT),
    "jpeg 2000 with a bomb within": (lambda: changed(jp2(), b"\xff\x51", 6, struct.pack(">II", HUGE, HUGE)), ERROR),
    "jpeg 2000 cut short": (lambda: jp2()[:-200], None),
    "avif cut short": (lambda: encoded(SMALL, "AVIF")[:-50], ERROR),
    "avif bomb": (lambda: changed(encoded(SMALL, "AVIF"), b"ispe", 8, struct.pack(">II", HUGE, HUGE)), LIMIT),
    "bmp bomb": (lambda: bmp(HUGE, HUGE), LIMIT),
    "bmp of negative width": (lambda: bmp(-5, 5), LIMIT),
    "bmp upside down": (lambda: bmp(4, -4, data=bytes(48)), PIXELS),
    "bmp of 77 bits": (lambda: bmp(4, 4, 77), ERROR),
    "icon that is a bomb": (lambda: icon(png(HUGE, HUGE, 1, 0)), LIMIT),
    "icon without an image": (lambda: icon(b"")[:6], ERROR),
    "tga bomb": (
        lambda: struct.pack("<BBBHHBHHHHBB", 0, 0, 2, 0, 0, 0, 0, 0, HUGE, HUGE, 24, 0) + bytes(99), LIMIT,
    ),
    "pcx bomb": (lambda: changed(encoded(SMALL, "PCX"), b"\x0a\x05", 8, b"\xff\xfe\xff\xfe"), LIMIT),
    "ppm bomb": (lambda: b"P6 99999 99999 255\n" + bytes(99), LIMIT),
    "ppm of words": (lambda: b"P3 5 5 255\n" + b"word " * 75, ERROR),
    "ppm of remarks": (lambda: b"P3\n9 9\n255\n" + b"#a\n" * 300_000, "slow to read"),
    "large ppm in text": (lambda: b"P3 900 900 255\n" + b"1 " * 2_430_000, "slow to read"),
    "large qoi": (lambda: b"qoif" + struct.pack(">IIBB", 2000, 2000, 3, 0) + b"\x6a" * 1_100_000, "slow to read"),
    "qoi cut short": (lambda: b"qoif" + struct.pack(">IIBB", 50, 50, 3, 0) + b"\x6a" * 99, ERROR),
    "floats": (lambda: encoded(Image.fromarray(np.zeros((5, 5), np.float32)), "TIFF"), PIXELS),
    "alpha that hides everything": (lambda: encoded(Image.new("RGBA", CLEAR.size), "PNG"), PIXELS),
}  # fmt: skip


def made(name: str) -> bytes:
    make: Callable[[], Any] = HOSTILE[name][0]
    return bytes(make())
