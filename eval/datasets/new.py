"""``python -m eval new``: a card for a dataset of one's own, made from what its folder says."""

import argparse
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from clipkit.errors import ConfigError, DataError
from clipkit.files.terminal import counted, printable
from eval.datasets import Card, Prompts, Published, card_names, card_toml, load_card, load_suite, suite_names
from eval.datasets.card import MetricKind
from eval.datasets.dataset import TEST, EvalDataset, NoSplit, some
from eval.datasets.targets import OWN_CARD
from eval.readers import open_dataset
from eval.readers.files import how_to_pack, is_table
from eval.tasks import TASKS

__all__ = [
    "card_lines",
    "cards_in_no_suite",
    "is_of_card",
    "new_card",
    "primary_metrics",
    "published_scores",
    "run",
    "suites_of",
]

_SHOWN = 200  # characters of a source in a message
_SPLITS = ("train", "val", TEST)
_MOST_NUMBERED = 100_000  # classes without names


def run(options: argparse.Namespace) -> int:
    """Write the card of a dataset folder."""
    folder = _folder(options.data)
    path = folder / OWN_CARD
    if path.exists():
        raise ConfigError(f"{path} is there already: edit it, or remove it first")
    try:
        options.title.encode()
    except UnicodeError as error:  # a terminal of another encoding has typed halves of letters
        shown = repr(options.title[:_SHOWN])
        raise ConfigError(f"the name {shown} is not UTF-8: write it in other letters") from error
    card = new_card(options.title, folder)
    where = printable(shlex.quote(options.data))
    text = card_toml(card, comments=_comments(card, where)) + _expected_toml(card, where)
    _write(path, text)
    print(f"wrote {path}: look over its metric and prompts, then")
    if card.keys and card.keys == _numbered(len(card.keys)):
        print(
            "  write under [prompts.own.names] what its classes are called, which the folder only numbers, then"
        )
    print(f"  python -m eval run --data {where} --model MODEL")
    return 0


def _write(path: Path, text: str) -> None:
    """Write a new file, of which nothing stays where it cannot be written whole.

    Raises:
        DataError: it cannot, or something lies there.
    """
    try:
        with path.open("xb") as file:
            try:
                file.write(text.encode())
                file.flush()
            except OSError:
                path.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error


def _folder(source: str) -> Path:
    """The folder in which a card is to lie.

    Raises:
        ConfigError: it is no folder of this machine.
    """
    try:
        path = Path(source).expanduser()
        if source and path.is_dir():  # an empty name would be the folder where one is
            return path
    except (OSError, RuntimeError):  # a name too long; there is no such user
        path = Path(source[:_SHOWN])
    takes = (
        "a card is made of a folder of this machine: images by class, the published layout or parquet files"
    )
    if is_table(path):
        raise ConfigError(f"{source} is a table: {how_to_pack(path)}; {takes}")
    if path.is_file():
        raise ConfigError(f"{source} is a file, which --data of run may take without a card; {takes}")
    raise ConfigError(f"{source[:_SHOWN] or '--data'} is no folder here: {takes}")


def _comments(card: Card, where: str) -> dict[str, str]:
    """What a user may write instead, by the key of the card that it stands above."""
    kind = MetricKind(multilabel=card.multilabel, classes=card.classes)
    first, every = kind.fitting(card.tasks[:1]), kind.fitting(card.tasks)
    also = "of the same" if first == every else f"of {', '.join(every)}"
    return {
        "": f"What python -m eval run --data {where} goes by; eval/README.md lists all keys.",
        "tasks": f"the first is scored unless --task says otherwise; of {', '.join(TASKS)}",
        "metric": f"the one that tables are about; for {card.tasks[0]} of {', '.join(first)}",
        "further": f"reported besides: {also}",
        "keys": "the classes as the folder calls them, in the order of the labels: leave them as they are",
        "splits": "images; any other number is refused",
        "prompts.own": "templates have {c} for the name; more sets as [prompts.NAME], for --prompts NAME",
        "prompts.own.names": "what prompts call a class: one name, or a list of synonyms",
    }


