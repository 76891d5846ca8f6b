"""Reproduce figures of papers in small, on built-in data.

    python -m bench.papers objectives [--steps N] [--folder FOLDER] [--out FILE] [--figure FILE]

``objectives`` is figure 2 of CLIP (Radford et al. 2021, https://arxiv.org/abs/2103.00020): zero-shot accuracy by
number of images seen, for predicting captions, predicting their words, and contrastive learning with two text
towers. All train on the same images of ``glyphs`` in the same order and are scored on the built-in ``digits``. Each
objective uses the better of two learning rates at seed 0. Finished parts are skipped when the command is repeated.
Captions have a vocabulary of their own, 1,966 tokens; the others use CLIP's, since bags of words require it.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from math import log2
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"

CAPTIONS = "caption"
OBJECTIVES: dict[str, tuple[str, ...]] = {
    CAPTIONS: ("loss.name=none", "lock.text=all", "caption.weight=1", "caption.length=24"),
    "words": ("loss.name=words", "model.text=words"),
    "contrastive, bag of words": ("model.text=cbow",),
    "contrastive, transformer": (),
}
RATES = ("5e-4", "1.5e-3")
BATCH, POINTS = 64, 5  # pairs per step; scored checkpoints of a run
Curve = dict[int, tuple[float, float, float]]  # images seen: accuracy and its 95% interval


def run(*command: str) -> None:
    """Run a Python command from the repository root; exit with its status if it fails."""
    if status := subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode:
        sys.exit(status)


def measured(objective: str, rate: str, seed: int, *, steps: int, folder: Path) -> Curve:
    """Train and score the checkpoints, as far as this is not yet done; return the accuracies."""
    out = folder / "".join(c if c.isalnum() else "_" for c in f"{objective} {rate} {seed}")
    done = out / "curve.json"
    curve: dict[str, Any] = json.loads(done.read_text()) if done.is_file() else {}
    every = max(1, steps // POINTS)
    at = range(every, every * POINTS + 1, every)
    if all(str(step * BATCH) in curve for step in at):
        return {int(images): tuple(score) for images, score in curve.items()}
    run(
        "train.py", f"out={out}", f"seed={seed}", f"steps={at[-1]}", f"batch_size={BATCH}", f"optim.lr={rate}",
        f"optim.warmup={at[-1] // 4}", "optim.schedule=constant",
        "eval.data=[]", f"checkpoint.every_steps={every}", "checkpoint.keep=0", *OBJECTIVES[objective],
        *([f"model.tokenizer={folder / 'tokenizer'}"] if objective == CAPTIONS else []),
    )  # fmt: skip

    import clipkit
    from eval.features.encoder import Encoder
    from eval.readers import open_dataset
    from eval.run import evaluate
    from eval.tasks.subject import Subject

    task = "likelihood" if objective == CAPTIONS else "zero-shot"
    for step in at:
        if str(step * BATCH) in curve:
            continue
        model = clipkit.load(str(out / "checkpoints" / f"step_{step:08d}"))
        subject = Subject(Encoder(model, batch_size=128), open_dataset("digits"), metrics=("acc1",))
        (score,) = (one for one in evaluate(subject, tasks=[task]) if one.metric == "acc1")
        curve[str(step * BATCH)] = [score.value, score.low, score.high]
        part = done.with_suffix(".partial")
        part.write_text(json.dumps(curve))
        part.replace(done)
        print(f"{objective}, rate {rate}, seed {seed}: {step * BATCH} images, {score.value:.1%}", flush=True)
    return {int(images): tuple(score) for images, score in curve.items()}


def images_to_reach(points: Sequence[tuple[int, float]], target: float) -> float | None:
    """Return the images seen when the score first reaches ``target``; None if it never does.

    Scores are interpolated linearly in log2(images). If the first point has reached it, its number of images is
    returned, an upper bound.
    """
    for index, (images, score) in enumerate(points):
        if score >= target:
            if index == 0:
                return float(images)
            before, low = points[index - 1]
            part = (target - low) / (score - low)
            return float(before * 2 ** (part * log2(images / before)))
    return None


def means(curves: Sequence[Curve]) -> list[tuple[int, float]]:
    """Return images seen and the mean accuracy over seeds."""
    return [(images, sum(one[images][0] for one in curves) / len(curves)) for images in sorted(curves[0])]


def plot(found: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> None:
    """Plot the mean accuracies over images seen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    for name, points in found.items():
        panel.plot(*zip(*points, strict=True), marker="o", label=name)
    panel.axhline(0.1, color="gray", lw=0.8, ls=":", label="chance")
    panel.set_xscale("log", base=2)
    panel.set_xlabel("images seen")
    panel.set_ylabel("zero-shot accuracy on digits")
    panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def objectives(*, steps: int, seeds: int, folder: Path, out: Path, figure: Path) -> None:
    """Reproduce figure 2 of CLIP."""
    from data.corpora.builtin import built_in

    folder, corpus = folder.absolute(), built_in("glyphs")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer").exists():
        run("-m", "data", "tokenizer", str(corpus), "--out", str(folder / "tokenizer"), "--vocab", "2048")
    found: dict[str, Any] = {}
    for name in OBJECTIVES:
        rates = {rate: measured(name, rate, 0, steps=steps, folder=folder) for rate in RATES}
        best = max(rates, key=lambda rate: rates[rate][max(rates[rate])][0])
        others = [measured(name, best, seed, steps=steps, folder=folder) for seed in range(1, seeds)]
        found[name] = {"rate": best, "rates": rates, "seeds": [rates[best], *others]}
    points = {name: means(one["seeds"]) for name, one in found.items()}
    images, target = points[CAPTIONS][-1]
    for name, one in found.items():
        reached = images_to_reach(points[name], target)
        one["factor"] = None if reached is None else images / reached
        one["factor_is_lower_bound"] = reached == points[name][0][0]
        sign = "≥ " if one["factor_is_lower_bound"] else ""
        factor = "not reached" if reached is None else f"factor {sign}{images / reached:.1f}"
        print(f"{name:<28}rate {one['rate']:<8}{points[name][-1][1]:6.1%}  {factor}")
    result = {
        "steps": steps,
        "batch_size": BATCH,
        "target": target,
        "paper": "words 3, contrastive 4 times words",
    }
    out.write_text(json.dumps({**result, "objectives": found}, indent=1) + "\n")
    plot(points, figure)


FIGURES: dict[str, Callable[..., None]] = {"objectives": objectives}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=FIGURES)
    parser.add_argument("--steps", type=int, default=400, help="steps of each training (default: 400)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the better rate (default: 3)")
    parser.add_argument("--folder", type=Path, default=Path("runs/papers/objectives"))
    parser.add_argument("--out", type=Path, default=RESULTS / "papers_objectives.json")
    parser.add_argument("--figure", type=Path, help="PNG or SVG (default: next to --out)")
    given = parser.parse_args()
    if given.steps < POINTS or given.seeds < 1:
        parser.error(f"expected --steps of at least {POINTS} and --seeds of at least 1")
    figure = given.figure or given.out.with_suffix(".png")
    FIGURES[given.name](
        steps=given.steps, seeds=given.seeds, folder=given.folder, out=given.out, figure=figure
    )


if __name__ == "__main__":
    main()
