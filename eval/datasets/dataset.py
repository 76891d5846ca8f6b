"""A split of a dataset as tasks see it.

Letters in shape comments: N images, C classes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product

import torch
from torch import Tensor

from clipkit.errors import DataError, Unavailable
from clipkit.model import fill_template
from clipkit.samples import Samples
from clipkit.samples.remote import ShardFile

TEST = "test"  # the split that is scored
SPLITS = ("train", "val", TEST)
DEFAULT_TEMPLATES = ("a photo of a {c}.",)  # for datasets without templates


def hash_values(*values: object) -> str:
    """Return 16 hexadecimal digits for values with a unique ``repr``."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


class SampleImages:
    """Random access to the images of a dataset, which are members of samples.

    Args:
        samples: the samples.
        files: the files that contain them.
        member: the member with the image; "" for the first one that is an image.
        cells: by image, the index of its sample, and its member; by default ``member`` of every sample.
    """

    def __init__(
        self,
        samples: Samples,
        files: Sequence[ShardFile] = (),
        *,
        member: str = "",
        cells: Sequence[tuple[int, str]] | None = None,
    ) -> None:
        self.samples = samples
        self.files = files
        self.member = member
        self.cells = cells

    def __len__(self) -> int:
        return len(self.samples if self.cells is None else self.cells)

    def select(self, rows: Sequence[int]) -> "SampleImages":
        """Return some of the images."""
        return SampleImages(self.samples, self.files, cells=[self._cell(row) for row in rows])

    def _cell(self, i: int) -> tuple[int, str]:
        return (i, self.member) if self.cells is None else self.cells[i]

    def locate(self, i: int) -> tuple[str, str]:
        """Return the file, and the key and the member of an image."""
        sample, member = self._cell(i)
        file, key = self.samples.locate(sample)
        return file, f"{key}, {member}" if member else key

    def read(self, i: int) -> bytes:
        """Return an encoded image; raise DataError if it cannot be read."""
        return self.samples.read(*self._cell(i))

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that depend on the samples and the members."""
        if self.cells is None and not self.member:
            return self.samples.content_id
        return hash_values(self.samples.content_id, self.member, self.cells)

    def stamp(self) -> str:
        """Return a fingerprint that also depends on the versions of the files."""
        return hash_values(self.fingerprint(), [(file.size, file.version) for file in self.files])


@dataclass(frozen=True, kw_only=True)
class Language:
    """A dataset's texts in one language.

    Attributes:
        class_names: names of the classes; () if only captions are translated.
        templates: prompts with ``{c}`` for the class name.
        labels: by class, its label in the dataset, if only some of its classes have names; others are left out.
        captions: of each image; None if only class names are translated.
    """

    class_names: tuple[str, ...] = ()
    templates: tuple[str, ...] = ("{c}",)
    labels: tuple[int, ...] = ()
    captions: tuple[tuple[str, ...], ...] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class EvalDataset:
    """One split of a dataset to evaluate a model on.

    Attributes:
        name: the dataset's name in results.
        split: the split's name.
        images: the N images.
        revision: the images' fingerprint, which ``eval.readers.files.check_dataset`` adds.
        tasks: default tasks, names of ``eval.tasks.TASKS``.
        class_names: by label; names may be empty or repeated.
        templates: prompts with ``{c}`` for the class name.
        labels: (N,) int64; (N, C) bool for multi-label datasets; None without labels.
        captions: one or more per image; None without captions.
        choices: by image, the right caption followed by wrong ones, for compositional tasks; or None. Images with
            the same ``item`` (Winoground) are also compared with each other's captions.
        items: (N,) int64, the group of each image; or None.
        metadata: by name, (N,) int64 values per image, such as the region.
        synonyms: by class, all its names, if some class has several; the first ones are ``class_names``.
        superclasses: by class, the name of its superclass; () without superclasses.
        prompt_set: name of the prompt set that ``class_names`` and ``templates`` come from; "own" for the dataset's
            own.
        caption_template: template applied to captions for retrieval, with ``{c}`` for the caption.
        caption_prompt_set: name of that template's prompt set; "" for plain captions.
        languages: texts by language, in each of which zero-shot and retrieval are scored.
        language: the language of a dataset that ``select_language`` returned; it is the setting of the scores.
    """

    name: str
    split: str = TEST
    images: SampleImages
    revision: str = ""
    tasks: tuple[str, ...]
    class_names: tuple[str, ...] = ()
    templates: tuple[str, ...] = DEFAULT_TEMPLATES
    labels: Tensor | None = None
    captions: tuple[tuple[str, ...], ...] | None = None
    choices: tuple[tuple[str, ...], ...] | None = None
    items: Tensor | None = None
    metadata: Mapping[str, Tensor] = field(default_factory=dict)
    synonyms: tuple[tuple[str, ...], ...] | None = None
    superclasses: tuple[str, ...] = ()
    prompt_set: str = "own"
    caption_template: str = "{c}"
    caption_prompt_set: str = ""
    languages: Mapping[str, Language] = field(default_factory=dict)
    language: str = ""

    def __len__(self) -> int:
        return len(self.images)

    def select_language(self, name: str) -> tuple["EvalDataset", Tensor | None]:
        """Return the dataset with the texts of one language, and the indices of its images; None for all."""
        texts = self.languages[name]
        dataset = replace(self, languages={}, language=name, captions=texts.captions)
        if not texts.class_names:
            return dataset, None
        dataset = replace(dataset, class_names=texts.class_names, synonyms=None, templates=texts.templates)
        if not texts.labels or self.labels is None:
            return dataset, None
        labels = torch.tensor(texts.labels)
        rows = torch.isin(self.labels, labels).nonzero().flatten()  # (M,)
        new_labels = torch.full((max(len(self.class_names), max(texts.labels) + 1),), -1)
        new_labels[labels] = torch.arange(len(labels))
        dataset = replace(
            dataset,
            images=self.images.select(rows.tolist()),
            labels=new_labels[self.labels[rows]],
            items=None,
            metadata={},
            superclasses=(),
        )
        return dataset, rows

    def all_captions(self) -> list[tuple[str, ...]]:
        """Return the choices of each image, then the captions of each image."""
        return [*(self.choices or ()), *(self.captions or ())]

    def prompts(self) -> list[list[str]]:
        """Return the prompts of each class: every template with every name."""
        prompts = []
        for names in self.synonyms or [(name,) for name in self.class_names]:
            pairs = product(names, self.templates)
            prompts.append([fill_template(template, name) for name, template in pairs])
        return prompts

    def caption_prompt(self, caption: str) -> str:
        """Return the text that retrieval encodes for a caption; different captions give different texts."""
        return fill_template(self.caption_template, caption)

    def caption_prompts(self) -> list[list[str]]:
        """Return the texts that retrieval encodes for the captions of each image; [] without captions."""
        return [list(map(self.caption_prompt, captions)) for captions in self.captions or ()]

    def number_superclasses(self) -> Tensor:
        """Return (C,) int64, the superclass of each class, numbered by first appearance."""
        names = list(dict.fromkeys(self.superclasses))
        return torch.tensor([names.index(name) for name in self.superclasses], dtype=torch.int64)

    @property
    def stamp(self) -> str:
        """A value that changes whenever the images may have changed."""
        return self.images.stamp()

    def describe_image(self, i: int) -> str:
        """Describe an image's location for a message."""
        shard, key = self.images.locate(i)
        return f"dataset {self.name}: image {key} of {shard}"


