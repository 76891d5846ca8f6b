"""Prepare the image of a packed sample: the original file, or the image rotated, resized or on a background.

JPEG, PNG, WebP and HEIC files that need no change are stored byte for byte, and so are DICOM, arrays, and TIFFs of
which a PNG would lose bits, channels or pages. Other formats are stored as PNG; of an animation, the first frame.
Deep grayscale images keep their values: 16-bit ones are stored as PNG, other TIFFs byte for byte. CLIP's
preprocessing ignores EXIF orientation and alpha channels, so stored images look as a model sees them.
"""

import io
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from PIL import Image, UnidentifiedImageError

from clipkit.errors import ConfigError, DataError
from clipkit.samples import (
    ORIENTATION_TAG,
    PILLOW_ERRORS,
    Bands,
    Color,
    Decoding,
    PixelRangeError,
    blend_onto,
    decode_jpeg,
    describe_unreadable,
    has_deep_colors,
    image_format,
    is_beyond_png,
    is_deep,
    is_transparent,
    jpeg_orientation,
    jpeg_size,
    read_beyond_pillow,
    read_orientation,
    readable_formats,
    refuse_deep_alpha,
    to_16_bit,
    upright_array,
    upright_image,
)

MAX_PIXELS = 100_000_000
_QUALITY = 95  # of JPEG and WebP
_AS_IS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "HEIF": "heic"}
_BEYOND_PILLOW = {"DICOM": "dcm", "NPY": "image.npy", "NPZ": "image.npz", "TIFF": "tif"}
ResizeMode = Literal["keep_ratio", "keep_ratio_largest", "center_crop", "border"]
RESIZE_MODES: tuple[ResizeMode, ...] = get_args(ResizeMode)


class BadImage(Exception):
    """The reason why an image cannot be stored; images with the same cause have the same message."""


@dataclass(frozen=True, kw_only=True)
class Resize:
    """How images are resized, as in img2dataset.

    Attributes:
        mode: ``keep_ratio`` resizes the shorter side to ``size`` pixels, ``keep_ratio_largest`` the longer side;
            ``center_crop`` resizes like ``keep_ratio`` and takes the center square; ``border`` resizes like
            ``keep_ratio_largest`` and adds a white border to make a square.
        size: in pixels.
        enlarge: whether smaller images are enlarged; otherwise they are not changed.
    """

    mode: ResizeMode
    size: int
    enlarge: bool = False

    def __post_init__(self) -> None:
        if self.mode not in RESIZE_MODES:
            raise ConfigError(f"resize mode {self.mode!r}: choose one of {', '.join(RESIZE_MODES)}")
        if self.size < 1:
            raise ConfigError(f"image size = {self.size}: expected at least 1")

    def target(self, width: int, height: int) -> tuple[int, int] | None:
        """Return the width and height to resize to, before cropping and borders; None to keep the size."""
        side = max(width, height)
        if self.mode in ("keep_ratio", "center_crop"):
            side = min(width, height)
        if (side < self.size and not self.enlarge) or (side == self.size and width == height):
            return None
        if side == self.size and self.mode.startswith("keep_ratio"):
            return None
        return tuple(max(1, round(length * self.size / side)) for length in (width, height))  # type: ignore[return-value]

    def box(self, width: int, height: int) -> tuple[int, int, int, int] | None:
        """Return left, top, right and bottom of the square in a resized image, beyond it for a border."""
        if self.mode.startswith("keep_ratio"):
            return None
        left = (width - self.size) // 2
        top = (height - self.size) // 2
        return left, top, left + self.size, top + self.size


@dataclass(frozen=True, kw_only=True)
class Storing:
    """How images are changed before they are stored.

    Attributes:
        resize: None keeps their size.
        keep_orientation: do not rotate images upright according to their EXIF orientation.
        background: color behind transparent images; None keeps their alpha channel.
    """

    resize: Resize | None = None
    keep_orientation: bool = False
    background: Color | None = None


