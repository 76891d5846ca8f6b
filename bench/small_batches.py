"""Methods for small batches: the words term and the loss over all samples, beside CLIP's loss.

    python -m bench.small_batches [--only glyphs emoji flickr8k cost] [--methods clip words global_clip]
        [--seeds 0 1 2] [--budgets samples time] [--work FOLDER] [--flickr8k FOLDER] [KEY=VALUE …]

Each method trains on as many samples as CLIP's loss alone (``samples``), or for as long as it (``time``): with
fewer steps then, by the ratio of the CPU time of the runs with equal samples. ``--only cost`` measures what a step
costs, in alternating steps of one process. Rows are stored in bench/results/small_batches.json by data, method,
budget and seed; rows of other calls stay. Interrupted runs resume with the same ``--work``, which also keeps the
stored features of Flickr8k.

Glyphs trains the quickstart's model from scratch, emoji and Flickr8k projections on the stored features of locked
towers. These need settings for the weights, such as ``model.image_weights=FILE``,
``model.text=transformers:FOLDER`` and ``model.text_weights=transformers``. ``--flickr8k`` is the folder of
bench/flickr8k.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import torch

from bench.flickr8k import read_scores, write_tables
from bench.select import HEADS
from clipkit.batch import Batch
from clipkit.config import load_config
from clipkit.model import apply_cpu_settings, select_distinct
from clipkit.objectives import ObjectiveState
from clipkit.objectives.global_clip import GlobalClip
from clipkit.training import build, optim, parallel
from clipkit.training.step import TrainingStep

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "small_batches.json"

SETUPS: dict[str, tuple[str, ...]] = {
    "glyphs": ("configs/quickstart.toml", "eval.every_steps=0", "checkpoint.every_steps=0"),
    "emoji": ("configs/emoji.toml", *HEADS, "eval.every_steps=0", "checkpoint.every_steps=0"),
    "flickr8k": ("configs/finetune_heads.toml", "batch_size=128"),
}  # fmt: skip
METHODS: dict[str, tuple[str, ...]] = {
    "clip": (),
    "words": ("words.weight=1", "words.vocabulary=2048"),
    "global_clip": ("loss.name=global_clip", "loss.same=negatives", "loss.smoothing=0"),
}
# words of the text tower's vocabulary that occur in the captions
VOCABULARIES = {"flickr8k": "words.vocabulary=8192"}
# model and batches whose steps are timed: settings, pairs, tokens of a caption, different tokens
COSTS: dict[str, tuple[tuple[str, ...], int, int, int]] = {
    "ViT-Ti-4-16": (("configs/quickstart.toml", "words.vocabulary=2048"), 128, 12, 800),
    "ViT-B-32": (("model.name=ViT-B-32", "batch_size=32", "words.vocabulary=0"), 32, 20, 40_000),
}

_SAMPLES = 10_000  # of the state whose cost is measured
Row = dict[str, Any]


def split_config(settings: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the configuration file among settings, or an empty one, and the other settings."""
    files = [setting for setting in settings if setting.endswith(".toml")]
    return ROOT / files[0] if files else Path(os.devnull), [one for one in settings if one not in files]


def read_rows() -> list[Row]:
    return json.loads(RESULT.read_text()) if RESULT.is_file() else []


def store_row(row: Row) -> None:
    """Add a row to the results, in place of one of the same data, method, budget and seed."""
    keys = ("data", "method", "budget", "seed")
    others = [other for other in read_rows() if any(other.get(key) != row.get(key) for key in keys)]
    rows = sorted([*others, row], key=lambda one: [str(one.get(key, "")) for key in keys])
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(row), flush=True)


def measure_cost(name: str, rounds: int) -> None:
    """Store the ratios of the CPU time of a step with each method to that of a step with CLIP's loss alone.

    All steps are of one model, whose head of words gets no gradient without the term.
    """
    settings, rows, length, words = COSTS[name]
    file, changed = split_config([*settings, "words.weight=1"])
    config = load_config(file, changed)
    shape = build.select_shape(config)
    size = shape.vision.image_size
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (rows, 3, size, size), dtype=torch.uint8, generator=random)
    tokens = torch.randint(1, words, (rows, length), generator=random)
    tokens[:, 0], tokens[:, -1] = 49406, 49407
    ids = torch.randperm(_SAMPLES, generator=random)[:rows]
    batch = Batch(
        images=images,
        tokens=tokens,
        lengths=(length,) * rows,
        ids=ids,
        identities=ids[:, None].repeat(1, 2),
        words=select_distinct(tokens, tokens < 49406),
    )
    model = build.first_model(config, shape)
    optimizer = optim.make_optimizer(model, config.optim)
    with_words = TrainingStep.from_config(
        config, shape, model, (), samples=_SAMPLES, bf16=False, averaged=None
    )
    objective = GlobalClip()
    state = ObjectiveState(objective.create_state(_SAMPLES))
    steps = {
        "clip": replace(with_words, terms={}),
        "words": with_words,
        "global_clip": replace(with_words, terms={}, objective=objective, state=state),
    }
    skip = torch.tensor(False)

    def make_update(step: TrainingStep) -> float:
        began = time.process_time()
        optimizer.zero_grad(set_to_none=True)
        step.gradients(model, batch, 0)
        parallel.clip_gradients(model, 1.0)
        optim.make_update(optimizer, config.optim.name, skip=skip)
        step.finish_update(model, skip=skip)
        return time.process_time() - began

    ratios: dict[str, list[float]] = {method: [] for method in steps}
    for i in range(rounds + 1):
        order = list(steps) if i % 2 else list(steps)[::-1]
        seconds = {method: make_update(steps[method]) for method in order}
        if i:  # the first steps allocate memory
            for method, value in seconds.items():
                ratios[method].append(value / seconds["clip"])
    for method in ("words", "global_clip"):
        low, median, high = statistics.quantiles(ratios[method], n=4)
        row = {"data": f"cost of a step of {name}", "method": method, "settings": [*settings], "rows": rows}
        quartiles = [round(low, 4), round(high, 4)]
        store_row({**row, "rounds": rounds, "ratio": round(median, 4), "quartiles": quartiles})


