"""Reader of SugarCrepe and ARO: a JSON file with a right and a wrong caption per image, and a folder of images.

SugarCrepe (Hsieh et al. 2023, arXiv 2306.14610) is an object of ``{"filename", "caption", "negative_caption"}``
with images of COCO val2017. ARO's relation and attribution sets (Yuksekgonul et al. 2023, arXiv 2210.01936) are
lists of ``{"image_path", "true_caption", "false_caption"}`` with a box ``"bbox_x", "bbox_y", "bbox_w", "bbox_h"``,
which is cropped as in ARO's own code. ``relation_name`` or ``attributes`` become the metadata ``"relation"`` or
``"attribute"``, numbered in sorted order; ``"symmetric"`` is 1 for relations that ARO's authors leave out of the
mean.
"""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.samples import is_deep, pillow_errors, refuse_deep_alpha, to_16_bit
from eval.datasets.dataset import EvalDataset, SampleImages
from eval.readers.files import FileSamples, check_dataset, encode_png, read_json_file

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
# left, top, width, height in pixels
Box = tuple[int, int, int, int]
Side = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]


class _Entry(msgspec.Struct, kw_only=True):
    """An entry of either dataset; the image and the captions have one of several names."""

    filename: str = ""
    image_path: str = ""
    image: str = ""
    caption: str = ""
    true_caption: str = ""
    negative_caption: str = ""
    false_caption: str = ""
    relation_name: str | None = None
    attributes: list[str] | None = None
    bbox_x: Side | None = None
    bbox_y: Side | None = None
    bbox_w: Side | None = None
    bbox_h: Side | None = None


class CroppedSamples(FileSamples):
    """Boxes of image files as lossless PNG; None for the unchanged file. See ``FileSamples``."""

    def __init__(self, root: Path, paths: Sequence[Path], boxes: Sequence[Box | None]) -> None:
        super().__init__(root, paths)
        self.boxes = tuple(boxes)

    def key(self, i: int) -> str:
        box = self.boxes[i]
        return super().key(i) if box is None else f"{super().key(i)} {list(box)}"

    def read(self, i: int, member: str) -> bytes:
        from PIL import Image

        content = super().read(i, member)
        box = self.boxes[i]
        if box is None:
            return content
        left, top, width, height = box
        with pillow_errors(), Image.open(BytesIO(content)) as image:
            if width < 1 or height < 1 or left >= image.width or top >= image.height:
                raise DataError(f"its box {list(box)} is outside its {image.width} x {image.height} pixels")
            refuse_deep_alpha(image)
            image.load()
            source: Image.Image | None = image.convert("RGB")
            if is_deep(image):
                source = to_16_bit(image)
            if source is None:
                raise DataError("a box cannot be cropped from 32-bit, signed or float grayscale")
            return encode_png(source.crop((left, top, left + width, top + height)))


def open_caption_choices(file: Path, name: str) -> EvalDataset:
    """Open a JSON file of SugarCrepe or ARO, whose images are in ``images`` or ``val2017`` next to it."""
    kind: Any = list[_Entry] | dict[str, _Entry]
    content: list[_Entry] | dict[str, _Entry] = read_json_file(file, kind) or []
    entries = list(content.values()) if isinstance(content, dict) else content
    if not entries:
        raise DataError(f"dataset {name}: {file} has no entries")
    folder = next(filter(Path.is_dir, map(file.parent.joinpath, _FOLDERS)), None)
    if folder is None:
        raise DataError(f"dataset {name}: no folder images or val2017 next to {file} with its images")
    folder = folder.resolve()
    files: list[Path] = []
    boxes: list[Box | None] = []
    choices: list[tuple[str, ...]] = []
    for i, entry in enumerate(entries):
        image = entry.filename or entry.image_path or entry.image
        right = (entry.caption or entry.true_caption).strip()
        wrong = (entry.negative_caption or entry.false_caption).strip()
        if not image or not right or not wrong:
            raise DataError(f"dataset {name}: entry {i} of {file} lacks an image, a right or a wrong caption")
        path = Path(image)
        if path.is_absolute() or ".." in path.parts:
            raise DataError(f"dataset {name}: entry {i} of {file} names an image outside its folder")
        sides = (entry.bbox_x, entry.bbox_y, entry.bbox_w, entry.bbox_h)
        box = None
        if None not in sides:
            box = cast(Box, sides)
        elif any(side is not None for side in sides):
            raise DataError(f"dataset {name}: entry {i} of {file} has the box {list(sides)}")
        files.append(folder / path)
        boxes.append(box)
        choices.append((right, wrong))
    metadata: dict[str, Tensor] = {}
    relations = [entry.relation_name for entry in entries]
    if None not in relations:
        metadata["relation"] = _number_values(relations)
        metadata["symmetric"] = torch.tensor([int(name in SYMMETRIC_RELATIONS) for name in relations])
    attributes = [entry.attributes for entry in entries]
    if not metadata and None not in attributes:
        metadata["attribute"] = _number_values(attributes)
    samples = CroppedSamples(folder, files, boxes)
    return check_dataset(
        EvalDataset(
            name=name,
            images=SampleImages(samples, samples.files),
            tasks=("compositional",),
            choices=tuple(choices),
            metadata=metadata,
        )
    )


def _number_values(values: Sequence[object]) -> Tensor:
    """Number values in sorted order, (N,) int64."""
    texts = list(map(repr, values))
    numbers = {text: i for i, text in enumerate(sorted(set(texts)))}
    return torch.tensor([numbers[text] for text in texts])
