"""Checkpoints of a run: what is in one, which is the newest whole one, and the model that it holds.

    RUN/checkpoints/LATEST                       the newest one's name
    RUN/checkpoints/step_00000200/
        model.safetensors                        weights, in open_clip's names; averaged ones if the run averages
        trained.safetensors                      those in training, where model.safetensors holds averaged ones
        model.json                               architecture, preprocessing, tokenizer
        tokenizer/                               of a text tower that does not use CLIP's own
        optimizer.safetensors                    the optimizer's tensors
        state.json                               everything else that the loop carries on with
        config.toml                              the run's whole configuration
        COMPLETE                                 size and checksum of each file
    RUN/.saved                                   there has been a checkpoint

clipkit/training/checkpoint.py writes them and resumes from them.
No pickle is read or written. A run whose checkpoints are all lost or damaged is not begun anew: that would
erase its history. In checkpoints of earlier versions COMPLETE has sizes alone, and other damage is not seen.
"""

import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from clipkit.errors import CheckpointError, ConfigError
from clipkit.files.traits import Decoding
from clipkit.model.architectures import ARCHITECTURES, Architecture
from clipkit.model.clip import CLIP, build
from clipkit.model.preprocess import Preprocess
from clipkit.model.resample import fit_positions
from clipkit.model.tokenizer import Tokenizer, tokenizer_of

__all__ = [
    "COMPLETE",
    "FORMAT",
    "LATEST",
    "SAVED",
    "STEP_FOLDER",
    "TRAINED",
    "check_free",
    "check_weights",
    "checksum",
    "is_complete",
    "is_whole",
    "latest_checkpoint",
    "listing",
    "load_model",
    "model_card",
    "model_hash",
    "passed_over",
    "read_json",
    "resolve_checkpoint",
    "save_model",
    "step_folders",
    "step_of",
    "weights_of",
]


# --------------------------------------------------------------------------------------------------------------
# Whether a file holds what was written: a checksum that takes less time than reading the file from a disk.
#
# It finds what disks, networks and copies do to bytes; whoever means to deceive can make another file of the
# same.

_PIECE = 16 << 20  # bytes; another size would give other checksums
_READ = 1 << 20  # bytes at a time: what a processor's cache holds is read and summed the fastest
_MOST_THREADS = 8


def checksum(path: Path, *, threads: int = 0) -> str:
    """Eight hexadecimal digits: the CRC-32 of the CRC-32s of each 16 MiB of a file.

    A file is read once by a process, as long as its size, time and place on the disk stay the same.

    Args:
        path: the file.
        threads: that sum pieces at the same time; 0 for one a core, up to 8.

    Raises:
        OSError: it cannot be read.
    """
    status = path.stat()
    threads = threads or min(_MOST_THREADS, os.cpu_count() or 1)
    return _checksum(str(path), status.st_size, status.st_mtime_ns, status.st_ino, threads)


@lru_cache(maxsize=256)
def _checksum(path: str, size: int, changed: int, inode: int, threads: int) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        starts = range(0, size, _PIECE)
        sums = _each(lambda start: _piece(descriptor, start, min(start + _PIECE, size)), starts, threads)
    finally:
        os.close(descriptor)
    return f"{zlib.crc32(b''.join(one.to_bytes(4, 'little') for one in sums)):08x}"


def _each(sum_of: Callable[[int], int], starts: range, threads: int) -> list[int]:
    if min(threads, len(starts)) < 2:
        return list(map(sum_of, starts))
    with ThreadPoolExecutor(threads, thread_name_prefix="checksum") as pool:
        return list(pool.map(sum_of, starts))


def _piece(descriptor: int, start: int, end: int) -> int:
    buffer, value = memoryview(bytearray(_READ)), 0
    while start < end:
        count = os.preadv(descriptor, [buffer[: end - start]], start)
        if not count:  # it was cut while it was read
            break
        value = zlib.crc32(buffer[:count], value)
        start += count
    return value


# --------------------------------------------------------------------------------------------------------------

LATEST, COMPLETE, SAVED = "LATEST", "COMPLETE", ".saved"
STEP_FOLDER = re.compile(r"step_(\d{1,18})", re.ASCII)
# what every checkpoint has; a text tower may add its tokenizer's
_FILES = {"model.safetensors", "model.json", "optimizer.safetensors", "state.json", "config.toml"}
FORMAT = 1
TRAINED = "/trained"  # behind the names in trained.safetensors
_GROUPS_TOLD = 4  # in a message, of each kind


