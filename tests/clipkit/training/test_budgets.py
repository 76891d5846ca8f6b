"""Budgets of a training step: its operations, each a launch on a GPU, and the bytes that they read and write.

Nothing is computed. A change that needs more must be worth it: raise the budget, and say why.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clipkit.batch import Batch
from clipkit.config import LossConfig, OptimConfig
from clipkit.model import create_architecture
from clipkit.model.clip import CLIP
from clipkit.model.measure import _to_float32
from clipkit.model.towers import fused_attention
from clipkit.objectives.clip import Clip
from clipkit.training import optim, parallel
from clipkit.training.step import TrainingStep


class Operations(TorchDispatchMode):
    """Counts operations that compute something, and the bytes of their arguments and results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__
        if func.namespace == "aten" and not func.is_view and "view" not in name and "empty" not in name:
            leaves = tree_leaves((args, kwargs, result))
            tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
            self.count += 1
            self.bytes += sum(tensor.nbytes for tensor in tensors.values())
        return result


def equal_captions(shape: Any, rows: int) -> Batch:
    """Pairs whose captions have one length: attention is one operation, as that of packed captions on a GPU."""
    size = shape.vision.image_size
    ids = torch.arange(rows)
    return Batch(
        images=torch.zeros(rows, 3, size, size, dtype=torch.uint8),
        tokens=torch.ones(rows, 16, dtype=torch.int64),
        lengths=(16,) * rows,
        ids=ids,
        identities=torch.stack([ids, ids], dim=1),
    )


def test_forward_loss_and_backward() -> None:
    shape = create_architecture("ViT-Ti-4-16")
    step = TrainingStep(shape=shape, objective=Clip(), loss=LossConfig(), bf16=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = CLIP(shape).train()
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.register_forward_pre_hook(_to_float32)
        batch = equal_captions(shape, 32)
        with fused_attention(), Operations() as operations:
            step.gradients(model, batch, 0)
            parallel.clip_gradients(model, 1.0)
    assert operations.count <= 635 and operations.bytes <= 273e6


@pytest.mark.parametrize(
    ("name", "gated", "count", "bytes_per_number"),
    [("adamw", True, 6, 17), ("lion", True, 61, 69), ("muon", False, 178, 88), ("muon", True, 191, 113)],
)
def test_update_of_vit_b_32(name: str, gated: bool, count: int, bytes_per_number: float) -> None:
    """Gated updates change nothing if ``found_inf`` is set, as in training on a GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            model = CLIP(create_architecture("ViT-B-32"))
            found_inf = torch.zeros(())
        optimizer = optim.make_optimizer(model, OptimConfig(name=name))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # makes the state
        if gated:
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        with Operations() as operations:
            optimizer.step()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert operations.count <= count and operations.bytes / numbers <= bytes_per_number
