"""``python -m eval new``: a card for a dataset of one's own, made from what its folder says."""

import argparse
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clipkit.errors import ConfigError, DataError
from eval.cards import Card, Prompts, card_toml
from eval.cards.metrics import MetricKind
from eval.dataset import TASKS, TEST, EvalDataset, NoSplit, some
from eval.readers import open_dataset
from eval.readers.caption_tables import how_to_pack, is_table
from eval.targets import OWN_CARD

__all__ = ["add_new_command", "new_card"]

_SHOWN = 200  # characters of a source in a message
_SPLITS = ("train", "val", TEST)
_MOST_NUMBERED = 100_000  # classes without names


def add_new_command(commands: Any) -> None:
    """Add it to the command line; it sets ``run``."""
    what = "make a card for a dataset of your own from its folder"
    new = commands.add_parser("new", help=what, description=what[0].upper() + what[1:] + ".")
    new.add_argument("title", metavar="NAME", help="what the dataset is called, as a person says it")
    new.add_argument("--data", required=True, metavar="FOLDER", help="the dataset")
    new.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
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
    where = "".join(one if one.isprintable() else "?" for one in shlex.quote(options.data))
    text = card_toml(card, comments=_comments(card, where)) + _expected(card, where)
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
        "a card is made of a folder of this machine: pictures by class, the published layout or parquet files"
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
        "splits": "pictures; any other number is refused",
        "prompts.own": "templates have {c} for the name; more sets as [prompts.NAME], for --prompts NAME",
        "prompts.own.names": "what prompts call a class: one name, or a list of synonyms",
    }


def _expected(card: Card, where: str) -> str:
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
        metric=_metric(dataset, several=several),
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


def _metric(dataset: EvalDataset, *, several: bool) -> str:
    if dataset.tasks[0] == "retrieval":
        return "mean_R@1"
    if several:
        return "mean_average_precision"
    if dataset.choices is not None:
        return "accuracy" if dataset.items is None else "group"
    return "acc1"
