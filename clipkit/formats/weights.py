"""Read tensors from weights files of any format without executing code from them.

    *.safetensors                       read by the safetensors library
    *.safetensors.index.json            several such files, as transformers stores large models
    files of torch.save                 a state dict, or a training checkpoint that contains one
    files of torch.jit.save             TorchScript, as OpenAI published CLIP

The format is determined from a file's content, not its name. Pickles are interpreted by ``read_pickle``, which does
not import or call anything. TorchScript archives require this, because loading them would run their code. It is
also used for files of ``torch.save``, because ``torch.load(weights_only=True, mmap=True)`` of torch 2.15 reads out
of bounds if a pickle states wrong storage sizes, decompresses entries without limit (1.3 MB to 300 MB), and crashes
the process on a dictionary with a deeply nested key.
"""

import io
import json
import mmap
import pickletools
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clipkit.errors import CheckpointError
from clipkit.files.terminal import printable

__all__ = ["Opaque", "ScriptObject", "StoredWeights", "read_pickle", "read_weights"]

# Together these limits bound time and memory by the size of the file.
MAX_PICKLE = 64 << 20  # bytes
MAX_INSTRUCTIONS = 2_000_000  # a few seconds; a ViT-B-32 with its optimizer has 37,000
# Any instruction can use a memoized value, so copying one must be cheap.
MAX_GLOBAL_NAME = 1_000  # characters
MAX_ARGUMENTS = 8
MAX_DIMENSIONS = 64
MAX_REPEATED = 1 << 20  # elements of a tensor that is larger than its storage
MAX_ENTRIES = 200_000  # per archive
MAX_INFLATED = 32 << 20  # decompressed bytes read from an archive in total
MAX_MODULE_NAMES = 1_000_000  # attributes of all modules of a TorchScript archive in total
MAX_MODULE_DEPTH = 100
MAX_NAME = MAX_NOTE = 1_000  # characters of a tensor's name and of a note
MAX_JSON = 64 << 20  # bytes
MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library


# prefixes of data-parallel wrappers and of modules of trainers, such as Lightning's, that contain a model
_WRAPPERS = ("module.", "model.", "clip_model.", "clip.")
# what to do with weights that clipkit does not read
MERGING = (
    "merge them by PeftModel.from_pretrained(model, FOLDER).merge_and_unload().save_pretrained(OUT), with the "
    "model that they were trained for, and load OUT"
)
_CONVERSION = (
    "convert them by torch.save(open_clip.create_model('{name}', pretrained='{path}').state_dict(), 'FILE.pt'), "
    "with the architecture's name, and load FILE.pt with name='open_clip:{name}'"
)


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """Content of a weights file.

    Tensors are on the CPU, have the stored dtype and do not require gradients. Tensors that shared memory when
    PyTorch saved them share memory again. They may be memory-mapped: do not modify the file while they are in use.
    Modifying them does not modify the file.
    """

    tensors: dict[str, Tensor]  # by name, without the prefixes of torch.compile and data-parallel wrappers
    kind: str  # "safetensors", "torch" or "torchscript"
    notes: dict[str, int | float | str] = field(
        default_factory=dict
    )  # stored next to the weights: epoch, step, …


