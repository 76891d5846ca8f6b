"""Read tensors from weights files of any format without executing code from them.

    *.safetensors                       read by the safetensors library
    *.safetensors.index.json            several such files, as transformers stores large models
    files of torch.save                 a state dict, or a training checkpoint that contains one
    files of torch.jit.save             TorchScript, as OpenAI published CLIP

The format is determined from a file's content, not its name. PyTorch's files contain a pickle, which may name any
function of Python to be called. ``_TensorUnpickler`` resolves the few names that tensors need to classes and
functions of this module, and rejects files with other names. It serves all of PyTorch's formats:
``torch.load(weights_only=True)`` cannot read TorchScript, and verifies no checksums of a mapped file.
"""

import io
import mmap
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clipkit.errors import CheckpointError
from clipkit.files.terminal import printable
from clipkit.formats.checkpoint import read_json

Notes: TypeAlias = dict[str, int | float | str]

MAX_TEXT = 1_000  # characters of a tensor's name and of a note
MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library
_MAX_THREADS = 8  # for checksums
# prefixes of data-parallel wrappers and of modules of trainers, such as Lightning's, that contain a model
_WRAPPERS = ("module.", "model.", "clip_model.", "clip.")
# keys of state dicts in checkpoints; trained weights take precedence over their moving average
_STATE_DICTS = (
    "state_dict", "model_state_dict", "model", "module", "net", "weights", "params", "ema_state_dict",
    "state_dict_ema", "model_ema", "ema_model", "ema", "teacher",
)  # fmt: skip
# exceptions that damaged pickles and archives raise
_DAMAGE = (
    ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
    pickle.UnpicklingError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """Content of a weights file.

    Tensors are on the CPU, have the stored dtype and do not require gradients. Tensors that shared memory when
    PyTorch saved them share memory again. They may be memory-mapped: do not modify the file while they are in use.
    Modifying them does not modify the file.

    Attributes:
        tensors: by name, without the prefixes of torch.compile and data-parallel wrappers.
        notes: numbers and short texts stored next to the weights: epoch, step, …
    """

    tensors: dict[str, Tensor]
    notes: Notes = field(default_factory=dict)


def read_weights(path: Path) -> StoredWeights:
    """Read the tensors of a file.

    Of a training checkpoint, only the model's tensors use memory. If a file contains several state dicts, trained
    weights take precedence over their moving average. No code from the file is run.
    """
    try:
        if path.is_dir():
            raise CheckpointError(f"{path} is a folder; use a weights file in it")
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        tensors, notes = _read_file(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    if not tensors:
        raise CheckpointError(f"{path} contains no tensors")
    if not all(len(name) <= MAX_TEXT and name.isprintable() for name in tensors):
        raise CheckpointError(f"{path}: the name of a tensor is too long, or has control characters")
    names = {_remove_compile_prefix(name): name for name in tensors}
    if len(names) < len(tensors):
        raise CheckpointError(f"{path}: the same tensor exists with and without torch.compile's prefix")
    counter = "n_averaged"  # a buffer of torch's AveragedModel
    if counter in names and len(names) > 1 and tensors[names[counter]].numel() == 1:
        notes[counter] = int(tensors[names.pop(counter)])
    while prefix := _common_wrapper(names):
        names = {name.removeprefix(prefix): stored for name, stored in names.items()}
    return StoredWeights(tensors={name: tensors[stored] for name, stored in names.items()}, notes=notes)


def _remove_compile_prefix(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _common_wrapper(names: Iterable[str]) -> str:
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in names):
            return prefix
    return ""


def _read_file(path: Path) -> tuple[dict[str, Tensor], Notes]:
    with path.open("rb") as file:
        start = file.read(64)
    # check safetensors first, because the 8 bytes of its header's length may look like another format
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < MAX_HEADER:
        return _read_safetensors(path)
    try:
        if start.startswith(b"PK"):
            return _read_zip(path)
        if start.startswith(b"\x80"):
            return _read_legacy(path)
    except _DAMAGE as error:
        raise CheckpointError(f"{_describe_damage(path)} ({printable(str(error), 200)})") from error
    if start.lstrip()[:1] in (b"{", b"["):
        return _read_index(path)
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path} is a Git LFS pointer: the weights were not downloaded; run git lfs pull"
        )
    if start.lstrip().startswith(b"<"):
        raise CheckpointError(f"{path} is a web page: the download failed; download it again")
    if not start or path.suffix == ".safetensors":
        raise CheckpointError(_describe_damage(path))
    raise CheckpointError(f"{path} is not a weights file: expected safetensors, torch.save or TorchScript")


