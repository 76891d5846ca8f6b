"""Fonts of the ``glyphs`` dataset: their characters, and the shapes of the glyphs.

The fonts are those that matplotlib installs. The shape of a glyph is stored as two distance fields, in pixels of a
canvas on which the em square has ``EM`` pixels. Distance fields can be stretched, cropped, and thresholded at any
stroke width without artifacts.

- outline field: signed distance to the outline, negative inside: the printed form;
- skeleton field: distance to the center line of the strokes: the path of a pen.
"""

import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

EM = 48  # pixels of the em square
CANVAS = 72  # pixels per side
BASELINE = 51  # row
PRUNED = (0, 3, 6)  # pixels by which the ends of a skeleton's strokes may be shortened
_REACH = 9  # largest stored distance


@dataclass(frozen=True, kw_only=True)
class Face:
    """A font file: one style of a family."""

    file: str
    family: str
    styles: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Glyph:
    """A character in a face.

    ``draw`` is the character to request from the font, ``character`` the one that it shows: an old font may have a
    Greek letter at the code of an accented one, and a "mathematical bold digit one" shows a digit one.
    """

    face: Face
    draw: str
    character: str
    styles: tuple[str, ...]


FACES = (
    *(
        Face(file=f"{stem}-{weight}{slant}.ttf".replace("-.", "."), family=family, styles=(*styles, style))
        for family, stem, style, slanted in (
            ("DejaVu Sans", "DejaVuSans", "sans", "Oblique"),
            ("DejaVu Serif", "DejaVuSerif", "serif", "Italic"),
            ("DejaVu Sans Mono", "DejaVuSansMono", "monospace", "Oblique"),
        )
        for weight, slant, styles in (
            ("", "", ()),
            ("Bold", "", ("bold",)),
            ("", slanted, (slanted.lower(),)),
            ("Bold", slanted, ("bold", slanted.lower())),
        )
    ),
    *(
        Face(file=f"{file}.ttf", family=family, styles=styles)
        for file, family, styles in (
            ("STIXGeneral", "STIX", ("serif",)),
            ("STIXGeneralBol", "STIX", ("bold", "serif")),
            ("STIXGeneralItalic", "STIX", ("italic", "serif")),
            ("STIXGeneralBolIta", "STIX", ("bold", "italic", "serif")),
            ("cmr10", "Computer Modern Roman", ("serif",)),
            ("cmb10", "Computer Modern Roman", ("bold", "serif")),
            ("cmti10", "Computer Modern Roman", ("italic", "serif")),
            ("cmmi10", "Computer Modern Roman", ("italic", "serif")),
            ("cmsy10", "Computer Modern Roman", ("script",)),
            ("cmtt10", "Computer Modern Typewriter", ("typewriter",)),
            ("cmss10", "Computer Modern Sans", ("sans",)),
        )
    ),
)

# Test families: a monospaced sans in four styles, and a sans by another designer.
HELD_OUT = frozenset({"DejaVu Sans Mono", "Computer Modern Sans"})

LICENSES = {
    "DejaVu": "Bitstream Vera license; DejaVu changes are in the public domain",
    "STIX": "STIX Fonts license, based on the SIL Open Font License",
    "Computer Modern": "BaKoMa Fonts license",
}

# Characters common in print, without combining marks and scripts that need shaping.
_BLOCKS = (
    (0x0021, 0x007E),  # ASCII
    (0x00A1, 0x017F),  # Latin-1, Latin Extended-A
    (0x0192, 0x0192),
    (0x01CD, 0x01DC),
    (0x0218, 0x021B),
    (0x0370, 0x03FF),  # Greek
    (0x0400, 0x045F),  # Cyrillic
    (0x1E80, 0x1EF9),
    (0x2010, 0x2051),  # punctuation
    (0x2070, 0x208E),  # superscripts and subscripts
    (0x20A0, 0x20BF),  # currency
    (0x2100, 0x214E),  # letterlike symbols
    (0x2150, 0x218F),  # number forms
    (0x2190, 0x21FF),  # arrows
    (0x2200, 0x22FF),  # mathematics
    (0x2460, 0x2473),  # circled numbers
    (0x25A0, 0x25FF),  # geometric shapes
    (0x2605, 0x266F),  # stars, planets, chess, cards, music
    (0x2701, 0x27BF),  # dingbats
    (0x1D400, 0x1D7FF),  # mathematical letters and digits, drawn as letters and digits in a style
)
_ALPHANUMERIC_STYLES = {
    "bold": "bold",
    "italic": "italic",
    "sans-serif": "sans",
    "script": "script",
    "fraktur": "fraktur",
    "black-letter": "fraktur",
    "double-struck": "double-struck",
    "monospace": "monospace",
}
_STYLE_ORDER = (
    *("bold", "italic", "oblique"),
    *("serif", "sans", "monospace", "typewriter", "script", "fraktur", "double-struck"),
)
_OLD_STYLE = {
    f"{unicodedata.name(figure).split()[1].lower()}oldstyle": figure for figure in "0123456789"
}  # by glyph name, figures with ascenders and descenders


