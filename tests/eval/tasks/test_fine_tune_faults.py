"""Tests of fine-tuning errors: messages, saved progress, and no scores of incomplete trainings."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import clipkit
from clipkit import CLIP
from clipkit.config import Config, LossConfig, ModelConfig, SmallConfig
from clipkit.errors import ConfigError, DataError
from clipkit.formats.checkpoint import save_model
from clipkit.model.clip import create
from clipkit.model.names import create_architecture
from clipkit.model.zero_shot import attach_class_head
from clipkit.training.build import first_model, shape_of
from eval import Encoder, Subject, open_dataset
from eval.tasks import Options
from eval.tasks.fine_tune import (
    ClassTraining,
    Diverged,
    _select_rate,
    fine_tune,
    lock_folder,
)

ROOT = Path(__file__).parents[3]
SECONDS = 300  # timeout of processes


@pytest.fixture(scope="module")
def shades(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of grey images, 12 training and 4 test images of each."""
    out, random = tmp_path_factory.mktemp("shades") / "shades", np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for name, level in (("dark", 60), ("light", 190)):
            (out / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(random.normal(level, 40, (16, 16, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(out / split / name / f"{i}.png")
    return out


@pytest.fixture(scope="module")
def unskilled() -> CLIP:
    return create("ViT-Ti-4-16", seed=0).eval()


def subject_of(model: CLIP, folder: Path) -> Subject:
    return Subject(
        Encoder(model), open_dataset(folder), open_split=lambda split: open_dataset(folder, split=split)
    )


def test_disk_errors_suggest_another_folder_or_rerun(shades: Path, unskilled: CLIP, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--runs ~nobody-of-this-name/x: "):
        fine_tune(subject_of(unskilled, shades), Options(runs=Path("~nobody-of-this-name/x")))
    (tmp_path / "file").write_text("")
    for runs in (tmp_path / "file", Path("/proc/nothing")):
        with pytest.raises(
            DataError, match=f"^{runs}.*, or choose another folder with --runs; progress is saved"
        ):
            fine_tune(subject_of(unskilled, shades), Options(runs=runs))
    with pytest.raises(DataError, match=r"gone/x: No such file.*--runs"), lock_folder(tmp_path / "there"):
        (tmp_path / "gone" / "x").write_text("")
    with lock_folder(tmp_path / "there"):  # the lock was released
        pass
    removed = tmp_path / "there"
    with pytest.raises(DataError, match="there was removed meanwhile: run the same command to start over"):  # noqa: SIM117
        with lock_folder(removed):
            shutil.rmtree(removed)
            (removed / "rates.json").write_text("")


class Tried(ClassTraining):
    """A training that returns fixed outcomes by rate."""

    outcomes: Mapping[float, Mapping[str, float] | None]
    trained: list[float]

    @classmethod
    def of(cls, folder: Path, outcomes: Mapping[float, Mapping[str, float] | None]) -> "Tried":
        made = cls(folder=folder, epochs=1, batch_size=1, seed=0, device=torch.device("cpu"))
        object.__setattr__(made, "outcomes", outcomes)
        object.__setattr__(made, "trained", [])
        return made

    def train_to_tune(self, head: CLIP, rate: float, title: str) -> Mapping[str, float]:
        self.trained.append(rate)
        if (outcome := self.outcomes[rate]) is None:
            raise Diverged("nan")
        return outcome


def best(training: ClassTraining, model: CLIP, rates: Sequence[float], metric: str) -> float:
    return _select_rate(training, model, rates, metric, "shades")


def test_rate_is_chosen_by_requested_metric(unskilled: CLIP, tmp_path: Path) -> None:
    near = 1e-3 * (1 + 1e-9)
    training = Tried.of(
        tmp_path, {1e-4: {"acc1": 0.5, "acc5": 0.9}, 1e-3: {"acc1": 0.7, "acc5": 0.8}, near: {"acc1": 0.6}}
    )
    assert best(training, unskilled, (1e-4, 1e-3), "acc1") == 1e-3
    assert best(training, unskilled, (1e-4, 1e-3), "acc5") == 1e-4
    assert best(training, unskilled, (1e-3, near), "f1_macro") == 1e-3  # not stored, so acc1 is used
    assert training.trained == [1e-4, 1e-3, near]


def test_diverging_rates_are_not_chosen(
    unskilled: CLIP, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Tried.of(tmp_path, {1e-3: {"acc1": 0.0}, 1e2: None, 1e3: None})
    assert best(training, unskilled, (1e-3, 1e2), "acc1") == 1e-3
    assert "training diverges at the rates 100" in caplog.text
    with pytest.raises(
        DataError, match="on shades diverges at all of the rates 100, 1000: use lower --rates"
    ):
        best(training, unskilled, (1e2, 1e3), "acc1")


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"0.001": 0.5}', "\x00\xff"])
def test_damaged_rates_file_is_written_again(unskilled: CLIP, tmp_path: Path, damaged: str) -> None:
    (tmp_path / "rates.json").write_bytes(damaged.encode("latin-1"))
    training = Tried.of(tmp_path, {1e-4: {"acc1": 0.5}, 1e-3: {"acc1": 0.7}})
    assert best(training, unskilled, (1e-4, 1e-3), "acc1") == 1e-3
    assert set(json.loads((tmp_path / "rates.json").read_text())) == {"0.0001", "0.001"}


@pytest.mark.parametrize(
    ("name", "changed", "sizes"),
    [
        ("ViT-Ti-4-16", {"logit_bias": True}, {}),
        ("ViT-Ti-4-16", {"quick_gelu": True}, {}),
        ("ViT-Ti-4-16", {"quick_gelu": True, "logit_bias": True}, {}),
        ("ViT-Ti-4-16", {"small_data": False}, {}),  # as in an exported model
        ("ViT-Ti-4-16", {"masked": "color"}, {}),
        ("ViT-Ti-4-16", {"quick_gelu": True}, {"patch_size": 8, "width": 128, "heads": 4}),
        ("ViT-Ti-4-16", {}, {"pool": "map", "positions": "none", "layers": 1, "mlp_ratio": 2.0}),
    ],
)
def test_heads_are_trained_in_their_own_architecture(
    name: str, changed: dict[str, Any], sizes: dict[str, Any], tmp_path: Path
) -> None:
    shape = replace(create_architecture(name, image_size=32), **changed)
    if sizes:
        assert shape.vision.plain is not None
        shape = replace(shape, embed_dim=24, vision=replace(shape.vision.plain, **sizes))
    save_model(create(shape, name=name, seed=0), tmp_path / "model")
    model = clipkit.load(tmp_path / "model")
    head = attach_class_head(model, ["a", "b"], torch.eye(2, shape.embed_dim))
    save_model(head, tmp_path / "head")
    (tmp_path / "names").write_text("a\nb")
    settings = ModelConfig(name="", weights=str(tmp_path / "head"), text=f"classes:{tmp_path}/names")
    loss = LossConfig(name="classes")
    trained = first_model(Config(model=settings, loss=loss), shape_of(settings, loss, SmallConfig()))
    assert trained.architecture.vision == shape.vision and trained.architecture.quick_gelu == shape.quick_gelu
    with torch.no_grad():
        images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
        assert torch.equal(trained.eval().encode_image(images), model.encode_image(images))


def test_class_head_on_timm_tower_is_loaded(tmp_path: Path) -> None:
    model = create(create_architecture("ViT-Ti-4-16", image="timm:resnet10t", image_size=32), name="", seed=0)
    head = attach_class_head(model, ["a"], torch.eye(1, model.architecture.embed_dim))
    save_model(head, tmp_path / "head")
    assert clipkit.load(tmp_path / "head").architecture == head.architecture


def processes_of(folder: Path) -> list[int]:
    """Return the process ids of trainings that write below a folder."""
    found = []
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = one.read_bytes().split(b"\0")
        except OSError:  # the process has ended
            continue
        if any(argument.startswith(f'out="{folder}'.encode()) for argument in arguments):
            found.append(int(one.parent.name))
    return found


@pytest.mark.long
def test_stopped_training_writes_no_scores_and_resumes(shades: Path, unskilled: CLIP, tmp_path: Path) -> None:
    save_model(unskilled, tmp_path / "model")

    def start(name: str) -> "subprocess.Popen[str]":
        arguments = [
            "fine-tune", "--model", str(tmp_path / "model"), "--data", str(shades), "--epochs", "60", "--features",
            "", "--fine-tune-batch", "8", "--rates", "1e-4", "--runs", str(tmp_path / name), "--out",
            str(tmp_path / f"{name}.jsonl"),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "eval", *arguments],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def training(name: str, *, beyond: int = 0) -> int:
        """Wait until the metrics have grown, and return the process id of the training."""
        until = time.monotonic() + SECONDS
        while not (figures(name) > beyond and processes_of(tmp_path / name)):
            assert time.monotonic() < until
            time.sleep(0.05)
        return min(processes_of(tmp_path / name))  # its loaders have higher ids

    def figures(name: str) -> int:
        return sum(one.stat().st_size for one in (tmp_path / name).glob("*/final_*/metrics.jsonl"))

    def scores(name: str) -> list[tuple[str, float]]:
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        return [(line["metric"], line["value"]) for line in lines]

    whole = start("whole")
    assert whole.wait(SECONDS) == 0 and whole.communicate()
    stopped = start("stopped")
    os.kill(training("stopped"), signal.SIGTERM)
    said = stopped.communicate(timeout=SECONDS)[1]
    assert (
        stopped.returncode == 1
        and "it was stopped at step" in said
        and "same command again to continue" in said
    )
    assert not scores("stopped")

    made = figures("stopped")
    stopped = start("stopped")
    training("stopped", beyond=made)
    stopped.terminate()
    said = stopped.communicate(timeout=SECONDS)[1]
    assert stopped.returncode == 130 and "Traceback" not in said, said
    assert "stopped; progress is saved; run the same command again" in said
    assert not processes_of(tmp_path / "stopped") and not scores("stopped")

    again = start("stopped")
    assert again.communicate(timeout=SECONDS) and again.returncode == 0
    assert scores("stopped") == scores("whole")
