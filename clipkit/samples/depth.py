"""Deep images (16-bit, 32-bit, signed or float): map their values to 8 bits.

A file does not say which values are black and white: a 12-bit X-ray is stored in 16 bits and is nearly black if the
full range of 16 bits is mapped. So the range is a setting, ``pixels.range``, for which there is no safe default.
Training, evaluation and inference call ``Bands.to_8_bits`` before anything else is done with an image.

Values are those of the file; of PPM and JPEG 2000 files with fewer than 16 bits, Pillow scales them to 16 bits.
Letters: H height, W width, B bands of the file, C channels of the result.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from clipkit.errors import ConfigError, DataError
from clipkit.files.terminal import counted

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image

# "auto": deep images raise PixelRangeError; "dtype": the full range of 16-bit integers; or the values of black and
# white, for all channels or for each. ``STRETCH`` is not a setting.
PixelRange = str | tuple[float, float] | tuple[tuple[float, float], ...]

# From the minimum to the maximum of each image. For display and to compare images only: the same gray stands for
# different values in different images.
STRETCH = "stretch"

_EXPECTED = (
    "expected auto, dtype, or the values of black and white in ascending order, such as 0,4095, or such a pair for "
    "each channel"
)
# TIFF tags
_BITS = 258
_COMPRESSION = 259
_PHOTOMETRIC = 262
_SAMPLES = 277
_PLANAR = 284
_EXTRA = 338
_SAMPLE_FORMAT = 339
_SEPARATE = 2  # planar configuration
_UNCOMPRESSED = 1
_PREMULTIPLIED = 1  # extra sample
# numpy type of integers that Pillow decodes to int32, by bits and TIFF sample format (1 unsigned, 2 signed)
_TIFF_TYPES = {(16, 2): "int16", (32, 1): "uint32"}
_BLOCK = 1 << 20  # values converted at a time, because the conversion takes 40 times their memory


class PixelRangeError(DataError):
    """An image does not fit the settings ``pixels``: its range is missing or does not fit, or its channels differ.

    All images of the same kind have this error, so commands stop instead of replacing the image.
    """


def parse_pixel_range(value: object, *, setting: str = "pixel_range") -> PixelRange:
    """Parse "auto", "dtype", "LOW,HIGH", "LOW,HIGH;LOW,HIGH;…", two numbers, or a list of pairs."""
    parsed: object = value
    try:
        if isinstance(value, str) and "," in value:
            pairs = [_parse_pair(pair.split(",")) for pair in value.split(";")]
            parsed = tuple(pairs) if ";" in value else pairs[0]
        elif isinstance(value, list | tuple) and all(isinstance(pair, list | tuple) for pair in value):
            parsed = tuple(_parse_pair(pair) for pair in value)
        elif isinstance(value, list | tuple):
            parsed = _parse_pair(value)
    except (ValueError, TypeError, OverflowError):
        parsed = None
    if not is_pixel_range(parsed):
        raise ConfigError(f"{setting} = {value!r} is invalid: {_EXPECTED}")
    return parsed


def _parse_pair(numbers: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in numbers)


def is_pixel_range(value: object) -> TypeGuard[PixelRange]:
    """Check whether a value is "auto", "dtype", two finite numbers in ascending order, or a tuple of such pairs."""
    if not isinstance(value, tuple):
        return isinstance(value, str) and value in ("auto", "dtype")
    if value and all(isinstance(pair, tuple) for pair in value):
        return all(_is_pair(pair) for pair in value)
    return _is_pair(value)


def _is_pair(value: tuple[Any, ...]) -> bool:
    if len(value) != 2 or not all(type(bound) in (int, float) for bound in value):
        return False
    low, high = value
    return bool(low < high) and math.isfinite(float(high - low) * 255)


def format_pixel_range(pixel_range: PixelRange) -> str:
    """Format as ``parse_pixel_range`` reads it."""
    if isinstance(pixel_range, str):
        return pixel_range
    pairs = [pixel_range] if isinstance(pixel_range[0], int | float) else pixel_range
    return ";".join(",".join(_format_number(bound) for bound in pair) for pair in pairs)


def _format_number(value: Any) -> str:
    return repr(value).removesuffix(".0")


def is_deep(image: "Image") -> bool:
    """Check whether an image is grayscale with more than 8 bits or signed values."""
    return image.mode.startswith(("I", "F")) or _is_signed_byte(image)


def _is_signed_byte(image: "Image") -> bool:
    return image.mode == "L" and _tiff_tag(image, _SAMPLE_FORMAT, default=1) == 2


def has_deep_colors(image: "Image") -> bool:
    """Check whether an image, opened but not yet loaded, has 16 bits per color, which Pillow reduces to 8."""
    if is_deep(image):
        return False
    if image.format == "TIFF":
        return _tiff_tag(image, _BITS, default=0) > 8
    if image.format == "HEIF":
        return int(image.info.get("bit_depth", 8)) > 8
    raw_mode, largest = _png_or_ppm_values(image)
    return raw_mode.endswith(";16B") or largest > 255


def refuse_deep_alpha(image: "Image") -> None:
    """Refuse 16-bit grayscale with an alpha channel, opened but not yet loaded, which Pillow reduces to 8 bits."""
    raw_mode, _ = _png_or_ppm_values(image)
    if raw_mode == "LA;16B":
        raise PixelRangeError(
            "16-bit grayscale image with an alpha channel, which cannot be read with all bits: convert it to "
            "16-bit grayscale without alpha"
        )


def _png_or_ppm_values(image: "Image") -> tuple[str, int]:
    """Return Pillow's name for how a PNG stores pixels, and the largest value of a PPM; "" and 0 if unknown."""
    tile = getattr(image, "tile", None)  # empty once the image is loaded
    if not tile or image.format not in ("PNG", "PPM"):
        return "", 0
    arguments = tile[0][3]
    if isinstance(arguments, str):
        return arguments, 0
    return "", int(arguments[1])


