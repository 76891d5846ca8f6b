"""Tests of scoring during training: once per step, printed, recorded and written."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from clipkit import CLIP
from clipkit.config import Config
from clipkit.training.checkpoint import LoopState, save_checkpoint
from eval import EvalDataset, open_dataset, weights_id
from eval.features.encoder import ONE_RANK
from eval.scorer import Scorer


def scorer_of(
    model: CLIP, run: Path, *datasets: EvalDataset
) -> tuple[Scorer, list[str], dict[int, list[str]]]:
    """Return a scorer, the lines that it prints, and the names of the scores that it records by step."""
    said: list[str] = []
    recorded: dict[int, list[str]] = {}

    def record(step: int, scores: Mapping[str, float]) -> None:
        recorded.setdefault(step, []).extend(scores)

    scorer = Scorer(
        model=model, datasets=datasets, run=run, ranks=ONE_RANK, batch_size=8, bf16=False,
        print_line=said.append, write_scores=record,
    )  # fmt: skip
    return scorer, said, recorded


def test_each_step_is_scored_once(model: CLIP, write_dataset: Callable[..., Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    dataset = open_dataset(write_dataset())
    scorer, said, recorded = scorer_of(model, run, dataset)
    scorer.score_if_owed(3)
    scorer.score_if_owed(3)
    lines = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    names = [f"{line['dataset']}/{line['task']}/{line['metric']}" for line in lines]
    assert recorded == {3: names} and len(set(names)) == len(names)
    assert {line["step"] for line in lines} == {3}
    assert [line.split(" chance ")[0].split("% [")[0].rsplit(" ", 1)[0] for line in said] == [
        f"step 3 {dataset.name} zero-shot {metric}" for metric in ("acc1", "acc5")
    ]
    assert (run / "snapshots").is_dir()
    assert {(line["model"], line["weights"]) for line in lines} == {(str(run), "run at step 3")}
    state, optimizer = LoopState(step=4, data="none"), torch.optim.AdamW(model.parameters())
    save_checkpoint(run, model, optimizer, state, Config(), keep=1)
    checkpoint = run / "checkpoints" / "step_00000004"
    scorer.score_if_owed(4)
    assert recorded == {3: names, 4: names}
    written = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()][len(lines) :]
    assert {line["weights"] for line in written} == {weights_id(str(checkpoint))[0]}  # as in eval run


def test_result_lines_without_dataset_are_ignored(model: CLIP, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"step": 3}\n{"step": 3, "dataset": []}\n')
    scorer_of(model, tmp_path)[0].score_if_owed(3)
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]
