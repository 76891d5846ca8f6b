"""Tests of delimited tables as users have them: open quotes, extra cells, no header, gzip, Excel's first line."""

import csv
import gzip
import io
import json
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from clipkit.errors import DataError
from clipkit.samples import Row, Table, is_table

OPEN_QUOTE = 'a quote (") that is not closed: close it, or double it if it is part of the text'
EXTRA = "more cells than columns: put cells that contain {} in quotes"


def read(path: Path, content: str | bytes, **arguments: object) -> list[Row]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(Table(path, **{"image_column": None, "caption_column": None, **arguments}))  # type: ignore[arg-type]


def read_urls(path: Path, content: str) -> list[Row]:
    return read(path, content, image_columns=("url",), image_name="url", need=("image",))


def pairs(rows: list[Row]) -> list[tuple[object, object] | str]:
    """Return the path and caption of each row, or its cause."""
    assert [row.number for row in rows] == list(range(1, len(rows) + 1))
    return [row.cause or (row.path, row.caption) for row in rows]


def write_rows(delimiter: str, order: int, captions: list[str], quoting: Any = 0) -> list[str]:
    """Return the lines of a table with paths in the first (1) or the last column (-1)."""
    lines = []
    for fields in [("path", "caption"), *((f"img/{i}.jpg", caption) for i, caption in enumerate(captions))]:
        text = io.StringIO()
        csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator="\n").writerow(fields[::order])
        lines.append(text.getvalue())
    return lines


@settings(max_examples=200, deadline=None)
@example([",1\n,1,"], ",", -1, csv.QUOTE_MINIMAL)
@given(
    st.lists(st.text('ab1 ,;|\n"', min_size=1, max_size=12), min_size=1, max_size=5),
    st.sampled_from(",;|\t"),
    st.sampled_from([1, -1]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_correctly_quoted_cells_of_several_lines_are_captions(
    captions: list[str], delimiter: str, order: int, quoting: Any
) -> None:
    with TemporaryDirectory() as folder:
        rows = read(Path(folder, "t.csv"), "".join(write_rows(delimiter, order, captions, quoting)))
    assert pairs(rows) == [(f"img/{i}.jpg", caption) for i, caption in enumerate(captions)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("ab1 ,;|", min_size=1, max_size=12), min_size=1, max_size=6),
    st.data(),
    st.sampled_from(",;|\t"),
    st.sampled_from([1, -1]),
    st.sampled_from(["", '"']),
)
def test_rows_after_an_open_quote_are_read(
    captions: list[str], data: st.DataObject, delimiter: str, order: int, end: str
) -> None:
    """A quote is opened in one row, and closed in no other, or at the end of the last one."""
    opened = data.draw(st.integers(0, len(captions) - 1))
    lines = write_rows(delimiter, order, captions)
    fields = (f"img/{opened}.jpg", '"the wall')
    lines[opened + 1] = delimiter.join(fields[::order]) + "\n"
    if opened < len(captions) - 1:
        captions = [*captions[:-1], f"x{end}"]
        lines[-1] = delimiter.join((f"img/{len(captions) - 1}.jpg", f"x{end}")[::order]) + "\n"
    with TemporaryDirectory() as folder:
        rows = pairs(read(Path(folder, "t.csv"), "".join(lines)))
    expected: list[tuple[object, object] | str] = [(f"img/{i}.jpg", text) for i, text in enumerate(captions)]
    expected[opened] = OPEN_QUOTE
    assert rows == expected


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        # closed by the quote of another row
        ("t.csv", 'path,caption\n1.jpg,"the wall\n2.jpg,"a, b"\n', [OPEN_QUOTE, ("2.jpg", "a, b")]),
        ("t.csv", 'path;caption\r\n1.jpg;"the wall\r\n2.jpg;"b"\r\n', [OPEN_QUOTE, ("2.jpg", "b")]),
        # two open quotes, the second without a line end
        ("t.csv", 'path|caption\n1.jpg|"the wall\n2.jpg|"b', [OPEN_QUOTE, OPEN_QUOTE]),
        ("t.tsv", 'path\tcaption\n1.jpg\t"the wall\n2.jpg\tb\n', [OPEN_QUOTE, ("2.jpg", "b")]),
        # quotes inside a cell are text
        ("t.csv", 'path,caption\n1.jpg,12" x\n2.jpg,"12"" x"\n', [("1.jpg", '12" x'), ("2.jpg", '12" x')]),
    ],
)  # fmt: skip
def test_open_quotes(tmp_path: Path, name: str, content: str, expected: list[object]) -> None:
    assert pairs(read(tmp_path / name, content)) == expected
    (tmp_path / name).rename(tmp_path / f"{name}.gz")
    assert pairs(read(tmp_path / f"{name}.gz", gzip.compress(content.encode()))) == expected


