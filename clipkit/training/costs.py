"""Estimate the costs of a run (parameters, FLOPs, memory of each GPU, hours), and measure the speed of a device.

FLOPs and activation memory are measured on a step that computes nothing, see ``clipkit.model.measure``: uncompiled,
with fused attention; compiled blocks keep less. Only the loss is estimated by formula. The memory of CUDA, its
libraries and communication, and memory that the allocator cannot use, come on top.
"""

import math
import re
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.polynomial import Polynomial
from torch import Tensor

from clipkit.api import load
from clipkit.batch import Batch
from clipkit.config import Config, LossConfig, OptimConfig, redact_settings
from clipkit.distributed import barrier, ranks_of_host, world_size
from clipkit.errors import ClipkitError, ConfigError, nearest
from clipkit.expected import describe_nearest_curve, expected_score
from clipkit.model.architectures import Architecture
from clipkit.model.clip import CLIP
from clipkit.model.lora import add_adapters
from clipkit.model.measure import (
    Bytes,
    Flops,
    Unmeasurable,
    copy_without_values,
    image_flops,
    measuring,
    recompute_function,
    text_flops,
)
from clipkit.model.naflex import Grids
from clipkit.model.names import create_architecture
from clipkit.objectives import OBJECTIVES, Term, create_state, select_objective, select_terms
from clipkit.options import Target
from clipkit.training import OPTIMIZERS
from clipkit.training.build import adapters_of, check_split, lock, patch_counts, select_shape, tower_of
from clipkit.training.ema import AveragedWeights
from clipkit.training.optim import expected_state, make_optimizer
from clipkit.training.parallel import (
    blocks,
    gathers_once,
    is_sharded,
    linear_parameters,
    recompute_blocks,
    without_values,
)
from clipkit.training.step import Sides, TrainingStep


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU's data sheet: dense bfloat16 FLOP/s with float32 accumulation, and memory in GB.

    Data sheets often state twice the FLOP/s, for matrices with 50% structured sparsity.
    """

    bf16: float
    gb: int


# By torch's name of the device; the first entry that occurs in it counts.
GPUS: dict[str, Gpu] = {
    "A100": Gpu(bf16=312e12, gb=80),  # NVIDIA A100 Tensor Core GPU data sheet; 40 or 80 GB
    "A800": Gpu(bf16=312e12, gb=80),  # the same chip with slower links
    "H100 PCIe": Gpu(bf16=756e12, gb=80),  # NVIDIA H100 Tensor Core GPU data sheet: 1,513 with sparsity
    "H100 NVL": Gpu(bf16=835e12, gb=94),  # the same sheet: 1,671 with sparsity
    "H100": Gpu(bf16=989e12, gb=80),  # the same sheet, SXM: 1,979 with sparsity
    "H800": Gpu(bf16=989e12, gb=80),  # the same chip as H100 SXM with slower links
    "H200 NVL": Gpu(bf16=835e12, gb=141),  # NVIDIA H200 Tensor Core GPU data sheet: 1,671 with sparsity
    "H200": Gpu(bf16=989e12, gb=141),  # the same sheet, SXM: 1,979 with sparsity
    "B200": Gpu(bf16=2250e12, gb=180),  # NVIDIA HGX B200: 36 PFLOP/s with sparsity and 1,440 GB for eight
    "L40S": Gpu(bf16=362e12, gb=48),  # NVIDIA L40S data sheet: 362 | 733 with sparsity
    "L4": Gpu(bf16=121e12, gb=24),  # NVIDIA L4 data sheet: 242 with sparsity
    "A40": Gpu(bf16=149.7e12, gb=48),  # NVIDIA A40 data sheet: 149.7 | 299.4 with sparsity
    "RTX 4090": Gpu(bf16=165.2e12, gb=24),  # NVIDIA Ada GPU architecture white paper, appendix A
    "RTX 3090": Gpu(bf16=71e12, gb=24),  # NVIDIA Ampere GA102 GPU architecture white paper, appendix A
}

_SECONDS = 0.25  # per measurement
_PRODUCTS = 20  # least number of products in a measurement
_SIZES = (256, 512, 1024, 2048, 4096, 8192)


def computes_in_bf16(precision: str, device: torch.device) -> bool:
    """Return whether the towers run in bfloat16 with a setting of ``precision``."""
    if precision == "auto" and device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if precision == "auto":
        return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return precision == "bf16"


def published_gpu(device_name: str) -> Gpu | None:
    """Return the data sheet for a name from ``torch.cuda.get_device_name``; None if it is not known."""
    words = device_name.replace("-", " ").split()
    for name, gpu in GPUS.items():
        gpu_words = name.split()
        if any(words[at : at + len(gpu_words)] == gpu_words for at in range(len(words))):
            return gpu
    return None


def published_memory(device_name: str) -> int | None:
    """Return a GPU's bytes of memory; a name that states them, such as "A100-PCIE-40GB", overrides the table."""
    if match := re.search(r"\b(\d+) ?GB\b", device_name, re.IGNORECASE):
        return int(match[1]) << 30
    gpu = published_gpu(device_name)
    return None if gpu is None else gpu.gb << 30


