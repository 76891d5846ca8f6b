"""SplitMix64's finalizer (Steele, Lea, Flood 2014) for 64-bit integers of Python, numpy and torch.

Only integer arithmetic is used, so results are the same on all machines, devices and library versions.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio
_FACTORS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)


def mix(state: int) -> int:
    """Map 0 ≤ ``state`` < 2^64 to another number in this range."""
    for shift, factor in _FACTORS:
        state = (state ^ (state >> shift)) * factor & MASK
    return state ^ (state >> 31)


def mix_array(state: "npt.NDArray[np.uint64]") -> "npt.NDArray[np.uint64]":
    """Apply ``mix`` to each number in place and return the array."""
    import numpy as np

    for shift, factor in _FACTORS:
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    state ^= state >> np.uint64(31)
    return state


def mix_tensor(state: "Tensor") -> "Tensor":
    """Apply ``mix`` to each int64, interpreted as unsigned; products wrap around at 64 bits on all devices."""
    for shift, factor in _FACTORS:
        state = (state ^ _shift_right(state, shift)) * to_signed(factor)
    return state ^ _shift_right(state, 31)


def to_signed(number: int) -> int:
    """Return the int64 with the same 64 bits."""
    return number - 2**64 if number >= 2**63 else number


def _shift_right(state: "Tensor", bits: int) -> "Tensor":
    """Shift right, filling with zeros; ``>>`` of int64 fills with the sign bit."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