def _describe_damage(path: Path) -> str:
    return f"{path} is truncated or damaged; download it again"


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], Notes]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, _select_notes(file.metadata() or {})
    except SafetensorError as error:
        raise CheckpointError(f"{_describe_damage(path)} ({printable(str(error), 200)})") from error


def _read_index(path: Path) -> tuple[dict[str, Tensor], Notes]:
    index = read_json(path)
    files = index.get("weight_map")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path} is JSON, not weights; use the weights file, usually model.safetensors")
    names: dict[str, list[str]] = {}
    for name, file in files.items():
        names.setdefault(str(file), []).append(name)
    tensors: dict[str, Tensor] = {}
    for file, shard_names in sorted(names.items()):
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
        if file.endswith(".json"):
            raise CheckpointError(f"{path}: {file[:120]!r} is not a weights file")
        stored, _ = _read_file(shard)
        for name in shard_names:
            if name not in stored:
                raise CheckpointError(f"{path}: {file!r} lacks {name[:120]!r}; download both again")
            tensors[name] = stored[name]
    metadata = index.get("metadata")
    return tensors, _select_notes(metadata if isinstance(metadata, dict) else {})


def _select_notes(values: Mapping[Any, Any]) -> Notes:
    notes: Notes = {}
    for name, value in values.items():
        is_text = type(value) is str and len(value) <= MAX_TEXT and value.isprintable()
        if type(name) is str and (is_text or type(value) in (int, float)):
            notes[name] = value
    return notes


# PyTorch's files: stand-ins for what a pickle names


class StoredTensor(NamedTuple):
    """View of a storage as the file describes it, not yet checked against the storage."""

    key: str
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Dictionary(dict[Any, Any]):
    """An ``OrderedDict`` whose attributes are ignored."""

    def __setstate__(self, state: object) -> None:
        pass


