"""What a run will cost: parameters, FLOPs, memory of each GPU, hours.

Activations are counted by formula: what autograd keeps of clipkit's blocks from the forward to the backward pass,
uncompiled, with attention that keeps its output and one number for each query instead of the whole square. Compiled
blocks keep less. What CUDA, its libraries and the communication take for themselves comes on top, and so does what
the allocator cannot use.

Letters: L tokens, D width, H width inside a block's MLP, O embedding dimension, N rows of the global batch.
"""

import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from clipkit.api import load
from clipkit.config import Config, to_toml
from clipkit.distributed import ranks_of_host, world_size
from clipkit.errors import ClipkitError, ConfigError, nearest
from clipkit.files.terminal import without_secrets
from clipkit.model.architectures import Architecture
from clipkit.model.clip import CLIP
from clipkit.model.flops import (
    Flops,
    counted_flops,
    image_flops,
    step_flops,
    text_flops,
    trained_blocks,
)
from clipkit.model.names import architecture
from clipkit.objectives import OBJECTIVES
from clipkit.training import OPTIMIZERS
from clipkit.training.build import check_split, lock, patch_counts, shape_of
from clipkit.training.machines import (
    GPUS,
    Machine,
    computes_in_bf16,
    measured_peak,
    published_gpu,
    published_memory,
)

if TYPE_CHECKING:
    from torch import nn

    from clipkit.model.clip import CLIP

__all__ = [
    "COUNTED_ON",
    "CPU_MFU",
    "GPU_MFU",
    "PUBLISHED_MFU",
    "Costs",
    "Estimate",
    "Memory",
    "cost_table",
    "dry_run",
    "duration",
    "estimate",
    "run_costs",
]

