"""What does the loss alone cost, beside open_clip's: time, and memory beyond its inputs?

    python -m bench.loss [--rows 4096 8192 16384 32768] [--dim 512] [--rounds 3]

Each measurement is one forward and backward pass in a process of its own, all on the same cores: float32 features
of unit norm, one process, no accumulation. Memory is the greatest resident size minus what was resident before the
pass; the gradients of the features, which both give, are in it. open_clip makes both halves of the logits and keeps
them: six products of N × N × O. Ours makes one half, and makes it again in the backward pass: four, and no N × N
matrix goes through main memory.

For more rows than fit, the slopes of the measured sizes are carried on: memory of ours by N, of open_clip's by N².
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

RESULTS = Path(__file__).parent / "results"
ON_PAPER = (131_072, 524_288, 1_048_576)


def one_pass(which: str, rows: int, dim: int) -> dict[str, float]:
    """Seconds and bytes of one pass; run in a fresh process."""
    from clipkit.loss import clip_loss

    if which == "open_clip":
        from open_clip import ClipLoss

        loss = ClipLoss()
    else:
        loss = clip_loss
    generator = torch.Generator().manual_seed(0)

    def features(count: int) -> list[torch.Tensor]:
        made = [F.normalize(torch.randn(count, dim, generator=generator), dim=-1) for _ in range(2)]
        return [one.requires_grad_() for one in made]

    scale = torch.tensor(14.3, requires_grad=True)
    torch.autograd.backward(loss(*features(256), scale))  # loads what the first pass loads
    given = features(rows)
    before = _resident()
    began = time.perf_counter()
    value = loss(*given, scale)
    torch.autograd.backward(value)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"seconds": seconds, "bytes": max(0, peak - before), "loss": value.item()}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def in_a_process(which: str, rows: int, dim: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.loss", "--one", which, "--rows", str(rows), "--dim", str(dim)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def compare(rows: int, dim: int, rounds: int) -> dict[str, float]:
    """Medians of both, and of the rounds' ratios."""
    ours, theirs = [], []
    for turn in range(rounds):
        order = ("clipkit", "open_clip") if turn % 2 else ("open_clip", "clipkit")
        found = {which: in_a_process(which, rows, dim) for which in order}
        ours.append(found["clipkit"])
        theirs.append(found["open_clip"])
    assert abs(ours[0]["loss"] - theirs[0]["loss"]) < 1e-4
    times = [a["seconds"] / b["seconds"] for a, b in zip(ours, theirs, strict=True)]
    return {
        "rows": rows,
        "clipkit seconds": statistics.median(one["seconds"] for one in ours),
        "open_clip seconds": statistics.median(one["seconds"] for one in theirs),
        "time ratio": statistics.median(times),
        "least": min(times),
        "greatest": max(times),
        "clipkit bytes": statistics.median(one["bytes"] for one in ours),
        "open_clip bytes": statistics.median(one["bytes"] for one in theirs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=("clipkit", "open_clip"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_pass(options.one, options.rows[0], options.dim)))
        return
    table = []
    for rows in options.rows:
        table.append(found := compare(rows, options.dim, options.rounds))
        print(
            f"{rows:>8,} rows: time {found['time ratio']:.2f} ({found['least']:.2f} to {found['greatest']:.2f}) of "
            f"open_clip's {found['open_clip seconds']:.2f} s; memory {found['clipkit bytes'] / 2**20:,.0f} MiB, "
            f"open_clip {found['open_clip bytes'] / 2**20:,.0f} MiB"
        )
    last = table[-1]
    paper = [
        {
            "rows": rows,
            "clipkit bytes": last["clipkit bytes"] * rows / last["rows"],
            "open_clip bytes": last["open_clip bytes"] * (rows / last["rows"]) ** 2,
        }
        for rows in ON_PAPER
    ]
    for row in paper:
        ours, theirs = row["clipkit bytes"] / 2**30, row["open_clip bytes"] / 2**30
        print(f"{row['rows']:>8,.0f} rows, carried on: {ours:,.1f} GiB, open_clip {theirs:,.0f} GiB")
    about = {"machine": platform.machine(), "threads": torch.get_num_threads(), "dim": options.dim}
    RESULTS.mkdir(exist_ok=True)
    content = {**about, "rounds": options.rounds, "measured": table, "carried on": paper}
    (RESULTS / "loss.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
