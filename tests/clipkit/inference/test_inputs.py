"""Tests of input streams from every kind of source: deterministic order, each item once, bounded memory."""

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from clipkit.config import Config, DataConfig, to_toml
from clipkit.errors import DataError
from clipkit.inference.inputs import (
    MAX_LINE,
    Item,
    Kind,
    Stream,
    read_caption,
    read_image,
    readable,
    recorded_members,
)
from clipkit.samples import find_split
from clipkit.samples.folders import MAX_BYTES


def write_tar(path: Path, files: Sequence[tuple[str, bytes]], **how: int) -> Path:
    with tarfile.open(path, "w", **how) as tar:  # type: ignore[call-overload]
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def found(*sources: str | Path, kind: Kind = "image", **more: Any) -> list[tuple[str, str]]:
    """Key and cause of each item, which must be equal in two passes."""
    stream = Stream([str(source) for source in sources], kind=kind, **more)
    items = [(item.key, item.cause) for item in stream]
    assert items == [(item.key, item.cause) for item in stream]
    return items


def texts(*sources: str | Path, **more: Any) -> list[str]:
    stream = Stream([str(source) for source in sources], kind="caption", **more)
    return [outcome(item) for item in stream]


def outcome(item: Item) -> str:
    try:
        return read_caption(item)
    except DataError as error:
        return f"<{error}>"


def cause(item: Item) -> str:
    with pytest.raises(DataError) as caught:
        read_image(item)
    return str(caught.value)


def test_folder_lists_all_images_below_it_in_path_order(tmp_path: Path) -> None:
    for name in ("b.jpg", "a/z.PNG", "a/deep/er/x.webp", "a.b/y.tiff", "a0.gif", "note.txt", "noext"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / ".hidden.jpg").touch()
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/x.jpg").touch()
    (tmp_path / "link.jpg").symlink_to("b.jpg")
    (tmp_path / "a/loop").symlink_to(tmp_path)
    (tmp_path / "other").symlink_to("a/deep")
    names = ["a.b/y.tiff", "a/deep/er/x.webp", "a/z.PNG", "a0.gif", "b.jpg", "link.jpg", "other/er/x.webp"]
    stream = Stream([str(tmp_path)])
    items = [item for item in stream if not item.cause]
    assert [item.key for item in items] == [str(tmp_path / name) for name in names]
    assert [(item.key, item.cause) for item in stream if item.cause] == [
        (str(tmp_path / "a/loop"), "link to a folder that contains it")
    ]
    read = [read_image(item).decode() for item in items]
    assert read == [*names[:-2], "b.jpg", "a/deep/er/x.webp"]
    assert {item.source for item in Stream([str(tmp_path)])} == {str(tmp_path)}