_SHARDINGS = ("none", "full", "hybrid")
_TILE = 1 << 22  # logits of the loss that exist at a time, three times: themselves, their slopes, a product
_BYTE, _HALF, _FLOAT = 1, 2, 4


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each GPU when they are most; ``activations`` is None where a tower is another library's."""

    weights: int
    gradients: int
    optimizer: int
    average: int  # of the weights, if one is kept
    activations: int | None
    loss: int
    images: int
    teacher: int = 0  # that encodes along, if one does

    @property
    def total(self) -> int:
        """Their sum, without what is not known."""
        known = (
            self.weights,
            self.gradients,
            self.optimizer,
            self.average,
            self.loss,
            self.images,
            self.teacher,
        )
        return sum(known) + (self.activations or 0)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run needs. FLOPs count the model's operations (``clipkit.model.flops``); None if not known.

    Attributes:
        parameters: by "image", "text" and "other" (the temperature).
        trained: how many of them are.
        image_flops: of one image, both passes; ``text_flops`` of one caption.
        step_flops: of a step, on all ranks together.
        memory: of each GPU.
        hours: of all steps at ``mfu`` of ``peak``; None where no peak is given.
    """

    parameters: Mapping[str, int]
    trained: int
    tokens: int
    batch_size: int
    image_flops: Flops | None
    text_flops: Flops | None
    step_flops: int | None
    memory: Memory
    steps: int
    world: int
    mfu: float
    peak: float | None
    hours: float | None


def estimate(
    model: "CLIP",
    *,
    batch_size: int,
    steps: int,
    world: int = 1,
    parts: int = 1,
    tokens: int = 0,
    patches: int | None = None,
    bf16: bool = True,
    recompute: int = 0,
    optimizer: str = "adamw",
    tiled: bool = True,
    average: bool = False,
    sharding: str = "none",
    shard_ranks: int = 0,
    mfu: float = 0.4,
    peak: float | None = None,
    counted: Mapping[str, Flops] | None = None,
) -> Estimate:
    """Estimate what a run of these settings needs, without computing anything.

    Args:
        model: may be on the meta device. What ``requires_grad`` says decides what is trained.
        batch_size: pairs of a step over all ranks.
        steps: of the whole run.
        world: how many GPUs, one to a rank.
        parts: how many pieces a rank's share is computed in (``accumulate``).
        tokens: mean length of a caption, packed; 0 is the whole context length.
        patches: of an image that patch dropout keeps; None is all.
        bf16: whether the towers compute in bfloat16.
        recompute: every so-manieth block keeps its input alone and is computed again in the backward pass; 0: none.
        optimizer: a name in ``OPTIMIZERS``.
        tiled: whether the loss computes its logits tile by tile, see ``clipkit.objectives.Objective``.
        average: whether a moving average of the weights is kept.
        sharding: "none", "full" (weights, gradients and states spread over all ranks), or "hybrid" (over
            ``shard_ranks`` of them, such as those of one node).
        shard_ranks: with "hybrid", how many ranks share one copy.
        mfu: fraction of the peak that the run is expected to reach, 0–1.
        peak: FLOP/s of a GPU, published or measured (``clipkit.training.machines``); None leaves the hours out.
        counted: FLOPs of the towers that other libraries build, see ``clipkit.model.flops.counted_flops``.

    Raises:
        ConfigError: the optimizer or the sharding is unknown.
    """
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer = {optimizer!r} is unknown: {nearest(optimizer, OPTIMIZERS)}")
    if sharding not in _SHARDINGS:
        raise ConfigError(f"sharding = {sharding!r} is unknown: {nearest(sharding, _SHARDINGS)}")
    shape = model.architecture
    tokens = tokens or shape.text.context_length
    rows = math.ceil(batch_size / world)
    part = math.ceil(rows / parts)
    ways = {"none": 1, "full": world, "hybrid": shard_ranks or world}[sharding]
    memory = Memory(
        **_weights(model, optimizer=optimizer, average=average, ways=ways, bf16=bf16),
        activations=_activations(model, part, tokens, patches, bf16=bf16, recompute=recompute),
        loss=_loss(rows, len(shape.text.classes) or batch_size, shape.embed_dim, tiled=tiled),
        # of this step and the next as they are stored, and a part of them as the tower takes it
        images=3 * shape.vision.image_size**2 * (2 * rows * _BYTE + part * _FLOAT),
    )
    image, text, of_rank = _flops_of(model, rows, batch_size, tokens, patches, counted or {})
    return Estimate(
        parameters=_parameters(model),
        trained=sum(one.numel() for one in model.parameters() if one.requires_grad),
        tokens=tokens,
        batch_size=batch_size,
        image_flops=image,
        text_flops=text,
        step_flops=None if of_rank is None else of_rank * world,
        memory=memory,
        steps=steps,
        world=world,
        mfu=mfu,
        peak=peak,
        hours=None if peak is None or of_rank is None else steps * of_rank / (peak * mfu) / 3600,
    )


def _flops_of(
    model: "CLIP", rows: int, all_rows: int, tokens: int, patches: int | None, counted: Mapping[str, Flops]
) -> tuple[Flops, Flops, int] | tuple[None, None, None]:
    """Of an image, of a caption, and of one rank's step; None where a tower's are not known."""
    shape = model.architecture
    image_blocks, text_blocks = trained_blocks(model)
    try:
        image = counted.get("image") or image_flops(shape, patches=patches, blocks=image_blocks)
        text = counted.get("text") or text_flops(shape, tokens, blocks=text_blocks)
    except ConfigError:
        return None, None, None
    step = step_flops(
        shape,
        rows=rows,
        lengths={tokens: rows},
        global_rows=all_rows,
        patches=patches,
        image_blocks=image_blocks,
        text_blocks=text_blocks,
        counted=counted,
    )
    return image, text, step


def _parameters(model: "CLIP") -> dict[str, int]:
    found = {"image": 0, "text": 0, "other": 0}
    for name, parameter in model.named_parameters():
        which = "image" if name.startswith("visual.") else "other" if name.startswith("logit_") else "text"
        found[which] += parameter.numel()
    return found


def _weights(model: "CLIP", *, optimizer: str, average: bool, ways: int, bf16: bool) -> dict[str, int]:
    """Bytes of what lasts from step to step, and of the gradients."""
    entry = OPTIMIZERS[optimizer]
    whole = gradients = state = multiplied = 0
    for name, one in model.named_parameters():
        is_matrix = one.ndim >= 2 and "embedding" not in name
        whole += one.numel() * _FLOAT
        multiplied += one.numel() if is_matrix else 0
        if one.requires_grad:
            gradients += one.numel() * _FLOAT
            state += one.numel() * (
                entry.matrix_bytes if is_matrix and "resblocks" in name else entry.other_bytes
            )
    weights = math.ceil(whole / ways)
    if ways > 1:  # two blocks and what lies outside of blocks are whole at a time
        largest, outside = _largest_block(model)
        weights += (2 * largest + outside) * (_HALF if bf16 else _FLOAT)
    elif bf16:
        weights += multiplied * _HALF  # autocast's copies
    return {
        "weights": weights,
        "gradients": math.ceil(gradients / ways),
        "optimizer": math.ceil(state / ways),
        "average": math.ceil(whole / ways) if average else 0,
    }


def _largest_block(model: "nn.Module") -> tuple[int, int]:
    """Parameters of the largest block, and of all that is in no block."""
    blocks: dict[str, int] = {}
    outside = 0
    for name, parameter in model.named_parameters():
        before, found, after = name.partition("resblocks.")
        if found:
            block = before + after.split(".")[0]
            blocks[block] = blocks.get(block, 0) + parameter.numel()
        else:
            outside += parameter.numel()
    return max(blocks.values(), default=0), outside


def _activations(
    model: "CLIP", rows: int, tokens: int, patches: int | None, *, bf16: bool, recompute: int
) -> int | None:
    """Of one part of a rank's rows; None where a trained tower is another library's."""
    shape = model.architecture
    image_blocks, text_blocks = trained_blocks(model)
    total = 0
    for tower, count, blocks in ((shape.vision, patches, image_blocks), (shape.text, tokens, text_blocks)):
        if blocks == 0:
            continue
        kept = tower.activation_bytes(count, blocks=blocks, bf16=bf16, recompute=recompute)
        if kept is None:
            return None
        total += rows * kept
    return total + rows * shape.embed_dim * _FLOAT * 4  # features and their unit vectors, of both


def _loss(rows: int, text_rows: int, embed_dim: int, *, tiled: bool) -> int:
    """All texts and their gradients, this rank's features and theirs, and logits: those of a tile, or all."""
    logits = min(_TILE, rows * text_rows) if tiled else rows * text_rows
    return _FLOAT * (2 * text_rows * embed_dim + 4 * rows * embed_dim + 3 * logits)