def read_weights(path: Path) -> StoredWeights:
    """Read the tensors of a file.

    Of a training checkpoint, only the model's tensors use memory. If a file contains several state dicts, trained
    weights take precedence over their moving average. No code from the file is run.

    Raises:
        CheckpointError: the file does not exist, is damaged, contains no tensors, has another format, or its pickle
            refers to anything that tensors do not need.
    """
    try:
        if path.is_dir():
            raise CheckpointError(f"{path} is a folder; use a weights file in it")
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        found = _read(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    tensors, notes = found.tensors, dict(found.notes)
    if not tensors:
        frozen = (
            " (a frozen TorchScript module stores them in its code)" if found.kind == "torchscript" else ""
        )
        raise CheckpointError(f"{path} contains no tensors{frozen}")
    if (longest := max(map(len, tensors))) > MAX_NAME:
        raise CheckpointError(
            f"{path}: the name of a tensor has {longest} characters; download the file again"
        )
    # remove torch.compile's prefix anywhere in a name, and those of wrappers if all names have them
    names = {".".join(part for part in name.split(".") if part != "_orig_mod"): name for name in tensors}
    if len(names) < len(tensors):
        raise CheckpointError(f"{path}: the same tensor exists with and without torch.compile's prefix")
    counter = "n_averaged"  # a buffer of torch's AveragedModel
    if counter in names and len(names) > 1 and tensors[names[counter]].numel() == 1:
        notes[counter] = int(tensors[names.pop(counter)])
    while prefix := _common_wrapper(names):
        names = {name.removeprefix(prefix): stored for name, stored in names.items()}
    if any(name.startswith("image_encoder.model.") for name in names):
        raise CheckpointError(
            f"{path} has Apple's names of MobileCLIP: {_CONVERSION.format(name='MobileCLIP-S1', path=path)}"
        )
    if any(".lora_A." in name for name in names):
        raise CheckpointError(f"{path} has adapters of peft, not a model: {MERGING}")
    return StoredWeights(
        tensors={name: tensors[stored] for name, stored in names.items()}, kind=found.kind, notes=notes
    )


def _common_wrapper(names: Iterable[str]) -> str:
    """Return the prefix of a wrapper that all names have, or ""."""
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in names):
            return prefix
    return ""


# first bytes of other files that are often mistaken for weights
_OTHER_FORMATS = {
    b"version https://git-lfs": "a Git LFS pointer: the weights were not downloaded; run git lfs pull",
    b"<": "a web page or XML; the download failed, download it again",
    b"\x1f\x8b": "compressed with gzip; decompress it first",
    b"BZh": "compressed with bzip2; decompress it first",
    b"\xfd7zXZ": "compressed with xz; decompress it first",
    b"(\xb5/\xfd": "compressed with zstd; decompress it first",
    b"\x93NUMPY": "a NumPy array",
    b"\x89HDF": "an HDF5 file; convert it to safetensors",
    b"GGUF": "a GGUF file; use the model's safetensors instead",
}


def _read(path: Path, *, shard: bool = False) -> StoredWeights:
    """Read a file with any format, without changing names."""
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        raise CheckpointError(f"{path} is empty; download it again")
    # check safetensors first, because the 8 bytes of its header's length may look like another format
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < MAX_HEADER:
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return StoredWeights(tensors=tensors, kind="safetensors", notes=_notes(file.metadata() or {}))
        except SafetensorError as error:
            raise CheckpointError(f"{_damaged(path)} ({printable(str(error), 200)})") from error
    if start.startswith(b"PK"):
        return _read_zip(path)
    if start.startswith(b"\x80"):
        return _read_legacy(path)
    if start.lstrip()[:1] in (b"{", b"[") and not shard:
        return _read_index(path)
    for beginning, what in _OTHER_FORMATS.items():
        if start.lstrip().startswith(beginning):
            raise CheckpointError(f"{path} is {what}")
    if path.suffix == ".safetensors":
        raise CheckpointError(_damaged(path))
    raise CheckpointError(f"{path} is not a weights file: expected safetensors, torch.save or TorchScript")


def _damaged(path: Path) -> str:
    return f"{path} is truncated or damaged; download it again"


