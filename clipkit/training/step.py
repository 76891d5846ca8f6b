"""One training step: the gradients of a batch's loss, and its metrics.

Random draws are functions of the seed, the step and the place in the global batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from clipkit.api import load
from clipkit.batch import Batch
from clipkit.config import Config, DataConfig, DistillConfig, LossConfig, SelectConfig
from clipkit.distributed import gather_row_counts, known_rows, rank, sum_over_ranks, world_size
from clipkit.errors import ConfigError
from clipkit.formats.checkpoint import model_hash
from clipkit.model.architectures import Architecture
from clipkit.model.clip import CLIP
from clipkit.model.towers import combine_features, copy_to_device, draw_patches, widest_dtype
from clipkit.model.zero_shot import evaluation_mode, zero_shot_classifier
from clipkit.objectives import (
    Objective,
    ObjectiveState,
    Outputs,
    Targets,
    Term,
    TermBatch,
    compare_pairs,
    create_state,
    select_objective,
    select_terms,
)
from clipkit.objectives.distill import Teaching
from clipkit.objectives.tiles import CaptionGathering
from clipkit.training.build import patch_counts
from clipkit.training.ema import AveragedWeights, RunningStatistics
from clipkit.training.metrics import Stopwatch
from clipkit.training.parallel import is_sharded, local_gradients, split_evenly
from clipkit.training.selection import BatchKind, choose_pairs, take_pairs

Loss = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Features:
    """The loss and this rank's features, detached.

    Attributes:
        loss: scalar, with the local terms.
        images: (B, O).
        texts: (B, O), then those of further captions; or (C, O) of all texts of the text tower.
        scale: scalar, exp(t) before the update.
        terms: scalars by name, means over the global batch's targets.
    """

    loss: Tensor
    images: Tensor
    texts: Tensor
    scale: Tensor
    terms: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LocalTerms:
    """Terms of the loss that need no other sample, see ``clipkit.objectives.TERMS``.

    Attributes:
        terms: K terms by name.
        inputs: arguments of each term by name, each a tensor or a sequence of B rows.
        weights: (K,) of the ``widest_dtype``.
        counts: (K,) of the same dtype, their numbers of targets in the global batch.
    """

    terms: Mapping[str, Term]
    inputs: Mapping[str, Mapping[str, Any]]
    weights: Tensor
    counts: Tensor

    @property
    def read_tokens(self) -> bool:
        return any(term.reads_tokens for term in self.terms.values())

    def sum_rows(
        self, model: CLIP, images: Tensor, features: Tensor, tokens: Sequence[Tensor], *, i: int, parts: int
    ) -> Tensor:
        """Return (K,) the sum of each term over part ``i`` of the rows."""
        sums = []
        for name, term in self.terms.items():
            inputs = cut_rows(self.inputs[name], i, parts)
            if term.reads_features:
                inputs["features"] = features
            sums.append(term.total(model, images, tokens, **inputs))
        return torch.stack(sums)


def check_rows(model: nn.Module, *, batch_size: int, world: int, parts: int) -> None:
    """Check that batch norms get at least two rows at a time: one row has no variance.

    The model is in training mode, in which locked batch norms are not.

    Raises:
        ConfigError: the smallest part has fewer.
    """
    rows = batch_size // world // parts
    if rows < 2 and any(isinstance(module, _BatchNorm) and module.training for module in model.modules()):
        least = 2 * world * parts
        raise ConfigError(
            f"batch_size = {batch_size} over {world} processes × accumulate = {parts} leaves parts of one row, "
            f"and the batch norms of this model need two: set batch_size={least} or more, or a smaller accumulate"
        )


def cut_rows(inputs: Mapping[str, Any], i: int, parts: int) -> dict[str, Any]:
    """Return part ``i`` of the rows of each argument; the sizes of parts differ by at most one."""
    cut = {}
    for name, rows in inputs.items():
        cut[name] = rows[split_evenly(len(rows), parts)[i]]
    return cut


def backward(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    loss: Loss,
    parts: int,
    autocast: bool,
    seeds: Sequence[int] = (),
    terms: LocalTerms | None = None,
    on_texts: Callable[[Tensor], None] | None = None,
    watch: Stopwatch | None = None,
) -> Features:
    """Add the gradient of ``loss`` and of local terms to the model's parameters, exactly also in parts.

    In parts (GradCache, Gao et al. 2021, https://arxiv.org/abs/2101.06983) all features are computed without a
    graph; the loss of the whole batch gives the gradients of the features, and a second pass carries them through
    the towers part by part, which computes the local terms too.

    Args:
        model: a CLIP, possibly wrapped in DistributedDataParallel or sharded.
        inputs: arguments of the model by name, each a tensor or a sequence of B rows; or, for the text tower, C
            rows of all classes.
        loss: a function of the model's outputs, such as ``clip_loss``: image features (B, O), text features (B, O),
            exp(t), and the bias of a model that has one.
        parts: number of parts, of sizes that differ by at most one, computed one after the other; 1 to B. 1 keeps
            everything in one pass.
        autocast: whether the towers run in bfloat16.
        seeds: seed of each part, if the towers draw random numbers; both passes then draw the same.
        terms: local terms that are added to the loss.
        on_texts: called with the text features before images are encoded, unless there are several parts.
        watch: stopwatch that times the phases.
    """
    watch = watch or Stopwatch()
    inputs = {name: rows for name, rows in inputs.items() if rows is not None}
    images = inputs["images"]
    assert 1 <= parts <= len(images), (len(images), parts)
    bare: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    sharded = is_sharded(next(bare.parameters()))
    precision = torch.autocast(images.device.type, torch.bfloat16, enabled=autocast)
    grad_sums: list[Tensor] = []
    if terms is not None:
        # ranks average their gradients
        grad_sums = [terms.weights / terms.counts * world_size()]

    def encode(module: nn.Module, i: int, terms: LocalTerms | None) -> tuple[Tensor, ...]:
        """Return the model's outputs for a part, and (K,) the sums of the terms, if any."""
        if seeds:
            torch.manual_seed(seeds[i])
        piece = cut_rows(inputs, i, parts)
        if on_texts is not None and parts == 1:
            piece["on_texts"] = on_texts
        with precision:
            if terms is None:
                outputs: tuple[Tensor, ...] = module(**piece)
            else:
                then = partial(terms.sum_rows, i=i, parts=parts)
                outputs = module(**piece, return_tokens=terms.read_tokens, then=then)
        last = outputs[0].grad_fn
        if last is not None and not sharded:
            # The text tower first in the backward pass too: its activations are freed before the image tower needs
            # more, and the gradient of its large token embedding is exchanged while the image tower computes. Among
            # operations that are ready, the one with the lowest number is last. Sharded models prefetch weights in
            # the opposite order of the forward pass.
            last._set_sequence_nr(0)  # type: ignore[attr-defined]
        return outputs

    watch.begin("forward")
    if parts == 1:
        outputs = encode(model, 0, terms)
        count = len(outputs) - len(grad_sums)
        sums = outputs[count:]
        watch.begin("loss")
        value = loss(*outputs[:count])
        watch.begin("backward")
        grads = [grad.to(total.dtype) for grad, total in zip(grad_sums, sums, strict=True)]
        torch.autograd.backward([value, *sums], [None, *grads])
        return _detach(value, outputs, terms, sums)
    statistics = RunningStatistics(bare)
    with torch.no_grad():
        first = [encode(bare, i, None) for i in range(parts)]
    statistics.put_back()  # the second pass counts
    watch.begin("loss")
    image_parts = [outputs[0] for outputs in first]
    text_parts = [outputs[1] for outputs in first]
    image_features = torch.cat(image_parts).requires_grad_()
    text_features = torch.cat(text_parts).requires_grad_()
    scalars = [scalar.detach().clone().requires_grad_() for scalar in first[0][2:]]  # exp(t), and the bias
    value = loss(image_features, text_features, *scalars)
    torch.autograd.backward(value)
    watch.begin("backward")
    grad_images = _gradient(image_features).split([len(rows) for rows in image_parts])
    grad_texts = _gradient(text_features).split([len(rows) for rows in text_parts])
    grad_scalars = [_gradient(scalar) / parts for scalar in scalars]
    all_sums: list[Tensor] = []
    for i in range(parts):
        with local_gradients(model, last=i == parts - 1):
            outputs = encode(model, i, terms)
            all_sums += outputs[len(first[0]) :]
            grads = [grad_images[i], grad_texts[i], *grad_scalars, *grad_sums]
            trained = []
            trained_grads = []
            for output, grad in zip(outputs, grads, strict=True):
                if output.requires_grad:  # not locked
                    trained.append(output)
                    trained_grads.append(grad.to(output.dtype))
            torch.autograd.backward(trained, trained_grads)
    return _detach(value, [image_features, text_features, *scalars], terms, all_sums)


def _not_a_number(loss: Loss, *features: Tensor) -> Tensor:
    return loss(*features) * math.nan


def _detach(
    value: Tensor, outputs: Sequence[Tensor], terms: LocalTerms | None, sums: Sequence[Tensor]
) -> Features:
    value = value.detach()
    images, texts, scale = (output.detach() for output in outputs[:3])
    means: dict[str, Tensor] = {}
    if terms is not None:
        totals = sum_over_ranks(torch.stack([part.detach() for part in sums]).sum(dim=0))  # (K,)
        value = value + (terms.weights / terms.counts * totals).sum().to(value.dtype)
        means = dict(zip(terms.terms, totals / terms.counts, strict=True))
    return Features(loss=value, images=images, texts=texts, scale=scale, terms=means)


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


_MASK = 2**63 - 1


def seed_of(seed: int, *coordinates: int) -> int:
    """Derive a seed, 0 to 2^63 - 1, from the run's seed and places, such as a step."""
    mixed = seed
    for coordinate in (len(coordinates), *coordinates):
        mixed = (mixed ^ (coordinate + 0x9E3779B97F4A7C15 + (mixed << 6) + (mixed >> 2))) * 0xBF58476D1CE4E5B9
        mixed = (mixed ^ (mixed >> 31)) & _MASK
    return mixed


def seeds_of(seed: int, step: int, rank: int, parts: int) -> list[int]:
    """Return a seed for each part of a rank's rows, for towers of other libraries with dropout."""
    return [seed_of(seed, step, rank, part) for part in range(parts)]


def encode_pairs(
    module: nn.Module,
    inputs: Mapping[str, Any],
    *,
    averaged: AveragedWeights | None = None,
    bf16: bool,
    tokens: bool = False,
) -> Teaching:
    """Encode a batch without gradients and patch dropout; all ranks call this together.

    Args:
        module: a CLIP, possibly wrapped in DistributedDataParallel or sharded.
        averaged: averaged weights, which take the place of the model's.
        inputs: this rank's ``images`` and ``tokens``, maybe ``lengths`` and ``projections``; see ``CLIP.forward``.
        bf16: whether the towers run in bfloat16.
        tokens: whether to return the images' tokens too.
    """
    bare: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    assert isinstance(bare, CLIP)
    pixels = inputs["images"]
    projections = inputs.get("projections")
    precision = torch.autocast(pixels.device.type, torch.bfloat16, enabled=bf16)
    weights = nullcontext() if averaged is None else averaged.applied()
    with weights, evaluation_mode(bare), torch.no_grad(), precision:
        if tokens:
            images, seen = bare.image_tokens(pixels, projections=projections)
        else:
            images, seen = bare.encode_image(pixels, projections=projections), None
        texts = bare.encode_text(inputs["tokens"], lengths=inputs.get("lengths"))
        return Teaching(images=images, texts=texts, scale=bare.logit_scale.exp(), tokens=seen)


class Teacher:
    """A CLIP that encodes each batch for distillation or data selection; its weights do not change.

    Letters: B batch, S side of the images, L tokens.

    Args:
        source: where it is loaded from, the setting ``distill.teacher``.
        student: the model in training; its tokens must be the teacher's. If it has a head of classes, the teacher
            classifies images by its own head of the same classes, or by the prompts "a photo of a CLASS."
        device: where it encodes.
        bf16: whether its towers run in bfloat16.

    Raises:
        ConfigError: its tokenizer or its classes differ from the student's.
        CheckpointError: it cannot be loaded.

    Attributes:
        fingerprint: hash of its weights, architecture and preprocessing.
    """

    def __init__(self, source: str, student: CLIP, *, device: torch.device, bf16: bool) -> None:
        self._model = load(source).requires_grad_(False)
        label = f"distill.teacher = {source!r}"
        self.fingerprint = model_hash(self._model)
        self._model.to(device)
        self._device = device
        self._bf16 = bf16
        if self._model.architecture.vision.budget is not None:
            raise ConfigError(
                f"{label} reads images of variable size: store its features and set distill.features"
            )
        self._classes: Tensor | None = None  # (C, P)
        if names := student.architecture.text.classes:
            own_names = self._model.architecture.text.classes
            if own_names and set(own_names) != set(names):
                raise ConfigError(
                    f"{label} has other classes ({len(own_names):,}) than model.text ({len(names):,})"
                )
            self._classes = zero_shot_classifier(self._model, names, allow_indistinguishable=True).T
            return
        sample = ["a photo of two cats, 3:4", "Ünï 猫"]
        tokens = self._model.tokenizer(sample)
        student_tokens = student.tokenizer(sample)
        length = min(tokens.shape[1], student_tokens.shape[1])  # context lengths may differ
        if not torch.equal(_cut(tokens, length), _cut(student_tokens, length)):
            raise ConfigError(
                f"{label} has another tokenizer than {student.name}: choose a model with its tokenizer, or store "
                "its features and set distill.features"
            )

    def __call__(self, images: Tensor, tokens: Tensor) -> Teaching:
        """Encode uint8 images (B, 3, S, S), resized to its own size, and tokens (B, L)."""
        side = self._model.architecture.vision.image_size
        length = self._model.architecture.text.context_length
        with torch.no_grad(), torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            return Teaching(
                images=self._model.encode_image(resize_images(images, side)),
                texts=self._model.encode_text(_cut(tokens, length))
                if self._classes is None
                else self._classes,
                scale=self._model.logit_scale.detach().exp(),
            )


def resize_images(images: Tensor, side: int) -> Tensor:
    """Resize uint8 images (B, 3, S, S)."""
    if images.shape[-1] == side:
        return images
    resized = F.interpolate(images.float(), (side, side), mode="bicubic", antialias=True)
    return resized.round_().clamp_(0, 255).to(torch.uint8)


def _cut(tokens: Tensor, length: int) -> Tensor:
    """Cut texts to ``length`` tokens, the last of which is the end of text, the largest id."""
    if tokens.shape[1] <= length:
        return tokens
    ends = tokens.amax(dim=1)
    cut = tokens[:, :length].clone()
    cut[:, -1] = torch.where(cut.amax(dim=1) == ends, cut[:, -1], ends)
    return cut


@dataclass(frozen=True, kw_only=True)
class Sides:
    """How features of several fields become one of a pair: their weighted mean, normalized again.

    Letters: F fields besides image and caption, O embedding dimension.

    Attributes:
        images: weights of the image and of further texts.
        texts: weights of the caption and of further texts.
    """

    images: tuple[float, ...] = (1.0,)
    texts: tuple[float, ...] = (1.0,)

    @classmethod
    def from_config(cls, data: DataConfig) -> "Sides":
        """Return the weights of ``data.image_fields`` and ``data.text_fields``."""
        images, texts = (tuple(data.parse_fields(side).values()) for side in ("image", "text"))
        return cls(images=images, texts=texts)

    @property
    def count(self) -> int:
        """F."""
        return len(self.images) + len(self.texts) - 2

    def combine(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Combine (B, O) features of images, and those of texts, of which the last FB are of the fields."""
        _, fields = self._split_fields(texts, len(images))
        combined = _combine(images, fields[: len(self.images) - 1], self.images)
        return combined, self.combine_texts(texts, rows=len(images))

    def combine_texts(self, texts: Tensor, *, rows: int) -> Tensor:
        """Combine features of the texts of B = ``rows`` pairs."""
        captions, fields = self._split_fields(texts, rows)
        return _combine(captions, fields[len(self.images) - 1 :], self.texts)

    def _split_fields(self, texts: Tensor, rows: int) -> tuple[Tensor, list[Tensor]]:
        captions, fields = texts.split([len(texts) - self.count * rows, self.count * rows])
        return captions, list(fields.split(rows))


def _combine(features: Tensor, fields: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    if len(weights) == 1:
        return features
    return combine_features([features, *fields], weights)


def batch_loss(
    *features: Tensor,
    objective: Objective,
    targets: Targets,
    settings: LossConfig,
    several_captions: bool = False,
    teaching: Teaching | None = None,
    distill: DistillConfig | None = None,
    halves: bool = False,
    gathering: CaptionGathering | None = None,
    sides: Sides | None = None,
) -> Tensor:
    """Compute the loss of the global batch from its features: all of a step's loss but the local terms.

    Args:
        *features: see ``Outputs``.
        settings: sizes and weights of prefixes, which are trained to be embeddings of their own (Matryoshka;
            Kusupati et al. 2022, https://arxiv.org/abs/2205.13147).
        several_captions: whether texts (MB, O) are the first captions of all images, their second captions, and so
            on. An image is compared as if it were in the batch with each of them.
        teaching: features of a teacher.
        distill: settings of distillation, with ``teaching``.
        halves: whether the teacher teaches the second half of the features and the objective the first, of unit
            norm each; see ``normalize_halves``.
        gathering: gathers the text features that the objective and all its prefixes compare; None: each gathers its
            own.
        sides: combines features of several fields, those of further texts being the last.
    """
    outputs = Outputs(*features)
    if sides is not None:
        images, texts = sides.combine(outputs.images, outputs.texts)
        outputs = outputs._replace(images=images, texts=texts)
    taught: Tensor | None = None
    if teaching is not None and distill is not None:
        student = outputs
        if halves:
            images, student_images = (outputs.images * math.sqrt(2)).chunk(2, dim=-1)
            texts, student_texts = (outputs.texts * math.sqrt(2)).chunk(2, dim=-1)
            student = outputs._replace(images=student_images, texts=student_texts)
            outputs = outputs._replace(images=images, texts=texts)
        taught = objective.divergence(student, teaching, distill)
        if distill.weight == 1:
            return _keep_scalars(taught, outputs)

    all_texts = None if gathering is None else gathering.finish(outputs.texts)

    def compare(outputs: Outputs, all_texts: Tensor | None) -> Tensor:
        if several_captions:
            count = len(outputs.texts) // len(outputs.images)
            outputs = outputs._replace(images=outputs.images.repeat(count, 1))
        loss = objective.loss(outputs, replace(targets, all_texts=all_texts))
        return _keep_scalars(loss, outputs)

    loss = compare(outputs, all_texts)
    if settings.dims:
        weights = settings.dim_weights or [1.0] * (len(settings.dims) + 1)
        loss = weights[-1] * loss
        for size, weight in zip(settings.dims, weights, strict=False):
            images = F.normalize(outputs.images[:, :size], dim=-1)
            texts = F.normalize(outputs.texts[:, :size], dim=-1)
            prefix = outputs._replace(images=images, texts=texts)
            all_prefixes = None if all_texts is None else F.normalize(all_texts[:, :size], dim=-1)
            loss = loss + weight * compare(prefix, all_prefixes)
        loss = loss / sum(weights)
    if taught is None or distill is None:
        return loss
    return distill.weight * taught + (1 - distill.weight) * loss


def _keep_scalars(loss: Tensor, outputs: Outputs) -> Tensor:
    """Give the scale and the bias a gradient, which DistributedDataParallel waits for, if the loss uses neither."""
    loss = loss + 0 * outputs.scale
    return loss if outputs.bias is None else loss + 0 * outputs.bias


def _join_parts(parts: Sequence[Teaching]) -> Teaching:
    images, texts = (torch.cat([getattr(part, side) for part in parts]) for side in ("images", "texts"))
    return Teaching(images=images, texts=texts, scale=parts[0].scale)


_SELECTION = 5  # distinguishes the random draws of data selection from those of terms


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """Computes a step's gradients as a function of the model, the batch and the number of the step.

    Attributes:
        shape: the model's architecture.
        loss: settings of the loss.
        terms: the local terms by name.
        distill: settings of distillation.
        select: settings of data selection.
        teacher: a model that encodes each batch, as a teacher or as a reference, if there is one.
        patch_dropout: fraction of patches that is dropped.
        seed: seed of the run.
        accumulate: parts in which this rank's rows are computed.
        bf16: whether the towers run in bfloat16.
        averaged: averaged weights, for terms and distillation that compare with them.
        sides: combines features of several fields.
        first_samples: (S,) int64, number of the first sample of each source, on the device.
        projection_numbers: (S,) int64, the projection of each source; None if there is only the image tower's.
        logs_samples: the setting ``log.samples``.
        state: state of the objective and the terms, on the device.
        steps: number of steps of the run.
        padding: the token behind the end of shorter texts.
    """

    shape: Architecture
    objective: Objective
    loss: LossConfig
    distill: DistillConfig = field(default_factory=DistillConfig)
    select: SelectConfig = field(default_factory=SelectConfig)
    teacher: Teacher | None = None
    patch_dropout: float = 0.0
    seed: int = 0
    accumulate: int = 1
    bf16: bool = False
    terms: Mapping[str, Term] = field(default_factory=dict)
    averaged: AveragedWeights | None = None
    sides: Sides = field(default_factory=Sides)
    first_samples: Tensor | None = None
    projection_numbers: Tensor | None = None
    logs_samples: bool = False
    state: ObjectiveState = field(default_factory=lambda: ObjectiveState({}))
    steps: int = 1
    padding: int = 0

    @classmethod
    def from_config(
        cls,
        config: Config,
        shape: Architecture,
        model: CLIP,
        first_samples: Sequence[int],
        *,
        samples: int,
        bf16: bool,
        averaged: AveragedWeights | None,
    ) -> "TrainingStep":
        """Return the step that the settings of a run select, and load the teacher if there is one.

        ``first_samples`` is the number of the first sample of each source of the training data, and ``samples`` the
        number of all.
        """
        teacher = None
        by_source: dict[str, Tensor] = {}
        device = model.logit_scale.device
        if shape.projections:
            by_source["first_samples"] = torch.tensor(first_samples, device=device)
            by_source["projection_numbers"] = torch.tensor(config.projection_numbers, device=device)
        if config.distill.loads_teacher:
            teacher = Teacher(config.distill.teacher, model, device=device, bf16=bf16)
        objective = select_objective(config)
        terms = select_terms(config)
        return cls(
            shape=shape,
            objective=objective,
            loss=config.loss,
            distill=config.distill,
            select=config.select,
            teacher=teacher,
            patch_dropout=config.model.patch_dropout,
            seed=config.seed,
            accumulate=config.accumulate,
            bf16=bf16,
            terms=terms,
            averaged=averaged,
            state=create_state(objective, terms, shape, samples=samples, device=device),
            steps=config.steps,
            sides=Sides.from_config(config.data),
            logs_samples=config.log.samples,
            padding=getattr(model.tokenizer, "padding", 0) if config.select.fraction < 1 else 0,
            **by_source,
        )

    @torch.no_grad()
    def finish_update(self, model: CLIP, *, skip: Tensor) -> None:
        """Update the state, and keep the scale of logits within 1 and the objective's ``max_scale``.

        Nothing changes if the update was skipped.
        """
        self.state.update(skip=skip)
        scale = model.logit_scale
        clamped = scale.clamp(0, math.log(self.objective.max_scale))
        scale.copy_(torch.where(skip, scale, clamped))

    def select_pairs(
        self, module: nn.Module, batch: BatchKind, step: int, watch: Stopwatch | None = None
    ) -> BatchKind:
        """Return this rank's part of the pairs that are trained after ``step`` updates, chosen of the global batch.

        Without ``select.fraction`` these are all. Pairs are scored by the image and its first caption, also with
        further captions or fields. All ranks call this together.
        """
        if self.select.fraction == 1:
            return batch
        if watch is not None:
            watch.begin("forward")
        with known_rows(batch.rank_rows):
            chosen, learnability = choose_pairs(
                *self._score_pairs(module, batch),
                batch.identities[: len(batch.ids)],
                count=self.select.count_pairs(sum(gather_row_counts(len(batch.ids)))),
                seed=seed_of(self.seed, step, _SELECTION),
                rows=batch.rows,
            )
            taken = take_pairs(batch, chosen.cpu(), padding=self.padding)
        return replace(taken, learnability=learnability)

    def _score_pairs(self, module: nn.Module, batch: Batch) -> tuple[Teaching, Teaching]:
        """Encode this rank's pairs by the model and by the reference, as many at a time as a step trains."""
        inputs = self._pair_inputs(batch)
        size = self.select.image_size
        if size and size < batch.images.shape[-1]:
            inputs["images"] = resize_images(batch.images, size)
        counts = gather_row_counts(len(batch.ids))
        rows = math.ceil(self.select.count_pairs(sum(counts)) / len(counts) / self.accumulate)
        parts = min(math.ceil(max(counts) / rows), *counts)  # the same on all ranks, as sharded models need
        encoded = [encode_pairs(module, cut_rows(inputs, i, parts), bf16=self.bf16) for i in range(parts)]
        if self.teacher is None:
            return _join_parts(encoded), self._teach(batch)
        inputs = {"images": batch.images, "tokens": batch.tokens}
        taught = [self.teacher(**cut_rows(inputs, i, parts)) for i in range(parts)]
        return _join_parts(encoded), _join_parts(taught)

    def gradients(
        self, module: nn.Module, batch: Batch, step: int, watch: Stopwatch | None = None
    ) -> Features:
        """Add the gradient of the global batch's loss to the module's parameters, after ``step`` updates.

        If the batch has a fault, the loss and the gradients are not numbers.
        """
        with known_rows(batch.rank_rows):
            return self._gradients(module, batch, step, watch)

    def _gradients(self, module: nn.Module, batch: Batch, step: int, watch: Stopwatch | None) -> Features:
        if watch is not None:
            watch.begin("forward")  # includes a teacher's

        # 1. The texts: captions, further and wrong captions and other fields behind them; or all rows of the text
        # tower.
        pairs = self._pair_inputs(batch)
        if self.objective.texts_are_classes:
            rows = self.objective.text_rows(self.shape.text, len(batch.images))
            pairs["tokens"] = torch.arange(rows, device=batch.tokens.device)[:, None]
            pairs["lengths"] = None
        inputs = dict(pairs)
        further = [tokens for tokens in (batch.more, batch.negatives, batch.fields) if tokens is not None]
        if further:
            inputs["tokens"] = torch.cat([batch.tokens, *further])
            lengths = batch.lengths + batch.more_lengths + batch.negative_lengths + batch.field_lengths
            inputs["lengths"] = lengths

        # 2. The patches that are encoded.
        if counts := patch_counts(self.shape, self.patch_dropout, batch.images.shape[-1]):
            inputs["patches"] = draw_patches(
                seed=seed_of(self.seed, step),
                rows=batch.rows,
                patches=counts[0],
                keep=counts[1],
            )

        # 3. The teacher's features. Averaged weights encode a batch once, for distillation and all terms.
        @cache
        def teach() -> Teaching:
            assert self.averaged is not None
            tokens = self.shape.masked == "features"
            return encode_pairs(module, pairs, averaged=self.averaged, bf16=self.bf16, tokens=tokens)

        teaching = None
        if self.distill.is_average:
            teaching = teach()
        elif self.distill.teaches:
            teaching = self._teach(batch)

        # 4. The loss of features and the local terms, and their gradients.
        gathering = None
        if self.objective.gathers_captions and (teaching is None or self.distill.weight < 1):
            gathering = CaptionGathering(has_negatives=batch.negatives is not None)

        def start_gathering(texts: Tensor) -> None:
            assert gathering is not None
            if batch.fields is not None:
                texts = self.sides.combine_texts(texts.detach(), rows=len(batch.ids))
            gathering.start(texts)

        loss: Loss = partial(
            batch_loss,
            objective=self.objective,
            targets=self._make_targets(batch, step),
            settings=self.loss,
            several_captions=batch.more is not None,
            teaching=teaching,
            distill=self.distill,
            halves=self.shape.distilled,
            gathering=gathering,
            sides=self.sides if batch.fields is not None else None,
        )
        if batch.fault:
            loss = partial(_not_a_number, loss)
        return backward(
            module,
            inputs,
            loss=loss,
            parts=self.accumulate,
            autocast=self.bf16,
            # only towers of other libraries use random numbers, for dropout, from torch's generator
            seeds=() if self.shape.is_native else seeds_of(self.seed, step, rank(), self.accumulate),
            terms=self._local_terms(batch, step, teach),
            on_texts=None if gathering is None else start_gathering,
            watch=watch,
        )

    def swaps(self, step: int) -> bool:
        """Return whether a step gives the model its averaged weights for a while."""
        terms = self.terms.values()
        return self.distill.is_average or any(term.uses_average and term.after <= step for term in terms)

    def _pair_inputs(self, batch: Batch) -> dict[str, Any]:
        """Return arguments of ``CLIP.forward`` for images and their captions."""
        pairs: dict[str, Any] = {
            "images": batch.images,
            "tokens": batch.tokens,
            "lengths": batch.lengths,
        }
        if batch.grids is not None:
            pairs["grids"] = batch.grids
        if self.first_samples is not None and self.projection_numbers is not None:
            image_numbers = batch.identities[: len(batch.images), 0].contiguous()
            source = torch.bucketize(image_numbers, self.first_samples, right=True) - 1
            pairs["projections"] = self.projection_numbers[source]
        return pairs

    def _teach(self, batch: Batch) -> Teaching:
        if self.teacher is not None:
            return self.teacher(batch.images, batch.tokens)
        assert batch.teacher is not None
        images, texts, stored_scale = batch.teacher
        assert texts is not None
        scale = torch.full((), self.distill.scale or stored_scale, device=images.device)
        return Teaching(images=images, texts=texts, scale=scale)

    def _local_terms(self, batch: Batch, step: int, teach: Callable[[], Teaching]) -> LocalTerms | None:
        terms = {name: term for name, term in self.terms.items() if step >= term.after}
        if not terms:
            return None
        inputs = {}
        counts = []
        for name, term in terms.items():
            seed = seed_of(self.seed, step, term.stream)
            draw = TermBatch(batch=batch, seed=seed, shape=self.shape, teach=teach, state=self.state)
            inputs[name], count = term.inputs(draw)
            counts.append(float(count))
        device = batch.tokens.device
        both = torch.tensor([counts, [term.weight for term in terms.values()]], dtype=widest_dtype(device))
        local_counts, weights = copy_to_device(both, device)
        return LocalTerms(terms=terms, inputs=inputs, weights=weights, counts=sum_over_ranks(local_counts))

    def figures(self, batch: Batch, features: Features) -> dict[str, float]:
        """Return the objective's metrics, the loss at chance, and its floor if above 0.

        All ranks call this together.
        """
        with known_rows(batch.rank_rows):
            return self._figures(batch, features)

    def _figures(self, batch: Batch, features: Features) -> dict[str, float]:
        targets = self._make_targets(batch)
        figures = {f"loss_{name}": float(value) for name, value in features.terms.items()}
        if batch.learnability is not None:
            read, trained = batch.learnability.tolist()
            figures |= {"learnability_read": read, "learnability_trained": trained}
        # the levels would depend on the teacher, and terms and wrong captions have none
        further = batch.negatives is not None or batch.more is not None
        if not (self.distill.teaches or self.terms or further):
            chance = self.objective.chance(targets, len(features.texts))
            if chance is not None:
                figures["chance"] = chance
            floor = self.objective.floor(targets, len(features.texts))
            if floor > 0:
                figures["floor"] = floor
        images, texts = self._combine_fields(batch, features)
        if batch.more is not None:  # of the first captions
            texts = texts[: len(images)]
            targets = replace(targets, identities=targets.identities[: len(texts)])
        return {**figures, **self.objective.figures(images, texts, targets)}

    def _combine_fields(self, batch: Batch, features: Features) -> tuple[Tensor, Tensor]:
        if batch.fields is None:
            return features.images, features.texts
        return self.sides.combine(features.images, features.texts)

    def compare_pairs(self, batch: Batch, features: Features) -> Tensor | None:
        """Return (4, B) the losses and margins of this rank's pairs, see ``clipkit.objectives.compare_pairs``.

        With several captions of an image, the pairs are those of the first ones. None without ``log.samples``. All
        ranks call this together. The host does not wait.
        """
        if not self.logs_samples:
            return None
        with known_rows(batch.rank_rows):
            images, texts = self._combine_fields(batch, features)
            rows = len(images)
            return compare_pairs(images, texts[:rows], features.scale, batch.identities[:rows])

    def _make_targets(self, batch: Batch, step: int = 0) -> Targets:
        weights = batch.weights
        numbers = copy_to_device(batch.ids, batch.tokens.device) if self.state.tensors else None
        if weights is not None and batch.more is not None:
            weights = weights.repeat(len(batch.identities) // len(weights))
        return Targets(
            identities=batch.identities,
            tokens=batch.tokens,
            same=self.loss.same,
            smoothing=self.loss.smoothing,
            negatives=None if batch.negatives is None else (batch.negatives != batch.tokens).any(dim=1),
            weights=weights,
            precision=self.loss.precision,
            state=self.state,
            numbers=numbers,
            progress=step / self.steps,
        )
