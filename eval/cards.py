"""A card per dataset, and suites of cards: what a dataset is, how it is scored, what others measured.

A card is a TOML file: ``eval/datasets/NAME.toml`` for the datasets that clipkit knows, ``card.toml`` beside a
user's own pictures. ``eval/datasets/suites.toml`` lists the suites. Class names are bound to the dataset's own
class keys (``eval.class_keys``), because published lists of them are not all in the order of the labels.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from clipkit.errors import DataError, nearest
from eval.card_fields import Fields, parse_fields, read_fields
from eval.card_parts import (
    CARD_METRICS,
    CARD_TASKS,
    FOLDER,
    Expected,
    Hub,
    Paper,
    Prompts,
    PromptSet,
    Published,
    Sources,
    Torchvision,
    expected_of,
    from_open_clip,
    metrics_of,
    paper_of,
    prompts_of,
    published_of,
    sources_of,
    superclasses_of,
    words_by_key,
)
from eval.class_keys import Words, bind_keys, unique_words

__all__ = [
    "CARD_METRICS",
    "CARD_TASKS",
    "Card",
    "Expected",
    "Hub",
    "Paper",
    "PromptSet",
    "Prompts",
    "Published",
    "Sources",
    "Suite",
    "Torchvision",
    "card_names",
    "load_card",
    "load_suite",
    "parse_card",
    "read_card",
    "suite_names",
]

_SIMPLE = ("a photo of a {c}.",)
_DATASETS = Path(__file__).parent / "datasets"
_SUITES = "suites"


@dataclass(frozen=True, kw_only=True, eq=False)
class Card:
    """One dataset.

    Attributes:
        name: of its file.
        title: as a person says it.
        tasks: what it is for, of ``CARD_TASKS``; the first is its main one.
        metric: the primary one, of ``CARD_METRICS`` or by group.
        further: metrics worth knowing besides.
        classes: how many; None for datasets without classes.
        keys: what the dataset calls its classes, in the order of its labels; () where the card does not know.
        aliases: by key, what else the class goes by.
        label_is_line: the class names are not distinct, so a ``classnames.txt`` is bound line by line.
        superclasses: by name, the keys of their classes.
        multilabel: whether a picture may have several labels.
        splits: how many pictures each has; of the others the card does not know.
        captions: how many captions each split has.
        prompt_sets: as stated; the first is the one to use unless the user says otherwise.
        sources: where it is to be had.
        metadata: facts about each picture, the columns of the ``npy`` beside it; metrics may group by one, as
            ``worst_region_acc1`` does.
        stand_in: the card of what others score in its place where its own data are not to be had; or "".
        get: how to get it.
        home: where its authors publish it.
        license: of the pictures.
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
    prompt_sets: Mapping[str, Prompts] = field(default_factory=dict)
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
            keys: what the dataset itself calls its classes, in the order of its labels.
            templates: those beside its pictures, for prompt sets that take them from there.

        Raises:
            DataError: there is no such prompt set; or keys and classes do not go together.
        """
        if prompt_set not in self.prompt_sets:
            hint = nearest(prompt_set, self.prompt_sets) if self.prompt_sets else "it has none"
            raise DataError(f"card {self.name} has no prompts {prompt_set!r}: {hint}")
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
                f"card {self.name}: the templates of prompts {prompt_set!r} are those beside the pictures, "
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
            by_key = dict(zip(load_card("imagenet1k").keys, from_open_clip(names), strict=True))
            return tuple((by_key[key],) for key in self.keys)
        return self._names(names)

    def _templates(self, prompt_set: str) -> tuple[str, ...]:
        """Its templates; () if they are those beside the pictures."""
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
            for word in (key, *self.aliases.get(key, ()))
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


def card_names() -> tuple[str, ...]:
    """The datasets that clipkit has a card of."""
    return tuple(sorted(path.stem for path in _DATASETS.glob("*.toml") if path.stem != _SUITES))


@cache
def load_card(name: str) -> Card:
    """A dataset's card.

    Raises:
        DataError: there is none.
    """
    if name not in card_names():
        raise DataError(f"there is no card of a dataset {name!r}: {nearest(name, card_names())}")
    return read_card(_DATASETS / f"{name}.toml")


def read_card(path: Path, *, name: str = "") -> Card:
    """The card in a file, a user's own for instance; it is named like the file unless ``name`` is given.

    Raises:
        DataError: the file cannot be read, or something in it is wrong.
    """
    return _card(read_fields(path), name or path.stem)


def parse_card(text: str, *, name: str, file: str) -> Card:
    """The card in a text; ``file`` is what messages call it."""
    return _card(parse_fields(text, file=file), name)


def _card(fields: Fields, name: str) -> Card:
    classes, keys = fields.whole("classes"), _keys(fields)
    if keys and classes not in (None, len(keys)):
        raise fields.wrong("classes", f"{len(keys)}, as many as there are keys")
    if len(set(keys)) < len(keys):
        doubled = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise fields.wrong("keys", f"a list in which no key stands twice, but {doubled!r} does")
    sets, sources = fields.table("prompts"), fields.table("sources")
    prompt_sets = prompts_of(sets, keys) if sets else {}
    if (classes or keys) and "simple" not in prompt_sets:
        names = next(iter(prompt_sets), None) if keys else FOLDER
        prompt_sets["simple"] = Prompts(
            name="simple", names=names or {}, templates=_SIMPLE, source="the plainest prompt there is"
        )
    metadata = fields.texts("metadata", ())
    metrics = metrics_of(metadata)
    splits, captions = fields.table("splits"), fields.table("captions")
    card = Card(
        name=name,
        title=fields.text("title", name),
        tasks=fields.some_of("tasks", CARD_TASKS),
        metric=fields.one_of("metric", metrics),
        further=fields.some_of("further", metrics, ()),
        classes=len(keys) or classes,
        keys=keys,
        aliases=words_by_key(fields, "aliases", keys),
        label_is_line=fields.flag("label_is_line"),
        superclasses=superclasses_of(fields, keys),
        multilabel=fields.flag("multilabel"),
        splits={split: splits.whole(split) or 0 for split in splits.names()} if splits else {},
        captions={split: captions.whole(split) or 0 for split in captions.names()} if captions else {},
        prompt_sets=prompt_sets,
        sources=sources_of(sources) if sources else Sources(),
        metadata=metadata,
        stand_in=fields.text("stand_in", ""),
        get=fields.text("get", ""),
        home=fields.text("home", ""),
        license=fields.text("license", ""),
        citation=fields.text("citation", ""),
        note=fields.text("note", ""),
        paper=paper_of(fields.table("paper")),
        published=tuple(published_of(one, metrics) for one in fields.tables("published")),
        expected=tuple(one for table in fields.tables("expected") for one in expected_of(table, metrics)),
    )
    fields.end()
    _check(card, fields)
    return card


def _keys(fields: Fields) -> tuple[str, ...]:
    """A list, or the name of the card whose keys these are too."""
    if not isinstance(fields.raw("keys"), str):
        return fields.texts("keys", ())
    return load_card(fields.one_of("keys", [name for name in card_names() if name != "suites"])).keys


def _check(card: Card, fields: Fields) -> None:
    if card.metric in card.further:
        raise fields.wrong("further", f"without {card.metric!r}, which is the metric already")
    for name in card.prompt_sets:
        _check_references(card, fields, name)
    for prompts in (*(one.prompts for one in card.published), *(one.prompts for one in card.expected)):
        if prompts and prompts not in card.prompt_sets:
            raise DataError(
                f"{fields.file}: published and expected scores are of the card's prompts, not {prompts!r}: "
                f"{nearest(prompts, card.prompt_sets) if card.prompt_sets else 'it has none'}"
            )
    if len(set(card.aliases) | set(card.keys)) > len(card.keys):
        raise fields.wrong("aliases", "of classes that stand in keys")


def _check_references(card: Card, fields: Fields, name: str) -> None:
    """A prompt set that takes names or templates of another must end at some."""
    for what in ("names", "templates"):
        seen = [name]
        while (
            isinstance(given := getattr(card.prompt_sets[seen[-1]], what), str) and given in card.prompt_sets
        ):
            if given in seen:
                raise DataError(f"{fields.file}: prompts.{name}.{what} goes in a circle: {', '.join(seen)}")
            seen.append(given)


def suite_names() -> tuple[str, ...]:
    """The suites that clipkit knows."""
    return tuple(_suites())


def load_suite(name: str) -> Suite:
    """A suite of cards.

    Raises:
        DataError: there is none.
    """
    suites = _suites()
    if name not in suites:
        raise DataError(f"there is no suite {name!r}: {nearest(name, suites)}")
    return suites[name]


@cache
def _suites() -> dict[str, Suite]:
    fields = read_fields(_DATASETS / f"{_SUITES}.toml")
    found = {}
    for name in fields.names():
        table = fields.table(name)
        assert table is not None
        found[name] = Suite(
            name=name,
            title=table.text("title"),
            cards=table.some_of("cards", card_names()),
            prompts=table.text("prompts", ""),
            metric=table.one_of("metric", CARD_METRICS, ""),
            note=table.text("note", ""),
            source=table.text("source", ""),
        )
        table.end()
    return found
