"""Files of published values; ``eval/README.md`` describes the fields."""

import hashlib
import tomllib
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from PIL import Image, ImageDraw

from clipkit.errors import DataError, nearest

VECTORS = Path(__file__).parent
Color = tuple[int, int, int]
# method of Pillow's ImageDraw, box, colors of the area and of the outline, and its width
Shape = tuple[Literal["ellipse", "rectangle"], tuple[int, int, int, int], Color, Color, int]
Kind = Literal["cosines", "logits", "probabilities", "sigmoids", "image features", "text features"]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table in a file; unknown keys are errors."""


class PublishedImage(_Table, frozen=True, kw_only=True):
    """An image file that users have, or an image of ``size`` that is drawn."""

    file: str
    url: str = ""
    sha256: str = ""
    size: tuple[int, int] | None = None
    color: Color = (0, 0, 0)
    last_color: Color | None = None
    shapes: tuple[Shape, ...] = ()

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
            image = Image.open(BytesIO(content))
        else:
            raise DataError(f"{path} is missing: download {self.url}, and give its folder as --image-root")
        digest = hashlib.sha256(content).hexdigest()
        if self.sha256 not in ("", digest):
            raise DataError(f"{path} is not the published image: its SHA-256 is {digest}, not {self.sha256}")
        return image


class Expected(_Table, frozen=True, kw_only=True):
    """Published values of one kind: a row per image, or of ``text features`` per text."""

    kind: Kind
    values: tuple[tuple[float, ...], ...]
    tolerance: Annotated[float, msgspec.Meta(gt=0)]
    scale: float | None = None


class PublishedValues(_Table, frozen=True, kw_only=True):
    """The inputs and outputs of a model that a page states."""

    title: str
    models: tuple[str, ...] = ()
    source: str
    date: str
    note: str = ""
    texts: tuple[str, ...]
    images: tuple[PublishedImage, ...]
    expected: tuple[Expected, ...]


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
        if len(expected.values) != rows or not fits:
            raise DataError(
                f"{path}: {expected.kind} need {rows} rows of equal length, with a value per text"
            )
    return published
