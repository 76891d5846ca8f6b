"""``python -m eval new``: a card for a dataset of one's own, made from what its folder says."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from clipkit.errors import ConfigError, DataError
from eval.cards import Card, Prompts, card_toml
from eval.cards.metrics import MetricKind
from eval.dataset import TASKS, TEST, EvalDataset, NoSplit
from eval.readers import open_dataset
from eval.readers.caption_tables import how_to_pack, is_table
from eval.targets import OWN_CARD

__all__ = ["add_new_command", "new_card"]

_SHOWN = 200  # characters of a source in a message
_SPLITS = ("train", "val", TEST)


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
    card = new_card(options.title, folder)
    where = "".join(one if one.isprintable() else "?" for one in shlex.quote(options.data))
    text = card_toml(card, comments=_comments(card, where)) + _expected(card, where)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
    print(f"wrote {path}: look over its metric and prompts, then")
    print(f"  python -m eval run --data {where} --model MODEL")
    return 0


def _folder(source: str) -> Path:
    """The folder in which a card is to lie.

    Raises:
        ConfigError: it is no folder of this machine.
    """
    try:
        path = Path(source).expanduser()
        if path.is_dir():
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
    raise ConfigError(f"{source[:_SHOWN]} is no folder here: {takes}")


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
    """How a score to be met is written, as a comment."""
    prompts = "own" if "own" in card.prompt_sets else ""
    return f"""
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
        DataError: the folder has no split to score on, or is broken.
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
    labelled = dataset.labels is not None and bool(dataset.class_names)
    several = dataset.labels is not None and dataset.labels.dim() == 2
    tasks = list(dataset.tasks)
    if labelled and "train" in splits:
        tasks += [task for task in ("linear-probe", "few-shot", "knn") if task not in tasks and not several]
    names = {key: (key,) for key in dataset.class_names}
    prompts = Prompts(name="own", names=names, templates=dataset.templates, source=title)
    return Card(
        name=dataset.name,
        title=title,
        tasks=tuple(tasks),
        metric=_metric(dataset, several=several),
        further=("mean_per_class_recall",) if labelled and not several else (),
        keys=dataset.class_names,
        classes=len(dataset.class_names) or None,
        multilabel=several,
        splits={name: len(one) for name, one in splits.items()},
        prompt_sets={"own": prompts} if labelled else {},
    )


def _metric(dataset: EvalDataset, *, several: bool) -> str:
    if several:
        return "mean_average_precision"
    if dataset.choices is not None:
        return "accuracy" if dataset.items is None else "group"
    return "mean_R@1" if dataset.tasks[0] == "retrieval" else "acc1"
