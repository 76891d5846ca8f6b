"""Compare fine-tuning options: the quickstart's model on 1,000 digits, and its loss of accuracy on fonts.

    python -m bench.finetuning [OPTION …] [--model runs/quickstart] [--seeds 0]

Trains ``configs/finetune.toml`` with its defaults and once with each option on the first 1,000 built-in digits, and
evaluates zero-shot on the other 797 and on the fonts that the quickstart is evaluated on.

The costs of each run are the median step time, peak memory (of the process on a CPU, allocated on a GPU), and the
sizes of weights and optimizer state in its last checkpoint. With several seeds, options alternate, so that a change
in the machine's load affects all of them: compare step times over the seeds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import eval as evaluation
from data.shards.writer import DatasetWriter, Record

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "finetuning.json"
LEARNED = 1000
# the last step is evaluated, and the number of steps does not depend on the number of pairs
LENGTH = (
    "steps=400", "optim.warmup=40", "lock.unfreeze_every=10", "checkpoint.every_steps=100", "checkpoint.best=",
    "eval.every_steps=0", "eval.patience=0", "eval.guard=[]",
)  # fmt: skip
OPTIONS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "all layers from the start": ("lock.unfreeze_every=0",),
    "locked image tower": ("lock.image=all", "lock.unfreeze_every=0"),
    "locked text tower": ("lock.text=all", "lock.unfreeze_every=0"),
    "one rate for all layers": ("optim.layer_decay=1",),
    "no averages": ("optim.average=0",),
    **{
        f"adapters, rate {rate}": (
            "lora.rank=8",
            "lock.unfreeze_every=0",
            "optim.layer_decay=1",
            f"optim.lr={rate}",
        )
        for rate in ("3e-4", "1e-3", "3e-3")
    },
    **{
        f"all layers, rate {rate}": ("lock.unfreeze_every=0", "optim.layer_decay=1", f"optim.lr={rate}")
        for rate in ("3e-5", "1e-4")
    },
}


def write_pairs(out: Path) -> None:
    """Write the digits with a prompt of their class as the caption, in a train and a test split."""
    (digits,) = evaluation.open_datasets(["digits"])
    assert digits.labels is not None
    with DatasetWriter(out) as writer:
        for i, label in enumerate(digits.labels.tolist()):
            prompts = digits.prompts()[label]
            writer.write(
                "train" if i < LEARNED else "test",
                Record(
                    key=f"{i:05d}",
                    image=digits.images.read(i),
                    extension="png",
                    caption=prompts[i % len(prompts)],
                    label=label,
                ),
            )
        writer.finish(
            {"name": "handwriting"}, class_names=list(digits.class_names), templates=list(digits.templates)
        )


def scores(results: Path) -> dict[str, dict[str, float]]:
    """Return zero-shot accuracy by dataset at the first and the last step."""
    found: dict[str, dict[str, float]] = {"start": {}, "end": {}}
    for line in map(json.loads, results.read_text().splitlines()):
        if line["metric"] == "acc1" and line["task"] == "zero-shot":
            found["end" if line["step"] else "start"][line["dataset"]] = line["value"]
    return found


def costs(run: Path) -> dict[str, Any]:
    """Return the costs of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "batch_time" in line]
    last = max((run / "checkpoints").glob("step_*"))
    return {
        "step_seconds": median(line["batch_time"] for line in steps),
        "peak_gib": max(line["memory_gib"] for line in steps),
        "weights_mb": (last / "model.safetensors").stat().st_size / 1e6,
        "optimizer_mb": (last / "optimizer.safetensors").stat().st_size / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("options", nargs="*", choices=[*OPTIONS, []], help="default: all")
    parser.add_argument("--model", default="runs/quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        pairs = Path(work) / "pairs"
        write_pairs(pairs)
        for i, (seed, name) in enumerate(product(given.seeds, given.options or OPTIONS)):
            out = Path(work) / str(i)
            by_name = {setting.partition("=")[0]: setting for setting in (*LENGTH, *OPTIONS[name])}
            settings = [
                f"data.train={pairs}", f'eval.data=["{pairs}", "glyphs"]', "data.workers=1",
                f"model.weights={given.model}", "model.name=ViT-Ti-4-16", f"out={out}", f"seed={seed}",
                *by_name.values(),
            ]  # fmt: skip
            program = [sys.executable, str(ROOT / "train.py"), str(ROOT / "configs" / "finetune.toml")]
            subprocess.run([*program, *settings], cwd=ROOT, check=True)
            found = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
            label = f"{name}, seed {seed}" if seed else name
            found[label] = {
                "settings": OPTIONS[name],
                **scores(out / "results.jsonl"),
                "costs": costs(out),
            }
            RESULT.write_text(json.dumps(found, indent=2) + "\n")
            print(label, found[label], flush=True)


if __name__ == "__main__":
    main()
