"""A card per dataset, and suites of cards: what a dataset is, how it is scored, what others measured.

A card is a TOML file: ``eval/datasets/NAME.toml`` for the datasets that clipkit knows, ``card.toml`` beside a
user's own images. ``eval/datasets/suites.toml`` lists the suites. Class names are bound to the dataset's own
class keys, because published lists of them are not all in the order of the labels.

card.py         Card and Suite
metrics.py      which metrics fit which task
parts.py        what a card holds: prompts, sources, scores of others
class_keys.py   binds a dataset's classes to those of its card
loading.py      reads cards and suites
writing.py      writes a card, for a user's own dataset
fields.py       the fields of a TOML file, with what is wrong in one line
"""

from eval.datasets.card import (
    Card,
    Expected,
    Hub,
    Paper,
    Prompts,
    PromptSet,
    Published,
    Sources,
    Suite,
    Torchvision,
)
from eval.datasets.loading import (
    card_names,
    card_toml,
    load_card,
    load_suite,
    parse_card,
    read_card,
    suite_names,
)

__all__ = [
    "Card",
    "Expected",
    "Hub",
    "Paper",
    "PromptSet",
    "Prompts",
    "Published",
    "Sources",
    "Suite",
    "Torchvision",
    "card_names",
    "card_toml",
    "load_card",
    "load_suite",
    "parse_card",
    "read_card",
    "suite_names",
]
