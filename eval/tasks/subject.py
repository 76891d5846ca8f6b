"""One model on one dataset, the input of every task.

Dimensions: N images or texts, D embedding dimension, W width before the projection, C classes.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, cast

import torch
from torch import Tensor

from clipkit.samples import MissingSplit
from eval.datasets.dataset import EvalDataset, prompt_with_bare_names
from eval.features.encoder import Encoder, ImageFeatures
from eval.metrics import Metric, get_metric
from eval.results.records import Details, Score

_log = logging.getLogger("eval")


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """The scores of a task, the details that a page shows besides them, and further fields of the results."""

    scores: list[Score]
    details: Sequence[Details] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def metric_scores(
    dataset: EvalDataset,
    names: Iterable[str],
    inputs: object,
    *,
    task: str,
    prompt_set: str = "",
    setting: str = "",
) -> list[Score]:
    """Compute metrics from what those of their kind are computed from, without those that are undefined for it."""
    scores = []
    for name in names:
        metric = cast(Metric[object] | None, get_metric(name))
        assert metric is not None, name
        estimate = metric.function(inputs)
        if estimate is not None:
            score = Score(
                dataset=dataset.name,
                split=dataset.split,
                task=task,
                prompt_set=prompt_set,
                setting=setting or dataset.language,
                metric=name,
                value=estimate.value,
                n=estimate.n,
                low=estimate.low,
                high=estimate.high,
                chance=metric.chance(inputs),
            )
            scores.append(score)
    return scores


class Subject:
    """A model's features of a dataset, encoded on first use.

    Args:
        encoder: the model. With a classification head, it reads class names and no prompts.
        metrics: the dataset's primary metric, then others; empty for the defaults of each task.
        open_split: opens another split of the dataset; raises ``MissingSplit`` if there is none.
    """

    def __init__(
        self,
        encoder: Encoder,
        dataset: EvalDataset,
        *,
        metrics: Sequence[str] = (),
        open_split: Callable[[str], EvalDataset] | None = None,
    ) -> None:
        self._by_names = bool(encoder.model.architecture.text.classes)
        dataset = self._replace_prompts(dataset)
        self.encoder = encoder
        self.dataset = dataset
        self.metrics = tuple(metrics)
        self._open_split = open_split
        self._splits: dict[str, EvalDataset | None] = {dataset.split: dataset}
        self._images: dict[str, ImageFeatures] = {}
        self.overlap: dict[str, int] = {}  # by split: number of identical files

    def _replace_prompts(self, dataset: EvalDataset) -> EvalDataset:
        return prompt_with_bare_names(dataset) if self._by_names else dataset

    @property
    def device(self) -> torch.device:
        """The model's device, where metrics may be computed."""
        return self.encoder.device

    @cached_property
    def logit_scale(self) -> float:
        """exp(t), the factor from similarities to logits."""
        return float(self.encoder.model.logit_scale.detach().float().exp())

    def split(self, name: str) -> EvalDataset | None:
        """Return a split of the dataset, or None if there is none; DataError if it is damaged."""
        if name not in self._splits:
            try:
                opened = self._open_split(name) if self._open_split is not None else None
                self._splits[name] = None if opened is None else self._replace_prompts(opened)
            except MissingSplit:
                self._splits[name] = None
        return self._splits[name]

    def images(self, split: str | None = None, *, layer: int | None = None) -> ImageFeatures:
        """Return the features of all images of a split, by default of the one that is scored.

        Args:
            split: name of the split.
            layer: 1 … L to return ``Encoder.layers`` of that block of the image tower as ``before_projection``;
                ``projected`` is then empty.

        Raises:
            MissingSplit: there is no such split.
            DataError: an image is damaged, or features are not finite.
        """
        dataset = self.split(split or self.dataset.split)
        if dataset is None:
            raise MissingSplit(f"dataset {self.dataset.name} has no split {split!r}")
        if layer is None:
            if dataset.split not in self._images:
                self._images[dataset.split] = self.encoder.images(dataset)
            return self._images[dataset.split]
        layers = self.encoder.layers(dataset)
        columns = {"projected": torch.empty(len(dataset), 0), "before_projection": layers[layer]}
        return ImageFeatures(columns.__getitem__)

    def select_prefix(self, dim: int) -> "Subject":
        """Return the subject with the first ``dim`` elements of each feature; nothing is encoded again."""
        subject = copy(self)
        subject.encoder = self.encoder.select_prefix(dim)
        subject._images = {}
        return subject

    def select_language(self, name: str) -> "Subject":
        """Return the subject with the texts of one language; images are encoded once for all languages."""
        dataset, rows = self.dataset.select_language(name)
        images = self.images()
        subject = copy(self)
        subject.dataset = self._replace_prompts(dataset)
        subject._splits = {dataset.split: subject.dataset}
        if rows is not None:
            images = ImageFeatures(
                lambda column: getattr(self.images(), column)[rows],
                lambda: [self.images().digests()[i] for i in rows.tolist()],
            )
        subject._images = {dataset.split: images}
        return subject

    def count_overlap(self, split: str) -> None:
        """Count the scored images whose files are also in another split, and log a warning."""
        if split in self.overlap:
            return
        others = set(self.images(split).digests())
        digests = self.images().digests()
        self.overlap[split] = sum(digest in others for digest in digests)
        if self.overlap[split]:
            self.warn(
                f"{self.overlap[split]:,} of {len(digests):,} {self.dataset.split} images are also in {split} "
                f"(identical files): scores of tasks that learn from {split} are too high"
            )

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Return the features of texts, (N, D) float32, unit norm; DataError if they are not finite."""
        return self.encoder.texts(texts)

    def class_weights(self) -> Tensor:
        """Return the zero-shot classifier of the dataset's prompts, (D, C) float32.

        Columns have unit norm, except with prompts that deny a class: the difference of both ranks images like
        the softmax over the two (CheXzero; Tiu et al. 2022, https://doi.org/10.1038/s41551-022-00936-9).
        """
        described = f"the class names of dataset {self.dataset.name}"
        weights = self.encoder.classifier(self.dataset.prompts(), description=described)
        denying = self.dataset.negative_prompts()
        return weights - self.encoder.classifier(denying, description=described) if denying else weights

    def warn(self, message: str) -> None:
        """Log a warning about the dataset on rank 0, once per process, as a training scores it many times."""
        if self.encoder.ranks.rank == 0:
            warn_once(f"dataset {self.dataset.name}: {message}")


@cache
def warn_once(message: str) -> None:
    """Log a warning, once per process."""
    _log.warning("%s", message)
