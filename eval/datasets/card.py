"""Dataset cards: what a dataset is, how it is scored, and what others have measured on it.

A card is a TOML file: ``eval/datasets/NAME.toml`` for the datasets that clipkit knows, ``card.toml`` next to a
user's own images. Class names are bound to the dataset's own class keys, since published lists are not all in label
order.
"""

import tomllib
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec

from clipkit.errors import DataError, nearest
from clipkit.files import counted, prompt_list
from eval.metrics import METRICS, get_metric
from eval.tasks import TASKS

DATASETS = Path(__file__).parent  # clipkit's own cards
FOLDER = "folder"  # names or templates that are next to the images
_IMAGENET_NAMES = "open_clip:IMAGENET_CLASSNAMES"
_IMAGENET_TEMPLATES = ("open_clip:OPENAI_IMAGENET_TEMPLATES", "open_clip:SIMPLE_IMAGENET_TEMPLATES")
_NAMED = 3  # missing classes in a message

Text = Annotated[str, msgspec.Meta(min_length=1)]
Texts = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
Template = Annotated[str, msgspec.Meta(pattern=r"\{c\}")]
Templates = Annotated[tuple[Template, ...], msgspec.Meta(min_length=1)]
Words = str | Texts  # one word or several
Count = Annotated[int, msgspec.Meta(ge=1)]
Score = Annotated[float, msgspec.Meta(ge=0, le=1)]
Split = Annotated[str, msgspec.Meta(pattern="^(train|val|test)$")]
Counts = Mapping[Split, Count]


# --------------------------------------------------------------------------------------------------------------
# Which metrics apply to which task and dataset.


@dataclass(frozen=True, kw_only=True)
class MetricKind:
    """Properties of a dataset that determine which metrics apply.

    Attributes:
        multilabel: whether an image may have several labels.
        classes: number of classes; None if unknown.
        columns: metadata columns to group by, as in ``worst_region_acc1``.
        superclasses: whether classes are grouped.
    """

    multilabel: bool = False
    classes: int | None = None
    columns: tuple[str, ...] = ()
    superclasses: bool = False

    def list_metrics(self, tasks: Sequence[str], *, primary: bool = False) -> tuple[str, ...]:
        """Return the metrics that apply to some of the tasks; larger values of a primary metric are better."""
        names = [*METRICS, *(f"worst_{column}_acc{k}" for column in self.columns for k in (1, 5))]
        return tuple(
            name
            for name in names
            if any(self._fits(name, task) for task in tasks)
            and not (primary and name in METRICS and not METRICS[name].larger_is_better)
        )

    def _fits(self, name: str, task_name: str) -> bool:
        metric, task = get_metric(name), TASKS[task_name]
        assert metric is not None
        if task.fits != "labels":
            # scores on cards are fractions
            return metric.kind == METRICS[task.metric].kind and metric.highest == 1.0
        if metric.kind != ("multi-label" if self.multilabel else "one-label"):
            return False
        if metric.column and metric.column not in self.columns:
            return False
        if self.classes is not None and not metric.least <= self.classes <= (metric.most or self.classes):
            return False
        return (self.superclasses or not metric.needs_superclasses) and (
            task.gives_probabilities or not metric.needs_probabilities
        )

    def find_misfit(self, metrics: Sequence[str], tasks: Sequence[str], *, primary: bool = False) -> str:
        """Describe the first metric that applies to none of the tasks; "" if there is none."""
        applicable = self.list_metrics(tasks, primary=primary)
        for name in metrics:
            if name not in applicable:
                return f"{name!r} does not apply to {' or '.join(tasks)}; metrics that do: {', '.join(applicable)}"
        return ""


