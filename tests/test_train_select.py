"""Tests of data selection in real trainings: resumed, on several ranks, and with each kind of reference."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from clipkit.errors import ConfigError
from data.__main__ import main
from tests.small_trainings import (
    Trainings,
    checkpoint,
    digests,
    error_of,
    go_back,
    metrics,
    pairs,
    process_of,
    trainings,
    wait_until,
)
from tests.test_train_samples import read_rows, values

__all__ = ["pairs", "trainings"]

READ, TRAINED, STEPS = 12, 5, 8  # neither is divisible by all numbers of ranks
SETTINGS = (
    f"steps={STEPS}", f"batch_size={READ}", "checkpoint.every_steps=4", "log.samples=true", "loss.same=ignored",
    "select.fraction=0.4",
)  # fmt: skip


def by_model(reference: Path) -> tuple[str, str]:
    """Return the settings for a model as the reference."""
    return f"distill.teacher={reference}", "distill.weight=0"


@pytest.fixture(scope="module")
def reference(trainings: Trainings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reference") / "run"
    trainings.run(out, "steps=3", "seed=7")
    return out


@pytest.fixture(scope="module")
def selected(trainings: Trainings, reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with data selection."""
    out = tmp_path_factory.mktemp("selected") / "run"
    said = trainings.run(out, *SETTINGS, *by_model(reference))
    assert f"; {TRAINED} of the {READ} pairs of a step are trained (select.fraction = 0.4)" in said
    return out


def test_page_states_what_was_trained_and_dynamics_are_refused(selected: Path) -> None:
    page = (selected / "report.html").read_text()
    assert f"on {STEPS * TRAINED} of {STEPS * READ} samples that were read" in page and "Learnability" in page
    with pytest.raises(
        ConfigError, match=r"each step chose \(select.fraction = 0.4\): train with select.fraction=1"
    ):
        main(["dynamics", str(selected), "--quiet"])


def test_chosen_pairs_are_recorded_and_read_samples_stay(
    selected: Path, trainings: Trainings, tmp_path: Path
) -> None:
    rows = read_rows(selected)
    assert rows["step"].tolist() == [step for step in range(1, STEPS + 1) for _ in range(TRAINED)]
    every = tmp_path / "every"
    trainings.run(every, *SETTINGS, "select.fraction=1")
    read = read_rows(every)
    for step in range(1, STEPS + 1):
        of_step = [set(table["sample"][table["step"] == step].tolist()) for table in (rows, read)]
        assert of_step[0] < of_step[1]
    line = metrics(selected)[-1]
    assert (line["samples"], line["samples_trained"]) == (STEPS * READ, STEPS * TRAINED)
    assert line["learnability_read"] != line["learnability_trained"]
    assert not any(name in metrics(every)[-1] for name in ("samples_trained", "learnability_read"))


def test_killed_run_resumes_bit_for_bit(
    selected: Path, reference: Path, trainings: Trainings, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    settings = (*SETTINGS, *by_model(reference))
    running = trainings.start(out, *settings)
    wait_until(lambda: checkpoint(out, 4).exists(), running)
    if not running.done():
        os.kill(process_of(out), signal.SIGKILL)
    running.result()
    go_back(out, 4)
    trainings.run(out, *settings)
    assert digests(out, STEPS) == digests(selected, STEPS)
    np.testing.assert_array_equal(read_rows(out), read_rows(selected))


@pytest.mark.parametrize(("world", "parts"), [(2, 2), (3, 1)])
def test_ranks_and_parts_choose_the_same_pairs(
    selected: Path, reference: Path, trainings: Trainings, tmp_path: Path, world: int, parts: int
) -> None:
    out = tmp_path / "run"
    settings = (*SETTINGS, *by_model(reference), f"accumulate={parts}")
    trainings.run_ranks(world, out, *settings)
    found, expected = read_rows(out), read_rows(selected)
    assert found[["step", "sample"]].tolist() == expected[["step", "sample"]].tolist()
    np.testing.assert_allclose(values(found), values(expected), atol=2e-3)
    go_back(out, 4)  # resumes on one rank
    trainings.run(out, *settings)
    assert read_rows(out)[["step", "sample"]].tolist() == expected[["step", "sample"]].tolist()


def test_sharded_training_chooses_the_same_pairs(
    selected: Path, reference: Path, trainings: Trainings, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    trainings.run_ranks(2, out, *SETTINGS, *by_model(reference), "sharding=full")
    assert read_rows(out)[["step", "sample"]].tolist() == read_rows(selected)[["step", "sample"]].tolist()


def test_stored_features_as_reference_choose_like_the_model(
    reference: Path, trainings: Trainings, tmp_path: Path
) -> None:
    """Without random crops, the stored features are those of the images that are trained, up to float16."""
    images, texts = tmp_path / "images", tmp_path / "texts"
    for folder, kind in ((images, ()), (texts, ("--text",))):
        trainings.clipkit(
            "encode", str(trainings.pairs), *kind, "--model", str(reference), "--out", str(folder), "--quiet"
        )
    few = (*SETTINGS, "steps=1", "data.crop_scale=1", "data.crop_aspect=1")
    trainings.run(tmp_path / "model", *few, *by_model(reference))
    stored = (f"distill.features={images}", f"distill.text_features={texts}")
    trainings.run_ranks(2, tmp_path / "stored", *few, *stored, "distill.weight=0")
    model_rows, feature_rows = read_rows(tmp_path / "model"), read_rows(tmp_path / "stored")
    assert feature_rows["sample"].tolist() == model_rows["sample"].tolist()
    learnability = [metrics(tmp_path / name)[0]["learnability_read"] for name in ("model", "stored")]
    assert learnability[0] == pytest.approx(learnability[1], abs=0.02)


def test_teacher_of_distillation_is_the_reference(
    reference: Path, trainings: Trainings, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    trainings.run(out, *SETTINGS, "steps=3", f"distill.teacher={reference}", "accumulate=2")
    assert len(read_rows(out)) == 3 * TRAINED and "learnability_read" in metrics(out)[-1]
    error = error_of(trainings.run(tmp_path / "none", *SETTINGS, status=1))
    assert error.startswith("error: select.fraction = 0.4 has no effect unless distill.teacher (a m")


def test_too_few_pairs_for_all_ranks_are_refused(trainings: Trainings, tmp_path: Path) -> None:
    reference = ("distill.teacher=unread", "distill.weight=0")
    error = error_of(trainings.run(tmp_path / "run", *SETTINGS, *reference, "accumulate=6", status=1))
    assert error.startswith("error: batch_size = 12 × select.fraction = 0.4 cannot be split over 1 processes")
