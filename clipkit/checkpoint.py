"""Checkpoints of a run: what is in one, how it is written so that no kill can spoil it, and how it is read.

    RUN/checkpoints/LATEST                       the newest one's name
    RUN/checkpoints/step_00000200/
        model.safetensors                        weights, in open_clip's names
        model.json                               architecture, preprocessing, tokenizer
        tokenizer/                               of a text tower that does not use CLIP's own
        optimizer.safetensors                    the optimizer's tensors
        state.json                               everything else that the loop carries on with
        config.toml                              the run's whole configuration
        COMPLETE                                 size of each file
    RUN/.saved                                   there has been a checkpoint

A checkpoint is written aside, synced, renamed, and only then does LATEST move. No pickle is read or written.
A run whose checkpoints are all lost or damaged is not begun anew: that would erase its history.
"""

import json
import os
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from clipkit.architectures import ARCHITECTURES, Architecture
from clipkit.config import Config
from clipkit.config_file import to_toml
from clipkit.errors import CheckpointError, ConfigError
from clipkit.model import CLIP, build
from clipkit.preprocess import Preprocess
from clipkit.resample import fit_positions
from clipkit.text_input import Tokenizer, tokenizer_of
from clipkit.training_state import LoopState, loop_state, optimizer_tensors, restore_optimizer

__all__ = [
    "LoopState", "latest_checkpoint", "load_model", "load_training", "passed_over", "resolve_checkpoint",
    "save_checkpoint",
]  # fmt: skip

_LATEST, _COMPLETE, _SAVED = "LATEST", "COMPLETE", ".saved"
_STEP_FOLDER = re.compile(r"step_(\d{1,18})", re.ASCII)
# what every checkpoint has; a text tower may add its tokenizer's
_FILES = {"model.safetensors", "model.json", "optimizer.safetensors", "state.json", "config.toml"}
_FORMAT = 1
_GROUPS_TOLD = 4  # in a message, of each kind


def save_checkpoint(
    run: Path, model: CLIP, optimizer: torch.optim.Optimizer, state: LoopState, config: Config, *, keep: int
) -> Path:
    """Write ``checkpoints/step_<8 digits>`` and point LATEST at it; older ones beyond ``keep`` are removed.

    Raises:
        CheckpointError: it could not be written, for example for want of space; the former ones are untouched.
    """
    root = run / "checkpoints"
    folder = root / f"step_{state.step:08d}"
    aside = root / f".{folder.name}.partial"
    try:
        for left in root.glob(".step_*.partial"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True)
        save_file(_weights(model), aside / "model.safetensors")
        save_file(optimizer_tensors(model, optimizer), aside / "optimizer.safetensors")
        (aside / "model.json").write_text(json.dumps(_model_card(model, aside), indent=2) + "\n")
        (aside / "state.json").write_text(json.dumps({"format": _FORMAT, **asdict(state)}, indent=2) + "\n")
        (aside / "config.toml").write_text(to_toml(config), encoding="utf-8")
        files = [path for path in sorted(aside.rglob("*")) if path.is_file()]
        sizes = {path.relative_to(aside).as_posix(): path.stat().st_size for path in files}
        (aside / _COMPLETE).write_text(json.dumps(sizes, indent=2) + "\n")
        for path in files:  # safetensors makes files that only their owner can read
            path.chmod((aside / _COMPLETE).stat().st_mode & 0o777)
        for path in (*aside.rglob("*"), aside):
            _sync(path)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
        _sync(root)
        _point_at(root, folder.name)
        (run / _SAVED).touch()
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"the checkpoint of step {state.step} was not written: {error}") from error
    if keep:
        # the one just written stays, even where someone has gone back to an older step
        others = [other for other in _step_folders(root) if other != folder and _is_complete(other)]
        for old in others[keep - 1 :]:
            shutil.rmtree(old, ignore_errors=True)
    return folder


def latest_checkpoint(run: Path) -> Path | None:
    """The checkpoint to resume from; None where the run has never had one.

    1. The one that LATEST names, if it is whole.
    2. Otherwise the newest whole one (LATEST is missing, or names one that was removed or damaged).

    Raises:
        CheckpointError: the run has had checkpoints, but they are gone or damaged, or cannot be read.
    """
    root = run / "checkpoints"
    if (pointer := _pointer(root)) is not None:
        named = root / pointer
        if named.parent == root and _is_complete(named):
            return named
    folders = _step_folders(root)
    if whole := next(filter(_is_complete, folders), None):
        return whole
    mend = f"bring them back, or remove {run} and all that is in it to begin anew"
    if folders:
        raise CheckpointError(f"no checkpoint in {root} is whole, {folders[0].name} and all others: {mend}")
    if (run / _SAVED).exists():
        raise CheckpointError(
            f"{run} has been trained, but its checkpoints are not in {root} any more: {mend}"
        )
    return None


