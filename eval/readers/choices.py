"""Reader of SugarCrepe and ARO: a JSON file with a right and a wrong caption per image, and a folder of images.

SugarCrepe (Hsieh et al. 2023, arXiv 2306.14610) is an object of ``{"filename", "caption", "negative_caption"}``
with images of COCO val2017. ARO's relation and attribution sets (Yuksekgonul et al. 2023, arXiv 2210.01936) are
lists of ``{"image_path", "true_caption", "false_caption"}`` with a box ``"bbox_x", "bbox_y", "bbox_w", "bbox_h"``,
which is cropped as in ARO's own code. ``relation_name`` or ``attributes`` become the metadata ``"relation"`` or
``"attribute"``, numbered in sorted order; ``"symmetric"`` is 1 for relations that ARO's authors leave out of the
mean.
"""

from pathlib import Path

import torch
from torch import Tensor

from clipkit.errors import DataError
from eval.datasets.dataset import EvalDataset
from eval.readers.files import Box, FileImages, checked_set, read_text_file
from eval.results.records import parse_json

__all__ = ["SYMMETRIC_RELATIONS", "open_caption_choices"]

# The 157 relations of ARO's Visual Genome set for which both captions may be right; the authors' notebook excludes
# them from the published mean (github.com/mertyg/vision-language-models-are-bows).
_SYMMETRIC = """\
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


SYMMETRIC_RELATIONS = frozenset(" ".join(_SYMMETRIC.split()).split("; "))

_FOLDERS = ("images", "val2017", "../images", "../val2017", "../coco/val2017", "../../coco/val2017")
_MAX_BYTES = 256 << 20
_FORMS = (  # image, right caption, wrong caption
    ("filename", "caption", "negative_caption"),
    ("image_path", "true_caption", "false_caption"),
    ("image", "caption", "negative_caption"),
)
_BOX = ("bbox_x", "bbox_y", "bbox_w", "bbox_h")


def open_caption_choices(file: Path, name: str) -> EvalDataset:
    """Open a JSON file of SugarCrepe or ARO, whose images are in ``images`` or ``val2017`` next to it.

    Raises:
        DataError: an entry is incomplete, or an image is missing.
    """
    try:
        found = parse_json(read_text_file(file, limit=_MAX_BYTES) or "")
    except ValueError as error:
        raise DataError(f"dataset {name}: {file} does not parse: {error}") from error
    entries = list(found.values()) if isinstance(found, dict) else found
    if not isinstance(entries, list) or not entries or not all(isinstance(one, dict) for one in entries):
        raise DataError(f"dataset {name}: {file} is neither a list nor an object of entries")
    form = next((form for form in _FORMS if all(key in entries[0] for key in form)), None)
    if form is None:
        known = "; ".join(", ".join(one) for one in _FORMS)
        raise DataError(f"dataset {name}: the entries of {file} have unknown keys; known: {known}")
    folders = [file.parent / inside for inside in _FOLDERS]
    folder = next(filter(Path.is_dir, folders), None)
    if folder is None:
        raise DataError(f"dataset {name}: no folder images or val2017 next to {file} with its images")
    folder = folder.resolve()
    files: list[Path] = []
    boxes: list[Box | None] = []
    choices: list[tuple[str, ...]] = []
    for number, entry in enumerate(entries):
        texts = [entry.get(key) for key in form]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise DataError(f"dataset {name}: entry {number} of {file} lacks one of {', '.join(form)}")
        path = Path(texts[0])
        if path.is_absolute() or ".." in path.parts:
            raise DataError(f"dataset {name}: entry {number} of {file} names an image outside its folder")
        if not (folder / path).is_file():
            raise DataError(
                f"dataset {name}: image {path} of entry {number} of {file.name} is not in {folder}"
            )
        box = tuple(entry.get(key) for key in _BOX)
        if box != (None,) * 4 and not all(type(side) is int and 0 <= side < 1 << 20 for side in box):
            raise DataError(f"dataset {name}: entry {number} of {file} has the box {list(box)}")
        files.append(folder / path)
        boxes.append(None if box[0] is None else (box[0], box[1], box[2], box[3]))
        choices.append(tuple(text.strip() for text in texts[1:]))
    metadata: dict[str, Tensor] = {}
    for key, named in (("relation", "relation_name"), ("attribute", "attributes")):
        if not metadata and all(named in entry for entry in entries):
            values = [repr(entry[named]) for entry in entries]
            numbers = {value: i for i, value in enumerate(sorted(set(values)))}
            metadata[key] = torch.tensor([numbers[value] for value in values])
            if key == "relation":
                symmetric = [int(entry[named] in SYMMETRIC_RELATIONS) for entry in entries]
                metadata["symmetric"] = torch.tensor(symmetric)
    return checked_set(
        EvalDataset(
            name=name,
            images=FileImages(folder, files, boxes),
            tasks=("compositional",),
            choices=tuple(choices),
            metadata=metadata,
        )
    )
