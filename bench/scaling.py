"""Measure train.py with 1, 2 and 4 ranks on this machine, and the bytes that they exchange against the formula.

    python -m bench.scaling [--rounds 3] [--steps 60] [--worlds 1 2 4] [--only speed volume analysis]

Speed: samples/s of the quickstart (no evaluation, no checkpoints) at the same global batch size, the median of its
steps' times, in alternating rounds. Each rank uses the cores of the machine divided by the number of ranks.

Volume: the collectives of one step according to ``train.py --profile``, as bytes that a rank sends with ring
algorithms, against ``clipkit.training.costs.communication_of``, for replicated and sharded models. Collectives of
at most 1,000 numbers (counts of rows, flags, norms, scalars) are listed apart. Communication time is that in which
a collective of rank 0 is in progress, as a fraction of the profiled steps; it includes waiting for other ranks and
what overlaps with the backward pass.

Analysis: by formula, the bytes of a step at large scale, and the number of GPUs at which sending them takes as long
as computing.
"""

import argparse
import gzip
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.options import ROOT
from clipkit.config import Config, load_config
from clipkit.model.clip import CLIP
from clipkit.model.names import create_architecture
from clipkit.training.costs import (
    GPUS,
    Workload,
    communication_of,
    computes_in_bf16,
    estimate,
    workloads_of,
)

RESULT = Path(__file__).parent / "results" / "scaling.json"
CONFIG = ROOT / "configs" / "quickstart.toml"
SETTINGS = (
    "eval.data=[]",
    "log.tensorboard=false",
    "checkpoint.every_steps=0",
    "optim.warmup=0",
    "optim.name=adamw",
)
SKIPPED = 10  # first steps, which allocate memory and start the loader
PROFILED = 4
FEW = 1000  # numbers of a collective that is listed apart
BYTES = {"float": 4, "double": 8, "long int": 8, "int": 4, "c10::BFloat16": 2, "unsigned char": 1, "bool": 1}
# bytes sent, relative to those of the largest tensor
SENT = {
    "c10d::allreduce_": 2, "c10d::_allgather_base_": 1, "c10d::allgather_": 1, "c10d::_reduce_scatter_base_": 1,
    "c10d::allgather_into_tensor_coalesced_": 1, "c10d::broadcast_": 1,
}  # fmt: skip
VARIANTS = (
    (2, ()), (4, ()), (2, ("accumulate=2",)), (2, ("sharding=full",)), (4, ("sharding=full",)),
    (2, ("sharding=full", "reshard=false")), (2, ("sharding=full", "accumulate=2")),
)  # fmt: skip
# images/s of a GPU that computes at 40% of its peak; bytes/s that a GPU sends to other hosts
GPU, MFU, LINK = "H100", 0.4, 50e9
MODELS = ("ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-H-14")
BATCH = 32_768


