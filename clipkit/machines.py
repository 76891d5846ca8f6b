"""What a run is to be computed on, as far as its costs depend on it: the memory and the rate of a GPU."""

import re
from dataclasses import dataclass

__all__ = ["PUBLISHED_GB", "Machine", "published_memory"]

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
