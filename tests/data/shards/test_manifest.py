"""Tests of the manifest of a training: counting, storing, and the changes that it reports."""

import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given, settings, strategies as st

from clipkit.errors import DataError
from clipkit.samples.index import ShardIndex, Strings, index_shard, pack_arrays, write_arrays
from clipkit.samples.remote import ShardCache, ShardFile
from data.__main__ import main
from data.captions import CaptionRule, Filter
from data.selection import SelectedShard, Selection
from data.shards import manifest
from data.shards.manifest import Census, Manifest, make_manifest
from data.shards.samples import Shards


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the indexes of temporary shards out of the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CLIPKIT_CACHE", str(folder))
    return folder


def write_shard(path: Path, count: int, letter: str = "a", **more: bytes) -> ShardFile:
    """Write a shard of ``count`` pairs."""
    path.parent.mkdir(exist_ok=True)
    with webdataset.TarWriter(str(path), encoder=False, mtime=1.0) as tar:
        for number in range(count):
            tar.write({"__key__": f"{letter}{number:03d}", "jpg": b"image", "txt": b"text", **more})
    return ShardFile.at(path)


def write_shards(folder: Path, *counts: int) -> list[ShardFile]:
    return [write_shard(folder / f"{number}.tar", count) for number, count in enumerate(counts)]


def state_stats(shard: ShardFile, successes: Any) -> None:
    """Write img2dataset's statistics next to a shard."""
    text = json.dumps({"count": 10_000, "successes": successes})
    Path(shard.url.replace(".tar", "_stats.json")).write_text(text)


