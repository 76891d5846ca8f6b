"""Tests of reading PyTorch files: archives and storages with false sizes or offsets are rejected."""

import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clipkit.errors import CheckpointError
from clipkit.formats import weights
from clipkit.formats.weights import read_weights

DAMAGED = "truncated or damaged"


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_weights(path)
    message = str(caught.value)
    assert "\n" not in message and message.isprintable() and str(path) in message
    return message


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save({"a": torch.arange(4.0), "b": torch.full((4,), 7.0)}, tmp_path / "saved.pt")
    return tmp_path / "saved.pt"


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


# --- the zip ------------------------------------------------------------------------------------------------


def packed(path: Path, files: dict[str, bytes], *, large: bool = False, **lies: dict[str, Any]) -> Path:
    """Write a zip whose directory has false values in single fields: ``size={"a/data/0": 1}``."""
    body, table = b"", b""
    for name, content in files.items():
        header = lies.get("header", {}).get(name, len(body))
        size = lies.get("size", {}).get(name, len(content))
        method = lies.get("method", {}).get(name, 0)
        flags = lies.get("flags", {}).get(name, 0)
        check = zlib.crc32(content)
        own = lies.get("own_name", {}).get(name, name).encode()
        local = struct.pack(
            "<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, check, len(content), len(content), len(own), 0
        )
        sizes, extra = (size, size, header), b""
        if large:
            sizes, extra = (0xFFFFFFFF,) * 3, struct.pack("<4H3Q", 9, 0, 1, 24, size, size, header)
        shown = lies.get("name", {}).get(name, name).encode()
        table += struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 20, 20, flags, method, 0, 0, check, *sizes[:2], len(shown), len(extra),
            0, 0, 0, 0, sizes[2],
        ) + shown + extra  # fmt: skip
        body += local + own + content
    count = lies.get("count", {}).get("", len(files))
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(table), len(body), 0)
    path.write_bytes(body + table + end)
    return path


def test_zips_of_other_writers_load(saved: Path, tmp_path: Path) -> None:
    """Storages need not be aligned to 64 bytes, nor be in PyTorch's order."""
    files = dict(reversed(contents(saved).items()))
    for path in (
        packed(tmp_path / "1", files),
        packed(tmp_path / "2", {"saved/x": b"x", **files}, large=True),
    ):
        found = read_weights(path).tensors
        assert torch.equal(found["a"], torch.arange(4.0)) and torch.equal(found["b"], torch.full((4,), 7.0))
        assert all(tensor.data_ptr() % 16 == 0 for tensor in found.values())
    with zipfile.ZipFile(tmp_path / "3", "w") as archive:
        archive.comment = b"a comment"
        for name, content in files.items():
            archive.writestr(name, content)
    assert len(read_weights(tmp_path / "3").tensors) == 2


@pytest.mark.parametrize("name", ["saved/data/0", "saved/data.pkl", "saved/version"])
def test_compressed_entries_are_rejected(name: str, saved: Path, tmp_path: Path) -> None:
    files = contents(saved)
    with zipfile.ZipFile(tmp_path / "x", "w") as archive:
        for other, content in files.items():
            archive.writestr(other, content, zipfile.ZIP_DEFLATED if other == name else zipfile.ZIP_STORED)
    assert f"'{name}' is compressed" in refused(tmp_path / "x")


def test_zip_bomb_is_rejected(saved: Path, tmp_path: Path) -> None:
    """Zeros that would inflate a thousandfold are never inflated."""
    files = contents(saved)
    stream = zlib.compressobj(wbits=-15)
    bomb = b"".join(stream.compress(bytes(1 << 20)) for _ in range(64)) + stream.flush()
    with zipfile.ZipFile(tmp_path / "x", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, bomb if name == "saved/data/0" else content)
    content = (tmp_path / "x").read_bytes()
    at = content.rindex(b"PK\1\2", 0, content.rindex(b"saved/data/0"))
    method, size = struct.pack("<H", 8), struct.pack("<L", 64 << 20)
    (tmp_path / "x").write_bytes(
        content[: at + 10] + method + content[at + 12 : at + 24] + size + content[at + 28 :]
    )
    assert "compressed" in refused(tmp_path / "x")


