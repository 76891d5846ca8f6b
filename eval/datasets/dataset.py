"""A split of a dataset as tasks see it, and what readers build it from: image files, checks, small text files.

Letters in shape comments: N images, C classes.
"""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from torch import Tensor

from clipkit.errors import DataError, Unavailable
from clipkit.files import counted, redact_url
from clipkit.model import fill_template
from clipkit.samples import Samples, join_place, read_file
from clipkit.samples.remote import ShardFile, is_remote
from data.captions import is_utf8

if TYPE_CHECKING:
    from PIL import Image

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
        revision: the images' fingerprint, which ``check_dataset`` adds.
        tasks: default tasks, names of ``eval.tasks.TASKS``.
        class_names: by label; names may be empty or repeated.
        templates: prompts with ``{c}`` for the class name.
        negative_templates: for several labels per image, prompts that deny the class; see
            ``Subject.class_weights``.
        labels: (N,) int64; (N, C) bool for multi-label datasets; None without labels.
        unknown: (N, C) bool, the labels of a multi-label dataset that are uncertain or not stated, for which
            ``labels`` is False; None if all are known.
        captions: one or more per image; None without captions.
        grades: by image, the relevance of each of its captions, at least 0; None if all belong to the image.
        ratings: by image and caption, how well they fit as rated by people; captions may then be wrong.
        image_fields: by name, the weight of the features of a text of each image, and these texts; () stands for
            the image itself. Without fields the features are the image's.
        choices: by image, the right caption followed by wrong ones, for compositional tasks; or None. Images with
            the same ``item`` (Winoground) are also compared with each other's captions.
        items: (N,) int64, the group of each image; or None.
        metadata: by name, (N,) int64 values per image, such as the region.
        synonyms: by class, all its names, if some class has several; the first ones are ``class_names``.
        superclasses: by class, the name of its superclass; () without superclasses.
        taxonomy: by rank, such as "genus", the value of each class there and above.
        class_order: by class, its position among ordered classes, such as grades; () if they are not ordered.
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
    negative_templates: tuple[str, ...] = ()
    labels: Tensor | None = None
    unknown: Tensor | None = None
    captions: tuple[tuple[str, ...], ...] | None = None
    grades: tuple[tuple[float, ...], ...] | None = None
    ratings: tuple[tuple[tuple[float, ...], ...], ...] | None = None
    image_fields: Mapping[str, tuple[float, tuple[str, ...]]] = field(default_factory=dict)
    choices: tuple[tuple[str, ...], ...] | None = None
    items: Tensor | None = None
    metadata: Mapping[str, Tensor] = field(default_factory=dict)
    synonyms: tuple[tuple[str, ...], ...] | None = None
    superclasses: tuple[str, ...] = ()
    taxonomy: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    class_order: tuple[int, ...] = ()
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
            taxonomy={},
            class_order=(),
        )
        return dataset, rows

    def all_captions(self) -> list[tuple[str, ...]]:
        """Return the choices of each image, then the captions of each image."""
        return [*(self.choices or ()), *(self.captions or ())]

    def prompts(self) -> list[list[str]]:
        """Return the prompts of each class: every template with every name."""
        return self._fill_templates(self.templates)

    def negative_prompts(self) -> list[list[str]]:
        """Return the prompts that deny each class; [] without ``negative_templates``."""
        return self._fill_templates(self.negative_templates) if self.negative_templates else []

    def all_prompts(self) -> list[list[str]]:
        """Return the prompts of each class, then those that deny each class."""
        return [*self.prompts(), *self.negative_prompts()]

    def _fill_templates(self, templates: Sequence[str]) -> list[list[str]]:
        prompts = []
        for names in self.synonyms or [(name,) for name in self.class_names]:
            pairs = product(names, templates)
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
        return _number_values(self.superclasses)

    def number_taxa(self, rank: str) -> Tensor:
        """Return (C,) int64, equal for classes that are equal up to a rank of the taxonomy."""
        return _number_values(self.taxonomy[rank])

    @property
    def known_labels(self) -> Tensor | None:
        """``labels``; if some are unknown, (N, C) float32 of 1, 0, and -1 for these."""
        if self.labels is None or self.unknown is None:
            return self.labels
        return self.labels.float() - self.unknown.float()

    @property
    def stamp(self) -> str:
        """A value that changes whenever the images may have changed."""
        return self.images.stamp()

    def describe_image(self, i: int) -> str:
        """Describe an image's location for a message."""
        shard, key = self.images.locate(i)
        return f"dataset {self.name}: image {key} of {shard}"


