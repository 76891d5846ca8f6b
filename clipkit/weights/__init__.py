"""Tensors out of any file of weights that people have, without running anything that is in it.

    *.safetensors                       read by safetensors
    *.safetensors.index.json            the same in several files, as transformers writes large models
    of torch.save                       a state dict, or a training checkpoint that holds one among other things
    of torch.jit.save                   TorchScript, as OpenAI published CLIP

What a file is follows from its content, not from its name. Pickles are read by ``inert_pickle``, which
imports and calls nothing. ``torch.load`` is not used, not even with ``weights_only``: mapping a file, it takes a
storage to be as long as the pickle claims, and reads on into what lies behind it.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from clipkit.errors import CheckpointError
from clipkit.weights.inert_pickle import Opaque, StoredTensor
from clipkit.weights.torch_file import Storages, map_file, open_archive, read_old_form
from clipkit.weights.torchscript import is_torchscript, read_torchscript

__all__ = ["StoredWeights", "read_weights"]

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
        what = "".join(letter for letter in str(error) if letter.isprintable())[:200]
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
