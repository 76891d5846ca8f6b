"""Reader of images in folders by class, ``ROOT/<class>/*.jpg``; no image is silently left out."""

import json
import logging
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from clipkit.errors import DataError
from clipkit.files import counted
from clipkit.samples import (
    CLASS_NAMES,
    SPLIT_NAMES,
    SPLIT_WORDS,
    SUFFIXES,
    caption_table_of,
    check_image,
    files_below,
    find_captions,
    folder_of_split,
    images_below,
    is_hidden,
    open_caption_tables,
    read_class_names,
)
from eval.datasets.dataset import DEFAULT_TEMPLATES, TEST, EvalDataset, NoSplit, some
from eval.readers.files import (
    ACCEPTED,
    FileImages,
    checked_set,
    templates_in,
)
from eval.readers.pairs import open_captioned_folder, open_table

__all__ = ["open_image_folder", "utf8_name", "visible_folders"]

_log = logging.getLogger("eval")


def open_image_folder(folder: Path, name: str, *, split: str = TEST) -> EvalDataset:
    """Open a folder of images by class, or of splits of such folders.

    Splits have the usual names, see ``eval.readers.files``. Without a ``test`` split, ``val`` is the test split, as
    in ImageNet's layout, and not a split of its own. A folder without splits is a test split. The names of
    classes are those of their folders, or the lines of ``classnames.txt`` (see ``clipkit.files.read_class_names``).

    Raises:
        DataError: there is no such split, there are images of fewer than two classes, or an image cannot be used.
    """
    folders = visible_folders(folder)
    splits = {
        one: own for one in SPLIT_NAMES if (own := folder_of_split(folders, one, visible_folders)) is not None
    }
    inside = _folder_of_split(folder, split, splits)
    # all splits number the same classes, including those that a split lacks
    subfolders = sorted({one.name for own in (inside, *splits.values()) for one in visible_folders(own)})
    listed = read_class_names(folder, subfolders) or read_class_names(inside, subfolders)
    classes, labels_of = listed or (subfolders, {one: label for label, one in enumerate(subfolders)})
    labelled = sorted((labels_of[one], file) for one, file in _images_by_class(inside))
    if len(subfolders) < 2 and listed is None:
        if (table := caption_table_of(inside, image_column=None, caption_column=None)) is not None:
            return replace(open_table(table, name), split=split)
        if find_captions(path for path, cause in images_below(inside) if not cause) is not None:
            return replace(open_captioned_folder(inside, name), split=split)
    if not labelled:
        # a configuration of a dataset at Hugging Face may have its files in a folder data
        parquet = (*inside.glob("*/*.parquet"), *inside.glob("*/*/*.parquet"))
        if below := sorted({inside / file.relative_to(inside).parts[0] for file in parquet}):
            raise DataError(
                f"{inside} has Parquet files in {counted(len(below), 'folder')}; pass one of them: "
                f"{some(list(map(str, below)))}"
            )
        raise DataError(
            f"{inside} contains no images in folders by class, such as {inside}/cat/1.jpg, nor images with captions"
        )
    captions = find_captions(file for _, file in labelled)
    if captions and listed is None:
        raise DataError(
            f"{captions} may contain captions of an image, so the names of folders are not read as classes: write "
            f"the names of classes into {folder / CLASS_NAMES}, or score the captions of a packed dataset "
            f"(python -m data pack {shlex.quote(str(inside))} OUT --test 1.0, then --data OUT)"
        )
    paths_below = (path for path, _ in files_below(inside))
    if listed is None and (tables_below := open_caption_tables(paths_below, SUFFIXES)):
        raise DataError(
            f"{tables_below[0].path} is a table of images and captions, so the names of folders are not read as "
            f"classes: name the table instead, or write the names of classes into {folder / CLASS_NAMES}"
        )
    if renamed := [f"{one} is {classes[i]!r}" for one, i in labels_of.items() if one != classes[i]]:
        _log.warning("dataset %s: the names of classes are those of %s: %s", name, CLASS_NAMES, some(renamed))
    images = FileImages(inside, [file for _, file in labelled])
    labels, real = torch.tensor([label for label, _ in labelled]), folder / _REAL
    if real.is_file():
        labels = _real_labels(real, [file for _, file in labelled], len(classes))
    if len(classes) == 1:
        raise DataError(
            f"{folder} contains images of only one class, {classes[0]!r}: images by class need at least two "
            f"folders, such as {folder / 'cat'} and {folder / 'dog'}; for captions, name a table of them"
        )
    if inside == folder and all(one.lower() in SPLIT_WORDS for one in classes):
        raise DataError(
            f"{folder} contains images in {some(classes)}, which are names of splits, not of classes: put the "
            f"images in a folder per class, such as {folder / classes[0] / 'cat'}"
        )
    if inside == folder and all(map(_LIKE_A_SPLIT.match, subfolders)):
        _log.warning(
            "dataset %s: scores the folders %s as classes, but their names look like splits: rename the folder of "
            "the test split to test",
            name,
            some(subfolders),
        )
    files = [path for path in inside.iterdir() if not is_hidden(path.name) and path.is_file()]
    if beside := sorted(path.name for path in files if check_image(path) is not None):
        _log.warning("dataset %s: skips images outside the class folders: %s", name, some(beside))
    others = [path for path in folders if inside != folder and path not in (inside, *splits.values())]
    if skipped := [path.name for path in others if next(images_below(path), None) is not None]:
        _log.warning(
            "dataset %s: scores the images in %s, and skips those in other folders beside it: %s",
            name,
            inside,
            some(skipped),
        )
    return checked_set(
        EvalDataset(
            name=name,
            split=split,
            images=images,
            revision=images.fingerprint(),
            tasks=("zero-shot",),
            class_names=tuple(utf8_name(one).replace("_", " ").strip() for one in classes),
            templates=templates_in(folder) or DEFAULT_TEMPLATES,
            labels=labels,
            metadata=_textures(labelled, classes),
        )
    )


