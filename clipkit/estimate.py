"""What a run will cost before it starts: parameters, FLOPs, memory of each GPU, hours.

Activations are counted by formula: what autograd keeps of clipkit's blocks from the forward to the backward pass,
uncompiled, with attention that keeps its output and one number for each query instead of the whole square. Compiled
blocks keep less. What CUDA, its libraries and the communication take for themselves comes on top, and so does what
the allocator cannot use.

Letters: L tokens, D width, H width inside a block's MLP, O embedding dimension, N rows of the global batch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipkit.architectures import BagOfWords, ClassTable, TextTower, VisionTower
from clipkit.errors import ConfigError, nearest
from clipkit.flops import Flops, image_flops, patches_of, step_flops, text_flops, trained_blocks

if TYPE_CHECKING:
    from torch import nn

    from clipkit.model import CLIP

__all__ = ["Estimate", "Memory", "activation_bytes", "estimate"]

_SHARDINGS = ("none", "full", "hybrid")
# bytes of state for a trained number: of the matrices in blocks, and of everything else
_OPTIMIZER_BYTES: dict[str, tuple[int, int]] = {
    "adamw": (8, 8),
    "stable_adamw": (8, 8),
    "lamb": (8, 8),
    "muon": (4, 8),
}
_TILE = 1 << 22  # logits of the loss that exist at a time, three times: themselves, their slopes, a product
_BYTE, _HALF, _FLOAT = 1, 2, 4
_STATISTICS = 2 * _FLOAT  # of a norm's token: mean and inverse deviation


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each GPU when they are most; ``activations`` is None where a tower is another library's."""

    weights: int
    gradients: int
    optimizer: int
    average: int  # of the weights, if one is kept
    activations: int | None
    loss: int
    pictures: int
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
            self.pictures,
            self.teacher,
        )
        return sum(known) + (self.activations or 0)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run needs. FLOPs are those of the model, see ``clipkit.flops``; None where they are not known.

    Attributes:
        parameters: by "image", "text" and "other" (the temperature).
        trained: how many of them are.
        image_flops: of one picture, both passes; ``text_flops`` of one caption.
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
    average: bool = False,
    sharding: str = "none",
    shard_ranks: int = 0,
    mfu: float = 0.4,
    peak: float | None = None,
    counted: Mapping[str, Flops] | None = None,
) -> Estimate:
    """What a run of these settings needs; computes nothing.

    Args:
        model: may be on the meta device. What ``requires_grad`` says decides what is trained.
        batch_size: pairs of a step over all ranks.
        steps: of the whole run.
        world: how many GPUs, one to a rank.
        parts: how many pieces a rank's share is computed in (``accumulate``).
        tokens: mean length of a caption, packed; 0 is the whole context length.
        patches: of a picture that patch dropout keeps; None is all.
        bf16: whether the towers compute in bfloat16.
        recompute: every so-manieth block keeps its input alone and is computed again in the backward pass; 0: none.
        optimizer: "adamw", "stable_adamw", "lamb" or "muon".
        average: whether a moving average of the weights is kept.
        sharding: "none", "full" (weights, gradients and states spread over all ranks), or "hybrid" (over
            ``shard_ranks`` of them, such as those of one node).
        shard_ranks: with "hybrid", how many ranks share one copy.
        mfu: share of the peak that the run is expected to reach, 0–1.
        peak: FLOP/s of a GPU, published or measured (``clipkit.peak_rate``); None leaves the hours out.
        counted: FLOPs of the towers that other libraries build, see ``clipkit.flops.counted_flops``.

    Raises:
        ConfigError: the optimizer or the sharding is unknown.
    """
    if optimizer not in _OPTIMIZER_BYTES:
        raise ConfigError(f"optimizer = {optimizer!r} is unknown: {nearest(optimizer, _OPTIMIZER_BYTES)}")
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
        loss=_loss(rows, batch_size, shape.embed_dim),
        # of this step and the next as they are stored, and a part of them as the tower takes it
        pictures=3 * shape.vision.image_size**2 * (2 * rows * _BYTE + part * _FLOAT),
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
    """Of a picture, of a caption, and of one rank's step; None where a tower's are not known."""
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
    of_matrices, of_others = _OPTIMIZER_BYTES[optimizer]
    whole = gradients = state = multiplied = 0
    for name, one in model.named_parameters():
        is_matrix = one.ndim >= 2 and "embedding" not in name
        whole += one.numel() * _FLOAT
        multiplied += one.numel() if is_matrix else 0
        if one.requires_grad:
            gradients += one.numel() * _FLOAT
            state += one.numel() * (of_matrices if is_matrix and "resblocks" in name else of_others)
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
    for tower, length, blocks in ((shape.vision, patches, image_blocks), (shape.text, tokens, text_blocks)):
        if blocks == 0:
            continue
        if isinstance(tower, VisionTower):
            length = (patches_of(tower) if length is None else length) + 1
        elif isinstance(tower, ClassTable):
            continue
        elif not isinstance(tower, TextTower | BagOfWords):
            return None
        total += rows * activation_bytes(tower, length or 0, blocks=blocks, bf16=bf16, recompute=recompute)
    return total + rows * shape.embed_dim * _FLOAT * 4  # features and their unit vectors, of both


def activation_bytes(
    tower: VisionTower | TextTower | BagOfWords,
    length: int,
    *,
    blocks: int | None = None,
    bf16: bool,
    recompute: int = 0,
) -> int:
    """What autograd keeps of one sample in one tower, its features left out.

    Args:
        tower: one of clipkit's own.
        length: tokens of a caption, or patches and one.
        blocks: how many of the last blocks are trained; None is the whole tower.
        bf16: whether products are in bfloat16; the residual stream stays in float32, as autocast has it on CUDA.
        recompute: every so-manieth block keeps its input alone; one that is computed again is whole for a while.
    """
    computed = _HALF if bf16 else _FLOAT
    if isinstance(tower, BagOfWords):
        return length * tower.width * _FLOAT
    width, hidden = tower.width, int(tower.mlp_ratio * tower.width)
    stream = length * (width * _FLOAT + _STATISTICS)  # what a norm keeps: its input
    # of each token the two norms' inputs and outputs, queries, keys, values, what attention gives, and the MLP's
    inner = length * (computed * (6 * width + 2 * hidden) + _FLOAT * tower.heads)
    body = 2 * stream + inner
    last = stream + computed * length * 3 * width  # keys and values of all tokens, the rest of one
    last += computed * (3 * width + 2 * hidden) + _FLOAT * 2 * width
    count = tower.layers if blocks is None else blocks
    kept = (count - 1) * body + last
    if recompute:
        inputs = count * length * width * _FLOAT + max(body if count > 1 else 0, last)
        kept = inputs // recompute + kept * (recompute - 1) // recompute
    if blocks is not None:
        return kept
    if isinstance(tower, TextTower):
        return kept + length * 8  # the tokens
    # patches, and the norm before the blocks
    return (
        kept + (length - 1) * 3 * tower.patch_size**2 * computed + length * (width * computed + _STATISTICS)
    )


def _loss(rows: int, all_rows: int, embed_dim: int) -> int:
    """All texts and their gradients, this rank's features and theirs, and tiles of logits."""
    tile = min(_TILE, rows * all_rows)
    return _FLOAT * (2 * all_rows * embed_dim + 4 * rows * embed_dim + 3 * tile)
