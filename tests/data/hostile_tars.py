"""Tars that are broken or need much time or memory to read, with the expected results."""

import bz2
import gzip
import lzma
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["GOOD", "HOSTILE", "PAIRS", "Hostile", "header", "member", "pax", "tar_of"]

BLOCK = 512
END = bytes(2 * BLOCK)
PAIRS = [
    pair for n in range(3) for pair in ((f"{n}.jpg", b"picture %d" % n * 90), (f"{n}.txt", b"text %d" % n))
]
GOOD = ("0", "1", "2")  # keys of the pairs


class Hostile(NamedTuple):
    """A tar with its expected result: a pattern of the error message, or the keys of its samples."""

    make: Callable[[], bytes]
    answer: str | tuple[str, ...]


def header(
    name: bytes | str,
    size: int | bytes = 0,
    *,
    kind: bytes = b"0",
    link: bytes = b"",
    prefix: bytes = b"",
    checksum: bytes | None = None,
) -> bytes:
    """Return a header of 512 bytes; the checksum is correct unless given, a size in bytes is copied."""
    name = name.encode() if isinstance(name, str) else name
    stated = b"%011o\0" % size if isinstance(size, int) else size.ljust(12, b"\0")
    fields = name.ljust(100, b"\0")[:100] + b"0000644\0" + b"0000000\0" * 2 + stated + b"00000000000\0"
    rest = kind + link.ljust(100, b"\0") + b"ustar\x0000" + bytes(80) + prefix.ljust(155, b"\0")
    total = sum(fields) + sum(rest) + 8 * 32
    return (fields + (b"%06o\0 " % total if checksum is None else checksum) + rest).ljust(BLOCK, b"\0")


def member(name: bytes | str, data: bytes = b"", *, kind: bytes = b"0", link: bytes = b"") -> bytes:
    """Return a header and its data, padded to whole blocks."""
    return header(name, len(data), kind=kind, link=link) + data + bytes(-len(data) % BLOCK)


