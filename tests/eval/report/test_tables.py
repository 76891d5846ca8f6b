"""Tests of score tables: the datasets that means cover, their names, and LaTeX rules."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from eval.report import as_csv, as_latex, as_markdown, build_comparison
from eval.report.tables import score_table
from eval.results.table import read_table
from tests.eval.made_up_results import line, write
from tests.eval.web_page import Page


def built(results: Path, **more: Any) -> Any:
    out = build_comparison([results], results.with_name("page.html"), **more)
    return Page(out.read_text(encoding="utf-8"))


def test_a_mean_covers_one_task_and_metric_unless_a_suite_has_several(tmp_path: Path) -> None:
    """Each task has its own heading."""
    ways = ("image_to_text_R@1", "text_to_image_R@1", "mean_R@1")
    lines = [line(0, name, "acc1", value) for name, value in (("a", 0.1), ("b", 0.3), ("c", 0.8))]
    lines += [line(0, name, "map_11_point", 0.9) for name in ("d", "e")]
    lines += [line(0, "f", "roc_auc", 0.99)]
    lines += [line(0, "a", way, 0.5, task="retrieval", prompt_set="") for way in ways]
    lines += [line(0, "g", way, 0.7, task="retrieval", prompt_set="") for way in ways]
    lines += [line(0, "h", "accuracy", 0.6, task="compositional", prompt_set="")]
    path = write(tmp_path / "r.jsonl", lines)
    primary = {"g": "mean_R@1", "h": "accuracy"}
    means = {average.title: average for average in score_table(read_table([path]), primary=primary).averages}
    expected = {
        "mean of all datasets, top-1, zero-shot": 0.4,
        "mean of all datasets, map 11 point, zero-shot": 0.9,
        "mean of all datasets, retrieval": 0.6,
    }
    assert {title: one.values[0] for title, one in means.items()} == pytest.approx(expected)
    assert "mean of all datasets" not in as_markdown([write(tmp_path / "one.jsonl", [lines[0], lines[-1]])])
    assert "mean of" not in built(tmp_path / "one.jsonl", primary=primary).words
    # the mean of a suite covers the main task of each dataset, and its title names no task
    suites = {"s": ("a", "b", "g", "h"), "t": ("a", "b")}
    more: dict[str, Any] = {"suites": suites, "primary": primary}
    (whole, of_task) = score_table(read_table([path]), **more).averages[:2]
    assert whole.tasks == ("zero-shot", "retrieval", "compositional") and whole.title == "mean of s"
    assert whole.values == pytest.approx({0: (0.1 + 0.3 + 0.7 + 0.6) / 4}) and (whole.over, whole.of) == (
        4,
        4,
    )
    assert of_task.title == "mean of t, zero-shot" and of_task.values == pytest.approx({0: 0.2})
    assert as_markdown([path], **more).splitlines()[2] == (
        "| mean of s | zero-shot, retrieval, compositional | over 4 | 42.5 |"
    )
    rows = list(csv.DictReader(io.StringIO(as_csv([path], **more))))
    (mean,) = (row for row in rows if row["kind"] == "mean" and row["dataset"] == "s")
    assert (mean["task"], mean["value"]) == ("zero-shot, retrieval, compositional", "0.425")
    page = built(path, **more)
    headings = ["Suites of several tasks", "Zero-shot", "Retrieval", "Compositional"]
    regions = [
        a["aria-label"] for _, a in page.tags if str(a.get("aria-label")).endswith(": models and datasets")
    ]
    assert regions == [f"{heading}: models and datasets" for heading in headings]
    assert (
        "over all its 4 datasets, each by its main task (zero-shot, retrieval, compositional)" in page.words
    )


def test_a_dataset_counts_in_the_task_of_its_primary_metric(tmp_path: Path) -> None:
    """Also if a dataset has both captions and labels."""
    lines = [line(0, name, "acc1", 0.2) for name in ("a", "b")]
    lines += [line(0, name, "mean_R@1", 0.6, task="retrieval") for name in ("b", "c")]
    path = write(tmp_path / "r.jsonl", lines)
    found = read_table([path])
    primary = {"a": "acc1", "b": "mean_R@1", "c": "mean_R@1"}
    (mean,) = score_table(found, suites={"s": ("a", "b", "c")}, primary=primary).averages
    assert mean.title == "mean of s"
    assert mean.values == pytest.approx({0: (0.2 + 0.6 + 0.6) / 3})


def test_text_about_means_mentions_models_without_the_datasets(tmp_path: Path) -> None:
    lines = [line(model, name, "acc1", 0.5) for model in (0, 1) for name in ("a", "b", "c")[: 3 - model]]
    path = write(tmp_path / "r.jsonl", lines)
    whole = "A mean covers the datasets that all models have, so that columns are comparable"
    assert f"{whole}." in built(path, suites={"s": ("a", "b", "c")}).words
    write(path, [*lines, line(2, "d", "acc1", 0.5)])
    page = built(path, suites={"s": ("a", "b", "c")})
    assert f"{whole}; models that have none of its datasets are left out (–)." in page.words
    assert "over the 2 of 3 datasets that all models that have any have" in page.words
    (row,) = (
        one for one in as_markdown([path], suites={"s": ("a", "b", "c")}).splitlines() if "mean of s" in one
    )
    assert row == "| mean of s | zero-shot | over 2 of 3 | 50.0 | 50.0 |  |"


def test_latex_has_a_rule_before_each_task_and_none_within_one(tmp_path: Path) -> None:
    """With and without means, which are followed by extra space."""
    lines = [
        line(0, name, "acc1", 0.5, task=task, setting="4-shot" if task == "few-shot" else "")
        for task in ("zero-shot", "linear-probe", "knn", "few-shot")
        for name in ("a", "b")
    ]
    lines += [line(0, "a", "acc1", 0.7, task="fine-tune"), line(0, "c", "mean_R@1", 0.1, task="retrieval")]
    path = write(tmp_path / "r.jsonl", lines)
    blocks = as_latex([path], suites={"s": ("a", "b", "c")}).split("\\midrule\n")[1:]
    tasks = [{row.split(" & ")[1] for row in block.splitlines() if " & " in row} for block in blocks]
    assert tasks == [
        {"zero-shot, retrieval"}, {"zero-shot"}, {"retrieval"}, {"linear-probe"}, {"knn"}, {"few-shot"},
        {"fine-tune"},
    ]  # fmt: skip
    for block in blocks:
        rows = [row for row in block.splitlines() if not row.startswith(("\\bottom", "\\end"))]
        means = [row.startswith("mean of") for row in rows]
        parted = [i for i, row in enumerate(rows) if row == "\\addlinespace"]
        assert parted == ([sum(means)] if any(means) and not all(means) else [])
        assert means == sorted(means, reverse=True)
