"""How fast a device multiplies matrices: measured at the start of a run, and by its data sheet.

Model FLOPs utilization is the useful operations of a second (``clipkit.model.flops``) over one of these rates.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from clipkit.distributed import barrier

__all__ = [
    "GPUS", "Gpu", "Machine", "computes_in_bf16", "measured_peak", "published_gpu", "published_memory",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU's data sheet: dense bfloat16 FLOP/s with float32 accumulation, and memory in GB.

    Data sheets often state twice the FLOP/s, for matrices with 50% structured sparsity.
    """

    bf16: float
    gb: int


# By what torch calls the device; the first name that occurs in it counts.
GPUS: dict[str, Gpu] = {
    "A100": Gpu(bf16=312e12, gb=80),  # NVIDIA A100 Tensor Core GPU data sheet; 40 or 80 GB
    "A800": Gpu(bf16=312e12, gb=80),  # the same chip with slower links
    "H100 PCIe": Gpu(bf16=756e12, gb=80),  # NVIDIA H100 Tensor Core GPU data sheet: 1,513 with sparsity
    "H100 NVL": Gpu(bf16=835e12, gb=94),  # the same sheet: 1,671 with sparsity
    "H100": Gpu(bf16=989e12, gb=80),  # the same sheet, SXM: 1,979 with sparsity
    "H800": Gpu(bf16=989e12, gb=80),  # the same chip as H100 SXM with slower links
    "H200 NVL": Gpu(bf16=835e12, gb=141),  # NVIDIA H200 Tensor Core GPU data sheet: 1,671 with sparsity
    "H200": Gpu(bf16=989e12, gb=141),  # the same sheet, SXM: 1,979 with sparsity
    "B200": Gpu(bf16=2250e12, gb=180),  # NVIDIA HGX B200: 36 PFLOP/s with sparsity and 1,440 GB for eight
    "L40S": Gpu(bf16=362e12, gb=48),  # NVIDIA L40S data sheet: 362 | 733 with sparsity
    "L4": Gpu(bf16=121e12, gb=24),  # NVIDIA L4 data sheet: 242 with sparsity
    "A40": Gpu(bf16=149.7e12, gb=48),  # NVIDIA A40 data sheet: 149.7 | 299.4 with sparsity
    "RTX 4090": Gpu(bf16=165.2e12, gb=24),  # NVIDIA Ada GPU architecture white paper, appendix A
    "RTX 3090": Gpu(bf16=71e12, gb=24),  # NVIDIA Ampere GA102 GPU architecture white paper, appendix A
}

_SECONDS = 0.25  # per measurement
_SHARE = 20  # products that fit in a measurement, at least
_SIZES = (256, 512, 1024, 2048, 4096, 8192)


def computes_in_bf16(precision: str, device: torch.device) -> bool:
    """Whether the towers run in bfloat16 at a setting of ``precision``."""
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision == "bf16"


def published_gpu(device_name: str) -> Gpu | None:
    """Return the data sheet of what ``torch.cuda.get_device_name`` names; None if it is not known."""
    words = device_name.replace("-", " ").split()
    for name, gpu in GPUS.items():
        wanted = name.split()
        if any(words[at : at + len(wanted)] == wanted for at in range(len(words))):
            return gpu
    return None


def published_memory(device_name: str) -> int | None:
    """Return a GPU's bytes of memory; a name that states them, such as "A100-PCIE-40GB", overrides the table."""
    if stated := re.search(r"\b(\d+) ?GB\b", device_name, re.IGNORECASE):
        return int(stated[1]) << 30
    gpu = published_gpu(device_name)
    return None if gpu is None else gpu.gb << 30


def measured_peak(
    device: torch.device, dtype: torch.dtype, *, seconds: float = _SECONDS, together: bool = True
) -> float:
    """Measure the FLOP/s of a product of square matrices, the fastest of several, in about ``seconds``.

    The fastest, since other load only makes products slower. The matrices are as large as the time allows, up to
    8,192 rows. With ``together`` all ranks start at the same time, so that ranks on the same machine measure their
    part of its cores; call it on all ranks then.

    Args:
        device: a CPU or a GPU.
        dtype: what the towers compute in, such as ``torch.bfloat16``.
        seconds: how long it may take, after the first product, which loads kernels.
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
        # the next size takes eight times as long, and is needed several times
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
    """Return the seconds of a product, starting and ending with an empty queue."""
    _wait(device)
    began = time.perf_counter()
    product()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A kind of GPU, or the CPU of this machine.

    Attributes:
        gpu: its name; "" for a CPU.
        memory: bytes; None if not known.
        peak: FLOP/s of one GPU, or of one process's part of this machine's CPU; None if not known.
        measured: whether ``peak`` is measured, not published.
    """

    gpu: str
    memory: int | None
    peak: float | None
    measured: bool
