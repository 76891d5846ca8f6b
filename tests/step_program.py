"""``train.py`` as rank 0 of many simulated ranks; prints what happens in one step.

python -m tests.step_program RANKS [key=value …]
"""

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import train
from clipkit import distributed
from clipkit.objectives import tiles
from clipkit.options import parse_arguments
from clipkit.training import checkpoint, guards, log, parallel

ROOT = Path(__file__).parents[1]
STEP = 5  # which is not logged


class Recorder(TorchDispatchMode):
    """Counts collectives and reads of tensors by the host, with the function of clipkit that causes them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: Counter[str] = Counter()
        self.order: list[str] = []

    def add(self, name: str) -> None:
        for frame in reversed(traceback.extract_stack()):
            path = Path(frame.filename)
            if path.is_relative_to(ROOT) and path.parts[len(ROOT.parts)] in ("clipkit", "data", "train.py"):
                self.events[f"{name} in {path.stem}.{frame.name}"] += 1
                return
        self.events[name] += 1  # by the autograd engine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if "c10d" in name and "wait" not in name:
            self.add(name.partition("::")[2].strip("_"))
        elif name == "aten::_local_scalar_dense":
            self.add("item")
        return func(*args, **(kwargs or {}))


def main() -> None:
    ranks = int(sys.argv[1])
    recorder = Recorder()
    tolist = torch.Tensor.tolist
    start_gathering = distributed.start_gathering
    replicated = parallel.replicated
    count_batch = log.Log.count_batch

    def start() -> torch.device:
        os.environ["LOCAL_WORLD_SIZE"] = "8"
        if ranks > 1:
            dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        return torch.device("cpu")

    def recorded_tolist(tensor: torch.Tensor) -> Any:
        recorder.add("tolist")
        return tolist(tensor)

    def recorded_gathering(rows: torch.Tensor, counts: list[int]) -> Callable[[], torch.Tensor]:
        recorder.order.append("gather starts")
        wait = start_gathering(rows, counts)

        def recorded_wait() -> torch.Tensor:
            recorder.order.append("wait")
            return wait()

        return recorded_wait

    def with_hook(model: Any) -> torch.nn.Module:
        module = replicated(model)
        first = model.visual.transformer.blocks[0]
        first.register_forward_pre_hook(lambda *_: recorder.order.append("image tower"))
        token_embedding, convolution = model.token_embedding.weight, model.visual.conv1.weight
        token_embedding.register_post_accumulate_grad_hook(lambda _: recorder.order.append("token embedding"))
        convolution.register_post_accumulate_grad_hook(lambda _: recorder.order.append("first convolution"))
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(None, reduce_bucket)
        return module

    # torch accepts no other annotation of the bucket than a type that mypy does not know
    def reduce_bucket(_: object, bucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[no-untyped-def]
        recorder.events["gradients"] += 1
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    steps: list[tuple[Counter[str], list[str]]] = []

    def counted(self: log.Log, batch: Any, pairs: torch.Tensor | None = None) -> None:
        steps.append((recorder.events, recorder.order))
        recorder.events, recorder.order = Counter(), []
        count_batch(self, batch, pairs)

    distributed.start = start
    distributed.broadcast_bytes = lambda content: content
    torch.Tensor.tolist = recorded_tolist  # type: ignore[method-assign, assignment]
    parallel.replicated = with_hook
    vars(tiles)["start_gathering"] = recorded_gathering
    vars(checkpoint)["broadcast_bytes"] = distributed.broadcast_bytes
    checkpoint.CheckpointWriter.begin = lambda *_, **__: None  # type: ignore[method-assign]
    log.Log.count_batch = counted  # type: ignore[method-assign]
    guards.LAG["cpu"] = 2
    sys.argv = ["train.py", *sys.argv[2:]]
    arguments = parse_arguments()
    with recorder:
        train.main(arguments)
    # the messages and host reads, and the order of some events
    counts, order = steps[STEP - 1]
    print(json.dumps({"counts": counts, "order": order}))


if __name__ == "__main__":
    main()