def test_quotes_with_backslashes(tmp_path: Path) -> None:
    lines = [r'1.jpg,"a \"red, big\" car"', r'2.jpg,"the \"end\""', r'3.jpg,"C:\dir"', r'4.jpg,"open \" x']
    rows = read(tmp_path / "t.csv", "\n".join(["path,caption", *lines, "5.jpg,x"]))
    expected = [("1.jpg", 'a "red, big" car'), ("2.jpg", 'the "end"'), ("3.jpg", r"C:\dir")]
    assert pairs(rows) == [*expected, OPEN_QUOTE, ("5.jpg", "x")]


def test_open_quote_in_captions_with_ids(tmp_path: Path) -> None:
    rows = read(tmp_path / "t.csv", 'id,caption\n1,"the wall\n2,x\n3,the end"\n4,y\n', need=("caption",))
    assert [row.cause or row.caption for row in rows] == [OPEN_QUOTE, "x", 'the end"', "y"]


def test_open_quote_costs_linear_time_and_loses_no_row(tmp_path: Path) -> None:
    lines = "".join(f"{i}.jpg,a picture {i}\n" for i in range(20_000))
    rows = read(tmp_path / "t.csv", f'path,caption\nfirst.jpg,"open\n{lines}')
    assert len(rows) == 20_001 and [row.number for row in rows if row.cause] == [1]
    empty = "".join(f'{i}.jpg,""\n' for i in range(20_000))  # escaped quotes inside the open one
    assert len(read(tmp_path / "t.csv", f'path,caption\nfirst.jpg,"open\n{empty}')) == 20_001


@pytest.mark.parametrize("delimiter", [",", ";", "|", "\t"])
def test_more_cells_than_columns_are_a_bad_row(tmp_path: Path, delimiter: str) -> None:
    lines = ["path,caption", "1.jpg,a red car, parked", "2.jpg,a dog", "3.jpg,a cat,, ", "4.jpg,,,x"]
    shown = "a tab" if delimiter == "\t" else repr(delimiter)
    rows = read(tmp_path / "t.csv", "\n".join(lines).replace(",", delimiter))
    cause = EXTRA.format(shown)
    assert pairs(rows) == [cause, ("2.jpg", "a dog"), ("3.jpg", "a cat"), cause]


def test_cells_in_unnamed_columns_after_the_last_name_are_a_bad_row(tmp_path: Path) -> None:
    lines = "0.png,a cat, big,\n1.png,a dog,\n2.png,a dog\n"
    assert pairs(read(tmp_path / "t.csv", f"image,caption,\n{lines}")) == [
        EXTRA.format("','"), ("1.png", "a dog"), ("2.png", "a dog"),
    ]  # fmt: skip
    assert pairs(read(tmp_path / "t.csv", "image,caption,,\n0.png,a red, round, ball\n1.png,x,,\n")) == [
        EXTRA.format("','"), ("1.png", "x"),
    ]  # fmt: skip
    assert pairs(read(tmp_path / "t.csv", "image,caption, \n0.png,a, b, c\n")) == [EXTRA.format("','")]
    # columns before the last name: an index, as pandas writes it
    assert pairs(read(tmp_path / "t.csv", ",image,,caption\n0,0.png,x,a cat\n")) == [("0.png", "a cat")]


