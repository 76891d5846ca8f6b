"""The built-in dataset ``icons``: PNG icons of the freedesktop icon themes installed on this machine.

One theme and its variants (such as a dark one) form the test split, and all other themes the training split, so
that evaluation uses artists not seen in training.

* Images have at least 48 pixels per side and are stored with at most 128. At most two sizes of
  each icon are used: the smallest, and the one nearest to 128 pixels.
* Transparent icons are blended onto white, or onto dark gray if they were drawn for dark panels and would be
  invisible on white.
* A file with several names (symbolic links, copies in other themes) is one image: its caption uses the file's own
  name, and its json lists all. The same drawing in two sizes or themes (images of one name
  with nearly equal fingerprints) is stored once.
* Test images that are equal or nearly equal to a training image are dropped.
"""

import configparser
import hashlib
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops
from rich.console import Console
from rich.progress import track

from data.corpora.builtin import Unavailable
from data.shards.writer import DatasetWriter, Record

__all__ = [
    "CONTEXTS",
    "Icon",
    "caption",
    "families_of",
    "is_symbolic",
    "make",
    "scan",
    "settle_names",
    "words",
]


# --------------------------------------------------------------------------------------------------------------
# Words and captions from icon names
#
# Names follow the freedesktop icon naming specification ("network-wireless-signal-excellent"), with prefixes of old
# toolkits ("gtk-", "stock_", "gnome-mime-"), MIME types ("application-x-tar"), abbreviations ("-rtl"), sizes, and
# "-symbolic" for drawings in one color.

_TEMPLATES = (
    "{c}",
    "{c} icon",
    "an icon of {c}",
    "a symbol for {c}",
    "a picture of {c}",
    "a small drawing of {c}",
)

CONTEXTS = {  # what an icon stands for, by the context of its folder in index.theme
    "actions": "action", "animations": "animation", "applications": "application", "apps": "application",
    "categories": "category", "devices": "device", "emblems": "emblem", "emotes": "face", "filesystems": "place",
    "international": "flag", "mimetypes": "file type", "places": "place", "status": "status", "stock": "action",
}  # fmt: skip

_PLAIN = (
    *_TEMPLATES,
    "{c}",
    "{c} symbol",
    "a computer icon of {c}",
    "an icon that stands for {c}",
    "a sign that means {c}",
)
_WITH_CONTEXT = (
    "{c}, {context}",
    "an icon of {c}, {context}",
    "{context} icon: {c}",
    "{c} {context} icon",
    "a picture of the {context} {c}",
)
_WITH_COMMA = ("{head}, {rest}", "an icon of {head}, {rest}", "a symbol for {head}, {rest}")
_SYMBOLIC = ("a black symbol for {c}", "{c} in black", "a plain black icon of {c}", "{c}, one colour")

_PREFIXES = re.compile(r"^(gnome-stock-|gnome-dev-|gnome-fs-|gnome-mime-|gtk-|stock[-_])", re.IGNORECASE)
_KINDS = {  # by the first part of a MIME type
    "application": "file", "audio": "audio file", "font": "font file", "image": "image file", "inode": "",
    "message": "message", "model": "model file", "multipart": "message", "package": "package",
    "text": "text file", "video": "video file",
}  # fmt: skip
_MIME = re.compile(rf"^({'|'.join(_KINDS)})(?:[-_/.](.*))?$")
_SPLIT = re.compile(r"[-_.,:;@()\s]+|(?<!\+)\+(?=\w)|(?<=\+\+)(?=\w)")  # "svg+xml", "c++src"
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_SPELLED_OUT = {"rtl": "right to left", "ltr": "left to right", "symbolic": ""}
_LONGEST_WORD = 19  # longer ones are identifiers of web applications
_MOST_WORDS = 8


def is_symbolic(name: str) -> bool:
    """Return whether a name denotes a drawing in one color."""
    return "symbolic" in re.split(r"[-.]", name)


