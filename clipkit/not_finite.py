"""A loss or gradient that is no number: which samples it was made of, and where in the model it begins.

RUN/not_finite.jsonl          the samples of that batch, a line each; of rank 3: not_finite-3.jsonl
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from clipkit.errors import DataError

__all__ = ["first_not_finite", "line", "write_down"]


def write_down(run: Path, names: Sequence[tuple[str, str]], *, step: int, rank: int) -> Path:
    """List a batch's samples, each by its shard and key.

    Raises:
        DataError: it cannot be written.
    """
    path = run / (f"not_finite-{rank}.jsonl" if rank else "not_finite.jsonl")
    lines = [json.dumps({"step": step + 1, "shard": shard, "key": key}) + "\n" for shard, key in names]
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from error
    return path


def line(run: Path, step: int, loss: float, norm: float) -> str:
    """What is said of it; ``step`` updates were made before."""
    what = f"the loss of step {step + 1} is {loss}"
    if math.isfinite(loss):
        what = f"the gradient of step {step + 1} is {norm}"
    return (
        f"{what}; step {step} is saved, and {run}/not_finite*.jsonl lists the samples: the same command with --replay "
        "computes the step again and tells where it begins; try a lower optim.lr, a longer optim.warmup or precision=fp32"
    )


@contextmanager
def _named_outputs(model: nn.Module, found: list[str]) -> Iterator[None]:
    handles: list[RemovableHandle] = []

    def looking_at(name: str) -> Callable[..., None]:
        def look(module: nn.Module, given: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not found and not bool(output.isfinite().all()):
                found.append(name)

        return look

    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(looking_at(name or "the model")))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_not_finite(
    model: nn.Module, inputs: Mapping[str, Any], loss: Callable[..., Tensor], *, autocast: bool
) -> str:
    """Compute a batch's loss and gradients again and name where the first number is not finite; "" if all are.

    Args:
        model: a CLIP; its gradients are replaced.
        inputs: its arguments, see ``clipkit.accumulation.backward``.
        loss: of what it returns.
        autocast: whether the towers run in bfloat16.
    """
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"the weight {name}"
        parameter.grad = None
    found: list[str] = []
    with (
        _named_outputs(model, found),
        torch.autocast(inputs["images"].device.type, torch.bfloat16, enabled=autocast),
    ):
        outputs = model(**inputs)
    if found:
        return f"the output of {found[0]}"
    value = loss(*outputs)
    if not bool(value.isfinite()):
        return "the loss"
    torch.autograd.backward(value)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return f"the gradient of {name}"
    return ""
