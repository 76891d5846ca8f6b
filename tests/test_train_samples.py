"""Tests of ``log.samples``: a row for each pair of each step, on any number of ranks and after kills."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import simplejpeg

from clipkit.config import load_config
from clipkit.errors import ConfigError
from data.__main__ import main
from data.scores.dynamics import Dynamics, read_steps
from data.shards.writer import DatasetWriter, Record
from data.training_data import open_training_data
from tests.small_trainings import (
    BATCH,
    SAMPLES,
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

__all__ = ["pairs", "trainings"]

STEPS = 14
SETTINGS = (f"steps={STEPS}", "checkpoint.every_steps=4", "log.samples=true", "loss.same=ignored")
COLUMNS = ["image_loss", "text_loss", "image_margin", "text_margin"]


def read_rows(out: Path) -> npt.NDArray[np.void]:
    """Return all rows, ordered by step and sample."""
    rows = np.concatenate(list(read_steps(out / "samples")))
    return rows[np.lexsort((rows["sample"], rows["step"]))]


def values(rows: npt.NDArray[np.void]) -> npt.NDArray[np.float32]:
    return np.stack([rows[name] for name in COLUMNS])


@pytest.fixture(scope="module")
def logged(trainings: Trainings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the losses of its pairs."""
    out = tmp_path_factory.mktemp("logged") / "run"
    trainings.run(out, *SETTINGS)
    return out


def test_each_pair_of_each_step_has_a_row(logged: Path, trainings: Trainings, tmp_path: Path) -> None:
    rows = read_rows(logged)
    per_epoch = SAMPLES // BATCH
    assert rows["step"].tolist() == [step for step in range(1, STEPS + 1) for _ in range(BATCH)]
    assert sorted(rows["sample"][: per_epoch * BATCH]) == list(range(SAMPLES))
    for line in metrics(logged):
        step = rows[rows["step"] == line["step"]]
        loss = (step["image_loss"] + step["text_loss"]).mean() / 2
        assert loss == pytest.approx(line["loss"], abs=1e-5)
        assert (step["image_margin"] > 1e-6).mean() == pytest.approx(line["image_to_text_R@1"])
    trainings.run(tmp_path / "plain", *SETTINGS, "log.samples=false")
    assert not (tmp_path / "plain" / "samples").exists()
    assert digests(tmp_path / "plain", STEPS) == digests(logged, STEPS)


