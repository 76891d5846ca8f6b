"""What one training step computes: a batch into the gradients of the loss the settings ask for, and its figures.

Everything that a step draws at random follows from the seed, the step and the place in the global batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from clipkit.api import load
from clipkit.config import DistillConfig, LossConfig
from clipkit.distributed import rank
from clipkit.errors import ConfigError
from clipkit.formats.checkpoint import model_hash
from clipkit.model.architectures import Architecture
from clipkit.model.clip import CLIP
from clipkit.model.towers import kept_patches
from clipkit.objectives import OBJECTIVES, Targets
from clipkit.objectives.distill import Teaching, with_teacher
from clipkit.training.build import patch_counts
from clipkit.training.ema import RunningStatistics
from clipkit.training.metrics import Stopwatch
from clipkit.training.parallel import local_gradients

__all__ = [
    "Features",
    "PairBatch",
    "Teacher",
    "TrainingStep",
    "backward",
    "check_rows",
    "seed_of",
    "seeds_of",
]


# --------------------------------------------------------------------------------------------------------------
# Gradients of one contrastive batch computed in parts, exactly (GradCache, Gao et al. 2021,
# https://arxiv.org/abs/2101.06983).
#
# The loss needs all features at once, the towers' activations do not fit at once: features are computed without
# a graph, the loss gives the gradient at the features, and a second pass carries it through the towers part by
# part. The loss, and every gradient with it, is that of the whole batch.

Loss = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Features:
    """What one backward pass leaves besides gradients: detached, the loss and this rank's features."""

    loss: Tensor  # ()
    images: Tensor  # (B, O)
    texts: Tensor  # (B, O), or (C, O) of all classes


def check_rows(model: nn.Module, *, batch_size: int, world: int, parts: int) -> None:
    """See that batch norms get at least two rows at a time: one has no variance.

    Args:
        model: in training mode; a batch norm that is locked is not in it, and takes any number.
        batch_size: of the global batch.
        world: how many ranks share it.
        parts: how many pieces each rank computes its share in.

    Raises:
        ConfigError: the smallest piece has fewer.
    """
    rows = batch_size // world // parts
    if rows < 2 and any(isinstance(one, _BatchNorm) and one.training for one in model.modules()):
        least = 2 * world * parts
        raise ConfigError(
            f"batch_size = {batch_size} over {world} processes × accumulate = {parts} leaves pieces of one row, "
            f"and the batch norms of this model need two: set batch_size={least} or more, or a smaller accumulate"
        )


def backward(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    loss: Loss,
    parts: int,
    autocast: bool,
    seeds: Sequence[int] = (),
    watch: Stopwatch | None = None,
) -> Features:
    """Add the gradient of ``loss`` to the model's parameters.

    Args:
        model: a CLIP, possibly wrapped in DistributedDataParallel or sharded.
        inputs: arguments of the model by name, each a tensor or a sequence of B rows; or C rows, of all classes,
            for the text tower.
        loss: of what the model returns: image features (B, O), text features (B, O), exp(t), and the bias of a
            model that has one; such as ``clip_loss``.
        parts: how many pieces of the batch are computed one after the other, of sizes that differ by one at
            most; 1 keeps everything in one pass. At most B.
        autocast: whether the towers run in bfloat16.
        seeds: of each piece's random numbers, if the towers draw any; both passes then draw the same.
        watch: told which phase begins.
    """
    watch = watch or Stopwatch()
    images = inputs["images"]
    precision = torch.autocast(images.device.type, torch.bfloat16, enabled=autocast)
    assert 1 <= parts <= len(images), (len(images), parts)
    pieces = _pieces(inputs, parts)
    watch.begin("forward")
    if parts == 1:
        _draw(seeds, 0)
        with precision:
            outputs = model(**pieces[0])
        watch.begin("loss")
        value = loss(*outputs)
        watch.begin("backward")
        torch.autograd.backward(value)
        return Features(loss=value.detach(), images=outputs[0].detach(), texts=outputs[1].detach())
    bare: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    first: list[tuple[Tensor, ...]] = []
    statistics = RunningStatistics(bare)
    for number, piece in enumerate(pieces):
        _draw(seeds, number)
        with torch.no_grad(), precision:
            first.append(bare(**piece))
    statistics.put_back()  # the second pass counts
    watch.begin("loss")
    whole = [torch.cat([one[i] for one in first]).requires_grad_() for i in (0, 1)]
    numbers = [one.detach().clone().requires_grad_() for one in first[0][2:]]  # exp(t), and the bias
    value = loss(*whole, *numbers)
    torch.autograd.backward(value)
    watch.begin("backward")
    sizes = [[len(one[i]) for one in first] for i in (0, 1)]
    gradients = zip(*(_gradient(one).split(own) for one, own in zip(whole, sizes, strict=True)), strict=True)
    for number, (piece, of_features) in enumerate(zip(pieces, gradients, strict=True)):
        _draw(seeds, number)
        with local_gradients(model, last=number == parts - 1):
            with precision:
                outputs = model(**piece)
            of_numbers = [_gradient(one) / parts for one in numbers]
            _backward(outputs, [*of_features, *of_numbers])
    return Features(loss=value.detach(), images=whole[0].detach(), texts=whole[1].detach())


