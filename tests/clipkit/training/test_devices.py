"""Tests of what training asks of devices: no float64 where there is none, and no reading of a GPU by optimizers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clipkit.batch import Batch
from clipkit.config import DistillConfig, LossConfig, OptimConfig
from clipkit.model import create_architecture, towers
from clipkit.model.clip import CLIP
from clipkit.objectives.clip import Clip
from clipkit.objectives.views import Views
from clipkit.training import checkpoint, optim
from clipkit.training.ema import AveragedWeights
from clipkit.training.step import TrainingStep

Types = Sequence[type]


def make_batch(size: int) -> Batch:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (size, 3, 16, 16), dtype=torch.uint8, generator=random)
    tokens = torch.randint(2, 40, (size, 4), generator=random)
    tokens[:, 0], tokens[:, -1] = 48, 49
    ids = torch.arange(size)
    identities = torch.stack([ids, tokens[:, 1]], dim=1)
    return Batch(
        images=images, tokens=tokens, lengths=(4,) * size, ids=ids, identities=identities, first_row=3
    )


class Float64(TorchDispatchMode):
    """Lists operations with a float64 result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Types, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(leaf.dtype == torch.float64 for leaf in leaves):
            self.operations.append(str(func))
        return result


def test_step_with_all_terms_needs_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(towers, "_WITHOUT_FLOAT64", {"cpu"})
    shape = create_architecture("ViT-Ti-4-16")
    model = CLIP(shape).initialize()
    step = TrainingStep(
        shape=shape,
        objective=Clip(),
        loss=LossConfig(same="positives"),
        distill=DistillConfig(),
        teacher=None,
        patch_dropout=0.0,
        seed=0,
        accumulate=1,
        bf16=False,
        averaged=AveragedWeights(model, 0.9),
        terms={"views": Views(weight=1.0, count=2)},
    )
    with Float64() as found:
        features = step.gradients(model, make_batch(5), 0)
        step.figures(make_batch(5), features)
    assert found.operations == []


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a fake GPU; every number that is read is 1."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Types, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += args[0].device.type == "cuda"
            return 1.0
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cuda":
            self.count += result.device.type == "cpu"
        return result


def test_resumed_adafactor_reads_the_gpu_in_the_first_step_only() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            model = CLIP(create_architecture("ViT-Ti-4-16")).train()
        optimizer = optim.make_optimizer(model, OptimConfig(name="adafactor"))
        state = {}
        for name, parameter in model.named_parameters():
            parameter.grad = torch.ones_like(parameter)
            for kind, (shape, dtype) in optim.expected_state(optimizer, parameter).items():
                state[f"{name}/{kind}"] = torch.zeros(shape, dtype=dtype)
        checkpoint.restore_optimizer(model, optimizer, state, origin=Path("run"))
        counts = []
        for _ in range(2):
            with Reads() as reads:
                optimizer.step()
            counts.append(reads.count)
    assert counts[1] == 0


def test_rows_are_on_the_device_of_the_images() -> None:
    batch = make_batch(3)
    assert batch.rows.tolist() == [3, 4, 5]
    assert replace(batch, images=batch.images.to("meta")).rows.device.type == "meta"