def _expected_toml(card: Card, where: str) -> str:
    """How a prompt for captions and a score to be met are written, as comments."""
    prompts = "own" if "own" in card.prompt_sets and card.tasks[0] != "retrieval" else ""
    of_captions = """
# What --prompts NAME puts before each caption, which else stands as it is:
# [caption_prompts]
# NAME = "a photo of {c}"
"""
    return f"""{of_captions if "retrieval" in card.tasks else ""}
# A score that python -m eval verify --data {where} --model MODEL holds a model to; there may be several:
# [[expected]]
# task = "{card.tasks[0]}"
# metric = "{card.metric}"
# prompts = "{prompts}"
# tolerance = 0.005
# source = "who measured it"
# values = {{ "MODEL" = 0.5 }}
"""


def new_card(title: str, folder: Path) -> Card:
    """What a dataset's folder says of it, as a card.

    Raises:
        DataError: the folder has no split to score on, or is broken, or two of its classes are called alike.
    """
    splits: dict[str, EvalDataset] = {}
    for split in _SPLITS:
        try:
            splits[split] = open_dataset(folder, split=split)
        except NoSplit:
            continue
    if TEST not in splits:
        raise DataError(f"{folder} has no split {TEST!r} to score on, only {', '.join(splits) or 'nothing'}")
    dataset = splits[TEST]
    if alike := [name for name, count in Counter(dataset.class_names).items() if count > 1]:
        raise DataError(
            f"{folder} has classes that are called alike, {some(list(map(repr, alike)))}: rename them, as a card "
            "tells classes apart by their names"
        )
    labelled = dataset.labels is not None
    several = dataset.labels is not None and dataset.labels.dim() == 2
    keys = dataset.class_names or _numbers(folder, list(splits.values()))
    tasks = list(dataset.tasks)
    if labelled and "train" in splits:
        tasks += [task for task in ("linear-probe", "few-shot", "knn") if task not in tasks and not several]
    fitting = MetricKind(multilabel=several, classes=len(keys) or None).fitting(tasks)
    names = {key: (key,) for key in keys}
    prompts = Prompts(name="own", names=names, templates=dataset.templates, source=title)
    return Card(
        name=dataset.name,
        title=title,
        tasks=tuple(tasks),
        metric=_primary_metric(dataset, several=several),
        further=tuple(one for one in ("acc5", "mean_per_class_recall") if one in fitting),
        keys=keys,
        classes=len(keys) or None,
        multilabel=several,
        splits={name: len(one) for name, one in splits.items()},
        prompt_sets={"own": prompts} if labelled else {},
    )


def _numbers(folder: Path, splits: Sequence[EvalDataset]) -> tuple[str, ...]:
    """Of classes without names, their numbers as keys; () where there are no labels.

    Raises:
        DataError: a label is too great to be the number of a class.
    """
    found = [one.labels for one in splits if one.labels is not None and len(one.labels)]
    counts = [own.shape[1] if own.dim() == 2 else int(own.max()) + 1 for own in found] or [0]
    if max(counts) > _MOST_NUMBERED:
        raise DataError(
            f"{folder} has label {max(counts) - 1:,}, and no class names: number its classes from 0"
        )
    return _numbered(max(counts))


def _numbered(classes: int) -> tuple[str, ...]:
    return tuple(map(str, range(classes)))


def _primary_metric(dataset: EvalDataset, *, several: bool) -> str:
    if several:
        return "mean_average_precision"
    if dataset.choices is not None and dataset.items is not None:
        return "group"  # Winoground
    return TASKS[dataset.tasks[0]].metric


# --------------------------------------------------------------------------------------------------------------
# What cards say of the datasets in some results, in the plain form that pages and tables take.


