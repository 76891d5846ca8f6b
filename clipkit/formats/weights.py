"""Read tensors from any file of weights without running anything in it.

    *.safetensors                       read by safetensors
    *.safetensors.index.json            the same in several files, as transformers writes large models
    of torch.save                       a state dict, or a training checkpoint that holds one among other things
    of torch.jit.save                   TorchScript, as OpenAI published CLIP

The format follows from the content of a file, not from its name. Pickles are read by ``InertPickle``, which
imports and calls nothing. TorchScript archives need such a reader anyway, as loading them would run their code.
Files of ``torch.save`` are read by it too: ``torch.load(weights_only=True, mmap=True)`` of torch 2.15 takes a
storage to be as long as the pickle claims and reads into what follows, inflates compressed entries without a limit
(1.3 MB to 300 MB), and crashes the process on a dictionary with a deeply nested key.
"""

import itertools
import json
import mmap
import pickle
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clipkit.errors import CheckpointError
from clipkit.files.terminal import printable

__all__ = [
    "Archive",
    "Entry",
    "InertPickle",
    "Opaque",
    "ScriptObject",
    "Storages",
    "StoredStorage",
    "StoredTensor",
    "StoredWeights",
    "is_torchscript",
    "map_file",
    "open_archive",
    "read_old_form",
    "read_torchscript",
    "read_weights",
]


# --------------------------------------------------------------------------------------------------------------
# Reading the pickles in PyTorch's files as plain values: nothing that they name is imported, made or called.
#
# A pickle is a program for a small stack machine. This machine knows only the instructions that writing tensors
# needs, and knows names (``torch._utils._rebuild_tensor_v2``) only as text, of which few are allowed. A tensor
# becomes a ``StoredTensor``: where its numbers lie, not the numbers. What has no part in weights becomes
# ``Opaque``. Time and memory are bounded by the size of the pickle, which is bounded too.

MAX_BYTES = 64 << 20
MAX_INSTRUCTIONS = 2_000_000  # seconds; a ViT-B-32 with its optimizer takes 37,000
# of what one instruction may have to copy, since a long one could be used again and again
MAX_GLOBAL_NAME = 1_000  # letters
MAX_ARGUMENTS = 8
MAX_DIMENSIONS = 64


@dataclass(frozen=True, slots=True, eq=False)
class StoredStorage:
    """A run of numbers in the file; ``dtype`` is None where the pickle leaves it to the tensor."""

    key: str
    dtype: torch.dtype | None
    count: int  # numbers, or bytes where dtype is None
    start: int = 0  # in numbers, of a view into a larger storage
    view: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A view of a storage, as the file claims it: nothing is checked against the storage yet."""

    storage: StoredStorage
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(slots=True, eq=False)
class ScriptObject:
    """An object of a class that a TorchScript archive defines; ``state`` is what was stored for it."""

    class_name: str
    state: object = None


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """A value that was not read, by the name of what would make it."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class _Global:
    name: str


_OF_STORAGE = {
    "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16, "Double": torch.float64,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
    # TorchScript only; torch.save names these dtypes beside an untyped storage
    "UInt16": torch.uint16, "UInt32": torch.uint32, "UInt64": torch.uint64,
    "Float8_e4m3fn": torch.float8_e4m3fn, "Float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "Float8_e5m2": torch.float8_e5m2, "Float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "Float8_e8m0fnu": torch.float8_e8m0fnu,
}  # fmt: skip
_STORAGES: dict[str, torch.dtype | None] = {
    f"{module}.{name}Storage": dtype
    for module in ("torch", "torch.cuda")
    for name, dtype in _OF_STORAGE.items()
}
_STORAGES |= {"torch.UntypedStorage": None, "torch.storage.UntypedStorage": None}
_DTYPES = {str(dtype): dtype for dtype in _OF_STORAGE.values()}
_REBUILD = "torch._utils._rebuild_"
_TENSOR_CLASSES = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"})
_REBUILDERS = frozenset(_REBUILD + name for name in ("tensor", "tensor_v2", "tensor_v3"))
_PARAMETERS = frozenset(_REBUILD + name for name in ("parameter", "parameter_with_state"))
_TYPED = "torch._tensor._rebuild_from_type_v2"
_LISTS = frozenset(
    "torch.jit._pickle." + name
    for name in ("build_intlist", "build_tensorlist", "build_doublelist", "build_boollist", "restore_type_tag")
)  # fmt: skip
_CALLED = _REBUILDERS | _PARAMETERS | _LISTS | {_TYPED, "collections.OrderedDict", "torch.Size"}
# seen beside weights, of no use to us: what they would make is left out
_LEFT_OUT = frozenset(
    {
        "collections.Counter", "torch.device", "torch.Generator", "torch.serialization._get_layout",
        "torch.jit._pickle.build_tensor_from_id", "_codecs.encode", "argparse.Namespace",
        "collections.defaultdict", "pathlib.PosixPath", "pathlib._local.PosixPath",
        # a learning rate from np.cos, in an optimizer's state
        "numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
        *(f"{module}.{name}" for module in ("builtins", "__builtin__")
          for name in ("set", "bytearray", "complex")),
        *(_REBUILD + name for name in ("sparse_tensor", "qtensor", "meta_tensor_no_storage",
                                       "device_tensor_from_numpy", "device_tensor_from_cpu_tensor")),
    }
)  # fmt: skip
_PLAIN = _CALLED | _LEFT_OUT | _TENSOR_CLASSES | _STORAGES.keys() | _DTYPES.keys()