def find_ratio(data: str, method: str) -> float:
    """Return the CPU time of a step relative to CLIP's loss alone, from the runs with equal samples."""
    seconds: dict[str, float] = {}
    for one in ("clip", method):
        rows = [row for row in read_rows() if row["data"] == data and row["method"] == one]
        rates = [row["cpu_seconds"] / row["steps"] for row in rows if row["budget"] == "samples"]
        if not rates:
            sys.exit(f"--budgets time needs runs of {data} with the budget samples first, also of clip")
        seconds[one] = min(rates)  # runs that also encode images take longer
    return max(1.0, seconds[method] / seconds["clip"])


def read_accuracies(path: Path) -> dict[str, float]:
    """Return the last scores of a run in percent: zero-shot accuracy and recalls."""
    scores = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if line["metric"] in ("acc1", "image_to_text_R@1", "text_to_image_R@1") and not line.get("setting"):
            scores[f"{line['dataset']} {line['metric']}"] = round(100 * line["value"], 2)
    return scores


def measure_run(
    data: str,
    method: str,
    budget: str,
    seed: int,
    *,
    work: Path,
    flickr8k: Path | None,
    settings: Sequence[str],
) -> None:
    """Train and score, and store the row."""
    vocabulary = VOCABULARIES.get(data) if method == "words" else None
    setup = [*SETUPS[data], *METHODS[method], *([vocabulary] if vocabulary else [])]
    every = [*setup, *settings]
    tables = work / "tables"
    if data == "flickr8k":
        if flickr8k is None:
            sys.exit("flickr8k needs --flickr8k FOLDER, see bench/flickr8k.py")
        tables.mkdir(exist_ok=True)
        write_tables(flickr8k, tables)
        every += [f"data.train={tables / 'train.csv'}", f'eval.data=["{tables / "dev.csv"}"]']
    file, changed = split_config(every)
    by_name = {setting.partition("=")[0]: setting for setting in changed}
    if budget == "time":
        ratio = find_ratio(data, method)
        steps = next(row["steps"] for row in read_rows() if row["data"] == data and row["method"] == "clip")
        by_name["steps"] = f"steps={round(steps / ratio)}"
    run = work / f"{data}-{method}-{budget}-{seed}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if data in ("emoji", "flickr8k"):
        environment["CLIPKIT_CACHE"] = str(work / "cache")
    command = [sys.executable, "train.py", str(file), f"out={run}", f"seed={seed}", *by_name.values()]
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    used = getrusage(RUSAGE_CHILDREN)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    row: Row = {
        "data": data,
        "method": method,
        "budget": budget,
        "seed": seed,
        "settings": setup,
        "steps": last["step"],
        "seconds": round(last["seconds"], 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, 1),
        "scores": read_accuracies(run / "results.jsonl"),
    }
    if data == "flickr8k":
        results = run / "test.jsonl"
        test = ("--data", str(tables / "test.csv"), "--out", str(results))
        command = [sys.executable, "-m", "eval", "retrieval", "--model", f"{run}@best", *test]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        row["scores"] = {"dev": read_scores(run / "results.jsonl"), "test": read_scores(results)}
    store_row(row)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[*SETUPS, "cost"], default=[*SETUPS, "cost"])
    parser.add_argument("--methods", nargs="+", choices=[*METHODS], default=[*METHODS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budgets", nargs="+", choices=["samples", "time"], default=["samples", "time"])
    parser.add_argument("--rounds", type=int, default=20, help="of --only cost")
    parser.add_argument("--models", nargs="+", choices=[*COSTS], default=[*COSTS], help="of --only cost")
    parser.add_argument("--work", type=Path, default=Path("runs/small_batches"))
    parser.add_argument("--flickr8k", type=Path, metavar="FOLDER")
    arguments, settings = parser.parse_known_args()
    if "cost" in arguments.only:
        apply_cpu_settings()
        for name in arguments.models:
            measure_cost(name, arguments.rounds)
    work = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    sets = [name for name in SETUPS if name in arguments.only]
    for budget, data, seed, method in product(arguments.budgets, sets, arguments.seeds, arguments.methods):
        if budget == "time" and method == "clip":
            continue
        measure_run(data, method, budget, seed, work=work, flickr8k=arguments.flickr8k, settings=settings)


if __name__ == "__main__":
    main()
