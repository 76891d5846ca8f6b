"""Compare training options on the quickstart: scores on handwriting and unseen fonts, and time.

    python -m bench.options [OPTION …] [--seeds 0 1 2] [--out FOLDER]

Trains ``configs/quickstart.toml`` as it is and, with AdamW and 1,200 steps, once with each option, and reads the
scores of the last step. Interrupted runs resume. Scores vary between seeds by 2 points on handwriting and 5 on
fonts (bench/README.md), so with one seed only larger differences are effects. Seconds depend on other load.
"""

import argparse
import json
import subprocess
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "options.json"

ADAMW = ("optim.name=adamw", "steps=1200", "optim.warmup=300")
OPTIONS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "adamw": ADAMW,
    "siglip": ("loss.name=siglip",),
    "same=positives": ("loss.same=positives",),
    "same=ignored": ("loss.same=ignored",),
    "patch_dropout=0.25": ("model.patch_dropout=0.25",),
    "patch_dropout=0.5": ("model.patch_dropout=0.5",),
    "small 8 px for 900 steps": ("small.steps=900", "small.image_size=8"),
    "stable_adamw": ("optim.name=stable_adamw",),
    "lamb, lr 1e-2": ("optim.name=lamb", "optim.lr=1e-2"),
    "muon": ("optim.name=muon",),
    "average=0.99": ("optim.average=0.99",),
    "constant, cooldown 240": ("optim.schedule=constant", "optim.cooldown=240"),
    "caption": ("caption.weight=1", "caption.length=24"),
    "masked": ("masked.weight=0.5",),
    "masked pixels": ("masked.weight=0.5", "masked.target=pixels"),
    "views": ("views.weight=1", "optim.average=0.99"),
    "dims 32, 64": ("loss.dims=[32,64]",),
    # as many steps as take the CPU time of 1,200 without a term
    "caption, equal time": ("caption.weight=1", "caption.length=24", "steps=230", "optim.warmup=58"),
    "masked, equal time": ("masked.weight=0.5", "steps=520", "optim.warmup=130"),
    "views, equal time": ("views.weight=1", "optim.average=0.99", "steps=330", "optim.warmup=82"),
}
SCORES = {"digits": "zero-shot", "glyphs": "zero-shot"}


def trained(out: Path, settings: tuple[str, ...]) -> dict[str, float]:
    """Train to the end; return the scores of the last step (value, low, high) and the seconds of all steps."""
    command = [sys.executable, str(ROOT / "train.py"), f"out={out}", "eval.every_steps=0", *settings]
    subprocess.run(command, cwd=ROOT, check=True)
    scores: dict[str, float] = {}
    for line in (out / "results.jsonl").read_text().splitlines():
        score = json.loads(line)
        if score["metric"] == "acc1" and SCORES.get(score["dataset"]) == score["task"]:
            scores |= {f"{score['dataset']}_{key}": score[key] for key in ("value", "low", "high")}
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    return {**scores, "seconds": last["seconds"], "steps": last["step"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("options", nargs="*", choices=[*OPTIONS, []], help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: 0")
    parser.add_argument("--out", type=Path, default=Path("runs/options"))
    given = parser.parse_args()
    for option, seed in product(given.options or OPTIONS, given.seeds):
        results = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
        name, settings = option, OPTIONS[option]
        if settings:
            settings = (*ADAMW, *settings)
        if seed:
            name, settings = f"{option}, seed {seed}", (*settings, f"seed={seed}")
        folder = given.out / "".join(c if c.isalnum() else "_" for c in name)
        results[name] = {"settings": settings, **trained(folder, settings)}
        RESULT.write_text(json.dumps(results, indent=2) + "\n")
        result = results[name]
        print(
            f"{name}: digits {result['digits_value']:.1%}, fonts {result['glyphs_value']:.1%}, "
            f"{result['seconds']:.0f} s"
        )


if __name__ == "__main__":
    main()
