"""Datasets to evaluate models on: a card per dataset, suites of cards, and the splits that tasks see."""

from eval.datasets.card import (
    Card,
    Expected,
    Hub,
    Paper,
    Prompts,
    PromptSet,
    Published,
    Sources,
    Torchvision,
    card_names,
    load_card,
    parse_card,
    read_card,
)
from eval.datasets.catalog import Suite, load_suite, suite_names

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
    "load_card",
    "load_suite",
    "parse_card",
    "read_card",
    "suite_names",
]
