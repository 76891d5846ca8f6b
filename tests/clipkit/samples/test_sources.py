"""Tests of recognizing sources: formats, and the files of a split, on this machine and in a store."""

import gzip
import io
import pickle
import tarfile
from pathlib import Path

import braceexpand
import numpy as np
import pytest
import webdataset
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from PIL import Image

from clipkit.errors import DataError
from clipkit.samples import MissingSplit, find_source, find_split, open_samples, sources as sources_module
from clipkit.samples.remote.store import ShardFile, is_remote
from clipkit.samples.sources import find_sources
from data.shards.samples import find_shards
from data.shards.writer import DatasetWriter, Record
from tests.clipkit.samples.remote import servers

nginx = servers.nginx
COUNT = 5


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    """Write the same images and captions in each format."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    photos = tmp_path / "photos"
    photos.mkdir()
    captions = [f"image {seed}" for seed in range(COUNT)]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for seed, caption in enumerate(captions):
            (photos / f"{seed}.png").write_bytes(png(seed))
            (photos / f"{seed}.txt").write_text(caption)
            for name in (f"{seed}.png", f"{seed}.txt"):
                tar.add(photos / name, name)
    rows = "".join(f"photos/{seed}.png,{caption}\n" for seed, caption in enumerate(captions))
    (tmp_path / "pairs.csv").write_text(f"image,caption\n{rows}")
    images = [png(seed) for seed in range(COUNT)]
    parquet.write_table(pyarrow.table({"image": images, "caption": captions}), tmp_path / "pairs.parquet")
    names = {"shards": "a.tar", "images": "photos", "table": "pairs.csv", "parquet": "pairs.parquet"}
    return {format: tmp_path / name for format, name in names.items()}


@pytest.mark.parametrize(
    "other", ["train-00000-of-00001", "train-00001-of-00002-4b1d", "train_00000-of-00002"]
)
def test_parts_of_different_datasets_are_refused(tmp_path: Path, other: str) -> None:
    for name in ("test-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002"):
        (tmp_path / f"{name}.parquet").touch()
    assert len(find_split(tmp_path, "train")[1]) == 2
    (tmp_path / f"{other}.parquet").touch()
    with pytest.raises(DataError, match=r"^\S+ and \S+ are parts of different datasets: remove one of them$"):
        find_split(tmp_path, "train")
    assert len(find_split(tmp_path, "test")[1]) == 1


def test_every_format_opens_the_same_samples(sources: dict[str, Path]) -> None:
    for format, path in sources.items():
        assert find_source(str(path)).format == format
        samples = open_samples(str(path))
        for opened in (samples, pickle.loads(pickle.dumps(samples))):
            assert [opened.read(i, "") for i in range(len(opened))] == [png(seed) for seed in range(COUNT)]
            assert opened.content_id == samples.content_id
        for i in range(COUNT):
            assert not samples.cause(i) and samples.locate(i)[1]
            captions = samples.fields(i) or {"caption": samples.read(i, "txt").decode()}
            [value] = captions.values()
            assert value in (f"image {i}", [f"image {i}"])


def test_formats_are_not_mixed_silently(sources: dict[str, Path]) -> None:
    folder = sources["shards"].parent
    with pytest.raises(DataError, match="has tars and tables: name them as separate sources"):
        find_source(f"{folder}/{{a.tar,pairs.csv}}")
    found = find_sources(f"{folder}/{{photos,a.tar,pairs.csv}}")
    assert [source.format for source in found] == ["shards", "table", "images"]
    with pytest.raises(DataError, match="is compressed: unpack it first"):
        (folder / "b.tar.gz").write_bytes(b"x")
        find_source(str(folder / "b.tar.gz"))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("training/0.tar", "train"), ("Validation/0.tar", "val"), ("dev/0.tar", "val"), ("testing/0.tar", "test"),
        ("extra/0.tar", "extra"), ("data/val-00000-of-00001.parquet", "val"), ("valid.parquet", "val"),
        ("data/TEST/0000.parquet", "test"), ("test_en.csv", "test"), ("extra-00000-of-00001.parquet", "extra"),
    ],
)  # fmt: skip
def test_names_of_splits(tmp_path: Path, name: str, split: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"x")
    stated, files = find_split(tmp_path, split)
    assert stated == split and [file.url for file in files] == [str(tmp_path / name)]
    for other in {"train", "val", "test"} - {split}:
        with pytest.raises(MissingSplit):
            find_split(tmp_path, other)


LAYOUT = st.sets(
    st.sampled_from(
        ["0.tar", "train/0.tar", "train/1.tar", "val/0.tar", "valid/0.tar", "data/train-0.parquet",
         "data/test-0.parquet", "train.parquet", "more.parquet", "data/more.parquet", "default/test/0.parquet"]
    )
)  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=LAYOUT, split=st.sampled_from(["train", "val", "test"]))
def test_splits_in_a_store_are_those_on_this_machine(
    tmp_path_factory: pytest.TempPathFactory, nginx: servers.Nginx, layout: set[str], split: str
) -> None:
    folder = tmp_path_factory.mktemp("set")
    for name in layout:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
        nginx.put(f"{folder.name}/{name}", b"x")

    def names(place: Path | str) -> tuple[str, list[str]] | None:
        try:
            stated, files = find_split(place, split)
        except MissingSplit:
            return None
        return stated, [file.url.rpartition(folder.name)[2] for file in files]

    if {"val/0.tar", "valid/0.tar"} <= layout and split == "val":
        for place in (folder, nginx.url(folder.name)):
            with pytest.raises(DataError, match="would both be the split 'val'"):
                find_split(place, split)
        return
    here = names(folder)
    there = names(nginx.url(folder.name)) if layout else None
    assert here == there


def test_missing_split_in_a_store_costs_few_requests(nginx: servers.Nginx) -> None:
    for name in ("set/train/0.tar", "set/train/1.tar", "set/photos/0.jpg"):
        nginx.put(name, b"x")
    nginx.put("unlisted/index.html", b"a page without links")
    for name, most in (("set", 3), ("unlisted", 7), ("none", 7)):
        before = len(nginx.requests())
        with pytest.raises(MissingSplit):
            find_split(nginx.url(name), "val")
        assert len(nginx.requests()) - before <= most
    nginx.put("unlisted/val/nshards.txt", b"2")
    for name in ("0.tar", "1.tar", "2.tar"):
        nginx.put(f"unlisted/val/{name}", b"x")
    stated, files = find_split(nginx.url("unlisted"), "val")
    assert stated == "val" and [file.name for file in files] == ["0.tar", "1.tar"]
    assert [file.size for file in files] == [1, 1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a dataset folder of 12 shards."""
    with DatasetWriter(tmp_path / "set", samples_per_shard=2) as writer:
        for number in range(23):
            record = Record(key=f"{number:06d}", image=b"image", extension="jpg", caption="text")
            writer.write("train", record)
        writer.finish({})
    return tmp_path / "set"


