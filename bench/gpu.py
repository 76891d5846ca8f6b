"""Measure a training step and the loss on one GPU relative to a plain implementation, and check CUDA results.

    python -m bench.gpu [--models ViT-B-32 ViT-L-14 ViT-B-16] [--parts right exact loop copies loss training resume]
                        [--minutes 8] [--out bench/results/gpu.json]

Requires torch, torchvision, timm and this repository; the part ``loop`` requires clipkit's other dependencies too.
The run takes at most ``--minutes``, plus a compilation in progress: each part gets a fraction of the time, and
results are written after each part.

* right: results of CUDA computations against references.
* exact: whether gradients repeat bit for bit, with the time of torch's deterministic algorithms.
* resume: whether a run that is killed and resumed ends with the weights of an uninterrupted one.
* loop: ``train.py`` itself on shards of JPEG files, with its loader.
* copies, loss: copies to the GPU; the losses alone.
* training: steps in one process on random images and captions of 16 tokens on average that are already on the GPU,
  including the optimizer:

* clipkit: bf16 autocast, compiled blocks, packed text, uint8 images normalized on the GPU, tiled float32
  loss, fused AdamW; at the largest batch size that fits and is at least 2% faster than half of it.
* plain: open_clip's formulation in bench/plain_clip.py: 77 padded tokens, an additive mask, separate products
  for queries, keys and values, float images, all tokens of the last block, two blocks of logits in bf16,
  torch's default AdamW; eager and compiled as a whole. At the same batch size, halved until it fits.
* open_clip itself, if installed, unchanged.

The losses are also compared with memeff and siglip-kernel, if installed; bench/README.md says how to bring them to
a machine without network.
"""

import argparse
import gc
import importlib.util
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_checks import TINY, check
from bench.gpu_loop import LoopRun, check_repeats, check_resume, measure_loop, write_shards
from bench.gpu_steps import Batch, Contestant, clipkit_steps, make_batch, open_clip_steps, other_steps
from bench.plain_clip import PlainCLIP, plain_loss
from clipkit.config import Config
from clipkit.model.architectures import ARCHITECTURES, Architecture
from clipkit.model.clip import CLIP, create
from clipkit.objectives.clip import clip_loss
from clipkit.objectives.siglip import siglip_loss
from clipkit.training.costs import Workload, flops_of_steps, measured_peak, published_gpu
from clipkit.training.parallel import compile_blocks

