"""One training step: the gradients of a batch's loss, and its metrics.

Random draws are functions of the seed, the step and the place in the global batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from clipkit.api import load
from clipkit.batch import Batch
from clipkit.config import DistillConfig, LossConfig
from clipkit.distributed import rank, sum_over_ranks, world_size
from clipkit.errors import ConfigError
from clipkit.formats.checkpoint import model_hash
from clipkit.model.architectures import Architecture
from clipkit.model.clip import CLIP
from clipkit.model.towers import kept_patches
from clipkit.model.zero_shot import evaluating, zero_shot_classifier
from clipkit.objectives import OBJECTIVES, TERMS, Targets
from clipkit.objectives.distill import Teaching, with_teacher
from clipkit.training.build import patch_counts
from clipkit.training.ema import AveragedWeights, RunningStatistics
from clipkit.training.metrics import Stopwatch
from clipkit.training.parallel import local_gradients

__all__ = [
    "Features", "LocalTerms", "Teacher", "TrainingStep", "averaged_teaching", "backward",
    "check_rows", "seed_of",
    "seeds_of", "with_captions", "with_prefixes",
]  # fmt: skip

Loss = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Features:
    """The loss and this rank's features, detached."""

    loss: Tensor  # ()
    images: Tensor  # (B, O)
    texts: Tensor  # (B, O), or (C, O) of all classes
    terms: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # () each, means over the global batch's targets


@dataclass(frozen=True, kw_only=True)
class LocalTerms:
    """Terms of the loss that need no other sample, see ``clipkit.objectives.TERMS``.

    Attributes:
        inputs: arguments of each term by name, each a tensor or a sequence of B rows.
        weights: (K,) float64, their weights.
        counts: (K,) float64, their numbers of targets in the global batch.
    """

    inputs: Mapping[str, Mapping[str, Any]]
    weights: Tensor
    counts: Tensor


