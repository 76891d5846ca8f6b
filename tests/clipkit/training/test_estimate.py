"""Tests of cost estimates, against the tensors that autograd and optimizers keep."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from clipkit.model import ARCHITECTURES, OpenClipVision
from clipkit.model.clip import CLIP, create
from clipkit.model.flops import step_flops
from clipkit.training.costs import Workload, communication_of, estimate, memory_of

TOLERANCE = 0.1
SMALL = "ViT-Ti-8-48"


def kept(model: CLIP, compute: Callable[[], Tensor]) -> int:
    """Bytes of tensors that autograd saves, without weights and their copies; shared memory counts once."""
    weights = {parameter.shape for parameter in model.parameters() if parameter.ndim > 1}
    weights |= {torch.Size((*shape[::-1],)) for shape in weights}
    memory: dict[int, int] = {}
    alive: list[Tensor] = []  # keeps addresses from being reused

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.shape not in weights:
            storage = tensor.untyped_storage()
            memory[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for address, size in memory.items() if address not in own)


@pytest.fixture(scope="module")
def model() -> CLIP:
    return create(SMALL, seed=0).train()


def test_image_activations_equal_saved_tensors(model: CLIP) -> None:
    vision, _ = model.architecture.own_towers()
    images = torch.randint(0, 256, (8, 3, 48, 48), dtype=torch.uint8)
    found = kept(model, lambda: model.visual(images.float() / 255))
    assert 8 * vision.activation_bytes(36, bf16=False) == pytest.approx(found, rel=TOLERANCE)


@pytest.mark.parametrize("bf16", [False, True])
def test_text_activations_equal_saved_tensors(model: CLIP, bf16: bool) -> None:
    _, text = model.architecture.own_towers()
    tokens = torch.zeros(48, 20, dtype=torch.int64)  # enough that autocast's weight copies do not matter
    tokens[:, -1] = 1

    def compute() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return model.encode_text(tokens)

    assert 48 * text.activation_bytes(20, bf16=bf16) == pytest.approx(kept(model, compute), rel=TOLERANCE)


def test_recomputed_blocks_keep_only_their_inputs(model: CLIP) -> None:
    vision, _ = model.architecture.own_towers()
    whole, recomputed = (vision.activation_bytes(36, bf16=True, recompute=flag) for flag in (False, True))
    assert recomputed < whole
    deep = replace(vision, layers=24)
    one_more = replace(vision, layers=25)
    more = one_more.activation_bytes(36, bf16=True, recompute=True)
    assert more - deep.activation_bytes(36, bf16=True, recompute=True) == 37 * 192 * 4


def test_frozen_blocks_keep_no_activations(model: CLIP) -> None:
    vision, _ = model.architecture.own_towers()
    sizes = [vision.activation_bytes(36, blocks=blocks, bf16=True) for blocks in (1, 2, 3, 4)]
    assert all(a < b for a, b in pairwise(sizes))
    assert sizes[-1] < vision.activation_bytes(36, bf16=True)


@pytest.mark.parametrize("name", ["adamw", "lamb", "stable_adamw"])
def test_memory_equals_that_of_torch_adamw(model: CLIP, name: str) -> None:
    copy = create(SMALL, seed=0)
    optimizer = torch.optim.AdamW(copy.parameters())
    for parameter in copy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    work = Workload(model=copy, batch_size=16, steps=1, bf16=False, optimizer=name)
    found = memory_of(work)
    numbers = sum(parameter.numel() for parameter in copy.parameters())
    held = sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if value.numel() > 1
    )
    assert found.weights == found.gradients == 4 * numbers
    assert found.optimizer == pytest.approx(held, rel=1e-3)
    assert found.average == 0
    assert memory_of(replace(work, average=True)).average == 4 * numbers
    assert memory_of(replace(work, optimizer="muon")).optimizer < found.optimizer


def test_communication_of_gradients_features_and_weights(model: CLIP) -> None:
    work = Workload(model=model, batch_size=64, steps=1, world=4)
    size = 4 * sum(one.numel() for one in model.parameters())
    found = communication_of(work)
    assert (found.weights, found.gradients) == (0, round(2 * size * 3 / 4))
    assert found.features == 3 / 4 * 4 * (2 * 64 * model.architecture.embed_dim + 4 * 64)
    assert communication_of(replace(work, world=1)).total == 0
    sharded = communication_of(replace(work, sharding="full"))
    assert sharded.gradients == pytest.approx(found.gradients / 2, rel=0.05)  # an all-reduce is two messages
    assert sharded.weights > sharded.gradients
    assert communication_of(replace(work, sharding="full", reshard=False)).weights < sharded.weights
    assert communication_of(replace(work, sharding="hybrid", shard_ranks=4)) == sharded
    matrices = 4 * sum(
        p.numel() for name, p in model.named_parameters() if p.ndim == 2 and ".resblocks." in f".{name}"
    )
    gathered = communication_of(replace(work, sharding="full", optimizer="muon"))
    assert gathered.weights - sharded.weights == 3 / 4 * matrices
    model.visual.requires_grad_(False)
    assert communication_of(work).gradients < found.gradients
    model.visual.requires_grad_(True)


def test_frozen_tower_has_no_gradients_state_or_activations() -> None:
    locked = create(SMALL, seed=0)
    work = Workload(model=locked, batch_size=64, steps=10)
    whole = estimate(work, 1e12)
    locked.visual.requires_grad_(False)
    found = estimate(work, 1e12)
    image = found.parameters["image"]
    assert found.trained == whole.trained - image
    assert whole.memory.gradients - found.memory.gradients == 4 * image
    assert whole.memory.optimizer - found.memory.optimizer == 8 * image
    assert found.memory.activations is not None and whole.memory.activations is not None
    assert found.memory.activations < whole.memory.activations
    assert found.hours is not None and whole.hours is not None and found.hours < whole.hours


def meta(name: str) -> CLIP:
    with torch.device("meta"):
        return CLIP(ARCHITECTURES[name])


def test_sharding_divides_weights_gradients_and_state() -> None:
    model = meta("ViT-H-14")
    work = Workload(model=model, batch_size=4096, steps=1, world=64)
    plain = memory_of(work)
    full = memory_of(replace(work, sharding="full"))
    hybrid = memory_of(replace(work, sharding="hybrid", shard_ranks=8))
    assert full.optimizer == pytest.approx(plain.optimizer / 64, rel=1e-3)
    assert hybrid.gradients == pytest.approx(plain.gradients / 8, rel=1e-3)
    assert full.weights < hybrid.weights < plain.weights
    assert full.activations == plain.activations


def test_loss_memory_is_linear_in_the_batch_size() -> None:
    model = meta("ViT-B-32")
    small, large = (
        memory_of(Workload(model=model, batch_size=size, steps=1, world=8)).loss
        for size in (32_768, 1_048_576)
    )
    assert 2 < large / small <= 32


def test_accumulation_divides_activations_and_hours_depend_on_the_peak() -> None:
    model = meta("ViT-L-14")
    work = Workload(model=model, batch_size=1024, steps=1000)
    one, four = estimate(work, 125e12), estimate(replace(work, parts=4), 250e12)
    assert one.memory.activations is not None and four.memory.activations is not None
    assert one.memory.activations == 4 * four.memory.activations
    assert one.hours is not None and four.hours == pytest.approx(one.hours / 2)
    flops = step_flops(model.architecture, rows=1024, lengths={77: 1024}, text_rows=1024)
    assert one.step_flops == flops
    assert one.hours == pytest.approx(1000 * flops / 125e12 / 3600)
    two = estimate(replace(work, world=2), 125e12)
    assert two.hours == pytest.approx(one.hours / 2, rel=1e-3)


def test_library_tower_has_counted_flops_but_no_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    vision = OpenClipVision(
        image_size=16, config={"layers": 1, "width": 64, "head_width": 32, "patch_size": 8}
    )
    model = create(replace(ARCHITECTURES["ViT-Ti-4-16"], vision=vision), seed=0)
    work = Workload(model=model, batch_size=8, steps=1)
    known = estimate(work, 1e12)
    assert known.step_flops is not None and known.hours is not None and known.memory.activations is None
    monkeypatch.setattr("clipkit.training.costs.counted_flops", lambda model: None)
    unknown = estimate(work, 1e12)
    assert unknown.step_flops is None and unknown.hours is None and unknown.image_flops is None