@pytest.mark.parametrize(
    "lies",
    [
        {"size": {"saved/data/0": 1 << 20}},
        {"size": {"saved/data/0": 300}},  # overlaps the following entry
        {"header": {"saved/data/0": 1 << 30}},
        {"header": {"saved/data/0": 1}},
        {"name": {"saved/data/0": "saved/data/1"}},
        {"name": {"saved/data/0": "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")}},
        {"own_name": {"saved/data/0": "saved/data/9"}},
        {"method": {"saved/data/0": 12}},
        {"flags": {"saved/data/0": 1}},  # encrypted
        {"count": {"": 2}},
        {"count": {"": 60_000}},
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_false_directory_values_are_rejected(
    lies: dict[str, Any], large: bool, saved: Path, tmp_path: Path
) -> None:
    assert DAMAGED in refused(packed(tmp_path / "x", contents(saved), large=large, **lies))


def test_nested_entries_are_rejected(saved: Path, tmp_path: Path) -> None:
    """An entry lies within the bytes of another."""
    inner = b"saved/in"
    local = (
        struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, zlib.crc32(b"x"), 1, 1, len(inner), 0)
        + inner
        + b"x"
    )
    files = {"saved/out": local + bytes(50), **contents(saved), "saved/in": b"x"}
    assert read_weights(packed(tmp_path / "x", files))
    at = len(b"saved/out") + 30
    assert DAMAGED in refused(packed(tmp_path / "y", files, header={"saved/in": at}))


