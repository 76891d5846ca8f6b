"""Compare images of variable size (NaFlex) with center crops: scores on made images, and time per patch.

    python -m bench.variable_size scores [--steps 200] [--seeds 3]
    python -m bench.variable_size speed [--rounds 15] [--device cuda]

Scores. A made image has the area of a 48 x 48 square, an aspect ratio drawn from 1:4 to 4:1 (uniform in its
logarithm), noise of random colors, and a disk of the color of the class, a tenth of the image's longer side from
one of its two ends. Two classifiers trained by ``train.py`` differ only in ``model.image_tokens``: squares of
16 patches, cropped from the center, and grids of at most 16 patches. Both see the same samples in the same order.
The score is the accuracy on 400 other images.

Speed. A step of four blocks of ViT-S/16, forward and backward, on squares of 196 patches, and on images of the
aspect ratios above with at most 196. Rounds alternate. The ratio is of patches per second, the median over rounds,
on a CPU by its seconds, with one thread, as other programs may run.
"""

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

import clipkit
from clipkit.model import create_architecture, eval_pixels
from data.shards.writer import DatasetWriter, Record

RESULTS = Path(__file__).parent / "results"
COLORS = {
    "red": (230, 30, 30), "green": (30, 180, 30), "blue": (30, 60, 230), "yellow": (240, 220, 30),
    "magenta": (220, 40, 220), "cyan": (40, 220, 220), "black": (0, 0, 0), "white": (255, 255, 255),
}  # fmt: skip
SIDE = 48
WIDEST = 4  # aspect ratio
TRAINING, HELD_OUT = 4000, 400


def draw_size(random: np.random.Generator, side: int) -> tuple[int, int]:
    """Draw a width and a height with the area of a square."""
    aspect = math.exp(random.uniform(-math.log(WIDEST), math.log(WIDEST)))
    return round(side * aspect**0.5), round(side / aspect**0.5)


def draw_image(seed: int) -> tuple[bytes, int]:
    """Draw an image, as PNG, and its class."""
    random = np.random.default_rng(seed)
    width, height = draw_size(random, SIDE)
    small = random.integers(60, 196, (max(2, height // 6), max(2, width // 6), 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    label = int(random.integers(len(COLORS)))
    radius = 0.2 * min(width, height)
    x, y = random.uniform(radius, width - radius), random.uniform(radius, height - radius)
    end = random.choice([0.1, 0.9])
    if width >= height:
        x = min(max(end * width, radius), width - radius)
    else:
        y = min(max(end * height, radius), height - radius)
    box = (x - radius, y - radius, x + radius, y + radius)
    ImageDraw.Draw(image).ellipse(box, fill=list(COLORS.values())[label])
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), label


def write_data(folder: Path) -> None:
    """Write training pairs and held-out images with labels."""
    names = list(COLORS)
    with DatasetWriter(folder, samples_per_shard=1000) as writer:
        for seed in range(TRAINING + HELD_OUT):
            content, label = draw_image(seed)
            split = "train" if seed < TRAINING else "test"
            record = Record(
                key=f"{seed:06d}",
                image=content,
                extension="png",
                caption=names[label],
                label=label,
            )
            writer.write(split, record)
        writer.finish({}, class_names=names)
    (folder / "classes.txt").write_text("\n".join(names) + "\n")


def train(folder: Path, out: Path, *, seed: int, tokens: int, steps: int) -> float:
    """Train a model and return its accuracy in percent."""
    settings = [
        f"data.train={folder}", f"eval.data={json.dumps([str(folder)])}", f"model.image_tokens={tokens}",
        f"seed={seed}", f"steps={steps}", f"out={out}", "model.name=ViT-Ti-4-16", "data.crop_scale=1",
        "shape.image_width=64", "shape.image_layers=2",
        f"model.text=classes:{folder}/classes.txt", "loss.name=classes",
        "batch_size=64", "optim.warmup=40", "optim.lr=1e-3", "data.workers=0", "eval.every_steps=0",
    ]  # fmt: skip
    subprocess.run([sys.executable, "train.py", *settings], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return float(next(row["value"] for row in reversed(rows) if row["metric"] == "acc1"))


def compare_scores(options: argparse.Namespace) -> dict[str, object]:
    """Train both ways for each seed."""
    started: dict[str, list[Future[float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "data"
        write_data(folder)
        with ThreadPoolExecutor(options.jobs) as pool:
            for name, tokens in (("center crop", 0), ("variable size", 16)):
                for seed in range(options.seeds):
                    out = Path(temporary) / f"{tokens}-{seed}"
                    run = pool.submit(train, folder, out, seed=seed, tokens=tokens, steps=options.steps)
                    started.setdefault(name, []).append(run)
            scores = {name: [run.result() for run in runs] for name, runs in started.items()}
    differences = [b - a for a, b in zip(*scores.values(), strict=True)]
    return {
        "steps": options.steps,
        "scores": scores,
        "mean_difference": statistics.mean(differences),
        "standard_error": statistics.stdev(differences) / len(differences) ** 0.5
        if len(differences) > 1
        else None,
    }


def make_step(model: clipkit.CLIP, images: torch.Tensor, **arguments: object) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.device.type == "cuda"):
            features = model.encode_image(images, **arguments)  # type: ignore[arg-type]
        features.sum().backward()
        if images.device.type == "cuda":
            torch.cuda.synchronize()

    return step


def compare_speed(options: argparse.Namespace) -> dict[str, object]:
    """Time both kinds of steps in turns."""
    device = torch.device(options.device)
    random = np.random.default_rng(0)
    steps: dict[str, tuple[Callable[[], None], int]] = {}
    for name, tokens in (("square", 0), ("variable size", 196)):
        shape = create_architecture("ViT-S-16", image_tokens=tokens)
        shape = replace(shape, vision=shape.vision.replace_sizes({"image_layers": 4}))
        model = clipkit.create(shape, seed=0).to(device)
        batch = []
        for _ in range(options.batch_size):
            width, height = draw_size(random, 224) if tokens else (224, 224)
            noise = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
            batch.append(eval_pixels(noise, model.preprocess))
        images = torch.stack(batch)
        arguments: dict[str, object] = {}
        patches = 196 * options.batch_size
        if shape.vision.budget is not None:
            grids = shape.vision.budget.read_grids(images)
            patches = sum(rows * columns for rows, columns in grids)
            arguments = {"grids": grids}
        steps[name] = make_step(model, images.to(device), **arguments), patches
    torch.set_num_threads(1)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(options.rounds + 1):
        for name, (step, patches) in list(steps.items())[:: 1 if i % 2 else -1]:
            began = clock()
            step()
            if i:  # the first round warms up
                rates[name].append(patches / (clock() - began))
    ratios = [b / a for a, b in zip(*rates.values(), strict=True)]
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "batch_size": options.batch_size,
        "patches": {name: patches for name, (_, patches) in steps.items()},
        "patches_per_second": {name: statistics.median(values) for name, values in rates.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["scores", "speed"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "variable_size.json")
    options = parser.parse_args()
    result = compare_scores(options) if options.part == "scores" else compare_speed(options)
    stored = json.loads(options.out.read_text()) if options.out.is_file() else {}
    name = options.part if options.device == "cpu" else f"{options.part}_{options.device}"
    options.out.write_text(json.dumps({**stored, name: result}, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
