"""Seeds of what a training step draws at random: functions of the run's seed and the step, so nothing is saved.

Torch's own generator is seeded for towers of other libraries, whose dropout draws from it; the same in both passes
over a piece of the batch. What clipkit draws itself follows from the place in the global batch, whatever the ranks.
"""

__all__ = ["seed_of", "seeds_of"]

_MASK = 2**63 - 1


def seed_of(seed: int, *places: int) -> int:
    """0 ≤ number < 2^63 that follows from a seed and places, such as a step, and looks like no other."""
    mixed = seed
    for place in (len(places), *places):
        mixed = (mixed ^ (place + 0x9E3779B97F4A7C15 + (mixed << 6) + (mixed >> 2))) * 0xBF58476D1CE4E5B9
        mixed = (mixed ^ (mixed >> 31)) & _MASK
    return mixed


def seeds_of(seed: int, step: int, rank: int, parts: int) -> list[int]:
    """One for each piece that a rank's share of a batch is computed in."""
    return [seed_of(seed, step, rank, part) for part in range(parts)]