def _read_index(path: Path) -> StoredWeights:
    """Read the tensors of several files, listed in a JSON file."""
    if path.stat().st_size > MAX_JSON:
        raise CheckpointError(f"{path} is too large to be an index of shards")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is neither weights nor JSON; download it again") from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict):
        raise CheckpointError(f"{path} is JSON, not weights; use the weights file, usually model.safetensors")
    names: dict[str, list[str]] = {}
    for name, file in files.items():
        names.setdefault(str(file), []).append(name)
    tensors: dict[str, Tensor] = {}
    kinds = set()
    for file, wanted in sorted(names.items()):
        if file in ("", ".", "..") or "/" in file or "\\" in file or not file.isprintable():
            raise CheckpointError(f"{path} lists {file[:120]!r}, which is not a file in the same folder")
        shard = path.parent / file
        if not shard.is_file():
            raise CheckpointError(f"{path}: {file[:120]!r} is missing from the same folder; download it too")
        # in a download cache, index and shards are links to files in the same folder
        if shard.resolve().parent not in (path.parent.resolve(), path.resolve().parent):
            raise CheckpointError(
                f"{path}: {file[:120]!r} is a link to another folder; copy the file instead"
            )
        stored = _read(shard, shard=True)
        kinds.add(stored.kind)
        if missing := [name for name in wanted if name not in stored.tensors]:
            raise CheckpointError(f"{path}: {file!r} lacks {missing[0][:120]!r}; download both again")
        tensors |= {name: stored.tensors[name] for name in wanted}
    notes = index.get("metadata")
    return StoredWeights(
        tensors=tensors,
        kind=min(kinds, default="safetensors"),
        notes=_notes(notes if isinstance(notes, dict) else {}),
    )


def _notes(values: Mapping[str, Any]) -> dict[str, int | float | str]:
    """Select numbers (not bool) and short strings without lone surrogates, which cannot be printed."""
    return {
        name: value
        for name, value in values.items()
        if type(value) in (int, float)
        or (type(value) is str and len(value) <= MAX_NOTE and value == value.encode(errors="ignore").decode())
    }


# A pickle is a program for a stack machine. The interpreter below supports only the instructions that tensors need,
# and treats names such as torch._utils._rebuild_tensor_v2 as strings, of which only a few are allowed.


@dataclass(frozen=True, slots=True, eq=False)
class StoredStorage:
    """Reference to a storage in the file; ``dtype`` is None if the pickle specifies it with the tensor."""

    key: str
    dtype: torch.dtype | None
    count: int  # elements, or bytes if dtype is None
    start: int = 0  # first element, for a view of a larger storage
    view: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """View of a storage as the file describes it, not yet checked against the storage."""

    storage: StoredStorage
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(slots=True, eq=False)
class ScriptObject:
    """Object of a class defined in a TorchScript archive, with its stored state."""

    class_name: str
    state: object = None


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """A value that was not read; ``name`` is the function that would create it."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class _Global:
    name: str


_OF_STORAGE = {
    "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16, "Double": torch.float64,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
    # TorchScript only; torch.save stores these dtypes with an untyped storage
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
_TENSORS = frozenset(_REBUILD + name for name in ("tensor", "tensor_v2", "tensor_v3"))
_PARAMETERS = frozenset(_REBUILD + name for name in ("parameter", "parameter_with_state"))
_SUBCLASS = "torch._tensor._rebuild_from_type_v2"  # also used for tensors with attributes
_FIRST_ARGUMENT = _PARAMETERS | {
    "torch.Size",
    *(f"torch.jit._pickle.build_{kind}list" for kind in ("int", "tensor", "double", "bool")),
    "torch.jit._pickle.restore_type_tag",
}
# occur next to weights but are not needed: read as Opaque
_IGNORED = frozenset(
    {
        "collections.Counter", "torch.device", "torch.Generator", "torch.serialization._get_layout",
        "torch.jit._pickle.build_tensor_from_id", "_codecs.encode", "argparse.Namespace",
        "collections.defaultdict", "pathlib.PosixPath", "pathlib._local.PosixPath",
        # a learning rate computed by NumPy, in an optimizer's state
        "numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
        *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "bytearray", "complex")),
        *(_REBUILD + name for name in ("sparse_tensor", "qtensor", "meta_tensor_no_storage",
                                       "device_tensor_from_numpy", "device_tensor_from_cpu_tensor")),
    }
)  # fmt: skip
_ALLOWED = _TENSORS | _FIRST_ARGUMENT | _IGNORED | _TENSOR_CLASSES | _STORAGES.keys() | _DTYPES.keys()
_ALLOWED |= {_SUBCLASS, "collections.OrderedDict"}


def _instructions(stream: io.BytesIO) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    """Decode a pickle without Python's warnings about escapes in its strings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from pickletools.genops(stream)


