"""SugarCrepe and ARO: a JSON file with a right and a wrong caption of each image, and a folder of the images.

SugarCrepe (Hsieh et al. 2023, arXiv 2306.14610) is an object of ``{"filename", "caption", "negative_caption"}``
with images of COCO val2017. ARO's relation and attribution sets (Yuksekgonul et al. 2023, arXiv 2210.01936) are
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
from eval.datasets.dataset import DEFAULT_TEMPLATES, TEST, EvalDataset, NoSplit
from eval.readers.files import Box, FileImages, checked_set, read_text_file
from eval.results.records import parse_json

__all__ = ["SYMMETRIC_RELATIONS", "open_caption_choices"]


# --------------------------------------------------------------------------------------------------------------
# Relations of ARO's Visual Genome set whose two captions its authors do not hold to differ.
#
# With both captions right, or neither clearly wrong, such a relation says nothing of a model: the authors'
# notebook leaves these 157 names out of the mean that they publish (github.com/mertyg/vision-language-models-
# are-bows).

_NAMES = """\
adjusting; around; attached to; beside; between; bigger than; biting; boarding; brushing; by; chewing;
cleaning; climbing; close to; coming from; coming out of; contain; crossing; dragging; draped over;
drinking; drinking from; driving; driving down; driving on; eating from; eating in; enclosing; exiting;
facing; filled with; floating in; floating on; flying; flying above; flying in; flying over; flying
through; full of; going down; going into; going through; grazing in; growing in; growing on; guiding;
hanging from; hanging in; hanging off; hanging over; higher than; holding onto; hugging; in between;
jumping off; jumping on; jumping over; kept in; larger than; leading; leaning over; leaving; licking;
longer than; looking in; looking into; looking out; looking over; looking through; lying next to; lying
on top of; making; mixed with; mounted on; moving; near; next to; of; on the back of; on the edge of; on
the front of; on the other side of; on the side of; opening; painted on; parked at; parked beside;
parked by; parked in; parked in front of; parked near; parked next to; perched on; petting; piled on;
playing; playing in; playing on; playing with; pouring; reaching for; reading; reflected on; riding on;
running in; running on; running through; seen through; sitting behind; sitting beside; sitting by;
sitting in front of; sitting near; sitting next to; sitting under; skiing down; skiing on; sleeping in;
sleeping on; smiling at; sniffing; splashing; sprinkled on; stacked on; standing against; standing
around; standing behind; standing beside; standing in front of; standing near; standing next to; staring
at; stuck in; surrounding; swimming in; swinging; talking to; topped with; touching; traveling down;
traveling on; tying; typing on; underneath; wading in; waiting for; walking across; walking by; walking
down; walking next to; walking through; with; working in; working on; worn on; wrapped around; wrapped
in
"""

SYMMETRIC_RELATIONS = frozenset(" ".join(_NAMES.split()).split("; "))


# --------------------------------------------------------------------------------------------------------------

_FOLDERS = ("images", "val2017", "../images", "../val2017", "../coco/val2017", "../../coco/val2017")
_MAX_BYTES = 256 << 20
_FORMS = (  # image, right caption, wrong caption
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
        images: the folder of its images; looked for beside the file if None.

    Raises:
        DataError: an entry lacks something, or an image is missing.
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
    pictures = FileImages(folder, files, boxes)
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
        found = parse_json(read_text_file(file, limit=_MAX_BYTES) or "")
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
            raise DataError(f"dataset {name}: there is no folder {folder} for its images")
        return folder
    for inside in _FOLDERS:
        if (folder := file.parent / inside).is_dir():
            return folder.resolve()
    raise DataError(f"dataset {name}: no folder images or val2017 beside {file}: put its images into one")


def _inside(folder: Path, picture: str, name: str, file: Path, number: int) -> Path:
    path = Path(picture)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(f"dataset {name}: entry {number} of {file} names an image out of its folder")
    if not (folder / path).is_file():
        raise DataError(f"dataset {name}: image {path} of entry {number} of {file.name} is not in {folder}")
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
