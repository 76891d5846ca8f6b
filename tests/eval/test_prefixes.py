"""Tests of prefixes of the embedding: scores, shared encodings, and reports by dimension."""

import json
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from clipkit import CLIP
from clipkit.errors import ConfigError
from clipkit.formats import save_model
from eval import evaluate, open_dataset
from eval.__main__ import main
from eval.features.encoder import ONE_RANK, Encoder
from eval.report import build_report
from eval.report.comparison_page import build_comparison
from eval.scorer import Scorer
from tests.eval.conftest import WriteDataset


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prefix_scores_during_training_equal_models_of_that_dimension(
    model: CLIP, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    run, recorded, said = tmp_path / "run", dict[str, float](), list[str]()
    run.mkdir()
    datasets = [
        open_dataset(write_dataset("classes")),
        open_dataset(write_dataset("texts", captions=["a cat", "two dogs", "a hat"], labels=[None] * 3)),
    ]
    scorer = Scorer(
        model=model, datasets=datasets, run=run, ranks=ONE_RANK, batch_size=8, bf16=False, dims=(4, 9),
        print_line=said.append, write_scores=lambda step, scores: recorded.update(scores),
    )  # fmt: skip
    scorer.score(3)
    scorer.score(6)
    lines = [line for line in lines_of(run / "results.jsonl") if line["step"] == 3]
    whole = [line for line in lines if not line["setting"]]
    assert len(lines) == 3 * len(whole) and {line["dim"] for line in whole} == {model.dim}
    assert all("dim " not in line for line in said)
    for dim in (4, 9):
        short = copy(model)
        short.dim = dim
        expected = [score for dataset in datasets for score in evaluate(short, dataset)]
        found = [line for line in lines if line["setting"] == f"dim {dim}"]
        assert {line["dim"] for line in found} == {dim} and len(found) == len(expected)
        for line, score in zip(found, expected, strict=True):
            assert (line["dataset"], line["task"], line["metric"]) == (
                score.dataset,
                score.task,
                score.metric,
            )
            assert line["value"] == pytest.approx(score.value, abs=1e-6)
            assert recorded[f"{score.dataset}/{score.task}/dim{dim}/{score.metric}"] == line["value"]
    page = build_report(run).read_text(encoding="utf-8")
    assert "classes, zero-shot: top-1 by dimension" in page and "mean R@1 by dimension" in page
    assert page.count("by dimension") >= 2


def test_images_and_texts_are_encoded_once(model: CLIP, write_dataset: WriteDataset) -> None:
    dataset, encoder = open_dataset(write_dataset()), Encoder(model)
    whole, short = encoder.images(dataset).projected, encoder.select_prefix(5).images(dataset).projected
    text = encoder.select_prefix(5).texts(["a", "b"])
    assert short.shape == (len(dataset), 5) and text.shape == (2, 5)
    assert encoder.texts(["b", "a"]).shape == (2, model.dim) and whole.shape == (len(dataset), model.dim)
    assert encoder.encoded == {"images": len({*map(dataset.images.read, range(len(dataset)))}), "texts": 2}
    for one in (short, text):
        assert one.norm(dim=1).tolist() == pytest.approx([1.0] * len(one))


def test_dim_option_scores_prefixes_and_page_compares_them(
    model: CLIP, write_dataset: WriteDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = write_dataset("classes"), tmp_path / "results.jsonl"
    for name in ("one", "other"):
        save_model(model, tmp_path / name)
    given = ["zero-shot", "--data", str(folder), "--out", str(out), "--features", "", "--device", "cpu"]
    command = [*given, "--model", str(tmp_path / "one")]
    assert main([*command, "--dim", "8", "4"]) == 0
    lines = lines_of(out)
    assert [*dict.fromkeys(line["setting"] for line in lines)] == ["", "dim 4", "dim 8"]
    assert len({(line["model"], line["model_hash"]) for line in lines}) == 1
    capsys.readouterr()
    assert main([*command, "--dim", "4", "8", "--skip-existing"]) == 0
    assert "skipped" in capsys.readouterr().out and lines_of(out) == lines
    page = build_comparison([out], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Score by dimension" in page and f">{model.dim}<" in page
    with pytest.raises(ConfigError, match=f"--dim {model.dim}: expected numbers below {model.dim}"):
        main([*command, "--dim", str(model.dim)])
