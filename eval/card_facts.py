"""What cards say of the datasets in some results, in the plain form that pages and tables take."""

from collections.abc import Collection, Iterable, Mapping

from eval.cards import Card, card_names, load_card, load_suite, suite_names

__all__ = ["is_of_card", "primary_metrics", "published_scores", "suites_of"]


def suites_of(datasets: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The suites of which at least two datasets are among these, with all that belong to them."""
    there = set(datasets)
    suites = {name: load_suite(name).cards for name in suite_names()}
    return {name: cards for name, cards in suites.items() if len(there.intersection(cards)) > 1}


def primary_metrics(datasets: Iterable[str]) -> dict[str, str]:
    """By dataset its primary metric, of those that have a card."""
    return {card.name: card.metric for card in _cards(datasets)}


def published_scores(datasets: Iterable[str]) -> dict[str, Mapping[str, float]]:
    """By dataset and model what others published, the first in a card: its main task, its primary metric."""
    found: dict[str, Mapping[str, float]] = {}
    for card in _cards(datasets):
        fitting = (one for one in card.published if one.task == card.tasks[0] and one.metric == card.metric)
        if (first := next(fitting, None)) is not None:
            found[card.name] = first.values
    return found


def is_of_card(dataset: str, counts: Collection[object]) -> bool:
    """Whether scores under this name, of so many pictures, are of the card's dataset, not of a folder called so."""
    if dataset not in card_names():
        return False
    stated = load_card(dataset).splits.get("test")
    return stated is None or stated in counts


def _cards(datasets: Iterable[str]) -> list[Card]:
    known = set(card_names())
    return [load_card(name) for name in dict.fromkeys(datasets) if name in known]
