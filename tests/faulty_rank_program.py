"""``train.py`` with a faulty rank; run by test_train_faulty_rank.py.

FAULT is "slow": rank 2 needs 30% longer for a forward pass; or "bit": a bit of one of its weights flips in the
third update.
"""

import os
import time
from typing import Any

import torch

import train
from clipkit import distributed
from clipkit.errors import run_command
from clipkit.model.clip import CLIP
from clipkit.options import parse_arguments
from clipkit.training import optim

FAULTY, SECONDS = 2, 0.4
UPDATE, BIT = 3, 5

forward, step = CLIP.forward, optim.AdamW.step
updates = 0


def slow_forward(model: CLIP, *arguments: Any, **more: Any) -> Any:
    time.sleep(SECONDS * (1.3 if distributed.rank() == FAULTY else 1.0))
    return forward(model, *arguments, **more)


def flipping_step(optimizer: optim.AdamW, *arguments: Any) -> Any:
    global updates
    updates += 1
    result = step(optimizer, *arguments)
    if distributed.rank() == FAULTY and updates == UPDATE:
        weight = optimizer.param_groups[0]["params"][0].detach()
        weight.view(torch.int32).view(-1)[7].bitwise_xor_(1 << BIT)
    return result


if __name__ == "__main__":
    if os.environ["FAULT"] == "slow":
        CLIP.forward = slow_forward  # type: ignore[assignment, method-assign]
    else:
        optim.AdamW.step = flipping_step
    arguments = parse_arguments()
    run_command(distributed.together(lambda: train.main(arguments)))
