"""Tests of data.balance: samples of each value in an epoch, their order, and where values are read."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from clipkit.config import DataConfig, load_config
from clipkit.errors import CheckpointError, ConfigError, DataError
from data.__main__ import main
from data.order import Order
from data.shards.manifest import Manifest
from data.shards.samples import Shards
from data.training_data import open_training_data
from tests.data.json_shards import shard_of
from tests.data.published_tars import jpeg_of

TAXA = ("felis", "canis", "apis")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the indexes of temporary shards out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


# --------------------------------------------------------------------------------------------------------------
# The order


@settings(deadline=None, max_examples=80)
@given(data=st.data(), seed=st.integers(0, 2**63), cap=st.integers(0, 9), weighted=st.booleans())
def test_counts_per_epoch_equal_the_formula(data: st.DataObject, seed: int, cap: int, weighted: bool) -> None:
    sources = data.draw(
        st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), min_size=1, max_size=3)
    )
    counts = [count for source in sources for count in source]
    samples = sum(counts)
    values = np.array(
        data.draw(st.lists(st.integers(0, 3), min_size=samples, max_size=samples)), dtype=np.uint64
    )
    firsts = np.cumsum([0, *map(sum, sources)]) if weighted else np.array([0, samples])
    expected = []  # by source: samples of each value in an epoch
    for first, end in pairwise(firsts.tolist()):
        seen = Counter(values[first:end].tolist())
        equal = sum(seen.values()) // len(seen)
        expected.append({value: min(count, cap) if cap else equal for value, count in seen.items()})
    lengths = [sum(counts.values()) for counts in expected]
    size = data.draw(st.integers(1, sum(lengths)))
    order = Order(
        counts,
        seed=seed,
        batch_size=size,
        window=data.draw(st.integers(1, 3)),
        wrap=True,
        sources=[*map(len, sources)],
        weights=[1.0] * len(sources) if weighted else (),
        values=values,
        cap=cap,
    )
    assert order.samples == sum(lengths)
    drawn: Counter[int] = Counter()
    for source, (first, length) in enumerate(zip(firsts, lengths, strict=False)):
        positions = np.arange(4 * length)
        ids = order._sources[source].take(np.zeros_like(positions), positions).ids
        if len(lengths) == 1:
            batches = [order.batch(step).ids for step in range(4 * length // size)]
            assert np.concatenate(batches).tolist() == ids[: sum(map(len, batches))].tolist()
        for of_epoch in np.split(ids, 4):
            assert Counter(values[of_epoch].tolist()) == expected[source]
            drawn.update(of_epoch.tolist())
            for value in expected[source]:  # samples take turns
                members = [i for i in range(first, firsts[source + 1]) if values[i] == value]
                times = [drawn[i] for i in members]
                assert max(times) - min(times) <= 1


@settings(deadline=None, max_examples=60)
@given(data=st.data(), seed=st.integers(0, 2**63), cap=st.integers(0, 5), groups=st.integers(1, 3))
def test_order_does_not_depend_on_ranks_or_earlier_steps(
    data: st.DataObject, seed: int, cap: int, groups: int
) -> None:
    counts = data.draw(
        st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(lambda counts: sum(counts) >= 6)
    )
    values = np.random.default_rng(seed).integers(0, 3, sum(counts)).astype(np.uint64)

    def make(size: int, wrap: bool = False) -> Order:
        return Order(
            counts, seed=seed, batch_size=size, window=2, groups=groups, wrap=wrap, values=values, cap=cap
        )

    seen_values = Counter(values.tolist())
    equal = len(values) // len(seen_values)
    assume(sum(min(count, cap) if cap else equal for count in seen_values.values()) >= 2 * groups)
    order = make(groups * 2)
    seen: dict[int, int] = {}
    for step in range(3 * order.batches_per_epoch):
        batch = make(groups * 2).batch(step)  # a new one, as after a restart
        assert np.array_equal(batch.ids, order.batch(step).ids) and np.array_equal(
            batch.epochs, order.batch(step).epochs
        )
        parts = [make(groups * 2).batch(step, rank=rank, world_size=2) for rank in range(2)]
        assert np.array_equal(np.concatenate([part.ids for part in parts]), batch.ids)
        assert np.array_equal(np.concatenate([part.epochs for part in parts]), batch.epochs)
        draws = [*zip(batch.ids.tolist(), batch.epochs.tolist(), strict=True)]
        assert not seen.keys() & set(draws) and len(set(draws)) == len(draws)  # each has its own augmentation
        seen |= dict.fromkeys(draws, step)
        now, _ = order.shards_ahead(step)
        starts = np.cumsum([0, *counts])
        assert {int(np.searchsorted(starts, i, side="right")) - 1 for i in batch.ids} <= set(now)


@settings(deadline=None, max_examples=80)
@given(
    data=st.data(),
    seed=st.integers(0, 2**63),
    adjacent=st.integers(2, 4),
    runs=st.integers(0, 3),
    groups=st.integers(1, 2),
    weighted=st.booleans(),
)
def test_samples_of_a_value_are_adjacent(
    data: st.DataObject, seed: int, adjacent: int, runs: int, groups: int, weighted: bool
) -> None:
    counts = data.draw(
        st.lists(st.integers(0, 9), min_size=2, max_size=8).filter(
            lambda counts: sum(counts[:2]) >= 9 and sum(counts[2:]) >= 9
        )
    )
    values = np.random.default_rng(seed).integers(0, 4, sum(counts)).astype(np.uint64)
    weights = (1.0, 2.0) if weighted else ()
    size = groups * adjacent * 2
    try:
        order = Order(
            counts, seed=seed, batch_size=size, window=2, groups=groups, wrap=True, sources=(2, len(counts) - 2),
            weights=weights, values=values, cap=runs * adjacent, adjacent=adjacent,
        )  # fmt: skip
    except ConfigError:
        assume(False)
    starts = np.cumsum([0, *counts])
    firsts = [0, int(starts[2]), int(starts[-1])] if weighted else [0, int(starts[-1])]
    drawn: list[tuple[int, int]] = []
    for step in range(3 * order.samples // size):
        batch = order.batch(step)
        for run in batch.ids.reshape(-1, adjacent):
            assert len(set(values[run].tolist())) == 1
            bounds = next(pair for pair in pairwise(firsts) if run[0] < pair[1])
            if runs and np.count_nonzero(values[slice(*bounds)] == values[run[0]]) >= adjacent:
                assert len(set(run.tolist())) == adjacent  # no sample twice
        parts = [order.batch(step, rank=rank, world_size=3) for rank in range(3)]
        assert np.array_equal(np.concatenate([part.ids for part in parts]), batch.ids)
        assert np.array_equal(np.concatenate([part.epochs for part in parts]), batch.epochs)
        now, _ = order.shards_ahead(step)
        assert {int(np.searchsorted(starts, i, side="right")) - 1 for i in batch.ids} <= set(now)
        drawn += zip(batch.ids.tolist(), batch.epochs.tolist(), strict=True)
    assert len(set(drawn)) == len(drawn)  # each has its own augmentation
    for source, (first, end) in enumerate(pairwise(firsts)):
        seen = Counter(values[first:end].tolist())
        equal = (end - first) // len(seen)
        times: Counter[int] = Counter()
        for epoch in range(2):
            ids: list[int] = []
            for group, length in enumerate(order._sources[source].lengths.tolist()):
                positions = np.arange(epoch * length, (epoch + 1) * length)
                ids += order._sources[source].take(np.full(length, group), positions).ids.tolist()
            assert Counter(values[ids].tolist()) == {
                value: max((min(count, runs * adjacent) if runs else equal) // adjacent, 1) * adjacent
                for value, count in seen.items()
            }
            times.update(ids)
        for value in seen:  # samples take turns
            turns = [times[i] for i in range(first, end) if values[i] == value]
            assert max(turns) - min(turns) <= 1


def test_runs_differ_between_epochs_and_are_read_from_few_shards() -> None:
    values = np.repeat(np.arange(50, dtype=np.uint64), 8)  # sorted by value
    order = Order([40] * 10, seed=3, batch_size=16, window=2, values=values, cap=8, adjacent=4)
    epochs = []
    for epoch in range(2):
        runs = [order.batch(step).ids.reshape(-1, 4) for step in range(epoch * 25, (epoch + 1) * 25)]
        epochs.append({frozenset(run.tolist()) for run in np.concatenate(runs)})
    assert len(epochs[0]) == len(epochs[1]) == 100 and len(epochs[0] & epochs[1]) < 20
    assert max(len(order.shards_ahead(step)[0]) for step in range(25)) <= 4
    assert order.describe_balance() == [
        "50 values, 0 capped: 400 → 400 samples an epoch, 8 to 8 of each value"
    ]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.balance=", "data.adjacent = 4 has no effect unless data.balance is set"),
        ("data.balance=a:6", "expected a divisor of the number in data.balance = a:6"),
        ("data.groups=4", "data.adjacent = 4 is invalid: expected a divisor of batch_size / data.groups = 2"),
    ],
)  # fmt: skip
def test_adjacent_samples_fit_the_batch_and_the_balance(setting: str, message: str) -> None:
    arguments = ["batch_size=8", "data.adjacent=4", "data.balance=a:8"]
    with pytest.raises(ConfigError) as caught:
        load_config(
            Path("/dev/null"), [argument for argument in arguments if argument[:9] != setting[:9]] + [setting]
        )
    assert message in str(caught.value)
    assert load_config(Path("/dev/null"), arguments).data.adjacent == 4


def test_epochs_state_how_often_a_sample_was_drawn() -> None:
    values = np.array([0] * 10 + [1] * 2, dtype=np.uint64)
    for cap in (0, 3):
        order = Order([5, 7], seed=1, batch_size=4, wrap=True, values=values, cap=cap)
        seen: Counter[int] = Counter()
        for step in range(3 * order.samples):
            batch = order.batch(step)
            for i, epoch in sorted(zip(batch.ids.tolist(), batch.epochs.tolist(), strict=True)):
                seen[i] += 1
                assert cap == 0 or epoch == seen[i] - 1


def test_cap_that_no_value_exceeds_changes_nothing_but_says_so() -> None:
    values = np.repeat(np.arange(4, dtype=np.uint64), [6, 5, 5, 4])
    balanced = Order([9, 11], seed=2, batch_size=5, values=values, cap=6)
    plain = Order([9, 11], seed=2, batch_size=5)
    for step in range(12):
        assert np.array_equal(balanced.batch(step).ids, plain.batch(step).ids)
        assert np.array_equal(balanced.batch(step).epochs, plain.batch(step).epochs)
    assert balanced.describe_balance() == [
        "4 values, 0 capped: 20 → 20 samples an epoch, 4 to 6 of each value"
    ]
    assert plain.describe_balance() == []


def test_descriptions_state_effective_counts() -> None:
    values = np.repeat(np.arange(3, dtype=np.uint64), [1000, 300, 20])
    capped = Order([1320], seed=0, batch_size=8, values=values, cap=200)
    assert capped.describe_balance() == [
        "3 values, 2 capped: 1,320 → 420 samples an epoch, 20 to 200 of each value"
    ]
    equal = Order([1320], seed=0, batch_size=8, values=values)
    assert equal.describe_balance() == [
        "3 values, 1 capped, 2 repeated: 1,320 → 1,320 samples an epoch, 440 to 440 of each value"
    ]
    mixed = Order([1000, 320], seed=0, batch_size=8, values=values, cap=200, sources=(1, 1), weights=(1, 1))
    assert [line.split(":")[0] for line in mixed.describe_balance()] == [
        "1 values, 1 capped",
        "2 values, 1 capped",
    ]


def test_an_epoch_must_have_a_batch() -> None:
    values = np.zeros(100, dtype=np.uint64)
    with pytest.raises(ConfigError, match="batch_size = 8, but the data have only 5 samples"):
        Order([100], seed=0, batch_size=8, values=values, cap=5)


# --------------------------------------------------------------------------------------------------------------
# Values of samples


def opened(source: Path, run: Path, *, resumed: bool = False, **data: Any) -> Shards:
    """Open shards with the settings of a training."""
    run.mkdir(exist_ok=True)
    return open_training_data(
        DataConfig(train=str(source), **data),
        run / "data.manifest",
        rank0=True,
        resumed=resumed,
        broadcast=lambda content: content,
    )


def write_samples(folder: Path, *fields: Any) -> Path:
    """Write shards of three samples with json fields."""
    folder.mkdir(exist_ok=True)
    for first in range(0, len(fields), 3):
        samples = [
            {"jpg": jpeg_of(i), "txt": f"text {i}", "json": json.dumps(value)}
            for i, value in enumerate(fields[first : first + 3])
        ]
        shard_of(folder / f"{first:03d}.tar", samples)
    return folder


def test_values_are_read_from_json_once_and_broadcast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = [{"of": {"category": name}} for name in ("a", "b", " a ", "b", "1", 1, 1.5, True)]
    source = write_samples(tmp_path / "data", *fields)
    shards = opened(source, tmp_path / "run", balance="of.category:2")
    values = shards.manifest.values
    assert len(values) == 8 and len(set(values.tolist())) == 5
    assert values[0] == values[2] and values[1] == values[3] and values[4] == values[5]
    read = Manifest.from_bytes(shards.manifest.to_bytes())
    assert read is not None and np.array_equal(read.values, values)
    plain = opened(source, tmp_path / "plain")
    assert len(plain.manifest.values) == 0
    assert (
        len(
            {
                part.fingerprint()
                for part in (shards, plain, opened(source, tmp_path / "x", balance="of.category:9"))
            }
        )
        == 2
    )
    monkeypatch.setattr("data.selection.SelectedShard.read_present", None)  # the values are stored
    again = opened(source, tmp_path / "run", balance="of.category:equal")
    assert np.array_equal(again.manifest.values, values)


def test_index_command_reads_values_for_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_samples(tmp_path / "data", *[{"category": name} for name in "aabbc"], {})
    assert main(["index", str(source), "--balance", "category", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "2 shards, 5 samples" in said and "left out    1 without category" in said
    monkeypatch.setattr("data.selection.SelectedShard.read_present", None)
    assert len(set(opened(source, tmp_path / "run", balance="category:2").manifest.values.tolist())) == 3


def test_samples_without_a_value_are_counted(tmp_path: Path) -> None:
    values = ("a", None, "", "  ", ["a", "b"], {"x": 1}, "b", float("nan"))
    fields = [{"category": value} for value in values] + [{}]
    source = write_samples(tmp_path / "data", *fields)
    shards = opened(source, tmp_path / "run", balance="category:2")
    assert len(shards) == 2
    assert shards.manifest.dropped == {"without category": 5, "with several values of category": 2}
    assert shards.manifest.left_out(shards.selection) == (
        "left out: 5 without category, 2 with several values of category"
    )


def test_values_are_text_members(tmp_path: Path) -> None:
    samples = [
        {"jpg": jpeg_of(0), "com.txt": "x", "sci.txt": f"{TAXA[i // 2]}\n" * (i < 5)} for i in range(6)
    ]
    shard_of(tmp_path / "0.tar", samples)
    shards = opened(tmp_path / "0.tar", tmp_path / "run", balance="sci.txt:1", captions=("com.txt",))
    assert len(shards) == 5 and shards.manifest.dropped == {"without sci.txt": 1}
    assert [*Counter(shards.manifest.values.tolist()).values()] == [2, 2, 1]
    sample = shards.read(0)
    assert sample.fields == {"com.txt": "x"}


def test_each_caption_counts_if_each_is_a_sample(tmp_path: Path) -> None:
    fields = [{"captions": ["x", "y"], "category": "a"}, {"captions": ["z"], "category": "b"}]
    source = write_samples(tmp_path / "data", *fields)
    shards = opened(
        source, tmp_path / "run", balance="category:2", captions=("captions",), caption_choice="all"
    )
    assert [*Counter(shards.manifest.values.tolist()).values()] == [2, 1]


def test_filters_and_fraction_come_first(tmp_path: Path) -> None:
    fields = [{"category": "ab"[i % 2], "width": i} for i in range(60)]
    source = write_samples(tmp_path / "data", *fields)
    shards = opened(source, tmp_path / "run", balance="category:2", filters=("width >= 10",), fraction=0.5)
    assert len(shards) == len(shards.manifest.values) < 40
    assert "not width >= 10" in shards.manifest.dropped and len(set(shards.manifest.values.tolist())) == 2


@pytest.mark.parametrize(
    ("fields", "balance", "message"),
    [
        ({"categry": "a"}, "category:2", "data.balance names the json field 'category', which none of 3 samples e"),
        ({"categry": "a"}, "category:2", "samples examined has: did you mean 'categry'? available fields: categry"),
        ({"category": ["a"]}, "category:2", "has no sample that is used: 3 with several values of category"),
    ],
)  # fmt: skip
def test_field_that_no_sample_has_is_an_error(
    fields: dict[str, Any], balance: str, message: str, tmp_path: Path
) -> None:
    source = write_samples(tmp_path / "data", fields, fields, fields)
    with pytest.raises(DataError) as caught:
        opened(source, tmp_path / "run", balance=balance)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "balance", ["category", "category:", ":5", "category:0", "category:-1", "category:x", "a:1.5"]
)
def test_balance_states_field_and_number(balance: str) -> None:
    with pytest.raises(
        ConfigError, match=r"data.balance = '.*' is invalid: expected empty, FIELD:COUNT or FIELD:equal"
    ):
        DataConfig(balance=balance)
    with pytest.raises(
        ConfigError, match=r"data.resample = True is invalid: cannot be combined with data.balance"
    ):
        DataConfig(balance="a:b:equal", resample=True)
    assert DataConfig(balance="a:b:70").balance_by == ("a:b", 70) and DataConfig().balance_by == ("", 0)


def test_changed_values_are_other_data(tmp_path: Path) -> None:
    source = write_samples(tmp_path / "data", *[{"category": name} for name in "aab"])
    shards = opened(source, tmp_path / "run", balance="category:2")
    assert (
        opened(source, tmp_path / "run", balance="category:2", resumed=True).fingerprint()
        == shards.fingerprint()
    )
    changed = replace(shards.manifest, values=shards.manifest.values[::-1])
    assert changed.changes_since(shards.manifest) == ["samples have other values of data.balance"]
    assert changed.fingerprint != shards.manifest.fingerprint
    write_samples(tmp_path / "data", *[{"category": name} for name in "abb"])
    with pytest.raises(CheckpointError, match=r"trained on other data: 000\.tar"):
        opened(source, tmp_path / "run", balance="category:2", resumed=True)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_tables_are_balanced_by_a_column(form: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    names = [*"aaaab", ""]
    for i in range(6):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg_of(i))
    columns = {
        "filepath": [f"{i}.jpg" for i in range(6)],
        "caption": [f"text {i}" for i in range(6)],
        "class name": names,
    }
    table = tmp_path / f"table.{form}"
    if form == "csv":
        rows = [",".join(columns), *map(",".join, zip(*columns.values(), strict=True))]
        table.write_text("\n".join(rows))
    else:
        pq.write_table(pa.table(columns), table)
    shards = opened(table, tmp_path / "run", balance="class_name:2")
    assert shards.manifest.dropped == {"without class_name": 1}
    order = Order(shards.counts, seed=0, batch_size=3, values=shards.manifest.values, cap=2)
    assert order.samples == 3