def read_pickle(
    stream: io.BytesIO, *, origin: str, script: bool = False, storages: dict[str, StoredStorage] | None = None
) -> object:
    """Interpret the pickle at the current position of a stream without importing or calling anything.

    Args:
        stream: positioned after the pickle on return.
        origin: name of the file for error messages.
        script: whether names of a TorchScript archive's own classes (``__torch__.…``) are allowed.
        storages: filled with the first storage of each key.

    Returns:
        dict (only with str keys), list, tuple, str, bytes, number, bool, None, ``StoredTensor``, ``ScriptObject``,
        or ``Opaque``. Dicts and lists may contain themselves.

    Raises:
        CheckpointError: the pickle contains a name that is not allowed, or is truncated, damaged or too long.
    """
    stack: list[Any] = []
    marked: list[list[Any]] = []
    memo: dict[int, Any] = {}
    value: Any
    try:
        for number, (opcode, value, _) in enumerate(_instructions(stream)):
            if number > MAX_INSTRUCTIONS:
                raise CheckpointError(f"{origin}: its pickle is too long to contain only weights")
            match opcode.name:
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[value])
                case "BINPUT" | "LONG_BINPUT":
                    memo[value] = stack[-1]
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "BINUNICODE" | "SHORT_BINUNICODE":
                    stack.append(value.encode("utf-8", "replace").decode())  # without lone surrogates
                case (
                    "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINBYTES" | "SHORT_BINBYTES"
                    | "BINSTRING" | "SHORT_BINSTRING" | "NONE"
                ):  # fmt: skip
                    stack.append(value)
                case "NEWTRUE" | "NEWFALSE":
                    stack.append(opcode.name == "NEWTRUE")
                case "EMPTY_DICT":
                    stack.append({})
                case "EMPTY_LIST":
                    stack.append([])
                case "EMPTY_TUPLE":
                    stack.append(())
                case "EMPTY_SET":
                    stack.append(Opaque("builtins.set"))
                case "MARK":
                    marked.append(stack)
                    stack = []
                case "TUPLE":
                    items, stack = stack, marked.pop()
                    stack.append(tuple(items))
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    length = int(opcode.name[-1])
                    if len(stack) < length:
                        raise ValueError("too few items")
                    stack[-length:] = [tuple(stack[-length:])]
                case "APPEND" | "APPENDS" | "ADDITEMS":
                    items = [stack.pop()]
                    if opcode.name != "APPEND":
                        items, stack = [*stack, *items], marked.pop()
                    if type(stack[-1]) is list:
                        stack[-1].extend(items)
                    elif not isinstance(stack[-1], Opaque):  # a set
                        raise TypeError("append")
                case "SETITEM" | "SETITEMS":
                    if opcode.name == "SETITEM":
                        items = [stack.pop(), stack.pop()][::-1]
                    else:
                        items, stack = stack, marked.pop()
                    if type(stack[-1]) is dict and len(items) % 2 == 0:
                        # State dicts have str keys. Hashing other keys is not safe: deep tuples overflow the C
                        # stack, and malicious numbers take quadratic time.
                        pairs = zip(items[::2], items[1::2], strict=True)
                        stack[-1].update((key, value) for key, value in pairs if type(key) is str)
                    elif not isinstance(stack[-1], Opaque):
                        raise TypeError("items")
                case "GLOBAL" | "STACK_GLOBAL":
                    if opcode.name == "GLOBAL":
                        module, name = value.split(" ", 1)
                    else:
                        name, module = stack.pop(), stack.pop()
                    if (
                        type(module) is not str
                        or type(name) is not str
                        or len(module + name) > MAX_GLOBAL_NAME
                    ):
                        raise TypeError("name")
                    full = f"{module}.{name}"
                    if full not in _ALLOWED and not (script and full.startswith("__torch__.")):
                        raise CheckpointError(
                            f"{origin} names {full[:120]!r}, which clipkit does not load from a pickle because it "
                            "could run code; ask its author for the weights alone, preferably as safetensors"
                        )
                    stack.append(_Global(full))
                case "REDUCE" | "NEWOBJ":
                    arguments, called = stack.pop(), _name(stack.pop())
                    if called.startswith("__torch__."):  # an object or, with REDUCE, an Enum member
                        stack.append(ScriptObject(called))
                    elif opcode.name == "NEWOBJ":
                        stack.append(Opaque(called))
                    else:
                        stack.append(_call(called, arguments))
                case "BUILD":
                    state = stack.pop()
                    if isinstance(stack[-1], ScriptObject):
                        stack[-1].state = state
                    elif not isinstance(stack[-1], dict | Opaque | StoredTensor):  # attributes are ignored
                        raise TypeError("state")
                case "BINPERSID":
                    storage = _storage(stack.pop())
                    if storages is not None:
                        storages.setdefault(storage.key, storage)
                    stack.append(storage)
                case "STOP":
                    return stack.pop()
                case "PROTO" | "FRAME":
                    pass
                case _:
                    raise ValueError(f"instruction {opcode.name}")
    except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{origin}: its pickle is truncated or damaged; download the file again"
        ) from error
    raise AssertionError("genops ends at STOP or raises")


