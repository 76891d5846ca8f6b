"""Makes ``icons``: pictures by real artists, the PNG icons of the freedesktop icon themes on this machine.

Training pictures come from all themes but one; the pictures of the theme held out (with its variants, such as
its dark one) are the test split, so that evaluation sees artists that training never saw. Rules:

* Pictures have at least 48 pixels a side, and at most the two sizes of each icon that differ most: the
  smallest and the one nearest to 128 pixels. Stored sides are at most 128 pixels (larger ones are reduced).
* Transparency is laid on white; drawings made for dark panels, which would vanish there, on dark grey.
* A file under many names (symbolic links, identical copies in other themes) is one picture: the caption has
  the file's own name, the json has them all. The same drawing at two sizes, or in two themes that forked, is
  kept once: pictures of one name whose fingerprints hardly differ.
* A test picture that is identical or nearly identical to any training picture is dropped.
"""

import hashlib
import io
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops
from rich.console import Console
from rich.progress import track

from clipkit.errors import DataError
from data.corpora.icon_names import TEMPLATES, caption
from data.corpora.icon_themes import LARGEST, SMALLEST, Icon, families_of, licenses, scan, settle_names
from data.writer import DatasetWriter, Record

__all__ = ["make"]

# The first that is installed, else the theme that shares most names. Oxygen's artists drew everything anew;
# elementary-xfce and mate, which share as many names, redraw or copy gnome's pictures here and there.
HELD_OUT = ("oxygen",)
STORED = 128  # pixels a side at most
FINGERPRINT = 24  # pixels a side
SAME_DRAWING = 0.98  # correlation of two fingerprints above which pictures of one name show one drawing
NEARLY_SAME = 0.9  # above which a test picture resembles a training picture too much, whatever their names
FAINTEST = 64  # of 255: a drawing whose darkest twentieth differs less from white is laid on dark grey
INSTALL = (
    "sudo apt-get install oxygen-icon-theme gnome-icon-theme mate-icon-theme faenza-icon-theme "
    "elementary-xfce-icon-theme moka-icon-theme"
)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """An icon as it will be stored: PNG bytes, and a fingerprint (1728 float32, unit norm) to compare by."""

    icon: Icon
    png: bytes
    side: int
    fingerprint: NDArray[np.float32]


def make(out: Path, *, root: Path = Path("/usr/share/icons"), progress: bool = True) -> None:
    """Write the icons of the themes under ``root`` as the dataset folder ``out``.

    Split "train" has PNG, caption and json; split "test" has a label too, one picture a class, and its
    class names are the names that the held-out theme shares with training. The same files installed give the
    same bytes.

    Args:
        out: the folder to make; it must not exist, or be empty.
        root: the folder that holds the theme folders.
        progress: show a progress bar on stderr.

    Raises:
        DataError: fewer than two themes with pictures, or no name that two themes share.
    """
    with DatasetWriter(out) as writer:
        icons = scan(root)
        families = families_of({theme for icon in icons for theme in icon.themes})
        if len(set(families.values())) < 2:
            found = f"only {min(families.values())}" if families else "none"
            raise DataError(f"icons needs two icon themes with PNG pictures; {root} has {found}: {INSTALL}")
        icons = settle_names(icons, families)
        held_out = _choose_held_out(icons, families)
        seen, unseen = _split(icons, families, held_out)
        report: Counter[str] = Counter()
        train = _distinct(_draw(_two_sizes(seen), report, "training" if progress else ""), report, "train")
        known = {drawing.icon.text for drawing in train}
        candidates = _one_a_class([icon for icon in unseen if icon.text in known])
        test = _distinct(_draw(candidates, report, "test" if progress else ""), report, "test")
        test = _unlike(test, train, report)
        if len(test) < 2:
            raise DataError(f"the icon themes under {root} share too few names to hold one out: {INSTALL}")
        class_names = sorted(drawing.icon.text for drawing in test)
        labels = {text: label for label, text in enumerate(class_names)}
        for record in _records(train, {}):
            writer.write("train", record)
        for record in _records(test, labels):
            writer.write("test", record)
        card = _card(train, test, held_out, report, root)
        writer.finish(card, class_names=class_names, templates=TEMPLATES)


