"""Output of open_clip's trainer: checkpoints, and a params.txt with their settings.

LOGS/NAME/params.txt                  every setting, as "name: value"
LOGS/NAME/checkpoints/epoch_N.pt      state dict, optimizer and scaler after N epochs
LOGS/NAME/checkpoints/epoch_latest.pt the same for the latest epoch, with --save-most-recent
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clipkit.errors import CheckpointError, ConfigError
from clipkit.files.open_clip import published_weights
from clipkit.formats.weights import read_weights
from clipkit.model.architectures import Architecture
from clipkit.model.names import OPEN_CLIP, check_names, from_open_clip, open_clip_config

__all__ = ["TrainingRecord", "newest_epoch", "training_record"]

_MAX_PARAMS = 2**20  # characters read from params.txt, which has about a hundred lines
_PREPROCESS = ("mean", "std", "interpolation", "resize_mode")


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """Settings recorded in params.txt.

    Attributes:
        architecture: the architecture; None if the record does not determine it.
        name: name of the architecture, or "".
        lacking: why the architecture is unknown, for an error message.
        preprocess: preprocessing settings that differ from CLIP's.
    """

    architecture: Architecture | None = None
    name: str = ""
    lacking: str = "no file next to these weights records their architecture, nor whether it uses QuickGELU"
    preprocess: Mapping[str, Any] = field(default_factory=dict)


def newest_epoch(folder: Path) -> Path | None:
    """Find the newest checkpoint in a training folder or its ``checkpoints`` folder; None if there is none."""
    for place in (folder / "checkpoints", folder):
        epochs = {
            int(match[1]): path
            for path in place.glob("epoch_*.pt")
            if (match := re.fullmatch(r"epoch_(\d+)\.pt", path.name))
        }
        latest = place / "epoch_latest.pt"
        if latest.is_file():
            epoch = read_weights(latest).notes.get("epoch", 0) if epochs else 0
            if not epochs or (isinstance(epoch, int) and epoch > max(epochs)):
                return latest
        if epochs:
            return epochs[max(epochs)]
    return None


def training_record(file: Path) -> TrainingRecord:
    """Read params.txt in a checkpoint's folder or its parent.

    Raises:
        CheckpointError: the record is inconsistent.
    """
    for folder in (file.parent, file.parent.parent):
        if (folder / "params.txt").is_file():
            return _read(folder / "params.txt")
    return TrainingRecord()


def _read(params: Path) -> TrainingRecord:
    with params.open(encoding="utf-8", errors="replace") as file:
        lines = file.read(_MAX_PARAMS).splitlines()
    values = {name: _value(value) for name, value in (line.split(": ", 1) for line in lines if ": " in line)}
    name = str(values.get("model", "")).replace("/", "-")  # as open_clip does
    try:
        check_names(OPEN_CLIP + name)
    except ConfigError:
        return TrainingRecord(
            lacking=f"{params} names the architecture {values.get('model')!r}, which open_clip does not know"
        )
    shape = from_open_clip(open_clip_config(name))
    tag = values.get("pretrained")  # the weights that training started from
    published = published_weights(name, tag) if tag and isinstance(tag, str) else {}
    preprocess = {key: published.get(key) for key in _PREPROCESS}
    preprocess |= {key: given for key in _PREPROCESS if (given := values.get(f"image_{key}")) is not None}
    if values.get("force_quick_gelu") is True:
        shape = replace(shape, quick_gelu=True)
    elif tag == "openai" and not shape.quick_gelu:
        return TrainingRecord(
            preprocess=preprocess,
            lacking=f"{params}: training started from OpenAI's weights, which open_clip used with QuickGELU before "
            "version 3 and with GELU since",
        )
    try:
        sizes = {
            "image_size": values.get("force_image_size"),
            "context_length": values.get("force_context_length"),
        }
        for key, size in sizes.items():
            if size is not None:
                shape = shape.resized(**{key: _one(size)})
    except ConfigError as error:
        raise CheckpointError(f"{params}: {error}") from error
    return TrainingRecord(architecture=shape, name=OPEN_CLIP + name, preprocess=preprocess)


def _value(text: str) -> Any:
    """Parse a value as printed by Python: None, a bool, a number, a list of numbers, or a string."""
    words = {"None": None, "True": True, "False": False}
    if text in words:
        return words[text]
    try:
        return json.loads(text.replace("(", "[").replace(")", "]"))
    except (ValueError, RecursionError):
        return text


def _one(size: Any) -> Any:
    """Reduce a list of equal numbers, such as the height and width of images, to one."""
    if isinstance(size, list) and size and all(side == size[0] for side in size):
        return size[0]
    return size
