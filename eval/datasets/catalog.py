"""The commands ``list`` and ``new``: print cards and suites, and write a card for a user's own dataset."""

import shlex
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
from rich import box
from rich.console import Console
from rich.table import Table

from clipkit.errors import ConfigError, DataError, nearest
from clipkit.files import counted, printable
from clipkit.samples import MissingSplit, are_ids
from eval.datasets.card import (
    OWN_CARD,
    Card,
    MetricKind,
    Prompts,
    card_names,
    imagenet_names,
    load_card,
    load_suite,
    suite_names,
)
from eval.datasets.dataset import SPLITS, TEST, EvalDataset, list_some
from eval.options import ListOptions, NewOptions
from eval.readers import open_dataset
from eval.tasks import TASKS
from eval.vectors.published import VECTORS


def cards_in_no_suite() -> tuple[str, ...]:
    """Return the datasets that have a card and are in no suite."""
    members = set(chain.from_iterable(suite.cards for suite in map(load_suite, suite_names())))
    return tuple(name for name in card_names() if name not in members)


def describe_card(name: str) -> list[str]:
    """Format a card as lines for a terminal; raise DataError if there is no such card."""
    card = load_card(name)
    sources = list(card.sources.urls)
    if card.sources.builtin:
        sources.insert(0, f"built in, --data {card.sources.builtin}")
    if card.sources.huggingface:
        sources.append(f"hf://datasets/{card.sources.huggingface.name}")
    if card.sources.torchvision:
        sources.append(f"torchvision.datasets.{card.sources.torchvision.name}")
    prompts = []
    for prompt_set, texts in card.prompt_sets.items():
        if not isinstance(texts.templates, str):
            prompt_set += f" ({counted(len(texts.templates), 'template')})"
        prompts.append(prompt_set)
    prompts += [f"{name} (of captions: {template!r})" for name, template in card.caption_prompts.items()]
    expected = []
    for score in card.expected:
        with_prompts = f" with prompts {score.prompts}" if score.prompts else ""
        figures = f"{100 * score.value:.2f} ± {100 * score.tolerance:.2f} %"
        expected.append(f"{score.model} {score.task} {score.metric} {figures}{with_prompts}")
    classes = _format_count(card.classes)
    if card.keys:
        classes += f" ({list_some(card.keys)})"
    suites = [suite for suite in suite_names() if name in load_suite(suite).cards]
    facts = {
        "tasks": ", ".join(card.tasks) or "none: it cannot be scored here",
        "metric": card.metric,
        "further": ", ".join(card.further),
        "images": _format_counts(card.splits),
        "captions": _format_counts(card.captions),
        "items": _format_counts(card.items),
        "classes": classes,
        "languages": str(card.languages or ""),
        "labels": "several per image" if card.multilabel else "",
        "groups": ", ".join(card.metadata),
        "prompts": ", ".join(prompts),
        "suites": ", ".join(suites),
        "source": ", ".join(sources),
        "get": card.get,
        "home": card.home,
        "license": card.license,
        "citation": card.citation,
        "expected": "; ".join(expected),
        "note": card.note,
    }
    width = max(map(len, facts)) + 2
    return [f"{name}: {card.title}", *(f"  {key:{width}}{value}" for key, value in facts.items() if value)]


def _format_counts(by_split: Mapping[str, int]) -> str:
    return ", ".join(f"{split} {count:,}" for split, count in by_split.items())


def _format_count(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


# --------------------------------------------------------------------------------------------------------------
# The command ``list``.


def run_list(options: ListOptions) -> int:
    """List suites and their datasets, or print a dataset's card."""
    console = Console(highlight=False)
    if options.suite in card_names():
        for line in describe_card(options.suite):
            console.print(line, markup=False, soft_wrap=True)
        return 0
    if options.suite is not None and options.suite not in suite_names():
        hint = nearest(options.suite, [*suite_names(), *card_names()])
        raise ConfigError(f"unknown suite or dataset {options.suite!r}: {hint}")
    suites = suite_names() if options.suite is None else (options.suite,)
    for name in suites:
        suite = load_suite(name)
        rows = [(card, suite.metrics_for(card)[0]) for card in map(load_card, suite.cards)]
        console.print(_tabulate_cards(f"{name}: {suite.title}", rows))
    if options.suite is None:
        rows = [(card, card.metric) for card in map(load_card, cards_in_no_suite())]
        console.print(_tabulate_cards("in no suite", rows))
        names = sorted(path.stem for path in VECTORS.glob("*.toml"))
        console.print(f"published values for verify --vectors: {', '.join(names)}")
    return 0


def _tabulate_cards(title: str, rows: Sequence[tuple[Card, str]]) -> Table:
    """Tabulate datasets with their main task and a metric; names are never wrapped, so that they can be copied."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("dataset", no_wrap=True)
    table.add_column("task", no_wrap=True)
    table.add_column("metric", overflow="fold")
    table.add_column("classes", justify="right", no_wrap=True)
    table.add_column("test", justify="right", no_wrap=True)
    for card, metric in rows:
        task = card.tasks[0] if card.tasks else "not scored"
        table.add_row(
            card.name, task, metric, _format_count(card.classes), _format_count(card.splits.get(TEST))
        )
    return table


# --------------------------------------------------------------------------------------------------------------
# The command ``new``.

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
    kind = MetricKind(multilabel=card.multilabel, classes=card.classes)
    main_metrics = kind.list_metrics(card.tasks[:1])
    metrics = kind.list_metrics(card.tasks)
    further = "any of the same metrics" if metrics == main_metrics else f"any of {', '.join(metrics)}"
    return {
        "": f"Used by python -m eval run --data {where}; eval/README.md lists all keys.",
        "tasks": f"the first is scored unless --task says otherwise; any of {', '.join(TASKS)}",
        "metric": f"the metric in tables; for {card.tasks[0]} one of {', '.join(main_metrics)}",
        "further": f"also reported: {further}",
        "keys": "the folder's class names; grades from the lowest to the highest, with ordered = true",
        "splits": "number of images; any other number is an error",
        "prompts.own": "templates have {c} for the name; add more sets as [prompts.NAME], for --prompts NAME",
        "prompts.own.names": "the name of each class in prompts: one name, or a list of synonyms",
    }


def _examples(card: Card, where: str) -> str:
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
    """Return the text of a card's file, which ``parse_card`` reads as an equal card."""
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
