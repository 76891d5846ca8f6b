"""``python -m eval new``: a card for a dataset of one's own, made from what its folder says."""

import argparse
from pathlib import Path
from typing import Any

from clipkit.errors import ConfigError, DataError
from eval.cards import Card, Prompts, card_toml
from eval.dataset import TEST, EvalDataset, NoSplit
from eval.readers import open_dataset
from eval.targets import OWN_CARD

__all__ = ["add_new_command", "new_card"]

_SPLITS = ("train", "val", TEST)


def add_new_command(commands: Any) -> None:
    """Add it to the command line; it sets ``run``."""
    what = "make a card for a dataset of your own from its folder"
    new = commands.add_parser("new", help=what, description=what[0].upper() + what[1:] + ".")
    new.add_argument("title", metavar="NAME", help="what the dataset is called, as a person says it")
    new.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="the dataset")
    new.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    path = options.data.expanduser() / OWN_CARD
    if path.exists():
        raise ConfigError(f"{path} is there already: edit it, or remove it first")
    text = card_toml(new_card(options.title, options.data))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
    print(f"wrote {path}: look over its metric and prompts, then")
    print(f"  python -m eval run --data {options.data} --model MODEL")
    return 0


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