def test_captions_of_several_lines_that_start_with_numbers(tmp_path: Path) -> None:
    captions = ["Steps:\n2, mix, bake", "ok", "one\n1,\n2, x, y\n3"]
    for order in ([0, 1, 2], [0, 2, 1], [2, 0, 1]):
        text = io.StringIO()
        rows: list[list[object]] = [["id", "image", "caption"]]
        rows += [[i, f"{i}.png", caption] for i, caption in enumerate(captions)]
        csv.writer(text).writerows([[fields[i] for i in order] for fields in rows])
        assert pairs(read(tmp_path / "t.csv", text.getvalue())) == [
            (f"{i}.png", caption) for i, caption in enumerate(captions)
        ]
    rows_read = read(tmp_path / "t.csv", 'id,image,caption\n1,0.png,"the wall\n2,1.png,b\n3,2.png,"c"\n')
    assert pairs(rows_read) == [OPEN_QUOTE, ("1.png", "b"), ("2.png", "c")]


@pytest.mark.parametrize(
    ("delimiter", "name"), [(",", "t.csv"), (";", "t.csv"), ("\t", "t.tsv"), ("\t", "t.txt")]
)
def test_quoted_cells_with_numbers_of_captions(tmp_path: Path, delimiter: str, name: str) -> None:
    captions = ["a cat, big", 'a "hot" dog', "x; y\tz"]
    for quoting in (csv.QUOTE_ALL, csv.QUOTE_MINIMAL):
        if quoting == csv.QUOTE_MINIMAL and delimiter == "\t":
            continue  # quotes are text
        text = io.StringIO()
        rows = [[f"{i}.png#0", caption] for i, caption in enumerate(captions)]
        csv.writer(text, delimiter=delimiter, quoting=quoting).writerows(rows)
        expected = [(f"{i}.png", caption) for i, caption in enumerate(captions)]
        assert pairs(read(tmp_path / name, text.getvalue())) == expected


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.jsonl", "t.json"])
def test_other_encodings_are_named(tmp_path: Path, encoding: str, name: str) -> None:
    content = "图,path,caption\n1,a.png,x\n".encode(encoding)
    with pytest.raises(
        DataError, match=r"is neither UTF-8 nor UTF-16 with a byte order mark: save it as UTF-8$"
    ):
        read(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content)


def test_urls_with_delimiters_are_not_cut(tmp_path: Path) -> None:
    url = "http://h/q.jpg?crop=2669,1999&w=80"
    cause = EXTRA.format("','")
    assert pairs(read_urls(tmp_path / "t.csv", f"url,caption\n{url},a car\nhttp://h/p,x\n")) == [
        cause,
        ("http://h/p", "x"),
    ]
    assert pairs(read_urls(tmp_path / "t.csv", f"url\n{url}\nhttp://h/p\n")) == [cause, ("http://h/p", None)]
    assert pairs(read_urls(tmp_path / "t.txt", f"http://h/p\r\n\r\n {url} \r\n")) == [
        ("http://h/p", None),
        (url, None),
    ]
    with pytest.raises(DataError, match="which column is the url"):
        read_urls(tmp_path / "t.txt", "hello, world\nan image\n")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("t.tsv", "a bus station\ti/0.jpg\nlooks\ti/1.jpg\n", [("i/0.jpg", "a bus station"), ("i/1.jpg", "looks")]),
        ("t.tsv", "photo\timg/0.jpg\ntext\timg/1.jpg\n", [("img/0.jpg", "photo"), ("img/1.jpg", "text")]),
        ("t.tsv", "IMG_1.jpg\timg/0.jpg\ntext\timg/1.jpg\n", [("img/0.jpg", "IMG_1.jpg"), ("img/1.jpg", "text")]),
        ("t.csv", '0.PNG,a cat; two\n1.webp,"a dog, old"\n', [("0.PNG", "a cat; two"), ("1.webp", "a dog, old")]),
        ("t.csv", "img/0.jpg|a cat, old\nimg/1.jpg|b\n", [("img/0.jpg", "a cat, old"), ("img/1.jpg", "b")]),
        # Flickr8k's first release: quotes are text, and each path has the number of its caption
        ("t.token.txt", '1.jpg#0\t"Hot" air, x\n2.jpg#0\t"open\n', [("1.jpg", '"Hot" air, x'), ("2.jpg", '"open')]),
        ("results_20130124.token", "1.jpg#0\tA\n", [("1.jpg", "A")]),
    ],
)  # fmt: skip
def test_tables_without_a_header(tmp_path: Path, name: str, content: str, expected: list[object]) -> None:
    assert pairs(read(tmp_path / name, content)) == expected