_CONSTANTS: dict[bytes, Callable[[], object]] = {
    pickle.NONE: lambda: None,
    pickle.NEWTRUE: lambda: True,
    pickle.NEWFALSE: lambda: False,
    pickle.EMPTY_DICT: dict,
    pickle.EMPTY_LIST: list,
    pickle.EMPTY_TUPLE: tuple,
    pickle.EMPTY_SET: lambda: Opaque("builtins.set"),
}
_NUMBERS = {pickle.BININT: "<i", pickle.BININT1: "<B", pickle.BININT2: "<H", pickle.BINFLOAT: ">d"}
_TEXTS = {  # by the form of their length
    pickle.BINUNICODE: "<I", pickle.SHORT_BINUNICODE: "<B", pickle.SHORT_BINSTRING: "<B", pickle.BINSTRING: "<i",
}  # fmt: skip
_BYTES = {pickle.BINBYTES: "<I", pickle.SHORT_BINBYTES: "<B"}
_SHORT_TUPLES = {pickle.TUPLE1: 1, pickle.TUPLE2: 2, pickle.TUPLE3: 3}
_PASSED_OVER = {pickle.PROTO: 1, pickle.FRAME: 8}  # by the bytes that follow


class InertPickle:
    """One pickle of a file.

    Args:
        data: the file, or the entry of the archive, that it lies in.
        position: where it begins; after ``load``, where it has ended.
        script: it is of a TorchScript archive, whose own classes (``__torch__.…``) become ``ScriptObject``.
        origin: what messages call it.
    """

    def __init__(self, data: memoryview, position: int = 0, *, script: bool = False, origin: str) -> None:
        self.position = position
        self.storages: dict[str, StoredStorage] = {}  # the first of each key
        self._data = data
        self._end = min(len(data), position + MAX_BYTES)
        self._script = script
        self._origin = origin
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> object:
        """What the pickle describes: dict (with text keys only), list, tuple, text, bytes, numbers, bool, None
        and the records of this module. Dicts and lists may hold themselves.

        Raises:
            CheckpointError: it names something that is not allowed, or is cut off, damaged or too long.
        """
        instructions = 0
        try:
            while (instruction := self._take(1)) != pickle.STOP:
                self._do(instruction)
                instructions += 1
                if instructions > MAX_INSTRUCTIONS:
                    raise CheckpointError(f"{self._origin}: its pickle is too long for weights")
            return self._stack.pop()
        except (IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error) as error:
            raise CheckpointError(
                f"{self._origin}: its pickle is cut off or damaged; fetch it again"
            ) from error

    def _do(self, instruction: bytes) -> None:
        stack = self._stack
        if instruction in (pickle.BINGET, pickle.LONG_BINGET):
            stack.append(self._memo[self._number("<B" if instruction == pickle.BINGET else "<I")])
        elif instruction in (pickle.BINPUT, pickle.LONG_BINPUT):
            self._memo[self._number("<B" if instruction == pickle.BINPUT else "<I")] = stack[-1]
        elif instruction == pickle.MEMOIZE:
            self._memo[len(self._memo)] = stack[-1]
        elif instruction in _CONSTANTS:
            stack.append(_CONSTANTS[instruction]())
        elif instruction in _NUMBERS:
            stack.append(self._number(_NUMBERS[instruction]))
        elif instruction == pickle.LONG1:
            stack.append(int.from_bytes(self._take(self._number("<B")), "little", signed=True))
        elif instruction in _TEXTS:
            text = self._take(self._number(_TEXTS[instruction]))
            stack.append(text.decode("utf-8", "replace"))
        elif instruction in _BYTES:
            stack.append(self._take(self._number(_BYTES[instruction])))
        elif instruction == pickle.MARK:
            self._marked.append(stack)
            self._stack = []
        elif instruction in _SHORT_TUPLES:
            self._short_tuple(_SHORT_TUPLES[instruction])
        elif instruction in _PASSED_OVER:
            self._take(_PASSED_OVER[instruction])
        elif instruction in _ACTIONS:
            _ACTIONS[instruction](self)
        else:
            raise ValueError(f"instruction {instruction!r}")

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if count < 0 or end > self._end:
            raise ValueError("cut off")
        taken = self._data[self.position : end].tobytes()
        self.position = end
        return taken

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _line(self) -> str:
        ahead = self._data[self.position : min(self.position + MAX_GLOBAL_NAME, self._end)].tobytes()
        return self._take(ahead.index(b"\n") + 1)[:-1].decode()

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _short_tuple(self, length: int) -> None:
        if len(self._stack) < length:
            raise ValueError("too few items")
        self._stack[-length:] = [tuple(self._stack[-length:])]

    def _tuple(self) -> None:
        items = self._since_mark()
        self._stack.append(tuple(items))

    def _append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target.extend(items)
        elif not isinstance(target, Opaque):  # a set
            raise TypeError("append")

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Opaque):
            return
        if type(target) is not dict or len(items) % 2:
            raise TypeError("items")
        # state dicts have names; other keys would have to be hashed, which deep tuples and chosen numbers abuse
        target.update(
            (key, items[i + 1]) for i, key in enumerate(items[:-1]) if not i % 2 and type(key) is str
        )

    def _global(self) -> None:
        module = self._line()
        self._push_global(module, self._line())

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._push_global(module, name)

    def _push_global(self, module: str, name: str) -> None:
        if type(module) is not str or type(name) is not str or len(module) + len(name) > MAX_GLOBAL_NAME:
            raise TypeError("name")
        full = f"{module}.{name}"
        if full not in _PLAIN and not (self._script and full.startswith("__torch__.")):
            raise CheckpointError(
                f"{self._origin} names {full[:120]!r}, which clipkit does not load from a pickle, since it could "
                "run code; have its author save the weights alone, best as safetensors"
            )
        self._stack.append(_Global(full))

    def _new_object(self) -> None:
        _, made = self._stack.pop(), self._stack.pop()
        name = _name(made)
        self._stack.append(ScriptObject(name) if name.startswith("__torch__.") else Opaque(name))

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, ScriptObject):
            target.state = state
        elif not isinstance(target, dict | Opaque | StoredTensor):  # whose attributes are of no use to us
            raise TypeError("state")

    def _reduce(self) -> None:
        arguments, called = self._stack.pop(), self._stack.pop()
        name = _name(called)
        if name.startswith("__torch__."):  # a value of an Enum, from the bare number
            self._stack.append(ScriptObject(name))
            return
        if type(arguments) is not tuple or len(arguments) > MAX_ARGUMENTS:
            raise TypeError("call")
        self._stack.append(_call(name, arguments))

    def _storage(self) -> None:
        source = self._stack.pop()
        if type(source) is not tuple or len(source) > MAX_ARGUMENTS:
            raise TypeError("storage")
        kind, class_, key, _, count, *view = source
        if kind != "storage" or type(key) is not str:
            raise TypeError("storage")
        start, is_view = 0, bool(view) and view[0] is not None
        if is_view:  # in files before PyTorch 0.4
            _, start, count = view[0]
        stored = StoredStorage(key, _STORAGES[_name(class_)], count, start, is_view)
        if type(count) is not int or type(start) is not int or count < 0 or start < 0:
            raise ValueError("storage")
        self.storages.setdefault(key, stored)
        self._stack.append(stored)