def latest_checkpoint(run: Path, *, needed: Callable[[str], bool] | None = None) -> Path | None:
    """The checkpoint to resume from; None where the run has never had one.

    1. The one that LATEST names, if it is whole.
    2. Otherwise the newest whole one (LATEST is missing, or names one that was removed or damaged).

    Args:
        run: the run folder.
        needed: which files' content must be what was written, by name; None for all.

    Raises:
        CheckpointError: the run has had checkpoints, but they are gone or damaged, or cannot be read.
    """
    root = run / "checkpoints"
    if (pointer := _pointer(root)) is not None:
        named = root / pointer
        if named.parent == root and is_whole(named, needed):
            return named
    folders = step_folders(root)
    if whole := next((folder for folder in folders if is_whole(folder, needed)), None):
        return whole
    mend = f"bring them back, or remove {run} and all that is in it to begin anew"
    if folders:
        raise CheckpointError(f"no checkpoint in {root} is whole, {folders[0].name} and all others: {mend}")
    if (run / SAVED).exists():
        raise CheckpointError(
            f"{run} has been trained, but its checkpoints are not in {root} any more: {mend}"
        )
    return None


def passed_over(checkpoint: Path) -> list[str]:
    """Names of newer checkpoints that are damaged, or missing though LATEST names them.

    Args:
        checkpoint: what ``latest_checkpoint`` has found. No file is read again: where LATEST does not name it, it
            was the newest whole one.
    """
    root = checkpoint.parent
    pointer = _pointer(root) or ""
    named = pointer == checkpoint.name
    newer = {folder.name for folder in step_folders(root) if not (named and is_complete(folder))}
    if STEP_FOLDER.fullmatch(pointer):
        newer.add(pointer)
    return sorted((name for name in newer if step_of(name) > step_of(checkpoint.name)), key=step_of)


def _pointer(root: Path) -> str | None:
    """What LATEST says."""
    try:
        return (root / LATEST).read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{root / LATEST} cannot be read: {error.strerror}") from error


def resolve_checkpoint(source: Path) -> Path:
    """The checkpoint folder that a path means: a run folder, its ``checkpoints``, or a checkpoint itself.

    Raises:
        CheckpointError: there is none, or none that is whole.
    """
    if (source / "model.json").is_file():
        return source
    run = source.parent if source.name == "checkpoints" else source
    found = latest_checkpoint(run, needed=_is_of_model)
    if found is None:
        raise CheckpointError(
            f"no checkpoint in {source}: expected a run folder or a checkpoints/step_… folder"
        )
    return found


def load_model(folder: Path, *, image_size: int = 0, context_length: int = 0) -> CLIP:
    """The model of one checkpoint folder, on the CPU in float32, in evaluation mode.

    Another ``image_size`` or ``context_length`` than 0 resamples the position embeddings.

    Raises:
        CheckpointError: files are missing or damaged, or the weights do not fit the stored architecture.
    """
    weights = folder / "model.safetensors"
    card = read_json(folder / "model.json")
    if card.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: model.json is of another format than this version reads")
    shape = Architecture.from_dict(card.get("architecture", {}))
    preprocess = stored_preprocess(folder)
    if preprocess.image_size != shape.vision.image_size:
        raise CheckpointError(f"{folder}: the image sizes of architecture and preprocessing differ")
    tokenizer = tokenizer_of(shape, stored=card.get("tokenizer", "none"), folder=folder)
    tensors = _read_tensors(weights)
    if not _is_as_written(weights, _listed(folder).get(weights.name)):
        raise CheckpointError(
            f"{weights} is not what was written: take another checkpoint, or remove {COMPLETE} beside it to load "
            "it as it is"
        )
    if resized := bool(image_size or context_length):
        shape = shape.resized(image_size=image_size, context_length=context_length)
        preprocess = replace(preprocess, image_size=shape.vision.image_size)
        if context_length:
            tokenizer = tokenizer.of_length(context_length)
    return with_weights(
        shape,
        tensors,
        origin=folder,
        name=str(card.get("name", "")),
        preprocess=preprocess,
        tokenizer=tokenizer,
        resample=resized,
    )


def stored_preprocess(folder: Path) -> Preprocess:
    """The preprocessing of the model of one checkpoint folder.

    Raises:
        CheckpointError: model.json is missing or damaged, or of another version.
    """
    return Preprocess.from_dict(read_json(folder / "model.json").get("preprocess", {}))


