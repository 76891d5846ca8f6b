"""Tests of the run folder: one training and configuration per folder, full disks, lists of bad samples."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clipkit.batch import BadSample
from clipkit.config import Config, ModelConfig, load_config
from clipkit.errors import CheckpointError, ConfigError, DataError
from clipkit.formats.checkpoint import save_model
from clipkit.training.build import first_model, select_shape
from clipkit.training.checkpoint import LoopState, only_trainer_of
from clipkit.training.log import BadSamples
from clipkit.training.parallel import prepare

CONFIG = Config(out="runs/test")


def make_checkpoint(run: Path, step: int) -> None:
    """Write a complete checkpoint of empty files."""
    checkpoint = run / "checkpoints" / f"step_{step:08d}"
    checkpoint.mkdir(parents=True)
    names = ("model.safetensors", "model.json", "optimizer.safetensors", "state.json", "config.toml")
    for name in names:
        (checkpoint / name).touch()
    (checkpoint / "COMPLETE").write_text(json.dumps(dict.fromkeys(names, 0)))


def test_leftover_files_do_not_make_a_run_folder_foreign(tmp_path: Path) -> None:
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


def test_existing_unwritable_folder_raises_a_specific_error(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    long = tmp_path / ("x" * 5000)
    for run, why in ((tmp_path, "written: Is a directory"), (long, "created: File name too long")):
        with (
            pytest.raises(ConfigError, match=f"cannot be {why}") as caught,
            only_trainer_of(run, CONFIG, rank0=True),
        ):
            pass
        assert len(str(caught.value)) < 300


def test_unwritable_new_folder_raises_one_line_error(tmp_path: Path) -> None:
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


def test_failed_start_leaves_no_run_folder(tmp_path: Path) -> None:
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
    (tmp_path / "before").mkdir()  # existed before the run
    start_that_fails(tmp_path / "before")
    assert (tmp_path / "before" / "config.toml").is_file()


def test_folder_is_for_one_configuration(tmp_path: Path) -> None:
    other = replace(CONFIG, seed=1)
    with only_trainer_of(tmp_path, other, rank0=True):
        (tmp_path / "metrics.jsonl").touch()
    with only_trainer_of(tmp_path, CONFIG, rank0=True):  # nothing is lost, because nothing was saved
        (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="seed: 0 → 1"), only_trainer_of(tmp_path, other, rank0=True):
        pass
    with only_trainer_of(tmp_path, CONFIG, rank0=True):
        pass


def test_run_may_be_extended_but_not_below_its_steps(tmp_path: Path) -> None:
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


def bad_sample(key: str) -> BadSample:
    return BadSample(shard="0.tar", key=key, cause="empty")


def bad_samples(run: Path = Path("run"), *, limit: float = 0.05) -> BadSamples:
    return BadSamples(run=run, batch_size=1, limit=limit)


def state_after(bad: int, good: int) -> LoopState:
    return LoopState(step=good, data="", bad_samples=bad)


def test_bad_samples_are_listed_by_rank(tmp_path: Path) -> None:
    bad_samples(tmp_path).append([], 1, rank=0)
    assert not list(tmp_path.iterdir())
    bad_samples(tmp_path).append([bad_sample("a"), bad_sample("b")], 2, rank=3)
    lines = (tmp_path / "bad_samples-3.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 2, "shard": "0.tar", "key": key, "cause": "empty"} for key in ("a", "b")
    ]
    with pytest.raises(DataError, match="cannot be written: No such file"):
        bad_samples(tmp_path / "gone").append([bad_sample("a")], 2, rank=0)


@pytest.mark.parametrize(
    ("bad", "used", "share", "too_many"),
    [
        (0, 0, 0.0, False),
        (1, 10**9, 0.0, True),
        (50, 4, 0.05, False),  # a few at the start are not representative
        (51, 4, 0.05, True),
        (1_000, 19_000, 0.05, False),
        (1_001, 19_000, 0.05, True),
        (10**9, 10, 1.0, False),  # any number is allowed
        (4_999, 5_001, 0.5, False),  # half of all draws
        (5_001, 4_999, 0.5, True),
    ],
)
def test_max_bad_is_a_fraction_of_drawn_samples(bad: int, used: int, share: float, too_many: bool) -> None:
    samples = bad_samples(limit=share)
    assert samples.exceeds_limit(state_after(bad, used)) is too_many
    if not too_many:
        samples.check(state_after(bad, used))
        return
    with pytest.raises(
        DataError, match=f"^{bad:,} of {bad + used:,} samples drawn so far are bad, more than "
    ):
        samples.check(state_after(bad, used))


@pytest.mark.parametrize("epochs", [1, 3, 100])
def test_bad_fraction_does_not_grow_with_epochs(epochs: int) -> None:
    bad, good = 100, 99_900  # one in a thousand samples is bad, each drawn once per epoch
    state = state_after(bad * epochs, good * epochs)
    assert not bad_samples(limit=0.001).exceeds_limit(state)
    assert bad_samples(limit=0.0009).exceeds_limit(state)


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
def test_bad_fraction_is_printed_with_its_limit(bad: int, used: int, share: float, line: str) -> None:
    assert bad_samples(limit=share).describe(state_after(bad, used)) == line


def test_resumed_model_is_built_without_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(model=ModelConfig(name="ViT-Ti-4-16"))
    shape = select_shape(config)
    begun = first_model(config, shape)
    save_model(begun, tmp_path / "model")
    monkeypatch.setattr("clipkit.training.build.create", None)  # draws weights
    monkeypatch.setattr("clipkit.formats.load.load_file", None)
    resumed = first_model(config, shape, checkpoint=tmp_path / "model")
    assert all(parameter.is_meta for parameter in resumed.parameters())
    assert resumed.training and resumed.name == begun.name and resumed.architecture == begun.architecture
    assert [p.requires_grad for p in resumed.parameters()] == [p.requires_grad for p in begun.parameters()]
    ready = prepare(resumed, config, torch.device("cpu"), sharding="none", bf16=False, terms={})
    assert all(parameter.device.type == "cpu" for parameter in ready.parameters())
    assert torch.equal(ready.colors[0], begun.colors[0]) and torch.equal(ready.colors[1], begun.colors[1])
    other = replace(shape, quick_gelu=True)
    with pytest.raises(CheckpointError, match="model is of another architecture than ViT-Ti-4-16"):
        first_model(config, other, checkpoint=tmp_path / "model")