_ACTIONS: dict[bytes, Callable[[InertPickle], None]] = {
    pickle.TUPLE: InertPickle._tuple,
    pickle.APPEND: InertPickle._append,
    pickle.APPENDS: lambda machine: machine._extend(machine._since_mark()),
    pickle.ADDITEMS: lambda machine: machine._extend(machine._since_mark()),
    pickle.SETITEM: InertPickle._set_item,
    pickle.SETITEMS: lambda machine: machine._set_items(machine._since_mark()),
    pickle.GLOBAL: InertPickle._global,
    pickle.STACK_GLOBAL: InertPickle._stack_global,
    pickle.NEWOBJ: InertPickle._new_object,
    pickle.BUILD: InertPickle._build,
    pickle.REDUCE: InertPickle._reduce,
    pickle.BINPERSID: InertPickle._storage,
}


def _name(value: object) -> str:
    if not isinstance(value, _Global):
        raise TypeError("no name")
    return value.name


def _call(name: str, arguments: tuple[Any, ...]) -> object:
    """What calling ``name`` would have made, described."""
    if name == _TYPED:  # a tensor that had attributes
        inner, class_, inner_arguments, _ = arguments
        if _name(class_) not in _TENSOR_CLASSES or _name(inner) not in _REBUILDERS | _PARAMETERS:
            return Opaque(name)
        if type(inner_arguments) is not tuple or len(inner_arguments) > MAX_ARGUMENTS:
            raise TypeError("call")
        return _call(_name(inner), inner_arguments)
    if name in _REBUILDERS:
        return _tensor(name, arguments)
    if name in _PARAMETERS or name in _LISTS or name == "torch.Size":
        return arguments[0]
    if name == "collections.OrderedDict":
        if arguments:  # Python 2 gave all items at once
            raise TypeError("items")
        return {}
    return Opaque(name)


