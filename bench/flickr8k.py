"""Image–text retrieval on Flickr8k (Hodosh et al. 2013): two pretrained encoders with trained projections.

    python -m bench.flickr8k FOLDER --image-weights FILE --text FOLDER [--seeds 0 1 2] [SETTING …]

FOLDER has ``images/``, ``captions.txt`` (a table with the columns ``image`` and ``caption``), and the published
split in ``Flickr_8k.trainImages.txt``, ``Flickr_8k.devImages.txt`` and ``Flickr_8k.testImages.txt``, or
``ExpertAnnotations.txt``, all of whose images are test images. The dataset is for research only.
``--image-weights`` are timm's weights of ``tf_efficientnet_lite0``, and ``--text`` is the folder of an encoder of
sentence-transformers.

Each seed starts with an empty cache and runs ``configs/finetune_heads.toml`` on the training images, with scores on
the dev images, by which the checkpoint is chosen, until the page of the run is written. The clock stops there; the
chosen checkpoint is then scored on the 1,000 test images with 5,000 captions. Settings were chosen on the dev
images.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "flickr8k.json"
METRICS = tuple(f"{way}_R@{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10))


def read_split(folder: Path) -> dict[str, set[str]]:
    """Return the names of the images of each split."""
    split = {
        name: set((folder / f"Flickr_8k.{name}Images.txt").read_text().split()) for name in ("train", "dev")
    }
    test = folder / "Flickr_8k.testImages.txt"
    annotations = folder / "ExpertAnnotations.txt"
    if annotations.is_file():
        split["test"] = {line.split()[0] for line in annotations.read_text().splitlines()}
    else:
        split["test"] = set(test.read_text().split())
    sizes = {name: len(images) for name, images in split.items()}
    assert sizes == {"train": 6000, "dev": 1000, "test": 1000}, sizes
    return split


def write_tables(folder: Path, out: Path) -> None:
    """Write a table of images and captions for each split."""
    split = read_split(folder)
    with (folder / "captions.txt").open(encoding="utf-8", newline="") as file:
        rows = [(row["image"], row["caption"]) for row in csv.DictReader(file)]
    for name, images in split.items():
        with (out / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["image", "caption"])
            writer.writerows([(folder / "images" / image, text) for image, text in rows if image in images])


def run_command(command: Sequence[str], cache: Path) -> None:
    """Run a command of clipkit with a cache folder of its own."""
    environment = {**os.environ, "CLIPKIT_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True)


def read_scores(path: Path) -> dict[str, float]:
    """Return the last recalls of a results file, in percent."""
    scores = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if line["metric"] in METRICS and not line.get("setting"):
            scores[line["metric"]] = round(100 * line["value"], 2)
    return scores


def measure_seed(seed: int, tables: Path, work: Path, settings: Sequence[str]) -> Mapping[str, Any]:
    """Train with a seed and score the chosen checkpoint on the test images."""
    run = work / f"seed-{seed}"
    cache = work / f"cache-{seed}"
    began = time.monotonic()
    run_command(
        [
            *("train.py", "configs/finetune_heads.toml", f"out={run}", f"seed={seed}"),
            *(f"data.train={tables / 'train.csv'}", f'eval.data=["{tables / "dev.csv"}"]'),
            *settings,
        ],
        cache,
    )
    seconds = time.monotonic() - began
    results = work / f"test-{seed}.jsonl"
    test = str(tables / "test.csv")
    run_command(
        ["-m", "eval", "retrieval", "--model", f"{run}@best", "--data", test, "--out", str(results)], cache
    )
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "dev": read_scores(run / "results.jsonl"),
        "test": read_scores(results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--image-weights", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--name", default="stored features", help="of the result")
    parser.add_argument("settings", nargs="*", help="further settings of the training, such as lock.views=2")
    arguments = parser.parse_intermixed_args()
    settings = [
        f"model.image_weights={arguments.image_weights}", f"model.text=transformers:{arguments.text}",
        *arguments.settings,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        write_tables(arguments.folder.resolve(), work)
        for seed in arguments.seeds:
            measured = measure_seed(seed, work, work, settings)
            print(measured, flush=True)
            results = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
            entry = results.setdefault(arguments.name, {"settings": arguments.settings, "seeds": []})
            entry["seeds"] = [*(result for result in entry["seeds"] if result["seed"] != seed), measured]
            RESULT.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