@cache
def font_folder() -> Path:
    """Return the folder of matplotlib's font files."""
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@cache
def list_glyphs(face: Face) -> tuple[Glyph, ...]:
    """Return the glyphs of a face that the dataset may contain, in the order of their codes."""
    from fontTools import agl  # type: ignore[import-untyped]
    from fontTools.ttLib import TTFont  # type: ignore[import-untyped]

    with TTFont(font_folder() / face.file, lazy=True) as font:
        names: dict[int, str] = font.getBestCmap()
    glyphs: dict[tuple[str, tuple[str, ...]], Glyph] = {}
    for code, name in sorted(names.items()):
        # Computer Modern's files use TeX's encodings: the glyph's name is correct, its code is not
        truth = _OLD_STYLE.get(name) or (agl.toUnicode(name) if face.file.startswith("cm") else chr(code))
        title = ""
        if len(truth) == 1 and name != ".notdef":
            title = unicodedata.name(truth, "")
        if (
            not 1 <= len(title.split()) <= 7
            or not any(first <= ord(truth) <= last for first, last in _BLOCKS)
            or unicodedata.category(truth)[0] not in "LNPS"
        ):
            continue
        character, styles = _simplify_character(truth, face)
        glyph = Glyph(face=face, draw=chr(code), character=character, styles=styles)
        glyphs.setdefault((character, styles), glyph)
    fitting = []
    for glyph in glyphs.values():
        left, top, right, bottom = _locate_ink(glyph)[1]
        inside = left >= 1 and top >= 1 and max(right, bottom) < CANVAS
        if glyph.draw.strip() and left < right and top < bottom and inside:
            fitting.append(glyph)
    return tuple(fitting)


def _simplify_character(character: str, face: Face) -> tuple[str, tuple[str, ...]]:
    """Map a mathematical letter or digit to the plain one and its style; others are unchanged."""
    folded = unicodedata.normalize("NFKC", character)
    words = unicodedata.name(character).lower().split()
    styles = tuple(style for word, style in _ALPHANUMERIC_STYLES.items() if word in words)
    styled = words[0] == "mathematical" or (styles and 0x2100 <= ord(character) <= 0x214F)
    if not styled or len(folded) != 1 or not folded.isalnum():
        return character, face.styles
    # the weight of the face remains; a sans alphabet in a serif face is sans
    face_styles = {*face.styles}
    if {*styles} & {*_STYLE_ORDER[3:]}:
        face_styles -= {*_STYLE_ORDER[3:]}
    either = face_styles | {*styles}
    if "italic" in either:
        either.discard("oblique")
    return folded, tuple(style for style in _STYLE_ORDER if style in either)


@cache
def _truetype(file: str) -> "FreeTypeFont":
    from PIL import ImageFont

    return ImageFont.truetype(str(font_folder() / file), EM, layout_engine=ImageFont.Layout.BASIC)


def _locate_ink(glyph: Glyph) -> tuple[int, tuple[float, float, float, float]]:
    """Return the starting column that centers the advance width, and the bounding box of the ink."""
    font = _truetype(glyph.face.file)
    start = round((CANVAS - font.getlength(glyph.draw)) / 2)
    box = font.getbbox(glyph.draw, anchor="ls")
    return start, (box[0] + start, box[1] + BASELINE, box[2] + start, box[3] + BASELINE)


def rasterize(glyph: Glyph) -> NDArray[np.uint8]:
    """Render a glyph: (CANVAS, CANVAS) uint8, 255 for full ink."""
    from PIL import Image, ImageDraw

    image = Image.new("L", (CANVAS, CANVAS))
    font = _truetype(glyph.face.file)
    pen = (_locate_ink(glyph)[0], BASELINE)
    ImageDraw.Draw(image).text(pen, glyph.draw, fill=255, font=font, anchor="ls")
    return np.asarray(image)


