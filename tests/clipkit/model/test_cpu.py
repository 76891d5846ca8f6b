"""Tests of computing on CPUs: oneDNN, packed weights and one batch per core change results by rounding only."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clipkit import create
from clipkit.model import processor
from clipkit.model.architectures import Adapters
from clipkit.model.cpu import PackedWeights, open_core_pool, run_parallel
from clipkit.model.lora import add_adapters
from clipkit.model.towers import choose_multiple

SHAPE = "ViT-Ti-4-16"


@pytest.fixture(autouse=True)
def cpu_on_which_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


def test_weights_stay_as_they_are_where_mkl_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    layer, x = nn.Linear(192, 576), torch.randn(40, 192)
    weights = PackedWeights(layer)
    with torch.inference_mode():
        expected = layer(x)
        with weights.activate():
            assert torch.equal(layer(x), expected)
    assert not weights._packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linear_equals_plain_linear(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(192, 576), torch.randn(3, 40, 384)[..., ::2]  # not contiguous
    weights = PackedWeights(layer)
    with torch.inference_mode(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        expected = layer(x)
        with weights.activate():
            found = layer(x)
    assert len(weights._packed) == (dtype in weights._dtypes)
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected)


def test_packed_weights_are_not_used_where_they_do_not_apply() -> None:
    layer, other = nn.Linear(64, 64, bias=False), nn.Linear(64, 64)
    weights, x = PackedWeights(layer), torch.randn(64, 64)
    with weights.activate():
        torch.autograd.backward(layer(x).sum())
        assert layer.weight.grad is not None
        with torch.inference_mode():
            layer(x[:4])
            other(x)
            F.linear(x, 2 * layer.weight)
            F.linear(x, layer.weight.T)
            layer.double()(x.double())
    assert not weights._packed


def test_packed_weights_keep_adapters() -> None:
    model = create(SHAPE, seed=0).eval()
    add_adapters(model, Adapters(rank=2, alpha=4.0, image=True, text=True, source="", hash=""))
    images = torch.randint(0, 256, (32, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(".up"):
                value.normal_()
        expected = model.encode_image(images)
        with PackedWeights(model).activate():
            torch.testing.assert_close(model.encode_image(images), expected)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Act as if MKL were slow on this CPU, and restore torch's settings."""
    monkeypatch.setattr(processor, "has_slow_mkl", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    yield settings
    settings.fp32_precision = before


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_products_by_onednn_are_in_float32(settings: Any) -> None:
    processor.use_onednn_for_float32()  # on a CPU with AMX, it finds products in bfloat16
    for rows, batch in [(1, ()), (40, ()), (4000, ()), (50, (8,))]:
        x, weight = torch.randn(*batch, rows, 192), torch.randn(*batch, 192, 576)
        expected = x.double() @ weight.double()
        torch.testing.assert_close((x @ weight).double(), expected, atol=2e-4, rtol=0)  # bfloat16: 0.1


def test_onednn_is_not_used_if_it_would_round_to_bfloat16(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = settings.fp32_precision
    monkeypatch.setattr(torch, "equal", lambda found, expected: False)
    processor.use_onednn_for_float32()
    assert settings.fp32_precision == before
    monkeypatch.undo()
    monkeypatch.setattr(processor, "has_slow_mkl", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    processor.use_onednn_for_float32()
    assert settings.fp32_precision == before


def test_texts_are_filled_up_where_onednn_computes(settings: Any) -> None:
    weight = torch.zeros(8, 8)
    settings.fp32_precision = "none"
    assert choose_multiple(weight, longest=77) == 1
    settings.fp32_precision = "bf16"
    assert choose_multiple(weight, longest=77) == 64
    assert choose_multiple(weight.double(), longest=77) == choose_multiple(weight.to("meta"), longest=77) == 1


def test_parallel_batches_keep_order_and_modes_on_one_core_each() -> None:
    model, seen = create(SHAPE, seed=0).eval(), []
    images = torch.randint(0, 256, (70, 3, 16, 16), dtype=torch.uint8)

    def work(batch: torch.Tensor) -> torch.Tensor:
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        seen.append((threading.get_ident(), torch.get_num_threads(), *modes))
        return model.encode_image(batch)

    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected = torch.cat([model.encode_image(batch) for batch in images.split(16)])
            found = torch.cat([*run_parallel(model, work, images.split(16))])
        assert torch.get_num_threads() == 3
        assert {one[1:] for one in seen} == {(1, False, False, True)}
        assert threading.get_ident() not in {one[0] for one in seen}
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0)
        seen.clear()
        with torch.inference_mode():
            [*run_parallel(model, work, images.split(40))]  # fewer batches than cores
        assert set(seen) == {(threading.get_ident(), 3, False, True, False)}
    finally:
        torch.set_num_threads(threads)


def test_error_in_a_batch_ends_the_pool() -> None:
    model = create(SHAPE, seed=0)

    def work(number: int) -> int:
        if number == 2:
            raise ValueError("two")
        return number

    threads = torch.get_num_threads()
    with pytest.raises(ValueError, match="two"):
        [*run_parallel(model, work, range(9))]
    assert torch.get_num_threads() == threads
    with open_core_pool(2) as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