def measured_peak(
    device: torch.device, dtype: torch.dtype, *, seconds: float = _SECONDS, together: bool = True
) -> float:
    """Measure the FLOP/s of a product of square matrices, the fastest of several, in about ``seconds``.

    Other load only makes products slower. The matrices are as large as the time allows, up to 8,192 rows. With
    ``together`` all ranks start at the same time, so that ranks on the same machine measure their part of its
    cores; call it on all ranks then.

    Args:
        device: a CPU or a GPU.
        dtype: dtype of the towers' computation, such as ``torch.bfloat16``.
        seconds: duration after the first product, which loads kernels.
        together: wait for the other ranks first.
    """

    def timed() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    if together:
        barrier()
    operations = 0
    times = [0.0]
    for size in _SIZES:
        generator = torch.Generator(device).manual_seed(0)  # zeros would draw less power, and be faster
        a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        timed()  # loads the kernel, which takes long on a GPU
        times = [timed(), timed()]
        operations = 2 * size**3
        # the next size takes eight times as long, and is needed several times
        if 8 * min(times) > seconds / _PRODUCTS:
            break
    began = time.monotonic()
    while time.monotonic() - began < seconds or len(times) < 3:
        times.append(timed())
    return operations / min(times)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A kind of GPU, or the CPU of this machine.

    Attributes:
        gpu: its name; "" for a CPU.
        memory: bytes; None if not known.
        peak: FLOP/s of one GPU, or of one process's part of this machine's CPU; None if not known.
        measured: whether ``peak`` is measured, not published.
    """

    gpu: str
    memory: int | None
    peak: float | None
    measured: bool


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Steps of a run that cost the same, and the ranks that make them.

    Attributes:
        model: the model of these steps, may be on the meta device; parameters that require no gradient are not
            trained.
        config: configuration of the run.
        terms: the local terms of these steps by name.
        steps: number of steps.
        world: number of ranks, one for each GPU.
        shard_ranks: with sharding=hybrid, number of ranks that share one copy of the weights, such as those of one
            host; 0: all.
        bf16: whether the towers compute in bfloat16.
        teacher: a model that encodes each batch.
    """

    model: CLIP
    config: Config = field(default_factory=Config)
    terms: Mapping[str, Term] = field(default_factory=dict)
    steps: int = 1
    world: int = 1
    shard_ranks: int = 0
    bf16: bool = True
    teacher: CLIP | None = None

    @property
    def rows(self) -> int:
        """Number of pairs that a rank trains in a step."""
        return math.ceil(self.config.trained_pairs / self.world)

    @property
    def read_rows(self) -> int:
        """Number of pairs that a rank reads in a step."""
        return math.ceil(self.config.batch_size / self.world)

    @property
    def part_rows(self) -> int:
        """Number of pairs that a rank computes at a time."""
        return math.ceil(self.rows / self.config.accumulate)

    @property
    def further(self) -> int:
        """Number of further texts of each image."""
        data = self.config.data
        return data.caption_count - 1 + bool(data.negatives) + Sides.from_config(data).count

    @property
    def text_rows(self) -> int:
        """Number of text features with which the loss compares an image."""
        return select_objective(self.config).text_rows(
            self.model.architecture.text, self.config.trained_pairs
        )

    @property
    def taught_rows(self) -> int:
        """Number of pairs of a rank that ``teacher`` encodes in a step."""
        rows = self.rows if self.config.distill.teaches else 0
        return rows + (self.read_rows if self.config.select.fraction < 1 else 0)

    @property
    def lacks_teacher(self) -> bool:
        """Whether the costs of a teacher are missing because it is not on this machine."""
        return self.config.distill.loads_teacher and self.teacher is None

    @property
    def ways(self) -> int:
        """Number of ranks that share one copy of the weights."""
        ways = {"none": 1, "full": self.world, "hybrid": self.shard_ranks or self.world}
        return ways[self.config.sharding]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of a number in a block that is gathered."""
        return _HALF if self.bf16 and gathers_once(self.terms) else _FLOAT


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The measured costs of a step of ``rows`` pairs, without its loss."""

    rows: int
    flops: int
    bytes: Bytes


