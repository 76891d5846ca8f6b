"""clipkit's cards and suites, and their facts for tables, pages and the terminal."""

import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from clipkit.errors import ConfigError, DataError, nearest
from clipkit.files import counted
from eval.datasets.card import DATASETS, Card, Published, card_names, load_card
from eval.datasets.dataset import TEST, list_some
from eval.options import ListOptions


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


# --------------------------------------------------------------------------------------------------------------
# Facts from cards about the datasets in a set of results.


def select_suites(datasets: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the suites with at least two of the datasets, and all their members."""
    there = set(datasets)
    return {name: one.cards for name, one in _suites().items() if len(there.intersection(one.cards)) > 1}


def primary_metrics(datasets: Iterable[str]) -> dict[str, str]:
    """Return the primary metric of each dataset that has a card."""
    return {name: load_card(name).metric for name in datasets if name in card_names()}


def published_scores(datasets: Iterable[str]) -> dict[str, Mapping[str, float] | tuple[Published, ...]]:
    """Return published scores by dataset and model: the first ones for the main task and primary metric.

    For retrieval, all are returned, since scores with and without a prompt before captions are not comparable.
    """
    found: dict[str, Mapping[str, float] | tuple[Published, ...]] = {}
    for card in (load_card(name) for name in dict.fromkeys(datasets) if name in card_names()):
        own = tuple(one for one in card.published if (one.task,) == card.tasks[:1])
        first = next((one for one in own if one.metric == card.metric), None)
        if own and own[0].task == "retrieval":
            found[card.name] = own
        elif first is not None:
            found[card.name] = first.values
    return found


def paper_differences(datasets: Iterable[str]) -> dict[str, float]:
    """Return by dataset the difference in figure 5 of the CLIP paper, see ``Paper``."""
    cards = (load_card(name) for name in dict.fromkeys(datasets) if name in card_names())
    return {card.name: card.paper.zero_shot_minus_resnet50 for card in cards if card.paper is not None}


def cards_in_no_suite() -> tuple[str, ...]:
    """Return the datasets that have a card and are in no suite."""
    members = {card for suite in _suites().values() for card in suite.cards}
    return tuple(name for name in card_names() if name not in members)


def matches_card(dataset: str, counts: Collection[object]) -> bool:
    """Return whether these image counts match the card's dataset rather than a folder with the same name."""
    if dataset not in card_names():
        return False
    stated = load_card(dataset).splits.get(TEST)
    return stated is None or stated in counts


def describe_card(name: str) -> list[str]:
    """Format a card as lines for a terminal; raise DataError if there is no such card."""
    card = load_card(name)
    known = card.sources
    sources = [f"built in, --data {known.builtin}"] if known.builtin else []
    sources += known.urls
    sources += [f"hf://datasets/{known.huggingface.name}"] if known.huggingface else []
    sources += [f"torchvision.datasets.{known.torchvision.name}"] if known.torchvision else []
    prompts = []
    for own, one in card.prompt_sets.items():
        templates = "" if isinstance(one.templates, str) else f" ({counted(len(one.templates), 'template')})"
        prompts.append(f"{own}{templates}")
    prompts += [f"{own} (of captions: {template!r})" for own, template in card.caption_prompts.items()]
    expected = []
    for score in card.expected:
        with_prompts = f" with prompts {score.prompts}" if score.prompts else ""
        figures = f"{100 * score.value:.2f} ± {100 * score.tolerance:.2f} %"
        expected.append(f"{score.model} {score.task} {score.metric} {figures}{with_prompts}")
    classes = f"{card.classes:,}" if card.classes is not None else ""
    facts = {
        "tasks": ", ".join(card.tasks) or "none: it cannot be scored here",
        "metric": card.metric,
        "further": ", ".join(card.further),
        "images": _counts(card.splits),
        "captions": _counts(card.captions),
        "items": _counts(card.items),
        "classes": f"{classes} ({list_some(card.keys)})" if card.keys else classes,
        "languages": str(card.languages or ""),
        "labels": "several per image" if card.multilabel else "",
        "groups": ", ".join(card.metadata),
        "prompts": ", ".join(prompts),
        "suites": ", ".join(suite for suite, one in _suites().items() if name in one.cards),
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


def _counts(by_split: Mapping[str, int]) -> str:
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
