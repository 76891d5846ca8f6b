"""Evaluate models: datasets × tasks → scores and reports.

import eval
scores = eval.evaluate(model, "digits")                             # a list of eval.Score
scores = eval.evaluate(model, "digits", out=Path("results.jsonl"))  # and lines in a file, with provenance

Names that need torch are imported at first use, so that the command line responds to --help and Ctrl-C at once.
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
    "TASKS": "tasks", "Encoder": "features.encoder", "EvalDataset": "datasets.dataset", "Ranks": "features.encoder",
    "Score": "results.scores", "Subject": "tasks.subject", "append_results": "results.scores", "check_tasks": "run",
    "evaluate": "run", "latest_results": "results.scores", "open_dataset": "readers", "open_datasets": "readers",
    "provenance": "results.scores", "read_results": "results.scores", "weights_id": "results.scores",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'eval' has no attribute {name!r}")
    found: object = getattr(import_module(f"eval.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