def test_unusual_extensions_and_formats_are_items(tmp_path: Path) -> None:
    jpeg = b"\xff\xd8\xff\xe0"
    for name in ("1.jfif", "2.jpg_large", "3", "4.JXL"):
        (tmp_path / name).write_bytes(jpeg)
    (tmp_path / "5.jxl").write_bytes(b"\0\0\0\x0cJXL \r\n\x87\n")
    (tmp_path / "6.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    cause = "JXL images cannot be read: convert them to JPEG or PNG"
    causes = {Path(item.key).name: item.cause for item in Stream([str(tmp_path)])}
    assert causes == {"1.jfif": "", "2.jpg_large": "", "3": "", "4.JXL": "", "5.jxl": cause}


def test_names_other_than_utf8_are_found_and_read(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9\n.jpg")).write_bytes(b"x")
    (item,) = Stream([str(tmp_path)])
    assert read_image(item) == b"x"
    assert item.key == f"{tmp_path}/caf\\xe9\n.jpg"  # Parquet files can only store UTF-8
    assert readable("naïve 🐈") == "naïve 🐈"


def test_memory_is_independent_of_the_number_of_images(tmp_path: Path) -> None:
    """Twenty times the images in folders of 50: the names alone would take some 300 KB more."""

    def peak(folder: Path) -> int:
        tracemalloc.start()
        count = sum(1 for _ in Stream([str(folder)]))
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count == int(folder.name)
        return top

    sizes = {}
    for count in (150, 3000):
        folder = tmp_path / str(count)
        folder.mkdir()
        for number in range(count):
            path = folder / str(number // 50) / f"{'long ' * 10}{number}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.touch()
        sizes[count] = min(peak(folder) for _ in range(3))  # excludes other allocations
    # one file of 100 names is open per hundred images: its buffer of some 10 KB counts, but not the names
    assert sizes[3000] - sizes[150] < 30 * 16_384


def test_unreadable_files_are_items_with_a_cause(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "gone.jpg").symlink_to("nowhere")
    with (tmp_path / "large.jpg").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    causes = {Path(item.key).stem: cause(item) for item in Stream([str(tmp_path)])}
    assert causes == {
        "empty": "empty file",
        "gone": "missing file",
        "large": "file of more than 256 MiB",
        "pipe": "not a file",
    }


def test_unreadable_subfolder_is_an_item_with_a_cause() -> None:
    with TemporaryDirectory() as name:  # other users cannot read pytest's folder
        root = Path(name)
        root.chmod(0o755)
        (root / "a.jpg").touch()
        (root / "b").mkdir(mode=0)
        user = os.geteuid()
        os.seteuid(user or 65534)  # root may read everything
        try:
            assert [(item.key, item.cause) for item in Stream([name])] == [
                (f"{name}/a.jpg", ""),
                (f"{name}/b", "cannot read folder: Permission denied"),
            ]
        finally:
            os.seteuid(user)


SAMPLES = [
    ("0001.jpg", b"one"),
    ("0001.txt", b"first"),
    ("0001.json", b'{"caption": "not this"}'),
    ("sub/0002.seg.png", b"mask"),
    ("sub/0002.PNG", b"two"),
    ("sub/0002.json", b'{"caption": "second"}'),
    ("0003.txt", b"third"),
    ("0004.jpeg", b"four"),
    ("0004.json", b"[" * 100_000),
]


def test_shards_yield_samples_with_key_image_and_caption(tmp_path: Path) -> None:
    for number, name in enumerate(["0.tar", "2.tar", "10.tar"]):
        files = [(f"{number}/{key}", content) for key, content in [*SAMPLES, (".x.jpg", b"")]]
        write_tar(tmp_path / name, files)
    _, shards = find_split(tmp_path, "train")
    assert [file.name for file in shards] == ["0.tar", "2.tar", "10.tar"]
    one = [("{}/0001", ""), ("{}/sub/0002", ""), ("{}/0003", ""), ("{}/0004", "")]
    keys = [(key.format(number), why) for number in range(3) for key, why in one]
    assert found(tmp_path) == keys
    assert found(f"{tmp_path}/{{0,2,10}}.tar") == keys
    assert found(tmp_path / "2.tar", tmp_path / "0.tar") == keys[4:8] + keys[:4]
    items = list(Stream([str(tmp_path)]))
    assert {item.source for item in items} == {file.url for file in shards}
    assert [read_image(items[i]) for i in (0, 1, 3)] == [b"one", b"two", b"four"]
    assert cause(items[2]) == "no image, only txt"
    *captions, damaged = texts(tmp_path / "0.tar")
    assert captions == ["first", "second", "third"] and damaged.startswith("<its json does not parse: ")


def test_dataset_folder_lists_the_shards_of_all_splits(tmp_path: Path) -> None:
    for split, key in (("train", "a"), ("test", "b"), ("notes", "c")):
        (tmp_path / split).mkdir()
        write_tar(tmp_path / split / "0.tar", [(f"{key}.jpg", b"x"), (f"{key}.txt", key.encode())])
        if split != "notes":
            (tmp_path / split / "nshards.txt").write_text("1\n")
    (tmp_path / "bad_rows.jsonl").touch()
    assert found(tmp_path) == [("b", ""), ("a", "")]
    assert texts(tmp_path) == ["b", "a"]


def test_wildcards_match_paths_in_numeric_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (9, 10, 100):
        write_tar(tmp_path / f"part-{number}.tar", [(f"{number}.jpg", b"x")])
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".part-1.tar").touch()
    keys = [("9", ""), ("10", ""), ("100", "")]
    assert found(tmp_path / "*.tar") == found(tmp_path / "part-*.tar") == keys
    assert found(f"{tmp_path}/part-{{100,[0-9]}}.tar") == [keys[2], keys[0]]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert found("~/*.tar") == keys
    write_tar(tmp_path / "[9]*.tar", [("own.jpg", b"x")])
    assert found(tmp_path / "[9]*.tar") == [("own", "")]


def test_blank_caption_is_missing_but_blank_line_is_a_text(tmp_path: Path) -> None:
    shard = write_tar(
        tmp_path / "0.tar",
        [("1.txt", b""), ("2.txt", b" \n"), ("3.json", b'{"caption": ""}'), ("4.txt", b"x")],
    )
    assert texts(shard) == ["<empty caption>"] * 3 + ["x"]
    (tmp_path / "t.jsonl").write_text('{"text": " "}\n{"text": null}\n{"text": "x"}\n')
    assert texts(tmp_path / "t.jsonl") == ["<empty caption>", "<no caption>", "x"]
    (tmp_path / "lines.txt").write_text("\nx\n")
    assert texts(tmp_path / "lines.txt") == ["", "x"]


def test_folder_with_images_and_shards_lists_both(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.png", "sub/a.png"):
        (tmp_path / name).touch()
    write_tar(tmp_path / "backup.tar", SAMPLES[:2])
    names = [str(tmp_path / "b.png"), str(tmp_path / "sub/a.png")]
    assert found(tmp_path) == [(name, "") for name in ["0001", *names]]
    assert texts(tmp_path) == ["first"]


def test_repeated_member_is_reported(tmp_path: Path) -> None:
    files = [
        ("1.jpg", b"a"),
        ("1.jpg", b"b"),
        ("1.txt", b"one"),
        ("1.txt", b"uno"),
        ("1.x", b""),
        ("1.x", b""),
    ]
    shard = write_tar(tmp_path / "0.tar", [*files, ("2.jpg", b"c")])
    fault = ", ".join(f"1 more {name} in samples that have one already" for name in ("jpg", "txt", "x"))
    assert found(shard) == [("1", ""), ("2", ""), ("", f"{shard}: {fault}")]
    assert found(shard, kind="caption")[2] == ("", f"{shard}: {fault}")
    (first, *_) = Stream([str(shard)])
    assert read_image(first) == b"a"


@pytest.mark.parametrize("how", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_long_names_in_every_tar_format(tmp_path: Path, how: int) -> None:
    name = "folder/" * 20 + "ä" * 20 + ".jpg"
    if how != tarfile.USTAR_FORMAT:
        name = "x" * 300 + "/" + name
    shard = write_tar(tmp_path / "0.tar", [(name, b"x")], format=how)
    assert found(shard) == [(name.removesuffix(".jpg"), "")]


def test_broken_shard_yields_the_samples_before_the_fault(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "whole.tar", SAMPLES)
    data = whole.read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[:2000])
    (tmp_path / "no_end.tar").write_bytes(data[: 2 * 512 * len(SAMPLES)])
    header = bytearray(data)
    header[3 * 1024] ^= 0xFF
    (tmp_path / "header.tar").write_bytes(header)
    (tmp_path / "empty.tar").touch()
    (tmp_path / "text.tar").write_text("no tar" * 1000)
    for name, keys, why in [
        ("cut.tar", ["0001"], "is truncated"),
        ("header.tar", [], "has a broken header at byte 3072"),
        ("empty.tar", [], "is empty"),
        ("text.tar", [], "is not a tar file"),
    ]:
        *before, (key, why_not) = found(tmp_path / name)
        assert ([key for key, _ in before], key) == (keys, "")
        assert why in why_not
    # the remaining shards are still read
    assert len(found(tmp_path / "cut.tar", whole)) == 2 + 4


def test_rewritten_or_deleted_shard_is_a_cause(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "0.tar", SAMPLES)
    items = list(Stream([str(shard)]))
    assert read_image(items[0]) == b"one"
    os.truncate(shard, 3600)
    assert cause(items[1]) == "the shard is shorter than when it was indexed"
    stream = Stream([str(write_tar(tmp_path / "1.tar", SAMPLES))])
    assert len(list(stream)) == 4
    (tmp_path / "1.tar").unlink()
    assert [item.cause for item in stream] == [f"shard {tmp_path / '1.tar'}: No such file or directory"]


def test_tables_of_paths_and_captions(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"a")
    (tmp_path / "b.jpg").write_bytes(b"b")
    table = tmp_path / "t.csv"
    rows = ["a.jpg,one", "gone.jpg,", ",three", "https://x/a.jpg,four", "file://b.jpg,five"]
    table.write_text("\n".join(["file,text", *rows]) + "\n")
    items = list(Stream([str(table)]))
    assert [(Path(item.key).name, item.caption) for item in items if not item.cause] == [
        ("a.jpg", "one"),
        ("gone.jpg", None),
        ("b.jpg", "five"),
    ]
    assert [read_image(items[0]), read_image(items[4])] == [b"a", b"b"]
    assert [cause(item) for item in items[1:4]] == [
        "missing file",
        "no path",
        "a web address, not a file: download it first",
    ]
    assert texts(table) == ["one", "<empty caption>", "three", "four", "five"]
    assert [item.key for item in Stream([str(table)], kind="caption")] == ["1", "2", "3", "4", "5"]
    (tmp_path / "a b.jpg").write_bytes(b"blank")
    table.write_text(f"file\nfile://{tmp_path}/a%20b.jpg\nfile://localhost{tmp_path}/a.jpg\n")
    assert [read_image(item) for item in Stream([str(table)])] == [b"blank", b"a"]
    lone = tmp_path / "t.jsonl"
    lone.write_text('{"text": "half a pair \\ud800", "other": "y"}\n{"text": 5}\nno\n')
    assert texts(lone) == [
        "<caption is not UTF-8>",
        "<caption is neither a string nor a list of strings>",
        "<not JSON>",
    ]
    assert texts(lone, captions=["other"]) == ["y", "<no caption>", "<not JSON>"]


def test_text_files_with_columns_are_tables(tmp_path: Path) -> None:
    table = tmp_path / "captions.txt"
    table.write_text('image,caption\na.jpg,one\nimg\\b.jpg,"two, three"\n')
    assert [Path(item.key) for item in Stream([str(table)])] == [tmp_path / "a.jpg", tmp_path / "img/b.jpg"]
    assert texts(table) == ["one", "two, three"]
    table.write_text("an image, a caption\na.jpg,one\n")
    assert texts(table) == ["an image, a caption", "a.jpg,one"]
    with pytest.raises(DataError, match="contains texts: add --text"):
        Stream([str(table)])
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"file": "a.jpg", "text": "one"}{"file": "b.jpg", "text": "two"}'))
    assert texts(packed) == ["one", "two"]


def test_damaged_parquet_table_yields_the_rows_before_the_damage(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    captions = [os.urandom(100).hex() for _ in range(20_000)]
    parquet.write_table(pyarrow.table({"text": captions}), path, row_group_size=10_000, use_dictionary=False)
    content = bytearray(path.read_bytes())
    for place in range(len(content) * 5 // 8, len(content) * 5 // 8 + 400_000):  # in the second row group
        content[place] ^= 0x5A
    path.write_bytes(content)
    items = list(Stream([str(path)], kind="caption"))
    assert items[0].caption == captions[0]
    assert "is damaged after row" in items[-1].cause


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_text_file_has_one_text_per_line(tmp_path: Path, encoding: str) -> None:
    lines = ["one", "", "drei ä 🐈", "  four\tand more ", "five\u2028still five\x0c"]
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(lines), encoding=encoding)
    assert texts(path) == lines
    path.write_text("\r\n".join([*lines, ""]), encoding=encoding, newline="")
    assert texts(path) == lines
    assert [item.key for item in Stream([str(path)], kind="caption")] == ["1", "2", "3", "4", "5"]


def test_too_long_line_is_a_cause(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("one\n" + "x" * (3 * MAX_LINE) + "\nthree\n")
    assert texts(path) == ["one", "<line of more than 1,048,576 characters>", "three"]
    path.write_text("y" * (MAX_LINE + 1))
    assert texts(path) == ["<line of more than 1,048,576 characters>"]
    path.write_bytes(b"caf\xe9\n" + b"z" * MAX_LINE + b"\n")
    assert texts(path) == ["caf\ufffd", "<line of more than 1,048,576 characters>"]


def test_standard_input_can_be_read_twice() -> None:
    code = (
        "from clipkit.inference.inputs import Stream\n"
        "stream = Stream(['-'], kind='caption')\n"
        "print([[item.caption for item in stream] for _ in range(2)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input="one\ntwo", capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str([["one", "two"]] * 2)


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("nowhere", "image", "no data at 'nowhere': there is no such file or folder"),
        ("nowhere/{0..3}.tar", "image", "4 of 4 files are missing, the first is nowhere/0.tar"),
        ("{0..99999999}.tar", "image", "more than 1,000,000 names"),
        ("{0..999}{0..9}{-99..100}.tar", "image", "more than 1,000,000 names"),
        ("x{1,2.tar", "image", "do not balance"),
        ("lines.txt", "image", "contains texts: add --text"),
        ("-", "image", "contains texts: add --text"),
        ("0.tar.gz", "image", "is compressed"),
        ("a.jpg", "caption", "texts are read from a .txt file"),
        ("photos", "caption", "photos: texts are read from a .txt file"),
        ("table.csv", "caption", "which column is the caption"),
        ("empty", "image", "empty has no images, tars, tables or Parquet files"),
        ("arrays", "image", "Parquet files; .npy files are images only if a table lists them"),
        ("empty.csv", "image", "empty.csv is empty"),
        ("no*.tar", "image", "no local file or folder matches 'no*.tar'"),
        ("{photos,none}/*", "image", "1 of 2 files are missing, the first is none/*"),
        ("empty.txt", "caption", "contains no text"),
    ],
)
def test_invalid_sources_raise_one_line_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, kind: Kind, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    for name in ("lines.txt", "0.tar.gz", "a.jpg", "photos/a.jpg", "empty.txt", "empty.csv", "arrays/a.npy"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("table.csv").write_text("path\na.jpg\n")
    with pytest.raises(DataError) as caught:
        list(Stream([source], kind=kind))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_existing_path_with_braces_is_not_expanded(tmp_path: Path) -> None:
    (tmp_path / "a{1,2}.jpg").write_bytes(b"x")
    assert found(tmp_path / "a{1,2}.jpg") == [(str(tmp_path / "a{1,2}.jpg"), "")]


def test_keys_are_json_serializable(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "0.tar", [("caf\udce9.jpg", b"x")])
    assert [json.loads(json.dumps(key)) for key, _ in found(shard)] == ["caf\\xe9"]


def test_image_in_several_rows_is_read_once(tmp_path: Path) -> None:
    """Spellings of a path are the same image; rows of captions are all read."""
    table = tmp_path / "captions.csv"
    table.write_text("image,caption\na.png,first\n./a.png,second\nb.png,third\nsub/../a.png,fourth\n,fifth\n")
    stream = Stream([str(table)])
    assert [(item.image, item.caption, item.cause) for item in stream] == [
        (tmp_path / "a.png", "first", ""),
        (tmp_path / "b.png", "third", ""),
        (None, None, "no path"),
    ]
    assert stream.repeated == 2
    assert stream.notes == ["2 rows have the image of an earlier row: each image is read once"]
    assert len(list(stream)) == 3 and stream.repeated == 2  # again
    texts = Stream([str(table)], kind="caption")
    assert [item.caption for item in texts] == ["first", "second", "third", "fourth", "fifth"]
    assert texts.notes == []


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_captions_of_parquet_files_are_read_as_of_other_tables(tmp_path: Path) -> None:
    images = [b"1", b"2", b"3"]
    cells = ['["a cat", "a pet"]', "['c' 'd']", "e"]
    file = write_parquet(tmp_path / "lists.parquet", {"image": images, "caption": cells})
    assert texts(file) == ["a cat", "a pet", "c", "d", "e"]
    assert [item.caption and read_caption(item) for item in Stream([str(file)])] == ["a cat", "c", "e"]
    conversation = [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "a dog"}]
    file = write_parquet(tmp_path / "llava.parquet", {"image": images, "conversations": [conversation] * 3})
    assert texts(file) == ["a dog"] * 3


def test_columns_of_parquet_files_are_chosen_as_of_other_tables(tmp_path: Path) -> None:
    columns = {"photo": [b"other"], "jpg": [b"image"], "captions": [["other"]], "text": ["caption"]}
    file = write_parquet(tmp_path / "t.parquet", columns)
    assert [read_image(item) for item in Stream([str(file)])] == [b"image"]
    assert texts(file) == ["caption"]


def test_captions_of_tables_without_header_are_found(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes(b"x")
    table = tmp_path / "Flickr8k.token"
    table.write_text("a.jpg#0\tA dog runs .\na.jpg#1\tA dog .\nb.jpg#0\tA cat .\n")
    assert [item.caption for item in Stream([str(table)])] == ["A dog runs .", "A cat ."]
    assert texts(table) == ["A dog runs .", "A dog .", "A cat ."]


def test_parquet_files_with_null_images_and_paths_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"a")
    null = write_parquet(tmp_path / "null.parquet", {"image": [None, {"bytes": b"b", "path": "b.jpg"}]})
    items = list(Stream([str(null)]))
    with pytest.raises(DataError, match="there is no image"):
        read_image(items[0])
    assert read_image(items[1]) == b"b"
    images = [{"bytes": None, "path": "a.jpg"}, {"bytes": b"b", "path": "b.jpg"}]
    paths = write_parquet(tmp_path / "paths.parquet", {"image": images, "text": ["one", "two"]})
    items = list(Stream([str(paths)]))
    assert [read_image(item) for item in items] == [b"a", b"b"]
    assert [item.caption for item in items] == ["one", "two"]


def test_first_of_parquet_columns_with_one_name_is_used(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = [pyarrow.array(values) for values in ([b"1"], ["first"], ["second"])]
    table = pyarrow.Table.from_arrays(columns, names=["image", "caption", "caption"])
    parquet.write_table(table, tmp_path / "t.parquet")
    assert texts(tmp_path / "t.parquet") == ["first"]
    assert [read_image(item) for item in Stream([str(tmp_path / "t.parquet")])] == [b"1"]


def test_members_are_read_by_name(tmp_path: Path) -> None:
    files = [("1.png", b"other"), ("1.mask", b"image"), ("1.sci.txt", b"felis"), ("1.com.txt", b"cat")]
    files += [("2.mask", b"image"), ("2.com.txt", b"dog"), ("2.json", b'{"names": {"de": "Hund"}}')]
    shard = write_tar(tmp_path / "0.tar", files)
    assert texts(shard, captions=["sci.txt", "com.txt"]) == ["felis", "dog"]
    assert texts(shard, captions=["names.de"]) == ["<no caption>", "Hund"]
    items = list(Stream([str(shard)], image="mask", captions=["com.txt"]))
    assert [(read_image(item), read_caption(item)) for item in items] == [
        (b"image", "cat"),
        (b"image", "dog"),
    ]


@pytest.mark.parametrize("kind", ["0.tar", "t.parquet", "t.csv"])
@pytest.mark.parametrize("option", ["image", "captions"])
def test_names_that_no_sample_has_are_one_error(tmp_path: Path, kind: str, option: str) -> None:
    path = tmp_path / kind
    if kind == "0.tar":
        write_tar(path, [(f"{i}.{name}", b"x") for i in range(3) for name in ("jpg", "txt")])
    elif kind == "t.csv":
        path.write_text("image,txt\na.jpg,x\n")
    else:
        write_parquet(path, {"jpg": [b"x"] * 3, "txt": ["x"] * 3})
    options: dict[str, Any] = {option: {"image": "jpeg", "captions": ["tx"]}[option]}
    with pytest.raises(DataError, match=r"has no .*(jpg|txt)"):
        list(Stream([str(path)], **options))


def test_members_of_the_training_are_read_where_samples_have_them(tmp_path: Path) -> None:
    config = Config(data=DataConfig(image="Mask", captions=("names.de", "sci.txt")))
    (tmp_path / "config.toml").write_text(to_toml(config))
    recorded = recorded_members(f"clipkit checkpoint {tmp_path}")
    assert recorded == ("mask", ("names.de", "sci.txt"))
    assert recorded_members("ViT-B-32") == ("", ())
    trained = write_tar(
        tmp_path / "0.tar", [("1.png", b"other"), ("1.mask", b"image"), ("1.sci.txt", b"felis")]
    )
    others = write_tar(tmp_path / "1.tar", [("1.png", b"other"), ("1.txt", b"cat")])
    (tmp_path / "shards").mkdir()
    write_tar(tmp_path / "shards" / "0.tar", [])
    (tmp_path / "shards" / "1.tar").symlink_to(others)
    kinds: tuple[Kind, ...] = ("image", "caption")
    for kind in kinds:
        stream = Stream([str(trained), str(others)], kind=kind)
        stream.recorded = recorded
        items = list(stream)
        assert [(read_image(item), read_caption(item)) for item in items] == [
            (b"image", "felis"),
            (b"other", "cat"),
        ]
        empty_first = Stream([str(tmp_path / "shards" / "{0..1}.tar")], kind=kind)
        empty_first.recorded = recorded
        assert [read_caption(item) for item in empty_first] == ["cat"] and not empty_first.notes
        names = "mask" if kind == "image" else "names.de and sci.txt"
        assert stream.notes == [f"read from {names}, as in the model's training"]
        given = Stream([str(trained)], kind=kind, image="png", captions=["sci.txt"])
        before = [item.stamp for item in given]
        given.recorded = recorded
        assert [item.stamp for item in given] == before and not given.notes
        assert [read_image(item) for item in given] == [b"other"]


def test_default_captions_of_the_training_are_guessed(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(Config()))
    assert recorded_members(f"clipkit checkpoint {tmp_path}") == ("", ())
