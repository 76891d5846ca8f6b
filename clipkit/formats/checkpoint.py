"""Find the newest intact checkpoint of a run, and load and save models.

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

``clipkit.training.checkpoint`` writes checkpoints and resumes from them. Pickle is never used. If all checkpoints
of a run are lost or damaged, it is not restarted, since that would erase its history. COMPLETE files of earlier
versions list only sizes, so other damage is not detected.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from clipkit.errors import CheckpointError, ConfigError
from clipkit.files.atomic import lock_output
from clipkit.files.terminal import counted
from clipkit.model.architectures import ARCHITECTURES, Architecture
from clipkit.model.clip import CLIP, build
from clipkit.model.lora import Adapters, add_adapters, merge_adapters
from clipkit.model.preprocess import Preprocess
from clipkit.model.resample import fit_positions
from clipkit.model.tokenizer import Tokenizer, tokenizer_of
from clipkit.samples.depth import format_pixel_range
from clipkit.samples.traits import Decoding

__all__ = [
    "COMPLETE", "FORMAT", "LATEST", "SAVED", "STEP_FOLDER", "TRAINED", "check_free", "check_weights",
    "checksum", "is_complete", "is_intact", "latest_checkpoint", "listing", "load_model", "model_card",
    "model_hash", "passed_over", "read_json", "resolve_checkpoint", "save_model", "step_folders", "step_of",
    "weights_of",
]  # fmt: skip


_CHUNK = 16 << 20  # bytes per CRC; part of the definition of the checksum
_READ = 1 << 20  # bytes read at a time; fastest if they fit in the processor's cache
_MAX_THREADS = 8


def checksum(path: Path, *, threads: int = 0) -> str:
    """Compute the CRC-32 of the CRC-32s of each 16 MiB of a file, as eight hexadecimal digits.

    Faster than reading the file from disk. Detects accidental damage, not manipulation. The result is cached while
    the file's size, modification time and inode are unchanged.

    Args:
        path: the file.
        threads: number of threads; 0 for one per core, up to 8.

    Raises:
        OSError: the file cannot be read.
    """
    status = path.stat()
    threads = threads or min(_MAX_THREADS, os.cpu_count() or 1)
    return _checksum(str(path), status.st_size, status.st_mtime_ns, status.st_ino, threads)


@lru_cache(maxsize=256)
def _checksum(path: str, size: int, changed: int, inode: int, threads: int) -> str:
    def chunk(start: int) -> int:
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
            sums = list(map(chunk, starts))
        else:
            with ThreadPoolExecutor(threads, thread_name_prefix="checksum") as pool:
                sums = list(pool.map(chunk, starts))
    finally:
        os.close(descriptor)
    return f"{zlib.crc32(b''.join(one.to_bytes(4, 'little') for one in sums)):08x}"


LATEST, COMPLETE, SAVED = "LATEST", "COMPLETE", ".saved"
STEP_FOLDER = re.compile(r"step_(\d{1,18})", re.ASCII)
# files of every checkpoint; there may also be tokenizer files
_FILES = {"model.safetensors", "model.json", "optimizer.safetensors", "state.json", "config.toml"}
FORMAT = 1
TRAINED = "/trained"  # suffix of the names in trained.safetensors
_SHOWN = 4  # names listed in a message, per kind
MAX_JSON = 128 * 2**20  # bytes; class names may take 64 MB


def latest_checkpoint(run: Path, *, needed: Callable[[str], bool] | None = None) -> Path | None:
    """Find the checkpoint to resume from; None if the run never saved one.

    It is the one named by LATEST if that is intact, otherwise the newest intact one.

    Args:
        run: the run folder.
        needed: selects files by name whose checksums are verified; None for all.

    Raises:
        CheckpointError: the run has saved checkpoints, but they are missing, damaged or unreadable.
    """
    root = run / "checkpoints"
    if (pointer := _pointer(root)) is not None:
        named = root / pointer
        if named.parent == root and is_intact(named, needed):
            return named
    folders = step_folders(root)
    if intact := next((folder for folder in folders if is_intact(folder, needed)), None):
        return intact
    advice = f"restore them; to train it again from the start, remove the folder {run}"
    if folders:
        raise CheckpointError(
            f"all checkpoints in {root}, from {folders[0].name} on, are incomplete or damaged: {advice}"
        )
    if (run / SAVED).exists():
        raise CheckpointError(f"{run} has been trained, but its checkpoints in {root} are missing: {advice}")
    return None


def passed_over(checkpoint: Path) -> list[str]:
    """List newer checkpoints that were skipped because they are damaged, or named by LATEST but missing.

    Args:
        checkpoint: the result of ``latest_checkpoint``. Checksums are not computed again: if LATEST does not name
            it, it was the newest intact checkpoint.
    """
    root = checkpoint.parent
    pointer = _pointer(root) or ""
    named = pointer == checkpoint.name
    newer = {folder.name for folder in step_folders(root) if not (named and is_complete(folder))}
    if STEP_FOLDER.fullmatch(pointer):
        newer.add(pointer)
    return sorted((name for name in newer if step_of(name) > step_of(checkpoint.name)), key=step_of)


def _pointer(root: Path) -> str | None:
    """Return the content of LATEST; None if it is missing."""
    try:
        return (root / LATEST).read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {root / LATEST}: {error.strerror}") from error


def resolve_checkpoint(source: Path) -> Path:
    """Find the checkpoint folder for a path: a run folder, its ``checkpoints`` folder, or a checkpoint itself.

    Raises:
        CheckpointError: there is no checkpoint, or none that is intact.
    """
    if (source / "model.json").is_file():
        return source
    run = source.parent if source.name == "checkpoints" else source
    found = latest_checkpoint(
        run,
        needed=lambda name: name in ("model.safetensors", "model.json") or name.startswith("tokenizer/"),
    )
    if found is None:
        raise CheckpointError(
            f"no checkpoint in {source}: expected a run folder or a checkpoints/step_… folder"
        )
    return found


def load_model(folder: Path, *, image_size: int = 0, context_length: int = 0) -> CLIP:
    """Load the model of a checkpoint folder on the CPU, in float32 and evaluation mode.

    A nonzero ``image_size`` or ``context_length`` resamples the position embeddings.

    Raises:
        CheckpointError: files are missing or damaged, or the weights do not match the stored architecture.
    """
    weights = folder / "model.safetensors"
    card = read_json(folder / "model.json")
    if card.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: this version cannot read the format of model.json")
    shape = Architecture.from_dict(card.get("architecture", {}))
    preprocess = stored_preprocess(folder)
    if preprocess.image_size != shape.vision.image_size:
        raise CheckpointError(f"{folder}: the image sizes of architecture and preprocessing differ")
    tokenizer = tokenizer_of(shape, stored=card.get("tokenizer", "none"), folder=folder)
    base = _base(folder, shape) if card.get("adapters") else None
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {weights}: {error}") from error
    if not _matches(weights, _listed(folder).get(weights.name)):
        raise CheckpointError(
            f"{weights} is damaged, its checksum is wrong: use another checkpoint, or remove {COMPLETE} beside "
            "it to load it anyway"
        )
    if base is not None:
        check_weights(base, {**base.state_dict(), **tensors}, origin=folder)
        base.load_state_dict(tensors, strict=False)
        merge_adapters(base)
        tensors = base.state_dict()
    if resized := bool(image_size or context_length):
        stored, shape = shape, shape.resized(image_size=image_size, context_length=context_length)
        warn_of_padding(stored, shape, origin=folder)
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


def _base(folder: Path, shape: Architecture) -> CLIP:
    """Load the model that a checkpoint's adapters belong to, and add adapters without values of their own."""
    from clipkit.formats.load import open_source

    adapters = _stored_adapters(folder)
    try:
        base = open_source(
            adapters.source, image_size=shape.vision.image_size, context_length=shape.text.context_length
        )
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(
            f"{folder} has adapters of {adapters.source}, which cannot be loaded: {error}"
        ) from error
    check_base(folder, model_hash(base))
    base.set_decoder(shape.decoder, seed=0)
    base.set_masked(shape.masked, seed=0)
    if shape.logit_bias and base.logit_bias is None:
        base.reset_bias()
    add_adapters(base, adapters)
    return base


