"""The parts of a batch under construction: sizes, captions, identities, bad samples, and JPEGs not yet decoded."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.batch import BadSample, Batch
from clipkit.config import SmallConfig
from clipkit.errors import DataError
from clipkit.samples import TraitCounts
from data.augment import JpegOfRow, Undecoded
from data.shards.teacher import FoundRow


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderBatch(Batch):
    """A batch some of whose images may be left to ``Loader.on_device`` to decode.

    Attributes:
        undecoded: JPEGs whose rows of ``images`` are undefined, None if there are none.
    """

    undecoded: Undecoded | None = None


@dataclass(kw_only=True, slots=True)
class BatchPart:
    """A batch under construction."""

    images: Tensor
    captions: list[str] = field(default_factory=list)  # all of an image next to each other
    negatives: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    features: list[FoundRow] = field(default_factory=list)
    bad: list[BadSample] = field(default_factory=list)
    traits: TraitCounts = field(default_factory=TraitCounts)
    undecoded: list[JpegOfRow] = field(default_factory=list)
    read_seconds: float = 0.0


class BatchError(DataError):
    """No usable sample was found for a row of a batch."""

    def __init__(self, message: str, bad: tuple[BadSample, ...] = ()) -> None:
        super().__init__(message, bad)  # both, for pickling
        self.bad = bad

    def __str__(self) -> str:
        return str(self.args[0])


def caption_hash(caption: str) -> int:
    """Return 63 bits of a caption, equal in every process; white space and case are ignored."""
    folded = " ".join(caption.casefold().split()).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(folded, digest_size=8).digest(), "little") >> 1


def ids_and_identities(
    ids: npt.NDArray[np.int64], images: list[int], captions: list[str]
) -> tuple[Tensor, Tensor]:
    """Return a batch's ``ids`` and ``identities`` in one storage, because each storage sent to another
    process takes a file descriptor."""
    count = len(ids)
    numbers = np.empty(count + 2 * len(captions), dtype=np.int64)
    numbers[:count] = ids
    numbers[count::2] = images
    numbers[count + 1 :: 2] = [caption_hash(caption) for caption in captions]
    both = torch.from_numpy(numbers)
    return both[:count], both[count:].view(-1, 2)


def token_lengths(tokens: Tensor) -> tuple[int, ...]:
    """(B, L) int64 on the host → tokens of each row up to and including its largest one."""
    return tuple((tokens.numpy().argmax(axis=1) + 1).tolist())


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Sizes of the steps before ``until_step``, from the end of the previous stage.

    Training at a small size and finishing at the full one costs a fraction of the compute for nearly the same
    model (CLIPA, Li et al. 2023, https://arxiv.org/abs/2305.07017).

    Attributes:
        until_step: steps since the start of training.
        image_size: side of the images in pixels.
        context_length: maximum tokens of a text; longer texts are truncated and keep their end-of-text token.
    """

    until_step: int
    image_size: int
    context_length: int


def small_stages(small: SmallConfig, *, image_size: int, context_length: int) -> tuple[Stage, ...]:
    """Return the stage of the settings, if any; unset sizes are those of the model."""
    if not small.steps:
        return ()
    size = small.image_size or image_size
    length = small.context_length or context_length
    return (Stage(until_step=small.steps, image_size=size, context_length=length),)


def stage_at(stages: Sequence[Stage], step: int) -> Stage | None:
    """Return the stage of a step; None after the last stage."""
    return next((stage for stage in stages if step < stage.until_step), None)
