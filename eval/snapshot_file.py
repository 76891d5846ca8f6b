"""The snapshots of a run folder: what one is, and how it is written and read.

A snapshot is one JSON file, ``snapshots/step_<8 digits>.<dataset>.json``. It holds three things: example
predictions, the similarity matrix of a held-out batch, and the pictures nearest to fixed text queries; and small
copies of every picture they refer to.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clipkit.errors import DataError
from eval.json_text import parse_json

__all__ = [
    "Example",
    "Guess",
    "Hit",
    "Matrix",
    "Picture",
    "Query",
    "Snapshot",
    "find_snapshots",
    "read_snapshot",
    "read_snapshots",
    "write_snapshot",
]

_MAX_FILE_BYTES = 16 << 20
_FILE = re.compile(r"step_(\d{8,})\.(.+)\.json")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A small copy of a picture: a base64 PNG ("" if it does not decode), and words for those who cannot see it."""

    png: str
    alt: str


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A label that the model considers, with its probability in [0, 1], and whether it is the true one.

    In details of retrieval it is a caption, and the number its cosine similarity.
    """

    label: str
    probability: float
    right: bool


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prediction: the likeliest labels, likeliest first, and where the true one stands (rank 1 is best)."""

    picture: str
    guesses: tuple[Guess, ...]
    truth: str | None
    rank: int | None
    probability: float | None


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Cosines of M pictures (rows) and their M captions (columns); the pairs are on the diagonal."""

    pictures: tuple[str, ...]
    captions: tuple[str, ...]
    cosines: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A picture near a query; ``right`` is None where nobody knows."""

    picture: str
    cosine: float
    right: bool | None


@dataclass(frozen=True, kw_only=True)
class Query:
    """A text and the pictures nearest to it, nearest first."""

    text: str
    hits: tuple[Hit, ...]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One moment in training on one dataset. Pictures are named by their number in the dataset."""

    step: int
    dataset: str
    samples: int
    classes: int
    examples: tuple[Example, ...]
    matrix: Matrix | None
    queries: tuple[Query, ...]
    pictures: Mapping[str, Picture]


def write_snapshot(run: Path, snapshot: Snapshot) -> Path:
    """Write a snapshot into a run folder, aside and renamed, and give its path."""
    folder = run / "snapshots"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{snapshot.step:08d}.{_file_name(snapshot.dataset)}.json"
    aside = folder / f".{path.name}.partial-{os.getpid()}"
    text = json.dumps(asdict(snapshot), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    aside.write_bytes((text + "\n").encode("utf-8", "replace"))  # captions may hold halves of characters
    aside.replace(path)
    return path


def _file_name(dataset: str) -> str:
    """The dataset's name where it may stand in a file name; else what may, and a hash that tells it from others."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", dataset).strip("-")[-80:]
    if plain == dataset:
        return plain
    return f"{plain or 'data'}-{hashlib.sha256(dataset.encode('utf-8', 'replace')).hexdigest()[:8]}"


def find_snapshots(run: Path) -> dict[str, dict[int, Path]]:
    """The snapshot files of a run folder by dataset (as its file name spells it) and step, both in order."""
    found: dict[str, dict[int, Path]] = {}
    for path in sorted((run / "snapshots").glob("step_*.json")):
        match = _FILE.fullmatch(path.name)
        if match:
            found.setdefault(match[2], {})[int(match[1])] = path
    return {name: dict(sorted(steps.items())) for name, steps in sorted(found.items())}


def read_snapshots(run: Path) -> list[Snapshot]:
    """Every snapshot of a run folder, by dataset and step.

    Raises:
        DataError: one of them is not a snapshot.
    """
    return [read_snapshot(path) for steps in find_snapshots(run).values() for path in steps.values()]


def read_snapshot(path: Path) -> Snapshot:
    """Read one snapshot.

    Raises:
        DataError: the file cannot be read, is too large, cut short, or not a snapshot.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{path} is not a regular file")
        if found.st_size > _MAX_FILE_BYTES:
            raise DataError(f"{path} is larger than a snapshot may be")
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    try:
        return _snapshot(parse_json(text))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise DataError(f"{path} is not a snapshot ({type(error).__name__}: {error})") from error


def _snapshot(value: dict[str, Any]) -> Snapshot:
    matrix = value["matrix"]
    if matrix is not None:
        matrix = Matrix(
            pictures=tuple(str(name) for name in matrix["pictures"]),
            captions=tuple(str(caption) for caption in matrix["captions"]),
            cosines=tuple(tuple(float(cosine) for cosine in row) for row in matrix["cosines"]),
        )
        size = len(matrix.pictures)
        if len(matrix.captions) != size or [len(row) for row in matrix.cosines] != [size] * size:
            raise ValueError("the similarity matrix is not square")
    queries = [
        Query(text=str(one["text"]), hits=tuple(_hit(hit) for hit in one["hits"])) for one in value["queries"]
    ]
    return Snapshot(
        step=int(value["step"]),
        dataset=str(value["dataset"]),
        samples=int(value["samples"]),
        classes=int(value["classes"]),
        examples=tuple(_example(one) for one in value["examples"]),
        matrix=matrix,
        queries=tuple(queries),
        pictures={
            str(name): Picture(png=str(picture["png"]), alt=str(picture["alt"]))
            for name, picture in value["pictures"].items()
        },
    )


def _example(value: dict[str, Any]) -> Example:
    return Example(
        picture=str(value["picture"]),
        guesses=tuple(
            Guess(label=str(one["label"]), probability=float(one["probability"]), right=bool(one["right"]))
            for one in value["guesses"]
        ),
        truth=None if value["truth"] is None else str(value["truth"]),
        rank=None if value["rank"] is None else int(value["rank"]),
        probability=None if value["probability"] is None else float(value["probability"]),
    )


def _hit(value: dict[str, Any]) -> Hit:
    right = value["right"]
    return Hit(
        picture=str(value["picture"]),
        cosine=float(value["cosine"]),
        right=None if right is None else bool(right),
    )