# --------------------------------------------------------------------------------------------------------------
# What a configuration's run will cost on a machine, estimated for ``train.py --dry-run``.
#
# The share of a GPU's peak that a run reaches (MFU) is the great unknown. Runs of CLIP whose hours are
# published, by this estimate's own count of FLOPs, with captions of 77 tokens, and A100's 312 TFLOP/s:
#
# * ViT-B/32 on LAION-400M, 36 hours on 128 A100 (open_clip, docs/PRETRAINED.md): 10%.
# * ViT-L/14 on LAION-400M, 50,800 hours of A100 (the same): 12%.
# * ViT-H/14 on LAION-2B, 34,608 samples/s on 824 A100 (LAION's scaling-laws-openclip, trained_models_info.csv):
# 15%.
# * ViT-B/16 by CLIPA with its finish, about 2 days on 8 A100 (open_clip, docs/clipa.md): 19%.

PUBLISHED_MFU = (0.10, 0.19)  # of the runs above, the least and the most
GPU_MFU = PUBLISHED_MFU[0]  # what is assumed where nothing is said
CPU_MFU = 0.4  # of the rate measured a moment before
COUNTED_ON = (
    0.9  # share of a GPU's memory that may be counted on: CUDA, NCCL and the allocator's gaps take some
)
_GPUS_PER_HOST = 8
_OPEN_CLIP = "open_clip:"


@dataclass(frozen=True, kw_only=True)
class Costs:
    """An estimate, and what it is of.

    Attributes:
        whole: of all steps; memory is that of the full size.
        machine: computed on.
        mfu: fraction of its peak that is reached.
        assumed: whether ``mfu`` is a default.
        instead: settings with which it would fit the memory, each a group for a command line.
        unknown_teacher: whether a teacher's costs are left out, as it is not on this machine.
    """

    whole: Estimate
    machine: Machine
    mfu: float
    assumed: bool
    instead: tuple[str, ...] = ()
    unknown_teacher: bool = False

    @property
    def fits(self) -> bool | None:
        """Whether the memory does; None where it is not known."""
        memory, wanted = self.machine.memory, self.whole.memory
        if memory is None or not self.machine.gpu:
            return None
        if wanted.total > COUNTED_ON * memory:
            return False
        return None if wanted.activations is None or self.unknown_teacher else True


