"""Tests of array files: they round-trip, and damaged files count as missing."""

import json
import mmap
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays_of

from clipkit.samples.index import Strings, pack_arrays, read_arrays, unpack_arrays, write_arrays

kinds = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64, np.int64])
arrays = kinds.flatmap(
    lambda kind: arrays_of.arrays(kind, arrays_of.array_shapes(min_dims=1, max_dims=3, min_side=0))
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
packed = pack_arrays(
    {"name": "é\n", "count": 3},
    {"rows": np.arange(100, dtype=np.uint32), "none": np.zeros((0, 4), np.uint8), "ids": np.arange(7)},
)


@settings(deadline=None)
@given(
    about=st.dictionaries(st.text(), json_values, max_size=4),
    content=st.dictionaries(st.text(), arrays, max_size=4),
)
def test_arrays_round_trip(about: dict[str, Any], content: dict[str, npt.NDArray[Any]]) -> None:
    found = unpack_arrays(pack_arrays(about, content))
    assert found is not None
    assert found[0] == about and list(found[1]) == list(content)
    for name, array in content.items():
        other = found[1][name]
        assert other.dtype == array.dtype and other.shape == array.shape and np.array_equal(other, array)
        assert not other.flags.writeable


def test_non_contiguous_arrays_round_trip() -> None:
    square = np.arange(36).reshape(6, 6)
    found = unpack_arrays(pack_arrays({}, {"turned": square.T, "some": square[::2, 1::3]}))
    assert found is not None
    assert np.array_equal(found[1]["turned"], square.T) and np.array_equal(
        found[1]["some"], square[::2, 1::3]
    )


def test_arrays_are_aligned_to_cache_lines() -> None:
    found = unpack_arrays(packed)
    assert found is not None
    first = np.frombuffer(packed, np.uint8).__array_interface__["data"][0]
    starts = [array.__array_interface__["data"][0] - first for array in found[1].values() if array.size]
    assert [start % 64 for start in starts] == [0, 0]


@settings(deadline=None)
@given(at=st.integers(0, len(packed) - 1), bit=st.integers(0, 7))
def test_changed_bit_is_detected(at: int, bit: int) -> None:
    changed = bytearray(packed)
    changed[at] ^= 1 << bit
    found = unpack_arrays(bytes(changed))
    assert found is None or bytes(changed[:8]).lower() == packed[:8]  # an upper-case digit of the checksum


@settings(deadline=None)
@given(length=st.integers(0, len(packed) - 1), more=st.binary(min_size=1, max_size=100))
def test_shorter_or_longer_file_is_rejected(length: int, more: bytes) -> None:
    assert unpack_arrays(packed[:length]) is None
    assert unpack_arrays(packed + more) is None


@settings(deadline=None)
@given(content=st.binary(max_size=300))
def test_random_bytes_are_rejected(content: bytes) -> None:
    assert unpack_arrays(content) is None
    assert unpack_arrays(b"%08x" % zlib.crc32(content) + content) is None


@pytest.mark.parametrize(
    "line",
    [
        [], 1, None, "x", {}, [{}], [{}, []], [{}, 1], [{}, {"a": []}], [{}, {"a": 1}],
        [{}, {"a": ["<i8", -1]}], [{}, {"a": ["<i8", 10**9]}], [{}, {"a": ["<i8", 10**30]}],
        [{}, {"a": ["<i8", "3"]}], [{}, {"a": ["<i8", 0.5]}], [{}, {"a": ["|O", 1]}], [{}, {"a": ["nonsense", 1]}],
        [{}, {"a": ["i4,", 1]}], [{}, {"a": [None, 1]}], [{}, {"a": ["<U4", 1]}], [{}, {"a": ["<i8", -1, -1]}],
        [[], {"a": ["<u4", 1]}], [{}, {"a": ["<i8", [1]]}], [{}, {"a": ["(", 1]}], [{}, {"a": ["<f8", 1]}],
    ],
)  # fmt: skip
def test_invalid_header_with_valid_checksum_is_rejected(line: Any) -> None:
    """Bytes with a valid checksum and an invalid header are rejected."""
    checked = json.dumps(line).encode() + b"\n" + bytes(64)
    assert unpack_arrays(b"%08x" % zlib.crc32(checked) + checked) is None


def test_deeply_nested_header_is_rejected() -> None:
    checked = b"[" * 100_000 + b"\n"
    assert unpack_arrays(b"%08x" % zlib.crc32(checked) + checked) is None


def test_file_is_written_atomically_and_mapped(tmp_path: Path) -> None:
    path = tmp_path / "some" / "folder" / "a.index"
    assert read_arrays(path) is None
    write_arrays(path, {"a": 1}, {"rows": np.arange(10)})
    write_arrays(path, {"a": 2}, {"rows": np.arange(20)})
    assert [one.name for one in path.parent.iterdir()] == ["a.index"]
    found = read_arrays(path)
    assert found is not None and found[0] == {"a": 2}
    path.unlink()  # the mapping stays valid
    assert np.array_equal(found[1]["rows"], np.arange(20))
    base: Any = found[1]["rows"]
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


def test_unreadable_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    assert [read_arrays(tmp_path / name) for name in ("empty", "folder", "missing", "x" * 300)] == [None] * 4


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "inside").write_bytes(b"")
    with pytest.raises(OSError):
        write_arrays(tmp_path / "a", {}, {"rows": np.arange(10)})
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError):
        write_arrays(tmp_path / "file" / "b", {}, {})
    with pytest.raises(TypeError):
        write_arrays(tmp_path / "c", {"a": object()}, {})
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "file"]


@settings(deadline=None)
@given(texts=st.lists(st.text(), max_size=20), names=st.lists(st.binary(max_size=8), max_size=4))
def test_strings_round_trip(texts: list[str], names: list[bytes]) -> None:
    texts += [
        name.decode("utf-8", "surrogateescape") for name in names
    ]  # as in file names that are not UTF-8
    strings = Strings.of(texts)
    assert len(strings) == len(texts) and list(strings) == texts
    assert [strings[number] for number in range(len(texts))] == texts
    found = unpack_arrays(pack_arrays({}, {"content": strings.content, "ends": strings.ends}))
    assert found is not None and list(Strings(**found[1])) == texts


def test_strings_index_out_of_range_raises() -> None:
    strings = Strings.of(["a", "", "bc"])
    with pytest.raises(IndexError):
        strings[3]
    assert list(Strings.of([])) == [] and len(Strings.of([])) == 0
