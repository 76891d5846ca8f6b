"""Which patches of an image are kept in training: patch dropout, of FLIP (Li et al. 2022, arXiv 2212.00794).

A vision transformer that sees half of the patches costs about half, and FLIP reaches the accuracy of all patches in
less time, best with a short end of the training on whole images. It changes what is learned: an option. Where
there are few patches it costs much: on the quickstart's 16 patches a picture, unseen fonts 75.4% with a quarter
left out and 20.1% with half, where all give 84.5% (bench/options.py, one seed).

What is kept is a function of a seed and an image's place in the global batch, computed in whole numbers: the same
on every device, for any number of ranks and any accumulation, and again in a second pass over the same images.
Letters: B images, P patches, K of them that are kept.
"""

import torch
from torch import Tensor

__all__ = ["kept_patches"]

_BITS = 64
# of the generator SplitMix64 (Steele, Lea, Flood 2014): its step, and the finalizer's two factors
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def kept_patches(*, seed: int, rows: Tensor, patches: int, keep: int) -> Tensor:
    """Draw ``keep`` of ``patches`` patches for each image, every choice as likely as any other.

    Args:
        seed: any whole number; another one for each step.
        rows: (B,) int64, the images' places in the global batch, on any device.
        patches: P.
        keep: K, from 1 to P.

    Returns:
        (B, K) int64, ascending along K, each from 0 to P - 1, on the device of ``rows``, which is not waited for.
    """
    assert rows.dtype == torch.int64 and rows.ndim == 1, (rows.dtype, rows.shape)
    assert 1 <= keep <= patches, (keep, patches)
    key = _mixed(rows + _mixed_number(seed))  # (B,)
    step = _signed(_STEP)
    numbers = torch.arange(1, patches + 1, device=rows.device) * step  # (P,), as SplitMix64 counts
    draws = _mixed(key[:, None] + numbers)  # (B, P), a random number for each patch
    # stable: should two be equal, all devices decide alike
    smallest = draws.argsort(dim=1, stable=True)[:, :keep]
    return smallest.sort(dim=1).values


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finalizer; products wrap around at 64 bits on all devices."""
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, zeros from the left; int64 alone would repeat the sign."""
    return (x >> bits) & ((1 << (_BITS - bits)) - 1)


def _mixed_number(seed: int) -> int:
    """A seed of any size as a well spread int64, so that seeds and rows that sum to the same do not meet."""
    value = 0
    while True:
        value = _finalized((value + seed) % 2**_BITS + _STEP)
        seed >>= _BITS
        if seed in (0, -1):
            return _signed(value)


def _finalized(x: int) -> int:
    x %= 2**_BITS
    x = (x ^ (x >> 30)) * _FIRST % 2**_BITS
    x = (x ^ (x >> 27)) * _SECOND % 2**_BITS
    return x ^ (x >> 31)


def _signed(value: int) -> int:
    return value - 2**_BITS if value >= 2 ** (_BITS - 1) else value
