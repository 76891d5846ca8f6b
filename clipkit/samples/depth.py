"""Deep grayscale images (16-bit, 32-bit, signed or float): map their values to 8 bits.

A file does not say which values are black and white: a 12-bit X-ray is stored in 16 bits and is nearly black if the
full range of 16 bits is mapped. So the range is a setting, ``pixel_range``, for which there is no safe default.
Training, evaluation and inference call ``eight_bit`` before anything else is done with an image.

Values are those that Pillow decodes: PPM and JPEG 2000 files with fewer than 16 bits are scaled to 16 bits.
"""

import math
from typing import TYPE_CHECKING, Any, TypeGuard

from clipkit.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image

__all__ = [
    "STRETCH",
    "PixelRange",
    "PixelRangeError",
    "are_integers",
    "describe_depth",
    "eight_bit",
    "format_pixel_range",
    "gray_values",
    "has_deep_colors",
    "is_deep",
    "is_pixel_range",
    "is_white_zero",
    "parse_pixel_range",
    "refuse_deep_alpha",
    "scale_to_8_bits",
    "suggest_pixel_range",
    "to_16_bit",
    "value_extrema",
]

# "auto": deep images raise PixelRangeError; "dtype": the full range of 16-bit integers; or the values of black and
# white. ``STRETCH`` is not a setting.
PixelRange = str | tuple[float, float]

# From the minimum to the maximum of each image. For display and to compare images only: the same gray stands for
# different values in different images.
STRETCH = "stretch"

_EXPECTED = "expected auto, dtype, or the values of black and white in ascending order, such as 0,4095"
# TIFF tags
_BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339
# numpy type of integers that Pillow decodes to int32, by bits and TIFF sample format (1 unsigned, 2 signed)
_TIFF_TYPES = {(16, 2): "int16", (32, 1): "uint32"}
_BLOCK = 1 << 20  # values converted at a time, because the conversion takes 40 times their memory


class PixelRangeError(DataError):
    """A deep image cannot be mapped to 8 bits because the pixel range is missing or does not fit.

    All images of the same kind have this error, so commands stop instead of replacing the image.
    """


def parse_pixel_range(value: object, *, setting: str = "pixel_range") -> PixelRange:
    """Parse "auto", "dtype", "LOW,HIGH" or two numbers.

    Raises:
        ConfigError: the value is none of these; ``setting`` is its name in the message.
    """
    parsed: object = value
    try:
        if isinstance(value, str) and "," in value:
            parsed = tuple(float(number) for number in value.split(","))
        elif isinstance(value, list | tuple):
            parsed = tuple(float(number) for number in value)
    except (ValueError, TypeError, OverflowError):
        parsed = None
    if not is_pixel_range(parsed):
        raise ConfigError(f"{setting} = {value!r} is invalid: {_EXPECTED}")
    return parsed


def is_pixel_range(value: object) -> TypeGuard[PixelRange]:
    """Check whether a value is "auto", "dtype", or two finite numbers in ascending order."""
    if not isinstance(value, tuple):
        return isinstance(value, str) and value in ("auto", "dtype")
    if len(value) != 2 or not all(type(number) in (int, float) for number in value):
        return False
    low, high = value
    return bool(low < high) and math.isfinite(float(high - low) * 255)


def format_pixel_range(pixel_range: PixelRange) -> str:
    """Format as ``parse_pixel_range`` reads it."""
    if isinstance(pixel_range, str):
        return pixel_range
    return ",".join(repr(number).removesuffix(".0") for number in pixel_range)


def is_deep(image: "Image") -> bool:
    """Check whether an image is grayscale with more than 8 bits or signed values."""
    return image.mode.startswith(("I", "F")) or _is_signed_byte(image)


def _is_signed_byte(image: "Image") -> bool:
    """Check for a TIFF with values from -128 to 127, which Pillow decodes to their bytes."""
    return image.mode == "L" and _tiff_tag(image, _SAMPLE_FORMAT, default=1) == 2


def has_deep_colors(image: "Image") -> bool:
    """Check whether an image, opened but not yet loaded, has 16 bits per color, which Pillow reduces to 8."""
    if is_deep(image):
        return False
    if image.format == "TIFF":
        return _tiff_tag(image, _BITS, default=0) > 8
    raw_mode, largest = _png_or_ppm_values(image)
    return raw_mode.endswith(";16B") or largest > 255


