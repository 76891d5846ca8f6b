"""Check that memory does not grow over epochs, with loader processes that live as long as the training.

    python -m bench.memory [--samples 3000] [--epochs 20] [--workers 2] [--image-size 64]

Small JPEGs with captions and json in a few shards are read as in ``train.py``: one iteration over all
batches of all epochs. After each epoch the proportional set size (shared pages are divided among the
processes that share them) of this process and of each loader process is read from ``/proc``. Mapped files are
excluded, because torch's libraries are shared with other programs on the machine. A line is fitted by least
squares from the third epoch on; its slope is reported in KiB per epoch with a 95% interval. Two variants:
captions from files, and captions drawn from json fields with a filter on another field.
"""

import argparse
import io
import json
import math
import os
import platform
import random
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from PIL import Image

from clipkit.model.tokenizer import ClipTokenizer
from data.captions import CaptionRule, Filter
from data.loader import Loader
from data.order import Order
from data.selection import Selection
from data.shards.manifest import make_manifest
from data.shards.samples import Shards, find_shards

RESULTS = Path(__file__).parent / "results"
BATCH = 50
SETTLED = 3  # first epoch of the fit; caches and pools fill up before
VARIANTS = {
    "captions from files": Selection(),
    "captions from json, filtered": Selection(
        filters=(Filter.of("width >= 10"),), captions=CaptionRule(fields=("txt", "texts"), choice="random")
    ),
}


def write_shards(folder: Path, samples: int, shards: int) -> None:
    drawn = random.Random(0)
    pixels = np.random.default_rng(0)
    with webdataset.ShardWriter(
        str(folder / "%05d.tar"), maxcount=math.ceil(samples / shards), encoder=False, verbose=0
    ) as tar:
        for i in range(samples):
            file = io.BytesIO()
            side = drawn.randint(40, 90)
            Image.fromarray(pixels.integers(0, 256, (side, side + 9, 3), dtype=np.uint8)).save(file, "JPEG")
            caption = " ".join(f"word{drawn.randint(0, 10**6)}" for _ in range(drawn.randint(3, 30)))
            meta = {
                "texts": [caption, f"picture {i}"],
                "width": side,
                "url": f"https://example.org/{i}",
            }
            tar.write(
                {
                    "__key__": f"{i:06d}",
                    "jpg": file.getvalue(),
                    "txt": caption.encode(),
                    "json": json.dumps(meta).encode(),
                }
            )


def proportional(process: int) -> float:
    """Return the proportional set size of a process in MiB, without mapped files."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) / 1024


def epochs_of(folder: Path, selection: Selection, options: argparse.Namespace) -> Iterator[list[float]]:
    """Yield MiB of the main process and of each loader process after each epoch."""
    manifest = make_manifest([find_shards(str(folder))], selection)
    shards = Shards(manifest, selection)
    order = Order(shards.counts, seed=0, batch_size=BATCH)
    loader = Loader(
        shards=shards,
        order=order,
        image_size=options.image_size,
        tokenize=ClipTokenizer(context_length=32),
        num_workers=options.workers,
    )
    steps = order.batches_per_epoch
    for step, batch in enumerate(loader.batches(0, steps * options.epochs), start=1):
        assert batch.bad == ()
        if step % steps == 0:
            processes = [os.getpid(), *sorted(active_child.pid or 0 for active_child in active_children())]
            yield [proportional(process) for process in processes]


def fitted(values: list[float]) -> dict[str, float]:
    """Fit a line from epoch ``SETTLED`` on: slope in KiB per epoch, and half of its 95% interval."""
    y = np.array(values[SETTLED - 1 :]) * 1024
    x = np.arange(len(y)) - (len(y) - 1) / 2
    slope = float((x * y).sum() / (x * x).sum())
    rest = y - y.mean() - slope * x
    error = math.sqrt(float((rest * rest).sum()) / (len(y) - 2) / float((x * x).sum()))
    # 0.975 quantile of Student's t by the Cornish-Fisher expansion, accurate from 5 degrees of freedom on
    freedom, z = len(y) - 2, 1.959964
    quantile = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return {"kib_an_epoch": slope, "plus_or_minus": quantile * error}


def measure(selection: Selection, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    rows = list(epochs_of(folder, selection, options))
    names = ["training process", *(f"loader process {i + 1}" for i in range(options.workers))]
    series = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    series["together"] = [sum(row) for row in rows]
    return {
        "mib": series,
        "slopes": {name: fitted(values) for name, values in series.items()},
        "seconds": time.perf_counter() - began,
    }


def plot(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot memory over epochs, one panel per variant."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = np.atleast_1d(figure.subplots(1, len(found), sharey=True))
    for panel, (variant, result) in zip(panels, found.items(), strict=True):
        for name, values in result["mib"].items():
            panel.plot(range(1, len(values) + 1), values, label=name, lw=2 if name == "together" else 1.2)
        slope = result["slopes"]["together"]
        trend = f"{slope['kib_an_epoch']:+.0f} ± {slope['plus_or_minus']:.0f} KiB per epoch"
        panel.set_title(f"{variant}\ntogether {trend}", fontsize=9)
        panel.set_xlabel("epoch")
        panel.set_xticks(range(0, len(result["mib"]["together"]) + 1, 5))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("memory, MiB")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--image-size", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CLIPKIT_CACHE"] = f"{folder}/cache"
        write_shards(Path(folder), options.samples, options.shards)
        for variant, selection in VARIANTS.items():
            found[variant] = measure(selection, Path(folder), options)
            print(f"{variant}, {found[variant]['seconds']:.0f} s")
            for name, values in found[variant]["mib"].items():
                slope = found[variant]["slopes"][name]
                first, third, last = values[0], values[SETTLED - 1], values[-1]
                print(
                    f"  {name:18} first {first:6.1f}, third {third:6.1f}, last {last:6.1f} MiB; "
                    f"slope {slope['kib_an_epoch']:+.1f} ± {slope['plus_or_minus']:.1f} KiB per epoch"
                )
    RESULTS.mkdir(exist_ok=True)
    about = {**vars(options), "batch_size": BATCH, "machine": platform.machine(), "torch": torch.__version__}
    (RESULTS / "memory.json").write_text(json.dumps({**about, "variants": found}, indent=2) + "\n")
    plot(found, RESULTS / "memory.png")


if __name__ == "__main__":
    main()
