"""What one training step computes: a batch into the gradients of the loss the settings ask for, and its figures.

Everything that a step draws at random follows from the seed, the step and the place in the global batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from clipkit.accumulation import Features, backward
from clipkit.architectures import Architecture, ClassTable
from clipkit.class_loss import class_loss, right_classes
from clipkit.config import DistillConfig, LossConfig
from clipkit.distributed import rank
from clipkit.in_batch_recall import in_batch_recall
from clipkit.objective import Teaching, batch_loss, chance_level
from clipkit.patch_dropout import kept_patches
from clipkit.seeds import seed_of, seeds_of
from clipkit.stopwatch import Stopwatch
from clipkit.teacher import Teacher
from clipkit.training_model import patch_counts

__all__ = ["PairBatch", "TrainingStep"]


class PairBatch(Protocol):
    """What is used of a batch, see data/batch.py."""

    @property
    def images(self) -> Tensor: ...
    @property
    def tokens(self) -> Tensor: ...
    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def rows(self) -> Tensor: ...
    @property
    def identities(self) -> Tensor: ...
    @property
    def teacher(self) -> tuple[Tensor, Tensor | None] | None: ...


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A step's gradients as a function of the model, the batch and the step's number.

    Attributes:
        shape: the model's architecture.
        loss: what is minimized.
        distill: how much of it is a teacher's.
        teacher: which encodes along, if one does.
        patch_dropout: share of the patches that is left out.
        seed: of the run.
        accumulate: pieces that this rank's share is computed in.
        bf16: whether the towers run in bfloat16.
    """

    shape: Architecture
    loss: LossConfig
    distill: DistillConfig
    teacher: Teacher | None
    patch_dropout: float
    seed: int
    accumulate: int
    bf16: bool

    def gradients(
        self, module: nn.Module, batch: PairBatch, step: int, watch: Stopwatch | None = None
    ) -> Features:
        """Leave the gradient of the global batch's loss in the module's parameters; ``step`` were made before."""
        if watch is not None:
            watch.begin("forward")  # of a teacher too
        return backward(
            module,
            self._inputs(batch, step),
            loss=self._loss(batch),
            parts=self.accumulate,
            autocast=self.bf16,
            # clipkit's own towers draw nothing; others' dropout draws from torch's generator
            seeds=() if self.shape.is_own else seeds_of(self.seed, step, rank(), self.accumulate),
            watch=watch,
        )

    def figures(self, batch: PairBatch, features: Features) -> dict[str, float]:
        """What is logged of a batch beside its loss: the loss's level of chance, and the share that is told right.

        All ranks call this together.
        """
        if self.loss.name == "classes":
            right = right_classes(features.images, features.texts, batch.tokens[:, 0])
            return {"chance": math.log(len(features.texts)), "acc1": right}
        chance = chance_level(self.loss, self.distill, batch.identities)
        to_text, to_image = in_batch_recall(features.images, features.texts).tolist()
        level = {} if chance is None else {"chance": chance}
        return {**level, "image_to_text_R@1": to_text, "text_to_image_R@1": to_image}

    def _inputs(self, batch: PairBatch, step: int) -> dict[str, Any]:
        inputs: dict[str, Any] = {"images": batch.images}
        if isinstance(self.shape.text, ClassTable):
            numbers = torch.arange(len(self.shape.text.names), device=batch.tokens.device)
            inputs["tokens"] = numbers[:, None]  # of all classes, not of those alone that the batch shows
        else:
            inputs |= {"tokens": batch.tokens, "lengths": batch.lengths}
        counts = patch_counts(self.shape, self.patch_dropout, batch.images.shape[-1])
        if counts is not None:
            inputs["patches"] = kept_patches(
                seed=seed_of(self.seed, step),
                rows=batch.rows.to(batch.images.device),
                patches=counts[0],
                keep=counts[1],
            )
        return inputs

    def _loss(self, batch: PairBatch) -> Callable[..., Tensor]:
        if self.loss.name == "classes":
            return partial(class_loss, labels=batch.tokens[:, 0])
        return batch_loss(self.loss, self.distill, batch.identities, self._teaching(batch))

    def _teaching(self, batch: PairBatch) -> Teaching | None:
        if self.teacher is not None:
            return self.teacher(batch.images, batch.tokens)
        if batch.teacher is None:
            return None
        images, texts = batch.teacher
        assert texts is not None
        return Teaching(
            images=images, texts=texts, scale=torch.tensor(self.distill.scale, device=images.device)
        )
