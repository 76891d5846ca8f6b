"""Reads freedesktop icon themes: which picture files they hold, under which names, and whose they are."""

import configparser
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data.corpora.icon_names import CONTEXTS, is_symbolic, words

__all__ = ["LARGEST", "SMALLEST", "Icon", "families_of", "licenses", "scan", "settle_names"]

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
