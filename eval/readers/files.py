"""Images that are files, wherever they lie; some are parts of them, which a box cuts out."""

import hashlib
import logging
import os
import shlex
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.files.terminal import counted
from data.remote.store import is_remote
from data.shards.samples import Sample
from eval.datasets.dataset import TEST, EvalDataset, some

__all__ = [
    "ACCEPTED",
    "SPLIT_NAMES",
    "Box",
    "FileImages",
    "beside",
    "checked_set",
    "folder_of_split",
    "how_to_pack",
    "is_table",
    "lines_of",
    "names_of_split",
    "png_of",
    "read_text_file",
    "shown_name",
    "state_of",
    "tables_in",
    "written",
]

Box = tuple[int, int, int, int]  # left, top, width, height in pixels
_MAX_BYTES = 256 << 20  # of one file, as of a member of a shard


class FileImages:
    """Random access to a list of files, in which one may stand several times.

    Args:
        root: the folder that they are named from.
        files: of each image.
        boxes: of each image, which part of the file it is, as lossless PNG; None for all of it, as it is.

    Raises:
        DataError: one is missing or no file: a score is never of fewer images.
    """

    def __init__(self, root: Path, files: Sequence[Path], boxes: Sequence[Box | None] | None = None) -> None:
        self.root, self.files = root, tuple(files)
        self._boxes = tuple(boxes) if boxes is not None else (None,) * len(self.files)
        self._states = {file: state_of(file) for file in dict.fromkeys(self.files)}

    def __len__(self) -> int:
        return len(self.files)

    def locate(self, number: int) -> tuple[str, str]:
        """The folder, and the file's path in it."""
        file, box = self.files[number], self._boxes[number]
        key = file.relative_to(self.root).as_posix() if file.is_relative_to(self.root) else str(file)
        return str(self.root), key if box is None else f"{key} {list(box)}"

    def read(self, number: int) -> Sample:
        """One image.

        Raises:
            DataError: the file cannot be read; or it must be cut, and does not decode or lacks that part.
        """
        file, box = self.files[number], self._boxes[number]
        folder, key = self.locate(number)
        try:
            image = file.read_bytes()
        except OSError as error:
            raise DataError(str(error.strerror)) from error
        return Sample(
            id=number,
            shard=folder,
            key=key,
            image=image if box is None else _part(image, box),
            caption=None,
            label=None,
            meta={},
            caption_number=0,
        )

    def fingerprint(self) -> str:
        """16 hexadecimal digits of paths, sizes and boxes; the folder may be moved."""
        digest = hashlib.sha256()
        for number, file in enumerate(self.files):
            digest.update(os.fsencode(f"{self.locate(number)[1]}\0{self._states[file][0]}\n"))
        return digest.hexdigest()[:16]

    def stamp(self) -> str:
        """Of the same and of each file's inode and times of change."""
        states = list(self._states.values())
        return hashlib.sha256(repr((self.fingerprint(), states)).encode()).hexdigest()[:16]


def state_of(file: Path) -> tuple[int, int, int, int]:
    """Bytes of an image, and what tells that it was written anew: see ``written``.

    Raises:
        DataError: there is none, it is too large, or no file: reading a pipe, say, might wait for ever.
        OSError: its folder cannot be read.
    """
    try:
        found = file.stat()
    except FileNotFoundError as error:
        what = "a link to nothing: mend or remove it" if file.is_symlink() else "missing"
        raise DataError(f"image {file} is {what}") from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"image {file} is not a regular file: remove it")
    if found.st_size > _MAX_BYTES:
        raise DataError(f"image {file} has {found.st_size} bytes, the limit is {_MAX_BYTES}")
    return found.st_size, *written(found)