def _number_values(values: Sequence[str]) -> Tensor:
    """Return (C,) int64, the number of each value by first appearance."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(value, len(numbers)) for value in values], dtype=torch.int64)


def require_labels(dataset: EvalDataset) -> Tensor:
    """Return the labels, (N,) int64 or (N, C) bool."""
    if dataset.labels is None:
        raise Unavailable(
            f"split {dataset.split} of dataset {dataset.name} has no labels, which classification needs; "
            "a folder of images by class gets them when it is packed again"
        )
    if not dataset.class_names:
        raise Unavailable(f"dataset {dataset.name} has no classnames.txt, which classification needs")
    return dataset.labels


def require_captions(dataset: EvalDataset) -> tuple[tuple[str, ...], ...]:
    """Return the captions of each image."""
    if dataset.captions is None:
        raise Unavailable(f"dataset {dataset.name} has no captions, which retrieval and captioning need")
    if dataset.ratings is not None:
        raise Unavailable(f"dataset {dataset.name} has rated captions, which only the task judgments can use")
    if dataset.grades is None and len(set(chain.from_iterable(dataset.captions))) < 2:
        raise DataError(
            f"dataset {dataset.name} has the same caption for all images: there is nothing to tell apart"
        )
    return dataset.captions


def require_choices(dataset: EvalDataset) -> EvalDataset:
    """Return the dataset if it has caption choices, or cues with candidates (``association``)."""
    if dataset.choices is None and ("association" not in dataset.metadata or dataset.items is None):
        raise Unavailable(
            f"dataset {dataset.name} has no captions to choose between, which the compositional task needs"
        )
    return dataset


def require_ratings(dataset: EvalDataset) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Return the human judgments of each caption of each image; those of a table are its grades."""
    ratings = dataset.ratings
    if ratings is None and dataset.grades is not None:
        ratings = tuple(tuple((grade,) for grade in grades) for grades in dataset.grades)
    if ratings is None:
        raise Unavailable(
            f"dataset {dataset.name} has no human judgments: neither ratings nor a table of grades"
        )
    return ratings


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
    return replace(
        dataset,
        class_names=names,
        synonyms=None,
        templates=("{c}",),
        negative_templates=(),
        prompt_set="names",
    )


