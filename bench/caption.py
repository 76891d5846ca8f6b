"""Compare a training step that predicts captions with open_clip's CoCa, and the memory of the vocabulary's loss.

    python -m bench.caption [--batch-size 16] [--rounds 7] [--tokens 1024 4096 131072]

Step: both train towers of the same shapes on the same images and captions (16 tokens on average) with the
contrastive loss and a caption loss, and update with AdamW. open_clip's CoCa has a decoder as deep as its text
tower, as in its published configurations; clipkit's has half of that by default. ``whole`` has all layers, for the
part of the ratio that is due to the code. Steps alternate; a ratio is the median over rounds. Data loading is
excluded.

Vocabulary: the peak resident memory of the loss of N predicted tokens, 512 wide, over 49,408 words, above that
before the pass, in a fresh process, for clipkit and for ``cross_entropy(hidden @ weight)``. The latter is
extrapolated where it needs more than ``--most-gb``, in proportion to N.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor

import clipkit
from bench.train_step import CONFIG, Pairs, gemm_rate, make_pairs, timed
from clipkit.model import Architecture, TextTower, VisionTower
from clipkit.model.architectures import Decoder
from clipkit.model.decoder import caption_nll
from clipkit.training.optim import adamw
from clipkit.training.step import LocalTerms, backward

RESULT = Path(__file__).parent / "results" / "caption.json"
WIDTH, LAYERS, HEADS = 256, 6, 4
WORDS, VOCABULARY_WIDTH = 49408, 512
SHAPE = Architecture(
    embed_dim=WIDTH,
    vision=VisionTower(image_size=64, patch_size=8, width=WIDTH, layers=LAYERS, heads=HEADS),
    text=TextTower(width=WIDTH, layers=LAYERS, heads=HEADS),
)
Step = tuple[Callable[[], Tensor], torch.optim.Optimizer]


def clipkit_step(pairs: Pairs, *, layers: int) -> Step:
    """Return the gradients of a step of clipkit, whose decoder reads the text tower's tokens, and its optimizer."""
    decoder = Decoder(width=WIDTH, layers=layers, heads=HEADS, context_length=76, feed="text")
    model = clipkit.create(replace(SHAPE, decoder=decoder), seed=0).train()
    optimizer = adamw(model, CONFIG)
    lengths = (pairs.tokens.argmax(dim=1) + 1).tolist()
    terms = LocalTerms(
        inputs={"caption": {"captions": pairs.tokens, "lengths": lengths}},
        weights=torch.tensor([1.0], dtype=torch.float64),
        counts=torch.tensor([sum(lengths) - len(lengths)], dtype=torch.float64),
    )

    def gradients() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        inputs = {"images": pairs.images, "tokens": pairs.tokens, "lengths": lengths}
        return backward(model, inputs, loss=clipkit.clip_loss, parts=1, autocast=False, terms=terms).loss

    return gradients, optimizer


def open_clip_step(pairs: Pairs) -> Step:
    """Return the same of open_clip's CoCa, as its trainer computes it."""
    text = {"width": WIDTH, "layers": LAYERS, "heads": HEADS}
    model: Any = open_clip.CoCa(
        embed_dim=WIDTH,
        vision_cfg={
            "image_size": 64, "patch_size": 8, "width": WIDTH, "layers": LAYERS, "head_width": WIDTH // HEADS,
            "output_tokens": True,
        },
        text_cfg={**text, "output_tokens": True},
        multimodal_cfg={**text, "context_length": 77},
    ).train()  # fmt: skip
    loss_of = open_clip.CoCaLoss(caption_loss_weight=1.0, clip_loss_weight=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG.lr, weight_decay=CONFIG.weight_decay)

    def gradients() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = sum(loss_of(**model(pairs.normalized, pairs.tokens)))
        torch.autograd.backward(value)
        return value.detach()

    return gradients, optimizer


def compare_steps(batch_size: int, rounds: int) -> dict[str, Any]:
    """Time steps in alternating order; return seconds and ratios to open_clip."""
    pairs = make_pairs(SHAPE, batch_size)
    steps = {
        "half": clipkit_step(pairs, layers=LAYERS // 2),
        "open_clip": open_clip_step(pairs),
        "whole": clipkit_step(pairs, layers=LAYERS),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items() if number % 2 else reversed(steps.items()):
            found, _ = timed(*step)
            if number:  # the first is a warm-up
                seconds[name].append(found)
    result: dict[str, Any] = {"batch_size": batch_size, "seconds": seconds, "gemm_flops": gemm_rate()}
    for name in ("half", "whole"):
        ratios = [a / b for a, b in zip(seconds["open_clip"], seconds[name], strict=True)]
        result[name] = {"ratio": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}
        print(
            f"{name}: {statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
    return result


def one_loss(side: str, tokens: int) -> dict[str, float]:
    """Measure the peak memory in bytes and the seconds of one pass; run in a fresh process."""
    random = torch.Generator().manual_seed(0)
    weight = (
        torch.randn(VOCABULARY_WIDTH, WORDS, generator=random).mul_(VOCABULARY_WIDTH**-0.5).requires_grad_()
    )

    def run(count: int) -> Tensor:
        hidden = torch.randn(count, VOCABULARY_WIDTH, generator=random).requires_grad_()
        targets = torch.randint(0, WORDS, (count,), generator=random)
        if side == "clipkit":
            value = caption_nll(hidden, weight, targets)
        else:
            value = F.cross_entropy(hidden @ weight, targets, reduction="sum")
        torch.autograd.backward(value)
        weight.grad = None
        return value

    run(2)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at the current size
    before = peak_memory()
    began = time.perf_counter()
    run(tokens)
    seconds = time.perf_counter() - began
    return {"bytes": peak_memory() - before, "seconds": seconds}


def peak_memory() -> int:
    """Return the greatest resident memory of this process in bytes, since its start or ``clear_refs``."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) << 10


def compare_losses(counts: list[int], most: float) -> list[dict[str, Any]]:
    """Measure memory for each number of tokens; the plain formula's is extrapolated above ``most`` bytes."""
    rows: list[dict[str, Any]] = []
    for count in counts:
        row: dict[str, Any] = {"tokens": count}
        for side in ("clipkit", "plain"):
            if side == "plain" and 3 * 4 * count * WORDS > most:
                last = rows[-1]
                row["plain_bytes"] = last["plain_bytes"] * count / last["tokens"]
                row["extrapolated"] = True
                continue
            command = [sys.executable, "-m", "bench.caption", "--one", side, "--tokens", str(count)]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            row |= {f"{side}_{name}": value for name, value in found.items()}
        row["memory_ratio"] = row["clipkit_bytes"] / row["plain_bytes"]
        rows.append(row)
        print(
            f"{count:,} tokens: {row['clipkit_bytes'] / 2**20:,.0f} MiB, 1/{1 / row['memory_ratio']:.0f}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 131_072], help="ascending")
    parser.add_argument("--most-gb", type=float, default=8.0)
    parser.add_argument("--one", choices=("clipkit", "plain"), help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.one:
        print(json.dumps(one_loss(parsed.one, parsed.tokens[0])))
        return
    result = {
        "step": compare_steps(parsed.batch_size, parsed.rounds),
        "vocabulary": compare_losses(parsed.tokens, parsed.most_gb * 2**30),
        "threads": torch.get_num_threads(),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