@dataclass(frozen=True, kw_only=True)
class StoredImage:
    """An image as it is stored, and facts about its file.

    Attributes:
        data: the encoded image.
        extension: "jpg", "png", "webp" or "heic", "tif" for values that PNG cannot store, "dcm",
            "image.npy" or "image.npz".
        size: width and height of the stored image in pixels.
        original_size: width and height of the image in the file, rotated upright unless the orientation is kept.
        upright: whether the file has no EXIF orientation other than upright.
        transparent: whether a pixel of the file is less than opaque.
        deep: whether it has more than 8 bits, which are kept.
    """

    data: bytes
    extension: str
    size: tuple[int, int]
    original_size: tuple[int, int]
    upright: bool
    transparent: bool
    deep: bool = False


def store_image(data: bytes, how: Storing) -> StoredImage:
    """Decode an image file completely and return the image to store.

    Call ``PIL.Image.init()`` before calling this from several threads.
    """
    try:
        if how.resize is not None and (stored := _resize_jpeg(data, how)) is not None:
            return stored
        bands = read_beyond_pillow(data, Decoding())
        if bands is not None:
            return _store_as_is(bands, data, how)
        with Image.open(io.BytesIO(data), formats=readable_formats(data)) as image:
            return _store_opened(image, data, how)
    except (DataError, PixelRangeError) as error:
        raise BadImage(str(error)) from None
    except Image.DecompressionBombError:
        raise BadImage(f"image of more than {MAX_PIXELS:,} pixels") from None
    except UnidentifiedImageError:
        raise BadImage(describe_unreadable(data)) from None
    except PILLOW_ERRORS:
        raise BadImage("broken or truncated image") from None


def _resize_jpeg(data: bytes, how: Storing) -> StoredImage | None:
    """Resize a JPEG without a color profile, several times as fast as Pillow; None for other images."""
    assert how.resize is not None
    if b"ICC_PROFILE" in data[: 2**16] or (size := jpeg_size(data)) is None:
        return None
    orientation = jpeg_orientation(data)
    if orientation != 1 and how.keep_orientation:
        return None
    height, width = size
    if orientation >= 5:
        height, width = width, height
    target = how.resize.target(width, height)
    if target is None:
        return None
    import simplejpeg
    import torch

    # decode at a half, a quarter or an eighth if at least twice the target size remains
    reduce = max(by for by in (1, 2, 4, 8) if by == 1 or min(width / target[0], height / target[1]) >= 2 * by)
    pixels = decode_jpeg(data, reduce=reduce)
    if pixels is None:
        return None
    # torch's fast kernel for bytes takes a batch with channels last
    tensor = torch.from_numpy(upright_array(pixels, orientation)[None]).permute(0, 3, 1, 2)  # (1, 3, H, W)
    tensor = torch.nn.functional.interpolate(
        tensor, size=(target[1], target[0]), mode="bicubic", align_corners=False, antialias=True
    )
    array = tensor[0].permute(1, 2, 0).numpy()  # (H, W, 3)
    box = how.resize.box(*target)
    if box is not None:
        left, top, right, bottom = box
        if how.resize.mode == "center_crop":
            array = array[top:bottom, left:right]
        else:
            array = np.pad(
                array, ((-top, bottom - target[1]), (-left, right - target[0]), (0, 0)), constant_values=255
            )
    array = np.ascontiguousarray(array)
    return StoredImage(
        data=simplejpeg.encode_jpeg(array, quality=_QUALITY, colorsubsampling="420"),
        extension="jpg",
        size=(array.shape[1], array.shape[0]),
        original_size=(width, height),
        upright=orientation == 1,
        transparent=False,
    )


def _store_as_is(bands: Bands, data: bytes, how: Storing) -> StoredImage:
    height, width, _ = bands.values.shape
    name = image_format(data)
    if how.resize is not None and how.resize.target(width, height) is not None:
        raise BadImage(f"{name} images of this kind cannot be resized: pack them without resizing")
    return StoredImage(
        data=data,
        extension=_BEYOND_PILLOW[name],
        size=(width, height),
        original_size=(width, height),
        upright=True,
        transparent=False,
        deep=bands.values.dtype != np.uint8,
    )


