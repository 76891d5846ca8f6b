"""Datasets × tasks → scores and reports: how good a model is, and on what.

import eval
scores = eval.evaluate(model, "digits")                             # a list of eval.Score
scores = eval.evaluate(model, "digits", out=Path("results.jsonl"))  # and lines in a file, with provenance
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from clipkit import CLIP
from clipkit.errors import ConfigError, nearest
from eval.dataset import TASKS, EvalDataset
from eval.encode import ONE_RANK, Encoded, Gather, Ranks, encode_dataset
from eval.readers import open_dataset, open_datasets
from eval.results import Score, append_results, latest_results, provenance, read_results, weights_id
from eval.tasks.retrieval import captions_of, retrieval
from eval.tasks.zero_shot import labels_of, zero_shot

__all__ = [
    "Encoded",
    "EvalDataset",
    "Score",
    "append_results",
    "check_tasks",
    "encode_dataset",
    "evaluate",
    "latest_results",
    "open_dataset",
    "open_datasets",
    "provenance",
    "read_results",
    "retrieval",
    "weights_id",
    "zero_shot",
]

_SCORE: Mapping[str, Callable[..., list[Score]]] = {"zero-shot": zero_shot, "retrieval": retrieval}
_CHECK: Mapping[str, Callable[[EvalDataset], object]] = {"zero-shot": labels_of, "retrieval": captions_of}
assert tuple(_SCORE) == tuple(_CHECK) == TASKS


def check_tasks(dataset: EvalDataset, tasks: Sequence[str] | None = None) -> tuple[str, ...]:
    """The tasks, or those that the dataset names, after making sure that it has what they need.

    Raises:
        DataError: the dataset lacks labels, class names or captions for one of them.
        ConfigError: a task is unknown.
    """
    chosen = dataset.tasks if tasks is None else tuple(tasks)
    for task in chosen:
        if task not in _CHECK:
            raise ConfigError(f"unknown task {task!r}: {nearest(task, _CHECK)}")
        _CHECK[task](dataset)
    return chosen


def evaluate(
    model: CLIP,
    data: str | Path | EvalDataset | Encoded,
    *,
    tasks: Sequence[str] | None = None,
    batch_size: int = 256,
    rank: int = 0,
    world: int = 1,
    gather: Gather = ONE_RANK.gather,
    out: Path | None = None,
    step: int | None = None,
    weights: str = "in memory",
    progress: Callable[[int], None] | None = None,
) -> list[Score]:
    """Score a model on a dataset; the pictures are encoded once for all tasks.

    With several ranks all of them call this, share the work, and return the same scores. It draws no random
    numbers and leaves the model in the mode it had, so a training may call it between two steps.

    Args:
        model: to be scored. Under autocast the towers run in its type, similarities never do.
        data: a dataset, or what ``open_dataset`` takes, or one that ``encode_dataset`` has encoded by this model.
        tasks: "zero-shot", "retrieval"; None for those that the dataset itself names.
        batch_size: pictures that the model takes at a time.
        rank: this process's number, below ``world``.
        world: how many processes there are.
        gather: sums a tensor over ranks, as ``clipkit.distributed.sum_over_ranks`` does.
        out: a results file to which rank 0 appends a line a score.
        step: of the training, for those lines.
        weights: what the weights are, for those lines.
        progress: called with the number of pictures after each batch.

    Raises:
        DataError: the dataset is missing or broken, or has not what a task needs.
        ConfigError: a task is unknown.
    """
    if isinstance(data, str | Path):
        data = open_dataset(data)
    chosen = check_tasks(data if isinstance(data, EvalDataset) else data.dataset, tasks)
    if isinstance(data, EvalDataset):
        data = encode_dataset(
            model, data, batch_size=batch_size, rank=rank, world=world, gather=gather, progress=progress
        )
    ranks = Ranks(rank=rank, world=world, gather=gather)
    scores = [score for task in chosen for score in _SCORE[task](model, data, ranks=ranks)]
    if out is not None and rank == 0:
        append_results(out, scores, step=step, provenance=provenance(model, data.dataset, weights=weights))
    return scores
