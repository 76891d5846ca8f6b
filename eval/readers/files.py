"""Image files, and helpers for all readers: consistency checks, split names, small text files."""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch

from clipkit.errors import DataError
from clipkit.files import counted, shown
from clipkit.samples import (
    Samples,
    is_deep,
    join_place,
    pillow_errors,
    read_file,
    refuse_deep_alpha,
    to_16_bit,
)
from clipkit.samples.remote import ShardFile, is_remote
from data.captions import is_utf8
from eval.datasets.dataset import EvalDataset, some

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "Box",
    "FileImages",
    "SampleImages",
    "checked_set",
    "lines_of",
    "png_of",
    "read_json_file",
    "read_text_file",
    "short_hash",
    "templates_in",
]

Box = tuple[int, int, int, int]  # left, top, width, height in pixels
_log = logging.getLogger("eval")


def short_hash(*values: object) -> str:
    """Return 16 hexadecimal digits for values with a unique ``repr``."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


class SampleImages:
    """Random access to images among samples.

    Args:
        samples: the samples.
        files: the files that contain them.
        member: the member with the image; "" for the first one that is an image.
        cells: by image, the index of its sample, and its member; by default ``member`` of every sample.
    """

    def __init__(
        self,
        samples: Samples,
        files: Sequence[ShardFile],
        *,
        member: str = "",
        cells: Sequence[tuple[int, str]] | None = None,
    ) -> None:
        self.samples, self.files, self.member, self.cells = samples, files, member, cells

    def __len__(self) -> int:
        return len(self.samples if self.cells is None else self.cells)

    def _cell(self, number: int) -> tuple[int, str]:
        return (number, self.member) if self.cells is None else self.cells[number]

    def locate(self, number: int) -> tuple[str, str]:
        """Return the file, and the key and the member of an image."""
        i, member = self._cell(number)
        file, key = self.samples.locate(i)
        return file, f"{key}, {member}" if member else key

    def read(self, number: int) -> bytes:
        """Return an encoded image; raise DataError if it cannot be read."""
        return self.samples.read(*self._cell(number))

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that depend on the samples and the members."""
        if self.cells is None and not self.member:
            return self.samples.content_id
        return short_hash(self.samples.content_id, self.member, self.cells)

    def stamp(self) -> str:
        """Return a fingerprint that also depends on the versions of the files."""
        return short_hash(self.fingerprint(), [(file.size, file.version) for file in self.files])