def values(one: Manifest) -> dict[str, Any]:
    """Return the content of a manifest for comparison."""
    numbers = {"sizes": one.sizes.tolist(), "counts": one.counts.tolist()}
    texts = {name: list(getattr(one, name)) for name in ("urls", "versions", "digests", "contents")}
    return {**numbers, **texts, "sources": one.sources, "selection": one.selection, "dropped": one.dropped}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the shards that this process opens."""
    names: list[str] = []

    def noted(file: ShardFile, *rest: Any) -> SelectedShard:
        names.append(file.name)
        return SelectedShard(file, *rest)

    monkeypatch.setattr(manifest, "SelectedShard", noted)
    return names


def made_of(
    lines: Sequence[tuple[str, int, int, str]],
    *,
    versions: Sequence[str] = (),
    contents: Sequence[str] = (),
    **more: Any,
) -> Manifest:
    """Return a manifest of names, sizes, counts and digests."""
    rest: dict[str, Any] = {"sources": (len(lines),), "selection": "s", "dropped": {}, **more}
    return Manifest(
        urls=Strings.of([line[0] for line in lines]),
        versions=Strings.of(versions or ["v"] * len(lines)),
        contents=Strings.of(contents or ["c"] * len(lines)),
        sizes=np.array([line[1] for line in lines], dtype=np.int64),
        counts=np.array([line[2] for line in lines], dtype=np.int64),
        digests=Strings.of([line[3] for line in lines]),
        **rest,
    )


def test_shards_are_counted_once(tmp_path: Path, opened: list[str]) -> None:
    sources = [write_shards(tmp_path / "a", 3, 0), write_shards(tmp_path / "b", 5)]
    told: list[int] = []
    first = make_manifest(sources, Selection(), progress=told.append)
    assert opened == ["0.tar", "1.tar", "0.tar"] and told == [1, 2, 3]
    assert (len(first), first.counts.tolist(), first.sources, first.stated) == (3, [3, 0, 5], (2, 1), 0)
    assert [first.shard(number) for number in range(3)] == [shard for source in sources for shard in source]
    assert all(len(digest) == 16 for digest in first.digests)
    again = make_manifest(sources, Selection(), progress=told.append)
    assert len(opened) == 3 and told == [1, 2, 3]
    assert values(again) == values(first) and again.fingerprint == first.fingerprint
    make_manifest(
        [[*sources[0], *sources[1]]], Selection()
    )  # other sources, rules or files have other manifests
    make_manifest(sources, Selection(captions=CaptionRule(fields=("a", "txt"))))
    os.utime(sources[1][0].url, ns=(5, 5))
    make_manifest([sources[0], [ShardFile.at(Path(sources[1][0].url))]], Selection())
    # of indexed shards only the first is opened
    assert opened[3:] == ["0.tar", "0.tar", "0.tar", "0.tar"]


def test_index_counts_the_samples_that_pass_filters(tmp_path: Path, opened: list[str]) -> None:
    """Training with the same filters then opens only the first shard, also in a list of other shards."""
    shards = [
        write_shard(tmp_path / "a" / f"{i}.tar", 3 + i, json=b'{"width": %d}' % (i % 2)) for i in range(4)
    ]
    assert main(["index", str(tmp_path / "a"), "--filters", "width >= 1", "--quiet"]) == 0
    assert opened == ["0.tar", "1.tar", "2.tar", "3.tar"]
    selection = Selection(filters=(Filter.of("width >= 1"),))
    assert make_manifest([shards], selection).counts.tolist() == [0, 4, 0, 6]
    assert len(opened) == 4
    some = make_manifest([shards[1:]], selection)
    assert some.counts.tolist() == [4, 0, 6] and some.dropped == {"not width >= 1": 5}
    assert opened[4:] == ["1.tar"]


def test_signature_of_a_url_is_not_part_of_the_stored_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def signed(signature: str, version: str = "etag") -> ShardFile:
        return ShardFile(url=f"https://h/0.tar?part=1&X-Amz-Signature={signature}", size=9, version=version)

    counted: list[str] = []

    def count(shards: Sequence[ShardFile], *_: Any, **__: Any) -> Iterator[tuple[int, Census]]:
        counted.append(shards[0].url)
        yield 0, Census(count=3, digest="d", content="c", dropped={}, members={})

    monkeypatch.setattr(manifest, "take_census", count)
    cache = ShardCache(tmp_path, 1)
    for signature in ("first", "second"):
        stored = make_manifest([[signed(signature)]], Selection(), cache=cache)
        assert stored.shard(0) == signed(signature)  # the earlier signature may have expired
    assert counted == [signed("first").url]
    make_manifest([[signed("second", "other")]], Selection(), cache=cache)
    make_manifest([[replace(signed("second"), url="https://h/0.tar?part=2")]], Selection(), cache=cache)
    assert len(counted) == 3


def test_digests_of_other_versions_of_the_index_are_not_compared() -> None:
    lines = [("0.tar", 100, 3, "d" * 16), ("1.tar", 100, 4, "e" * 16)]
    other = [(*line[:3], "f" * 16) for line in lines]
    now = made_of(other, contents=["x", "y"], versions=["v", "w"])
    about, arrays = made_of(lines)._stored()
    del about["index_version"]  # as earlier versions stored it
    earlier = Manifest.from_bytes(pack_arrays(about, arrays))
    assert earlier is not None and earlier.fingerprint == made_of(lines).fingerprint
    assert now.changes_since(earlier) == [] and now.changes_since(made_of(lines)) != []
    assert now.not_compared(earlier) == 1  # with another modification time
    resumed = now.copy_counts(earlier)
    assert resumed.fingerprint == earlier.fingerprint and now.changes_since(resumed) == []
    fewer = made_of([other[0], ("1.tar", 100, 5, "f" * 16)])
    assert fewer.changes_since(earlier) == ["1.tar has 5 used samples instead of 4"]


def test_damaged_manifest_is_rebuilt(own_cache: Path, tmp_path: Path, opened: list[str]) -> None:
    shards = write_shards(tmp_path / "a", 3, 4)
    first = make_manifest([shards], Selection())
    (kept,) = (own_cache / "manifest").iterdir()
    content = kept.read_bytes()
    for damaged in (
        b"",
        content[:-1],
        b"x" + content[1:],
        content + b"\0",
        content.replace(b"0.tar", b"1.tar", 1),
    ):
        kept.unlink()
        kept.write_bytes(damaged)
        assert Manifest.load(kept) is None and Manifest.from_bytes(damaged) is None
        opened.clear()
        assert values(make_manifest([shards], Selection())) == values(first)
        assert opened == ["0.tar"] and kept.read_bytes() == content


def test_unwritable_cache_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "file"))
    shards = write_shards(tmp_path / "a", 3, 4)
    assert [make_manifest([shards], Selection()).counts.tolist() for _ in range(2)] == [[3, 4]] * 2


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@settings(deadline=None)
@given(
    lines=st.lists(st.tuples(texts, st.integers(-1, 2**62), st.integers(0, 2**62), texts), max_size=8),
    sources=st.lists(st.integers(0, 9), max_size=3),
    selection=texts,
    dropped=st.dictionaries(texts, st.integers(0, 2**62), max_size=3),
)
def test_manifest_round_trips_through_bytes_and_files(
    lines: list[tuple[str, int, int, str]],
    sources: list[int],
    selection: str,
    dropped: dict[str, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    one = made_of(lines, sources=tuple(sources), selection=selection, dropped=dropped)
    path = tmp_path_factory.mktemp("kept") / "one"
    one.save(path)
    assert path.read_bytes() == one.to_bytes()
    for other in (Manifest.load(path), Manifest.from_bytes(one.to_bytes())):
        assert other is not None and values(other) == values(one)
        assert other.fingerprint == one.fingerprint and other.changes_since(one) == []


def test_invalid_manifest_is_none(tmp_path: Path) -> None:
    for content in (b"", b"x", pack_arrays({}, {}), pack_arrays({"sources": 1}, {"sizes": np.arange(3)})):
        (tmp_path / "one").write_bytes(content)
        assert Manifest.from_bytes(content) is None and Manifest.load(tmp_path / "one") is None
    assert Manifest.load(tmp_path / "missing") is None


BEFORE = [("/d/0.tar", 10, 5, "aa"), ("/d/1.tar", 20, 6, "bb"), ("/d/2.tar", 30, 7, "cc")]


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (BEFORE, []),
        ([(url.replace("/d/", "s3://x/y/"), *rest) for url, *rest in BEFORE], []),
        (BEFORE[:2], ["2 shards instead of 3", "2.tar is gone"]),
        (BEFORE + BEFORE[:1], ["4 shards instead of 3", "0.tar is new"]),
        ([*BEFORE[:2], ("/d/9.tar", 30, 7, "cc")], ["2.tar is gone", "9.tar is new"]),
        (BEFORE[::-1], ["the shards are in another order"]),
        ([BEFORE[0], ("/d/1.tar", 21, 6, "bb"), BEFORE[2]], ["1.tar has 21 bytes instead of 20"]),
        ([BEFORE[0], ("/d/1.tar", 20, 9, "xx"), BEFORE[2]], ["1.tar has 9 used samples instead of 6"]),
        ([BEFORE[0], ("/d/1.tar", 20, 6, "xx"), BEFORE[2]], ["1.tar has other samples"]),
        ([BEFORE[0], ("/d/1.tar", 20, 9, ""), BEFORE[2]], []),  # the count is stated, not verified
        ([BEFORE[0], ("/d/1.tar", 20, 9, ""), ("/d/2.tar", 31, 7, "")], ["2.tar has 31 bytes instead of 30"]),
        ([("https://h/0.tar?signature=a/b", 10, 5, "aa"), *BEFORE[1:]], []),
    ],
)  # fmt: skip
def test_changes_are_described(now: list[tuple[str, int, int, str]], said: list[str]) -> None:
    earlier, later = made_of(BEFORE), made_of(now, sources=(3,) if len(now) == 3 else (len(now),))
    assert later.changes_since(earlier) == said
    stated_only = any(not line[3] for line in now)
    assert (later.fingerprint == earlier.fingerprint) == (not said and not stated_only)


def test_changed_rules_and_sources_are_described() -> None:
    one = made_of(BEFORE)
    assert made_of(BEFORE, selection="t").changes_since(one) == [
        "the settings of captions or filters, data.fraction, or the scores, differ"
    ]
    assert made_of(BEFORE[:2], selection="t").changes_since(one)[1:] == [
        "2 shards instead of 3",
        "2.tar is gone",
    ]
    assert made_of(BEFORE, sources=(1, 2)).changes_since(one) == [
        "the shards are divided into sources differently"
    ]


def test_only_a_few_of_many_changes_are_listed() -> None:
    before = [(f"/d/{number}.tar", 10, 5, "aa") for number in range(50)]
    bigger = made_of([(url, 11, count, digest) for url, _, count, digest in before])
    assert bigger.changes_since(made_of(before)) == [
        *(f"{number}.tar has 11 bytes instead of 10" for number in range(3)), "47 more"
    ]  # fmt: skip
    others = made_of([(f"/d/x{number}.tar", 10, 5, "aa") for number in range(50)]).changes_since(
        made_of(before)
    )
    assert len(others) == 8 and others[3] == "47 more" and others[4] == "x0.tar is new"


def test_counts_of_an_earlier_manifest_are_kept() -> None:
    stated = made_of([(url, size, 100, "") for url, size, _, _ in BEFORE])
    now = made_of(BEFORE)
    assert now.fingerprint != stated.fingerprint  # computed before, as in training
    kept = now.copy_counts(stated)
    assert kept.counts.tolist() == [100] * 3 and kept.fingerprint == stated.fingerprint and kept.stated == 3
    assert list(kept.urls) == list(now.urls)


def test_changed_files_are_detected(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "a", 3, 4, 5)
    first = make_manifest([shards], Selection())
    write_shard(tmp_path / "a" / "1.tar", 4, letter="b")
    os.utime(tmp_path / "a" / "1.tar", ns=(1, 1))
    now = [ShardFile.at(Path(shard.url)) for shard in shards]
    assert [one.size for one in now] == [one.size for one in shards]
    second = make_manifest([now], Selection())
    assert second.changes_since(first) == ["1.tar has other samples"]
    os.utime(tmp_path / "a" / "2.tar", ns=(1, 1))  # another modification time, the same content
    third = make_manifest([[ShardFile.at(Path(shard.url)) for shard in shards]], Selection())
    assert third.changes_since(second) == [] and third.fingerprint == second.fingerprint


def test_changed_captions_of_the_same_size_are_detected(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "a", 3, 4)
    first = make_manifest([shards], Selection())
    changed = tmp_path / "a" / "1.tar"
    before, whole = changed.stat(), changed.read_bytes()
    for content in (b"next", b"last"):  # rewritten in place, also with the old modification time
        changed.write_bytes(whole.replace(b"text", content))
        if content == b"last":
            os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
        now = make_manifest([[shards[0], ShardFile.at(changed)]], Selection())
        assert (
            now.fingerprint == first.fingerprint
        )  # unchanged from earlier versions, which stored it in checkpoints
        said = ["1.tar has other captions or images of the same names and sizes"]
        assert now.changes_since(first) == said and now.not_compared(first) == 0
    assert Shards(now, Selection()).read(3).fields["txt"] == "last"


def test_repacked_data_are_unchanged(tmp_path: Path) -> None:
    """Modification times of members have no effect."""
    manifests = []
    for time_of_members in (1.0, 2.0):
        with webdataset.TarWriter(str(tmp_path / "0.tar"), encoder=False, mtime=time_of_members) as tar:
            tar.write({"__key__": "a", "jpg": b"image", "txt": b"text", "json": b"{}", "cls": b"1"})
        manifests.append(make_manifest([[ShardFile.at(tmp_path / "0.tar")]], Selection()))
    assert list(manifests[0].versions) != list(manifests[1].versions)
    assert manifests[1].changes_since(manifests[0]) == []
    assert manifests[1].not_compared(manifests[0]) == 0


@pytest.mark.parametrize("member", ["jpg", "txt", "json", "cls"])
def test_content_digest_covers_every_member(member: str, tmp_path: Path) -> None:
    members = {"jpg": b"p" * 5000, "txt": b"t" * 5000, "json": b"j" * 5000, "cls": b"1" * 5000}
    found: list[ShardIndex] = []
    for last in (b"", b"x"):
        shard = ShardFile(url=str(tmp_path / "0.tar"), size=0, version=str(len(found)))
        with webdataset.TarWriter(shard.url, encoder=False, mtime=1.0) as tar:
            changed = {member: members[member][: -len(last) or None] + last}
            tar.write({"__key__": "a", **members, **changed})
        found.append(index_shard(shard))
    assert found[0].digest == found[1].digest and found[0].content != found[1].content
    assert not found[0].is_same(found[1])
    assert found[0].is_same(replace(found[1], content=""))  # unknown content


@pytest.mark.parametrize("extension", ["bmp", "ppm", "webp"])
def test_images_with_equal_ends_have_different_digests(extension: str, tmp_path: Path) -> None:
    found: list[ShardIndex] = []
    for last in (b"p", b"x"):
        shard = ShardFile(url=str(tmp_path / "0.tar"), size=0, version=str(len(found)))
        with webdataset.TarWriter(shard.url, encoder=False, mtime=1.0) as tar:
            tar.write({"__key__": "a", extension: 2500 * last + b"white" * 600, "txt": b"caption"})
        found.append(index_shard(shard))
    assert found[0].digest == found[1].digest and not found[0].is_same(found[1])


@pytest.mark.parametrize(
    ("then", "now", "contents", "unknown"),
    [
        (("1", "2"), ("1", "2"), (["", ""], ["", ""]), 0),  # the same files
        (("1", "2"), ("1", "9"), (["", "c"], ["", "c"]), 0),  # a copy of the same content
        (("1", "2"), ("1", "9"), (["", ""], ["", "c"]), 1),  # a run of an earlier version
        (("1", "2"), ("8", "9"), (["c", "c"], ["", "c"]), 1),  # a remote shard without a copy on disk
        (
            ("", "2"),
            ("", "2"),
            (["c", "c"], ["c", "c"]),
            1,
        ),  # a pipe: its output may differ from the indexed one
    ],
)
def test_shards_that_cannot_be_compared_are_counted(
    then: tuple[str, str], now: tuple[str, str], contents: tuple[list[str], list[str]], unknown: int
) -> None:
    earlier = made_of(BEFORE[:2], versions=then, contents=contents[0])
    later = made_of(BEFORE[:2], versions=now, contents=contents[1])
    assert later.changes_since(earlier) == [] and later.not_compared(earlier) == unknown


def test_manifest_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    one = made_of(BEFORE)
    about, arrays = one._stored()
    write_arrays(tmp_path / "one", about, {k: v for k, v in arrays.items() if not k.startswith("contents")})
    other = Manifest.load(tmp_path / "one")
    assert other is not None and other.fingerprint == one.fingerprint
    assert list(other.contents) == [""] * 3 and one.changes_since(other) == []
    assert list(one.copy_counts(other).contents) == ["c"] * 3


def test_fingerprint_does_not_depend_on_the_folder(tmp_path: Path) -> None:
    first = make_manifest([write_shards(tmp_path / "a", 3, 4)], Selection()).fingerprint
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copies = [ShardFile.at(tmp_path / "b" / f"{number}.tar") for number in range(2)]
    assert make_manifest([copies], Selection()).fingerprint == first
    assert make_manifest([copies[::-1]], Selection()).fingerprint != first
    assert make_manifest([copies], Selection(need=("image",))).fingerprint != first


def test_stated_counts_are_used_except_for_the_first_shard(tmp_path: Path, opened: list[str]) -> None:
    shards = write_shards(tmp_path / "a", 3, 4, 5)
    for shard in shards:
        state_stats(shard, 1000)
    found = make_manifest([shards], Selection())
    assert found.counts.tolist() == [3, 1000, 1000] and found.stated == 2 and opened == ["0.tar"]
    assert [bool(digest) for digest in found.digests] == [True, False, False]
    assert make_manifest([shards], Selection()).stated == 2 and opened == ["0.tar"]
    exact = make_manifest([shards], Selection(), stats=False)
    assert exact.counts.tolist() == [3, 4, 5] and exact.stated == 0
    assert exact.changes_since(found) == []
    assert make_manifest([shards], Selection()).stated == 0 and opened == ["0.tar", "0.tar", "1.tar", "2.tar"]


@pytest.mark.parametrize(
    "selection",
    [
        Selection(filters=(Filter.of("width > 1"),)),
        Selection(captions=CaptionRule(choice="all", fields=("txt", "caption"))),
    ],
)
def test_stated_counts_are_ignored_with_filters_or_other_rules(
    selection: Selection, tmp_path: Path, opened: list[str]
) -> None:
    shards = [
        write_shard(tmp_path / "a" / f"{number}.tar", 3, json=b'{"width": 5}', cls=b"1")
        for number in range(3)
    ]
    for shard in shards:
        state_stats(shard, 1000)
    assert make_manifest([shards], selection).stated == 0 and len(opened) == 3


@pytest.mark.parametrize("stated", ["7", None, -1, 7.0, True, [7], {}])
def test_invalid_stated_count_is_ignored(stated: Any, tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "a", 3, 4)
    state_stats(shards[1], stated)
    assert make_manifest([shards], Selection()).counts.tolist() == [3, 4]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"5", b'{"successes": 1' + b"0" * 5000 + b"}"]
)
def test_unreadable_stats_are_ignored(content: bytes, tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "a", 3, 4)
    (tmp_path / "a" / "1_stats.json").write_bytes(content)
    assert make_manifest([shards], Selection()).counts.tolist() == [3, 4]


def test_stored_index_takes_precedence_over_stats(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "a", 3, 4)
    SelectedShard(shards[1], Selection(), None)
    state_stats(shards[1], 1000)
    assert make_manifest([shards], Selection()).counts.tolist() == [3, 4]


def test_samples_beyond_the_true_count_raise_error(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "a", 3, 2)
    state_stats(shards[1], 4)
    data = Shards.of(shards)
    assert len(data) == 7 and data.read(4).key == "a001"
    for number in (5, 6):
        with pytest.raises(DataError, match="its shard has only 2 samples, fewer than stated"):
            data.read(number)
        assert data.locate(number) == (shards[1].url, "")


def test_shards_without_pairs_are_reported_after_a_few(tmp_path: Path, opened: list[str]) -> None:
    """The error is raised early, even with a thousand shards."""
    one = tmp_path / "one.tar"
    with webdataset.TarWriter(str(one), encoder=False) as tar:
        tar.write({"__key__": "a", "npy": b"x", "txt": b"text"})
    for number in range(1000):
        (tmp_path / f"{number}.tar").symlink_to(one)
    shards = [ShardFile.at(tmp_path / f"{number}.tar") for number in range(1000)]
    began = time.perf_counter()
    with pytest.raises(DataError) as caught:
        make_manifest([shards], Selection())
    assert time.perf_counter() - began < 10
    assert str(caught.value) == (
        "the first 8 shards have no sample with image and caption; members: npy (8), txt (8)"
    )
    indexed = list((Path(os.environ["CLIPKIT_CACHE"]) / "index").rglob("*.index"))
    processes = len(os.sched_getaffinity(0))
    assert len(indexed) <= 8 + 2 * manifest._UNDER_WAY * processes, f"{len(indexed)} were opened"
    print(f"{len(indexed)} of 1000 shards were opened")


def test_first_shards_without_pairs_are_skipped(tmp_path: Path) -> None:
    assert make_manifest([write_shards(tmp_path / "a", 0, 0, 0, 2)], Selection()).counts.tolist() == [
        0,
        0,
        0,
        2,
    ]


def test_no_shards_raise_error() -> None:
    no_sources: list[list[ShardFile]] = []
    for sources in (no_sources, [no_sources.copy()]):
        with pytest.raises(DataError, match="no shards were given"):
            make_manifest(sources, Selection())  # type: ignore[arg-type]


def test_200_000_shards_need_little_time_and_memory() -> None:
    lines = [
        (f"s3://bucket/some/folder/{number:06d}.tar", 10**9 + number, 10_000, f"{number:016x}")
        for number in range(200_000)
    ]
    one = made_of(lines)
    del lines
    times = [time.perf_counter()]
    tracemalloc.start()
    try:
        content = one.to_bytes()
        times.append(time.perf_counter())
        other = Manifest.from_bytes(content)
        assert other is not None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    times.append(time.perf_counter())
    assert other.fingerprint == one.fingerprint
    times.append(time.perf_counter())
    assert other.changes_since(one) == []
    assert other.changes_since(replace(one, sources=(100_000, 100_000)))
    times.append(time.perf_counter())
    steps = zip(("to_bytes", "from_bytes", "2 fingerprints", "changes_since"), np.diff(times), strict=True)
    print(
        f"{len(content) / 1e6:.1f} MB, peak {peak / 1e6:.1f} MB; "
        + ", ".join(f"{n} {t:.3f} s" for n, t in steps)
    )
    assert len(content) < 30e6 and peak < 150e6 and times[-1] - times[0] < 30