def run_costs(
    config: Config,
    shape: Architecture,
    machine: Machine,
    *,
    world: int,
    shard_ranks: int,
    bf16: bool,
    mfu: float | None = None,
) -> Costs:
    """Estimate what a run costs, without computing anything.

    Args:
        config: of the run.
        shape: its model's architecture.
        machine: that each process computes on.
        world: processes.
        shard_ranks: with sharding=hybrid, how many share one copy.
        bf16: whether the towers compute in bfloat16.
        mfu: fraction of the peak, above 0 and at most 1; None: a cautious default.

    Raises:
        ConfigError: it is not.
    """
    if mfu is not None and not 0 < mfu <= 1:
        raise ConfigError(f"--mfu {mfu} does not fit: above 0, at most 1")
    assumed = mfu is None
    share = mfu if mfu is not None else GPU_MFU if machine.gpu else CPU_MFU
    teacher, unknown = _teacher(config.distill.teacher)
    given = _Given(
        shape=shape,
        teacher=teacher,
        world=world,
        shard_ranks=shard_ranks,
        bf16=bf16,
        mfu=share,
        peak=machine.peak,
    )
    costs = Costs(
        whole=given.whole(config), machine=machine, mfu=share, assumed=assumed, unknown_teacher=unknown
    )
    if costs.fits is not False:
        return costs
    fitting = (
        next(
            (said for said, changed in tried if replace(costs, whole=given.whole(changed)).fits is not False),
            None,
        )
        for tried in _alternatives(config, world)
    )
    return replace(costs, instead=tuple(one for one in fitting if one))


def dry_run(
    config: Config,
    device: torch.device,
    *,
    gpu: str | None = None,
    gpus: int = 0,
    gpus_per_host: int = 0,
    mfu: float | None = None,
) -> list[str]:
    """Return the lines of ``train.py --dry-run``: the settings that are not defaults, and the estimated costs.

    Args:
        config: of the run.
        device: of this process, which is measured where ``gpu`` is not given.
        gpu: name of a GPU whose data sheet is used instead.
        gpus: total number of GPUs; 0: one for each process of this job.
        gpus_per_host: with sharding=hybrid; 0: ``gpus``, at most 8, or as many as this host has processes.
        mfu: as for ``run_costs``.

    Raises:
        ConfigError: the GPU is unknown, or the batch cannot be split over so many.
    """
    shape = shape_of(config.model, config.loss, config.small)
    world = gpus or world_size()
    check_split(config.batch_size, world=world, parts=config.accumulate)
    bf16 = computes_in_bf16(config.precision, device)
    if gpu:
        bf16, sheet = config.precision != "fp32", published_gpu(gpu)
        if sheet is None:
            raise ConfigError(f"--gpu {gpu} is unknown: {nearest(gpu, GPUS)}")
        machine = Machine(
            gpu=gpu, memory=published_memory(gpu), peak=sheet.bf16 if bf16 else None, measured=False
        )
    else:
        peak = measured_peak(device, torch.bfloat16 if bf16 else torch.float32)
        machine = Machine(gpu="", memory=None, peak=peak, measured=True)
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            machine = replace(machine, gpu=properties.name, memory=properties.total_memory)
    shard_ranks = gpus_per_host or min(gpus, _GPUS_PER_HOST) or ranks_of_host()
    costs = run_costs(config, shape, machine, world=world, shard_ranks=shard_ranks, bf16=bf16, mfu=mfu)
    settings = without_secrets(to_toml(config, differing_from=Config()))
    return ["# settings that differ from the defaults, which --settings lists", settings, *cost_table(costs)]


def _alternatives(config: Config, world: int) -> Iterator[Iterator[tuple[str, Config]]]:
    """Ways to less memory, and of each the steps on it, from the cheapest on."""
    rows = config.batch_size // world

    def with_parts(changed: Config, said: str, first: int) -> Iterator[tuple[str, Config]]:
        parts = (first * 2**power for power in range(40))
        for count in takewhile(lambda count: count <= max(rows, 1), parts):
            words = [said] if said else []
            words += [f"accumulate={count}"] if count > config.accumulate else []
            yield " ".join(words), replace(changed, accumulate=count)

    yield with_parts(config, "", 2 * config.accumulate)
    again = replace(config, recompute=1)
    if config.recompute != 1:
        yield with_parts(again, "recompute=1", config.accumulate)
    if config.sharding == "none" and world > 1:
        said = "sharding=full" if config.recompute == 1 else "sharding=full recompute=1"
        yield with_parts(replace(again, sharding="full"), said, config.accumulate)


