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

from clipkit.errors import DataError
from data.shards.writer import DatasetWriter, Record

__all__ = [
    "CONTEXTS",
    "LARGEST",
    "SMALLEST",
    "TEMPLATES",
    "Icon",
    "caption",
    "families_of",
    "is_symbolic",
    "licenses",
    "make",
    "pick",
    "scan",
    "settle_names",
    "words",
]


# --------------------------------------------------------------------------------------------------------------
# Turns the names of icons ("network-wireless-signal-excellent") into words and captions.
#
# Icon themes share the names of the freedesktop icon naming specification, with habits of their own on top:
# prefixes of old toolkits ("gtk-", "stock_", "gnome-mime-"), MIME types ("application-x-tar"), abbreviations
# ("-rtl"), sizes, and the mark "-symbolic" for one-coloured drawings.

TEMPLATES = (
    "{c}",
    "{c} icon",
    "an icon of {c}",
    "a symbol for {c}",
    "a picture of {c}",
    "a small drawing of {c}",
)

# what index.theme calls a folder of icons -> the word for one of them
CONTEXTS = {
    "actions": "action",
    "animations": "animation",
    "applications": "application",
    "apps": "application",
    "categories": "category",
    "devices": "device",
    "emblems": "emblem",
    "emotes": "face",
    "filesystems": "place",
    "international": "flag",
    "mimetypes": "file type",
    "places": "place",
    "status": "status",
    "stock": "action",
}