def paths_of(source: str, split: str = "train") -> list[Path]:
    """Return the paths of a source's shards."""
    return [Path(shard.url) for shard in find_shards(source, split=split)]


def test_shards_by_folder_name_and_pattern(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("{folder}/train/{{0..14}}.tar", "3 of 15 files are missing, the first is {folder}/train/12.tar"),
        ("{folder}/train/{{0..3.tar", "the braces of '{folder}/train/{{0..3.tar' do not balance"),
        ("{folder}/train/99.tar", "no data at '{folder}/train/99.tar': there is no such file or folder"),
        (
            "glyph",
            "no data at 'glyph': there is no such file or folder, nor a built-in dataset (cues, digits, emoji, g",
        ),
        ("", "no data: the source is empty"),
        ("x" * 300, "no data at 'xxx"),
        ("x/" * 2500, "no data at 'x/x/"),
        ("{{1,2}}" + "x" * 300, "2 of 2 files are missing, the first is 1xxx"),
        ("~there-is-no-such-user/x", "no data at '~there-is-no-such-user/x': "),
        (
            "x{{0..300000000}}.tar",
            "the braces of 'x{{0..300000000}}.tar' expand to more than 1,000,000 names",
        ),
        (
            "{{0..9999}}{{0..9999}}",
            "the braces of '{{0..9999}}{{0..9999}}' expand to more than 1,000,000 names",
        ),
        ("{{0,{{0..9}}{{0..999999..-5}}}}", "the braces of '{{0,{{0..9}}{{0..999999..-5}}}}' expand to more"),
        ("{{0.." + "9" * 5000 + "}}", "the braces of '{{0..999"),
        ("{{" * 5000 + "1,2" + "}}" * 5000, "the braces of '{{{{{{"),
    ],
)
def test_missing_source_raises_error(source: str, message: str, folder: Path) -> None:
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
def test_names_of_patterns_are_counted(pattern: str, count: int) -> None:
    assert sources_module._count_names(pattern) == count == len(list(braceexpand.braceexpand(pattern)))


