"""How fast a device multiplies matrices: measured at the start of a run, and as its maker publishes it.

Model FLOPs utilization is the useful operations of a second (``clipkit.model.flops``) over one of these rates.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from clipkit.distributed import barrier

__all__ = [
    "PUBLISHED_BF16", "PUBLISHED_GB", "Machine", "computes_in_bf16", "measured_peak", "published_memory",
    "published_peak",
]  # fmt: skip

# Dense bfloat16 FLOP/s with float32 sums, by what torch calls the device; the first name that occurs counts.
# Makers' sheets often state twice as much, for matrices half of which are zeros.
PUBLISHED_BF16: dict[str, float] = {
    "A100": 312e12,  # NVIDIA A100 Tensor Core GPU data sheet
    "A800": 312e12,  # the same chip with slower links
    "H100 PCIe": 756e12,  # NVIDIA H100 Tensor Core GPU data sheet: 1,513 with sparsity
    "H100 NVL": 835e12,  # the same sheet: 1,671 with sparsity
    "H100": 989e12,  # the same sheet, SXM: 1,979 with sparsity
    "H800": 989e12,  # the same chip as H100 SXM with slower links
    "H200 NVL": 835e12,  # NVIDIA H200 Tensor Core GPU data sheet: 1,671 with sparsity
    "H200": 989e12,  # the same sheet, SXM: 1,979 with sparsity
    "B200": 2250e12,  # NVIDIA HGX B200: 36 PFLOP/s with sparsity for eight
    "L40S": 362e12,  # NVIDIA L40S data sheet: 362 | 733 with sparsity
    "L4": 121e12,  # NVIDIA L4 data sheet: 242 with sparsity
    "A40": 149.7e12,  # NVIDIA A40 data sheet: 149.7 | 299.4 with sparsity
    "RTX 4090": 165.2e12,  # NVIDIA Ada GPU architecture white paper, appendix A: bf16 with fp32 accumulate
    "RTX 3090": 71e12,  # NVIDIA Ampere GA102 GPU architecture white paper, appendix A: bf16 with fp32 accumulate
}

_SECONDS = 0.25  # that a measurement may take
_SHARE = 20  # of them, what one product may take at most
_SIZES = (256, 512, 1024, 2048, 4096, 8192)


def computes_in_bf16(precision: str, device: torch.device) -> bool:
    """Whether the towers run in bfloat16 at a setting of ``precision``."""
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision == "bf16"


def published_peak(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of what ``torch.cuda.get_device_name`` names; None where it is not known."""
    words = device_name.replace("-", " ").split()
    for name, rate in PUBLISHED_BF16.items():
        wanted = name.split()
        if any(words[at : at + len(wanted)] == wanted for at in range(len(words))):
            return rate
    return None


def measured_peak(
    device: torch.device, dtype: torch.dtype, *, seconds: float = _SECONDS, together: bool = True
) -> float:
    """FLOP/s of a plain product of square matrices, the fastest of several, in about ``seconds``.

    The fastest one, as whatever else the machine computes only makes products slower. The matrices are as large as
    the time allows, up to 8,192 rows. With ``together`` all ranks begin together, so that those which share a
    machine's cores measure their share of them; call it on all ranks then.

    Args:
        device: a CPU or a GPU.
        dtype: what the towers compute in, such as ``torch.bfloat16``.
        seconds: how long it may take, after the first product, which loads what it needs.
        together: wait for the other ranks first.
    """
    if together:
        barrier()
    began = time.monotonic()
    operations, times = 0, [0.0]
    for size in _SIZES:
        product = _product(size, device, dtype)
        product()  # loads the kernel
        times = [_timed(product, device)]
        operations = 2 * size**3
        # the next one takes eight times as long; it is wanted several times
        if 8 * times[0] > seconds / _SHARE or time.monotonic() - began > seconds / 4:
            break
    while time.monotonic() - began < seconds or len(times) < 3:
        times.append(_timed(product, device))
    return operations / min(times)


def _product(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    generator = torch.Generator(device).manual_seed(0)  # zeros would draw less power, and be faster
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    return multiply


def _timed(product: Callable[[], None], device: torch.device) -> float:
    """Seconds, from one queue that is empty to the next."""
    _wait(device)
    began = time.perf_counter()
    product()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --------------------------------------------------------------------------------------------------------------
# What a run is to be computed on, as far as its costs depend on it: the memory and the rate of a GPU.

# Gigabytes of memory by makers' data sheets; the first name that occurs counts. A name that states its own, such as
# "A100-PCIE-40GB", has that.
PUBLISHED_GB: dict[str, int] = {
    "A100": 80,  # NVIDIA A100 Tensor Core GPU data sheet: 40 or 80
    "A800": 80,  # the same chip with slower links
    "H100 PCIe": 80,  # NVIDIA H100 Tensor Core GPU data sheet
    "H100 NVL": 94,  # the same sheet
    "H100": 80,  # the same sheet, SXM
    "H800": 80,  # the same chip as H100 SXM with slower links
    "H200": 141,  # NVIDIA H200 Tensor Core GPU data sheet, SXM and NVL
    "B200": 180,  # NVIDIA HGX B200: 1,440 for eight
    "L40S": 48,  # NVIDIA L40S data sheet
    "L4": 24,  # NVIDIA L4 data sheet
    "A40": 48,  # NVIDIA A40 data sheet
    "RTX 4090": 24,  # NVIDIA Ada GPU architecture white paper, appendix A
    "RTX 3090": 24,  # NVIDIA Ampere GA102 GPU architecture white paper, appendix A
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A kind of GPU, or the CPU of this machine.

    Attributes:
        gpu: its name; "" is a CPU.
        memory: bytes; None where they are not known.
        peak: FLOP/s of one GPU, or of this machine's share for one process; None where they are not known.
        measured: whether ``peak`` was, and not published.
    """

    gpu: str
    memory: int | None
    peak: float | None
    measured: bool


def published_memory(device_name: str) -> int | None:
    """Bytes of memory of what ``torch.cuda.get_device_name`` names; None where they are not known."""
    if stated := re.search(r"\b(\d+) ?GB\b", device_name, re.IGNORECASE):
        return int(stated[1]) << 30
    words = device_name.replace("-", " ").split()
    for name, size in PUBLISHED_GB.items():
        wanted = name.split()
        if any(words[at : at + len(wanted)] == wanted for at in range(len(words))):
            return size << 30
    return None
