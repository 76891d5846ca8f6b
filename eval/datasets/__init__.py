"""Datasets to evaluate models on.

card     a card per dataset, and suites of cards
dataset  what tasks see of a split
targets  the datasets that a command names, with their cards and prompts
catalog  the commands ``list`` and ``new``
"""
