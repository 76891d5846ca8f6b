"""Tests of the sample order, a function of (seed, epoch, batch)."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from clipkit.errors import ConfigError
from data.order import Order

ROOT = Path(__file__).parents[2]

counts_of_shards = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)
seeds = st.integers(0, 2**63 - 1)


@settings(deadline=None)
@given(
    counts=counts_of_shards,
    seed=seeds,
    window=st.integers(1, 15),
    epoch=st.integers(0, 10**6),
    data=st.data(),
)
def test_epoch_contains_each_sample_once(
    counts: list[int], seed: int, window: int, epoch: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, sum(counts)), label="batch_size")
    order = Order(counts, seed=seed, batch_size=size, window=window)
    assert order.batches_per_epoch == sum(counts) // size
    first = epoch * order.batches_per_epoch
    batches = [order.batch(step).ids for step in range(first, first + order.batches_per_epoch)]
    assert all(batch.shape == (size,) and batch.dtype == np.int64 for batch in batches)
    taken = np.concatenate(batches)
    assert len(np.unique(taken)) == len(taken) == sum(counts) - sum(counts) % size
    assert taken.min() >= 0 and taken.max() < sum(counts)


@settings(deadline=None)
@given(
    counts=counts_of_shards,
    seed=seeds,
    size=st.integers(1, 40),
    step=st.integers(0, 50),
    mixed=st.booleans(),
    data=st.data(),
)
def test_parts_of_ranks_form_the_batch(
    counts: list[int], seed: int, size: int, step: int, mixed: bool, data: st.DataObject
) -> None:
    world = data.draw(st.integers(1, size), label="world")
    counts = [*counts, 40]  # enough for the largest batch
    order, alone = (
        Order(
            counts,
            seed=seed,
            batch_size=size,
            window=3,
            sources=(len(counts) - 1, 1),
            weights=(1.0, 2.5) if mixed else (),
        )
        for _ in range(2)
    )
    parts = [order.batch(step, rank=rank, world_size=world) for rank in range(world)]
    assert {len(part.ids) for part in parts} <= {size // world, -(-size // world)}
    whole = alone.batch(step)
    for name in ("ids", "epochs", "rows"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))
    assert whole.rows.tolist() == list(range(size))


def test_uneven_parts_are_allowed_and_too_many_ranks_rejected() -> None:
    order = Order([40], seed=0, batch_size=16)
    assert [len(order.part(rank, 3)) for rank in range(3)] == [5, 5, 6]
    assert len(order.batch(0, rank=15, world_size=16).ids) == 1
    with pytest.raises(ConfigError, match="batch_size = 16 is less than the 17 processes"):
        order.batch(0, rank=0, world_size=17)


@settings(deadline=None)
@given(counts=counts_of_shards, seed=seeds, steps=st.lists(st.integers(0, 100), min_size=1, max_size=20))
def test_batch_does_not_depend_on_earlier_calls(counts: list[int], seed: int, steps: list[int]) -> None:
    size = max(1, sum(counts) // 3)
    kept = Order(counts, seed=seed, batch_size=size, window=2)
    for step in steps:
        assert np.array_equal(
            kept.batch(step).ids, Order(counts, seed=seed, batch_size=size, window=2).batch(step).ids
        )


@settings(deadline=None)
@given(seed=seeds, window=st.integers(1, 12), step=st.integers(0, 30))
def test_batch_reads_shards_of_at_most_two_windows(seed: int, window: int, step: int) -> None:
    shards, held = 12, 20
    order = Order([held] * shards, seed=seed, batch_size=16, window=window)
    touched = np.unique(order.batch(step).ids // held)
    assert len(touched) <= 2 * window
    if window == 1:  # 20 samples of one shard, then 20 of the next
        at = step % order.batches_per_epoch
        assert len(touched) == (1 if at * 16 // held == (at * 16 + 15) // held else 2)


def test_shards_of_a_window_are_read_together() -> None:
    order = Order([10] * 40, seed=5, batch_size=40, window=4)
    of_windows = [set((order.batch(step).ids // 10).tolist()) for step in range(10)]
    assert [len(shards) for shards in of_windows] == [4] * 10
    assert set.union(*of_windows) == set(range(40))
    assert of_windows != [set((order.batch(step).ids // 10).tolist()) for step in range(10, 20)]


def test_window_larger_than_all_shards() -> None:
    all_of_them, more = (Order([10] * 4, seed=5, batch_size=8, window=window) for window in (4, 10**20))
    assert all(np.array_equal(all_of_them.batch(step).ids, more.batch(step).ids) for step in range(12))


def test_epochs_and_seeds_differ() -> None:
    orders = [Order([50, 50, 50], seed=seed, batch_size=150) for seed in (0, 1, 2**63 - 1)]
    epochs = [tuple(order.batch(step).ids.tolist()) for order in orders for step in range(4)]
    assert len(set(epochs)) == len(epochs)
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(range(150))}


def test_samples_left_out_differ_between_epochs() -> None:
    order = Order([25] * 4, seed=0, batch_size=60, window=2)
    left_out = [frozenset(range(100)) - frozenset(order.batch(step).ids.tolist()) for step in range(20)]
    assert all(len(one) == 40 for one in left_out)
    assert frozenset.union(*left_out) == frozenset(range(100))


def test_batch_larger_than_the_data_raises_error() -> None:
    Order([3, 4], seed=0, batch_size=7)
    with pytest.raises(ConfigError, match="batch_size = 8, but the data have only 7 samples"):
        Order([3, 4], seed=0, batch_size=8)


def test_order_is_stable() -> None:
    """A run resumed elsewhere or after an update must see the remaining samples."""
    code = (
        "from data.order import Order\n"
        "order = Order([5, 7, 3, 6], seed=11, batch_size=6, window=2)\n"
        "print([order.batch(step).ids.tolist() for step in (0, 1, 2, 7, 10**9)])"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout
    assert json.loads(printed) == [
        [20, 14, 16, 18, 19, 15],
        [12, 17, 13, 10, 3, 2],
        [9, 7, 5, 4, 0, 1],
        [11, 2, 3, 8, 10, 7],
        [3, 0, 20, 16, 1, 14],
    ]


def test_far_step_needs_little_time_and_memory() -> None:
    order = Order([10_000] * 40_000, seed=0, batch_size=32_768)
    began = time.perf_counter()
    batch = order.batch(10**9).ids
    assert time.perf_counter() - began < 2
    assert len(np.unique(batch)) == 32_768
    (source,) = order._sources
    arrays = [array for kept in source._recent.values() for array in kept]
    assert len(source._recent) == 1 and sum(array.nbytes for array in arrays) < 2 << 20


@pytest.mark.parametrize("wrap", [False, True])
def test_epoch_after_a_trillion_steps_is_complete(wrap: bool) -> None:
    order = Order([7, 0, 30, 13], seed=3, batch_size=10, window=2, wrap=wrap)
    first = 10**12
    ids = np.concatenate([order.batch(step).ids for step in range(first, first + 5)])
    assert sorted(ids.tolist()) == list(range(50))
    assert order.batch(first).epochs.tolist() == [first // 5] * 10


def test_many_small_windows_in_a_batch_are_fast() -> None:
    order = Order([3] * 50_000, seed=0, batch_size=30_000, window=1)
    began = time.perf_counter()
    assert len(np.unique(order.batch(0).ids)) == 30_000
    assert time.perf_counter() - began < 2
