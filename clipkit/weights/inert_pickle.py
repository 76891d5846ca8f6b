"""Reading the pickles in PyTorch's files as plain values: nothing that they name is imported, made or called.

A pickle is a program for a small stack machine. This machine knows only the instructions that writing tensors
needs, and knows names (``torch._utils._rebuild_tensor_v2``) only as text, of which few are allowed. A tensor
becomes a ``StoredTensor``: where its numbers lie, not the numbers. What has no part in weights becomes
``Opaque``. Time and memory are bounded by the size of the pickle, which is bounded too.
"""

import pickle  # for the names of its instructions only
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from clipkit.errors import CheckpointError

__all__ = ["InertPickle", "Opaque", "ScriptObject", "StoredStorage", "StoredTensor"]

MAX_BYTES = 64 << 20
MAX_INSTRUCTIONS = 2_000_000  # seconds; a ViT-B-32 with its optimizer takes 37,000
# of what one instruction may have to copy, since a long one could be used again and again
MAX_NAME = 1_000  # letters
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
        ahead = self._data[self.position : min(self.position + MAX_NAME, self._end)].tobytes()
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
        if type(module) is not str or type(name) is not str or len(module) + len(name) > MAX_NAME:
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
