"""Program run by test_loss_ranks.py under torchrun: every loss of a fixed global batch, spread over ranks.

    loss_program.py OUT

Each rank writes its values and gradients, by spread, dtype, loss and variable, into OUT/RANK.safetensors.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import clipkit.objectives.tiles
from clipkit import distributed
from clipkit.objectives.base import compute_recall
from tests.clipkit.plain_losses import LOSSES, given, gradients, ours

# rows of each rank, by number of ranks
SPREADS = {
    1: ((13,),),
    2: ((7, 7), (4, 9)),
    3: ((4, 4, 4), (5, 1, 7), (5, 5, 6)),
    4: ((3, 3, 3, 3), (2, 5, 1, 5), (6, 0, 2, 5)),
}


def found() -> dict[str, Tensor]:
    """This rank's values and gradients."""
    tensors = {}
    for spread in SPREADS[distributed.world_size()]:
        first = sum(spread[: distributed.rank()])
        own = slice(first, first + spread[distributed.rank()])
        for dtype in (torch.float32, torch.float64):
            for loss in LOSSES:
                batch = given(sum(spread), dtype=dtype).slice(own)
                value = ours(loss, batch)
                names = ("images", "texts", "scale", "bias")
                for name, gradient in zip(names, gradients(value, batch), strict=True):
                    tensors[f"{spread}/{dtype}/{loss}/{name}"] = gradient.clone()
                tensors[f"{spread}/{dtype}/{loss}/value"] = value.detach()
            tensors[f"{spread}/{dtype}/recall"] = compute_recall(batch.images, batch.texts)
    return tensors


def main() -> None:
    torch.set_num_threads(1)
    clipkit.objectives.tiles._TILE, clipkit.objectives.tiles._LEAST_ROWS = 40, 2
    distributed.start()
    save_file(found(), Path(sys.argv[1]) / f"{distributed.rank()}.safetensors")
    distributed.stop()


if __name__ == "__main__":
    main()