def test_duplicate_entry_is_rejected(saved: Path, tmp_path: Path) -> None:
    files = contents(saved)
    with zipfile.ZipFile(tmp_path / "x", "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        for name, content in [*files.items(), ("saved/data/0", bytes(16))]:
            archive.writestr(name, content)
    assert DAMAGED in refused(tmp_path / "x")


def test_too_many_entries_are_rejected(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_ENTRIES", 3)
    assert "too many" in refused(saved)


def test_too_large_pickle_is_rejected(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_PICKLE", 10)
    assert "data.pkl is larger" in refused(saved)


def test_two_archives_in_one_are_rejected(saved: Path, tmp_path: Path) -> None:
    files = contents(saved)
    path = packed(tmp_path / "x", files | {name.replace("saved", "other"): files[name] for name in files})
    assert "no PyTorch weights" in refused(path)


def test_big_endian_files_are_rejected(saved: Path, tmp_path: Path) -> None:
    assert "big-endian" in refused(packed(tmp_path / "x", contents(saved) | {"saved/byteorder": b"big"}))
    files = {name: content for name, content in contents(saved).items() if name != "saved/byteorder"}
    assert read_weights(packed(tmp_path / "x", files))  # as before PyTorch 2.1


# --- tensors ------------------------------------------------------------------------------------------------


class Lie:
    """Pickles as a view of four numbers, possibly an invalid one."""

    def __init__(
        self, *view: object, storage: Tensor | None = None, rebuild: str = "_rebuild_tensor_v2"
    ) -> None:
        base = torch.arange(4.0) if storage is None else storage
        self.arguments = (base.storage(), *view, False, OrderedDict())
        self.rebuild = rebuild

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return getattr(torch._utils, self.rebuild), self.arguments


BEYOND, NEVER, PICKLE = "reaches beyond its storage", "an impossible shape", "pickle is truncated or damaged"


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("view", "reason"),
    [
        ((0, (5,), (1,)), BEYOND),
        ((1, (4,), (1,)), BEYOND),
        ((4, (), ()), BEYOND),
        ((0, (2, 2), (3, 1)), BEYOND),
        ((0, (2,), (1 << 61,)), BEYOND),
        ((0, (1, 4), (1 << 63, 1)), BEYOND),
        ((0, (0, 1 << 100), (1, 1)), BEYOND),
        ((-1, (2,), (1,)), NEVER),
        ((0, (-2,), (1,)), NEVER),
        ((3, (2,), (-1,)), NEVER),
        ((0, (2,), (1, 1)), NEVER),
        ((0, (1,) * 70, (1,) * 70), PICKLE),
        ((0, (1 << 40,), (0,)), "repeats the 4 values of its storage"),
        ((0, (2000, 2000), (0, 0)), "repeats the 4 values of its storage"),
        ((0, (1 << 100,), (0,)), BEYOND),
        ((0, [2], (1,)), PICKLE),
        ((0, (2.0,), (1,)), PICKLE),
        ((False, (2,), (1,)), PICKLE),
        ((None, (2,), (1,)), PICKLE),
        ((0, (2, "x"), (1, 1)), PICKLE),
        ((0, 2, 1), PICKLE),
    ],
)
def test_tensors_beyond_their_storage_are_rejected(
    view: tuple[object, ...], reason: str, old: bool, tmp_path: Path
) -> None:
    torch.save(
        {"fine": torch.ones(2), "w": Lie(*view)}, tmp_path / "x", _use_new_zipfile_serialization=not old
    )
    assert reason in refused(tmp_path / "x")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_valid_views_load(tmp_path: Path) -> None:
    views = {
        "last": (3, (), ()),
        "none": (9, (0,), (1,)),
        "same": (2, (3, 4), (0, 0)),
        "rows": (0, (3, 2), (1, 1)),
    }
    torch.save({name: Lie(*view) for name, view in views.items()}, tmp_path / "x")
    found = read_weights(tmp_path / "x").tensors
    for name, (offset, size, stride) in views.items():
        expected = torch.arange(4.0).as_strided(size, stride, min(offset, 3))
        assert torch.equal(found[name], expected)


@pytest.mark.parametrize("count", [3, 5, 64, 255])
def test_storage_of_wrong_size_is_rejected(count: int, saved: Path) -> None:
    """torch.load, which maps the file, would read the bytes that follow."""
    content = saved.read_bytes()
    before = b"K\x04tq\x07Q"
    assert content.count(before) == 1
    saved.write_bytes(content.replace(before, bytes([75, count]) + before[2:]))
    assert "'a': its storage is truncated" in refused(saved)


def test_old_files_with_storage_views_load(tmp_path: Path) -> None:
    """Before PyTorch 0.4, a storage could be a view of another one."""
    torch.save({"w": torch.arange(8.0)}, tmp_path / "x", _use_new_zipfile_serialization=False)
    content = (tmp_path / "x").read_bytes()
    whole = b"K\x08Ntq"  # eight numbers, no view
    assert content.count(whole) == 1

    def view(start: int, count: int) -> Path:
        part = b"K\x08(X\x01\x00\x00\x00v" + bytes([75, start, 75, count]) + b"ttq"
        changed = content.replace(whole, part).replace(b"QK\x00K\x08\x85", b"QK\x00K\x03\x85")
        (tmp_path / "y").write_bytes(changed)
        return tmp_path / "y"

    assert torch.equal(read_weights(view(2, 3)).tensors["w"], torch.tensor([2.0, 3.0, 4.0]))
    assert BEYOND in refused(view(2, 2))
    assert "is truncated" in refused(view(6, 3))


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"K\x05.", "not written by torch.save"),
        (b"M\xe9\x03.", b"M\xe8\x03.", "version or byte order"),
        (b"little_endianq\x02\x88", b"little_endianq\x02\x89", "version or byte order"),
        (struct.pack("<q", 4), struct.pack("<q", -4), DAMAGED),
        (struct.pack("<q", 4), struct.pack("<q", 5), DAMAGED),
        (struct.pack("<q", 4), struct.pack("<q", 3), "'w': its storage is truncated"),
        (struct.pack("<q", 4), struct.pack("<q", 1 << 62), DAMAGED),
    ],
)
def test_inconsistent_old_files_are_rejected(
    before: bytes, after: bytes, reason: str, tmp_path: Path
) -> None:
    torch.save({"w": torch.zeros(4)}, tmp_path / "x", _use_new_zipfile_serialization=False)
    content = (tmp_path / "x").read_bytes()
    assert content.count(before) == 1
    (tmp_path / "x").write_bytes(content.replace(before, after))
    assert reason in refused(tmp_path / "x")
