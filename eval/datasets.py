"""Evaluation datasets: what to show the model, what is right, and which tasks make sense.

Two layouts are read. The one in which the field publishes its sets (data/writer.py shows it; split ``test``),
with four additions: ``dataset_type.txt`` may say ``retrieval``, ``card.json`` may list ``"tasks"`` and states
how many samples there are, a caption file may hold several captions, one a line, and a sample's json may list
them as ``"captions"``, of which the caption file then holds the first. And a plain folder of pictures,
``ROOT/<class name>/*.jpg``, whose folder names are the class names with ``_`` for a space.

Plain shards, as crawls leave them, say nothing of themselves: without ``card.json``, ``dataset_type.txt`` and (in a
split's own folder) ``nshards.txt``, pairs are scored without the samples that have no caption, and how many those
are is logged. Everywhere else a sample that lacks what others have is an error.

Which tasks a dataset is scored on unless the user names one: those of its card's ``"tasks"``; else retrieval if
its type is ``retrieval`` or it has captions but no labels; else zero-shot. Labelled sets often carry captions that
are made from the class, and retrieval among hundreds of equal captions measures nothing.
"""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from clipkit.errors import DataError, nearest
from data.corpora.builtin import BUILTIN, built_in
from data.shards import Sample, Shards
from data.sources import find_shards
from eval.image_folder import ImageFolder, visible_folders
from eval.json_text import parse_json
from eval.some_pictures import SomePictures

__all__ = [
    "DEFAULT_TEMPLATES",
    "TASKS",
    "EvalDataset",
    "Pictures",
    "open_dataset",
    "open_datasets",
]

SPLIT = "test"
TASKS = ("zero-shot", "retrieval")
_MARKS_OF_WHOLE = ("card.json", "dataset_type.txt", "nshards.txt")  # files of a set that was written as one
DEFAULT_TEMPLATES = ("a photo of a {c}.",)  # where a dataset brings none
_MAX_TEXT_BYTES = 16 << 20  # of a file of names, templates or a card
_SHOWN = 200  # characters of a source in a message
_log = logging.getLogger("eval")


class Pictures(Protocol):
    """Random access to encoded pictures; ``data.shards.Shards`` and ``ImageFolder`` are ones."""

    def __len__(self) -> int: ...

    def read(self, number: int) -> Sample:
        """The picture's bytes with what lies beside it; DataError if it cannot be read."""

    def locate(self, number: int) -> tuple[str, str]:
        """Shard (or folder) and key (or file), to name a picture in a message."""

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change when the pictures do."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EvalDataset:
    """One dataset to score a model on.

    Attributes:
        name: as it stands in results.
        class_names: the line number is the label; a name may be empty or stand there twice.
        templates: prompts with ``{c}`` for the class name.
        shards: the N pictures.
        labels: (N,) int64, or None for a dataset without labels.
        captions: of each picture, one or more; or None for a dataset without captions.
        revision: the pictures' fingerprint.
        tasks: what it is scored on unless the user says otherwise, of ``TASKS``.
    """

    name: str
    class_names: tuple[str, ...]
    templates: tuple[str, ...]
    shards: Pictures
    labels: Tensor | None
    captions: tuple[tuple[str, ...], ...] | None
    revision: str
    tasks: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.shards)

    def where(self, number: int) -> str:
        """Names a picture in a message."""
        shard, key = self.shards.locate(number)
        return f"dataset {self.name}: picture {key} of {shard}"


def open_dataset(name_or_folder: str | Path) -> EvalDataset:
    """Open a built-in dataset by its name (made on first use), or a folder in one of the two layouts.

    Whoever keeps scores of several in one place opens them by ``open_datasets``, so that no two have one name.

    Raises:
        DataError: there is no such dataset, or it is incomplete or contradicts itself. Pictures are decoded
            later; one that does not decode is then an error too, so a score is never of fewer pictures than
            the dataset has.
    """
    return open_datasets([name_or_folder])[0]


