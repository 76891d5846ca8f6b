"""Readers of benchmarks in the files of their authors.

- **SugarCrepe** (Hsieh et al. 2023, arXiv 2306.14610): a JSON object of ``{"filename", "caption",
  "negative_caption"}``, with images of COCO val2017. **ARO**'s relation and attribution sets (Yuksekgonul et
  al. 2023, arXiv 2210.01936): lists of ``{"image_path", "true_caption", "false_caption"}`` with a box
  ``"bbox_x", "bbox_y", "bbox_w", "bbox_h"``, which is cropped as in ARO's own code. ``relation_name`` or
  ``attributes`` become the metadata ``"relation"`` or ``"attribute"``, numbered in sorted order;
  ``"symmetric"`` is 1 for relations that ARO's authors leave out of the mean.
- **Crossmodal-3600** (Thapliyal et al. 2022): ``captions.jsonl``, in each line ``image/key`` and for each
  language ``{"caption": [...]}``; ``images/KEY.jpg``.
- **XTD** (Aggarwal and Kale 2020): ``test_image_names.txt`` and, with the same lines,
  ``test_1kcaptions_LANGUAGE.txt`` in the folder itself or in ``XTD10``, ``MIC`` and ``STAIR``; or
  ``LANGUAGE.txt`` for XTD200; images in ``images``.
- **Babel-ImageNet** (Geigle et al. 2023): ``babel_imagenet.json``, by language class numbers of ImageNet and
  their names, and ``nllb_dist13b_prompts.json``, by language templates with ``{}``. Any dataset with classes
  may have ``names.json`` next to its shards: by language the names in label order.
- **Flickr8k-Expert** and **Flickr8k-CF** (Hodosh et al. 2013): ``ExpertAnnotations.txt``, in each line an
  image, a caption, and ratings by three experts from 1 to 4; ``CrowdFlowerAnnotations.txt``, with the fraction of
  yes and the numbers of yes and no. ``IMAGE#2`` is the third caption of an image in ``Flickr8k.token.txt`` or
  ``captions.txt`` beside it.
- **ImageNet-Vid-Robust** and **YTBB-Robust** (Shankar et al. 2021, https://arxiv.org/abs/1906.02168): video
  frames, and the similar frames near each of them. An anchor frame is correct if one of its labels is predicted
  for it (pm-0), or also for all similar frames within 10 frames of it (pm-10). The former has, in the folder or
  ``metadata``, ``pmsets.json`` with the nearby frames of each anchor and ``labels.json`` with the labels of
  each frame, both by path; in the folder or ``misc``, ``imagenet_vid_class_index.json`` with ``[WordNet id,
  name]`` by label. The latter has ``anchor_labels.json`` and ``pmk_labels.json``, the reviews of anchors and of
  pairs of frames; ``ytbb_robustness_test_anchors_full.csv`` and ``ytbb_class_index.json``, the original labels
  and their names; frames as ``VIDEO_MILLISECONDS/frame-NUMBER.jpg``.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar, cast

import msgspec
import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.samples import Table, is_deep, join_place, pillow_errors, refuse_deep_alpha, to_16_bit
from eval.datasets.dataset import (
    EvalDataset,
    FileSamples,
    Language,
    SampleImages,
    check_dataset,
    encode_png,
    file_images,
    hash_values,
    make_multi_hot,
    read_json_file,
    read_lines,
    read_text_file,
)
from eval.results.records import parse_json

# --------------------------------------------------------------------------------------------------------------
# SugarCrepe and ARO: a right and a wrong caption for each image.

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

_IMAGE_FOLDERS = ("images", "val2017", "../images", "../val2017", "../coco/val2017", "../../coco/val2017")
# left, top, width, height in pixels
Box = tuple[int, int, int, int]
Side = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]


class _ChoiceEntry(msgspec.Struct, kw_only=True):
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
    kind: Any = list[_ChoiceEntry] | dict[str, _ChoiceEntry]
    content: list[_ChoiceEntry] | dict[str, _ChoiceEntry] = read_json_file(file, kind) or []
    entries = list(content.values()) if isinstance(content, dict) else content
    if not entries:
        raise DataError(f"dataset {name}: {file} has no entries")
    folder = next(filter(Path.is_dir, map(file.parent.joinpath, _IMAGE_FOLDERS)), None)
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
    texts = list(map(repr, values))
    numbers = {text: i for i, text in enumerate(sorted(set(texts)))}
    return torch.tensor([numbers[text] for text in texts])


# --------------------------------------------------------------------------------------------------------------
# Human judgments of Flickr8k.

_TABLES = ("Flickr8k.token.txt", "captions.txt")
# image, image and index of the caption, then three ratings, or the fraction of yes and the numbers of yes and no
JUDGMENTS = {
    "ExpertAnnotations.txt": re.compile(r"([^\t]+)\t([^\t]+)#(\d+)\t([1-4])\t([1-4])\t([1-4])"),
    "CrowdFlowerAnnotations.txt": re.compile(r"([^\t]+)\t([^\t]+)#(\d+)\t(0(?:\.\d+)?|1(?:\.0+)?)\t\d+\t\d+"),
}


def list_judgments(source: str) -> list[str]:
    """Return the files of judgments in a folder, or a source that has none, unchanged."""
    return [str(file) for file in map(Path(source).joinpath, JUDGMENTS) if file.is_file()] or [source]


def open_judgments(file: Path) -> EvalDataset:
    """Open a file of human judgments, named as its card.

    Of experts, pairs with a caption of the image itself are left out, as in CLIPScore (Hessel et al. 2021).
    """
    name = f"flickr8k-{file.name.removesuffix('Annotations.txt')}"
    path = next(filter(Path.is_file, map(file.with_name, _TABLES)), None)
    if path is None:
        raise DataError(f"dataset {name}: no {' or '.join(_TABLES)} with the captions next to {file}")
    table = Table(path, image_column=None, caption_column=None)
    captions: dict[str, dict[int, str]] = {}  # by image and number
    for row in table:
        if row.cause:
            raise DataError(f"dataset {name}: {path} row {row.number:,}: {row.cause}")
        numbered = captions.setdefault(str(row.path), {})
        i = len(numbered) if row.caption_number is None else row.caption_number
        if i in numbered:
            raise DataError(f"dataset {name}: {path} row {row.number:,}: {row.path}#{i} occurs twice")
        numbered[i] = " ".join(str(row.caption).split())
    judged: dict[str, dict[str, tuple[float, ...]]] = {}  # by image, the ratings of each caption
    for line_number, line in enumerate(read_lines(file), start=1):
        match = JUDGMENTS[file.name].fullmatch(line)
        if match is None:
            raise DataError(f"dataset {name}: {file} line {line_number:,} is not as published: {line[:80]!r}")
        image, other, number, *ratings = match.groups()
        caption = captions.get(other, {}).get(int(number))
        if image not in captions or caption is None:
            missing = f"caption {other}#{number}" if image in captions else f"captions of {image}"
            raise DataError(f"dataset {name}: {file} line {line_number:,}: {path} has no {missing}")
        if len(ratings) == 1 or caption not in captions[image].values():
            image_ratings = judged.setdefault(image, {})
            image_ratings[caption] = (*image_ratings.get(caption, ()), *map(float, ratings))
    dataset = EvalDataset(
        name=name,
        images=file_images(file.parent, list(map(table.find_image, judged))),
        tasks=("judgments",),
        captions=tuple(map(tuple, judged.values())),
        ratings=tuple(tuple(image_ratings.values()) for image_ratings in judged.values()),
    )
    revision = hash_values(dataset.images.fingerprint(), dataset.captions, dataset.ratings)
    return check_dataset(replace(dataset, revision=revision))


# --------------------------------------------------------------------------------------------------------------
# Texts in several languages.

_MAX_TEXT_BYTES = 1 << 30
_CAPTIONS = "captions.jsonl"
_IMAGES = "test_image_names.txt"
_PREFIX = "test_1kcaptions_"
_TEXT_FOLDERS = (".", "XTD10", "MIC", "STAIR")


def is_multilingual(folder: Path) -> bool:
    """Return whether a folder has the captions of Crossmodal-3600 or XTD."""
    if any((folder / part / _IMAGES).is_file() for part in _TEXT_FOLDERS):
        return True
    if not (folder / _CAPTIONS).is_file():
        return False
    with (folder / _CAPTIONS).open("rb") as file:
        return b'"image/key"' in file.readline(1 << 20)


def open_multilingual(folder: Path, name: str) -> EvalDataset:
    """Open a folder of Crossmodal-3600 or XTD; its plain captions are the English or the first ones."""
    keyed = (folder / _CAPTIONS).is_file()
    read_captions = _read_json_lines if keyed else _read_text_files
    files, captions = read_captions(folder, name)
    if not files or not captions:
        raise DataError(f"dataset {name}: no captions in {folder}")
    languages: dict[str, Language] = {}
    for language, texts in captions.items():
        if () in texts:
            file = files[texts.index(())]
            raise DataError(f"dataset {name}: image {file} has no caption in language {language}")
        languages[language] = Language(captions=texts)
    images = folder / "images" if (folder / "images").is_dir() else folder
    return check_dataset(
        EvalDataset(
            name=name,
            images=file_images(folder, list(map(images.joinpath, files))),
            tasks=("retrieval",),
            captions=captions.get("en") or next(iter(captions.values())),
            languages=languages,
        )
    )


# by language, the captions of each image
_Captions = dict[str, tuple[tuple[str, ...], ...]]


def _read_json_lines(folder: Path, name: str) -> tuple[list[str], _Captions]:
    file = folder / _CAPTIONS
    images: list[str] = []
    captions: dict[str, list[tuple[str, ...]]] = {}
    text = read_text_file(file, limit=_MAX_TEXT_BYTES) or ""
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        texts: dict[str, list[str]] = {}
        try:
            entry = parse_json(line)
            for language, value in entry.items():
                if isinstance(value, dict):
                    texts[language] = list(filter(None, map(str.strip, value["caption"])))
            images.append(f"{entry['image/key']}.jpg")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"dataset {name}: {file} line {line_number}: expected image/key and a list of captions for each "
                "language"
            ) from error
        if len(images) == 1:
            captions = {language: [] for language in texts}
        if texts.keys() != captions.keys():
            different = min(texts.keys() ^ captions.keys())
            raise DataError(
                f"dataset {name}: {file} line {line_number} differs from the first line in language {different}"
            )
        for language in texts:
            captions[language].append(tuple(texts[language]))
    return images, {language: tuple(texts) for language, texts in captions.items()}


def _read_text_files(folder: Path, name: str) -> tuple[list[str], _Captions]:
    files: list[str] | None = None
    paths: list[Path] = []
    for inside in _TEXT_FOLDERS:
        paths += (folder / inside).glob("*.txt")
        if files is None and (folder / inside / _IMAGES).is_file():
            files = read_lines(folder / inside / _IMAGES)
    assert files is not None
    paths = [path for path in paths if path.name != _IMAGES]
    paths = [path for path in paths if path.stem.startswith(_PREFIX)] or paths
    captions: _Captions = {}
    for path in sorted(paths):
        lines = read_lines(path)
        if len(lines) != len(files):
            raise DataError(
                f"dataset {name}: {path} has {len(lines):,} lines, {_IMAGES} has {len(files):,}: expected one "
                "caption per image"
            )
        captions[path.stem.removeprefix(_PREFIX)] = tuple((line,) if line else () for line in lines)
    return files, captions


def read_named_languages(folder: Path | str, dataset: EvalDataset) -> Mapping[str, Language]:
    """Read class names by language from ``names.json``; {} if there is no file; prompts are the dataset's."""
    file = join_place(folder, "names.json")
    languages = {}
    for language, names in (read_json_file(file, dict[str, list[str]]) or {}).items():
        if len(names) != len(dataset.class_names):
            raise DataError(f"{file}: {language}: expected a list of {len(dataset.class_names)} class names")
        languages[language] = Language(class_names=tuple(names), templates=dataset.templates)
    return languages


