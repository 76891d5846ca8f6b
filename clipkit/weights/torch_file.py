"""PyTorch's files: the zip of ``torch.save`` and of TorchScript, the older plain form, and tensors out of them.

The file is mapped, privately: numbers are read from the disk when they are used, those of an optimizer never,
and changing a tensor does not change the file. Every claim of the file (where an entry lies, how long it is,
what part of a storage a tensor covers) is checked against what is there before it is followed.
"""

import itertools
import mmap
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from clipkit.errors import CheckpointError
from clipkit.weights.inert_pickle import MAX_BYTES, InertPickle, StoredStorage, StoredTensor

__all__ = ["Archive", "Entry", "Storages", "map_file", "open_archive", "read_old_form"]

MAX_ENTRIES = 200_000
MAX_REPEATED = 1 << 20  # numbers of a tensor that is larger than its storage
MAX_INFLATED = 32 << 20  # of all compressed entries of an archive that are read
_STORED, _DEFLATED = 0, 8
_END = struct.Struct("<4s4H2LH")
_END64_PLACE = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001  # of the older form


def map_file(path: Path) -> mmap.mmap:
    """The bytes of a file that is not empty; writing to the mapping does not reach the file.

    Raises:
        OSError: it cannot be opened or mapped.
    """
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file in an archive: where its bytes begin, how many there are, and how many once inflated."""

    start: int
    length: int
    inflated: int
    compressed: bool
    check: int  # CRC-32


class Archive:
    """A zip that PyTorch has written: ``ROOT/data.pkl``, ``ROOT/data/0``, …"""

    def __init__(self, mapped: mmap.mmap, entries: dict[str, Entry], root: str, origin: str) -> None:
        self.mapped, self.root, self.origin = mapped, root, origin
        self._entries = entries
        self._inflated = 0

    def __contains__(self, name: str) -> bool:
        return f"{self.root}/{name}" in self._entries

    def entry(self, name: str) -> Entry:
        """Of a name without the root.

        Raises:
            CheckpointError: there is none.
        """
        try:
            return self._entries[f"{self.root}/{name}"]
        except KeyError:
            raise CheckpointError(f"{self.origin}: {name[:80]!r} is missing from the archive") from None

    def view(self, name: str) -> memoryview:
        """The bytes of an entry that was stored as it is."""
        entry = self.entry(name)
        return memoryview(self.mapped)[entry.start : entry.start + entry.length]

    def inflate(self, name: str) -> bytes:
        """The bytes of an entry, inflated if need be."""
        entry = self.entry(name)
        if not entry.compressed:
            return self.view(name).tobytes()
        self._inflated += entry.inflated
        if self._inflated > MAX_INFLATED:
            raise CheckpointError(f"{self.origin}: its compressed entries are too large to be code")
        try:
            data = zlib.decompressobj(-15).decompress(self.view(name), entry.inflated + 1)
        except zlib.error as error:
            raise CheckpointError(f"{self.origin}: {name[:80]!r} in it is damaged; fetch it again") from error
        if len(data) != entry.inflated or zlib.crc32(data) != entry.check:
            raise CheckpointError(f"{self.origin}: {name[:80]!r} in it is damaged; fetch it again")
        return data

    def storages(self, folder: str) -> "Storages":
        """Of the tensors whose numbers are in ``ROOT/folder``."""

        def place(key: str) -> tuple[int, int]:
            entry = self.entry(f"{folder}/{key}")
            return entry.start, entry.length

        return Storages(self.mapped, place, self.origin)

    def read_pickle(self, name: str, *, script: bool = False) -> object:
        """See ``InertPickle``."""
        view = self.view(name)
        if len(view) > MAX_BYTES:
            raise CheckpointError(f"{self.origin}: {name} is larger than {MAX_BYTES >> 20} MB")
        return InertPickle(view, script=script, origin=self.origin).load()


def open_archive(mapped: mmap.mmap, origin: str) -> Archive:
    """The archive that fills a file.

    Raises:
        CheckpointError: it is cut off or damaged; its entries overlap, repeat or are compressed (PyTorch
            compresses only code); or it is of something else.
    """
    try:
        entries = _entries(memoryview(mapped), origin)
    except (struct.error, ValueError, OverflowError) as error:
        raise CheckpointError(f"{origin} is cut off or damaged; fetch it again") from error
    roots = [
        name[: -len("/data.pkl")] for name in entries if name.endswith("/data.pkl") and name.count("/") == 1
    ]
    if len(roots) != 1:
        found = (
            "arrays of NumPy" if any(name.endswith(".npy") for name in entries) else "no weights of PyTorch"
        )
        raise CheckpointError(f"{origin} is a zip with {found}; expected a file that torch.save has written")
    for name, entry in entries.items():
        if entry.compressed and not name.startswith(f"{roots[0]}/code/"):
            raise CheckpointError(f"{origin}: {name[:80]!r} in it is compressed, as PyTorch never writes it")
    archive = Archive(mapped, entries, roots[0], origin)
    if "byteorder" in archive and archive.inflate("byteorder")[:10] != b"little":
        raise CheckpointError(f"{origin} was written by a big-endian machine; save it again on another one")
    return archive


def _entries(view: memoryview, origin: str) -> dict[str, Entry]:
    start, end, count = _directory(view)
    if count > MAX_ENTRIES:
        raise CheckpointError(f"{origin}: {count} entries are too many for weights")
    entries: dict[str, Entry] = {}
    places: list[tuple[int, int]] = []
    for _ in range(count):
        fields = _CENTRAL.unpack_from(view, start)
        signature, flags, method, check = fields[0], fields[3], fields[4], fields[7]
        lengths = fields[10:13]
        start += _CENTRAL.size
        name = view[start : start + lengths[0]].tobytes().decode()
        extra = view[start + lengths[0] : start + lengths[0] + lengths[1]].tobytes()
        start += sum(lengths)
        stored, inflated, header = _large(extra, fields[8], fields[9], fields[16])
        if signature != b"PK\x01\x02" or flags & 1 or method not in (_STORED, _DEFLATED) or start > end:
            raise ValueError("central header")
        if method == _STORED and stored != inflated:
            raise ValueError("size")
        first = _first_byte(view, header, name)
        if first + stored > end or name in entries:
            raise ValueError("beyond the file, or twice")
        entries[name] = Entry(
            start=first, length=stored, inflated=inflated, compressed=method == _DEFLATED, check=check
        )
        places.append((header, first + stored))
    places.sort()
    if start != end or any(one[1] > following[0] for one, following in itertools.pairwise(places)):
        raise ValueError("overlap")
    return entries


def _directory(view: memoryview) -> tuple[int, int, int]:
    """Where the table of entries begins and ends, and their number."""
    tail = max(0, len(view) - _END.size - 0xFFFF)
    at = tail + view[tail:].tobytes().rindex(b"PK\x05\x06")
    *_, count, size, start, comment = _END.unpack_from(view, at)
    if at + _END.size + comment != len(view):
        raise ValueError("the end is not at the end")
    if view[max(0, at - _END64_PLACE.size) : at].tobytes().startswith(b"PK\x06\x07"):  # PyTorch's way, always
        _, _, place, _ = _END64_PLACE.unpack_from(view, at - _END64_PLACE.size)
        signature, *_, count, size, start = _END64.unpack_from(view, place)
        if signature != b"PK\x06\x06":
            raise ValueError("zip64")
        at = place
    if start + size != at:
        raise ValueError("table")
    return start, start + size, count


def _large(extra: bytes, stored: int, inflated: int, header: int) -> tuple[int, int, int]:
    """Sizes and place, from the zip64 field where they do not fit into the header."""
    wanted = [stored, inflated, header]
    at = 0
    while 0xFFFFFFFF in wanted and at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        at += 4
        if kind == 1:
            for i in (1, 0, 2):  # in this order, and only what is needed
                if wanted[i] == 0xFFFFFFFF:
                    (wanted[i],) = struct.unpack_from("<Q", extra, at)
                    at += 8
            break
        at += length
    return wanted[0], wanted[1], wanted[2]


def _first_byte(view: memoryview, header: int, name: str) -> int:
    """Where an entry's bytes begin, after its local header."""
    signature, *_, name_length, extra_length = _LOCAL.unpack_from(view, header)
    after = header + _LOCAL.size
    if signature != b"PK\x03\x04" or view[after : after + name_length].tobytes() != name.encode():
        raise ValueError("local header")
    first: int = after + name_length + extra_length
    return first


