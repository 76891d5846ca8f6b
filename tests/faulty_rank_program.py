"""``train.py`` with a faulty rank; run by test_train_faulty_rank.py.

FAULT is "slow": rank 2 needs 30% longer for a forward pass; or "bit": a bit of one of its weights flips in the
third update; or "saving": rank 0 saves and scores for longer than ranks may wait for each other in a step.
"""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import train
from clipkit import distributed
from clipkit.errors import run_command
from clipkit.model.clip import CLIP
from clipkit.options import parse_arguments
from clipkit.training import checkpoint, optim
from eval import Scorer

FAULTY, SECONDS = 2, 0.4
UPDATE, BIT = 3, 5

STEP_SECONDS = 8.0

forward, step = CLIP.forward, optim.AdamW.step
commit, score = checkpoint.CheckpointWriter._commit, Scorer.score
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


def slow_commit(writer: checkpoint.CheckpointWriter, *paths: Path) -> None:
    time.sleep(1.5 * STEP_SECONDS)
    commit(writer, *paths)


def slow_score(scorer: Scorer, at: int) -> None:
    time.sleep(1.5 * STEP_SECONDS * (distributed.rank() == 0))
    score(scorer, at)


if __name__ == "__main__":
    if os.environ["FAULT"] == "slow":
        CLIP.forward = slow_forward  # type: ignore[assignment, method-assign]
    elif os.environ["FAULT"] == "saving":
        distributed._STEP_TIMEOUT = timedelta(seconds=STEP_SECONDS)
        checkpoint.CheckpointWriter._commit = slow_commit  # type: ignore[assignment, method-assign]
        Scorer.score = slow_score  # type: ignore[assignment, method-assign]
    else:
        optim.AdamW.step = flipping_step
    arguments = parse_arguments()
    run_command(distributed.together(lambda: train.main(arguments)))
