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

``--open-clip PAIRS`` trains the same towers, locked, and heads of the same kinds with ``open_clip_train.main`` for
one epoch of that many pairs, with the same learning rate, crops, cores, and memory that is kept as clipkit keeps
it, in batches of 128: the same time allows few steps of larger ones. Choose PAIRS such that it takes as long as
clipkit. Its option ``--lock-image-freeze-bn-stats`` is not used: it replaces timm's batch norms without their
activations.
"""

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import open_clip
import torch
from safetensors.torch import load_file, save_file

from bench.time_to_score import PACKAGES, PEER

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "flickr8k.json"
# without them, glibc returns the memory of activations after each operation, and page faults take most of the time
KEPT_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
}
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


def measure_steps(tables: Path, work: Path, settings: Sequence[str]) -> Mapping[str, float]:
    """Return the steps per second of training on stored features, and with the locked towers on images."""
    steps = {"stored": 200, "locked": 12}
    small = tables / "small.csv"
    with (tables / "dev.csv").open(encoding="utf-8") as file:
        small.write_text("".join(islice(file, 1 + 5 * 512)), encoding="utf-8")
    speeds = {}
    for name, kind in (("stored", ["lock.views=1"]), ("locked", ["lock.store=false", "lock.views=1"])):
        run = work / name
        run_command(
            [
                *("train.py", "configs/finetune_heads.toml", f"out={run}", f"data.train={small}"),
                *(
                    "eval.data=[]",
                    "checkpoint.best=",
                    "eval.patience=0",
                    f"steps={steps[name]}",
                    "batch_size=128",
                    "optim.warmup=5",
                ),
                *("log.every_steps=1", *kind, *settings),
            ],
            work / "cache",
        )
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        times = [line["batch_time"] for line in lines if "batch_time" in line]
        speeds[name] = round(1 / statistics.median(times[2:]), 3)
    return {**speeds, "ratio": round(speeds["stored"] / speeds["locked"], 1)}


def measure_open_clip(
    pairs: int, tables: Path, work: Path, image_weights: str, text: str
) -> Mapping[str, Any]:
    """Train with open_clip's trainer and score its last checkpoint on the test images."""
    packages = work / "packages"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages)]
    subprocess.run([*pip, *PACKAGES], check=True)
    model = {
        "embed_dim": 512,
        "vision_cfg": {
            "timm_model_name": "tf_efficientnet_lite0",
            "timm_pool": "avg",
            "timm_proj": "mlp",
            "timm_drop": 0.3,
            "image_size": 224,
        },
        "text_cfg": {
            "context_length": 77,
            "hf_model_name": text,
            "hf_tokenizer_name": text,
            "hf_proj_type": "linear",
            "hf_pooler_type": "mean_pooler",
        },
    }
    shape = work / "flickr8k.json"
    shape.write_text(json.dumps(model))
    open_clip.add_model_config(shape)
    towers = open_clip.create_model("flickr8k")
    trunk = towers.visual.trunk
    missing, _ = trunk.load_state_dict(load_file(image_weights), strict=False)
    assert not missing, missing
    weights = work / "start.pt"
    torch.save(towers.state_dict(), weights)

    with (tables / "train.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    random.Random(0).shuffle(rows)
    with (work / "pairs.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("image", "caption"), *rows[:pairs]])
    warmup = str(pairs // 128 // 20)
    command = [
        *(sys.executable, "-c", PEER, str(shape), "--model", "flickr8k", "--pretrained", str(weights)),
        *(
            "--lock-image",
            "--lock-text",
            "--train-data",
            str(work / "pairs.csv"),
            "--dataset-type",
            "csv",
        ),
        *("--csv-img-key", "image", "--csv-caption-key", "caption", "--csv-separator", ","),
        *("--batch-size", "128", "--lr", "1e-3", "--wd", "0.1", "--warmup", warmup, "--epochs", "1"),
        *("--aug-cfg", "scale=(0.6,1.0)", "--image-mean", *["0.498"] * 3, "--image-std", *["0.502"] * 3),
        *(
            "--workers",
            "1",
            "--precision",
            "fp32",
            "--device",
            "cpu",
            "--logs",
            str(work),
            "--name",
            "open_clip",
        ),
    ]
    began = time.monotonic()
    environment = {**os.environ, **KEPT_MEMORY, "PYTHONPATH": str(packages)}
    subprocess.run(command, env=environment, check=True)
    seconds = time.monotonic() - began
    folder = work / "open_clip_model"
    folder.mkdir()
    preprocess = {
        "mean": [0.498] * 3,
        "std": [0.502] * 3,
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    }
    configuration = {"model_cfg": model, "preprocess_cfg": {"size": [224, 224], **preprocess}}
    (folder / "open_clip_config.json").write_text(json.dumps(configuration))
    checkpoint = torch.load(work / "open_clip" / "checkpoints" / "epoch_1.pt", weights_only=True)
    save_file(checkpoint["state_dict"], folder / "open_clip_model.safetensors")
    scores = {}
    for split in ("dev", "test"):
        results = work / f"open_clip-{split}.jsonl"
        data = str(tables / f"{split}.csv")
        run_command(
            ["-m", "eval", "retrieval", "--model", str(folder), "--data", data, "--out", str(results)],
            work / "cache",
        )
        scores[split] = read_scores(results)
    return {"pairs": pairs, "seconds": round(seconds, 1), **scores}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.flickr8k",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", type=Path, help="images/, captions.txt and the lists of the split, see above"
    )
    parser.add_argument("--image-weights", required=True, help="file of timm's tf_efficientnet_lite0")
    parser.add_argument("--text", required=True, help="folder of an encoder of sentence-transformers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--name", default="stored features", help="of the result")
    parser.add_argument(
        "--open-clip",
        type=int,
        metavar="PAIRS",
        help="train on as many pairs with open_clip's trainer instead",
    )
    parser.add_argument("--steps", action="store_true", help="measure steps per second instead")
    parser.add_argument("settings", nargs="*", help="further settings of the training, such as lock.views=2")
    arguments = parser.parse_intermixed_args()
    settings = [
        f"model.image_weights={arguments.image_weights}", f"model.text=transformers:{arguments.text}",
        *arguments.settings,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        write_tables(arguments.folder.resolve(), work)
        results = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
        if arguments.steps:
            results["steps_per_second"] = measure_steps(work, work, settings)
            print(results["steps_per_second"])
            RESULT.write_text(json.dumps(results, indent=2) + "\n")
            return
        if arguments.open_clip:
            measured = measure_open_clip(
                arguments.open_clip, work, work, arguments.image_weights, arguments.text
            )
            results["open_clip"] = measured
            print(measured)
            RESULT.write_text(json.dumps(results, indent=2) + "\n")
            return
        for seed in arguments.seeds:
            measured = measure_seed(seed, work, work, settings)
            print(measured, flush=True)
            entry = results.setdefault(arguments.name, {"settings": arguments.settings, "seeds": []})
            entry["seeds"] = [*(result for result in entry["seeds"] if result["seed"] != seed), measured]
            RESULT.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