def refuse_deep_alpha(image: "Image") -> None:
    """Refuse 16-bit grayscale with an alpha channel, opened but not yet loaded, which Pillow reduces to 8 bits.

    Raises:
        PixelRangeError: the image is of this kind.
    """
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
    bits, sample_format = _tiff_tag(image, _BITS, default=0), _tiff_tag(image, _SAMPLE_FORMAT, default=1)
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


def _tiff_tag(image: "Image", tag: int, *, default: int) -> int:
    value = getattr(image, "tag_v2", {}).get(tag, default)
    return int(value[0] if isinstance(value, tuple) else value)


def eight_bit(image: "Image", pixel_range: PixelRange) -> tuple["Image", bool]:
    """Convert a loaded deep image to mode L.

    Returns:
        The image, and whether values were outside the range.

    Raises:
        PixelRangeError: the range is "auto", or "dtype" for other values than 16-bit integers.
    """
    from PIL import Image

    gray, clamped = scale_to_8_bits(gray_values(image), pixel_range)
    return Image.fromarray(255 - gray if is_white_zero(image) else gray), clamped


def scale_to_8_bits(
    values: "npt.NDArray[Any]", pixel_range: PixelRange
) -> tuple["npt.NDArray[np.uint8]", bool]:
    """Map values linearly from the pixel range to 0–255: (H, W) → (H, W) uint8.

    A value v becomes ``rint((clip(v, low, high) - low) * 255 / (high - low))`` in float64, which rounds halves to
    even numbers. NaN becomes 0.

    Returns:
        The result, and whether values were outside the range.

    Raises:
        PixelRangeError: as for ``eight_bit``.
    """
    import numpy as np

    low, high = _bounds(values, pixel_range)
    gray = np.empty(values.shape, dtype=np.uint8)
    clamped = False
    rows = max(1, _BLOCK // max(1, values.shape[1]))
    for start in range(0, len(values), rows):
        block = values[start : start + rows].astype(np.float64)
        inside = (block >= low) & (block <= high)  # False for NaN
        clamped = clamped or not inside.all()
        block = np.clip(np.nan_to_num(block, nan=low), low, high)
        gray[start : start + rows] = np.rint((block - low) * 255 / (high - low))
    return gray, clamped


def _bounds(values: "npt.NDArray[Any]", pixel_range: PixelRange) -> tuple[float, float]:
    """Return the values that become 0 and 255."""
    import numpy as np

    if isinstance(pixel_range, tuple):
        return pixel_range
    if pixel_range == STRETCH:
        low, high = value_extrema(values)
        return (low, high) if low < high else (low, low + 1)
    is_16_bit = values.dtype.kind in "iu" and values.dtype.itemsize == 2
    if pixel_range == "dtype" and is_16_bit:
        limits = np.iinfo(values.dtype)
        return float(limits.min), float(limits.max)
    low, high = value_extrema(values)
    cause = "and no known black and white"
    if pixel_range == "dtype":
        cause = "which has no pixel range dtype: that is for 16-bit integers"
    extrema = " to ".join(repr(number).removesuffix(".0") for number in (low, high))
    is_integer = are_integers(values)
    target = "the values of black and white"
    if low >= 0 and (is_integer or high <= 1):
        target = f"values such as {suggest_pixel_range(low, high, is_integer=is_integer)}"
    raise PixelRangeError(
        f"{describe_depth(values)} grayscale image with values from {extrema}, {cause}: set data.pixel_range "
        f"(training), --pixel-range (commands) or pixel_range (clipkit.load) to {target}; `python -m data inspect` "
        "reports the values of all images"
    )


def describe_depth(values: "npt.NDArray[Any]") -> str:
    """Describe the type of values, such as "16-bit", "signed 16-bit" or "32-bit float"."""
    bits = 8 * values.dtype.itemsize
    if values.dtype.kind == "f":
        return f"{bits}-bit float"
    return f"signed {bits}-bit" if values.dtype.kind == "i" and bits < 32 else f"{bits}-bit"


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
