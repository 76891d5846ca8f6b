"""Numbers that look random and are computed from their place: hashes, and permutations without a table.

Only 64-bit integer arithmetic is used, so that the outcome is the same on every machine and in every release of
every library. Letters: N numbers asked for at once.
"""

import numpy as np
import numpy.typing as npt

__all__ = ["hashed", "key", "permuted"]

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64's finalizer (Steele et al. 2014)
_ROUNDS = 8

Integers = npt.NDArray[np.int64] | npt.NDArray[np.uint64]


def key(*numbers: int) -> int:
    """64 bits that depend on all of ``numbers`` (non-negative) and on their order."""
    state = 0
    for number in numbers:
        assert number >= 0
        while True:  # by digits of 64 bits
            state = _mix((state + _STEP + (number & _MASK)) & _MASK)
            number >>= 64
            if not number:
                break
    return state


def _mix(state: int) -> int:
    state = (state ^ (state >> 30)) * _MIX_1 & _MASK
    state = (state ^ (state >> 27)) * _MIX_2 & _MASK
    return state ^ (state >> 31)


def hashed(keys: int | npt.NDArray[np.uint64], numbers: Integers) -> npt.NDArray[np.uint64]:
    """(N,) 64 bits for each of (N,) ``numbers``, under one key or a key for each."""
    return _scrambled(
        (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP) + np.asarray(keys, np.uint64)
    )


def _scrambled(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer, in place."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    state ^= state >> np.uint64(31)
    return state


def permuted(
    positions: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """Where a permutation of ``range(size)`` sends each position; the key says which permutation.

    A Feistel network on pairs (row, column) of a table with about √size columns; the few of its cells that are
    no number below ``size`` are sent on until one is (Black and Rogaway 2002).

    Args:
        positions: (N,) 0 ≤ position < size.
        sizes: (N,) the size that each position belongs to.
        keys: (N,) well mixed, and the same for all positions of one permutation.
    """
    size = sizes.astype(np.uint64)
    width = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    height = (size + width - np.uint64(1)) // width
    outcome = _sent(positions.astype(np.uint64), width, height, keys)
    while len(again := np.flatnonzero(outcome >= size)):
        outcome[again] = _sent(outcome[again], width[again], height[again], keys[again])
    return outcome.astype(np.int64)


def _sent(
    cells: npt.NDArray[np.uint64],
    width: npt.NDArray[np.uint64],
    height: npt.NDArray[np.uint64],
    keys: npt.NDArray[np.uint64],
) -> npt.NDArray[np.uint64]:
    row, column = np.divmod(cells, width)
    for _ in range(_ROUNDS // 2):
        keys = keys + np.uint64(_MIX_1)
        column = (column + _scrambled(row * np.uint64(_STEP) + keys)) % width
        keys = keys + np.uint64(_MIX_1)
        row = (row + _scrambled(column * np.uint64(_STEP) + keys)) % height
    return row * width + column