def test_killed_run_has_the_same_rows(logged: Path, trainings: Trainings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    running = trainings.start(out, *SETTINGS)
    wait_until(lambda: (out / "samples" / "00000008.npy").exists(), running)
    process = process_of(out)
    wait_until(lambda: checkpoint(out, 4).exists(), running)
    os.kill(process, signal.SIGKILL)
    running.result()
    trainings.run(out, *SETTINGS)
    np.testing.assert_array_equal(read_rows(out), read_rows(logged))
    # and from an earlier checkpoint
    go_back(out, 4)
    assert "resuming" in trainings.run(out, *SETTINGS)
    np.testing.assert_array_equal(read_rows(out), read_rows(logged))


def test_ranks_and_parts_have_the_same_rows(logged: Path, trainings: Trainings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    trainings.run_ranks(2, out, *SETTINGS, "accumulate=2")
    assert (out / "samples" / "00000004-1.npy").exists()
    found, expected = read_rows(out), read_rows(logged)
    assert found[["step", "sample"]].tolist() == expected[["step", "sample"]].tolist()
    np.testing.assert_allclose(values(found), values(expected), atol=2e-3)
    # resumes on one rank, which removes the later rows of both
    go_back(out, 8)
    trainings.run(out, *SETTINGS)
    assert read_rows(out)[["step", "sample"]].tolist() == expected[["step", "sample"]].tolist()


def test_rows_of_substitutes_are_left_out(trainings: Trainings, tmp_path: Path) -> None:
    data, out = tmp_path / "pairs", tmp_path / "run"
    noise = np.random.default_rng(0)
    with DatasetWriter(data) as writer:
        for i in range(12):
            image = simplejpeg.encode_jpeg(noise.integers(0, 256, (20, 24, 3), dtype=np.uint8))
            broken = image[:80] if i == 5 else image
            writer.write("train", Record(key=f"{i:04d}", image=broken, extension="jpg", caption=f"noise {i}"))
        writer.finish({"name": "pairs"})
    trainings.run(out, *SETTINGS, f"data.train={data}", "steps=6", "data.max_bad=0.5")
    assert sorted({*read_rows(out)["sample"].tolist()}) == [i for i in range(12) if i != 5]


@pytest.mark.parametrize(
    "settings", [("loss.name=words", "model.text=words"), ("loss.name=none", "caption.weight=1")]
)
def test_objectives_that_compare_no_pairs_are_refused(
    settings: tuple[str, str], trainings: Trainings, tmp_path: Path
) -> None:
    error = error_of(trainings.run(tmp_path / "run", "steps=4", "log.samples=true", *settings, status=1))
    assert error == f"error: log.samples = True is invalid: cannot be combined with {settings[0]}"


def test_dynamics_scores_and_page(
    logged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "cache"))
    assert main(["dynamics", str(logged), "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert f"{SAMPLES} pairs, {SAMPLES} of them drawn in {STEPS} steps" in printed
    page = (logged / "dynamics.html").read_text()
    assert page.count("data:image/webp") == SAMPLES and "noise 1" in page
    assert "most pairs were never learned" in printed and "most pairs were never learned" in page  # of noise
    assert "data.scores=" not in printed + page
    name = Path(printed.split("  scores ")[1].split()[0]).name
    rows = read_rows(logged)
    lowest = {}
    for sample in range(SAMPLES):
        margins = values(rows[rows["sample"] == sample])[2:]
        lowest[sample] = 1 - np.maximum(-margins, 0).mean()
    threshold = sorted(lowest.values(), reverse=True)[SAMPLES * 3 // 4 - 1]
    settings = replace(
        load_config(logged / "config.toml").data, scores=name, filters=("score.learnability >= top 75%",)
    )
    shards = open_training_data(
        settings, tmp_path / "manifest", rank0=True, resumed=False, broadcast=lambda content: content
    )
    keys = {shards.locate(i)[1] for i in range(len(shards))}
    assert keys == {f"{sample:04d}" for sample, value in lowest.items() if value >= threshold - 1e-7}


def made_rows(step: int, **margins: float) -> npt.NDArray[np.void]:
    """Rows of a step with the margins of samples "s0", "s1", …."""
    rows = np.zeros(len(margins), [("step", "<i4"), ("sample", "<i8"), *((name, "<f4") for name in COLUMNS)])
    rows["step"] = step
    rows["sample"] = [int(name[1:]) for name in margins]
    for name in COLUMNS[2:]:
        rows[name] = list(margins.values())
    rows["image_loss"] = step
    return rows


def test_pairs_are_never_learned_forgotten_or_learned_last() -> None:
    dynamics = Dynamics(5)
    dynamics.add_step(made_rows(1, s0=-0.5, s1=0.2, s2=-0.1))
    dynamics.add_step(made_rows(2, s3=0.3, s2=0.1))
    dynamics.add_step(made_rows(3, s0=-0.3, s1=-0.4, s3=0.1))
    sections = {name: ids.tolist() for name, ids in dynamics.sections().items()}
    assert sections == {"never learned": [0], "forgotten": [1], "learned last": [2, 3]}
    np.testing.assert_allclose(dynamics.learnability, [0.6, 0.8, 0.95, 1, np.nan], rtol=1e-6)
    assert dynamics.forgotten.tolist() == [0, 1, 0, 0, 0]
    assert (dynamics.first_loss[0], dynamics.last_loss[0]) == (0.5, 1.5)


def test_pair_that_is_drawn_twice_in_a_step_counts_twice() -> None:
    dynamics = Dynamics(2)
    rows = np.concatenate([made_rows(1, s0=-0.4, s1=-0.4), made_rows(1, s0=-0.4)])
    dynamics.add_step(rows)
    assert dynamics.draws.tolist() == [2, 1]
    np.testing.assert_allclose(dynamics.learnability, [0.6, 0.6], rtol=1e-6)


def test_runs_without_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('out = "run"\n')
    with pytest.raises(ConfigError, match=r"train with log.samples=true"):
        main(["dynamics", str(tmp_path), "--quiet"])
