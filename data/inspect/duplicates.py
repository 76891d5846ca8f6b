"""Which pictures are the same: by their bytes, or by how they look.

How a picture looks is told by the signs of the differences between neighbours among 17 x 16 mean grey values. A
difference near zero counts for nothing, so that the noise of an encoder does not tell two copies apart.

Letters: N pictures, C = 256 differences of each.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_COMPARED", "groups_alike", "groups_equal", "look_code"]

MOST_COMPARED = 10_000  # pictures that are compared by their look, each with each
_SIDE = 16
_NEAR_ZERO = 6  # of 255
_LEAST_SIGNS = 40  # of 256: a picture with fewer is too plain to be told from others
_AGREE = 0.92  # share of the signs that two copies have in common
_ROWS = 512  # compared at a time


def look_code(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """(H, W, 3) uint8 → (C,) int8, each -1, 0 or 1."""
    from PIL import Image

    small = Image.fromarray(pixels).resize((_SIDE + 1, _SIDE), Image.Resampling.BOX).convert("L")
    grey = np.asarray(small, dtype=np.int16)
    steps = np.diff(grey, axis=1).ravel()
    return (np.sign(steps) * (np.abs(steps) > _NEAR_ZERO)).astype(np.int8)


def groups_equal(hashes: Sequence[bytes]) -> list[list[int]]:
    """The numbers of those that are equal, by groups of two and more, the largest first."""
    by_hash: defaultdict[bytes, list[int]] = defaultdict(list)
    for number, one in enumerate(hashes):
        by_hash[one].append(number)
    return sorted((group for group in by_hash.values() if len(group) > 1), key=len, reverse=True)


def groups_alike(codes: Sequence[npt.NDArray[np.int8]]) -> list[list[int]]:
    """The numbers of those that look the same, by groups of two and more, the largest first."""
    if not codes:
        return []
    signs = np.stack(codes[:MOST_COMPARED]).astype(np.float32)  # (N, C)
    count = np.abs(signs).sum(axis=1)
    parent = list(range(len(signs)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    for start in range(0, len(signs), _ROWS):
        agreement = signs[start : start + _ROWS] @ signs.T
        most = np.maximum(count[start : start + _ROWS, None], count[None])
        rows, columns = np.nonzero((agreement >= _AGREE * most) & (most >= _LEAST_SIGNS))
        for row, column in zip((rows + start).tolist(), columns.tolist(), strict=True):
            if column > row:
                parent[root(column)] = root(row)
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for number in range(len(signs)):
        groups[root(number)].append(number)
    return sorted((group for group in groups.values() if len(group) > 1), key=len, reverse=True)
