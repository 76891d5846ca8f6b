"""Tests of the notes and lines printed before the first step."""

from pathlib import Path

import pytest

from clipkit.config import load_config, to_toml
from clipkit.objectives import OBJECTIVES
from clipkit.training.log import describe_start

CONFIGS = Path(__file__).parents[3] / "configs"
QUICKSTART = CONFIGS / "quickstart.toml"


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        (
            ["optim.warmup=6"],
            "optim.warmup = 6 is not shorter than the run of 6 steps: the learning rate rises to 0.0015",
        ),
        (
            ["optim.warmup=2", "small.steps=6", "small.image_size=8"],
            "small.steps = 6 is not shorter than the run",
        ),
        (
            ["optim.warmup=2", "lock.unfreeze_every=2"],
            "lock.unfreeze_every = 2 unlocks 3 of 14 layers in 6",
        ),
        (
            ["optim.warmup=2", "batch_size=8192"],
            "each of the 960 pairs is seen 51 times; steps=1 would be 10 times",
        ),
        (
            ["optim.warmup=2", "loss.name=siglip"],
            "the sigmoid loss starts near 10, above the level of chance",
        ),
    ],
)
def test_questionable_settings_print_a_note(settings: list[str], note: str) -> None:
    config = load_config(QUICKSTART, ["steps=6", *settings])
    (line,) = config.notes(step=0, samples=960, layers=14)
    assert line.startswith(f"note: {note}")
    assert not config.notes(step=6, samples=960, layers=14)  # at the last step


@pytest.mark.parametrize(
    ("source", "groups", "hosts", "better"),
    [
        ("s3://bucket/{00..99}.tar", 1, 4, 64),
        ("s3://bucket/{00..99}.tar", 64, 48, 48),
        ("s3://bucket/{00..99}.tar", 64, 32, None),
        ("s3://bucket/{00..99}.tar", 1, 1, None),
        ("s3://bucket/{00..99}.tar", 1, 7, None),  # no number of groups divides the batch size
        ("pairs", 1, 4, None),
    ],
)
def test_machines_that_download_the_same_shards_print_a_note(
    source: str, groups: int, hosts: int, better: int | None
) -> None:
    config = load_config(QUICKSTART, [f"data.train={source}", "batch_size=192", f"data.groups={groups}"])
    notes = config.notes(step=0, samples=96_000, layers=14, hosts=hosts)
    expected = (
        f"note: data.groups = {groups} is not a multiple of the {hosts} machines, so they download the same "
        f"shards; with data.groups={better}, each downloads its own part"
    )
    assert notes == ([expected] if better else [])
    assert not config.notes(step=1, samples=96_000, layers=14, hosts=hosts)  # fixed since the first step


def test_valid_boundary_settings_print_no_note() -> None:
    settings = ["optim.warmup=26", "small.steps=26", "small.image_size=8", "lock.unfreeze_every=2"]
    assert not load_config(QUICKSTART, ["steps=27", *settings]).notes(step=0, samples=9600, layers=14)


def test_lion_with_defaults_of_adamw_prints_a_note() -> None:
    def list_notes(*more: str) -> list[str]:
        settings = ["loss.name=clip", "optim.name=lion", *more]
        return load_config(QUICKSTART, settings).notes(step=0, samples=9600, layers=14)

    (note,) = list_notes()
    assert (
        "optim.beta2 = 0.98 is usual for adamw: Lion usually needs 0.99, a tenth of AdamW's optim.lr" in note
    )
    assert not list_notes("optim.beta2=0.99")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_provided_configurations_print_no_note(path: Path) -> None:
    config = load_config(path, count_epoch=lambda _: 80.0)
    notes = config.notes(step=0, samples=config.steps * config.batch_size // 40, layers=14)
    assert set(notes) <= {f"note: {OBJECTIVES[config.loss.name].note}"}


def test_start_and_resume_print_one_line_per_fact(tmp_path: Path) -> None:
    settings = ["out=runs/a", "optim.warmup=2"]
    config = load_config(QUICKSTART, ["steps=8", *settings])
    (tmp_path / "config.toml").write_text(to_toml(load_config(QUICKSTART, ["steps=6", *settings])))
    assert describe_start(config, 0, None) == ["starting runs/a"]
    assert describe_start(config, 0, tmp_path) == ["starting runs/a"]  # the checkpoint of a failed first step
    assert describe_start(config, 8, tmp_path) == ["runs/a has made all its 8 steps"]
    resumed = describe_start(config, 4, tmp_path)
    assert resumed[0] == "resuming runs/a at step 4"
    assert resumed[1].startswith(
        "steps = 8 now, and was 6: from here on the learning rate follows the schedule of the longer run, "
    )
    (tmp_path / "config.toml").unlink()  # only a line depends on it
    assert describe_start(config, 4, tmp_path) == resumed[:1]