def with_weights(
    shape: Architecture,
    tensors: dict[str, Tensor],
    *,
    origin: Path,
    name: str = "",
    preprocess: Preprocess | None = None,
    tokenizer: Tokenizer | None = None,
    resample: bool = False,
) -> CLIP:
    """A model in evaluation mode that holds the given weights, as float32; every name and shape must fit.

    Args:
        shape: the architecture.
        tensors: a state dict in the model's names.
        origin: where they come from, for messages.
        name: what the architecture is called.
        preprocess: how pictures become its input.
        tokenizer: how texts do.
        resample: whether position embeddings of another size are made to fit.

    Raises:
        CheckpointError: they do not fit; memory is then not taken for what the architecture claims.
    """
    try:
        if shape.is_own:  # before memory is taken for what a stored architecture claims
            with torch.device("meta"):
                model = CLIP(shape, name=name)
            tensors = _fitting(model, tensors, origin, resample=resample)
        model = build(shape, name=name, preprocess=preprocess, tokenizer=tokenizer)
    except ConfigError as error:
        raise CheckpointError(f"{origin}: {error}") from error
    model.load_state_dict(_fitting(model, tensors, origin, resample=resample))
    return model.eval()


def _fitting(model: CLIP, tensors: dict[str, Tensor], origin: Path, *, resample: bool) -> dict[str, Tensor]:
    if resample:
        tensors = fit_positions(tensors, {name: value.shape for name, value in model.state_dict().items()})
    check_weights(model, tensors, origin=origin)
    return tensors


def check_weights(model: CLIP, tensors: Mapping[str, Tensor], *, origin: Path) -> None:
    """Refuse tensors whose names or shapes are not the model's, and whole numbers for weights.

    The model may be on the meta device.

    Raises:
        CheckpointError: names the missing, unexpected and misshapen tensors, layers as one.
    """
    own = model.state_dict()
    missing, unexpected = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    misshapen = sorted(name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape)
    if not (missing or unexpected or misshapen):
        for name, value in tensors.items():
            if value.is_floating_point() != own[name].is_floating_point():
                raise CheckpointError(f"{origin}: {name} is {value.dtype}, not {own[name].dtype}")
        return
    parts = [f"{len(misshapen)} of another shape ({_shapes(misshapen, tensors, own)})"] if misshapen else []
    for what, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            parts.append(f"{len(names)} {what} ({_grouped(names)})")
    raise CheckpointError(f"{origin}: the weights do not fit {model.name or 'the model'}: {'; '.join(parts)}")


