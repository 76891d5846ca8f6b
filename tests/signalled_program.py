"""``train.py`` whose rank 1 gets SIGTERM during its last step; run by test_train_ahead.py."""

import os
import signal
from typing import Any

import train
from clipkit import distributed
from clipkit.errors import run_command
from clipkit.options import parse_arguments
from clipkit.training.step import TrainingStep

if __name__ == "__main__":
    arguments = parse_arguments()
    steps = int(dict(setting.split("=", 1) for setting in arguments.overrides)["steps"])
    gradients = TrainingStep.gradients

    def signalled(self: TrainingStep, module: Any, batch: Any, step: int, watch: Any = None) -> Any:
        if step == steps - 1 and distributed.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return gradients(self, module, batch, step, watch)

    TrainingStep.gradients = signalled  # type: ignore[method-assign]
    run_command(distributed.together(lambda: train.main(arguments)))