def words(name: str, context: str) -> str | None:
    """Return an icon's name as lower-case words; None if it has no meaning.

    Args:
        name: the file name without suffix, such as "folder-open" or "application-x-tar".
        context: a value of ``CONTEXTS``, or "".
    """
    mime = context == "file type" or name.startswith("gnome-mime-")
    name = _PREFIXES.sub("", name)
    kind = ""
    if mime and (match := _MIME.match(name.lower())):
        kind, name = _KINDS[match[1]], match[2] or ""
    tokens: list[str] = []
    for token in _CAMEL.sub(" ", " ".join(_SPLIT.split(name))).lower().split():
        if re.fullmatch(r"\d+x\d+", token) or (mime and token in ("x", "vnd")):
            continue
        if len(token) > _LONGEST_WORD:
            return None
        # "040" and "40" are one word
        tokens += str(int(token)).split() if token.isdecimal() else _SPELLED_OUT.get(token, token).split()
    tokens += kind.split()
    if not 0 < len(tokens) <= _MOST_WORDS or not any(re.search(r"[a-z]", token) for token in tokens):
        return None
    return " ".join(tokens)


def caption(text: str, *, context: str, symbolic: bool, key: str) -> str:
    """Return a caption for an image of ``text``, in one of several phrasings, chosen by a hash of ``key``."""
    phrasings = [*_PLAIN]
    if context and not {context, "file"} & set(text.split()):  # no "emblem new, emblem"
        phrasings += _WITH_CONTEXT
    head, _, rest = text.partition(" ")
    if rest and context in ("place", "device", "status"):
        phrasings += _WITH_COMMA
    if symbolic:
        phrasings += _SYMBOLIC * 2  # the most visible property
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % len(phrasings)
    return phrasings[number].format(c=text, context=context, head=head, rest=rest)


# --------------------------------------------------------------------------------------------------------------
# Icon themes

_SMALLEST, _LARGEST = 48, 512  # pixels per side
_LARGEST_FILE = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Icon:
    """An image file with all names that refer to it.

    Attributes:
        theme: the theme of the file.
        themes: all themes that contain it, a link to it or a copy.
        name: the file's own name.
        names: all names.
        context: a value of ``CONTEXTS``, or "".
        side: pixels per side, according to the theme's index.
        text: the name in words.
        symbolic: whether it is drawn in one color.
    """

    path: Path
    theme: str
    themes: frozenset[str]
    name: str
    names: tuple[str, ...]
    context: str
    side: int
    text: str
    symbolic: bool


def scan(root: Path) -> list[Icon]:
    """List each image file of 48 to 512 pixels in the themes under ``root`` once, with all its names."""
    names: dict[Path, set[str]] = defaultdict(set)
    themes: dict[Path, set[str]] = defaultdict(set)
    places: dict[Path, tuple[str, str, int]] = {}  # theme, context and side of a file
    for theme in sorted(root.iterdir()) if root.is_dir() else []:
        if theme.name == "hicolor" or not (theme / "index.theme").is_file():
            continue  # hicolor contains the icons of applications, by many artists
        for folder, context, side in _folders(theme):
            home = folder.resolve()
            for link in sorted(folder.glob("*.png")):
                path = link.resolve()
                if not path.is_file() or path.stat().st_size > _LARGEST_FILE:
                    continue
                names[path] |= {link.stem, path.stem}
                themes[path].add(theme.name)
                if (
                    path == home / link.name or path not in places
                ):  # the file itself takes precedence over links
                    places[path] = (theme.name, context, side)
    copies: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(places):
        copies[hashlib.sha256(path.read_bytes()).hexdigest()].append(path)
    icons = []
    for paths in copies.values():
        path = min(paths, key=lambda copy: (len(places[copy][0]), copy))  # a theme before its variants
        own_theme, context, side = places[path]
        icons.append(
            Icon(
                path=path,
                theme=own_theme,
                themes=frozenset().union(*(themes[copy] for copy in paths)),
                name=path.stem,
                names=tuple(sorted(set().union(*(names[copy] for copy in paths)))),
                context=context,
                side=side,
                text=words(path.stem, context) or "",
                symbolic=is_symbolic(path.stem),
            )
        )
    return icons


