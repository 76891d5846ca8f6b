"""Knowing shards before a training: ``python -m data inspect``."""

from data.inspect.findings import Findings
from data.inspect.survey import inspect

__all__ = ["Findings", "inspect"]
