"""Score a model during its training."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from clipkit import CLIP
from clipkit.formats import is_complete
from clipkit.samples import TraitCounts
from eval.datasets.dataset import EvalDataset
from eval.features.encoder import Encoder, Ranks
from eval.results.details import take_snapshot
from eval.results.records import PREFIX, read_results, weights_id, write_snapshot
from eval.run import evaluate
from eval.tasks.subject import Subject

_PRINTED = ("acc1", "acc5", "image_to_text_R@1", "text_to_image_R@1")


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores a model during training, on all ranks, into the run's ``results.jsonl`` and ``snapshots/``.

    Attributes:
        model: the model, scored in its state at each call.
        datasets: the datasets to score on.
        run: the run folder, to which rank 0 writes.
        ranks: the ranks that share the work.
        batch_size: images encoded at a time on each rank.
        bf16: whether the towers run in bfloat16.
        dims: sizes of prefixes of the embedding that are scored too.
        print_line: called with a line for each of the main scores.
        write_scores: called on rank 0 with the step and the scores of a dataset by ``dataset/task/metric``, and
            for a prefix by ``dataset/task/dim64/metric``.
        note_traits: called for each dataset and split with the number of transparent and rotated images.
        as_scored: context manager that puts the model into the state to be scored.
    """

    model: CLIP
    datasets: Sequence[EvalDataset]
    run: Path
    ranks: Ranks
    batch_size: int
    bf16: bool
    print_line: Callable[[str], None]
    write_scores: Callable[[int, Mapping[str, float]], None]
    dims: Sequence[int] = ()
    note_traits: Callable[[str, TraitCounts], None] = lambda images, counts: None
    as_scored: Callable[[], AbstractContextManager[None]] = nullcontext

    def score_if_owed(self, step: int) -> None:
        """Score this step unless rank 0 finds results of it."""
        owed = 0.0
        if self.ranks.rank == 0:
            lines = read_results(self.run / "results.jsonl")
            done = {str(line.get("dataset")) for line in lines if line.get("step") == step}
            owed = float(any(dataset.name not in done for dataset in self.datasets))
        if self.ranks.gather(torch.tensor(owed)).item():
            self.score(step)

    def score(self, step: int) -> None:
        """Append the scores to the results, and write a snapshot."""
        # the hash of the checkpoint if it is written, as other scores of it say; it is at the end of a training
        folder = self.run / "checkpoints" / f"step_{step:08d}"
        weights = f"{self.run.name} at step {step}"
        if self.ranks.rank == 0 and is_complete(folder):
            weights = weights_id(str(folder))[0]
        with self.as_scored():
            for dataset in self.datasets:
                self._score(dataset, step, weights)

    def _score(self, dataset: EvalDataset, step: int, weights: str) -> None:
        with torch.autocast(self.model.logit_scale.device.type, torch.bfloat16, enabled=self.bf16):
            subject = Subject(Encoder(self.model, ranks=self.ranks, batch_size=self.batch_size), dataset)
            scores = evaluate(
                subject,
                dims=self.dims,
                out=self.run / "results.jsonl",
                step=step,
                weights=weights,
                origin={"model": str(self.run)},
            )
            snapshot = take_snapshot(subject, step=step)  # by all ranks, which share the texts
        for (name, split), counts in subject.encoder.counts.items():
            self.note_traits(f"dataset {name}, split {split}", counts)
        if self.ranks.rank > 0:
            return
        write_snapshot(self.run, snapshot)
        values: dict[str, float] = {}
        for score in scores:
            is_prefix = bool(PREFIX.fullmatch(score.setting))
            names = [score.dataset, score.task, score.metric]
            if is_prefix:
                names.insert(2, score.setting.replace(" ", ""))
            values["/".join(names)] = score.value
            if score.metric in _PRINTED and not is_prefix:
                self.print_line(
                    f"step {step} {score.dataset} {score.task} {score.metric} {score.value:.1%} "
                    f"[{score.low or 0:.1%}, {score.high or 1:.1%}] chance {score.chance or 0:.1%}"
                )
        self.write_scores(step, values)
