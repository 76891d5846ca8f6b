"""Tests of the end of a shard: padding written by tar programs, and incomplete downloads."""

import io
import random
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipkit.errors import DataError
from clipkit.samples.index import ShardIndex, index_shard as index_file
from clipkit.samples.remote.store import ShardFile

MANY = [
    (f"{number}.{kind}", random.Random(number).randbytes(1500))
    for number in range(64)
    for kind in ("jpg", "txt")
]
PAIRS = MANY[:6]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the indexes of temporary shards out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def index_shard(path: Path) -> ShardIndex:
    return index_file(ShardFile.at(path))


def tar_of(members: list[tuple[str, bytes]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


@pytest.mark.parametrize("at", [0.5, 0.1, 0.93])
def test_shard_with_zeros_of_an_incomplete_download_is_rejected(at: float, tmp_path: Path) -> None:
    tar = tar_of(MANY)
    path = tmp_path / "0.tar"
    rest = int(len(tar) * (1 - at))
    path.write_bytes(tar[:-rest] + bytes(rest))
    with pytest.raises(
        DataError, match=rf"seems incompletely downloaded: zeros from byte \d+ to {len(tar)} of"
    ):
        index_shard(path)
    path.write_bytes(
        tar[:-rest] + bytes(rest - 12_000) + tar[-12_000:]
    )  # zeros in the middle, with an intact end
    with pytest.raises(DataError, match="seems incompletely downloaded: zeros from byte"):
        index_shard(path)
    path.write_bytes(tar + bytes(3 << 20))
    with pytest.raises(DataError, match="seems incompletely downloaded: zeros from byte"):
        index_shard(path)
    path.write_bytes(bytes(1 << 22))
    with pytest.raises(DataError, match="seems incompletely downloaded: zeros from byte 0 to"):
        index_shard(path)


@pytest.mark.parametrize("padded", [True, False])
def test_concatenated_archives_are_rejected(padded: bool, tmp_path: Path) -> None:
    first, second = tar_of(PAIRS), tar_of(MANY)
    if not padded:
        first = first.rstrip(b"\0")
        first += bytes(-len(first) % 512 + 1024)
    path = tmp_path / "0.tar"
    path.write_bytes(first + second)
    with pytest.raises(DataError, match=f"more than one archive, the second starts at byte {len(first)}"):
        index_shard(path)
    path.write_bytes(second + b"junk")
    with pytest.raises(DataError, match="seems incompletely downloaded"):
        index_shard(path)


@pytest.mark.parametrize("records", [(), ("-b", "1"), ("-b", "64"), ("-b", "2048")])
@pytest.mark.parametrize("program", ["tar", "bsdtar"])
@pytest.mark.parametrize("count", [1, 17, 64])
def test_padding_of_tar_programs_is_accepted(
    program: str, records: tuple[str, ...], count: int, tmp_path: Path
) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    for name, data in MANY[: 2 * count]:
        (tmp_path / name).write_bytes(data)
    path = tmp_path / "0.tar"
    files = [name for name, _ in MANY[: 2 * count]]
    for to in ("file", "pipe"):  # some programs pad the last record only in a pipe
        with path.open("wb") as out:
            command = [program, *records, "-cf", str(path) if to == "file" else "-", *files]
            subprocess.run(
                command, cwd=tmp_path, check=True, stdout=None if to == "file" else out, timeout=60
            )
        assert len(index_shard(path)) == count