def read_babel_languages(folder: Path | str, labels: Sequence[int]) -> Mapping[str, Language]:
    """Read Babel-ImageNet's class names and prompts.

    Args:
        folder: the folder of the two files.
        labels: by class of ImageNet, its label in the images.
    """
    names_file = join_place(folder, "babel_imagenet.json")
    names = read_json_file(names_file, dict[str, tuple[list[int], list[str]]])
    prompts = read_json_file(join_place(folder, "nllb_dist13b_prompts.json"), dict[str, list[str]])
    if names is None or prompts is None:
        raise DataError(f"{folder}: expected babel_imagenet.json and nllb_dist13b_prompts.json")
    languages = {}
    for language, (classes, class_names) in names.items():
        valid = set(classes) & set(range(len(labels)))
        if not class_names or not len(valid) == len(classes) == len(class_names):
            raise DataError(f"{names_file}: {language}: expected different class numbers and their names")
        templates = prompts.get(language, ["{}"])  # a few languages have no prompts
        if not templates:
            raise DataError(f"{folder}: prompts of {language}: expected a list of templates")
        languages[language.lower()] = Language(
            class_names=tuple(class_names),
            templates=tuple(template.replace("{}", "{c}") for template in templates),
            labels=tuple(labels[i] for i in classes),
        )
    return languages


