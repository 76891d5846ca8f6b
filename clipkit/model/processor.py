"""What torch computes fast on this CPU."""

from functools import cache

import torch


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
