"""Depth, transparency and EXIF orientation of image files: detect them, and apply them on request.

By default clipkit, like open_clip, drops the alpha channel, which reveals the colors of transparent pixels, and
ignores the EXIF orientation. Images with ignored traits are counted and reported. For deep grayscale images see
``clipkit.samples.depth``.
"""

import struct
import zlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from clipkit.errors import ConfigError
from clipkit.files.terminal import counted
from clipkit.samples.depth import PixelRange, format_pixel_range, is_deep

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL.Image import Image

Color = tuple[int, int, int]

# exceptions that Pillow raises for broken files, documented or observed
PILLOW_ERRORS = (
    OSError, SyntaxError, ValueError, EOFError, RuntimeError, LookupError, TypeError, ArithmeticError, MemoryError,
    AssertionError, AttributeError, struct.error, zlib.error,
)  # fmt: skip
ORIENTATION_TAG = 0x0112  # EXIF tag
_TRANSPOSE = {  # Pillow's transposition by EXIF orientation
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip


class Traits(NamedTuple):
    """Properties of an image file that open_clip's preprocessing ignores.

    Attributes:
        transparent: whether any pixel is not opaque.
        rotated: whether the EXIF orientation is not upright.
        clamped: whether values of a deep image are outside the pixel range.
        deep_colors: whether it has 16 bits per color, which Pillow reduces to 8.
        frames: whether it has several frames, of which the first is used.
        cmyk: whether its colors are CMYK, which are converted to RGB without a color profile.
        pages: whether it has several pages of one size with one channel each, of which the first is used.
        extra_channels: whether it has channels beyond gray, RGB and alpha, which are not used.
        file_channels: with ``pages`` or ``extra_channels``, the number of channels of all pages; else 0.
    """

    transparent: bool = False
    rotated: bool = False
    clamped: bool = False
    deep_colors: bool = False
    frames: bool = False
    cmyk: bool = False
    pages: bool = False
    extra_channels: bool = False
    file_channels: int = 0


NO_TRAITS = Traits()


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """Options for decoding images; the defaults are open_clip's.

    Attributes:
        background: color behind transparent images; None drops the alpha channel.
        upright: whether to apply the EXIF orientation.
        pixel_range: the values of deep images that become black and white.
        channels: C of the result, 3 for RGB; images of another number of channels do not fit.
    """

    background: Color | None = None
    upright: bool = False
    # not in repr if it is the default: models without it keep their hash
    pixel_range: PixelRange = field(default="auto", repr=False)
    channels: int = field(default=3, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values, as stored with weights, without ``channels``; {} for the defaults."""
        values: dict[str, Any] = {}
        if self.background is not None or self.upright:
            values = {"background": self.background, "upright": self.upright}
        if self.pixel_range != "auto":
            values["pixel_range"] = self.pixel_range
        return values

    def __str__(self) -> str:
        """Describe the settings; "" for the defaults."""
        words = []
        if self.background is not None:
            words.append(f"transparent images get the background {format_color(self.background)}")
        if self.upright:
            words.append("the EXIF orientation of images is applied")
        if self.pixel_range == "dtype":
            words.append("the full range of 16-bit images becomes 0 to 255")
        elif isinstance(self.pixel_range, tuple):
            ranges = format_pixel_range(self.pixel_range).replace(",", " to ").replace(";", ", ")
            each = " (one range for each channel)" if ", " in ranges else ""
            words.append(f"values from {ranges} of deep images become 0 to 255{each}")
        return " and ".join(words)


@dataclass(kw_only=True, slots=True)
class TraitCounts:
    """Number of images with each trait, and the sum of ``file_channels``."""

    images: int = 0
    transparent: int = 0
    rotated: int = 0
    clamped: int = 0
    deep_colors: int = 0
    frames: int = 0
    cmyk: int = 0
    pages: int = 0
    extra_channels: int = 0
    file_channels: int = 0

    def add(self, *images: Traits) -> None:
        """Count images."""
        for traits in images:
            self.images += 1
            for name, present in traits._asdict().items():
                setattr(self, name, getattr(self, name) + present)

    def merge(self, other: "TraitCounts") -> None:
        """Add the counts of other images."""
        for name, count in asdict(other).items():
            setattr(self, name, getattr(self, name) + count)

    @property
    def counts_by_trait(self) -> dict[str, int]:
        """The number of images with each trait, by its name, and the sum of ``file_channels``."""
        return {name: getattr(self, name) for name in Traits._fields}

    def lines(self, decoding: Decoding, *, background: str, upright: str) -> dict[str, str]:
        """Return a warning, by the trait's name, for each trait that was present and lost information.

        Args:
            decoding: how the images were decoded.
            background: how to set a background, such as "--background white"; "" if the user chose not to.
            upright: how to apply the orientation; "" if the user chose not to.
        """

        def format_of_all(count: int) -> str:
            return f"{count:,} of {counted(self.images, 'image')} {'is' if count == 1 else 'are'}"

        lines = {}
        if self.transparent and decoding.background is None and background:
            lines["transparent"] = (
                f"{format_of_all(self.transparent)} transparent and without a background: the colors hidden under "
                f"the transparent parts are used, as open_clip does; set {background}"
            )
        if self.rotated and not decoding.upright and upright:
            lines["rotated"] = (
                f"{format_of_all(self.rotated)} rotated by an EXIF tag that is not applied, as in open_clip; set "
                f"{upright}"
            )
        pixel_range = format_pixel_range(decoding.pixel_range)
        channels, rest = divmod(self.file_channels, max(1, self.pages + self.extra_channels))
        number = "several" if rest else str(channels)
        advice = ""
        if not rest and channels != decoding.channels:
            advice = (
                f"; to use all as channels, train with pixels.channels={channels}, and add it to "
                "`python -m data inspect`, which then reports the values of each"
            )
        for name, loss in (
            ("clamped", f"values outside the pixel range {pixel_range}, which become black or white"),
            ("deep_colors", "16 bits per color, of which the upper 8 are used"),
            ("frames", "several frames, of which the first is used"),
            ("cmyk", "CMYK colors, which are converted to RGB without a color profile"),
            ("pages", f"{number} pages, of which the first is used{advice}"),
            ("extra_channels", f"{number} channels, of which only gray, colors and alpha are used{advice}"),
        ):
            count = getattr(self, name)
            if count:
                have = "has" if count == 1 else "have"
                lines[name] = f"{count:,} of {counted(self.images, 'image')} {have} {loss}"
        return lines


def color_of(color: str | Color, *, setting: str = "background") -> Color | None:
    """Parse a color to red, green and blue, each 0–255; return None for "none"."""
    from PIL import ImageColor

    rgb: object = color
    alpha: tuple[int, ...] = ()
    if isinstance(color, str):
        if color.strip().lower() == "none":
            return None
        try:
            parsed: tuple[int, ...] = ImageColor.getrgb(color)
        except ValueError:
            parsed = ()
        rgb = parsed[:3]
        alpha = parsed[3:]
    if not is_rgb(rgb):
        raise ConfigError(f"{setting} = {color!r} is not a color: use a color such as white or #ffffff")
    if alpha not in ((), (255,)):
        raise ConfigError(f"{setting} = {color!r} is not opaque: use a color such as white or #ffffff")
    return rgb


def is_rgb(values: object) -> TypeGuard[Color]:
    """Check whether a value consists of red, green and blue, each 0–255."""
    return (
        isinstance(values, tuple)
        and len(values) == 3
        and all(type(value) is int and 0 <= value <= 255 for value in values)
    )


def format_color(color: Color | None) -> str:
    """Format a color as "#rrggbb", or "none"."""
    if color is None:
        return "none"
    return "#{:02x}{:02x}{:02x}".format(*color)


def is_transparent(image: "Image") -> bool:
    """Check whether any pixel of a loaded image is not opaque."""
    if (image.mode == "P" and image.palette is None) or not image.has_transparency_data:
        return False
    try:
        low, _ = get_alpha(image).getextrema()
    # a transparent color that does not match the mode, which Pillow ignores too
    except (TypeError, ValueError):
        return False
    assert isinstance(low, int | float)
    return low < 255


def get_alpha(image: "Image") -> "Image":
    """Return the opacity of an image, mode L."""
    import numpy as np
    from PIL import Image

    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa"):
        return image.getchannel(image.getbands()[-1])
    if image.mode.startswith("I;16"):  # Pillow cannot convert this mode to RGBA
        return Image.fromarray(
            np.where(np.asarray(image) == image.info["transparency"], 0, 255).astype(np.uint8)
        )
    return image.convert("RGBA").getchannel("A")


def align_transparent_color(image: "Image") -> None:
    """Scale the transparent color of a PNG, opened but not yet loaded, in the same way as its pixels.

    Pillow scales pixels to 8 bits but does not change this color. It keeps the upper 8 of 16 bits per channel, so
    all pixels with these upper bits are treated as transparent.
    """
    color = image.info.get("transparency")
    tile = getattr(image, "tile", None)  # empty once the image is loaded
    if image.format != "PNG" or color is None or not tile:
        return
    raw_mode = tile[0][3]
    if raw_mode in ("L;2", "L;4"):
        largest = 2 ** int(raw_mode[-1]) - 1
        image.info["transparency"] = (color & largest) * (255 // largest)
    elif raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(channel >> 8 for channel in color)


def blend_onto(image: "Image", background: Color) -> "Image":
    """Composite an image of 8 bits per channel onto a background color; the result has mode RGB."""
    from PIL import Image

    assert not is_deep(image)
    ground = Image.new("RGBA", image.size, (*background, 255))
    return Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")


def read_orientation(image: "Image") -> int:
    """Return the EXIF orientation, 1 to 8; 1 if upright or the tag is damaged."""
    if image.format == "TIFF":  # Pillow applies it on loading
        return 1
    try:
        value = image.getexif().get(ORIENTATION_TAG)
    except PILLOW_ERRORS:
        return 1
    return value if type(value) is int and value in _TRANSPOSE else 1


def upright_image(image: "Image", orientation: int) -> "Image":
    """Apply an EXIF orientation to an image."""
    from PIL.Image import Transpose

    if orientation != 1:
        return image.transpose(Transpose[_TRANSPOSE[orientation]])
    return image


def upright_array(pixels: "npt.NDArray[Any]", orientation: int) -> "npt.NDArray[Any]":
    """Apply an EXIF orientation to (H, W, C) pixels, if it is from 2 to 8; the result is contiguous."""
    import numpy as np

    if orientation not in _TRANSPOSE:
        return pixels
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)