def gray_values(image: "Image") -> "npt.NDArray[Any]":
    """Return the values of a loaded deep image, (H, W), in the type of its file."""
    import numpy as np

    values = np.asarray(image)
    if _is_signed_byte(image):
        return values.view(np.int8)
    if image.mode != "I":
        return values
    if image.format == "PPM":
        return values.astype(np.uint16)
    bits = _tiff_tag(image, _BITS, default=0)
    sample_format = _tiff_tag(image, _SAMPLE_FORMAT, default=1)
    return values.astype(_TIFF_TYPES.get((bits, sample_format), values.dtype))


def to_16_bit(image: "Image") -> "Image | None":
    """Convert a loaded deep image to mode I;16, which PNG can store; None if that would change its values."""
    import numpy as np
    from PIL import Image

    values = gray_values(image)
    if values.dtype.str[1:] != "u2" or is_white_zero(image):
        return None
    return Image.fromarray(values.astype(np.uint16))


def is_white_zero(image: "Image") -> bool:
    """Check whether small values of a deep image are white, which Pillow ignores."""
    return _tiff_tag(image, _PHOTOMETRIC, default=1) == 0


def samples_per_pixel(image: "Image") -> int:
    """Return the number of channels of a TIFF, of which Pillow may read only some."""
    return _tiff_tag(image, _SAMPLES, default=1)


def has_unread_planes(image: "Image") -> bool:
    """Check whether a TIFF stores its channels one after the other in a way that Pillow does not read.

    Of uncompressed values of more than 8 bits, Pillow would read single bytes. It refuses planes of gray with alpha
    and of premultiplied colors.
    """
    if _tiff_tag(image, _PLANAR, default=1) != _SEPARATE:
        return False
    if _tiff_tag(image, _COMPRESSION, default=_UNCOMPRESSED) != _UNCOMPRESSED:
        return False
    is_premultiplied = _tiff_tag(image, _EXTRA, default=0) == _PREMULTIPLIED
    return is_premultiplied or image.mode == "LA" or _tiff_tag(image, _BITS, default=1) > 8


