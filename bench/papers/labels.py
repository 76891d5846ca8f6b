"""Studies of ViTs that are trained on labels: small models, the characters of ``glyphs``, three seeds.

Every training sees 400 batches of 128 images of 32 pixels unless its settings say otherwise, with 1,574 characters
as classes. Scores are the accuracy on two unseen fonts ("fonts", 62 classes), that of a linear probe on handwritten
digits ("probe", 1,000 images to learn from), and that of ridge regression on five digits per class ("5-shot").
"""

import hashlib
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.labels import write_folder
from bench.papers.runs import run

STEPS, BATCH, SIDE = 400, 128, 32
VIT = ("shape.patch=8",)  # 16 patches, 0.8 million parameters
RESNET = ("model.image=timm:resnet10t", 'model.image_options={"channels":[24,48,96,192]}')  # 0.7 million
FloatArray = NDArray[np.float64]
Means = Mapping[str, Mapping[str, float]]  # variant: score: mean over seeds


@dataclass(frozen=True, kw_only=True)
class Study:
    """Variants of a training and what a paper found about them.

    Attributes:
        title: heading of the section.
        source: the paper.
        finding: what it found, in a sentence.
        variants: settings by name. ``{NAME}`` is the run folder of an earlier variant with the same seed, ``{}``
            the folder of all studies.
        agrees: whether the means show the same direction; by claim if there are several.
        scores: computes the scores of a run folder, given the folder of all studies.
        scale: what each variant was trained on.
        fit: describes a function that was fitted to the means.
    """

    title: str
    source: str
    finding: str
    variants: Mapping[str, Sequence[str]]
    agrees: Callable[[Means], bool | dict[str, bool]]
    scores: Callable[[Path, Path], dict[str, float]] = lambda out, folder: scores(out, folder)
    scale: str = f"{STEPS} steps of {BATCH} images of {SIDE} pixels"
    fit: Callable[[Means], str] | None = None


def _best(means: Means, score: str, among: Callable[[str], bool] = lambda name: True) -> str:
    return max((name for name in means if among(name)), key=lambda name: means[name][score])


def _spread(means: Means, names: Sequence[str]) -> float:
    found = [means[name]["fonts"] for name in names]
    return max(found) - min(found)


_TOKEN = "hard labels, distillation token, twice the embedding"  # a half for each token
_FRACTIONS = {"1,200": 0.02, "3,000": 0.05, "12,000": 0.2, "60,000": 1.0}