def _folders(theme: Path) -> Iterator[tuple[Path, str, int]]:
    """Yield the folders of a theme with icons of a suitable size: path, context and side."""
    index = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        index.read(theme / "index.theme", encoding="utf-8")
        main = index["Icon Theme"]
    except (configparser.Error, KeyError, UnicodeDecodeError):
        return  # a cursor theme, or a broken index
    listed = f"{main.get('Directories', '')},{main.get('ScaledDirectories', '')}".split(",")
    for name in dict.fromkeys(part.strip() for part in listed):
        if not index.has_section(name) or not (theme / name).is_dir():
            continue
        section = index[name]
        try:
            side = int(section.get("Size", "0")) * int(section.get("Scale", "1"))
        except ValueError:
            continue
        if _SMALLEST <= side <= _LARGEST:
            yield theme / name, CONTEXTS.get(section.get("Context", "").strip().lower(), ""), side


def families_of(themes: set[str]) -> dict[str, str]:
    """Return the family of each theme: variants are named after it, such as Faenza-Dark after Faenza."""
    return {
        theme: min((base for base in themes if theme == base or theme.startswith(base + "-")), key=len)
        for theme in themes
    }


def settle_names(icons: Sequence[Icon], families: Mapping[str, str]) -> list[Icon]:
    """Choose each icon's name and words, and drop icons whose names have no meaning.

    The name is the file's own, unless another of its names is a file's own name in more than twice as many families
    (a plain folder may be filed as "inode-directory").
    """
    known: dict[str, set[str]] = defaultdict(set)
    for icon in icons:
        known[icon.name].add(families[icon.theme])  # without links: many are names of old applications
    settled = []
    for icon in icons:
        readable = {name: text for name in icon.names if (text := words(name, icon.context))}
        if not readable:
            continue
        best = min(readable, key=lambda name: (-len(known[name]), len(name), name))
        if icon.name in readable and 2 * len(known[icon.name]) >= len(known[best]):
            best = icon.name
        settled.append(replace(icon, name=best, text=readable[best], symbolic=is_symbolic(best)))
    return settled


def _licenses(root: Path, themes: Sequence[str]) -> dict[str, str]:
    """Return the license of each theme according to its Debian package, if dpkg knows it."""
    found = dict.fromkeys(themes, "unknown: see where the theme came from")
    for listing in sorted(Path("/var/lib/dpkg/info").glob("*icon-theme*.list")):
        package = listing.stem.partition(":")[0]
        copyright_file = Path("/usr/share/doc", package, "copyright")
        files = set(listing.read_text(errors="replace").splitlines())
        if not copyright_file.is_file():
            continue
        text = copyright_file.read_text(errors="replace")
        named = sorted(set(re.findall(r"^License: *(.+?) *$", text, re.MULTILINE)))
        for theme in themes:
            if str(root / theme) in files:
                found[theme] = f"{package}: {', '.join(named) or 'see ' + str(copyright_file)}"
    return found


# --------------------------------------------------------------------------------------------------------------
# The dataset

# Held out if installed, otherwise the theme that shares the most names is. All of Oxygen's images are original;
# elementary-xfce and mate share as many names, but redraw or copy some of gnome's images.
_HELD_OUT = "oxygen"
_STORED_SIDE = 128  # pixels
_FINGERPRINT_SIDE = 24  # pixels
_SAME_DRAWING = 0.98  # correlation of fingerprints above which images of one name are the same drawing
_NEARLY_SAME = 0.9  # above which a test image is too similar to a training image of any name
_FAINTEST = 64  # of 255; drawings whose darkest 5% contrast less with white are blended onto dark gray
_INSTALL = (
    "sudo apt-get install oxygen-icon-theme gnome-icon-theme mate-icon-theme faenza-icon-theme "
    "elementary-xfce-icon-theme moka-icon-theme"
)


@dataclass(frozen=True, kw_only=True)
class _Drawing:
    """An icon as stored: PNG bytes, and a fingerprint (1728,) float32 of unit norm."""

    icon: Icon
    png: bytes
    side: int
    fingerprint: NDArray[np.float32]