def list_some(names: Sequence[str], most: int = 3) -> str:
    """Join the first few names, for a message."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


# --------------------------------------------------------------------------------------------------------------
# Image files.

_log = logging.getLogger("eval")


class FileSamples(Samples):
    """Image files, one per sample; a file may occur several times.

    Args:
        root: the folder that paths in messages and in ``content_id`` are relative to.
        paths: the file of each sample.

    Attributes:
        files: the state of each different file.
    """

    def __init__(self, root: Path, paths: Sequence[Path]) -> None:
        self.root = root
        self.paths = tuple(paths)
        states: dict[Path, ShardFile] = {}
        for path in dict.fromkeys(self.paths):
            try:
                states[path] = ShardFile.from_status(str(path), path.stat())
            except OSError as error:
                raise DataError(f"image {path}: {error.strerror}") from error
        self.files = tuple(states.values())
        self._sizes = {path: state.size for path, state in states.items()}

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, i: int) -> Path:
        return self.paths[i]

    def key(self, i: int) -> str:
        """Return the path of an image in the root."""
        path = self.paths[i]
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)

    def locate(self, i: int) -> tuple[str, str]:
        return str(self.root), self.key(i)

    def members(self, i: int) -> Sequence[str]:
        return [self.paths[i].suffix.lower().removeprefix(".")]

    def fields(self, i: int) -> dict[str, Any]:
        return {}

    def read(self, i: int, member: str) -> bytes:
        return read_file(self.paths[i])

    @property
    def content_id(self) -> str:
        """16 hexadecimal digits that depend on keys and sizes."""
        digest = hashlib.sha256()
        for i, path in enumerate(self.paths):
            digest.update(os.fsencode(f"{self.key(i)}\0{self._sizes[path]}\n"))
        return digest.hexdigest()[:16]


def make_multi_hot(labels: Sequence[Sequence[int]], classes: int) -> Tensor:
    """Return (N, C) bool from the labels of each of N images."""
    hot = torch.zeros(len(labels), classes, dtype=torch.bool)
    for i, image_labels in enumerate(labels):
        hot[i, image_labels] = True
    return hot


def file_images(root: Path, paths: Sequence[Path]) -> SampleImages:
    """Return image files as the images of a dataset; see ``FileSamples``."""
    samples = FileSamples(root, paths)
    return SampleImages(samples, samples.files)


def encode_png(image: "Image.Image") -> bytes:
    """Encode an image as lossless PNG, fast rather than small."""
    file = BytesIO()
    image.save(file, "png", compress_level=1)
    return file.getvalue()


# --------------------------------------------------------------------------------------------------------------
# Consistency checks on a reader's result.

_LONGEST = 60  # characters of a caption in a message


def check_dataset(dataset: EvalDataset) -> EvalDataset:
    """Add the revision to a dataset whose labels, names, templates and choices are consistent; log oddities."""
    if not dataset.revision:
        dataset = replace(dataset, revision=dataset.images.fingerprint())
    name = dataset.name
    names = dataset.class_names
    labels = dataset.labels
    for text in (name, *names):
        if not is_utf8(text):
            raise DataError(f"the name {text!r} of a dataset or class is not UTF-8: rename the folder")
    for template in dataset.templates:
        if "{c}" not in template:
            raise DataError(f"dataset {name}: the template {template!r} has no {{c}} for the class name")
    if labels is not None and len(names) == 1:
        if dataset.captions is None and dataset.choices is None:
            raise DataError(
                f"dataset {name} has only one class, {names[0]!r}: classification needs at least two"
            )
        if dataset.tasks == ("zero-shot",):
            dataset = replace(dataset, tasks=("retrieval",))
    if labels is not None and labels.ndim == 1:
        wrong = ((labels < 0) | ((labels >= len(names)) & (len(names) > 0))).nonzero()
        if len(wrong):
            first = int(wrong[0])
            label = int(labels[first])
            why = ": labels begin at 0, and datasets with secret labels cannot be scored"
            if label >= 0:
                why = (
                    f", but there are {len(names)} class names, for labels 0 to {len(names) - 1}; blank lines in "
                    "classnames.txt count"
                )
            raise DataError(f"{dataset.describe_image(first)} has label {label}{why}")
    if labels is not None and names:
        repeated = [repr(text) for text, count in Counter(names).items() if count > 1]
        if repeated:
            _log.warning("dataset %s: class names shared by several classes: %s", name, list_some(repeated))
        counts = labels.sum(dim=0) if labels.ndim == 2 else labels.bincount(minlength=len(names))  # (C,)
        empty = [repr(names[i]) for i in (counts == 0).nonzero().flatten().tolist()]
        if empty:
            _log.warning(
                "dataset %s: its images show %s of %s classes; the names of the others remain possible answers: %s",
                name,
                f"{len(names) - len(empty):,}",
                f"{len(names):,}",
                list_some(empty),
            )
    ambiguous: list[str] = []
    for i, (right, *others) in enumerate(dataset.choices or ()):
        if not others:
            raise DataError(f"{dataset.describe_image(i)} has 1 caption to choose from, expected at least 2")
        if right in others:
            ambiguous.append(repr(right[:_LONGEST]))
    if ambiguous:
        _log.warning(
            "dataset %s: %s whose right caption is also among the wrong ones, which counts as wrong: %s",
            name,
            counted(len(ambiguous), "image"),
            list_some(ambiguous),
        )
    return dataset


# --------------------------------------------------------------------------------------------------------------
# Small text files next to the images, local or in a store.

_MAX_TEXT_BYTES = 16 << 20
_MAX_JSON_BYTES = 1 << 30
Content = TypeVar("Content")


def read_lines(place: str | Path) -> list[str]:
    """Return a file's stripped lines, including blank ones; [] if there is no file."""
    text = (read_text_file(place) or "").removesuffix("\n").removesuffix("\r")
    if not text:
        return []
    return [line.strip() for line in text.split("\n")]


def read_templates(root: str | Path) -> tuple[str, ...]:
    """Return the prompt templates next to a dataset's images."""
    return tuple(filter(None, read_lines(join_place(root, "zeroshot_classification_templates.txt"))))


def read_text_file(place: str | Path, *, limit: int = _MAX_TEXT_BYTES) -> str | None:
    """Return a file's text, or None if there is no file."""
    if isinstance(place, str) and is_remote(place):
        from clipkit.samples import remote

        text = remote.read_text(place, limit=limit)
        if text is None:
            return None
        if "\ufffd" in text:  # replaces bytes that are not UTF-8
            raise DataError(f"{redact_url(place)} is not UTF-8 text")
        return text.removeprefix("\ufeff")
    path = Path(place)
    if not path.is_file():
        return None
    if path.stat().st_size > limit:
        raise DataError(f"{path} is larger than {limit} bytes")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error


def read_json_file(place: str | Path, kind: type[Content]) -> Content | None:
    """Return the content of a JSON file, or None if there is no file."""
    text = read_text_file(place, limit=_MAX_JSON_BYTES)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataError(f"{redact_url(str(place))} is not as published: {error}") from error
