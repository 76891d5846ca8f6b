"""Tests of the feature table: correct rows despite concurrent writers, kills and damaged files."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from clipkit.errors import DataError
from eval.features.store import FeatureTable, digest_of

WIDTHS = {"projected": 3, "before_projection": 5}


def row_of(number: int) -> dict[str, torch.Tensor]:
    """Return features that are unique to ``number``."""
    return {name: torch.arange(width) + 1000.0 * number for name, width in WIDTHS.items()}


def append(table: FeatureTable, numbers: list[int]) -> None:
    rows = [row_of(number) for number in numbers]
    columns = {
        name: torch.stack([row[name] for row in rows]) if rows else torch.empty(0, width)
        for name, width in WIDTHS.items()
    }
    table.append([digest_of(b"%d" % number) for number in numbers], columns)


def check(table: FeatureTable, numbers: set[int]) -> None:
    """Check that each number is stored once, with its own features, in a random order."""
    assert len(table) == len(numbers)
    order = random.sample(sorted(numbers), len(numbers))
    found = [table.find(digest_of(b"%d" % number)) for number in order]
    assert sorted(row for row in found if row is not None) == list(range(len(numbers)))
    for name in WIDTHS:
        values = table.column(name, np.array(found, dtype=np.int64))
        expected = [row_of(number)[name] for number in order]
        assert torch.equal(values, torch.stack(expected) if expected else torch.empty(0, WIDTHS[name]))


@given(pieces=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 12), max_size=5)), max_size=8))
@pytest.mark.parametrize("on_disk", [True, False])
def test_two_writers_share_one_table(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[tuple[bool, list[int]]],
    on_disk: bool,
) -> None:
    folder = tmp_path_factory.mktemp("table") if on_disk else None
    first = FeatureTable(folder, WIDTHS)
    second = FeatureTable(folder, WIDTHS) if on_disk else first
    every: set[int] = set()
    for to_first, numbers in pieces:
        append(first if to_first else second, numbers)
        every.update(numbers)
    for table in (first, second):
        table.refresh()
        check(table, every)
    if folder is not None:
        check(FeatureTable(folder, WIDTHS), every)


def test_changes_to_mapped_rows_do_not_reach_the_disk(tmp_path: Path) -> None:
    table = FeatureTable(tmp_path, WIDTHS)
    append(table, list(range(10)))
    table.column("projected", np.arange(2, 8)).fill_(7)
    check(FeatureTable(tmp_path, WIDTHS), set(range(10)))


PROGRAM = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_feature_store import FeatureTable, WIDTHS, append
table = FeatureTable(Path(sys.argv[1]), WIDTHS)
print("ready", flush=True)
for start in range(int(sys.argv[3]), 100_000, 3):
    append(table, [start, start + 1, start + 2, start // 2])
"""