def measure_step(
    work: Workload, rows: int, *, length: int = 0, image_size: int = 0, further: int = 0
) -> StepCosts:
    """Measure a step of one process in one part, without its loss.

    Args:
        work: the workload.
        rows: number of pairs.
        length: tokens of each text; 0: the context length.
        image_size: side of the images in pixels; 0: the model's. Images of variable size have the most patches.
        further: number of further texts of each image.

    Raises:
        Unmeasurable: a library's tower reads values.
    """
    shape = work.model.architecture
    vision = shape.vision
    size = vision.image_size if work.config.lock.stores("image") else image_size or vision.image_size
    pixels = (vision.channels, size, size)
    if vision.image_tokens:
        pixels = work.model.preprocess.input_shape
    length = length or shape.text.context_length
    with measuring() as meter:
        shadow = copy_without_values(work.model)
        recompute_blocks(shadow, every=work.config.recompute, recompute=recompute_function)
        step = TrainingStep(
            shape=shape,
            objective=OBJECTIVES["none"](),
            loss=LossConfig(name="none"),
            patch_dropout=work.config.model.patch_dropout,
            bf16=work.bf16,
            terms=work.terms,
            averaged=AveragedWeights(shadow, 0.0) if _encodes_twice(work.terms) else None,
            state=create_state(
                OBJECTIVES["none"](), work.terms, shape, samples=0, device=torch.device("meta")
            ),
        )
        lock = work.config.lock
        images = torch.empty(rows, *pixels, dtype=torch.uint8)
        tokens = torch.empty(rows * (1 + further), length, dtype=torch.int64)
        words = tokens[:rows]
        with torch.no_grad():
            if lock.stores("image"):
                images = shadow.pool_images(images)
            if lock.stores("text"):
                tokens = shadow.pool_texts(tokens, lengths=(length,) * len(tokens))
        batch = Batch(
            images=images,
            grids=((1, vision.image_tokens),) * rows if vision.image_tokens else None,
            tokens=tokens[:rows],
            lengths=(length,) * rows,
            more=tokens[rows:] if further else None,
            more_lengths=(length,) * (rows * further),
            words=words,
            ids=torch.empty(rows, dtype=torch.int64),
            identities=torch.empty(rows * (1 + further), 2, dtype=torch.int64),
        )
        meter.begin(shadow.parameters(), chain.from_iterable(map(linear_parameters, blocks(shadow))))
        step.gradients(shadow, batch, max((term.after for term in work.terms.values()), default=0))
        gradients = [parameter.grad for parameter in shadow.parameters() if parameter.grad is not None]
        return StepCosts(rows=rows, flops=meter.flops, bytes=meter.most_bytes(gradients))


def measure_workload(work: Workload) -> StepCosts | None:
    """Measure one part of a rank's step, see ``measure_step``; None if a library's tower reads values."""
    try:
        return measure_step(work, work.part_rows, further=work.further)
    except Unmeasurable:
        return None


def _encodes_twice(terms: Mapping[str, Term]) -> bool:
    return any(term.uses_average for term in terms.values())


_FEW = 2  # rows of a step whose FLOPs are measured; with one, batch norms have no variance


