"""Files of published values; ``eval/README.md`` describes the fields."""

import hashlib
import math
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from PIL import Image, ImageDraw

from clipkit.errors import DataError, nearest
from clipkit.files import counted
from clipkit.samples import open_image, pillow_errors

VECTORS = Path(__file__).parent
# kinds of values, with the smallest that each can have
KINDS = {
    "cosines": -1,
    "logits": -1e6,
    "probabilities": 0,
    "sigmoids": 0,
    "image features": -1,
    "text features": -1,
}
SHAPES = ("ellipse", "rectangle")
Side = Annotated[int, msgspec.Meta(ge=1, le=8192)]
Position = Annotated[int, msgspec.Meta(ge=-8192, le=8192)]
Channel = Annotated[int, msgspec.Meta(ge=0, le=255)]
Color = tuple[Channel, Channel, Channel]
Box = tuple[Position, Position, Position, Position]
# method of Pillow's ImageDraw, box, colors of the area and of the outline, and its width
Shape = tuple[str, Box, Color, Color, Annotated[int, msgspec.Meta(ge=0, le=8192)]]
Row = Annotated[tuple[float, ...], msgspec.Meta(min_length=1)]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table in a file; unknown keys are errors."""


class PublishedImage(_Table, frozen=True, kw_only=True):
    """An image file that users have, or an image of ``size`` that is drawn."""

    file: str
    url: str = ""
    sha256: str = ""
    size: tuple[Side, Side] | None = None
    color: Color = (0, 0, 0)
    last_color: Color | None = None
    shapes: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        for kind, (left, top, right, bottom), *_ in self.shapes:
            if kind not in SHAPES:
                raise ValueError(f"unknown shape {kind!r}: {nearest(kind, SHAPES)}")
            if left > right or top > bottom:
                raise ValueError(f"box {[left, top, right, bottom]}: expected [left, top, right, bottom]")

    def draw(self, size: tuple[int, int]) -> Image.Image:
        """Draw columns from one color to another, or of one color, and shapes."""
        width, height = size
        first, last = np.array(self.color), np.array(self.last_color or self.color)
        columns = np.arange(width)[:, None]
        colors = (first * (width - 1 - columns) + last * columns) // max(1, width - 1)  # (W, 3)
        image = Image.fromarray(np.tile(colors.astype(np.uint8), (height, 1, 1)))
        for kind, box, fill, outline, line_width in self.shapes:
            getattr(ImageDraw.Draw(image), kind)(box, fill, outline, line_width)
        return image

    def open(self, folder: Path) -> Image.Image:
        """Draw the image, or open its file; DataError if it is missing or not the published one."""
        path = folder / self.file
        if self.size is not None:
            image = self.draw(self.size)
            content = image.tobytes()
        elif path.is_file():
            content = path.read_bytes()
        else:
            download = f"download {self.url}, and " if self.url else ""
            raise DataError(
                f"{path} is missing: {download}give its folder as --image-root, or size to draw it"
            )
        digest = hashlib.sha256(content).hexdigest()
        if self.sha256.lower() not in ("", digest):
            raise DataError(f"{path} is not the published image: its SHA-256 is {digest}, not {self.sha256}")
        if self.size is None:
            try:
                with pillow_errors():
                    image = open_image(content)
                    image.load()
            except DataError as error:
                raise DataError(f"{path}: {error}") from error
        return image


class Expected(_Table, frozen=True, kw_only=True):
    """Published values of one kind: a row per image, or of ``text features`` per text."""

    kind: str
    values: Annotated[tuple[Row, ...], msgspec.Meta(min_length=1)]
    tolerance: Annotated[float, msgspec.Meta(ge=1e-9, le=10)]
    scale: Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind = {self.kind!r}: expected one of {', '.join(KINDS)}")
        low = KINDS[self.kind]
        high = max(1, -low)
        numbers = [value for row in self.values for value in row if not math.isnan(value)]
        if not numbers:
            raise ValueError(f"all {self.kind} are nan: state at least one value")
        if min(numbers) < low - self.tolerance or max(numbers) > high + self.tolerance:
            raise ValueError(f"{self.kind} must be from {low:g} to {high:g}, or nan if they are unknown")
        if self.tolerance >= high:
            raise ValueError(f"tolerance = {self.tolerance:g}: must be below {high:g} for {self.kind}")


class PublishedValues(_Table, frozen=True, kw_only=True):
    """The inputs and outputs of a model that a page states."""

    title: str
    models: tuple[str, ...] = ()
    source: str
    date: str
    note: str = ""
    texts: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    images: tuple[PublishedImage, ...]
    expected: Annotated[tuple[Expected, ...], msgspec.Meta(min_length=1)]


def read_published(source: str) -> PublishedValues:
    """Read a file, or one of ``eval/vectors`` by its name."""
    names = sorted(path.stem for path in VECTORS.glob("*.toml"))
    path = VECTORS / f"{source}.toml" if source in names else Path(source).expanduser()
    try:
        published = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), PublishedValues)
    except OSError as error:
        hint = nearest(source, names)
        raise DataError(f"--vectors {source}: {error.strerror}; give a file, or a name; {hint}") from error
    except ValueError as error:  # no text, no TOML, or other tables
        raise DataError(f"{path}: {error}") from error
    for expected in published.expected:
        rows = len(published.texts if expected.kind == "text features" else published.images)
        widths = {len(row) for row in expected.values}
        fits = len(widths) == 1 if "features" in expected.kind else widths == {len(published.texts)}
        if rows == 0:
            raise DataError(f"{path}: {expected.kind} need at least one of [[images]]")
        if len(expected.values) != rows or not fits:
            raise DataError(
                f"{path}: {expected.kind} need {counted(rows, 'row')} of equal length, with a value per text"
            )
        if expected.kind == "probabilities" and len(published.texts) == 1:
            raise DataError(f"{path}: the probability of a single text is always 1: use two or more texts")
    return published