def _pieces(inputs: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
    """The inputs cut into pieces of rows."""
    pieces: list[dict[str, Any]] = [{} for _ in range(parts)]
    for name, value in inputs.items():
        if value is not None:
            cuts = [len(value) * number // parts for number in range(parts + 1)]
            for piece, span in zip(pieces, pairwise(cuts), strict=True):
                piece[name] = value[slice(*span)]
    return pieces


def _draw(seeds: Sequence[int], number: int) -> None:
    if seeds:
        torch.manual_seed(seeds[number])


def _gradient(tensor: Tensor) -> Tensor:
    """Of a tensor that nothing depends on, zeros."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Carry gradients on through what has a graph: a locked tower has none."""
    pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])


# --------------------------------------------------------------------------------------------------------------
# Seeds of what a training step draws at random: functions of the run's seed and the step, so nothing is saved.
#
# Torch's own generator is seeded for towers of other libraries, whose dropout draws from it; the same in both
# passes over a piece of the batch. What clipkit draws itself follows from the place in the global batch,
# whatever the ranks.

_MASK = 2**63 - 1


def seed_of(seed: int, *places: int) -> int:
    """0 ≤ number < 2^63 that follows from a seed and places, such as a step, and looks like no other."""
    mixed = seed
    for place in (len(places), *places):
        mixed = (mixed ^ (place + 0x9E3779B97F4A7C15 + (mixed << 6) + (mixed >> 2))) * 0xBF58476D1CE4E5B9
        mixed = (mixed ^ (mixed >> 31)) & _MASK
    return mixed


def seeds_of(seed: int, step: int, rank: int, parts: int) -> list[int]:
    """One for each piece that a rank's share of a batch is computed in."""
    return [seed_of(seed, step, rank, part) for part in range(parts)]


# --------------------------------------------------------------------------------------------------------------
# A model that is learned from: it encodes every batch along with the one in training (online distillation).
#
# Letters in shape comments: B batch, S side of the images, L tokens.


class Teacher:
    """A CLIP in evaluation mode whose weights do not change.

    Args:
        source: whatever ``clipkit.load`` takes.
        student: the model in training, whose tokens the teacher must understand.
        device: where it encodes.
        bf16: whether its towers run in bfloat16.

    Raises:
        ConfigError: it has another tokenizer than the student.
        CheckpointError: it cannot be loaded.

    Attributes:
        fingerprint: changes with its weights, architecture and preprocessing.
    """

    def __init__(self, source: str, student: CLIP, *, device: torch.device, bf16: bool) -> None:
        self._model = load(source).requires_grad_(False)
        self.fingerprint = model_hash(self._model)
        self._model.to(device)
        self._device, self._bf16 = device, bf16
        sample = ["a photo of two cats, 3:4", "Ünï 猫"]
        own, other = self._model.tokenizer(sample), student.tokenizer(sample)
        length = min(own.shape[1], other.shape[1])  # one may take shorter texts
        if not torch.equal(_cut(own, length), _cut(other, length)):
            raise ConfigError(
                f"distill.teacher = {source!r} splits texts in another way than {student.name}: choose one with "
                "CLIP's tokenizer, or store its features and set distill.features"
            )

    def __call__(self, images: Tensor, tokens: Tensor) -> Teaching:
        """Encode uint8 images (B, 3, S, S), resized to its own size, and tokens (B, L)."""
        side = self._model.architecture.vision.image_size
        length = self._model.architecture.text.context_length
        with torch.no_grad(), torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            if images.shape[-1] != side:
                resized = F.interpolate(images.float(), (side, side), mode="bicubic", antialias=True)
                images = resized.round_().clamp_(0, 255).to(torch.uint8)
            return Teaching(
                images=self._model.encode_image(images),
                texts=self._model.encode_text(_cut(tokens, length)),
                scale=self._model.logit_scale.detach().exp(),
            )


def _cut(tokens: Tensor, length: int) -> Tensor:
    """Texts of at most ``length`` tokens; a longer one still ends with its end of text, its largest id."""
    if tokens.shape[1] <= length:
        return tokens
    ends = tokens.amax(dim=1)
    cut = tokens[:, :length].clone()
    cut[:, -1] = torch.where(cut.amax(dim=1) == ends, cut[:, -1], ends)
    return cut


# --------------------------------------------------------------------------------------------------------------


class PairBatch(Protocol):
    """What is used of a batch, see data/loader.py."""

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
        patch_dropout: fraction of the patches that is dropped.
        seed: of the run.
        accumulate: parts in which this rank's rows are computed.
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
        objective, targets = OBJECTIVES[self.loss.name], self._targets(batch)
        level = {}
        if objective.chance is not None and not self.distill.wanted:  # else it depends on the teacher
            level["chance"] = objective.chance(targets, len(features.texts))
        return {**level, **objective.figures(features.images, features.texts, targets)}

    def _targets(self, batch: PairBatch) -> Targets:
        return Targets(identities=batch.identities, tokens=batch.tokens, same=self.loss.same)

    def _inputs(self, batch: PairBatch, step: int) -> dict[str, Any]:
        inputs: dict[str, Any] = {"images": batch.images}
        if classes := self.shape.text.classes:
            numbers = torch.arange(len(classes), device=batch.tokens.device)
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
        loss = partial(OBJECTIVES[self.loss.name].loss, targets=self._targets(batch))
        teaching = self._teaching(batch)
        return loss if teaching is None else with_teacher(loss, teaching, weight=self.distill.weight)

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
