"""Evaluate models: datasets × tasks → scores and reports.

import eval
scores = eval.evaluate(model, "digits")                             # a list of eval.Score
scores = eval.evaluate(model, "digits", out=Path("results.jsonl"))  # also appended to a file, with provenance

Names are imported on first use, because most need torch and ``python -m eval --help`` imports this package.
"""

from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eval.datasets.dataset import EvalDataset as EvalDataset
    from eval.datasets.targets import (
        Target as Target,
        find_guards as find_guards,
        find_targets as find_targets,
    )
    from eval.features.adapters import mteb_model as mteb_model
    from eval.features.encoder import Encoder as Encoder, Ranks as Ranks, check_image as check_image
    from eval.readers import open_dataset as open_dataset, open_datasets as open_datasets
    from eval.readers.shards import Members as Members
    from eval.results.records import (
        Score as Score,
        append_results as append_results,
        provenance as provenance,
        read_results as read_results,
        weights_id as weights_id,
    )
    from eval.run import evaluate as evaluate, select_tasks as select_tasks
    from eval.scorer import (
        BestScore as BestScore,
        Scorer as Scorer,
        count_scored_steps as count_scored_steps,
    )
    from eval.tasks import TASKS as TASKS
    from eval.tasks.subject import Subject as Subject
    from eval.verdict import (
        FineTune as FineTune,
        format_verdict as format_verdict,
        judge_fine_tune as judge_fine_tune,
    )

_MODULES = {
    "eval.datasets.dataset": ("EvalDataset",),
    "eval.datasets.targets": ("Target", "find_guards", "find_targets"),
    "eval.features.encoder": ("Encoder", "Ranks", "check_image"),
    "eval.features.adapters": ("mteb_model",),
    "eval.readers": ("open_dataset", "open_datasets"),
    "eval.readers.shards": ("Members",),
    "eval.results.records": ("Score", "append_results", "provenance", "read_results", "weights_id"),
    "eval.run": ("evaluate", "select_tasks"),
    "eval.scorer": ("BestScore", "Scorer", "count_scored_steps"),
    "eval.tasks": ("TASKS",),
    "eval.tasks.subject": ("Subject",),
    "eval.verdict": ("FineTune", "format_verdict", "judge_fine_tune"),
}  # fmt: skip

__all__ = sorted(chain.from_iterable(_MODULES.values()))


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(module), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
