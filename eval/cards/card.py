"""What a dataset is, how it is scored and what others measured on it; and datasets that are scored together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from clipkit.count_progress import counted
from clipkit.errors import DataError, nearest
from eval.cards.class_keys import Words, bind_keys, unique_words
from eval.cards.parts import (
    FOLDER,
    Expected,
    Paper,
    Prompts,
    PromptSet,
    Published,
    Sources,
    from_open_clip,
    imagenet_names,
)

__all__ = ["Card", "Suite"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Card:
    """One dataset.

    Attributes:
        name: of its file.
        title: as a person says it.
        tasks: what it is for, of ``CARD_TASKS``; the first is its main one. None where it is known and cannot be
            scored here, for which the note says why.
        metric: the primary one, of those that fit the main task; see ``eval.cards.metrics``.
        further: metrics worth knowing besides.
        classes: how many; None for datasets without classes.
        keys: what the dataset calls its classes, in the order of its labels; () where the card does not know.
        aliases: by key, what else the class goes by.
        label_is_line: some class names stand for two classes, so a ``classnames.txt`` is bound line by line; and
            the number of a class is a key of it.
        superclasses: by name, the keys of their classes.
        multilabel: whether a picture may have several labels.
        splits: how many pictures each has; of the others the card does not know.
        captions: how many captions each split has.
        items: how many things are asked of each split where these are not its pictures: pairs of pictures, cues.
        prompt_sets: as stated; the first is the one to use unless the user says otherwise.
        caption_prompts: by the name of a prompt set, what retrieval reads of a caption, ``{c}``; captions stand as
            they are unless the user names one.
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

    def check_size(self, split: str, pictures: int) -> None:
        """DataError if a split has not as many pictures as the card states: partial or other data."""
        if (stated := self.splits.get(split, pictures)) != pictures:
            how = f"fetch it again: {self.get or self.home}"
            if not (self.get or self.home):  # a user's own, which nobody publishes
                how = f"bring back what is missing, or set {split!r} of [splits] in its card to {pictures}"
            raise DataError(
                f"dataset {self.name}: split {split!r} has {counted(pictures, 'picture')}, "
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
            templates: those beside its pictures, for prompt sets that take them from there.

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
            by_key = imagenet_names()
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
