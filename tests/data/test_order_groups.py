"""Tests of orders with several groups: a machine reads only the shards of its groups."""

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from clipkit.config import load_config
from clipkit.errors import ConfigError
from data.order import Draw, Order

KINDS = ("drop", "wrap", "mixture", "resample", "resampled mixture")
Int64s = npt.NDArray[np.int64]

seeds = st.integers(0, 2**63 - 1)
# of sources, at least one with as many samples as the largest batch
uneven_sources = st.lists(
    st.lists(st.integers(0, 90), min_size=1, max_size=12).filter(lambda counts: sum(counts) >= 96),
    min_size=1,
    max_size=3,
)


def make_order(sources: Sequence[Sequence[int]], kind: str, **more: Any) -> Order:
    return Order(
        [count for source in sources for count in source],
        sources=list(map(len, sources)),
        weights=tuple(range(1, len(sources) + 1)) if "mixture" in kind else (),
        wrap=kind == "wrap",
        resample="resample" in kind,
        **more,
    )


def mixture(sources: Sequence[Sequence[int]], weights: Sequence[float], **more: Any) -> Order:
    counts = [count for source in sources for count in source]
    return Order(counts, seed=0, sources=list(map(len, sources)), weights=weights, **more)


def draw_steps(order: Order, steps: range) -> Draw:
    draws = [order.batch(step) for step in steps]
    return Draw(
        ids=np.concatenate([draw.ids for draw in draws]),
        epochs=np.concatenate([draw.epochs for draw in draws]),
    )


def shards_of(counts: Sequence[int] | Int64s, ids: Int64s) -> set[int]:
    return set(np.searchsorted(np.cumsum(counts), ids, side="right").tolist())


def shards_of_node(
    order: Order, steps: range, *, node: int, nodes: int, ranks: int = 2
) -> tuple[set[int], int]:
    """Return the shards that a node reads in some steps, and the number of samples."""
    shards: set[int] = set()
    samples = 0
    for step in steps:
        for rank in range(node * ranks, (node + 1) * ranks):
            ids = order.batch(step, rank=rank, world_size=nodes * ranks).ids
            shards |= shards_of(order.counts, ids)
            samples += len(ids)
    return shards, samples


