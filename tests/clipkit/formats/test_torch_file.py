"""Tests of reading PyTorch files: damaged storages and tensors beyond their storage are rejected."""

import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clipkit.errors import CheckpointError
from clipkit.formats.weights import read_weights


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


def write_zip(path: Path, files: dict[str, bytes], *, compressed: str = "", comment: bytes = b"") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = comment
        for name, content in files.items():
            method = zipfile.ZIP_DEFLATED if name == compressed else zipfile.ZIP_STORED
            archive.writestr(name, content, method)
    return path


# --- the zip ------------------------------------------------------------------------------------------------


def test_zips_of_other_writers_load(saved: Path, tmp_path: Path) -> None:
    """Storages need not be aligned to 64 bytes, nor be in PyTorch's order."""
    files = dict(reversed(contents(saved).items()))
    for shift in range(17):
        path = write_zip(tmp_path / "x", {"saved/x": bytes(shift), **files}, comment=b"a comment")
        tensors = read_weights(path).tensors
        assert torch.equal(tensors["a"], torch.arange(4.0))
        assert torch.equal(tensors["b"], torch.full((4,), 7.0))
        assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors.values())


@pytest.mark.parametrize("name", ["saved/data/0", "saved/data.pkl", "saved/version"])
def test_compressed_entries_are_rejected(name: str, saved: Path, tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x", contents(saved), compressed=name)
    assert f"{name} is compressed" in refused(path)


def test_a_changed_value_of_the_model_is_detected(saved: Path) -> None:
    """``torch.load`` reads it without an error if it maps the file."""
    content = saved.read_bytes()
    value = struct.pack("<f", 7.0)
    assert content.count(value * 4) == 1
    saved.write_bytes(content.replace(value * 4, struct.pack("<f", 8.0) + value * 3))
    assert torch.load(saved, weights_only=True, mmap=True)["b"][0] == 8
    assert "checksum of a storage is wrong" in refused(saved)


def test_a_changed_optimizer_does_not_matter(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(3)}, "optimizer": torch.full((4,), 7.0)}, tmp_path / "x")
    value = struct.pack("<f", 7.0)
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes().replace(value, struct.pack("<f", 8.0)))
    assert torch.equal(read_weights(tmp_path / "x").tensors["w"], torch.ones(3))


def test_an_entry_beyond_the_file_is_rejected(saved: Path, tmp_path: Path) -> None:
    content = bytearray(saved.read_bytes())
    entry = content.rindex(b"PK\1\2", 0, content.rindex(b"saved/data/0"))
    for size in (0, 1, 1 << 20):
        content[entry + 20 : entry + 28] = struct.pack("<2L", size, size)
        (tmp_path / "x").write_bytes(content)
        assert "truncated or damaged" in refused(tmp_path / "x")


def test_two_archives_in_one_are_rejected(saved: Path, tmp_path: Path) -> None:
    files = contents(saved)
    others = {name.replace("saved", "other"): content for name, content in files.items()}
    assert "without PyTorch weights" in refused(write_zip(tmp_path / "x", files | others))


def test_big_endian_files_are_rejected(saved: Path, tmp_path: Path) -> None:
    files = contents(saved)
    assert "big-endian" in refused(write_zip(tmp_path / "x", files | {"saved/byteorder": b"big"}))
    del files["saved/byteorder"]
    assert read_weights(write_zip(tmp_path / "x", files))  # as before PyTorch 2.1


# --- tensors ------------------------------------------------------------------------------------------------


class View:
    """Pickles as a view of four numbers, possibly an invalid one."""

    def __init__(self, *view: object) -> None:
        self.arguments = (torch.arange(4.0).storage(), *view, False, OrderedDict())

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return torch._utils._rebuild_tensor_v2, self.arguments


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    "view",
    [
        (0, (5,), (1,)),
        (1, (4,), (1,)),
        (4, (), ()),
        (0, (2, 2), (3, 1)),
        (0, (2,), (1 << 61,)),
        (0, (1, 4), (1 << 63, 1)),
        (-1, (2,), (1,)),
        (0, (-2,), (1,)),
        (3, (2,), (-1,)),
        (0, (2,), (1, 1)),
        (0, (1 << 100,), (0,)),
        (0, (2.0,), (1,)),
        (None, (2,), (1,)),
        (0, (2, "x"), (1, 1)),
        (0, 2, 1),
    ],
)
def test_tensors_beyond_their_storage_are_rejected(
    view: tuple[object, ...], old: bool, shift: int, tmp_path: Path
) -> None:
    """Also of storages that are not aligned in the file."""
    values = {"fine": torch.ones(2), "w": View(*view)}
    torch.save(values, tmp_path / "x", _use_new_zipfile_serialization=not old)
    if not old:
        write_zip(tmp_path / "x", {"x/x": bytes(shift), **contents(tmp_path / "x")})
    assert "truncated or damaged" in refused(tmp_path / "x")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_valid_views_load(tmp_path: Path) -> None:
    views: dict[str, Any] = {"last": (3, (), ()), "same": (2, (3, 4), (0, 0)), "rows": (0, (3, 2), (1, 1))}
    torch.save({name: View(*view) for name, view in views.items()}, tmp_path / "x")
    found = read_weights(tmp_path / "x").tensors
    for name, (offset, size, stride) in views.items():
        assert torch.equal(found[name], torch.arange(4.0).as_strided(size, stride, offset))


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"K\x05.", "not written by torch.save"),
        (b"M\xe9\x03.", b"M\xe8\x03.", "version or byte order"),
        (b"little_endianq\x02\x88", b"little_endianq\x02\x89", "version or byte order"),
        (struct.pack("<q", 4), struct.pack("<q", -4), "damaged"),
        (struct.pack("<q", 4), struct.pack("<q", 5), "damaged"),
        (struct.pack("<q", 4), struct.pack("<q", 3), "damaged"),
        (struct.pack("<q", 4), struct.pack("<q", 1 << 62), "damaged"),
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