def written(found: os.stat_result) -> tuple[int, int, int]:
    """When a file's content and its entry were last changed, in nanoseconds, and its inode.

    The first alone is not enough: copying and unpacking set it to what they like.
    """
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _part(image: bytes, box: Box) -> bytes:
    from PIL import Image, UnidentifiedImageError

    left, top, width, height = box
    try:
        with Image.open(BytesIO(image)) as opened:
            if width < 1 or height < 1 or left >= opened.width or top >= opened.height:
                raise DataError(
                    f"its box {list(box)} has no part of its {opened.width} x {opened.height} pixels"
                )
            return png_of(opened.convert("RGB").crop((left, top, left + width, top + height)))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, UnidentifiedImageError) as error:
        raise DataError(f"it does not decode: {' '.join(str(error).split())[:200]}") from error


def png_of(image: object) -> bytes:
    """An image of Pillow as lossless PNG, as fast as may be."""
    from PIL import Image

    assert isinstance(image, Image.Image)
    file = BytesIO()
    image.save(file, "png", compress_level=1)
    return file.getvalue()


# --------------------------------------------------------------------------------------------------------------
# Tables of images and captions: what they are called, and how a dataset is made of one.

_TABLES = (
    ".csv",
    ".tsv",
    ".tab",
    ".jsonl",
    ".ndjson",
    ".parquet",
    ".pq",
)  # what ``python -m data pack`` reads


def is_table(path: Path) -> bool:
    """Whether a file is called like a table; its content is not looked at."""
    return path.suffix.lower() in _TABLES and path.is_file()


def tables_in(folder: Path) -> list[Path]:
    """The tables directly in a folder, in the order of their names."""
    return sorted(filter(is_table, folder.iterdir())) if folder.is_dir() else []


def how_to_pack(table: Path | None) -> str:
    """What makes a dataset of a table; of the user's, where it is not known which."""
    named = "TABLE" if table is None else shlex.quote(str(table))
    return f"python -m data pack {named} OUT --test 1.0, then --data OUT"


# --------------------------------------------------------------------------------------------------------------
# Whether what a reader has found goes together.

_log = logging.getLogger("eval")
_LONGEST = 60  # characters of a caption in a message


def checked_set(dataset: EvalDataset) -> EvalDataset:
    """The dataset, if its labels, names, templates and choices go together; what is merely odd is logged.

    Raises:
        DataError: labels without a name, templates without a place for it, or an image without a choice.
    """
    for template in dataset.templates:
        if "{c}" not in template:
            raise DataError(
                f"dataset {dataset.name}: the template {template!r} has no {{c}} for the class name"
            )
    if dataset.labels is not None and len(dataset.class_names) == 1:
        dataset = _of_one_class(dataset)
    if dataset.labels is not None:
        if dataset.labels.ndim == 1:
            _check_labels(dataset, dataset.labels)
        if dataset.class_names:
            _tell_odd_classes(dataset, dataset.labels)
    if dataset.choices is not None:
        _check_choices(dataset, dataset.choices)
    return dataset


def _of_one_class(dataset: EvalDataset) -> EvalDataset:
    """Whoever classifies is always right; so it is captions that such images are scored on."""
    if dataset.captions is None and dataset.choices is None:
        raise DataError(
            f"dataset {dataset.name} has one class only, {dataset.class_names[0]!r}: classification takes two "
            "or more"
        )
    return replace(dataset, tasks=("retrieval",)) if dataset.tasks == ("zero-shot",) else dataset


def _check_labels(dataset: EvalDataset, labels: Tensor) -> None:
    classes = len(dataset.class_names)
    wrong = ((labels < 0) | ((labels >= classes) & (classes > 0))).nonzero()
    if not len(wrong):
        return
    first = int(wrong[0])
    label = int(labels[first])
    if label < 0:
        raise DataError(
            f"{dataset.where(first)} has label {label}: labels begin at 0, and sets whose labels are kept secret "
            "cannot be scored"
        )
    raise DataError(
        f"{dataset.where(first)} has label {label}, but there are {classes} class names, for labels 0 to "
        f"{classes - 1}; blank lines in classnames.txt count"
    )


