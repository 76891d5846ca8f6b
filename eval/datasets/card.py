"""What a dataset is, how it is scored and what others measured on it; and datasets that are scored together."""

import tomllib
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from clipkit.errors import DataError, nearest
from clipkit.files.open_clip import prompt_list
from clipkit.files.terminal import counted
from eval.datasets.dataset import SPLITS
from eval.metrics import METRICS, metric_of
from eval.tasks import TASKS, Task

__all__ = [
    "DATASETS",
    "FOLDER",
    "Card",
    "Expected",
    "Fields",
    "Hub",
    "MetricKind",
    "Paper",
    "PromptSet",
    "Prompts",
    "Published",
    "Sources",
    "Suite",
    "Torchvision",
    "Words",
    "bind_keys",
    "caption_prompts_of",
    "counts_of",
    "expected_of",
    "from_open_clip",
    "imagenet_names",
    "loose_form",
    "metric_and_further",
    "paper_of",
    "parse_fields",
    "prompts_of",
    "published_of",
    "read_fields",
    "sources_of",
    "superclasses_of",
    "task_and_metric",
    "unique_words",
    "words_by_key",
]


# --------------------------------------------------------------------------------------------------------------
# Binds a dataset's classes to those of its card by their keys, never by their order.
#
# A key is what a dataset calls a class: a folder's name, a line of ``classnames.txt``, one of torchvision's
# classes. It is looked for as it stands among the card's keys and aliases, then by its letters and digits alone
# (``apple_pie``, ``Apple Pie``; ``00014``, ``14``), then in the same two ways among the class names of the
# card's prompts. What would stand for two classes stands for none.

Words = dict[str, int]  # what stands for a class → its number
_SHOWN = 3


def loose_form(key: str) -> str:
    """Its letters and digits alone, without case and accents; of a number also without leading zeros."""
    plain = "".join(one for one in unicodedata.normalize("NFKD", key).casefold() if one.isalnum())
    return (plain.lstrip("0") or "0") if plain.isdecimal() else plain


def unique_words(words: Iterable[tuple[str, int]], *, loose: bool) -> Words:
    """The words that stand for one class only; loosely compared, none without a letter or digit."""
    found: dict[str, int | None] = {}
    for word, number in words:
        form = loose_form(word) if loose else word
        if found.setdefault(form, number) != number:
            found[form] = None
    return {form: number for form, number in found.items() if number is not None and (form or not loose)}


def bind_keys(
    card: str, given: Sequence[str], keys: Sequence[str], books: Iterator[tuple[bool, Words]], *, lines: bool
) -> tuple[int, ...]:
    """Which of the card's classes each of the dataset's is.

    Args:
        card: its name, for messages.
        given: the dataset's own keys, in the order of its labels.
        keys: the card's.
        books: what stands for its classes, and whether loosely; the first that has a key decides.
        lines: whether keys of which some cannot be bound are the card's line by line, if most say so and none
            contradicts it.

    Returns:
        By label, the number of the class on the card.

    Raises:
        DataError: a key is unknown or there twice, or a class has none.
    """
    found: list[int | None] = [None] * len(given)
    for loose, words in books:
        for label, key in enumerate(given):
            if found[label] is None:
                found[label] = words.get(loose_form(key) if loose else key)
        if None not in found:
            break
    bound = [number for number in found if number is not None]
    if len(bound) == len(given) == len(keys) == len(set(bound)):
        return tuple(bound)
    if lines and len(given) == len(keys) and 2 * len(bound) >= len(keys):
        for label, one in enumerate(found):
            if one not in (None, label):
                raise DataError(
                    f"card {card}: line {label + 1} of the class names is {given[label]!r}, which is class {one}: "
                    "they are not in the order that the card states"
                )
        return tuple(range(len(keys)))
    raise _unbound(card, given, keys, found)


def _unbound(card: str, given: Sequence[str], keys: Sequence[str], found: Sequence[int | None]) -> DataError:
    seen: dict[int, int] = {}
    for label, number in enumerate(found):
        if number is None:
            hint = nearest(given[label], keys)
            return DataError(f"card {card}: no class goes by {given[label]!r} (label {label}), {hint}")
        if number in seen:
            first, second = given[seen[number]], given[label]
            return DataError(
                f"card {card}: labels {seen[number]} and {label} are one class, {first!r} and {second!r}"
            )
        seen[number] = label
    missing = [repr(key) for number, key in enumerate(keys) if number not in seen]
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return DataError(
        f"card {card}: of its {len(keys)} classes the dataset lacks {', '.join(missing[:_SHOWN])}{more}"
    )