_LIKE_A_SPLIT = re.compile(rf"(?:{'|'.join(SPLIT_WORDS)})(?![a-z])", re.IGNORECASE)
_REAL = "real.json"
_VALIDATION = re.compile(r"ILSVRC2012_val_(\d{8})")


def _real_labels(file: Path, images: Sequence[Path], classes: int) -> torch.Tensor:
    """Return ImageNet's reassessed labels (Beyer et al. 2020, https://arxiv.org/abs/2006.07159), (N, C) bool.

    Raises:
        DataError: the file is not a list of labels for each validation image, or an image is not one of them.
    """
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        rows = [[int(label) for label in own] for own in given]
        labels = torch.zeros(len(images), classes, dtype=torch.bool)
        for number, image in enumerate(images):
            match = _VALIDATION.fullmatch(image.stem)
            if match is None or not 1 <= int(match[1]) <= len(rows):
                raise DataError(
                    f"{file} has no labels for {image.name}: expected ILSVRC2012_val_00000001.JPEG …"
                )
            own = rows[int(match[1]) - 1]
            if any(not 0 <= label < classes for label in own):
                raise DataError(f"{file}: labels {own} of {image.name} are not among {classes} class folders")
            labels[number, own] = True
    except (ValueError, TypeError) as error:
        raise DataError(f"{file} is not a JSON list with a list of labels for each image: {error}") from error
    return labels


_CONFLICT = re.compile(r"(.+?)\d+-(.+?)\d+")


def _textures(labelled: Sequence[tuple[int, Path]], classes: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the column ``texture`` if all files are named as cue-conflict images are: ``cat/cat4-bottle1.png``."""
    found = []
    for label, file in labelled:
        match = _CONFLICT.fullmatch(file.stem)
        if match is None or match[1] != classes[label] or match[2] not in classes:
            return {}
        found.append(classes.index(match[2]))
    return {"texture": torch.tensor(found)}


def _folder_of_split(folder: Path, split: str, splits: dict[str, Path]) -> Path:
    # otherwise probes would be tuned on the images that they are scored on
    if split == "val" and "val" in splits and TEST not in splits:
        raise NoSplit(
            f"{folder} has no split 'val' besides the test split, for which its folder {splits['val'].name!r} is "
            "used"
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
        entries = visible_folders(folder)
        flat = folder_of_split(entries, TEST) or folder_of_split(entries, "val")
        if flat is not None:
            raise NoSplit(
                f"{flat} has no folders by class: put the images to score on into a folder per class, such as "
                f"{flat / 'cat'}"
            )
        raise NoSplit(
            f"{folder} has only the split 'train': pass the folder with the images to score on, or put them next "
            f"to it; splits are folders {ACCEPTED}"
        )
    return folder


def visible_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder that are not hidden, sorted by name.

    Raises:
        DataError: one of the entries is a broken link.
        OSError: the folder cannot be read.
    """
    if not folder.is_dir():
        return []
    paths = sorted(path for path in folder.iterdir() if not is_hidden(path.name))
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} is a broken link: fix or remove it")
    return [path for path in paths if path.is_dir()]


def _images_by_class(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the images below the class folders in a folder, each with the name of its class folder.

    Raises:
        DataError: an image or a folder cannot be read, or is a link that ``files_below`` does not follow.
    """
    for path, cause in images_below(folder):
        parts = path.relative_to(folder).parts
        if cause and (len(parts) > 1 or path.is_dir()):
            raise DataError(f"{path}: {cause}")
        if len(parts) > 1:
            yield parts[0], path


def utf8_name(name: str) -> str:
    """Return a folder's name as UTF-8 text, whatever the locale.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        return os.fsencode(name).decode()
    except UnicodeError as error:
        raise DataError(f"the folder {name!r} has a name that is not UTF-8: rename it") from error