def _tell_odd_classes(dataset: EvalDataset, labels: Tensor) -> None:
    names = dataset.class_names
    doubled = [repr(name) for name, count in Counter(names).items() if count > 1]
    if doubled:
        _log.warning(
            "dataset %s: class names that stand for several classes: %s", dataset.name, some(doubled)
        )
    counts = labels.sum(dim=0) if labels.ndim == 2 else torch.bincount(labels, minlength=len(names))  # (C,)
    if empty := [shown_name(names, i) for i in (counts == 0).nonzero().flatten().tolist()]:
        _log.warning("dataset %s: classes without an image: %s", dataset.name, some(empty))


def shown_name(names: Sequence[str], number: int) -> str:
    """A class in a message."""
    return repr(names[number]) if number < len(names) else str(number)


def _check_choices(dataset: EvalDataset, choices: Sequence[Sequence[str]]) -> None:
    for number, own in enumerate(choices):
        if len(own) < 2:
            raise DataError(
                f"{dataset.where(number)} has {counted(len(own), 'caption')} to choose from, it takes 2 or more"
            )
    equal = [own[0] for own in choices if own[0] in own[1:]]
    if equal:
        _log.warning(
            "dataset %s: %s whose right caption is among the wrong ones too, which counts as wrong: %s",
            dataset.name,
            counted(len(equal), "image"),
            some([repr(one[:_LONGEST]) for one in equal]),
        )


# --------------------------------------------------------------------------------------------------------------
# What the folders and files of a split may be called: the usual spellings, in capitals or not.

SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    TEST: (TEST, "testing"),
}
ACCEPTED = "train (or training), val (valid, validation, dev) and test (testing)"  # for messages


def names_of_split(split: str) -> tuple[str, ...]:
    """What else a split goes by, in small letters; its own name first."""
    return SPLIT_NAMES.get(split, (split,))


def folder_of_split(
    folders: Iterable[Path], split: str, holds: Callable[[Path], object] = lambda _: True
) -> Path | None:
    """Of some folders the one that is called like a split and holds what it should; None where there is none.

    Raises:
        DataError: there are two.
    """
    called = [one for one in folders if one.name == split or one.name.lower() in names_of_split(split)]
    found = list(filter(holds, called))
    if len(found) > 1:
        raise DataError(f"{found[0]} and {found[1]} would both be the split {split!r}: rename or move one")
    return found[0] if found else None


# --------------------------------------------------------------------------------------------------------------
# Small files of text beside a dataset's images, which anybody may have written, here or in a store.

_MAX_TEXT_BYTES = 16 << 20


def beside(root: str | Path, *names: str) -> str | Path:
    """A file or folder in a folder of this machine, or in one of a store."""
    if isinstance(root, Path) or not is_remote(root):
        return Path(root, *names)
    return "/".join([root.rstrip("/"), *names])


def lines_of(place: str | Path) -> list[str]:
    """The lines, stripped. Blank ones stay, because their place has a meaning; a missing file has none."""
    text = (read_text_file(place) or "").removesuffix("\n").removesuffix("\r")
    return [line.strip() for line in text.split("\n")] if text else []


def read_text_file(place: str | Path, *, limit: int = _MAX_TEXT_BYTES) -> str | None:
    """A file's text; None where there is none.

    Raises:
        DataError: it is longer than ``limit`` bytes or not UTF-8, or its store does not answer.
    """
    if isinstance(place, str) and is_remote(place):
        return _remote_text(place, limit)
    path = Path(place)
    if not path.is_file():
        return None
    if path.stat().st_size > limit:
        raise DataError(f"{path} is larger than {limit} bytes")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error


def _remote_text(url: str, limit: int) -> str | None:
    from data.remote import store

    text = store.read_text(url, limit=limit)
    if text is not None and "\ufffd" in text:  # what its bytes that are no UTF-8 were turned into
        raise DataError(f"{store.shown(url)} is not UTF-8 text")
    return None if text is None else text.removeprefix("\ufeff")
