"""Figure 2 of CLIP (Radford et al. 2021, https://arxiv.org/abs/2103.00020).

Zero-shot accuracy by number of images seen, for predicting captions, predicting their words, and contrastive
learning with two text towers. All train on the same images of ``glyphs`` in the same order and are scored on the
built-in ``digits``. Each objective uses the better of two learning rates at seed 0. Captions have a vocabulary of
their own, 1,966 tokens; the others use CLIP's, since bags of words require it.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import log2
from pathlib import Path
from typing import Any

from bench.papers.runs import RESULTS, run

CAPTIONS = "caption"
OBJECTIVES: dict[str, tuple[str, ...]] = {
    CAPTIONS: ("loss.name=none", "lock.text=all", "caption.weight=1", "caption.length=24"),
    "words": ("loss.name=words", "model.text=words"),
    "contrastive, bag of words": ("model.text=cbow",),
    "contrastive, transformer": (),
}
RATES = ("5e-4", "1.5e-3")
STEPS, BATCH, POINTS = 400, 64, 5  # pairs per step; scored checkpoints of a run
Curve = dict[int, tuple[float, float, float]]  # images seen: accuracy and its 95% interval


def measured(objective: str, rate: str, seed: int, *, folder: Path, jobs: int) -> Curve:
    """Train and score the checkpoints, as far as this is not yet done; return the accuracies."""
    out = folder / "".join(c if c.isalnum() else "_" for c in f"{objective} {rate} {seed}")
    done = out / "curve.json"
    curve: dict[str, Any] = json.loads(done.read_text()) if done.is_file() else {}
    every = STEPS // POINTS
    at = range(every, every * POINTS + 1, every)
    if all(str(step * BATCH) in curve for step in at):
        return {int(images): tuple(score) for images, score in curve.items()}
    run(
        "train.py", f"out={out}", f"seed={seed}", f"steps={at[-1]}", f"batch_size={BATCH}", f"optim.lr={rate}",
        f"optim.warmup={at[-1] // 4}", "optim.schedule=constant", "optim.name=adamw",
        "eval.data=[]", f"checkpoint.every_steps={every}", "checkpoint.keep=0", *OBJECTIVES[objective],
        *([f"model.tokenizer={folder / 'tokenizer'}"] if objective == CAPTIONS else []),
        log=out.with_suffix(".log"), jobs=jobs,
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
    return [(images, sum(curve[images][0] for curve in curves) / len(curves)) for images in sorted(curves[0])]


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


def objectives(*, seeds: int, jobs: int, folder: Path) -> dict[str, Any]:
    """Reproduce figure 2 of CLIP."""
    from data.corpora.builtin import built_in

    folder, corpus = folder / "objectives", built_in("glyphs")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer").exists():
        run("-m", "data", "tokenizer", str(corpus), "--out", str(folder / "tokenizer"), "--vocab", "2048")

    def curves(name: str) -> dict[str, Any]:
        rates = {rate: measured(name, rate, 0, folder=folder, jobs=jobs) for rate in RATES}
        best = max(rates, key=lambda rate: rates[rate][max(rates[rate])][0])
        others = [measured(name, best, seed, folder=folder, jobs=jobs) for seed in range(1, seeds)]
        return {"rate": best, "rates": rates, "seeds": [rates[best], *others]}

    with ThreadPoolExecutor(jobs) as pool:
        found = dict(zip(OBJECTIVES, pool.map(curves, OBJECTIVES), strict=True))
    points = {name: means(one["seeds"]) for name, one in found.items()}
    images, target = points[CAPTIONS][-1]
    for name, one in found.items():
        reached = images_to_reach(points[name], target)
        one["factor"] = None if reached is None else images / reached
        one["factor_is_lower_bound"] = reached == points[name][0][0]
    plot(points, RESULTS / "papers_objectives.png")
    words, contrastive = (found[name]["factor"] for name in ("words", "contrastive, bag of words"))
    return {
        "title": "Captions, words, or a comparison of pairs",
        "source": "CLIP (Radford et al. 2021, https://arxiv.org/abs/2103.00020), figure 2",
        "finding": "Predicting a bag of words needs 3 times fewer images than predicting captions, and the "
        "contrastive objective 4 times fewer again.",
        "agrees": {
            "words": bool(words and words > 1.5),
            "the contrastive objective": bool(words and contrastive and contrastive > 1.5 * words),
        },
        "scale": f"{STEPS} steps of {BATCH} pairs, {seeds} seeds",
        "rows": {
            f"{name}, {_factor(one)}": {
                f"after {images:,} images": [seed[images][0] for seed in one["seeds"]]
            }
            for name, one in found.items()
        },
        "objectives": found,
    }


def _factor(one: Mapping[str, Any]) -> str:
    sign = "≥ " if one["factor_is_lower_bound"] else ""
    return (
        "never as good as captions"
        if one["factor"] is None
        else f"{sign}{one['factor']:.1f} times fewer images"
    )