class _ScriptObject:
    """An object of a class defined in a TorchScript archive."""

    state: object = None

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Ignored:
    """An object next to the weights that is not needed."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass


def _describe_tensor(
    storage: tuple[str, torch.dtype],
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
    hooks: object = None,
    metadata: object = None,
) -> StoredTensor:
    if metadata:
        raise ValueError("a tensor is conjugated or negated lazily")
    key, dtype = storage
    return StoredTensor(key, dtype, offset, size, stride)


def _describe_tensor_of_dtype(
    storage: tuple[str, None],
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: object,
    dtype: torch.dtype,
    metadata: object = None,
) -> StoredTensor:
    return _describe_tensor((storage[0], dtype), offset, size, stride, metadata=metadata)


def _describe_subclass(rebuild: Any, kind: object, arguments: Iterable[Any], state: object) -> Any:
    return rebuild(*arguments)


def _take_first(value: object, *others: object) -> object:
    return value


_STORAGE_DTYPES = {
    "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16, "Double": torch.float64,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
    # TorchScript only; torch.save stores these dtypes with an untyped storage
    "UInt16": torch.uint16, "UInt32": torch.uint32, "UInt64": torch.uint64,
    "Float8_e4m3fn": torch.float8_e4m3fn, "Float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "Float8_e5m2": torch.float8_e5m2, "Float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "Float8_e8m0fnu": torch.float8_e8m0fnu,
}  # fmt: skip
# what each name that a pickle may contain stands for; the dtype of a storage, or None for an untyped one
_STAND_INS: dict[str, Any] = {
    "collections.OrderedDict": _Dictionary,
    "torch._utils._rebuild_tensor": _describe_tensor,
    "torch._utils._rebuild_tensor_v2": _describe_tensor,
    "torch._utils._rebuild_tensor_v3": _describe_tensor_of_dtype,
    "torch._tensor._rebuild_from_type_v2": _describe_subclass,
    "torch.UntypedStorage": None,
    "torch.storage.UntypedStorage": None,
}
for _name, _dtype in _STORAGE_DTYPES.items():
    _STAND_INS[f"torch.{_name}Storage"] = _dtype
    _STAND_INS[f"torch.cuda.{_name}Storage"] = _dtype
    _STAND_INS[str(_dtype)] = _dtype
for _name in (
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state", "torch.Size",
    "torch.jit._pickle.build_intlist", "torch.jit._pickle.build_tensorlist", "torch.jit._pickle.build_doublelist",
    "torch.jit._pickle.build_boollist", "torch.jit._pickle.restore_type_tag",
):  # fmt: skip
    _STAND_INS[_name] = _take_first
for _name in (
    "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer", "torch.device",
    "torch.Generator", "torch.serialization._get_layout", "torch.jit._pickle.build_tensor_from_id",
    "collections.Counter", "collections.defaultdict", "argparse.Namespace", "pathlib.PosixPath",
    "pathlib._local.PosixPath", "_codecs.encode", "builtins.set", "builtins.bytearray", "builtins.complex",
    "__builtin__.set", "__builtin__.bytearray", "__builtin__.complex",
    # a learning rate computed by NumPy, in an optimizer's state
    "numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
):  # fmt: skip
    _STAND_INS[_name] = _Ignored


class _TensorUnpickler(pickle.Unpickler):
    """Read a pickle of PyTorch to dictionaries, lists and ``StoredTensor`` without importing what it names.

    Attributes:
        dtypes: of each storage, None for an untyped one.
    """

    def __init__(self, file: Any, path: Path, *, script: bool = False) -> None:
        super().__init__(file, encoding="utf-8")
        self.dtypes: dict[str, torch.dtype | None] = {}
        self._path = path
        self._script = script

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name; CheckpointError if tensors do not need it."""
        full = f"{module}.{name}"
        if full in _STAND_INS:
            return _STAND_INS[full]
        if self._script and full.startswith("__torch__."):
            return _ScriptObject
        raise CheckpointError(
            f"{self._path} names {full[:120]!r}, which clipkit does not load from a pickle because it could run "
            "code; ask its author for the weights alone, preferably as safetensors"
        )

    def persistent_load(self, source: Any) -> tuple[str, torch.dtype | None]:
        """Return the key and the dtype of a storage."""
        kind, dtype, key, _, _, *view = source
        if kind != "storage" or not isinstance(dtype, torch.dtype | None) or any(view):
            raise ValueError("a storage of an unknown kind")
        self.dtypes.setdefault(key, dtype)
        return key, dtype


class _Entry(NamedTuple):
    """Position of a storage in a file, in bytes, and its CRC-32 if the file has one."""

    start: int
    size: int
    checksum: int | None


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        # private: changed tensors do not change the file
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _map_tensors(
    stored: Mapping[str, StoredTensor], entries: Mapping[str, _Entry], content: mmap.mmap
) -> dict[str, Tensor]:
    """Create tensors over a mapped file; their values are read from disk when they are used."""
    keys = list({tensor.key for tensor in stored.values()})
    with ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="checksum") as pool:
        mapped = pool.map(lambda key: _map_storage(entries[key], content), keys)
        storages = dict(zip(keys, mapped, strict=True))
    tensors: dict[str, Tensor] = {}
    for name, (key, dtype, offset, size, stride) in stored.items():
        tensor = torch.empty(0, dtype=dtype).set_(storages[key], offset, size, stride)
        # torch enlarges a storage that is too small, with random values
        if storages[key].nbytes() != entries[key].size:
            raise ValueError(f"{name[:120]!r} reaches beyond its storage")
        tensors[name] = tensor
    return tensors


def _map_storage(entry: _Entry, content: mmap.mmap) -> torch.UntypedStorage:
    values = memoryview(content)[entry.start : entry.start + entry.size]
    if len(values) != entry.size:
        raise ValueError("a storage is truncated")
    if entry.checksum is not None and zlib.crc32(values) != entry.checksum:
        raise ValueError("the checksum of a storage is wrong")
    if not entry.size:
        return torch.UntypedStorage(0)
    storage = torch.frombuffer(values, dtype=torch.uint8).untyped_storage()
    # older files do not guarantee alignment
    return storage.clone() if entry.start % 16 else storage


