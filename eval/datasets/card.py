"""Cards, which describe datasets, and suites of cards.

A card is a TOML file: ``eval/datasets/NAME.toml`` for the datasets that clipkit knows, ``card.toml`` next to a
user's own images. Class names are bound to the dataset's own class keys, since published lists are not all in label
order.
"""

import tomllib
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec

from clipkit.errors import DataError, nearest
from clipkit.files import counted, load_prompts
from eval.datasets.dataset import list_some
from eval.metrics import EVERY, METRICS, get_metric
from eval.tasks import TASKS

DATASETS = Path(__file__).parent  # clipkit's own cards
OWN_CARD = "card.toml"  # next to a user's images
FOLDER = "folder"  # names or templates that are next to the images
_IMAGENET_NAMES = "open_clip:IMAGENET_CLASSNAMES"
_IMAGENET_TEMPLATES = ("open_clip:OPENAI_IMAGENET_TEMPLATES", "open_clip:SIMPLE_IMAGENET_TEMPLATES")

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
        ordered: whether classes are ordered.
        taxonomy: ranks of the taxonomy of the classes.
    """

    multilabel: bool = False
    classes: int | None = None
    columns: tuple[str, ...] = ()
    superclasses: bool = False
    ordered: bool = False
    taxonomy: tuple[str, ...] = ()

    def list_metrics(self, tasks: Sequence[str], *, primary: bool = False) -> tuple[str, ...]:
        """Return the metrics that apply to some of the tasks; larger values of a primary metric are better."""
        names = list(METRICS)
        if primary:
            names = [name for name in METRICS if METRICS[name].larger_is_better]
        for column in self.columns:
            names += [f"worst_{column}_acc1", f"worst_{column}_acc5"]
        names += [f"acc1_{rank}" for rank in self.taxonomy]
        names += [f"roc_auc_of_{EVERY}", f"average_precision_of_{EVERY}"]
        return tuple(name for name in names if any(self._fits(name, task) for task in tasks))

    def _fits(self, name: str, task_name: str) -> bool:
        task = TASKS[task_name]
        metric = get_metric(name)
        if metric is None:
            return False
        if task.fits != "labels":
            # scores on cards are fractions
            return metric.kind == METRICS[task.metric].kind and metric.highest == 1.0
        if metric.kind != ("multi-label" if self.multilabel else "one-label"):
            return False
        if metric.column and metric.column not in self.columns:
            return False
        if metric.taxon and metric.taxon not in (*self.taxonomy, *([EVERY] if self.taxonomy else [])):
            return False
        if self.classes is not None and not metric.least <= self.classes <= (metric.most or self.classes):
            return False
        return (
            (self.superclasses or not metric.needs_superclasses)
            and (self.ordered or not metric.needs_order)
            and (task.gives_probabilities or not metric.needs_probabilities)
        )

    def find_misfit(self, metrics: Sequence[str], tasks: Sequence[str], *, primary: bool = False) -> str:
        """Describe the first metric that applies to none of the tasks; "" if there is none."""
        for name in metrics:
            metric = get_metric(name)
            allowed = metric is not None and (metric.larger_is_better or not primary)
            if not allowed or not any(self._fits(name, task) for task in tasks):
                applicable = ", ".join(self.list_metrics(tasks, primary=primary))
                return f"{name!r} does not apply to {' or '.join(tasks)}; metrics that do: {applicable}"
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
        negative_templates: for several labels per image, prompts that deny a class, such as "no {c}": the score of
            a label is then the similarity with its prompts minus that with these.
        names: by class key, the names of classes that are not called by their key; or a string as for templates.
    """

    source: str = ""
    templates: Templates | str
    negative_templates: tuple[Template, ...] = ()
    names: Mapping[str, Words] | str = {}


