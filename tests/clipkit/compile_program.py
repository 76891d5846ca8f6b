"""Training steps of compiled blocks; run by test_compile.py, also as a program on two ranks.

python -m tests.clipkit.compile_program STEPS ["key=value …"]  # of each training
"""

import random
import sys
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from clipkit import distributed
from clipkit.batch import Batch
from clipkit.config import load_config
from clipkit.model.tokenizer import END_OF_TEXT, START_OF_TEXT
from clipkit.objectives import select_terms
from clipkit.training import build, optim, parallel
from clipkit.training.ema import AveragedWeights
from clipkit.training.step import TrainingStep

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
ROWS = 6


def count_graphs(steps: int, *settings: str) -> list[int]:
    """Return how many graphs exist after each step of a training whose captions have other lengths in each."""
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    rows = ROWS * distributed.world_size()
    own = ("model.name=ViT-Ti-4-16", "optim.name=adamw", f"batch_size={rows}", f"steps={steps}")
    config = load_config(QUICKSTART, [*own, *settings])
    shape = build.select_shape(config)
    model = build.first_model(config, shape)
    terms = select_terms(config)
    build.lock(model, image=config.lock.image, text=config.lock.text, terms=terms)
    device = torch.device("cpu")
    model = parallel.prepare(model, config, device, sharding=config.sharding, bf16=True, terms=terms)
    parallel.compile_blocks(model, backend="eager")  # needs no compiler of C++, and is faster
    optimizer = optim.make_optimizer(model, config.optim)
    averaged = AveragedWeights(model, config.optim.average) if config.optim.average else None
    unfreezing = build.Unfreezing(model, config.lock)
    unfreezing.lock_for_step(0)
    compute = TrainingStep.from_config(config, shape, model, (), samples=1, bf16=True, averaged=averaged)
    trained = parallel.replicated(model)
    draw = random.Random(distributed.rank())
    graphs = []
    for step in range(steps):
        if unfreezing.lock_for_step(step):
            trained = parallel.replicated(model)
        batch = make_batch(draw, shape.vision.image_size, shape.text.context_length)
        compute.gradients(trained, batch, step)
        parallel.complete_gradients(model)
        parallel.clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if averaged is not None:
            averaged.update(step + 1)
        graphs.append(counters["stats"]["unique_graphs"] - before)
    return graphs


def main() -> None:
    torch.set_num_threads(1)
    distributed.start()
    for settings in sys.argv[2:]:
        print(*count_graphs(int(sys.argv[1]), *settings.split()))
    distributed.stop()


def make_batch(draw: random.Random, size: int, length: int) -> Batch:
    lengths = tuple(draw.randint(3, length) for _ in range(ROWS))
    tokens = torch.zeros(ROWS, max(lengths), dtype=torch.int64)
    for row, count in enumerate(lengths):
        tokens[row, : count - 1] = START_OF_TEXT
        tokens[row, count - 1] = END_OF_TEXT
    ids = torch.arange(ROWS) + ROWS * distributed.rank()
    return Batch(
        images=torch.full((ROWS, 3, size, size), draw.randrange(256), dtype=torch.uint8),
        tokens=tokens,
        lengths=lengths,
        ids=ids,
        identities=torch.stack([ids, ids], dim=1),
        first_row=int(ids[0]),
    )


if __name__ == "__main__":
    main()
