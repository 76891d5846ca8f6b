"""A split of a dataset as the tasks see it: what to show the model, what is right, and which tasks make sense.

Which tasks a dataset is scored on unless the user names one: those of its card's ``tasks``; else retrieval if
its type is ``retrieval`` or it has captions but no labels; else zero-shot. Labelled sets often carry captions that
are made from the class, and retrieval among hundreds of equal captions measures nothing.

Letters in shape comments: N images, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.model.zero_shot import fill_template
from data.shards.samples import Sample

__all__ = [
    "DEFAULT_TEMPLATES",
    "SPLITS",
    "TEST",
    "EvalDataset",
    "Images",
    "Lacks",
    "NoSplit",
    "by_class_names",
    "captions_of",
    "choices_of",
    "distinct_names",
    "labels_of",
    "some",
]

TEST = "test"  # the split that scores are of
SPLITS = ("train", "val", TEST)
DEFAULT_TEMPLATES = ("a photo of a {c}.",)  # where a dataset brings none


class Lacks(DataError):
    """A dataset lacks what a task needs; nothing about it is wrong."""


class NoSplit(Lacks):
    """A dataset has no split of the name that is asked for."""


class Images(Protocol):
    """Random access to encoded images; ``data.shards.samples.Shards`` and ``ImageFolder`` are ones."""

    def __len__(self) -> int: ...

    def read(self, number: int) -> Sample:
        """The image's bytes with what lies beside it; DataError if it cannot be read."""

    def locate(self, number: int) -> tuple[str, str]:
        """Shard (or folder) and key (or file), to name an image in a message."""

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change when the images do."""

    def stamp(self) -> str:
        """Likewise, and it changes too when files were written anew, or lie elsewhere."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EvalDataset:
    """One dataset to score a model on.

    Attributes:
        name: as it stands in results.
        split: which part of the dataset it is.
        class_names: the line number is the label; a name may be empty or stand there twice.
        templates: prompts with ``{c}`` for the class name.
        shards: the N images.
        labels: (N,) int64; (N, C) bool where an image has several; or None for a dataset without labels.
        captions: of each image, one or more; or None for a dataset without captions.
        choices: of each image, a right caption and then wrong ones, of which a model is to tell the right; or
            None. Images of one ``item`` (Winoground) are told apart by each other's captions too.
        items: (N,) int64, which images belong together; or None.
        metadata: by name, (N,) int64 facts about each image, such as the region it is from.
        synonyms: of each class, all its names, if a prompt set gives it several; the first are ``class_names``.
        superclasses: of each class, the group that it is of (an animal, a vehicle); () where there are none.
        prompt_set: the name under which ``class_names`` and ``templates`` go, "own" for those beside the images.
        caption_template: what retrieval has a model read of a caption, with ``{c}`` for it.
        caption_prompt_set: the name under which that goes, "" for captions as they stand.
        revision: the images' fingerprint.
        tasks: what it is scored on unless the user says otherwise, of ``eval.tasks.TASKS``.
    """

    name: str
    split: str = TEST
    class_names: tuple[str, ...]
    templates: tuple[str, ...]
    shards: Images
    labels: Tensor | None
    captions: tuple[tuple[str, ...], ...] | None
    revision: str
    tasks: tuple[str, ...]
    choices: tuple[tuple[str, ...], ...] | None = None
    items: Tensor | None = None
    metadata: Mapping[str, Tensor] = field(default_factory=dict)
    synonyms: tuple[tuple[str, ...], ...] | None = None
    superclasses: tuple[str, ...] = ()
    prompt_set: str = "own"
    caption_template: str = "{c}"
    caption_prompt_set: str = ""

    def __len__(self) -> int:
        return len(self.shards)

    def all_captions(self) -> list[tuple[str, ...]]:
        """The captions to choose between of each image, then its captions."""
        return [*(self.choices or ()), *(self.captions or ())]

    def prompts(self) -> list[list[str]]:
        """Of each class, every template with every name."""
        names = self.synonyms or tuple((name,) for name in self.class_names)
        return [[fill_template(one, name) for name in own for one in self.templates] for own in names]

    def caption_prompt(self, caption: str) -> str:
        """What retrieval has a model read of a caption; of two that differ, it differs too."""
        return fill_template(self.caption_template, caption)

    def caption_prompts(self) -> list[list[str]]:
        """Of each image, what retrieval has a model read of its captions; none where it has none."""
        return [[self.caption_prompt(caption) for caption in own] for own in self.captions or ()]

    def superclass_numbers(self) -> Tensor:
        """(C,) int64, the superclass of each class, numbered in the order of their first appearance."""
        number = {name: i for i, name in enumerate(dict.fromkeys(self.superclasses))}
        return torch.tensor([number[name] for name in self.superclasses], dtype=torch.int64)

    @property
    def stamp(self) -> str:
        """Changes whenever the images may have, also where the revision, which moves with them, does not."""
        return self.shards.stamp()

    def where(self, number: int) -> str:
        """Names an image in a message."""
        shard, key = self.shards.locate(number)
        return f"dataset {self.name}: image {key} of {shard}"


def labels_of(dataset: EvalDataset) -> Tensor:
    """The labels, (N,) int64 or (N, C) bool.

    Raises:
        Lacks: the dataset has none, or no class names for them.
    """
    if dataset.labels is None:
        raise Lacks(f"dataset {dataset.name} has no labels, which classification needs")
    if not dataset.class_names:
        raise Lacks(f"dataset {dataset.name} has no classnames.txt, which classification needs")
    return dataset.labels


def captions_of(dataset: EvalDataset) -> tuple[tuple[str, ...], ...]:
    """The captions of each image.

    Raises:
        Lacks: the dataset has none.
        DataError: they are all the same.
    """
    if dataset.captions is None:
        raise Lacks(f"dataset {dataset.name} has no captions, which retrieval needs")
    if len({caption for own in dataset.captions for caption in own}) < 2:
        raise DataError(
            f"dataset {dataset.name} has the same caption for all images: there is nothing to retrieve"
        )
    return dataset.captions


def choices_of(dataset: EvalDataset) -> EvalDataset:
    """The dataset, if it has choices between captions, or cues with candidates (``association``).

    Raises:
        Lacks: it has neither.
    """
    if dataset.choices is None and ("association" not in dataset.metadata or dataset.items is None):
        raise Lacks(
            f"dataset {dataset.name} has no captions to choose between, which the compositional task needs"
        )
    return dataset


def distinct_names(names: Sequence[str]) -> list[str]:
    """Class names as captions can tell them apart: none empty, no two alike, on one line each.

    Number 3 of those without a name is "class 3", and of those whose name was there before "NAME (3)".
    """
    given = [" ".join(name.split()) for name in names]
    found: dict[str, None] = {}
    for number, name in enumerate(given):
        own = name or f"class {number}"
        while own in found or (own != name and own in given):
            own += f" ({number})"
        found[own] = None
    return list(found)


def by_class_names(dataset: EvalDataset) -> EvalDataset:
    """The same for a model that reads class names alone, see ``clipkit.model.architectures.ClassTable``."""
    names = tuple(distinct_names(dataset.class_names))
    return replace(dataset, class_names=names, synonyms=None, templates=("{c}",), prompt_set="names")


def some(names: Sequence[str], most: int = 3) -> str:
    """The first few of a list, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
