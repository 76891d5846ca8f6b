"""Reader of images with captions: a table of paths, or a folder with captions in files beside the images.

The rows of an image are one image with all their captions, see ``clipkit.samples.TableSamples``. If the table has a
column ``split``, as Karpathy's splits have, its rows belong to the splits that it names; otherwise all of them are
the test split. If the captions are a column ``label``, they are the classes of the images.
"""

import logging
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from clipkit.errors import DataError
from clipkit.files import counted
from clipkit.samples import (
    FolderSamples,
    MissingSplit,
    Table,
    TableSamples,
    is_table,
    plain_name,
    read_split,
)
from eval.datasets.dataset import DEFAULT_TEMPLATES, TEST, EvalDataset, list_some
from eval.readers.files import check_dataset, file_images, read_templates

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
        MissingSplit: there is no such split.
        DataError: the table cannot be read, or none of its images can be used.
    """
    table = Table(file, image_column=None, caption_column=None, others=None)
    samples = TableSamples([table])
    if samples.damage:
        raise DataError(f"dataset {name}: {samples.damage}")
    folders = {table.find_folder(row.path) for row in table if isinstance(row.path, str)} - {None}
    root = folders.pop() if len(folders) == 1 else None
    return _open_pairs(samples, root or file.parent, file, name, split, is_whole_split=is_whole_split)


def open_captioned_folder(samples: FolderSamples, name: str) -> EvalDataset:
    """Open a folder of images with captions in files beside them, which are a test split; see ``open_table``."""
    return _open_pairs(samples, samples.folder, samples.folder, name, TEST)


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
