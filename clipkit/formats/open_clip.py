"""What open_clip's trainer leaves behind: checkpoints, and a params.txt that says how they came about.

LOGS/NAME/params.txt                  every setting, as "name: value"
LOGS/NAME/checkpoints/epoch_N.pt      state dict, optimizer and scaler after N epochs
LOGS/NAME/checkpoints/epoch_latest.pt the same, where it was asked for
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

_LARGEST = 2**20  # of params.txt, which has some hundred lines
_PREPROCESS = ("mean", "std", "interpolation", "resize_mode")


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """What params.txt says.

    Attributes:
        architecture: None where it does not say enough.
        name: of the architecture, "" without one.
        lacking: why there is no architecture, for a message.
        preprocess: how pictures were prepared, what differs from CLIP's own.
    """

    architecture: Architecture | None = None
    name: str = ""
    lacking: str = "nothing beside these weights tells their architecture, nor whether it has QuickGELU"
    preprocess: Mapping[str, Any] = field(default_factory=dict)


def newest_epoch(folder: Path) -> Path | None:
    """The newest checkpoint of a training folder or its ``checkpoints``; None where there is none."""
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
    """What is recorded beside a checkpoint, or a folder above it.

    Raises:
        CheckpointError: the record contradicts itself.
    """
    for folder in (file.parent, file.parent.parent):
        if (folder / "params.txt").is_file():
            return _read(folder / "params.txt")
    return TrainingRecord()


def _read(params: Path) -> TrainingRecord:
    with params.open(encoding="utf-8", errors="replace") as file:
        lines = file.read(_LARGEST).splitlines()
    values = {name: _value(value) for name, value in (line.split(": ", 1) for line in lines if ": " in line)}
    name = str(values.get("model", "")).replace("/", "-")  # as open_clip itself has it
    try:
        check_names(OPEN_CLIP + name)
    except ConfigError:
        return TrainingRecord(
            lacking=f"{params} names the architecture {values.get('model')!r}, which open_clip's registry has not"
        )
    shape = from_open_clip(open_clip_config(name))
    published = _published(name, values.get("pretrained"))
    preprocess = {key: published.get(key) for key in _PREPROCESS}
    preprocess |= {key: given for key in _PREPROCESS if (given := values.get(f"image_{key}")) is not None}
    if values.get("force_quick_gelu") is True:
        shape = replace(shape, quick_gelu=True)
    elif values.get("pretrained") == "openai" and not shape.quick_gelu:
        return TrainingRecord(
            preprocess=preprocess,
            lacking=f"{params}: training began from OpenAI's weights, with QuickGELU in open_clip before version 3 "
            "and with GELU since",
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
    """A value as Python prints it: None, a truth value, a number, a list of numbers, or a word."""
    words = {"None": None, "True": True, "False": False}
    if text in words:
        return words[text]
    try:
        return json.loads(text.replace("(", "[").replace(")", "]"))
    except (ValueError, RecursionError):
        return text


def _one(size: Any) -> Any:
    """A side of pictures may be given twice, for height and width."""
    if isinstance(size, list) and size and all(side == size[0] for side in size):
        return size[0]
    return size


def _published(name: str, tag: Any) -> Mapping[str, Any]:
    """What open_clip's registry says of the weights that training began from."""
    return published_weights(name, tag) if tag and isinstance(tag, str) else {}
