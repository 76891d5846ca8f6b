"""Tests of comparing two models: differences, rejected comparisons and corrected p-values."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from torch import Tensor

from clipkit.errors import ConfigError, DataError
from eval.compare import ModelComparison, compare, tabulate_comparison
from eval.datasets.dataset import EvalDataset
from eval.metrics import METRICS, compare_correct
from eval.metrics.classes import mean_per_class_recall, roc_auc
from eval.metrics.intervals import mcnemar
from eval.results.details import item_details, prediction_details
from eval.results.records import append_results, pack_values, write_details
from eval.tasks import Options
from eval.tasks.classify import prompt_outcome
from eval.tasks.subject import Subject

N, C = 400, 5
LABELS = torch.arange(N) ** 2 % C  # classes of different sizes


def dataset(name: str, revision: str = "r1") -> EvalDataset:
    return EvalDataset(
        name=name,
        class_names=tuple("abcde"),
        templates=("{c}",),
        images=(),  # type: ignore[arg-type]
        labels=LABELS,
        captions=None,
        revision=revision,
        tasks=("zero-shot",),
    )


def guesses(right: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.where(torch.rand(N, generator=generator) < right, LABELS, (LABELS + 1) % C)


def add(
    results: Path, model: str, name: str, predicted: Tensor, *, details: bool = True, **more: Any
) -> None:
    correct = predicted == LABELS
    values = {
        "acc1": correct.float().mean().item(),
        "mean_per_class_recall": mean_per_class_recall(correct, LABELS),
    }
    line: dict[str, Any] = {
        "model": model,
        "weights": f"sha256:{model}000000",
        "dataset": name,
        "task": "zero-shot",
        "n": N,
    }
    line |= {"data_revision": "r1", "prompt_set": "own", "prompts": "p1", "split": "test", **more}
    with results.open("a") as file:
        for metric, value in {**values, "ece": 0.1}.items():
            file.write(json.dumps({**line, "metric": metric, "value": value}) + "\n")
    if details:
        found = prediction_details(dataset(name, line["data_revision"]), predicted, task="zero-shot")
        write_details(
            results, type(found)(**{**vars(found), "prompt_set": line["prompt_set"]}), weights=line["weights"]
        )


def printed(comparison: ModelComparison) -> str:
    console = Console(width=80, record=True, file=StringIO())
    console.print(tabulate_comparison(comparison))
    return console.export_text()


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def test_differences_agree_with_the_metrics(results: Path) -> None:
    pair = guesses(0.6, 1), guesses(0.8, 2)
    for name in ("digits", "glyphs", "emoji"):
        add(results, "small", name, pair[0])
        add(results, "large", name, pair[1] if name == "digits" else pair[0])
    found = compare([results], "small", "large")
    assert (found.first, found.second) == ("small", "large")
    by_key = {(one.dataset, one.metric): one for one in found.differences}
    assert len(by_key) == 6
    bits = pair[0] == LABELS, pair[1] == LABELS
    one = by_key["digits", "acc1"]
    assert one.test == compare_correct(*bits)
    assert one.test.p == mcnemar(int((bits[0] & ~bits[1]).sum()), int((bits[1] & ~bits[0]).sum()))
    assert one.p == pytest.approx(3 * one.test.p)  # Holm's correction: the smallest of three
    recall = by_key["digits", "mean_per_class_recall"]
    assert recall.test.difference == pytest.approx(recall.second - recall.first)
    assert recall.beyond_chance
    assert by_key["glyphs", "acc1"].p == 1.0
    said = (
        "zero-shot on digits, glyphs, emoji: ece cannot be tested: the details have no per-item values of it"
    )
    assert found.refused == (said,)
    text = printed(found)
    assert "2 of 6 differences are beyond chance" in " ".join(text.split())
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"data_revision": "r2"}, "the data revisions differ (r1 and r2)"),
        ({"n": 399}, "the numbers of items differ (400 and 399)"),
        ({"prompt_set": "openai"}, "the prompt sets differ (own and openai)"),
        ({"prompts": "p2"}, "the prompts of set own differ (p1 and p2)"),
        (
            {"details": False},
            "there are no per-item details: `python -m eval run --model M --data D` writes them",
        ),
    ],
)
def test_incomparable_scores_are_rejected(results: Path, more: dict[str, Any], said: str) -> None:
    add(results, "small", "digits", guesses(0.6, 1))
    add(results, "large", "digits", guesses(0.8, 2), **more)
    add(results, "large", "glyphs", guesses(0.8, 2))
    found = compare([results], "small", "large")
    assert found.differences == ()
    assert found.refused == (f"zero-shot on digits: {said}", "zero-shot on glyphs: only large has scores")
    assert "0 of 0 differences" in printed(found)


def test_items_in_another_order_are_rejected(results: Path) -> None:
    add(results, "small", "digits", guesses(0.6, 1))
    add(results, "large", "digits", guesses(0.8, 2), details=False)
    details = prediction_details(dataset("digits"), guesses(0.8, 2), task="zero-shot")
    moved = {**vars(details), "labels": pack_values(LABELS.flip(0))}
    write_details(results, type(details)(**moved), weights="sha256:large000000")
    assert "differ in order" in compare([results], "small", "large").refused[0]


def test_details_of_other_scores_are_rejected(results: Path) -> None:
    add(results, "small", "digits", guesses(0.6, 1))
    add(results, "large", "digits", guesses(0.8, 2))
    with results.open("a") as file:
        line = {
            "model": "large",
            "weights": "sha256:large000000",
            "dataset": "digits",
            "task": "zero-shot",
            "n": N,
        }
        file.write(json.dumps({**line, "prompt_set": "own", "metric": "acc1", "value": 0.123}) + "\n")
    found = compare([results], "small", "large")
    assert [difference.metric for difference in found.differences] == ["mean_per_class_recall"]
    assert "zero-shot on digits: acc1: the details do not match the scores" in found.refused


def test_roc_auc_and_mean_rank_are_compared(results: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(N) % 2
    noise = torch.rand(2, N, generator=generator)
    for i, model in enumerate(("small", "large")):
        scores = noise[i] + labels * (0.2 + i)
        found = item_details(
            dataset("memes"), task="zero-shot", n=N, values={"roc_auc": scores, "mean_rank": noise[i]}
        )
        write_details(
            results, type(found)(**{**vars(found), "labels": pack_values(labels)}), weights=f"sha256:{model}"
        )
        for metric, value in (
            ("roc_auc", roc_auc(scores, labels).value),
            ("mean_rank", float(noise[i].mean())),
        ):
            line = {
                "model": model,
                "weights": f"sha256:{model}",
                "dataset": "memes",
                "task": "zero-shot",
                "metric": metric,
            }
            with results.open("a") as file:
                file.write(json.dumps({**line, "value": value, "n": N, "prompt_set": "own"}) + "\n")
    area, rank = compare([results], "small", "large").differences
    assert area.test.difference == pytest.approx(area.second - area.first, abs=1e-6)
    assert area.beyond_chance
    assert rank.test.difference == pytest.approx(rank.second - rank.first, abs=1e-6)


UNTESTED = {"ece", "any_label_acc1"}  # neither a mean over items nor stored with the details


@pytest.mark.parametrize("kind", ["one-label", "multi-label"])
def test_paired_tests_of_all_metrics_agree_with_the_scores(
    results: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.results.details._draw_thumbnails", lambda *_: {})
    generator = torch.Generator().manual_seed(0)
    several = torch.nn.functional.one_hot(LABELS) + torch.nn.functional.one_hot(LABELS**2 % C, C) > 0
    data = replace(dataset("eyes"), class_order=(3, 0, 1, 4, 2))
    names = [name for name, metric in METRICS.items() if metric.kind == kind and not metric.column]
    if kind == "multi-label":
        data = replace(data, labels=several)
    else:
        names = [
            name for name in names if name not in ("roc_auc", "mean_top1_top5", "acc5", "superclass_acc1")
        ]
    weights = torch.nn.functional.normalize(torch.randn(16, C, generator=generator), dim=0)
    for model, noise in (("small", 0.3), ("large", 0.2)):
        images = weights.T[LABELS] + noise * torch.randn(N, 16, generator=generator)
        images[:3] = torch.nan
        subject = cast(Subject, SimpleNamespace(dataset=data, metrics=names, device=torch.device("cpu")))
        outcome = prompt_outcome(subject, Options(details=True), images, weights, 20.0)
        provenance = {"model": model, "weights": f"sha256:{model}"}
        append_results(results, outcome.scores, step=None, provenance=provenance)
        for details in outcome.details:
            write_details(results, details, weights=provenance["weights"])
    found = compare([results], "small", "large")
    assert {difference.metric for difference in found.differences} == {*names} - UNTESTED
    for difference in found.differences:
        change = difference.second - difference.first
        assert difference.test.difference == pytest.approx(change, abs=1e-5), difference.metric
        assert difference.test.low <= change <= difference.test.high


def test_models_are_found_by_name_weights_or_file(results: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    add(results, "small", "digits", guesses(0.6, 1))
    add(other, "large", "digits", guesses(0.8, 2))
    expected = compare([results, other], "small", "large").differences
    assert compare([], str(results), str(other)).differences == expected
    assert compare([results, other], "sha256:small0", "large000").differences == expected
    for missing, said in (
        ("no.jsonl", "there is no file no.jsonl"),
        (str(tmp_path / "run"), "no such file or run"),
    ):
        with pytest.raises(ConfigError, match=said):
            compare([], str(results), missing)
    with pytest.raises(
        ConfigError, match=r"'small' is neither a results file .*compare MODEL_A MODEL_B --results FILE"
    ):
        compare([], "small", "large")
    with pytest.raises(ConfigError, match="no results for model 'huge'"):
        compare([results, other], "small", "huge")
    with pytest.raises(ConfigError, match="are the same model"):
        compare([results, other], "small", "small")
    add(other, "small", "digits", guesses(0.6, 1), weights="sha256:x")
    with pytest.raises(
        ConfigError, match=r"matches several models: choose one of small \(small0*\), small \(x\)"
    ):
        compare([results, other], "small", "large")
    several = f"other.jsonl contains several models .*compare MODEL_A MODEL_B --results {other}"
    with pytest.raises(ConfigError, match=several):
        compare([], str(results), str(other))
    add(other, "tiny", "emoji", guesses(0.6, 1))
    with pytest.raises(DataError, match="no dataset and task in common"):
        compare([results, other], "large", "tiny")