def passed_over(checkpoint: Path) -> list[str]:
    """Names of newer checkpoints beside this one that are damaged, or missing though LATEST names them."""
    root = checkpoint.parent
    newer = {folder.name for folder in _step_folders(root) if not _is_complete(folder)}
    pointer = _pointer(root) or ""
    if _STEP_FOLDER.fullmatch(pointer) and not _is_complete(root / pointer):
        newer.add(pointer)
    return sorted((name for name in newer if _step_of(name) > _step_of(checkpoint.name)), key=_step_of)


def _pointer(root: Path) -> str | None:
    """What LATEST says."""
    try:
        return (root / _LATEST).read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{root / _LATEST} cannot be read: {error.strerror}") from error


def resolve_checkpoint(source: Path) -> Path:
    """The checkpoint folder that a path means: a run folder, its ``checkpoints``, or a checkpoint itself.

    Raises:
        CheckpointError: there is none, or none that is whole.
    """
    if (source / "model.json").is_file():
        return source
    run = source.parent if source.name == "checkpoints" else source
    found = latest_checkpoint(run)
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
    card = _read_json(folder / "model.json")
    if card.get("format") != _FORMAT:
        raise CheckpointError(f"{folder}: model.json is of another format than this version reads")
    shape = Architecture.from_dict(card.get("architecture", {}))
    preprocess = Preprocess.from_dict(card.get("preprocess", {}))
    if preprocess.image_size != shape.vision.image_size:
        raise CheckpointError(f"{folder}: the image sizes of architecture and preprocessing differ")
    tokenizer = tokenizer_of(shape, stored=card.get("tokenizer", "none"), folder=folder)
    tensors = _read_tensors(folder / "model.safetensors")
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


def load_training(folder: Path, model: CLIP, optimizer: torch.optim.Optimizer) -> LoopState:
    """Put a checkpoint's weights and optimizer state into what a run has built; returns the loop's state.

    Raises:
        CheckpointError: a file is missing or damaged, or does not fit the model.
    """
    stored = _read_json(folder / "state.json")
    if stored.pop("format", None) != _FORMAT:
        raise CheckpointError(f"{folder}: state.json is of another format than this version writes")
    state = loop_state(stored, origin=folder)
    if _STEP_FOLDER.fullmatch(folder.name) and state.step != _step_of(folder.name):
        raise CheckpointError(f"{folder}: state.json is of step {state.step}")
    weights = _fitting(model, _read_tensors(folder / "model.safetensors"), folder, resample=False)
    for name, own in model.state_dict().items():
        if weights[name].dtype != own.dtype:  # it would be converted, and the run not be the same
            raise CheckpointError(f"{folder}: {name} is {weights[name].dtype}, not {own.dtype}")
    model.load_state_dict(weights)
    restore_optimizer(model, optimizer, _read_tensors(folder / "optimizer.safetensors"), origin=folder)
    return state


def check_weights(model: CLIP, tensors: dict[str, Tensor], *, origin: Path) -> None:
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


def _shapes(names: list[str], found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
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


def _model_card(model: CLIP, folder: Path) -> dict[str, Any]:
    # a name of ours on another shape would mislead
    name = model.name if ARCHITECTURES.get(model.name, model.architecture) == model.architecture else ""
    return {
        "format": _FORMAT,
        "name": name,
        "architecture": model.architecture.to_dict(),
        "preprocess": model.preprocess.to_dict(),
        "tokenizer": model.tokenizer.store(folder),
    }


def _weights(model: CLIP) -> dict[str, Tensor]:
    """The state dict; what lies in one memory under two names, as tied embeddings do, is written twice."""
    seen: set[int] = set()
    tensors = {}
    for name, value in model.state_dict().items():
        shared = value.untyped_storage().data_ptr() in seen
        seen.add(value.untyped_storage().data_ptr())
        tensors[name] = value.clone(memory_format=torch.contiguous_format) if shared else value.contiguous()
    return tensors


def _step_folders(root: Path) -> list[Path]:
    """Checkpoints, whole or not, the newest first."""
    try:
        # not glob, for which a folder that may not be read is empty
        folders = [folder for folder in root.iterdir() if _STEP_FOLDER.fullmatch(folder.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root} cannot be read: {error.strerror}") from error
    return sorted(folders, key=lambda folder: _step_of(folder.name), reverse=True)


def _step_of(name: str) -> int:
    """The step that a folder's name tells; -1 if it tells none."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else -1


def _is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _COMPLETE).read_text())
        return sizes.keys() >= _FILES and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _point_at(root: Path, name: str) -> None:
    aside = root / f".{_LATEST}.partial"
    aside.write_text(name + "\n")
    _sync(aside)
    aside.replace(root / _LATEST)
    _sync(root)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_json(path: Path) -> dict[str, Any]:
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
