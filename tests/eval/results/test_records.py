"""Tests of results files: appended lines, damaged lines, concurrent writers and provenance."""

import hashlib
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch

from clipkit import CLIP
from clipkit.errors import DataError
from eval import Score, append_results, open_dataset, provenance, read_results, weights_id

WriteDataset = Callable[..., Path]


def score(metric: str = "acc1", value: float = 0.5) -> Score:
    return Score(
        dataset="d", task="zero-shot", metric=metric, value=value, n=10, low=0.2, high=0.8, chance=0.1
    )


def test_lines_are_appended_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run" / "results.jsonl"
    append_results(path, [score("acc1"), score("acc5")], step=100, provenance={"weights": "w"})
    append_results(path, [score("acc1", 0.6)], step=None, provenance={})
    assert read_results(path)[0] == {
        "step": 100, "dataset": "d", "task": "zero-shot", "metric": "acc1", "value": 0.5, "n": 10, "low": 0.2,
        "high": 0.8, "chance": 0.1, "split": "test", "prompt_set": "", "setting": "",
            "seconds": None, "weights": "w",
    }  # fmt: skip
    assert [(line["step"], line["metric"]) for line in read_results(path)] == [
        (100, "acc1"),
        (100, "acc5"),
        (None, "acc1"),
    ]
    assert read_results(tmp_path / "none.jsonl") == []


def test_half_written_line_affects_no_other(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_results(path, [score()], step=1, provenance={})
    path.write_text(path.read_text() + '{"step": 2, "dataset": "d", "ta')
    append_results(path, [score()], step=3, provenance={})
    assert [line["step"] for line in read_results(path)] == [1, 3]


def test_lines_that_are_not_scores_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_results(path, [score()], step=1, provenance={})
    good = json.loads(path.read_text())
    odd = [{**good, "step": [1]}, {**good, "dataset": ["d"]}, {**good, "task": None}, {"step": 1}, 1]
    hostile = ["[" * 100_000, '{"a":' * 100_000, '{"a":' * 900 + "1" + "}" * 900, "9" * 5000]
    huge = json.dumps(good).replace('"step": 1', f'"step": 1, "x": {"9" * 5000}')
    path.write_text("\n".join([*hostile, *map(json.dumps, odd), huge, json.dumps(good)]) + "\n")
    assert read_results(path) == [good]


def test_names_may_contain_any_character(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    name = "one\u2028two\x85three\x0bfour\nfive\r"
    append_results(path, [replace(score(), dataset=name)], step=1, provenance={})
    assert [line["dataset"] for line in read_results(path)] == [name]


def test_concurrent_programs_do_not_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"

    def append(name: str) -> None:
        # lines of many pages, which are visible in part while they are written
        one = replace(score(), dataset=name * 60_000)
        for step in range(40):
            append_results(path, [one] * 4, step=step, provenance={})

    processes = [multiprocessing.get_context("fork").Process(target=append, args=(name,)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 480
    runs = [[line["dataset"][0] for line in lines[i : i + 4]] for i in range(0, 480, 4)]
    assert all(len(set(run)) == 1 for run in runs)


def test_an_unwritable_file_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        append_results(tmp_path / "file" / "results.jsonl", [score()], step=1, provenance={})


def test_provenance_has_data_prompts_and_versions(model: CLIP, write_dataset: WriteDataset) -> None:
    dataset = open_dataset(write_dataset(captions=[f"thing {i}" for i in range(23)]))
    facts = provenance(model, dataset, weights="sha256:1")
    json.dumps(facts)
    assert facts["data_revision"] == dataset.revision
    assert (facts["weights"], facts["dtype"], facts["torch"]) == ("sha256:1", "float32", torch.__version__)
    assert facts["prompt_count"] == 14
    assert facts["preprocessing"]["image_size"] == 16
    assert datetime.fromisoformat(facts["time"]).utcoffset() is not None
    other = open_dataset(write_dataset("other", templates=["{c}", "a photo of something {c}."]))
    assert provenance(model, other, weights="")["prompts"] != facts["prompts"]
    assert provenance(model, other, weights="")["captions"] is None


def test_weights_are_named_by_the_hash_of_their_file(tmp_path: Path) -> None:
    folder = tmp_path / "step_00000200"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    name, step = weights_id(str(folder))
    assert (name, step) == ("sha256:" + hashlib.sha256(b"weights").hexdigest()[:16], 200)
    assert weights_id(str(folder / "model.safetensors")) == (name, step)
    assert weights_id("open_clip:ViT-B-32/openai") == ("open_clip:ViT-B-32/openai", None)
