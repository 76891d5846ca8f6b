"""Tests of JSON Lines with several objects per line, of JSON documents, and of captions in lists."""

import gzip
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from clipkit.errors import DataError
from clipkit.samples import Table, is_table, listed_path

ROWS = [{"image": f"{i}.jpg", "caption": f"n {i}"} for i in range(4)]


def read(path: Path, content: object, **arguments: Any) -> list[tuple[object, object] | str]:
    """Write a document, or text as it is; return the path and caption of each row, or its cause."""
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    rows = list(Table(path, **{"image_column": None, "caption_column": None, **arguments}))
    assert [row.number for row in rows] == list(range(1, len(rows) + 1))
    return [row.cause or (row.path, row.caption) for row in rows]


def expected(*numbers: int) -> list[tuple[object, object] | str]:
    return [(f"{i}.jpg", f"n {i}") for i in numbers]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["", " ", ",", ", ", "\n", "\r\n", ",\n", "\n\n"]), min_size=3, max_size=3))
def test_objects_are_rows_however_they_are_separated(separators: list[str]) -> None:
    text = "".join(
        json.dumps(row) + separator for row, separator in zip(ROWS, [*separators, ""], strict=True)
    )
    with TemporaryDirectory() as folder:
        assert read(Path(folder, "t.jsonl"), text) == expected(0, 1, 2, 3)
        assert read(Path(folder, "t.json"), text) == expected(0, 1, 2, 3)


def test_errors_within_a_line_are_bad_rows(tmp_path: Path) -> None:
    first, second, third, _ = map(json.dumps, ROWS)
    text = f"{first} {second} oops {third}\n[{first}] {third}\n{second[:-3]}"
    assert read(tmp_path / "t.jsonl", text) == [
        *expected(0, 1), "not JSON", "not a JSON object", *expected(2), "not JSON",
    ]  # fmt: skip


def test_line_of_many_objects_is_read_in_bounded_memory(tmp_path: Path) -> None:
    rows = [{"image": f"é{i}.jpg", "caption": "x" * 100} for i in range(30_000)]  # 4 MB in a line
    text = " ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    assert read(tmp_path / "t.jsonl", text) == [(row["image"], row["caption"]) for row in rows]
    long = json.dumps({"image": "x" * 3 * 2**20})
    text = f"{json.dumps(ROWS[0])} {long} {json.dumps(ROWS[1])}\n{json.dumps(ROWS[2])}\n"
    cause = "an object longer than 1,048,576 characters, or not JSON: the rest of the line is not read"
    assert read(tmp_path / "t.jsonl", text) == [*expected(0), cause, *expected(2)]


def test_compressed_json_is_read(tmp_path: Path) -> None:
    for name, text in (("t.jsonl.gz", "\n".join(map(json.dumps, ROWS))), ("t.json.gz", json.dumps(ROWS))):
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
        rows = Table(tmp_path / name, image_column=None, caption_column=None)
        assert [(row.path, row.caption) for row in rows] == expected(0, 1, 2, 3)
        assert is_table(tmp_path / name)


def test_captions_of_coco_are_joined_with_their_images(tmp_path: Path) -> None:
    images = [{"id": i, "file_name": f"{i}.jpg", "width": 9, "coco_url": f"http://h/{i}"} for i in (7, 8, 9)]
    annotations = [(9, "a"), (7, "b"), (9, "c"), (5, "lost"), (5, "too")]
    document = {
        "info": {},
        "licenses": [{"id": 1}],
        "images": images,
        "annotations": [{"image_id": i, "id": 0, "caption": text} for i, text in annotations],
    }
    cause = "captions of an image that is not in the list of images"
    for indent in (None, 1):
        assert read(tmp_path / "captions.json", json.dumps(document, indent=indent)) == [
            ("7.jpg", ["b"]), ("8.jpg", None), ("9.jpg", ["a", "c"]), cause,
        ]  # fmt: skip
    urls = Table(
        tmp_path / "captions.json", image_column=None, caption_column=None,
        image_name="url", image_columns=("url", "coco_url"), others=None,
    )  # fmt: skip
    row = next(iter(urls))
    assert row.path == "http://h/7" and row.others == {"id": 7, "file_name": "7.jpg", "width": 9}
    document["annotations"] = [{"image_id": 7, "bbox": [0, 0, 1, 1]}]
    with pytest.raises(DataError, match=r"its annotations have no captions \(COCO's are in captions_"):
        read(tmp_path / "instances.json", document)


