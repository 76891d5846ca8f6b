"""Reader of ImageNet-Vid-Robust and YTBB-Robust: video frames, and the similar frames near each of them.

(Shankar et al. 2021, "Do Image Classifiers Generalize Across Time?", https://arxiv.org/abs/1906.02168.) An anchor
frame is correct if one of its labels is predicted for it (pm-0), or also for all similar frames within 10 frames of
it (pm-10). Files, as the authors publish them:

- ImageNet-Vid-Robust: in the folder or ``metadata``, ``pmsets.json`` with the nearby frames of each anchor and
  ``labels.json`` with the labels of each frame, both by path; in the folder or ``misc``,
  ``imagenet_vid_class_index.json`` with ``[WordNet id, name]`` by label.
- YTBB-Robust: ``anchor_labels.json`` and ``pmk_labels.json``, the reviews of anchors and of pairs of frames;
  ``ytbb_robustness_test_anchors_full.csv`` and ``ytbb_class_index.json``, the original labels and their names;
  frames as ``VIDEO_MILLISECONDS/frame-NUMBER.jpg``.
"""

import csv
import io
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Annotated, TypeVar

import msgspec
import torch

from clipkit.errors import DataError
from eval.datasets.dataset import EvalDataset
from eval.readers.files import check_dataset, file_images, make_multi_hot, read_json_file, read_text_file

_MAX_BYTES = 256 << 20
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
    """Return the path and the content of a JSON file."""
    for part in ("", *inside):
        path = folder / part / name
        content = read_json_file(path, kind)
        if content is not None:
            return path, content
    raise DataError(f"{folder} lacks {name}")


def _read_imagenet_vid(folder: Path) -> tuple[list[str], Frames]:
    """Read the class names and frames of ImageNet-Vid-Robust."""
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
    text = read_text_file(path, limit=_MAX_BYTES)
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
