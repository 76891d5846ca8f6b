"""Tests of orders across epochs, of weighted sources, and with replacement."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings, strategies as st

from clipkit.errors import ConfigError
from data.order import Draw, Order

counts_of_shards = st.lists(st.integers(0, 30), min_size=1, max_size=10).filter(any)
counts_of_sources = st.lists(counts_of_shards, min_size=1, max_size=5)
seeds = st.integers(0, 2**63 - 1)
weights = st.floats(0.001, 1000)


def mixture(
    sources: Sequence[Sequence[int]], of: Sequence[float], *, batch_size: int, seed: int = 1, **more: Any
) -> Order:
    """Return an order of several sources."""
    counts = [count for source in sources for count in source]
    return Order(
        counts, seed=seed, batch_size=batch_size, sources=list(map(len, sources)), weights=of, **more
    )


def draws_of(order: Order, steps: range) -> Draw:
    """Return the concatenated draws of some steps."""
    draws = [order.batch(step) for step in steps]
    return Draw(
        ids=np.concatenate([draw.ids for draw in draws]),
        epochs=np.concatenate([draw.epochs for draw in draws]),
    )


def source_of(sources: Sequence[Sequence[int]], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the source of each sample."""
    ends = np.cumsum([sum(source) for source in sources])
    return np.searchsorted(ends, ids, side="right")


def assert_epochs_are_whole(draw: Draw, first: int, samples: int) -> None:
    """Check that each epoch of a source contains each sample once, except the first and last one."""
    epochs = np.unique(draw.epochs).tolist()
    assert epochs == list(range(epochs[0], epochs[-1] + 1)) if epochs else True
    for epoch in epochs:
        ids = draw.ids[draw.epochs == epoch]
        assert len(np.unique(ids)) == len(ids) and ids.min() >= first and ids.max() < first + samples
        assert len(ids) == samples or epoch in (epochs[0], epochs[-1])


