"""The parts of a dataset's card, and how each is read from its table in the card's file."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from clipkit.open_clip_package import prompt_list
from eval.cards.fields import Fields, read_fields
from eval.cards.metrics import MetricKind, task_and_metric
from eval.dataset import SPLITS, TASKS

__all__ = [
    "CARD_TASKS",
    "DATASETS",
    "FOLDER",
    "Expected",
    "Hub",
    "Paper",
    "PromptSet",
    "Prompts",
    "Published",
    "Sources",
    "Torchvision",
    "caption_prompts_of",
    "counts_of",
    "expected_of",
    "from_open_clip",
    "imagenet_names",
    "paper_of",
    "prompts_of",
    "published_of",
    "sources_of",
    "superclasses_of",
    "words_by_key",
]

CARD_TASKS = TASKS
DATASETS = Path(__file__).parents[1] / "datasets"  # the cards that clipkit brings
FOLDER = "folder"  # names or templates that are those beside the pictures
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
        names: by class key, for the classes whose name is not their key; or "folder" for those beside the pictures;
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
    """Where the pictures are; "" or None where they are not.

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
        train: pictures.
        test: pictures.
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
