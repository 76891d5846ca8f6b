"""The layout in which the field publishes its sets, WebDataset shards with text files beside them.

data/writer.py shows it. Four additions are read: ``dataset_type.txt`` may say ``retrieval``, ``card.json`` may list
``"tasks"`` and states how many samples there are, a caption file may hold several captions, one a line, and a
sample's json may list them as ``"captions"``, of which the caption file then holds the first.

Plain shards, as crawls leave them, say nothing of themselves: without ``card.json``, ``dataset_type.txt`` and (in a
split's own folder) ``nshards.txt``, pairs are scored without the samples that have no caption, and how many those
are is logged. Everywhere else a sample that lacks what others have is an error.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipkit.errors import DataError
from data.shards import Sample, Shards
from data.sources import find_shards
from eval.dataset import DEFAULT_TEMPLATES, TASKS, TEST, EvalDataset, Pictures, checked, some
from eval.json_text import parse_json
from eval.readers.image_folder import visible_folders
from eval.readers.some_pictures import SomePictures
from eval.readers.text_files import lines_of, text_of

__all__ = ["open_published"]

_MARKS_OF_WHOLE = ("card.json", "dataset_type.txt", "nshards.txt")  # files of a set that was written as one
_SHOWN = 200  # characters of a source in a message
_log = logging.getLogger("eval")


def open_published(folder: Path, name: str, *, split: str = TEST) -> EvalDataset:
    """One split of a published set.

    Raises:
        DataError: there is no such split, it is incomplete or contradicts itself.
    """
    card = _card(folder)
    _check_has_split(folder, name, split)
    found = find_shards(str(folder), split=split)
    _check_consecutive([Path(shard.url) for shard in found])
    shards = Shards.of(found, need=("image",))
    stated = card.get("samples", {}).get(split) if isinstance(card.get("samples"), dict) else None
    if shards.skipped or stated not in (None, len(shards)):
        expected = f", its card says {str(stated)[:_SHOWN]}" if stated is not None else ""
        raise DataError(
            f"dataset {name}: {len(shards)} samples of split {split!r} have a picture, {shards.skipped} have none"
            f"{expected}; fetch or write it again"
        )
    templates = tuple(line for line in lines_of(folder / "zeroshot_classification_templates.txt") if line)
    plain = not any((folder / mark).is_file() for mark in _MARKS_OF_WHOLE)
    pictures, labels, captions = _annotated(name, shards, may_lack_captions=plain)
    kind = lines_of(folder / "dataset_type.txt")
    return checked(
        EvalDataset(
            name=name,
            split=split,
            class_names=tuple(lines_of(folder / "classnames.txt")),
            templates=templates or DEFAULT_TEMPLATES,
            shards=pictures,
            labels=labels,
            captions=captions,
            revision=pictures.fingerprint(),
            tasks=_tasks(name, card, kind, pairs_only=labels is None and bool(captions)),
        )
    )


def _check_has_split(folder: Path, name: str, split: str) -> None:
    """Shards that lie in the folder itself count as any split that is asked for to test on."""
    splits = [inside.name for inside in visible_folders(folder) if any(inside.glob("*.tar"))]
    if split in splits or (split == TEST and (not splits or any(folder.glob("*.tar")))):
        return
    if split != TEST or not splits:
        there = f"only {some(splits)}" if splits else "and no other"
        raise DataError(f"dataset {name} has no split {split!r}, {there}")
    raise DataError(
        f"dataset {name} has no split {split!r} to score on, only {some(splits)}: pack it with pairs held out "
        f"(python -m data pack TABLE OUT --test 0.1), or name a split's own folder, {folder / splits[0]}"
    )


def _annotated(
    name: str, shards: Shards, *, may_lack_captions: bool
) -> tuple[Pictures, Tensor | None, tuple[tuple[str, ...], ...] | None]:
    """The pictures with labels and captions: each either of every sample or of none.

    Args:
        name: of the dataset.
        shards: its samples.
        may_lack_captions: whether samples without a caption are left out where others have one and none a label.
    """
    labels: list[int | None] = []
    captions: list[tuple[str, ...]] = []
    for number in range(len(shards)):
        shard, key = shards.locate(number)
        try:
            sample = shards.read(number)
        except DataError as error:
            raise DataError(f"dataset {name}: sample {key} of {shard}: {error}") from error
        labels.append(sample.label)
        captions.append(_captions(sample))
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


def _captions(sample: Sample) -> tuple[str, ...]:
    """Those listed in the sample's json, if its caption is the first of them, else the lines of its caption."""
    listed = sample.meta.get("captions")
    if not isinstance(listed, list) or listed[:1] != [sample.caption]:
        listed = (sample.caption or "").split("\n")
    return tuple(one.strip() for one in listed if isinstance(one, str) and one.strip())


def _tasks(name: str, card: dict[str, Any], kind: list[str], *, pairs_only: bool) -> tuple[str, ...]:
    if "tasks" in card:
        tasks = card["tasks"]
        if not isinstance(tasks, list) or not tasks or any(task not in TASKS for task in tasks):
            shown = repr(tasks)[:_SHOWN]
            raise DataError(f"dataset {name}: card.json has tasks {shown}; known: {', '.join(TASKS)}")
        return tuple(task for task in TASKS if task in tasks)
    if kind and kind[0] not in ("classification", "retrieval"):
        raise DataError(f"dataset {name} is of type {kind[0][:40]!r}; known: classification, retrieval")
    return ("retrieval",) if kind == ["retrieval"] or pairs_only else ("zero-shot",)


def _card(folder: Path) -> dict[str, Any]:
    path = folder / "card.json"
    try:
        card = parse_json(text_of(path) or "{}")
    except ValueError as error:
        raise DataError(f"{path} does not parse: {error}") from error
    if not isinstance(card, dict):
        raise DataError(f"{path} is not a JSON object")
    return card


def _check_consecutive(paths: list[Path]) -> None:
    """Published shards are 0.tar … N-1.tar; a gap is a lost shard."""
    stems = [path.stem for path in paths]
    if all(stem.isdecimal() for stem in stems):
        missing = sorted(set(range(len(paths))) - {int(stem) for stem in stems})
        if missing:
            raise DataError(
                f"shard {missing[0]}.tar is missing in {paths[0].parent}; fetch the dataset again"
            )