def make(out: Path, *, root: Path = Path("/usr/share/icons"), progress: bool = True) -> None:
    """Write the icons of the themes under ``root`` as the dataset folder ``out``.

    The train split has PNG, caption and json; the test split also has labels, one image per class. The classes are
    the names that the held-out theme shares with training. The output depends only on the installed files.

    Args:
        out: must not exist, or be empty.
        root: contains the theme folders.
        progress: show a progress bar on stderr.

    Raises:
        Unavailable: fewer than two themes contain images, or no two themes share a name.
    """
    with DatasetWriter(out) as writer:
        icons = scan(root)
        families = families_of({theme for icon in icons for theme in icon.themes})
        if len(set(families.values())) < 2:
            found = f"only {min(families.values())}" if families else "none"
            raise Unavailable(f"icons needs two icon themes with PNG images; {root} has {found}: {_INSTALL}")
        icons = settle_names(icons, families)
        held_out = _choose_held_out(icons, families)
        seen, unseen = list[Icon](), list[Icon]()
        for icon in icons:  # a file in both splits goes to training
            others = sorted(theme for theme in icon.themes if families[theme] != held_out)
            if others:
                seen.append(icon if icon.theme in others else replace(icon, theme=others[0]))
            else:
                unseen.append(icon)
        report: Counter[str] = Counter()
        train = _distinct(_draw(_two_sizes(seen), report, "training" if progress else ""), report, "train")
        known = {drawing.icon.text for drawing in train}
        by_text: dict[str, list[Icon]] = defaultdict(list)
        for icon in unseen:
            if icon.text in known:
                by_text[icon.text].append(icon)
        candidates = [  # in color, of the theme itself rather than its variants, in the largest size
            min(group, key=lambda icon: (icon.symbolic, len(icon.theme), *_from_stored_side(icon)))
            for group in by_text.values()
        ]
        test = _distinct(_draw(candidates, report, "test" if progress else ""), report, "test")
        if test and train:
            fingerprints = np.stack([drawing.fingerprint for drawing in train])
            nearest = (np.stack([drawing.fingerprint for drawing in test]) @ fingerprints.T).max(axis=1)
            kept = [one for one, similarity in zip(test, nearest, strict=True) if similarity < _NEARLY_SAME]
            report["test: nearly the same as a training image"] += len(test) - len(kept)
            test = kept
        if len(test) < 2:
            raise Unavailable(f"the icon themes under {root} share too few names to hold one out: {_INSTALL}")
        class_names = sorted(drawing.icon.text for drawing in test)
        for record in _records(train, {}):
            writer.write("train", record)
        for record in _records(test, {text: label for label, text in enumerate(class_names)}):
            writer.write("test", record)
        themes = Counter(drawing.icon.theme for drawing in (*train, *test))
        card = {
            "name": "icons",
            "description": "PNG icons of the freedesktop icon themes installed on one machine",
            "made_by": "python -m data make icons",
            "held_out": held_out,
            "themes": dict(sorted(themes.items())),
            "names": {"train": len(known), "test": len(test)},
            "tasks": ["zero-shot", "retrieval"],
            "left_out": dict(sorted(report.items())),
            "licenses": _licenses(root, sorted(themes)),
        }
        writer.finish(card, class_names=class_names, templates=_TEMPLATES)


def _choose_held_out(icons: Sequence[Icon], families: Mapping[str, str]) -> str:
    texts: dict[str, set[str]] = defaultdict(set)
    for icon in icons:
        for theme in icon.themes:
            texts[families[theme]].add(icon.text)
    if _HELD_OUT in texts:
        return _HELD_OUT

    def shared(family: str) -> int:
        return len(texts[family] & set().union(*(texts[other] for other in texts if other != family)))

    return min(texts, key=lambda family: (-shared(family), family))