def pax(*records: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    """Return a PAX header with these records."""
    return member("PaxHeader", b"".join(record(*one) for one in records), kind=kind)


def record(key: bytes, value: bytes) -> bytes:
    length = len(key) + len(value) + 3
    while length != len(b"%d" % length) + len(key) + len(value) + 3:
        length += 1
    return b"%d %s=%s\n" % (length, key, value)


def tar_of(members: Sequence[tuple[bytes | str, bytes]] = PAIRS, *, before: bytes = b"") -> bytes:
    """Return a tar of files, after other members."""
    return before + b"".join(member(*one) for one in members) + END


def long_name(name: bytes) -> bytes:
    """Return a GNU header with the name of the next member."""
    return member("././@LongLink", name + b"\0", kind=b"L")


def renamed(by: bytes, *, of: bytes = b"9") -> bytes:
    """Return a pair, the first member of which is renamed by an extended header, and the usual pairs."""
    return by + member(of + b".jpg", b"renamed") + member("y.txt", b"text") + tar_of()


def with_second(change: Callable[[bytes], bytes]) -> bytes:
    """Return the usual pairs with a changed header of the second member."""
    first = len(member(*PAIRS[0]))
    whole = tar_of()
    return whole[:first] + change(whole[first : first + BLOCK]) + whole[first + BLOCK :]


def cut(at: int) -> Callable[[], bytes]:
    return lambda: tar_of()[:at]


def other_size(size: bytes | int) -> Callable[[], bytes]:
    """Return the usual pairs; the second member states another size, with a correct checksum."""
    return lambda: with_second(lambda _: header("0.txt", size))


def among(*others: bytes) -> Callable[[], bytes]:
    """Return the usual pairs with other members between the first image and its caption."""
    return lambda: member(*PAIRS[0]) + b"".join(others) + tar_of(PAIRS[1:])


def keyed(*names: bytes | str) -> Callable[[], bytes]:
    """Return a tar of members with these names."""
    return lambda: tar_of([(name, b"data of %d" % number) for number, name in enumerate(names)])


IMAGE = len(member(*PAIRS[0]))  # size of the first member
DATA = len(tar_of()) - len(END)
BROKEN_SIZE = f"has a broken size at byte {IMAGE}"
NOTE = "has a broken extended header"

HOSTILE: dict[str, Hostile] = {
    # truncated tars and data after the end
    "nothing": Hostile(lambda: b"", "is empty"),
    "one byte": Hostile(lambda: b"\0", "is truncated"),
    "one letter": Hostile(lambda: b"0", "is truncated"),
    "cut in the first header": Hostile(cut(100), "is truncated"),
    "cut behind the first header": Hostile(cut(BLOCK), "is truncated"),
    "cut in data": Hostile(cut(BLOCK + 30), "is truncated"),
    "cut behind data, before they are filled up": Hostile(cut(BLOCK + 810), "is truncated"),
    "cut behind a member": Hostile(cut(IMAGE), "is truncated"),
    "cut in a later header": Hostile(cut(IMAGE + 200), "is truncated"),
    "cut behind the last member": Hostile(cut(DATA), "is truncated"),
    "cut in the end mark": Hostile(cut(DATA + 300), "is truncated"),
    "half an end mark": Hostile(cut(DATA + BLOCK), GOOD),
    "cut in a long name": Hostile(lambda: long_name(b"n" * 900)[:-300], "is truncated"),
    "nothing behind a long name": Hostile(lambda: long_name(b"n.jpg"), "is truncated"),
    "the end behind a long name": Hostile(lambda: tar_of()[:DATA] + long_name(b"n.jpg") + END, GOOD),
    "junk behind the end": Hostile(lambda: tar_of() + b"junk", "seems incompletely downloaded"),
    "two archives": Hostile(lambda: tar_of() * 2, "contains more than one archive"),
    "zeros for ever": Hostile(lambda: tar_of() + bytes(80 << 20), "seems incompletely downloaded"),
    "only zeros": Hostile(lambda: bytes(80 << 20), "seems incompletely downloaded"),
    "zeros inside": Hostile(among(bytes(20 * BLOCK)), "contains more than one archive"),
    "zeros over half of it": Hostile(lambda: tar_of()[: DATA // 2] + bytes(2 << 20), "truncated|incompletely"),
    # files that are not tars
    "a web page": Hostile(lambda: b"<!DOCTYPE html>" + b" " * 4000, "is not a tar file"),
    "an error in XML": Hostile(lambda: b'<?xml version="1.0"?><Error>AccessDenied</Error>', "truncated"),
    "gzip": Hostile(lambda: gzip.compress(tar_of() + bytes(PAIRS[0][1] * 99)), "is compressed|is truncated"),
    "bzip2": Hostile(lambda: bz2.compress(bytes(range(256)) * 400), "is compressed"),
    "xz": Hostile(lambda: lzma.compress(bytes(range(256)) * 99 + tar_of(), preset=0), "is compressed|is truncated"),
    "an image": Hostile(lambda: b"\xff\xd8\xff\xe0" + b"\x80" * 3000, "is not a tar file|broken size"),
    # header fields
    "a wrong checksum": Hostile(lambda: with_second(lambda _: header("0.txt", 6, checksum=b"012345\0 ")), "header"),
    "no checksum": Hostile(lambda: with_second(lambda _: header("0.txt", 6, checksum=bytes(8))), "header at"),
    "a checksum of words": Hostile(lambda: with_second(lambda _: header("0.txt", 6, checksum=b"checksum")), "head"),
    "a header of noise": Hostile(lambda: with_second(lambda _: b"\xa5" * BLOCK), "byte"),
    "a size of words": Hostile(other_size(b"twelve bytes"), BROKEN_SIZE),
    "a negative size": Hostile(other_size(b"-0000000001"), BROKEN_SIZE),
    "a negative size in base 256": Hostile(other_size(b"\xff" * 12), BROKEN_SIZE),
    "a huge size": Hostile(other_size(8**11 - 1), "is truncated"),
    "a huge size in base 256": Hostile(other_size(b"\x80" + b"\xff" * 11), "is truncated"),
    "a size in base 256": Hostile(other_size(b"\x80" + (6).to_bytes(11, "big")), GOOD),
    "no size": Hostile(lambda: member(*PAIRS[0]) + header("0.txt", b"") + END, ("0",)),
    "a size that skips the next member": Hostile(other_size(IMAGE + 40), ("0", "2")),
    # names and sizes from extended headers
    "many long names for one file": Hostile(lambda: long_name(b"n.jpg") * 5000 + tar_of(), NOTE),
    "long links without end": Hostile(
        lambda: member("@LongLink", b"to\0", kind=b"K") * 5000 + tar_of(), GOOD
    ),
    "a long name of 2 MiB": Hostile(lambda: long_name(b"n" * (2 << 20)) + tar_of(), "has a name of"),
    "a name of 5,000 characters": Hostile(lambda: renamed(long_name(b"n" * 5000 + b".jpg")), "5004 characters"),
    "a name of 4,000 characters": Hostile(lambda: renamed(long_name(b"n" * 3996 + b".jpg")), GOOD),
    "an empty long name": Hostile(lambda: renamed(long_name(b"")), GOOD),
    "a path by PAX": Hostile(lambda: renamed(pax((b"path", b"y.jpg"))), ("y", *GOOD)),
    "a path by PAX and by GNU": Hostile(lambda: renamed(pax((b"path", b"y.jpg")) + long_name(b"z.jpg")), NOTE),
    "two paths by PAX": Hostile(lambda: renamed(pax((b"path", b"y.jpg")) + pax((b"path", b"z.jpg"))), NOTE),
    "a path for all by PAX": Hostile(lambda: renamed(pax((b"path", b"y.jpg"), kind=b"g")), NOTE),
    "a size for all by PAX": Hostile(lambda: renamed(pax((b"size", b"7"), kind=b"g")), NOTE),
    "a remark for all by PAX": Hostile(lambda: tar_of(before=pax((b"comment", b"size=path"), kind=b"g")), GOOD),
    "a size by PAX": Hostile(
        lambda: tar_of(before=pax((b"size", b"7")) + header("y.jpg", 0) + b"picture".ljust(BLOCK, b"\0")
        + member("y.txt", b"text")), ("y", *GOOD),
    ),
    "a size by PAX beyond the end": Hostile(lambda: renamed(pax((b"size", b"9" * 19))), "is truncated"),
    "a negative size by PAX": Hostile(lambda: renamed(pax((b"size", b"-512"))), NOTE),
    "a size of words by PAX": Hostile(lambda: renamed(pax((b"size", b"1_0"))), NOTE),
    "a PAX header of 2 MiB": Hostile(lambda: renamed(pax((b"comment", b"x" * (2 << 20)))), "has a name of"),
    "a PAX header of 200,000 records": Hostile(
        lambda: tar_of(before=member("p", b"5 a=\n" * 200_000 + record(b"size", b"9"), kind=b"x")
        + member("y.txt", b"something")), GOOD,
    ),
    "100 PAX headers of 200 kB": Hostile(
        lambda: (pax(*[(b"k%d" % n, b"size=" * 20) for n in range(1500)]) + member("a.txt")) * 100 + END, "no ",
    ),
    "a PAX record longer than its header": Hostile(lambda: renamed(member("p", b"99 path=y.jp", kind=b"x")), NOTE),
    "a PAX record shorter than it says": Hostile(lambda: renamed(member("p", b"9 path=y.jpg\n", kind=b"x")), NOTE),
    "a PAX record of no length": Hostile(lambda: renamed(member("p", b"path=y.jpg\n", kind=b"x")), NOTE),
    "a sparse file by PAX": Hostile(lambda: renamed(pax((b"GNU.sparse.major", b"1"))), "contains a sparse file"),
    "a sparse file by GNU": Hostile(among(member("s.jpg", b"x", kind=b"S")), "contains a sparse file"),
    # other kinds of members
    "links, devices, pipes and folders": Hostile(
        among(*(member("9.jpg", kind=kind, link=b"/etc/passwd") for kind in (b"1", b"2", b"3", b"4", b"5", b"6"))),
        GOOD,
    ),
    "members of kinds that nobody knows": Hostile(
        among(member("8.jpg", b"data", kind=b"Z"), member("8.txt", b"data", kind=b"V")), GOOD,
    ),
    "100,000 empty members": Hostile(
        lambda: b"".join(header(f"{n // 2}.{('jpg', 'txt')[n % 2]}") for n in range(100_000)) + END,
        tuple(str(n) for n in range(50_000)),
    ),
    "30,000 extensions": Hostile(
        lambda: b"".join(header(f"a.{n}.jpg") for n in range(30_000)) + END, "no sample with image",
    ),
    # file names
    "names with newlines": Hostile(keyed("a\nb.jpg", "a\nb.txt"), ("a\nb",)),
    "an extension with newlines": Hostile(keyed("a.b\nc", "b.\x1b[31mred"), "no sample with image"),
    "names with control characters": Hostile(keyed("\x1b[2J.jpg", "\x1b[2J.txt"), ("\x1b[2J",)),
    "names that leave the folder": Hostile(keyed("../../a.jpg", "../../a.txt", "/etc/b.jpg", "/etc/b.txt"),
        ("../../a", "/etc/b")),
    "names that are no UTF-8": Hostile(keyed(b"\xff.jpg", b"\xff.txt", b"\xfe.jpg", b"\xfe.txt"),
        ("\\xff", "\\xfe")),
    "a NUL in a name by PAX": Hostile(
        lambda: renamed(pax((b"path", b"y.jpg\0.exe"))), ("y", *GOOD),
    ),
    "no names": Hostile(keyed("", "", ".jpg", "/", "a/.jpg", "."), "no sample with image"),
    "dots in names": Hostile(keyed("a.b.jpg", "a.b.txt", "c.d/e.jpg", "c.d/e.txt"), ("c.d/e",)),
    "upper-case extensions": Hostile(keyed("a.JPG", "a.TXT", "b.Jpeg", "b.Txt"), ("a", "b")),
    "the same key twice, side by side": Hostile(keyed("a.jpg", "a.txt", "a.jpg", "a.txt"), ("a",)),
    "the same key twice, apart": Hostile(keyed("a.jpg", "a.txt", "b.jpg", "b.txt", "a.jpg", "a.txt"),
        ("a", "b", "a")),
    "image and caption apart": Hostile(keyed("a.jpg", "b.jpg", "a.txt", "b.txt"), "no sample with image"),
    "a folder by the old rule": Hostile(lambda: tar_of(before=member("a.jpg/", kind=b"\0")), GOOD),
}  # fmt: skip