STUDIES: dict[str, Study] = {
    "size": Study(
        title="Pre-training size: ResNet against ViT",
        source="ViT (Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929), figures 3 and 4",
        finding="ResNets are better after pre-training on few images, ViTs after pre-training on many.",
        variants={
            f"{name}, {images} images": (*settings, f"data.fraction={fraction}")
            for name, settings in (("ViT", VIT), ("ResNet", RESNET))
            for images, fraction in _FRACTIONS.items()
        },
        agrees=lambda means: {
            "on few images": means["ResNet, 1,200 images"]["probe"] > means["ViT, 1,200 images"]["probe"],
            "on many": means["ViT, 60,000 images"]["probe"] > means["ResNet, 60,000 images"]["probe"],
        },
    ),
    "positions": Study(
        title="Position embeddings and pooling",
        source="ViT, appendix D.3 and D.4",
        finding="Without position embeddings accuracy is 3 points lower; their kind and the pooling matter little.",
        variants={
            f"{positions}, {pool}": (
                *VIT, f"shape.positions={positions}", f"shape.pool={pool}", "steps=300", "optim.warmup=225",
            )
            for positions, pool in (
                *((one, "class") for one in ("none", "learned", "learned_2d", "sincos_2d")), ("learned", "mean"),
                ("learned", "map"),
            )
        },
        agrees=lambda means: {
            "without": means["none, class"]["fonts"] == min(one["fonts"] for one in means.values()),
            "their kind": _spread(means, ("learned, class", "learned_2d, class", "sincos_2d, class")) < 0.03,
            "the pooling": _spread(means, ("learned, class", "learned, mean", "learned, map")) < 0.03,
        },
        scale=f"300 steps of {BATCH} images of {SIDE} pixels",
    ),
    "head": Study(
        title="Strong weight decay on the head",
        source="Scaling ViT (Zhai et al. 2022, https://arxiv.org/abs/2106.04560), section 3.1",
        finding="Much decay on the head and little on the body transfers better to few labels.",
        variants={
            f"head {head}, body {body}": (*VIT, f"optim.head_decay={head}", f"optim.weight_decay={body}")
            for head, body in ((0.1, 0.1), (3.0, 0.1), (0.03, 0.03), (3.0, 0.03))
        },
        agrees=lambda means: "head 3.0" in _best(means, "5-shot"),
    ),
    "sam": Study(
        title="Sharpness-aware minimization",
        source="Chen et al. 2022, https://arxiv.org/abs/2106.01548",
        finding="A ViT without pre-training or strong augmentation becomes 5 points better, a ResNet less so.",
        variants={
            f"{name}, SAM {rho}": (*settings, "data.fraction=0.05", f"optim.sam={rho}")
            for name, settings in (("ViT", VIT), ("ResNet", RESNET))
            for rho in (0, 0.1)
        },
        agrees=lambda means: (
            means["ViT, SAM 0.1"]["fonts"] - means["ViT, SAM 0"]["fonts"]
            > max(0, means["ResNet, SAM 0.1"]["fonts"] - means["ResNet, SAM 0"]["fonts"])
        ),
        scale=f"{STEPS} steps of {BATCH} images of {SIDE} pixels, of 3,000",
    ),
    "distillation": Study(
        title="Distillation from a ResNet",
        source="DeiT (Touvron et al. 2021, https://arxiv.org/abs/2012.12877), table 3",
        finding="A ViT learns more from a ResNet's hard labels than from its soft ones or from labels alone, and "
        "still more with a distillation token.",
        variants={
            "teacher: ResNet": (*RESNET, "data.fraction=0.2"),
            "labels alone": (*VIT, "data.fraction=0.2"),
            "soft labels, temperature 3": (
                *VIT, "data.fraction=0.2", "distill.teacher={teacher: ResNet}", "distill.temperature=3",
            ),
            "hard labels": (*VIT, "data.fraction=0.2", "distill.teacher={teacher: ResNet}", "distill.hard=true"),
            "hard labels, distillation token": (
                *VIT, "data.fraction=0.2", "distill.teacher={teacher: ResNet}", "distill.hard=true",
                "shape.distilled=true",
            ),
            _TOKEN: (
                *VIT, "data.fraction=0.2", "distill.teacher={teacher: ResNet}", "distill.hard=true",
                "shape.distilled=true", "shape.embed=256",
            ),
        },
        agrees=lambda means: {
            "hard labels": means["hard labels"]["fonts"]
            > max(means[name]["fonts"] for name in ("soft labels, temperature 3", "labels alone")),
            "the token": means[_TOKEN]["fonts"] > means["hard labels"]["fonts"],
        },
    ),
    "dimensions": Study(
        title="One dimension at a time",
        source="ViT, figure 8",
        finding="Depth helps most, up to a point; smaller patches help surprisingly much; width least.",
        variants={
            name: (*settings, "steps=200", "optim.warmup=150")
            for name, settings in {
                "base": VIT,
                "depth 8": (*VIT, "shape.image_layers=8"),
                "width 384": (*VIT, "shape.image_width=384", "shape.image_heads=6"),
                "MLP 1536": (*VIT, "shape.image_mlp=8"),
                "patch 4": ("shape.patch=4",),
            }.items()
        },
        agrees=lambda means: {
            name: means[variant]["fonts"] > means["width 384"]["fonts"]
            for name, variant in {"depth": "depth 8", "smaller patches": "patch 4"}.items()
        },
        scale=f"200 steps of {BATCH} images of {SIDE} pixels",
    ),
    "compute": Study(
        title="Error by training compute",
        source="Scaling ViT (Zhai et al. 2022, https://arxiv.org/abs/2106.04560), section 2",
        finding="The few-shot error follows E = a (C + d)^-b + c of compute C: a power law that saturates.",
        variants={
            f"{steps} steps": (*VIT, f"steps={steps}", f"optim.warmup={3 * steps // 4}")
            for steps in (25, 50, 100, 200, 400, 800)
        },
        agrees=lambda means: (
            _falls([1 - one["5-shot"] for one in means.values()]) and saturating_fit(*_errors(means))[1] < 0.01
        ),
        fit=lambda means: _shown_fit(*_errors(means)),
        scale=f"{BATCH} images of {SIDE} pixels per step",
    ),
    "cues": Study(
        title="Shape or texture",
        source="Tuli et al. 2021, https://arxiv.org/abs/2105.07197",
        finding="A ViT decides by shape more often than a convolutional network.",
        variants={
            name: (
                *settings, "data.train=cues", "model.text=classes:{}/cues.txt", "model.image_size=64", "steps=200",
                "optim.warmup=50",
            )
            for name, settings in (("ViT", VIT), ("ResNet", RESNET))
        },
        agrees=lambda means: means["ViT"]["shape bias"] > means["ResNet"]["shape bias"],
        scores=lambda out, _: cue_scores(out),
        scale=f"200 steps of {BATCH} images of 64 pixels",
    ),
}  # fmt: skip