def _choose_held_out(icons: Sequence[Icon], families: Mapping[str, str]) -> str:
    """The family of themes to evaluate on: a preferred one, else the one that shares most names."""
    held: dict[str, set[str]] = defaultdict(set)
    for icon in icons:
        for theme in icon.themes:
            held[families[theme]].add(icon.text)
    for family in HELD_OUT:
        if family in held:
            return family

    def shared(family: str) -> int:
        return len(held[family] & set().union(*(held[other] for other in held if other != family)))

    return min(held, key=lambda family: (-shared(family), family))


def _split(
    icons: Sequence[Icon], families: Mapping[str, str], held_out: str
) -> tuple[list[Icon], list[Icon]]:
    """The icons for training and those of the family held out; a file that both have goes to training."""
    seen, unseen = [], []
    for icon in icons:
        others = sorted(theme for theme in icon.themes if families[theme] != held_out)
        if not others:
            unseen.append(icon)
        else:
            seen.append(icon if icon.theme in others else replace(icon, theme=others[0]))
    return seen, unseen


def _two_sizes(icons: Sequence[Icon]) -> list[Icon]:
    """Of the sizes of one icon in one theme: the smallest, and the one nearest to the stored size."""
    groups: dict[tuple[str, str, bool], list[Icon]] = defaultdict(list)
    for icon in icons:
        groups[icon.theme, icon.text, icon.symbolic].append(icon)
    chosen = []
    for group in groups.values():
        small = min(group, key=lambda icon: (icon.side, icon.path))
        large = min(group, key=_from_stored_size)
        chosen += [large] if large == small else [large, small]
    return chosen


def _one_a_class(icons: Sequence[Icon]) -> list[Icon]:
    """One icon for each text: a coloured one of the theme itself before its variants, the largest size."""
    groups: dict[str, list[Icon]] = defaultdict(list)
    for icon in icons:
        groups[icon.text].append(icon)
    return [
        min(group, key=lambda icon: (icon.symbolic, len(icon.theme), *_from_stored_size(icon)))
        for group in groups.values()
    ]


def _from_stored_size(icon: Icon) -> tuple[bool, int, Path]:
    """Sorts by fitness for storing: the smallest that need not be enlarged, else the largest."""
    return icon.side < STORED, abs(icon.side - STORED), icon.path


def _draw(icons: Sequence[Icon], report: Counter[str], what: str) -> list[Drawing]:
    """Decode, lay on a ground, reduce, and encode; ``what`` labels the progress bar, "" shows none."""
    drawings = []
    bar = track(icons, f"drawing {what} icons", console=Console(stderr=True), disable=not what)
    for icon in bar:
        try:
            with Image.open(icon.path, formats=("PNG",)) as image:
                if not SMALLEST <= max(image.size) <= LARGEST or min(image.size) < SMALLEST // 2:
                    report["of another size than the index says"] += 1
                    continue
                picture = _on_ground(image.convert("RGBA"))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # Pillow raises all four
            report["unreadable"] += 1
            continue
        if picture is None:
            report["blank"] += 1
            continue
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        side, png = max(picture.size), buffer.getvalue()
        drawings.append(Drawing(icon=icon, png=png, side=side, fingerprint=_fingerprint(picture)))
    return drawings


def _on_ground(picture: Image.Image) -> Image.Image | None:
    """An RGBA picture as RGB of at most 128 pixels, on white or on dark grey; None if it is blank."""
    inked = np.asarray(picture.getchannel("A")) >= 32
    if not inked.any():
        return None
    flat = _laid_on("white", picture)
    darkness = 255 - np.asarray(flat).min(axis=2)[inked]
    if np.percentile(darkness, 95) < FAINTEST:
        flat = _laid_on("#404040", picture)
    flat.thumbnail((STORED, STORED), Image.Resampling.LANCZOS)
    return flat


