"""Image GPT's study of probes by depth, in small (Chen et al. 2020).

Every block of a tower that was trained to predict pixels is probed on handwritten digits, 1,000 images to learn
from, next to those of a ViT of the same depth and width that was trained on labels.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from bench.papers.labels import prepare, trained
from bench.papers.runs import run

STEPS, BATCH, SIDE, COLORS, LAYERS = 200, 16, 16, 16, 6
_COMMON = (f"steps={STEPS}", f"batch_size={BATCH}", f"model.image_size={SIDE}", f"optim.warmup={STEPS // 4}")
_PIXELS = (
    *_COMMON, "model.image=pixels:Ti", "loss.name=none", "model.text=", "lock.text=all",
    "image_gpt.weight=1",
)  # fmt: skip
VARIANTS: dict[str, tuple[str, ...]] = {
    "next pixel": (*_PIXELS, f'model.image_options={{"colors":{COLORS}}}'),
    "masked pixels": (*_PIXELS, f'model.image_options={{"colors":{COLORS},"causal":false}}'),
    "ViT, labels": (
        *_COMMON, "shape.patch=2", f"shape.image_layers={LAYERS}", "shape.image_width=128", "shape.image_heads=4",
    ),
}  # fmt: skip


def pixels(*, seeds: int, jobs: int, folder: Path) -> dict[str, Any]:
    """Probe every block of both."""
    prepare(folder)

    def of_seed(seed: int) -> dict[str, list[float]]:
        found = {}
        for name, settings in VARIANTS.items():
            found[name] = _accuracies(trained(settings, seed, folder, jobs=jobs), folder, jobs)
            print(f"pixels, seed {seed}, {name}: {' '.join(f'{one:.1%}' for one in found[name])}", flush=True)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(of_seed, range(seeds)))
    rows = {
        name: {f"block {layer + 1}": [one[name][layer] for one in found] for layer in range(LAYERS)}
        for name in VARIANTS
    }
    best = {name: max(row, key=lambda block: mean(row[block])) for name, row in rows.items()}
    last = f"block {LAYERS}"
    return {
        "title": "Image GPT: probes by depth",
        "source": "Image GPT (Chen et al. 2020), figure 2",
        "finding": "The best features of a tower that predicts pixels are in its middle, a supervised one's at its "
        "end.",
        "agrees": {
            "the tower that predicts pixels": best["next pixel"] not in ("block 1", last),
            "the supervised one": best["ViT, labels"] == last,
        },
        "scale": f"{STEPS} steps of {BATCH} images of {SIDE} pixels and {COLORS} colors, {LAYERS} blocks of width "
        f"128, probes on 1,000 digits, {seeds} seeds",
        "rows": rows,
        "ordered": True,
    }


def _accuracies(model: Path, folder: Path, jobs: int) -> list[float]:
    out = model / "layers.jsonl"
    run(
        "-m", "eval", "linear-probe", "--model", str(model), "--data", str(folder / "digits"), "--layers",
        "--skip-existing", "--out", str(out), log=model.with_suffix(".log"), jobs=jobs,
    )  # fmt: skip
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    by_setting = {line["setting"]: float(line["value"]) for line in lines if line["metric"] == "acc1"}
    return [by_setting[f"layer {layer}"] for layer in range(1, LAYERS + 1)]
