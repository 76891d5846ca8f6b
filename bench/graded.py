"""Compare training with and without weights of pairs, on made products with graded relevance to queries.

    python -m bench.graded [--steps 120] [--seeds 0 1 2]

A product is a shape of some color on a noisy background. A query names a color and a shape. Products that match
both have grade 3, those of the shape alone 2, those of the color alone 1, as in a shop where the same thing in
another color is a better answer than another thing. Each training pair is a product with one of the queries that it
matches in any way, all equally likely, and a score of 2^grade - 1. Without the score, all these pairs are equal. A
sixth of the queries is left out of training.

nDCG@10 is scikit-learn's, with the grades as gains, over new products, which are ranked by cosine.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageDraw
from sklearn.metrics import ndcg_score

import clipkit
from data.shards.writer import DatasetWriter, Record

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "graded.json"
SIDE = 24  # pixels
COLORS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (230, 210, 40),
    "purple": (160, 50, 190), "white": (240, 240, 240), "orange": (240, 130, 20), "cyan": (40, 200, 210),
}  # fmt: skip
# corners in a square from -1 to 1; a disk has none
SHAPES: dict[str, Sequence[tuple[float, float]]] = {
    "disk": (),
    "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    "triangle": ((0, -1), (1, 1), (-1, 1)),
    "diamond": ((0, -1), (0.6, 0), (0, 1), (-0.6, 0)),
    "bar": ((-1, -0.3), (1, -0.3), (1, 0.3), (-1, 0.3)),
    "cup": ((-1, -1), (-0.4, -1), (-0.4, 0.4), (0.4, 0.4), (0.4, -1), (1, -1), (1, 1), (-1, 1)),
}
KINDS = [*product(COLORS, SHAPES)]  # of products, and of queries
PAIRS, TESTED = 6000, 4  # training pairs; new products of each kind
VARIANTS = {"unweighted": (), "weighted": ("data.weight=score",)}

Images = npt.NDArray[np.uint8]


def draw_product(color: str, shape: str, random: np.random.Generator) -> Images:
    """Draw a product of random size and place on noise, (S, S, 3)."""
    noise = random.integers(0, 110, (SIDE, SIDE, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    radius = random.uniform(6, 9)
    center = random.uniform(radius + 1, SIDE - radius - 1, 2)
    draw = ImageDraw.Draw(image)
    shade = tuple(int(value * random.uniform(0.8, 1)) for value in COLORS[color])
    if corners := SHAPES[shape]:
        draw.polygon([tuple(center + radius * np.array(corner)) for corner in corners], fill=shade)
    else:
        draw.ellipse([*(center - radius), *(center + radius)], fill=shade)
    return np.asarray(image)


def grade(query: tuple[str, str], kind: tuple[str, str]) -> int:
    """Return the relevance of a product to a query, 0 to 3."""
    return (query[0] == kind[0]) + 2 * (query[1] == kind[1])


def write_pairs(out: Path, queries: Sequence[tuple[str, str]]) -> None:
    """Write the training pairs, with their scores as a field."""
    random = np.random.default_rng(0)
    with DatasetWriter(out) as writer:
        for i in range(PAIRS):
            kind = KINDS[random.integers(len(KINDS))]
            relevant = [query for query in queries if grade(query, kind)]
            query = relevant[random.integers(len(relevant))]
            image = simplejpeg.encode_jpeg(draw_product(*kind, random), quality=95)
            score = 2 ** grade(query, kind) - 1
            record = Record(
                key=f"{i:05d}", image=image, extension="jpg", caption=" ".join(query), meta={"score": score}
            )
            writer.write("train", record)
        writer.finish({"name": "products"})


def measure_ndcg(model: str, queries: Sequence[tuple[str, str]]) -> float:
    """Return nDCG@10 of queries over new products."""
    random = np.random.default_rng(1)
    kinds = KINDS * TESTED
    products = [Image.fromarray(draw_product(*kind, random)) for kind in kinds]
    loaded = clipkit.load(model)
    images = clipkit.encode_image(products, loaded)
    texts = clipkit.encode_text([" ".join(query) for query in queries], loaded)
    grades = np.array([[grade(query, kind) for kind in kinds] for query in queries])
    return float(ndcg_score(grades, (texts @ images.T).numpy(), k=10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    order = np.random.default_rng(2).permutation(len(KINDS))
    unseen = [KINDS[i] for i in order[: len(KINDS) // 6]]
    seen = [kind for kind in KINDS if kind not in unseen]
    scores: dict[str, dict[str, list[float]]] = {
        variant: {"seen queries": [], "unseen queries": []} for variant in VARIANTS
    }
    with tempfile.TemporaryDirectory() as work:
        pairs = Path(work) / "products"
        write_pairs(pairs, seen)
        for seed, (variant, settings) in product(given.seeds, VARIANTS.items()):
            out = f"{work}/{variant}-{seed}"
            command = [
                sys.executable, str(ROOT / "train.py"), f"data.train={pairs}", f"out={out}", f"seed={seed}",
                f"steps={given.steps}", f"optim.warmup={given.steps // 4}", "eval.data=[]", "data.workers=1",
                *settings,
            ]  # fmt: skip
            subprocess.run(command, cwd=ROOT, check=True)
            scores[variant]["seen queries"].append(measure_ndcg(out, seen))
            scores[variant]["unseen queries"].append(measure_ndcg(out, unseen))
            print(variant, seed, scores[variant], flush=True)
    summary = {}
    for which in ("seen queries", "unseen queries"):
        before, after = (scores[variant][which] for variant in VARIANTS)
        gains = [weighted - plain for plain, weighted in zip(before, after, strict=True)]
        summary[which] = {
            "gain": mean(gains),
            "least_gain": min(gains),
            "seed_noise": max(stdev(before), stdev(after)) if len(before) > 1 else None,
        }
    RESULT.write_text(json.dumps({"steps": given.steps, "ndcg@10": scores, **summary}, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
