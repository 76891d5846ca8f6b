"""Tests of fine-tuning with real trainings: scores, stored files, resuming and rejected inputs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

import clipkit
import eval as evaluation
from clipkit import CLIP
from clipkit.errors import ConfigError, DataError
from clipkit.formats.checkpoint import save_model
from clipkit.model.clip import create
from clipkit.model.zero_shot import attach_class_head
from eval import Encoder, Subject
from eval.__main__ import main
from eval.datasets.dataset import make_distinct
from eval.datasets.targets import find_targets
from eval.features.encoder import Ranks
from eval.run import Results, run_model
from eval.tasks import Options
from eval.tasks.fine_tune import fine_tune
from eval.tasks.subject import Outcome

ROOT = Path(__file__).parents[3]
COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of images, 24 training and 10 test images of each."""
    out, random = tmp_path_factory.mktemp("colours") / "colours", np.random.default_rng(0)
    for split, count in (("train", 24), ("test", 10)):
        for name, colour in COLOURS.items():
            (out / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(random.normal(colour, 50, (16, 16, 3)), 0, 255).astype(np.uint8)
                file = BytesIO()
                Image.fromarray(pixels).save(file, "png")
                (out / split / name / f"{i}.png").write_bytes(file.getvalue())
    return out


@pytest.fixture(scope="module")
def unskilled() -> CLIP:
    return create("ViT-Ti-4-16", seed=0).eval()


def subject_of(model: CLIP, folder: Path, *, ranks: Ranks = Ranks()) -> Subject:  # noqa: B008
    return Subject(
        Encoder(model, ranks=ranks),
        evaluation.open_dataset(folder),
        open_split=lambda split: evaluation.open_dataset(folder, split=split),
    )


def values(found: Outcome) -> dict[str, float]:
    return {score.metric: score.value for score in found.scores}


def run_of(runs: Path) -> Path:
    (run,) = runs.glob("*/final_*/")
    return run


@pytest.mark.long
def test_fine_tuned_head_learns_classes_and_is_loadable(
    colours: Path, unskilled: CLIP, tmp_path: Path
) -> None:
    subject = subject_of(unskilled, colours)
    before = {score.metric: score.value for score in evaluation.evaluate(subject, tasks=["zero-shot"])}
    options = Options(epochs=6, fine_tune_batch=16, rates=(1e-3,), runs=tmp_path)
    found = fine_tune(subject, options)
    run = run_of(tmp_path)
    assert found.details[0].tuned_on == "" and not (run.parent / "pictures" / "test").exists()
    assert values(found)["acc1"] > max(0.9, before["acc1"] + 0.2)
    tuned = clipkit.load(run)
    images = [np.full((16, 16, 3), colour, np.uint8) for colour in COLOURS.values()]
    assert clipkit.classify(images, list(COLOURS), tuned).argmax(1).tolist() == [0, 1, 2]
    results = Results()
    run_model(
        tuned, find_targets([str(colours)]), out=tmp_path / "r.jsonl", tasks=["zero-shot"], results=results
    )
    again = {score.metric: score.value for score in results.scores}
    assert not results.errors and {metric: again[metric] for metric in values(found)} == values(found)
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["chance"] == pytest.approx(np.log(3)) and 0 <= first["acc1"] <= 1


@pytest.mark.long
def test_head_of_other_classes_is_replaced_at_another_image_size(
    colours: Path, unskilled: CLIP, tmp_path: Path
) -> None:
    save_model(attach_class_head(unskilled, ["a", "b"], torch.eye(2, 128)), tmp_path / "other")
    out = tmp_path / "r.jsonl"
    command = ["fine-tune", "--model", str(tmp_path / "other"), "--data", str(colours), "--image-size", "24"]
    settings = [
        "--epochs",
        "6",
        "--fine-tune-batch",
        "16",
        "--rates",
        "1e-3",
        "--runs",
        str(tmp_path / "runs"),
    ]
    assert main([*command, *settings, "--out", str(out)]) == 0
    scores = {line["metric"]: line["value"] for line in map(json.loads, out.read_text().splitlines())}
    assert scores["acc1"] > 0.9
    tuned = clipkit.load(run_of(tmp_path / "runs"))
    assert tuned.architecture.vision.image_size == 24
    assert tuned.architecture.text.classes == tuple(sorted(COLOURS))


@pytest.mark.long
def test_better_rate_is_chosen_and_nothing_is_trained_twice(
    colours: Path, unskilled: CLIP, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    subject = subject_of(unskilled, colours)
    options = Options(epochs=6, fine_tune_batch=16, rates=(1e-9, 1e-3), runs=tmp_path)
    found = fine_tune(subject, options)
    (details,), run = found.details, run_of(tmp_path)
    assert details.chosen_rate == 1e-3 and details.tuned_on == "a fifth of train"
    assert details.setting == "6 epochs"
    said = capfd.readouterr().err
    assert [float(one) for one in re.findall(r"at rate ([\d.e-]+)", said)] == [1e-9, 1e-3, 1e-3]

    tried = json.loads((run.parent / "rates.json").read_text())
    assert tried["1e-09"]["acc1"] < tried["0.001"]["acc1"]
    assert not list(run.parent.glob("rate_*/"))

    metrics = (run / "metrics.jsonl").read_bytes()
    assert values(fine_tune(subject, options)) == values(found)
    assert (run / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.long
def test_tiny_rate_keeps_zero_shot_scores(colours: Path, unskilled: CLIP, tmp_path: Path) -> None:
    subject = subject_of(unskilled, colours)
    before = {score.metric: score.value for score in evaluation.evaluate(subject, tasks=["zero-shot"])}
    found = fine_tune(subject, Options(epochs=0.1, fine_tune_batch=16, rates=(1e-12,), runs=tmp_path))
    assert {metric: values(found)[metric] for metric in before} == before


@pytest.mark.long
def test_killed_fine_tuning_resumes_to_same_scores(colours: Path, unskilled: CLIP, tmp_path: Path) -> None:
    save_model(unskilled, tmp_path / "model")

    def start(name: str) -> "subprocess.Popen[bytes]":
        arguments = [
            "fine-tune", "--model", str(tmp_path / "model"), "--data", str(colours), "--epochs", "6",
            "--fine-tune-batch", "16", "--rates", "1e-9", "1e-3", "--runs", str(tmp_path / name),
            "--out", str(tmp_path / f"{name}.jsonl"),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, "-m", "eval", *arguments], cwd=ROOT, env=environment)

    assert start("whole").wait(timeout=300) == 0
    killed = start("killed")
    time.sleep(6 + 20 * float(torch.rand(())))
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    again, beside = start("killed"), start("killed")
    assert again.wait(timeout=300) == beside.wait(timeout=300) == 0

    def scores(name: str) -> list[tuple[str, float]]:
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        return [(line["metric"], line["value"]) for line in lines]

    assert scores("killed") == scores("whole") * (len(scores("killed")) // len(scores("whole")))


def test_ranks_and_several_labels_are_rejected(colours: Path, unskilled: CLIP, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run it without torchrun"):
        fine_tune(subject_of(unskilled, colours, ranks=Ranks(rank=0, world=2)), Options(runs=tmp_path))
    subject = subject_of(unskilled, colours)
    train = subject.split("train")
    assert train is not None
    several = torch.nn.functional.one_hot(torch.arange(len(train)) % 3).bool()
    subject.dataset = replace(subject.dataset, labels=several[: len(subject.dataset)])
    subject._splits["train"] = replace(train, labels=several)
    with pytest.raises(DataError, match="several labels per image, but fine-tuning needs one"):
        fine_tune(subject, Options(runs=tmp_path))


@pytest.mark.long
def test_failed_training_reports_its_own_error(colours: Path, unskilled: CLIP, tmp_path: Path) -> None:
    subject = subject_of(unskilled, colours)
    options = Options(epochs=6, fine_tune_batch=16, runs=tmp_path)
    object.__setattr__(options, "rates", (1e30,))  # higher than the valid rates, to diverge at once
    with pytest.raises(
        DataError, match=r"on colours at rate 1e\+30, for the test: the loss of step \d+ is nan.*\.log\)"
    ):
        fine_tune(subject, options)


@given(st.lists(st.text(st.sampled_from("ab (1)\t\n"), max_size=6), max_size=8))
def test_distinct_names_are_unique(names: list[str]) -> None:
    found = make_distinct(names)
    assert len(set(found)) == len(found) == len(names)
    for name, own in zip(names, found, strict=True):
        assert own and own == " ".join(own.split())
        if (
            names.count(name) == 1
            and name.split()
            and [" ".join(one.split()) for one in names].count(own) == 1
        ):
            assert own == " ".join(name.split())
