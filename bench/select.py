"""Compare data selection with uniform sampling, by the samples that are trained, CPU time and FLOPs.

    python -m bench.select {emoji,flickr8k} [--noise 0 0.2] [--fractions 1 0.5 0.2] [--lengths 1 0.5]
        [--seeds 0 1 2] [--work runs/select] [--name NAME] [--flickr8k FOLDER] [KEY=VALUE …]

``emoji`` trains configs/emoji.toml. With ``--heads IMAGE_WEIGHTS TEXT_FOLDER`` it trains projections of a locked
EfficientNet-Lite0 (see ``python -m bench.emoji --lite0``) and a locked text encoder of transformers on stored
features. ``flickr8k`` trains configs/finetune_heads.toml without flips. It needs ``--heads``, and ``--flickr8k``,
the folder of bench/flickr8k.py.

Each step trains as many pairs as with uniform sampling (``select.fraction=1``), and reads 1 / fraction times as
many. ``--lengths`` are multiples of the number of steps, each with a schedule of its length. The fraction
``--noise`` of the captions is exchanged with each other. The reference is a model of the same settings, trained on
a half of the pairs before captions were exchanged (``data.fraction=0.5``, seed 100); its features are stored.

Figures of each run: the curve of scores over trained samples (zero-shot accuracy on Fluent 3D, or the mean R@1 of
both directions on Flickr8k's test images), CPU time, and the FLOPs of all steps, scoring included. Recorded runs
are not repeated, so the comparison can be made piecewise; delete rows of the file to measure again.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import mean, stdev
from typing import Any

import pyarrow
import pyarrow.csv

from bench.dirty_pairs import exchange_captions, write_pairs
from bench.flickr8k import write_tables
from clipkit.config import Config, load_config
from clipkit.training.costs import measure_workload, step_flops, workloads_of

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "select.json"
CONFIGS = {"emoji": "configs/emoji.toml", "flickr8k": "configs/finetune_heads.toml"}
METRICS = {"emoji": "acc1", "flickr8k": "mean_R@1"}
HEADS = (
    "model.name=ViT-B-32", "model.image=timm:tf_efficientnet_lite0", "model.image_size=96",
    'model.image_options={"projection": "mlp", "dropout": 0.3}', "model.context_length=0", "lock.image=backbone",
    "lock.text=backbone", "lock.store=true", "data.crop_scale=1", "data.color_jitter=0", "data.grayscale=0",
    "optim.name=adamw", "optim.lr=1e-3", "optim.weight_decay=0.1",
)  # fmt: skip
# batches of 128 pairs have a lower rate than the recipe, see bench/optimizers.py
FLICKR8K = (
    "lock.views=1", "data.flip=0", "batch_size=128", "steps=940", "optim.lr=3e-4", "optim.warmup=47",
    "checkpoint.best=", "eval.patience=0", "eval.every_steps=188",
)  # fmt: skip


def run_program(*command: str) -> float:
    """Run a Python program of this repository, and return its CPU time in seconds."""
    before = getrusage(RUSAGE_CHILDREN)
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(ended.stderr[-2000:])
    used = getrusage(RUSAGE_CHILDREN)
    return round(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, 1)


def count_flops(config: Config) -> int:
    """Return the FLOPs of all steps; 0 if they cannot be measured.

    With stored features, those of the projections that score pairs are not counted, so there is no total either.
    """
    if config.lock.store:
        return 0
    total = 0
    for work in workloads_of(config, world=1, shard_ranks=1, bf16=False):
        costs = measure_workload(work)
        if costs is None:
            return 0
        total += work.steps * step_flops(work, costs)
    return total


def read_curve(out: Path, pairs: int, metric: str) -> list[tuple[int, float]]:
    """Return the values of a metric by the number of trained samples."""
    curve = {}
    for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["metric"] == metric and not row["setting"]:
            curve[row["step"] * pairs] = row["value"]
    return sorted(curve.items())


def make_reference(work: Path, clean: Path, config: str, settings: list[str]) -> list[str]:
    """Train the reference on clean pairs, store its features of all pairs, and return settings for selection.

    Features are found by content, so they are right for exchanged captions too.
    """
    out = work / "reference"
    if not (out / "report.html").exists():
        half = (f"data.train={clean}", "data.fraction=0.5", "seed=100", f"out={out}")
        run_program("train.py", config, *settings, *half)
    images, texts = work / "images", work / "texts"
    for folder, kind in ((images, ()), (texts, ("--text",))):
        if not folder.exists():
            options = ("--model", str(out), "--out", str(folder), "--quiet")
            run_program("-m", "clipkit", "encode", str(clean), *kind, *options)
    return [f"distill.features={images}", f"distill.text_features={texts}", "distill.weight=0"]


def summarize(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return mean and standard deviation of the final scores over seeds."""
    scores = defaultdict(list)
    for row in rows:
        key = f"noise {row['noise']:g}, {row['by']} {row['fraction']:g}, length {row['length']:g}"
        scores[key].append(row)
    summary = {}
    for key, same in sorted(scores.items()):
        finals = [row["curve"][-1][1] for row in same]
        spread = stdev(finals) if len(finals) > 1 else 0.0
        first = same[0]
        summary[key] = {
            "score": mean(finals),
            "seed_noise": spread,
            "seeds": len(finals),
            "samples_trained": first["curve"][-1][0],
            "flops": first["flops"],
        }
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", choices=[*CONFIGS])
    parser.add_argument("--noise", nargs="+", default=["0", "0.2"], help="fractions of exchanged captions")
    parser.add_argument("--fractions", type=float, nargs="+", default=[1.0, 0.5, 0.2])
    parser.add_argument("--lengths", type=float, nargs="+", default=[1.0, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--heads", nargs=2, default=[], metavar=("IMAGE_WEIGHTS", "TEXT_FOLDER"))
    parser.add_argument("--work", type=Path, default=Path("runs/select"))
    parser.add_argument("--flickr8k", type=Path, metavar="FOLDER")
    parser.add_argument("--name", help="name of these settings in the results, by default the source's")
    arguments, settings = parser.parse_known_args()
    name, config_file = arguments.name or arguments.source, CONFIGS[arguments.source]
    stated = [*settings]
    if arguments.heads:
        stated = [
            *(HEADS if arguments.source == "emoji" else FLICKR8K),
            *settings,
        ]  # without paths of weights
        weights, folder = arguments.heads
        towers = [
            f"model.image_weights={weights}",
            f"model.text=transformers:{folder}",
            "model.text_weights=transformers",
        ]
        settings = [*stated, *towers]
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    pairs = {noise: work / f"pairs-{noise}" for noise in {"0", *arguments.noise}}
    if arguments.source == "flickr8k":
        write_tables(arguments.flickr8k.resolve(), work)
        settings.append(f'eval.data=["{work / "test.csv"}"]')
        pairs = {noise: Path(f"{path}.csv") for noise, path in pairs.items()}
    for noise, path in pairs.items():
        if path.exists():
            continue
        if arguments.source == "flickr8k":
            table = pyarrow.csv.read_csv(work / "train.csv")
            captions = exchange_captions(table["caption"].to_pylist(), float(noise), 0)
            pyarrow.csv.write_csv(pyarrow.table({"image": table["image"], "caption": captions}), path)
        else:
            write_pairs(arguments.source, path, 0, fraction=float(noise))
    stored = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    rows = stored.get(name, {}).get("runs", [])
    base = load_config(ROOT / config_file, settings)
    for seed in arguments.seeds:
        for noise in arguments.noise:
            for fraction in arguments.fractions:
                by = "learnability" if fraction < 1 else "uniform"
                for length in arguments.lengths:
                    key = {
                        "noise": float(noise),
                        "by": by,
                        "fraction": fraction,
                        "length": length,
                        "seed": seed,
                    }
                    if any(key.items() <= row.items() for row in rows):
                        continue
                    steps = round(length * base.steps)
                    run_settings = [
                        *settings,
                        f"data.train={pairs[noise]}",
                        f"seed={seed}",
                        f"steps={steps}",
                        f"eval.every_steps={max(1, steps // 5)}",
                        f"batch_size={round(base.batch_size / fraction)}",
                    ]
                    if fraction < 1:
                        run_settings.append(f"select.fraction={fraction}")
                        run_settings += make_reference(work, pairs["0"], config_file, settings)
                    last = {setting.partition("=")[0]: setting for setting in run_settings}
                    out = work / f"run-{noise}-{by}-{fraction:g}-{length:g}-{seed}"
                    seconds = run_program("train.py", config_file, *last.values(), f"out={out}")
                    config = load_config(ROOT / config_file, [*last.values()])
                    curve = read_curve(out, config.trained_pairs, METRICS[arguments.source])
                    figures = {"curve": curve, "cpu_seconds": seconds, "flops": count_flops(config)}
                    rows.append(key | figures)
                    stored[name] = {
                        "settings": stated,
                        "runs": rows,
                        "summary": summarize(rows),
                    }
                    RESULT.write_text(json.dumps(stored, indent=1) + "\n")
                    print(key, f"{curve[-1][1]:.1%}", flush=True)


if __name__ == "__main__":
    main()
