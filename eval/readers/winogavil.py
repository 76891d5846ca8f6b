"""WinoGAViL: cues, each with some pictures of which a few belong to it (Bitton et al. 2022, arXiv 2207.12576).

Every candidate of every cue stands as a picture of its own, so one picture stands there several times. ``items``
says which candidates belong together, ``captions`` has the cue, and ``metadata["association"]`` is 1 where a
picture belongs to it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clipkit.errors import DataError
from data.index import IMAGE_EXTENSIONS
from eval.dataset import DEFAULT_TEMPLATES, EvalDataset, Pictures
from eval.readers.checks import checked_set
from eval.readers.file_pictures import FilePictures
from eval.readers.parquet_files import ParquetFiles
from eval.readers.parquet_pictures import ParquetPictures

__all__ = ["ASSOCIATION", "open_winogavil"]

ASSOCIATION = "association"
_PICTURES = ("candidates_images", "candidate_images", "images")  # columns of lists of pictures
_FOLDERS = (
    "images",
    "winogavil_images",
    "winogavil_images_dir",
)  # of files NAME.jpg beside the parquet files


def open_winogavil(place: Path | str, name: str, *, split: str, files: ParquetFiles) -> EvalDataset:
    """The set in parquet files; its pictures in a column ``candidates_images``, or as files in a folder ``images``.

    Raises:
        DataError: a case has no association, or one that is not among its candidates; pictures are missing.
    """
    cells: list[tuple[int, int, int]] = []
    names: list[str] = []
    cues: list[tuple[str, ...]] = []
    right: list[int] = []
    for row, (cue, candidates, chosen) in enumerate(
        zip(*files.columns("cue", "candidates", "associations"), strict=True)
    ):
        own, belong = _texts(candidates), set(_texts(chosen))
        if not isinstance(cue, str) or not belong or not belong <= set(own) or len(set(own)) != len(own):
            raise DataError(
                f"dataset {name}: row {row} has no cue, a candidate twice, or associations that are none of its "
                "candidates"
            )
        cells += [(row, 0, number) for number in range(len(own))]
        names += own
        cues += [(cue,)] * len(own)
        right += [int(one in belong) for one in own]
    pictures = _pictures(place, name, files, np.array(cells, dtype=np.int64), names)
    return checked_set(
        EvalDataset(
            name=name,
            split=split,
            class_names=(),
            templates=DEFAULT_TEMPLATES,
            shards=pictures,
            labels=None,
            captions=tuple(cues),
            items=torch.tensor([row for row, _, _ in cells]),
            metadata={ASSOCIATION: torch.tensor(right)},
            revision=pictures.fingerprint(),
            tasks=("compositional",),
        )
    )


def _texts(value: Any) -> list[str]:
    """A list of names, which some copies of the set keep as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _pictures(
    place: Path | str, name: str, files: ParquetFiles, cells: Any, names: Sequence[str]
) -> Pictures:
    from pyarrow import types

    for column in _PICTURES:
        if column in files.schema.names:
            kind = files.schema.field(column).type
            if types.is_list(kind) and not types.is_string(kind.value_type):
                return ParquetPictures(files, [column], cells)
    if isinstance(place, Path):
        for folder in (place / inside for inside in _FOLDERS):
            if folder.is_dir():
                return FilePictures(folder, [_file(folder, name, one) for one in names])
    raise DataError(
        f"dataset {name}: it has no column candidates_images with pictures, and no folder images with NAME.jpg"
    )


def _file(folder: Path, name: str, candidate: str) -> Path:
    if "/" in candidate or candidate.startswith("."):
        raise DataError(f"dataset {name}: {candidate[:40]!r} is no name of a picture")
    for extension in IMAGE_EXTENSIONS:
        if (file := folder / f"{candidate}.{extension}").is_file():
            return file
    raise DataError(f"dataset {name}: there is no picture of {candidate[:40]!r} in {folder}")
