"""Tests of reading samples from a list of shards."""

import json
import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import webdataset

from clipkit.errors import DataError
from clipkit.samples import ShardSamples, shards as shards_module
from clipkit.samples.remote.store import ShardFile
from data.shards.samples import Sample, Shards, find_shards
from data.shards.writer import DatasetWriter, Record


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the indexes of temporary shards out of the user's cache."""
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))


def record(number: int) -> Record:
    return Record(
        key=f"part/{number:06d}",
        image=b"image %d " % number * (1 + number % 5),
        extension=("png", "jpg", "webp")[number % 3],
        caption=f"caption {number} ü",
        label=number % 7 if number % 2 else None,
        meta={"number": number} if number % 3 else {},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a dataset folder of 23 samples in 12 shards."""
    with DatasetWriter(tmp_path / "set", samples_per_shard=2) as writer:
        for number in range(23):
            writer.write("train", record(number))
        writer.finish({})
    return tmp_path / "set"


def write_tar(path: Path, *samples: dict[str, Any]) -> Path:
    with webdataset.TarWriter(str(path), encoder=False) as tar:
        for sample in samples:
            tar.write(sample)
    return path


def shards_of(*paths: Path) -> Shards:
    """Open local shards."""
    return Shards.of([ShardFile.at(path) for path in paths])


def samples_of(*paths: Path) -> ShardSamples:
    """Open all samples of local shards."""
    return ShardSamples([ShardFile.at(path) for path in paths])


def paths_of(source: str, split: str = "train") -> list[Path]:
    """Return the paths of a source's shards."""
    return [Path(shard.url) for shard in find_shards(source, split=split)]


def test_samples_round_trip(folder: Path) -> None:
    paths = paths_of(str(folder))
    assert [path.name for path in paths] == [
        f"{number}.tar" for number in range(12)
    ]  # numeric order: 10 after 9
    shards, samples = shards_of(*paths), samples_of(*paths)
    assert len(shards) == len(samples) == 23
    assert shards.counts.tolist() == [2] * 11 + [1]
    for number in range(23):
        wrote, shard = record(number), str(paths[number // 2])
        assert shards.locate(number) == samples.locate(number) == (shard, wrote.key)
        assert shards.read(number) == Sample(
            shard=shard, key=wrote.key, image=wrote.image, fields={"txt": wrote.caption}, caption_number=0
        )
        members = wrote.members()
        assert samples.key(number) == members.pop("__key__")
        assert {name: samples.read(number, name) for name in samples.members(number)} == members
        assert samples.read(number, "") == wrote.image
        assert samples.fields(number) == wrote.meta
    for number in (-1, 23):
        with pytest.raises(IndexError):
            shards.read(number)
        with pytest.raises(IndexError):
            samples.read(number, "")


def test_only_samples_with_the_needed_members_count(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "0.tar",
        {"__key__": "a", "jpg": b"A", "txt": b"text"},
        {"__key__": "b", "jpg": b"B", "cls": b" 12\n"},
        {"__key__": "c", "jpg": b"C", "json": b'{"caption": "from json", "x": 1}'},
        {"__key__": "d", "txt": b"no image"},
        {"__key__": "e", "jpg": b"E", "txt": b"text", "json": b'{"caption": "not this"}', "cls": b"0"},
    )
    pairs = shards_of(path)
    assert [pairs.read(number).key for number in range(len(pairs))] == ["a", "c", "e"]
    captions = [pairs.selection.captions.caption(pairs.read(number).fields, 0, None) for number in range(3)]
    assert captions == ["text", "from json", "text"]
    assert pairs.manifest.dropped == {"without image": 1, "without caption": 1}
    samples = samples_of(path)
    assert [samples.key(i) for i in range(len(samples))] == ["a", "b", "c", "d", "e"]
    with pytest.raises(DataError, match=r"^no image, only txt$"):
        samples.read(3, "")
    with pytest.raises(DataError, match=r"^no cls, only jpg, txt$"):
        samples.read(0, "cls")


@pytest.mark.parametrize("json", [b"{", b"[" * 200_000, b"1" * 5000, b"\xff{}"])
def test_invalid_json_is_an_error_only_if_it_is_needed(json: bytes, tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "0.tar",
        {"__key__": "a", "jpg": b"A", "txt": b"text", "json": json},
        {"__key__": "b", "jpg": b"B", "json": json},
    )
    shards, samples = shards_of(path), samples_of(path)
    assert shards.read(0)[2:4] == (b"A", {"txt": "text"})
    assert samples.read(0, "json") == json
    for read in (lambda: shards.read(1), lambda: samples.fields(0)):
        with pytest.raises(DataError, match=r"^its json does not parse"):
            read()


def test_invalid_utf8_and_json_lists_are_read(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "0.tar", {"__key__": "a", "jpg": b"A", "txt": b"caf\xe9", "json": b"[1]"})
    assert shards_of(path).read(0).fields == {"txt": "caf\udce9"}  # a bad sample in training
    assert samples_of(path).fields(0) == {}


def test_member_over_the_size_limit_raises_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "_LIMITS", {"json": 20})
    monkeypatch.setattr(shards_module, "_LIMIT", 20)
    shards = Shards.of(find_shards(str(folder)))
    assert shards.read(0).key == "part/000000"
    with pytest.raises(DataError, match="over the limit"):
        shards.read(4)


def test_shard_changed_after_indexing_raises_error(folder: Path) -> None:
    shards = Shards.of(find_shards(str(folder)))
    os.truncate(folder / "train" / "3.tar", 700)
    with pytest.raises(DataError, match=r"shorter|is truncated"):
        shards.read(6)
    (folder / "train" / "4.tar").unlink()
    with pytest.raises(DataError, match="No such file"):
        shards.read(8)
    (folder / "train" / "4.tar").mkdir()
    with pytest.raises(DataError, match="not a regular file"):
        shards.read(8)


def read_all(shards: Shards, answer: Connection) -> None:
    samples = [shards.read(number) for number in range(len(shards))]
    answer.send((samples, [file._descriptor for file in shards._open.values()], shards._open_in))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_process_opens_its_own_files(method: Any, folder: Path) -> None:
    shards = Shards.of(find_shards(str(folder)))
    here = [shards.read(number) for number in range(23)]
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe()
    process = context.Process(target=read_all, args=(shards, sender))
    process.start()
    assert receiver.poll(60)
    there, descriptors, owner = receiver.recv()
    process.join()
    assert there == here
    assert owner == process.pid and len(set(descriptors)) == 12
    assert shards._open_in == os.getpid()
    assert [shards.read(number) for number in range(23)] == here


def open_files() -> set[str]:
    names = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            names.add(str(link.readlink()))
        except FileNotFoundError:
            continue
    return names


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Write a folder of 100 shards of one sample."""
    with DatasetWriter(tmp_path / "many", samples_per_shard=1) as writer:
        for number in range(100):
            writer.write("train", record(number))
        writer.finish({})
    return tmp_path / "many"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="lists open files by /proc")
def test_number_of_open_files_is_limited(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "_MAX_OPEN", 64)
    shards = Shards.of(find_shards(str(many)))
    for _ in range(2):
        for number in range(100):
            assert shards.read(number).image == record(number).image
    names = [f"{many}/train/{number}.tar" for number in range(36, 100)]
    assert {name for name in open_files() if name.startswith(str(many))} == set(names)
    shards.read(36)
    shards.read(0)  # replaces 37, the least recently used
    opened = open_files()
    assert names[0] in opened and names[1] not in opened
    del shards
    assert not [name for name in open_files() if name.startswith(str(many))]


def test_threads_read_while_others_close_files(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "_MAX_OPEN", 2)
    shards = Shards.of(find_shards(str(many)))
    expected = [record(number).image for number in range(100)]
    wrong: list[object] = []

    def read(first: int) -> None:
        for turn in range(600):
            number = (first * 13 + turn * 7) % 100
            try:
                if shards.read(number).image != expected[number]:
                    wrong.append(number)
            except (DataError, OSError, KeyError) as error:
                wrong.append(error)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_fingerprint_depends_on_samples_not_on_the_folder(folder: Path, tmp_path: Path) -> None:
    first = Shards.of(find_shards(str(folder))).fingerprint()
    assert len(first) == 16 and int(first, 16) >= 0
    moved = folder.rename(tmp_path / "elsewhere")
    paths = paths_of(str(moved))
    assert shards_of(*paths).fingerprint() == first
    seen = {
        first,
        shards_of(*paths[::-1]).fingerprint(),
        shards_of(*paths[:-1]).fingerprint(),
    }
    paths[0].rename(paths[0].with_name("00.tar"))
    seen.add(shards_of(paths[0].with_name("00.tar"), *paths[1:]).fingerprint())
    for image, key in ((b"A", "a"), (b"AA", "a"), (b"A", "b")):
        sample = {"__key__": key, "jpg": image, "txt": b"text"}
        seen.add(shards_of(write_tar(tmp_path / "one.tar", sample)).fingerprint())
    assert len(seen) == 7


def test_error_without_pairs_lists_extensions(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "0.tar",
        *({"__key__": f"{number}", "npy": b"x", "caption": b"text"} for number in range(3)),
        {"__key__": "last", "jpg": b"x"},
    )
    with pytest.raises(DataError) as caught:
        shards_of(path)
    assert str(caught.value) == (
        f"shard {path} has no sample with image and caption; members: caption (3), npy (3), jpg (1): "
        "set data.captions=caption (training) or --captions caption (commands)"
    )
    with pytest.raises(DataError, match="no sample with image and caption; members: none"):
        shards_of(write_tar(tmp_path / "1.tar"))
    with pytest.raises(DataError, match="no shards"):
        Shards.of([])


def test_folder_name_that_is_not_utf8(folder: Path) -> None:
    moved = folder.rename(os.fsdecode(os.fsencode(folder) + b"\xff"))
    shards = Shards.of(find_shards(str(moved)))
    assert len(shards) == 23 and shards.read(3).fields["txt"] == "caption 3 ü"
    assert len(shards.fingerprint()) == 16


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_open() -> Iterator[None]:
    """Check that no file stays open after the list of shards is deleted."""
    if not Path("/proc/self/fd").is_dir():
        yield
        return
    before = set(open_files())  # objects of other modules' tests may not be collected yet
    yield
    assert [name for name in open_files() if name.endswith(".tar") and name not in before] == []


def test_meta_round_trips_through_json(tmp_path: Path) -> None:
    meta = {"nested": {"list": [1, 2.5, None, "ü"]}}
    sample = {"__key__": "a", "jpg": b"A", "txt": b"t", "json": json.dumps(meta).encode()}
    assert samples_of(write_tar(tmp_path / "0.tar", sample)).fields(0) == meta
