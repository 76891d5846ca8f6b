"""clipkit's cards and suites, and their facts for tables, pages and the terminal."""

import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain

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
    names = set(datasets)
    selected = {}
    for name, suite in _suites().items():
        if len(names.intersection(suite.cards)) > 1:
            selected[name] = suite.cards
    return selected


def primary_metrics(datasets: Iterable[str]) -> dict[str, str]:
    """Return the primary metric of each dataset that has a card."""
    return {card.name: card.metric for card in _load_cards(datasets)}


def _load_cards(datasets: Iterable[str]) -> list[Card]:
    """Return the cards of the datasets that have one."""
    return [load_card(name) for name in dict.fromkeys(datasets) if name in card_names()]


def published_scores(datasets: Iterable[str]) -> dict[str, Mapping[str, float] | tuple[Published, ...]]:
    """Return published scores by dataset and model: the first ones for the main task and primary metric.

    For retrieval, all are returned, since scores with and without a prompt before captions are not comparable.
    """
    published: dict[str, Mapping[str, float] | tuple[Published, ...]] = {}
    for card in _load_cards(datasets):
        for scores in card.published:
            if scores.task not in card.tasks[:1]:
                continue
            if scores.task == "retrieval":
                earlier = published.get(card.name, ())
                assert isinstance(earlier, tuple)
                published[card.name] = (*earlier, scores)
            elif scores.metric == card.metric:
                published.setdefault(card.name, scores.values)
    return published


def paper_differences(datasets: Iterable[str]) -> dict[str, float]:
    """Return by dataset the difference in figure 5 of the CLIP paper, see ``Paper``."""
    differences = {}
    for card in _load_cards(datasets):
        if card.paper is not None:
            differences[card.name] = card.paper.zero_shot_minus_resnet50
    return differences


def cards_in_no_suite() -> tuple[str, ...]:
    """Return the datasets that have a card and are in no suite."""
    members = set(chain.from_iterable(suite.cards for suite in _suites().values()))
    return tuple(name for name in card_names() if name not in members)


def matches_card(dataset: str, counts: Collection[object]) -> bool:
    """Return whether these image counts match the card's dataset rather than a folder with the same name."""
    if dataset not in card_names():
        return False
    count = load_card(dataset).splits.get(TEST)
    return count is None or count in counts


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
    suites = [suite for suite, members in _suites().items() if name in members.cards]
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