def _tensor(name: str, arguments: tuple[Any, ...]) -> StoredTensor | Opaque:
    storage, offset, size, stride, *more = arguments
    if not isinstance(storage, StoredStorage):
        raise TypeError("storage")
    dtype, metadata = storage.dtype, more[2:]
    if name.endswith("v3"):
        dtype, metadata = _DTYPES[_name(more[2])], more[3:]
    if metadata and metadata[0]:  # conjugated or negated without its numbers having been changed
        return Opaque(name)
    if not isinstance(dtype, torch.dtype) or type(size) is not tuple or type(stride) is not tuple:
        raise TypeError("tensor")
    if max(len(size), len(stride)) > MAX_DIMENSIONS:
        raise ValueError("tensor")
    if any(type(number) is not int for number in (offset, *size, *stride)):
        raise TypeError("tensor")
    return StoredTensor(storage, dtype, offset, size, stride)


# --------------------------------------------------------------------------------------------------------------
# PyTorch's files: the zip of ``torch.save`` and of TorchScript, the older plain form, and tensors out of them.
#
# The file is mapped, privately: numbers are read from the disk when they are used, those of an optimizer never,
# and changing a tensor does not change the file. Every claim of the file (where an entry lies, how long it is,
# what part of a storage a tensor covers) is checked against what is there before it is followed.

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


# --------------------------------------------------------------------------------------------------------------
# TorchScript archives, as OpenAI published CLIP: their state dict without running them.
#
# ``ROOT/data.pkl`` holds the tree of modules with their attributes, ``ROOT/code/__torch__/….py`` the source of
# their classes. The source is read as text, for the two lines of each class that say which attributes are
# parameters and which are buffers; nothing of it is compiled.

MAX_NAMES = 1_000_000  # attributes of all modules, a part that is used twice counted twice
MAX_DEPTH = 100
MAX_LENGTH = 1_000  # of a name
_CLASS = re.compile(r"class (\w+)(?:\((\w+)\))?:")
_NAMES = re.compile(r"  __(parameters|buffers)__ = \[(.*)\]")
_NAME = re.compile(r'"([^"]*)"')


def is_torchscript(archive: Archive) -> bool:
    """Whether an archive is of ``torch.jit.save``, not of ``torch.save``."""
    return "constants.pkl" in archive