class FileImages:
    """Random access to image files; a file may occur several times.

    Args:
        root: the folder that paths in messages and in the fingerprint are relative to.
        files: the file of each image.
        boxes: the box to crop from each file, as lossless PNG; None for the unchanged file.

    Raises:
        DataError: a file is missing.
    """

    def __init__(self, root: Path, files: Sequence[Path], boxes: Sequence[Box | None] | None = None) -> None:
        self.root, self.files = root, tuple(files)
        self._boxes = tuple(boxes) if boxes is not None else (None,) * len(self.files)
        self._states: dict[Path, ShardFile] = {}
        for file in dict.fromkeys(self.files):
            try:
                self._states[file] = ShardFile.of_status(str(file), file.stat())
            except OSError as error:
                raise DataError(f"image {file}: {error.strerror}") from error

    def __len__(self) -> int:
        return len(self.files)

    def locate(self, number: int) -> tuple[str, str]:
        """Return the folder, and the file's path in it."""
        file, box = self.files[number], self._boxes[number]
        key = file.relative_to(self.root).as_posix() if file.is_relative_to(self.root) else str(file)
        return str(self.root), key if box is None else f"{key} {list(box)}"

    def read(self, number: int) -> bytes:
        """Return an encoded image.

        Raises:
            DataError: the file cannot be read; or it is to be cropped, and does not decode or lacks the box.
        """
        from PIL import Image

        file, box = self.files[number], self._boxes[number]
        content = read_file(file)
        if box is None:
            return content
        left, top, width, height = box
        with pillow_errors(), Image.open(BytesIO(content)) as image:
            if width < 1 or height < 1 or left >= image.width or top >= image.height:
                raise DataError(f"its box {list(box)} is outside its {image.width} x {image.height} pixels")
            refuse_deep_alpha(image)
            image.load()
            source = to_16_bit(image) if is_deep(image) else image.convert("RGB")
            if source is None:
                raise DataError("a box cannot be cropped from 32-bit, signed or float grayscale")
            return png_of(source.crop((left, top, left + width, top + height)))

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that depend on relative paths, sizes and boxes."""
        digest = hashlib.sha256()
        for number, file in enumerate(self.files):
            digest.update(os.fsencode(f"{self.locate(number)[1]}\0{self._states[file].size}\n"))
        return digest.hexdigest()[:16]

    def stamp(self) -> str:
        """Return a fingerprint that also depends on inodes and modification times."""
        return short_hash(self.fingerprint(), [file.version for file in self._states.values()])


def png_of(image: "Image.Image") -> bytes:
    """Encode an image as lossless PNG, fast rather than small."""
    file = BytesIO()
    image.save(file, "png", compress_level=1)
    return file.getvalue()


# --------------------------------------------------------------------------------------------------------------
# Consistency checks on a reader's result.

_LONGEST = 60  # characters of a caption in a message


def checked_set(dataset: EvalDataset) -> EvalDataset:
    """Add the revision to a dataset whose labels, names, templates and choices are consistent; log oddities.

    Raises:
        DataError: a label without a class name, a template without ``{c}``, an image without choices, or a single
            class.
    """
    if not dataset.revision:
        dataset = replace(dataset, revision=dataset.images.fingerprint())
    name, names, labels = dataset.name, dataset.class_names, dataset.labels
    for text in (name, *names):
        if not is_utf8(text):
            raise DataError(f"the name {text!r} of a dataset or class is not UTF-8: rename the folder")
    for template in dataset.templates:
        if "{c}" not in template:
            raise DataError(f"dataset {name}: the template {template!r} has no {{c}} for the class name")
    if labels is not None and len(names) == 1:
        if dataset.captions is None and dataset.choices is None:
            raise DataError(
                f"dataset {name} has only one class, {names[0]!r}: classification needs at least two"
            )
        if dataset.tasks == ("zero-shot",):
            dataset = replace(dataset, tasks=("retrieval",))
    if labels is not None and labels.ndim == 1:
        wrong = ((labels < 0) | ((labels >= len(names)) & (len(names) > 0))).nonzero()
        if len(wrong):
            first = int(wrong[0])
            label = int(labels[first])
            why = ": labels begin at 0, and datasets with secret labels cannot be scored"
            if label >= 0:
                why = (
                    f", but there are {len(names)} class names, for labels 0 to {len(names) - 1}; blank lines in "
                    "classnames.txt count"
                )
            raise DataError(f"{dataset.where(first)} has label {label}{why}")
    if labels is not None and names:
        if repeated := [repr(one) for one, count in Counter(names).items() if count > 1]:
            _log.warning("dataset %s: class names shared by several classes: %s", name, some(repeated))
        counts = (
            labels.sum(dim=0) if labels.ndim == 2 else torch.bincount(labels, minlength=len(names))
        )  # (C,)
        if empty := [repr(names[i]) for i in (counts == 0).nonzero().flatten().tolist()]:
            count = f"{len(names) - len(empty):,} of {len(names):,} classes"
            _log.warning(
                "dataset %s: its images show %s; the names of the others remain possible answers: %s",
                name,
                count,
                some(empty),
            )
    choices = dataset.choices or ()
    for number, own in enumerate(choices):
        if len(own) < 2:
            raise DataError(
                f"{dataset.where(number)} has {counted(len(own), 'caption')} to choose from, expected at least 2"
            )
    if equal := [own[0] for own in choices if own[0] in own[1:]]:
        _log.warning(
            "dataset %s: %s whose right caption is also among the wrong ones, which counts as wrong: %s",
            name,
            counted(len(equal), "image"),
            some([repr(one[:_LONGEST]) for one in equal]),
        )
    return dataset


# --------------------------------------------------------------------------------------------------------------
# Small text files next to the images, local or in a store.

_MAX_TEXT_BYTES, _MAX_JSON_BYTES = 16 << 20, 1 << 30
Content = TypeVar("Content")


def lines_of(place: str | Path) -> list[str]:
    """Return a file's stripped lines, including blank ones; [] if there is no file."""
    text = (read_text_file(place) or "").removesuffix("\n").removesuffix("\r")
    return [line.strip() for line in text.split("\n")] if text else []


def templates_in(root: str | Path) -> tuple[str, ...]:
    """Return the prompt templates next to a dataset's images."""
    return tuple(filter(None, lines_of(join_place(root, "zeroshot_classification_templates.txt"))))


def read_text_file(place: str | Path, *, limit: int = _MAX_TEXT_BYTES) -> str | None:
    """Return a file's text, or None if there is no file.

    Raises:
        DataError: the file is larger than ``limit`` bytes or not UTF-8, or its store does not respond.
    """
    if isinstance(place, str) and is_remote(place):
        from clipkit.samples import remote

        text = remote.read_text(place, limit=limit)
        if text is not None and "\ufffd" in text:  # replaces bytes that are not UTF-8
            raise DataError(f"{shown(place)} is not UTF-8 text")
        return None if text is None else text.removeprefix("\ufeff")
    path = Path(place)
    if not path.is_file():
        return None
    if path.stat().st_size > limit:
        raise DataError(f"{path} is larger than {limit} bytes")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error


def read_json_file(place: str | Path, kind: type[Content]) -> Content | None:
    """Return the content of a JSON file, or None if there is no file.

    Raises:
        DataError: the file is not JSON with values of these types, or as for ``read_text_file``.
    """
    text = read_text_file(place, limit=_MAX_JSON_BYTES)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataError(f"{shown(str(place))} is not as published: {error}") from error
