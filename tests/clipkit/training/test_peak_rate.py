"""Tests of peak rates: measured by matrix products, published ones found by device name."""

import time

import pytest
import torch

from clipkit.training.costs import GPUS, measured_peak, published_gpu


def test_measured_peak_is_close_to_the_rate_of_a_matrix_product() -> None:
    began = time.monotonic()
    rate = measured_peak(torch.device("cpu"), torch.float32, seconds=0.1)
    assert time.monotonic() - began < 5  # generous, for a busy machine
    size = 512
    a = torch.randn(size, size)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    assert 0.2 < rate / (2 * size**3 / min(times)) < 5


def test_half_precision_peak_is_measured() -> None:
    assert measured_peak(torch.device("cpu"), torch.bfloat16, seconds=0.02) > 0


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_published_peak_is_found_by_device_name(device: str, name: str) -> None:
    assert published_gpu(device) is GPUS[name]


@pytest.mark.parametrize("device", ["NVIDIA A10G", "Tesla V100-SXM2-16GB", "NVIDIA RTX A4000", ""])
def test_unknown_device_has_no_published_peak(device: str) -> None:
    assert published_gpu(device) is None