def check_base(folder: Path, weights: str) -> None:
    """Check that the adapters of a checkpoint belong to the model with this hash.

    Raises:
        CheckpointError: they belong to other weights, or model.json describes no adapters.
    """
    adapters = _stored_adapters(folder)
    if adapters.hash != weights:
        raise CheckpointError(
            f"{folder} has adapters of {adapters.source}, whose weights have changed since: restore them"
        )


def _stored_adapters(folder: Path) -> Adapters:
    try:
        return msgspec.convert(read_json(folder / "model.json").get("adapters"), Adapters)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{folder}: model.json describes no adapters: {error}") from error


def stored_preprocess(folder: Path) -> Preprocess:
    """Read the preprocessing of the model in a checkpoint folder.

    Raises:
        CheckpointError: model.json is missing, damaged or of another version.
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
    """Build a float32 model in evaluation mode with the given weights; all names and shapes must match.

    Args:
        shape: the architecture.
        tensors: a state dict with the model's names.
        origin: where the tensors come from, for error messages.
        name: name of the architecture.
        preprocess: the model's image preprocessing.
        tokenizer: the model's tokenizer.
        resample: whether to resample position embeddings of another size.

    Raises:
        CheckpointError: the weights do not match; raised before memory for the architecture is allocated.
    """

    def fitting(model: CLIP) -> dict[str, Tensor]:
        fitted = tensors
        if resample:
            shapes = {name: value.shape for name, value in model.state_dict().items()}
            fitted = fit_positions(tensors, shapes)
        check_weights(model, fitted, origin=origin)
        return fitted

    try:
        if shape.is_own:  # check before allocating memory for a stored, possibly manipulated architecture
            with torch.device("meta"):
                fitting(CLIP(shape, name=name))
        model = build(shape, name=name, preprocess=preprocess, tokenizer=tokenizer)
    except ConfigError as error:
        raise CheckpointError(f"{origin}: {error}") from error
    model.load_state_dict(fitting(model))
    return model.eval()


def warn_of_padding(stored: Architecture, resized: Architecture, *, origin: Path) -> None:
    """Warn if another context length changes the features of all texts."""
    length, stored_length = resized.text.context_length, stored.text.context_length
    if length != stored_length and stored.text.reads_padding:
        warnings.warn(
            f"{origin}: context_length = {length} changes the features of all texts, because this text tower reads "
            f"the padding up to {stored_length} tokens: fine-tune the model before use",
            stacklevel=7,  # the caller of clipkit.load
        )


def check_weights(model: CLIP, tensors: Mapping[str, Tensor], *, origin: Path) -> None:
    """Check that tensors match a model's names, shapes and kinds of dtype; the model may be on the meta device.

    Raises:
        CheckpointError: tensors are missing, unexpected or have other shapes; the message groups them by layer.
    """
    own = model.state_dict()
    missing, unexpected = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    misshapen = sorted(name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape)
    if not (missing or unexpected or misshapen):
        for name, value in tensors.items():
            if value.is_floating_point() != own[name].is_floating_point():
                raise CheckpointError(f"{origin}: {name} is {value.dtype}, not {own[name].dtype}")
        return
    prefix = "" if own.keys() & tensors.keys() else _common_prefix(missing, unexpected)
    if prefix:
        others = sorted(name for name in tensors if not name.startswith(prefix))
        without = f" and without {counted(len(others), 'other tensor')} ({_first(others)})" if others else ""
        raise CheckpointError(
            f"{origin}: the names of the model's tensors start with {prefix!r}: store them without it{without}"
        )
    parts = []
    if misshapen:
        shapes = [
            f"{name} {tuple(tensors[name].shape)} instead of {tuple(own[name].shape)}" for name in misshapen
        ]
        parts.append(f"{len(misshapen)} with another shape ({_first(shapes)})")
    for what, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            layers = Counter(
                f"{layer[0]}*" if (layer := re.match(r".*?\.\d+\.", name)) else name for name in names
            )
            groups = [f"{group} ×{count}" if count > 1 else group for group, count in layers.items()]
            parts.append(f"{len(names)} {what} ({_first(groups)})")
    raise CheckpointError(
        f"{origin}: the weights do not match {model.name or 'the model'}: {'; '.join(parts)}"
    )


def _common_prefix(missing: list[str], unexpected: list[str]) -> str:
    """Return a prefix with which all missing names are among the unexpected ones; "" if there is none."""
    for name in unexpected:
        prefix = name.removesuffix(missing[0])
        if prefix != name and {prefix + wanted for wanted in missing} <= set(unexpected):
            return prefix
    return ""


def _first(listed: list[str]) -> str:
    return ", ".join(listed[:_SHOWN] + ["…"] * (len(listed) > _SHOWN))


def step_folders(root: Path) -> list[Path]:
    """List the checkpoint folders, complete or not, newest first."""
    try:
        # glob would treat an unreadable folder as empty
        folders = [folder for folder in root.iterdir() if STEP_FOLDER.fullmatch(folder.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read {root}: {error.strerror}") from error
    return sorted(folders, key=lambda folder: step_of(folder.name), reverse=True)


def step_of(name: str) -> int:
    """Return the step in a folder's name; -1 if there is none."""
    match = STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else -1