@settings(deadline=None)
@given(
    sources=uneven_sources,
    kind=st.sampled_from(KINDS),
    seed=seeds,
    size=st.sampled_from([32, 48, 96]),
    groups=st.sampled_from([1, 2, 4, 16]),
    window=st.integers(1, 20),
    step=st.integers(0, 10**12),
)
def test_batches_are_identical_for_1_4_and_32_nodes(
    sources: list[list[int]], kind: str, seed: int, size: int, groups: int, window: int, step: int
) -> None:
    batches = []
    for nodes in (1, 4, 5, 32):
        order = make_order(sources, kind, seed=seed, batch_size=size, window=window, groups=groups)
        order.batch(step + 3)  # a batch does not depend on earlier ones
        parts = [order.batch(step, rank=node, world_size=nodes) for node in range(nodes)]
        assert [row for part in parts for row in part.rows] == list(range(size))
        batches.append([[pair for part in parts for pair in zip(part.ids, part.epochs, strict=True)]])
    assert all(batch == batches[0] for batch in batches)


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    seed=seeds,
    window=st.integers(1, 15),
    epoch=st.integers(0, 10**6),
    data=st.data(),
)
def test_epoch_contains_each_sample_once(
    counts: list[int], seed: int, window: int, epoch: int, data: st.DataObject
) -> None:
    """Also with fewer shards than groups."""
    samples = sum(counts)
    groups = data.draw(st.integers(1, min(samples, 20)), label="groups")
    size = groups * data.draw(st.integers(1, samples // groups), label="rows of a group")
    order = Order(counts, seed=seed, batch_size=size, window=window, groups=groups)
    steps = samples // size
    draw = draw_steps(order, range(epoch * steps, (epoch + 1) * steps))
    assert len(np.unique(draw.ids)) == len(draw.ids) == samples - samples % size
    assert draw.ids.min() >= 0 and draw.ids.max() < samples
    assert set(draw.epochs.tolist()) == {epoch}
    assert order.epoch(epoch * steps) == epoch and order.epoch((epoch + 1) * steps - 1) == epoch


@settings(deadline=None, max_examples=15)
@given(
    sources=uneven_sources,
    kind=st.sampled_from(["wrap", "mixture"]),
    seed=seeds,
    groups=st.sampled_from([2, 4]),
    window=st.integers(1, 20),
)
def test_wrapped_and_mixed_epochs_contain_each_sample_once(
    sources: list[list[int]], kind: str, seed: int, groups: int, window: int
) -> None:
    order = make_order(sources, kind, seed=seed, batch_size=32, window=window, groups=groups)
    steps = 0
    while order.epoch(steps) < 2:
        steps += 1
    draw = draw_steps(order, range(steps))
    pairs = set(zip(draw.epochs.tolist(), draw.ids.tolist(), strict=True))
    assert len(pairs) == steps * 32
    assert {(epoch, i) for epoch in range(2) for i in range(sum(map(sum, sources)))} <= pairs


def test_samples_left_out_differ_between_epochs() -> None:
    order = Order([25] * 4, seed=0, batch_size=60, window=2, groups=4)
    left_out = [frozenset(range(100)) - frozenset(order.batch(step).ids.tolist()) for step in range(30)]
    assert all(len(samples) == 40 for samples in left_out)
    assert frozenset.union(*left_out) == frozenset(range(100))


@settings(deadline=None, max_examples=50)
@given(
    weights=st.lists(st.floats(0.001, 1000), min_size=2, max_size=4),
    groups=st.sampled_from([2, 8, 64]),
    start=st.integers(0, 10**9),
)
def test_each_group_draws_the_fractions_of_sources(weights: list[float], groups: int, start: int) -> None:
    sources = [[64]] * len(weights)
    exact = [Fraction(repr(weight)) for weight in weights]
    fractions = [weight / sum(exact) for weight in exact]
    order = mixture(sources, weights, batch_size=64, groups=groups)
    one_group = mixture(sources, weights, batch_size=64)
    for step in (start, start + 1):
        drawn = [order._count_drawn(step, group) for group in range(groups)]
        for counts in drawn:
            assert sum(counts) == step * 64 // groups
            expected = [step * 64 // groups * fraction for fraction in fractions]
            assert all(abs(n - m) < 3 for n, m in zip(counts, expected, strict=True))
        # all groups together draw as many of the first source as one group with the whole batch
        assert sum(counts[0] for counts in drawn) == one_group._count_drawn(step, 0)[0]


def test_rare_source_is_spread_over_steps() -> None:
    order = mixture([[100], [6400]], [1, 63], batch_size=64, groups=16)
    assert [int((order.batch(step).ids < 100).sum()) for step in range(64)] == [1] * 64


@pytest.mark.parametrize("nodes", [8, 32])
@pytest.mark.parametrize("window", [64, 256])
def test_node_reads_only_its_part_of_each_window(window: int, nodes: int) -> None:
    order = Order([256] * 1024, seed=3, batch_size=1024, window=window, groups=64)
    steps = window * 256 // 1024  # a window
    for start in (0, 5 * steps, order.batches_per_epoch):
        shards, samples = shards_of_node(order, range(start, start + steps), node=nodes - 2, nodes=nodes)
        assert samples == window * 256 // nodes
        assert len(shards) == window // nodes
    shards, _ = shards_of_node(
        Order([256] * 1024, seed=3, batch_size=1024, window=window), range(steps), node=0, nodes=nodes
    )
    assert len(shards) == window  # with one group, each node reads all


@pytest.mark.parametrize("kind", KINDS)
def test_node_reads_its_part_of_uneven_shards(kind: str) -> None:
    """Windows of groups end in different steps, so shards are counted over an epoch: each is read once."""
    counts = np.random.default_rng(1).integers(128, 385, 2048)
    sources = [counts.tolist()] if "mixture" not in kind else [counts[:700].tolist(), counts[700:].tolist()]
    order = make_order(sources, kind, seed=1, batch_size=2048, window=64, groups=64)
    steps = range(order.batches_per_epoch)
    shards, samples = shards_of_node(order, steps, node=11, nodes=32, ranks=1)
    assert len(shards) <= 1.2 * samples / counts.mean() and samples == len(steps) * 64


def test_windows_of_a_group_are_read_one_after_another() -> None:
    order = Order(
        [10] * 40, seed=5, batch_size=40, window=8, groups=4
    )  # 10 shards of each group, 2 at a time
    for group in range(4):
        read = [shards_of([10] * 40, order.batch(step, rank=group, world_size=4).ids) for step in range(10)]
        assert [len(shards) for shards in read] == [2] * 10
        assert all(read[step] == read[step + 1] for step in range(0, 10, 2))
        assert len(set.union(*read)) == 10
    assert order.batch(0, rank=1, world_size=4).ids.tolist() != sorted(
        order.batch(0, rank=1, world_size=4).ids
    )


def test_window_is_at_least_one_shard_of_each_group() -> None:
    few, least = (Order([10] * 40, seed=5, batch_size=40, window=window, groups=4) for window in (1, 4))
    assert all(np.array_equal(few.batch(step).ids, least.batch(step).ids) for step in range(10))


@settings(deadline=None, max_examples=150)
@given(
    sources=uneven_sources,
    kind=st.sampled_from(KINDS),
    seed=seeds,
    groups=st.sampled_from([1, 2, 4, 16]),
    window=st.integers(1, 20),
    world=st.sampled_from([1, 3, 8, 32]),
    start=st.integers(0, 200),
)
def test_shards_ahead_contain_the_shards_of_the_part(
    sources: list[list[int]], kind: str, seed: int, groups: int, window: int, world: int, start: int
) -> None:
    counts = [count for source in sources for count in source]
    order = make_order(sources, kind, seed=seed, batch_size=32, window=window, groups=groups)
    for rank in {0, world // 2, world - 1}:
        for step in range(start, start + 3):
            now, following = order.shards_ahead(step, rank=rank, world_size=world)
            assert shards_of(counts, order.batch(step, rank=rank, world_size=world).ids) <= set(now)
            assert len(set(now)) == len(now) and len(set(following)) == len(following) and now and following


def test_shards_ahead_are_those_of_the_rank() -> None:
    order = Order(
        [10] * 64, seed=2, batch_size=80, window=16, groups=8
    )  # a batch is a window of 1 shard or more
    ahead = [order.shards_ahead(3, rank=rank, world_size=8) for rank in range(8)]
    for now, following in ahead:
        assert len(now) == 2 and len(following) == 2 and not set(now) & set(following)
    assert len({shard for now, _ in ahead for shard in now}) == 16
    assert set(order.shards_ahead(3)[0]) == {shard for now, _ in ahead for shard in now}
    for rank in range(8):
        assert order.shards_ahead(2, rank=rank, world_size=8)[0] == ahead[rank][0]
        assert order.shards_ahead(4, rank=rank, world_size=8)[0] == ahead[rank][1]


def test_order_with_groups_is_stable() -> None:
    order = Order([5, 7, 3, 6], seed=11, batch_size=6, window=2, groups=3)
    assert [order.batch(step).ids.tolist() for step in (0, 1, 2, 7, 10**9)] == [
        [14, 12, 20, 19, 11, 10],
        [13, 15, 6, 9, 4, 0],
        [17, 18, 5, 8, 1, 3],
        [6, 11, 3, 1, 18, 16],
        [20, 17, 4, 1, 8, 6],
    ]


def test_groups_that_cannot_be_filled_raise_error(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("batch_size = 100\ndata.groups = 64\n")
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert str(caught.value) == "data.groups = 64 is invalid: expected a divisor of batch_size = 100"
    with pytest.raises(ConfigError) as caught:
        mixture([[7], [100]], [1, 1], batch_size=64, groups=8)
    assert str(caught.value) == (
        "source 1 of data.train has only 7 samples for data.groups = 8: remove it or set a smaller data.groups"
    )
    assert load_config(config, ["data.groups=50"]).data.groups == 50


def test_description_counts_all_groups() -> None:
    for groups in (1, 5):
        order = Order([30, 7], seed=0, batch_size=10, wrap=True, groups=groups)
        assert order.describe(37).endswith("no sample left out, 10 epochs in all")
        assert math.isclose(order.epoch(37), 10, abs_tol=1)