def open_datasets(names_or_folders: Sequence[str | Path]) -> tuple[EvalDataset, ...]:
    """Open several datasets, each under a name of its own, by which its results and snapshots are told apart.

    A folder is named by the last part of its path. Where two would have the same name, theirs are lengthened by
    as many parent folders as it takes: ``A/test`` and ``B/test`` become ``A-test`` and ``B-test``.

    Raises:
        DataError: as for ``open_dataset``; or a dataset is given twice.
    """
    sources = [str(one) for one in names_or_folders]
    places = [_place(source) for source in sources]
    names = _distinct_names(places)
    return tuple(_open(*one) for one in zip(sources, places, names, strict=True))


def _place(source: str) -> Path:
    """Where a dataset lies: the full path of a folder, or just the name of a built-in set."""
    if source in BUILTIN and not Path(source).is_dir():
        return Path(source)
    folder = _folder(source)
    try:
        if folder.is_dir():
            return folder.resolve()
    except OSError as error:
        raise DataError(f"cannot read dataset {source[:_SHOWN]!r}: {error.strerror}") from error
    hint = nearest(source[:_SHOWN], BUILTIN)
    raise DataError(f"no dataset {source[:_SHOWN]!r}: it is not a folder, nor built in ({hint})")


def _folder(source: str) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError:  # there is no such user
        return Path(source)


def _distinct_names(places: Sequence[Path]) -> list[str]:
    parts = [[part for part in place.parts if part != place.anchor] for place in places]
    lengths = [1] * len(places)
    while True:
        # joined by what may stand in a file name
        names = ["-".join(own[-length:]) for own, length in zip(parts, lengths, strict=True)]
        shared = {name for name, count in Counter(names).items() if count > 1}
        short = [i for i, name in enumerate(names) if name in shared and lengths[i] < len(parts[i])]
        if not short:
            break
        for i in short:
            lengths[i] += 1
    for name in shared:
        same = [place for place, own in zip(places, names, strict=True) if own == name]
        if len(set(same)) == 1:
            raise DataError(f"dataset {same[0]} is given twice: leave one out")
        raise DataError(
            f"datasets {same[0]} and {same[1]} would both be named {name}: rename one of the folders"
        )
    return names


def _open(source: str, place: Path, name: str) -> EvalDataset:
    name = _utf8(name)
    try:
        if not place.is_absolute():
            return _open_published(built_in(name), name)
        return _open_folder(_folder(source), name)  # as the user says it, for messages
    except OSError as error:
        raise DataError(f"cannot read dataset {name}: {error.filename}: {error.strerror}") from error


def _open_folder(folder: Path, name: str) -> EvalDataset:
    marks = ("classnames.txt", "dataset_type.txt", "card.json", "nshards.txt")
    if (
        any((folder / mark).is_file() for mark in marks)
        or any(folder.glob("*.tar"))
        or any(folder.glob("*/*.tar"))
    ):
        return _open_published(folder, name)
    return _open_image_folder(folder, name)


def _open_published(folder: Path, name: str) -> EvalDataset:
    card = _card(folder)
    splits = [inside for inside in visible_folders(folder) if any(inside.glob("*.tar"))]
    if splits and not (folder / SPLIT).is_dir() and not any(folder.glob("*.tar")):
        raise DataError(
            f"dataset {name} has no split {SPLIT!r} to score on, only {_some([one.name for one in splits])}: pack "
            f"it with pairs held out (python -m data pack TABLE OUT --test 0.1), or name a split's own folder, "
            f"{splits[0]}"
        )
    found = find_shards(str(folder), split=SPLIT)
    _check_consecutive([Path(shard.url) for shard in found])
    shards = Shards.of(found, need=("image",))
    stated = card.get("samples", {}).get(SPLIT) if isinstance(card.get("samples"), dict) else None
    if shards.skipped or stated not in (None, len(shards)):
        expected = f", its card says {str(stated)[:_SHOWN]}" if stated is not None else ""
        raise DataError(
            f"dataset {name}: {len(shards)} samples of split {SPLIT!r} have a picture, {shards.skipped} have none"
            f"{expected}; fetch or write it again"
        )
    class_names = tuple(_lines(folder / "classnames.txt"))
    templates = tuple(line for line in _lines(folder / "zeroshot_classification_templates.txt") if line)
    plain = not any((folder / mark).is_file() for mark in _MARKS_OF_WHOLE)
    pictures, labels, captions = _annotated(name, shards, may_lack_captions=plain)
    return _checked(
        EvalDataset(
            name=name,
            class_names=class_names,
            templates=templates or DEFAULT_TEMPLATES,
            shards=pictures,
            labels=labels,
            captions=captions,
            revision=pictures.fingerprint(),
            tasks=_tasks(
                name, card, _lines(folder / "dataset_type.txt"), pairs_only=labels is None and bool(captions)
            ),
        )
    )


