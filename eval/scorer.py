"""Score a model during its training."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from clipkit import CLIP
from clipkit.errors import ConfigError, DataError, nearest
from clipkit.files import counted
from clipkit.formats import is_complete
from clipkit.samples import TraitCounts
from eval.datasets.dataset import EvalDataset
from eval.features.encoder import Encoder, PooledFeatures, Ranks
from eval.metrics import METRICS, get_metric, is_fraction, lower_is_better
from eval.results.details import take_snapshot
from eval.results.records import PREFIX, Score, parse_finite, read_results, weights_id, write_snapshot
from eval.run import evaluate
from eval.tasks.subject import Subject

_PRINTED = ("acc1", "acc5", "image_to_text_R@1", "text_to_image_R@1")


@dataclass(kw_only=True)
class BestScore:
    """The best score of one metric in a run, and how long it has been the best.

    Attributes:
        dataset, metric: their names.
        revision: of the dataset; scores of others are not compared.
        patience: number of evaluations without a rise after which training stops; 0: never.
        step: the step of the best score, the first of equal ones; None before the first score.
        value: the score.
        waited: number of evaluations since the last rise: since a score was better than the 95% interval of the
            score at the rise before.
    """

    dataset: str
    metric: str
    revision: str = ""
    patience: int = 0
    step: int | None = None
    value: float = 0.0
    waited: int = 0
    _bound: float = 0.0  # the end of the interval that the next rise exceeds

    @classmethod
    def from_setting(cls, name: str, datasets: Sequence[EvalDataset], *, patience: int = 0) -> "BestScore":
        """Create it from ``checkpoint.best``; ConfigError if no dataset or metric has the name. "" selects none."""
        dataset, _, metric = name.rpartition("/")
        if not name:
            return cls(dataset="", metric="")
        names = [known.name for known in datasets]
        dataset = dataset or names[0]
        if dataset not in names:
            raise ConfigError(
                f"checkpoint.best = {name!r}: eval.data has no dataset {dataset!r}: {nearest(dataset, names)}"
            )
        if get_metric(metric) is None:
            raise ConfigError(
                f"checkpoint.best = {name!r}: unknown metric {metric!r}: {nearest(metric, METRICS)}"
            )
        revision = datasets[names.index(dataset)].revision
        return cls(dataset=dataset, metric=metric, revision=revision, patience=patience)

    @property
    def is_exhausted(self) -> bool:
        """Whether training should stop."""
        return 0 < self.patience <= self.waited

    def add_scores(self, step: int, scores: Sequence[Score]) -> None:
        """Add the scores of an evaluation of its dataset; DataError if the metric is not among them."""
        names = []
        for score in scores:
            if score.metric == self.metric and not score.setting:
                self.add(step, score.value, score.low, score.high)
                return
            names.append(score.metric)
        raise DataError(
            f"checkpoint.best = '{self.dataset}/{self.metric}': {self.dataset} is scored by "
            f"{', '.join(dict.fromkeys(names))}: choose one of these, or name others in its card"
        )

    def add_results(self, path: Path, *, until: int) -> None:
        """Add the scores of a results file, up to those of a step."""
        added = {None}  # steps; a checkpoint may have been scored again after the training
        for line in read_results(path):
            step = line["step"]
            name = line["dataset"], line["metric"], line.get("setting"), line.get("data_revision")
            value = parse_finite(line.get("value"))
            if (
                name != (self.dataset, self.metric, "", self.revision)
                or value is None
                or step in added
                or step > until
            ):
                continue
            added.add(step)
            self.add(step, value, parse_finite(line.get("low")), parse_finite(line.get("high")))

    def describe(self, step: int, run: Path, *, steps: int) -> list[str]:
        """Describe the best score of a run of ``steps`` and why it ended at this step, as lines to print."""
        lines = []
        if self.is_exhausted and step < steps:
            lines.append(
                f"stopped at step {step}: in {counted(self.waited, 'evaluation')}, no {self.metric} on "
                f"{self.dataset} was better than the 95% interval of an earlier one (eval.patience)"
            )
        if self.step is not None:
            shown = f"{self.value:.2%}" if is_fraction(self.metric) else f"{self.value:.4g}"
            line = f"best {self.metric} on {self.dataset}: {shown} at step {self.step}"
            if not is_complete(run / "checkpoints" / f"step_{self.step:08d}"):
                line += ", of which there is no checkpoint"
            lines.append(line)
        return lines

    def add(self, step: int, value: float, low: float | None, high: float | None) -> None:
        """Add the next score and its 95% interval."""
        sign = -1 if lower_is_better(self.metric) else 1
        end = low if sign < 0 else high
        self.waited += 1
        if self.step is None or sign * value > sign * self._bound:
            self._bound = value if end is None else end
            self.waited = 0
        if self.step is None or sign * value > sign * self.value:
            self.step = step
            self.value = value


def count_scored_steps(run: Path, dataset: str) -> int:
    """Return at how many steps after the start a training was scored on a dataset; at least 1."""
    lines = read_results(run / "results.jsonl")
    return max(1, len({line["step"] for line in lines if line["dataset"] == dataset and line["step"]}))


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
        locked: the towers "image" and "text" whose backbones are locked, so that they encode each dataset once.
        metrics: the metrics of a dataset's card, by the dataset's name.
        best: the best score of ``checkpoint.best``, to which scores are added.
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
    locked: Collection[str] = ()
    metrics: Mapping[str, Sequence[str]] = field(default_factory=dict)
    best: BestScore = field(default_factory=lambda: BestScore(dataset="", metric=""))
    pooled: PooledFeatures = field(default_factory=PooledFeatures, init=False)

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
            encoder = Encoder(
                self.model,
                ranks=self.ranks,
                batch_size=self.batch_size,
                pooled=self.pooled,
                locked=self.locked,
            )
            subject = Subject(encoder, dataset, metrics=self.metrics.get(dataset.name, ()))
            scores = evaluate(
                subject,
                dims=self.dims,
                out=self.run / "results.jsonl",
                step=step,
                weights=weights,
                origin={"model": str(self.run)},
            )
            snapshot = take_snapshot(subject, step=step)  # by all ranks, which share the texts
        if dataset.name == self.best.dataset:
            self.best.add_scores(step, scores)
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
