"""``eval.evaluate``: one model on one dataset, from Python."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from clipkit import CLIP
from clipkit.encode import model_hash
from eval.dataset import EvalDataset
from eval.encode import Encoder
from eval.ranks import ONE_RANK, Ranks
from eval.readers import open_dataset
from eval.results import Score, append_results, provenance
from eval.subject import Subject
from eval.tasks import KNOWN_TASKS, Options, check_tasks

__all__ = ["evaluate"]


def evaluate(
    model: CLIP | Subject,
    data: str | Path | EvalDataset | None = None,
    *,
    tasks: Sequence[str] | None = None,
    batch_size: int = 256,
    ranks: Ranks = ONE_RANK,
    out: str | Path | None = None,
    step: int | None = None,
    weights: str = "",
    origin: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Score]:
    """Score a model on a dataset; the pictures are encoded once for all tasks.

    With several ranks all of them call this, share the work, and return the same scores. It draws no random
    numbers and leaves the model in the mode it had, so a training may call it between two steps.

    Args:
        model: to be scored; or a subject, which is a model on a dataset, what it has encoded included. Under
            autocast the towers run in its type, similarities never do.
        data: a dataset, or what ``open_dataset`` takes; None for a subject's own.
        tasks: of ``KNOWN_TASKS``; None for those that the dataset itself names.
        batch_size: pictures that the model takes at a time.
        ranks: who shares the work.
        out: a results file to which rank 0 appends a line a score.
        step: of the training, for those lines.
        weights: what the weights are, for those lines; else the model's hash tells.
        origin: further facts for them, such as the name of the model.
        progress: called with the number of pictures after each batch.

    Warns:
        UserWarning: images are transparent or have an EXIF orientation, and the model's preprocessing has neither a
            background nor ``upright`` (see ``clipkit.load``). Not of a subject, whose encoder has the counts.

    Raises:
        DataError: the dataset is missing or broken, or has not what a task needs.
        ConfigError: a task is unknown.
        TypeError: the model is none, or there is no dataset.
    """
    reported = isinstance(model, Subject)  # by whoever made it
    if not isinstance(model, Subject):
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a CLIP, as clipkit.load gives it, not {type(model).__name__}")
        if data is None:
            raise TypeError("a model needs data to be scored on: a dataset, its name or its folder")
        encoder = Encoder(model, ranks=ranks, batch_size=batch_size, progress=progress)
        dataset = data if isinstance(data, EvalDataset) else open_dataset(data)
        others = None if isinstance(data, EvalDataset) else lambda split: open_dataset(data, split=split)
        model = Subject(encoder, dataset, open_split=others)
    subject, options = model, Options(details=False)
    scores: list[Score] = []
    for task in check_tasks(subject.dataset, tasks):
        start = time.monotonic()
        found = KNOWN_TASKS[task].run(subject, options).scores
        scores += found
        if out is not None and subject.encoder.ranks.rank == 0:
            whose = {} if weights else {"model": "in memory", "model_hash": model_hash(subject.encoder.model)}
            facts = provenance(subject.encoder.model, subject.dataset, weights=weights)
            facts |= {**whose, **(origin or {})}
            append_results(
                Path(out), found, step=step, provenance=facts, seconds=round(time.monotonic() - start, 3)
            )
    for (name, split), counts in () if reported else subject.encoder.counts.items():
        for line in counts.lines(
            subject.encoder.model.preprocess.decoding,
            background="background='white' in clipkit.load",
            upright="upright=True in clipkit.load",
        ).values():
            warnings.warn(f"dataset {name}, split {split}: {line}", stacklevel=2)
    return scores