def _errors(means: Means) -> tuple[list[float], list[float]]:
    """Return thousands of images seen, to which compute is proportional, and 5-shot errors."""
    images = [int(name.split()[0]) * BATCH / 1000 for name in means]
    return images, [1 - mean["5-shot"] for mean in means.values()]


def saturating_fit(compute: Sequence[float], errors: Sequence[float]) -> tuple[list[float], float]:
    """Fit E = a (C + d)^-b + c by least squares.

    Args:
        compute: C of at least 4 models, above 0.
        errors: E, 0 to 1.

    Returns:
        (a, b, c, d), and the root mean square of the residuals.
    """
    from scipy.optimize import least_squares

    x, y = np.asarray(compute), np.asarray(errors)

    def residuals(p: FloatArray) -> FloatArray:
        return np.asarray(p[0] * (x + p[3]) ** -p[1] + p[2] - y)

    # several starts: the sum of squares has local minima
    bounds = ([0, 0, 0, 0], [np.inf, 5, 1, np.inf])
    starts = [
        (y.max(), slope, low, shift) for slope in (0.2, 1) for low in (0, y.min()) for shift in (0.1, 10)
    ]
    found = [least_squares(residuals, start, bounds=bounds, x_scale=(1, 1, 0.1, 10)) for start in starts]
    best = min(found, key=lambda one: one.cost)
    return best.x.tolist(), float(np.sqrt(np.mean(best.fun**2)))


def _shown_fit(compute: Sequence[float], errors: Sequence[float]) -> str:
    (a, b, c, d), residual = saturating_fit(compute, errors)
    return (
        f"Fit of the mean 5-shot errors, C in thousands of images: E = {a:.3g} (C + {d:.3g})^−{b:.3g} + {c:.3g}. "
        f"The root mean square of its residuals is {100 * residual:.1f} points."
    )


def _falls(values: Sequence[float]) -> bool:
    return list(values) == sorted(values, reverse=True)


def write_classes(corpus: Path, out: Path) -> None:
    """Write the names of all training images, one a line."""
    names = set()
    for path in sorted((corpus / "train").glob("*.tar")):
        with tarfile.open(path) as shard:
            for member in shard:
                if member.name.endswith(".json") and (file := shard.extractfile(member)):
                    names.add(json.load(file)["name"])
    out.write_text("\n".join(sorted(names)) + "\n", encoding="utf-8")


def prepare(folder: Path) -> None:
    """Write what the studies share, as far as it is missing: names of classes, and digits by class."""
    from data.corpora.builtin import built_in

    if not (folder / "classes.txt").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_folder(folder / "digits")
        write_classes(built_in("glyphs"), folder / "classes.txt")
    if not (folder / "cues.txt").exists():
        (folder / "cues.txt").write_bytes((built_in("cues") / "classnames.txt").read_bytes())


