"""Puts a checkpoint's weights and optimizer state into what a run has built, on any number of ranks."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clipkit.averaging import AveragedWeights
from clipkit.checkpoint import FORMAT, STEP_FOLDER, TRAINED, check_weights, read_json, step_of
from clipkit.errors import CheckpointError
from clipkit.model import CLIP
from clipkit.parallel import put
from clipkit.training_state import LoopState, loop_state, restore_optimizer

__all__ = ["load_training"]


def load_training(
    folder: Path,
    model: CLIP,
    optimizer: torch.optim.Optimizer,
    averaged: AveragedWeights | None = None,
    *,
    partly: bool = False,
) -> LoopState:
    """Put a checkpoint's weights and optimizer state into what a run has built; returns the loop's state.

    Args:
        folder: of the checkpoint.
        model: on its device, sharded or not, whatever the checkpoint was written by.
        optimizer: over the model's parameters.
        averaged: of the model, where the run averages weights.
        partly: whether some parameters may have no optimizer state yet, as they are unfrozen one after the other.

    Raises:
        CheckpointError: a file is missing or damaged, or does not fit the model.
    """
    stored = read_json(folder / "state.json")
    if stored.pop("format", None) != FORMAT:
        raise CheckpointError(f"{folder}: state.json is of another format than this version writes")
    state = loop_state(stored, origin=folder)
    if STEP_FOLDER.fullmatch(folder.name) and state.step != step_of(folder.name):
        raise CheckpointError(f"{folder}: state.json is of step {state.step}")
    weights: Mapping[str, Tensor] = _Stored(folder / "model.safetensors")
    _check(model, weights, folder)
    if averaged is not None:
        averaged.restore(weights, origin=folder)
        trained = _Stored(folder / "trained.safetensors")
        weights = {**weights, **{name.removesuffix(TRAINED): trained[name] for name in trained}}
        _check(model, weights, folder)
    elif (folder / "trained.safetensors").exists():
        raise CheckpointError(f"{folder}: the weights are averaged ones; set optim.average as it was")
    for name, own in model.state_dict().items():
        put(own, weights[name])
    partly = partly or not state.step  # before the first update an optimizer has no state
    restore_optimizer(
        model, optimizer, _Stored(folder / "optimizer.safetensors"), origin=folder, partly=partly
    )
    return state


def _check(model: CLIP, weights: Mapping[str, Tensor], folder: Path) -> None:
    check_weights(model, weights, origin=folder)
    for name, own in model.state_dict().items():
        if weights[name].dtype != own.dtype:  # it would be converted, and the run not be the same
            raise CheckpointError(f"{folder}: {name} is {weights[name].dtype}, not {own.dtype}")


class _Stored(Mapping[str, Tensor]):
    """The tensors of a file, each read when it is asked for.

    Raises:
        CheckpointError: the file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any
        try:
            self._file = safe_open(path, framework="pt")
            self._names = list(self._file.keys())  # no mapping: iterating gives nothing
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def __getitem__(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._path} cannot be read: {error}") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
