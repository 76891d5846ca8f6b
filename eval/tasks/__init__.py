"""What a model is asked to do with a dataset, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from clipkit.errors import ConfigError, nearest
from eval.dataset import EvalDataset
from eval.results import Score
from eval.tasks.classification import labels_of
from eval.tasks.retrieval import captions_of, retrieval
from eval.tasks.zero_shot import zero_shot

__all__ = ["KNOWN_TASKS", "Task", "check_tasks"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something a model can be scored on.

    Attributes:
        what: it is, in a few words.
        run: scores a model on a dataset.
        check: raises DataError where a dataset lacks what it needs.
    """

    what: str
    run: Callable[..., list[Score]]
    check: Callable[[EvalDataset], object]


KNOWN_TASKS: Mapping[str, Task] = {
    "zero-shot": Task(
        what="classify pictures by the prompts of their class names", run=zero_shot, check=labels_of
    ),
    "retrieval": Task(
        what="find captions by pictures and pictures by captions", run=retrieval, check=captions_of
    ),
}


def check_tasks(dataset: EvalDataset, tasks: Sequence[str] | None = None) -> tuple[str, ...]:
    """The tasks, or those that the dataset names, after making sure that it has what they need.

    Raises:
        DataError: the dataset lacks labels, class names or captions for one of them.
        ConfigError: a task is unknown.
    """
    chosen = dataset.tasks if tasks is None else tuple(tasks)
    for task in chosen:
        if task not in KNOWN_TASKS:
            raise ConfigError(f"unknown task {task!r}: {nearest(task, KNOWN_TASKS)}")
        KNOWN_TASKS[task].check(dataset)
    return chosen