def outline_field(ink: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Compute the signed distance to the outline: (N, H, W) uint8 ink → (N, H, W) float32 within ±9."""
    # the outline crosses gray pixels; their coverage gives its distance from their center
    offset = ink.astype(np.float32) / 255 - 0.5
    squares = np.round(offset * offset * _FINE).astype(np.int16)
    outside = np.where(ink == 255, 0, np.where(ink == 0, _FAR, np.where(offset < 0, squares, 0)))
    inside = np.where(ink == 0, 0, np.where(ink == 255, _FAR, np.where(offset > 0, squares, 0)))
    return _root_of_nearest(outside) - _root_of_nearest(inside)


def skeleton_fields(ink: NDArray[np.uint8]) -> list[NDArray[np.float32]]:
    """Compute the distance to the strokes' center lines: (N, H, W) uint8 ink → (N, H, W) float32 in [0, 9] each.

    There is one field for each of ``PRUNED``: that many pixels are removed from every free end, and with them short
    spurs such as serifs.
    """
    lines = _thin(ink > 127)
    done = 0
    fields = []
    for pixels in PRUNED:
        lines = _prune(lines, pixels - done)
        done = pixels
        fields.append(_root_of_nearest(np.where(lines, np.int16(0), _FAR)))
    return fields


_FINE = 64  # units per squared pixel, so that squared distances fit into 16 bits
_FAR = np.int16(_REACH * _REACH * _FINE)


def _root_of_nearest(squares: NDArray[np.int16]) -> NDArray[np.float32]:
    """Square root of min over pixels of (value there + squared distance to there), within the largest distance."""
    best = squares.astype(np.int16)
    for start in range(0, len(best), 32):  # a few at a time, for the CPU cache
        some = best[start : start + 32]
        for axis in (1, 2):
            near = np.moveaxis(some, axis, 0)
            values = np.moveaxis(some.copy(), axis, 0)
            for step in range(1, _REACH + 1):
                more = values + np.int16(step * step * _FINE)
                np.minimum(near[step:], more[:-step], out=near[step:])
                np.minimum(near[:-step], more[step:], out=near[:-step])
    return np.minimum(np.sqrt(best.astype(np.float32) / _FINE), np.float32(_REACH))


def _neighbors(lines: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """The eight neighbors of each pixel as bits, clockwise from the top; outside the canvas is empty."""
    height, width = lines.shape[1:]
    padded = np.pad(lines.view(np.uint8), ((0, 0), (1, 1), (1, 1)))
    code = np.zeros(lines.shape, np.uint8)
    for bit, (y, x) in enumerate(((0, 1), (0, 2), (1, 2), (2, 2), (2, 1), (2, 0), (1, 0), (0, 0))):
        code |= padded[:, y : y + height, x : x + width] << np.uint8(bit)
    return code


@cache
def _tabulate_removals() -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """For each of the 256 neighborhoods, whether its pixel is removed in the two steps of a round of thinning."""
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1 == 1  # (256, 8)
    count = bits.sum(1)
    rises = (~bits & np.roll(bits, -1, axis=1)).sum(1)
    up = bits[:, 0]
    right = bits[:, 2]
    down = bits[:, 4]
    left = bits[:, 6]
    border = (count >= 2) & (count <= 6) & (rises == 1)
    first = border & ~(up & right & down) & ~(right & down & left)
    second = border & ~(up & right & left) & ~(up & down & left)
    return first, second


def _thin(ink: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Thin to lines of one pixel (Zhang and Suen, "A fast parallel algorithm for thinning", 1984)."""
    lines = ink.copy()
    left = np.arange(len(lines))  # not thin yet
    while len(left):
        some = before = lines[left]
        for table in _tabulate_removals():
            some = some & ~table[_neighbors(some)]
        lines[left] = some
        left = left[(some != before).any(axis=(1, 2))]
    return lines


def _prune(lines: NDArray[np.bool_], pixels: int) -> NDArray[np.bool_]:
    single = np.array([value.bit_count() == 1 for value in range(256)])
    for _ in range(pixels):
        ends = lines & single[_neighbors(lines)]
        alone = ends & (_neighbors(ends) > 0)  # the last two pixels of a dot remain
        lines = lines & ~(ends & ~alone)
    return lines
