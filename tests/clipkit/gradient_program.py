"""Run by test_distributed.py under torchrun: one backward pass of a fixed global batch, gradients to a file."""

import sys

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import clipkit
from clipkit import distributed
from clipkit.accumulation import backward
from clipkit.architectures import Architecture, TextTower, VisionTower
from clipkit.model import CLIP

BATCH = 16


def main() -> None:
    out, parts = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    distributed.start()
    gradients: dict[str, torch.Tensor] = {}
    for dtype in (torch.float32, torch.float64):
        for name, gradient in compute(parts, dtype).items():
            gradients[f"{str(dtype).removeprefix('torch.')}/{name}"] = gradient
    if distributed.rank() == 0:
        save_file(gradients, out)
    distributed.stop()


def compute(parts: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The loss of the fixed global batch and its gradients by parameter name."""
    rank, world = distributed.rank(), distributed.world_size()
    shape = Architecture(
        embed_dim=24,
        vision=VisionTower(image_size=16, patch_size=8, width=32, layers=2, heads=2),
        text=TextTower(width=32, layers=2, heads=2),
    )
    torch.manual_seed(0)
    model = CLIP(shape).initialize().to(dtype)
    random = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (BATCH, 3, 16, 16), dtype=torch.uint8, generator=random)
    # captions of very different length: ranks trim to their own longest
    tokens = clipkit.tokenize(["seven " * (1 + (5 * i) % 23) + chr(97 + i) for i in range(BATCH)])
    own = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    trained: nn.Module = DistributedDataParallel(model) if world > 1 else model
    loss = backward(trained, images[own], tokens[own], loss=clipkit.clip_loss, parts=parts, autocast=False)
    losses = distributed.gather_objects(float(loss))
    assert len(set(losses)) == 1, losses  # the value is that of the global batch on every rank
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return {**gradients, "loss": loss.reshape(1)}


if __name__ == "__main__":
    main()