def _shapes(names: list[str], found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    first = names[:_GROUPS_TOLD]
    told = [f"{name} {tuple(found[name].shape)} instead of {tuple(wanted[name].shape)}" for name in first]
    return ", ".join([*told, *(["…"] if len(names) > len(first) else [])])


def _grouped(names: list[str]) -> str:
    """The names of one layer as one."""
    groups: dict[str, int] = {}
    for name in names:
        layer = re.match(r".*?\.\d+\.", name)
        group = f"{layer[0]}*" if layer else name
        groups[group] = groups.get(group, 0) + 1
    told = [f"{group} ×{count}" if count > 1 else group for group, count in groups.items()]
    return ", ".join([*told[:_GROUPS_TOLD], *(["…"] if len(told) > _GROUPS_TOLD else [])])


def step_folders(root: Path) -> list[Path]:
    """Checkpoints, whole or not, the newest first."""
    try:
        # not glob, for which a folder that may not be read is empty
        folders = [folder for folder in root.iterdir() if STEP_FOLDER.fullmatch(folder.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root} cannot be read: {error.strerror}") from error
    return sorted(folders, key=lambda folder: step_of(folder.name), reverse=True)


def step_of(name: str) -> int:
    """The step that a folder's name tells; -1 if it tells none."""
    match = STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else -1


def is_complete(folder: Path) -> bool:
    """Whether all files are there, in their sizes."""
    listed = _listed(folder)
    try:
        return listed.keys() >= _FILES and all(
            (folder / name).stat().st_size == size for name, (size, _) in listed.items()
        )
    except (OSError, ValueError):
        return False


def is_whole(folder: Path, needed: Callable[[str], bool] | None = None) -> bool:
    """Whether all files are there, and those that are needed (None: all) hold what was written."""
    if not is_complete(folder):
        return False
    wanted = {name: one for name, one in _listed(folder).items() if needed is None or needed(name)}
    return all(_is_as_written(folder / name, one) for name, one in wanted.items())


def listing(folder: Path) -> str:
    """What COMPLETE is to hold of the files that are in a folder."""
    files = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    # by one thread, as a training wants the others
    listed = {
        name: {"bytes": path.stat().st_size, "crc32": checksum(path, threads=1)}
        for name, path in files.items()
    }
    return json.dumps(listed, indent=2) + "\n"


def _listed(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and checksum of each file as COMPLETE has them, "" for no checksum; nothing where it is damaged."""
    try:
        listed = json.loads((folder / COMPLETE).read_text())
        entries = {
            name: (one, "") if isinstance(one, int) else (int(one["bytes"]), str(one["crc32"]))
            for name, one in listed.items()
        }
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return {}
    return entries


def _is_as_written(path: Path, listed: tuple[int, str] | None) -> bool:
    try:
        return listed is None or not listed[1] or checksum(path) == listed[1]
    except OSError:
        return False


def _is_of_model(name: str) -> bool:
    return name in ("model.safetensors", "model.json") or name.startswith("tokenizer/")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold an object")
    return value


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


# --------------------------------------------------------------------------------------------------------------
# A folder that holds one model and nothing of a run: model.json, model.safetensors, the tokenizer's files.
#
# ``clipkit.load`` takes it as it takes a checkpoint.


def save_model(model: CLIP, out: Path, *, made_from: Mapping[str, Any] | None = None) -> None:
    """Write a model to a new folder; it is written aside and then put in its place.

    Args:
        model: whole, on any device.
        out: a folder that does not exist, or is empty.
        made_from: what model.json is to say of where it comes from.

    Raises:
        ConfigError: the folder holds something.
        CheckpointError: it could not be written.
    """
    check_free(out)
    aside = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of one that was killed
        aside.mkdir(parents=True)
        tensors = {name: value.cpu() for name, value in weights_of(model).items()}
        save_file(tensors, aside / "model.safetensors")
        card = model_card(model, aside) | ({"made_from": dict(made_from)} if made_from else {})
        (aside / "model.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        mode = (aside / "model.json").stat().st_mode & 0o777
        (aside / "model.safetensors").chmod(mode)  # safetensors makes files that only their owner can read
        if out.is_dir():
            out.rmdir()
        aside.rename(out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{out} was not written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_free(out: Path) -> None:
    """Refuse a folder that a model cannot be written to.

    Raises:
        ConfigError: it holds something, has no name, or cannot be looked at.
    """
    try:
        held = out.is_dir() and any(out.iterdir())
        if held or not out.name or (out.exists() and not out.is_dir()):
            raise ConfigError(f"{out} is there already, and not empty: give a new folder")
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL
        raise ConfigError(f"no folder can be made at {str(out)[:200]!r}: {error}") from error


def model_card(model: CLIP, folder: Path) -> dict[str, Any]:
    """What model.json holds; the tokenizer's files are written to the folder."""
    # a name of ours on another shape would mislead
    name = model.name if ARCHITECTURES.get(model.name, model.architecture) == model.architecture else ""
    return {
        "format": FORMAT,
        "name": name,
        "architecture": model.architecture.to_dict(),
        "preprocess": model.preprocess.to_dict(),
        "tokenizer": model.tokenizer.store(folder),
    }


def weights_of(model: CLIP) -> dict[str, Tensor]:
    """Return the state dict, with tensors that share memory, such as tied embeddings, copied."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if hasattr(value, "device_mesh"):  # a DTensor of clipkit's own towers, which tie nothing
            tensors[name] = value
            continue
        shared = value.untyped_storage().data_ptr() in seen
        seen.add(value.untyped_storage().data_ptr())
        tensors[name] = value.clone(memory_format=torch.contiguous_format) if shared else value.contiguous()
    return tensors


def model_hash(model: CLIP) -> str:
    """32 hexadecimal digits that change with the weights, the architecture and the preprocessing.

    It tells models apart that are not made to be mistaken for each other: tensors count by their CRC, which takes
    a tenth of the time of a cryptographic hash. How fresh weights would be drawn makes no other model.
    """
    shape = replace(model.architecture, small_data=False)
    digest = hashlib.sha256(f"{shape!r}\n{model.preprocess!r}\n".encode())
    if (decoding := model.preprocess.decoding) != Decoding():
        digest.update(f"{decoding!r}\n".encode())
    for name, tensor in sorted(model.state_dict().items()):
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(content)}\n".encode())
    return digest.hexdigest()[:32]
