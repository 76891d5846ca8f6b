"""A folder that holds one model and nothing of a run: model.json, model.safetensors, the tokenizer's files.

``clipkit.load`` takes it as it takes a checkpoint.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from clipkit.architectures import ARCHITECTURES
from clipkit.checkpoint import FORMAT
from clipkit.errors import CheckpointError, ConfigError
from clipkit.model import CLIP

__all__ = ["check_free", "model_card", "save_model", "weights_of"]


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
    """The state dict; what lies in one memory under two names, as tied embeddings do, is copied."""
    from torch.distributed.tensor import DTensor

    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):  # spread over ranks: of clipkit's own towers, which tie nothing
            tensors[name] = value
            continue
        shared = value.untyped_storage().data_ptr() in seen
        seen.add(value.untyped_storage().data_ptr())
        tensors[name] = value.clone(memory_format=torch.contiguous_format) if shared else value.contiguous()
    return tensors