# --------------------------------------------------------------------------------------------------------------
# Video frames.

_MAX_TABLE_BYTES = 256 << 20
_SETS = "pmsets.json"
_REVIEWS = "anchor_labels.json"
_TABLE = "ytbb_robustness_test_anchors_full.csv"
_UNLIKE = frozenset(
    ("dissimilar", "problematic", "incorrect", "dont know", "deformation", "background-change",
     "occlusion-increased", "blur-increase", "bad-anchor")
)  # fmt: skip
# by anchor: its labels, and those of nearby frames
Frames = dict[str, tuple[list[int], dict[str, list[int]]]]
Name = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Labels = Annotated[list[Count], msgspec.Meta(min_length=1)]
Content = TypeVar("Content")


class _Review(msgspec.Struct):
    key: Name
    labels: list[Count]


class _Reviews(msgspec.Struct):
    annotations: list[_Review]
    labels: list[Name]


def is_video_frames(folder: Path) -> bool:
    """Return whether a folder has the annotations of ImageNet-Vid-Robust or YTBB-Robust."""
    return any((folder / file).is_file() for file in (_SETS, f"metadata/{_SETS}", _REVIEWS))


def open_video_frames(folder: Path, name: str) -> EvalDataset:
    """Open the frames of ImageNet-Vid-Robust or YTBB-Robust.

    The metadata column ``anchor`` is the index of the anchor frame to which an image belongs; an anchor belongs to
    itself.
    """
    read_frames = _read_ytbb if (folder / _REVIEWS).is_file() else _read_imagenet_vid
    names, frames = read_frames(folder)
    files: list[Path] = []
    labels: list[list[int]] = []
    anchors: list[int] = []
    for anchor, (anchor_labels, nearby) in frames.items():
        first = len(files)
        for file, label in {anchor: anchor_labels, **nearby}.items():
            path = PurePosixPath(file)
            if path.is_absolute() or ".." in path.parts or "\0" in file or (folder / path).is_dir():
                raise DataError(
                    f"dataset {name}: annotations name {file!r}, which is not a frame in {folder}"
                )
            if max(label) >= len(names):
                raise DataError(
                    f"dataset {name}: frame {file} has label {max(label)} of {len(names)} classes"
                )
            files.append(folder / path)
            labels.append(label)
            anchors.append(first)
    if not files:
        raise DataError(f"dataset {name}: no anchor frames in {folder}")
    return check_dataset(
        EvalDataset(
            name=name,
            images=file_images(folder, files),
            tasks=("zero-shot",),
            class_names=tuple(names),
            templates=("a photo of a {c}.",),
            labels=make_multi_hot(labels, len(names)),
            metadata={"anchor": torch.tensor(anchors)},
        )
    )


