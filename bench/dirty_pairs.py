"""Find wrong captions of a training set by ``python -m data dynamics``, and by CLIP scores.

    python -m bench.dirty_pairs emoji [--seeds 0 1 2] [KEY=VALUE …]
    python -m bench.dirty_pairs FOLDER/train.csv --name flickr8k KEY=VALUE …

5% of the captions are exchanged with each other. A model is trained on all pairs with ``log.samples``. The pairs of
the lowest ``score.learnability``, as many as were exchanged, are compared with those of the lowest ``score.clip``,
which ``python -m data score`` computes with the same model after its training. Figures: the fraction of these pairs
that were exchanged (precision; chance: 5%), and the area under the ROC curve.

Each caption of an image makes a pair of its own. Flickr8k is for research only, so its images stay outside of the
repository.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from sklearn.metrics import roc_auc_score

from clipkit.samples import Shard
from data.scores.table import scores_folder
from data.shards.samples import find_shards
from data.shards.writer import DatasetWriter, Record

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "dirty_pairs.json"
FRACTION = 0.05
SETTINGS = {
    "emoji": (
        "model.name=ViT-Ti-8-48", "model.image=timm:resnet18", "model.image_size=32", "model.context_length=16",
        "data.crop_scale=0.7", "loss.same=positives", "optim.name=muon", "optim.lr=2e-3", "optim.warmup=50",
        "optim.weight_decay=0.2", "batch_size=128", "steps=840", "data.workers=1",
    ),
}  # fmt: skip

Flags = npt.NDArray[np.bool_]


def exchange_captions(captions: Sequence[str], fraction: float, seed: int) -> list[str]:
    """Return captions of which a fraction, drawn at random, is exchanged with each other."""
    exchanged = list(captions)
    chosen = np.random.default_rng(seed).choice(len(captions), round(fraction * len(captions)), replace=False)
    for i, other in zip(chosen, np.roll(chosen, 1), strict=True):
        exchanged[i] = captions[other]
    return exchanged


def write_pairs(source: str, out: Path, seed: int, *, fraction: float = FRACTION) -> Flags:
    """Write the pairs of a source to shards with some captions exchanged, and return which."""
    samples: list[tuple[bytes, str, str]] = []  # image, extension, caption
    for file in find_shards(source):
        shard = Shard(file)
        for row in range(len(shard.index)):
            image = next(name for name in shard.index.members(row) if name in ("jpg", "png", "webp"))
            data, text, fields = shard.read(row, (image, "txt", "json"))
            assert data is not None and text is not None
            captions = json.loads(fields or "{}").get("captions", [text.decode()])
            samples += [(data, image, caption) for caption in captions]
    captions = exchange_captions([caption for _, _, caption in samples], fraction, seed)
    with DatasetWriter(out) as writer:
        for i, (data, extension, _) in enumerate(samples):
            record = Record(key=f"{i:06d}", image=data, extension=extension, caption=captions[i])
            writer.write("train", record)
        writer.finish({"name": "dirty pairs"})
    return np.array([captions[i] != sample[2] for i, sample in enumerate(samples)])


def run(*command: str) -> str:
    """Run a Python program of this repository and return what it prints."""
    ended = subprocess.run(
        [sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return ended.stdout


def read_scores(name: str, column: str) -> npt.NDArray[np.float64]:
    """Return a column of scores in the order of the samples' keys."""
    tables = [
        pq.read_table(path, columns=["key", column]) for path in (scores_folder() / name).glob("*.parquet")
    ]
    values = {key: value for table in tables for key, value in zip(*table.to_pydict().values(), strict=True)}
    return np.array([values[key] for key in sorted(values)], dtype=np.float64)


def compare(scores: npt.NDArray[np.float64], exchanged: Flags) -> dict[str, float]:
    """Return precision among as many lowest scores as captions were exchanged, and the area under the ROC curve."""
    worst = np.argsort(scores)[: exchanged.sum()]
    return {"precision": float(exchanged[worst].mean()), "auc": float(roc_auc_score(exchanged, -scores))}


def measure(source: str, seed: int, settings: Sequence[str], work: Path) -> dict[str, dict[str, float]]:
    """Train on exchanged captions, and return the figures of both scores."""
    pairs = work / f"pairs-{seed}"
    exchanged = write_pairs(source, pairs, seed)
    out = str(work / f"run-{seed}")
    run(
        "train.py",
        f"data.train={pairs}",
        f"out={out}",
        f"seed={seed}",
        "log.samples=true",
        "eval.data=[]",
        *settings,
    )
    learnability = run("-m", "data", "dynamics", out, "--quiet")
    clip = run("-m", "data", "score", str(pairs), "--model", out, "--no-duplicates", "--quiet")
    figures = {}
    for column, printed in (("learnability", learnability), ("clip", clip)):
        name = printed.split("data.scores=")[1].split()[0]
        figures[column] = compare(read_scores(name, column), exchanged)
    return figures


def names_path(setting: str) -> bool:
    """Return whether the value of a setting is a file or folder of this machine."""
    return Path(setting.partition("=")[2].rpartition(":")[2] or "-").exists()


def summarize(runs: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return mean and standard deviation of the precision over seeds."""
    summary = {}
    for column in runs[0]:
        values = [figures[column]["precision"] for figures in runs]
        spread = stdev(values) if len(values) > 1 else 0.0
        summary[column] = {"mean": mean(values), "least": min(values), "seed_noise": spread}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("source", help="emoji, or a table of images and captions")
    parser.add_argument("--name", default="")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments, settings = parser.parse_known_args()
    settings = [*SETTINGS.get(arguments.source, ()), *settings]
    runs = []
    with tempfile.TemporaryDirectory() as work:
        for seed in arguments.seeds:
            runs.append(measure(arguments.source, seed, settings, Path(work)))
            print(seed, runs[-1], flush=True)
    stored = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    stored[arguments.name or arguments.source] = {
        "settings": [setting for setting in settings if not names_path(setting)],
        "runs": runs,
        "precision": summarize(runs),
    }
    RESULT.write_text(json.dumps(stored, indent=2) + "\n")
    print(json.dumps(summarize(runs), indent=2))


if __name__ == "__main__":
    main()
