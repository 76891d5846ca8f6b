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
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from clipkit.errors import DataError
from eval.datasets.dataset import TEST, EvalDataset, NoSplit
from eval.readers.files import FileImages, checked_set, read_text_file
from eval.results.records import parse_json

__all__ = ["is_video_frames", "open_video_frames"]

_MAX_BYTES = 256 << 20
_SETS, _REVIEWS = "pmsets.json", "anchor_labels.json"
_UNLIKE = frozenset(
    ("dissimilar", "problematic", "incorrect", "dont know", "deformation", "background-change",
     "occlusion-increased", "blur-increase", "bad-anchor")
)  # fmt: skip
Frames = dict[
    str, tuple[list[int], dict[str, list[int]]]
]  # by anchor: its labels, and those of nearby frames


def is_video_frames(folder: Path) -> bool:
    """Return whether a folder has the annotations of ImageNet-Vid-Robust or YTBB-Robust."""
    return any((folder / one).is_file() for one in (_SETS, f"metadata/{_SETS}", _REVIEWS))


def open_video_frames(folder: Path, name: str, *, split: str = TEST) -> EvalDataset:
    """Open the frames of ImageNet-Vid-Robust or YTBB-Robust.

    The metadata column ``anchor`` is the number of the anchor frame to which an image belongs; an anchor's is its
    own.

    Raises:
        DataError: an image is missing, or the annotations are incomplete.
    """
    if split != TEST:
        raise NoSplit(f"dataset {name} has no split {split!r}: all of {folder} is for testing")
    try:
        names, frames = (_of_reviews if (folder / _REVIEWS).is_file() else _of_sets)(folder)
        files: list[Path] = []
        labels: list[list[int]] = []
        anchors: list[int] = []
        for anchor, (own, nearby) in frames.items():
            first = len(files)
            for file, label in {anchor: own, **nearby}.items():
                path = PurePosixPath(file)
                if path.is_absolute() or ".." in path.parts:
                    raise DataError(f"dataset {name}: the frame {file!r} is outside of {folder}")
                files.append(folder / path)
                labels.append(label)
                anchors.append(first)
        if not files:
            raise DataError(f"dataset {name}: no anchor frames in {folder}")
        hot = torch.zeros(len(files), len(names), dtype=torch.bool)
        for number, own in enumerate(labels):
            if not own or min(own) < 0:
                raise DataError(f"dataset {name}: the frame {files[number]} has no label")
            hot[number, own] = True
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"dataset {name}: annotations in {folder} are incomplete: {error!r}") from error
    images = FileImages(folder, files)
    return checked_set(
        EvalDataset(
            name=name,
            images=images,
            revision=images.fingerprint(),
            tasks=("zero-shot",),
            class_names=tuple(names),
            templates=("a photo of a {c}.",),
            labels=hot,
            metadata={"anchor": torch.tensor(anchors)},
        )
    )


def _read(folder: Path, name: str, *inside: str) -> Any:
    for part in ("", *inside):
        if (text := read_text_file(folder / part / name, limit=_MAX_BYTES)) is not None:
            return parse_json(text)
    raise DataError(f"{folder} lacks {name}")


def _of_sets(folder: Path) -> tuple[list[str], Frames]:
    """Read the class names and frames of ImageNet-Vid-Robust."""
    sets, labels = (_read(folder, name, "metadata") for name in (_SETS, "labels.json"))
    classes = _read(folder, "imagenet_vid_class_index.json", "misc")
    names = [str(classes[str(label)][1]).replace("_", " ") for label in range(len(classes))]
    frames = {
        anchor: (labels[anchor], {frame: labels[frame] for frame in nearby if frame != anchor})
        for anchor, nearby in sets.items()
    }
    return names, frames


def _of_reviews(folder: Path) -> tuple[list[str], Frames]:
    """Read the class names and reviewed frames of YTBB-Robust; "none" is not a class."""
    classes: dict[str, str] = _read(folder, "ytbb_class_index.json")
    original = [classes[str(label)] for label in range(len(classes))]
    names = [one for one in original if one != "none"]
    table = read_text_file(folder / "ytbb_robustness_test_anchors_full.csv", limit=_MAX_BYTES)
    if table is None:
        raise DataError(f"{folder} lacks ytbb_robustness_test_anchors_full.csv")
    # the table numbers its last two classes in the other order than the list of names
    swapped = {"22": "23", "23": "22"}
    first = {
        f"{row['ytid']}_{row['time_ms']}": classes[swapped.get(row["label"], row["label"])]
        for row in csv.DictReader(table.splitlines())
    }
    anchors = _reviews(_read(folder, _REVIEWS))
    pairs = {
        tuple(_key(part) for part in pair.split(",")): marks
        for pair, marks in _reviews(_read(folder, "pmk_labels.json")).items()
    }
    bad = {anchor for (anchor, _), marks in pairs.items() if "bad-anchor" in marks}
    frames: Frames = {}
    for path, marks in anchors.items():
        anchor = _key(path)
        if "good" in marks and not marks & {"bad", "unsure"} and anchor not in bad:
            found = (marks | {first[anchor.split("/")[0]]}) & set(names)
            frames[anchor] = (sorted(names.index(one) for one in found), {})
    for (anchor, frame), marks in pairs.items():
        near = anchor in frames and 0 < abs(_number(frame) - _number(anchor)) <= 10
        if near and "similar" in marks and not marks & _UNLIKE:
            frames[anchor][1][frame] = frames[anchor][0]
    return names, frames


def _reviews(found: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the marks of each key; the last review of a key counts."""
    return {one["key"]: {found["labels"][mark] for mark in one["labels"]} for one in found["annotations"]}


def _key(path: str) -> str:
    return "/".join(PurePosixPath(path).parts[-2:])


def _number(frame: str) -> int:
    return int(PurePosixPath(frame).stem.removeprefix("frame-"))
