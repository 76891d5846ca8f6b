"""Measure the peak memory of a training step on the CPU, against open_clip's and against the estimate of --dry-run.

    python -m bench.step_memory [--cases ViT-B-32:32 ViT-L-14:2] [--tokens 16 77]

Each case (model and batch size) is measured in fresh processes: the greatest resident memory of building the model
and its AdamW and making two steps in float32, above that after the imports. Four variants: as it is, with
``recompute`` (open_clip: ``--grad-checkpointing``), with ``accumulate=4`` (``--accum-freq 4`` at a quarter of the
batch size), and both. Memory is returned to the system as soon as a tensor of at least 1 MiB is freed, for both
sides.

open_clip pads captions to 77 tokens; clipkit computes their tokens, 16 on average, or 77 with ``--tokens 77``, as
the estimate assumes. The results under "gpu" are estimates in bf16.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import clipkit
from bench.caption import peak_memory
from bench.options import ROOT
from bench.train_step import CONFIG, make_pairs
from clipkit.config import Config
from clipkit.model.clip import CLIP
from clipkit.model.names import create_architecture
from clipkit.model.tokenizer import END_OF_TEXT, START_OF_TEXT
from clipkit.training.costs import Workload, measure_workload, memory_of
from clipkit.training.optim import adamw
from clipkit.training.parallel import recompute_blocks
from clipkit.training.step import backward

RESULT = Path(__file__).parent / "results" / "step_memory.json"
VARIANTS = ((0, 1), (1, 1), (0, 4), (1, 4))  # recompute, accumulate
GPU_CASES = (("ViT-B-32", 1024), ("ViT-L-14", 256), ("ViT-H-14", 128))
STEPS = 2  # the second has the optimizer's state during the backward pass


def clipkit_steps(name: str, images: Tensor, tokens: Tensor, recompute: int, parts: int) -> None:
    model = clipkit.create(name, seed=0).train()
    recompute_blocks(model, every=recompute)
    optimizer = adamw(model, CONFIG)
    lengths = (tokens.argmax(dim=1) + 1).tolist()
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        inputs = {"images": images, "tokens": tokens, "lengths": lengths}
        backward(model, inputs, loss=clipkit.clip_loss, parts=parts, autocast=False)
        optimizer.step()


def open_clip_steps(name: str, images: Tensor, tokens: Tensor, recompute: int, parts: int) -> None:
    """Train as open_clip's trainer does (open_clip_train/train.py), which computes the loss once for each part."""
    import open_clip

    model: Any = open_clip.create_model(name).train()
    model.set_grad_checkpointing(bool(recompute))
    loss_of = open_clip.ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG.lr, weight_decay=CONFIG.weight_decay)
    for _ in range(STEPS):
        optimizer.zero_grad()
        if parts == 1:
            torch.autograd.backward(loss_of(*model(images, tokens)))
        else:
            pairs = list(zip(images.chunk(parts), tokens.chunk(parts), strict=True))
            with torch.no_grad():
                features = [model(*pair)[:2] for pair in pairs]
            for i, pair in enumerate(pairs):
                of_images, of_texts, scale = model(*pair)
                whole = []
                for side, own in enumerate((of_images, of_texts)):
                    kept = [feature[side] for feature in features]
                    whole.append(torch.cat([*kept[:i], own, *kept[i + 1 :]]))
                torch.autograd.backward(loss_of(*whole, scale))
        optimizer.step()


def measure(side: str, name: str, rows: int, tokens: int, recompute: int, parts: int) -> int:
    """Return the peak memory in bytes; run in a fresh process."""
    torch.set_num_threads(1)
    pairs = make_pairs(create_architecture(name), rows)
    if tokens == 77:
        pairs.tokens.fill_(1)
        pairs.tokens[:, 0], pairs.tokens[:, -1] = START_OF_TEXT, END_OF_TEXT
    steps, images = (
        (clipkit_steps, pairs.images) if side == "clipkit" else (open_clip_steps, pairs.normalized)
    )
    steps("ViT-S-32", images[:1], pairs.tokens[:1], recompute, 1)  # imports and thread pools
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at the current size
    before = peak_memory()
    steps(name, images, pairs.tokens, recompute, parts)
    return peak_memory() - before


def estimated(name: str, rows: int, recompute: int, parts: int, *, bf16: bool = False) -> int:
    """Return the estimate of ``--dry-run`` in bytes."""
    with torch.device("meta"):
        model = CLIP(create_architecture(name))
    config = Config(batch_size=rows, accumulate=parts, recompute=recompute)
    work = Workload(model=model, config=config, bf16=bf16)
    return memory_of(work, measure_workload(work)).total


def write(rows: list[dict[str, Any]]) -> None:
    """Write the rows measured so far, and estimates for GPUs."""
    gpu = [
        {"model": name, "rows": count, "recompute": recompute, "accumulate": parts}
        | {"estimate": estimated(name, count, recompute, parts, bf16=True)}
        for name, count in GPU_CASES
        for recompute, parts in VARIANTS
    ]
    RESULT.write_text(json.dumps({"cpu": rows, "gpu": gpu, "torch": torch.__version__}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["ViT-B-32:32", "ViT-L-14:2"], metavar="MODEL:ROWS")
    parser.add_argument("--tokens", type=int, nargs="+", choices=(16, 77), default=[16, 77])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(measure(*json.loads(options.one)))
        return
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "PYTHONPATH": str(ROOT)}
    rows: list[dict[str, Any]] = []
    for case in options.cases:
        name, _, size = case.partition(":")
        for recompute, parts in VARIANTS:
            count = int(size)
            if parts > count:
                continue
            row: dict[str, Any] = {"model": name, "rows": count, "recompute": recompute, "accumulate": parts}
            row["estimate"] = estimated(name, count, recompute, parts)
            sides = [("open_clip", 77), *(("clipkit", tokens) for tokens in options.tokens)]
            for side, tokens in sides:
                given = json.dumps([side, name, count, tokens, recompute, parts])
                command = [sys.executable, "-m", "bench.step_memory", "--one", given]
                done = subprocess.run(
                    command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
                )
                row[side if side == "open_clip" else f"{side}_{tokens}"] = int(done.stdout)
            rows.append(row)
            shown = [
                f"{key} {value / 2**20:,.0f} MiB"
                for key, value in row.items()
                if type(value) is int and value > 2**20
            ]
            print(f"{case} recompute={recompute} accumulate={parts}: {', '.join(shown)}", flush=True)
            write(rows)


if __name__ == "__main__":
    main()
