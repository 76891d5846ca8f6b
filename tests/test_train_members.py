"""Trainings on tars in the layouts of published datasets, with settings only."""

import json
from pathlib import Path

import pytest

from tests.data.published_tars import SETTINGS, write_published
from tests.small_trainings import BATCH, Trainings, error_of, metrics, pairs, trainings

__all__ = ["pairs", "trainings"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", SETTINGS)
def test_published_layouts_are_trained_on(layout: str, trainings: Trainings, tmp_path: Path) -> None:
    image, captions = SETTINGS[layout]
    write_published(layout, tmp_path / "data" / "0.tar", 4 * BATCH)
    settings = (f"data.train={tmp_path / 'data'}", "steps=5", f"data.captions={json.dumps(captions)}")
    more = (
        f"data.image={image}",
        "data.caption_choice=random",
        "data.text_dropout=0.2",
        f'eval.data=["{tmp_path / "data"}","digits"]',
    )
    trainings.run(tmp_path / "run", *settings, *more)
    scores = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert {(score["dataset"], score["task"]) for score in scores} == {
        ("data", "retrieval"), ("digits", "zero-shot"),
    }  # fmt: skip
    lines = metrics(tmp_path / "run")
    assert len(lines) == 5 and all(line["bad_samples"] == 0 for line in lines)
    if image:
        error = error_of(trainings.run(tmp_path / "other", *settings, status=1))
        assert error.endswith(f": set data.image={image} (training) or --image {image} (commands)")