def _select_state_dict(content: object, path: Path) -> dict[str, StoredTensor]:
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} contains no state dict; save one with torch.save(model.state_dict(), FILE)"
        )
    for state in (*(content.get(name) for name in _STATE_DICTS), content):
        if isinstance(state, dict):
            tensors = {name: value for name, value in state.items() if isinstance(value, StoredTensor)}
            if tensors:
                return tensors
    names = ", ".join(repr(name)[:40] for name in list(content)[:6])
    raise CheckpointError(f"{path} contains no model tensors, only: {names or 'nothing'}")


def _read_legacy(path: Path) -> tuple[dict[str, Tensor], Notes]:
    """Read a file of ``torch.save`` before PyTorch 1.6: five pickles, then the storages."""
    with path.open("rb") as file:
        if _TensorUnpickler(file, path).load() != 0x1950A86A20F9469CFC6C:
            raise CheckpointError(
                f"{path} is a pickle that was not written by torch.save, which clipkit does not read"
            )
        version = _TensorUnpickler(file, path).load()
        system = _TensorUnpickler(file, path).load()
        if version != 1001 or system["little_endian"] is not True:
            raise CheckpointError(f"{path} has a version or byte order that clipkit does not read")
        unpickler = _TensorUnpickler(file, path)
        content = unpickler.load()
        entries: dict[str, _Entry] = {}
        for key in _TensorUnpickler(file, path).load():
            entries[key] = _Entry(0, 0, None)
        position = file.tell()
        for key in entries:
            file.seek(position)
            (count,) = struct.unpack("<q", file.read(8))
            dtype = unpickler.dtypes[key] or torch.uint8
            entries[key] = _Entry(position + 8, count * dtype.itemsize, None)
            position += 8 + entries[key].size
    if position != path.stat().st_size:
        raise ValueError("its length is wrong")
    stored = _select_state_dict(content, path)
    return _map_tensors(stored, entries, _map_file(path)), _select_notes(content)


def _read_zip(path: Path) -> tuple[dict[str, Tensor], Notes]:
    """Read the zip archive of ``torch.save`` or ``torch.jit.save``: ``ROOT/data.pkl``, ``ROOT/data/0``, …"""
    content = _map_file(path)
    with zipfile.ZipFile(path) as archive:
        pickles = [name for name in archive.namelist() if re.fullmatch(r"[^/]+/data\.pkl", name)]
        if len(pickles) != 1:
            raise CheckpointError(
                f"{path} is a zip without PyTorch weights; expected a file written by torch.save"
            )
        root = pickles[0].removesuffix("data.pkl")
        entries: dict[str, _Entry] = {}
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED and not info.filename.startswith(f"{root}code/"):
                raise ValueError(f"{info.filename} is compressed, which PyTorch never does")
            lengths = struct.unpack_from("<2H", content, info.header_offset + 26)
            start = info.header_offset + 30 + sum(lengths)
            entries[info.filename.removeprefix(f"{root}data/")] = _Entry(start, info.file_size, info.CRC)
        # before PyTorch 2.1 there was no such entry
        if f"{root}byteorder" in entries and archive.read(f"{root}byteorder") != b"little":
            raise CheckpointError(f"{path} was written on a big-endian machine; save it on another one")
        script = f"{root}constants.pkl" in entries
        unpickler = _TensorUnpickler(io.BytesIO(archive.read(pickles[0])), path, script=script)
        value = unpickler.load()
    if not script:
        return _map_tensors(_select_state_dict(value, path), entries, content), _select_notes(value)
    if not isinstance(value, _ScriptObject):
        raise CheckpointError(f"{path} is a TorchScript archive without a module")
    notes = _select_notes(value.state) if isinstance(value.state, dict) else {}
    return _map_tensors(dict(_walk_script(value)), entries, content), notes


def _walk_script(module: _ScriptObject, prefix: str = "") -> Iterator[tuple[str, StoredTensor]]:
    if not isinstance(module.state, dict):
        return
    for name, value in module.state.items():
        if isinstance(value, StoredTensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, _ScriptObject):
            yield from _walk_script(value, f"{prefix}{name}.")