def suites_of(datasets: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The suites of which at least two datasets are among these, with all that belong to them."""
    there = set(datasets)
    suites = {name: load_suite(name).cards for name in suite_names()}
    return {name: cards for name, cards in suites.items() if len(there.intersection(cards)) > 1}


def primary_metrics(datasets: Iterable[str]) -> dict[str, str]:
    """By dataset its primary metric, of those that have a card."""
    return {card.name: card.metric for card in _cards(datasets)}


def published_scores(datasets: Iterable[str]) -> dict[str, Mapping[str, float] | tuple[Published, ...]]:
    """By dataset and model what others published, the first in a card: its main task, its primary metric.

    Of retrieval it is all: numbers with a prompt before each caption do not belong beside those without.
    """
    found: dict[str, Mapping[str, float] | tuple[Published, ...]] = {}
    for card in _cards(datasets):
        own = tuple(one for one in card.published if (one.task,) == card.tasks[:1])
        first = next((one for one in own if one.metric == card.metric), None)
        if own and own[0].task == "retrieval":
            found[card.name] = own
        elif first is not None:
            found[card.name] = first.values
    return found


def cards_in_no_suite() -> tuple[str, ...]:
    """The datasets that have a card and are in no suite."""
    there = {card for name in suite_names() for card in load_suite(name).cards}
    return tuple(name for name in card_names() if name not in there)


def is_of_card(dataset: str, counts: Collection[object]) -> bool:
    """Whether scores under this name, of so many images, are of the card's dataset, not of a folder called so."""
    if dataset not in card_names():
        return False
    stated = load_card(dataset).splits.get("test")
    return stated is None or stated in counts


def _cards(datasets: Iterable[str]) -> list[Card]:
    known = set(card_names())
    return [load_card(name) for name in dict.fromkeys(datasets) if name in known]


def card_lines(name: str) -> list[str]:
    """What a card says of its dataset, a line for each thing, to be read on a terminal.

    Raises:
        DataError: there is no such card.
    """
    card = load_card(name)
    facts = {
        "tasks": ", ".join(card.tasks) or "none: it cannot be scored here",
        "metric": card.metric,
        "further": ", ".join(card.further),
        "images": _counts(card.splits),
        "captions": _counts(card.captions),
        "items": _counts(card.items),
        "classes": "" if card.classes is None else f"{card.classes:,}{_some_keys(card)}",
        "labels": "several per image" if card.multilabel else "",
        "groups": ", ".join(card.metadata),
        "prompts": ", ".join(_prompts(card)),
        "suites": ", ".join(suite for suite in suite_names() if name in load_suite(suite).cards),
        "source": _sources(card),
        "get": card.get,
        "home": card.home,
        "license": card.license,
        "citation": card.citation,
        "expected": "; ".join(_expected_scores(card)),
        "note": card.note,
    }
    width = max(map(len, facts)) + 2
    return [f"{name}: {card.title}", *(f"  {key:{width}}{value}" for key, value in facts.items() if value)]


def _counts(of_splits: Mapping[str, int]) -> str:
    return ", ".join(f"{split} {count:,}" for split, count in of_splits.items())


def _some_keys(card: Card) -> str:
    return f" ({some(card.keys)})" if card.keys else ""


def _prompts(card: Card) -> Iterator[str]:
    yield from (f"{own}{_templates(card, own)}" for own in card.prompt_sets)
    yield from (f"{own} (of captions: {template!r})" for own, template in card.caption_prompts.items())


def _templates(card: Card, prompt_set: str) -> str:
    """How many templates a prompt set states itself."""
    templates = card.prompt_sets[prompt_set].templates
    return "" if isinstance(templates, str) else f" ({counted(len(templates), 'template')})"


def _sources(card: Card) -> str:
    known = card.sources
    built_in = f"built in, --data {known.builtin}" if known.builtin else ""
    library = f"torchvision.datasets.{known.torchvision.name}" if known.torchvision is not None else ""
    hub = f"hf://datasets/{known.huggingface.name}" if known.huggingface is not None else ""
    return ", ".join(filter(None, (built_in, *known.urls, hub, library)))


def _expected_scores(card: Card) -> Iterator[str]:
    for one in card.expected:
        prompts = f" with prompts {one.prompts}" if one.prompts else ""
        figures = f"{100 * one.value:.2f} ± {100 * one.tolerance:.2f} %"
        yield f"{one.model} {one.task} {one.metric} {figures}{prompts}"
