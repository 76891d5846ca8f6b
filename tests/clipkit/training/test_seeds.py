"""Tests of seeds, which are a function of the run's seed and of where they are used."""

from itertools import pairwise, product

from hypothesis import given, strategies as st

from clipkit.training.step import seed_of, seeds_of

seeds = st.integers(0, 2**63 - 1)
places = st.lists(st.integers(0, 2**40), max_size=4)


@given(seeds, places)
def test_seed_is_valid_for_torch_and_deterministic(seed: int, where: list[int]) -> None:
    value = seed_of(seed, *where)
    assert 0 <= value < 2**63 and value == seed_of(seed, *where)


@given(seeds, places, places)
def test_other_places_have_other_seeds(seed: int, first: list[int], other: list[int]) -> None:
    assert (seed_of(seed, *first) == seed_of(seed, *other)) == (first == other)


def test_seeds_of_steps_ranks_and_parts_are_distinct() -> None:
    drawn = [
        value
        for seed, step, rank in product(range(4), range(200), range(8))
        for value in seeds_of(seed, step, rank, 4)
    ]
    drawn += [seed_of(seed, step) for seed, step in product(range(4), range(200))]
    assert len(set(drawn)) == len(drawn)


def test_seed_bits_are_balanced() -> None:
    """Half of the bits differ between seeds of consecutive steps."""
    drawn = [seed_of(0, step) for step in range(2000)]
    for bit in range(63):
        assert 850 < sum(value >> bit & 1 for value in drawn) < 1150, bit
    changed = [(a ^ b).bit_count() for a, b in pairwise(drawn)]
    assert 28 < sum(changed) / len(changed) < 35


@given(seeds, st.integers(0, 10**6), st.integers(0, 4000), st.integers(1, 9), st.integers(1, 9))
def test_seeds_of_parts_are_independent_of_their_number(
    seed: int, step: int, rank: int, a: int, b: int
) -> None:
    fewer = min(a, b)
    assert seeds_of(seed, step, rank, a)[:fewer] == seeds_of(seed, step, rank, b)[:fewer]
