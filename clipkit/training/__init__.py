"""What train.py calls: the step, optimizers, parallelism, checkpoints, guards, metrics and costs."""

__all__: list[str] = []