def _name(value: object) -> str:
    if not isinstance(value, _Global):
        raise TypeError("not a name")
    return value.name


def _storage(source: object) -> StoredStorage:
    """Convert the persistent id of a storage."""
    if type(source) is not tuple or len(source) > MAX_ARGUMENTS:
        raise TypeError("storage")
    kind, class_, key, _, count, *view = source
    is_view = bool(view) and view[0] is not None
    _, start, count = view[0] if is_view else ("", 0, count)  # before PyTorch 0.4
    if kind != "storage" or type(key) is not str or type(count) is not int or type(start) is not int:
        raise TypeError("storage")
    if count < 0 or start < 0:
        raise ValueError("storage")
    return StoredStorage(key, _STORAGES[_name(class_)], count, start, is_view)


def _call(name: str, arguments: Any) -> object:
    """Describe the result of a call."""
    if type(arguments) is not tuple or len(arguments) > MAX_ARGUMENTS:
        raise TypeError("call")
    if name == _SUBCLASS:
        inner, class_, inner_arguments, _ = arguments
        if _name(class_) not in _TENSOR_CLASSES or _name(inner) not in _TENSORS | _PARAMETERS:
            return Opaque(name)
        return _call(_name(inner), inner_arguments)
    if name in _FIRST_ARGUMENT:
        return arguments[0]
    if name == "collections.OrderedDict":
        if arguments:  # pickles of Python 2 pass all items
            raise TypeError("items")
        return {}
    if name not in _TENSORS:
        return Opaque(name)
    storage, offset, size, stride, *more = arguments
    if not isinstance(storage, StoredStorage):
        raise TypeError("storage")
    dtype, metadata = storage.dtype, more[2:]
    if name.endswith("v3"):
        dtype, metadata = _DTYPES[_name(more[2])], more[3:]
    if metadata and metadata[0]:  # lazily conjugated or negated: the stored values differ
        return Opaque(name)
    if dtype is None or type(size) is not tuple or type(stride) is not tuple:
        raise TypeError("tensor")
    if max(len(size), len(stride)) > MAX_DIMENSIONS:
        raise ValueError("tensor")
    if any(type(number) is not int for number in (offset, *size, *stride)):
        raise TypeError("tensor")
    return StoredTensor(storage, dtype, offset, size, stride)


