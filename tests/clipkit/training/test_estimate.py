"""Tests of cost estimates, against the tensors that autograd and optimizers keep."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from clipkit.config import Config, OptimConfig
from clipkit.model import ARCHITECTURES, Architecture, OpenClipVision
from clipkit.model.clip import CLIP, create
from clipkit.training.costs import (
    Memory,
    StepCosts,
    Workload,
    communication_of,
    estimate,
    flops_of_steps,
    measure_step,
    measure_workload,
    memory_of,
)
from clipkit.training.parallel import blocks, linear_parameters, recompute_function

SMALL = "ViT-Ti-8-48"
STEP_MEMORY = Path(__file__).parents[3] / "bench" / "results" / "step_memory.json"


def meta(shape: Architecture) -> CLIP:
    with torch.device("meta"):
        return CLIP(shape)


@pytest.fixture(scope="module")
def model() -> CLIP:
    return create(SMALL, seed=0).train()


def with_settings(work: Workload, **settings: Any) -> Workload:
    return replace(work, config=replace(work.config, **settings))


def memory(work: Workload) -> Memory:
    return memory_of(work, measure_workload(work))


def measured(model: CLIP, *, bf16: bool = False, recompute: int = 0) -> StepCosts:
    return measure_step(Workload(model=model, config=Config(recompute=recompute), bf16=bf16), 16)


def activations(model: CLIP, **settings: Any) -> int:
    return measured(model, **settings).bytes.activations


def test_recomputed_blocks_keep_only_their_inputs() -> None:
    shape = ARCHITECTURES[SMALL]
    vision, _ = shape.get_plain_towers()
    deep, deeper = (meta(replace(shape, vision=replace(vision, layers=layers))) for layers in (8, 9))
    assert activations(deep, recompute=1) < activations(deep)
    more = activations(deeper, recompute=1) - activations(deep, recompute=1)
    assert more == 16 * 37 * 192 * 4
    # in bfloat16 too: the stream between the blocks is float32, as under autocast on GPUs
    assert activations(deeper, recompute=1, bf16=True) - activations(deep, recompute=1, bf16=True) == more


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_recomputed_blocks_are_measured_as_with_torch(
    every: int, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = meta(ARCHITECTURES[SMALL])
    plain, recomputed = (measured(model, bf16=bf16, recompute=recompute) for recompute in (0, every))
    monkeypatch.setattr("clipkit.training.costs.recompute_function", recompute_function)
    assert recomputed == measured(model, bf16=bf16, recompute=every)
    # what is computed again does not count
    assert recomputed.flops == plain.flops and recomputed.bytes.activations < plain.bytes.activations


def test_frozen_blocks_keep_no_activations() -> None:
    model = meta(ARCHITECTURES[SMALL])
    sizes = [activations(model)]
    for depth in range(4):
        for name, parameter in model.visual.named_parameters():
            if not name.startswith("transformer.resblocks.") or f"resblocks.{depth}." in name:
                parameter.requires_grad_(name in ("proj", "ln_post.weight"))
        sizes.append(activations(model))
    assert all(before > after for before, after in pairwise(sizes[:4]))
    assert sizes[4] == sizes[3]  # the peak is that of the texts now, which are encoded first


def test_a_new_tower_or_term_needs_no_cost_method() -> None:
    """The bytes of half precision: blocks keep less, and copies of the weights are told apart."""
    model = meta(ARCHITECTURES[SMALL])
    full, half = (measured(model, bf16=bf16) for bf16 in (False, True))
    matrices = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and "resblocks" in name
    )
    assert full.flops == half.flops and full.bytes.weight_copies == 0
    assert 2 * matrices <= half.bytes.weight_copies < 2.5 * matrices
    assert half.bytes.activations < 0.8 * full.bytes.activations


@pytest.mark.parametrize("name", ["adamw", "lamb", "stable_adamw"])
def test_memory_equals_that_of_torch_adamw(model: CLIP, name: str) -> None:
    copy = create(SMALL, seed=0)
    optimizer = torch.optim.AdamW(copy.parameters())
    for parameter in copy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    work = Workload(model=copy, config=Config(batch_size=16, optim=OptimConfig(name=name)), bf16=False)
    usage = memory(work)
    numbers = sum(parameter.numel() for parameter in copy.parameters())
    held = sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if value.numel() > 1
    )
    assert usage.weights == usage.gradients == 4 * numbers
    assert usage.optimizer == pytest.approx(held, rel=1e-3)
    assert usage.average == 0
    assert memory(with_settings(work, optim=OptimConfig(average=0.9))).average == 4 * numbers
    assert memory(with_settings(work, optim=OptimConfig(name="muon"))).optimizer < usage.optimizer
    assert memory(with_settings(work, optim=OptimConfig(name="lion"))).optimizer == 4 * numbers


def test_communication_of_gradients_features_and_weights(model: CLIP) -> None:
    work = Workload(model=model, config=Config(batch_size=64), world=4)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    traffic = communication_of(work)
    assert (traffic.weights, traffic.gradients) == (0, round(2 * size * 3 / 4))
    assert traffic.features == 3 / 4 * 4 * (2 * 64 * model.architecture.embed_dim + 4 * 64)
    assert communication_of(replace(work, world=1)).total == 0
    full = with_settings(work, sharding="full")
    sharded = communication_of(full)
    assert sharded.gradients == pytest.approx(
        traffic.gradients / 2, rel=0.05
    )  # an all-reduce is two messages
    assert sharded.weights > 0.9 * sharded.gradients  # gathered twice in half precision
    assert communication_of(with_settings(full, reshard=False)).weights < sharded.weights
    assert communication_of(replace(with_settings(work, sharding="hybrid"), shard_ranks=4)) == sharded
    matrices = 4 * sum(
        p.numel() for name, p in model.named_parameters() if p.ndim == 2 and ".resblocks." in f".{name}"
    )
    divided = communication_of(with_settings(full, optim=OptimConfig(name="muon")))
    assert divided.weights == sharded.weights
    # directions, and updates of 7 matrices of each shape, which are padded to 8; both in half precision
    layers = sum(len(transformer.blocks) for transformer in model.transformers.values())
    assert layers == 7
    assert divided.gradients - sharded.gradients == 3 / 4 * matrices / 2 * (1 + 8 / 7)
    in_float32 = communication_of(replace(full, bf16=False)).weights - sharded.weights
    assert 3 / 4 * matrices < in_float32 < 1.01 * 3 / 4 * matrices
    model.visual.requires_grad_(False)
    assert communication_of(work).gradients < traffic.gradients
    model.visual.requires_grad_(True)


def test_frozen_tower_has_no_gradients_state_or_activations() -> None:
    locked = create(SMALL, seed=0)
    work = Workload(model=locked, config=Config(batch_size=64), steps=10)
    whole = estimate(work, 1e12)
    locked.visual.requires_grad_(False)
    frozen = estimate(work, 1e12)
    image = frozen.parameters["image"]
    assert frozen.trained == whole.trained - image
    assert whole.memory.gradients - frozen.memory.gradients == 4 * image
    assert whole.memory.optimizer - frozen.memory.optimizer == pytest.approx(8 * image, rel=1e-3)
    assert frozen.memory.activations is not None and whole.memory.activations is not None
    assert frozen.memory.activations < whole.memory.activations
    assert frozen.hours is not None and whole.hours is not None and frozen.hours < whole.hours


def test_sharding_divides_weights_gradients_and_state() -> None:
    model = meta(ARCHITECTURES["ViT-L-14"])
    work = Workload(model=model, config=Config(batch_size=4096), world=64)
    sharded = with_settings(work, sharding="full")
    plain, full = memory(work), memory(sharded)
    hybrid = memory(replace(with_settings(work, sharding="hybrid"), shard_ranks=8))
    assert full.optimizer == pytest.approx(plain.optimizer / 64, rel=1e-3)
    assert hybrid.gradients == pytest.approx(plain.gradients / 8, rel=1e-3)
    assert full.weights < hybrid.weights < plain.weights
    # blocks are gathered in bfloat16, so autocast makes no copies of them
    assert plain.activations is not None and full.activations is not None
    matrices = sum(p.numel() for block in blocks(model) for p in linear_parameters(block))
    assert plain.activations - full.activations == pytest.approx(2 * matrices, rel=1e-4)
    assert memory(with_settings(sharded, reshard=False)).weights > full.weights + 2 * 0.9 * matrices


def test_loss_memory_is_linear_in_the_batch_size() -> None:
    model = meta(ARCHITECTURES["ViT-B-32"])
    small, large = (
        memory_of(Workload(model=model, config=Config(batch_size=size), world=8), None).loss
        for size in (32_768, 1_048_576)
    )
    assert 2 < large / small <= 32


def test_accumulation_divides_activations_and_hours_depend_on_the_peak() -> None:
    model = meta(ARCHITECTURES["ViT-L-14"])
    work = Workload(model=model, config=Config(batch_size=1024), steps=1000)
    single, four = estimate(work, 125e12), estimate(with_settings(work, accumulate=4), 250e12)
    assert single.memory.activations is not None and four.memory.activations is not None
    assert single.memory.activations == pytest.approx(4 * four.memory.activations, rel=0.02)
    assert single.hours is not None and four.hours == pytest.approx(single.hours / 2)
    count = flops_of_steps(work)
    assert count is not None and single.step_flops == count([77] * 1024, 224, [])
    assert single.hours == pytest.approx(1000 * single.step_flops / 125e12 / 3600)
    two = estimate(replace(work, world=2), 125e12)
    assert two.hours == pytest.approx(single.hours / 2, rel=1e-3)


def test_library_tower_is_measured_unless_it_reads_values() -> None:
    vision = OpenClipVision(
        image_size=16, config={"layers": 1, "width": 64, "head_width": 32, "patch_size": 8}
    )
    model = create(replace(ARCHITECTURES["ViT-Ti-4-16"], vision=vision), seed=0)
    work = Workload(model=model, config=Config(batch_size=8))
    known = estimate(work, 1e12)
    assert known.step_flops is not None and known.hours is not None and known.memory.activations is not None
    model.visual.register_forward_pre_hook(lambda module, inputs: inputs[0].sum().item())
    unknown = estimate(work, 1e12)
    assert unknown.step_flops is None and unknown.hours is None and unknown.image_flops is None
    assert unknown.memory.activations is None and unknown.memory.weights == known.memory.weights


def test_flops_of_a_step_are_the_sum_over_its_captions(model: CLIP) -> None:
    work = Workload(model=model, config=Config(batch_size=2))
    count = flops_of_steps(work)
    assert count is not None
    single = {length: measure_step(work, 2, length=length).flops / 2 for length in (3, 30, 77)}
    loss = 3 * 2 * 3 * 2 * model.architecture.embed_dim
    assert count([3, 30, 77], 48, []) == sum(single.values()) + loss


@pytest.mark.parametrize(
    "row",
    json.loads(STEP_MEMORY.read_text())["cpu"],
    ids=lambda row: f"{row['model']} {row['recompute']} {row['accumulate']}",
)
def test_estimate_is_near_the_measured_memory(row: dict[str, Any]) -> None:
    config = Config(batch_size=row["rows"], accumulate=row["accumulate"], recompute=row["recompute"])
    work = Workload(model=meta(ARCHITECTURES[row["model"]]), config=config, bf16=False)
    assert memory(work).total == pytest.approx(row["clipkit_77"], rel=0.03)
