"""Trainings that keep the checkpoint with the best score, and stop when no score is better."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import clipkit
from clipkit.formats.checkpoint import best_checkpoint
from eval import BestScore
from eval.results.records import read_results
from tests.small_trainings import (
    Trainings,
    checkpoint,
    digests,
    error_of,
    metrics,
    pairs,
    trainings,
    write_pairs,
)

__all__ = ["pairs", "trainings"]  # fixtures

METRIC = "image_to_text_R@1"
BEST = f"checkpoint.best=train/{METRIC}"


def scored(trainings: Trainings, *more: str) -> tuple[str, ...]:
    data = f'eval.data=["{trainings.pairs}/train"]'
    return (data, "eval.every_steps=1", "checkpoint.keep=1", BEST, "optim.name=muon", *more)


def scores(run: Path) -> dict[int, dict[str, Any]]:
    lines = read_results(run / "results.jsonl")
    return {line["step"]: line for line in lines if line["metric"] == METRIC}


def expected_best(run: Path) -> int:
    by_step = scores(run)
    return max(by_step, key=lambda step: (by_step[step]["value"], -step))


@pytest.mark.slow
def test_best_and_newest_checkpoints_are_kept(trainings: Trainings, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # the score rises at step 6, and falls at step 7, with CLIP's tokenizer
    settings = scored(
        trainings, "steps=7", "batch_size=12", "optim.lr=3e-3", "optim.warmup=6", "checkpoint.every_steps=1",
        "model.tokenizer=",
    )  # fmt: skip
    said = trainings.run(run, *settings)
    best = expected_best(run)
    assert best > 0
    names = {path.name for path in (run / "checkpoints").glob("step_*")}
    assert names == {f"step_{best:08d}", "step_00000007"}
    assert f"best {METRIC} on train: {scores(run)[best]['value']:.2%} at step {best}" in said
    loaded = clipkit.load(f"{run}@best")
    reference = clipkit.load(checkpoint(run, best))
    assert all(map(torch.equal, loaded.state_dict().values(), reference.state_dict().values()))


@pytest.mark.slow
def test_training_stops_without_a_rise_and_resumes_as_if_it_had_not_been_killed(
    trainings: Trainings, tmp_path: Path
) -> None:
    saving = ("checkpoint.keep=0", "checkpoint.every_steps=1")
    settings = (
        *scored(trainings, "steps=30", "eval.patience=3", "optim.lr=1e-12"),
        *saving,
    )  # scores stay equal
    said = trainings.run(tmp_path / "run", *settings)
    assert len(metrics(tmp_path / "run")) == 3
    line = (
        "stopped at step 3: in 3 evaluations, no image_to_text_R@1 on train was better than the 95% interval"
    )
    assert line in said and "at step 0, of which there is no checkpoint" in said
    assert (tmp_path / "run" / "report.html").is_file()
    again = trainings.run(tmp_path / "run", *settings)
    assert line in again and len(metrics(tmp_path / "run")) == 3

    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    for step in (2, 3):
        shutil.rmtree(checkpoint(tmp_path / "killed", step))
    (tmp_path / "killed" / "checkpoints" / "LATEST").write_text("step_00000001\n")
    trainings.runs.add(tmp_path / "killed")
    trainings.run(tmp_path / "killed", *settings)
    assert digests(tmp_path / "killed", 3) == digests(tmp_path / "run", 3)
    assert scores(tmp_path / "killed").keys() == {0, 1, 2, 3}

    more = trainings.run(tmp_path / "run", *settings, "eval.patience=5")
    assert "stopped at step 5" in more
    assert "stopped at" not in trainings.run(tmp_path / "run", *settings, "eval.patience=6", "steps=6")


@pytest.mark.slow
def test_another_metric_or_dataset_starts_anew(trainings: Trainings, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = scored(trainings, "optim.lr=0.3", "optim.warmup=2", "eval.every_steps=1")
    trainings.run(run, *settings, "steps=4", "checkpoint.best=train/image_to_text_mean_rank")
    said = trainings.run(run, *settings, "steps=5", "checkpoint.best=train/text_to_image_R@5")
    lines = read_results(run / "results.jsonl")
    by_step = {line["step"]: line["value"] for line in lines if line["metric"] == "text_to_image_R@5"}
    best = max(by_step, key=lambda step: (by_step[step], -step))
    named = best_checkpoint(run)
    if checkpoint(run, best).exists():
        assert named == checkpoint(run, best)
    else:
        assert named is None and f"at step {best}, of which there is no checkpoint" in said

    other = tmp_path / "other" / "train"
    write_pairs(other, 20)
    anew = trainings.run(run, *settings, "steps=6", f'eval.data=["{other / "train"}"]')
    values = {
        line["step"]: line["value"]
        for line in read_results(run / "results.jsonl")
        if line["metric"] == METRIC
    }
    assert f"best {METRIC} on train: {values[6]:.2%} at step 6" in anew  # the only score on these pairs


@pytest.mark.slow
def test_two_ranks_stop_at_the_same_step(trainings: Trainings, tmp_path: Path) -> None:
    said = trainings.run_ranks(
        2, tmp_path / "run", *scored(trainings, "steps=30", "eval.patience=2", "optim.lr=1e-12")
    )
    assert sum("stopped at step 2" in text for text in said) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("checkpoint.best=acc2",), "checkpoint.best = 'acc2': unknown metric 'acc2': did you mean 'acc5'"),
        (("checkpoint.best=tram/acc1",), "eval.data has no dataset 'tram'"),
        (("checkpoint.best=train/acc2",), "unknown metric 'acc2': did you mean 'acc5'"),
        (
            ("checkpoint.best=", "eval.patience=2"),
            "eval.patience = 2 has no effect unless checkpoint.best is set",
        ),
        (("eval.data=[]",), "has no effect unless eval.data is set"),
    ],
)
def test_names_are_checked_before_training(
    settings: tuple[str, ...], message: str, trainings: Trainings, tmp_path: Path
) -> None:
    error = error_of(trainings.run(tmp_path / "run", *scored(trainings), *settings, status=1))
    assert message in error, error


@pytest.mark.slow
def test_a_metric_that_is_not_scored_lists_those_that_are(trainings: Trainings, tmp_path: Path) -> None:
    error = error_of(
        trainings.run(tmp_path / "run", *scored(trainings), "checkpoint.best=train/acc1", status=1)
    )
    assert error.startswith("error: checkpoint.best = 'train/acc1': train is scored by image_to_text_R@1,"), (
        error
    )


def test_a_run_without_a_best_checkpoint_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(clipkit.CheckpointError, match="has no best checkpoint"):
        clipkit.load(f"{tmp_path}@best")


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), st.integers(1, 4), st.booleans())
def test_waited_counts_evaluations_since_a_rise_beyond_the_interval(
    values: list[int], width: int, lower: bool
) -> None:
    best = BestScore(dataset="d", metric="ece" if lower else "acc1", patience=3)
    rises = []
    bound = -1000
    for step, value in enumerate(values):
        signed = -value if lower else value
        if signed > bound:
            bound = signed + width
            rises.append(step)
        best.add(step, value, value - width, value + width)
        assert best.waited == step - rises[-1]
        assert best.is_exhausted == (best.waited >= 3)
    extreme = min(values) if lower else max(values)
    assert (best.step, best.value) == (values.index(extreme), extreme)


def test_scores_of_a_file_are_read_once_for_each_step(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    lines = []
    for step, value, setting, revision in (
        (1, 0.9, "", "other"),
        (1, 0.5, "", "r"),
        (1, 0.9, "dim 64", "r"),
        (2, 0.6, "", "r"),
        (2, 0.6, "", "r"),
        (3, 0.9, "", "r"),
    ):
        line = {"dataset": "d", "task": "zero-shot", "metric": "acc1", "setting": setting, "step": step}
        lines.append({**line, "value": value, "data_revision": revision})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    best = BestScore(dataset="d", metric="acc1", revision="r", patience=2)
    best.add_results(file, until=2)
    assert (best.step, best.value, best.waited) == (2, 0.6, 0)