def trained(settings: Sequence[str], seed: int, folder: Path, *, jobs: int = 1) -> Path:
    """Train as far as this is not yet done; return the run folder, which is named after the settings."""
    digest = hashlib.sha256("\n".join([*settings, str(seed)]).encode()).hexdigest()[:12]
    out = folder / f"run_{digest}"
    if not (out / "report.html").is_file():
        base = {
            "steps": STEPS, "batch_size": BATCH, "model.image_size": SIDE, "loss.name": "classes",
            "model.text": f"classes:{folder / 'classes.txt'}", "data.captions": "name", "eval.data": "[]",
            "optim.name": "adamw", "optim.warmup": 300,
        }  # fmt: skip
        base |= dict(text.split("=", 1) for text in settings)
        given = [f"{name}={value}" for name, value in base.items()]
        run("train.py", f"out={out}", f"seed={seed}", *given, log=out.with_suffix(".log"), jobs=jobs)
    return out


def scores(out: Path, folder: Path) -> dict[str, float]:
    """Return the scores of a run, computed once."""
    done = out / "scores.json"
    if not done.is_file():
        import clipkit
        from eval.features.encoder import Encoder
        from eval.readers import open_dataset
        from eval.tasks import Options
        from eval.tasks.classify import zero_shot
        from eval.tasks.probe import few_shot, linear_probe
        from eval.tasks.subject import Subject

        encoder = Encoder(clipkit.load(str(out)), batch_size=BATCH)
        fonts = Subject(encoder, open_dataset("glyphs"))
        opened = partial(open_dataset, str(folder / "digits"))
        digits = Subject(encoder, opened(), open_split=lambda split: opened(split=split))
        options = Options(details=False, shots=(5,), estimators=("ridge",), seeds=tuple(range(10)))
        found = {}
        for name, task, subject in (
            ("fonts", zero_shot, fonts), ("probe", linear_probe, digits), ("5-shot", few_shot, digits),
        ):  # fmt: skip
            found[name] = mean(
                score.value for score in task(subject, options).scores if score.metric == "acc1"
            )
        done.write_text(json.dumps(found))
    found = json.loads(done.read_text())
    return {str(name): float(value) for name, value in found.items()}


def cue_scores(out: Path) -> dict[str, float]:
    """Return the shape bias of a run on ``cues``, and its accuracy where shape and texture agree."""
    import clipkit
    from eval.features.encoder import Encoder
    from eval.readers import open_dataset
    from eval.tasks import Options
    from eval.tasks.classify import zero_shot
    from eval.tasks.subject import Subject

    encoder, found = Encoder(clipkit.load(str(out)), batch_size=BATCH), {}
    for name, split, metric in (("shape bias", "test", "shape_bias"), ("equal cues", "val", "acc1")):
        dataset = open_dataset("cues", split=split, metadata_names=("texture",))
        (score,) = zero_shot(Subject(encoder, dataset, metrics=(metric,)), Options(details=False)).scores
        found[name] = score.value
    return found


def study(name: str, *, seeds: int, jobs: int, folder: Path) -> dict[str, Any]:
    """Train and score the variants of a study; return what its section shows."""
    one = STUDIES[name]
    prepare(folder)

    def of_seed(seed: int) -> dict[str, dict[str, float]]:
        runs: dict[str, Path] = {}
        found = {}
        for variant, settings in one.variants.items():
            filled = [text.replace("{}", str(folder)) for text in settings]
            for other, out in runs.items():
                filled = [text.replace("{" + other + "}", str(out)) for text in filled]
            runs[variant] = trained(filled, seed, folder, jobs=jobs)
            found[variant] = one.scores(runs[variant], folder)
            shown = ", ".join(f"{score} {value:.1%}" for score, value in found[variant].items())
            print(f"{name}, seed {seed}, {variant}: {shown}", flush=True)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(of_seed, range(seeds)))
    rows = {
        variant: {score: [by_seed[variant][score] for by_seed in found] for score in found[0][variant]}
        for variant in one.variants
    }
    means = {variant: {score: mean(values) for score, values in row.items()} for variant, row in rows.items()}
    return {
        "title": one.title,
        "source": one.source,
        "finding": one.finding,
        "agrees": one.agrees(means),
        "scale": f"{one.scale}, {seeds} seeds",
        "fit": "" if one.fit is None else one.fit(means),
        "rows": rows,
    }
