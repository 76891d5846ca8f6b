"""Tests of scores on a run's page: headlines of the training, and one curve per setting."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from clipkit import CLIP
from clipkit.config import Config
from clipkit.training.checkpoint import LoopState, save_checkpoint
from eval import open_dataset
from eval.__main__ import main
from eval.features.encoder import ONE_RANK
from eval.report import build_report
from eval.report.charts import load_macro
from eval.report.run_page import Result, read_run_folder, select_headlines, select_newest
from eval.scorer import Scorer
from tests.eval.web_page import Page

CONFIG = 'steps = 300\n[model]\nname = "ViT-Ti-4-32"\n[eval]\ndata = ["digits"]\nevery_steps = 100\n'


def line(step: int, value: float, metric: str = "acc1", **facts: Any) -> dict[str, Any]:
    return {
        "step": step,
        "dataset": "digits",
        "split": "test",
        "task": "zero-shot",
        "prompt_set": "own",
        "setting": "",
        "metric": metric,
        "value": value,
        "n": 100,
        **facts,
    }


def later(step: int, value: float, metric: str = "acc1", **facts: Any) -> dict[str, Any]:
    """Return a line of a checkpoint that was scored after the training."""
    return line(step, value, metric, **{"model_hash": "0123", "inputs": "4567", **facts})


TRAINED = [line(step, value) for step, value in ((100, 0.42), (200, 0.48), (300, 0.61))]


def write(run: Path, lines: list[dict[str, Any]]) -> Path:
    run.mkdir(exist_ok=True)
    (run / "config.toml").write_text(CONFIG)
    (run / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def page_of(run: Path) -> Page:
    return Page(build_report(run).read_text(encoding="utf-8"))


def charts(page: Page) -> list[str]:
    return [str(a["aria-label"]) for _, a in page.tags if a.get("class") == "plot"]


def top(run: Path) -> str:
    folder = read_run_folder(run)
    return Page(
        f"<html>{load_macro('charts.html', 'headlines')(select_headlines(folder.results, folder.step))}</html>"
    ).words


def test_a_curve_has_one_setting(tmp_path: Path) -> None:
    few = {"task": "few-shot", "prompt_set": ""}
    lines = [later(step, step / 1000, **few, setting="4-shot") for step in (100, 200, 300)]
    lines += [later(step, 0.9 + step / 10_000, **few, setting="16-shot logistic") for step in (200, 300)]
    lines += [later(300, 0.5, task="knn", prompt_set="", setting=f"k={k}") for k in (10, 20)]
    page = page_of(write(tmp_path / "run", TRAINED + lines))
    assert charts(page) == [
        "digits, zero-shot: top-1 from 42.0% at step 100 to 61.0% at step 300",
        "digits, few-shot, 4-shot ridge: top-1 from 10.0% at step 100 to 30.0% at step 300",
        "digits, few-shot, 16-shot logistic: top-1 from 92.0% at step 200 to 93.0% at step 300",
    ]
    assert "93.0% at step" not in page.words
    for name in ("knn, k=10", "knn, k=20", "few-shot, 4-shot ridge", "few-shot, 16-shot logistic"):
        assert name in page.words


def test_a_curve_has_one_prompt_set_and_split(tmp_path: Path) -> None:
    lines = [later(step, 0.02, prompt_set="openai") for step in (200, 300)]
    lines += [later(step, 0.07, split="val") for step in (100, 200)]
    assert charts(page_of(write(tmp_path / "run", TRAINED + lines))) == [
        "digits, zero-shot, prompts own, split test: top-1 from 42.0% at step 100 to 61.0% at step 300",
        "digits, zero-shot, prompts own, split val: top-1 from 7.0% at step 100 to 7.0% at step 200",
        "digits, zero-shot, prompts openai, split test: top-1 from 2.0% at step 200 to 2.0% at step 300",
    ]


RETRIEVAL = {"task": "retrieval", "prompt_set": ""}


@settings(max_examples=30)
@given(
    st.lists(
        st.builds(
            later,
            st.sampled_from([100, 200, 300]),
            st.floats(0, 1),
            st.sampled_from(["acc1", "ece"]),
            dataset=st.sampled_from(["digits", "emoji"]),
            task=st.sampled_from(["zero-shot", "knn"]),
            setting=st.sampled_from(["", "k=10"]),
        ),
        max_size=8,
    )
)
def test_headlines_do_not_change_when_checkpoints_are_scored_later(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]]
) -> None:
    run = tmp_path_factory.mktemp("scored") / "run"
    before = top(write(run, TRAINED))
    assert "61.0 %" in before
    assert top(write(run, TRAINED + lines)) == before


def test_headlines_show_the_main_metric_of_the_last_step(tmp_path: Path) -> None:
    both = ("image_to_text_R@1", 0.595), ("text_to_image_R@1", 0.4), ("mean_R@1", 0.4975)
    lines = [line(200, value / 2, metric, **RETRIEVAL) for metric, value in both]
    run = write(tmp_path / "run", [*lines, *TRAINED])
    assert "retrieval" not in top(run)  # scores of earlier steps are only in the table
    lines += [line(300, value, metric, **RETRIEVAL) for metric, value in both]
    assert "digits retrieval mean R@1 49.8 %" in top(write(run, [*TRAINED, *lines]))
    said = next(chart for chart in charts(page_of(run)) if chart.startswith("digits, retrieval"))
    assert said.startswith("digits, retrieval: mean R@1 from 24.9%")
    assert "image to text R@1 from" in said and "text to image R@1 from" in said


def test_headlines_name_their_step_if_it_is_not_the_last(tmp_path: Path) -> None:
    run = write(tmp_path / "run", TRAINED)
    assert "step" not in top(run)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 340, "loss": 1.0}) + "\n")
    assert "step 300" in top(run)
    assert "digits, zero-shot 61.0% at step 300" in page_of(run).words


def test_newest_groups_series_and_sorts_those_of_the_training_first(tmp_path: Path) -> None:
    lines = [line(300, 0.5, dataset="glyphs"), later(300, 0.1, "ece"), later(100, 0.2, dataset="emoji")]
    found = select_newest(read_run_folder(write(tmp_path / "run", [*lines, *TRAINED])).results)
    assert [(one.dataset, one.metric, one.step) for one in found] == [
        ("digits", "acc1", 300),
        ("digits", "ece", 300),
        ("glyphs", "acc1", 300),
        ("emoji", "acc1", 100),
    ]


def test_a_run_without_scores_of_its_own_shows_the_latest(tmp_path: Path) -> None:
    lines = [later(100, 0.2), later(300, 0.3, dataset="emoji")]
    said = top(write(tmp_path / "run", lines))
    assert "emoji" in said and "30.0 %" in said
    assert "20.0" not in said


def test_the_trainings_own_score_takes_precedence(tmp_path: Path) -> None:
    found = read_run_folder(
        write(tmp_path / "run", [*TRAINED, later(300, 0.6), later(300, 0.2, "ece")])
    ).results

    def of_last(results: list[Result]) -> dict[str, float]:
        return {result.metric: result.value for result in results if result.step == 300}

    assert of_last(list(found)) == {"acc1": 0.61, "ece": 0.2}


def test_lines_of_the_training_and_of_the_command_line_are_distinguished(
    model: CLIP, write_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    run, data = tmp_path / "run", write_dataset()
    state, optimizer = LoopState(step=4, data="none"), torch.optim.AdamW(model.parameters())
    save_checkpoint(run, model, optimizer, state, Config(), keep=1)
    scorer = Scorer(
        model=model, datasets=[open_dataset(data)], run=run, ranks=ONE_RANK, batch_size=8, bf16=False,
        print_line=lambda _: None, write_scores=lambda step, scores: None,
    )  # fmt: skip
    for step in (2, 4):
        scorer.score(step)
    before = top(run)
    assert "zero-shot top-1" in before
    own = read_run_folder(run).results
    assert all(result.scored_in_training for result in own)
    assert main(["run", "--model", str(run), "--data", str(data), "--features", ""]) == 0
    found = read_run_folder(run).results
    assert [result for result in found if result.scored_in_training] == own
    assert {(result.step, result.metric) for result in found if not result.scored_in_training} == {(4, "ece")}
    assert top(run) == before