def is_complete(folder: Path) -> bool:
    """Check that all files exist and have the listed sizes."""
    listed = _listed(folder)
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
    wanted = {name: one for name, one in _listed(folder).items() if needed is None or needed(name)}
    return all(_matches(folder / name, one) for name, one in wanted.items())


def listing(folder: Path) -> str:
    """Return the content of COMPLETE for the files in a folder."""
    files = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    # one thread, to leave the other cores to training
    listed = {
        name: {"bytes": path.stat().st_size, "crc32": checksum(path, threads=1)}
        for name, path in files.items()
    }
    return json.dumps(listed, indent=2) + "\n"


def _listed(folder: Path) -> dict[str, tuple[int, str]]:
    """Read size and checksum ("" if missing) of each file from COMPLETE; empty if that is missing or damaged."""
    try:
        listed = json.loads((folder / COMPLETE).read_text())
        entries = {
            name: (one, "") if isinstance(one, int) else (int(one["bytes"]), str(one["crc32"]))
            for name, one in listed.items()
        }
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return {}
    return entries


def _matches(path: Path, listed: tuple[int, str] | None) -> bool:
    """Check a file's checksum, if one is listed."""
    try:
        return listed is None or not listed[1] or checksum(path) == listed[1]
    except OSError:
        return False


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: the file cannot be read, or does not contain a JSON object.
    """
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

    Args:
        model: an unsharded model on any device.
        out: a folder that does not exist or is empty.
        made_from: the model's origin, stored in model.json.

    Raises:
        ConfigError: the folder is not empty, or another process is writing to it.
        CheckpointError: writing fails.
    """
    check_free(out)
    aside = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with lock_output(out, "process"), ExitStack() as cleanup:
            cleanup.callback(shutil.rmtree, aside, ignore_errors=True)
            shutil.rmtree(aside, ignore_errors=True)  # left by a killed process
            aside.mkdir()
            tensors = {name: value.cpu() for name, value in weights_of(model).items()}
            save_file(tensors, aside / "model.safetensors")
            card = model_card(model, aside) | ({"made_from": dict(made_from)} if made_from else {})
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
    """Check that a model can be written to a folder.

    Raises:
        ConfigError: the folder is not empty, has no name or cannot be accessed.
    """
    try:
        held = out.is_dir() and any(out.iterdir())
        if held or not out.name or (out.exists() and not out.is_dir()):
            raise ConfigError(f"{out} already exists and is not empty: use a new folder")
    except (OSError, ValueError) as error:  # the name is too long or contains NUL
        raise ConfigError(f"cannot create the folder {str(out)[:200]!r}: {error}") from error


def model_card(model: CLIP, folder: Path) -> dict[str, Any]:
    """Return the content of model.json, and write the tokenizer's files to the folder."""
    # omit a registered name if the architecture differs from the registered one
    name = model.name if ARCHITECTURES.get(model.name, model.architecture) == model.architecture else ""
    return {
        "format": FORMAT,
        "name": name,
        "architecture": model.architecture.to_dict(),
        "preprocess": model.preprocess.to_dict(),
        "tokenizer": model.tokenizer.store(folder),
        **({} if model.adapters is None else {"adapters": asdict(model.adapters)}),
    }


def weights_of(model: CLIP) -> dict[str, Tensor]:
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
    if model.dim != shape.embed_dim:
        digest.update(f"dim {model.dim}\n".encode())
    for name, tensor in sorted(model.state_dict().items()):
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(content)}\n".encode())
    return digest.hexdigest()[:32]
