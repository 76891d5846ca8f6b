"""Compare AdamW, Lion and Muon with batches of 128 to 4,096 pairs, at equal samples.

    python -m bench.optimizers flickr8k --folder FOLDER --image-weights FILE --text FOLDER
    python -m bench.optimizers emoji --image-weights FILE

Options: ``--batch-sizes 128 1024``, ``--only lion muon``, ``--seeds 0 1 2``, ``--samples N``. Rows of earlier calls
stay in ``bench/results/optimizers.json`` and are not measured again, so the comparison can be run in pieces.

``flickr8k`` trains the projections of ``configs/finetune_heads.toml`` on stored features (one view; see
``bench.flickr8k`` for the files). ``emoji`` trains the text tower of ``configs/emoji.toml`` from scratch, and a
projection of images, whose features a locked EfficientNet-Lite0 computed (``python -m bench.emoji --lite0``). Each
run sees the same number of samples, whatever the batch size, and its last step is scored.

The learning rate is chosen for each optimizer and batch size with the first seed, by the score on the validation
split: three rates, a factor of about 3 apart, and further ones while the best is the lowest or the highest. On
Flickr8k both splits are scored by the mean R@1 of both directions. On emoji, validation is the same among concepts
that training does not see, and the test is zero-shot accuracy on an artist that training does not see. Weight decay
is that of the configuration, for Lion ten times as high, as published with a tenth of AdamW's learning rate.

Muon updates the matrices of blocks. Flickr8k's projections have none, so Muon is AdamW there and is not measured.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from math import log10
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import clipkit
from bench.flickr8k import write_tables
from data.corpora.builtin import built_in
from eval.features.encoder import Encoder, PooledFeatures
from eval.readers import open_dataset
from eval.run import evaluate
from eval.tasks.subject import Subject

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "optimizers.json"
WORK = ROOT / "runs" / "optimizers"
BATCH_SIZES = (128, 256, 512, 1024, 2048, 4096)
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
# by optimizer, the index in RATES at which the search begins with batches of 128, and settings
OPTIMIZERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "adamw": (4, ()),
    "lion": (2, ("optim.beta2=0.99",)),
    "muon": (4, ()),
}
COMPARED = {"flickr8k": ("adamw", "lion"), "emoji": ("adamw", "lion", "muon")}
WEIGHT_DECAY = {"flickr8k": 0.1, "emoji": 0.2}
SAMPLES = {"flickr8k": 120_000, "emoji": 43_008}
SETTINGS = {
    "flickr8k": (
        "configs/finetune_heads.toml", "pixels.mean=[0.498,0.498,0.498]", "pixels.std=[0.502,0.502,0.502]",
        "lock.views=1",
    ),
    "emoji": (
        "configs/emoji.toml", "model.image=timm:tf_efficientnet_lite0", "model.image_options=",
        "model.image_size=96", "lock.image=backbone", "lock.store=true", "data.crop_scale=1", "data.color_jitter=0",
        "data.grayscale=0",
    ),
}  # fmt: skip
LAST_STEP_ONLY = (
    "eval.data=[]", "checkpoint.best=", "checkpoint.every_steps=0", "eval.every_steps=0", "eval.patience=0",
    "log.tensorboard=false",
)  # fmt: skip

Row = dict[str, Any]
Score = Callable[[Path], dict[str, float]]


def score_flickr8k(run: Path, *, pooled: PooledFeatures) -> dict[str, float]:
    """Return the mean R@1 of both directions; ``pooled`` are features of the locked backbones, computed once."""
    encoder = Encoder(clipkit.load(run), pooled=pooled, locked=("image", "text"))
    scores = {}
    for name, split in (("validation", "dev"), ("test", "test")):
        subject = Subject(encoder, open_dataset(WORK / f"{split}.csv"))
        scores[name] = _read_metric(subject, "retrieval", "mean_R@1")
    return scores


def score_emoji(run: Path, *, pooled: PooledFeatures) -> dict[str, float]:
    """Return the mean R@1 among unseen concepts, and zero-shot accuracy on Fluent 3D."""
    encoder = Encoder(clipkit.load(run), batch_size=128, pooled=pooled, locked=("image",))
    unseen = Subject(encoder, open_dataset(built_in("emoji"), split="unseen_concepts"))
    artist = Subject(encoder, open_dataset(built_in("emoji"), split="test"))
    return {
        "validation": _read_metric(unseen, "retrieval", "mean_R@1"),
        "test": _read_metric(artist, "zero-shot", "acc1"),
    }


def _read_metric(subject: Subject, task: str, metric: str) -> float:
    (value,) = (score.value for score in evaluate(subject, tasks=[task]) if score.metric == metric)
    return value


def train(task: str, settings: Sequence[str], cell: Mapping[str, Any]) -> Path:
    """Train a run and return its folder."""
    run = WORK / f"run_{task}"
    shutil.rmtree(run, ignore_errors=True)
    optimizer = cell["optimizer"]
    steps = cell["samples"] // cell["batch_size"]
    decay = WEIGHT_DECAY[task] * (10 if optimizer == "lion" else 1)
    command = [
        *(sys.executable, "train.py", *SETTINGS[task], *LAST_STEP_ONLY, *settings, *OPTIMIZERS[optimizer][1]),
        *(f"out={run}", f"batch_size={cell['batch_size']}", f"steps={steps}", f"seed={cell['seed']}"),
        *(f"optim.name={optimizer}", f"optim.lr={cell['rate']}", f"optim.warmup={round(0.05 * steps)}"),
        f"optim.weight_decay={decay}",
    ]
    with (WORK / f"log_{task}.txt").open("w") as log:
        subprocess.run(command, cwd=ROOT, stderr=log, check=True)
    return run


def choose_rate(measure_rate: Callable[..., Row], start: int) -> float:
    """Return the best of RATES, of three around ``start`` and of further ones while the best has one neighbor."""
    scores = {i: measure_rate(rate=RATES[i])["validation"] for i in (start - 1, start, start + 1)}
    while True:
        best = max(scores, key=lambda i: scores[i])
        further = {best - 1, best + 1} & set(range(len(RATES))) - scores.keys()
        if not further:
            return RATES[best]
        scores |= {i: measure_rate(rate=RATES[i])["validation"] for i in further}


def read_rows() -> dict[str, list[Row]]:
    """Return the measured runs by task."""
    rows: dict[str, list[Row]] = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    return rows


def measure(task: str, settings: Sequence[str], score: Score, **cell: Any) -> Row:
    """Train and score a run, unless the results have it."""
    for row in read_rows().get(task, []):
        if all(row[name] == value for name, value in cell.items()):
            return row
    run = train(task, settings, cell)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    row = {**cell, "steps": last["step"], "loss": last["loss"], "scale": last["scale"], **score(run)}
    rows = read_rows()  # another call may have added some
    rows.setdefault(task, []).append(row)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")
    print(row, flush=True)
    return row


def print_table(task: str, batch_sizes: Sequence[int], table: dict[tuple[str, int], list[Row]]) -> None:
    """Print the test scores, mean and standard deviation over seeds, and the chosen rates."""
    print("| |", " | ".join(f"{size:,}" for size in batch_sizes), "|")
    for optimizer in dict.fromkeys(name for name, _ in table):
        cells = []
        for size in batch_sizes:
            rows = table[optimizer, size]
            values = [100 * row["test"] for row in rows]
            spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{mean(values):.1f}{spread}% ({rows[0]['rate']:g})")
        print(f"| {task}, {optimizer} |", " | ".join(cells), "|")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.optimizers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", choices=list(SETTINGS))
    parser.add_argument("--folder", type=Path, help="of Flickr8k, see bench.flickr8k")
    parser.add_argument("--image-weights", help="file of timm's tf_efficientnet_lite0")
    parser.add_argument("--text", help="folder of an encoder of sentence-transformers")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--only", nargs="+", choices=list(OPTIMIZERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the first chooses the rate")
    parser.add_argument("--samples", type=int, help="that each run sees, by default those of SAMPLES")
    arguments = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    settings: tuple[str, ...] = (f"model.image_weights={arguments.image_weights}",)
    score: Score = partial(score_emoji, pooled=PooledFeatures())
    if arguments.task == "flickr8k":
        score = partial(score_flickr8k, pooled=PooledFeatures())
        if not (WORK / "train.csv").is_file():
            write_tables(arguments.folder.resolve(), WORK)
        settings += (f"data.train={WORK / 'train.csv'}", f"model.text=transformers:{arguments.text}")
    table: dict[tuple[str, int], list[Row]] = {}
    for batch_size, optimizer in product(arguments.batch_sizes, arguments.only or COMPARED[arguments.task]):
        start = OPTIMIZERS[optimizer][0] + round(log10(batch_size / 128))  # proportional to √ batch size
        measure_rate = partial(
            measure,
            arguments.task,
            settings,
            score,
            optimizer=optimizer,
            batch_size=batch_size,
            samples=arguments.samples or SAMPLES[arguments.task],
        )
        rate = choose_rate(partial(measure_rate, seed=arguments.seeds[0]), start)
        table[optimizer, batch_size] = [measure_rate(seed=seed, rate=rate) for seed in arguments.seeds]
    print_table(arguments.task, arguments.batch_sizes, table)


if __name__ == "__main__":
    main()
