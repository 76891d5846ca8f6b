"""The batches that training uses; the package ``data`` makes them.

Letters: B samples of a rank's part of a batch, S image side in pixels, L tokens of the longest caption.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.samples.traits import TraitCounts


@dataclass(frozen=True, kw_only=True, slots=True)
class BadSample:
    """A sample that could not be used, and why."""

    shard: str
    key: str
    cause: str


class TeacherFeatures(NamedTuple):
    """(B, T) float16, unit norm up to rounding, of a batch's images and, if stored, of its texts; and exp(t)."""

    images: Tensor
    texts: Tensor | None
    scale: float

    def convert(self, change: Callable[[Tensor], Tensor]) -> "TeacherFeatures":
        """Return the results of ``change`` for images and texts."""
        texts = None if self.texts is None else change(self.texts)
        return TeacherFeatures(change(self.images), texts, self.scale)


# of a batch, on its device
_TENSORS = ("images", "tokens", "identities", "more", "negatives", "fields", "weights", "words")
_TEXTS = ("tokens", "more", "negatives", "fields", "words")
_LENGTHS = ("lengths", "more_lengths", "negative_lengths", "field_lengths")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rank's part of a global batch of image–caption pairs.

    Attributes:
        images: (B, 3, S, S) uint8, channels last in memory; or with ``lock.store`` pooled features (B, W) float32.
        tokens: (B, L) int64, trimmed to the longest caption of this part; or with ``lock.store`` pooled features
            (B, W) float32, also in place of other tokens.
        lengths: B token counts, including the end of text.
        grids: rows and columns of patches of each image, if images are strips, see ``clipkit.model.naflex``.
        more: ((K - 1) B, L) int64, the second captions of all images, the third, …, with ``data.caption_count`` K;
            then there are KB ``identities``. ``more_lengths`` are as ``lengths``.
        negatives: (B, L) int64, a wrong caption of each image, or again the caption of an image that has none; None
            without ``data.negatives``. ``negative_lengths`` are as ``lengths``.
        fields: (FB, L) int64, the texts of all samples in a field, then those in the next one: those of
            ``data.image_fields``, then those of ``data.text_fields``; None without. ``field_lengths`` are as
            ``lengths``.
        weights: (B,) float32, weights of the samples in the loss; None without ``data.weight``.
        words: (B, L) int64, the distinct tokens of each caption without start, end and padding, and -1 elsewhere;
            None unless a term reads them.
        ids: (B,) int64, sample numbers, always on the host; a substitute has the number of the sample it
            replaces.
        identities: (B, 2) int64, number of the image and hash of the caption: equal for
            samples that share one; a substitute has its own. With ``loss.same_field`` (B, 3): and hash of the
            field's value, or a number of its own.
        first_row: index of the first sample in the global batch.
        rank_rows: how many rows of the global batch each rank has; empty: not known.
        fault: why the batch could not be made, in which case the values are placeholders.
        bad: the samples that were replaced.
        substitutes: indices of the rows that have the substitute of a bad sample.
        traits: how many images are transparent or have an EXIF orientation.
        cut_captions: how many captions are longer than the context length; not counted in a smaller stage.
        without_group: how many samples have no value of ``loss.same_field``.
        teacher: stored features of the samples, None without a teacher.
        learnability: (2,) means of all pairs that were read and of those chosen, which this batch has; None without
            data selection.
        read_seconds: time to read the samples.
        make_seconds: time to make the batch, including reading.
    """

    images: Tensor
    tokens: Tensor
    lengths: tuple[int, ...]
    ids: Tensor
    identities: Tensor
    grids: tuple[tuple[int, int], ...] | None = None
    first_row: int = 0
    rank_rows: tuple[int, ...] = ()
    fault: str = ""
    bad: tuple[BadSample, ...] = ()
    substitutes: tuple[int, ...] = ()
    traits: TraitCounts = field(default_factory=TraitCounts)
    cut_captions: int = 0
    without_group: int = 0
    teacher: TeacherFeatures | None = None
    more: Tensor | None = None
    more_lengths: tuple[int, ...] = ()
    negatives: Tensor | None = None
    negative_lengths: tuple[int, ...] = ()
    fields: Tensor | None = None
    field_lengths: tuple[int, ...] = ()
    weights: Tensor | None = None
    words: Tensor | None = None
    learnability: Tensor | None = None
    read_seconds: float = 0.0
    make_seconds: float = 0.0

    @property
    def rows(self) -> Tensor:
        """(B,) int64 on the device of the images, indices of the samples in the global batch."""
        return torch.arange(self.first_row, self.first_row + len(self.ids), device=self.images.device)

    @property
    def width(self) -> int:
        """The largest L of texts; 0 if all are pooled features."""
        texts = [getattr(self, name) for name in _TEXTS]
        return max(
            (text.shape[1] for text in texts if text is not None and not text.is_floating_point()), default=0
        )

    @property
    def counts(self) -> dict[str, int]:
        """What all ranks sum up in a step: bad samples, faults, cut captions, missing groups, and traits."""
        return {
            "bad_samples": len(self.bad),
            "faults": int(bool(self.fault)),
            "cut_captions": self.cut_captions,
            "without_group": self.without_group,
            **self.traits.counts_by_trait,
        }

    def pin_memory(self) -> Self:
        """Copy to page-locked memory; torch's loader calls this."""
        return self._moved(Tensor.pin_memory)

    def to(self, device: torch.device) -> Self:
        """Copy everything but ``ids`` to a device, asynchronously from page-locked memory."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that ``to`` copies."""
        features = () if self.teacher is None else self.teacher[:2]
        tensors = (*(getattr(self, name) for name in _TENSORS), *features)
        return tuple(tensor for tensor in tensors if tensor is not None)

    def take_rows(self, take: Callable[[Tensor], Tensor], *, width: int, padding: int) -> Self:
        """Return a batch of other samples.

        Args:
            take: returns (n, …) rows from (B, …), on the device or on the host; called for all that samples have.
            width: L of the result, at least ``width`` of this batch.
            padding: the token behind the end of shorter texts.
        """
        count = len(self.ids)

        def take_blocks(rows: Tensor) -> Tensor:
            """Take rows of each of M blocks, (MB, …) → (Mn, …)."""
            blocks = rows.unflatten(0, (-1, count)).transpose(0, 1)  # (B, M, …)
            return take(blocks).transpose(0, 1).flatten(0, 1)

        def take_numbers(numbers: Sequence[int]) -> tuple[int, ...]:
            return tuple(take_blocks(torch.tensor(numbers)).tolist()) if numbers else ()

        taken: dict[str, Any] = {"ids": take_blocks(self.ids)}
        for name in _TENSORS:
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if name in _TEXTS and not tensor.is_floating_point():
                value = -1 if name == "words" else padding
                tensor = F.pad(tensor, (0, width - tensor.shape[1]), value=value)
            if tensor.ndim == 4:  # channels stay last in memory
                taken[name] = take_blocks(tensor.movedim(1, -1)).movedim(-1, 1)
            else:
                taken[name] = take_blocks(tensor)
        for name in _LENGTHS:
            taken[name] = take_numbers(getattr(self, name))
        is_substitute = [int(row in self.substitutes) for row in range(count)]
        taken["substitutes"] = tuple(row for row, flag in enumerate(take_numbers(is_substitute)) if flag)
        if self.teacher is not None:
            taken["teacher"] = self.teacher.convert(take)
        return replace(self, **taken)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        moved: dict[str, Any] = {}
        for name in _TENSORS:
            tensor = getattr(self, name)
            moved[name] = None if tensor is None else move(tensor)
        if self.teacher is not None:
            moved["teacher"] = self.teacher.convert(move)
        return replace(self, **moved)