def test_missing_or_incomplete_split_raises_error(folder: Path) -> None:
    (folder / "bad_rows.jsonl").write_text("{}\n")  # written by data pack: not a table to pack
    for split in ("tset", "more"):
        (folder / "more").mkdir(exist_ok=True)
        with pytest.raises(DataError) as caught:
            paths_of(str(folder), split=split)
        assert str(caught.value) == f"{folder} has no split {split!r}, only train"
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


# Wildcards and common mistakes


def test_wildcards_match_local_shards(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = folder / "train"
    every = [train / f"{number}.tar" for number in range(12)]
    for name in ("notes.txt", ".9.tar", "0.tar.tmp"):
        (train / name).write_bytes(b"")
    (tmp_path / "set" / "folder.tar").mkdir()
    assert paths_of(f"{train}/*.tar") == paths_of(f"{train}/*") == every  # numeric order: 10 after 9
    assert paths_of(f"{train}/1?.tar") == every[10:]
    assert paths_of(f"{train}/[13].tar") == [every[1], every[3]]
    assert paths_of(f"{tmp_path}/*/train/{{3,1?}}.tar") == [every[3], *every[10:]]
    assert paths_of(f"{tmp_path}/**/*.tar") == every
    (train / ".9.tar").unlink()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths_of("train/*.tar") == paths_of("~/s?t/train/*.tar") == every
    strange = tmp_path / "set[1]*"  # an existing name takes precedence over a wildcard
    train.rename(strange)
    assert len(paths_of(str(strange))) == 12 and paths_of(f"{strange}/3.tar") == [strange / "3.tar"]
    monkeypatch.setattr(sources_module, "_MAX_NAMES", 5)
    with pytest.raises(DataError, match="matches more than 5 names: use their folder"):
        paths_of(f"{tmp_path}/*/*.tar")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("no*.tar", "no local file or folder matches 'no*.tar'"),
        ("tr*", "'tr*' matches folders: append /*.tar"),
        ("{train,none}/*.tar", "1 of 2 files are missing, the first is none/*.tar"),
        (
            "*.csv",
            "pairs.csv can be packed: it has no rows",
        ),
        (
            "pairs.csv",
            "pairs.csv can be packed: it has no rows",
        ),
        ("a cat.jpg", "a cat.jpg has images without captions: write the captions into .txt files"),
        ("*.tgz", "packed.tgz is compressed: unpack it first"),
        ("packed.tgz", "packed.tgz is compressed: unpack it first"),
        ("s3://pairs/*.tar", "s3://pairs/*.tar: stores do not support wildcards; name the folder"),
        ("https://h/a*/{0..3}.tar?s=Zq", "https://h/a*/{0..3}.tar: stores do not support wildcards"),
    ],
)
def test_error_suggests_the_correct_source(
    source: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "pairs.csv").write_text("image,caption\n")
    (folder / "a cat.jpg").write_bytes(b"\xff\xd8")
    (folder / "packed.tgz").write_bytes(gzip.compress(b""))
    with pytest.raises(DataError) as caught:
        find_shards(source)
    message = str(caught.value)
    assert said in message and "Zq" not in message and len(message.splitlines()) == 1


