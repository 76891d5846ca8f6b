"""Datasets × tasks → scores and reports: how good a model is, and on what.

import eval
scores = eval.evaluate(model, "digits")                             # a list of eval.Score
scores = eval.evaluate(model, "digits", out=Path("results.jsonl"))  # and lines in a file, with provenance

What needs torch is imported when it is first asked for: Ctrl-C is answered at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eval.datasets.dataset import EvalDataset
    from eval.features.encoder import Encoder, Ranks
    from eval.readers import open_dataset, open_datasets
    from eval.results.scores import (
        Score,
        append_results,
        latest_results,
        provenance,
        read_results,
        weights_id,
    )
    from eval.run import check_tasks, evaluate
    from eval.tasks import TASKS
    from eval.tasks.subject import Subject

__all__ = [
    "TASKS",
    "Encoder",
    "EvalDataset",
    "Ranks",
    "Score",
    "Subject",
    "append_results",
    "check_tasks",
    "evaluate",
    "latest_results",
    "open_dataset",
    "open_datasets",
    "provenance",
    "read_results",
    "weights_id",
]

_HOMES = {
    "TASKS": "tasks",
    "Encoder": "features.encoder",
    "EvalDataset": "datasets.dataset",
    "Ranks": "features.encoder",
    "Score": "results.scores",
    "Subject": "tasks.subject",
    "append_results": "results.scores",
    "check_tasks": "run",
    "evaluate": "run",
    "latest_results": "results.scores",
    "open_dataset": "readers",
    "open_datasets": "readers",
    "provenance": "results.scores",
    "read_results": "results.scores",
    "weights_id": "results.scores",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'eval' has no attribute {name!r}")
    found: object = getattr(import_module(f"eval.{_HOMES[name]}"), name)
    globals()[name] = found  # asked for once
    return found


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
