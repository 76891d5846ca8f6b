"""Tests of FSDP2 with two ranks: gathers in half precision change no bit, and no weights are gathered in vain."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from clipkit import distributed
from clipkit.config import Config, ModelConfig
from clipkit.model.architectures import ARCHITECTURES, PixelTower
from clipkit.model.clip import CLIP, create
from clipkit.model.measure import _to_float32
from clipkit.model.tokenizer import END_OF_TEXT
from clipkit.model.towers import ResidualAttentionBlock, fused_attention
from clipkit.objectives import TERMS
from clipkit.training.costs import Workload, communication_of, measure_step, measure_workload, memory_of
from clipkit.training.parallel import blocks, linear_parameters, shard, without_values
from tests.clipkit.fsdp_program import SHAPES
from tests.forked import Forked


@pytest.fixture(scope="module")
def gathered(forked: Forked) -> Mapping[str, tuple[int, int]]:
    """Bytes that are gathered in a step: in float32, and in half precision."""
    first, _ = forked.ranks("tests/clipkit/fsdp_program.py", world=2)
    lines = [line.split(",") for line in first.stdout.splitlines()]
    return {name: (int(former), int(found)) for name, former, found in lines}


def test_gradients_are_bit_identical_to_gathers_in_float32(gathered: Mapping[str, tuple[int, int]]) -> None:
    assert gathered.keys() == {*SHAPES, "unused"}
    assert all(found < former for name, (former, found) in gathered.items() if name != "unused")


@pytest.mark.parametrize(("name", "parts"), [("plain", 1), ("in parts", 2)])
def test_gathered_bytes_are_halved_and_equal_the_formula(
    name: str, parts: int, gathered: Mapping[str, tuple[int, int]]
) -> None:
    model = create(SHAPES[name], seed=0)
    work = Workload(model=model, config=Config(batch_size=12, accumulate=parts, sharding="full"), world=2)
    former, found = gathered[name]
    assert found / 2 == communication_of(work).weights
    in_blocks = [parameter for block in blocks(model) for parameter in linear_parameters(block)]
    others = {parameter for parameter in model.parameters() if parameter.ndim}.difference(in_blocks)
    passes = 2 if parts == 1 else 3 * parts
    assert former == 4 * passes * (padded(in_blocks) + padded(others))
    assert found == 2 * passes * padded(in_blocks) + 4 * parts * padded(others)


def padded(parameters: Collection[nn.Parameter]) -> int:
    """Return the number of values; two ranks have equally many rows."""
    return sum(math.ceil(len(parameter) / 2) * 2 * parameter[0].numel() for parameter in parameters)


def test_no_block_is_gathered_in_vain(gathered: Mapping[str, tuple[int, int]]) -> None:
    assert gathered["unused"] == (0, 0)


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """Rank 0 of 8 whose messages are not sent."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("eight_ranks")
def test_estimated_activations_are_what_autograd_saves() -> None:
    rows = 32
    whole = create("ViT-Ti-8-48", seed=0).train()
    model = without_values(whole)
    shard(model, whole.state_dict(), "full", device=torch.device("cpu"), gather_bf16=True)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_pre_hook(_to_float32)
    images = torch.zeros(rows, 3, 48, 48, dtype=torch.uint8)
    tokens = torch.ones(rows, 77, dtype=torch.int64)
    tokens[:, -1] = END_OF_TEXT
    saved: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor)
    with hooks, fused_attention(), torch.autocast("cpu", torch.bfloat16):
        features = model(images, tokens, lengths=[77] * rows)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            assert group is not None
            for parameter in group.fsdp_params:  # these are freed, and gathered again
                saved.pop(parameter._unsharded_param.untyped_storage()._cdata, None)
    work = Workload(model=whole, config=Config(batch_size=8 * rows, sharding="full"), world=8)
    costs = measure_workload(work)
    expected = sum(saved.values())
    assert features[0].requires_grad
    assert memory_of(work, costs).activations == pytest.approx(expected, rel=0.05)
    # a replicated model keeps a copy of all matrices
    replicated = memory_of(replace(work, config=Config(batch_size=8 * rows)), costs).activations
    assert replicated is not None and replicated > 1.1 * expected


@pytest.mark.usefixtures("eight_ranks")
def test_groups_of_a_mesh_have_the_timeout_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """And wait as long as rank 0 saves or scores, as the group of all ranks does."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(distributed, "_groups", [])
    timeouts: dict[dist.ProcessGroup | None, timedelta] = {}
    monkeypatch.setattr(distributed, "_set_timeout", lambda timeout, group: timeouts.update({group: timeout}))
    whole = create("ViT-Ti-4-16", seed=0)
    shard(without_values(whole), None, "hybrid", device=torch.device("cpu"))
    for change, timeout in (
        (distributed.allow_long_waits, distributed._SAVE_TIMEOUT),
        (distributed.end_long_waits, distributed._STEP_TIMEOUT),
    ):
        change()
        sizes = [8 if group is None else group.size() for group in timeouts]
        assert sorted(sizes) == [2, 4, 8] and set(timeouts.values()) == {timeout}


@pytest.mark.parametrize("feed", ["tokens", "text", "shared"])
@pytest.mark.parametrize("name", TERMS)
def test_terms_that_compute_blocks_again_say_so(
    name: str, feed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise gradients in half precision would be added."""
    if name != "caption" and feed != "tokens":
        return
    settings: dict[str, Any] = {"weight": 1.0}
    if name == "caption":
        settings["feed"] = feed
    term = TERMS[name](**settings)
    shape = ARCHITECTURES["ViT-Ti-4-16"]
    if name == "image_gpt":
        shape = replace(
            shape, vision=PixelTower(image_size=8, width=16, layers=2, heads=2, colors=8, causal=True)
        )
    with torch.device("meta"):
        model = CLIP(replace(shape, **term.heads(shape, ModelConfig(name="ViT-Ti-4-16"))))
    calls: Counter[int] = Counter()
    forward = ResidualAttentionBlock.forward

    def count_call(block: ResidualAttentionBlock, *arguments: Any, **options: Any) -> Any:
        calls[id(block)] += torch.is_grad_enabled()
        return forward(block, *arguments, **options)

    monkeypatch.setattr(ResidualAttentionBlock, "forward", count_call)
    measure_step(Workload(model=model, terms={name: term}), 2)
    assert (max(calls.values()) > 1) == term.encodes_again
