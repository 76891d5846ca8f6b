"""Readers of image files: folders by class, tables of paths with captions, folders with captions in other files.

No image is silently left out. The rows of an image are one image with all their captions, see
``clipkit.samples.TableSamples``. If a table has a column ``split``, as Karpathy's splits have, its rows belong to
the splits that it names; otherwise all of them are the test split. If the captions are a column ``label``, they are
the classes of the images.
"""

import logging
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import msgspec
import torch

from clipkit.errors import DataError, nearest
from clipkit.files import counted
from clipkit.samples import (
    CLASS_NAMES,
    SPLIT_NAMES,
    SPLIT_WORDS,
    SUFFIXES,
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
    usable_texts,
)
from data.captions import PairFields, parse_number
from eval.datasets.card import OWN_CARD, Card, TableSource
from eval.datasets.dataset import (
    DEFAULT_TEMPLATES,
    TEST,
    EvalDataset,
    check_dataset,
    file_images,
    hash_values,
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


def open_table(
    file: Path, name: str, *, split: str = TEST, is_whole_split: bool = False, card: Card | None = None
) -> EvalDataset:
    """Open a table of paths of images with captions or labels.

    All rows belong to the split if ``is_whole_split``, because the name of the file states the split.

    Raises:
        MissingSplit: no row belongs to the split.
        DataError: the table is damaged, or has neither captions nor labels.
    """
    columns = (card and card.table) or TableSource()
    texts = columns.caption or columns.label
    in_columns = card is not None and card.multilabel and not columns.label
    need = ["image"] if in_columns else ["image", "caption"]
    table = Table(
        file, image_column=columns.image or None, caption_column=texts or None, need=need, others=None
    )
    samples = TableSamples([table], most_rows=sys.maxsize)  # all judgments of an image count
    if samples.damage:
        raise DataError(f"dataset {name}: {samples.damage}")
    folders = {table.find_folder(row.path) for row in table if isinstance(row.path, str)} - {None}
    root = folders.pop() if len(folders) == 1 else None
    dataset, rows = _open_pairs(
        samples, root or file.parent, file, name, split, is_whole_split=is_whole_split, need=need
    )
    if card is not None and card.multilabel:
        dataset = _add_labels(dataset, samples, rows, card)
    elif columns.label or (not columns.caption and plain_name(samples.caption_column) in ("label", "labels")):
        dataset = _name_labels(dataset, file)
    elif columns.grade:
        dataset = _add_grades(dataset, samples, rows, columns.grade)
    if columns.image_fields:
        dataset = _add_image_fields(dataset, samples, rows, columns.image_fields)
    return check_dataset(dataset)


def _open_pairs(
    samples: TableSamples | FolderSamples,
    root: Path,
    source: Path,
    name: str,
    split: str,
    *,
    is_whole_split: bool = False,
    need: Sequence[str] = ("image", "caption"),
) -> tuple[EvalDataset, list[int]]:
    """Return images with their captions, and their samples.

    Images without a caption, if it is needed, and missing files are counted in the log.
    """
    rows: list[int] = []
    files: list[Path] = []
    captions: list[tuple[str, ...]] = []
    splits: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    for i in range(len(samples)):
        try:
            fields = samples.fields(i)
            texts = tuple(dict.fromkeys(fields.get(samples.caption_column, ())))
            path = samples.path(i)
            # tables with encoded images are refused when they are opened
            assert path is not None
            if not texts and "caption" in need:
                raise DataError("no caption")
            if not path.is_file():
                raise DataError("missing file")
            row_split = read_split(fields, file_split=split if is_whole_split else "") or TEST
        except DataError as error:
            bad[str(error)] += 1
            continue
        splits[row_split] += 1
        if row_split == split:
            rows.append(i)
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
    return dataset, rows


def _name_labels(dataset: EvalDataset, source: Path) -> EvalDataset:
    """Make the only caption of each image its class."""
    captions = dataset.captions or ()
    for i, texts in enumerate(captions):
        if len(texts) > 1:
            image = dataset.images.locate(i)[1]
            raise DataError(f"dataset {dataset.name}: {image} has several labels in {source}")
    class_names = tuple(sorted(set(chain.from_iterable(captions))))
    labels = torch.tensor([class_names.index(texts[0]) for texts in captions])
    return replace(dataset, tasks=("zero-shot",), captions=None, class_names=class_names, labels=labels)


def _add_grades(dataset: EvalDataset, samples: TableSamples, rows: Sequence[int], column: str) -> EvalDataset:
    """Add the relevance of each caption of an image, from a column of the rows with this image and caption."""
    _check_columns(samples, [column])
    grades: list[tuple[float, ...]] = []
    for i, captions in zip(rows, dataset.captions or (), strict=True):
        by_caption: dict[str, float] = {}
        for row in samples.rows(i):
            cell = row.others.get(column)
            grade = parse_number(cell)
            is_grade = grade is not None and 0 <= grade <= sys.float_info.max
            for caption in usable_texts(row.caption):
                if grade is None or not is_grade or by_caption.setdefault(caption, grade) != grade:
                    shown = "" if cell is None else str(cell)[:40]
                    raise DataError(
                        f"dataset {dataset.name}: row {row.number:,} has {column} {shown!r}: expected a number of "
                        "0 or more, the same in all rows with the same image and caption"
                    )
        grades.append(tuple(by_caption[caption] for caption in captions))
    if not any(map(any, grades)):
        raise DataError(f"dataset {dataset.name}: no row has a {column} above 0")
    revision = hash_values(dataset.images.fingerprint(), dataset.captions, grades)
    return replace(dataset, grades=tuple(grades), revision=revision)


def _add_image_fields(
    dataset: EvalDataset, samples: TableSamples, rows: Sequence[int], weights: Mapping[str, float]
) -> EvalDataset:
    """Add the texts of each image that its features are combined with; the first one of rows that differ."""
    names = [name for name in weights if name != "image"]
    _check_columns(samples, names)
    further = PairFields(image=tuple(names))
    texts: list[list[str]] = []
    for i, row in enumerate(rows):
        try:
            texts.append(further.further_texts(samples.fields(row)))
        except DataError as error:
            raise DataError(f"dataset {dataset.name}: {dataset.images.locate(i)[1]}: {error}") from error
    fields: dict[str, tuple[float, tuple[str, ...]]] = {"image": (weights["image"], ())}
    for name, column in zip(names, zip(*texts, strict=True), strict=True):
        fields[name] = (weights[name], column)
    revision = hash_values(dataset.revision or dataset.images.fingerprint(), fields)
    return replace(dataset, image_fields=fields, revision=revision)


def _check_columns(samples: TableSamples, columns: Sequence[str]) -> None:
    for column in columns:
        if column not in samples.others:
            hint = nearest(column, samples.others)
            raise DataError(f"{samples.tables[0].path} has no column {column!r} ({hint})")


def _add_labels(dataset: EvalDataset, samples: TableSamples, rows: Sequence[int], card: Card) -> EvalDataset:
    """Add which keys of the card each image has: those in its column of labels, or its columns with 1."""
    assert card.table is not None
    keys = card.keys
    labels = torch.zeros(len(rows), len(keys), dtype=torch.bool)
    unknown = torch.zeros_like(labels)
    if card.table.label:
        others: Counter[str] = Counter()
        for i, texts in enumerate(dataset.captions or ()):
            for label in {part.strip() for text in texts for part in text.split(card.table.separator)}:
                if label in keys:
                    labels[i, keys.index(label)] = True
                elif label:
                    others[label] += 1
        if others:
            listed = list_some([f"{count:,} × {label[:40]!r}" for label, count in others.most_common()])
            _log.warning("dataset %s: labels that are none of the card's keys: %s", dataset.name, listed)
    else:
        _check_columns(samples, keys)
        for i, sample in enumerate(rows):
            fields = samples.fields(sample)
            for j, key in enumerate(keys):
                cell = fields.get(key)
                number = parse_number(int(cell) if isinstance(cell, bool) else cell)
                labels[i, j] = number == 1
                unknown[i, j] = number not in (0, 1)
                if number not in (0, 1, -1) and cell not in (None, ""):
                    image = dataset.images.locate(i)[1]
                    raise DataError(
                        f"dataset {dataset.name}: {image} has {key} {str(cell)[:40]!r}: expected 1, 0, -1 "
                        "(uncertain) or nothing, the same in all rows of an image"
                    )
    if bool(unknown.any()):
        _log.warning(
            "dataset %s: %s of %s labels are uncertain or blank and left out of its metrics",
            dataset.name,
            f"{int(unknown.sum()):,}",
            f"{labels.numel():,}",
        )
    return replace(
        dataset,
        tasks=("zero-shot",),
        captions=None,
        class_names=keys,
        labels=labels,
        unknown=unknown if bool(unknown.any()) else None,
    )


# --------------------------------------------------------------------------------------------------------------
# Folders of images by class, ``ROOT/<class>/*.jpg``.

_ACCEPTED = "train (or training), val (valid, validation, dev) and test (testing)"  # for messages
_LIKE_A_SPLIT = re.compile(rf"(?:{'|'.join(SPLIT_WORDS)})(?![a-z])", re.IGNORECASE)


def open_image_folder(folder: Path, name: str, *, split: str = TEST, card: Card | None = None) -> EvalDataset:
    """Open a folder of images by class, or of splits of such folders.

    Splits are named as in ``clipkit.samples.SPLIT_NAMES``. Without a ``test`` split, ``val`` is the test split,
    as in ImageNet's layout, and not a split of its own. A folder without splits is a test split. The names of
    classes are those of their folders, or the lines of ``classnames.txt``, see ``read_class_names``. A card may say
    that a table lists the images instead.
    """
    if card is not None and card.table is not None:
        return _open_card_table(folder, name, split, card, card.table)
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
            dataset, _ = _open_pairs(samples, inside, inside, name, TEST)
            return check_dataset(replace(dataset, split=split))
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


def _open_card_table(folder: Path, name: str, split: str, card: Card, columns: TableSource) -> EvalDataset:
    """Open the table that a card names, or the only one in its folder."""
    if columns.files:
        if split not in columns.files:
            raise MissingSplit(
                f"dataset {name} has no split {split!r}: files of [table] in {folder / OWN_CARD} has none"
            )
        return open_table(folder / columns.files[split], name, split=split, is_whole_split=True, card=card)
    tables = [path for path in sorted(folder.iterdir()) if path.name.lower().endswith(SUFFIXES)]
    if len(tables) != 1:
        listed = list_some([path.name for path in tables]) or "none"
        raise DataError(
            f"{folder} has {counted(len(tables), 'table')} ({listed}): name that of each split in "
            f'{folder / OWN_CARD}, such as files.test = "test.csv" under [table]'
        )
    return open_table(tables[0], name, split=split, card=card)


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
