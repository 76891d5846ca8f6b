"""Tests of comparing ranks: checksums of weights, and which ranks differ from the others."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from clipkit.training.guards import find_odd_ranks, sum_bits
from clipkit.training.metrics import RankTimes


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


def test_slowest_rank_and_its_cause() -> None:
    names = [f"rank {i} on node{i // 2}" for i in range(4)]
    phases = {"data": [0.0, 0.01, 0.0, 0.3], "forward": [1.0, 1.1, 1.0, 1.0], "optimizer": [0.1] * 4}
    times = RankTimes(names=names, phases=phases)
    assert times.slowest == 3 and times.cause == "data" and times.is_slow
    assert times.excess == pytest.approx(0.3 / 1.1)
    assert times.waiting == pytest.approx([0.3, 0.19, 0.3, 0.0])
    line = "rank 3 on node1 takes 27% longer than the others, mostly in data: 300 ms a step instead of 0 ms"
    assert times.describe().startswith(line)
    even = RankTimes(names=names, phases={**phases, "data": [0.0] * 4})
    assert not even.is_slow and even.cause == "forward"
