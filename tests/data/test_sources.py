"""The ways to name a source's shards, and what is said where none are there."""

from pathlib import Path

import braceexpand
import pytest
import webdataset
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from clipkit.errors import DataError
from data import sources
from data.shard_file import ShardFile, is_remote
from data.sources import find_shards
from data.writer import DatasetWriter, Record


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset folder of 12 shards."""
    with DatasetWriter(tmp_path / "set", samples_per_shard=2) as writer:
        for number in range(23):
            record = Record(key=f"{number:06d}", image=b"picture", extension="jpg", caption="text")
            writer.write("train", record)
        writer.finish({})
    return tmp_path / "set"


def paths_of(source: str, split: str = "train") -> list[Path]:
    """Where a source's shards lie."""
    return [Path(shard.url) for shard in find_shards(source, split=split)]


def test_the_ways_to_name_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = folder / "train"
    all_of_them = [train / f"{number}.tar" for number in range(12)]
    assert paths_of(str(folder)) == paths_of(str(train)) == all_of_them
    assert paths_of(f"{train}/3.tar") == [all_of_them[3]]
    assert paths_of(f"{train}/{{3..5}}.tar") == all_of_them[3:6]
    assert paths_of(f"{train}/{{7,3}}.tar") == [all_of_them[7], all_of_them[3]]
    long = ",".join(str(number) for number in range(12)) + ",0" * 300  # longer than any file name
    assert len(paths_of(f"{train}/{{{long}}}.tar")) == 312
    monkeypatch.setenv("HOME", str(folder))
    assert paths_of("~/train/{3..5}.tar") == all_of_them[3:6]
    assert paths_of("~") == all_of_them


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{folder}/train/{{0..14}}.tar", "3 of 15 shards are missing, the first is {folder}/train/12.tar"),
        ("{folder}/train/{{0..3.tar", "the braces of '{folder}/train/{{0..3.tar' do not balance"),
        ("{folder}/train/99.tar", "no data at '{folder}/train/99.tar': not a folder, a tar, or a built-in"),
        ("glyph", "no data at 'glyph': not a folder, a tar, or a built-in corpus (digits, glyphs, icons)"),
        ("", "no data: the source is empty"),
        ("x" * 300, "cannot look for data at 'xxx"),
        ("x/" * 2500, "cannot look for data at 'x/x/"),
        ("{{1,2}}" + "x" * 300, "cannot look for data at '{{1,2}}xxx"),
        ("~there-is-no-such-user/x", "cannot look for data at '~there-is-no-such-user/x': "),
        ("x{{0..300000000}}.tar", "the braces of 'x{{0..300000000}}.tar' stand for more than 1000000 shards"),
        (
            "{{0..9999}}{{0..9999}}",
            "the braces of '{{0..9999}}{{0..9999}}' stand for more than 1000000 shards",
        ),
        ("{{0,{{0..9}}{{0..999999..-5}}}}", "the braces of '{{0,{{0..9}}{{0..999999..-5}}}}' stand for more"),
        ("{{0.." + "9" * 5000 + "}}", "the braces of '{{0..999"),
        ("{{" * 5000 + "1,2" + "}}" * 5000, "the braces of '{{{{{{"),
    ],
)
def test_a_source_that_is_not_there(source: str, message: str, folder: Path) -> None:
    with pytest.raises(DataError) as caught:
        paths_of(source.format(folder=folder))
    assert str(caught.value).startswith(message.format(folder=folder))


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("a", 1), ("{a}", 1), ("{a,b}", 2), ("{0..9}", 10), ("{9..0..3}", 4), ("{-3..-1}{a,b}", 6),
        ("{0..9..0}", 10), ("{a,{1..3},c{1,2}}x{3,4}", 12), (r"\{1..9\}", 1), (r"{a\,b,c}", 2),
        ("{{1..4},{5..6}}", 6), ("a,b", 1),
    ],
)  # fmt: skip
def test_names_are_counted_before_they_are_made(pattern: str, count: int) -> None:
    assert sources._count_names(pattern) == count == len(list(braceexpand.braceexpand(pattern)))


