"""Tests of file checksums: independent of the number of threads, sensitive to values and order of bytes."""

import zlib
from pathlib import Path

import pytest

from clipkit.formats import checkpoint
from clipkit.formats.checkpoint import compute_checksum


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_CHUNK", 64)
    monkeypatch.setattr(checkpoint, "_READ", 24)


@pytest.mark.parametrize("size", [0, 1, 23, 64, 65, 128, 1000])
def test_checksum_is_the_crc_of_the_crcs_of_chunks(size: int, tmp_path: Path) -> None:
    content = bytes(number * 7 % 251 for number in range(size))
    pieces = [content[start : start + 64] for start in range(0, size, 64)]
    want = zlib.crc32(b"".join(zlib.crc32(piece).to_bytes(4, "little") for piece in pieces))
    for threads in (0, 1, 3):
        path = tmp_path / f"{threads}"
        path.write_bytes(content)
        assert compute_checksum(path, threads=threads) == f"{want:08x}"


def test_checksum_detects_changed_and_swapped_bytes(tmp_path: Path) -> None:
    content = bytes(range(200))
    changed = [
        content[:70] + b"?" + content[71:],
        content[64:128] + content[:64] + content[128:],
        content[:-1],
    ]
    found = set()
    for number, one in enumerate([content, *changed]):
        (tmp_path / str(number)).write_bytes(one)
        found.add(compute_checksum(tmp_path / str(number)))
    assert len(found) == 4
