"""Tests of feature files: rows that were not written, or were damaged, are never read as features."""

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
from safetensors.torch import load_file

from eval.features.store import FeatureFile, TextFeatures, digest_content

WIDTHS = {"projected": 3, "before_projection": 5}
COUNT = 12


def write(file: FeatureFile, numbers: list[int]) -> None:
    """Write rows that are unique to their numbers."""
    columns = {
        name: 1000.0 * torch.tensor(numbers)[:, None] + torch.arange(width) for name, width in WIDTHS.items()
    }
    digests = [digest_content(b"%d" % number) for number in numbers]
    file.write(np.array(numbers, dtype=np.int64), digests, columns)


def check(file: FeatureFile, numbers: set[int]) -> None:
    """Check that the file has these rows, each with its own features."""
    assert set(file.intact().nonzero()[0].tolist()) == numbers
    for number in numbers:
        assert file.digests[number].tobytes() == digest_content(b"%d" % number)
        for name, width in WIDTHS.items():
            assert torch.equal(file.columns[name][number], 1000.0 * number + torch.arange(width))


def create(path: Path | None) -> FeatureFile:
    return FeatureFile(path, WIDTHS, COUNT, key="k", create=True)


@given(pieces=st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, COUNT - 1))), max_size=6))
@pytest.mark.parametrize("on_disk", [True, False])
def test_rows_are_those_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[bool, set[int]]], on_disk: bool
) -> None:
    path = tmp_path_factory.mktemp("features") / "f.safetensors" if on_disk else None
    file, every = create(path), set[int]()
    for reopen, numbers in pieces:
        if reopen and on_disk:
            file = create(path)  # goes on with the same file
        write(file, sorted(numbers))
        every |= numbers
    check(file, every)
    if path is not None:
        check(FeatureFile(path, WIDTHS, COUNT, key="k"), every)
        assert not FeatureFile(path, WIDTHS, COUNT, key="other").intact().any()
        loaded = load_file(path)
        assert all(torch.equal(loaded[name], file.columns[name]) for name in WIDTHS)


def test_changes_to_mapped_rows_do_not_reach_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    write(create(path), list(range(COUNT)))
    FeatureFile(path, WIDTHS, COUNT, key="k").columns["projected"].fill_(7)
    check(FeatureFile(path, WIDTHS, COUNT, key="k"), set(range(COUNT)))


def test_files_with_another_layout_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    write(create(path), [1])
    for widths, count in (({"projected": 3}, COUNT), (WIDTHS, COUNT + 1), (WIDTHS, COUNT - 1)):
        with pytest.raises(OSError, match="incomplete"):
            FeatureFile(path, widths, count, key="k")
    mapped = FeatureFile(path, WIDTHS, COUNT, key="k")
    with path.open("ab") as opened:
        opened.write(b"x")
    check(create(path), set())
    check(mapped, {1})  # of the replaced file
    (tmp_path / "empty.safetensors").write_bytes(b"")
    write(create(tmp_path / "empty.safetensors"), [2])
    assert len(FeatureFile(None, WIDTHS, 0)) == 0
    assert create(tmp_path / "empty.safetensors").intact().tolist().count(True) == 1


@given(place=st.integers(0, 1 << 12), bit=st.integers(0, 7))
def test_a_flipped_bit_is_never_read_as_a_feature(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("features") / "f.safetensors"
    write(create(path), list(range(COUNT)))
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << bit
    path.write_bytes(content)
    file = create(path)
    intact = set(file.intact().nonzero()[0].tolist())
    assert intact < set(range(COUNT))
    check(file, intact)


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_store import COUNT, create, write
file = create(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    for number in range(COUNT // 2):
        write(file, [number])
"""


def test_killed_writers_leave_a_valid_file(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    arguments = [str(path), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(random.uniform(0.1, 0.4))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    file = create(path)
    stored = set(file.intact().nonzero()[0].tolist())
    assert stored
    check(file, stored)
    write(file, list(range(COUNT)))
    check(FeatureFile(path, WIDTHS, COUNT, key="k"), set(range(COUNT)))


def test_full_disk_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (90, hard))  # bytes of a file
    errors: list[OSError] = []
    try:
        with pytest.raises(OSError, match="File too large"):
            create(tmp_path / "f.safetensors")
        texts = TextFeatures(tmp_path / "texts", 3, key="k", on_unwritable=errors.append)
        texts.append([digest_content(b"a")], torch.ones(1, 3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [error.strerror for error in errors] == ["File too large"]
    features, stored = texts.read([digest_content(b"a"), digest_content(b"b")])
    assert stored.tolist() == [True, False] and torch.equal(features[0], torch.ones(3))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def open_texts(folder: Path) -> TextFeatures:
    return TextFeatures(folder, 2, key="k", on_unwritable=lambda error: pytest.fail(str(error)))


def test_texts_are_found_in_all_files(tmp_path: Path) -> None:
    digests = [digest_content(b"%d" % number) for number in range(6)]
    expected = torch.arange(12.0).view(6, 2)
    texts = open_texts(tmp_path)
    texts.append(digests[:4], expected[:4])
    texts.append(digests[4:], expected[4:])
    for table in (texts, open_texts(tmp_path)):
        features, stored = table.read([*digests[::-1], digest_content(b"other")])
        assert stored.tolist() == [True] * 6 + [False]
        assert torch.equal(features[:6], expected.flip(0))
    first, second = sorted(tmp_path.iterdir())
    third = second.read_bytes()
    second.write_bytes(first.read_bytes())  # has other texts now
    shutil.copyfile(first, tmp_path / "name.safetensors")
    for table in (texts, open_texts(tmp_path)):
        features, stored = table.read(digests)
        assert 0 < stored.sum() < 6
        assert torch.equal(features[torch.from_numpy(stored)], expected[torch.from_numpy(stored)])
    second.write_bytes(third)
    first.unlink()
    assert 0 < texts.read(digests)[1].sum() < 6