RESULTS = Path(__file__).parent / "results"
MODELS = ("ViT-B-32", "ViT-L-14", "ViT-B-16")
FIRST_ROWS = {"ViT-B-32": 1024, "ViT-B-16": 512, "ViT-L-14": 256}
PARTS = ("right", "exact", "loop", "copies", "loss", "training", "resume")
SMALL_RUN = ("model.name=" + TINY, "precision=fp32", "batch_size=16")
LOSS_ROWS = (32_768, 65_536, 131_072, 262_144, 1_048_576)
SCALE = 14.3  # exp(t) in the losses
GAIN = 1.02  # in samples/s that justifies doubling the batch size


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Device, time limit and results so far."""

    device: torch.device
    out: Path
    ends: float  # by the monotonic clock
    small: bool
    results: dict[str, Any] = field(default_factory=dict)

    def left(self) -> float:
        return self.ends - time.monotonic()

    def save(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        aside = self.out.with_suffix(".aside")
        aside.write_text(json.dumps(self.results, indent=2) + "\n")
        aside.rename(self.out)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def seconds(self, work: Callable[[], object], times: int = 1) -> float:
        """Return the seconds per call, with synchronization before and after."""
        self.wait()
        began = time.perf_counter()
        for _ in range(times):
            work()
        self.wait()
        return (time.perf_counter() - began) / times

    def most_memory(self, work: Callable[[], object]) -> int:
        """Return the peak of additionally allocated bytes; 0 if the device does not report it."""
        if self.device.type != "cuda":
            work()
            return 0
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.wait()
        return torch.cuda.max_memory_allocated(self.device) - before


def exact(bench: Bench) -> None:
    """Check whether computations repeat exactly, in a new process: cuBLAS reads its workspace setting once."""
    models: tuple[str, ...] = ("ViT-B-32", "ViT-B-16", "ViT-L-14")
    tokens: tuple[int, ...] = (50, 77, 197, 257, 577)
    rows = 64
    if bench.small:
        models = (TINY,)
        tokens = (50,)
        rows = 4
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        bench.results["exact"] = pool.submit(
            check_repeats, bench.device, models, tokens=tokens, rows=rows
        ).result()
    bench.save()
    for name, modes in bench.results["exact"].items():
        print(f"{name}: {modes}", flush=True)


def loop(bench: Bench) -> None:
    """Measure ``train.py`` on shards of JPEG files."""
    base, large = ("model.name=ViT-B-32", "batch_size=1024"), ("model.name=ViT-L-14", "batch_size=256")
    runs = [
        LoopRun(name="ViT-B-32", steps=60, settings=base, profile=5),
        LoopRun(name="ViT-B-32 compiled", steps=60, settings=(*base, "compile=true")),
        LoopRun(name="ViT-L-14", steps=40, settings=large),
        LoopRun(name="ViT-L-14 not deterministic", steps=40, settings=(*large, "deterministic=false")),
    ]
    if bench.small:
        runs = [LoopRun(name=TINY, steps=12, settings=(*SMALL_RUN, "log.every_steps=2"))]
    report = bench.results["loop"] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = shards_for(bench, folder)
        for run in runs:
            report[run.name] = measure_loop(shards, folder, run, workers=workers_for(bench))
            bench.save()
            print(f"train.py, {run.name}: {json.dumps(report[run.name], indent=1)}", flush=True)


def resume(bench: Bench) -> None:
    """Compare a run that is killed and resumed with an uninterrupted one."""
    settings: tuple[str, ...] = ("model.name=ViT-B-16", "batch_size=256")
    steps = 18
    if bench.small:
        settings, steps = SMALL_RUN, 60
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = shards_for(bench, folder)
        report = check_resume(shards, folder, settings, steps=steps, workers=workers_for(bench))
    bench.results["resume"] = report
    bench.save()
    print(f"resume: {report}", flush=True)


def shards_for(bench: Bench, folder: Path) -> str:
    if bench.small:
        return write_shards(folder / "shards", shards=4, samples=32, side=64)
    return write_shards(folder / "shards", shards=16, samples=1024, side=256)


def workers_for(bench: Bench) -> int:
    return 1 if bench.small else max(1, (os.cpu_count() or 1) - 2)


def most_useful_rows(
    bench: Bench, contestant: Contestant, shape: Architecture, first: int, ends: float
) -> int:
    """Find the largest batch size that fits and is faster than half of it."""
    best, rate, rows, times = first, 0.0, first, 1 if bench.small else 3
    while bench.left() > ends:
        if (seconds := tried(bench, contestant, shape, rows, times)) is None:
            break
        if rows / seconds < GAIN * rate:
            break
        best, rate, rows = rows, rows / seconds, rows * 2
        if bench.small and rows > 2 * first:
            break
    return best


def tried(
    bench: Bench, contestant: Contestant, shape: Architecture, rows: int, times: int = 1
) -> float | None:
    """Return the seconds per step; None if out of memory."""
    seconds, batch = None, None
    try:
        batch = make_batch(shape, rows, bench.device)
        bench.seconds(partial(contestant.step, batch))  # compiles, and creates the optimizer state
        seconds = bench.seconds(partial(contestant.step, batch), times)
    except torch.cuda.OutOfMemoryError:
        pass
    del batch
    contestant.optimizer.zero_grad(set_to_none=True)
    bench.free()
    return seconds


def train(bench: Bench, name: str, seconds: float) -> dict[str, Any]:
    """Measure one model: clipkit and the others in turns, for ``seconds``."""
    shape, ends = ARCHITECTURES[name], bench.left() - seconds
    backend = "eager" if bench.small else "inductor"  # inductor compiles too slowly for tests
    model = create(ARCHITECTURES[name], name=name, seed=0).to(bench.device).train()
    plain = PlainCLIP(shape).to(bench.device).train()
    plain.load_state_dict(model.state_dict())
    compile_blocks(model, backend=backend)
    contestants = [clipkit_steps(model)]
    first = 8 if bench.small else FIRST_ROWS.get(name, 256)
    fits = most_useful_rows(bench, contestants[0], shape, first, ends + 0.6 * seconds)
    rows = {"clipkit": fits}
    others = [other_steps("plain", plain, plain)]
    if importlib.util.find_spec("open_clip") is not None:
        others.append(open_clip_steps(shape, model, bench.device))
    others.append(other_steps("plain compiled", plain, torch.compile(plain, backend=backend)))
    for other in others:
        if other.name == "plain compiled" and bench.left() < bench.results.get("compiled_in", 45.0):
            break
        began = time.monotonic()
        while fits > 1 and tried(bench, other, shape, fits) is None:
            fits //= 2
        rows[other.name] = fits
        contestants.append(other)
    if "plain compiled" in rows:
        bench.results["compiled_in"] = max(bench.results.get("compiled_in", 0.0), time.monotonic() - began)
    while True:
        try:
            return rounds(bench, contestants, rows, shape, ends)
        except torch.cuda.OutOfMemoryError:  # each was tried with fewer other weights in memory
            rows = {which: size // 2 for which, size in rows.items()}
        bench.free()


def rounds(
    bench: Bench, contestants: list[Contestant], rows: dict[str, int], shape: Architecture, ends: float
) -> dict[str, Any]:
    """Run steps in turns until the time limit, and summarize them."""
    made = {size: make_batch(shape, size, bench.device) for size in set(rows.values())}
    steps = {
        contestant.name: partial(contestant.step, made[rows[contestant.name]]) for contestant in contestants
    }
    memory, seconds = {}, {contestant.name: list[float]() for contestant in contestants}
    for contestant in contestants:
        memory[contestant.name] = contestant.held() + bench.most_memory(steps[contestant.name])
        contestant.optimizer.zero_grad(set_to_none=True)
    for turn in range(2 if bench.small else 9):
        if turn > 1 and bench.left() < ends:
            break
        for one in contestants:
            seconds[one.name].append(bench.seconds(steps[one.name], 1 if bench.small else 3))
            one.optimizer.zero_grad(set_to_none=True)
    measured = {}
    for name, times in seconds.items():
        ratios = [
            b / rows[name] / (a / rows["clipkit"]) for a, b in zip(seconds["clipkit"], times, strict=True)
        ]
        measured[name] = {
            **rates(bench, shape, made[rows[name]], statistics.median(times)),
            "peak_memory": memory[name],
            "seconds_by_round": times,
            "clipkit_faster": statistics.median(ratios),
            "clipkit_faster_by_round": ratios,
        }
    return measured


def rates(bench: Bench, shape: Architecture, batch: Batch, seconds: float) -> dict[str, Any]:
    rows, device = len(batch.lengths), bench.results["device"]
    with torch.device("meta"):
        count = flops_of_steps(Workload(model=CLIP(shape), config=Config(batch_size=rows)))
    assert count is not None
    flops = count(batch.lengths, shape.vision.image_size, ()) / seconds
    sheet = device["data_sheet_bf16"]
    return {
        "batch": rows,
        "mean_tokens": statistics.mean(batch.lengths),
        "samples_per_second": rows / seconds,
        "flops_per_second": flops,
        "mfu_of_measured_peak": flops / device["measured_bf16"],
        "mfu_of_data_sheet": flops / sheet if sheet else None,
    }


def copies(bench: Bench, rows: int) -> dict[str, float]:
    """Measure seconds to copy a batch to the device: pinned uint8, and float32 from a loader without pinning."""
    images = torch.randint(0, 256, (rows, 3, 224, 224), dtype=torch.uint8)
    floats = images.float()
    if bench.device.type == "cuda":
        images = images.pin_memory()
    seconds = {"pictures": float(rows)}
    for name, tensor in (("uint8 pinned", images), ("float32", floats)):
        copy = partial(tensor.to, bench.device, non_blocking=True)
        seconds[name] = statistics.median(bench.seconds(copy) for _ in range(5))
    return seconds


def loss_peers(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """Return the losses to measure by name; those of other libraries if they are installed.

    All take unit-norm features in float32, exp(t) and, for the sigmoid loss, a bias.
    """
    peers: dict[str, Callable[..., Tensor]] = {
        "clipkit": clip_loss,
        "plain": plain_loss,
        "clipkit siglip": siglip_loss,
    }
    if importlib.util.find_spec("open_clip") is not None:
        from open_clip.loss import ClipLoss, SigLipLoss

        peers["open_clip"], peers["open_clip siglip"] = ClipLoss(), SigLipLoss()
    if device.type == "cuda" and importlib.util.find_spec("memeff") is not None:
        import memeff

        # its temperature is a number, without a gradient
        module = memeff.MemoryEfficientCLIPLoss(temperature=1 / SCALE, normalized_inputs=True, stable=False)
        peers["memeff"] = lambda image, text, scale: module(image, text)
    if device.type == "cuda" and importlib.util.find_spec("siglip_kernel") is not None:
        from siglip_kernel import fused_siglip_loss

        peers["siglip-kernel siglip"] = lambda image, text, scale, bias: fused_siglip_loss(
            image, text, scale.log(), bias
        )
    return peers


def loss_alone(bench: Bench, sizes: Sequence[int], dim: int) -> None:
    """Measure forward and backward passes of the losses on the features of one GPU, within the time limit."""
    table, peers = bench.results.setdefault("loss", []), loss_peers(bench.device)
    for rows in sizes:
        row: dict[str, Any] = {"rows": rows, "dim": dim}
        table.append(row)
        generator = torch.Generator(bench.device).manual_seed(0)
        features = [torch.randn(rows, dim, device=bench.device, generator=generator) for _ in range(2)]
        given = [F.normalize(feature, dim=-1).requires_grad_() for feature in features]
        given.append(torch.tensor(SCALE, device=bench.device, requires_grad=True))
        bias = torch.tensor(-10.0, device=bench.device, requires_grad=True)
        for name, loss in peers.items():
            tensors = [*given, bias] if name.endswith("siglip") else given
            row[name] = one_loss(bench, partial(both_passes, loss, tensors), expected(table, name, rows))
            for tensor in tensors:
                tensor.grad = None
            bench.free()
        bench.save()
        report_loss(row)


def report_loss(row: dict[str, Any]) -> None:
    for name, result in row.items():
        own = row["clipkit siglip" if name.endswith("siglip") else "clipkit"]
        if isinstance(result, dict) and isinstance(own, dict):
            compared = f"{own['seconds'] / result['seconds']:.2f} of its time"
            if result["bytes"]:
                compared += f", {own['bytes'] / result['bytes']:.2f} of its memory"
            print(
                f"loss of {row['rows']:,} rows, {name}: {1e3 * result['seconds']:.1f} ms, "
                f"{result['bytes'] / 2**20:,.0f} MiB, value {result['value']:.6g}; clipkit takes {compared}",
                flush=True,
            )
        elif isinstance(result, str):
            print(f"loss of {row['rows']:,} rows, {name}: {result}", flush=True)


def both_passes(loss: Callable[..., Tensor], given: Sequence[Tensor]) -> Tensor:
    value = loss(*given)
    torch.autograd.backward(value)
    return value.detach()


def expected(table: Sequence[dict[str, Any]], name: str, rows: int) -> float:
    """Return the expected seconds: proportional to the square of the rows, from the last measurement."""
    timed = [row for row in table if isinstance(row.get(name), dict)]
    return timed[-1][name]["seconds"] * (rows / timed[-1]["rows"]) ** 2 if timed else 0.0


def one_loss(bench: Bench, work: Callable[[], Tensor], seconds: float) -> dict[str, float] | str:
    """Measure one loss that is expected to take ``seconds``; long ones only once."""
    if seconds > bench.left():
        return "no time left"
    try:
        if seconds < 1:
            work()  # one-time initialization
        values: list[Tensor] = []
        began = time.perf_counter()
        memory = bench.most_memory(lambda: values.append(work()))
        took = time.perf_counter() - began
        if took < 2:
            took = statistics.median(bench.seconds(work) for _ in range(3))
    except torch.cuda.OutOfMemoryError:
        return "out of memory"
    except Exception as error:  # of a peer: a kernel that does not compile here must not end the bench
        return f"failed: {error!r:.300}"
    return {"seconds": took, "bytes": memory, "value": values[0].item()}


def describe_device(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "name": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "measured_bf16": measured_peak(device, torch.bfloat16),
        "measured_fp32": measured_peak(device, torch.float32),
        "data_sheet_bf16": None if (sheet := published_gpu(name)) is None else sheet.bf16,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="smoke test with a tiny model and batch")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    device, small = torch.device(options.device), options.small
    ends = time.monotonic() + 60 * options.minutes
    bench = Bench(device=device, out=options.out, ends=ends, small=small)
    bench.results["device"] = describe_device(device)
    if "right" in options.parts:
        bench.results["right"] = check(device, small=small)
        bench.save()
    if "exact" in options.parts:
        exact(bench)
    if "loop" in options.parts:
        loop(bench)
    if "copies" in options.parts:
        bench.results["copies"] = copies(bench, 8 if small else 1024)
        bench.save()
    if "loss" in options.parts:
        loss_alone(bench, (64, 128) if small else LOSS_ROWS[:-1], 64 if small else 512)
    if "training" in options.parts:
        models = [TINY] if small else options.models
        bench.results["training"] = {}
        for i, name in enumerate(models):
            bench.results["training"][name] = results = train(bench, name, bench.left() / (len(models) - i))
            bench.free()
            bench.save()
            report(name, results)
    if "resume" in options.parts:
        resume(bench)
    if "loss" in options.parts and not small:
        loss_alone(bench, LOSS_ROWS[-1:], 512)  # may exceed the remaining time
    bench.results["minutes"] = options.minutes - bench.left() / 60
    bench.save()
    print(
        json.dumps({name: result for name, result in bench.results.items() if name != "training"}, indent=2)
    )
    wrong = [name for name, result in bench.results.get("right", {}).items() if not result["right"]]
    if wrong:
        raise SystemExit(f"error: wrong on {device}: {', '.join(wrong)}")


def report(name: str, results: dict[str, Any]) -> None:
    for who, result in results.items():
        print(
            f"{name} {who}: {result['samples_per_second']:,.0f} samples/s at {result['batch']}, MFU "
            f"{result['mfu_of_measured_peak']:.1%} of the measured peak, {result['peak_memory'] / 2**30:.1f} GiB, "
            f"clipkit {result['clipkit_faster']:.2f}× as fast"
        )


if __name__ == "__main__":
    main()