# PyTorch files are mapped privately: values are read from disk when they are used, and optimizer state is never
# read. Every size and position in the file is checked before use.


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _tensors(
    stored: Mapping[str, StoredTensor], mapped: mmap.mmap, places: Mapping[str, tuple[int, int]], origin: str
) -> dict[str, Tensor]:
    """Create tensors from a mapped file; ``places`` maps each storage to its position and number of bytes."""
    storages: dict[str, torch.UntypedStorage] = {}
    tensors = {}
    for name, tensor in stored.items():
        what, source = f"{origin}: {name[:120]!r}", tensor.storage
        if source.key not in places:
            raise CheckpointError(
                f"{what}: its storage {source.key[:80]!r} is missing; download the file again"
            )
        start, length = places[source.key]
        width = (source.dtype or torch.uint8).itemsize
        size = source.count * width
        if source.view:
            whole = source.start * width + size <= length and source.dtype == tensor.dtype
        else:
            whole = size == length
        if not whole:
            raise CheckpointError(f"{what}: its storage is truncated; download the file again")
        numbers = (tensor.offset, *tensor.size, *tensor.stride)
        if len(tensor.size) != len(tensor.stride) or min(numbers) < 0:
            raise CheckpointError(f"{what} has an impossible shape")
        room, count, last = size // tensor.dtype.itemsize, 1, tensor.offset
        for extent, stride in zip(tensor.size, tensor.stride, strict=True):
            count *= extent
            last += (extent - 1) * stride
        # an empty tensor may start anywhere, even beyond the end of the storage
        if max(numbers) >= 1 << 62 or (count and last >= room):
            raise CheckpointError(f"{what} reaches beyond its storage; download the file again")
        if count > max(room, MAX_REPEATED):
            raise CheckpointError(f"{what} repeats the {room} values of its storage {count} times")
        if source.key not in storages:
            storage = torch.UntypedStorage(0)
            if length:
                content = torch.frombuffer(mapped, dtype=torch.uint8, count=length, offset=start)
                storage = content.untyped_storage()
            # older files do not guarantee alignment
            storages[source.key] = storage.clone() if start % 16 else storage
        try:
            tensors[name] = torch.empty(0, dtype=tensor.dtype).set_(
                storages[source.key], source.start + tensor.offset if count else 0, tensor.size, tensor.stride
            )
        except RuntimeError as error:
            raise CheckpointError(f"{what} has an impossible shape") from error
    return tensors


# keys of state dicts in checkpoints; trained weights take precedence over their moving average
_STATE_DICTS = ("state_dict", "model_state_dict", "model", "module", "net", "weights", "params",
                "ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "ema")  # fmt: skip


def _of_torch_save(
    found: object, mapped: mmap.mmap, places: Mapping[str, tuple[int, int]], path: Path
) -> StoredWeights:
    """Find the state dict in the content of a ``torch.save`` file, and create only its tensors."""
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{path} contains no state dict; save one with torch.save(model.state_dict(), FILE)"
        )
    for state in (*(found.get(name) for name in _STATE_DICTS), found):
        if isinstance(state, dict) and any(isinstance(item, StoredTensor) for item in state.values()):
            break
    else:
        names = ", ".join(repr(name)[:40] for name in list(found)[:6])
        raise CheckpointError(f"{path} contains no model tensors, only: {names or 'nothing'}")
    for name, value in state.items():
        if isinstance(value, Opaque) and value.name.startswith("torch._utils."):
            raise CheckpointError(
                f"{path}: {name[:120]!r} is not a plain tensor ({value.name}); save it dense"
            )
    stored = {name: value for name, value in state.items() if isinstance(value, StoredTensor)}
    return StoredWeights(
        tensors=_tensors(stored, mapped, places, str(path)), kind="torch", notes=_notes(found)
    )


def _read_legacy(path: Path) -> StoredWeights:
    """Read a file of ``torch.save`` before PyTorch 1.6: five pickles, then the storages."""
    mapped = _mapped(path)
    stream = io.BytesIO(mapped[:MAX_PICKLE])
    known: dict[str, StoredStorage] = {}
    if read_pickle(stream, origin=str(path)) != 0x1950A86A20F9469CFC6C:
        raise CheckpointError(
            f"{path} is a pickle that was not written by torch.save, which clipkit does not read"
        )
    version, system, found, keys = (read_pickle(stream, origin=str(path), storages=known) for _ in range(4))
    if version != 1001 or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise CheckpointError(f"{path} has a version or byte order that clipkit does not read")
    places: dict[str, tuple[int, int]] = {}
    position = stream.tell()
    for key in keys if isinstance(keys, list) else ():
        if not isinstance(key, str) or key not in known or key in places or position + 8 > len(mapped):
            raise CheckpointError(_damaged(path))
        (count,) = struct.unpack_from("<q", mapped, position)
        length = count * (known[key].dtype or torch.uint8).itemsize
        places[key] = (position + 8, length)
        position += 8 + length
        if count < 0 or position > len(mapped):
            raise CheckpointError(_damaged(path))
    return _of_torch_save(found, mapped, places, path)


