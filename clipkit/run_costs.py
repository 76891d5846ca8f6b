"""What a configuration's run will cost on a machine, estimated for ``train.py --dry-run``.

The share of a GPU's peak that a run reaches (MFU) is the great unknown. Runs of CLIP whose hours are published, by
this estimate's own count of FLOPs, with captions of 77 tokens, and A100's 312 TFLOP/s:

* ViT-B/32 on LAION-400M, 36 hours on 128 A100 (open_clip, docs/PRETRAINED.md): 10%.
* ViT-L/14 on LAION-400M, 50,800 hours of A100 (the same): 12%.
* ViT-H/14 on LAION-2B, 34,608 samples/s on 824 A100 (LAION's scaling-laws-openclip, trained_models_info.csv): 15%.
* ViT-B/16 by CLIPA with its finish, about 2 days on 8 A100 (open_clip, docs/clipa.md): 19%.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import torch

from clipkit.api import load
from clipkit.architectures import Architecture
from clipkit.config import Config
from clipkit.errors import ClipkitError, ConfigError
from clipkit.estimate import Estimate, estimate
from clipkit.family import architecture
from clipkit.flops import counted_flops, image_flops, text_flops
from clipkit.locking import lock
from clipkit.machines import Machine
from clipkit.model import CLIP
from clipkit.training_model import patch_counts

__all__ = ["COUNTED_ON", "CPU_MFU", "GPU_MFU", "PUBLISHED_MFU", "Costs", "run_costs"]

PUBLISHED_MFU = (0.10, 0.19)  # of the runs above, the least and the most
GPU_MFU = PUBLISHED_MFU[0]  # what is assumed where nothing is said
CPU_MFU = 0.4  # of the rate measured a moment before
COUNTED_ON = (
    0.9  # share of a GPU's memory that may be counted on: CUDA, NCCL and the allocator's gaps take some
)
_OPEN_CLIP = "open_clip:"


@dataclass(frozen=True, kw_only=True)
class Costs:
    """An estimate, and what it is of.

    Attributes:
        whole: of all steps; memory is that of the full size.
        machine: computed on.
        mfu: share of its peak that is reached.
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
    """What a run costs; computes nothing.

    Args:
        config: of the run.
        shape: its model's architecture.
        machine: that each process computes on.
        world: processes.
        shard_ranks: with sharding=hybrid, how many share one copy.
        bf16: whether the towers compute in bfloat16.
        mfu: share of the peak, above 0 and at most 1; None is a cautious default.

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