def test_existing_names_with_special_characters_are_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Existing files are used whatever their name; URLs and commands may contain such characters."""
    one = (folder / "train" / "1.tar").read_bytes()
    for name in ("a,b.tar", "a b.tar", "a::b.tar", "saved.tar.gz", "odd.csv"):
        (folder / name).write_bytes(one)
        assert paths_of(f"{folder}/{name}") == [folder / name]
    assert [shard.url for shard in find_shards("pipe:cat {1,2}.tar *")] == [
        "pipe:cat 1.tar *",
        "pipe:cat 2.tar *",
    ]


@pytest.mark.parametrize("page", [None, b"<a href=other.txt>"])
def test_web_folder_without_tars_shows_the_expected_form(page: bytes | None, nginx: servers.Nginx) -> None:
    if page is not None:
        nginx.put("dir/train/index.html", page)
    url = nginx.url("dir/").replace("http://", "http://user:Zq@")
    with pytest.raises(DataError) as caught:
        find_shards(f"{url}?s=Zq")
    message = str(caught.value)
    assert message.startswith(f"no tar, table or Parquet file of split 'train' in {nginx.url('dir')}; ")
    assert (
        message.endswith(f"; name the shards as {nginx.url('dir')}/{{00000..00331}}.tar")
        and "Zq" not in message
    )


def test_folder_of_other_files_raises_error_with_its_content(tmp_path: Path) -> None:
    for name, message in (
        ("0.tar.gz", "no tar, table or Parquet file of split 'train' in {0}"),
        ("0.parquet", "{1}/0.parquet cannot be read as Parquet: "),
        (
            "all.csv",
            "{1}/all.csv: which column is the image? Set --image-column; the columns are x. Write shards",
        ),
        ("0.JPG", "{0} has images without captions: write the captions into .txt files of the same names"),
        (
            "cats/0.webp",
            "{0} has images without captions: write the captions into .txt files of the same names",
        ),
    ):
        folder = tmp_path / f"my {name.replace('/', '_')}"
        for place in (folder, folder / "train"):
            (place / name).parent.mkdir(parents=True)
            (place / name).write_bytes(b"x")
            with pytest.raises(DataError) as caught:
                paths_of(str(folder))
            assert str(caught.value).startswith(message.format(folder, place))


@st.composite
def brace_patterns(draw: st.DrawFn, depth: int = 2) -> str:
    """Draw nested brace patterns."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["text", "range", "list"] if depth else ["text", "range"]))
        if kind == "text":
            parts.append(draw(st.sampled_from(["a", "b.tar", "-", "\\{", "\\,", "é/"])))
        elif kind == "range":
            first, last, step = draw(st.tuples(*[st.integers(-4, 9)] * 3))
            parts.append(f"{{{first}..{last}}}" if step < 0 else f"{{{first}..{last}..{step}}}")
        else:
            inside = [draw(brace_patterns(depth=depth - 1)) for _ in range(draw(st.integers(1, 3)))]
            parts.append("{" + ",".join(inside) + "}")
    return "".join(parts)


@settings(deadline=None)
@given(pattern=brace_patterns())
def test_names_of_random_patterns_are_counted(pattern: str) -> None:
    count = sources_module._count_names(pattern)
    assume(count < 3000)
    assert count == len(list(braceexpand.braceexpand(pattern)))


@settings(deadline=None)
@given(text=st.text("{},.01-\\a", max_size=9))
def test_random_source_raises_one_line_error(text: str) -> None:
    try:
        found = find_shards(f"/nowhere/{text}")
    except DataError as error:
        assert len(str(error).splitlines()) == 1
    else:
        raise AssertionError(f"{found} are not there")


def test_dataset_folder_has_splits(folder: Path) -> None:
    (folder / "test").mkdir()
    with webdataset.TarWriter(str(folder / "test" / "0.tar"), encoder=False) as tar:
        tar.write({"__key__": "a", "jpg": b"x"})
    assert paths_of(str(folder), split="test") == [folder / "test" / "0.tar"]
    assert paths_of(f"{folder}/test", split="train") == [folder / "test" / "0.tar"]


def test_shards_are_in_numeric_order_without_other_files(folder: Path) -> None:
    for name in ("0_stats.json", "0.parquet", "0.tar.tmp", "0.tgz"):
        (folder / "train" / name).write_bytes(b"")
    assert [path.name for path in paths_of(str(folder))] == [f"{number}.tar" for number in range(12)]


def test_local_shard_has_size_and_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "train" / "3.tar"
    shard = ShardFile.at(path)
    status = path.stat()
    version = f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
    assert (shard.url, shard.size, shard.version) == (str(path), status.st_size, version)
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
def test_remote_sources_are_recognized(source: str, remote: bool, name: str) -> None:
    assert is_remote(source) is remote
    shard = ShardFile(url=source, size=1, version="")
    assert (shard.is_remote, shard.name) == (remote, name)