def flops_of_steps(work: Workload) -> Callable[..., int] | None:
    """Return a function from a batch to the FLOPs of this rank in a step; None if a tower cannot be measured.

    Its arguments are the caption lengths, the image size, the lengths of further texts, and the grids of images of
    variable size. The FLOPs of a teacher and of scoring for data selection do not count.
    """
    model = work.model
    if any(is_sharded(parameter) for parameter in model.parameters()):
        model = without_values(model)
        work = replace(work, model=model)
    shape = model.architecture

    @cache
    def fit_pairs(image_size: int) -> Polynomial:
        def measure_pair(length: int) -> float:
            costs = measure_step(work, _FEW, length=length, image_size=image_size)
            return costs.flops / _FEW + _average_flops(work, length)

        return _fit_lengths(measure_pair, shape)

    @cache
    def fit_texts() -> Polynomial:
        if work.config.lock.stores("text"):
            both = measure_step(work, _FEW, further=1)
            return Polynomial([(both.flops - measure_step(work, _FEW).flops) / _FEW])
        return _fit_lengths(lambda length: text_flops(model, length).both, shape)

    @cache
    def fit_images() -> Polynomial:
        """Return the FLOPs of an image as a function of its patches, less those of the most patches."""
        most = shape.vision.image_tokens
        sizes = sorted({1, (1 + most) // 2, most})
        flops = [image_flops(model, patches=size).both for size in sizes]
        return Polynomial.fit(sizes, flops, deg=len(sizes) - 1) - flops[-1]

    def count(
        lengths: Sequence[int],
        image_size: int,
        further: Sequence[int] = (),
        grids: Grids | None = None,
    ) -> int:
        flops = float(fit_pairs(image_size)(np.array(lengths)).sum())
        if grids:
            flops += float(fit_images()(np.prod(grids, axis=1)).sum())
        if further:
            flops += float(fit_texts()(np.array(further)).sum())
        return _gradients_of(work) * round(flops + _loss_flops(work, len(lengths)))

    try:
        fit_pairs(shape.vision.image_size)
    except Unmeasurable:
        return None
    return count


def _fit_lengths(measure: Callable[[int], float], shape: Architecture) -> Polynomial:
    """Return the FLOPs of a text as a function of its length: a polynomial of degree 2, as attention is a square.

    The few captions that are longer than a decoder predicts count as if it predicted all of them.
    """
    longest = shape.text.context_length
    if not shape.text.any_length or longest < 4:
        return Polynomial([measure(longest)])
    if shape.decoder is not None:
        longest = max(4, min(longest, shape.decoder.context_length + 1))
    lengths = (2, (2 + longest) // 2, longest)
    return Polynomial.fit(lengths, [measure(length) for length in lengths], deg=2)


def step_flops(work: Workload, costs: StepCosts) -> int:
    """Return the FLOPs of a step on all ranks together, given those of ``measure_workload``."""
    longest = work.model.architecture.text.context_length
    flops = work.rows * costs.flops // costs.rows
    flops += work.rows * _average_flops(work, longest) + _loss_flops(work, work.rows)
    flops *= _gradients_of(work)
    if work.config.select.fraction < 1:
        flops += work.read_rows * _scoring_flops(work)
    if work.teacher is not None:
        flops += work.taught_rows * _encoding_flops(work.teacher)
    return flops * work.world


def _scoring_flops(work: Workload) -> int:
    """Return the FLOPs with which the model scores a pair for data selection, without products of features.

    Of a tower whose features are stored, only the projection computes, which is not counted.
    """
    lock = work.config.lock
    shape = work.model.architecture
    flops = 0
    if not lock.stores("image"):
        # the model's is smaller in small steps
        size = min(work.config.select.image_size, shape.vision.image_size)
        flops += image_flops(work.model, image_size=size).forward
    if not lock.stores("text"):
        flops += text_flops(work.model, shape.text.context_length).forward
    return flops


def _gradients_of(work: Workload) -> int:
    return 2 if work.config.optim.sam else 1


def _average_flops(work: Workload, length: int) -> int:
    """Return the FLOPs of a pair with which averaged weights teach, unless a term has them counted already."""
    if not work.config.distill.is_average or _encodes_twice(work.terms):
        return 0
    return _encoding_flops(work.model, length)


def _encoding_flops(model: CLIP, length: int = 0) -> int:
    length = length or model.architecture.text.context_length
    return image_flops(model).forward + text_flops(model, length).forward


def _loss_flops(work: Workload, rows: int) -> int:
    dims = work.model.architecture.embed_dim + sum(work.config.loss.dims)
    product = 2 * rows * work.text_rows * dims
    trained = any(
        parameter.requires_grad and tower_of(name) in ("image", "text")
        for name, parameter in work.model.named_parameters()
    )
    return 3 * product if trained else product


_TILE = 1 << 22  # logits of a tiled loss in memory, three times: themselves, their gradients, a product
_HALF = 2
_FLOAT = 4


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak memory of each GPU in bytes; ``activations`` is None if a library's tower cannot be measured."""

    weights: int
    gradients: int
    optimizer: int
    average: int  # averaged weights
    copy: int  # of the weights, for ``optim.sam``
    teacher: int  # weights of a teacher that encodes each batch
    activations: int | None  # and copies of weights in half precision
    loss: int
    images: int

    @property
    def total(self) -> int:
        """The sum of what is known."""
        return sum(getattr(self, field.name) or 0 for field in fields(self))


def memory_of(work: Workload, costs: StepCosts | None) -> Memory:
    """Estimate the memory of a workload.

    Args:
        work: the workload.
        costs: measured costs of a step with as many rows or about as many, see ``measure_workload``.
    """
    model = work.model
    config = work.config
    rows = work.rows

    # weights, gradients and state
    optimizer = make_optimizer(model, OptimConfig(name=config.optim.name))
    numbers = trained = state = 0
    for parameter in model.parameters():
        numbers += parameter.numel()
        if parameter.requires_grad:
            trained += parameter.numel()
            for size, dtype in expected_state(optimizer, parameter).values():
                state += size.numel() * dtype.itemsize
    ways = work.ways
    weight_bytes = math.ceil(_FLOAT * numbers / ways)
    gradient_bytes = math.ceil(_FLOAT * trained / ways)
    weights = weight_bytes
    if ways > 1:
        # two blocks are gathered at a time, or all; the gradient of one is added up in float32. The parameters
        # outside of blocks are gathered for the whole step, and so is their gradient
        sizes = [sum(map(Tensor.numel, linear_parameters(block))) for block in blocks(model)]
        largest = max(sizes, default=0)
        weights += work.gathered_bytes * (2 * largest if config.reshard else sum(sizes))
        weights += _FLOAT * (largest + 2 * (numbers - sum(sizes)))
    teacher = 0
    if work.teacher is not None:  # whole on each GPU
        for parameter in work.teacher.parameters():
            copied = work.bf16 and parameter.ndim >= 2
            teacher += parameter.numel() * (_FLOAT + (_HALF if copied else 0))

    activations: int | None = None
    if costs is not None:
        copies = costs.bytes.weight_copies
        if ways > 1 and work.gathered_bytes == _HALF:
            copies -= costs.bytes.block_copies
        activations = costs.bytes.activations + copies
        if work.world == config.accumulate == 1:
            # gradients grow while activations are released; otherwise gradients are there from the start
            activations = max(costs.bytes.together - _FLOAT * trained, copies)
        activations = copies + (activations - copies) * work.part_rows // costs.rows

    # the loss: all texts and their gradients, this rank's features and theirs, and logits
    logits = rows * work.text_rows
    if select_objective(config).tiled:
        logits = min(_TILE, logits)
    features = (2 * work.text_rows + 4 * rows) * model.architecture.embed_dim
    return Memory(
        weights=weights,
        gradients=gradient_bytes,
        optimizer=math.ceil(state / ways),
        average=gradient_bytes if config.optim.average else 0,
        copy=weight_bytes if config.optim.sam else 0,
        teacher=teacher,
        activations=activations,
        loss=_FLOAT * (features + 3 * logits),
        # this step's and the next one's as they are stored
        images=math.prod(model.preprocess.input_shape) * 2 * work.read_rows,
    )


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Bytes that each rank sends in a step, besides a few numbers.

    With ring algorithms, an all-gather or a reduce-scatter of M bytes in all over W ranks sends (W − 1) / W · M,
    and an all-reduce of M bytes twice as much.

    Attributes:
        gradients: reduce-scatters of sharded gradients, and all-reduces over copies of the weights.
        weights: all-gathers of sharded weights.
        features: an all-gather of the text features, a reduce-scatter of their gradients, and softmax's sums by
            column.
    """

    gradients: int
    weights: int
    features: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.gradients + self.weights + self.features


def communication_of(work: Workload) -> Communication:
    """Count the bytes that each rank sends in a step, without a further objective's sums and data selection."""

    def sent(ranks: int, size: int) -> float:
        return size * (ranks - 1) / ranks

    config = work.config
    ways = work.ways
    copies = work.world // ways
    weights = gradients = 0.0
    in_blocks = {parameter for block in blocks(work.model) for parameter in linear_parameters(block)}
    # blocks: a pass without and one with a graph for each part, and what was freed again for each backward pass
    block_passes = config.accumulate
    if config.reshard:
        block_passes = 2 if config.accumulate == 1 else 3 * config.accumulate
    for parameter in work.model.parameters():
        numbers = parameter.numel()
        sharded = ways > 1 and parameter.ndim > 0
        if sharded:
            # the rows of all ranks are padded alike
            numbers = numbers // len(parameter) * math.ceil(len(parameter) / ways) * ways
            if parameter in in_blocks:
                weights += sent(ways, work.gathered_bytes * numbers) * block_passes
            else:
                weights += sent(ways, _FLOAT * numbers) * config.accumulate
        if parameter.requires_grad and sharded:
            gradients += sent(ways, _FLOAT * numbers) + 2 * sent(copies, _FLOAT * numbers // ways)
        elif parameter.requires_grad:
            gradients += 2 * sent(work.world, _FLOAT * numbers)
    if OPTIMIZERS[config.optim.name].divides_matrices:
        # in bfloat16: directions of sharded matrices, and the updates of all
        shapes = Counter(
            parameter.shape
            for transformer in work.model.transformers.values()
            for block in transformer.blocks
            for parameter in block.parameters()
            if parameter.requires_grad and parameter.ndim == 2
        )
        for shape, count in shapes.items():
            size = _HALF * shape.numel()
            gradients += sent(ways, count * size)
            gradients += sent(work.world, math.ceil(count / work.world) * work.world * size)
    features = 0.0
    if not select_objective(config).texts_are_classes:  # otherwise all ranks have all classes
        rows = config.trained_pairs * config.data.caption_count
        # features and their gradients, all-reduces of the greatest logits and of the sums of exponentials
        numbers = rows * (2 * work.model.architecture.embed_dim + 4)
        features = sent(work.world, _FLOAT * numbers)
    return Communication(gradients=round(gradients), weights=round(weights), features=round(features))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Resources that a workload needs; FLOPs are None if unknown.

    Attributes:
        work: the workload.
        parameters: number of parameters by "image", "text", "decoder" and "other" (the temperature).
        trained: number of trained parameters.
        image_flops: FLOPs of one image, both passes; ``text_flops`` of one caption.
        step_flops: FLOPs of a step on all ranks together, including a teacher's.
        costs: measured costs of one part of a rank's step.
        memory: memory of each GPU.
        hours: duration of the steps; None if the FLOPs or the speed are not known.
    """

    work: Workload
    parameters: Mapping[str, int]
    trained: int
    image_flops: Flops | None
    text_flops: Flops | None
    step_flops: int | None
    costs: StepCosts | None
    memory: Memory
    hours: float | None


def estimate(work: Workload, speed: float | None = None) -> Estimate:
    """Estimate the costs of a workload without computing anything.

    Args:
        work: the workload.
        speed: FLOP/s that each GPU is expected to reach; None: no hours.
    """
    shape = work.model.architecture
    parameters = {"image": 0, "text": 0, "decoder": 0, "other": 0}
    trained = 0
    for name, parameter in work.model.named_parameters():
        parameters[tower_of(name) or "other"] += parameter.numel()
        trained += parameter.numel() if parameter.requires_grad else 0
    image = text = flops = hours = None
    costs = measure_workload(work)
    if costs is not None:
        flops = step_flops(work, costs)
        counts = patch_counts(shape, work.config.model.patch_dropout, shape.vision.image_size)
        image = image_flops(work.model, patches=counts[1] if counts else None)
        text = text_flops(work.model, shape.text.context_length)
        if speed is not None:
            hours = work.steps * flops / work.world / speed / 3600
    return Estimate(
        work=work,
        parameters=parameters,
        trained=trained,
        image_flops=image,
        text_flops=text,
        step_flops=flops,
        costs=costs,
        memory=memory_of(work, costs),
        hours=hours,
    )


# Which fraction of a GPU's peak a run reaches (MFU) is the largest unknown. Published hours of CLIP runs, by this
# estimate's count of FLOPs, with captions of 77 tokens and the A100's 312 TFLOP/s:
#
# * ViT-B/32 on LAION-400M, 36 hours on 128 A100 (open_clip, docs/PRETRAINED.md): 10%.
# * ViT-L/14 on LAION-400M, 50,800 hours of A100 (the same): 12%.
# * ViT-H/14 on LAION-2B, 34,608 samples/s on 824 A100 (LAION's scaling-laws-openclip, trained_models_info.csv):
#   15%.
# * ViT-B/16 by CLIPA with its finish, about 2 days on 8 A100 (open_clip, docs/clipa.md): 19%.

PUBLISHED_MFU = (0.10, 0.19)  # the lowest and highest of these runs
GPU_MFU = PUBLISHED_MFU[0]  # default
CPU_MFU = 0.4  # of the measured rate
USABLE_MEMORY = 0.9  # fraction of a GPU's memory: CUDA, NCCL and the allocator's gaps take some
_GPUS_PER_HOST = 8
_OPEN_CLIP = "open_clip:"


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The estimated costs of a run.

    Attributes:
        estimate: that of the last steps, those at full size with all terms; ``hours`` are of all steps.
        machine: machine of each process.
        mfu: fraction of its peak that is reached.
        assumed: whether ``mfu`` is the default.
        alternatives: settings with which the run would fit into memory, each a group for a command line.
    """

    estimate: Estimate
    machine: Machine
    mfu: float
    assumed: bool
    alternatives: tuple[str, ...] = ()

    @property
    def knows_memory(self) -> bool:
        """Whether all parts of the memory are known."""
        return self.estimate.memory.activations is not None and not self.estimate.work.lacks_teacher

    @property
    def fits(self) -> bool | None:
        """Whether the memory suffices; None if it is not known."""
        memory = self.machine.memory
        if memory is None or not self.machine.gpu:
            return None
        if self.estimate.memory.total > USABLE_MEMORY * memory:
            return False
        return True if self.knows_memory else None


def workloads_of(
    config: Config, *, world: int, shard_ranks: int, bf16: bool, teacher: CLIP | None = None
) -> list[Workload]:
    """Return the workloads of a run: its small steps and those before terms begin, if any, and its other steps.

    Args:
        config: configuration of the run.
        world, shard_ranks, bf16, teacher: see ``Workload``.
    """
    small = config.small
    selected = select_terms(config)
    starts = (0, small.steps, *(term.after for term in selected.values()))
    bounds = sorted({min(start, config.steps) for start in starts} | {config.steps})
    works = []
    for begin, end in pairwise(bounds):
        terms = {name: term for name, term in selected.items() if begin >= term.after}
        shape = select_shape(config, terms)
        if begin < small.steps:
            shape = shape.replace_size(image_size=small.image_size, context_length=small.context_length)
        with torch.device("meta"):
            model = CLIP(shape, name=config.model.label)
        if config.lora.rank:
            add_adapters(model, adapters_of(config.lora))
        lock(model, image=config.lock.image, text=config.lock.text, terms=terms)
        works.append(
            Workload(
                model=model,
                config=config,
                terms=terms,
                steps=end - begin,
                world=world,
                shard_ranks=shard_ranks,
                bf16=bf16,
                teacher=teacher,
            )
        )
    return works


def run_costs(works: Sequence[Workload], machine: Machine, *, mfu: float | None = None) -> Costs:
    """Estimate the costs of a run, and find settings with which it would fit into memory.

    Args:
        works: see ``workloads_of``.
        machine: machine of each process.
        mfu: fraction of the peak that is reached, above 0 and at most 1; None: a cautious default.
    """
    fraction = mfu or (GPU_MFU if machine.gpu else CPU_MFU)
    speed = None if machine.peak is None else fraction * machine.peak
    estimates = [estimate(work, speed) for work in works]
    last = estimates[-1]
    if last.hours is not None:
        last = replace(last, hours=sum(part.hours or 0.0 for part in estimates))
    costs = Costs(estimate=last, machine=machine, mfu=fraction, assumed=mfu is None)
    return replace(costs, alternatives=tuple(_fitting_settings(costs))) if costs.fits is False else costs


def _fitting_settings(costs: Costs) -> Iterator[str]:
    work = costs.estimate.work
    config = work.config
    # ways to less memory, the cheapest first; each is tried with more and more parts
    ways: list[dict[str, Any]] = [{}]
    if config.recompute != 1:
        ways.append({"recompute": 1})
    if config.sharding == "none" and work.world > 1:
        ways.append({"sharding": "full", **ways[-1]})
    measured = {config.recompute: costs.estimate.costs}
    for settings in ways:
        changed = replace(work, config=replace(config, **settings))
        every = changed.config.recompute
        if every not in measured:
            measured[every] = measure_workload(changed)
        parts = config.accumulate if settings else 2 * config.accumulate
        while parts <= config.trained_pairs // work.world:
            if parts > config.accumulate:
                settings = {**settings, "accumulate": parts}
            changed = replace(work, config=replace(config, **settings))
            memory = memory_of(changed, measured[every])
            if replace(costs, estimate=replace(costs.estimate, memory=memory)).fits is not False:
                yield " ".join(f"{name}={value}" for name, value in settings.items())
                break
            parts *= 2


def dry_run(config: Config, device: torch.device, target: Target) -> list[str]:
    """Return the lines of ``train.py --dry-run``: the settings that are not defaults, and the estimated costs.

    Args:
        config: configuration of the run.
        device: device of this process, which is measured unless ``target`` names a GPU.
        target: the machines.
    """
    select_shape(config)  # mistakes are reported before anything is measured
    world = target.gpus or world_size()
    check_split(config, world=world)
    bf16 = computes_in_bf16(config.precision, device)
    if gpu := target.gpu:
        bf16 = config.precision != "fp32"
        sheet = published_gpu(gpu)
        if sheet is None:
            raise ConfigError(f"--gpu {gpu} is unknown: {nearest(gpu, GPUS)}")
        peak = sheet.bf16 if bf16 else None
        machine = Machine(gpu=gpu, memory=published_memory(gpu), peak=peak, measured=False)
    else:
        peak = measured_peak(device, torch.bfloat16 if bf16 else torch.float32)
        machine = Machine(gpu="", memory=None, peak=peak, measured=True)
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            machine = replace(machine, gpu=properties.name, memory=properties.total_memory)
    teacher = None
    source = config.distill.teacher if config.distill.loads_teacher else ""
    if source.startswith(_OPEN_CLIP):
        with suppress(ClipkitError), torch.device("meta"):
            teacher = CLIP(create_architecture(source.partition("/")[0]), name=source)
    elif source and Path(source).expanduser().exists():
        teacher = load(source)
    shard_ranks = target.gpus_per_host or min(target.gpus, _GPUS_PER_HOST) or ranks_of_host()
    works = workloads_of(config, world=world, shard_ranks=shard_ranks, bf16=bf16, teacher=teacher)
    costs = run_costs(works, machine, mfu=target.mfu)
    title = "# settings that differ from the defaults, see --settings"
    rows = cost_table(costs, expected=expected_score(config), nearest_curve=describe_nearest_curve(config))
    return [title, redact_settings(config), *rows]


# columns of the table, and of a row's name
_WIDTH = 80
_NAME = 16


def cost_table(costs: Costs, *, expected: str = "", nearest_curve: str = "") -> list[str]:
    """Return parameters, FLOPs, memory, whether it fits, time and scores of public runs, in at most 80 columns."""
    rows = [
        *_model_rows(costs.estimate),
        *_memory_rows(costs),
        *_time_rows(costs),
        *_wrapped("expected", expected),
        *_wrapped("you are here", nearest_curve),
    ]
    rows.append(("data", "not checked: use python -m data inspect SOURCE"))
    return [f"{name:<{_NAME}}{text}" for name, text in rows]


Row = tuple[str, str]


def _model_rows(estimate: Estimate) -> Iterator[Row]:
    work = estimate.work
    counts = {name: f"{count / 1e6:,.1f} M" for name, count in estimate.parameters.items()}
    towers = f"image {counts['image']}, text {counts['text']}"
    if estimate.parameters["decoder"]:
        towers += f", decoder {counts['decoder']}"
    total = sum(estimate.parameters.values()) / 1e6
    yield "parameters", f"{towers}, {total:,.1f} M in all, {estimate.trained / 1e6:,.1f} M trained"
    if estimate.image_flops is None or estimate.text_flops is None or estimate.step_flops is None:
        yield "FLOPs", "not known, as a tower of another library reads values"
        return
    tokens = work.model.architecture.text.context_length
    caption = f"{_flops(estimate.text_flops.both)} a caption of {tokens} tokens"
    patches = work.model.architecture.vision.image_tokens
    image = f"an image of {patches} patches, the most," if patches else "an image,"
    yield "FLOPs", f"{_flops(estimate.image_flops.both)} {image} {caption}"
    taught = work.teacher is not None or work.config.distill.is_average
    pairs = f"{work.config.batch_size:,} pairs"
    if work.config.select.fraction < 1:
        pairs += f", {work.config.trained_pairs:,} of them trained"
    step = f"{_flops(estimate.step_flops)} a step of {pairs}, both passes"
    yield "", f"{step}, with the teacher's" if taught else step


def _memory_rows(costs: Costs) -> Iterator[Row]:
    memory = costs.estimate.memory
    machine = costs.machine
    yield "memory per GPU" if machine.gpu else "memory", f"{_gib(memory.weights)} weights"
    rows = [
        (memory.gradients, "gradients"),
        (memory.optimizer, "optimizer state"),
        (memory.average, "averaged weights"),
        (memory.copy, "copy of the weights"),
        (memory.teacher, "the teacher's weights"),
        (memory.activations, "activations"),
        (memory.loss, "loss"),
        (memory.images, "images"),
    ]
    for size, name in rows:
        if size is None:
            yield "", f"        {name} of another library's tower: not known"
        elif size:
            yield "", f"{_gib(size)} {name}"
    if sample_bytes := select_objective(costs.estimate.work.config).sample_bytes:
        name = costs.estimate.work.config.loss.name
        yield "", f"        {sample_bytes} bytes for each pair of data.train: state of loss.name={name}"
    if costs.estimate.work.lacks_teacher:
        yield "", "        a teacher that is not on this machine: not known"
    bound = "in all" if costs.knows_memory else "at least"
    yield "", f"{_gib(memory.total)} {bound}, besides that of {'CUDA' if machine.gpu else 'Python'} itself"
    if costs.fits is None or machine.memory is None:
        return
    gib = machine.memory / 2**30
    answer = "yes" if costs.fits else "no"
    usable = USABLE_MEMORY * gib
    yield "fits", f"{answer}: {_short(machine.gpu)} has {gib:.0f} GB, {usable:.0f} of them usable"
    if not costs.fits and not costs.alternatives:
        yield "", "try more GPUs (--gpus), a smaller model or a smaller batch_size"
    for i, settings in enumerate(costs.alternatives):
        yield "", f"{'or' if i else 'it fits'} with {settings}"


def _time_rows(costs: Costs) -> Iterator[Row]:
    estimate = costs.estimate
    machine = costs.machine
    world = estimate.work.world
    steps = estimate.work.config.steps
    if machine.peak is None:
        yield "time", "not known: the published rates of GPUs are for bf16"
        return
    if estimate.hours is None:
        yield "time", "not known: the FLOPs of another library's tower"
        return
    text = f"{duration(estimate.hours)} for {steps:,} steps, without evaluation, "
    rate = f"if loading data is fast enough and {costs.mfu:.0%} (--mfu) of {machine.peak / 1e12:,.3g} TFLOP/s"
    origin = "measured now" if machine.measured else "according to its data sheet"
    if machine.gpu:
        text += f"on {world} × {_short(machine.gpu)}: {estimate.hours * world:,.0f} GPU-hours, "
    text += f"{rate} are reached, the rate {origin}"
    if not machine.gpu:
        text += "; other programs reduce both"
    elif costs.assumed:
        least, most = PUBLISHED_MFU
        text += f" (published runs reached {least:.0%} to {most:.0%}, see configs/README.md)"
    yield from _wrapped("time", text)
    if world > 1:
        sent = communication_of(estimate.work)
        parts = ", ".join(f"{size / 2**30:.2f} of {name}" for name, size in asdict(sent).items() if size)
        needed = _round_to_two_digits(sent.total * steps / estimate.hours / 3600 / 1e9)
        text = (
            f"{sent.total / 2**30:.2f} GiB sent by each {'GPU' if machine.gpu else 'process'} and step ({parts}): "
            f"takes as long as the computation at {needed} GB/s; much faster links hide it"
        )
        yield from _wrapped("communication", text)


def _round_to_two_digits(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{round(value, 1 - math.floor(math.log10(value))):,.0f}"


def _wrapped(name: str, text: str) -> Iterator[Row]:
    for i, line in enumerate(textwrap.wrap(text, _WIDTH - _NAME, break_on_hyphens=False)):
        yield "" if i else name, line


def duration(hours: float) -> str:
    """Format a duration in a suitable unit."""
    seconds = hours * 3600
    if seconds < 1:
        return "less than 1 second"
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    if hours < 48:
        return f"{hours:,.1f} hours"
    return f"{hours:,.0f} hours ({hours / 24:,.1f} days)"


def _short(gpu: str) -> str:
    return gpu.removeprefix("NVIDIA ").removeprefix("GeForce ")[:15].rstrip()


def _flops(count: int) -> str:
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T")):
        if count >= size:
            return f"{count / size:,.3g} {letter}FLOP"
    return f"{count / 1e9:,.3g} GFLOP"


def _gib(size: int) -> str:
    return f"{size / 2**30:8.2f} GiB"
