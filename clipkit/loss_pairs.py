"""Which pictures and texts of the global batch belong together, as the losses ask tile by tile.

Letters: B rows of this rank, N rows of all ranks, R rows of a tile, K identities of a pair.
"""

from typing import Literal

import torch
from torch import Tensor

from clipkit.distributed import sum_over_ranks
from clipkit.loss_tiles import GlobalBatch

__all__ = ["OwnPairs", "Same", "belonging"]

Same = Literal["positives", "ignored"]


def belonging(batch: GlobalBatch, features: Tensor, identities: Tensor | None, same: Same) -> "OwnPairs":
    """What belongs together, to be asked tile by tile.

    Args:
        batch: the rows.
        features: (B, O), for dtype and device.
        identities: (B, K) int64, see ``clip_loss``; None: every picture belongs to its own text alone.
        same: what becomes of two pairs that show the same thing.

    Raises:
        ValueError: identities are no (B, K) integers, or ``same`` is unknown.
    """
    if same not in _KINDS:
        raise ValueError(f"same must be one of {', '.join(_KINDS)}, not {same!r}")
    if identities is None:
        return OwnPairs(batch, features)
    if identities.ndim != 2 or len(identities) != len(features) or not identities.shape[1]:
        raise ValueError(
            f"identities must be (rows, numbers) of {len(features)} rows, not {tuple(identities.shape)}"
        )
    if identities.dtype != torch.int64:
        raise ValueError(f"identities must be int64, not {identities.dtype}")
    return _KINDS[same](batch, features, identities)


class OwnPairs:
    """Every picture belongs to its own text alone.

    A loss shows it the logits tile by tile with ``see``; then ``mean_targets`` and, after it, ``subtract_targets``.
    """

    def __init__(self, batch: GlobalBatch, features: Tensor) -> None:
        self._batch = batch
        self._of_rows = features.new_empty(len(features))

    def leave_out(self, logits: Tensor, tile: slice, filling: float) -> None:
        """Put ``filling`` where a picture and a text are to be no pair at all."""

    def negate(self, values: Tensor, tile: slice) -> None:
        """Change the sign of what belongs together."""
        self._own(values, tile).neg_()

    def see(self, logits: Tensor, tile: slice) -> None:
        """Take in the logits of what belongs together."""
        self._of_rows[tile] = self._own(logits, tile)

    def mean_targets(self) -> Tensor:
        """(B,) the mean of a picture's logits with its texts plus that of its text's with their pictures."""
        return self._of_rows * 2

    def subtract_targets(self, slopes: Tensor, tile: slice) -> None:
        """Take away the share of each target by row and by column."""
        self._own(slopes, tile).sub_(2)

    def _own(self, values: Tensor, tile: slice) -> Tensor:
        return values.diagonal(self._batch.own.start + tile.start)


class _SamePairs(OwnPairs):
    """Pairs that agree in one of their identities."""

    def __init__(self, batch: GlobalBatch, features: Tensor, identities: Tensor) -> None:
        super().__init__(batch, features)
        self._identities = identities.to(features.device)
        self._all_identities = batch.gather(self._identities)

    def _same(self, tile: slice) -> Tensor:
        """(R, N) whether a picture and a text are the same."""
        same = self._identities[tile, 0, None] == self._all_identities[:, 0]
        for k in range(1, self._identities.shape[1]):
            same |= self._identities[tile, k, None] == self._all_identities[:, k]
        return same


class _Ignored(_SamePairs):
    """Every picture belongs to its own text, and has nothing to do with others that are the same."""

    def leave_out(self, logits: Tensor, tile: slice, filling: float) -> None:
        others = self._same(tile)
        self._own(others, tile).fill_(False)
        logits.masked_fill_(others, filling)


class _Positives(_SamePairs):
    """Every picture belongs in equal parts to all texts that are the same."""

    _all_parts: Tensor  # (N,)

    def __init__(self, batch: GlobalBatch, features: Tensor, identities: Tensor) -> None:
        super().__init__(batch, features, identities)
        self._of_columns = features.new_zeros(batch.size)
        self._parts = torch.empty_like(self._of_rows)  # one over how many texts a picture has

    def negate(self, values: Tensor, tile: slice) -> None:
        values.addcmul_(values, self._same(tile).to(values.dtype), value=-2)

    def see(self, logits: Tensor, tile: slice) -> None:
        same = self._same(tile).to(logits.dtype)
        self._parts[tile] = same.sum(1)
        targets = same.mul_(logits)
        self._of_rows[tile] = targets.sum(1)
        self._of_columns += targets.sum(0)

    def mean_targets(self) -> Tensor:
        self._all_parts = self._batch.gather(self._parts.reciprocal_())
        of_columns = sum_over_ranks(self._of_columns)[self._batch.own]
        return (self._of_rows + of_columns) * self._parts  # as many pictures as texts are the same

    def subtract_targets(self, slopes: Tensor, tile: slice) -> None:
        same = self._same(tile).to(slopes.dtype)
        slopes.addcmul_(same, self._parts[tile, None], value=-1)
        slopes.addcmul_(same, self._all_parts, value=-1)


_KINDS: dict[str, type[_SamePairs]] = {"positives": _Positives, "ignored": _Ignored}
