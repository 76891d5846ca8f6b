"""What a training carries on with besides its weights: the loop's state, and the optimizer's tensors by name.

Both are checked when they are read: a count that is none, or a tensor of another shape that would be broadcast,
would go on as another run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipkit.config_file import load_config
from clipkit.errors import CheckpointError, ConfigError
from clipkit.model import CLIP
from clipkit.optim import expected_state
from clipkit.parallel import put

__all__ = ["LoopState", "loop_state", "optimizer_tensors", "planned_steps", "restore_optimizer"]

_MOST = 2**63  # of a count, or of seconds


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """All state of the training loop besides weights and the optimizer's tensors.

    Order, augmentation and random draws are functions of the seed and the step, so the number of batches
    consumed is all that the data need, and no generator is saved.
    """

    step: int  # updates made = global batches consumed
    data: str  # fingerprint of the training samples
    teacher: str = (
        ""  # of the model or the stored features that are learned from; "" also where it was not kept
    )
    seconds: float = 0.0  # of training so far
    bad_samples: int = 0
    transparent: int = 0  # images drawn that are transparent
    rotated: int = 0  # images drawn that have an EXIF orientation other than upright
    skipped: int = 0  # updates left out, as their gradient was far above the usual
    usual_norm: float = 0.0  # of gradients, see clipkit/spikes.py


def loop_state(stored: Mapping[str, Any], *, origin: Path) -> LoopState:
    """The state that state.json holds.

    Raises:
        CheckpointError: something is missing, unknown, of another kind, or out of range.
    """
    try:
        state = LoopState(**stored)
    except TypeError as error:
        raise CheckpointError(f"{origin}: state.json does not fit: {error}") from error
    for name, kinds, what in (
        ("step", (int,), "a count"),
        ("data", (str,), "a string"),
        ("teacher", (str,), "a string"),
        ("seconds", (int, float), "a number of seconds"),
        ("bad_samples", (int,), "a count"),
        ("transparent", (int,), "a count"),
        ("rotated", (int,), "a count"),
        ("skipped", (int,), "a count"),
        ("usual_norm", (int, float), "a norm"),
    ):
        value = getattr(state, name)
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        if not fits or (isinstance(value, int | float) and not 0 <= value < _MOST):  # nor is it NaN
            raise CheckpointError(f"{origin}: state.json does not fit: {name} = {value!r} is not {what}")
    return state


def planned_steps(folder: Path, *, otherwise: int) -> int:
    """How many steps the run was to make when a checkpoint was written; ``otherwise`` where that cannot be read.

    A line that is shown depends on it, and nothing else: no reason to leave the checkpoint.
    """
    try:
        return load_config(folder / "config.toml").steps
    except ConfigError:
        return otherwise


def optimizer_tensors(model: CLIP, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as ``<parameter name>/<state name>``, so that it does not depend on group order."""
    return {
        f"{name}/{key}": torch.as_tensor(value).contiguous()
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for key, value in optimizer.state[parameter].items()
    }


def restore_optimizer(
    model: CLIP,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    *,
    origin: Path,
    partly: bool = False,
) -> None:
    """Give an optimizer the state that ``optimizer_tensors`` took; model and optimizer may be sharded.

    Args:
        model: whose parameters the optimizer has.
        optimizer: one of ``clipkit.optim``.
        tensors: what was taken.
        origin: where they come from, for messages.
        partly: whether some parameters may have no state, as they had no gradient yet.

    Raises:
        CheckpointError: it is for other parameters, incomplete, or of other shapes or dtypes.
    """
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = dict(model.named_parameters())
    stored: dict[str, list[str]] = {}
    for key in tensors:
        name, _, what = key.rpartition("/")
        stored.setdefault(name, []).append(what)
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    missing = wanted.keys() - stored.keys()
    if (missing and not partly) or any(id(parameters.get(name)) not in held for name in stored):
        raise CheckpointError(f"{origin}: the optimizer's state is for other parameters than the model has")
    for name, kinds in stored.items():
        _check(expected_state(optimizer, parameters[name]), kinds, tensors, name, origin)
    for name, kinds in stored.items():
        optimizer.state[parameters[name]] = {
            what: _like(parameters[name], tensors[f"{name}/{what}"]) for what in kinds
        }


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """A state's tensor as the optimizer has it: spread as its parameter is, and a count beside it."""
    if not value.ndim:
        return value.to(parameter.device, copy=True)
    held = torch.empty_like(parameter)
    put(held, value)
    return held


def _check(
    expected: Mapping[str, tuple[torch.Size, torch.dtype]],
    kinds: Sequence[str],
    tensors: Mapping[str, Tensor],
    name: str,
    origin: Path,
) -> None:
    whose = f"{origin}: the optimizer's state of {name}"
    if sorted(kinds) != sorted(expected):
        raise CheckpointError(f"{whose} holds {', '.join(sorted(kinds))} instead of {', '.join(expected)}")
    for what, (shape, dtype) in expected.items():
        value = tensors[f"{name}/{what}"]
        if value.shape != shape or value.dtype != dtype:
            raise CheckpointError(
                f"{whose}: {what} is {tuple(value.shape)} {value.dtype} instead of {tuple(shape)} {dtype}"
            )