def read_torchscript(archive: Archive) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The state dict (parameters and buffers of all modules, by their dotted names) and the outermost
    module's other attributes.

    Raises:
        CheckpointError: the archive is damaged, names what is not allowed, or cannot be read without running it.
    """
    top = archive.read_pickle("data.pkl", script=True)
    archive.read_pickle("constants.pkl", script=True)  # only to refuse what a program would stumble over
    if not isinstance(top, ScriptObject):
        raise CheckpointError(f"{archive.origin} is an archive of TorchScript without a module")
    storages = archive.storages("data")
    tensors = {
        name: storages.tensor(stored, name)
        for name, stored in _Walk(archive).tensors(top, prefix="", depth=0)
    }
    attributes = top.state if isinstance(top.state, dict) else {}
    return tensors, {name: value for name, value in attributes.items() if not name.startswith("_")}


@dataclass(frozen=True, kw_only=True)
class _Class:
    module: bool
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] | None = None  # None: written before PyTorch said so, each tensor is one


class _Walk:
    """Over the tree of modules, in the order of ``state_dict``: a module's parameters, buffers, then its parts."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._names = 0
        self._files: dict[str, dict[str, _Class]] = {}

    def tensors(
        self, module: ScriptObject, prefix: str = "", depth: int = 0
    ) -> Iterator[tuple[str, StoredTensor]]:
        shape = self._class_of(module)
        if not shape.module:
            return
        state = module.state
        if not isinstance(state, dict):
            raise self._error(f"{module.class_name[:120]!r} can only be read by running its code")
        self._names += 1 + len(state) + len(shape.parameters) + len(shape.buffers or ())
        if self._names > MAX_NAMES or depth > MAX_DEPTH or len(prefix) > MAX_LENGTH:
            raise self._error("its modules hold each other without an end")
        buffers = shape.buffers
        if buffers is None:
            others = state.keys() - set(shape.parameters)
            buffers = tuple(
                name for name in state if name in others and isinstance(state[name], StoredTensor)
            )
        for name in (*shape.parameters, *buffers):
            value = state.get(name, module)
            if len(prefix) + len(name) > MAX_LENGTH:
                raise self._error(f"a tensor has a name of {len(prefix) + len(name)} letters")
            if isinstance(value, StoredTensor):
                yield prefix + name, value
            elif value is not None:  # None is a linear layer's bias that it does not have
                raise self._error(f"{(prefix + name)[:120]!r} is not a tensor that can be read")
        for name, value in state.items():
            if isinstance(value, ScriptObject):
                yield from self.tensors(value, f"{prefix}{name}.", depth + 1)

    def _class_of(self, module: ScriptObject) -> _Class:
        """What the source says of an object's class."""
        file, _, name = module.class_name.rpartition(".")
        if file == "__torch__.torch.classes" or file.startswith("__torch__.torch.classes."):
            return _Class(module=False)  # of a library in C++
        path = f"code/{file.replace('.', '/')}.py"
        if path not in self._files:
            source = self._archive.inflate(path).decode("utf-8", "replace")
            self._files[path] = _classes(source)
        if name not in self._files[path]:
            raise self._error(f"its code lacks the class {module.class_name[:120]!r}")
        return self._files[path][name]

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._archive.origin}: {what}; save its state dict with torch.save instead")


def _classes(source: str) -> dict[str, _Class]:
    classes: dict[str, _Class] = {}
    name = ""  # of the class that the line is in
    for line in source.split("\n"):
        if match := _CLASS.fullmatch(line):
            name = match[1]
            classes[name] = _Class(module=match[2] == "Module")
        elif line[:1].strip():
            name = ""
        elif name and (match := _NAMES.fullmatch(line)):
            names = tuple(_NAME.findall(match[2]))
            known = classes[name]
            is_parameters = match[1] == "parameters"
            classes[name] = (
                replace(known, parameters=names) if is_parameters else replace(known, buffers=names)
            )
    return classes


# --------------------------------------------------------------------------------------------------------------

MAX_JSON = 64 << 20
MAX_HEADER = 100_000_000  # of safetensors, as that library has it
MAX_NOTE = MAX_NAME = 1_000  # letters

