"""SugarCrepe and ARO: a JSON file with a right and a wrong caption of each picture, and a folder of the pictures.

SugarCrepe (Hsieh et al. 2023, arXiv 2306.14610) is an object of ``{"filename", "caption", "negative_caption"}``
with pictures of COCO val2017. ARO's relation and attribution sets (Yuksekgonul et al. 2023, arXiv 2210.01936) are
lists of ``{"image_path", "true_caption", "false_caption"}`` with a box, ``"bbox_x", "bbox_y", "bbox_w", "bbox_h"``,
which is cut out, as its own code does; ``relation_name`` or ``attributes`` become the metadata ``"relation"`` or
``"attribute"``, numbered in the order of the names; ``"symmetric"`` is 1 for relations that the authors call so.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipkit.errors import DataError
from eval.dataset import DEFAULT_TEMPLATES, TEST, EvalDataset, NoSplit
from eval.json_text import parse_json
from eval.readers.checks import checked_set
from eval.readers.file_pictures import Box, FilePictures
from eval.readers.symmetric_relations import SYMMETRIC_RELATIONS
from eval.readers.text_files import text_of

__all__ = ["open_caption_choices"]

_FOLDERS = ("images", "val2017", "../images", "../val2017", "../coco/val2017", "../../coco/val2017")
_MAX_BYTES = 256 << 20
_FORMS = (  # picture, right caption, wrong caption
    ("filename", "caption", "negative_caption"),
    ("image_path", "true_caption", "false_caption"),
    ("image", "caption", "negative_caption"),
)
_BOX = ("bbox_x", "bbox_y", "bbox_w", "bbox_h")


def open_caption_choices(
    file: Path, name: str, *, split: str = TEST, images: Path | str | None = None
) -> EvalDataset:
    """A set of the form that is described above.

    Args:
        file: the JSON.
        name: of the dataset.
        split: only "test": these sets have no other.
        images: the folder of its pictures; looked for beside the file if None.

    Raises:
        DataError: an entry lacks something, or a picture is missing.
    """
    if split != TEST:
        raise NoSplit(f"dataset {name} has no split {split!r}: {file} is all of it, to test on")
    entries = _entries(file, name)
    form = next((form for form in _FORMS if all(key in entries[0] for key in form)), None)
    if form is None:
        known = "; ".join(", ".join(one) for one in _FORMS)
        raise DataError(f"dataset {name}: {file} has entries of another form; known: {known}")
    folder = _folder(file, name, images)
    files: list[Path] = []
    boxes: list[Box | None] = []
    choices: list[tuple[str, ...]] = []
    for number, entry in enumerate(entries):
        texts = [entry.get(key) for key in form]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise DataError(f"dataset {name}: entry {number} of {file} lacks one of {', '.join(form)}")
        picture, *captions = map(str, texts)
        files.append(_inside(folder, picture, name, file, number))
        boxes.append(_box(entry, name, file, number))
        choices.append(tuple(caption.strip() for caption in captions))
    pictures = FilePictures(folder, files, boxes)
    return checked_set(
        EvalDataset(
            name=name,
            class_names=(),
            templates=DEFAULT_TEMPLATES,
            shards=pictures,
            labels=None,
            captions=None,
            choices=tuple(choices),
            metadata=_groups(entries),
            revision=pictures.fingerprint(),
            tasks=("compositional",),
        )
    )


def _entries(file: Path, name: str) -> list[Mapping[str, Any]]:
    try:
        found = parse_json(text_of(file, limit=_MAX_BYTES) or "")
    except ValueError as error:
        raise DataError(f"dataset {name}: {file} does not parse: {error}") from error
    entries = list(found.values()) if isinstance(found, dict) else found
    if not isinstance(entries, list) or not entries or not all(isinstance(one, dict) for one in entries):
        raise DataError(f"dataset {name}: {file} is no list of entries, nor an object of them")
    return entries


def _folder(file: Path, name: str, images: Path | str | None) -> Path:
    if images is not None:
        folder = Path(images).expanduser()
        if not folder.is_dir():
            raise DataError(f"dataset {name}: there is no folder {folder} for its pictures")
        return folder
    for inside in _FOLDERS:
        if (folder := file.parent / inside).is_dir():
            return folder.resolve()
    raise DataError(f"dataset {name}: no folder images or val2017 beside {file}: put its pictures into one")


def _inside(folder: Path, picture: str, name: str, file: Path, number: int) -> Path:
    path = Path(picture)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(f"dataset {name}: entry {number} of {file} names a picture out of its folder")
    if not (folder / path).is_file():
        raise DataError(f"dataset {name}: picture {path} of entry {number} of {file.name} is not in {folder}")
    return folder / path


def _box(entry: Mapping[str, Any], name: str, file: Path, number: int) -> Box | None:
    sides = [entry.get(key) for key in _BOX]
    if sides == [None] * 4:
        return None
    if not all(type(side) is int and 0 <= side < 1 << 20 for side in sides):
        raise DataError(f"dataset {name}: entry {number} of {file} has the box {sides}")
    left, top, width, height = sides
    assert left is not None and top is not None and width is not None and height is not None
    return left, top, width, height


def _groups(entries: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    for key, named in (("relation", "relation_name"), ("attribute", "attributes")):
        if not all(named in entry for entry in entries):
            continue
        values = [repr(entry[named]) for entry in entries]
        number = {value: i for i, value in enumerate(sorted(set(values)))}
        groups = {key: torch.tensor([number[value] for value in values])}
        if key == "relation":
            groups["symmetric"] = torch.tensor(
                [int(entry[named] in SYMMETRIC_RELATIONS) for entry in entries]
            )
        return groups
    return {}
