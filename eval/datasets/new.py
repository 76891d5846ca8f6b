"""``python -m eval new``: write a card for a user's own dataset, based on its folder."""

import shlex
import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from clipkit.errors import ConfigError, DataError
from clipkit.files import printable
from clipkit.samples import MissingSplit, are_ids
from eval.datasets.card import Card, MetricKind, Prompts, imagenet_names
from eval.datasets.dataset import SPLITS, TEST, EvalDataset, list_some
from eval.datasets.targets import OWN_CARD
from eval.options import NewOptions
from eval.readers import open_dataset
from eval.tasks import TASKS

_SHOWN = 200  # characters of a source in a message
_MAX_NUMBERED = 100_000  # classes without names
_WIDTH = 100  # characters of a line of comments


def run_new(options: NewOptions) -> int:
    """Write the card of a dataset folder."""
    takes = "expected a local folder of images by class, shards or parquet files"
    folder = Path(options.data)
    try:
        folder = folder.expanduser()
        is_folder = bool(options.data) and folder.is_dir()  # Path("") is the current folder
    except (OSError, RuntimeError):  # a name too long; no such user
        folder = Path(options.data[:_SHOWN])
        is_folder = False
    if not is_folder:
        if folder.is_file():
            raise ConfigError(
                f"{options.data} is a file, which --data of run may accept without a card; {takes}"
            )
        raise ConfigError(f"{options.data[:_SHOWN] or '--data'} is not a folder: {takes}")
    path = folder / OWN_CARD
    if path.exists():
        raise ConfigError(f"{path} already exists: edit it, or remove it first")
    try:
        options.title.encode()
    except UnicodeError as error:  # from a terminal with another encoding
        raise ConfigError(f"the name {options.title[:_SHOWN]!r} is not UTF-8: choose another name") from error
    card = new_card(options.title, folder)
    where = printable(shlex.quote(options.data))
    text = card_toml(card, comments=_comments(card, where)) + _examples(card, where)
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
    print(f"wrote {path}: check its metric and prompts, then")
    if are_ids(card.keys) and not all(key in imagenet_names() for key in card.keys):
        print("  add class names under [prompts.own.names], since the folder has only numbers or ids, then")
    print(f"  python -m eval run --data {where} --model MODEL")
    return 0


def _comments(card: Card, where: str) -> dict[str, str]:
    """Return a comment for each key of the card that a user may change."""
    kind = MetricKind(multilabel=card.multilabel, classes=card.classes)
    main_metrics = kind.list_metrics(card.tasks[:1])
    metrics = kind.list_metrics(card.tasks)
    further = "any of the same metrics" if metrics == main_metrics else f"any of {', '.join(metrics)}"
    return {
        "": f"Used by python -m eval run --data {where}; eval/README.md lists all keys.",
        "tasks": f"the first is scored unless --task says otherwise; any of {', '.join(TASKS)}",
        "metric": f"the metric in tables; for {card.tasks[0]} one of {', '.join(main_metrics)}",
        "further": f"also reported: {further}",
        "keys": "the folder's class names in label order: do not change them",
        "splits": "number of images; any other number is an error",
        "prompts.own": "templates have {c} for the name; add more sets as [prompts.NAME], for --prompts NAME",
        "prompts.own.names": "the name of each class in prompts: one name, or a list of synonyms",
    }


def _examples(card: Card, where: str) -> str:
    """Return commented examples of a caption prompt and an expected score."""
    prompts = "own" if "own" in card.prompt_sets and card.tasks[0] != "retrieval" else ""
    examples = """
# Templates that --prompts NAME applies to captions; without it captions are used unchanged:
# [caption_prompts]
# NAME = "a photo of {c}"
"""
    if "retrieval" not in card.tasks:
        examples = ""
    return f"""{examples}
# A score that python -m eval verify --data {where} --model MODEL must reach; there may be several:
# [[expected]]
# task = "{card.tasks[0]}"
# metric = "{card.metric}"
# prompts = "{prompts}"
# tolerance = 0.005
# source = "who measured it"
# values = {{ "MODEL" = 0.5 }}
"""


def new_card(title: str, folder: Path) -> Card:
    """Create a card from a dataset's folder."""
    splits: dict[str, EvalDataset] = {}
    for split in SPLITS:
        try:
            splits[split] = open_dataset(folder, split=split)
        except MissingSplit:
            continue
    if TEST not in splits:
        raise DataError(f"{folder} has no split {TEST!r} to score on, only {', '.join(splits) or 'nothing'}")
    dataset = splits[TEST]
    repeated = [repr(name) for name, count in Counter(dataset.class_names).items() if count > 1]
    if repeated:
        raise DataError(
            f"{folder} has classes with the same name, {list_some(repeated)}: rename them, since a card identifies "
            "classes by name"
        )
    keys = dataset.class_names
    if not keys:  # numbered classes
        classes = 0
        for labels in (opened.labels for opened in splits.values()):
            if labels is not None and labels.dim() == 2:
                classes = max(classes, labels.shape[1])
            elif labels is not None and len(labels):
                classes = max(classes, int(labels.max()) + 1)
        if classes > _MAX_NUMBERED:
            raise DataError(
                f"{folder} has label {classes - 1:,}, and no class names: number its classes from 0"
            )
        keys = tuple(map(str, range(classes)))
    multilabel = dataset.labels is not None and dataset.labels.dim() == 2
    tasks = list(dataset.tasks)
    if dataset.labels is not None and not multilabel and "train" in splits:
        tasks = list(dict.fromkeys([*tasks, "linear-probe", "few-shot", "knn"]))
    metric = TASKS[dataset.tasks[0]].metric
    if multilabel:
        metric = "mean_average_precision"
    elif dataset.choices is not None and dataset.items is not None:  # Winoground
        metric = "group"
    applicable = MetricKind(multilabel=multilabel, classes=len(keys) or None).list_metrics(tasks)
    names = imagenet_names()
    prompt_sets = {}
    if dataset.labels is not None:
        class_names = {key: names.get(key, key) for key in keys}
        prompt_sets["own"] = Prompts(names=class_names, templates=dataset.templates, source=title)
    return Card(
        name=dataset.name,
        title=title,
        tasks=tuple(tasks),
        metric=metric,
        further=tuple(name for name in ("acc5", "mean_per_class_recall") if name in applicable),
        keys=keys,
        classes=len(keys) or None,
        multilabel=multilabel,
        splits={split: len(opened) for split, opened in splits.items()},
        prompt_sets=prompt_sets,
    )


def card_toml(card: Card, *, comments: Mapping[str, str] | None = None) -> str:
    """Return the text of a card's file, which ``parse_card`` reads as an equal card.

    Args:
        card: the card; empty values are left out.
        comments: comments by the key or table that they precede; "" is for the start of the file.
    """
    fields: dict[str, Any] = msgspec.to_builtins(card)
    del fields["(name)"]
    unwritten = dict(comments or {})  # each is written once: a class may have the name of a key
    lines = _comment_lines(unwritten.pop("", ""))
    for line in tomli_w.dumps(fields).split("\n")[:-1]:
        key = line.partition(" = ")[0] if " = " in line else line.strip("[]")
        lines += [*_comment_lines(unwritten.pop(key, "")), line]
    return "\n".join(lines) + "\n"


def _comment_lines(text: str) -> list[str]:
    # TOML allows no control characters in comments
    return textwrap.wrap(
        printable(text), _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
    )
