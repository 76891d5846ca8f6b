"""Tests of terminal tables: formats, widths and escaped names."""

import io
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType

from clipkit.files.terminal import printable
from eval.compare import Difference, ModelComparison, tabulate_comparison
from eval.metrics import Comparison
from eval.report.terminal import score_table
from eval.results.records import Score

SCORE = Score(
    dataset="digits", task="few-shot", metric="acc1", value=0.5, n=48, low=0.4, high=0.6, chance=0.1
)


def shown(table: RenderableType, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


@given(st.text())
def test_printable_text_is_unchanged_and_other_characters_are_escaped(text: str) -> None:
    told = printable(text)
    assert told.isprintable()
    assert (told == text) == text.isprintable()


@pytest.mark.parametrize("task", ["zero-shot", "few-shot"])
def test_control_characters_in_names_are_escaped(task: str) -> None:
    name = "a\x1b[2J\x07[b]\x9bé"
    text = shown(score_table([replace(SCORE, dataset=name, task=task, setting=f"1-shot {name}")]), 200)
    assert text.count("a\\x1b[2J\\x07[b]\\x9bé") == 2
    assert text.replace("\n", "").isprintable()


@settings(max_examples=20, deadline=None)
@given(st.text(max_size=60))
def test_any_name_is_complete_within_80_columns(name: str) -> None:
    told = [replace(SCORE, dataset=name, task="knn", metric=name, setting=name)]
    text = shown(score_table(told))
    assert all(cell_len(line) <= 80 for line in text.splitlines()) and "…" not in text.replace(name, "")


@pytest.mark.parametrize("width", [30, 40, 50, 60, 70, 80, 120])
@pytest.mark.parametrize("dataset", ["digits", "dsprites_label_x_position"])
def test_metric_and_value_are_complete_at_any_width(width: int, dataset: str) -> None:
    metrics = ("acc1", "acc5", "mean_per_class_recall", "mean_average_precision", "image_to_text_R@10")
    scores = [
        replace(SCORE, dataset=dataset, task="zero-shot", metric=one, value=0.101 + i / 100, n=50_000)
        for i, one in enumerate(metrics)
    ]
    text = shown(score_table(scores), width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    words = text.split()
    assert {"dataset", "metric", "value", "%", "mean", "per", "class", "recall", "R@10"} <= set(words)
    assert [word for word in words if word.startswith("1") and word.endswith(".1")] == [
        f"1{i}.1" for i in range(5)
    ]
    kept = sum(head in words for head in ("interval", "n", "chance"))
    assert kept == 3 if width >= 80 else kept <= (0 if width == 30 else 3)


@pytest.mark.parametrize("width", [30, 40, 60])
def test_few_shot_metrics_and_values_are_complete_at_any_width(width: int) -> None:
    scores = []
    for k in (1, 2, 4, 8, 16):
        own = replace(SCORE, metric="mean_per_class_recall", setting=f"{k}-shot logistic")
        std = {"metric": f"{own.metric}_std", "value": 0.067, "low": None, "high": None, "chance": None}
        scores += [own, replace(own, **std, n=3)]  # type: ignore[arg-type]
    text = shown(score_table(scores), width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    words = text.split()
    assert words.count("±6.7") == words.count("40.0–60.0") == 5
    assert words.count("recall,") == words.count("logistic") == words.count("metric") >= 1
    assert all(f"{k}-shot" in words for k in (1, 2, 4, 8, 16))


@pytest.mark.parametrize("width", [30, 40, 50, 60, 70])
def test_differences_are_complete_at_any_width(width: int) -> None:
    test = Comparison(difference=-0.25, low=-0.389, high=-0.111, p=0.0, n=48)
    one = Difference(
        dataset="digits", task="linear-probe", setting="", prompt_set="", metric="mean_per_class_recall",
        first=1.0, second=0.75, test=test, p=0.0,
    )  # fmt: skip
    both = (one, replace(one, dataset="glyphs"))
    text = shown(
        tabulate_comparison(ModelComparison(first="a", second="b", differences=both, refused=())), width
    )
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    assert text.count("−25.0 [−38.9, −11.1]") == 2 and "B − A [95%]" in text
    assert {"digits", "glyphs", "mean", "per", "class", "recall"} <= set(text.split())


def test_few_shot_has_a_row_per_metric_and_estimator() -> None:
    scores = []
    for metric in ("acc1", "mean_per_class_recall"):
        for estimator in ("", " logistic"):
            for k in (1, 2, 4, 8, 16):
                own = replace(SCORE, metric=metric, setting=f"{k}-shot{estimator}")
                std = {"metric": f"{metric}_std", "value": 0.067, "low": None, "high": None, "chance": None}
                scores += [own, replace(own, **std, n=3)]  # type: ignore[arg-type]
    lines = shown(score_table(scores)).splitlines()
    assert len(lines) < 18 and max(map(len, lines)) <= 80
    assert any(line.split() == ["acc1,", "ridge", *["50.0", "±6.7"] * 5, "10.00"] for line in lines)
    assert sum(line.count("40.0–60.0") for line in lines) == 20  # every interval
    text = "\n".join(lines)
    assert "n = 48" in text and "mean of 3 draws ± standard deviation" in text and "_" not in text
    alone = [replace(score, n=1) if score.metric.endswith("_std") else score for score in scores]
    assert "±" not in shown(score_table(alone))  # one draw has no deviation


def test_wide_few_shot_columns_are_split_over_two_tables() -> None:
    scores = []
    for k in (1, 2, 4, 8, 16):
        own = replace(
            SCORE, metric="mean_per_class_recall", setting=f"{k}-shot logistic", value=1.0, low=0.0, high=1.0
        )
        std = {"metric": f"{own.metric}_std", "value": 0.577, "low": None, "high": None, "chance": None}
        scores += [own, replace(own, **std, n=3)]  # type: ignore[arg-type]
    lines = shown(score_table(scores)).splitlines()
    assert max(map(len, lines)) <= 80
    words = [word for line in lines for word in line.split()]
    assert words.count("±57.7") == 5 and words.count("0.0–100.0") == 5
    assert "metri" not in words and words.count("logistic") == 2 and words.count("metric") == 2
    assert sum("1-shot" in line and "8-shot" in line for line in lines) == 1


def test_selected_prompt_set_is_shown() -> None:
    scores = [replace(SCORE, task="retrieval", metric="mean_R@1", prompt_set=one) for one in ("", "openai")]
    lines = [line.split() for line in shown(score_table(scores)).splitlines() if "R@1" in line]
    assert [line[: line.index("mean")] for line in lines] == [["digits"], ["prompts", "openai"]]
    own = replace(SCORE, task="zero-shot", prompt_set="own")
    assert "own" not in shown(score_table([own]))


def test_settings_follow_the_dataset_and_ranks_have_no_percent_sign() -> None:
    scores = [
        replace(SCORE, dataset="dsprites_label_x_position", task="fine-tune", metric=one, setting="10 epochs")
        for one in ("acc1", "mean_per_class_recall")
    ]
    lines = shown(score_table(scores)).splitlines()
    assert [line.rstrip() for line in lines if "─" not in line and line.strip()][1:] == [
        " dsprites_label_x_   acc1                      50.0     40.0–60.0     10.00  48",
        " position 10 epochs",
        "                     mean per class recall     50.0     40.0–60.0     10.00  48",
    ]
    assert "value %" in lines[1]
    rank = {
        "task": "retrieval",
        "metric": "image_to_text_median_rank",
        "low": 1.0,
        "high": 2.0,
        "chance": None,
    }
    text = shown(score_table([*scores, replace(SCORE, value=1.0, **rank)]))  # type: ignore[arg-type]
    assert "% or rank" in text and " 1.0 " in text and "1.0–2.0" in text and "100.0" not in text


def test_differences_fit_one_line_of_80_columns() -> None:
    test = Comparison(difference=-0.25, low=-0.389, high=-0.111, p=0.0, n=48)
    first = Difference(
        dataset="digits", task="linear-probe", setting="", prompt_set="", metric="acc1", first=1.0, second=0.75,
        test=test, p=0.0,
    )  # fmt: skip
    found = [
        replace(first, dataset=dataset, metric=metric)
        for dataset in ("digits", "glyphs")
        for metric in ("acc1", "mean_per_class_recall")
    ]
    ranks = [
        replace(found[0], task="retrieval", metric=f"image_to_text_{metric}")
        for metric in ("R@10", "mean_rank")
    ]
    text = shown(
        tabulate_comparison(ModelComparison(first="a", second="b", differences=(*found, *ranks), refused=()))
    )
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 80
    at = lines.index("linear-probe: mean per class recall")
    assert lines[at + 1].split() == ["digits", "100.0%", "75.0%", "−25.0", "[−38.9,", "−11.1]", "<0.001", "A"]
    at = lines.index("retrieval on digits")
    assert lines[at + 1].startswith("image to text R@10 ") and lines[at + 1].endswith(" A")
    assert lines[at + 2].split()[5:7] == ["1.0", "0.8"] and lines[at + 2].endswith(
        " B"
    )  # a rank: lower is better
