"""Image files, and helpers for all readers: consistency checks, split names, small text files."""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.files import counted, redact_url
from clipkit.samples import Samples, join_place, read_file
from clipkit.samples.remote import ShardFile, is_remote
from data.captions import is_utf8
from eval.datasets.dataset import EvalDataset, SampleImages, list_some

if TYPE_CHECKING:
    from PIL import Image

_log = logging.getLogger("eval")


class FileSamples(Samples):
    """Image files, one per sample; a file may occur several times.

    Args:
        root: the folder that paths in messages and in ``content_id`` are relative to.
        paths: the file of each sample.

    Attributes:
        files: the state of each different file.
    """

    def __init__(self, root: Path, paths: Sequence[Path]) -> None:
        self.root = root
        self.paths = tuple(paths)
        states: dict[Path, ShardFile] = {}
        for path in dict.fromkeys(self.paths):
            try:
                states[path] = ShardFile.from_status(str(path), path.stat())
            except OSError as error:
                raise DataError(f"image {path}: {error.strerror}") from error
        self.files = tuple(states.values())
        self._sizes = {path: state.size for path, state in states.items()}

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, i: int) -> Path:
        return self.paths[i]

    def key(self, i: int) -> str:
        """Return the path of an image in the root."""
        path = self.paths[i]
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)

    def locate(self, i: int) -> tuple[str, str]:
        return str(self.root), self.key(i)

    def members(self, i: int) -> Sequence[str]:
        return [self.paths[i].suffix.lower().removeprefix(".")]

    def fields(self, i: int) -> dict[str, Any]:
        return {}

    def read(self, i: int, member: str) -> bytes:
        return read_file(self.paths[i])

    @property
    def content_id(self) -> str:
        """16 hexadecimal digits that depend on keys and sizes."""
        digest = hashlib.sha256()
        for i, path in enumerate(self.paths):
            digest.update(os.fsencode(f"{self.key(i)}\0{self._sizes[path]}\n"))
        return digest.hexdigest()[:16]


def make_multi_hot(labels: Sequence[Sequence[int]], classes: int) -> Tensor:
    """Return (N, C) bool from the labels of each of N images."""
    hot = torch.zeros(len(labels), classes, dtype=torch.bool)
    for i, image_labels in enumerate(labels):
        hot[i, image_labels] = True
    return hot


def file_images(root: Path, paths: Sequence[Path]) -> SampleImages:
    """Return image files as the images of a dataset; see ``FileSamples``."""
    samples = FileSamples(root, paths)
    return SampleImages(samples, samples.files)


def encode_png(image: "Image.Image") -> bytes:
    """Encode an image as lossless PNG, fast rather than small."""
    file = BytesIO()
    image.save(file, "png", compress_level=1)
    return file.getvalue()


# --------------------------------------------------------------------------------------------------------------
# Consistency checks on a reader's result.

_LONGEST = 60  # characters of a caption in a message


def check_dataset(dataset: EvalDataset) -> EvalDataset:
    """Add the revision to a dataset whose labels, names, templates and choices are consistent; log oddities."""
    if not dataset.revision:
        dataset = replace(dataset, revision=dataset.images.fingerprint())
    name = dataset.name
    names = dataset.class_names
    labels = dataset.labels
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
            raise DataError(f"{dataset.describe_image(first)} has label {label}{why}")
    if labels is not None and names:
        repeated = [repr(text) for text, count in Counter(names).items() if count > 1]
        if repeated:
            _log.warning("dataset %s: class names shared by several classes: %s", name, list_some(repeated))
        counts = labels.sum(dim=0) if labels.ndim == 2 else labels.bincount(minlength=len(names))  # (C,)
        empty = [repr(names[i]) for i in (counts == 0).nonzero().flatten().tolist()]
        if empty:
            _log.warning(
                "dataset %s: its images show %s of %s classes; the names of the others remain possible answers: %s",
                name,
                f"{len(names) - len(empty):,}",
                f"{len(names):,}",
                list_some(empty),
            )
    ambiguous: list[str] = []
    for i, (right, *others) in enumerate(dataset.choices or ()):
        if not others:
            raise DataError(f"{dataset.describe_image(i)} has 1 caption to choose from, expected at least 2")
        if right in others:
            ambiguous.append(repr(right[:_LONGEST]))
    if ambiguous:
        _log.warning(
            "dataset %s: %s whose right caption is also among the wrong ones, which counts as wrong: %s",
            name,
            counted(len(ambiguous), "image"),
            list_some(ambiguous),
        )
    return dataset


# --------------------------------------------------------------------------------------------------------------
# Small text files next to the images, local or in a store.

_MAX_TEXT_BYTES = 16 << 20
_MAX_JSON_BYTES = 1 << 30
Content = TypeVar("Content")


def read_lines(place: str | Path) -> list[str]:
    """Return a file's stripped lines, including blank ones; [] if there is no file."""
    text = (read_text_file(place) or "").removesuffix("\n").removesuffix("\r")
    if not text:
        return []
    return [line.strip() for line in text.split("\n")]


def read_templates(root: str | Path) -> tuple[str, ...]:
    """Return the prompt templates next to a dataset's images."""
    return tuple(filter(None, read_lines(join_place(root, "zeroshot_classification_templates.txt"))))


def read_text_file(place: str | Path, *, limit: int = _MAX_TEXT_BYTES) -> str | None:
    """Return a file's text, or None if there is no file."""
    if isinstance(place, str) and is_remote(place):
        from clipkit.samples import remote

        text = remote.read_text(place, limit=limit)
        if text is None:
            return None
        if "\ufffd" in text:  # replaces bytes that are not UTF-8
            raise DataError(f"{redact_url(place)} is not UTF-8 text")
        return text.removeprefix("\ufeff")
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
    """Return the content of a JSON file, or None if there is no file."""
    text = read_text_file(place, limit=_MAX_JSON_BYTES)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataError(f"{redact_url(str(place))} is not as published: {error}") from error
