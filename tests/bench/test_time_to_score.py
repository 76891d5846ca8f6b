"""Tests of the table of time to score by commit."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import time_to_score
from bench.time_to_score import ROWS, add_row, describe_commit, format_row

README = Path(__file__).parents[2] / "bench" / "README.md"


def run_of(seconds: float | None, commit: str) -> dict[str, Any]:
    return {"date": "2026-11-25", "commit": commit, "reached": seconds}


def test_readme_has_all_rows() -> None:
    page = README.read_text(encoding="utf-8")
    for line in ROWS.read_text(encoding="utf-8").splitlines():
        assert format_row(json.loads(line)) in page


def test_row_replaces_that_of_the_same_corpus_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    monkeypatch.setattr(time_to_score, "ROWS", rows)
    add_row("glyphs", [run_of(100.0, "a")], [run_of(300.0, "a")], "first")
    add_row("emoji", [run_of(None, "a")], [run_of(500.0, "a")], "")
    add_row("glyphs", [run_of(90.0, "b")], [run_of(300.0, "a")], "a shorter schedule")
    own = [run_of(80.0, "a"), run_of(100.0, "a"), run_of(None, "a")]
    peer = [run_of(400.0, "a"), run_of(400.0, "a"), run_of(400.0, "a")]
    row = add_row("glyphs", own, peer, "")
    assert row["ratio"] == 4.5  # of the seeds with which both reached the targets
    assert row["note"] == "first"
    assert [json.loads(line)["commit"] for line in rows.read_text().splitlines()] == ["a", "b", "a"]
    assert (
        format_row(row) == "| 2026-11-25 | glyphs | a | 80, 100, not reached | 400, 400, 400 | 4.50 | first |"
    )


def test_commit_is_dirty_if_code_changed_but_not_if_results_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    for path in (results / "a.json", tmp_path / "train.py"):
        path.write_text("1\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "first")):
        subprocess.run(["git", *command], check=True)
    commit = describe_commit()
    (results / "a.json").write_text("2\n")
    assert describe_commit() == commit
    (tmp_path / "train.py").write_text("2\n")
    assert describe_commit() == f"{commit}-dirty"
