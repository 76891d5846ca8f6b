"""Import the learning curves of LAION's scaling study, which ``train.py --dry-run`` and reports of runs show.

    git clone https://github.com/LAION-AI/scaling-laws-openclip
    python -m bench.import_curves scaling-laws-openclip

Reads the tables of the clone's last commit (Cherti et al. 2022, https://arxiv.org/abs/2212.07143) and writes
``clipkit/public_curves.json``: at most 40 scores of each run, at a constant ratio of the samples seen, and the
fraction of the A100's peak (MFU) that it reached by clipkit's count of FLOPs.
"""

import argparse
import csv
import io
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from bench.import_published import read_git
from bench.options import ROOT
from clipkit.model.clip import CLIP
from clipkit.model.measure import image_flops, text_flops
from clipkit.model.names import create_architecture
from clipkit.training.costs import GPUS

RESULT = ROOT / "clipkit" / "public_curves.json"
SCORES = "imagenet_zeroshot_learning_curves.csv"
RUNS = "trained_models_info.csv"
POINTS = 40


def read_table(clone: Path, name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file of the last commit."""
    return list(csv.DictReader(io.StringIO(read_git(clone, "show", f"HEAD:{name}"))))


def count_flops(architecture: str) -> int:
    """Return the FLOPs of a pair with a caption of 77 tokens, both passes."""
    name = architecture if architecture != "ViT-g-14" else f"open_clip:{architecture}"
    with torch.device("meta"):
        model = CLIP(create_architecture(name))
    return image_flops(model).both + text_flops(model, 77).both


def import_runs(clone: Path) -> list[dict[str, object]]:
    """Return what the package stores of each run."""
    scores: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for row in read_table(clone, SCORES):
        scores[row["name"]][int(row["epoch"])] = 100 * float(row["imagenet-zeroshot-val-top1"])
    runs: list[dict[str, object]] = []
    for row in read_table(clone, RUNS):
        epochs = sorted(scores[row["name"]])
        indices = sorted({round(i) for i in np.geomspace(1, len(epochs), POINTS)})
        chosen = [epochs[i - 1] for i in indices] if len(epochs) > POINTS else epochs
        gpus = int(row["gpus"])
        speed = float(row["samples_per_sec"]) / gpus
        run = {
            "architecture": row["arch"],
            "dataset": f"LAION-{row['data']}",
            "batch_size": gpus * int(row["local_bs"]),
            "speed": round(speed, 1),
            "mfu": round(speed * count_flops(row["arch"]) / GPUS["A100"].bf16, 4),
            "samples": [epoch * int(row["samples_per_epoch"]) for epoch in chosen],
            "scores": [round(scores[row["name"]][epoch], 2) for epoch in chosen],
        }
        runs.append(run)
    return sorted(runs, key=lambda run: tuple(map(str, run.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clone", type=Path, help="clone of LAION-AI/scaling-laws-openclip")
    clone: Path = parser.parse_args().clone
    commit, date = read_git(clone, "log", "-1", "--format=%H %cs").split()
    heading = {
        "source": "https://github.com/LAION-AI/scaling-laws-openclip",
        "files": [SCORES, RUNS],
        "commit": commit,
        "date": date,
    }
    runs = import_runs(clone)
    lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    text = json.dumps(heading)[:-1] + f', "runs": [\n{lines}\n]}}\n'
    RESULT.write_text(text, encoding="utf-8")
    points = sum(len(scores) for run in runs if isinstance(scores := run["scores"], list))
    print(f"{len(runs)} runs, {points} scores, {len(text):,} bytes in {RESULT}")


if __name__ == "__main__":
    main()