def test_urls_without_a_header_are_separated_by_tabs(tmp_path: Path) -> None:
    url = "http://h/sig/x1?sig=1,2"
    for content, expected in [
        ("{url}\ta cat\n{url}\tcat\n", [(url, "a cat"), (url, "cat")]),
        ("a cat\t{url}\ncat\t{url}\n", [(url, "a cat"), (url, "cat")]),
        ('{url}\t"a cat, big; old| x\t"\n{url}\ta\n', [(url, "a cat, big; old| x\t"), (url, "a")]),
        ("{url}\ta cat\n{url}\n{url}\tb c\n", [(url, "a cat"), "too few columns", (url, "b c")]),
    ]:
        assert pairs(read_urls(tmp_path / "t.csv", content.replace("{url}", url))) == expected, content
    content = "http://h/1.jpg,cat\nhttp://h/2.jpg,a dog\n"
    assert pairs(read_urls(tmp_path / "t.csv", content)) == [
        ("http://h/1.jpg", "cat"),
        ("http://h/2.jpg", "a dog"),
    ]
    with pytest.raises(DataError, match="which column is the url"):
        read_urls(tmp_path / "t.csv", "http://h/1,a cat\n")


def test_urls_that_may_be_several_columns_raise_an_error(tmp_path: Path) -> None:
    for content in (
        "http://h/x?s=1,cat\nhttp://h/y?s=2,dog\n",
        "http://h/1,2\nhttp://h/3,4\nhttp://h/5\n",
        "http://h/0.jpg\nhttp://h/1.jpg?c=1,2\n",
    ):
        message = (
            r"',' may separate columns or be a part of the URLs: add a header line such as url,caption, or"
        )
        with pytest.raises(DataError, match=message):
            read_urls(tmp_path / "t.csv", content)
        assert [row.path for row in read_urls(tmp_path / "t.txt", content)] == content.split()
    header = read_urls(tmp_path / "t.csv", "url,caption\nhttp://h/x?s=1,cat\n")
    assert pairs(header) == [("http://h/x?s=1", "cat")]
    urls = ["http://h/0", "http://h/1.jpg?w=1"]
    assert [row.path for row in read_urls(tmp_path / "t.csv", "\n".join(urls))] == urls


@pytest.mark.parametrize("delimiter", [";", "|", "\t"])
@pytest.mark.parametrize(
    "captions", [["a cat, big", "b dog"], ["b", "a, b"], ["a, b", "c, d"], ["a, b, c", ", d"]]
)
def test_delimiter_without_a_header_is_that_of_all_rows(
    tmp_path: Path, delimiter: str, captions: list[str]
) -> None:
    for order in (1, -1):
        lines = [delimiter.join([f"{i}.png", caption][::order]) for i, caption in enumerate(captions)]
        expected = [(f"{i}.png", caption) for i, caption in enumerate(captions)]
        assert pairs(read(tmp_path / "t.csv", "\n".join(lines))) == expected


def test_columns_without_a_header_have_numbers(tmp_path: Path) -> None:
    content = "7,img/0.jpg,a cat\n8,img/1.jpg,a dog\n"
    with pytest.raises(DataError, match=r"which column is the caption.* column 1, column 2, column 3"):
        read(tmp_path / "t.csv", content)
    rows = read(tmp_path / "t.csv", content, caption_column="column 3", others=None)
    assert pairs(rows) == [("img/0.jpg", "a cat"), ("img/1.jpg", "a dog")]
    assert [row.others for row in rows] == [{"column 1": "7"}, {"column 1": "8"}]
    with pytest.raises(DataError, match="no column 'caption'"):
        read(tmp_path / "t.csv", content, caption_column="caption")
    # names that are requested are a header
    assert pairs(read(tmp_path / "t.csv", "a.jpg,text\nb.png,x\n", image_column="a.jpg")) == [("b.png", "x")]


