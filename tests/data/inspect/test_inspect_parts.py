"""Tests of the functions of ``inspect``: missing numbers, identical files."""

import numpy as np
from hypothesis import HealthCheck, given, settings, strategies as st

from clipkit.files.terminal import printable
from data.inspect.findings import PERCENTILES, Histogram
from data.inspect.samples import DeepValues, group_equal, missing_numbers, summarize_deep, token_counts


@given(st.lists(st.integers(0, 300), min_size=1, unique=True), st.integers(1, 6))
def test_missing_numbers_are_the_gaps(numbers: list[int], width: int) -> None:
    ranges, count = missing_numbers([f"/a/x{number:0{width}d}.tar" for number in numbers])
    missing = sorted(set(range(min(numbers), max(numbers))) - set(numbers))
    if len(missing) > 10 * len(numbers):
        assert (ranges, count) == ([], 0)
        return
    assert count == len(missing)
    stated: list[int] = []
    for one in ranges:
        first, _, last = one.partition("–")
        stated += range(int(first), int(last or first) + 1)
    assert stated == missing


def test_missing_numbers_of_several_folders_and_names() -> None:
    urls = ["/a/0.tar", "/a/2.tar", "/b/0.tar", "s3://b/t-08.tar?v=1", "s3://b/t-10.tar?v=1", "/c/only.tar"]
    assert missing_numbers(urls) == (["1", "09"], 2)
    assert missing_numbers(["/a/1700000000.tar", "/a/1800000000.tar"]) == ([], 0)


@given(st.text(st.characters(codec=None), max_size=300))
def test_printable_text_is_unchanged_up_to_its_length(text: str) -> None:
    shown = printable(text, 160)
    assert shown.isprintable() or not shown
    assert shown.startswith(text[:160]) or not text[:160].isprintable()


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=30)
@given(st.lists(st.integers(0, 12), max_size=30))
def test_equal_items_are_grouped(kinds: list[int]) -> None:
    expected = sorted(
        [n for n, one in enumerate(kinds) if one == kind] for kind in set(kinds) if kinds.count(kind) > 1
    )
    assert sorted(group_equal([bytes([kind]) for kind in kinds])) == expected


@given(st.lists(st.integers(0, 400), max_size=40))
def test_histogram_counts_each_value_once(values: list[int]) -> None:
    bins = Histogram.of("x", values, (0, 10, 100))
    assert bins.labels == ("0–9", "10–99", "100 and more")
    assert sum(bins.counts) == len(values) and bins.counts[1] == sum(10 <= value < 100 for value in values)


def test_token_counts_include_special_tokens_in_the_text() -> None:
    assert token_counts(["", "!", "a cat !!!", "<end_of_text> a"]) == [2, 3, 5, 4]


@given(st.lists(st.integers(1, 5000), min_size=3, max_size=3), st.integers(1, 3))
def test_values_of_each_channel_of_deep_images(largest: list[int], images: int) -> None:
    random = np.random.default_rng(sum(largest))
    arrays = []
    for _ in range(images):
        values = (random.random((8, 9, 3)) * np.array(largest)).astype(np.uint16)
        values[0, 0] = largest
        arrays.append(values)
    deep = summarize_deep([DeepValues.of(values) for values in arrays])
    assert (deep.count, deep.kinds) == (images, {"16-bit": images})
    pairs = deep.settings.removeprefix("pixels.range=").strip("'").split(";")
    pairs = pairs * 3 if len(pairs) == 1 else pairs
    whole = np.stack(arrays).reshape(-1, 3)
    for channel, pair, most, values in zip(deep.channels, pairs, largest, whole.T, strict=True):
        assert (channel.low, channel.high) == (values.min(), most)
        assert channel.percentiles == tuple(np.percentile(values, PERCENTILES))
        assert pair == ("0,1" if most == 1 else f"0,{2 ** max(8, most.bit_length()) - 1}")
