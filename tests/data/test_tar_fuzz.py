"""Tests of the tar reader, compared with ``tarfile`` on random members and damaged bytes."""

import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import webdataset
from hypothesis import given, settings, strategies as st

import clipkit.samples.tar
from clipkit.errors import DataError
from clipkit.samples.tar import list_tar_content
from tests.data.hostile_tars import header, pax

BLOCK = 512
FORMATS = (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT)
KINDS = (
    tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE,
    tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE,
)  # fmt: skip
Members = list[tuple[str, int, int]]


@dataclass(frozen=True)
class Short:
    """Bytes of a store that returns a limited number at once, like a broken connection."""

    content: bytes
    most: int

    def __len__(self) -> int:
        return len(self.content)

    def __getitem__(self, part: slice, /) -> bytes:
        return self.content[part.start : min(part.stop, part.start + self.most)]


def ours(tar: bytes) -> tuple[Members, str]:
    """Return the members before the end or an error, and the error; check that all scans agree."""
    found = listed(tar, at_hand=False)
    for window in (BLOCK, 3 * BLOCK, clipkit.samples.tar._WINDOW):
        with patch.multiple(clipkit.samples.tar, _WINDOW=window, _WORTH=0):
            assert listed(tar, at_hand=True) == found
    return found


def listed(tar: bytes, *, at_hand: bool) -> tuple[Members, str]:
    found: Members = []
    try:
        for one in list_tar_content("0.tar", tar, at_hand=at_hand):
            found.append(one)
    except DataError as error:
        assert str(error).isprintable()
        return found, str(error)
    return found, ""


def theirs(tar: bytes) -> Members:
    with tarfile.open(fileobj=io.BytesIO(tar), errors="surrogateescape") as opened:
        files = [one for one in opened if one.isreg()]
    names = [
        file.name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for file in files
    ]
    return [(name, file.offset_data, file.size) for name, file in zip(names, files, strict=True)]


letters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
parts = st.text(letters, min_size=1, max_size=40) | st.sampled_from([".", "..", "a" * 120, "日" * 60])
names = st.builds("/".join, st.lists(parts, min_size=1, max_size=5)).map(lambda name: name.strip("/") or "a")
one_member = st.tuples(
    names, st.binary(max_size=1200), st.sampled_from(KINDS), st.text(letters, max_size=120)
)


def by_tarfile(members: Sequence[tuple[str, bytes, bytes, str]], form: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for name, data, kind, link in members:
            if kind == tarfile.AREGTYPE and len(name.encode()) > tarfile.LENGTH_NAME:
                continue  # tarfile takes it for a folder if the truncated name ends with a slash
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            info.size = len(data) if kind in tarfile.REGULAR_TYPES else 0
            try:
                tar.addfile(info, io.BytesIO(data))
            except ValueError:  # a name that does not fit into a ustar header
                continue
    return file.getvalue()


@settings(deadline=None, max_examples=120)
@given(members=st.lists(one_member, max_size=8), form=st.sampled_from(FORMATS))
def test_tars_written_by_tarfile(members: list[tuple[str, bytes, bytes, str]], form: int) -> None:
    tar = by_tarfile(members, form)
    assert ours(tar) == (theirs(tar), "")


keys = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=60)


@settings(deadline=None, max_examples=30)
@given(samples=st.dictionaries(keys, st.tuples(st.binary(max_size=900), st.text(max_size=300)), max_size=6))
def test_tars_written_by_webdataset(samples: dict[str, tuple[bytes, str]]) -> None:
    file = io.BytesIO()
    with webdataset.TarWriter(file, encoder=False) as tar:
        for key, (image, caption) in samples.items():
            tar.write({"__key__": key, "jpg": image, "txt": caption.encode("utf-8", "replace")})
    members, fault = ours(file.getvalue())
    assert fault == "" and members == theirs(file.getvalue())
    content = [(name, file.getvalue()[at : at + size]) for name, at, size in members]
    assert [data for name, data in content if name.endswith(".jpg")] == [
        image for image, _ in samples.values()
    ]