def _laid_on(ground: str, picture: Image.Image) -> Image.Image:
    flat = Image.new("RGB", picture.size, ground)
    flat.paste(picture, mask=picture.getchannel("A"))
    return flat


def _fingerprint(picture: Image.Image) -> NDArray[np.float32]:
    """What stays when a drawing is moved, scaled or encoded anew: the part with ink, small, of unit norm.

    The dot product of two fingerprints is their correlation; that of an even picture is zero with any.
    """
    ground = Image.new("RGB", picture.size, picture.getpixel((0, 0)))
    ink = ImageChops.difference(picture, ground).convert("L").point(lambda value: 255 * (value > 16))
    small = picture.crop(ink.getbbox()).resize((FINGERPRINT, FINGERPRINT), Image.Resampling.BOX)
    colours = np.asarray(small, np.float32).reshape(-1, 3)
    flat: NDArray[np.float32] = (colours - colours.mean(axis=0)).reshape(-1)
    return flat / max(float(np.linalg.norm(flat)), 1e-6)


def _distinct(drawings: Sequence[Drawing], report: Counter[str], split: str) -> list[Drawing]:
    """Leave out what is there already: equal pixels under any name, the same drawing under the same name."""
    order = sorted(drawings, key=lambda drawing: (-drawing.side, drawing.icon.path))
    pixels: set[str] = set()
    kept: dict[str, list[Drawing]] = defaultdict(list)
    for drawing in order:
        digest = hashlib.sha256(drawing.png).hexdigest()
        same_name = kept[drawing.icon.text]
        if digest in pixels:
            report[f"{split}: equal pixels"] += 1
        elif any(drawing.fingerprint @ other.fingerprint > SAME_DRAWING for other in same_name):
            report[f"{split}: the same drawing again"] += 1
        else:
            pixels.add(digest)
            same_name.append(drawing)
    return [drawing for group in kept.values() for drawing in group]


def _unlike(test: Sequence[Drawing], train: Sequence[Drawing], report: Counter[str]) -> list[Drawing]:
    """The test drawings that no training drawing resembles, whatever the names."""
    if not test or not train:
        return []
    known = np.stack([drawing.fingerprint for drawing in train])
    nearest = (np.stack([drawing.fingerprint for drawing in test]) @ known.T).max(axis=1)
    kept = [drawing for drawing, similarity in zip(test, nearest, strict=True) if similarity < NEARLY_SAME]
    report["test: nearly the same as a training picture"] += len(test) - len(kept)
    return kept


def _records(drawings: Sequence[Drawing], labels: Mapping[str, int]) -> Iterator[Record]:
    """The drawings as samples, in an order that mixes themes and follows from their names alone."""
    keyed = []
    for drawing in drawings:
        icon = drawing.icon
        where = f"{icon.theme}/{icon.path.parent.parent.name}/{icon.path.parent.name}/{icon.path.name}"
        keyed.append((hashlib.sha256(where.encode()).hexdigest()[:16], drawing))
    for key, drawing in sorted(keyed, key=lambda pair: pair[0]):
        icon = drawing.icon
        yield Record(
            key=key,
            image=drawing.png,
            extension="png",
            caption=caption(icon.text, context=icon.context, symbolic=icon.symbolic, key=key),
            label=labels.get(icon.text),
            meta={
                "theme": icon.theme,
                "name": icon.name,
                "names": [name for name in icon.names if name != icon.name],
                "context": icon.context,
                "size": icon.side,
            },
        )


def _card(
    train: Sequence[Drawing], test: Sequence[Drawing], held_out: str, report: Counter[str], root: Path
) -> dict[str, object]:
    themes = Counter(drawing.icon.theme for drawing in (*train, *test))
    return {
        "name": "icons",
        "description": "PNG icons of the freedesktop icon themes installed on one machine",
        "made_by": "python -m data make icons",
        "held_out": held_out,
        "themes": dict(sorted(themes.items())),
        "names": {"train": len({drawing.icon.text for drawing in train}), "test": len(test)},
        "tasks": ["zero-shot", "retrieval"],
        "left_out": dict(sorted(report.items())),
        "licenses": licenses(root, sorted(themes)),
    }
