"""Readers of image files: folders by class, tables of paths with captions, folders with captions in other files.

No image is silently left out. The rows of an image are one image with all their captions, see
``clipkit.samples.TableSamples``. If a table has a column ``split``, as Karpathy's splits have, its rows belong to
the splits that it names; otherwise all of them are the test split. If the captions are a column ``label``, they are
the classes of the images.
"""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import msgspec
import torch

from clipkit.errors import DataError
from clipkit.files import counted
from clipkit.samples import (
    CLASS_NAMES,
    SPLIT_NAMES,
    SPLIT_WORDS,
    FolderSamples,
    MissingSplit,
    Table,
    TableSamples,
    find_caption_table,
    find_split_folder,
    find_splits,
    images_below,
    is_hidden,
    is_table,
    plain_name,
    read_class_names,
    read_split,
)
from eval.datasets.dataset import (
    DEFAULT_TEMPLATES,
    TEST,
    EvalDataset,
    check_dataset,
    file_images,
    list_some,
    make_multi_hot,
    read_templates,
)

_log = logging.getLogger("eval")


def lists_captions(file: Path) -> bool:
    """Return whether a file is a table of paths of images with captions.

    SugarCrepe's and ARO's files also have wrong captions, and Parquet files may contain the images.
    """
    if file.suffix not in (".json", ".parquet", ".pq"):
        return is_table(file)
    try:
        table = Table(file, image_column=None, caption_column=None, others=None)
    except DataError:
        return False
    return "negative_caption" not in table.others


def open_table(file: Path, name: str, *, split: str = TEST, is_whole_split: bool = False) -> EvalDataset:
    """Open a table of paths of images with captions or labels.

    All rows belong to the split if ``is_whole_split``, because the name of the file states the split.

    Raises:
        MissingSplit: no row belongs to the split.
        DataError: the table is damaged, or has neither captions nor labels.
    """
    table = Table(file, image_column=None, caption_column=None, others=None)
    samples = TableSamples([table])
    if samples.damage:
        raise DataError(f"dataset {name}: {samples.damage}")
    folders = {table.find_folder(row.path) for row in table if isinstance(row.path, str)} - {None}
    root = folders.pop() if len(folders) == 1 else None
    return _open_pairs(samples, root or file.parent, file, name, split, is_whole_split=is_whole_split)


def _open_pairs(
    samples: TableSamples | FolderSamples,
    root: Path,
    source: Path,
    name: str,
    split: str,
    *,
    is_whole_split: bool = False,
) -> EvalDataset:
    """Bind captions, or labels; images without them, and missing files, are counted in the log."""
    files: list[Path] = []
    captions: list[tuple[str, ...]] = []
    splits: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    for i in range(len(samples)):
        try:
            fields = samples.fields(i)
            texts = tuple(dict.fromkeys(fields[samples.caption_column]))
            path = samples.path(i)
            # tables with encoded images are refused when they are opened
            assert path is not None
            if not texts:
                raise DataError("no caption")
            if not path.is_file():
                raise DataError("missing file")
            row_split = read_split(fields, file_split=split if is_whole_split else "") or TEST
        except DataError as error:
            bad[str(error)] += 1
            continue
        splits[row_split] += 1
        if row_split == split:
            files.append(path)
            captions.append(texts)
    causes = list_some([f"{count:,} × {cause}" for cause, count in bad.most_common()])
    if not splits:
        raise DataError(f"dataset {name}: no image of {source} can be used: {causes or 'it has no rows'}")
    if not files:
        raise MissingSplit(f"dataset {name} has no split {split!r}: {source} has {list_some(sorted(splits))}")
    if bad:
        _log.warning("dataset %s: %s cannot be used: %s", name, counted(bad.total(), "image"), causes)
    dataset = EvalDataset(
        name=name,
        split=split,
        images=file_images(root, files),
        tasks=("retrieval",),
        templates=read_templates(source.parent) or DEFAULT_TEMPLATES,
        captions=tuple(captions),
    )
    if plain_name(samples.caption_column) in ("label", "labels"):
        for path, texts in zip(files, captions, strict=True):
            if len(texts) > 1:
                raise DataError(f"dataset {name}: {path} has several labels in {source}")
        class_names = tuple(sorted(set(chain.from_iterable(captions))))
        labels = torch.tensor([class_names.index(texts[0]) for texts in captions])
        dataset = replace(
            dataset, tasks=("zero-shot",), captions=None, class_names=class_names, labels=labels
        )
    return check_dataset(dataset)