@pytest.mark.parametrize(
    "content",
    [
        b"sep=;\r\npath;caption\r\na.jpg;x, y\r\n",
        b'"sep=;"\npath;caption\na.jpg;x, y\n',
        b"\xef\xbb\xbfSEP=|\n\npath|caption\na.jpg|x, y\n",
        "sep=\t\r\npath\tcaption\r\na.jpg\tx, y\r\n".encode("utf-16"),
        b"sep=;\na.jpg;x, y\n",
        b"\n\npath;caption\na.jpg;x, y\n",
    ],
)
def test_lines_before_the_header_are_skipped(tmp_path: Path, content: bytes) -> None:
    assert pairs(read(tmp_path / "t.csv", content)) == [("a.jpg", "x, y")]
    assert pairs(read(tmp_path / "t.csv.gz", gzip.compress(content))) == [("a.jpg", "x, y")]


def test_damaged_gzip_raises_error(tmp_path: Path) -> None:
    content = gzip.compress("".join(["path,caption\n", *(f"{i}.jpg,x\n" for i in range(50_000))]).encode())
    for damaged in (content[: len(content) // 2], b"\x1f\x8b" + b"x" * 50, content[:-8] + b"x" * 8):
        with pytest.raises(DataError, match=r"t\.csv\.gz is damaged"):
            read(tmp_path / "t.csv.gz", damaged)
    # a browser may have decompressed it, or kept the compression without the suffix
    assert pairs(read(tmp_path / "u.csv.gz", b"path,caption\na.jpg,x\n")) == [("a.jpg", "x")]
    assert pairs(read(tmp_path / "u.csv", gzip.compress(b"path,caption\na.jpg,x\n"))) == [("a.jpg", "x")]


def test_long_lines_are_bad_rows_in_bounded_memory(tmp_path: Path) -> None:
    bomb = gzip.compress(b"path,caption\na.jpg,x\n" + b"x" * 2**26 + b"\nb.jpg,y\n")
    tracemalloc.start()
    rows = read(tmp_path / "t.csv.gz", bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24
    assert pairs(rows) == [("a.jpg", "x"), "a line longer than 1,048,576 characters", ("b.jpg", "y")]


def test_cells_with_lists_are_several_captions(tmp_path: Path) -> None:
    cells: dict[str, object] = {
        str(["a cat", "it's", "a\nb\\"]): ["a cat", "it's", "a\nb\\"],
        '["x", "y"]': ["x", "y"],
        '["caf\\u00e9 \\/"]': ["café /"],
        "['']": [""],
        "[]": [],
        " [ ] ": [],
        "[None, 'a']": [None, "a"],
        '["e", null]': ["e", None],
        "[nan 'a']": [None, "a"],
        "[None]": [None],
        '["x", 7]': ["x", 7],
        "['x', 7]": ["x", 7],
        "['a cat' 'a pet']": ["a cat", "a pet"],
        "['a cat'\n \"it's\"]": ["a cat", "it's"],
    }
    unreadable = ["['a dog's bone', 'x']", "['a' 'b' ... 'y' 'z']", '["a", "b" x "c"]', r"['\d']", r"['\x1']"]
    texts = ["[untitled]", "[2020]", "[1, 2]", "['a'] cat", "[", "[]x", "x ['a', 'b']", '["Hello" sign]']
    text = io.StringIO()
    cell_rows = [["a.jpg", cell] for cell in [*cells, *unreadable, *texts]]
    csv.writer(text).writerows([["path", "caption"], *cell_rows])
    rows = read(tmp_path / "t.csv", text.getvalue())
    cause = 'a list that cannot be read: write it as JSON, ["a cat", "a pet"]'
    assert [row.cause or row.caption for row in rows] == [*cells.values(), *[cause] * len(unreadable), *texts]


@given(st.lists(st.none() | st.text(), max_size=4))
def test_lists_that_python_writes_as_text_are_read(captions: list[str | None]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "t.jsonl")
        for text in (str(captions), json.dumps(captions), str(captions).replace(", ", " ")):
            rows = read(path, json.dumps({"path": "a.jpg", "caption": text}))
            if not any(caption and ", " in caption for caption in captions):
                assert rows[0].caption == captions


def test_other_columns_that_are_not_utf8_are_bad_rows(tmp_path: Path) -> None:
    content = "path,caption,author\na.jpg,x,André\nb.jpg,y,Ann\n".encode("latin-1")
    rows = read(tmp_path / "t.csv", content, others=None)
    assert pairs(rows) == ["not UTF-8: column 'author'", ("b.jpg", "y")] and rows[0].path == "a.jpg"
    assert pairs(read(tmp_path / "t.csv", content)) == [("a.jpg", "x"), ("b.jpg", "y")]  # not requested
    content = '[{"path": "a.jpg", "caption": "x", "by": {"name": ["é"]}}]'.encode("latin-1")
    for name, text in (("t.json", content), ("t.jsonl", content[1:-1])):
        assert pairs(read(tmp_path / name, text, others=None)) == ["not UTF-8: column 'by'"]
    (row,) = read(tmp_path / "t.csv", "path,caption,title\na.jpg,x,My \ufffd page\n", others=None)
    assert (row.cause, row.others) == ("", {"title": "My \ufffd page"})  # the character is in the file
    (row,) = read(
        tmp_path / "t.jsonl", '{"path": "a.jpg", "caption": "x", "title": "\\ufffd"}\n', others=None
    )
    assert (row.cause, row.others) == ("", {"title": "\ufffd"})


def test_images_do_not_depend_on_captions_that_are_not_needed(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("path,caption\na.jpg,\"['a dog's bone', 'x']\"\n")
    (row,) = Table(path, image_column=None, caption_column=None, need=("image",))
    assert (row.path, row.caption, row.cause) == ("a.jpg", None, "")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("captions.txt", "image,caption\n1.jpg,A child .\n", True),
        ("Flickr8k.token.txt", "1.jpg#0\tA child .\n", True),
        ("lines.txt", "an image, a caption\n", False),
        ("lines.txt", "photo.jpg\nanother text\n", False),
        ("lines.txt", "photo.jpg, a text\n", False),
        ("urls.txt", "http://h/1.jpg\nhttp://h/2.jpg\n", False),
        ("empty.txt", "", False),
        ("t.tsv.gz", "", True),
        ("t.png", "path,caption\n", False),
    ],
)
def test_text_files_are_tables_if_they_have_both_columns(
    tmp_path: Path, name: str, content: str, expected: bool
) -> None:
    (tmp_path / name).write_text(content)
    assert is_table(tmp_path / name) is expected


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=60)
    | st.lists(st.sampled_from(list(b'\n\r\t ,;|"\\=#:/.ajpgseht{}[]\0\xff\xfe'))).map(bytes),
    st.sampled_from([".csv", ".tsv", ".txt", ".token", ".jsonl", ".json", ".csv.gz", ".json.gz"]),
    st.sampled_from(
        [b"", b"path,caption\n", b"sep=;\n", b"\x1f\x8b\x08\0", b'[{"image": "a", "caption": "b"},']
    ),
    st.booleans(),
)
def test_any_content_gives_rows_or_an_error(content: bytes, suffix: str, start: bytes, packed: bool) -> None:
    data = start + content
    with TemporaryDirectory() as folder:
        path = Path(folder, f"t{suffix}")
        path.write_bytes(gzip.compress(data) if packed else data)
        is_table(path)
        try:
            rows = list(Table(path, image_column=None, caption_column=None, others=None))
        except DataError as error:
            assert "\n" not in str(error)
        else:
            assert [row.number for row in rows] == list(range(1, len(rows) + 1))
