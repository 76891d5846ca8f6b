"""Fine-tunes of a small model end with a verdict: better than the start weights or not, and what was lost."""

import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import clipkit
from clipkit.formats import best_checkpoint, parse_step
from data.shards.writer import DatasetWriter, Record
from eval import evaluate
from eval.datasets.dataset import encode_png
from eval.results.records import Verdict, read_verdict
from tests.small_trainings import Trainings, error_of, pairs, trainings

__all__ = ["pairs", "trainings"]  # fixtures

COLORS = {
    "red": (220, 30, 30), "green": (30, 200, 30), "blue": (40, 40, 230), "yellow": (220, 210, 30),
    "white": (235, 235, 235), "black": (20, 20, 20),
}  # fmt: skip
OTHERS = {
    "orange": (250, 140, 20), "violet": (130, 30, 200), "pink": (250, 150, 190), "brown": (110, 60, 20),
    "grey": (128, 128, 128), "cyan": (40, 200, 210),
}  # fmt: skip
SHAPE = (
    "shape.image_layers=2", "shape.image_width=64", "shape.text_layers=1", "shape.text_width=64", "shape.embed=32",
    "loss.same=positives", "log.every_steps=50", "checkpoint.keep=1",
)  # fmt: skip
FINE_TUNE = (
    *SHAPE, "batch_size=40", "steps=250", "optim.warmup=5", "optim.lr=1e-3", "eval.every_steps=10",
    "checkpoint.every_steps=50", "checkpoint.best=acc1", "eval.patience=5",
)  # fmt: skip


def write_colors(
    folder: Path,
    colors: dict[str, tuple[int, int, int]],
    samples: dict[str, int],
    *,
    wrong: float = 0.0,
    shuffled: bool = False,
) -> Path:
    """Write noisy images of about one color, whose captions name it.

    A fraction of the captions of the training split is ``wrong``; if ``shuffled``, captions and labels of all
    splits are drawn at random.
    """
    random = np.random.default_rng(0)
    names = tuple(colors)
    with DatasetWriter(folder) as writer:
        for split, count in samples.items():
            for i in range(count):
                label = int(random.integers(len(names)))
                pixels = (
                    np.array(colors[names[label]])
                    + random.normal(0, 40, 3)
                    + random.normal(0, 40, (16, 16, 3))
                )
                is_wrong = split == "train" and random.random() < wrong
                label = int(random.integers(len(names))) if shuffled else label
                record = Record(
                    key=f"{i:05d}",
                    image=encode_png(Image.fromarray(pixels.clip(0, 255).astype(np.uint8))),
                    extension="png",
                    caption=f"a picture of {random.choice(names) if is_wrong else names[label]}",
                    label=label,
                )
                writer.write(split, record)
        writer.finish({"name": folder.name}, class_names=names, templates=["a picture of {c}"])
    return folder


@pytest.fixture(scope="module")
def start(trainings: Trainings) -> Path:
    """Weights of a model that names colors."""
    folder = trainings.pairs.parent
    write_colors(folder / "colors", COLORS, {"train": 2000, "test": 150})
    write_colors(folder / "others", OTHERS, {"train": 200, "test": 200}, wrong=0.4)
    write_colors(folder / "shuffled", OTHERS, {"train": 200, "test": 200}, shuffled=True)
    out = folder / "start"
    settings = (
        f"data.train={folder}/colors",
        "steps=150",
        "batch_size=32",
        "optim.lr=2e-3",
        "optim.warmup=20",
    )
    trainings.run(out, *SHAPE, *settings)
    return out


def best_step(run: Path) -> int:
    best = best_checkpoint(run)
    assert best is not None
    return parse_step(best.name)


