"""Find the newest intact checkpoint of a run, and save models.

    RUN/checkpoints/LATEST                       name of the newest checkpoint
    RUN/checkpoints/step_00000200/
        model.safetensors                        weights, with open_clip's names; their average if the run uses one
        trained.safetensors                      unaveraged weights, if model.safetensors contains the average
        model.json                               architecture, preprocessing, tokenizer
        tokenizer/                               files of a tokenizer other than CLIP's
        optimizer.safetensors                    tensors of the optimizer's state
        state.json                               all other state of the training loop
        config.toml                              the complete configuration of the run
        COMPLETE                                 size and checksum of each file
    RUN/.saved                                   marks that a checkpoint has been saved

``clipkit.training.checkpoint`` writes checkpoints and resumes from them; ``clipkit.formats.load`` loads models.
Pickle is never used. If all checkpoints of a run are lost or damaged, it is not restarted, since that would erase
its history. COMPLETE files of earlier versions list only sizes, so other damage is not detected.
"""

import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from clipkit.errors import CheckpointError, ConfigError, nearest
from clipkit.files.writing import lock_output
from clipkit.model.architectures import ARCHITECTURES, Architecture, Decoder
from clipkit.model.clip import CLIP
from clipkit.model.names import IMAGE_TOWERS, TEXT_TOWERS
from clipkit.model.preprocess import Preprocess
from clipkit.samples.depth import format_pixel_range
from clipkit.samples.traits import Decoding

_CHUNK = 16 << 20  # bytes per CRC; part of the definition of the checksum
_READ = 1 << 20  # bytes read at a time; fastest if they fit in the processor's cache
_MAX_THREADS = 8


def compute_checksum(path: Path, *, threads: int = 0) -> str:
    """Compute the CRC-32 of the CRC-32s of each 16 MiB of a file, as eight hexadecimal digits.

    Faster than reading the file from disk. Detects accidental damage, not manipulation. The result is cached while
    the file's size, modification time and inode are unchanged.

    Args:
        threads: number of threads; 0 for one per core, up to 8.
    """
    status = path.stat()
    threads = threads or min(_MAX_THREADS, os.cpu_count() or 1)
    return _checksum(str(path), status.st_size, status.st_mtime_ns, status.st_ino, threads)


@lru_cache(maxsize=256)
def _checksum(path: str, size: int, changed: int, inode: int, threads: int) -> str:
    def sum_chunk(start: int) -> int:
        end = min(start + _CHUNK, size)
        buffer, value = memoryview(bytearray(_READ)), 0
        while start < end:
            count = os.preadv(descriptor, [buffer[: end - start]], start)
            if not count:  # the file was truncated while it was being read
                break
            value = zlib.crc32(buffer[:count], value)
            start += count
        return value

    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        starts = range(0, size, _CHUNK)
        if min(threads, len(starts)) < 2:
            sums = list(map(sum_chunk, starts))
        else:
            with ThreadPoolExecutor(threads, thread_name_prefix="checksum") as pool:
                sums = list(pool.map(sum_chunk, starts))
    finally:
        os.close(descriptor)
    return f"{zlib.crc32(b''.join(value.to_bytes(4, 'little') for value in sums)):08x}"


LATEST, BEST, COMPLETE, SAVED = "LATEST", "BEST", "COMPLETE", ".saved"
_AT_BEST = "@best"  # suffix of a run folder
STEP_FOLDER = re.compile(r"step_(\d{1,18})", re.ASCII)
# files of every checkpoint; there may also be tokenizer files
_FILES = {"model.safetensors", "model.json", "optimizer.safetensors", "state.json", "config.toml"}
FORMAT = 1
TRAINED = "/trained"  # suffix of the names in trained.safetensors
MAX_JSON = 128 * 2**20  # bytes; class names may take 64 MB