def test_a_split_that_is_not_there_or_not_whole(folder: Path) -> None:
    with pytest.raises(DataError, match=f"no tar of split 'test' in {folder}; it has the folders train"):
        paths_of(str(folder), split="test")
    (folder / "train" / "11.tar").unlink()
    with pytest.raises(DataError, match=r"has 11 shards, but nshards.txt says '12'"):
        paths_of(str(folder))
    (folder / "train" / "nshards.txt").write_bytes(b"\xff\n")
    with pytest.raises(DataError, match=r"nshards.txt says"):
        paths_of(str(folder))
    (folder / "train" / "nshards.txt").write_text("9" * 5000)
    with pytest.raises(DataError, match=r"nshards.txt says"):
        paths_of(str(folder))
    (folder / "train" / "nshards.txt").unlink()
    assert len(paths_of(str(folder))) == 11


@st.composite
def patterns(draw: st.DrawFn, depth: int = 2) -> str:
    """Braces in braces."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["text", "range", "list"] if depth else ["text", "range"]))
        if kind == "text":
            parts.append(draw(st.sampled_from(["a", "b.tar", "-", "\\{", "\\,", "é/"])))
        elif kind == "range":
            first, last, step = draw(st.tuples(*[st.integers(-4, 9)] * 3))
            parts.append(f"{{{first}..{last}}}" if step < 0 else f"{{{first}..{last}..{step}}}")
        else:
            inside = [draw(patterns(depth=depth - 1)) for _ in range(draw(st.integers(1, 3)))]
            parts.append("{" + ",".join(inside) + "}")
    return "".join(parts)


@settings(deadline=None)
@given(pattern=patterns())
def test_any_pattern_is_counted_rightly(pattern: str) -> None:
    count = sources._count_names(pattern)
    assume(count < 3000)
    assert count == len(list(braceexpand.braceexpand(pattern)))


@settings(deadline=None)
@given(text=st.text("{},.01-\\a", max_size=9))
def test_any_text_is_names_or_an_error(text: str) -> None:
    try:
        found = find_shards(f"/nowhere/{text}")
    except DataError as error:
        assert len(str(error).splitlines()) == 1
    else:
        raise AssertionError(f"{found} are not there")


def test_a_dataset_folder_has_its_splits(folder: Path) -> None:
    (folder / "test").mkdir()
    with webdataset.TarWriter(str(folder / "test" / "0.tar"), encoder=False) as tar:
        tar.write({"__key__": "a", "jpg": b"x"})
    assert paths_of(str(folder), split="test") == [folder / "test" / "0.tar"]
    assert paths_of(f"{folder}/test", split="train") == [folder / "test" / "0.tar"]


def test_ten_comes_after_nine_and_other_files_do_not_count(folder: Path) -> None:
    for name in ("0_stats.json", "0.parquet", "0.tar.tmp", "0.tgz"):
        (folder / "train" / name).write_bytes(b"")
    assert [path.name for path in paths_of(str(folder))] == [f"{number}.tar" for number in range(12)]


def test_what_is_known_of_a_file_of_this_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "train" / "3.tar"
    shard = ShardFile.at(path)
    status = path.stat()
    assert (shard.url, shard.size, shard.version) == (str(path), status.st_size, str(status.st_mtime_ns))
    assert shard.name == "3.tar" and not shard.is_remote
    monkeypatch.chdir(folder)
    assert ShardFile.at(Path("train/3.tar")) == shard == find_shards("train/3.tar")[0]
    for other, cause in ((folder, "is not a regular file"), (folder / "x.tar", "No such file")):
        with pytest.raises(DataError, match=cause):
            ShardFile.at(other)


@pytest.mark.parametrize(
    ("source", "remote", "name"),
    [
        ("s3://bucket/a/00000.tar", True, "00000.tar"),
        ("https://host/a/00000.tar?X-Signature=ab", True, "00000.tar"),
        ("pipe:cat /a/0.tar", True, "0.tar"),
        ("/a/b/0.tar", False, "0.tar"),
        ("a:b/0.tar", False, "0.tar"),
    ],
)
def test_what_lies_elsewhere(source: str, remote: bool, name: str) -> None:
    assert is_remote(source) is remote
    shard = ShardFile(url=source, size=1, version="")
    assert (shard.is_remote, shard.name) == (remote, name)
