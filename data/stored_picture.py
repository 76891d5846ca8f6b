"""What a packed dataset stores of one picture file: its bytes as they are, or the picture encoded anew.

JPEG, PNG and WebP are stored byte for byte unless something has to be done to the picture: to turn it upright,
to lay it on a background, or to reduce it. CLIP's preprocessing heeds neither an EXIF orientation nor an alpha
channel, so whoever trains or evaluates on the stored picture sees it as it is stored. Other formats are stored
as PNG, of an animation the first frame.
"""

import io
import struct
import zlib
from dataclasses import dataclass, replace

from PIL import Image, UnidentifiedImageError

from clipkit.image_traits import ORIENTATION_TAG, flattened, is_transparent, orientation_of, upright_image

__all__ = ["BadPicture", "StoredPicture", "Storing", "store_picture"]

MOST_PIXELS = 100_000_000
STORED_AS_IS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}
READ = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")  # none of them runs a program
QUALITY = 95  # of JPEG and WebP
# all that Pillow's decoders raise on broken bytes; MemoryError for sizes that a header only claims
BROKEN = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError, MemoryError,
    NotImplementedError, AttributeError, struct.error, zlib.error,
)  # fmt: skip


class BadPicture(Exception):
    """The cause for which a picture cannot be stored, in words that are the same for all of that cause."""


@dataclass(frozen=True, kw_only=True)
class Storing:
    """What is done to pictures.

    Attributes:
        max_side: a picture with a longer side than this many pixels is reduced to it.
        keep_orientation: leave a picture as it lies in its file, also where an EXIF tag says how to turn it.
        background: red, green and blue, each 0–255, to lay partly transparent pictures on.
    """

    max_side: int | None = None
    keep_orientation: bool = False
    background: tuple[int, int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class StoredPicture:
    """A picture as it is stored, and what was found in its file.

    Attributes:
        data: the encoded picture.
        extension: "jpg", "png" or "webp".
        upright: whether the file has no EXIF orientation other than upright.
        transparent: whether a pixel of the file is less than opaque.
    """

    data: bytes
    extension: str
    upright: bool
    transparent: bool


def store_picture(data: bytes, how: Storing) -> StoredPicture:
    """What to store of a picture file, which is decoded in any case to see that it is whole.

    Raises:
        BadPicture: it is broken, too large, of an unknown format, or cannot be encoded anew without loss of depth.
    """
    known = tuple(name for name in READ if name in Image.OPEN)
    try:
        with Image.open(io.BytesIO(data), formats=known) as image:
            return _stored(image, data, how)
    except Image.DecompressionBombError:
        raise BadPicture(f"picture of more than {MOST_PIXELS:,} pixels") from None
    except UnidentifiedImageError:
        raise BadPicture("not a picture of a known format") from None
    except BROKEN:
        raise BadPicture("broken or truncated picture") from None


def _stored(image: Image.Image, data: bytes, how: Storing) -> StoredPicture:
    if image.width * image.height > MOST_PIXELS:
        raise BadPicture(f"picture of more than {MOST_PIXELS:,} pixels")
    if how.max_side is not None and max(image.size) <= how.max_side:
        how = replace(how, max_side=None)
    extension = STORED_AS_IS.get(image.format or "")
    orientation = orientation_of(image)
    as_it_is = extension is not None and how.max_side is None and (orientation == 1 or how.keep_orientation)
    if as_it_is:
        # an eighth of the size is enough to run through all bytes of a JPEG, and faster
        image.draft(None, (max(1, image.width // 8), max(1, image.height // 8)))
    elif how.max_side is not None:
        image.draft("RGB", (2 * how.max_side, 2 * how.max_side))
    image.load()
    transparent = is_transparent(image)
    if not transparent:  # no JPEG is, so none is encoded from its draft of an eighth
        how = replace(how, background=None)
    if not as_it_is or how.background is not None:
        lossless = image.format == "WEBP" and b"VP8L" in data
        data = _encoded(image, extension or "png", how, orientation=orientation, lossless=lossless)
    return StoredPicture(
        data=data, extension=extension or "png", upright=orientation == 1, transparent=transparent
    )


def _is_deep(image: Image.Image) -> bool:
    return image.mode.startswith(("I", "F"))


def _encoded(image: Image.Image, extension: str, how: Storing, *, orientation: int, lossless: bool) -> bytes:
    """The picture turned, laid on the background and reduced, each where ``how`` says so."""
    if _is_deep(image) and (how.max_side is not None or image.format != "PNG"):
        raise BadPicture("more than 8 bits a pixel: convert it first")
    profile = image.info.get("icc_profile") if image.mode in ("L", "LA", "P", "RGB", "RGBA") else None
    tags = Image.Exif()
    picture = image
    if orientation != 1 and how.keep_orientation:
        tags[ORIENTATION_TAG] = orientation
    elif orientation != 1:
        picture = upright_image(picture, orientation)
    if not _is_deep(picture):
        picture = picture.convert(_plain_mode(picture))
    if how.background is not None:
        profile = None if picture.mode == "LA" else profile  # one of grey does not fit colours
        picture = flattened(picture, how.background)
    if how.max_side is not None:
        picture.thumbnail((how.max_side, how.max_side), Image.Resampling.LANCZOS)
    # nothing else that the file says of itself: some of it would be wrong now
    picture.info = {name: value for name, value in picture.info.items() if name == "transparency"}
    said = {"exif": tags.tobytes() if tags else b"", "icc_profile": profile}
    buffer = io.BytesIO()
    if extension == "jpg":
        subsampling = "4:4:4" if how.max_side is None else "4:2:0"  # all colours where all pixels stay
        picture.save(buffer, "JPEG", quality=QUALITY, subsampling=subsampling, **said)
    elif extension == "webp":
        picture.save(buffer, "WEBP", quality=QUALITY, lossless=lossless, **said)
    else:
        picture.save(buffer, "PNG", **said)
    return buffer.getvalue()


def _plain_mode(image: Image.Image) -> str:
    """The mode of 8 bits a channel that loses nothing of the picture."""
    if image.mode in ("1", "L", "LA") and "transparency" not in image.info:
        return "LA" if image.mode == "LA" else "L"
    return "RGBA" if image.has_transparency_data else "RGB"