def check_rows(model: nn.Module, *, batch_size: int, world: int, parts: int) -> None:
    """Check that batch norms get at least two rows at a time: one row has no variance.

    Args:
        model: in training mode, in which locked batch norms are not.
        batch_size: pairs of all ranks.
        world: number of ranks.
        parts: parts in which each rank computes its rows.

    Raises:
        ConfigError: the smallest part has fewer.
    """
    rows = batch_size // world // parts
    if rows < 2 and any(isinstance(one, _BatchNorm) and one.training for one in model.modules()):
        least = 2 * world * parts
        raise ConfigError(
            f"batch_size = {batch_size} over {world} processes × accumulate = {parts} leaves parts of one row, "
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
    terms: LocalTerms | None = None,
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
        watch: stopwatch that times the phases.
    """
    watch = watch or Stopwatch()
    images = inputs["images"]
    precision = torch.autocast(images.device.type, torch.bfloat16, enabled=autocast)
    assert 1 <= parts <= len(images), (len(images), parts)
    pieces: list[dict[str, Any]] = [{} for _ in range(parts)]

    def cut(name: str, value: Any, into: Sequence[dict[str, Any]]) -> None:
        cuts = [len(value) * number // parts for number in range(parts + 1)]
        for piece, span in zip(into, pairwise(cuts), strict=True):
            piece[name] = value[slice(*span)]

    for name, value in inputs.items():
        if value is not None:
            cut(name, value, pieces)
    further: list[dict[str, Any]] = [{} for _ in range(parts)]  # arguments of passes with a graph
    if terms is not None:
        for name, given in terms.inputs.items():
            own: list[dict[str, Any]] = [{} for _ in range(parts)]
            for key, value in given.items():
                cut(key, value, own)
            for number, one in enumerate(own):
                further[number].setdefault("terms", {})[name] = TERMS[name].total, one
        for arguments in further:
            arguments["reads_tokens"] = any(TERMS[name].reads_tokens for name in terms.inputs)
        factors = terms.weights / terms.counts

    def of_sums(sums: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient of the terms' sums; ranks average their gradients."""
        return [(factors * world_size()).to(one.dtype) for one in sums]

    def done(value: Tensor, images: Tensor, texts: Tensor, sums: Sequence[Tensor]) -> Features:
        found: dict[str, Tensor] = {}
        value = value.detach()
        if terms is not None:
            total = sum_over_ranks(torch.stack([one.detach() for one in sums]).sum(dim=0))  # (K,)
            value = value + (factors * total).sum().to(value.dtype)
            found = dict(zip(terms.inputs, total / terms.counts, strict=True))
        return Features(loss=value, images=images.detach(), texts=texts.detach(), terms=found)

    def draw(number: int) -> None:
        if seeds:
            torch.manual_seed(seeds[number])

    watch.begin("forward")
    if parts == 1:
        draw(0)
        with precision:
            outputs = model(**pieces[0], **further[0])
        outputs, sums = (outputs, ()) if terms is None else (outputs[:-1], outputs[-1:])
        watch.begin("loss")
        value = loss(*outputs)
        watch.begin("backward")
        torch.autograd.backward([value, *sums], [None, *of_sums(sums)])
        return done(value, outputs[0], outputs[1], sums)
    bare: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    first: list[tuple[Tensor, ...]] = []
    statistics = RunningStatistics(bare)
    for number, piece in enumerate(pieces):
        draw(number)
        with torch.no_grad(), precision:
            first.append(bare(**piece))
    statistics.put_back()  # the second pass counts
    watch.begin("loss")
    whole = [torch.cat([one[i] for one in first]).requires_grad_() for i in (0, 1)]
    scalars = [one.detach().clone().requires_grad_() for one in first[0][2:]]  # exp(t), and the bias
    value = loss(*whole, *scalars)
    torch.autograd.backward(value)
    watch.begin("backward")
    sizes = [[len(one[i]) for one in first] for i in (0, 1)]
    all_sums: list[Tensor] = []
    gradients = zip(*(_gradient(one).split(own) for one, own in zip(whole, sizes, strict=True)), strict=True)
    for number, (piece, of_features) in enumerate(zip(pieces, gradients, strict=True)):
        draw(number)
        with local_gradients(model, last=number == parts - 1):
            with precision:
                outputs = model(**piece, **further[number])
            sums = outputs[len(scalars) + 2 :]
            all_sums += sums
            of_outputs = [*of_features, *(_gradient(one) / parts for one in scalars), *of_sums(sums)]
            pairs = [
                pair for pair in zip(outputs, of_outputs, strict=True) if pair[0].requires_grad
            ]  # not locked
            torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
    return done(value, whole[0], whole[1], all_sums)


def _gradient(tensor: Tensor) -> Tensor:
    """Return the gradient, or zeros if the loss does not depend on the tensor."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


_MASK = 2**63 - 1


def seed_of(seed: int, *places: int) -> int:
    """Derive a seed, 0 to 2^63 - 1, from the run's seed and places, such as a step."""
    mixed = seed
    for place in (len(places), *places):
        mixed = (mixed ^ (place + 0x9E3779B97F4A7C15 + (mixed << 6) + (mixed >> 2))) * 0xBF58476D1CE4E5B9
        mixed = (mixed ^ (mixed >> 31)) & _MASK
    return mixed


def seeds_of(seed: int, step: int, rank: int, parts: int) -> list[int]:
    """Return a seed for each part of a rank's rows, for towers of other libraries with dropout."""
    return [seed_of(seed, step, rank, part) for part in range(parts)]


def averaged_teaching(
    module: nn.Module, averaged: AveragedWeights, inputs: Mapping[str, Any], *, bf16: bool, tokens: bool
) -> Teaching:
    """Encode a batch with the averaged weights, without patch dropout; all ranks call this together.

    Args:
        module: a CLIP, possibly wrapped in DistributedDataParallel or sharded.
        averaged: its averaged weights.
        inputs: this rank's ``images`` and ``tokens``, and ``lengths`` if they are known; see ``CLIP.forward``.
        bf16: whether the towers run in bfloat16.
        tokens: whether to return the images' tokens too.
    """
    bare: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    assert isinstance(bare, CLIP)
    pixels = inputs["images"]
    precision = torch.autocast(pixels.device.type, torch.bfloat16, enabled=bf16)
    with averaged.applied(), evaluating(bare), torch.no_grad(), precision:
        images, seen = bare.image_tokens(pixels) if tokens else (bare.encode_image(pixels), None)
        texts = bare.encode_text(inputs["tokens"], lengths=inputs.get("lengths"))
        return Teaching(images=images, texts=texts, scale=bare.logit_scale.exp(), tokens=seen)


class Teacher:
    """A CLIP that encodes each batch for distillation; its weights do not change.

    Letters: B batch, S side of the images, L tokens.

    Args:
        source: a model as for ``clipkit.load``.
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
        self.fingerprint = model_hash(self._model)
        self._model.to(device)
        self._device, self._bf16 = device, bf16
        self._classes: Tensor | None = None  # (C, P)
        if names := student.architecture.text.classes:
            own_names = self._model.architecture.text.classes
            if own_names and set(own_names) != set(names):
                raise ConfigError(
                    f"distill.teacher = {source!r} has other classes ({len(own_names):,}) than model.text "
                    f"({len(names):,})"
                )
            self._classes = zero_shot_classifier(self._model, names, allow_indistinguishable=True).T
            return
        sample = ["a photo of two cats, 3:4", "Ünï 猫"]
        own, other = self._model.tokenizer(sample), student.tokenizer(sample)
        length = min(own.shape[1], other.shape[1])  # context lengths may differ
        if not torch.equal(_cut(own, length), _cut(other, length)):
            raise ConfigError(
                f"distill.teacher = {source!r} has another tokenizer than {student.name}: choose a teacher with "
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
                texts=self._model.encode_text(_cut(tokens, length))
                if self._classes is None
                else self._classes,
                scale=self._model.logit_scale.detach().exp(),
            )


def _cut(tokens: Tensor, length: int) -> Tensor:
    """Cut texts to ``length`` tokens, the last of which is the end of text, the largest id."""
    if tokens.shape[1] <= length:
        return tokens
    ends = tokens.amax(dim=1)
    cut = tokens[:, :length].clone()
    cut[:, -1] = torch.where(cut.amax(dim=1) == ends, cut[:, -1], ends)
    return cut


def with_prefixes(loss: Loss, dims: Sequence[int], weights: Sequence[float] = ()) -> Loss:
    """Return the weighted mean of ``loss`` over prefixes of the features and the whole features.

    Prefixes become embeddings of their own (Matryoshka; Kusupati et al. 2022, https://arxiv.org/abs/2205.13147).

    Args:
        loss: a function of image features (B, O), text features (C, O) and scalars.
        dims: sizes of the prefixes, which are normalized again; temperature and bias are shared.
        weights: weight of each prefix and of the whole; empty for equal weights.
    """
    weights = weights or [1.0] * (len(dims) + 1)

    def mean(images: Tensor, texts: Tensor, *scalars: Tensor) -> Tensor:
        total = weights[-1] * loss(images, texts, *scalars)
        for size, weight in zip(dims, weights, strict=False):
            prefixes = (F.normalize(features[:, :size], dim=-1) for features in (images, texts))
            total = total + weight * loss(*prefixes, *scalars)
        return total / sum(weights)

    return mean


def with_captions(loss: Loss) -> Loss:
    """Return ``loss`` for several captions of each image, as if the image were in the batch with each of them.

    Text features (MB, O) are those of the first captions of all images, of their second captions, and so on.
    """

    def repeated(images: Tensor, texts: Tensor, *scalars: Tensor) -> Tensor:
        return loss(images.repeat(len(texts) // len(images), 1), texts, *scalars)

    return repeated


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """Computes a step's gradients as a function of the model, the batch and the number of the step.

    Attributes:
        shape: the model's architecture.
        loss: the objective.
        terms: settings of each local term by name, see ``clipkit.objectives.TERMS``.
        distill: settings of distillation.
        teacher: a teacher that encodes each batch, if there is one.
        patch_dropout: fraction of patches that is dropped.
        seed: seed of the run.
        accumulate: parts in which this rank's rows are computed.
        bf16: whether the towers run in bfloat16.
        averaged: averaged weights, for terms and distillation that compare with them.
    """

    shape: Architecture
    loss: LossConfig
    distill: DistillConfig
    teacher: Teacher | None
    patch_dropout: float
    seed: int
    accumulate: int
    bf16: bool
    terms: Mapping[str, Any] = field(default_factory=dict)
    averaged: AveragedWeights | None = None

    def gradients(
        self, module: nn.Module, batch: Batch, step: int, watch: Stopwatch | None = None
    ) -> Features:
        """Add the gradient of the global batch's loss to the module's parameters, after ``step`` updates."""
        if watch is not None:
            watch.begin("forward")  # includes a teacher's
        inputs: dict[str, Any] = {"images": batch.images}
        objective, text = OBJECTIVES[self.loss.name], self.shape.text
        if objective.over_classes or objective.over_words:  # all of them, not only those in the batch
            rows = objective.text_rows(text, len(batch.images))
            inputs["tokens"] = torch.arange(rows, device=batch.tokens.device)[:, None]
        else:
            inputs |= {"tokens": batch.tokens, "lengths": batch.lengths}
        plain = dict(inputs)
        further = [one for one in (batch.more, batch.negatives) if one is not None]
        if further:  # their features follow those of the captions
            inputs["tokens"] = torch.cat([batch.tokens, *further])
            inputs["lengths"] = batch.lengths + batch.more_lengths + batch.negative_lengths
        if counts := patch_counts(self.shape, self.patch_dropout, batch.images.shape[-1]):
            inputs["patches"] = kept_patches(
                seed=seed_of(self.seed, step),
                rows=batch.rows.to(batch.images.device),
                patches=counts[0],
                keep=counts[1],
            )
        loss: Loss = partial(objective.loss, targets=self._targets(batch))
        if batch.more is not None:
            loss = with_captions(loss)
        if self.loss.dims:
            loss = with_prefixes(loss, self.loss.dims, self.loss.dim_weights)

        @cache
        def teach() -> Teaching:
            assert self.averaged is not None
            tokens = self.shape.masked == "features"
            return averaged_teaching(module, self.averaged, plain, bf16=self.bf16, tokens=tokens)

        teaching = None
        if self.distill.averages:
            teaching = teach()
        elif self.teacher is not None:
            teaching = self.teacher(batch.images, batch.tokens)
        elif batch.teacher is not None:
            images, texts = batch.teacher
            assert texts is not None
            scale = torch.tensor(self.distill.scale, device=images.device)
            teaching = Teaching(images=images, texts=texts, scale=scale)
        if teaching is not None:
            assert objective.divergence is not None
            loss = with_teacher(
                loss, objective.divergence, teaching, self.distill, halves=self.shape.distilled
            )
        return backward(
            module,
            inputs,
            loss=loss,
            parts=self.accumulate,
            autocast=self.bf16,
            # only towers of other libraries use random numbers, for dropout, from torch's generator
            seeds=() if self.shape.is_own else seeds_of(self.seed, step, rank(), self.accumulate),
            terms=self._local_terms(batch, step, teach),
            watch=watch,
        )

    def swaps(self, step: int) -> bool:
        """Return whether a step gives the model its averaged weights for a while."""
        terms = ((settings, TERMS[name]) for name, settings in self.terms.items())
        return self.distill.averages or any(
            settings.after <= step and term.averages(settings) for settings, term in terms
        )

    def _local_terms(self, batch: Batch, step: int, teach: Callable[[], Teaching]) -> LocalTerms | None:
        terms = {name: settings for name, settings in self.terms.items() if step >= settings.after}
        if not terms:
            return None
        inputs, counts = {}, []
        for name, settings in terms.items():
            seed = seed_of(self.seed, step, TERMS[name].stream)
            inputs[name], count = TERMS[name].inputs(settings, batch, seed, self.shape, teach)
            counts.append(float(count))
        device = batch.tokens.device
        both = torch.tensor([counts, [float(one.weight) for one in terms.values()]], dtype=torch.float64)
        counted, weights = both.to(device, non_blocking=True)
        whole = sum_over_ranks(counted)
        return LocalTerms(inputs=inputs, weights=weights, counts=whole)

    def figures(self, batch: Batch, features: Features) -> dict[str, float]:
        """Return the objective's metrics, the loss at chance, and its floor if above 0.

        All ranks call this together.
        """
        objective, targets = OBJECTIVES[self.loss.name], self._targets(batch)
        level = {f"loss_{name}": float(value) for name, value in features.terms.items()}
        # it would depend on the teacher, and terms and wrong captions have none
        plain = not (
            self.distill.wanted or self.terms or batch.negatives is not None or batch.more is not None
        )
        if objective.chance is not None and plain:
            level["chance"] = objective.chance(targets, len(features.texts))
        if objective.floor is not None and plain:
            floor = objective.floor(targets, len(features.texts))
            if floor > 0:
                level["floor"] = floor
        texts = features.texts
        if batch.more is not None:  # of the first captions
            texts = texts[: len(features.images)]
            targets = replace(targets, identities=targets.identities[: len(texts)])
        return {**level, **objective.figures(features.images, texts, targets)}

    def _targets(self, batch: Batch) -> Targets:
        return Targets(
            identities=batch.identities,
            tokens=batch.tokens,
            same=self.loss.same,
            smoothing=self.loss.smoothing,
            negatives=None if batch.negatives is None else (batch.negatives != batch.tokens).any(dim=1),
        )