# --------------------------------------------------------------------------------------------------------------
# The tables of a card. Fields are in the order in which ``card_toml`` writes them.


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A table in a card file; unknown keys are errors."""


class Prompts(_Table, frozen=True, kw_only=True):
    """A prompt set as stated on a card.

    Attributes:
        source: where the prompts are from.
        templates: prompts with ``{c}``; or "folder" for those next to the images, an ``open_clip:`` list, or the
            name of another prompt set of the card.
        names: by class key, the names of classes that are not called by their key; or a string as for templates.
    """

    source: str = ""
    templates: Templates | str
    names: Mapping[str, Words] | str = {}


class Torchvision(_Table, frozen=True, kw_only=True):
    """A class of ``torchvision.datasets``, its arguments besides the split, and its splits by our names."""

    name: Text = msgspec.field(name="class")
    arguments: Mapping[str, Any] = {}
    splits: Mapping[str, Text] = {}

    def split(self, ours: str) -> str:
        """Return the split of ``eval.readers`` for a split of the card: "all" may be the test split."""
        return self.splits.get(ours, ours)


class Hub(_Table, frozen=True, kw_only=True):
    """A dataset of parquet files at Hugging Face, and the split that is the test split."""

    name: Text
    split: Text = "test"


class Sources(_Table, frozen=True, kw_only=True):
    """Locations of the images.

    Attributes:
        clip_benchmark: a published folder at ``hf://datasets/clip-benchmark/``.
        datacomp: a folder published by DataComp, test split only, at ``hf://datasets/djghosh/``.
        builtin: the name of a built-in dataset.
        torchvision: torchvision's dataset.
        huggingface: parquet files at Hugging Face.
        images: the card of the dataset with the images, if only texts are published.
    """

    clip_benchmark: str = ""
    datacomp: str = ""
    builtin: str = ""
    torchvision: Torchvision | None = None
    huggingface: Hub | None = None
    images: str = ""

    @property
    def folders(self) -> tuple[str, ...]:
        """Names that a published folder may have below a data root."""
        return tuple(filter(None, (self.clip_benchmark, self.datacomp)))

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the published folders."""
        places = (("clip-benchmark", self.clip_benchmark), ("djghosh", self.datacomp))
        return tuple(f"hf://datasets/{owner}/{folder}" for owner, folder in places if folder)


class Paper(_Table, frozen=True, kw_only=True):
    """What the CLIP paper (Radford et al. 2021) reports for a dataset in Table 9 and Figure 5.

    Attributes:
        name: the dataset's name.
        train: number of images.
        test: number of images.
        zero_shot_minus_resnet50: zero-shot score of ViT-L/14@336px minus that of a linear probe on a supervised
            ResNet-50.
        doubtful: facts that its other tables or the dataset contradict, or that cannot be checked.
    """

    name: Text
    train: Count
    test: Count
    zero_shot_minus_resnet50: Annotated[float, msgspec.Meta(ge=-1, le=1)]
    doubtful: str = ""


class Published(_Table, frozen=True, kw_only=True):
    """Scores published by others, by model, in 0 … 1; for comparison only."""

    source: Text
    task: Text
    metric: Text
    prompts: str = ""
    values: Annotated[Mapping[str, Score], msgspec.Meta(min_length=1)]


class Scores(Published, frozen=True, kw_only=True):
    """Scores that models must reach within ``tolerance``; otherwise data, model or code are wrong."""

    tolerance: Score


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The score that one model must reach within ``tolerance``; see ``Scores``."""

    model: str
    task: str
    metric: str
    prompts: str
    value: float
    tolerance: float
    source: str


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Class names and templates in the order of a dataset's labels.

    Attributes:
        name: the prompt set's name, such as "openai".
        class_names: by class, one name or several synonyms; names may be empty or repeated.
        templates: prompts with ``{c}`` for the class name.
        source: where the prompts are from.
    """

    name: str
    class_names: tuple[tuple[str, ...], ...]
    templates: tuple[str, ...]
    source: str

    def prompts(self, label: int) -> tuple[str, ...]:
        """Return every template with every synonym of a class; classifiers average over all of them."""
        return tuple(
            template.replace("{c}", name) for name in self.class_names[label] for template in self.templates
        )