def _read_annotations(kind: type[Content], folder: Path, name: str, *inside: str) -> tuple[Path, Content]:
    for part in ("", *inside):
        path = folder / part / name
        content = read_json_file(path, kind)
        if content is not None:
            return path, content
    raise DataError(f"{folder} lacks {name}")


def _read_imagenet_vid(folder: Path) -> tuple[list[str], Frames]:
    path, sets = _read_annotations(dict[Name, list[Name]], folder, _SETS, "metadata")
    labels_path, labels = _read_annotations(dict[str, Labels], folder, "labels.json", "metadata")
    missing = sorted({*sets, *chain.from_iterable(sets.values())} - labels.keys())
    if missing:
        raise DataError(f"{labels_path} has no labels of {missing[0]!r}, a frame of {path.name}")
    _, classes = _read_annotations(
        dict[str, tuple[Name, Name]], folder, "imagenet_vid_class_index.json", "misc"
    )
    names = [name.replace("_", " ") for _, name in _sort_classes(classes)]
    frames: Frames = {}
    for anchor, nearby in sets.items():
        frames[anchor] = (labels[anchor], {frame: labels[frame] for frame in nearby if frame != anchor})
    return names, frames


def _read_ytbb(folder: Path) -> tuple[list[str], Frames]:
    """Read the class names and reviewed frames of YTBB-Robust; "none" is not a class."""
    _, classes = _read_annotations(dict[str, Name], folder, "ytbb_class_index.json")
    all_names = _sort_classes(classes)
    names = [name for name in all_names if name != "none"]
    path = folder / _TABLE
    text = read_text_file(path, limit=_MAX_TABLE_BYTES)
    if text is None:
        raise DataError(f"{folder} lacks {_TABLE}")
    first_names = {}
    try:
        for row in csv.DictReader(io.StringIO(text, newline="")):
            # the table numbers its last two classes in the other order than the list of names
            label = {22: 23, 23: 22}.get(int(row["label"]), int(row["label"]))
            first_names[f"{row['ytid']}_{row['time_ms']}"] = all_names[label]
    except (csv.Error, KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not as published: expected ytid,time_ms,label in each row") from error
    pairs: dict[tuple[str, str], set[str]] = {}
    bad: set[str] = set()
    for pair, marks in _read_reviews(folder, "pmk_labels.json").items():
        anchor, frame = map(_shorten_path, pair.partition(",")[::2])
        pairs[anchor, frame] = marks
        if "bad-anchor" in marks:
            bad.add(anchor)
    frames: Frames = {}
    for file, marks in _read_reviews(folder, _REVIEWS).items():
        anchor = _shorten_path(file)
        if "good" in marks and not marks & {"bad", "unsure"} and anchor not in bad:
            labels = marks | {first_names.get(anchor.split("/")[0], "")}
            if labels.isdisjoint(names):
                raise DataError(f"{path} has no label of the anchor frame {anchor}")
            frames[anchor] = ([i for i, name in enumerate(names) if name in labels], {})
    for (anchor, frame), marks in pairs.items():
        near = anchor in frames and 0 < abs(_frame_number(frame) - _frame_number(anchor)) <= 10
        if near and "similar" in marks and not marks & _UNLIKE:
            frames[anchor][1][frame] = frames[anchor][0]
    return names, frames


def _sort_classes(classes: dict[str, Content]) -> list[Content]:
    if sorted(classes) != sorted(map(str, range(len(classes)))):
        raise DataError(f"expected classes that are numbered from 0, not {', '.join(sorted(classes)[:5])}")
    return [classes[str(label)] for label in range(len(classes))]


def _read_reviews(folder: Path, name: str) -> dict[str, set[str]]:
    """Return the marks of each key; the last review of a key counts."""
    path, reviews = _read_annotations(_Reviews, folder, name)
    marks = {}
    for review in reviews.annotations:
        if max(review.labels, default=0) >= len(reviews.labels):
            raise DataError(f"{path}: {review.key} has mark {max(review.labels)} of {len(reviews.labels)}")
        marks[review.key] = {reviews.labels[i] for i in review.labels}
    return marks


def _shorten_path(path: str) -> str:
    return "/".join(PurePosixPath(path).parts[-2:])


def _frame_number(frame: str) -> int:
    digits = PurePosixPath(frame).stem.removeprefix("frame-")
    if not (digits.isdecimal() and len(digits) < 10):
        raise DataError(f"frame {frame[:60]!r} has no number: expected VIDEO_MILLISECONDS/frame-NUMBER.jpg")
    return int(digits)
