"""Tests of what protects a run: skipped updates, values that are not finite, weights that differ between ranks."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from clipkit.config import Config
from clipkit.errors import DataError
from clipkit.model.clip import CLIP
from clipkit.objectives.clip import clip_loss
from clipkit.training import guards
from clipkit.training.guards import (
    Decisions,
    Outcome,
    diagnose_failed_step,
    find_not_finite,
    find_odd_ranks,
    list_not_finite,
    sum_bits,
)
from clipkit.training.step import Features, backward

TOKENS = torch.tensor([[1, 2, 49407], [3, 4, 49407], [5, 6, 49407], [7, 8, 49407]])
NAMES = [("a.tar", "0001"), ("b.tar", 'an "odd" näme\n')]


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4, 3, 32, 32), generator=random, dtype=torch.uint8)
    tokens = torch.randint(1, 99, (4, 9), generator=random)
    tokens[:, 8] = 49407
    return {"images": images, "tokens": tokens}


def compute(model: CLIP, inputs: dict[str, Tensor], parts: int = 1) -> Features:
    return backward(model, inputs, loss=clip_loss, parts=parts, autocast=False)


def test_finite_step_finds_nothing(tiny: CLIP, inputs: dict[str, Tensor]) -> None:
    before = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    finding = find_not_finite(tiny, lambda: compute(tiny, inputs))
    assert (finding.where, finding.rows) == ("", []) and finding.loss > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny.state_dict().items())
    assert not any(module._forward_hooks for module in tiny.modules())


@pytest.mark.parametrize("captions", [1, 2, 3])
def test_rows_have_several_captions_or_none(captions: int, tiny: CLIP) -> None:
    features = compute(tiny, {"images": torch.zeros(4, 3, 32, 32, dtype=torch.uint8), "tokens": TOKENS})
    texts = features.texts.repeat(captions, 1)
    texts[4 * (captions - 1) + 2, 0] = torch.nan
    finding = find_not_finite(tiny, lambda: replace(features, texts=texts))
    assert finding.rows == [2]
    finding = find_not_finite(tiny, lambda: replace(features, texts=texts), has_captions=False)
    assert finding.rows == []


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("weight", "value", "where"),
    [
        ("visual.conv1.weight", torch.nan, "the weight visual.conv1.weight"),
        ("logit_scale", torch.inf, "the weight logit_scale"),
        (
            "visual.transformer.resblocks.1.mlp.c_fc.weight",
            3e38,
            "the output of visual.transformer.resblocks.1",
        ),
        ("visual.conv1.weight", 3e38, "the output of visual.ln_pre"),
    ],
)
def test_first_nonfinite_tensor_is_reported(
    parts: int, weight: str, value: float, where: str, tiny: CLIP, inputs: dict[str, Tensor]
) -> None:
    tiny.state_dict()[weight].fill_(value)
    finding = find_not_finite(tiny, lambda: compute(tiny, inputs, parts))
    assert finding.where.startswith(where), finding.where
    assert not any(module._forward_hooks for module in tiny.modules())


def test_nonfinite_rows_are_reported(tiny: CLIP, inputs: dict[str, Tensor]) -> None:
    inputs["tokens"][2, 3] = 77
    tiny.state_dict()["token_embedding.weight"][77] = 3e38  # a word that one text has
    finding = find_not_finite(tiny, lambda: compute(tiny, inputs))
    assert finding.rows == [2] and "transformer" in finding.where


def test_nonfinite_gradient_is_found(tiny: CLIP, inputs: dict[str, Tensor]) -> None:
    def spoilt() -> Features:
        features = compute(tiny, inputs)
        assert tiny.text_projection.grad is not None
        tiny.text_projection.grad[0, 0] = torch.nan
        return features

    assert find_not_finite(tiny, spoilt).where == "the gradient of text_projection"


def test_samples_are_listed_by_rank_and_replaced(tmp_path: Path) -> None:
    list_not_finite(tmp_path, NAMES, step=4, rank=0)
    list_not_finite(tmp_path, NAMES[1:], step=4, rank=3)
    list_not_finite(tmp_path, NAMES, step=7, rank=0)
    records = [json.loads(line) for line in (tmp_path / "not_finite.jsonl").read_text().splitlines()]
    assert records == [{"step": 8, "shard": shard, "key": key} for shard, key in NAMES]
    assert len((tmp_path / "not_finite-3.jsonl").read_text().splitlines()) == 1


def test_unwritable_list_raises_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "not_finite.jsonl").mkdir()
    with pytest.raises(DataError, match=r"not_finite.jsonl cannot be written: Is a directory"):
        list_not_finite(tmp_path, NAMES, step=4, rank=0)


def test_message_reports_the_nonfinite_value(tmp_path: Path) -> None:
    config = Config(out=str(tmp_path), accumulate=3)

    def message(loss: float, norm: float) -> str:
        outcome = Outcome(
            totals={"faults": 0}, loss=loss, norm=norm, is_finite=False, is_spike=False, usual_norm=1.0,
            ids=torch.arange(2),
        )  # fmt: skip
        return str(
            diagnose_failed_step(config, outcome, "", step=4, names=lambda ids: [NAMES[i] for i in ids])
        )

    assert message(torch.nan, 1.0).startswith("the loss of step 5 is nan; step 4 is saved")
    assert message(torch.nan, torch.nan).startswith("the loss of step 5 is nan")
    assert message(2.5, torch.inf).startswith("the gradient of step 5 is inf")
    assert "\n" not in message(torch.nan, 1.0)
    assert "the same command with --replay accumulate=3, in one process, " in message(torch.nan, 1.0)
    assert len((tmp_path / "not_finite.jsonl").read_text().splitlines()) == len(NAMES)


CPU = torch.device("cpu")
IDS = torch.arange(2)
norms = st.just(0.0) | st.floats(1e-30, 1e6)  # not so small that rounding matters


def decide(losses: list[float], values: list[float], factor: float) -> list[bool]:
    """Return which steps are skipped in a training with these losses and gradient norms."""
    deciding = Decisions(0.0, 0, device=CPU, factor=factor)
    return [
        bool(deciding.skip_update(torch.tensor(loss), torch.tensor(norm)))
        for loss, norm in zip(losses, values, strict=True)
    ]


def skipped(values: list[float], factor: float) -> list[int]:
    return [step for step, skip in enumerate(decide([1.0] * len(values), values, factor)) if skip]


@given(st.lists(norms, max_size=60))
def test_no_step_is_skipped_by_default(values: list[float]) -> None:
    assert skipped(values, 0) == []


@given(st.lists(norms, max_size=20))
def test_first_updates_are_never_skipped(values: list[float]) -> None:
    assert skipped(values, 1.01) == []


def test_spike_is_skipped_and_the_next_step_is_not() -> None:
    assert skipped([1.0] * 30 + [100.0] + [1.0] * 30, 3) == [30]
    assert skipped([1.0] * 30 + [2.9] + [1.0] * 30, 3) == []
    assert skipped([1.0] * 30 + [100.0, 100.0] + [1.0] * 30, 3) == [30, 31]


@settings(max_examples=20)  # of 950 steps each
@given(st.floats(1.5, 10), st.floats(2, 1e3))
def test_permanently_higher_norms_become_usual(factor: float, rise: float) -> None:
    left_out = skipped([1.0] * 50 + [rise] * 900, factor)
    assert left_out == list(range(50, 50 + len(left_out)))  # and none later
    assert len(left_out) < 900


@given(st.lists(norms, max_size=60), st.floats(1.01, 10))
def test_decisions_equal_those_of_plain_arithmetic(values: list[float], factor: float) -> None:
    usual = 0.0
    updates = 0
    expected = []
    for value in torch.tensor(values).tolist():
        spike = updates >= 20 and value > factor * usual
        memory = min(0.98, updates / (updates + 1))
        usual = memory * usual + (1 - memory) * (factor * usual if spike else value)
        updates += not spike
        expected.append(spike)
    assert decide([1.0] * len(values), values, factor) == expected


@given(norms, st.floats(0.5, 2), st.integers(0, 10_000))
def test_usual_norm_is_constant_for_constant_norms(norm: float, other: float, updates: int) -> None:
    def following(usual: float, norm: float) -> float:
        deciding = Decisions(usual, updates, device=CPU, factor=3)
        deciding.skip_update(torch.tensor(1.0), torch.tensor(norm))
        deciding.add(dict, IDS)
        outcome = deciding.next_outcome(wait=True)
        assert outcome is not None
        return outcome.usual_norm

    norm, other_norm = torch.tensor([norm, norm * other]).tolist()  # rounded to float32
    assert abs(following(norm, norm) - norm) <= 1e-9 * norm
    between = sorted((norm, other_norm))
    assert between[0] * (1 - 1e-9) <= following(norm, other_norm) <= between[1] * (1 + 1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("of", ["loss", "norm"])
def test_no_update_follows_a_value_that_is_not_finite(of: str, value: float) -> None:
    losses, values = [1.0] * 6, [1.0] * 6
    (losses if of == "loss" else values)[2] = value
    assert decide(losses, values, 0) == [False, False, True, True, True, True]


@pytest.mark.parametrize("lag", [0, 2])
def test_outcomes_are_returned_in_order(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(guards.LAG, "cpu", lag)
    deciding = Decisions(2.0, 2, device=CPU, factor=0)
    outcomes = []
    waited = []
    for step in range(4):
        deciding.skip_update(torch.tensor(step + 0.5), torch.tensor(2.0))
        deciding.add(lambda step=step: waited.append(step) or {"faults": step}, IDS)  # type: ignore[misc, func-returns-value]
        while (outcome := deciding.next_outcome(wait=False)) is not None:
            outcomes.append(outcome)
        assert len(outcomes) == len(waited) == max(0, step + 1 - lag)
    while (outcome := deciding.next_outcome(wait=True)) is not None:
        outcomes.append(outcome)
    assert [outcome.loss for outcome in outcomes] == [0.5, 1.5, 2.5, 3.5]
    assert [outcome.totals for outcome in outcomes] == [{"faults": step} for step in range(4)]
    assert all(outcome.is_finite and not outcome.is_spike for outcome in outcomes)
    assert outcomes[-1].usual_norm == 2.0 and deciding.updates == 6


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_every_flipped_bit_changes_the_checksum(data: Any) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    model = nn.Linear(5, 3).to(dtype)
    before = sum_bits(model)
    weight = model.weight.detach()
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    bit = data.draw(st.integers(0, 8 * weight.element_size() - 1))
    place = data.draw(st.integers(0, weight.numel() - 1))
    flip = torch.tensor(1, dtype=integers) << bit
    weight.view(integers).view(-1)[place].bitwise_xor_(flip)
    after = sum_bits(model)
    assert before[0] != after[0] and before[1] == after[1] == 0
    weight.view(integers).view(-1)[place].bitwise_xor_(flip)
    assert torch.equal(sum_bits(model), before)


@pytest.mark.parametrize(
    ("whole", "shards", "parts", "odd"),
    [
        ([7, 7, 7, 7], [0, 0, 0, 0], 1, []),
        ([7, 7, 8, 7], [0, 0, 0, 0], 1, [2]),
        ([7, 8], [0, 0], 1, [0, 1]),  # nobody knows which one is right
        ([7, 7, 7, 7], [1, 2, 3, 4], 4, []),  # fully sharded: each rank has its own shard
        ([7, 9, 7, 7], [1, 2, 3, 4], 4, [1]),  # but all have the temperature
        ([7] * 6, [1, 2, 1, 2, 1, 2], 2, []),  # hybrid: three hosts of two ranks
        ([7] * 6, [1, 2, 1, 5, 1, 2], 2, [3]),
    ],
)
def test_odd_ranks_are_those_that_differ_from_most_of_their_replicas(
    whole: list[int], shards: list[int], parts: int, odd: list[int]
) -> None:
    assert find_odd_ranks(list(zip(whole, shards, strict=True)), parts) == odd