record = st.tuples(
    st.sampled_from(
        [b"path", b"size", b"linkpath", b"comment", b"GNU.sparse.major", b"hdrcharset", b"mtime"]
    ),
    st.sampled_from(
        [b"", b"7", b"600", b"a.jpg", b"x" * 130, b"-1", b"1e2", b"size=3", b"\xff\xfe.jpg", b" 7"]
    ),
)
extras = st.builds(
    lambda records, kind: pax(*records, kind=kind),
    st.lists(record, max_size=3),
    st.sampled_from([b"x", b"g", b"X"]),
)
longs = st.builds(
    lambda name, kind: header("L", len(name), kind=kind) + name.ljust(BLOCK, b"\0"),
    st.sampled_from([b"", b"long.jpg\0", b"n" * 200, b"\xff.txt\0rest"]), st.sampled_from([b"L", b"K"]),
)  # fmt: skip
plain = st.builds(
    lambda name, data, kind: header(name, len(data), kind=kind) + data + bytes(-len(data) % BLOCK),
    st.sampled_from([b"a.jpg", b"b/c.txt", b"\xff.jpg", b"n" * 100]),
    st.binary(max_size=700), st.sampled_from([b"0", b"7"]),
)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(pieces=st.lists(extras | longs | plain, max_size=7))
def test_tars_of_random_headers(pieces: list[bytes]) -> None:
    """A tar that ``tarfile`` cannot read, or reads as shorter, is rejected."""
    tar = b"".join(pieces) + bytes(2 * BLOCK)
    found, fault = ours(tar)
    check_inside(found, tar)
    try:
        expected = theirs(tar)
    except (tarfile.TarError, ValueError, RecursionError):
        return  # no reference result
    assert found == expected[: len(found)]
    assert fault or found == expected


def check_inside(found: Members, tar: bytes) -> None:
    assert all(
        BLOCK <= at <= at + size <= len(tar) and at % BLOCK == 0 and size >= 0 for _, at, size in found
    )


@st.composite
def damaged(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """Return a tar, a damaged copy, and the start of the damage."""
    members = draw(st.lists(one_member, min_size=1, max_size=6))
    tar = by_tarfile(members, draw(st.sampled_from(FORMATS)))
    used = len(tar.rstrip(b"\0")) or 1
    at = draw(st.integers(0, used - 1))
    how = draw(st.sampled_from(["flip", "cut", "insert", "remove", "swap", "zeros", "overwrite"]))
    bent = bytearray(tar)
    if how == "flip":
        bent[at] ^= 1 << draw(st.integers(0, 7))
    elif how == "cut":
        del bent[at:]
    elif how == "insert":
        bent[at:at] = draw(st.binary(min_size=1, max_size=1100))
    elif how == "remove":
        del bent[at : at + draw(st.integers(1, 1100))]
    elif how == "zeros":
        bent[at : at + 2000] = bytes(len(bent[at : at + 2000]))
    elif how == "overwrite":
        new = draw(st.binary(min_size=1, max_size=600))
        bent[at : at + len(new)] = new
    else:
        at, other = sorted(draw(st.integers(0, len(tar) // BLOCK - 1)) * BLOCK for _ in range(2))
        bent[at : at + BLOCK], bent[other : other + BLOCK] = (
            tar[other : other + BLOCK],
            tar[at : at + BLOCK],
        )
    return tar, bytes(bent), at


@settings(deadline=None, max_examples=400)
@given(case=damaged())
def test_damage_is_detected_or_harmless(case: tuple[bytes, bytes, int]) -> None:
    tar, bent, at = case
    whole, _ = ours(tar)
    found, fault = ours(bent)
    check_inside(found, bent)
    before = [one for one in whole if one[1] + one[2] <= at]
    assert found[: len(before)] == before
    flipped = len(bent) == len(tar) and sum(a != b for a, b in zip(tar, bent, strict=True)) == 1
    if flipped and not fault:  # checksums detect changed headers, but not changed data
        assert len(found) == len(whole)
        assert [one[1:] for one in found] == [one[1:] for one in whole]


@settings(deadline=None, max_examples=60)
@given(members=st.lists(one_member, max_size=6), form=st.sampled_from(FORMATS), most=st.integers(0, 1500))
def test_store_that_returns_too_few_bytes(
    members: list[tuple[str, bytes, bytes, str]], form: int, most: int
) -> None:
    tar = by_tarfile(members, form)
    found: Members = []
    try:
        for one in list_tar_content("0.tar", Short(tar, most)):
            found.append(one)
    except DataError as error:
        assert "truncated" in str(error)
        assert found == theirs(tar)[: len(found)]
    else:
        assert found == theirs(tar)


def test_vectorized_scan_finds_nearly_all_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = by_tarfile(
        [(f"inner/{n}.txt", b"x" * n, tarfile.REGTYPE, "") for n in range(9)], tarfile.PAX_FORMAT
    )
    members = []
    for number in range(2000):
        long = number == 700  # its name is in an extended header
        data = inner if number == 1460 else bytes(number)
        members.append((f"{number}.{'日' * 60 if long else 'jpg'}", data, tarfile.REGTYPE, ""))
    walked = []
    follow = clipkit.samples.tar._follow

    def counted(*given: Any, most: int) -> Any:
        walked.append(follow(*given, most=most))
        return walked[-1]

    monkeypatch.setattr(clipkit.samples.tar, "_follow", counted)
    monkeypatch.setattr(clipkit.samples.tar, "_WORTH", 200)
    for form in FORMATS[:2]:
        walked.clear()
        tar = by_tarfile(members, form)
        assert listed(tar, at_hand=True) == (theirs(tar), "")
        assert sum(len(run.headers) for run in walked) < 600