def chi_square(seen: npt.NDArray[np.int64]) -> float:
    """Return the deviation of counts from equal ones, in standard deviations of the statistic."""
    expected, freedom = seen.mean(), seen.size - 1
    return float((((seen - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@settings(deadline=None, max_examples=40)
@given(
    counts=counts_of_shards,
    seed=seeds,
    window=st.integers(1, 12),
    start=st.integers(0, 10**9),
    data=st.data(),
)
def test_wrapped_epochs_contain_all_samples(
    counts: list[int], seed: int, window: int, start: int, data: st.DataObject
) -> None:
    samples = sum(counts)
    size = data.draw(st.integers(1, samples), label="batch_size")
    order = Order(counts, seed=seed, batch_size=size, window=window, wrap=True)
    assert not order.leaves_out
    first = start * samples  # a whole number of epochs before the first step
    epochs_of_first, rest = divmod(first * size, samples)
    assert rest == 0
    draw = draws_of(order, range(first, first + math.ceil(3 * samples / size)))
    assert_epochs_are_whole(draw, 0, samples)
    assert np.all(np.diff(draw.epochs) >= 0) and draw.epochs[0] == epochs_of_first
    assert np.bincount(draw.epochs - epochs_of_first)[:3].tolist() == [samples] * 3
    wrapped = [step for step in range(first, first + 5) if len(np.unique(order.batch(step).epochs)) > 1]
    assert bool(wrapped) <= (samples % size > 0)


@pytest.mark.parametrize("wrap", [False, True])
def test_wrapped_and_plain_orders_have_the_same_first_epoch(wrap: bool) -> None:
    order = Order([20, 10, 7], seed=4, batch_size=10, window=2, wrap=wrap)
    other = Order([20, 10, 7], seed=4, batch_size=10, window=2)
    assert all(np.array_equal(order.batch(step).ids, other.batch(step).ids) for step in range(3))
    assert np.array_equal(order.batch(3).ids, other.batch(3).ids) is not wrap
    assert order.leaves_out is not wrap


@settings(deadline=None, max_examples=40)
@given(
    sources=counts_of_sources,
    seed=seeds,
    size=st.integers(1, 30),
    start=st.integers(0, 10**6),
    data=st.data(),
)
def test_mixture_keeps_proportions_and_epochs_of_sources(
    sources: list[list[int]], seed: int, size: int, start: int, data: st.DataObject
) -> None:
    assume(size <= sum(map(sum, sources)))
    of = data.draw(st.lists(weights, min_size=len(sources), max_size=len(sources)), label="weights")
    order = mixture(sources, of, batch_size=size, seed=seed, window=2)
    assert not order.leaves_out
    begin = draws_of(order, range(20))
    exact = [Fraction(repr(weight)) for weight in of]
    shares = [weight / sum(exact) for weight in exact]
    # rounding: each source is off by at most one sample, with more than three sources by two
    most = 1 if len(sources) < 4 else 2
    for upto in range(size, 20 * size + 1, size):
        taken = np.bincount(source_of(sources, begin.ids[:upto]), minlength=len(sources)).tolist()
        assert all(abs(got - upto * share) <= most for got, share in zip(taken, shares, strict=True))
    first = 0
    for draw in (begin, draws_of(order, range(start, start + 10))):
        first = 0
        for number, source in enumerate(sources):
            here = source_of(sources, draw.ids) == number
            assert_epochs_are_whole(Draw(ids=draw.ids[here], epochs=draw.epochs[here]), first, sum(source))
            first += sum(source)


def test_proportions_are_exact_after_many_steps() -> None:
    """Tenths are not binary fractions; proportions are exact even after 10^12 steps."""
    sources = [[70], [20, 20], [7]]
    order = mixture(sources, (0.1, 0.2, 0.7), batch_size=30)
    begin = 10**12
    drawn = draws_of(order, range(begin, begin + 30))
    taken = np.bincount(source_of(sources, drawn.ids))
    assert taken.tolist() == [90, 180, 630]
    expected = [begin * 3 // 70, begin * 6 // 40, begin * 21 // 7]
    for number, epoch in enumerate(expected):
        assert drawn.epochs[source_of(sources, drawn.ids) == number].min() == epoch


def test_sources_are_shuffled_within_a_batch() -> None:
    sources = [[500], [500]]
    order = mixture(sources, (1, 1), batch_size=200)
    placed = np.array([source_of(sources, order.batch(step).ids) for step in range(100)])
    assert placed.sum(1).tolist() == [100] * 100
    assert abs(chi_square(placed.sum(0))) < 5  # no position prefers a source
    assert len({tuple(row) for row in placed.tolist()}) == 100


def test_weights_do_not_change_the_order_within_a_source() -> None:
    sources = [[20, 5], [30]]
    orders = [mixture(sources, of, batch_size=20) for of in ((1, 1), (1, 9))]
    of_first = []
    for order in orders:
        draw = draws_of(order, range(60))
        of_first.append(sorted(zip(draw.epochs.tolist(), draw.ids.tolist(), strict=True)))
    upto = [{pair for pair in pairs if pair[1] < 25 and pair[0] < 4} for pairs in of_first]
    assert upto[0] == upto[1] and len(upto[0]) == 100


@settings(deadline=None)
@given(
    sources=counts_of_sources,
    resample=st.booleans(),
    wrap=st.booleans(),
    part=st.integers(1, 4),
    world=st.integers(1, 6),
    step=st.integers(0, 10**12),
)
def test_batch_does_not_depend_on_the_number_of_ranks(
    sources: list[list[int]], resample: bool, wrap: bool, part: int, world: int, step: int
) -> None:
    sources = [*sources, [30]]
    for of in ((), tuple(range(1, len(sources) + 1))):
        order = mixture(sources, of, batch_size=part * world, window=3, resample=resample, wrap=wrap)
        parts = [order.batch(step, rank=rank, world_size=world) for rank in range(world)]
        whole = mixture(sources, of, batch_size=part * world, window=3, resample=resample, wrap=wrap).batch(
            step
        )
        assert all(len(one.ids) == len(one.epochs) == part for one in parts)
        assert np.concatenate([one.ids for one in parts]).tolist() == whole.ids.tolist()
        assert np.concatenate([one.epochs for one in parts]).tolist() == whole.epochs.tolist()
        assert whole.ids.dtype == whole.epochs.dtype == np.int64
        assert whole.ids.min() >= 0 and whole.ids.max() < sum(map(sum, sources))


@settings(deadline=None, max_examples=150)
@given(
    sources=counts_of_sources,
    kind=st.sampled_from(["drop", "wrap", "mixture", "resample", "resampled mixture"]),
    seed=seeds,
    window=st.integers(1, 6),
    start=st.integers(0, 200),
    data=st.data(),
)
def test_shards_ahead_contain_the_shards_of_the_batch(
    sources: list[list[int]], kind: str, seed: int, window: int, start: int, data: st.DataObject
) -> None:
    counts = [count for source in sources for count in source]
    ends = np.cumsum(counts)
    size = data.draw(st.integers(1, sum(counts)), label="batch_size")
    of = data.draw(st.lists(weights, min_size=len(sources), max_size=len(sources)), label="weights")
    order = mixture(
        sources,
        of if "mixture" in kind else (),
        batch_size=size,
        seed=seed,
        window=window,
        wrap=kind == "wrap",
        resample="resample" in kind,
    )
    for step in range(start, start + 4):
        now, following = order.shards_ahead(step)
        read = np.searchsorted(ends, order.batch(step).ids, side="right")
        assert set(read.tolist()) <= set(now)
        assert len(set(now)) == len(now) and now and following
        assert all(0 <= shard < len(counts) for shard in [*now, *following])


def test_shards_ahead_contain_the_next_window() -> None:
    """A window of four shards has 40 samples; in batches of 20 it changes every second step."""
    order = Order([10] * 14, seed=5, batch_size=20, window=4)  # 4, 4, 4 and 2 shards
    ahead = [order.shards_ahead(step) for step in range(15)]
    of_epoch = [ahead[step][0] for step in (0, 2, 4, 6)]
    assert [len(shards) for shards in of_epoch] == [4, 4, 4, 2]
    assert sorted(shard for shards in of_epoch for shard in shards) == list(range(14))
    for (now, following), (then, _) in pairwise(ahead):
        assert then in (now, following)
    assert ahead[6][1] == ahead[7][0] and ahead[7][0] != ahead[0][0]


def test_shards_ahead_contain_sources_absent_from_the_batch() -> None:
    order = mixture([[100], [5, 5]], (99, 1), batch_size=10, window=1)
    assert set(order.batch(0).ids.tolist()) <= set(range(100))
    now, _ = order.shards_ahead(0)
    assert now[0] == 0 and len(now) == 2


@settings(deadline=None)
@given(counts=counts_of_shards, seed=seeds, window=st.integers(1, 5), step=st.integers(0, 10**12))
def test_resampled_draws_do_not_depend_on_earlier_calls(
    counts: list[int], seed: int, window: int, step: int
) -> None:
    size = min(16, sum(counts))
    orders = [Order(counts, seed=seed, batch_size=size, window=window, resample=True) for _ in range(2)]
    orders[1].batch(step + 5)
    draws = [order.batch(step) for order in orders]
    assert draws[0].ids.tolist() == draws[1].ids.tolist()
    assert draws[0].epochs.tolist() == list(range(step * size, (step + 1) * size))


@pytest.mark.parametrize("window", [1, 3, 100])
def test_resampling_is_uniform_with_repetitions(window: int) -> None:
    counts = [0, 60, 1, 0, 25, 14, 0]
    seen = np.zeros(100, dtype=np.int64)
    for seed in range(300):  # the draws of one run are dependent: whole windows of a few shards
        order = Order(counts, seed=seed, batch_size=50, window=window, resample=True)
        first = order.batch(0).ids
        assert len(np.unique(first)) < 50
        seen += np.bincount(first[:1], minlength=100) + np.bincount(
            draws_of(order, range(400, 404)).ids[::199], minlength=100
        )
    assert abs(chi_square(seen)) < 5
    long = Order(counts, seed=1, batch_size=100, window=window, resample=True)
    often = np.bincount(draws_of(long, range(1000)).ids, minlength=100)
    by_shard = [often[begin:end].sum() / (end - begin) for begin, end in ((0, 60), (61, 86), (86, 100))]
    assert np.allclose(by_shard, 1000, rtol=0.25) and often.min() > 500


def test_resampled_batch_reads_few_shards() -> None:
    order = Order([10] * 200, seed=3, batch_size=30, window=3, resample=True)
    drawn = [set((order.batch(step).ids // 10).tolist()) for step in range(100)]
    assert all(1 <= len(shards) <= 3 for shards in drawn)
    assert len(set.union(*drawn)) > 100


def test_resampled_mixture_keeps_proportions() -> None:
    sources = [[10, 20], [70]]
    order = mixture(sources, (3, 1), batch_size=40, resample=True)
    drawn = draws_of(order, range(200))
    assert np.bincount(source_of(sources, drawn.ids)).tolist() == [6000, 2000]
    for number in range(2):
        numbers = drawn.epochs[source_of(sources, drawn.ids) == number]
        assert len(np.unique(numbers)) == len(numbers)  # so that repeated samples are augmented differently


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ((1.0,), "data.weights has 1 weights for 2 sources"),
        ((1.0, 2.0, 3.0), "data.weights has 3 weights for 2 sources"),
        ((1.0, 0.0), r"data.weights = \[1.0, 0.0\]: expected positive"),
        ((1.0, -2.0), "expected positive"),
        ((1.0, math.nan), "expected positive"),
        ((1.0, math.inf), "expected positive"),
    ],
)
def test_invalid_weights_raise_error(of: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixture([[5], [5, 5]], of, batch_size=2)


def test_weighted_source_without_samples_raises_error() -> None:
    with pytest.raises(ConfigError, match=r"source 2 of data.train has no usable sample"):
        mixture([[5], [0, 0], [3]], (1, 1, 1), batch_size=2)
    assert sorted(mixture([[5], [0, 0], [3]], (), batch_size=8).batch(0).ids.tolist()) == list(range(8))


@pytest.mark.parametrize("resample", [False, True])
def test_no_samples_raise_error(resample: bool) -> None:
    with pytest.raises(ConfigError, match="the data have only 0 samples"):
        Order([0, 0], seed=0, batch_size=1, resample=resample)


def test_descriptions_of_orders() -> None:
    sources = [[30, 7], [20]]
    assert Order([30, 7], seed=0, batch_size=10).describe(6) == (
        "3 batches of 10 an epoch, 7 samples left out of each epoch, 2 epochs in all"
    )
    assert Order([30, 7], seed=0, batch_size=10, wrap=True).describe(37) == (
        "3 batches of 10 an epoch, no sample left out, 10 epochs in all"
    )
    assert mixture(sources, (1, 3), batch_size=40).describe(10) == (
        "mixed in batches of 40; epochs: source 1 2.7, source 2 15"
    )
    named = mixture(sources, (1, 3), batch_size=40).describe(10, ["photos", "s3://bucket/drawings"])
    assert named.endswith("; epochs: photos 2.7, s3://bucket/drawings 15")
    assert Order([30, 7], seed=0, batch_size=10, resample=True).describe(10, ["a", "b"]) == (
        "drawn with replacement in batches of 10, 2.7 draws per sample"
    )
    drawn = Order([30, 7, 20], seed=0, batch_size=40, sources=(2, 1), weights=(1, 3), resample=True).describe(
        10, ["a", "b"]
    )
    assert drawn == "mixed in batches of 40 with replacement; draws per sample: a 2.7, b 15"


def test_mixtures_and_draws_are_stable() -> None:
    """A run resumed elsewhere or after an update must continue in the same order."""
    sources, far = [[5, 0, 7], [3]], 10**12
    orders = {
        "wrap": Order([5, 0, 7, 3], seed=11, batch_size=4, window=2, wrap=True),
        "mixture": mixture(sources, (0.7, 0.3), batch_size=4, seed=11, window=2),
        "resample": Order([5, 0, 7, 3], seed=11, batch_size=4, window=2, resample=True),
    }
    found = {name: [order.batch(step).ids.tolist() for step in (0, 3, far)] for name, order in orders.items()}
    assert found == {
        "wrap": [[7, 14, 11, 8], [2, 3, 0, 1], [7, 9, 8, 5]],
        "mixture": [[9, 6, 12, 7], [2, 4, 3, 13], [11, 14, 10, 6]],
        "resample": [[6, 6, 11, 9], [13, 8, 6, 13], [8, 10, 8, 13]],
    }


@settings(deadline=None, max_examples=60)
@given(
    sources=counts_of_sources.filter(lambda sources: all(map(any, sources))),
    seed=seeds,
    size=st.integers(1, 12),
    steps=st.integers(0, 40),
    weighted=st.booleans(),
    data=st.data(),
)
def test_epoch_is_how_often_every_sample_was_drawn(
    sources: list[list[int]], seed: int, size: int, steps: int, weighted: bool, data: st.DataObject
) -> None:
    samples = sum(map(sum, sources))
    size = min(size, samples)
    of = [data.draw(st.sampled_from([0.2, 1.0, 3.7]), label="weight") for _ in sources] if weighted else []
    order = mixture(sources, of, batch_size=size, seed=seed, wrap=True)
    times = np.zeros(samples, dtype=np.int64)
    for step in range(steps):
        assert order.epoch(step) == times.min()
        times += np.bincount(order.batch(step).ids, minlength=samples)


@settings(deadline=None)
@given(counts=counts_of_shards, seed=seeds, steps=st.integers(0, 30), data=st.data())
def test_epoch_begins_with_its_first_batch_if_samples_are_left_out(
    counts: list[int], seed: int, steps: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, sum(counts)), label="batch_size")
    order = Order(counts, seed=seed, batch_size=size)
    for step in range(steps):
        assert set(order.batch(step).epochs.tolist()) == {order.epoch(step)}


def test_described_epochs_are_those_of_the_metrics() -> None:
    order = Order([100], seed=0, batch_size=60)
    assert order.epoch(9) == 9
    assert order.describe(10) == "1 batch of 60 an epoch, 40 samples left out of each epoch, 10 epochs in all"
    wrapped = Order([100], seed=0, batch_size=60, wrap=True)
    assert (wrapped.epoch(9), wrapped.epoch(10)) == (5, 6)
    assert wrapped.describe(10).endswith("no sample left out, 6 epochs in all")


def test_epoch_of_draws_with_replacement() -> None:
    order = Order([10, 10], seed=0, batch_size=8, resample=True)
    assert [order.epoch(step) for step in (0, 2, 3, 5)] == [0, 0, 1, 2]
