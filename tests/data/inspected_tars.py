"""Small tars for tests of ``inspect``, and access to its report."""

import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data.inspect import Findings, inspect
from data.inspect.report import notes, parts
from data.options import InspectOptions

Members = Sequence[tuple[str, bytes]]


def image_file(seed: int, size: tuple[int, int] = (40, 36), form: str = "jpeg", **options: Any) -> bytes:
    """Return an image of soft spots that depends on the seed."""
    spots = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(spots).resize(size, Image.Resampling.BICUBIC).save(file, form, **options)
    return file.getvalue()


def write_tar(path: Path, members: Members) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))


def pairs(first: int, count: int, **more: Mapping[int, bytes]) -> list[tuple[str, bytes]]:
    """Return good samples with keys of six digits; ``images`` and ``captions`` replace some contents."""
    members = []
    for number in range(first, first + count):
        key = f"{number:06d}"
        caption = f"an image of thing {number}".encode()
        members += [
            (f"{key}.jpg", more.get("images", {}).get(number, image_file(number))),
            (f"{key}.txt", more.get("captions", {}).get(number, caption)),
        ]
    return members


def look(sources: Sequence[str], **options: Any) -> Findings:
    """Inspect for a small model."""
    given = {field.name for field in fields(InspectOptions)} & options.keys()
    wanted = {"image_size": 32, "batch_size": 4, "quiet": True} | {name: options.pop(name) for name in given}
    return inspect(InspectOptions(sources=tuple(sources), **wanted), **options)


def row(found: Findings, part: str, label: str) -> str:
    """Return the lines of a row of the report."""
    return " | ".join(
        line
        for one in parts(found)
        if one.name == part
        for row in one.rows
        if row.label == label
        for line in row.lines
    )


def told(found: Findings) -> str:
    return "\n".join(note.text for note in notes(found))