class Card(_Table, frozen=True, kw_only=True):
    """One dataset.

    Attributes:
        name: the name of its file.
        title: its full name.
        tasks: names of ``eval.tasks.TASKS``, the main task first; empty if it cannot be scored here (see the note).
        metric: the primary metric, which applies to the main task.
        further: additional metrics.
        classes: number of classes; None without classes.
        label_is_line: whether two classes may share a name, so that a ``classnames.txt`` is matched line by
            line and a class's number is also its key.
        multilabel: whether an image may have several labels.
        metadata: names of the columns of the ``npy`` next to each image; metrics may group by one.
        stand_in: the card of the dataset that others score if this one's data are unavailable.
        get: how to get the data.
        home: the authors' page.
        license: the images' license.
        citation: what to cite.
        note: pitfalls.
        keys: the dataset's names of its classes in label order; () if unknown.
        splits: by split, the number of images.
        captions: by split, the number of captions.
        items: by split, the number of items if these are not single images but pairs of images or cues.
        caption_prompts: by prompt set, the template for captions, with ``{c}``; used only if the user names it.
        aliases: by class key, other keys of the class.
        superclasses: by superclass, the keys of its classes.
        languages: number of languages; None for one language or any number.
        paper: numbers from the CLIP paper, for its 27 datasets.
        sources: where the data are.
        prompt_sets: by name; the first is the default.
        published: scores by others.
        expected_scores: scores that models must reach.
    """

    name: str = msgspec.field(name="(name)")
    title: str
    tasks: tuple[str, ...]
    metric: str = ""
    further: tuple[str, ...] = ()
    classes: Count | None = None
    label_is_line: bool = False
    multilabel: bool = False
    metadata: tuple[str, ...] = ()
    stand_in: str = ""
    get: str = ""
    home: str = ""
    license: str = ""
    citation: str = ""
    note: str = ""
    keys: tuple[str, ...] = ()
    splits: Counts = {}
    captions: Counts = {}
    items: Counts = {}
    caption_prompts: Mapping[Text, Template] = {}
    aliases: Mapping[str, Words] = {}
    superclasses: Mapping[str, Texts] = {}
    languages: Count | None = None
    paper: Paper | None = None
    sources: Sources = Sources()
    prompt_sets: Mapping[str, Prompts] = msgspec.field(name="prompts", default_factory=dict)
    published: tuple[Published, ...] = ()
    expected_scores: tuple[Scores, ...] = msgspec.field(name="expected", default=())

    @property
    def metrics(self) -> tuple[str, ...]:
        """The primary metric, then the further ones."""
        return tuple(dict.fromkeys((self.metric, *self.further)))

    @property
    def expected(self) -> tuple[Expected, ...]:
        """The scores that models must reach."""
        return tuple(
            Expected(
                model=model,
                value=value,
                task=one.task,
                metric=one.metric,
                prompts=one.prompts,
                tolerance=one.tolerance,
                source=one.source,
            )
            for one in self.expected_scores
            for model, value in one.values.items()
        )

    def metric_kind(self) -> MetricKind:
        """Return the properties that determine which metrics apply."""
        return MetricKind(
            multilabel=self.multilabel,
            classes=self.classes,
            columns=self.metadata,
            superclasses=bool(self.superclasses),
        )

    def check_size(self, split: str, images: int) -> None:
        """Raise DataError if a split does not have the stated number of images."""
        if (stated := self.splits.get(split, images)) != images:
            how = f"download it again: {self.get or self.home}"
            if not (self.get or self.home):  # a user's own dataset
                how = f"restore the missing images, or set {split!r} of [splits] in its card to {images}"
            raise DataError(
                f"dataset {self.name}: split {split!r} has {counted(images, 'image')}, "
                f"its card says {stated:,}; {how}"
            )

    def match_classes(self, keys: Sequence[str]) -> tuple[int, ...]:
        """Bind a dataset's classes to the card's classes by their keys, never by their order.

        A key may be a folder's name, a line of ``classnames.txt``, or one of torchvision's classes. It is looked up
        among the card's keys and aliases, first exactly, then by letters and digits only, then in the same two ways
        among the class names of the prompt sets. Ambiguous names are ignored.

        Args:
            keys: the dataset's keys, by label.

        Returns:
            By label, the index of the class in ``self.keys``.

        Raises:
            DataError: a key is unknown or repeated, or a class is missing.
        """
        found: list[int | None] = [None] * len(keys)
        for loose, numbers in self._lookups():
            for label, key in enumerate(keys):
                if found[label] is None:
                    found[label] = numbers.get(simplify_key(key) if loose else key)
            if None not in found:
                break
        bound = [number for number in found if number is not None]
        if len(bound) == len(keys) == len(self.keys) == len(set(bound)):
            return tuple(bound)
        if self.label_is_line and len(keys) == len(self.keys) <= 2 * len(bound):
            for label, one in enumerate(found):
                if one not in (None, label):
                    raise DataError(
                        f"card {self.name}: line {label + 1} of the class names is {keys[label]!r}, which is class "
                        f"{one}: they are not in the order of the card"
                    )
            return tuple(range(len(keys)))
        seen: dict[int, int] = {}
        for label, number in enumerate(found):
            if number is None:
                hint = nearest(keys[label], self.keys)
                raise DataError(f"card {self.name}: unknown class {keys[label]!r} (label {label}), {hint}")
            if number in seen:
                first, second = keys[seen[number]], keys[label]
                raise DataError(
                    f"card {self.name}: labels {seen[number]} and {label} are the same class, "
                    f"{first!r} and {second!r}"
                )
            seen[number] = label
        missing = [repr(key) for number, key in enumerate(self.keys) if number not in seen]
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise DataError(
            f"card {self.name}: the dataset lacks {', '.join(missing[:_NAMED])}{more} of its {len(self.keys)} "
            "classes"
        )

    def _lookups(self) -> Iterator[tuple[bool, dict[str, int]]]:
        """Yield, in order of precedence, whether to compare loosely, and the class of each unambiguous word."""
        keys = [
            (word, number)
            for number, key in enumerate(self.keys)
            for word in (
                key,
                *_several(self.aliases.get(key, ())),
                *([str(number)] if self.label_is_line else []),
            )
        ]
        names = [
            (name, number)
            for prompt_set in self.prompt_sets
            for number, own in enumerate(self._names(prompt_set) or ())
            for name in own
        ]
        for words in (keys, names):
            for loose in (False, True):
                found: dict[str, int | None] = {}
                for word, number in words:
                    form = simplify_key(word) if loose else word
                    if found.setdefault(form, number) != number:
                        found[form] = None
                yield (
                    loose,
                    {form: one for form, one in found.items() if one is not None and (form or not loose)},
                )

    def list_superclasses(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Return the superclass of each of a dataset's classes; () without superclasses."""
        if not self.superclasses:
            return ()
        above = {key: name for name, below in self.superclasses.items() for key in below}
        return tuple(above[self.keys[number]] for number in self.match_classes(keys))

    def prompts(self, prompt_set: str, keys: Sequence[str], templates: Sequence[str] = ()) -> PromptSet:
        """Return a prompt set in the order of a dataset's labels.

        Args:
            prompt_set: a name in ``self.prompt_sets``.
            keys: the dataset's class keys by label; () if it only numbers its classes, which works if the numbers
                are keys or aliases.
            templates: the templates next to its images, for prompt sets that use them.

        Raises:
            DataError: there is no such prompt set, or the classes cannot be bound.
        """
        if prompt_set not in self.prompt_sets:
            hint = nearest(prompt_set, self.prompt_sets) if self.prompt_sets else "it has none"
            raise DataError(f"card {self.name} has no prompts {prompt_set!r}: {hint}")
        keys = keys or tuple(map(str, range(self.classes or 0)))
        if self.classes is not None and len(keys) != self.classes:
            raise DataError(f"card {self.name} has {self.classes} classes, the dataset {len(keys)}")
        names = self._names(prompt_set)
        class_names: tuple[tuple[str, ...], ...] = tuple((key,) for key in keys)
        if names is not None:
            class_names = tuple(names[number] for number in self.match_classes(keys))
        chosen: str | tuple[str, ...] = prompt_set
        while chosen in self.prompt_sets:
            chosen = self.prompt_sets[str(chosen)].templates
        if isinstance(chosen, str):
            chosen = tuple(templates) if chosen == FOLDER else _from_open_clip(chosen)
        if not chosen:
            raise DataError(
                f"card {self.name}: prompts {prompt_set!r} use the templates next to the images, but there are none"
            )
        source = self.prompt_sets[prompt_set].source
        return PromptSet(name=prompt_set, class_names=class_names, templates=chosen, source=source)

    def _names(self, prompt_set: str) -> tuple[tuple[str, ...], ...] | None:
        """Return the names of each class; None if they are the dataset's own keys."""
        names = self.prompt_sets[prompt_set].names
        if not isinstance(names, str):
            return tuple(_several(names.get(key, key)) for key in self.keys) if self.keys else None
        if names == FOLDER:
            return None
        if names.startswith("open_clip:"):
            return tuple((imagenet_names()[key],) for key in self.keys)
        return self._names(names)


def _several(words: str | tuple[str, ...]) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else words


def simplify_key(key: str) -> str:
    """Return the letters and digits without case and accents; of a number also without leading zeros."""
    plain = "".join(one for one in unicodedata.normalize("NFKD", key).casefold() if one.isalnum())
    return (plain.lstrip("0") or "0") if plain.isdecimal() else plain


def _from_open_clip(name: str) -> tuple[str, ...]:
    """Return one of open_clip's lists; its templates are functions of the class name."""
    values = prompt_list(name.removeprefix("open_clip:"))
    return tuple(value if isinstance(value, str) else value("{c}") for value in values)


@cache
def imagenet_names() -> dict[str, str]:
    """Return open_clip's class names by WordNet id; the keys of the card imagenet1k are in label order."""
    keys = read_card(DATASETS / "imagenet1k.toml").keys
    return dict(zip(keys, _from_open_clip(_IMAGENET_NAMES), strict=True))


# --------------------------------------------------------------------------------------------------------------
# Reading cards.


def read_card(path: Path, *, name: str = "") -> Card:
    """Read a card; its name is the file's unless ``name`` is given.

    Raises:
        DataError: the file cannot be read, or its content is invalid.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    return parse_card(text, name=name or path.stem, file=str(path))


@cache
def card_names() -> tuple[str, ...]:
    """Return the names of all cards."""
    return tuple(sorted(path.stem for path in DATASETS.glob("*.toml") if path.stem != "suites"))


@cache
def load_card(name: str) -> Card:
    """Return a dataset's card; raise DataError if there is none."""
    if name not in card_names():
        raise DataError(f"no card for dataset {name!r}: {nearest(name, card_names())}")
    return read_card(DATASETS / f"{name}.toml")


def parse_card(text: str, *, name: str, file: str) -> Card:
    """Parse a card; ``file`` is its name in messages.

    Raises:
        DataError: its content is invalid.
    """
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for numbers with thousands of digits
        raise DataError(f"{file} is not TOML: {error}") from error
    keys = table.get("keys")
    if isinstance(keys, str):  # the name of a card with the same classes
        table["keys"] = read_card(DATASETS / f"{keys}.toml").keys
    try:
        card = msgspec.convert({"title": name, **table, "(name)": name}, Card)
    except msgspec.ValidationError as error:
        raise DataError(f"{file}: {error}") from error
    if card.keys and card.classes not in (None, len(card.keys)):
        raise DataError(f"{file}: classes = {card.classes}, but there are {len(card.keys)} keys")
    if not card.prompt_sets.get("simple") and (card.classes or card.keys):
        names = next(iter(card.prompt_sets), None) if card.keys else FOLDER
        simple = Prompts(names=names or {}, templates=("a photo of a {c}.",), source="the plainest prompt")
        card = msgspec.structs.replace(card, prompt_sets={**card.prompt_sets, "simple": simple})
    card = msgspec.structs.replace(card, classes=len(card.keys) or card.classes)
    mistake = _find_mistake(card)
    if mistake:
        raise DataError(f"{file}: {mistake}")
    return card


def _find_mistake(card: Card) -> str:
    """Describe a mistake in a user's card that would silently give other scores; "" without one.

    What only the authors of clipkit's own cards write is checked by their tests.
    """
    if repeated := [key for key, count in Counter(card.keys).items() if count > 1]:
        return f"keys has {repeated[0]!r} several times"
    if unknown := [task for task in card.tasks if task not in TASKS]:
        return f"tasks has an unknown task {unknown[0]!r}: {nearest(unknown[0], TASKS)}"
    if card.tasks:
        kind = card.metric_kind()
        if misfit := kind.find_misfit([card.metric], card.tasks[:1], primary=True):
            return f"metric: {misfit}"
        if misfit := kind.find_misfit(card.further, card.tasks):
            return f"further: {misfit}"
    names_of_classes: dict[str, Mapping[str, Words] | str] = {"aliases": card.aliases}
    for prompt_set, prompts in card.prompt_sets.items():
        names_of_classes[f"prompts.{prompt_set}.names"] = prompts.names
        for key, lists in (("names", (_IMAGENET_NAMES,)), ("templates", _IMAGENET_TEMPLATES)):
            if not _ends(card, prompt_set, key, (FOLDER, *lists)):
                known = [other for other in (FOLDER, *lists, *card.prompt_sets) if other != prompt_set]
                value = getattr(prompts, key)
                return f"prompts.{prompt_set}.{key} = {value!r} leads to no list: {nearest(value, known)}"
    for table, names in names_of_classes.items():
        for key in names if not isinstance(names, str) else ():
            if key not in card.keys:
                return f"{table} has {key!r}, which is none of keys: {nearest(key, card.keys)}"
    if card.superclasses and sorted(chain(*card.superclasses.values())) != sorted(card.keys):
        return "superclasses must have each of keys once"
    for score in card.expected_scores:
        known_prompts = card.caption_prompts if score.task == "retrieval" else card.prompt_sets
        if score.prompts and score.prompts not in known_prompts:
            return f"expected has the prompts {score.prompts!r}, which the card does not have"
    return ""


def _ends(card: Card, prompt_set: str, key: str, lists: Sequence[str]) -> bool:
    """Whether a prompt set refers, perhaps through others, to a list rather than to nothing or to itself."""
    seen = {prompt_set}
    value = getattr(card.prompt_sets[prompt_set], key)
    while isinstance(value, str) and value not in lists:
        if value in seen or value not in card.prompt_sets:
            return False
        seen.add(value)
        value = getattr(card.prompt_sets[value], key)
    return True
