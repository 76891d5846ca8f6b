"""Scores one model again and again while it changes, and keeps what a run's page shows of it.

RUN/results.jsonl             a line a score, see eval/results.py
RUN/snapshots/                pictures and guesses of each moment, see eval/snapshot_file.py
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from clipkit import CLIP
from clipkit.checkpoint import is_complete
from clipkit.image_traits import TraitCounts
from eval import evaluate
from eval.dataset import EvalDataset
from eval.encode import Encoder
from eval.ranks import Ranks
from eval.results import Score, read_results, weights_id
from eval.snapshot import take_snapshot, write_snapshot
from eval.subject import Subject

__all__ = ["Scorer"]

_TOLD = ("acc1", "acc5", "image_to_text_R@1", "text_to_image_R@1")


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores a model on some datasets, by all ranks together.

    Attributes:
        model: as it is at each call.
        datasets: what it is scored on.
        run: the folder that rank 0 writes to.
        ranks: who shares the work.
        batch_size: pictures encoded at a time on each rank.
        bf16: whether the towers run in bfloat16.
        say: is given a line for each of the main scores.
        record: is given the step and all scores of a dataset by ``dataset/task/metric``; called on rank 0 only.
        note: is given, for each dataset and split, how many of its images are transparent or rotated by EXIF.
        as_scored: puts the model into the state that is scored, and back.
    """

    model: CLIP
    datasets: Sequence[EvalDataset]
    run: Path
    ranks: Ranks
    batch_size: int
    bf16: bool
    say: Callable[[str], None]
    record: Callable[[int, Mapping[str, float]], None]
    note: Callable[[str, TraitCounts], None] = lambda whose, counts: None
    as_scored: Callable[[], AbstractContextManager[None]] = nullcontext

    def score_if_owed(self, step: int) -> None:
        """Score this step unless rank 0 finds it in the results already."""
        owed = 0.0
        if self.ranks.rank == 0:
            lines = read_results(self._results)
            done = {str(line.get("dataset")) for line in lines if line.get("step") == step}
            owed = float(any(dataset.name not in done for dataset in self.datasets))
        if self.ranks.gather(torch.tensor(owed)).item():
            self.score(step)

    def score(self, step: int) -> None:
        """Append a line a score to the results, and take a snapshot."""
        weights = self._weights(step)
        with self.as_scored():
            for dataset in self.datasets:
                self._score(dataset, step, weights)

    def _weights(self, step: int) -> str:
        """What other scores of these weights call them: the hash of their file, where it is written already.

        At the end of a training it is; before, the run and the step tell which they are.
        """
        folder = self.run / "checkpoints" / f"step_{step:08d}"
        if self.ranks.rank == 0 and is_complete(folder):
            return weights_id(str(folder))[0]
        return f"{self.run.name} at step {step}"

    @property
    def _results(self) -> Path:
        return self.run / "results.jsonl"

    def _score(self, dataset: EvalDataset, step: int, weights: str) -> None:
        with torch.autocast(self.model.logit_scale.device.type, torch.bfloat16, enabled=self.bf16):
            subject = Subject(Encoder(self.model, ranks=self.ranks, batch_size=self.batch_size), dataset)
            scores = evaluate(
                subject, out=self._results, step=step, weights=weights, origin={"model": str(self.run)}
            )
            # every rank takes it, since they share the texts; one writes it
            snapshot = take_snapshot(subject, step=step)
        for (name, split), counts in subject.encoder.counts.items():
            self.note(f"dataset {name}, split {split}", counts)
        if self.ranks.rank == 0:
            write_snapshot(self.run, snapshot)
            self._tell(scores, step)

    def _tell(self, scores: Sequence[Score], step: int) -> None:
        for score in scores:
            if score.metric in _TOLD:
                self.say(
                    f"step {step} {score.dataset} {score.task} {score.metric} {score.value:.1%} "
                    f"[{score.low or 0:.1%}, {score.high or 1:.1%}] chance {score.chance or 0:.1%}"
                )
        self.record(step, {f"{score.dataset}/{score.task}/{score.metric}": score.value for score in scores})
