"""Images in folders by class, ``ROOT/<class>/*.jpg``, of which none is left out silently."""

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from clipkit.errors import DataError
from clipkit.files.patterns import IMAGE_EXTENSIONS
from data.shards.samples import Sample
from eval.datasets.dataset import DEFAULT_TEMPLATES, TEST, EvalDataset, NoSplit, some
from eval.readers.files import (
    ACCEPTED,
    SPLIT_NAMES,
    checked_set,
    folder_of_split,
    how_to_pack,
    lines_of,
    state_of,
    tables_in,
)

__all__ = ["ImageFolder", "open_image_folder", "utf8_name", "visible_folders"]

_OF_SYSTEMS = ("__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN", "System Volume Information")
# images that are not read: to leave them out would score fewer than there are
_UNREAD = ("heic", "heif", "jfif", "jpe", "jxl", "svg", "psd", "dng", "cr2", "nef", "arw")
_SPLIT_WORDS = frozenset(word for words in SPLIT_NAMES.values() for word in words)
_log = logging.getLogger("eval")


def open_image_folder(folder: Path, name: str, *, split: str = TEST) -> EvalDataset:
    """A folder of images by class, or of splits of such; to test on, one without splits counts as a whole.

    Splits go by the usual names, see ``eval.readers.files``. Where there is no ``test``, ``val`` stands in
    for it, as in ImageNet's layout, and is no split of its own then.

    Raises:
        DataError: it has no such split, images of one class only, or what ``ImageFolder`` refuses.
    """
    splits = _splits(folder)
    inside = _folder_of_split(folder, split, splits)
    # a class that one split lacks keeps its place in it: labels of all splits are of the same classes
    classes = (
        {one.name for own in splits.values() for one in visible_folders(own)} if inside != folder else ()
    )
    pictures = ImageFolder(inside, classes=sorted(classes))
    if len(pictures.classes) == 1:
        raise DataError(_of_one_class(folder, pictures.classes[0]))
    if inside == folder and all(one.lower() in _SPLIT_WORDS for one in pictures.classes):
        raise DataError(_of_flat_splits(folder, pictures.classes))
    if beside := sorted(one.name for one in inside.iterdir() if _is_image(one.name) and one.is_file()):
        _log.warning("dataset %s: images beside the class folders are left out: %s", name, some(beside))
    templates = tuple(line for line in lines_of(folder / "zeroshot_classification_templates.txt") if line)
    return checked_set(
        EvalDataset(
            name=name,
            split=split,
            class_names=tuple(utf8_name(one).replace("_", " ").strip() for one in pictures.classes),
            templates=templates or DEFAULT_TEMPLATES,
            shards=pictures,
            labels=torch.tensor([label for _, label in pictures.files]),
            captions=None,
            revision=pictures.fingerprint(),
            tasks=("zero-shot",),
        )
    )


def _splits(folder: Path) -> dict[str, Path]:
    """By split, the folder in it that is called so and holds folders."""
    folders = visible_folders(folder)
    found = {split: folder_of_split(folders, split, visible_folders) for split in SPLIT_NAMES}
    return {split: own for split, own in found.items() if own is not None}


def _folder_of_split(folder: Path, split: str, splits: Mapping[str, Path]) -> Path:
    # else probes would be tuned on what they are scored on
    if split == "val" and "val" in splits and TEST not in splits:
        raise NoSplit(
            f"{folder} has no split 'val' besides the one to test on, for which its folder "
            f"{splits['val'].name!r} stands in"
        )
    for own in (split, "val") if split == TEST else (split,):
        if own in splits:
            return splits[own]
        if visible_folders(folder / own):
            return folder / own
    if split != TEST:
        raise NoSplit(
            f"{folder} has no split {split!r}: no folder {folder / split} with folders by class; splits are "
            f"folders {ACCEPTED}"
        )
    if "train" in splits:
        raise NoSplit(
            f"{folder} has the split 'train' only: name the folder of the images to score on, or put them beside "
            f"it; splits are folders {ACCEPTED}"
        )
    return folder


def _of_one_class(folder: Path, name: str) -> str:
    """What a folder seems to be whose images are all in one folder, and what to do with it."""
    if (tables := tables_in(folder)) or (tables := tables_in(folder / name)):
        return (
            f"{folder} holds images in one folder, {name}, and {tables[0].name}, which may be a table of their "
            f"captions: {how_to_pack(tables[0])}; images by class take two folders or more"
        )
    return (
        f"{folder} holds images of one class only, {name!r}: images by class take two folders or more, as "
        f"{folder / 'cat'} and {folder / 'dog'}; for images with captions {how_to_pack(None)}"
    )


