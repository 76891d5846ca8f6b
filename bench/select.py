"""Compare data selection with uniform sampling, by the samples that are trained and by FLOPs.

    python -m bench.select emoji [--noise 0 0.2] [--fractions 1 0.5 0.2] [--lengths 1 0.5] [--seeds 0 1 2]
                                 [--work runs/select] [--name NAME] [KEY=VALUE …]

``emoji`` trains configs/emoji.toml. With ``--heads IMAGE_WEIGHTS TEXT_FOLDER`` it trains projections of a locked
EfficientNet-Lite0 (see ``python -m bench.emoji --lite0``) and a locked text encoder of transformers on stored
features. Each step trains as many pairs as with uniform sampling (``select.fraction=1``), and reads 1 / fraction
times as many. ``--lengths`` are multiples of the number of steps, each with a schedule of its length.

The fraction ``--noise`` of the captions is exchanged with each other. The reference is a model of the same
settings, trained on a half of the pairs before captions were exchanged (``data.fraction=0.5``, seed 100); its
features are stored. ``--by`` selects the rule of selection. Figures of each run: the curve of zero-shot accuracy
over trained samples, and the FLOPs of all steps, scoring included. Recorded runs are not repeated, so the
comparison can be made piecewise; delete rows of the file to measure again.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.dirty_pairs import write_pairs
from clipkit.config import Config, load_config
from clipkit.training.costs import measure_workload, step_flops, workloads_of

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "select.json"
CONFIG = "configs/emoji.toml"
HEADS = (
    "model.name=ViT-B-32", "model.image=timm:tf_efficientnet_lite0", "model.image_size=96",
    'model.image_options={"projection": "mlp", "dropout": 0.3}', "model.context_length=0", "lock.image=backbone",
    "lock.text=backbone", "lock.store=true", "data.crop_scale=1", "data.color_jitter=0", "data.grayscale=0",
    "optim.name=adamw", "optim.lr=1e-3", "optim.weight_decay=0.1",
)  # fmt: skip


def run_program(*command: str) -> None:
    """Run a Python program of this repository."""
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(ended.stderr[-2000:])


def count_flops(config: Config) -> int:
    """Return the FLOPs of all steps; 0 if they cannot be measured."""
    total = 0
    for work in workloads_of(config, world=1, shard_ranks=1, bf16=False):
        costs = measure_workload(work)
        if costs is None:
            return 0
        total += work.steps * step_flops(work, costs)
    return total


def read_curve(out: Path, pairs: int) -> list[tuple[int, float]]:
    """Return the zero-shot accuracy on emoji by the number of trained samples."""
    curve = {}
    for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["metric"] == "acc1" and row["dataset"] == "emoji":
            curve[row["step"] * pairs] = row["value"]
    return sorted(curve.items())


def make_reference(work: Path, settings: list[str]) -> list[str]:
    """Train the reference on clean pairs, store its features of all pairs, and return settings for selection.

    Features are found by content, so they are right for exchanged captions too.
    """
    out = work / "reference"
    clean = f"{work}/pairs-0"
    if not (out / "report.html").exists():
        half = (f"data.train={clean}", "data.fraction=0.5", "seed=100", "eval.every_steps=0", f"out={out}")
        run_program("train.py", CONFIG, *settings, *half)
    images, texts = work / "images", work / "texts"
    for folder, kind in ((images, ()), (texts, ("--text",))):
        if not folder.exists():
            options = ("--model", str(out), "--out", str(folder), "--quiet")
            run_program("-m", "clipkit", "encode", clean, *kind, *options)
    return [f"select.features={images}", f"select.text_features={texts}"]


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
            "acc1": mean(finals),
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
    parser.add_argument("source", choices=["emoji"])
    parser.add_argument("--noise", nargs="+", default=["0", "0.2"], help="fractions of exchanged captions")
    parser.add_argument("--fractions", type=float, nargs="+", default=[1.0, 0.5, 0.2])
    parser.add_argument("--lengths", type=float, nargs="+", default=[1.0, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--by", nargs="+", default=["learnability"], help="rules of select.by")
    parser.add_argument("--heads", nargs=2, default=[], metavar=("IMAGE_WEIGHTS", "TEXT_FOLDER"))
    parser.add_argument("--work", type=Path, default=Path("runs/select"))
    parser.add_argument("--name", default="emoji", help="name of these settings in the results")
    arguments, settings = parser.parse_known_args()
    stated = [*settings]
    if arguments.heads:
        stated = [*HEADS, *settings]  # without paths of weights
        weights, folder = arguments.heads
        towers = [
            f"model.image_weights={weights}",
            f"model.text=transformers:{folder}",
            "model.text_weights=transformers",
        ]
        settings = [*HEADS, *towers, *settings]
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    for noise in {"0", *arguments.noise}:
        if not (pairs := work / f"pairs-{noise}").exists():
            write_pairs(arguments.source, pairs, 0, fraction=float(noise))
    stored = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    rows = stored.get(arguments.name, {}).get("runs", [])
    base = load_config(ROOT / CONFIG, settings)
    for seed in arguments.seeds:
        for noise in arguments.noise:
            for fraction in arguments.fractions:
                for by in arguments.by if fraction < 1 else ["uniform"]:
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
                            f"data.train={work}/pairs-{noise}",
                            f"seed={seed}",
                            f"steps={steps}",
                            f"eval.every_steps={max(1, steps // 5)}",
                            f"batch_size={round(base.batch_size / fraction)}",
                        ]
                        if fraction < 1:
                            run_settings += [f"select.fraction={fraction}", f"select.by={by}"]
                        if fraction < 1 and by != "hard":
                            run_settings += make_reference(work, settings)
                        last = {setting.partition("=")[0]: setting for setting in run_settings}
                        out = work / f"run-{noise}-{by}-{fraction:g}-{length:g}-{seed}"
                        run_program("train.py", CONFIG, *last.values(), f"out={out}")
                        config = load_config(ROOT / CONFIG, [*last.values()])
                        curve = read_curve(out, config.trained_pairs)
                        rows.append({**key, "curve": curve, "flops": count_flops(config)})
                        stored[arguments.name] = {
                            "settings": stated,
                            "runs": rows,
                            "summary": summarize(rows),
                        }
                        RESULT.write_text(json.dumps(stored, indent=1) + "\n")
                        print(key, f"{curve[-1][1]:.1%}", flush=True)


if __name__ == "__main__":
    main()
