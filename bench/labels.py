"""Compare all tasks that learn from labels with zero-shot classification, on handwritten digits.

    python -m bench.labels [--model runs/quickstart]

The first 1,000 built-in digits are the training set, the other 797 the test set. The learning rates suit a
model of a few million parameters that was trained at 1e-3. Only scores are recorded, so other load on the
machine does not matter.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import eval as evaluation

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "labels.json"
LEARNED = 1000
TASKS = ("zero-shot", "knn", "few-shot", "linear-probe", "fine-tune")
RATES = ("3e-4", "1e-3", "3e-3", "1e-2")


def write_folder(out: Path) -> None:
    """Write the digits as images by class, in a train and a test split."""
    (digits,) = evaluation.open_datasets(["digits"])
    assert digits.labels is not None
    for i, label in enumerate(digits.labels.tolist()):
        folder = out / ("train" if i < LEARNED else "test") / digits.class_names[label]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:05d}.png").write_bytes(digits.images.read(i))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--model", default="runs/quickstart")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        data, out = Path(work) / "handwriting", Path(work) / "results.jsonl"
        write_folder(data)
        tasks = [part for task in TASKS for part in ("--task", task)]
        command = [
            sys.executable, "-m", "eval", "run", "--model", given.model, "--data", str(data), "--out", str(out),
            "--runs", f"{work}/runs", *tasks, "--rates", *RATES,
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True)
        lines = [json.loads(line) for line in out.read_text().splitlines()]
    keys = ("task", "setting", "metric", "value", "low", "high", "n", "options")
    found = [{key: line[key] for key in keys} for line in lines if line["metric"] == "acc1"]
    RESULT.write_text(json.dumps(found, indent=2) + "\n")
    for one in found:
        print(f"{one['task']} {one['setting']}: {one['value']:.1%} ({one['low']:.1%} to {one['high']:.1%})")


if __name__ == "__main__":
    main()