@dataclass(frozen=True, kw_only=True)
class _Given:
    """All but the configuration that an estimate depends on."""

    shape: Architecture
    teacher: CLIP | None
    world: int
    shard_ranks: int
    bf16: bool
    mfu: float
    peak: float | None

    def whole(self, config: Config) -> Estimate:
        """Of all steps, small ones and those of full size."""
        small = config.small
        full = self._of_steps(config, self.shape, max(0, config.steps - small.steps))
        if not small.steps:
            return full
        sizes = self.shape.resized(image_size=small.image_size, context_length=small.context_length)
        first = self._of_steps(config, sizes, min(small.steps, config.steps))
        both = None if first.hours is None or full.hours is None else first.hours + full.hours
        return replace(full, steps=config.steps, hours=both)

    def _of_steps(self, config: Config, shape: Architecture, steps: int) -> Estimate:
        with torch.device("meta"):
            model = CLIP(shape, name=config.model.label)
        lock(model, image=config.lock.image, text=config.lock.text)
        counts = patch_counts(shape, config.model.patch_dropout, shape.vision.image_size)
        found = estimate(
            model,
            batch_size=config.batch_size,
            steps=steps,
            world=self.world,
            parts=config.accumulate,
            patches=counts[1] if counts else None,
            bf16=self.bf16,
            recompute=config.recompute,
            optimizer=config.optim.name,
            tiled=OBJECTIVES[config.loss.name].tiled,
            average=bool(config.optim.average),
            sharding=config.sharding,
            shard_ranks=self.shard_ranks,
            mfu=self.mfu,
            peak=self.peak,
            counted=counted_flops(model),
        )
        return found if self.teacher is None else self._taught(found, self.teacher)

    def _taught(self, found: Estimate, teacher: CLIP) -> Estimate:
        """With a teacher that encodes each batch along; its weights are whole on each GPU."""
        numbers = sum(one.numel() for one in teacher.parameters())
        copies = sum(one.numel() for one in teacher.parameters() if one.ndim >= 2) if self.bf16 else 0
        memory = replace(found.memory, teacher=4 * numbers + 2 * copies)
        counted, shape = counted_flops(teacher) or {}, teacher.architecture
        try:
            image = counted.get("image") or image_flops(shape)
            text = counted.get("text") or text_flops(shape, shape.text.context_length)
        except ConfigError:
            return replace(found, memory=memory, hours=None)
        if found.step_flops is None or found.hours is None:
            return replace(found, memory=memory)
        flops = found.step_flops + found.batch_size * (image.forward + text.forward)
        return replace(found, memory=memory, step_flops=flops, hours=found.hours * flops / found.step_flops)


def _teacher(source: str) -> tuple[CLIP | None, bool]:
    """A teacher's shape, if there is one; and whether there is one of which nothing is known here."""
    if not source:
        return None, False
    if source.startswith(_OPEN_CLIP):
        try:
            shape = architecture(source.partition("/")[0])
        except ClipkitError:
            return None, True
        with torch.device("meta"):
            return CLIP(shape, name=source), False
    if Path(source).expanduser().exists():
        return load(source), False
    return None, True


# --------------------------------------------------------------------------------------------------------------
# The table that ``train.py --dry-run`` prints of a run's costs: plain text, at most 80 columns wide.

_WIDTH, _NAME = 80, 16  # columns: in all, and of a row's name


def cost_table(costs: Costs) -> list[str]:
    """Parameters, FLOPs, memory, whether that fits, time, and what was not looked at."""
    rows = [*_model(costs.whole), *_memory(costs), *_fits(costs), *_time(costs)]
    rows.append(("data", "not looked at: python -m data inspect SOURCE does that"))
    return [f"{name:<{_NAME}}{text}" for name, text in rows]


Row = tuple[str, str]


