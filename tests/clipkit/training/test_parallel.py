"""Tests of gradient clipping, parameter placement and gathering for DDP and FSDP, with one rank.

test_distributed.py, test_sharded.py and tests/test_train_sharded.py cover several ranks.
"""

import gc
import math
import weakref
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from clipkit.errors import ConfigError
from clipkit.model.architectures import Architecture, TextTower, VisionTower
from clipkit.model.clip import CLIP, create
from clipkit.training import parallel
from clipkit.training.parallel import (
    clip_gradients,
    complete_gradients,
    gathered,
    local_gradients,
    put,
    replicated,
    scalars,
    shard,
    without_values,
)

SHAPE = Architecture(
    embed_dim=8,
    vision=VisionTower(image_size=8, patch_size=8, width=8, layers=1, heads=2),
    text=TextTower(width=8, layers=1, heads=2, context_length=4, vocab_size=11),
    logit_bias=True,
)
CPU = torch.device("cpu")


@pytest.fixture
def model() -> CLIP:
    made = create(SHAPE, seed=0)
    random = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=random)
    return made


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def many_ranks() -> Iterator[None]:
    """Rank 0 of 64 whose messages are not sent."""
    dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    yield
    dist.destroy_process_group()


def spread(model: CLIP, mesh: DeviceMesh) -> CLIP:
    """Shard parameters and gradients as FSDP2 does: all but the scalars."""
    made, found = deepcopy(model), gradients(model)
    for module in made.modules():
        for name, own in list(module.named_parameters(recurse=False)):
            if own.ndim:
                module.register_parameter(
                    name, nn.Parameter(distribute_tensor(own.detach(), mesh, [Shard(0)]))
                )
    for name, parameter in made.named_parameters():
        grad = found[name]
        parameter.grad = distribute_tensor(grad, mesh, [Shard(0)]) if grad.ndim else grad
    return made


def gradients(model: CLIP) -> dict[str, Tensor]:
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
        for name, grad in found.items()
    }


def norm_of(found: dict[str, Tensor]) -> float:
    return float(torch.cat([one.flatten().double() for one in found.values()]).norm())


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(limit=st.floats(0, 200), size=st.floats(1e-3, 1e3))
def test_gradient_is_clipped_by_global_norm(limit: float, size: float, model: CLIP) -> None:
    clipped = deepcopy(model)
    for own, other in zip(clipped.parameters(), model.parameters(), strict=True):
        assert other.grad is not None
        own.grad = other.grad * size
    before = gradients(clipped)
    norm = clip_gradients(clipped, limit).item()
    assert norm == pytest.approx(norm_of(before), rel=1e-5)
    after = gradients(clipped)
    factor = min(1.0, limit / norm) if limit else 1.0
    for name, one in before.items():
        torch.testing.assert_close(after[name], one * factor, rtol=1e-4, atol=1e-6 * size)


def test_parameters_without_gradient_are_ignored(model: CLIP) -> None:
    model.logit_scale.grad = model.visual.conv1.weight.grad = None  # type: ignore[union-attr]
    norm = clip_gradients(model, 1.0).item()
    assert norm > 1 and norm_of(gradients(model)) == pytest.approx(1, rel=1e-4)
    assert model.logit_scale.grad is None


def test_sharded_and_plain_gradients_are_clipped_equally(model: CLIP, mesh: DeviceMesh) -> None:
    parts = spread(model, mesh)
    for limit in (0.0, 100.0, 0.5):
        assert clip_gradients(parts, limit).item() == pytest.approx(
            clip_gradients(model, limit).item(), rel=1e-5
        )
        found, wanted = gradients(parts), gradients(model)
        assert found.keys() == wanted.keys()
        for name, one in wanted.items():
            torch.testing.assert_close(found[name], one)


def test_put_copies_into_sharded_and_plain_tensors(model: CLIP, mesh: DeviceMesh) -> None:
    parts, other = spread(model, mesh), create(SHAPE, seed=5).state_dict()
    for target in (parts, model):
        for name, own in target.state_dict().items():
            put(own, other[name])
        for name, own in target.state_dict().items():
            whole = own.full_tensor() if isinstance(own, DTensor) else own
            assert torch.equal(whole, other[name]), name


class Watched(Tensor):
    """Records the shapes of tensors that are copied or moved."""

    shapes: ClassVar[list[torch.Size]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.to, Tensor.copy_, Tensor.clone):
            cls.shapes += [value.shape for value in args if isinstance(value, Watched)]
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("many_ranks")
@pytest.mark.parametrize("rows", [64, 130, 192])
def test_only_rows_of_this_rank_are_read(rows: int) -> None:
    """A file that is mapped into memory is read where it is copied."""
    mesh = init_device_mesh("cpu", (64,))
    value = torch.randn(rows, 3)
    target = distribute_tensor(torch.zeros(rows, 3), mesh, [Shard(0)], src_data_rank=None)
    Watched.shapes.clear()
    watched = value.as_subclass(Watched)
    put(target, watched)
    assert isinstance(target, DTensor)
    expected = value[: math.ceil(rows / 64)]
    assert torch.equal(target.to_local(), expected)
    assert set(Watched.shapes) == {expected.shape}


def test_model_without_values_keeps_architecture_and_flags(model: CLIP) -> None:
    model.visual.requires_grad_(False)
    empty = without_values(model.eval())
    assert empty.training and {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    assert empty.architecture == model.architecture
    assert [(name, one.shape, one.requires_grad) for name, one in empty.named_parameters()] == [
        (name, one.shape, one.requires_grad) for name, one in model.named_parameters()
    ]


def test_single_rank_needs_no_wrapper(model: CLIP) -> None:
    before = gradients(model)
    assert replicated(model) is model
    with gathered(model), local_gradients(model, last=False):
        complete_gradients(model)
    assert all(torch.equal(gradient, before[name]) for name, gradient in gradients(model).items())
    assert scalars(model) == [model.logit_scale, model.logit_bias]


@pytest.mark.usefixtures("many_ranks")
def test_replaced_module_is_freed_before_another_is_made(model: CLIP) -> None:
    gc.disable()
    try:
        modules = []
        for _ in range(3):
            trained = replicated(model)
            modules.append(weakref.ref(trained))
            assert all(parameter.grad is None for parameter in model.parameters())
            assert [former() is None for former in modules[:-1]] == [True] * (len(modules) - 1)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            del trained
    finally:
        gc.enable()


@pytest.mark.usefixtures("many_ranks")
def test_buckets_are_larger_for_many_ranks(model: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for ranks in (parallel._LARGE_WORLD - 1, parallel._LARGE_WORLD):
        monkeypatch.setattr(parallel, "world_size", lambda ranks=ranks: ranks)
        trained = replicated(model)
        assert isinstance(trained, DistributedDataParallel)
        sizes.append(trained.bucket_bytes_cap >> 20)
    assert sizes == [25, 100]


def test_sharding_with_one_process_raises_one_line_error(model: CLIP) -> None:
    with pytest.raises(
        ConfigError, match="sharding = 'full' requires several processes: start with torchrun"
    ):
        shard(without_values(model), model.state_dict(), "full", device=CPU)
