"""Tests of the index of a shard, compared with tarfile and with webdataset's reader."""

import bz2
import gzip
import io
import lzma
import os
import random
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given, settings, strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

from clipkit.errors import DataError
from clipkit.samples import index
from clipkit.samples.index import ShardIndex, index_shard as index_file, keep_index, stored_index
from clipkit.samples.remote.cache import ShardCache, cache_folder
from clipkit.samples.remote.store import ShardFile
from clipkit.samples.shards import ShardSamples

FORMATS = {"gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "ustar": tarfile.USTAR_FORMAT}
Members = dict[str, bytes]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the indexes of temporary shards out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def tar_of(members: list[tuple[str, bytes]], form: int = tarfile.GNU_FORMAT) -> bytes:
    """Return a tar of these files; a name with a trailing slash becomes a folder."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            if name.endswith("/"):
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            else:
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def index_shard(path: Path) -> ShardIndex:
    """Index a local file."""
    return index_file(ShardFile.at(path))


def spans_of(found: ShardIndex) -> list[dict[str, tuple[int, int]]]:
    """Return the spans of each sample's members."""
    return [
        {name: found.spans(found.find_layout(row), [name])[0] for name in found.members(row)}
        for row in range(len(found))
    ]


def keys_of(found: ShardIndex) -> list[str]:
    """Return the keys of all samples."""
    return [found.key(row) for row in range(len(found))]


def samples_of(found: ShardIndex, tar: bytes) -> list[tuple[str, Members]]:
    """Return the key and members of all samples."""
    return [
        (key, {name: tar[span[0] : sum(span)] for name, span in spans.items()})
        for key, spans in zip(keys_of(found), spans_of(found), strict=True)
    ]


def grouped(members: list[tuple[str, bytes]]) -> tuple[list[tuple[str, Members]], Counter[str]]:
    """Group the members of a tar by the WebDataset rule, as a reference."""
    samples: list[tuple[str, Members]] = []
    extensions: Counter[str] = Counter()
    for name, data in members:
        folder, slash, file_name = name.rpartition("/")
        if "." not in file_name[:-1] or file_name.startswith("."):
            continue
        stem, extension = file_name.split(".", 1)
        extensions[extension.lower()] += 1
        if not samples or samples[-1][0] != folder + slash + stem:
            samples.append((folder + slash + stem, {}))
        samples[-1][1].setdefault(extension.lower(), data)
    return samples, extensions


names = st.builds(
    "{}{}{}".format,
    st.sampled_from(["", "a/", "a.b/c/", "ünïcode/", "./", "d" * 60 + "/" + "e" * 50 + "/"]),
    st.sampled_from(["0", "1", "cat", "日本語", "été", "long" * 20, "", " x "]),
    st.sampled_from([".jpg", ".PNG", ".txt", ".cls", ".json", ".Json", ".seg.png", ".npy", "", ".", ".webp"]),
)
members = st.lists(st.tuples(names, st.binary(max_size=1100)), max_size=12)


@given(
    st.lists(
        st.lists(st.sampled_from(["jpg", "txt", "json"]), min_size=1, max_size=3, unique=True), max_size=4
    ),
    st.integers(1, 3),
)
def test_samples_have_their_own_members(kinds: list[list[str]], repeated: int) -> None:
    """Also if all samples have the same number of members, or the same members."""
    samples = kinds * repeated
    tar = [(f"{i}.{name}", 512 * i, j) for i, kind in enumerate(samples) for j, name in enumerate(kind)]
    found = index.index_members("0.tar", tar)
    for row, kind in enumerate(samples):
        assert found.members(row) == tuple(kind)
        spans = found.spans(found.find_layout(row), kind)
        assert spans == [(512 * row, size) for size in range(len(kind))]


@settings(deadline=None, max_examples=60)
@given(members=members, folders=st.booleans(), form=st.sampled_from(sorted(FORMATS)))
def test_index_equals_tarfile(
    members: list[tuple[str, bytes]], folders: bool, form: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    members = [(name, data) for name, data in members if name and not name.endswith("/")]
    if folders:
        members = [pair for member in members for pair in (("folder.jpg/", b""), member)]
    tar = tar_of(members, FORMATS[form])
    path = tmp_path_factory.mktemp("shard") / "0.tar"
    path.write_bytes(tar)
    with tarfile.open(path) as opened:
        files = [member for member in opened.getmembers() if member.isreg()]
        seen = [(member.name, opened.extractfile(member).read()) for member in files]  # type: ignore[union-attr]
    assert len(seen) == len([name for name, _ in members if not name.endswith("/")])
    found = index_shard(path)
    samples, extensions = grouped(seen)
    assert samples_of(found, tar) == samples
    assert found.names == extensions
    for some in (["jpg"], ["png", "json"], ["npy", "seg.png", "none"]):
        assert found.has_any(some).tolist() == [not parts.keys().isdisjoint(some) for _, parts in samples]
    assert samples_of(index_shard(path), tar) == samples  # from the cache


@pytest.mark.parametrize("form", FORMATS)
def test_names_longer_than_100_characters(form: str, tmp_path: Path) -> None:
    folder = "f" * 70 + "/" + "g" * 70 + "/"
    expected = [(f"{folder}{i}é", {"jpg": b"image %d" % i, "txt": b"text %d" % i}) for i in range(3)]
    members = [
        pair for key, at in expected for pair in ((f"{key}.jpg", at["jpg"]), (f"{key}.txt", at["txt"]))
    ]
    tar = tar_of(members, FORMATS[form])
    path = tmp_path / "0.tar"
    path.write_bytes(tar)
    assert samples_of(index_shard(path), tar) == expected


def test_index_equals_webdataset_reader(tmp_path: Path) -> None:
    rng = random.Random(0)
    with webdataset.ShardWriter(str(tmp_path / "%02d.tar"), maxcount=7, verbose=0) as writer:
        for number in range(20):
            sample: dict[str, Any] = {
                "__key__": f"part.{number // 5}/{number:05d}",
                "jpg": rng.randbytes(300),
            }
            sample |= {"txt": f"caption ü {number}", "cls": number, "extra.npy": rng.randbytes(10)}
            writer.write(sample | ({"json": {"n": number}} if number % 2 else {}))
    paths = sorted(tmp_path.glob("*.tar"))
    assert len(paths) == 3
    theirs = []
    for path in paths:
        with path.open("rb") as stream:
            files = tar_file_expander([{"url": path.name, "stream": stream}])
            theirs += [
                (
                    sample["__key__"],
                    {name: data for name, data in sample.items() if not name.startswith("__")},
                )
                for sample in group_by_keys(files)
            ]
    ours = [pair for path in paths for pair in samples_of(index_shard(path), path.read_bytes())]
    assert ours == theirs
    assert len(ours) == 20


PAIRS = [pair for i in range(3) for pair in ((f"{i}.jpg", b"picture" * 100), (f"{i}.txt", b"text"))]


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_truncated_shard_is_rejected_at_any_length(form: str, tmp_path: Path) -> None:
    tar = tar_of([(f"{'deep/' * 30}{name}", data) for name, data in PAIRS], FORMATS[form])
    whole = len(tar.rstrip(b"\0"))
    last_data = -(-whole // 512) * 512
    cuts = {*range(0, last_data + 1, 512), *range(7, last_data, 509), last_data - 1, last_data + 511}
    path = tmp_path / "0.tar"
    for cut in sorted(cuts):
        path.write_bytes(tar[:cut])
        with pytest.raises(DataError, match=r"truncated|is empty"):
            index_shard(path)
    path.write_bytes(tar[: last_data + 512])  # one block of zeros ends an archive
    assert len(index_shard(path)) == 3


def with_header(change: Callable[[bytearray], None]) -> bytes:
    """Return a tar with a changed second header and a correct checksum."""
    tar = bytearray(tar_of(PAIRS))
    header = tar[1536:2048]
    assert header[:5] == b"0.txt"
    change(header)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    tar[1536:2048] = header
    return bytes(tar)


BAD_SIZES = {
    "negative octal": b"-0000003000\0",
    "signed": b"+0000003000\0",
    "underscore": b"1_0\0" + bytes(8),
    "prefix": b"0o7\0" + bytes(8),
    "nine": b"00000000009\0",
    "letters": b"abcdefghijk\0",
    "huge octal": b"777777777777",
    "huge binary": b"\x80" + b"\xff" * 11,
    "negative binary": b"\xff" * 11 + b"\x00",
    "other binary": b"\x81" + bytes(11),
}


@pytest.mark.parametrize("name", BAD_SIZES)
def test_invalid_size_field_raises_error(name: str, tmp_path: Path) -> None:
    def change(header: bytearray) -> None:
        header[124:136] = BAD_SIZES[name]

    path = tmp_path / "0.tar"
    path.write_bytes(with_header(change))
    with pytest.raises(DataError, match=r"byte 1536"):
        index_shard(path)


def test_base_256_size_is_read(tmp_path: Path) -> None:
    def change(header: bytearray) -> None:
        header[124:136] = b"\x80" + (4).to_bytes(11, "big")

    tar = with_header(change)
    path = tmp_path / "0.tar"
    path.write_bytes(tar)
    assert samples_of(index_shard(path), tar)[0] == ("0", {"jpg": b"picture" * 100, "txt": b"text"})


def test_link_has_no_data_despite_its_size_field(tmp_path: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in PAIRS:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
            link = tarfile.TarInfo("link.jpg")
            link.type, link.linkname, link.size = tarfile.LNKTYPE, name, 5000
            tar.addfile(link)
    path = tmp_path / "0.tar"
    path.write_bytes(file.getvalue())
    assert samples_of(index_shard(path), file.getvalue()) == grouped(PAIRS)[0]


@pytest.mark.parametrize("stated", ["9" * 5000, "-512", "１００", "4"])
def test_size_in_pax_header_is_read_or_rejected(stated: str, tmp_path: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("0.txt")
        info.size, info.pax_headers = 4, {"size": stated}
        tar.addfile(info, io.BytesIO(b"text"))
    path = tmp_path / "0.tar"
    path.write_bytes(file.getvalue())
    try:
        assert samples_of(index_shard(path), file.getvalue()) == [("0", {"txt": b"text"})]
    except DataError:
        assert stated != "4"


def test_sparse_files_and_overlong_names_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    for headers, name, match in (
        ({"GNU.sparse.major": "1"}, "0.jpg", "sparse"),
        ({}, "n" * 5000 + ".jpg", "5004 characters"),
        ({"comment": "x" * (1 << 20)}, "0.jpg", "bytes at byte 0"),
    ):
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
            info = tarfile.TarInfo(name)
            info.pax_headers = headers
            tar.addfile(info)
        with pytest.raises(DataError, match=match):
            index_shard(path)


def test_many_short_pax_records_are_read_quickly(tmp_path: Path) -> None:
    records = b"5 a=\n" * 200_000
    tar = bytearray(tar_of([("header", records), ("0.jpg", b"image")]))
    tar[156:157] = b"x"
    tar[148:156] = b" " * 8
    tar[148:156] = b"%06o\0 " % sum(tar[:512])
    path = tmp_path / "0.tar"
    path.write_bytes(tar)
    assert samples_of(index_shard(path), bytes(tar)) == [("0", {"jpg": b"image"})]


def test_names_that_are_not_utf8_remain_distinct(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        for name in ("é.jpg", "è.jpg"):
            tar.addfile(tarfile.TarInfo(name))
    keys = keys_of(index_shard(path))
    assert len(set(keys)) == 2
    assert all(key.isascii() for key in keys)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_damaged_headers_only_raise_data_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tar = bytearray(tar_of(PAIRS, FORMATS[data.draw(st.sampled_from(sorted(FORMATS)))]))
    for _ in range(data.draw(st.integers(1, 4))):
        start = 512 * data.draw(st.sampled_from([0, 3, 5, 8])) + data.draw(st.integers(0, 511))
        new = data.draw(st.binary(min_size=1, max_size=16))
        tar[start : start + len(new)] = new
    for start in (0, 1536, 2560):  # valid checksums, so that other fields are tested too
        tar[start + 148 : start + 156] = b" " * 8
        tar[start + 148 : start + 156] = b"%06o\0 " % sum(tar[start : start + 512])
    check_damaged(bytes(tar), tmp_path_factory)


@settings(deadline=None, max_examples=100)
@given(tar=st.binary(min_size=0, max_size=3000))
def test_random_bytes_only_raise_data_error(tar: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_damaged(tar, tmp_path_factory)


def check_damaged(tar: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("damaged") / "0.tar"
    path.write_bytes(tar)
    try:
        found = index_shard(path)
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert all(sum(span) <= len(tar) for spans in spans_of(found) for span in spans.values())


@pytest.mark.parametrize("compressor", [gzip, bz2, lzma])
def test_compressed_shard_is_reported(compressor: Any, tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(compressor.compress(tar_of(PAIRS)))
    with pytest.raises(DataError, match="compressed"):
        index_shard(path)


def test_files_that_are_not_shards_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    with pytest.raises(DataError, match="No such file"):
        index_shard(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        index_shard(path)
    path.write_bytes(b"<!DOCTYPE html>" + b" " * 1000)
    with pytest.raises(DataError, match="is not a tar file"):
        index_shard(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match="not a regular file"):
        index_shard(path)
    path.rmdir()
    os.mkfifo(path)  # opening it would block forever
    with pytest.raises(DataError, match="not a regular file"):
        index_shard(path)


def test_empty_archive_has_no_samples(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(bytes(1024))
    found = index_shard(path)
    assert len(found) == 0 and len(found.member_blocks) == len(found.member_ends) == 0


def test_stored_index_is_used_until_the_shard_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(tar_of(PAIRS))
    first = index_shard(path)
    with monkeypatch.context() as patch:
        patch.setattr(index, "list_tar_files", lambda path: pytest.fail("scanned again"))
        assert keys_of(index_shard(path)) == keys_of(first)
    changed = tar_of([("9.jpg", b"new"), ("9.txt", b"text")])
    path.write_bytes(changed)
    assert samples_of(index_shard(path), changed) == [("9", {"jpg": b"new", "txt": b"text"})]
    status = path.stat()
    other = changed.replace(b"9.", b"8.").replace(b"new", b"old")
    path.write_bytes(
        tar_of([("8.jpg", b"old"), ("8.txt", b"text")])
    )  # the same size, another modification time
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert len(other) == status.st_size
    assert keys_of(index_shard(path)) == ["8"]


def test_damaged_stored_index_is_rebuilt(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(tar_of(PAIRS))
    first = index_shard(path)
    (stored,) = (cache_folder() / "index").glob("*/*.index")
    whole = stored.read_bytes()
    rng = random.Random(1)
    damaged = [b"", whole[:100], whole[:-30], b"nonsense"]
    for _ in range(200):
        bent = bytearray(whole)
        bent[rng.randrange(len(bent))] ^= 1 << rng.randrange(8)
        damaged.append(bytes(bent))
    for content in damaged:
        stored.write_bytes(content)
        again = index_shard(path)
        assert keys_of(again) == keys_of(first)
        assert spans_of(again) == spans_of(first)


def test_pickles_in_the_cache_are_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(tar_of(PAIRS))
    first = index_shard(path)
    (stored,) = (cache_folder() / "index").glob("*/*.index")
    evil = {name: np.array([pytest.fail], dtype=object) for name in ("blocks", "sizes", "key_ends")}
    with stored.open("wb") as file:
        np.savez(file, **evil)  # type: ignore[arg-type]
    assert keys_of(index_shard(path)) == keys_of(first)


def test_unwritable_cache_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(tar_of(PAIRS))
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "file" / "cache"))
    assert len(index_shard(path)) == len(index_shard(path)) == 3


def test_path_that_is_not_utf8_is_indexed(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.tar"))
    path.write_bytes(tar_of(PAIRS))
    assert len(index_shard(path)) == len(index_shard(path)) == 3


@pytest.mark.parametrize("version", ["", "etag"])
def test_urls_that_differ_only_in_their_query_have_their_own_index(tmp_path: Path, version: str) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(tar_of(PAIRS))
    first, second = (
        ShardFile(
            url=f"https://host/get?token=s1gn4ture&file={name}.tar", size=path.stat().st_size, version=version
        )
        for name in "ab"
    )
    keep_index(first, index_shard(path))
    assert stored_index(first) is not None and stored_index(second) is None
    for file in cache_folder().rglob("*"):
        assert "s1gn4ture" not in str(file)
        assert file.is_dir() or b"s1gn4ture" not in file.read_bytes()


def read_texts(command: str, cache: ShardCache) -> list[tuple[str, bytes]]:
    samples = ShardSamples([ShardFile(url=f"pipe:{command}", size=-1, version="")], cache)
    return [(samples.key(i), samples.read(i, "txt")) for i in range(len(samples))]


def test_index_of_a_pipe_belongs_to_its_output(tmp_path: Path) -> None:
    expected = {}
    for folder, count in (("a", 2), ("b", 3)):
        (tmp_path / folder).mkdir()
        expected[folder] = [(f"{folder}{i}", f"text {i} of {folder}".encode()) for i in range(count)]
        tar = tar_of([(f"{key}.txt", text) for key, text in expected[folder]])
        (tmp_path / folder / "0.tar").write_bytes(tar)
    cache = ShardCache(tmp_path / "shards", 10**9)
    for folder in ("a", "b", "a"):
        assert read_texts(f"cat {tmp_path}/{folder}/0.tar", cache) == expected[folder]
    # the same command with another output, and an empty cache of shards
    (tmp_path / "a" / "0.tar").write_bytes((tmp_path / "b" / "0.tar").read_bytes())
    cache = ShardCache(tmp_path / "empty", 10**9)
    assert read_texts(f"cat {tmp_path}/a/0.tar", cache) == expected["b"]
