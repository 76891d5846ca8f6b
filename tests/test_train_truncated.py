"""Tests of training on truncated shards and on captions that are cut: used as far as possible, and counted."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

from data.shards.writer import DatasetWriter, Record
from tests.small_trainings import (
    Trainings,
    digests,
    error_of,
    go_back,
    metrics,
    pairs,
    trainings,
    write_pairs,
)  # fmt: skip

__all__ = ["pairs", "trainings"]


@pytest.mark.long
def test_intact_part_of_truncated_shard_is_used(trainings: Trainings, tmp_path: Path) -> None:
    data, out = write_pairs(tmp_path / "pairs"), tmp_path / "run"
    shard = data / "train" / "1.tar"
    whole = shard.read_bytes()
    os.truncate(shard, 3 * len(whole) // 8)
    settings = (f"data.train={data}", "data.workers=1", "steps=12", "checkpoint.every_steps=5")

    error = error_of(trainings.run(out, *settings, status=1))
    assert error.startswith(f"error: shard {shard} is truncated: ")
    assert error.endswith(", or set data.truncated=use to train on its intact part")
    assert not out.exists()

    said = trainings.run(out, *settings, "data.truncated=use")
    (listed,) = [json.loads(line) for line in (out / "truncated_shards.jsonl").read_text().splitlines()]
    kept = listed["samples_kept"]
    assert listed["shard"] == str(shard) and 0 < kept < 20
    assert f"note: shard {shard} is truncated: {kept} samples kept" in said
    assert f"\n{28 + kept} samples; " in said
    assert all(line["truncated_shards"] == 1 and line["bad_samples"] == 0 for line in metrics(out))

    end = digests(out, 12)
    go_back(out, 5)
    said = trainings.run(out, *settings, "data.truncated=use")
    assert f"resuming {out} at step 5" in said and "is truncated" in said
    assert digests(out, 12) == end

    shard.write_bytes(whole)
    error = error_of(trainings.run(out, *settings, "data.truncated=use", status=1))
    assert f"1.tar has {len(whole)} bytes instead of {3 * len(whole) // 8}" in error


@pytest.mark.slow
def test_captions_that_are_cut_are_counted(trainings: Trainings, tmp_path: Path) -> None:
    data, out = tmp_path / "pairs", tmp_path / "run"
    with DatasetWriter(data, samples_per_shard=8) as writer:
        for number in range(8):
            image = simplejpeg.encode_jpeg(np.full((16, 16, 3), 9 * number, dtype=np.uint8))
            caption = "red hat " * number  # 2 to 16 tokens
            writer.write(
                "train", Record(key=f"{number}", image=image, extension="jpg", caption=caption + "hat")
            )
        writer.finish({})
    settings = (
        f"data.train={data}", "steps=4", "batch_size=4", "model.tokenizer=", "model.context_length=11",
        "checkpoint.every_steps=1",
    )  # fmt: skip
    said = trainings.run(out, *settings)
    note = "note: 6 of 16 captions drawn in all, repeats counted, had more than 11 tokens and were cut; "
    assert said.count(note) == 1
    assert metrics(out)[-1]["cut_captions"] == 6
    go_back(out, 1)
    assert note in trainings.run(out, *settings)
    said = trainings.run(tmp_path / "longer", *settings, "model.context_length=17")
    assert "were cut" not in said and metrics(tmp_path / "longer")[-1]["cut_captions"] == 0