_PLAIN = (
    *TEMPLATES,
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
_MIME = re.compile(
    r"^(application|audio|font|image|inode|message|model|multipart|package|text|video)(?:[-_/.](.*))?$"
)
_KINDS = {
    "application": "file",
    "audio": "audio file",
    "font": "font file",
    "image": "image file",
    "inode": "",
    "message": "message",
    "model": "model file",
    "multipart": "message",
    "package": "package",
    "text": "text file",
    "video": "video file",
}
_SPLIT = re.compile(r"[-_.,:;@()\s]+|(?<!\+)\+(?=\w)|(?<=\+\+)(?=\w)")  # "svg+xml", "c++src"
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_SPOKEN = {"rtl": "right to left", "ltr": "left to right", "symbolic": ""}
_NOT_SPOKEN_IN_MIME = {"x", "vnd"}
_LONGEST_WORD = 19  # longer ones are identifiers of web applications, not words
_MOST_WORDS = 8


def is_symbolic(name: str) -> bool:
    """Whether a name is that of a one-coloured drawing."""
    return "symbolic" in re.split(r"[-.]", name)


def words(name: str, context: str) -> str | None:
    """The readable form of an icon's name, in lower case; None for a name that says nothing.

    Args:
        name: the file's name without its suffix, as in "folder-open" or "application-x-tar".
        context: the word for the icon's context, one of the values of ``CONTEXTS`` or "".
    """
    mime = context == "file type" or name.startswith("gnome-mime-")
    name = _PREFIXES.sub("", name)
    kind = ""
    if mime and (match := _MIME.match(name.lower())):
        kind, name = _KINDS[match[1]], match[2] or ""
    tokens: list[str] = []
    for token in _CAMEL.sub(" ", " ".join(_SPLIT.split(name))).lower().split():
        if re.fullmatch(r"\d+x\d+", token) or (mime and token in _NOT_SPOKEN_IN_MIME):
            continue
        if len(token) > _LONGEST_WORD:
            return None
        tokens += _spoken(token).split()
    tokens += kind.split()
    if not 0 < len(tokens) <= _MOST_WORDS or not any(re.search(r"[a-z]", token) for token in tokens):
        return None
    return " ".join(tokens)


def _spoken(token: str) -> str:
    if token.isdecimal():
        return str(int(token))  # "040" and "40" are one word
    return _SPOKEN.get(token, token)


def pick(key: str, count: int) -> int:
    """A number in [0, count) that follows from ``key`` alone, on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % count


def caption(text: str, *, context: str, symbolic: bool, key: str) -> str:
    """A caption for a picture of ``text``, in one of several phrasings, chosen by ``key``."""
    phrasings = [*_PLAIN]
    if context and not {context, "file"} & set(text.split()):  # no "emblem new, emblem"
        phrasings += _WITH_CONTEXT
    head, _, rest = text.partition(" ")
    if rest and context in ("place", "device", "status"):
        phrasings += _WITH_COMMA
    if symbolic:
        phrasings += _SYMBOLIC * 2  # twice: it is what one sees first
    return phrasings[pick(key, len(phrasings))].format(c=text, context=context, head=head, rest=rest)


# --------------------------------------------------------------------------------------------------------------
# Reads freedesktop icon themes: which picture files they hold, under which names, and whose they are.

SMALLEST, LARGEST = 48, 512  # pixels a side
LARGEST_FILE = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Icon:
    """One picture file, under all the names that lead to it."""

    path: Path
    theme: str  # where the file lies
    themes: frozenset[str]  # that show it, by a link or a copy
    name: str
    names: tuple[str, ...]  # all of them
    context: str  # a value of CONTEXTS, or ""
    side: int  # pixels, as the index says
    text: str  # the name in words
    symbolic: bool  # one-coloured


def scan(root: Path) -> list[Icon]:
    """Every picture file of 48 to 512 pixels that a theme's index names, once, with all its names."""
    names: dict[Path, set[str]] = defaultdict(set)
    themes: dict[Path, set[str]] = defaultdict(set)
    places: dict[Path, tuple[str, str, int]] = {}  # file -> theme, context, side
    for theme in sorted(root.iterdir()) if root.is_dir() else []:
        if theme.name == "hicolor" or not (theme / "index.theme").is_file():
            continue  # hicolor is where applications leave icons of their own: no artist's set
        for folder, context, side in _folders(theme):
            home = folder.resolve()
            for link in sorted(folder.glob("*.png")):
                path = link.resolve()
                if not path.is_file() or path.stat().st_size > LARGEST_FILE:
                    continue
                names[path] |= {link.stem, path.stem}
                themes[path].add(theme.name)
                if path == home / link.name or path not in places:  # the file's own place wins
                    places[path] = (theme.name, context, side)
    copies: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(places):
        copies[hashlib.sha256(path.read_bytes()).hexdigest()].append(path)
    icons = []
    for paths in copies.values():
        path = min(paths, key=lambda copy: (len(places[copy][0]), copy))  # a theme before its variants
        name, (own_theme, context, side) = path.stem, places[path]
        icons.append(
            Icon(
                path=path,
                theme=own_theme,
                themes=frozenset().union(*(themes[copy] for copy in paths)),
                name=name,
                names=tuple(sorted(set().union(*(names[copy] for copy in paths)))),
                context=context,
                side=side,
                text=words(name, context) or "",
                symbolic=is_symbolic(name),
            )
        )
    return icons


def _folders(theme: Path) -> Iterator[tuple[Path, str, int]]:
    """The folders of a theme that hold icons of a fitting size, each with its context and nominal side."""
    index = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        index.read(theme / "index.theme", encoding="utf-8")
        main = index["Icon Theme"]
    except (configparser.Error, KeyError, UnicodeDecodeError):
        return  # not an icon theme: cursors alone, or a broken index
    listed = f"{main.get('Directories', '')},{main.get('ScaledDirectories', '')}".split(",")
    for name in dict.fromkeys(part.strip() for part in listed):
        if not index.has_section(name) or not (theme / name).is_dir():
            continue
        section = index[name]
        try:
            side = int(section.get("Size", "0")) * int(section.get("Scale", "1"))
        except ValueError:
            continue
        if SMALLEST <= side <= LARGEST:
            yield theme / name, CONTEXTS.get(section.get("Context", "").strip().lower(), ""), side


def families_of(themes: set[str]) -> dict[str, str]:
    """The family of each theme: a theme's variants are named after it, as Faenza-Dark is after Faenza."""
    return {
        theme: min((base for base in themes if theme == base or theme.startswith(base + "-")), key=len)
        for theme in themes
    }


def settle_names(icons: Sequence[Icon], families: Mapping[str, str]) -> list[Icon]:
    """Settle each icon's name and its words; icons whose names say nothing are left out.

    The name is the file's own, unless another of its names is a file's own in more than twice as many
    families: an artist may have filed a plain folder as "inode-directory".
    """
    known: dict[str, set[str]] = defaultdict(set)
    for icon in icons:
        known[icon.name].add(families[icon.theme])  # not the names of links: many are of old applications
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


def licenses(root: Path, themes: Sequence[str]) -> dict[str, str]:
    """What each theme's Debian package says about its license, as far as dpkg's own files tell."""
    found = dict.fromkeys(themes, "unknown: see where the theme came from")
    for listing in sorted(Path("/var/lib/dpkg/info").glob("*icon-theme*.list")):
        package = listing.stem.partition(":")[0]
        copyright_file = Path("/usr/share/doc", package, "copyright")
        holds = set(listing.read_text(errors="replace").splitlines())
        if not copyright_file.is_file():
            continue
        text = copyright_file.read_text(errors="replace")
        named = sorted(set(re.findall(r"^License: *(.+?) *$", text, re.MULTILINE)))
        for theme in themes:
            if str(root / theme) in holds:
                found[theme] = f"{package}: {', '.join(named) or 'see ' + str(copyright_file)}"
    return found


# --------------------------------------------------------------------------------------------------------------

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