def fine_tune(trainings: Trainings, start: Path, out: Path, data: str, *more: str) -> tuple[str, Verdict]:
    """Train on a dataset with the colors as the guard set; return stderr and the verdict."""
    folder = trainings.pairs.parent
    said = trainings.run(
        out, *FINE_TUNE, f"model.weights={start}", f"data.train={folder / data}", f"eval.data=['{folder / data}']",
        f"eval.guard=['{folder / 'colors'}']", *more,
    )  # fmt: skip
    verdict = read_verdict(out)
    assert verdict is not None
    return said, verdict


@pytest.mark.slow
def test_overfitted(trainings: Trainings, start: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    longer = "model.context_length=90"
    said, verdict = fine_tune(trainings, start, run, "others", longer)
    assert "stopped at step " in said and "best acc1 on others: " in said
    assert verdict.kind == "better"
    rows = {(row.dataset, row.model): row for row in verdict.rows}
    best = next(model for dataset, model in rows if model.startswith("best, step "))
    assert best == f"best, step {best_step(run)}"
    values = {key: row.value for key, row in rows.items()}
    assert values["others", best] > values["others", "start weights"] + 0.3
    assert values["colors", best] < values["colors", "start weights"] - 0.1
    recommended = next(text for text in verdict.sentences if text.startswith("Recommended: "))
    chosen = recommended.removeprefix("Recommended: ").split(", with ")[0]
    row = rows["others", chosen]
    assert row.low is not None and row.low > 0 and f"Better: {chosen}: {row.text} top-1 on others" in said
    lost = rows["colors", chosen]
    assert (lost.high is not None and lost.high < 0) == (f"Lost by {chosen}: colors" in said)
    page = (run / "report.html").read_text()
    assert (
        f"{chosen}: {row.text} top-1 on others" in page and f"best checkpoint, step {best_step(run)}" in page
    )
    # the command writes a model with these scores
    words = shlex.split(verdict.command)
    trainings.clipkit(*words[1:])
    folder = trainings.pairs.parent
    for data in ("others", "colors"):
        scores = evaluate(clipkit.load(words[words.index("--out") + 1]), folder / data, tasks=["zero-shot"])
        assert next(score.value for score in scores if score.metric == "acc1") == values[data, chosen]
    # the same command judges again only what is missing
    lines = (run / "verdict" / "results.jsonl").read_bytes()
    again, same = fine_tune(trainings, start, run, "others", longer)
    assert same == verdict and verdict.sentences[0] in again
    (run / "verdict.json").unlink()
    _, same = fine_tune(trainings, start, run, "others", longer)
    assert same == verdict and (run / "verdict" / "results.jsonl").read_bytes() == lines


@pytest.mark.slow
def test_shuffled_pairs_are_no_evidence_on_two_ranks(
    trainings: Trainings, start: Path, tmp_path: Path
) -> None:
    folder = trainings.pairs.parent
    said = trainings.run_ranks(
        2, tmp_path / "run", *FINE_TUNE, f"model.weights={start}", f"data.train={folder / 'shuffled'}",
        f"eval.data=['{folder / 'shuffled'}']", "steps=40",
    )  # fmt: skip
    assert sum("No evidence: no model is better than the start weights" in text for text in said) == 1
    verdict = read_verdict(tmp_path / "run")
    assert verdict is not None and verdict.kind == "no evidence" and not verdict.command
    assert "What the model lost is not known: eval.guard names no dataset." in verdict.sentences
    assert {row.dataset for row in verdict.rows} == {"shuffled"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("eval.guard=['digits']",), 'eval.guard = ["digits"] has no effect unless model.weights is set'),
        (("eval.guard=['digit']", "model.weights=START"), "no dataset 'digit'"),
        (("eval.guard=['digits']", "model.weights=START", "eval.data=[]"), "unless eval.data is set"),
    ],
)
def test_guard_sets_are_checked_before_training(
    settings: tuple[str, ...], message: str, trainings: Trainings, tmp_path: Path
) -> None:
    data = f"eval.data=['{trainings.pairs}/train']"
    name = "model.name=ViT-Ti-4-16"
    error = error_of(trainings.run(tmp_path / "run", data, name, *settings, status=1))
    assert message in error, error
