"""Puts a checkpoint's weights and optimizer state into what a run has built, on any number of ranks."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clipkit.averaging import AveragedWeights
from clipkit.checkpoint import (
    FORMAT,
    STEP_FOLDER,
    TRAINED,
    check_weights,
    latest_checkpoint,
    read_json,
    step_of,
)
from clipkit.config import Config
from clipkit.config_file import load_config
from clipkit.errors import CheckpointError, ConfigError
from clipkit.model import CLIP
from clipkit.parallel import put
from clipkit.training_state import LoopState, loop_state, restore_optimizer

__all__ = ["as_replayed", "load_training"]


def as_replayed(config: Config, run: Path) -> Config:
    """The configuration of a step that one process computes again: in as many pieces as all ranks had together.

    How many ranks there were is told by the lists of samples that each has left, see clipkit/not_finite.py.

    Raises:
        ConfigError: the run was never saved.
    """
    checkpoint = latest_checkpoint(run)
    if checkpoint is None:
        raise ConfigError(f"--replay needs a run that was saved: there is no checkpoint in {run}")
    failed = step_of(checkpoint.name) + 1
    ranks = max(1, sum(_first_step(path) == failed for path in run.glob("not_finite*.jsonl")))
    parts = load_config(checkpoint / "config.toml").accumulate * ranks
    return replace(config, accumulate=min(max(parts, config.accumulate), config.batch_size))


def _first_step(path: Path) -> int | None:
    try:
        with path.open(encoding="utf-8") as file:
            step = json.loads(file.readline()).get("step")
    except (OSError, ValueError, AttributeError):
        return None
    return step if isinstance(step, int) else None


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