def latest_checkpoint(run: Path, *, needed: Callable[[str], bool] | None = None) -> Path | None:
    """Find the checkpoint to resume from; None if the run never saved one.

    It is the one named by LATEST if that is intact, otherwise the newest intact one.

    Args:
        needed: selects files by name whose checksums are verified; None for all.
    """
    root = run / "checkpoints"
    pointer = _read_pointer(root, LATEST)
    if pointer is not None:
        named = root / pointer
        if named.parent == root and is_intact(named, needed):
            return named
    folders = step_folders(root)
    for folder in folders:
        if is_intact(folder, needed):
            return folder
    advice = f"restore them; to train it again from the start, remove the folder {run}"
    if folders:
        raise CheckpointError(
            f"all checkpoints in {root}, from {folders[0].name} on, are incomplete or damaged: {advice}"
        )
    if (run / SAVED).exists():
        raise CheckpointError(f"{run} has been trained, but its checkpoints in {root} are missing: {advice}")
    return None


def list_skipped_checkpoints(checkpoint: Path) -> list[str]:
    """List newer checkpoints that were skipped because they are damaged, or named by LATEST but missing.

    Args:
        checkpoint: the result of ``latest_checkpoint``. Checksums are not computed again: if LATEST does not name
            it, it was the newest intact checkpoint.
    """
    root = checkpoint.parent
    pointer = _read_pointer(root, LATEST) or ""
    named = pointer == checkpoint.name
    newer = {folder.name for folder in step_folders(root) if not (named and is_complete(folder))}
    if STEP_FOLDER.fullmatch(pointer):
        newer.add(pointer)
    return sorted((name for name in newer if parse_step(name) > parse_step(checkpoint.name)), key=parse_step)


def _read_pointer(root: Path, file: str) -> str | None:
    try:
        return (root / file).read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {root / file}: {error.strerror}") from error


def best_checkpoint(run: Path) -> Path | None:
    """Return the checkpoint with the best score so far, see ``checkpoint.best``; None if there is none."""
    name = _read_pointer(run / "checkpoints", BEST) or ""
    folder = run / "checkpoints" / name
    return folder if STEP_FOLDER.fullmatch(name) and is_complete(folder) else None


def select_best(source: Path) -> Path:
    """Return the best checkpoint of RUN for a path RUN@best; other paths are returned as they are."""
    if not source.name.endswith(_AT_BEST) or source.exists():
        return source
    run = source.with_name(source.name.removesuffix(_AT_BEST))
    checkpoint = best_checkpoint(run)
    if checkpoint is None:
        raise CheckpointError(
            f"{run} has no best checkpoint: none of those it saved has the best score, or it was trained without "
            "checkpoint.best"
        )
    return checkpoint


def resolve_checkpoint(source: Path) -> Path:
    """Find the checkpoint folder for a path: a run folder, its ``checkpoints`` folder, or a checkpoint itself."""
    if (source / "model.json").is_file():
        return source
    run = source.parent if source.name == "checkpoints" else source
    checkpoint = latest_checkpoint(
        run, needed=lambda name: name in ("model.safetensors", "model.json") or name.startswith("tokenizer/")
    )
    if checkpoint is None:
        raise CheckpointError(
            f"no checkpoint in {source}: expected a run folder or a checkpoints/step_… folder"
        )
    return checkpoint


def read_preprocess(folder: Path) -> Preprocess:
    """Read the preprocessing of the model in a checkpoint folder."""
    return Preprocess.from_dict(read_json(folder / "model.json").get("preprocess", {}))