def has_swapped_bytes(image: "Image") -> bool:
    """Check whether Pillow would swap the bytes of a big-endian TIFF that libtiff has already swapped.

    It does so with compressed values of 32 bits and signed ones of 16 bits.
    """
    return image.mode in ("I", "F") and _tiff_tag(image, _COMPRESSION, default=_UNCOMPRESSED) != _UNCOMPRESSED


def is_beyond_png(image: "Image") -> bool:
    """Check whether a PNG would lose bits, channels or pages of a loaded TIFF."""
    if getattr(image, "is_animated", False):
        return True
    if is_deep(image):
        return to_16_bit(image) is None
    if has_deep_colors(image):
        return True
    is_premultiplied = _tiff_tag(image, _EXTRA, default=0) == _PREMULTIPLIED
    is_converted = image.mode in ("CMYK", "LA") or is_premultiplied
    return is_converted or (image.mode != "P" and samples_per_pixel(image) != len(image.getbands()))


def _tiff_tag(image: "Image", tag: int, *, default: int) -> int:
    value = getattr(image, "tag_v2", {}).get(tag, default)
    return int(value[0] if isinstance(value, tuple) else value)


class Bands(NamedTuple):
    """An image in the type of its file.

    Attributes:
        values: (H, W, B); values of uint8 are 8-bit channels already.
        white_zero: whether small values are white.
        several: whether the file has further frames, which are not used.
        pages: number of pages of the file, if the first is used and each has its size and one channel; else 0.
    """

    values: "npt.NDArray[Any]"
    white_zero: bool = False
    several: bool = False
    pages: int = 0

    def to_8_bits(self, pixel_range: PixelRange, *, channels: int) -> tuple["npt.NDArray[np.uint8]", bool]:
        """Map values linearly from the pixel range to 0–255.

        A value v becomes ``rint((clip(v, low, high) - low) * 255 / (high - low))`` in float64, which rounds halves
        to even numbers. NaN becomes 0. Values of uint8 are unchanged. A range for each of ``channels`` maps one
        band to as many channels.

        Returns:
            (H, W, C) uint8, where C is ``channels``, or 1 for grayscale if ``channels`` is 3; and whether values
            were outside the range.

        Raises:
            PixelRangeError: the range is "auto", or "dtype" for other values than 16-bit integers, or the image has
                another number of channels.
        """
        import numpy as np

        values = self.values
        clamped = False
        bands = values.shape[2]
        if pixel_range == STRETCH and bands not in (1, channels):
            values = values[..., : 3 if bands > 2 else 1]
        result = values.shape[2]
        if bands == 1 and values.dtype != np.uint8 and isinstance(pixel_range[0], tuple):
            result = len(pixel_range)
        if result != channels and (result, channels) != (1, 3):
            total = self.pages or bands
            raise PixelRangeError(
                f"image with {counted(total, 'channel')}, and the model has {channels}: set pixels.channels = "
                f"{total} for a new model; `python -m data inspect` reports the channels of all images"
            )
        if values.dtype != np.uint8:
            values, clamped = _scale(values, pixel_range)
        return 255 - values if self.white_zero else values, clamped


