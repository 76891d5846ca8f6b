"""Tests of the corpus `emoji`, made from small packages in the format of the npm registry."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clipkit.errors import DataError, Unavailable
from data.corpora import emoji
from data.corpora.builtin import BUILTIN
from eval.datasets.card import load_card
from eval.readers import open_dataset

ROOT = Path(__file__).parents[3]
COLORS = {"noto": "#f00", "noto-v1": "#e00", "twemoji": "#d00", "openmoji": "#c00", "emojione": "#b00"}
COLORS |= {"fluent-emoji-flat": "#00f"}
CODES = [f"{0x1F400 + number:X}" for number in range(40)]
COMPOSED = "1F469-200D-1F52C"
FLAG = "1F1EF-1F1F2"  # Jamaica


def archive(folder: Path, package: str, files: Mapping[str, object]) -> None:
    folder.mkdir(exist_ok=True)
    name, _, version = package.removeprefix("@").replace("/", "-").rpartition("@")
    with tarfile.open(folder / f"{name}-{version}.tgz", "w:gz") as tar:
        for path, content in files.items():
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            member = tarfile.TarInfo(f"package/{path}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def rows(language: str) -> list[dict[str, Any]]:
    animals = [
        {"hexcode": code, "label": f"{language} animal {code}", "tags": [f"{language} pet"], "group": 0}
        for code in CODES
    ]
    return [
        *animals,
        {"hexcode": COMPOSED, "label": f"{language} woman scientist", "group": 0},
        {"hexcode": FLAG, "label": "flag: Jamaica", "group": 0},
        {"hexcode": "1F3FB", "label": "light skin tone", "group": 1},
        {"hexcode": "1F1E6", "label": "regional indicator A"},
    ]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    files: dict[str, object] = {f"{one}/data.json": rows(one) for one in emoji.LANGUAGES if one != "bn"}
    files["bn/data.json"] = rows("bn")[:-6]  # some names are missing
    files["meta/groups.json"] = {"groups": {"0": "animals-nature", "1": "component"}}
    archive(folder, emoji.NAMES, files)
    for artist, color in COLORS.items():
        body = f'<rect x="4" y="4" width="8" height="24" fill="{color}"/>'
        icons = {f"animal-{code.lower()}": {"body": body} for code in CODES}
        icons["flag-for-flag-jamaica"] = icons["lady-with-tube"] = {"body": body}
        icons["animal-light-skin-tone"] = {"body": "not drawn"}
        content = {
            "icons": icons,
            "aliases": {"en-woman-scientist": {"parent": "lady-with-tube"}},
            "height": 32,
        }
        chars = {code.lower(): f"animal-{code.lower()}" for code in CODES}
        info = {"license": {"title": "CC BY 4.0"}, "author": {"name": f"artist of {artist}"}}
        archive(
            folder,
            emoji.PACKAGES[artist],
            {"icons.json": {**content, "width": 32}, "chars.json": chars, "info.json": info},
        )
    buffer = io.BytesIO()
    Image.new("RGBA", (200, 200), (0, 0, 0, 0)).save(buffer, "WEBP", lossless=True)
    webps = {
        f"assets/{code.lower()}.webp": buffer.getvalue()
        for code in (*CODES, FLAG, "1F3FB", f"{CODES[0]}-fe0f")
    }
    package = {"license": "MIT", "author": "someone"}
    archive(folder, emoji.PACKAGES["fluent-emoji-3d"], {"package.json": package, **webps})
    return folder


def run(*arguments: object, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "data", "make", "emoji", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **variables})


@pytest.fixture(scope="module")
def made(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "emoji"
    done = run(out, "--packages", packages)
    assert done.returncode == 0 and "unseen_concepts" in done.stdout, done.stderr
    return out


def samples(folder: Path, split: str) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    with tarfile.open(folder / split / "0.tar") as tar:
        for member in tar:
            key, _, kind = member.name.partition(".")
            content = tar.extractfile(member)
            assert content is not None
            found.setdefault(key, {})[kind] = content.read()
    return [{**sample, **json.loads(sample["json"])} for sample in found.values()]


def test_artists_and_concepts_are_held_out(made: Path) -> None:
    splits = {split: samples(made, split) for split in ("train", "test", "flat", "unseen_concepts")}
    artists = {split: {one["artist"] for one in found} for split, found in splits.items()}
    assert artists["test"] == {"fluent-emoji-3d"} and artists["flat"] == {"fluent-emoji-flat"}
    assert artists["train"] == artists["unseen_concepts"] == {*emoji.PACKAGES} - set(emoji.HELD_OUT)
    concepts = {split: {one["code"] for one in found} for split, found in splits.items()}
    assert not concepts["train"] & concepts["unseen_concepts"] and concepts["unseen_concepts"]
    assert concepts["train"] | concepts["unseen_concepts"] == {*CODES, COMPOSED, FLAG}
    assert FLAG not in concepts["test"]  # the package has this flag from another artist
    assert concepts["test"] <= concepts["train"] and concepts["flat"] <= concepts["train"]
    every = [one for found in splits.values() for one in found]
    drawn = Counter((one["artist"], one["code"]) for one in every)
    assert max(drawn.values()) == 1  # one file has a variation selector too


def test_names_labels_and_images(made: Path) -> None:
    classes = (made / "classnames.txt").read_text().splitlines()
    names = json.loads((made / "names.json").read_text())
    assert len(classes) == len(CODES) + 2 and names["en"] == classes and set(names) == set(emoji.LANGUAGES)
    assert all(len(of_language) == len(classes) for of_language in names.values())
    assert names["bn"][-2] == "en woman scientist" and names["de"][-2] == "de woman scientist"
    for sample in samples(made, "train"):
        label = int(sample["cls"])
        assert (
            classes[label] == sample["txt"].decode() == sample["names"]["en"]
            and names["de"][label] == sample["names"]["de"]
        )
        assert sample["code"] in (COMPOSED, FLAG) or sample["keywords"]["de"] == ["de pet"]
        image = Image.open(io.BytesIO(sample["png"]))
        assert image.size == (emoji.SIDE,) * 2 and image.mode == "RGB"
        corner, inside = image.getpixel((1, 1)), image.getpixel((24, 48))
        assert corner == (255, 255, 255) and inside == tuple(
            int(c * 2, 16) for c in COLORS[sample["artist"]][1:]
        )
    assert {Image.open(io.BytesIO(sample["png"])).getpixel((9, 9)) for sample in samples(made, "test")} == {
        (255,) * 3
    }


def test_card(made: Path) -> None:
    card = json.loads((made / "card.json").read_text())
    assert card["licenses"]["openmoji"] == "CC BY 4.0, artist of openmoji"
    assert card["licenses"]["fluent-emoji-3d"] == "MIT, someone" and card["packages"] == [
        *emoji.PACKAGES.values(),
        emoji.NAMES,
    ]
    assert sum(card["images"].values()) == sum(card["samples"].values())
    assert card["revision"] == BUILTIN["emoji"].revision
    assert load_card("emoji").classes == 1914
    for source, split in ((made, "test"), (made / "unseen_concepts", "test")):
        dataset = open_dataset(source, split=split)
        assert dataset.class_names[-2] == "en woman scientist" and dataset.labels is not None


def test_corpus_is_reproducible(made: Path, packages: Path, tmp_path: Path) -> None:
    emoji.make(tmp_path / "again", packages=packages, progress=False)
    for path in made.rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(made)).read_bytes()


NPM = """#!/bin/sh
for word in "$@"; do case "$word" in --pack-destination=*) to="${word#*=}";; esac; done
[ "$HOW" = offline ] && { echo half > "$to/emojibase-data-17.0.0.tgz"; echo 'npm error code ENOTFOUND' >&2
  echo 'npm error network request to https://registry failed' >&2; exit 1; }