# --------------------------------------------------------------------------------------------------------------
# The fields of a TOML file, taken one by one, so that what is wrong is said with its file, key and value.

_MAX_BYTES = 4 << 20
_SHOWN_LETTERS = 80  # characters of a value in a message


class Fields:
    """One table. ``end`` tells of the fields that nobody has asked for."""

    def __init__(self, table: Mapping[str, Any], *, file: str, at: str = "") -> None:
        self.file = file
        self._table = table
        self._at = at
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._table

    def raw(self, key: str) -> Any:
        """What stands there, whatever it is; None where nothing does."""
        self._asked.add(key)
        return self._table.get(key)

    def wrong(self, key: str, must: str) -> DataError:
        value = self._table.get(key)
        shown = "is missing" if value is None else f"= {repr(value)[:_SHOWN_LETTERS]}"
        return DataError(f"{self.file}: {self._at}{key} {shown}: it must be {must}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or (not value and default is None):
            raise self.wrong(key, "text")
        return value

    def one_of(self, key: str, known: Collection[str], default: str | None = None) -> str:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value not in known:
            raise self.wrong(key, f"a known one, {nearest(str(value or '')[:_SHOWN_LETTERS], known)}")
        return value

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value) or not value:
            raise self.wrong(key, "a list of texts")
        return tuple(value)

    def some_of(
        self, key: str, known: Collection[str], default: tuple[str, ...] | None = None
    ) -> tuple[str, ...]:
        values = self.texts(key, default)
        for value in values:
            if value not in known:
                raise self.wrong(key, f"of known ones, not {value!r}: {nearest(value, known)}")
        if len(set(values)) < len(values):
            raise self.wrong(key, "a list in which nothing stands twice")
        return values

    def whole(self, key: str) -> int | None:
        value = self.raw(key)
        if value is not None and (type(value) is not int or value < 1):
            raise self.wrong(key, "a whole number, 1 or more")
        return value

    def wholes(self, key: str) -> tuple[int, ...]:
        value = self.raw(key)
        if value is None:
            return ()
        if not isinstance(value, list) or any(type(one) is not int or one < 0 for one in value):
            raise self.wrong(key, "a list of whole numbers, 0 or more")
        return tuple(value)

    def number(self, key: str, low: float, high: float) -> float:
        value = self.raw(key)
        # the bounds also keep out what is not finite, and whole numbers that no float holds
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.wrong(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return bool(value)

    def names(self) -> tuple[str, ...]:
        """Of its fields, in the order of the file."""
        return tuple(self._table)

    def table(self, key: str) -> "Fields | None":
        """The table inside this one, or None where there is none."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "a table")
        return Fields(value, file=self.file, at=f"{self._at}{key}.")

    def tables(self, key: str) -> list["Fields"]:
        """Those of a list of tables; none where there is no list."""
        value = self.raw(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self.wrong(key, f"tables, each under [[{self._at}{key}]]")
        return [
            Fields(one, file=self.file, at=f"{self._at}{key}[{number}].") for number, one in enumerate(value)
        ]

    def end(self) -> None:
        """DataError if there are fields that were never asked for."""
        for key in self._table:
            if key not in self._asked:
                raise DataError(
                    f"{self.file}: unknown key {(self._at + key)[:_SHOWN_LETTERS]!r}, {nearest(key, self._asked)}"
                )


def read_fields(path: Path) -> Fields:
    """The whole of a TOML file.

    Raises:
        DataError: it cannot be read, is too large, or is no TOML.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise DataError(f"{path} is larger than {_MAX_BYTES} bytes, too large for a card")
    try:
        return parse_fields(data.decode("utf-8-sig"), file=str(path))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error


def parse_fields(text: str, *, file: str) -> Fields:
    """The whole of a TOML file's text; ``file`` is what messages call it."""
    try:
        return Fields(tomllib.loads(text), file=file)
    except (ValueError, RecursionError) as error:  # ValueError too of numbers with thousands of digits
        raise DataError(f"{file} is no TOML: {error}") from error


# --------------------------------------------------------------------------------------------------------------
# Which metrics apply to which task and dataset.


@dataclass(frozen=True, kw_only=True)
class MetricKind:
    """The facts about a dataset that decide which metrics apply to it.

    Attributes:
        multilabel: whether an image may have several labels.
        classes: how many there are; None if unknown.
        columns: metadata columns that metrics may group by, as ``worst_region_acc1`` does.
        superclasses: whether classes are grouped.
    """

    multilabel: bool = False
    classes: int | None = None
    columns: tuple[str, ...] = ()
    superclasses: bool = False

    def fitting(self, tasks: Sequence[str], *, primary: bool = False) -> tuple[str, ...]:
        """The metrics that apply to some of these tasks; of a primary metric larger values are better."""
        names = [*METRICS, *(f"worst_{column}_acc{k}" for column in self.columns for k in (1, 5))]
        return tuple(
            name
            for name in names
            if any(self._fits(name, TASKS[task]) for task in tasks)
            and not (primary and name in METRICS and not METRICS[name].larger_is_better)
        )

    def _fits(self, name: str, task: Task) -> bool:
        metric = metric_of(name)
        assert metric is not None
        if task.fits != "labels":
            # scores of cards lie in 0 … 1, ranks do not
            return (
                metric.kind == {"captions": "retrieval", "choices": "compositional"}[task.fits]
                and metric.highest is not None
            )
        if metric.kind != ("multi-label" if self.multilabel else "one-label"):
            return False
        if self.classes is not None and not metric.least <= self.classes <= (metric.most or self.classes):
            return False
        return (self.superclasses or not metric.needs_superclasses) and (
            task.gives_probabilities or not metric.needs_probabilities
        )

    def fault(self, metrics: Sequence[str], tasks: Sequence[str], *, primary: bool = False) -> str:
        """Return what is expected instead, if one of the metrics applies to none of the tasks; else ""."""
        known = self.fitting(tasks, primary=primary)
        for metric in metrics:
            if metric not in known:
                other = _meant_for(metric)
                meant = f" ({metric} is for {other})" if other else ""
                return f"a metric of {' or '.join(tasks)}: {', '.join(known)}{meant}"
        return ""


def metric_and_further(fields: Fields, kind: MetricKind, tasks: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The primary metric, which fits the first task, and further ones, each of which fits some task.

    Raises:
        DataError: one does not.
    """
    metric = fields.raw("metric")
    further = () if fields.raw("further") == [] else fields.texts("further", ())
    if must := kind.fault([metric], tasks[:1], primary=True):
        raise fields.wrong("metric", must)
    if must := kind.fault(further, tasks):
        raise fields.wrong("further", f"a list of which each is {must}")
    if len({metric, *further}) <= len(further):
        raise fields.wrong("further", f"a list in which nothing stands twice, nor the metric {metric!r}")
    return metric, further


def task_and_metric(fields: Fields, kind: MetricKind) -> tuple[str, str]:
    """What the scores of a table are of.

    Raises:
        DataError: there is no such task, or the metric does not fit it.
    """
    task, metric = fields.one_of("task", TASKS), fields.raw("metric")
    if must := kind.fault([metric], [task]):
        raise fields.wrong("metric", must)
    return task, metric


def _meant_for(name: str) -> str:
    """What a metric applies to; "" if there is no such metric."""
    metric = METRICS.get(name) if isinstance(name, str) else None
    if metric is None:
        return ""
    if metric.kind == "multi-label":
        return "images with several labels, multilabel = true"
    if metric.kind != "one-label":
        return metric.kind
    if metric.needs_superclasses:
        return "datasets with [superclasses]"
    if not metric.larger_is_better:
        return "further, as smaller values are better"
    if metric.most is not None:
        return "two classes"
    return (
        "more than five classes, one label per image" if metric.least > 1 else "classes, one label per image"
    )


# --------------------------------------------------------------------------------------------------------------
# The parts of a dataset's card, and how each is read from its table in the card's file.

DATASETS = Path(__file__).parent  # the cards that clipkit brings
FOLDER = "folder"  # names or templates that are those beside the images
_TEMPLATES = ("OPENAI_IMAGENET_TEMPLATES", "SIMPLE_IMAGENET_TEMPLATES")  # open_clip's


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Class names and templates, in the order of a dataset's labels.

    Attributes:
        name: such as "openai".
        class_names: of each class, one name or several synonyms; a name may be empty, or stand for two classes.
        templates: with ``{c}`` where the class name goes.
        source: where the list is from.
    """

    name: str
    class_names: tuple[tuple[str, ...], ...]
    templates: tuple[str, ...]
    source: str

    def prompts(self, label: int) -> tuple[str, ...]:
        """Every template with every synonym of a class; a classifier takes the plain mean over all of them."""
        return tuple(
            template.replace("{c}", name) for name in self.class_names[label] for template in self.templates
        )


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """A prompt set as its card states it.

    Attributes:
        name: such as "openai".
        names: by class key, for the classes whose name is not their key; or "folder" for those beside the images;
            or "open_clip:" with the list's name there; or the name of another prompt set of the card.
        templates: the templates; or one of the same words.
        source: where the list is from.
    """

    name: str
    names: Mapping[str, tuple[str, ...]] | str
    templates: tuple[str, ...] | str
    source: str


@dataclass(frozen=True, kw_only=True)
class Torchvision:
    """A class of ``torchvision.datasets``: what it is told besides its split, and our names of its splits."""

    name: str
    arguments: Mapping[str, Any]
    splits: Mapping[str, str]

    def split(self, ours: str) -> str:
        """What ``eval.readers`` calls a split of the card: "all" of a set without splits may be its test."""
        return self.splits.get(ours, ours)


@dataclass(frozen=True, kw_only=True)
class Hub:
    """A dataset of the Hugging Face hub as parquet files, and which of its splits is the test."""

    name: str
    split: str


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the images are; "" or None where they are not.

    Attributes:
        clip_benchmark: a folder in the published layout, at ``hf://datasets/clip-benchmark/``.
        datacomp: one that DataComp publishes, test split only, at ``hf://datasets/djghosh/``.
        builtin: a built-in set's name.
        torchvision: see there.
        huggingface: see ``Hub``.
    """

    clip_benchmark: str = ""
    datacomp: str = ""
    builtin: str = ""
    torchvision: Torchvision | None = None
    huggingface: Hub | None = None

    @property
    def folders(self) -> tuple[str, ...]:
        """Names that a folder in the published layout may have below a data root."""
        return tuple(filter(None, (self.clip_benchmark, self.datacomp)))

    @property
    def urls(self) -> tuple[str, ...]:
        """Where such folders are published."""
        places = (("clip-benchmark", self.clip_benchmark), ("djghosh", self.datacomp))
        return tuple(f"hf://datasets/{who}/{folder}" for who, folder in places if folder)


@dataclass(frozen=True, kw_only=True)
class Paper:
    """What the CLIP paper (Radford et al. 2021) prints of a dataset in Table 9 and Figure 5.

    Attributes:
        name: there.
        train: images.
        test: images.
        zero_shot_minus_resnet50: ViT-L/14@336px zero-shot less a linear probe on a supervised ResNet-50, in -1 … 1.
        doubtful: what of these its other tables or the dataset contradict, or nobody can check; "" where nothing.
    """

    name: str
    train: int
    test: int
    zero_shot_minus_resnet50: float
    doubtful: str


@dataclass(frozen=True, kw_only=True)
class Published:
    """Scores that others have published, by clipkit's name of the model, in 0 … 1: to look at, not to be met."""

    source: str
    task: str
    metric: str
    prompts: str
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A score that a model has to reach within ``tolerance``, or something is wrong with data, model or code."""

    model: str
    task: str
    metric: str
    prompts: str
    value: float
    tolerance: float
    source: str


def prompts_of(fields: Fields, keys: Collection[str]) -> dict[str, Prompts]:
    """The table ``prompts``: a table for each prompt set."""
    return {name: _prompts(name, fields, keys) for name in fields.names()}


def _prompts(name: str, sets: Fields, keys: Collection[str]) -> Prompts:
    fields = sets.table(name)
    assert fields is not None
    others = [FOLDER, *(other for other in sets.names() if other != name)]
    templates: tuple[str, ...] | str
    if isinstance(fields.raw("templates"), str):
        templates = fields.one_of("templates", [*others, *(f"open_clip:{one}" for one in _TEMPLATES)])
    else:
        templates = fields.texts("templates")
        if lacking := [template for template in templates if "{c}" not in template]:
            raise fields.wrong("templates", f"with {{c}} for the class name in each, not {lacking[0]!r}")
    names: Mapping[str, tuple[str, ...]] | str
    if isinstance(fields.raw("names"), str):
        names = fields.one_of("names", [*others, "open_clip:IMAGENET_CLASSNAMES"])
    else:
        names = words_by_key(fields, "names", keys)
    found = Prompts(name=name, names=names, templates=templates, source=fields.text("source", ""))
    fields.end()
    return found


def caption_prompts_of(fields: Fields | None) -> dict[str, str]:
    """The table ``caption_prompts``: by the name of a prompt set, what retrieval reads of a caption."""
    found = {}
    for name in fields.names() if fields is not None else ():
        assert fields is not None
        template = fields.raw(name)
        if not name or not isinstance(template, str) or "{c}" not in template:
            raise fields.wrong(name, "text with {c} for the caption, under a name for --prompts")
        found[name] = template
    return found


def words_by_key(fields: Fields, name: str, keys: Collection[str]) -> dict[str, tuple[str, ...]]:
    """A table of words by class key: one word or a list of them."""
    table = fields.table(name)
    if table is None:
        return {}
    found = {}
    for key in table.names():
        if key not in keys:
            raise table.wrong(key, "of a class that stands in keys")
        found[key] = (table.text(key, ""),) if isinstance(table.raw(key), str) else table.texts(key)
    return found


def sources_of(fields: Fields) -> Sources:
    """The table ``sources``."""
    found = Sources(
        clip_benchmark=fields.text("clip_benchmark", ""),
        datacomp=fields.text("datacomp", ""),
        builtin=fields.text("builtin", ""),
        torchvision=_torchvision(fields.table("torchvision")),
        huggingface=_hub(fields.table("huggingface")),
    )
    fields.end()
    return found


def _torchvision(fields: Fields | None) -> Torchvision | None:
    if fields is None:
        return None
    arguments, splits = fields.table("arguments"), fields.table("splits")
    found = Torchvision(
        name=fields.text("class"),
        arguments={key: arguments.raw(key) for key in arguments.names()} if arguments else {},
        splits={split: splits.text(split) for split in splits.names()} if splits else {},
    )
    fields.end()
    return found


def _hub(fields: Fields | None) -> Hub | None:
    if fields is None:
        return None
    found = Hub(name=fields.text("name"), split=fields.text("split", "test"))
    fields.end()
    return found


def paper_of(fields: Fields | None) -> Paper | None:
    """The table ``paper``."""
    if fields is None:
        return None
    found = Paper(
        name=fields.text("name"),
        train=fields.whole("train") or 0,
        test=fields.whole("test") or 0,
        zero_shot_minus_resnet50=fields.number("zero_shot_minus_resnet50", -1, 1),
        doubtful=fields.text("doubtful", ""),
    )
    fields.end()
    return found


def published_of(fields: Fields, kind: MetricKind) -> Published:
    """One of the tables ``[[published]]``."""
    task, metric = task_and_metric(fields, kind)
    found = Published(
        source=fields.text("source"),
        task=task,
        metric=metric,
        prompts=fields.text("prompts", ""),
        values=_values(fields),
    )
    fields.end()
    return found


def expected_of(fields: Fields, kind: MetricKind) -> tuple[Expected, ...]:
    """One of the tables ``[[expected]]``, which has a value for each of some models."""
    task, metric = task_and_metric(fields, kind)
    found = tuple(
        Expected(
            model=model,
            task=task,
            metric=metric,
            prompts=fields.text("prompts", ""),
            value=value,
            tolerance=fields.number("tolerance", 0, 1),
            source=fields.text("source"),
        )
        for model, value in _values(fields).items()
    )
    fields.end()
    return found


def _values(fields: Fields) -> dict[str, float]:
    values = fields.table("values")
    if values is None or not values.names():
        raise fields.wrong("values", "a table of scores by model")
    return {model: values.number(model, 0, 1) for model in values.names()}


def superclasses_of(fields: Fields, keys: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The table ``superclasses``."""
    table = fields.table("superclasses")
    if table is None:
        return {}
    found = {name: table.some_of(name, keys) for name in table.names()}
    if sorted(key for below in found.values() for key in below) != sorted(keys):
        raise fields.wrong("superclasses", "tables in which each key stands once")
    return found


def counts_of(fields: Fields, key: str) -> dict[str, int]:
    """A table of counts by split."""
    table = fields.table(key)
    if table is None:
        return {}
    if unknown := [split for split in table.names() if split not in SPLITS]:
        raise fields.wrong(key, f"counts of {', '.join(SPLITS)}, not of {unknown[0]!r}")
    return {split: table.whole(split) or 0 for split in table.names()}


def from_open_clip(name: str) -> tuple[str, ...]:
    """One of open_clip's lists, "open_clip:" before it; its templates are functions of the class name."""
    values = prompt_list(name.removeprefix("open_clip:"))
    return tuple(value if isinstance(value, str) else value("{c}") for value in values)


@cache
def imagenet_names() -> dict[str, str]:
    """open_clip's class names by WordNet number, which are the keys of the card imagenet1k in label order."""
    keys = read_fields(DATASETS / "imagenet1k.toml").texts("keys")
    return dict(zip(keys, from_open_clip("open_clip:IMAGENET_CLASSNAMES"), strict=True))


# --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Card:
    """One dataset.

    Attributes:
        name: of its file.
        title: as a person says it.
        tasks: of ``eval.tasks.TASKS``, the main one first; empty if it cannot be scored here (the note says why).
        metric: the primary one, of those that fit the main task; see ``eval.datasets.card``.
        further: metrics worth knowing besides.
        classes: how many; None for datasets without classes.
        keys: what the dataset calls its classes, in the order of its labels; () where the card does not know.
        aliases: by key, what else the class goes by.
        label_is_line: some class names stand for two classes, so a ``classnames.txt`` is bound line by line; and
            the number of a class is a key of it.
        superclasses: by name, the keys of their classes.
        multilabel: whether an image may have several labels.
        splits: how many images each has; of the others the card does not know.
        captions: how many captions each split has.
        items: how many things are asked of each split where these are not its images: pairs of images, cues.
        prompt_sets: as stated; the first is the one to use unless the user says otherwise.
        caption_prompts: by the name of a prompt set, what retrieval reads of a caption, ``{c}``; captions stand as
            they are unless the user names one.
        sources: where it is to be had.
        metadata: facts about each image, the columns of the ``npy`` beside it; metrics may group by one, as
            ``worst_region_acc1`` does.
        stand_in: the card of what others score in its place where its own data are not to be had; or "".
        get: how to get it.
        home: where its authors publish it.
        license: of the images.
        citation: to cite.
        note: pitfalls.
        paper: what the CLIP paper prints of it; None for what is not one of its 27.
        published: scores by others.
        expected: scores to be met.
    """

    name: str
    title: str
    tasks: tuple[str, ...]
    metric: str
    further: tuple[str, ...] = ()
    classes: int | None = None
    keys: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    label_is_line: bool = False
    superclasses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    multilabel: bool = False
    splits: Mapping[str, int] = field(default_factory=dict)
    captions: Mapping[str, int] = field(default_factory=dict)
    items: Mapping[str, int] = field(default_factory=dict)
    prompt_sets: Mapping[str, Prompts] = field(default_factory=dict)
    caption_prompts: Mapping[str, str] = field(default_factory=dict)
    sources: Sources = field(default_factory=Sources)
    metadata: tuple[str, ...] = ()
    stand_in: str = ""
    get: str = ""
    home: str = ""
    license: str = ""
    citation: str = ""
    note: str = ""
    paper: Paper | None = None
    published: tuple[Published, ...] = ()
    expected: tuple[Expected, ...] = ()

    @property
    def metrics(self) -> tuple[str, ...]:
        """The primary metric, then the further ones."""
        return (self.metric, *self.further)

    def check_size(self, split: str, images: int) -> None:
        """DataError if a split has not as many images as the card states: partial or other data."""
        if (stated := self.splits.get(split, images)) != images:
            how = f"fetch it again: {self.get or self.home}"
            if not (self.get or self.home):  # a user's own, which nobody publishes
                how = f"bring back what is missing, or set {split!r} of [splits] in its card to {images}"
            raise DataError(
                f"dataset {self.name}: split {split!r} has {counted(images, 'image')}, "
                f"its card says {stated:,}; {how}"
            )

    def class_order(self, keys: Sequence[str]) -> tuple[int, ...]:
        """By label of a dataset with these class keys, the number of the class in ``self.keys``.

        Raises:
            DataError: a key is unknown or there twice, or a class has none.
        """
        return bind_keys(self.name, keys, self.keys, self._books(), lines=self.label_is_line)

    def superclass_of(self, keys: Sequence[str]) -> tuple[str, ...]:
        """By label of a dataset with these class keys, the name of its superclass; () where the card has none."""
        if not self.superclasses:
            return ()
        above = {key: name for name, below in self.superclasses.items() for key in below}
        return tuple(above[self.keys[number]] for number in self.class_order(keys))

    def prompts(self, prompt_set: str, keys: Sequence[str], templates: Sequence[str] = ()) -> PromptSet:
        """A prompt set in the order of a dataset's labels.

        Args:
            prompt_set: its name, one of ``self.prompt_sets``.
            keys: what the dataset itself calls its classes, in the order of its labels; none where it only numbers
                them, which binds them if their numbers are keys or aliases.
            templates: those beside its images, for prompt sets that take them from there.

        Raises:
            DataError: there is no such prompt set; or keys and classes do not go together.
        """
        if prompt_set not in self.prompt_sets:
            hint = nearest(prompt_set, self.prompt_sets) if self.prompt_sets else "it has none"
            raise DataError(f"card {self.name} has no prompts {prompt_set!r}: {hint}")
        keys = keys or tuple(map(str, range(self.classes or 0)))
        if self.classes is not None and len(keys) != self.classes:
            raise DataError(f"card {self.name} has {self.classes} classes, the dataset {len(keys)}")
        stated = self.prompt_sets[prompt_set]
        names = self._names(prompt_set)
        class_names: tuple[tuple[str, ...], ...] = tuple((key,) for key in keys)
        if names is not None:
            class_names = tuple(names[number] for number in self.class_order(keys))
        found = self._templates(prompt_set) or tuple(templates)
        if not found:
            raise DataError(
                f"card {self.name}: the templates of prompts {prompt_set!r} are those beside the images, "
                "and there are none"
            )
        return PromptSet(name=prompt_set, class_names=class_names, templates=found, source=stated.source)

    def _names(self, prompt_set: str) -> tuple[tuple[str, ...], ...] | None:
        """By class, its names; None if they are the dataset's own keys, whatever those are."""
        names = self.prompt_sets[prompt_set].names
        if not isinstance(names, str):
            return tuple(names.get(key, (key,)) for key in self.keys) if self.keys else None
        if names == FOLDER:
            return None
        if names.startswith("open_clip:"):
            by_key = imagenet_names()
            return tuple((by_key[key],) for key in self.keys)
        return self._names(names)

    def _templates(self, prompt_set: str) -> tuple[str, ...]:
        """Its templates; () if they are those beside the images."""
        templates = self.prompt_sets[prompt_set].templates
        if not isinstance(templates, str):
            return templates
        if templates == FOLDER:
            return ()
        return from_open_clip(templates) if templates.startswith("open_clip:") else self._templates(templates)

    def _books(self) -> Iterator[tuple[bool, Words]]:
        """What stands for the classes: keys and aliases, then their names, each as it is and loosely."""
        words = [
            (word, number)
            for number, key in enumerate(self.keys)
            for word in (key, *self.aliases.get(key, ()), *([str(number)] if self.label_is_line else []))
        ]
        yield False, unique_words(words, loose=False)
        yield True, unique_words(words, loose=True)
        names = [
            (name, number)
            for prompt_set in self.prompt_sets
            for number, own in enumerate(self._names(prompt_set) or ())
            for name in own
        ]
        yield False, unique_words(names, loose=False)
        yield True, unique_words(names, loose=True)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Cards that are scored together.

    Attributes:
        name: such as "clip27".
        title: as a person says it.
        cards: their names, in the order of the source.
        prompts: the prompt set of all, where a card has it; "" for each card's first.
        metric: the primary metric of all; "" for each card's own.
        note: what is particular about it.
        source: whose suite it is.
    """

    name: str
    title: str
    cards: tuple[str, ...]
    prompts: str = ""
    metric: str = ""
    note: str = ""
    source: str = ""

    def prompts_for(self, card: Card) -> str:
        """The prompt set to score a card with; "" for one without prompts."""
        return self.prompts if self.prompts in card.prompt_sets else next(iter(card.prompt_sets), "")

    def metrics_for(self, card: Card) -> tuple[str, ...]:
        """The primary metric first."""
        if not self.metric:
            return card.metrics
        return (self.metric, *(metric for metric in card.metrics if metric != self.metric))
