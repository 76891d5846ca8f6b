"""Tests of the explanations of why training waits for batches."""

import pytest
import torch

from clipkit.batch import Batch
from data.loader import Starvation


def batch(reading: float, making: float) -> Batch:
    return Batch(
        images=torch.zeros(1, 3, 8, 8, dtype=torch.uint8),
        tokens=torch.zeros(1, 3, dtype=torch.int64),
        lengths=(3,),
        ids=torch.zeros(1, dtype=torch.int64),
        identities=torch.zeros(1, 2, dtype=torch.int64),
        read_seconds=reading,
        make_seconds=making,
    )


@pytest.mark.parametrize(
    ("reading", "making", "said"),
    [
        (8.0, 10.0, "reading from s3://bucket/a.tar takes 80% of the time per batch"),
        (1.0, 10.0, "decoding and cropping images takes 90% of the time per batch: raise data.workers = 0"),
        (0.0, 0.0, "raise data.workers = 0"),
    ],
)
def test_cause_is_the_slowest_part(reading: float, making: float, said: str) -> None:
    starvation = Starvation(0, "s3://bucket/a.tar")
    for _ in range(3):
        starvation.count(batch(reading / 3, making / 3))
    assert said in starvation.cause()


def test_more_workers_are_not_suggested_if_all_cores_are_in_use() -> None:
    starvation = Starvation(10_000, "pairs")
    starvation.count(batch(0.1, 1.0))
    assert "cores are in use" in starvation.cause()
