"""Program run by test_checkpoint_writer.py as four ranks on two hosts: checkpoints of a sharded model.

Prints the ranks that write, and the error of a checkpoint that one of them could not write.
"""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from clipkit import distributed
from clipkit.config import Config, OptimConfig, to_toml
from clipkit.errors import CheckpointError
from clipkit.model.architectures import Architecture, TextTower, VisionTower
from clipkit.model.clip import create
from clipkit.training import checkpoint
from clipkit.training.checkpoint import CheckpointWriter, LoopState, load_training, optimizer_tensors
from clipkit.training.optim import make_optimizer
from clipkit.training.parallel import local_part, shard, without_values

CPU = torch.device("cpu")
SHAPE = Architecture(
    embed_dim=24,
    vision=VisionTower(image_size=16, patch_size=8, width=32, layers=2, heads=2),
    text=TextTower(width=32, layers=1, heads=2, context_length=12, vocab_size=100),
)


def main() -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    distributed.start()
    whole = create(SHAPE, seed=0).train()
    model = without_values(whole)
    shard(model, whole.state_dict(), "hybrid", device=CPU)
    config = OptimConfig(name="adafactor", lr=1e-2)  # whose state is partly divided and partly not
    optimizer = make_optimizer(model, config)
    run = Path(sys.argv[1])
    writer = CheckpointWriter(run, to_toml(Config()), keep=0)
    for step in range(1, 4):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, float(step * number % 7 - 3))
        optimizer.step()
        writer.save_now(model, optimizer, LoopState(step=step, data=""))
        assert writer.saved_step == step
        folder = run / "checkpoints" / f"step_{step:08d}"
        stored = load_file(folder / "model.safetensors")
        for name, tensor in model.state_dict().items():
            expected = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(stored[name], expected), (step, name)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    restored = make_optimizer(model, config)
    load_training(folder, model, restored)
    state = optimizer_tensors(model, optimizer)
    for name, tensor in optimizer_tensors(model, restored).items():
        assert torch.equal(local_part(tensor), local_part(state[name])), name
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    distributed.barrier()
    error = ""
    if distributed.rank() == 1:
        vars(checkpoint)["save_file"] = fail
    writer.begin(model, optimizer, LoopState(step=4, data=""))
    try:
        writer.finish()
    except CheckpointError as caught:
        error = str(caught)
    distributed.barrier()
    assert sorted(path.name for path in folder.parent.iterdir())[-1] == folder.name
    print(writer._group is not None, error, sep=",")
    writer.close()
    distributed.stop()
    sys.stdout.flush()


def fail(*_: object) -> None:
    raise OSError("no space left")


if __name__ == "__main__":
    main()
