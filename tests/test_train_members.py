"""Trainings on tars in the layouts of published datasets, with settings only."""

import json
from pathlib import Path

import pytest

from tests.configs.recipes import classes
from tests.data.json_shards import shard_of
from tests.data.published_tars import SETTINGS, jpeg_of, write_published
from tests.small_trainings import BATCH, Trainings, digests, error_of, go_back, metrics, pairs, trainings

__all__ = ["pairs", "trainings"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", SETTINGS)
def test_published_layouts_are_trained_on(layout: str, trainings: Trainings, tmp_path: Path) -> None:
    image, captions = SETTINGS[layout]
    write_published(layout, tmp_path / "data" / "0.tar", 4 * BATCH)
    classes(tmp_path / "colors", ("red", "blue"), 3)
    settings = (f"data.train={tmp_path / 'data'}", "steps=5", f"data.captions={json.dumps(captions)}")
    more = (
        f"data.image={image}",
        "data.caption_choice=random",
        "data.text_dropout=0.2",
        f'eval.data=["{tmp_path / "data"}","{tmp_path / "colors"}"]',
    )
    trainings.run(tmp_path / "run", *settings, *more)
    scores = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert {(score["dataset"], score["task"]) for score in scores} == {
        ("data", "retrieval"), ("colors", "zero-shot"),
    }  # fmt: skip
    lines = metrics(tmp_path / "run")
    assert len(lines) == 5 and all(line["bad_samples"] == 0 for line in lines)
    if image:
        error = error_of(trainings.run(tmp_path / "other", *settings, status=1))
        assert error.endswith(f": set data.image={image} (training) or --image {image} (commands)")


def test_balanced_run_is_the_same_after_a_restart_and_on_two_ranks(
    trainings: Trainings, tmp_path: Path
) -> None:
    for shard in range(3):
        samples = []
        for i in range(10):
            meta = json.dumps({"kind": "common" if i % 5 else f"rare {shard}"})
            samples.append({"jpg": jpeg_of(10 * shard + i), "txt": f"text {shard} {i}", "json": meta})
        shard_of(tmp_path / f"{shard}.tar", samples)
    settings = (
        f"data.train={tmp_path}/{{0..2}}.tar", "data.balance=kind:5", "data.text_dropout=0.2", "steps=7",
        "checkpoint.every_steps=3",
    )  # fmt: skip
    said = trainings.run(tmp_path / "run", *settings)
    assert "data.balance = kind:5: 4 values, 1 capped: 30 → 11 samples an epoch, 2 to 5 of each value" in said
    assert "11 samples; 2 batches of 4 an epoch, 3 samples left out of each epoch, 3.5 epochs in all" in said
    whole = digests(tmp_path / "run", 7)
    go_back(tmp_path / "run", 3)
    assert "resuming" in trainings.run(tmp_path / "run", *settings)
    assert digests(tmp_path / "run", 7) == whole
    trainings.run_ranks(2, tmp_path / "ranks", *settings)
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("run", "ranks")]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    error = error_of(trainings.run(tmp_path / "run", *settings, "data.balance=kind:6", "steps=9", status=1))
    assert "data.balance" in error and "kind:6" in error
