"""ViT's main experiment: pre-train on labels, fine-tune on other labels at twice the resolution."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.papers.labels import SIDE, STEPS, VIT, prepare, trained
from bench.papers.runs import run

RATES = ("3e-4", "1e-3", "3e-3")
EPOCHS = 20
STARTS: dict[str, tuple[str, ...]] = {
    "pre-trained on characters": (),
    "from scratch": ("steps=1", "optim.lr=1e-12"),
}


def transfer(*, seeds: int, jobs: int, folder: Path) -> dict[str, Any]:
    """Fine-tune pre-trained and fresh ViTs on 1,000 handwritten digits of twice the resolution."""
    prepare(folder)

    def of_seed(seed: int) -> list[float]:
        return [_accuracy(name, seed, folder, jobs) for name in STARTS]

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(of_seed, range(seeds)))
    best, scratch = zip(*found, strict=True)
    return {
        "title": "Pre-training on labels, fine-tuning at twice the resolution",
        "source": "ViT (Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929), section 3.2",
        "finding": "Pre-trained and fine-tuned on few images, a ViT is far better than one trained from scratch.",
        "agrees": min(best) > max(scratch),
        "scale": f"{STEPS} steps of pre-training at {SIDE} pixels, then {EPOCHS} epochs of 1,000 digits at "
        f"{2 * SIDE} pixels, best of {len(RATES)} learning rates, {seeds} seeds",
        "rows": dict(zip(STARTS, ({"digits": list(best)}, {"digits": list(scratch)}), strict=True)),
    }


def _accuracy(name: str, seed: int, folder: Path, jobs: int) -> float:
    model = trained((*VIT, *STARTS[name]), seed, folder, jobs=jobs)
    out = model / f"fine_tuned_{EPOCHS}.jsonl"
    run(
        "-m", "eval", "fine-tune", "--model", str(model), "--data", str(folder / "digits"), "--skip-existing",
        "--image-size", str(2 * SIDE), "--epochs", str(EPOCHS), "--rates", *RATES, "--seed", str(seed),
        "--runs", str(model / "fine_tune"), "--out", str(out), log=model.with_suffix(".log"), jobs=jobs,
    )  # fmt: skip
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    (accuracy,) = (float(line["value"]) for line in lines if line["metric"] == "acc1")
    print(f"transfer, seed {seed}, {name}: {accuracy:.1%}", flush=True)
    return accuracy