def _store_opened(image: Image.Image, data: bytes, how: Storing) -> StoredImage:
    if image.width * image.height > MAX_PIXELS:
        raise BadImage(f"image of more than {MAX_PIXELS:,} pixels")
    refuse_deep_alpha(image)
    deep = is_deep(image)
    extension = _AS_IS.get(image.format or "")
    orientation = read_orientation(image)
    rotate = orientation != 1 and not how.keep_orientation
    original = (image.height, image.width) if rotate and orientation >= 5 else image.size
    target = how.resize.target(*original) if how.resize else None
    as_is = extension is not None and target is None and not rotate
    if as_is:
        # an eighth of the size is enough to read all bytes of a JPEG, and faster
        image.draft(None, (max(1, image.width // 8), max(1, image.height // 8)))
    elif target is not None:
        image.draft("RGB", (2 * max(target), 2 * max(target)))
    image.load()
    has_deep_tiff_colors = image.format == "TIFF" and has_deep_colors(image)
    if target is None and image.format == "TIFF" and is_beyond_png(image):
        extension = "tif"
        as_is = True
        original = image.size
    transparent = is_transparent(image)
    if has_deep_tiff_colors and (target is not None or (transparent and how.background is not None)):
        raise BadImage("TIFF of 16 bits per color cannot be changed without loss: pack it unchanged")
    size = original
    if not as_is or (transparent and how.background is not None):
        extension = None if extension in ("heic", "tif") else extension
        result = _transform_image(image, how, orientation=orientation, target=target, transparent=transparent)
        size = result.size
        lossless = image.format == "WEBP" and b"VP8L" in data
        data = _encode_image(result, extension or "png", resized=target is not None, lossless=lossless)
    return StoredImage(
        data=data,
        extension=extension or "png",
        size=size,
        original_size=original,
        upright=orientation == 1,
        transparent=transparent,
        deep=deep or has_deep_tiff_colors,
    )


def _transform_image(
    image: Image.Image, how: Storing, *, orientation: int, target: tuple[int, int] | None, transparent: bool
) -> Image.Image:
    """Return the image rotated, blended onto the background and resized, with only its color profile and tags."""
    deep = is_deep(image)
    result = to_16_bit(image) if deep else image
    border = how.resize is not None and how.resize.mode == "border"  # there is no white in deep grayscale
    is_lost = deep and transparent and (target is not None or how.background is not None)
    if result is None or is_lost or (deep and border and target is not None):
        raise BadImage(
            "deep, signed or float grayscale that cannot be changed without loss: convert it first, or pack it "
            "unchanged"
        )
    profile = None
    if image.mode in ("L", "LA", "P", "RGB", "RGBA"):
        profile = image.info.get("icc_profile")
    tags = Image.Exif()
    if deep and "transparency" in image.info:
        result.info["transparency"] = image.info["transparency"]
    if orientation != 1 and how.keep_orientation:
        tags[ORIENTATION_TAG] = orientation
    elif orientation != 1:
        result = upright_image(result, orientation)
    if not deep:
        if result.mode in ("1", "L", "LA") and "transparency" not in result.info:
            result = result.convert("LA" if result.mode == "LA" else "L")
        else:
            result = result.convert("RGBA" if result.has_transparency_data else "RGB")
    if transparent and how.background is not None:
        profile = None if result.mode == "LA" else profile  # a profile for gray does not fit colors
        result = blend_onto(result, how.background)
    if target is not None and how.resize is not None:
        result = result.resize(target, Image.Resampling.BICUBIC, reducing_gap=2.0)
        box = how.resize.box(*target)
        if box is not None:
            if how.resize.mode == "border":
                white = Image.new(result.mode, (how.resize.size,) * 2, (255,) * len(result.getbands()))
                white.paste(result, (-box[0], -box[1]))
                result = white
            else:
                result = result.crop(box)
    # other entries of the file's header could be wrong now
    result.info = {name: value for name, value in result.info.items() if name == "transparency"}
    result.info |= {"exif": tags.tobytes() if tags else b"", "icc_profile": profile}
    return result


def _encode_image(image: Image.Image, extension: str, *, resized: bool, lossless: bool) -> bytes:
    header = {"exif": image.info.pop("exif"), "icc_profile": image.info.pop("icc_profile")}
    buffer = io.BytesIO()
    if extension == "jpg":
        subsampling = "4:2:0" if resized else "4:4:4"  # full color resolution unless pixels were lost
        image.save(buffer, "JPEG", quality=_QUALITY, subsampling=subsampling, **header)
    elif extension == "webp":
        image.save(buffer, "WEBP", quality=_QUALITY, lossless=lossless, **header)
    else:
        image.save(buffer, "PNG", **header)
    return buffer.getvalue()
