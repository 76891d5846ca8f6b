"""Tests of memory-mapped rows: values in any order, and memory that is released after use."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from eval.features import store
from eval.features.store import chosen_rows, map_rows, release
from eval.metrics.ranks import class_ranks, match_ranks

ROWS, WIDTH = 1 << 15, 512  # 64 MiB


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.bin"
    np.random.default_rng(0).standard_normal((ROWS, WIDTH), dtype=np.float32).tofile(path)
    return path


def mapped(file: Path, rows: int = ROWS) -> torch.Tensor:
    with file.open("rb") as opened:
        return map_rows(opened, rows, WIDTH)


def resident() -> int:
    """Return the bytes of mapped files in this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssFile")).split()[1]) << 10


@given(
    rows=st.lists(st.integers(0, 99), max_size=40) | st.integers(0, 60).map(lambda i: list(range(i, i + 40)))
)
@pytest.mark.parametrize("copied", [0, 1 << 20])
def test_chosen_rows_equal_the_file_in_any_order(
    file: Path, tmp_path_factory: pytest.TempPathFactory, rows: list[int], copied: int
) -> None:
    folder = tmp_path_factory.mktemp("copies")
    table, wanted = mapped(file, 100), np.array(rows, dtype=np.int64)
    expected = torch.from_numpy(np.fromfile(file, np.float32, 100 * WIDTH).reshape(100, WIDTH)[wanted])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_MAX_COPY", copied)
        patch.setattr(store, "PIECE", 3 * WIDTH * 4)
        assert torch.equal(chosen_rows(table, wanted, folder), expected)
        assert torch.equal(chosen_rows(table, wanted), expected)
    assert not list(folder.iterdir())


def test_ranking_releases_mapped_memory(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, classes, labels = mapped(file), torch.randn(WIDTH, 1000), torch.zeros(ROWS, dtype=torch.int64)
    class_ranks(table[:100], classes, labels[:100])  # loads libraries for matrix products
    before = resident()
    ranks = class_ranks(table, classes, labels)
    assert resident() - before < 16 << 20
    assert torch.equal(class_ranks(table.clone(), classes, labels), ranks)
    release(table)
    torch.testing.assert_close(table.sum(), torch.from_numpy(np.fromfile(file, np.float32)).sum())
    assert resident() - before > 48 << 20  # other reads stay in memory
    release(table)
    assert resident() - before < 16 << 20
    backwards = chosen_rows(table, np.arange(ROWS)[::-1].copy(), None)
    monkeypatch.setattr(store, "_MAX_COPY", 0)
    before = resident()
    copy = chosen_rows(table, np.arange(ROWS)[::-1].copy(), tmp_path)
    assert resident() - before < 16 << 20
    assert torch.equal(copy, backwards)
    release(copy)
    assert torch.equal(class_ranks(copy, classes, labels), class_ranks(backwards, classes, labels))
    pairs = torch.stack([torch.arange(ROWS), labels], dim=1)
    captions, before = classes.T.contiguous(), resident()
    ranks = match_ranks(table, captions, pairs)
    assert resident() - before < 16 << 20
    assert torch.equal(match_ranks(table.clone(), captions, pairs), ranks)


def test_release_keeps_unmapped_and_used_tensors(file: Path) -> None:
    own = torch.arange(1 << 20, dtype=torch.float32)
    release(own)
    assert torch.equal(own, torch.arange(1 << 20, dtype=torch.float32))
    table = mapped(file)
    part = table[7:9]
    del table
    gc.collect()
    release(part)  # the part is still in use
    assert torch.equal(part, mapped(file)[7:9])
    del part
    gc.collect()
    assert not store._maps
    assert mapped(file, 0).shape == (0, WIDTH)
    with pytest.raises(ValueError, match="greater than file size"):
        mapped(file, ROWS + 1)