# where training programs put the state dict; the weights in training come before their moving average
_PLACES = ("state_dict", "model_state_dict", "model", "module", "net", "weights", "params",
           "ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "ema")  # fmt: skip
_COUNTER = "n_averaged"  # beside the names of torch's AveragedModel

# beginnings of what is often in the place of weights
_OTHERS = {
    b"version https://git-lfs": "a Git LFS pointer: the weights themselves were not downloaded; run git lfs pull",
    b"<": "a web page or XML; the download has gone wrong, fetch it again",
    b"\x1f\x8b": "compressed with gzip; unpack it first",
    b"BZh": "compressed with bzip2; unpack it first",
    b"\xfd7zXZ": "compressed with xz; unpack it first",
    b"(\xb5/\xfd": "compressed with zstd; unpack it first",
    b"\x93NUMPY": "an array of NumPy",
    b"\x89HDF": "of HDF5; convert it to safetensors",
    b"GGUF": "of GGUF; take the model's safetensors instead",
}


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """What a file of weights holds.

    Tensors are on the CPU, of the stored dtype, and require no gradient; those that shared memory when they were
    saved by PyTorch share it. Their numbers may be read from the file when they are used: keep the file as it is
    until they are copied. Changing them does not change the file.
    """

    tensors: dict[str, Tensor]  # by name, without the prefixes of torch.compile and of data-parallel wrappers
    kind: str  # "safetensors", "torch", "torchscript"
    notes: dict[str, int | float | str] = field(
        default_factory=dict
    )  # epoch, step, name, … beside the weights


def read_weights(path: Path) -> StoredWeights:
    """Read the tensors of a file.

    Of a training checkpoint only the model's tensors take memory; of several state dicts in one file, the
    weights in training come before their moving average.

    Raises:
        CheckpointError: there is no such file, it is cut off or damaged, holds no tensors, is of another format,
            or names anything in a pickle that tensors do not need. Nothing of it was run.
    """
    try:
        if path.is_dir():
            raise CheckpointError(f"{path} is a folder; name the file of weights in it")
        if not path.is_file():
            raise CheckpointError(f"{path}: there is no such file")
        weights = _read(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    tensors, notes = _clean(weights.tensors, weights.notes, path)
    if not tensors:
        frozen = " (a frozen TorchScript keeps them in its code)" if weights.kind == "torchscript" else ""
        raise CheckpointError(f"{path} holds no tensors{frozen}")
    return StoredWeights(tensors=tensors, kind=weights.kind, notes=notes)


def _read(path: Path, *, shard: bool = False) -> StoredWeights:
    """By content; names as they are stored."""
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        raise CheckpointError(f"{path} is empty; fetch it again")
    # the first 8 bytes are the header's length, which may look like any of the others
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < MAX_HEADER:
        return _read_safetensors(path)
    if start.startswith(b"PK"):
        return _read_zip(path)
    if start.startswith(b"\x80"):
        found, storages = read_old_form(map_file(path), str(path))
        return _choose(found, storages, path)
    if start.lstrip()[:1] in (b"{", b"[") and not shard:
        return _read_index(path)
    for beginning, what in _OTHERS.items():
        if start.lstrip().startswith(beginning):
            raise CheckpointError(f"{path} is {what}")
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is cut off or damaged; fetch it again")
    raise CheckpointError(
        f"{path} is no file of weights that clipkit knows: safetensors, torch.save, TorchScript"
    )


def _read_safetensors(path: Path) -> StoredWeights:
    try:
        with safe_open(path, framework="pt") as file:
            notes = _notes(file.metadata() or {})
            return StoredWeights(
                tensors={name: file.get_tensor(name) for name in file.keys()},  # noqa: SIM118
                kind="safetensors",
                notes=notes,
            )
    except SafetensorError as error:
        what = printable(str(error), 200)
        raise CheckpointError(f"{path} is cut off or damaged ({what}); fetch it again") from error


def _read_index(path: Path) -> StoredWeights:
    """Tensors that are spread over several files beside a list of which is where."""
    if path.stat().st_size > MAX_JSON:
        raise CheckpointError(f"{path} is too large for a list of shards")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is neither weights nor JSON; fetch it again") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict):
        raise CheckpointError(
            f"{path} is JSON, not weights; name the file of weights, often model.safetensors"
        )
    names: dict[str, list[str]] = {}
    for name, shard in places.items():
        names.setdefault(str(shard), []).append(name)
    tensors: dict[str, Tensor] = {}
    kinds = set()
    for shard, wanted in sorted(names.items()):
        stored = _read(_shard(path, shard), shard=True)
        kinds.add(stored.kind)
        missing = [name for name in wanted if name not in stored.tensors]
        if missing:
            raise CheckpointError(f"{path}: {shard!r} lacks {missing[0][:120]!r}; fetch both again")
        tensors |= {name: stored.tensors[name] for name in wanted}
    notes = index.get("metadata")
    return StoredWeights(
        tensors=tensors,
        kind=min(kinds, default="safetensors"),
        notes=_notes(notes if isinstance(notes, dict) else {}),
    )


def _shard(index: Path, name: str) -> Path:
    """A file beside the index; in a download cache both are links into one folder."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise CheckpointError(f"{index} names {name[:120]!r}, which is not a file beside it")
    shard = index.parent / name
    if not shard.is_file():
        raise CheckpointError(f"{index}: {name[:120]!r} is missing beside it; fetch it too")
    if shard.resolve().parent not in (index.parent.resolve(), index.resolve().parent):
        raise CheckpointError(
            f"{index}: {name[:120]!r} is a link to somewhere else; copy the file there instead"
        )
    return shard


def _read_zip(path: Path) -> StoredWeights:
    archive = open_archive(map_file(path), str(path))
    if is_torchscript(archive):
        tensors, attributes = read_torchscript(archive)
        return StoredWeights(tensors=tensors, kind="torchscript", notes=_notes(attributes))
    return _choose(archive.read_pickle("data.pkl"), archive.storages("data"), path)


def _choose(found: object, storages: Storages, path: Path) -> StoredWeights:
    """The state dict in what ``torch.save`` was given; only its tensors are made."""
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{path} holds no state dict; save one with torch.save(model.state_dict(), FILE)"
        )
    places = [name for name in _PLACES if _is_state_dict(found.get(name))]
    if places:
        chosen, beside = found[places[0]], found
    elif _is_state_dict(found):
        chosen, beside = found, found
    else:
        names = ", ".join(repr(name)[:40] for name in list(found)[:6])
        raise CheckpointError(f"{path} holds no tensors of a model; it has: {names or 'nothing'}")
    for name, value in chosen.items():
        if isinstance(value, Opaque) and value.name.startswith("torch._utils."):
            raise CheckpointError(
                f"{path}: {name[:120]!r} is not a plain tensor ({value.name}); save it dense"
            )
    tensors = {
        name: storages.tensor(value, name)
        for name, value in chosen.items()
        if isinstance(value, StoredTensor)
    }
    return StoredWeights(tensors=tensors, kind="torch", notes=_notes(beside))


def _is_state_dict(value: object) -> bool:
    return isinstance(value, dict) and any(isinstance(item, StoredTensor) for item in value.values())


def _notes(values: dict[str, Any]) -> dict[str, int | float | str]:
    # exact types: bool is not a number here
    return {name: value for name, value in values.items() if type(value) in (int, float) or _is_text(value)}


def _is_text(value: object) -> bool:
    # JSON can hold halves of letters, which cannot be printed
    return type(value) is str and len(value) <= MAX_NOTE and value == value.encode(errors="ignore").decode()


def _clean(
    tensors: dict[str, Tensor], notes: dict[str, int | float | str], path: Path
) -> tuple[dict[str, Tensor], dict[str, int | float | str]]:
    """Names without ``_orig_mod`` (torch.compile's) anywhere, and without a ``module.`` that all begin with."""
    longest = max(map(len, tensors), default=0)
    if longest > MAX_NAME:
        raise CheckpointError(f"{path}: a tensor has a name of {longest} letters; fetch the file again")
    cleaned = {".".join(part for part in name.split(".") if part != "_orig_mod"): name for name in tensors}
    if len(cleaned) < len(tensors):
        raise CheckpointError(f"{path}: the same tensors are there with and without torch.compile's prefix")
    if _COUNTER in cleaned and len(cleaned) > 1 and tensors[cleaned[_COUNTER]].numel() == 1:
        notes = {**notes, _COUNTER: int(tensors[cleaned.pop(_COUNTER)])}
    while cleaned and all(name.startswith("module.") for name in cleaned):
        cleaned = {name.removeprefix("module."): stored for name, stored in cleaned.items()}
    return {name: tensors[stored] for name, stored in cleaned.items()}, notes
