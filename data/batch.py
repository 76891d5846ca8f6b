"""What a batch holds, and how its samples are told apart.

Letters: B samples of a rank's part of a batch, S image side in pixels, L tokens of the longest caption.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.image_traits import TraitCounts
from data.device_decode import Undecoded
from data.stored_features import TeacherFeatures

__all__ = ["BadSample", "Batch", "caption_hash", "numbers_of", "token_lengths"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BadSample:
    """A sample that could not be used, and why."""

    shard: str
    key: str
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        images: (B, 3, S, S) uint8, channels last in memory; rows of what is yet to be decoded are undefined.
        tokens: (B, L) int64, trimmed to the longest caption of this part.
        lengths: B token counts, up to a text's largest token and with it; for CLIP's tokenizer, its end of text.
        ids: (B,) int64, sample numbers, always on the host; a bad sample's substitute stands under its own number.
        identities: (B, 2) int64, the number of the picture that is seen and a hash of the caption that is read (see
            ``caption_hash``): equal where two samples share one, of a substitute its own.
        first_row: the place of this part's first sample in the global batch.
        bad: the samples that were replaced.
        traits: how many images are transparent or rotated by EXIF.
        undecoded: JPEGs that ``Loader.on_device`` is to decode; None where there are none.
        teacher: stored features of the same samples, where the loader was given any.
        reading: seconds that its samples' bytes took.
        making: seconds that all of it took.
    """

    images: Tensor
    tokens: Tensor
    lengths: tuple[int, ...]
    ids: Tensor
    identities: Tensor
    first_row: int = 0
    bad: tuple[BadSample, ...] = ()
    traits: TraitCounts = field(default_factory=TraitCounts)
    undecoded: Undecoded | None = None
    teacher: TeacherFeatures | None = None
    reading: float = 0.0
    making: float = 0.0

    @property
    def rows(self) -> Tensor:
        """(B,) int64, the samples' places in the global batch."""
        return torch.arange(self.first_row, self.first_row + len(self.ids))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory; torch's loader calls this."""
        return self._moved(Tensor.pin_memory)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device, all but ``ids``; a copy from page-locked memory is not waited for."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def tensors(self) -> tuple[Tensor, ...]:
        """All that ``to`` moves."""
        taught = () if self.teacher is None else tuple(one for one in self.teacher if one is not None)
        return (self.images, self.tokens, self.identities, *taught)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        images, tokens, identities, *taught = map(move, self.tensors())
        teacher = TeacherFeatures(*taught) if taught else None
        return replace(self, images=images, tokens=tokens, identities=identities, teacher=teacher)


def caption_hash(caption: str) -> int:
    """63 bits of a caption, the same in every process; blanks and the case of letters do not count."""
    folded = " ".join(caption.casefold().split()).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(folded, digest_size=8).digest(), "little") >> 1


def numbers_of(ids: npt.NDArray[np.int64], pictures: list[int], captions: list[str]) -> tuple[Tensor, Tensor]:
    """A batch's ``ids`` and ``identities``.

    They share one storage: each takes a file descriptor on its way from a loader process.
    """
    count = len(ids)
    numbers = np.empty(3 * count, dtype=np.int64)
    numbers[:count] = ids
    numbers[count::2] = pictures
    numbers[count + 1 :: 2] = [caption_hash(caption) for caption in captions]
    both = torch.from_numpy(numbers)
    return both[:count], both[count:].view(count, 2)


def token_lengths(tokens: Tensor) -> tuple[int, ...]:
    """(B, L) int64 on the host → how many tokens each row has, up to its largest one and with it."""
    return tuple((tokens.numpy().argmax(axis=1) + 1).tolist())