def _two_sizes(icons: Sequence[Icon]) -> list[Icon]:
    """Choose two sizes of each icon in a theme: the smallest, and the one nearest to the stored side."""
    groups: dict[tuple[str, str, bool], list[Icon]] = defaultdict(list)
    for icon in icons:
        groups[icon.theme, icon.text, icon.symbolic].append(icon)
    chosen = []
    for group in groups.values():
        small = min(group, key=lambda icon: (icon.side, icon.path))
        large = min(group, key=_from_stored_side)
        chosen += [large] if large == small else [large, small]
    return chosen


def _from_stored_side(icon: Icon) -> tuple[bool, int, Path]:
    """Sort key: the smallest icon that need not be enlarged, else the largest."""
    return icon.side < _STORED_SIDE, abs(icon.side - _STORED_SIDE), icon.path


def _draw(icons: Sequence[Icon], report: Counter[str], what: str) -> list[_Drawing]:
    """Decode, blend onto a background, shrink, and encode; ``what`` labels the progress bar, "" disables it."""
    drawings = []
    for icon in track(icons, f"drawing {what} icons", console=Console(stderr=True), disable=not what):
        try:
            with Image.open(icon.path, formats=("PNG",)) as image:
                if not _SMALLEST <= max(image.size) <= _LARGEST or min(image.size) < _SMALLEST // 2:
                    report["of another size than the index says"] += 1
                    continue
                rgba = image.convert("RGBA")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # Pillow raises all four
            report["unreadable"] += 1
            continue
        inked = np.asarray(rgba.getchannel("A")) >= 32
        if not inked.any():
            report["blank"] += 1
            continue
        flat = _blend_onto("white", rgba)
        if np.percentile(255 - np.asarray(flat).min(axis=2)[inked], 95) < _FAINTEST:
            flat = _blend_onto("#404040", rgba)
        flat.thumbnail((_STORED_SIDE, _STORED_SIDE), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        flat.save(buffer, "PNG")
        drawings.append(
            _Drawing(icon=icon, png=buffer.getvalue(), side=max(flat.size), fingerprint=_fingerprint(flat))
        )
    return drawings


def _blend_onto(background: str, image: Image.Image) -> Image.Image:
    flat = Image.new("RGB", image.size, background)
    flat.paste(image, mask=image.getchannel("A"))
    return flat


def _fingerprint(image: Image.Image) -> NDArray[np.float32]:
    """Return a small copy of the part with ink, invariant to shifts, scaling and encoding, of unit norm.

    The dot product of two fingerprints is their correlation; it is 0 if one of the images is uniform.
    """
    ground = Image.new("RGB", image.size, image.getpixel((0, 0)))
    ink = ImageChops.difference(image, ground).convert("L").point(lambda value: 255 * (value > 16))
    small = image.crop(ink.getbbox()).resize((_FINGERPRINT_SIDE, _FINGERPRINT_SIDE), Image.Resampling.BOX)
    colors = np.asarray(small, np.float32).reshape(-1, 3)
    flat: NDArray[np.float32] = (colors - colors.mean(axis=0)).reshape(-1)
    return flat / max(float(np.linalg.norm(flat)), 1e-6)


def _distinct(drawings: Sequence[_Drawing], report: Counter[str], split: str) -> list[_Drawing]:
    """Drop duplicates: equal pixels under any name, and the same drawing under the same name."""
    digests: set[str] = set()
    kept: dict[str, list[_Drawing]] = defaultdict(list)
    for drawing in sorted(drawings, key=lambda drawing: (-drawing.side, drawing.icon.path)):
        digest = hashlib.sha256(drawing.png).hexdigest()
        same_name = kept[drawing.icon.text]
        if digest in digests:
            report[f"{split}: equal pixels"] += 1
        elif any(drawing.fingerprint @ other.fingerprint > _SAME_DRAWING for other in same_name):
            report[f"{split}: the same drawing again"] += 1
        else:
            digests.add(digest)
            same_name.append(drawing)
    return [drawing for group in kept.values() for drawing in group]


def _records(drawings: Sequence[_Drawing], labels: Mapping[str, int]) -> Iterator[Record]:
    """Yield the drawings as samples, ordered by a hash of their paths, which mixes themes."""
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