[ "$HOW" = killed ] && { echo half > "$to/emojibase-data-17.0.0.tgz"; kill -9 $PPID; sleep 1; exit 1; }
cp "$PACKAGES"/*.tgz "$to"
"""


@pytest.mark.long
def test_packages_are_downloaded_once(packages: Path, tmp_path: Path) -> None:
    (tmp_path / "npm").write_text(NPM)
    (tmp_path / "npm").chmod(0o755)
    variables = {"CLIPKIT_CACHE": str(tmp_path / "cache"), "PACKAGES": str(packages)}
    no_npm = run(tmp_path / "out", **variables, PATH=str(tmp_path / "empty"))
    assert no_npm.returncode == 1 and no_npm.stderr.count("\n") == 1 and "install npm" in no_npm.stderr
    variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    offline = run(tmp_path / "out", **variables, HOW="offline")
    assert offline.returncode == 1 and "network request to https://registry failed" in offline.stderr
    assert run(tmp_path / "out", **variables, HOW="killed").returncode == -9
    done = run(tmp_path / "out", **variables)
    assert done.returncode == 0, done.stderr
    assert run(tmp_path / "again", **variables, HOW="offline").returncode == 0  # downloaded once


def test_missing_or_damaged_packages_raise_error(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"lacks 8 packages: run there: npm pack @iconify-json/noto@"):
        emoji.make(tmp_path / "out", packages=tmp_path / "nothing")
    copied = tmp_path / "copied"
    copied.mkdir()
    for path in packages.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    damaged = next(copied.glob("*noto-1*"))
    for content in (damaged.read_bytes()[:300], b"", b"no archive"):
        damaged.write_bytes(content)
        with pytest.raises(DataError, match=r"noto-1.*is not a readable package.*download it again"):
            emoji.make(tmp_path / "out", packages=copied, progress=False)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    done = run(tmp_path / "out", "--packages", packages, "--packages", tmp_path / "file.tgz")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    monkeypatch.setattr(emoji, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="requires resvg_py: pip install"):
        emoji.make(tmp_path / "out", packages=packages)
