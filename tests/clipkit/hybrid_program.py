"""Program run by test_checkpoint_writer.py as four ranks on two hosts: three checkpoints of a sharded model.

Prints the ranks that write, and how often their work was divided anew.
"""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from clipkit import distributed
from clipkit.config import Config, OptimConfig, to_toml
from clipkit.model.clip import create
from clipkit.training.checkpoint import CheckpointWriter, LoopState, load_training
from clipkit.training.optim import make_optimizer
from clipkit.training.parallel import shard, without_values

CPU = torch.device("cpu")
plans = 0


def main() -> None:
    global plans
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    distributed.start()
    whole = create("ViT-Ti-4-16", name="ViT-Ti-4-16", seed=0).train()
    model = without_values(whole)
    shard(model, whole.state_dict(), "hybrid", device=CPU)
    optimizer = make_optimizer(model, OptimConfig(lr=1e-2))
    divide = DefaultSavePlanner._create_global_plan

    def count(planner: DefaultSavePlanner, all_plans: list[SavePlan]) -> object:
        global plans
        plans += 1
        return divide(planner, all_plans)

    DefaultSavePlanner._create_global_plan = count  # type: ignore[method-assign, assignment]
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
    load_training(folder, model, make_optimizer(model, OptimConfig(lr=1e-2)))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    distributed.barrier()
    print(writer._group is not None, plans)
    writer.close()
    distributed.stop()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