@pytest.mark.parametrize("name", ["title", "caption", "text", "alt", "Description"])
def test_captions_of_coco_are_used_whatever_fields_images_have(tmp_path: Path, name: str) -> None:
    document = {
        "images": [{"id": 1, "file_name": "0.jpg", name: "DSC_1"}, {"id": 2, "file_name": "1.jpg"}],
        "annotations": [{"image_id": 1, "caption": "a cat"}],
    }
    assert read(tmp_path / "t.json", document) == [("0.jpg", ["a cat"]), ("1.jpg", None)]
    assert read(tmp_path / "t.json", document, caption_column=name)[0] == ("0.jpg", "DSC_1")
    table = Table(tmp_path / "t.json", image_column=None, caption_column=None, others=None)
    assert next(iter(table)).others == {"id": 1, name: "DSC_1"}


def test_captions_of_coco_without_an_image_name_its_id(tmp_path: Path) -> None:
    document = {
        "images": [{"id": 1, "file_name": "0.jpg"}],
        "annotations": [{"image_id": i, "caption": "a cat"} for i in (1, 7, 7, "x")],
    }
    (tmp_path / "t.json").write_text(json.dumps(document))
    rows = list(Table(tmp_path / "t.json", image_column=None, caption_column=None))
    assert [row.path for row in rows] == ["0.jpg", "image_id 7 (captions: 2)", "image_id x (captions: 1)"]
    assert rows[1].cause == rows[2].cause == "captions of an image that is not in the list of images"


def test_first_answer_of_a_conversation_is_the_caption(tmp_path: Path) -> None:
    def turns(*texts: str) -> list[dict[str, str]]:
        return [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]

    document = [
        {
            "id": "1",
            "image": "1.jpg",
            "conversations": turns("Describe.\n<image>", "a couch", "Color?", "red"),
        },
        {"id": "2", "conversations": turns("Hello", "Hello!")},
        {"id": "3", "image": "3.jpg", "conversations": turns("Unanswered")},
        {"id": "4", "image": "4.jpg", "conversations": []},
    ]
    rows = [("1.jpg", "a couch"), (None, "Hello!"), ("3.jpg", [None]), ("4.jpg", [])]
    assert read(tmp_path / "llava.json", document) == rows
    assert read(tmp_path / "llava.jsonl", "\n".join(map(json.dumps, document))) == rows
    table = Table(tmp_path / "llava.json", image_column=None, caption_column=None)
    assert table.left_out == {"conversations": "except the first answer of each, which is the caption"}


@pytest.mark.parametrize(
    ("document", "rows"),
    [
        ([*ROWS[:1], 7, "text"], [*expected(0), "not a JSON object", "not a JSON object"]),
        ({"data": ROWS[:2], "version": 1}, expected(0, 1)),
        # Karpathy's splits of Flickr8k and COCO
        (
            {"dataset": "x", "images": [{"filename": "1.jpg", "sentences": [{"raw": "A b"}, {"raw": "c"}]}]},
            [("1.jpg", ["A b", "c"])],
        ),
        (
            {"images": [{"filepath": "val", "filename": "1.jpg", "sentences": [{"raw": "A b"}]}]},
            [("val/1.jpg", ["A b"])],
        ),
        ([{"image": "1.jpg", "captions": ["x", "y"]}], [("1.jpg", ["x", "y"])]),
    ],
)  # fmt: skip
def test_documents(tmp_path: Path, document: object, rows: list[object]) -> None:
    assert read(tmp_path / "t.json", document) == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"image": "a.jpg"', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "has no JSON object in its first 100 rows"),
        ("7", "expected a list of objects"),
        ('{"image": {"0": "a.jpg"}, "caption": {"0": "x"}}', "expected a list of objects"),
        ('{"a": [{"x": 1}], "b": [{"x": 1}]}', "expected a list of objects"),
        ("", "is not JSON"),
    ],
)
def test_other_documents_raise_error(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"t\.json:? {message}"):
        read(tmp_path / "t.json", content)


