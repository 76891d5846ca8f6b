"""Tests of training on truncated shards: rejected, or their intact parts are used, listed and counted."""

import json
import os
from pathlib import Path

import pytest

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