def _model(found: Estimate) -> Iterator[Row]:
    image, text = found.parameters["image"], found.parameters["text"]
    whole = sum(found.parameters.values())
    both = f"image {_millions(image)}, text {_millions(text)}"
    yield "parameters", f"{both}, {_millions(whole)} in all, {_millions(found.trained)} trained"
    if found.image_flops is None or found.text_flops is None or found.step_flops is None:
        yield "FLOPs", "not known for a tower of another library"
        return
    of_text = f"{_flops(found.text_flops.both)} a caption of {found.tokens} tokens"
    yield "FLOPs", f"{_flops(found.image_flops.both)} an image, {of_text}"
    teacher = ", a teacher's too" if found.memory.teacher else ""
    yield "", f"{_flops(found.step_flops)} a step of {found.batch_size:,} pairs, both passes{teacher}"


def _memory(costs: Costs) -> Iterator[Row]:
    memory, gpu = costs.whole.memory, costs.machine.gpu
    yield "memory per GPU" if gpu else "memory", f"{_gb(memory.weights)} weights"
    rows = [
        (memory.gradients, "gradients"),
        (memory.optimizer, "optimizer state"),
        (memory.average, "moving average of the weights"),
        (memory.teacher, "the teacher's weights"),
        (memory.activations, "activations"),
        (memory.loss, "loss"),
        (memory.images, "images"),
    ]
    for size, name in rows:
        if size is None:
            yield "", f"        {name} of another library's tower: not known"
        elif size:
            yield "", f"{_gb(size)} {name}"
    if costs.unknown_teacher:
        yield "", "        a teacher that is not on this machine: not known"
    known = "at least" if memory.activations is None or costs.unknown_teacher else "in all"
    yield "", f"{_gb(memory.total)} {known}, and what {'CUDA' if gpu else 'Python'} itself takes"


def _fits(costs: Costs) -> Iterator[Row]:
    machine = costs.machine
    if costs.fits is None or machine.memory is None:
        return
    size = machine.memory / 2**30
    answer = "yes" if costs.fits else "no"
    counted = f"{size:.0f} GB, of which {COUNTED_ON * size:.0f} are counted on"
    yield "fits", f"{answer}: {_short(machine.gpu)} has {counted}"
    if costs.fits:
        return
    if not costs.instead:
        yield "", "it might with more GPUs (--gpus), a smaller model or batch_size"
    for number, settings in enumerate(costs.instead):
        yield "", f"{'or with' if number else 'it would with'} {settings}"


def _time(costs: Costs) -> Iterator[Row]:
    found, machine = costs.whole, costs.machine
    if machine.peak is None:
        yield "time", "not known: the published rates of GPUs are of bf16"
        return
    if found.hours is None:
        yield "time", "not known: the FLOPs of another library's tower"
        return
    text = f"{duration(found.hours)} for {found.steps:,} steps, scores left out, "
    rate = f"{costs.mfu:.0%} (--mfu) of {machine.peak / 1e12:,.3g} TFLOP/s are reached"
    if machine.gpu:
        text += f"on {found.world} × {_short(machine.gpu)}: {found.hours * found.world:,.0f} GPU-hours, "
        origin = "measured just now" if machine.measured else "by its data sheet"
        text += f"if the data keep up and {rate}, the rate {origin}"
    else:
        text += f"if the data keep up and {rate}, the rate measured just now; what else runs here slows both"
    if costs.assumed and machine.gpu:
        least, most = PUBLISHED_MFU
        text += f" (published runs reached {least:.0%} to {most:.0%}, see configs/README.md)"
    for number, line in enumerate(textwrap.wrap(text, _WIDTH - _NAME, break_on_hyphens=False)):
        yield "" if number else "time", line


def duration(hours: float) -> str:
    """In the unit that suits it."""
    seconds = hours * 3600
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    if hours < 48:
        return f"{hours:,.1f} hours"
    return f"{hours:,.0f} hours ({hours / 24:,.1f} days)"


def _short(gpu: str) -> str:
    return gpu.removeprefix("NVIDIA ").removeprefix("GeForce ")[:15].rstrip()


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M"


def _flops(count: int) -> str:
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T")):
        if count >= size:
            return f"{count / size:,.3g} {letter}FLOP"
    return f"{count / 1e9:,.3g} GFLOP"


def _gb(size: int) -> str:
    return f"{size / 2**30:8.2f} GiB"