def _open_image_folder(folder: Path, name: str) -> EvalDataset:
    splits = [folder / split for split in (SPLIT, "val") if visible_folders(folder / split)]
    if not splits and visible_folders(folder / "train"):
        raise DataError(f"{folder} has the split 'train' only: name the folder of the pictures to score on")
    pictures = ImageFolder(splits[0] if splits else folder)
    templates = tuple(line for line in _lines(folder / "zeroshot_classification_templates.txt") if line)
    return _checked(
        EvalDataset(
            name=name,
            class_names=tuple(_utf8(folder.name).replace("_", " ").strip() for folder in pictures.folders),
            templates=templates or DEFAULT_TEMPLATES,
            shards=pictures,
            labels=torch.tensor([label for _, label in pictures.files]),
            captions=None,
            revision=pictures.fingerprint(),
            tasks=("zero-shot",),
        )
    )


def _checked(dataset: EvalDataset) -> EvalDataset:
    """The dataset, if its labels, names and templates go together; what is merely odd is logged."""
    names, labels = dataset.class_names, dataset.labels
    for template in dataset.templates:
        if "{c}" not in template:
            raise DataError(
                f"dataset {dataset.name}: the template {template!r} has no {{c}} for the class name"
            )
    if labels is None or not names:
        return dataset
    wrong = (labels >= len(names)).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{dataset.where(first)} has label {int(labels[first])}, but classnames.txt has {len(names)} lines "
            f"(labels 0 to {len(names) - 1}); blank lines in it count"
        )
    doubled = [repr(name) for name, count in Counter(names).items() if count > 1]
    if doubled:
        _log.warning(
            "dataset %s: class names that stand for several classes: %s", dataset.name, _some(doubled)
        )
    empty = sorted(set(range(len(names))) - set(labels.tolist()))
    if empty:
        _log.warning(
            "dataset %s: classes without a picture: %s", dataset.name, _some([repr(names[i]) for i in empty])
        )
    return dataset


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
        card = parse_json(_text(path) or "{}")
    except ValueError as error:
        raise DataError(f"{path} does not parse: {error}") from error
    if not isinstance(card, dict):
        raise DataError(f"{path} is not a JSON object")
    return card


def _utf8(name: str) -> str:
    """A folder's name as UTF-8, in which results and prompts are written, whatever the locale takes it for."""
    try:
        return os.fsencode(name).decode()
    except UnicodeError as error:
        raise DataError(f"the folder {name!r} has a name that is not UTF-8: rename it") from error


def _check_consecutive(paths: list[Path]) -> None:
    """Published shards are 0.tar … N-1.tar; a gap is a lost shard."""
    stems = [path.stem for path in paths]
    if all(stem.isdecimal() for stem in stems):
        missing = sorted(set(range(len(paths))) - {int(stem) for stem in stems})
        if missing:
            raise DataError(
                f"shard {missing[0]}.tar is missing in {paths[0].parent}; fetch the dataset again"
            )


def _lines(path: Path) -> list[str]:
    """The lines, stripped. Blank ones stay, because their place has a meaning; a missing file has none."""
    text = _text(path).removesuffix("\n").removesuffix("\r")
    return [line.strip() for line in text.split("\n")] if text else []


def _text(path: Path) -> str:
    if not path.is_file():
        return ""
    if path.stat().st_size > _MAX_TEXT_BYTES:
        raise DataError(f"{path} is larger than {_MAX_TEXT_BYTES} bytes")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
