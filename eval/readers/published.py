"""The layout in which the field publishes its sets, WebDataset shards with text files beside them.

CLIP_benchmark and DataComp publish so, and data/writer.py writes it: a sample has its picture and a ``cls`` (the
number of its class), an ``npy`` (multi-hot, where ``dataset_type.txt`` says ``multilabel``; else facts about the
picture, in columns that the caller names) or captions, one a line. Additions of our own: ``card.json`` may list
``"tasks"`` and states how many samples there are; a sample's json may list its captions as ``"captions"``, of which
the caption file then holds the first; and ``dataset_type.txt`` may say ``image_caption_selection``: of a picture's
captions the first is right and the others are wrong.

Plain shards, as crawls leave them, say nothing of themselves: without ``card.json``, ``dataset_type.txt`` and (in a
split's own folder) ``nshards.txt``, pairs are scored without the samples that have no caption, and how many those
are is logged. Everywhere else a sample that lacks what others have is an error.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipkit.count_progress import counted
from clipkit.errors import DataError
from data.cache import shard_cache
from data.captions import CaptionRule
from data.manifest import make_manifest
from data.selection import Selection
from data.shard_file import ShardFile, is_remote
from eval.dataset import DEFAULT_TEMPLATES, TASKS, TEST, EvalDataset, Pictures
from eval.json_text import parse_json
from eval.readers.annotations import Annotations, annotations_of, columns_of, multi_hot
from eval.readers.checks import checked_set
from eval.readers.places import address_of, shards_of_split
from eval.readers.some_pictures import EveryPicture, SomePictures
from eval.readers.text_files import beside, lines_of, text_of

__all__ = ["CACHE_GB", "open_published"]

CACHE_GB = 100.0  # of remote shards on this machine, as for a training
_FETCHING = 4  # shards at a time
_MARKS_OF_WHOLE = ("card.json", "dataset_type.txt", "nshards.txt")  # files of a set that was written as one
_MARKS_OF_SET = ("card.json", "dataset_type.txt", "classnames.txt")
_TYPES = ("classification", "multilabel", "retrieval", "image_caption_selection")
_SHOWN = 200  # characters of a source in a message
_log = logging.getLogger("eval")


def open_published(
    folder: Path | str,
    name: str,
    *,
    split: str = TEST,
    metadata_names: Sequence[str] = (),
    cache_gb: float = CACHE_GB,
) -> EvalDataset:
    """One split of a published set, on this machine or in a store; remote shards are fetched now, and kept.

    Args:
        folder: of this machine, or its URL (``https://``, ``hf://``, ``s3://``, ``gs://``; also a page of Hugging
            Face, ``https://huggingface.co/datasets/OWNER/NAME/tree/BRANCH``). Of this machine it may be one split's
            own; what that does not say of itself is read in the folder above.
        name: of the dataset.
        split: which of its folders.
        metadata_names: of the columns that the ``npy`` of each sample has beside its label, all of them in order.
        cache_gb: how much of remote shards this machine keeps; 0 reads samples over the network.

    Raises:
        DataError: there is no such split, it is incomplete or contradicts itself.
    """
    place = address_of(folder) if isinstance(folder, str) and is_remote(folder) else Path(folder)
    root, own_split = _described(place, split)
    card, kind = _card(root), _type(name, root)
    shards = _shards(shards_of_split(name, place, split), cache_gb)
    _check_count(name, shards, own_split, card)
    class_names = tuple(lines_of(beside(root, "classnames.txt")))
    several = kind == "multilabel"
    if several and metadata_names:
        raise DataError(f"dataset {name} is multilabel, so its npy is its label and holds no metadata")
    beside_pictures = annotations_of(name, shards, arrays=several or bool(metadata_names))
    if shards.cache is not None:
        shards.cache.close()  # all that is fetched ahead is here; a suite would gather the threads of its datasets
    pictures: Pictures = shards
    labels, captions = None, None
    if several:
        labels = multi_hot(name, beside_pictures.arrays, shards, classes=len(class_names))
    else:
        marks = [beside(one, mark) for one in dict.fromkeys((place, root)) for mark in _MARKS_OF_WHOLE]
        plain = not any(text_of(mark) is not None for mark in marks)
        pictures, labels, captions = _annotated(name, shards, beside_pictures, may_lack_captions=plain)
    tasks = _tasks(name, card, kind, pairs_only=labels is None and bool(captions))
    if beside_pictures.not_utf8:
        broken = f"{counted(len(beside_pictures.not_utf8), 'sample')} with a caption that is not UTF-8"
        if not several and ({"retrieval", "compositional"} & set(tasks)):
            raise DataError(
                f"dataset {name}: {broken}, the first is {beside_pictures.not_utf8[0]}: write them in UTF-8"
            )
        _log.warning("dataset %s: %s: captions are left out", name, broken)
        captions = None
    choices = captions if kind == "image_caption_selection" else None
    templates = tuple(
        line for line in lines_of(beside(root, "zeroshot_classification_templates.txt")) if line
    )
    metadata = columns_of(name, beside_pictures.arrays, shards, metadata_names) if metadata_names else {}
    return checked_set(
        EvalDataset(
            name=name,
            split=split,
            class_names=class_names,
            templates=templates or DEFAULT_TEMPLATES,
            shards=pictures,
            labels=labels,
            captions=None if choices else captions,
            choices=choices,
            metadata=metadata,
            revision=pictures.fingerprint(),
            tasks=tasks,
        )
    )


def _described(place: Path | str, split: str) -> tuple[Path | str, str]:
    """Where the files are that say what a set is, and the split's name there: of a split's own folder, above it."""
    if split != TEST or not isinstance(place, Path) or not any(place.glob("*.tar")):
        return place, split
    own = place.absolute()
    known = [any((folder / mark).is_file() for mark in _MARKS_OF_SET) for folder in (own, own.parent)]
    return (own.parent, own.name) if known == [False, True] else (place, split)


def _shards(found: Sequence[ShardFile], cache_gb: float) -> EveryPicture:
    """Their samples; counted anew, since statistics beside them may be of other shards."""
    cache = shard_cache([shard.url for shard in found], cache_gb)
    if cache is not None:
        cache.prefetch([shard for shard in found if shard.is_remote], threads=_FETCHING)
    selection = Selection(need=("image",), captions=CaptionRule())
    return EveryPicture(make_manifest([found], selection, cache=cache, stats=False), selection, cache=cache)


def _check_count(name: str, shards: EveryPicture, split: str, card: dict[str, Any]) -> None:
    stated = card.get("samples", {}).get(split) if isinstance(card.get("samples"), dict) else None
    if shards.skipped or stated not in (None, len(shards)):
        expected = f", its card says {str(stated)[:_SHOWN]}" if stated is not None else ""
        raise DataError(
            f"dataset {name}: split {split!r} has {counted(len(shards), 'sample')} with a picture, "
            f"{shards.skipped} without"
            f"{expected}; fetch or write it again"
        )


def _annotated(
    name: str, shards: EveryPicture, found: Annotations, *, may_lack_captions: bool
) -> tuple[Pictures, Tensor | None, tuple[tuple[str, ...], ...] | None]:
    """The pictures with labels and captions: each either of every sample or of none.

    Args:
        name: of the dataset.
        shards: its samples.
        found: what lies beside their pictures.
        may_lack_captions: whether samples without a caption are left out where others have one and none a label.
    """
    labels, captions = found.labels, found.captions
    known = [label for label in labels if label is not None]
    if may_lack_captions and not known and any(captions) and not all(captions):
        numbers = [number for number, own in enumerate(captions) if own]
        _log.warning(
            "dataset %s: %d of %d samples have no caption and are left out",
            name,
            len(shards) - len(numbers),
            len(shards),
        )
        return SomePictures(every=shards, numbers=numbers), None, tuple(filter(None, captions))
    for what, present in (
        ("label", [one is not None for one in labels]),
        ("caption", list(map(bool, captions))),
    ):
        if any(present) and not all(present):
            shard, key = shards.locate(present.index(False))
            raise DataError(f"dataset {name}: sample {key} of {shard} has no {what}, others have one")
    return shards, (torch.tensor(known) if known else None), (tuple(captions) if any(captions) else None)


def _type(name: str, root: Path | str) -> str:
    kind = (*lines_of(beside(root, "dataset_type.txt")), "")[0].lower()
    if kind not in ("", *_TYPES):
        raise DataError(f"dataset {name} is of type {kind[:40]!r}; known: {', '.join(_TYPES)}")
    return kind


def _tasks(name: str, card: dict[str, Any], kind: str, *, pairs_only: bool) -> tuple[str, ...]:
    if "tasks" in card:
        tasks = card["tasks"]
        if not isinstance(tasks, list) or not tasks or any(task not in TASKS for task in tasks):
            shown = repr(tasks)[:_SHOWN]
            raise DataError(f"dataset {name}: card.json has tasks {shown}; known: {', '.join(TASKS)}")
        return tuple(task for task in TASKS if task in tasks)
    if kind == "image_caption_selection":
        return ("compositional",)
    return ("retrieval",) if kind == "retrieval" or pairs_only else ("zero-shot",)


def _card(root: Path | str) -> dict[str, Any]:
    place = beside(root, "card.json")
    try:
        card = parse_json(text_of(place) or "{}")
    except ValueError as error:
        raise DataError(f"{place} does not parse: {error}") from error
    if not isinstance(card, dict):
        raise DataError(f"{place} is not a JSON object")
    return card
