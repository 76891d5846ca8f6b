"""A run folder is for one training of one configuration, and a full disk does not spoil it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from clipkit.config import Config, load_config
from clipkit.errors import ConfigError, DataError
from clipkit.training.checkpoint import only_trainer_of
from clipkit.training.guards import (
    append_bad_samples,
    bad_fraction,
    check_bad_samples,
    drop_bad_samples_after,
    too_many_bad,
)

CONFIG = Config(out="runs/test")


def make_checkpoint(run: Path, step: int) -> None:
    """One of empty files, which is whole."""
    checkpoint = run / "checkpoints" / f"step_{step:08d}"
    checkpoint.mkdir(parents=True)
    names = ("model.safetensors", "model.json", "optimizer.safetensors", "state.json", "config.toml")
    for name in names:
        (checkpoint / name).touch()
    (checkpoint / "COMPLETE").write_text(json.dumps(dict.fromkeys(names, 0)))


def test_what_a_full_disk_or_a_kill_has_left_is_no_foreign_file(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for left in (".lock", ".config.toml.partial", ".metrics.jsonl.partial"):
        (run / left).write_text("half")
    with only_trainer_of(run, CONFIG, rank0=True):
        assert (run / "config.toml").is_file()
    (tmp_path / "thesis.tex").touch()
    with (
        pytest.raises(ConfigError, match="is not a run folder"),
        only_trainer_of(tmp_path, CONFIG, rank0=True),
    ):
        pass


def test_a_folder_that_is_there_and_cannot_be_written_is_said_to(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    long = tmp_path / ("x" * 5000)
    for run, why in ((tmp_path, "written: Is a directory"), (long, "created: File name too long")):
        with (
            pytest.raises(ConfigError, match=f"cannot be {why}") as caught,
            only_trainer_of(run, CONFIG, rank0=True),
        ):
            pass
        assert len(str(caught.value)) < 300


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    program = (
        "import resource, sys\nfrom pathlib import Path\nfrom clipkit.config import Config\n"
        "from clipkit.errors import run_command\nfrom clipkit.training.checkpoint import only_trainer_of\n"
        "def main():\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))\n"  # as on a full disk
        "    with only_trainer_of(Path(sys.argv[1]), Config(), rank0=True): pass\n"
        "run_command(main)\n"
    )
    run = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", program, run], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"error: the run folder {run} cannot be written: File too large\n"
    assert not run.exists()
    with only_trainer_of(run, CONFIG, rank0=True):  # there is space again
        assert (run / "config.toml").is_file()


def start_that_fails(run: Path, *files: str, lines: str = "") -> None:
    with pytest.raises(DataError), only_trainer_of(run, CONFIG, rank0=True):
        (run / "tensorboard").mkdir()
        (run / "metrics.jsonl").write_text(lines)
        for name in files:
            (run / name).touch()
        raise DataError("no data")


def test_a_start_that_fails_leaves_nothing_that_looks_like_a_run(tmp_path: Path) -> None:
    start_that_fails(tmp_path / "runs" / "one", ".config.toml.partial")
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").mkdir()
    start_that_fails(tmp_path / "runs" / "one")
    assert not list((tmp_path / "runs").iterdir())
    for number, file in enumerate(("results.jsonl", "checkpoints", "notes.txt")):
        start_that_fails(tmp_path / f"{number}", file)
        assert (tmp_path / f"{number}" / file).exists() and (tmp_path / f"{number}" / "config.toml").is_file()
    start_that_fails(tmp_path / "made", lines="{}")
    assert (tmp_path / "made" / "metrics.jsonl").read_text() == "{}"
    (tmp_path / "before").mkdir()  # not ours
    start_that_fails(tmp_path / "before")
    assert (tmp_path / "before" / "config.toml").is_file()


def test_a_folder_is_for_one_configuration(tmp_path: Path) -> None:
    other = replace(CONFIG, seed=1)
    with only_trainer_of(tmp_path, other, rank0=True):
        (tmp_path / "metrics.jsonl").touch()
    with only_trainer_of(tmp_path, CONFIG, rank0=True):  # nothing was saved yet, so nothing is lost
        (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="seed: 0 → 1"), only_trainer_of(tmp_path, other, rank0=True):
        pass
    with only_trainer_of(tmp_path, CONFIG, rank0=True):
        pass


def test_a_run_may_be_extended_but_not_to_fewer_steps_than_it_has_made(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=20)
    with only_trainer_of(tmp_path, config, rank0=True):
        make_checkpoint(tmp_path, 10)
    for steps in (30, 10):
        with only_trainer_of(tmp_path, replace(CONFIG, steps=steps), rank0=True):
            assert load_config(tmp_path / "config.toml").steps == steps
    fewer = replace(CONFIG, steps=9)
    with pytest.raises(ConfigError, match="has made 10: set steps=10 or more, or out=…"):  # noqa: SIM117
        with only_trainer_of(tmp_path, fewer, rank0=True):
            pass
    assert load_config(tmp_path / "config.toml").steps == 10


def test_bad_samples_are_listed_by_rank(tmp_path: Path) -> None:
    append_bad_samples(tmp_path, [], 1, rank=0)
    assert not list(tmp_path.iterdir())
    append_bad_samples(tmp_path, [{"key": "a"}, {"key": "b"}], 2, rank=3)
    lines = (tmp_path / "bad_samples-3.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 2, "key": "a"}, {"step": 2, "key": "b"}]
    with pytest.raises(DataError, match="cannot be written: No such file"):
        append_bad_samples(tmp_path / "gone", [{"key": "a"}], 2, rank=0)


def test_lists_of_ranks_that_are_no_more_are_cut_to_the_checkpoint_too(tmp_path: Path) -> None:
    for rank in (0, 1, 12):
        for step in (4, 5, 6):
            append_bad_samples(tmp_path, [{"key": f"{rank}"}], step, rank=rank)
    drop_bad_samples_after(tmp_path, 5)
    for name in ("bad_samples.jsonl", "bad_samples-1.jsonl", "bad_samples-12.jsonl"):
        lines = (tmp_path / name).read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [4, 5]


@pytest.mark.parametrize(
    ("bad", "used", "share", "too_many"),
    [
        (0, 0, 0.0, False),
        (1, 10**9, 0.0, True),
        (50, 4, 0.05, False),  # a few early ones are no measure
        (51, 4, 0.05, True),
        (1_000, 19_000, 0.05, False),
        (1_001, 19_000, 0.05, True),
        (10**9, 10, 1.0, False),  # whatever is bad
        (4_999, 5_001, 0.5, False),  # half of all draws, as half of the samples are
        (5_001, 4_999, 0.5, True),
    ],
)
def test_the_share_of_bad_samples_is_one_of_draws(bad: int, used: int, share: float, too_many: bool) -> None:
    assert too_many_bad(bad, used, share) is too_many
    if not too_many:
        check_bad_samples(bad, used, share, Path("run"))
        return
    with pytest.raises(
        DataError, match=f"^{bad:,} of {bad + used:,} samples drawn so far are bad, more than "
    ):
        check_bad_samples(bad, used, share, Path("run"))


@pytest.mark.parametrize("epochs", [1, 3, 100])
def test_the_share_of_bad_samples_does_not_grow_with_epochs(epochs: int) -> None:
    bad, good = 100, 99_900  # one in a thousand of a corpus, each drawn once an epoch
    assert not too_many_bad(bad * epochs, good * epochs, 0.001)
    assert too_many_bad(bad * epochs, good * epochs, 0.0009)


@pytest.mark.parametrize(
    ("bad", "used", "share", "line"),
    [
        (150, 850, 0.05, "15% of the 1,000 samples drawn were bad (limit: data.max_bad = 5%)"),
        (
            6,
            34,
            0.05,
            "15% of the 40 samples drawn were bad (limit: data.max_bad = 5% of at least 1,000 samples)",
        ),
        (1, 99_999, 0.001, "0.001% of the 100,000 samples drawn were bad (limit: data.max_bad = 0.1%)"),
    ],
)
def test_the_share_of_bad_samples_is_told_beside_its_limit(
    bad: int, used: int, share: float, line: str
) -> None:
    assert bad_fraction(bad, used, share) == line
