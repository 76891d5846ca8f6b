"""Tests of permutations without a table: pseudorandom bijections, equal on every machine."""

import itertools
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings, strategies as st

from data.order import hashed, key, permuted

keys = st.integers(0, 2**64 - 1)

# values of the first release
KEYS = [0, 16294208416658607535, 7702586659592502839, 16490336266968443936]
HASHES = [6791897765849424158, 17405687883870564846, 385125812468360887]
TEN = [3, 4, 8, 5, 7, 0, 9, 2, 1, 6]
FAR = [0, 0, 2, 138662384, 481564147452]


def permutation(size: int, of_key: int) -> npt.NDArray[np.int64]:
    """Return a whole permutation."""
    return permuted(np.arange(size), np.full(size, size), np.full(size, of_key, dtype=np.uint64))


def chi_square(seen: npt.NDArray[np.int64]) -> float:
    """Return the deviation of counts from equal ones, in standard deviations of the statistic."""
    expected, freedom = seen.mean(), seen.size - 1
    return float((((seen - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@settings(deadline=None, max_examples=60)
@given(size=st.one_of(st.integers(1, 300), st.integers(1, 30_000)), of_key=keys)
@example(size=1_000_000, of_key=7)
@example(size=999_983, of_key=2**64 - 1)  # a prime
@example(size=1000**2 + 1, of_key=0)  # almost one more row of the table
def test_permutation_is_a_bijection(size: int, of_key: int) -> None:
    outcome = permutation(size, of_key)
    assert outcome.dtype == np.int64
    assert np.array_equal(np.sort(outcome), np.arange(size))


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 2**40), min_size=1, max_size=30),
    of_keys=st.lists(keys, min_size=30, max_size=30),
    data=st.data(),
)
def test_vectorized_permutations_equal_single_ones(
    sizes: list[int], of_keys: list[int], data: st.DataObject
) -> None:
    places = np.array([data.draw(st.integers(0, size - 1)) for size in sizes])
    size, of_key = np.array(sizes), np.array(of_keys[: len(sizes)], dtype=np.uint64)
    given_places = places.copy()
    together = permuted(places, size, of_key)
    alone = [
        int(permuted(places[n : n + 1], size[n : n + 1], of_key[n : n + 1])[0]) for n in range(len(sizes))
    ]
    assert together.tolist() == alone
    assert np.all((together >= 0) & (together < size))
    assert np.array_equal(places, given_places)  # the input is not modified


def test_empty_input_gives_empty_output() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    assert permuted(nothing, nothing, nothing.astype(np.uint64)).shape == (0,)


@pytest.mark.parametrize("size", [20, 1000, 65_537])
def test_different_keys_give_unrelated_permutations(size: int) -> None:
    """Keys that differ in one bit give unrelated permutations."""
    first = permutation(size, key(1))
    same = [int((permutation(size, key(1) ^ (1 << bit)) == first).sum()) for bit in range(64)]
    assert np.mean(same) == pytest.approx(1, abs=0.7) and max(same) <= 8
    assert not np.array_equal(first, np.arange(size))


def permutations_of_few(size: int, count: int) -> npt.NDArray[np.int64]:
    """Return (count, size) permutations under as many keys."""
    of_keys = np.repeat(hashed(key(size), np.arange(count)), size)
    places = np.tile(np.arange(size), count)
    return permuted(places, np.full(size * count, size), of_keys).reshape(count, size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_permutations_of_few_elements_are_equally_likely(size: int) -> None:
    every = list(itertools.permutations(range(size)))
    seen = Counter(map(tuple, permutations_of_few(size, 400 * len(every)).tolist()))
    assert chi_square(np.array([seen[one] for one in every])) < 5


@pytest.mark.parametrize("size", [5, 6, 7, 9, 12])
def test_small_permutations_are_nearly_uniform(size: int) -> None:
    """In such small tables, eight rounds mix up to a few percent."""
    outcome = permutations_of_few(size, 30_000)
    seen = np.array([np.bincount(outcome[:, place], minlength=size) for place in range(size)])
    assert np.abs(seen * size / 30_000 - 1).max() < 0.1
    assert size > 5 or len(np.unique(outcome, axis=0)) == 120


@pytest.mark.parametrize("size", [64, 100, 97])
def test_positions_are_uniform_and_neighbors_independent(size: int) -> None:
    count = 40_000
    of_keys = hashed(key(3), np.arange(count))
    for place in (0, 1, size // 2, size - 1):
        outcome = permuted(np.full(count, place), np.full(count, size), of_keys)
        assert abs(chi_square(np.bincount(outcome, minlength=size))) < 5
    first, second = (permuted(np.full(count, place), np.full(count, size), of_keys) for place in (0, 1))
    apart = np.bincount((second - first) % size, minlength=size)
    assert apart[0] == 0 and abs(chi_square(apart[1:])) < 5


@given(numbers=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5))
def test_key_depends_on_each_number_and_their_order(numbers: list[int]) -> None:
    base = key(*numbers)
    assert 0 <= base < 2**64 and base == key(*numbers)
    others = {key(*numbers, 0), key(0, *numbers), key(numbers[0] ^ 1, *numbers[1:])}
    if numbers != numbers[::-1]:
        others.add(key(*numbers[::-1]))
    assert base not in others


def test_bits_of_keys_and_hashes_are_uniform() -> None:
    made = np.array([key(0, number) for number in range(4000)], dtype=np.uint64)
    for many in (made, hashed(5, np.arange(4000)), hashed(made, np.zeros(4000, dtype=np.int64))):
        bits = np.unpackbits(many.view(np.uint8).reshape(4000, 8), axis=1).mean(axis=0)
        assert len(np.unique(many)) == 4000 and np.all(abs(bits - 0.5) < 0.05)


def test_numbers_over_64_bits_give_different_keys() -> None:
    assert len({key(n) for n in (0, 1, 2**64 - 1, 2**64, 2**64 + 1, 2**130)}) == 6


def test_keys_hashes_and_permutations_are_stable() -> None:
    """A resumed run must continue with its order."""
    assert [key(), key(0), key(1, 2, 3), key(2**64 - 1)] == KEYS
    assert hashed(key(1), np.array([0, 1, 2**40])).tolist() == HASHES
    assert permutation(10, key(4)).tolist() == TEN
    sizes = np.array([1, 2, 1000, 10**9, 2 * 10**12])
    places = np.array([0, 1, 999, 123_456_789, 10**12])
    of_keys = np.array([key(number) for number in range(5)], dtype=np.uint64)
    assert permuted(places, sizes, of_keys).tolist() == FAR