def require_labels(dataset: EvalDataset) -> Tensor:
    """Return the labels, (N,) int64 or (N, C) bool.

    Raises:
        Unavailable: the dataset has no labels or no class names.
    """
    if dataset.labels is None:
        raise Unavailable(
            f"split {dataset.split} of dataset {dataset.name} has no labels, which classification needs"
        )
    if not dataset.class_names:
        raise Unavailable(f"dataset {dataset.name} has no classnames.txt, which classification needs")
    return dataset.labels


def require_captions(dataset: EvalDataset) -> tuple[tuple[str, ...], ...]:
    """Return the captions of each image.

    Raises:
        Unavailable: the dataset has no captions.
        DataError: all captions are equal.
    """
    if dataset.captions is None:
        raise Unavailable(f"dataset {dataset.name} has no captions, which retrieval and captioning need")
    if len(set(chain.from_iterable(dataset.captions))) < 2:
        raise DataError(
            f"dataset {dataset.name} has the same caption for all images: there is nothing to tell apart"
        )
    return dataset.captions


def require_choices(dataset: EvalDataset) -> EvalDataset:
    """Return the dataset if it has caption choices, or cues with candidates (``association``).

    Raises:
        Unavailable: it has neither.
    """
    if dataset.choices is None and ("association" not in dataset.metadata or dataset.items is None):
        raise Unavailable(
            f"dataset {dataset.name} has no captions to choose between, which the compositional task needs"
        )
    return dataset


def make_distinct(names: Sequence[str]) -> list[str]:
    """Make class names non-empty, unique and single-line.

    An empty name of label 3 becomes "class 3", a repeated one "NAME (3)".
    """
    lines = [" ".join(name.split()) for name in names]
    distinct: dict[str, None] = {}
    for label, line in enumerate(lines):
        name = line or f"class {label}"
        while name in distinct or (name != line and name in lines):
            name += f" ({label})"
        distinct[name] = None
    return list(distinct)


def prompt_with_bare_names(dataset: EvalDataset) -> EvalDataset:
    """Return the dataset with bare class names as prompts, for models with a ``ClassTable`` text tower."""
    names = tuple(make_distinct(dataset.class_names))
    return replace(dataset, class_names=names, synonyms=None, templates=("{c}",), prompt_set="names")


def list_some(names: Sequence[str], most: int = 3) -> str:
    """Join the first few names, for a message."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text
