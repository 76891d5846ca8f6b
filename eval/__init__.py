"""Evaluate models: datasets × tasks → scores and reports.

import eval
scores = eval.evaluate(model, "digits")                             # a list of eval.Score
scores = eval.evaluate(model, "digits", out=Path("results.jsonl"))  # also appended to a file, with provenance

Names that need torch are imported on first use, so that ``--help`` and Ctrl-C respond immediately.
"""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from eval.datasets.dataset import EvalDataset as EvalDataset
    from eval.datasets.targets import find_targets as find_targets
    from eval.features.encoder import Encoder as Encoder, Ranks as Ranks, check_image as check_image
    from eval.features.mteb import mteb_model as mteb_model
    from eval.readers import open_dataset as open_dataset, open_datasets as open_datasets
    from eval.results.scores import (
        Score as Score,
        append_results as append_results,
        latest_results as latest_results,
        provenance as provenance,
        read_results as read_results,
        weights_id as weights_id,
    )
    from eval.run import check_tasks as check_tasks, evaluate as evaluate
    from eval.tasks import TASKS as TASKS
    from eval.tasks.subject import Subject as Subject

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "datasets.dataset": ["EvalDataset"],
        "datasets.targets": ["find_targets"],
        "features.encoder": ["Encoder", "Ranks", "check_image"],
        "features.mteb": ["mteb_model"],
        "readers": ["open_dataset", "open_datasets"],
        "results.scores": [
            "Score",
            "append_results",
            "latest_results",
            "provenance",
            "read_results",
            "weights_id",
        ],
        "run": ["check_tasks", "evaluate"],
        "tasks": ["TASKS"],
        "tasks.subject": ["Subject"],
    },
)