def _of_flat_splits(folder: Path, names: Sequence[str]) -> str:
    """What a folder seems to be whose splits hold images without folders by class."""
    return (
        f"{folder} holds images in {some(names)}, which are called like splits, not like classes: put them into "
        f"a folder by class, as {folder / names[0] / 'cat'}; for images with captions {how_to_pack(None)}"
    )


class ImageFolder:
    """The images below ``root/<class>/``, class folders and files in the order of their names.

    Args:
        root: their folder.
        classes: names of class folders, in order, of which some may be missing; those that there are if empty.

    Attributes:
        classes: the names; the place of each is its label.

    Raises:
        DataError: there is none; or a folder cannot be read, or an image is no file: a score is never of fewer
            images.
    """

    def __init__(self, root: Path, *, classes: Sequence[str] = ()) -> None:
        self.root = root
        folders = {folder.name: folder for folder in visible_folders(root)}
        self.classes = tuple(classes or folders)
        self.files = [
            (file, label)
            for label, name in enumerate(self.classes)
            if name in folders
            for file in sorted(_pictures(folders[name], root))
        ]
        if not self.files:
            tables = tables_in(root)
            pairs = (
                f"; {tables[0].name} may be a table of captions: {how_to_pack(tables[0])}" if tables else ""
            )
            raise DataError(f"{root} holds no image in folders by class, as in {root}/cat/1.jpg{pairs}")
        self._states = [state_of(file) for file, _ in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, number: int) -> Sample:
        """Picture ``number`` with its label.

        Raises:
            DataError: the file cannot be read.
        """
        file, label = self.files[number]
        folder, key = self.locate(number)
        try:
            image = file.read_bytes()
        except OSError as error:
            raise DataError(str(error.strerror)) from error
        return Sample(
            id=number,
            shard=folder,
            key=key,
            image=image,
            caption=None,
            label=label,
            meta={},
            caption_number=0,
        )

    def locate(self, number: int) -> tuple[str, str]:
        """The folder, and the file's path in it."""
        return str(self.root), self.files[number][0].relative_to(self.root).as_posix()

    def fingerprint(self) -> str:
        """Of paths and sizes; the folder may be moved."""
        digest = hashlib.sha256()
        for number, state in enumerate(self._states):
            digest.update(f"{self.locate(number)[1]}\0{state[0]}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:16]

    def stamp(self) -> str:
        """Of the same and of each file's inode and times of change."""
        return hashlib.sha256(repr((self.fingerprint(), self._states)).encode()).hexdigest()[:16]


def visible_folders(folder: Path) -> list[Path]:
    """The folders in a folder that are not hidden, in the order of their names.

    Raises:
        DataError: one of them is a link to nothing.
        OSError: the folder cannot be read.
    """
    if not folder.is_dir():
        return []
    paths = sorted(path for path in folder.iterdir() if not _is_hidden(path.name))
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} is a link to nothing: mend or remove it")
    return [path for path in paths if path.is_dir()]


def _is_hidden(name: str) -> bool:
    """Whether a user sees no such file or folder, as programs keep theirs there."""
    return name.startswith(".") or name in _OF_SYSTEMS


def _is_image(name: str) -> bool:
    return not _is_hidden(name) and _extension(name) in IMAGE_EXTENSIONS


def _extension(name: str) -> str:
    return os.path.splitext(name)[1].lower().removeprefix(".")  # noqa: PTH122 - of a name, not of a path


def _pictures(folder: Path, root: Path) -> Iterator[Path]:
    """Those in a class folder and in the folders below it, links among them, which lead nowhere above themselves.

    Raises:
        DataError: a link leads to a folder that it lies in; an image is of a kind that is not read.
        OSError: a folder cannot be read: it is not passed over.
    """
    # folders, and where each, and the links by which one gets there, really lie
    todo: list[tuple[Path, tuple[Path, ...]]] = [(folder, (root.resolve() / folder.name,))]
    while todo:
        inside, above = todo.pop()
        if inside.is_symlink():
            real = inside.resolve()
            if any(one.is_relative_to(real) for one in above):
                raise DataError(f"{inside} is a link to a folder that it lies in: remove it")
            above = (*above, real)
        with os.scandir(inside) as found:
            entries = [entry for entry in found if not _is_hidden(entry.name)]
        for entry in entries:
            if entry.is_dir():
                todo.append((Path(entry.path), (*above[:-1], above[-1] / entry.name)))
            elif _extension(entry.name) in IMAGE_EXTENSIONS:
                yield Path(entry.path)
            elif _extension(entry.name) in _UNREAD:
                raise DataError(
                    f"image {entry.path} is of a kind that is not read: write it as JPEG or PNG, or remove it"
                )


def utf8_name(name: str) -> str:
    """A folder's name as UTF-8, in which results and prompts are written, whatever the locale takes it for."""
    try:
        return os.fsencode(name).decode()
    except UnicodeError as error:
        raise DataError(f"the folder {name!r} has a name that is not UTF-8: rename it") from error
