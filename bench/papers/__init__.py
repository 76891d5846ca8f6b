"""Findings of papers, tried in small on built-in data; see ``python -m bench.papers --help``."""