def _scale(values: "npt.NDArray[Any]", pixel_range: PixelRange) -> tuple["npt.NDArray[np.uint8]", bool]:
    import numpy as np

    low, high = _bounds(values, pixel_range)
    height, width, bands = values.shape
    pixels = np.empty((height, width, max(bands, np.size(low))), dtype=np.uint8)
    clamped = False
    rows = max(1, _BLOCK // max(1, width * bands))
    for start in range(0, height, rows):
        with np.errstate(invalid="ignore"):  # signaling NaN
            block = values[start : start + rows].astype(np.float64)
        inside = (block >= low) & (block <= high)  # False for NaN
        clamped = clamped or not inside.all()
        block = np.where(np.isnan(block), low, np.clip(block, low, high))
        pixels[start : start + rows] = np.rint((block - low) * 255 / (high - low))
    return pixels, clamped


def _bounds(values: "npt.NDArray[Any]", pixel_range: PixelRange) -> "tuple[Any, Any]":
    import numpy as np

    bands = values.shape[2]
    if isinstance(pixel_range, tuple):
        ends = np.array(pixel_range, dtype=np.float64)
        if ends.ndim == 2 and bands not in (1, len(ends)):
            raise PixelRangeError(
                f"image with {counted(bands, 'channel')}, and pixels.range has {len(ends)} pairs: one for each "
                "channel is needed"
            )
        return ends[..., 0], ends[..., 1]
    if pixel_range == STRETCH:
        extrema = [value_extrema(values[..., band]) for band in range(bands)]
        return np.array(extrema)[:, 0], np.array([high if low < high else low + 1 for low, high in extrema])
    is_16_bit = values.dtype.kind in "iu" and values.dtype.itemsize == 2
    if pixel_range == "dtype" and is_16_bit:
        limits = np.iinfo(values.dtype)
        return float(limits.min), float(limits.max)
    low, high = value_extrema(values)
    cause = "and no known black and white"
    if pixel_range == "dtype":
        cause = "which has no pixel range dtype: that is for 16-bit integers"
    is_integer = are_integers(values)
    target = "the values of black and white"
    if low >= 0 and (is_integer or high <= 1):
        target = f"values such as {suggest_pixel_range(low, high, is_integer=is_integer)}"
    kind = "grayscale image"
    if bands != 1:
        kind = f"image of {bands} channels"
    interval = f"{_format_number(low)} to {_format_number(high)}"
    raise PixelRangeError(
        f"{describe_depth(values)} {kind} with values from {interval}, {cause}: "
        f"set pixels.range (training), --pixel-range (commands) or pixel_range (clipkit.load) to {target}; "
        "`python -m data inspect` reports the values of all images"
    )


def describe_depth(values: "npt.NDArray[Any]") -> str:
    """Describe the type of values, such as "16-bit", "signed 16-bit" or "32-bit float"."""
    bits = 8 * values.dtype.itemsize
    if values.dtype.kind == "f":
        return f"{bits}-bit float"
    if values.dtype.kind == "i" and bits < 32:
        return f"signed {bits}-bit"
    return f"{bits}-bit"


def are_integers(values: "npt.NDArray[Any]") -> bool:
    """Check whether all finite values are integers, whatever their type."""
    import numpy as np

    if values.dtype.kind != "f":
        return True
    finite = values[np.isfinite(values)]
    return bool((finite == np.floor(finite)).all())


def value_extrema(values: "npt.NDArray[Any]") -> tuple[float, float]:
    """Return the smallest and the largest finite value, or 0 and 0 without finite values."""
    import numpy as np

    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    if not finite.size:
        return 0.0, 0.0
    return float(finite.min()), float(finite.max())


def suggest_pixel_range(low: float, high: float, *, is_integer: bool) -> str:
    """Return a pixel range for values from ``low`` to ``high``, as ``parse_pixel_range`` reads it.

    0,1 if the largest value is 1 or a fraction of it. For other non-negative integers, the range of the fewest bits
    that hold them: 0,4095 for values up to 3,000. For others, the values themselves.
    """
    if low >= 0 and 0 < high <= 1:
        return "0,1"
    if low >= 0 and is_integer:
        return f"0,{2 ** max(8, int(high).bit_length()) - 1}"
    return format_pixel_range((low, high if high > low else low + 1))
