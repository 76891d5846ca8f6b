"""Rows of feature tables as one list, read in blocks, for what learns from features.

Letters in shape comments: N rows, W width of a feature.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["Rows"]

_HELD = 1 << 30  # bytes of chosen rows that are copied out of a table once; more are gathered block by block


class Rows:
    """Rows of feature tables as one list: whole tables, or chosen rows of them, perhaps memory-mapped.

    Args:
        parts: each a (N, W) table, or such a table and the (n,) int64 numbers of the rows to take of it.
    """

    def __init__(self, *parts: Tensor | tuple[Tensor, Tensor]) -> None:
        self._parts: list[tuple[Tensor, Tensor | None]] = []
        for part in parts:
            table, chosen = part if isinstance(part, tuple) else (part, None)
            if chosen is not None and chosen.numel() * table.shape[1] * 4 <= _HELD:
                table, chosen = table[chosen], None
            self._parts.append((table, chosen))
        self.width = self._parts[0][0].shape[1] if parts else 0

    def __len__(self) -> int:
        return sum(len(table if chosen is None else chosen) for table, chosen in self._parts)

    def __add__(self, other: "Rows") -> "Rows":
        """These rows, then the others."""
        both = Rows()
        both._parts, both.width = self._parts + other._parts, self.width
        return both

    def on(self, device: torch.device) -> "Rows":
        """These rows with their tables on an accelerator, if they fill at most half of what is free there."""
        if device.type != "cuda" or len(self) * self.width * 4 > torch.cuda.mem_get_info(device)[0] // 2:
            return self
        return Rows(*(_taken(table, chosen).to(device, torch.float32) for table, chosen in self._parts))

    def blocks(self, rows: int) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of at most so many rows with their places, (rows, W), as they are stored."""
        start = 0
        for table, chosen in self._parts:
            n = len(table if chosen is None else chosen)
            for first in range(0, n, rows):
                last = min(first + rows, n)
                block = table[first:last] if chosen is None else table[chosen[first:last]]
                yield slice(start + first, start + last), block
            start += n


def _taken(table: Tensor, chosen: Tensor | None) -> Tensor:
    return table if chosen is None else table[chosen]
