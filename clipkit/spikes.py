"""Gradients far above the usual: an update from one of them can undo much, and may be left out.

The usual norm is a moving average over the steps made, in which a spike counts as the most that is borne: one alone
changes little, and where norms rise for good, as when more layers are unfrozen, they are soon the usual ones. It is
part of the loop's state, so a run that is resumed judges as one that never stopped.
"""

__all__ = ["is_spike", "next_usual"]

_MEMORY = 0.98  # of the average: about fifty steps
_FIRST = 20  # updates that only tell what is usual


def is_spike(norm: float, usual: float, *, factor: float, updates: int) -> bool:
    """Whether a gradient of this norm is to be left out.

    Args:
        norm: of the gradient before clipping.
        usual: of those before, see ``next_usual``.
        factor: how many times the usual is too much; 0 leaves nothing out.
        updates: made so far.
    """
    return factor > 0 and updates >= _FIRST and norm > factor * usual


def next_usual(usual: float, norm: float, *, factor: float, updates: int) -> float:
    """The usual norm after one more step; the arguments are those of ``is_spike``."""
    if is_spike(norm, usual, factor=factor, updates=updates):
        norm = factor * usual
    memory = min(_MEMORY, updates / (updates + 1))
    return memory * usual + (1 - memory) * norm
