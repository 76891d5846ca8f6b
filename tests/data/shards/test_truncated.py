"""Tests of truncated shards: with ``data.truncated=use`` exactly the samples of the intact part are used."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from clipkit.samples.index import index_shard, stored_index
from clipkit.samples.remote.cache import ShardCache
from clipkit.samples.remote.store import ShardFile
from clipkit.samples.tar import TruncatedError
from data.__main__ import main
from data.selection import Selection
from data.shards.manifest import Manifest, make_manifest
from data.shards.samples import Shards, find_shards
from tests.clipkit.samples.remote import servers

nginx, impatient = servers.nginx, servers.impatient
USE = Selection(truncated="use")
SAMPLES = 5


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "cache"))


def sample(number: int) -> dict[str, bytes]:
    return {"jpg": b"image %d " % number * 90, "txt": b"caption %d" % number, "json": b'{"n": %d}' % number}


def tar_and_ends() -> tuple[bytes, list[int]]:
    """Return a tar of samples with three members, and the end of each sample's data."""
    file, ends = io.BytesIO(), []
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number in range(SAMPLES):
            for extension, data in sample(number).items():
                member = tarfile.TarInfo(f"{number}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
                end = file.tell() - (-len(data) % 512)  # before the padding
            ends.append(end)
    return file.getvalue(), ends


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write three shards; the second is truncated in its third sample."""
    made = tmp_path / "pairs"
    made.mkdir()
    tar, ends = tar_and_ends()
    for number in range(3):
        (made / f"{number}.tar").write_bytes(tar if number != 1 else tar[: ends[1] + 700])
    return made


def test_complete_samples_before_any_cut_are_kept(tmp_path: Path) -> None:
    tar, ends = tar_and_ends()
    path = tmp_path / "0.tar"
    for cut in (*range(0, ends[-1] + 512, 512), *range(7, ends[-1], 509), *ends, *(end - 1 for end in ends)):
        path.write_bytes(tar[:cut])
        file = ShardFile.at(path)
        with pytest.raises(TruncatedError):
            index_shard(file)
        index = index_shard(file, truncated="use")
        whole = sum(end <= cut for end in ends)
        rows = [row for row in range(len(index)) if {"jpg", "txt", "json"} <= {*index.members(row)}]
        assert len(rows) == whole, cut
        assert len(index) == whole or (
            whole == 0 and len(index) == 1
        )  # the members of the first sample are not known yet
        assert [index.key(row) for row in rows] == [str(row) for row in range(whole)]
        assert "truncated" in index.truncated or "empty" in index.truncated
        assert stored_index(file) is None  # trainings that reject truncated shards must not use it
        stored = stored_index(file, truncated="use")
        assert stored is not None and (stored.digest, stored.truncated) == (index.digest, index.truncated)


def test_zeros_of_an_incomplete_download_count_as_truncation(tmp_path: Path) -> None:
    tar, ends = tar_and_ends()
    path = tmp_path / "0.tar"
    path.write_bytes(tar[: ends[1] + (-ends[1] % 512)].ljust(900 * 512, b"\0"))
    index = index_shard(ShardFile.at(path), truncated="use")
    assert len(index) == 2 and "seems incompletely downloaded" in index.truncated


def test_setting_does_not_change_complete_shards(folder: Path) -> None:
    (folder / "1.tar").unlink()
    sources = [find_shards(str(folder))]
    one, other = (make_manifest(sources, selection) for selection in (Selection(), USE))
    assert one.fingerprint == other.fingerprint and other.truncated == ()


def check(manifest: Manifest, cache: ShardCache | None = None) -> None:
    assert manifest.counts.tolist() == [SAMPLES, 2, SAMPLES]
    ((name, kept),) = manifest.truncated_shards()
    assert name.endswith("1.tar") and kept == 2
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again is not None and again.truncated == manifest.truncated
    shards = Shards(manifest, USE, cache=cache)
    read = [shards.read(number) for number in range(len(shards))]
    assert [one.key for one in read] == [*map(str, range(5)), "0", "1", *map(str, range(5))]
    for one in read:
        assert one.image == sample(int(one.key))["jpg"] and one.fields["txt"] == f"caption {one.key}"


def test_truncated_local_shard(folder: Path) -> None:
    sources = [find_shards(str(folder))]
    for _ in range(2):  # the second time from the cache
        check(make_manifest(sources, USE))
        with pytest.raises(TruncatedError):
            make_manifest(sources, Selection())


def test_truncated_shards_counted_by_several_processes(folder: Path) -> None:
    tar = (folder / "0.tar").read_bytes()
    for number in range(3, 9):
        (folder / f"{number}.tar").write_bytes(tar[: -512 * number * 3])
    sources = [find_shards(str(folder))]
    with pytest.raises(TruncatedError):
        make_manifest(sources, Selection())
    manifest = make_manifest(sources, USE)
    assert dict(manifest.truncated).keys() >= {1, 7, 8} and manifest.counts[1] == 2


def test_counts_stated_by_img2dataset_are_ignored(folder: Path) -> None:
    for number in range(3):
        (folder / f"{number}_stats.json").write_text('{"successes": 5}')
    check(make_manifest([find_shards(str(folder))], USE))


@pytest.mark.parametrize("cached", [True, False])
def test_truncated_remote_shard(cached: bool, folder: Path, nginx: servers.Nginx, tmp_path: Path) -> None:
    for shard in folder.iterdir():
        nginx.put(f"pairs/{shard.name}", shard.read_bytes())
    cache = ShardCache(tmp_path / "shards", 10**9) if cached else None
    check(make_manifest([find_shards(nginx.url("pairs"))], USE, cache=cache), cache)


def test_truncated_command_output(folder: Path, tmp_path: Path) -> None:
    sources = [find_shards(f"pipe:cat {folder}/{{0..2}}.tar")]
    cache = ShardCache(tmp_path / "shards", 10**9)
    manifest = make_manifest(sources, USE, cache=cache)
    check(manifest, cache)
    assert (
        stored_index(sources[0][1], truncated="use") is None
    )  # the index would not notice that the shard was repaired


def test_repaired_shard_is_reported_as_a_change(folder: Path) -> None:
    before = make_manifest([find_shards(str(folder))], USE)
    (folder / "1.tar").write_bytes((folder / "0.tar").read_bytes())
    size = (folder / "0.tar").stat().st_size
    (change,) = make_manifest([find_shards(str(folder))], USE).changes_since(before)
    assert change.startswith(f"1.tar has {size} bytes instead of ")


def test_index_command_with_truncated_shards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", "--quiet", "--truncated", "use", str(folder)]) == 0
    assert f"truncated   {folder}/1.tar: 2 samples kept" in capsys.readouterr().out
    path = folder / "1.tar"
    assert stored_index(ShardFile.at(path), truncated="use") is not None
    os.truncate(path, 100)
    with pytest.raises(Exception, match="--truncated use"):
        main(["index", "--quiet", str(folder)])
