"""Compare time and memory of the loss alone with open_clip's.

    python -m bench.loss [--loss clip siglip] [--rows 4096 8192 16384 32768] [--dim 512] [--rounds 3]

Each measurement is one forward and backward pass in a separate process on the same cores: float32 features
with unit norm, one process, no accumulation. Memory is the peak resident size minus the resident size before
the pass, so it includes the gradients of the features.

open_clip's ClipLoss computes both halves of the logits and stores them: six products of N × N × O. clipkit
computes one half, and again in the backward pass: four products. SigLipLoss needs three, as does clipkit's,
which computes the gradients together with the value. clipkit never writes an N × N matrix to main memory.

Costs of more rows are extrapolated and marked as such: for clipkit by least squares over the measured sizes,
time as N², memory as multiples of the features and of a tile; open_clip's memory as N² from the largest size.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
EXTRAPOLATED_ROWS = (65_536, 131_072, 262_144, 524_288, 1_048_576)
LOSSES = ("clip", "siglip")
SIDES = ("clipkit", "open_clip")
Row = dict[str, float]


def loss_of(side: str, name: str) -> Callable[..., Tensor]:
    """Return a loss of image features, text features, scale and, for siglip, bias."""
    if side == "clipkit":
        from clipkit.objectives.clip import clip_loss
        from clipkit.objectives.siglip import siglip_loss

        return clip_loss if name == "clip" else siglip_loss
    from open_clip.loss import ClipLoss, SigLipLoss

    found: Callable[..., Tensor] = ClipLoss() if name == "clip" else SigLipLoss()
    return found


def one_pass(side: str, name: str, rows: int, dim: int) -> Row:
    """Measure seconds and bytes of one pass; run in a fresh process."""
    loss = loss_of(side, name)
    generator = torch.Generator().manual_seed(0)

    def features(count: int) -> list[Tensor]:
        made = [F.normalize(torch.randn(count, dim, generator=generator), dim=-1) for _ in range(2)]
        return [one.requires_grad_() for one in made]

    scalars = {"clip": [14.3], "siglip": [10.0, -10.0]}[name]
    scale = [torch.tensor(value, requires_grad=True) for value in scalars]
    torch.autograd.backward(loss(*features(256), *scale))  # one-time initialization
    given = features(rows)
    before = _resident()
    began = time.perf_counter()
    value = loss(*given, *scale)
    torch.autograd.backward(value)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"seconds": seconds, "bytes": max(0, peak - before), "loss": value.item()}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def in_a_process(side: str, name: str, rows: int, dim: int) -> Row:
    """Run ``one_pass`` in a separate process."""
    command = [sys.executable, "-m", "bench.loss", "--one", side, "--loss", name]
    done = subprocess.run(
        [*command, "--rows", str(rows), "--dim", str(dim)], capture_output=True, text=True, check=True
    )
    found: Row = json.loads(done.stdout)
    return found


def compare(name: str, rows: int, dim: int, rounds: int) -> Row:
    """Return medians of both sides and the ratios over rounds."""
    found: dict[str, list[Row]] = {side: [] for side in SIDES}
    for turn in range(rounds):
        for side in SIDES if turn % 2 else reversed(SIDES):
            found[side].append(in_a_process(side, name, rows, dim))
    own, reference = found["clipkit"], found["open_clip"]
    assert abs(own[0]["loss"] - reference[0]["loss"]) < 1e-4
    times = [a["seconds"] / b["seconds"] for a, b in zip(own, reference, strict=True)]
    row = {"rows": rows, "time ratio": statistics.median(times), "least": min(times), "greatest": max(times)}
    for side in SIDES:
        for what in ("seconds", "bytes"):
            row[f"{side} {what}"] = statistics.median(one[what] for one in found[side])
    row["memory ratio"] = row["clipkit bytes"] / max(1, row["open_clip bytes"])
    return row


def extrapolate(table: list[Row], dim: int) -> list[Row]:
    """Extrapolate the measured slopes to more rows.

    Memory requires two measured sizes with more rows than a tile, time one.
    """
    from clipkit.objectives.tiles import tile_height

    def parts(rows: float) -> list[float]:
        return [4.0 * rows * dim, 4.0 * rows * tile_height(int(rows), int(rows))]  # bytes: features, a tile

    def column(key: str) -> Tensor:
        return torch.tensor([[row[key]] for row in table], dtype=torch.float64)

    rows, seconds, used = column("rows"), column("clipkit seconds"), column("clipkit bytes")
    by_square = float((rows**2 * seconds).sum() / (rows**4).sum())
    copies = torch.tensor([parts(row["rows"]) for row in table], dtype=torch.float64)
    slopes = torch.linalg.lstsq(copies, used, driver="gelsd").solution[:, 0].tolist()
    if min(slopes) < 0:  # too few sizes to separate them: attribute all to the features
        slopes = [float((copies[:, :1] * used).sum() / (copies[:, 0] ** 2).sum()), 0.0]
    last = table[-1]
    return [
        {
            "rows": rows,
            "clipkit seconds": by_square * rows**2,
            "clipkit bytes": sum(slope * part for slope, part in zip(slopes, parts(rows), strict=True)),
            "open_clip bytes": last["open_clip bytes"] * (rows / last["rows"]) ** 2,
        }
        for rows in EXTRAPOLATED_ROWS
    ]


def show(name: str, table: list[Row], further: list[Row]) -> None:
    """Print the table in Markdown."""
    print(f"\n{name}\n\n| rows | seconds | relative to open_clip | MiB | open_clip MiB | |")
    print("| ---: | ---: | ---: | ---: | ---: | --- |")
    for row in table:
        ratio = f"{row['time ratio']:.2f} ({row['least']:.2f} to {row['greatest']:.2f})"
        print(f"| {row['rows']:,} | {row['clipkit seconds']:.3g} | {ratio} | {_memory(row)} | measured |")
    for row in further:
        print(f"| {row['rows']:,} | {row['clipkit seconds']:,.0f} | – | {_memory(row)} | extrapolated |")


def _memory(row: Row) -> str:
    return f"{row['clipkit bytes'] / 2**20:,.0f} | {row['open_clip bytes'] / 2**20:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loss", choices=LOSSES, nargs="+", default=LOSSES)
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "loss.json", help="output file (JSON)")
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_pass(options.one, options.loss[0], options.rows[0], options.dim)))
        return
    losses = {}
    for name in options.loss:
        table = [compare(name, rows, options.dim, options.rounds) for rows in sorted(options.rows)]
        further = extrapolate(table, options.dim)
        show(name, table, further)
        losses[name] = {"measured": table, "extrapolated": further}
    about = {"machine": platform.machine(), "threads": torch.get_num_threads(), "dim": options.dim}
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps({**about, "rounds": options.rounds, **losses}, indent=2) + "\n")


if __name__ == "__main__":
    main()