def step_folders(root: Path) -> list[Path]:
    """List the checkpoint folders, complete or not, newest first."""
    try:
        # glob would treat an unreadable folder as empty
        folders = [folder for folder in root.iterdir() if STEP_FOLDER.fullmatch(folder.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read {root}: {error.strerror}") from error
    return sorted(folders, key=lambda folder: parse_step(folder.name), reverse=True)


def parse_step(name: str) -> int:
    """Return the step in a folder's name; -1 if there is none."""
    match = STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else -1


def is_complete(folder: Path) -> bool:
    """Check that all files exist and have the listed sizes."""
    listed = _read_listing(folder)
    try:
        return listed.keys() >= _FILES and all(
            (folder / name).stat().st_size == size for name, (size, _) in listed.items()
        )
    except (OSError, ValueError):
        return False


def is_intact(folder: Path, needed: Callable[[str], bool] | None = None) -> bool:
    """Check that all files exist and those selected by ``needed`` (None: all) have the listed checksums."""
    if not is_complete(folder):
        return False
    for name, listed in _read_listing(folder).items():
        if (needed is None or needed(name)) and not _is_unchanged(folder / name, listed):
            return False
    return True


def list_checksums(folder: Path) -> str:
    """Return the content of COMPLETE for the files in a folder."""
    files = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    # one thread, to leave the other cores to training
    listed = {
        name: {"bytes": path.stat().st_size, "crc32": compute_checksum(path, threads=1)}
        for name, path in files.items()
    }
    return json.dumps(listed, indent=2) + "\n"


def _read_listing(folder: Path) -> dict[str, tuple[int, str]]:
    """Read size and checksum ("" if missing) of each file from COMPLETE; empty if that is missing or damaged."""
    try:
        entries: dict[str, tuple[int, str]] = {}
        for name, entry in json.loads((folder / COMPLETE).read_text()).items():
            if isinstance(entry, int):
                entries[name] = entry, ""
            else:
                entries[name] = int(entry["bytes"]), str(entry["crc32"])
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return {}
    return entries


def check_checksum(path: Path) -> None:
    """Check a file of a checkpoint folder against COMPLETE, if that lists a checksum."""
    if not _is_unchanged(path, _read_listing(path.parent).get(path.name)):
        raise CheckpointError(
            f"{path} is damaged, its checksum is wrong: use another checkpoint, or remove {COMPLETE} beside "
            "it to load it anyway"
        )


def _is_unchanged(path: Path, listed: tuple[int, str] | None) -> bool:
    try:
        return listed is None or not listed[1] or compute_checksum(path) == listed[1]
    except OSError:
        return False


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise CheckpointError(f"{path} is too large to be a configuration")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not contain a JSON object")
    return value


def save_model(model: CLIP, out: Path, *, made_from: Mapping[str, Any] | None = None) -> None:
    """Write a model to a new folder (model.json, model.safetensors and the tokenizer's files), atomically.

    ``clipkit.load`` reads such a folder like a checkpoint.
    """
    check_free(out)
    aside = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with lock_output(out, "process"), ExitStack() as cleanup:
            cleanup.callback(shutil.rmtree, aside, ignore_errors=True)
            shutil.rmtree(aside, ignore_errors=True)  # left by a killed process
            aside.mkdir()
            tensors = {name: value.cpu() for name, value in collect_tensors(model).items()}
            save_file(tensors, aside / "model.safetensors")
            card = describe_model(model, aside) | ({"made_from": dict(made_from)} if made_from else {})
            (aside / "model.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
            mode = (aside / "model.json").stat().st_mode & 0o777
            (aside / "model.safetensors").chmod(
                mode
            )  # safetensors creates files readable only by their owner
            if out.is_dir():
                out.rmdir()
            aside.rename(out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {out}: {error}") from error


def check_free(out: Path) -> None:
    """Check that a model can be written to a folder."""
    try:
        held = out.is_dir() and any(out.iterdir())
        if held or not out.name or (out.exists() and not out.is_dir()):
            raise ConfigError(f"{out} already exists and is not empty: use a new folder")
    except (OSError, ValueError) as error:  # the name is too long or contains NUL
        raise ConfigError(f"cannot create the folder {str(out)[:200]!r}: {error}") from error


def describe_model(model: CLIP, folder: Path) -> dict[str, Any]:
    """Return the content of model.json, and write the tokenizer's files to the folder."""
    # omit a registered name if the architecture differs from the registered one
    name = model.name if ARCHITECTURES.get(model.name, model.architecture) == model.architecture else ""
    return {
        "format": FORMAT,
        "name": name,
        "architecture": serialize_architecture(model.architecture),
        "preprocess": model.preprocess.to_dict(),
        "tokenizer": model.tokenizer.store(folder),
        **({} if model.adapters is None else {"adapters": asdict(model.adapters)}),
    }


def serialize_architecture(shape: Architecture) -> dict[str, Any]:
    """Convert an architecture to nested plain values, as stored with weights."""
    image_kinds = {kind: name for name, kind in IMAGE_TOWERS.items()}
    text_kinds = {kind: name for name, kind in TEXT_TOWERS.items()}
    values = asdict(shape)
    values["vision"] = {"kind": image_kinds[type(shape.vision)], **asdict(shape.vision)}
    values["text"] = {"kind": text_kinds[type(shape.text)], **asdict(shape.text)}
    return {name: value for name, value in values.items() if value not in (None, ())}


def parse_architecture(values: Mapping[str, Any]) -> Architecture:
    """Invert ``serialize_architecture``; CheckpointError if a field is unknown, missing or of the wrong type."""
    try:
        vision = _parse_tower(values["vision"], "vit", IMAGE_TOWERS)
        text = _parse_tower(values["text"], "transformer", TEXT_TOWERS)
        decoder = Decoder(**values["decoder"]) if "decoder" in values else None
        heads = {"decoder": decoder, "projections": tuple(values.get("projections", ()))}
        return Architecture(**{**values, "vision": vision, "text": text, **heads})
    except (AttributeError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(
            f"the stored architecture is invalid or from another version: {error}"
        ) from error


def _parse_tower(values: Mapping[str, Any], default: str, kinds: Mapping[str, Any]) -> Any:
    name = values.get("kind", default)
    if name not in kinds:
        raise ConfigError(f"kind = {name!r} is unknown: {nearest(str(name), kinds)}")
    return kinds[name](**{key: value for key, value in values.items() if key != "kind"})


def collect_tensors(model: CLIP) -> dict[str, Tensor]:
    """Return the state dict; tensors that share memory, such as tied embeddings, are copied."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if hasattr(value, "device_mesh"):  # a DTensor of clipkit's own towers, which share no tensors
            tensors[name] = value
            continue
        shared = value.untyped_storage().data_ptr() in seen
        seen.add(value.untyped_storage().data_ptr())
        tensors[name] = value.clone(memory_format=torch.contiguous_format) if shared else value.contiguous()
    return tensors


def model_hash(model: CLIP) -> str:
    """Hash the weights, the architecture, the preprocessing and ``dim`` to 32 hexadecimal digits.

    Not secure against deliberate collisions: tensors are hashed with CRC-32, which takes a tenth of the time of a
    cryptographic hash. The initialization scheme is not part of the hash.
    """
    shape = replace(model.architecture, small_data=False)
    digest = hashlib.sha256(f"{shape!r}\n{model.preprocess!r}\n".encode())
    if (decoding := model.preprocess.decoding) != Decoding():
        digest.update(f"{decoding!r}\n".encode())
    if decoding.pixel_range != "auto":
        digest.update(f"pixel range {format_pixel_range(decoding.pixel_range)}\n".encode())
    digest.update(f"{shape.text.variant}{shape.vision.variant}".encode())
    if shape.decoder is not None:
        digest.update(f"{shape.decoder!r}\n".encode())
    if shape.masked is not None:
        digest.update(f"masked {shape.masked}\n".encode())
    if shape.words is not None:
        digest.update(f"words {shape.words}\n".encode())
    if model.dim != shape.embed_dim:
        digest.update(f"dim {model.dim}\n".encode())
    digest.update(describe_tensors(model.state_dict()).encode())
    return digest.hexdigest()[:32]


def describe_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return names, dtypes, shapes and CRC-32s of tensors, a line for each."""
    lines = []
    for name, tensor in sorted(tensors.items()):
        content: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(content)}\n")
    return "".join(lines)
