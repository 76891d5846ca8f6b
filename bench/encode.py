"""Measure how well ``clipkit encode`` overlaps decoding with the forward passes.

    python -m bench.encode [--model ViT-B-32] [--images 512] [--size 512] [--batch-size 32] [--rounds 5]

Each round measures three variants on the same images, in alternating order, so that changes in machine load
affect all of them:

    forward    the forward passes alone, on batches in memory, one after the other on all cores
    one_core   the same, but one batch per core, as ``clipkit encode`` computes them
    encode     the complete command: lists the folder, reads, decodes and preprocesses JPEG files, computes the same
               batches, writes and syncs embeddings and metadata

The model is loaded in advance. Ratios are medians over rounds of the time of encode relative to each of the
others.

Bound on a CPU: decoding takes cores from the forward pass. If all cores are busy, the ratio to ``one_core``
cannot be below 1 + (CPU time of decoding) / (CPU time of the forward passes). The result contains both.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # before torch loads; spinning threads would block decoding

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor

import clipkit
from clipkit.inference.encode import encode
from clipkit.inference.inputs import Stream
from clipkit.inference.stream import FeatureStream
from clipkit.model.cpu import open_core_pool
from clipkit.model.preprocess import preprocess_images
from clipkit.options import EncodeOptions

RESULTS = Path(__file__).parent / "results"


def make_images(folder: Path, count: int, size: int) -> list[Path]:
    """Write JPEGs of quality 90: random square crops of two photographs."""
    random = np.random.default_rng(0)
    photos = [Image.fromarray(array) for array in load_sample_images().images]
    paths = []
    for i in range(count):
        photo = photos[i % len(photos)]
        side = int(random.integers(200, min(photo.size)))
        left, top = (int(random.integers(0, length - side + 1)) for length in photo.size)
        square = photo.crop((left, top, left + side, top + side)).resize(
            (size, size), Image.Resampling.BICUBIC
        )
        path = folder / f"{i:05d}.jpg"
        square.save(path, quality=90)
        paths.append(path)
    return paths


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Measure wall-clock seconds and CPU seconds of the process."""
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()
    model = clipkit.create(options.model, seed=0).eval()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "images"
        folder.mkdir()
        paths = make_images(folder, options.images, options.size)
        measure(options, model, paths, Path(scratch))


def measure(options: argparse.Namespace, model: clipkit.CLIP, paths: list[Path], scratch: Path) -> None:
    """Run the rounds and report the result."""
    size = options.batch_size
    batches: list[Tensor] = []

    def decode() -> None:
        starts = range(0, len(paths), size)
        batches.extend(
            preprocess_images([str(path) for path in paths[i : i + size]], model.preprocess) for i in starts
        )

    def forward() -> None:
        with torch.inference_mode():
            for batch in batches:
                model.encode_image(batch)

    def one_core() -> None:
        def rows(batch: Tensor) -> Tensor:
            with torch.inference_mode():
                return model.encode_image(batch)

        with open_core_pool(torch.get_num_threads()) as pool:
            list(pool.map(rows, batches))

    number = 0

    def whole() -> None:
        nonlocal number
        number += 1
        features = FeatureStream(model, batch_size=size, workers=options.workers)
        stream = Stream([str(paths[0].parent)])
        out = scratch / f"out-{number}"
        encode(stream, features, EncodeOptions(sources=(), model="", out=out, quiet=True))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    decoding = timed(decode)[1]
    torch.set_num_threads(threads)
    with torch.inference_mode():
        model.encode_image(batches[0])  # one-time initialization
    work = {"forward": forward, "encode": whole, "one_core": one_core}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    loads = [os.getloadavg()[0]]  # other load on the machine
    for turn in range(options.rounds):
        for name in sorted(work, reverse=bool(turn % 2)):
            seconds[name].append(timed(work[name]))
        took = ", ".join(
            "{} {:.1f} s ({:.1f} CPU)".format(name, *times[-1]) for name, times in seconds.items()
        )
        loads.append(os.getloadavg()[0])
        print(f"round {turn + 1}: {took}, load {loads[-1]:.1f}", flush=True)
    report(options, seconds, decoding, loads)


def report(
    options: argparse.Namespace,
    seconds: dict[str, list[tuple[float, float]]],
    decoding: float,
    loads: list[float],
) -> None:
    """Print the result and write it as JSON."""
    ratios = {
        name: [whole[0] / alone[0] for whole, alone in zip(seconds["encode"], seconds[name], strict=True)]
        for name in ("forward", "one_core")
    }
    cpu = {name: statistics.median(used for _, used in times) for name, times in seconds.items()}
    rates = {
        name: options.images / statistics.median(wall for wall, _ in times) for name, times in seconds.items()
    }
    result = {
        "model": options.model,
        "pictures": options.images,
        "pixels": options.size,
        "batch_size": options.batch_size,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "load_before_and_after_rounds": loads,
        "seconds": {name: [wall for wall, _ in times] for name, times in seconds.items()},
        "pictures_per_second": rates,
        "cpu_ms_per_picture": {
            **{name: 1e3 * value / options.images for name, value in cpu.items()},
            "decode": 1e3 * decoding / options.images,
        },
        "ratio_by_round": ratios,
        "lowest_ratio_on_busy_cores": 1 + decoding / cpu["one_core"],
        "ratio": {f"encode to {name}": statistics.median(values) for name, values in ratios.items()},
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"encode_{options.model}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "seconds"}, indent=2))
    print(
        f"encode {rates['encode']:.2f} images/s, forward passes alone {rates['forward']:.2f} images/s; "
        f"time of encode relative to forward passes {statistics.median(ratios['forward']):.3f}, "
        f"with one batch per core {statistics.median(ratios['one_core']):.3f}"
    )


if __name__ == "__main__":
    main()