_DAMAGED_ZIP = (
    EOFError, NotImplementedError, OverflowError, ValueError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def _read_zip(path: Path) -> StoredWeights:
    """Read the zip archive of ``torch.save`` or ``torch.jit.save``: ``ROOT/data.pkl``, ``ROOT/data/0``, …"""
    mapped = _mapped(path)
    try:
        with zipfile.ZipFile(path) as archive:
            entries = _places(archive, mapped, path)
            roots = [name for name in entries if re.fullmatch(r"[^/]+/data\.pkl", name)]
            if len(roots) != 1:
                numpy = any(name.endswith(".npy") for name in entries)
                if any(name.startswith(("params/img/", "img/")) for name in entries):
                    how = _CONVERSION.format(name="ViT-B-16-SigLIP", path=path)
                    raise CheckpointError(f"{path} has weights of big_vision: {how}")
                raise CheckpointError(
                    f"{path} is a zip with {'NumPy arrays' if numpy else 'no PyTorch weights'}; expected a file "
                    "written by torch.save"
                )
            root = roots[0].removesuffix("data.pkl")
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED and not info.filename.startswith(f"{root}code/"):
                    raise CheckpointError(
                        f"{path}: its entry {info.filename[:80]!r} is compressed, which PyTorch never does"
                    )

            def content(name: str) -> bytes:
                start, length = entries[name]
                if length > MAX_PICKLE:
                    raise CheckpointError(f"{path}: {name} is larger than {MAX_PICKLE >> 20} MB")
                return mapped[start : start + length]

            # before PyTorch 2.1 there was no such entry
            if root + "byteorder" in entries and content(root + "byteorder") != b"little":
                raise CheckpointError(f"{path} was written on a big-endian machine; save it on another one")
            script = root + "constants.pkl" in entries
            found = read_pickle(io.BytesIO(content(roots[0])), script=script, origin=str(path))
            folder = f"{root}data/"
            places = {name.removeprefix(folder): entries[name] for name in entries if name.startswith(folder)}
            if not script:
                return _of_torch_save(found, mapped, places, path)
            # not used here, but damaged or malicious content would break other programs
            read_pickle(io.BytesIO(content(root + "constants.pkl")), script=True, origin=str(path))
            if not isinstance(found, ScriptObject):
                raise CheckpointError(f"{path} is a TorchScript archive without a module")
            stored = dict(_script_tensors(found, archive, root, path))
            attributes = found.state if isinstance(found.state, dict) else {}
            return StoredWeights(
                tensors=_tensors(stored, mapped, places, str(path)),
                kind="torchscript",
                notes=_notes({name: value for name, value in attributes.items() if not name.startswith("_")}),
            )
    except _DAMAGED_ZIP as error:
        raise CheckpointError(_damaged(path)) from error


def _places(archive: zipfile.ZipFile, mapped: mmap.mmap, path: Path) -> dict[str, tuple[int, int]]:
    """Return the position and number of stored bytes of each entry, checked against the file and each other."""
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    if len(infos) > MAX_ENTRIES:
        raise CheckpointError(f"{path}: {len(infos)} entries are too many for a weights file")
    (count,) = struct.unpack_from("<H", mapped, len(mapped) - len(archive.comment) - 12)
    if count != min(len(infos), 0xFFFF):
        raise ValueError("number of entries")
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for info in infos:
        signature, name_length, extra_length = struct.unpack_from("<4s22x2H", mapped, info.header_offset)
        name_at = info.header_offset + 30
        first = name_at + name_length + extra_length
        raw = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
        name = raw.decode()
        if signature != b"PK\x03\x04" or mapped[name_at : name_at + name_length] != raw:
            raise ValueError("local header")
        if info.header_offset < end or name in places:
            raise ValueError("entries overlap or repeat")
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError("encrypted, or an unknown compression")
        if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
            raise ValueError("size")
        places[name] = (first, info.compress_size)
        end = first + info.compress_size
    if end > archive.start_dir:
        raise ValueError("an entry overlaps the table")
    return places


_CLASS = re.compile(r"class (\w+)(?:\((\w+)\))?:")
_ATTRIBUTES = re.compile(r"  __(parameters|buffers)__ = \[(.*)\]")


def _script_tensors(
    top: ScriptObject, archive: zipfile.ZipFile, root: str, path: Path
) -> Iterator[tuple[str, StoredTensor]]:
    """Iterate over the state dict of a TorchScript module in PyTorch's order: parameters, buffers, submodules.

    The source code of a class (``ROOT/code/__torch__/….py``) is searched for the two lines that list its parameters
    and buffers; it is not compiled.
    """
    # by file and class: whether it is a module, and the names of its parameters and buffers
    files: dict[str, dict[str, tuple[bool, dict[str, list[str]]]]] = {}
    names = inflated = 0

    def failure(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: {what}; save its state dict with torch.save instead")

    def source(file: str) -> dict[str, tuple[bool, dict[str, list[str]]]]:
        nonlocal inflated
        name = f"code/{file.replace('.', '/')}.py"
        try:
            info = archive.getinfo(f"{root}{name}")
        except KeyError:
            raise CheckpointError(f"{path}: {name[:80]!r} is missing from the archive") from None
        inflated += info.file_size
        if inflated > MAX_INFLATED:
            raise CheckpointError(f"{path}: its compressed entries are too large for code")
        classes: dict[str, tuple[bool, dict[str, list[str]]]] = {}
        attributes: dict[str, list[str]] | None = None  # attributes of the current class
        for line in archive.read(info).decode("utf-8", "replace").split("\n"):
            if match := _CLASS.fullmatch(line):
                attributes = {}
                classes[match[1]] = (match[2] == "Module", attributes)
            elif line[:1].strip():
                attributes = None
            elif attributes is not None and (match := _ATTRIBUTES.fullmatch(line)):
                attributes[match[1]] = re.findall(r'"([^"]*)"', match[2])
        return classes

    def walk(module: ScriptObject, prefix: str, depth: int) -> Iterator[tuple[str, StoredTensor]]:
        nonlocal names
        file, _, class_ = module.class_name.rpartition(".")
        if f"{file}.".startswith("__torch__.torch.classes."):  # implemented in C++
            return
        if file not in files:
            files[file] = source(file)
        if class_ not in files[file]:
            raise failure(f"its code lacks the class {module.class_name[:120]!r}")
        is_module, attributes = files[file][class_]
        if not is_module:
            return
        state = module.state
        if not isinstance(state, dict):
            raise failure(f"{module.class_name[:120]!r} can only be read by running its code")
        parameters = attributes.get("parameters", [])
        buffers = attributes.get("buffers")
        names += 1 + len(state) + len(parameters) + len(buffers or ())
        if names > MAX_MODULE_NAMES or depth > MAX_MODULE_DEPTH or len(prefix) > MAX_NAME:
            raise failure("its modules contain each other recursively")
        if buffers is None:  # old versions of PyTorch list no buffers
            known = set(parameters)
            buffers = [name for name in state if isinstance(state[name], StoredTensor) and name not in known]
        for name in (*parameters, *buffers):
            value = state.get(name, module)
            if len(prefix + name) > MAX_NAME:
                raise failure(f"the name of a tensor has {len(prefix + name)} characters")
            if isinstance(value, StoredTensor):
                yield prefix + name, value
            elif value is not None:  # None is, for example, the missing bias of a linear layer
                raise failure(f"{(prefix + name)[:120]!r} is not a readable tensor")
        for name, value in state.items():
            if isinstance(value, ScriptObject):
                yield from walk(value, f"{prefix}{name}.", depth + 1)

    yield from walk(top, "", 0)
