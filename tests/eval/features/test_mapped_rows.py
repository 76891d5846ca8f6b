"""Tests of memory-mapped rows: memory that is released after use."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from eval.features import store
from eval.features.store import FeatureFile, release_rows
from eval.metrics.ranks import class_ranks, match_ranks

ROWS, WIDTH = 1 << 15, 512  # 64 MiB


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.safetensors"
    opened = FeatureFile(path, {"x": WIDTH}, ROWS, create=True)
    opened.columns["x"][:] = torch.from_numpy(
        np.random.default_rng(0).standard_normal((ROWS, WIDTH), dtype=np.float32)
    )
    return path


def mapped(file: Path) -> torch.Tensor:
    return FeatureFile(file, {"x": WIDTH}, ROWS).columns["x"]


def resident() -> int:
    """Return the bytes of mapped files in this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssFile")).split()[1]) << 10


def test_ranking_releases_mapped_memory(file: Path) -> None:
    table, classes, labels = mapped(file), torch.randn(WIDTH, 1000), torch.zeros(ROWS, dtype=torch.int64)
    class_ranks(table[:100], classes, labels[:100])  # loads libraries for matrix products
    before = resident()
    ranks = class_ranks(table, classes, labels)
    assert resident() - before < 16 << 20
    copy = table.clone()
    assert torch.equal(class_ranks(copy, classes, labels), ranks)
    release_rows(table)
    torch.testing.assert_close(table.sum(), copy.sum())
    assert resident() - before > 48 << 20  # other reads stay in memory
    release_rows(table)
    assert resident() - before < 16 << 20
    pairs = torch.stack([torch.arange(ROWS), labels], dim=1)
    captions, before = classes.T.contiguous(), resident()
    ranks = match_ranks(table, captions, pairs)
    assert resident() - before < 16 << 20
    assert torch.equal(match_ranks(copy, captions, pairs), ranks)


def test_checking_rows_releases_mapped_memory(file: Path) -> None:
    opened = FeatureFile(file, {"x": WIDTH}, ROWS)
    opened.intact(np.arange(10))
    before = resident()
    opened.intact()
    assert resident() - before < 24 << 20


def test_release_keeps_unmapped_and_used_tensors(file: Path) -> None:
    own = torch.arange(1 << 20, dtype=torch.float32)
    release_rows(own)
    assert torch.equal(own, torch.arange(1 << 20, dtype=torch.float32))
    table = mapped(file)
    part = table[7:9]
    del table
    gc.collect()
    release_rows(part)  # the part is still in use
    assert torch.equal(part, mapped(file)[7:9])
    del part
    gc.collect()
    assert not store._maps