def writer(folder: Path, start: int) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(Path(__file__).parent), str(start)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_killed_writers_leave_a_valid_table(tmp_path: Path) -> None:
    processes = [writer(tmp_path, 0), writer(tmp_path, 1)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    time.sleep(random.uniform(0.1, 0.4))
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    table = FeatureTable(tmp_path, WIDTHS)
    there = {number for number in range(100_000) if table.find(digest_of(b"%d" % number)) is not None}
    assert len(there) > 3
    check(table, there)
    append(table, [100_001])  # overwrites partial rows
    check(FeatureTable(tmp_path, WIDTHS), there | {100_001})


def test_partial_rows_of_a_crash_are_truncated(tmp_path: Path) -> None:
    append(FeatureTable(tmp_path, WIDTHS), [0, 1])
    for name in ("projected", "digests"):
        with (tmp_path / f"{name}.bin").open("ab") as file:
            file.write(b"x" * 7)
    table = FeatureTable(tmp_path, WIDTHS)
    check(table, {0, 1})
    append(table, [2])
    check(FeatureTable(tmp_path, WIDTHS), {0, 1, 2})


def test_rows_stay_in_memory_when_the_disk_is_full(tmp_path: Path) -> None:
    errors: list[OSError] = []
    table = FeatureTable(tmp_path, WIDTHS, on_unwritable=errors.append)
    append(table, [0, 1, 2])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (90, hard))  # bytes of a file
    try:
        append(table, list(range(3, 9)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [error.strerror for error in errors] == ["File too large"]
    check(table, set(range(9)))
    append(table, [9, 1])
    table.keep_rows("k", np.array([9, 2]))
    other = FeatureTable(tmp_path, WIDTHS)
    check(other, {0, 1, 2})
    append(other, [11])
    check(table, set(range(10)))
    rows = table.rows_of("k", 2)
    assert rows is not None and rows.tolist() == [9, 2]
    check(FeatureTable(tmp_path, WIDTHS), {0, 1, 2, 11})


def test_row_numbers_are_stored_under_a_key(tmp_path: Path) -> None:
    table = FeatureTable(tmp_path, WIDTHS)
    append(table, [4, 5, 6])
    assert table.rows_of("k", 2) is None
    table.keep_rows("k", np.array([2, 0]))
    rows = FeatureTable(tmp_path, WIDTHS).rows_of("k", 2)
    assert rows is not None and rows.tolist() == [2, 0]
    assert table.rows_of("k", 3) is None  # the dataset has grown
    kept = (tmp_path / "rows" / "k.bin").read_bytes()
    (tmp_path / "rows" / "other.bin").write_bytes(kept)
    assert table.rows_of("other", 2) is None
    for numbers in ([0, 2], [2, 1], [0, -1], [2, 3]):
        (tmp_path / "rows" / "k.bin").write_bytes(kept[:16] + np.array(numbers).tobytes())
        assert table.rows_of("k", 2) is None
    for damaged in (b"", kept[:20], kept[:-1], kept + b"x", b"x" + kept[1:]):
        (tmp_path / "rows" / "k.bin").write_bytes(damaged)
        assert table.rows_of("k", 2) is None


def test_row_numbers_are_not_used_in_a_recreated_table(tmp_path: Path) -> None:
    table = FeatureTable(tmp_path, WIDTHS)
    append(table, [0, 1, 2])
    table.keep_rows("k", np.array([0, 1, 2]))
    (tmp_path / "projected.bin").unlink()
    table = FeatureTable(tmp_path, WIDTHS)
    append(table, [3, 4, 5])
    assert table.rows_of("k", 3) is None
    append(table, [0, 1, 2])
    assert table.rows_of("k", 3) is None


def test_columns_of_another_table_are_rejected(tmp_path: Path) -> None:
    for name in ("a", "b"):
        append(FeatureTable(tmp_path / name, WIDTHS), [0, 1, 2])
    for name in ("projected", "before_projection", "sums"):
        shutil.copyfile(tmp_path / "a" / f"{name}.bin", tmp_path / "b" / f"{name}.bin")
    with pytest.raises(DataError, match="are damaged: remove that folder"):
        FeatureTable(tmp_path / "b", WIDTHS).column("projected", np.arange(3))


@pytest.mark.parametrize("file", ["projected", "before_projection", "sums"])
def test_changed_files_are_never_read_as_features(tmp_path: Path, file: str) -> None:
    append(FeatureTable(tmp_path, WIDTHS), list(range(6)))
    path = tmp_path / f"{file}.bin"
    whole = path.read_bytes()
    for data in (bytes(len(whole)), b"\xff" * len(whole), random.randbytes(len(whole))):
        path.write_bytes(data)
        table = FeatureTable(tmp_path, WIDTHS)
        with pytest.raises(DataError, match="are damaged: remove that folder"):
            for name in WIDTHS:
                table.column(name, np.arange(6))
    path.write_bytes(whole)
    check(FeatureTable(tmp_path, WIDTHS), set(range(6)))


@pytest.mark.parametrize("gone", ["projected", "digests", "sums"])
def test_mapped_features_stay_valid_when_the_table_is_recreated(tmp_path: Path, gone: str) -> None:
    table = FeatureTable(tmp_path, WIDTHS)
    append(table, list(range(6)))
    mapped = {name: table.column(name, np.arange(6)) for name in WIDTHS}
    before = {name: values.clone() for name, values in mapped.items()}
    (tmp_path / f"{gone}.bin").unlink()
    append(FeatureTable(tmp_path, WIDTHS), [7])
    assert all(torch.equal(mapped[name], before[name]) for name in WIDTHS)


@pytest.mark.parametrize("gone", ["projected", "digests", "all"])
def test_table_removed_while_in_use_is_rejected(tmp_path: Path, gone: str) -> None:
    table = FeatureTable(tmp_path / "t", WIDTHS)
    append(table, list(range(6)))
    if gone == "all":
        shutil.rmtree(tmp_path / "t")
        FeatureTable(tmp_path / "t", WIDTHS)  # another process recreates the table
    else:
        (tmp_path / "t" / f"{gone}.bin").unlink()
    for use in (lambda: append(table, [7, 8]), lambda: table.column("projected", np.arange(6))):
        with pytest.raises(DataError, match="were removed while in use: run the command again"):
            use()
    again = FeatureTable(tmp_path / "t", WIDTHS)
    append(again, [7, 8])
    check(FeatureTable(tmp_path / "t", WIDTHS), {7, 8})
