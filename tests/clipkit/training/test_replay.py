"""Tests of replay_parts: one process replays a step of several ranks in as many parts as all ranks had."""

import json
from pathlib import Path

import pytest

from clipkit.config import Config, to_toml
from clipkit.errors import ConfigError
from clipkit.training.guards import replay_parts

CONFIG = Config(out="runs/test", batch_size=48, accumulate=2)


def failed_run(run: Path, *, ranks: int) -> None:
    """Write a run with a checkpoint of step 7 that failed in step 8, whose samples each rank listed."""
    folder = run / "checkpoints" / "step_00000007"
    folder.mkdir(parents=True)
    names = ("model.safetensors", "model.json", "optimizer.safetensors", "state.json", "config.toml")
    for name in names:
        (folder / name).touch()
    (folder / "config.toml").write_text(to_toml(CONFIG))
    sizes = {name: (folder / name).stat().st_size for name in names}
    (folder / "COMPLETE").write_text(json.dumps(sizes))
    for rank in range(ranks):
        lines = json.dumps({"step": 8, "shard": "0.tar", "key": "a"}) + "\n"
        (run / (f"not_finite-{rank}.jsonl" if rank else "not_finite.jsonl")).write_text(lines)
    (run / "not_finite-9.jsonl").write_text(json.dumps({"step": 3, "shard": "0.tar", "key": "a"}) + "\n")
    (run / "not_finite-10.jsonl").write_text("broken")


@pytest.mark.parametrize(
    ("ranks", "given", "parts"), [(0, 2, 2), (1, 1, 2), (4, 2, 8), (4, 12, 12), (9, 40, 40)]
)
def test_parts_are_those_of_all_ranks(tmp_path: Path, ranks: int, given: int, parts: int) -> None:
    failed_run(tmp_path, ranks=ranks)
    assert replay_parts(tmp_path, given, CONFIG.batch_size) == parts


def test_every_part_has_a_row(tmp_path: Path) -> None:
    failed_run(tmp_path, ranks=8)
    assert replay_parts(tmp_path, CONFIG.accumulate, 12) == 12


def test_unsaved_run_is_not_replayed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="requires a saved run: there is no checkpoint in"):
        replay_parts(tmp_path, 1, 8)
