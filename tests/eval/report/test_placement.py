"""Tests of ``report --beside published``: ranks among the models of open_clip's published table."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from clipkit.errors import ConfigError
from eval.__main__ import main
from eval.datasets.card import load_card, load_suite
from eval.report import placement
from eval.report.placement import rank_models
from eval.results.table import read_table
from tests.eval.made_up_results import line, write
from tests.eval.web_page import Page

TABLE = json.loads(Path(placement.__file__).with_name("published.json").read_text())
DATASETS = [column[0] for column in TABLE["columns"]]
VALUES = np.array([*TABLE["models"].values()])  # (models, datasets)


def score(model: int, column: int, value: float, **more: object) -> dict[str, object]:
    dataset, task, metric, prompts = TABLE["columns"][column]
    card = load_card(dataset)
    n = card.items.get("test", card.splits.get("test", 1000))
    return line(model, dataset, metric, value, **{"task": task, "prompt_set": prompts, "n": n, **more})


def test_columns_are_those_of_the_cards() -> None:
    assert VALUES.shape == (121, 38) and VALUES.min() >= 0 and VALUES.max() <= 1
    assert set(DATASETS) == set(load_suite("datacomp38").cards)
    assert len(TABLE["commit"]) == 40
    for i, (dataset, *what) in enumerate(TABLE["columns"]):
        (published,) = (one for one in load_card(dataset).published if one.source == TABLE["source"])
        assert [published.task, published.metric, published.prompts] == what
        for model, value in published.values.items():
            assert TABLE["models"][model.removeprefix("open_clip:")][i] == value


@settings(max_examples=25, deadline=None)
@given(scores=st.dictionaries(st.integers(0, 37), st.floats(0, 1), min_size=1))
def test_ranks_equal_counting(tmp_path_factory: pytest.TempPathFactory, scores: dict[int, float]) -> None:
    path = tmp_path_factory.mktemp("ranks") / "results.jsonl"
    write(path, [score(10, column, value) for column, value in scores.items()])
    (placed,) = rank_models(read_table([path])).placements
    columns = sorted(scores)
    values = np.array([scores[column] for column in columns])
    assert [rank for _, rank, _ in placed.scores] == [
        1 + int((VALUES[:, column] > scores[column]).sum()) for column in columns
    ]
    assert [best for *_, best in placed.scores] == VALUES[:, columns].max(axis=0).tolist()
    names = [name for _, (name, _) in placed.neighbors]
    rank = placed.neighbors[names.index(placed.model)][0]
    means = VALUES[:, columns].mean(axis=1)
    below, above = (means > values.mean() + sign * 1e-9 for sign in (1, -1))
    assert 1 + below.sum() <= rank <= 1 + above.sum()
    assert f"rank {rank} of 122" in placed.place
    assert [place for place, _ in placed.neighbors] == [*range(max(1, rank - 5), min(122, rank + 5) + 1)]
    ordered = [mean for _, (_, mean) in placed.neighbors]
    assert ordered == sorted(ordered, reverse=True)


def test_other_definitions_are_left_out(tmp_path: Path) -> None:
    i = DATASETS.index("cifar10")
    path = tmp_path / "results.jsonl"
    others = [
        score(10, i, 0.9, prompt_set="openai"),
        score(10, i, 0.9, split="val"),
        score(10, i, 0.9, setting="dim 64"),
        score(10, i, 0.9, task="knn", prompt_set=""),
    ]
    write(path, [*others, score(10, DATASETS.index("mnist"), 0.5, n=500)])
    ranking = rank_models(read_table([path]))
    assert not ranking.placements and not ranking.published
    assert ranking.lead.endswith(
        "Left out: cifar10 with prompts openai, not datacomp, cifar10 on split val, cifar10 with dim 64, "
        "mnist with another number of images."
    )
    with pytest.raises(ConfigError, match="no score can be compared"):
        main(["report", str(write(path, others)), "--beside", "published"])


def test_the_number_of_images_is_that_of_each_score(tmp_path: Path) -> None:
    i = DATASETS.index("cifar10")
    few = score(10, i, 0.9, n=100)
    probe = score(10, i, 0.95, task="linear-probe", prompt_set="")
    path = write(tmp_path / "results.jsonl", [few, probe, score(10, DATASETS.index("mnist"), 0.5)])
    ranking = rank_models(read_table([path]))
    ((place,),) = ([row.dataset for row, *_ in placed.scores] for placed in ranking.placements)
    assert place == "mnist" and list(ranking.published) == ["mnist"]
    assert "cifar10 with another number of images" in ranking.lead


@pytest.mark.parametrize("name", ["ViT-B-32/openai", "mine"])
def test_a_model_with_the_name_or_the_score_of_a_published_one(tmp_path: Path, name: str) -> None:
    i = DATASETS.index("cifar10")
    value = TABLE["models"]["ViT-B-32/openai"][i]
    path = write(tmp_path / "results.jsonl", [{**score(10, i, value), "model": name, "model_hash": "m"}])
    (placed,) = rank_models(read_table([path])).placements
    ((_, rank, _),) = placed.scores
    assert f"rank {rank} of 122" in placed.place and f"mean of the ranks: {rank}.0" in placed.place
    assert placed.neighbors[5] == (rank, (placed.model, value))
    assert "ViT-B-32/openai" in [name for _, (name, _) in placed.neighbors[6:]]


def test_page_and_tables_show_the_neighbors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = [DATASETS.index(name) for name in ("cifar10", "cifar100", "flickr30k")]
    model = TABLE["models"]["ViT-B-16/laion400m_e32"]
    path = write(tmp_path / "results.jsonl", [score(10, column, model[column] + 1e-6) for column in columns])
    table, out = tmp_path / "scores.csv", tmp_path / "page.html"
    command = ["report", str(path), "--beside", "published"]
    assert main([*command, "--csv", str(table), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "over 3 datasets" in said and "121 models of open_clip" in said
    page = Page(out.read_text(encoding="utf-8"))
    assert "Among published models" in page.words
    assert "ViT-B-16/laion400m_e32" in "".join(page.text)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    published = [row for row in rows if row["kind"] == "published"]
    assert {row["dataset"] for row in published} == {"cifar10", "cifar100", "flickr30k"}
    for row in published:
        value = TABLE["models"][row["model"]][DATASETS.index(row["dataset"])]
        assert float(row["value"]) == pytest.approx(value, abs=1e-6)