class Torchvision(_Table, frozen=True, kw_only=True):
    """A class of ``torchvision.datasets``, its arguments besides the split, and its splits by the card's names."""

    name: Text = msgspec.field(name="class")
    arguments: Mapping[str, Any] = {}
    splits: Mapping[str, Text] = {}


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
        return tuple(folder for folder in (self.clip_benchmark, self.datacomp) if folder)

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the published folders."""
        urls = []
        if self.clip_benchmark:
            urls.append(f"hf://datasets/clip-benchmark/{self.clip_benchmark}")
        if self.datacomp:
            urls.append(f"hf://datasets/djghosh/{self.datacomp}")
        return tuple(urls)


class TableSource(_Table, frozen=True, kw_only=True):
    """The table with the images of the folder that a card is in, and the names of its columns.

    Attributes:
        files: by split, the table, a path relative to the folder; {} to look for tables in the folder.
        image: paths of the images; "" for the usual names, as of the captions.
        caption: captions, or queries.
        grade: the relevance of a row's image for its caption, 0 or more.
        image_fields: for retrieval, weights of the image's features and of those of its texts in other columns, of
            which the normalized sum stands for the image, as with ``data.image_fields`` of a training.
        label: the class of the image, or its classes with ``multilabel``.
        separator: what separates several classes in a cell.
    """

    files: Mapping[Split, Text] = {}
    image: str = ""
    caption: str = ""
    grade: str = ""
    image_fields: Mapping[Text, Annotated[float, msgspec.Meta(gt=0)]] = {}
    label: str = ""
    separator: Text = "|"


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
        negative_templates: prompts that deny the class.
        source: where the prompts are from.
    """

    name: str
    class_names: tuple[tuple[str, ...], ...]
    templates: tuple[str, ...]
    negative_templates: tuple[str, ...]
    source: str


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
        ordered: whether ``keys`` are in an order that metrics may use, such as grades of a disease.
        taxonomy: the ranks in each class key, such as ("genus", "species"), from the highest; the last one takes
            the rest of the key.
        taxonomy_separator: what separates them in a key; "" for white space.
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
        table: for a user's own card, the table with the images; with ``multilabel``, ``keys`` are its columns of 0,
            1 and -1 unless it has a column of labels.
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
    ordered: bool = False
    taxonomy: tuple[Text, ...] = ()
    taxonomy_separator: str = ""
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
    table: TableSource | None = None
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
        expected = []
        for scores in self.expected_scores:
            for model, value in scores.values.items():
                score = Expected(
                    model=model,
                    value=value,
                    task=scores.task,
                    metric=scores.metric,
                    prompts=scores.prompts,
                    tolerance=scores.tolerance,
                    source=scores.source,
                )
                expected.append(score)
        return tuple(expected)

    def metric_kind(self) -> MetricKind:
        """Return the properties that determine which metrics apply."""
        return MetricKind(
            multilabel=self.multilabel,
            classes=self.classes,
            columns=self.metadata,
            superclasses=bool(self.superclasses),
            ordered=self.ordered,
            taxonomy=self.taxonomy,
        )

    def check_size(self, split: str, images: int) -> None:
        """Raise DataError if a split does not have the stated number of images."""
        expected = self.splits.get(split, images)
        if images != expected:
            how = f"download it again: {self.get or self.home}"
            if not (self.get or self.home):  # a user's own dataset
                how = f"restore the missing images, or set {split!r} of [splits] in its card to {images}"
            raise DataError(
                f"dataset {self.name}: split {split!r} has {counted(images, 'image')}, "
                f"its card says {expected:,}; {how}"
            )

    def match_classes(self, keys: Sequence[str]) -> tuple[int, ...]:
        """Bind a dataset's classes to the card's classes by their keys, never by their order.

        A key may be a folder's name, a line of ``classnames.txt``, or one of torchvision's classes. It is looked up
        among the card's keys and aliases, first exactly, then by letters and digits only, then in the same two ways
        among the class names of the prompt sets. Ambiguous names are ignored.

        Returns:
            By label, the index of the class in ``self.keys``.
        """
        matches: list[int | None] = [None] * len(keys)
        for normalize, classes in self._class_lookups():
            for label, key in enumerate(keys):
                if matches[label] is None:
                    matches[label] = classes.get(normalize(key))
            if None not in matches:
                break
        order = [i for i in matches if i is not None]
        if len(order) == len(keys) == len(self.keys) == len(set(order)):
            return tuple(order)
        if self.label_is_line and len(keys) == len(self.keys) <= 2 * len(order):
            for label, i in enumerate(matches):
                if i not in (None, label):
                    raise DataError(
                        f"card {self.name}: line {label + 1} of the class names is {keys[label]!r}, which is class "
                        f"{i}: they are not in the order of the card"
                    )
            return tuple(range(len(keys)))
        labels: dict[int, int] = {}
        for label, i in enumerate(matches):
            if i is None:
                hint = nearest(keys[label], self.keys)
                raise DataError(f"card {self.name}: unknown class {keys[label]!r} (label {label}), {hint}")
            if i in labels:
                raise DataError(
                    f"card {self.name}: labels {labels[i]} and {label} are the same class, {keys[labels[i]]!r} and "
                    f"{keys[label]!r}"
                )
            labels[i] = label
        missing = [repr(key) for i, key in enumerate(self.keys) if i not in labels]
        raise DataError(
            f"card {self.name}: the dataset lacks {list_some(missing)} of its {len(self.keys)} classes"
        )

    def _class_lookups(self) -> Iterator[tuple[Callable[[str], str], dict[str, int]]]:
        """Yield, in order of precedence, a form of words and the class of each word in this form."""
        keys: list[tuple[str, int]] = []
        for i, key in enumerate(self.keys):
            words = (key, *_as_tuple(self.aliases.get(key, ())))
            keys += [(word, i) for word in words]
            if self.label_is_line:
                keys.append((str(i), i))
        names: list[tuple[str, int]] = []
        for prompt_set in self.prompt_sets:
            for i, class_names in enumerate(self._names(prompt_set) or ()):
                names += [(name, i) for name in class_names]
        for classes_of_words in (keys, names):
            for normalize in (str, simplify_key):
                classes: dict[str, set[int]] = {}
                for word, i in classes_of_words:
                    classes.setdefault(normalize(word), set()).add(i)
                if normalize is simplify_key:
                    classes.pop("", None)  # words without letters and digits
                yield normalize, {word: same.pop() for word, same in classes.items() if len(same) == 1}

    def order_classes(self, keys: Sequence[str]) -> tuple[int, ...]:
        """Return where each of a dataset's classes is in the order of ``self.keys``; () if they are not ordered."""
        if not self.ordered:
            return ()
        numbers = tuple(map(str, range(len(self.keys))))  # of a dataset that only numbers its classes
        return self.match_classes(keys or numbers)

    def list_superclasses(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Return the superclass of each of a dataset's classes; () without superclasses."""
        if not self.superclasses:
            return ()
        superclass_of = {}
        for name, members in self.superclasses.items():
            superclass_of.update(dict.fromkeys(members, name))
        return tuple(superclass_of[self.keys[i]] for i in self.match_classes(keys))

    def list_taxonomy(self, keys: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return, by rank, the value of each of a dataset's classes at this rank and all above it."""
        if not self.taxonomy:
            return {}
        lineages: list[list[str]] = []
        for key in keys or self.keys:
            parts = key.split(self.taxonomy_separator or None, len(self.taxonomy) - 1)
            lineages.append([part.strip() for part in parts])
            if len(parts) < len(self.taxonomy):
                raise DataError(
                    f"card {self.name}: class {key!r} has {counted(len(parts), 'part')}, but taxonomy has "
                    f"{counted(len(self.taxonomy), 'rank')}"
                )
            for rank, part in zip(self.taxonomy, lineages[-1], strict=True):
                if not part:
                    raise DataError(
                        f"card {self.name}: class {key!r} has no {rank}: classes without one would count as equal"
                    )
        return {
            rank: tuple("\n".join(lineage[: i + 1]) for lineage in lineages)
            for i, rank in enumerate(self.taxonomy)
        }

    def prompts(self, prompt_set: str, keys: Sequence[str], templates: Sequence[str] = ()) -> PromptSet:
        """Return a prompt set in the order of a dataset's labels.

        Args:
            prompt_set: a name in ``self.prompt_sets``.
            keys: the dataset's class keys by label; () if it only numbers its classes, which works if the numbers
                are keys or aliases.
            templates: the templates next to its images, for prompt sets that use them.
        """
        if prompt_set not in self.prompt_sets:
            hint = nearest(prompt_set, self.prompt_sets) if self.prompt_sets else "it has none"
            raise DataError(f"card {self.name} has no prompts {prompt_set!r}: {hint}")
        keys = keys or tuple(map(str, range(self.classes or 0)))
        if self.classes is not None and len(keys) != self.classes:
            raise DataError(f"card {self.name} has {self.classes} classes, the dataset {len(keys)}")
        names = self._names(prompt_set)
        class_names: tuple[tuple[str, ...], ...]
        if names is None:
            class_names = tuple((key,) for key in keys)
        else:
            class_names = tuple(names[i] for i in self.match_classes(keys))
        chosen = self._dereference(prompt_set, "templates")
        if chosen == FOLDER:
            chosen = tuple(templates)
        elif isinstance(chosen, str):
            chosen = _load_open_clip_list(chosen)
        if not chosen:
            raise DataError(
                f"card {self.name}: prompts {prompt_set!r} use the templates next to the images, but there are none"
            )
        prompts = self.prompt_sets[prompt_set]
        return PromptSet(
            name=prompt_set,
            class_names=class_names,
            templates=chosen,
            negative_templates=prompts.negative_templates,
            source=prompts.source,
        )

    def _names(self, prompt_set: str) -> tuple[tuple[str, ...], ...] | None:
        """Return the names of each class; None if they are the dataset's own keys."""
        names = self._dereference(prompt_set, "names")
        if names == FOLDER or not self.keys:
            return None
        if isinstance(names, str):
            return tuple((imagenet_names()[key],) for key in self.keys)
        return tuple(_as_tuple(names.get(key, key)) for key in self.keys)

    def _dereference(self, prompt_set: str, field: str) -> Any:
        """Return the names or templates of a prompt set, or of the set that it refers to."""
        value = getattr(self.prompt_sets[prompt_set], field)
        if isinstance(value, str) and value in self.prompt_sets:
            return getattr(self.prompt_sets[value], field)
        return value


def _as_tuple(words: str | tuple[str, ...]) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else words


def simplify_key(key: str) -> str:
    """Return the letters and digits without case and accents; of a number also without leading zeros."""
    plain = "".join(filter(str.isalnum, unicodedata.normalize("NFKD", key).casefold()))
    if plain.isdecimal():
        return plain.lstrip("0") or "0"
    return plain


def _load_open_clip_list(name: str) -> tuple[str, ...]:
    """Return one of open_clip's lists; its templates are functions of the class name."""
    values = load_prompts(name.removeprefix("open_clip:"))
    return tuple(value("{c}") if callable(value) else value for value in values)


@cache
def imagenet_names() -> dict[str, str]:
    """Return open_clip's class names by WordNet id; the keys of the card imagenet1k are in label order."""
    keys = read_card(DATASETS / "imagenet1k.toml").keys
    return dict(zip(keys, _load_open_clip_list(_IMAGENET_NAMES), strict=True))


# --------------------------------------------------------------------------------------------------------------
# Reading cards.


def read_card(path: Path, *, name: str = "") -> Card:
    """Read a card; its name is the file's unless ``name`` is given."""
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
    """Parse a card; ``file`` is its name in messages."""
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
        raise DataError(f"{file}: {_find_misplaced(table) or error}") from error
    if card.keys and card.classes not in (None, len(card.keys)):
        raise DataError(f"{file}: classes = {card.classes}, but there are {len(card.keys)} keys")
    if not card.prompt_sets.get("simple") and (card.classes or card.keys):
        names: str | dict[str, Words] = FOLDER
        if card.keys:
            names = next(iter(card.prompt_sets), {})
        simple = Prompts(names=names, templates=("a photo of a {c}.",), source="the plainest prompt")
        card = msgspec.structs.replace(card, prompt_sets={**card.prompt_sets, "simple": simple})
    card = msgspec.structs.replace(card, classes=len(card.keys) or card.classes)
    mistake = _find_mistake(card)
    if mistake:
        raise DataError(f"{file}: {mistake}")
    return card


def _find_misplaced(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """Describe a key of the card that is in a table, which only the next table ends; "" if there is none."""
    card_keys = {field.encode_name for field in msgspec.structs.fields(Card)}
    for key, value in table.items():
        if isinstance(value, dict) and key not in ("aliases", "superclasses", "names"):  # names of classes
            misplaced = _find_misplaced(value, (*path, key))
            if misplaced:
                return misplaced
        elif path and key in card_keys and not isinstance(value, dict):
            return (
                f"{key!r} is no key of [{'.'.join(path)}]: move it up, before the first line with a [table]"
            )
    return ""


def _find_mistake(card: Card) -> str:
    """Describe a mistake in a user's card that would silently give other scores; "" without one.

    What only the authors of clipkit's own cards write is checked by their tests.
    """
    for key, words in (("keys", card.keys), ("taxonomy", card.taxonomy)):
        for word, count in Counter(words).items():
            if count > 1:
                return f"{key} has {word!r} several times"
    if card.table is not None:
        if card.table.caption and card.table.label:
            return "table.caption and table.label exclude each other"
        if card.table.grade and not card.table.caption:
            return "table.grade needs table.caption, the column of the queries"
        if card.table.image_fields and "image" not in card.table.image_fields:
            return "table.image_fields needs a weight of image"
        if card.multilabel and not card.keys:
            return "multilabel needs keys, the labels or their columns of the table"
    if card.ordered and not card.keys:
        return "ordered needs keys, the classes in their order"
    for task in card.tasks:
        if task not in TASKS:
            return f"tasks has an unknown task {task!r}: {nearest(task, TASKS)}"
    if card.tasks:
        kind = card.metric_kind()
        misfit = kind.find_misfit([card.metric], card.tasks[:1], primary=True)
        if misfit:
            return f"metric: {misfit}"
        misfit = kind.find_misfit(card.further, card.tasks)
        if misfit:
            return f"further: {misfit}"
    names_of_classes: dict[str, Mapping[str, Words]] = {"aliases": card.aliases}
    for prompt_set, prompts in card.prompt_sets.items():
        if prompts.negative_templates and not card.multilabel:
            return f"prompts.{prompt_set}.negative_templates needs multilabel = true"
        if not isinstance(prompts.names, str):
            names_of_classes[f"prompts.{prompt_set}.names"] = prompts.names
        for field, lists in (("names", (_IMAGENET_NAMES,)), ("templates", _IMAGENET_TEMPLATES)):
            value = card._dereference(prompt_set, field)
            if isinstance(value, str) and value not in (FOLDER, *lists):
                reference = getattr(prompts, field)
                sources = {FOLDER, *lists, *card.prompt_sets} - {prompt_set}
                hint = nearest(reference, sources)
                return f"prompts.{prompt_set}.{field} = {reference!r} leads to no list: {hint}"
    for table, names in names_of_classes.items():
        for key in names:
            if key not in card.keys:
                return f"{table} has {key!r}, which is none of keys: {nearest(key, card.keys)}"
    if card.superclasses and sorted(chain(*card.superclasses.values())) != sorted(card.keys):
        return "superclasses must have each of keys once"
    for score in card.expected_scores:
        prompt_sets = card.caption_prompts if score.task == "retrieval" else card.prompt_sets
        if score.prompts and score.prompts not in prompt_sets:
            return f"expected has the prompts {score.prompts!r}, which the card does not have"
    return ""


# --------------------------------------------------------------------------------------------------------------
# Suites.


class Suite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cards that are scored together.

    Attributes:
        title: the suite's full name.
        cards: names of cards, in the order of the source.
        prompts: the prompt set to use where a card has it; "" for each card's first.
        metric: the primary metric; "" for each card's own.
        note: remarks about the suite.
        source: who defined it.
    """

    title: str
    cards: tuple[str, ...]
    prompts: str = ""
    metric: str = ""
    note: str = ""
    source: str = ""

    def prompts_for(self, card: Card) -> str:
        """Return the prompt set for a card; "" for a card without prompts."""
        return self.prompts if self.prompts in card.prompt_sets else next(iter(card.prompt_sets), "")

    def metrics_for(self, card: Card) -> tuple[str, ...]:
        """Return the metrics for a card, the primary one first."""
        if not self.metric:
            return card.metrics
        return (self.metric, *(metric for metric in card.metrics if metric != self.metric))


@cache
def _suites() -> dict[str, Suite]:
    text = (DATASETS / "suites.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Suite])


def suite_names() -> tuple[str, ...]:
    """Return the names of all suites."""
    return tuple(_suites())


def load_suite(name: str) -> Suite:
    """Return a suite; raise DataError if there is none."""
    if name not in _suites():
        raise DataError(f"no suite {name!r}: {nearest(name, _suites())}")
    return _suites()[name]