class Storages:
    """Tensors out of a mapped file.

    Args:
        place: gives the first byte and the number of bytes of the storage of a key.
        origin: what messages call the file.
    """

    def __init__(self, mapped: mmap.mmap, place: Callable[[str], tuple[int, int]], origin: str) -> None:
        self._mapped, self._place, self._origin = mapped, place, origin
        self._made: dict[str, torch.UntypedStorage] = {}

    def tensor(self, stored: StoredTensor, name: str) -> Tensor:
        """Tensors of one storage share it, as those that were saved did; none requires a gradient.

        Raises:
            CheckpointError: the tensor reaches beyond its storage, or is not what its storage is for.
        """
        source = stored.storage
        width = (source.dtype or torch.uint8).itemsize
        start, length = self._place(source.key)
        room = source.count * width
        if source.view:  # a part of its storage
            whole = source.start * width + room <= length and source.dtype == stored.dtype
        else:
            whole = room == length
        if not whole:
            raise CheckpointError(f"{self._origin}: the storage of {name[:120]!r} is cut off; fetch it again")
        _check_view(stored, room // stored.dtype.itemsize, f"{self._origin}: {name[:120]!r}")
        if source.key not in self._made:
            self._made[source.key] = self._storage(start, length)
        first = source.start + stored.offset
        try:
            return torch.empty(0, dtype=stored.dtype).set_(
                self._made[source.key], 0 if 0 in stored.size else first, stored.size, stored.stride
            )
        except RuntimeError as error:
            raise CheckpointError(f"{self._origin}: {name[:120]!r} has a shape that cannot be") from error

    def _storage(self, start: int, length: int) -> torch.UntypedStorage:
        if not length:
            return torch.UntypedStorage(0)
        storage = torch.frombuffer(
            self._mapped, dtype=torch.uint8, count=length, offset=start
        ).untyped_storage()
        return storage.clone() if start % 16 else storage  # numbers must be aligned; older files do not care


def _check_view(stored: StoredTensor, room: int, what: str) -> None:
    """Refuse a tensor that is not within the ``room`` numbers of its storage."""
    numbers = (stored.offset, *stored.size, *stored.stride)
    if len(stored.size) != len(stored.stride) or min(numbers) < 0:
        raise CheckpointError(f"{what} has a shape that cannot be")
    count, last = 1, stored.offset
    for size, stride in zip(stored.size, stored.stride, strict=True):
        count *= size
        last += (size - 1) * stride
    # one without numbers may lie anywhere, as a slice from behind the end does
    if max(numbers) >= 1 << 62 or (count and last >= room):
        raise CheckpointError(f"{what} reaches beyond its storage; fetch the file again")
    if count > max(room, MAX_REPEATED):
        raise CheckpointError(f"{what} repeats the {room} numbers of its storage {count} times")


def read_old_form(mapped: mmap.mmap, origin: str) -> tuple[object, Storages]:
    """What ``torch.save`` wrote before PyTorch 1.6: pickles one after another, then the storages.

    Raises:
        CheckpointError: it is cut off, damaged, another pickle, or names what is not allowed.
    """
    view = memoryview(mapped)
    position = 0
    loaded: list[object] = []
    known: dict[str, StoredStorage] = {}
    for _ in range(5):  # magic number, version, system, object, keys
        pickle = InertPickle(view, position, origin=origin)
        loaded.append(pickle.load())
        position = pickle.position
        known |= pickle.storages
        if loaded[0] != _MAGIC:
            raise CheckpointError(f"{origin} is a pickle, but not one of torch.save; clipkit reads no others")
    _, version, system, found, keys = loaded
    if version != _VERSION or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise CheckpointError(f"{origin} is of a version or byte order that clipkit does not read")
    places: dict[str, tuple[int, int]] = {}
    for key in keys if isinstance(keys, list) else ():
        if not isinstance(key, str) or key not in known or key in places or position + 8 > len(view):
            raise CheckpointError(f"{origin} is cut off or damaged; fetch it again")
        (count,) = struct.unpack_from("<q", view, position)
        length = count * (known[key].dtype or torch.uint8).itemsize
        places[key] = (position + 8, length)
        position += 8 + length
        if count < 0 or position > len(view):
            raise CheckpointError(f"{origin} is cut off or damaged; fetch it again")

    def place(key: str) -> tuple[int, int]:
        if key not in places:
            raise CheckpointError(f"{origin} lacks a storage; fetch it again")
        return places[key]

    return found, Storages(mapped, place, origin)
