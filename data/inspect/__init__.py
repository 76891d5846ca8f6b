"""``python -m data inspect``: inspect shards before training."""

from data.inspect.findings import Findings
from data.inspect.survey import inspect

__all__ = ["Findings", "inspect"]