def test_size_of_a_document_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipkit.samples.table.json_rows.LARGEST", 2**20)
    with pytest.raises(DataError, match="is larger than 1 MiB"):
        read(tmp_path / "t.json", [{"image": "x" * 2**20}])
    assert len(read(tmp_path / "t.json", "\n".join(map(json.dumps, ROWS * 10_000)))) == 40_000  # JSON Lines


def test_lists_of_captions_in_parquet(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    turns = pyarrow.struct([("from", pyarrow.string()), ("value", pyarrow.string())])
    kinds: list[tuple[Any, Any, Any]] = [
        (pyarrow.list_(pyarrow.string()), ["a", "b"], ["a", "b"]),
        (pyarrow.large_list(pyarrow.large_string()), ["a", "b"], ["a", "b"]),
        (pyarrow.list_(pyarrow.string(), 2), ["a", "b"], ["a", "b"]),
        (pyarrow.list_(turns), [{"from": "human", "value": "?"}, {"from": "gpt", "value": "a"}], "a"),
        (pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), "a", "a"),
    ]
    for kind, value, caption in kinds:
        columns = {"image": ["1.jpg", "2.jpg"], "caption": pyarrow.array([value, None], kind)}
        parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
        rows = list(Table(tmp_path / "t.parquet", image_column=None, caption_column=None))
        assert [(row.path, row.caption) for row in rows] == [("1.jpg", caption), ("2.jpg", None)]
    for kind, value in ((pyarrow.list_(pyarrow.int64()), [1]), (pyarrow.list_(pyarrow.binary()), [b"x"])):
        columns = {"image": ["1.jpg"], "caption": pyarrow.array([value], kind)}
        parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
        with pytest.raises(DataError, match=r"column 'caption' contains list<.*, not text"):
            Table(tmp_path / "t.parquet", image_column=None, caption_column=None)


def test_listed_paths(tmp_path: Path) -> None:
    for name in ("a b%.jpg", "100%25.jpg", "back\\slash.jpg", "é.jpg"):
        (tmp_path / name).touch()
    (tmp_path / "img").mkdir()
    (tmp_path / "img/1.jpg").touch()
    for text, name in [
        (f"file://{tmp_path}/a%20b%25.jpg", "a b%.jpg"),
        (f"file://localhost{tmp_path}/a b%.jpg", "a b%.jpg"),
        (f"file://{tmp_path}/100%2525.jpg", "100%25.jpg"),
        (f"file://{tmp_path}/%C3%A9.jpg", "é.jpg"),
        ("100%25.jpg", "100%25.jpg"),  # no URL
        ("back\\slash.jpg", "back\\slash.jpg"),
        ("img\\1.jpg", "img/1.jpg"),
        (".\\img\\1.jpg", "img/1.jpg"),
        (f"{tmp_path}/img\\1.jpg", "img/1.jpg"),
    ]:
        assert listed_path(tmp_path, text) == tmp_path / name
    assert not listed_path(tmp_path, "missing\\1.jpg").exists()
    listed_path(tmp_path, "long\\" * 10_000)
    listed_path(tmp_path, "nul\0\\x")
    for text in ("http://h/a.jpg", "s3://bucket/a.jpg", "HTTPS://h/a.jpg"):
        with pytest.raises(DataError, match="a web address, not a file: download it first"):
            listed_path(tmp_path, text)
