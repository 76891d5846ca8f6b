"""What a training carries on with besides its weights: the loop's state, and the optimizer's tensors by name.

Both are checked when they are read: a count that is none, or a tensor of another shape that would be broadcast,
would go on as another run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipkit.errors import CheckpointError
from clipkit.model import CLIP

__all__ = ["LoopState", "loop_state", "optimizer_tensors", "restore_optimizer"]

_MOST = 2**63  # of a count, or of seconds
_ADAMW = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """All state of the training loop besides weights and the optimizer's tensors.

    Order, augmentation and random draws are functions of the seed and the step, so the number of batches
    consumed is all that the data need, and no generator is saved.
    """

    step: int  # updates made = global batches consumed
    data: str  # fingerprint of the training samples
    seconds: float = 0.0  # of training so far
    bad_samples: int = 0


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
        ("seconds", (int, float), "a number of seconds"),
        ("bad_samples", (int,), "a count"),
    ):
        value = getattr(state, name)
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        if not fits or (isinstance(value, int | float) and not 0 <= value < _MOST):  # nor is it NaN
            raise CheckpointError(f"{origin}: state.json does not fit: {name} = {value!r} is not {what}")
    return state


def optimizer_tensors(model: CLIP, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as ``<parameter name>/<state name>``, so that it does not depend on group order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            tensors[f"{names[id(parameter)]}/{key}"] = torch.as_tensor(value).contiguous()
    return tensors


def restore_optimizer(
    model: CLIP, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], *, origin: Path
) -> None:
    """Give AdamW the state that ``optimizer_tensors`` took.

    Raises:
        CheckpointError: it is for other parameters, incomplete, or of other shapes or dtypes.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    states: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, what = key.rpartition("/")
        states.setdefault(name, {})[what] = value
    if states.keys() != parameters.keys():
        raise CheckpointError(f"{origin}: the optimizer's state is for other parameters than the model has")
    for name, parameter in parameters.items():
        _check_adamw(states[name], parameter, f"{origin}: the optimizer's state of {name}")
    for name, parameter in parameters.items():
        # the count of updates stays where it was saved from; everything of the parameter's shape moves to it
        optimizer.state[parameter] = {
            what: value.to(parameter.device) for what, value in states[name].items()
        }


def _check_adamw(state: Mapping[str, Tensor], parameter: Tensor, whose: str) -> None:
    if sorted(state) != sorted(_ADAMW):
        raise CheckpointError(f"{whose} holds {', '.join(sorted(state))} instead of {', '.join(_ADAMW)}")
    for what, value in state.items():
        shape, dtype = (torch.Size(), torch.float32) if what == "step" else (parameter.shape, parameter.dtype)
        if value.shape != shape or value.dtype != dtype:
            raise CheckpointError(
                f"{whose}: {what} is {tuple(value.shape)} {value.dtype} instead of {tuple(shape)} {dtype}"
            )