# --------------------------------------------------------------------------------------------------------------
# Folders of images by class, ``ROOT/<class>/*.jpg``.

_ACCEPTED = "train (or training), val (valid, validation, dev) and test (testing)"  # for messages
_LIKE_A_SPLIT = re.compile(rf"(?:{'|'.join(SPLIT_WORDS)})(?![a-z])", re.IGNORECASE)


def open_image_folder(folder: Path, name: str, *, split: str = TEST) -> EvalDataset:
    """Open a folder of images by class, or of splits of such folders.

    Splits are named as in ``clipkit.samples.SPLIT_NAMES``. Without a ``test`` split, ``val`` is the test split,
    as in ImageNet's layout, and not a split of its own. A folder without splits is a test split. The names of
    classes are those of their folders, or the lines of ``classnames.txt``, see ``read_class_names``.
    """
    folders = _visible_folders(folder)
    splits: dict[str, Path] = {}
    for word in SPLIT_NAMES:
        inner = find_split_folder(folders, word, _visible_folders)
        if inner is not None:
            splits[word] = inner
    if not splits:
        tables = find_splits(folder)
        if split in tables and tables[split].format == "table":
            return open_table(Path(tables[split].files[0].url), name, split=split, is_whole_split=True)
        for word in _fallbacks(split):
            inner = find_split_folder(folders, word, _is_captioned)
            if inner is not None:
                return replace(open_image_folder(inner, name), split=split)
    inside = _folder_of_split(folder, split, splits)
    samples = FolderSamples(inside)
    # all splits number the same classes, including those that a split lacks
    names: set[str] = set()
    for part in (inside, *splits.values()):
        names.update(path.name for path in _visible_folders(part))
    subfolders = sorted(names)
    listed = read_class_names(folder, subfolders) or read_class_names(inside, subfolders)
    if len(subfolders) < 2 and listed is None:
        table = find_caption_table(inside, image_column=None, caption_column=None)
        if table is not None:
            return replace(open_table(table, name), split=split)
        if samples.caption_file is not None:
            # captions in files beside the images are a test split
            return replace(_open_pairs(samples, inside, inside, name, TEST), split=split)
    classes, labels_of = listed or (subfolders, {name: label for label, name in enumerate(subfolders)})
    labelled: list[tuple[int, Path]] = []
    outside: list[str] = []
    for i in range(len(samples)):
        path = samples.path(i)
        subfolder = samples.subfolder(i)
        cause = samples.cause(i)
        if cause and (subfolder or path.is_dir()):
            raise DataError(f"{path}: {cause}")
        if subfolder:
            labelled.append((labels_of[subfolder], path))
        else:
            outside.append(path.name)
    labelled.sort()
    if not labelled:
        raise DataError(
            f"{inside} contains no images in folders by class, such as {inside}/cat/1.jpg, nor images with captions"
        )
    if listed is None:
        if samples.caption_file is not None:
            raise DataError(
                f"{samples.caption_file} may contain captions of an image, so the names of folders are not read as "
                f"classes: write the names of classes into {folder / CLASS_NAMES}, or pack the images with their "
                "captions"
            )
        samples.check_no_caption_tables()
    if inside == folder and all(map(_LIKE_A_SPLIT.match, subfolders)):
        raise DataError(
            f"{folder} contains images in {list_some(subfolders)}, which are names of splits, not of classes: put "
            f"the images in a folder per class, such as {folder / subfolders[0] / 'cat'}, and name the test split "
            "test"
        )
    renamed = [f"{key} is {classes[label]!r}" for key, label in labels_of.items() if key != classes[label]]
    if renamed:
        _log.warning(
            "dataset %s: the names of classes are those of %s: %s", name, CLASS_NAMES, list_some(renamed)
        )
    if outside:
        _log.warning(
            "dataset %s: skips images outside the class folders: %s", name, list_some(sorted(outside))
        )
    others = set() if inside == folder else {*folders} - {inside, *splits.values()}
    skipped = [path.name for path in sorted(others) if next(images_below(path), None) is not None]
    if skipped:
        _log.warning(
            "dataset %s: scores the images in %s, and skips those in other folders beside it: %s",
            name,
            inside,
            list_some(skipped),
        )
    files = [file for _, file in labelled]
    labels = torch.tensor([label for label, _ in labelled])
    if (folder / _REAL).is_file():
        labels = _read_real_labels(folder / _REAL, files, len(classes))
    return check_dataset(
        EvalDataset(
            name=name,
            split=split,
            images=file_images(inside, files),
            tasks=("zero-shot",),
            class_names=tuple(text.replace("_", " ").strip() for text in classes),
            templates=read_templates(folder) or DEFAULT_TEMPLATES,
            labels=labels,
            metadata=_find_textures(labelled, classes),
        )
    )