def train(out: Path, world: int, *arguments: str) -> None:
    """Run train.py with so many ranks."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    )
    threads = max(1, len(os.sched_getaffinity(0)) // world)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, "train.py", str(CONFIG), *SETTINGS, *arguments, f"out={out}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def speed(folder: Path, worlds: Sequence[int], rounds: int, steps: int) -> dict[str, Any]:
    """Return samples/s by number of ranks, and their ratio to one rank's within rounds."""
    rates: dict[int, list[float]] = {world: [] for world in worlds}
    for i in range(rounds):
        for world in worlds if i % 2 else reversed(worlds):
            run = folder / f"speed-{world}-{i}"
            train(run, world, f"steps={steps + SKIPPED}", "log.every_steps=1")
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            rates[world].append(statistics.median(one["samples_per_second"] for one in lines[SKIPPED:]))
            print(f"{world} ranks: {rates[world][-1]:.0f} samples/s", flush=True)
    first = rates[worlds[0]]
    ratios = {world: [a / b for a, b in zip(own, first, strict=True)] for world, own in rates.items()}
    return {
        "samples_per_second": rates,
        "ratio": {world: statistics.median(own) for world, own in ratios.items()},
        "ratio_by_round": ratios,
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, end = 0.0, -math.inf
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def collectives(trace: Path, world: int) -> dict[str, Any]:
    """Return the bytes that rank 0 sends in a step by kind of tensor, and the fraction of time in collectives."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    steps = [event for event in events if event.get("name", "").startswith("ProfilerStep#")]
    begin = min(step["ts"] for step in steps)
    end = max(step["ts"] + step["dur"] for step in steps)
    found: dict[str, float] = {"features": 0.0, "weights and gradients": 0.0, "few numbers": 0.0}
    spans = []
    config = load_config(CONFIG)
    rows, embed = config.batch_size, create_architecture(config.model.name).embed_dim
    for event in events:
        name = event.get("name", "")
        if name.startswith("gloo:"):
            spans.append((max(event["ts"], begin), min(event["ts"] + event["dur"], end)))
        if name not in SENT:
            assert not name.startswith("c10d::") or name in ("c10d::barrier",), name
            continue
        numbers, dims, size = largest(event["args"])
        if dims in ([rows, embed], [rows], [1, rows]):
            kind = "features"
        else:
            kind = "few numbers" if numbers <= FEW else "weights and gradients"
        found[kind] += SENT[name] * size * (world - 1) / world
    return {
        "bytes": {kind: round(size / len(steps)) for kind, size in found.items()},
        "fraction_of_time": covered(spans) / (end - begin),
    }


def largest(arguments: dict[str, Any]) -> tuple[int, list[int], int]:
    """Return the number of elements and the shape of a collective's largest tensor, and its bytes."""
    sizes = [
        (math.prod(shape), shape, BYTES.get(dtype, 0))
        for dims, dtype in zip(arguments["Input Dims"], arguments["Input type"], strict=True)
        if dims
        for shape in (dims if isinstance(dims[0], list) else [dims])
    ]
    numbers, shape, width = max(sizes)
    return numbers, shape, numbers * (width or 4)  # lists of tensors have no dtype: they are float32


def workload(config: Config, world: int) -> Workload:
    """Return the workload of a configuration."""
    bf16 = computes_in_bf16(config.precision, torch.device("cpu"))
    return workloads_of(config, world=world, shard_ranks=world, bf16=bf16)[-1]


def volume(folder: Path) -> list[dict[str, Any]]:
    """Compare measured bytes with the formula for each variant."""
    rows = []
    for i, (world, settings) in enumerate(VARIANTS):
        run = folder / f"volume-{i}"
        steps = f"steps={4 + PROFILED}"
        train(run, world, *settings, steps, "log.every_steps=1000", "--profile", str(PROFILED))
        found = collectives(run / "profile" / "trace.json.gz", world)
        expected = communication_of(workload(load_config(CONFIG, [*SETTINGS, *settings]), world))
        measured = found["bytes"]
        formula = {
            "features": expected.features,
            "weights and gradients": expected.weights + expected.gradients,
        }
        equal = all(abs(measured[kind] - size) <= 8 for kind, size in formula.items())  # the temperature
        row = {"ranks": world, "settings": settings, **found, "formula": formula, "equal": equal}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def analysis() -> list[dict[str, Any]]:
    """Return bytes of a step and the limits of scaling at a fixed global batch size, by formula."""
    rows = []
    for name in MODELS:
        with torch.device("meta"):
            model = CLIP(create_architecture(name))
        for sharding in ("none", "full"):
            for world in (8, 64, 256, 1024):
                config = Config(batch_size=BATCH, sharding=sharding)
                work = Workload(model=model, config=config, world=world)
                found = estimate(work, speed=MFU * GPUS[GPU].bf16)
                assert found.hours is not None
                sent, seconds = communication_of(work), found.hours * 3600
                row = {
                    "model": name, "sharding": sharding, "gpus": world, **asdict(sent),
                    "compute_seconds": seconds, "send_seconds": sent.total / LINK,
                    "gpus_at_equality": round(world * seconds * LINK / sent.total),
                }  # fmt: skip
                rows.append(row)
                print(
                    f"{name} sharding={sharding} on {world}: {sent.total / 1e9:.2f} GB a step, computing "
                    f"{1e3 * seconds:.0f} ms, sending {1e3 * sent.total / LINK:.0f} ms, equal on "
                    f"{row['gpus_at_equality']} GPUs"
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each run")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4], help="the first is the reference")
    parts = ("speed", "volume", "analysis")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    result = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    result |= {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if "analysis" in options.only:
            result["analysis"] = analysis()
        if "volume" in options.only:
            result["volume"] = volume(folder)
        if "speed" in options.only:
            result["speed"] = speed(folder, options.worlds, options.rounds, options.steps)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
