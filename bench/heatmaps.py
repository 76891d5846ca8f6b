"""Check heatmaps of texts: on images of four digits, how often the heat of a digit is in its quarter.

    python -m bench.heatmaps [--steps 600] [--folder runs/heatmaps]

Trains a ViT (48 pixels, patches of 8) on 12,000 images that are 2 × 2 digits of scikit-learn, whose captions name
them in random order, so nothing says where each is. 500 images are made of other digits. The quarter with the most
heat counts (``clipkit.explain``); chance is 25%. Interrupted trainings resume.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from sklearn.datasets import load_digits

import clipkit
from data.shards.writer import DatasetWriter, Record

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "heatmaps.json"
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TILE, TESTED, LEARNED = 24, 500, 12_000
SETTINGS = (
    "batch_size=128", "model.name=ViT-Ti-8-48", "model.context_length=16", "loss.same=positives",
    "optim.name=muon", "optim.lr=2e-3", "optim.warmup=100", "data.workers=1", "data.crop_scale=1",
    "checkpoint.every_steps=200", "eval.data=[]",
)  # fmt: skip
Pixels = npt.NDArray[np.uint8]


def composites(count: int, *, test: bool, seed: int) -> list[tuple[Pixels, list[int]]]:
    """Return images (48, 48) and their four different digits, in the order of the quarters along rows."""
    draw, digits = np.random.default_rng(seed), load_digits()
    chosen = np.random.default_rng(0).permutation(len(digits.target)) < TESTED
    pools = [np.flatnonzero((digits.target == digit) & (chosen == test)) for digit in range(10)]
    found = []
    for _ in range(count):
        four = draw.permutation(10)[:4].tolist()
        tiles = []
        for digit in four:
            pixels = digits.images[draw.choice(pools[digit])] * (255 / 16)
            image = Image.fromarray(pixels.astype(np.uint8)).resize((TILE, TILE), Image.Resampling.BICUBIC)
            tiles.append(np.asarray(image))
        found.append((np.vstack([np.hstack(tiles[:2]), np.hstack(tiles[2:])]), four))
    return found


def write_training_data(folder: Path) -> None:
    """Write the images to learn from, with captions."""
    from io import BytesIO

    draw = np.random.default_rng(2)
    with DatasetWriter(folder) as writer:
        for i, (pixels, four) in enumerate(composites(LEARNED, test=False, seed=1)):
            file = BytesIO()
            Image.fromarray(pixels).convert("RGB").save(file, "png")
            caption = " and ".join(NAMES[digit] for digit in draw.permutation(four))
            record = Record(key=f"{i:06d}", image=file.getvalue(), extension="png", caption=caption)
            writer.write("train", record)
        writer.finish({"name": "four digits"})


def right_quarters(model: clipkit.CLIP) -> tuple[int, int]:
    """Return how many of the digits have the most heat in their quarter, and the number of digits."""
    right = 0
    found = composites(TESTED, test=True, seed=3)
    for pixels, four in found:
        heat = clipkit.explain(pixels, [NAMES[digit] for digit in four], model)[0]  # (4, g, g)
        half = heat.shape[-1] // 2
        sums = heat.unflatten(2, (2, half)).unflatten(1, (2, half)).sum(dim=(2, 4)).flatten(1)  # (4, 4)
        right += int((sums.argmax(dim=1).numpy() == np.arange(4)).sum())
    return right, 4 * len(found)


def main() -> None:
    """Train, count, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--folder", type=Path, default=Path("runs/heatmaps"))
    given = parser.parse_args()
    folder = given.folder.absolute()
    if not (folder / "data").exists():
        write_training_data(folder / "data")
    out = folder / f"run_{given.steps}"
    settings = [f"out={out}", f"steps={given.steps}", f"data.train={folder / 'data' / 'train'}", *SETTINGS]
    subprocess.run([sys.executable, str(ROOT / "train.py"), *settings], cwd=ROOT, check=True)
    right, count = right_quarters(clipkit.load(out))
    print(f"{right} of {count} digits have the most heat in their quarter: {right / count:.1%} (chance 25%)")
    RESULT.write_text(json.dumps({"steps": given.steps, "right": right, "digits": count}, indent=1) + "\n")


if __name__ == "__main__":
    main()
