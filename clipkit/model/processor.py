"""What torch computes fast on this CPU, and which library multiplies float32."""

from functools import cache
from typing import Any

import torch

_PRODUCTS: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # unknown to mypy


def has_bfloat16_products() -> bool:
    """Return whether this CPU has the instructions, such as AVX-512, with which oneDNN multiplies in bfloat16.

    Others take 27 times as long as in float32.
    """
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def has_slow_mkl() -> bool:
    """Return whether MKL, with which torch multiplies float32, uses only half of this CPU.

    On CPUs of AMD it uses AVX2, also on those that have AVX-512.
    """
    is_named = hasattr(torch.cpu, "get_capabilities")  # not in torch 2.11
    is_amd = is_named and str(torch.cpu.get_capabilities().get("cpu_name", "")).startswith("AMD")
    return (
        is_amd
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


def is_faster_in_bfloat16() -> bool:
    """Return whether this CPU encodes much faster in bfloat16 (bench/README.md has figures)."""
    has_amx = torch.cpu._is_amx_tile_supported()
    return has_amx or (has_slow_mkl() and torch.cpu._is_avx512_bf16_supported())


def use_onednn_for_float32() -> None:
    """Let oneDNN compute the products of this process in float32, where it is faster than MKL.

    torch's setting for this permits products in bfloat16. oneDNN makes use of that on CPUs with AMX only, and a
    product that has to be exact shows whether it does.
    """
    if not has_slow_mkl() or torch.cpu._is_amx_tile_supported():
        return
    before = _PRODUCTS.fp32_precision
    _PRODUCTS.fp32_precision = "bf16"
    fine = torch.full((512, 512), 1 + 2**-20)
    if not torch.equal(fine @ torch.eye(512), fine):
        _PRODUCTS.fp32_precision = before


def uses_onednn_for_float32() -> bool:
    """Return whether ``use_onednn_for_float32`` has chosen oneDNN."""
    return bool(_PRODUCTS.fp32_precision == "bf16")
