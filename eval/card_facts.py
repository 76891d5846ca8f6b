"""What cards say of the datasets in some results, in the plain form that pages and tables take."""

from collections.abc import Collection, Iterable, Iterator, Mapping

from clipkit.count_progress import counted
from eval.cards import Card, Published, card_names, load_card, load_suite, suite_names
from eval.dataset import some

__all__ = [
    "card_lines",
    "cards_in_no_suite",
    "is_of_card",
    "primary_metrics",
    "published_scores",
    "suites_of",
]


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
    """Whether scores under this name, of so many pictures, are of the card's dataset, not of a folder called so."""
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
        "pictures": _counts(card.splits),
        "captions": _counts(card.captions),
        "items": _counts(card.items),
        "classes": "" if card.classes is None else f"{card.classes:,}{_some_keys(card)}",
        "labels": "several a picture" if card.multilabel else "",
        "groups": ", ".join(card.metadata),
        "prompts": ", ".join(_prompts(card)),
        "suites": ", ".join(suite for suite in suite_names() if name in load_suite(suite).cards),
        "source": _sources(card),
        "get": card.get,
        "home": card.home,
        "license": card.license,
        "citation": card.citation,
        "expected": "; ".join(_expected(card)),
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


def _expected(card: Card) -> Iterator[str]:
    for one in card.expected:
        prompts = f" with prompts {one.prompts}" if one.prompts else ""
        figures = f"{100 * one.value:.2f} ± {100 * one.tolerance:.2f} %"
        yield f"{one.model} {one.task} {one.metric} {figures}{prompts}"