def _is_captioned(folder: Path) -> bool:
    table = find_caption_table(folder, image_column=None, caption_column=None)
    return table is not None or FolderSamples(folder).caption_file is not None


def _folder_of_split(folder: Path, split: str, splits: dict[str, Path]) -> Path:
    # otherwise probes would be tuned on the images that they are scored on
    if split == "val" and "val" in splits and TEST not in splits:
        raise MissingSplit(
            f"{folder} has no split 'val' besides the test split, for which its folder {splits['val'].name!r} is "
            "used"
        )
    for name in _fallbacks(split):
        if name in splits:
            return splits[name]
        if _visible_folders(folder / name):
            return folder / name
    if split == TEST and "train" not in splits:
        return folder
    raise MissingSplit(
        f"{folder} has no split {split!r}: no folder {folder / split} with folders by class, such as "
        f"{folder / split / 'cat'}; splits are folders {_ACCEPTED}"
    )


def _fallbacks(split: str) -> tuple[str, ...]:
    return (TEST, "val") if split == TEST else (split,)


def _visible_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder that are not hidden, sorted by name; raise DataError for a broken link."""
    if not folder.is_dir():
        return []
    paths = sorted(path for path in folder.iterdir() if not is_hidden(path.name))
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} is a broken link: fix or remove it")
    return [path for path in paths if path.is_dir()]


_REAL = "real.json"
_VALIDATION = re.compile(r"ILSVRC2012_val_(\d{8})")


def _read_real_labels(file: Path, images: Sequence[Path], classes: int) -> torch.Tensor:
    """Return ImageNet's reassessed labels (Beyer et al. 2020, https://arxiv.org/abs/2006.07159), (N, C) bool."""
    try:
        rows = msgspec.json.decode(file.read_bytes(), type=list[list[int]])
    except msgspec.DecodeError as error:
        raise DataError(f"{file} is not a JSON list with a list of labels for each image: {error}") from error
    labels: list[list[int]] = []
    valid_labels = frozenset(range(classes))
    for image in images:
        match = _VALIDATION.fullmatch(image.stem)
        image_number = int(match[1]) if match is not None else 0
        if not 1 <= image_number <= len(rows):
            raise DataError(f"{file} has no labels for {image.name}: expected ILSVRC2012_val_00000001.JPEG …")
        labels.append(rows[image_number - 1])
        if not valid_labels.issuperset(labels[-1]):
            raise DataError(f"{file}: labels of {image.name} are not among {classes} class folders")
    return make_multi_hot(labels, classes)


_CONFLICT = re.compile(r"(.+?)\d+-(.+?)\d+")


def _find_textures(labelled: Sequence[tuple[int, Path]], classes: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the column ``texture`` if all files are named as cue-conflict images are: ``cat/cat4-bottle1.png``."""
    textures = []
    for label, file in labelled:
        match = _CONFLICT.fullmatch(file.stem)
        if match is None or match[1] != classes[label] or match[2] not in classes:
            return {}
        textures.append(classes.index(match[2]))
    return {"texture": torch.tensor(textures)}
