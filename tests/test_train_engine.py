"""Tests of the training engine: resuming with all options on, spikes, non-finite losses, full disks, metrics.

Each test runs a real ``train.py`` in one process. Several ranks: test_train_sharded.py. Teachers:
test_train_taught.py.
"""

import hashlib
import json
import math
import os
import resource
import shutil
import signal
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from safetensors.torch import load_file

import clipkit
from clipkit.formats.checkpoint import save_model
from data.shards.writer import DatasetWriter, Record
from tests.small_trainings import (
    BATCH,
    SAMPLES,
    Trainings,
    checkpoint,
    digests,
    error_of,
    go_back,
    latest_step,
    metrics,
    pairs,
    process_of,
    trainings,
    wait_until,
)

__all__ = ["pairs", "trainings"]  # fixtures

pytestmark = pytest.mark.slow

STEPS, SAVED_EVERY = 6, 2
EVERYTHING = (
    f"steps={STEPS}", f"checkpoint.every_steps={SAVED_EVERY}", "batch_size=8", "accumulate=3",
    "loss.name=siglip", "loss.same=positives", "model.patch_dropout=0.5", "recompute=1",
    "optim.name=stable_adamw", "optim.average=0.9", "optim.layer_decay=0.8", "optim.skip_above=3",
    "lock.unfreeze_every=2", "small.steps=3", "small.image_size=8", "small.context_length=8",
)  # fmt: skip
TENSORS = {"model.safetensors", "trained.safetensors", "optimizer.safetensors"}


@dataclass(frozen=True, kw_only=True)
class Whole:
    """An uninterrupted run with all options on, the digests of its last checkpoint and its losses."""

    out: Path
    end: dict[str, str]
    losses: list[float]


@pytest.fixture(scope="module")
def whole(trainings: Trainings, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    out = tmp_path_factory.mktemp("whole") / "run"
    trainings.run(out, *EVERYTHING)
    return Whole(out=out, end=digests(out, STEPS), losses=losses(out))


def losses(out: Path) -> list[float]:
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def hashes(folder: Path) -> dict[str, str]:
    """Hash every file except the lock, which contains the id of the last process."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_all_options_resume_bit_for_bit(trainings: Trainings, whole: Whole) -> None:
    assert whole.end.keys() == TENSORS
    go_back(whole.out, STEPS - SAVED_EVERY)
    said = trainings.run(whole.out, *EVERYTHING)
    assert f"resuming {whole.out} at step {STEPS - SAVED_EVERY}" in said
    assert digests(whole.out, STEPS) == whole.end
    assert losses(whole.out) == whole.losses


def test_resume_after_kill_while_saving(trainings: Trainings, whole: Whole, tmp_path: Path) -> None:
    out = next(filter(None, (killed_while_saving(trainings, tmp_path / name) for name in "abc")))
    assert not checkpoint(out, 2 * SAVED_EVERY).exists() and latest_step(out) == SAVED_EVERY
    clipkit.load(out)

    # image sizes change and a layer is unfrozen after the step at which the run resumes
    said = trainings.run(out, *EVERYTHING)
    assert f"resuming {out} at step {SAVED_EVERY}" in said
    assert digests(out, STEPS) == whole.end
    assert losses(out) == whole.losses
    assert not list((out / "checkpoints").glob(".*"))


def killed_while_saving(trainings: Trainings, out: Path) -> Path | None:
    """Return a run that was killed while it wrote its second checkpoint, None if the kill was too late."""
    half = out / "checkpoints" / f".step_{2 * SAVED_EVERY:08d}.partial"
    running = trainings.start(out, *EVERYTHING)
    wait_until(half.is_dir, running)
    os.kill(process_of(out), signal.SIGKILL)
    assert running.result().returncode == -signal.SIGKILL
    return out if half.is_dir() else None


def test_full_disk_keeps_last_checkpoint_and_run_resumes(trainings: Trainings, tmp_path: Path) -> None:
    out, settings = tmp_path / "full", ("steps=9", "checkpoint.every_steps=3", "checkpoint.keep=1")
    running = trainings.start(out, *settings)
    wait_until(lambda: checkpoint(out, 3).exists(), running)
    # the limit on file sizes makes writes fail like a full disk
    resource.prlimit(process_of(out), resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    ended = running.result()
    assert ended.returncode == 1
    saved = latest_step(out)
    assert saved in (3, 6)
    assert error_of(ended.stderr).startswith(f"error: the checkpoint of step {saved + 3} was not written: ")
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"LATEST", checkpoint(out, saved).name}
    clipkit.load(out)

    assert f"resuming {out} at step {saved}" in trainings.run(out, *settings)
    assert latest_step(out) == len(losses(out)) == 9


def test_non_finite_loss_stops_the_run_and_is_replayed(trainings: Trainings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = ("steps=6", "optim.lr=1e30", "optim.warmup=0", "optim.clip_norm=0")
    error = error_of(trainings.run(out, *settings, status=1))
    assert error.startswith("error: the loss of step 2 is nan; step 1 is saved, and ")
    assert latest_step(out) == 1
    listed = [json.loads(line) for line in (out / "not_finite.jsonl").read_text().splitlines()]
    assert len({record["key"] for record in listed}) == BATCH
    assert {record["step"] for record in listed} == {2}

    before = hashes(out)
    running = trainings.start(out, *settings, "--replay")
    assert running.result().returncode == 0
    first, *rows = running.result().stdout.splitlines()
    assert first.startswith("step 2 in fp32: the output of ") and first.endswith(" is not finite")
    assert [row.split()[-3] for row in rows] == [record["key"] for record in listed]
    assert hashes(out) == before


def test_non_finite_weights_after_last_step_are_not_saved(trainings: Trainings, tmp_path: Path) -> None:
    out, settings = tmp_path / "run", ("optim.name=adamw", "optim.lr=1e38", "optim.warmup=0")
    error = error_of(trainings.run(out, "steps=1", *settings, status=1))
    assert error.startswith("error: the weights after step 1 are not finite, first ")
    assert ", and are not saved; no checkpoint exists; " in error
    assert not (out / "checkpoints").exists() and not (out / "report.html").exists()


@pytest.mark.long
def test_non_finite_loss_of_first_step_is_replayed(trainings: Trainings, tmp_path: Path) -> None:
    weights, out = tmp_path / "weights", tmp_path / "run"
    model = clipkit.create("ViT-Ti-4-16", seed=0)
    with torch.no_grad():
        model.state_dict()["visual.conv1.weight"].fill_(3e38)
    save_model(model, weights)
    settings = ("steps=2", f"model.weights={weights}")
    error = error_of(trainings.run(out, *settings, status=1))
    assert error.startswith("error: the loss of step 1 is nan; step 0 is saved, and ")
    replay = trainings.start(out, *settings, "--replay").result()
    assert replay.returncode == 0, replay.stderr
    assert replay.stdout.startswith("step 1 in fp32: the output of visual.")


@pytest.mark.long
@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_resume_does_not_read_initial_weights(loss: str, trainings: Trainings, tmp_path: Path) -> None:
    weights, out = tmp_path / "weights", tmp_path / "run"
    model = clipkit.create("ViT-Ti-4-16", seed=3)
    model.preprocess = replace(model.preprocess, mean=(0.1, 0.2, 0.3))
    save_model(model, weights)
    settings = ("steps=4", "checkpoint.every_steps=2", f"loss.name={loss}")
    trainings.run(out, *settings, f"model.weights={weights}")
    end, card = digests(out, 4), (checkpoint(out, 4) / "model.json").read_text()
    assert "0.1" in card

    shutil.rmtree(weights)
    for place in (weights, tmp_path / "elsewhere"):
        go_back(out, 2)
        said = trainings.run(out, *settings, f"model.weights={place}")
        assert f"model.weights = '{place}' is not read" in said
        assert digests(out, 4) == end and (checkpoint(out, 4) / "model.json").read_text() == card


@pytest.mark.long
def test_skipped_spikes_are_counted_and_identical_after_resume(trainings: Trainings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    # the learning rate is too small to change gradient norms, so about half of them are above the mean
    settings = (
        "steps=45", "checkpoint.every_steps=30", "optim.skip_above=1.01", "optim.lr=1e-7",
        "optim.clip_norm=0",
    )  # fmt: skip
    trainings.run(out, *settings)
    lines, end, losses_before = metrics(out), digests(out, 45), losses(out)
    counts = [line["skipped"] for line in lines]
    assert counts[19] == 0 and 0 < counts[29] < counts[-1] < 25, counts
    for before, after in pairwise(lines):
        if after["skipped"] > before["skipped"]:
            assert after["grad_norm"] > 1.01 * min(line["grad_norm"] for line in lines)
    stored = json.loads((checkpoint(out, 30) / "state.json").read_text())
    assert stored["skipped"] == counts[29] and stored["usual_norm"] > 0

    go_back(out, 30)
    trainings.run(out, *settings)
    assert digests(out, 45) == end
    assert [line["skipped"] for line in metrics(out)] == counts and losses(out) == losses_before


@pytest.fixture(scope="module")
def plain(trainings: Trainings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with ``--profile``."""
    out = tmp_path_factory.mktemp("plain") / "run"
    said = trainings.run(out, "steps=6", "--profile", "2")
    assert f"profiled: {out}/profile/table.txt" in said
    return out


def test_profile_writes_table_and_trace(plain: Path) -> None:
    table = (plain / "profile" / "table.txt").read_text()
    head, *rows, whole = table.splitlines()
    assert head.split() == ["operation", "CPU", "ms", "fraction", "calls"] and "aten::" in table
    names, own = zip(*((row[:44].strip(), float(row[44:].split()[0])) for row in rows), strict=True)
    assert "aten::mm" in names and list(own) == sorted(own, reverse=True)
    assert whole.split()[::2] == ["all", "100.0%"] and max(map(len, table.splitlines())) <= 80
    assert (plain / "profile" / "trace.json.gz").stat().st_size > 1000


def test_metrics_of_every_step(trainings: Trainings, plain: Path, whole: Whole) -> None:
    for out, batch in ((plain, BATCH), (whole.out, 8)):
        for line in metrics(out):
            if out == plain:
                assert line["chance"] == pytest.approx(math.log(batch))
            else:  # of the sigmoid loss; higher with more positive pairs
                least = math.log(batch) + (batch - 1) * math.log(batch / (batch - 1))
                assert least * 0.999 <= line["chance"] < 2 * least
            assert 0 < line["loss"] < 100 and line["scale"] > 1 and line["grad_norm"] > 0
            times = {name: value for name, value in line.items() if name.endswith("_time")}
            whole_time = times.pop("batch_time")
            assert 0 <= times.pop("transfer_time") <= times["data_time"] + 1e-3
            assert all(value >= 0 for value in times.values())
            assert sum(times.values()) == pytest.approx(whole_time, rel=0.01)
            for phase in ("data", "forward", "loss", "backward", "optimizer"):
                assert times[f"{phase}_time"] > 0, phase  # also of data, as there are no workers
            assert line["samples_per_second"] == pytest.approx(batch / whole_time)
            assert line["samples_per_second_per_gpu"] == line["samples_per_second"]
            assert 0 < line["memory_gib"] < 64 and 0 < line.get("mfu", 1) <= 1
            assert 0 <= line["image_to_text_R@1"] <= 1 and 0 <= line["text_to_image_R@1"] <= 1
            assert line["samples"] == batch * line["step"]
            assert line["epoch"] == (line["step"] - 1) // (SAMPLES // batch)


def test_epochs_and_floor_of_two_weighted_sources(trainings: Trainings, tmp_path: Path) -> None:
    few = tmp_path / "few"
    with DatasetWriter(few) as writer:
        for number in range(8):
            image = simplejpeg.encode_jpeg(np.full((20, 20, 3), 30 * number, dtype=np.uint8))
            record = Record(key=f"{number}", image=image, extension="jpg", caption=f"number {number % 2}")
            writer.write("train", record)
        writer.finish({})
    mixed = f'data.train=["{few}", "{few}"]'
    said = trainings.run(
        tmp_path / "run", mixed, "data.weights=[1, 3]", "steps=6", "batch_size=8", "loss.same=positives"
    )
    lines = metrics(tmp_path / "run")
    assert [line["epoch"] for line in lines] == [0, 0, 0, 0, 1, 1]  # 2 of 8 samples in each step
    floor = math.log(4)  # unless the captions are unevenly drawn
    assert all(abs(line["floor"] - floor) < 0.4 for line in lines) and "floor 1." in said


def test_dry_run_prints_costs_and_creates_no_files(trainings: Trainings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = trainings.start(out, *EVERYTHING, "--dry-run").result()
    assert ended.returncode == 0 and ended.stderr == ""
    assert not out.exists()
    _, blank, table = ended.stdout.rpartition("\n\n")
    assert blank and [line.partition("  ")[0] for line in table.splitlines() if line[0] != " "] == [
        "parameters", "FLOPs", "memory", "time", "data"
    ]  # fmt: skip
    assert max(map(len, table.splitlines())) <= 80


def test_checkpoints_by_the_clock(trainings: Trainings, tmp_path: Path) -> None:
    often, seldom = tmp_path / "often", tmp_path / "seldom"
    trainings.run(often, "steps=3", "checkpoint.every_steps=0", "checkpoint.every_minutes=1e-9")
    trainings.run(seldom, "steps=3", "checkpoint.every_steps=0")
    assert [checkpoint(often, step).exists() for step in (1, 2, 3)] == [True, True, True]
    assert [checkpoint(seldom, step).exists() for step in (1, 2, 3)] == [False, False, True]


def test_sigusr1_saves_within_a_step(trainings: Trainings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    running = trainings.start(out, "steps=1000")
    wait_until(lambda: (out / "metrics.jsonl").is_file() and len(metrics(out)) > 2, running)
    os.kill(process_of(out), signal.SIGUSR1)
    asked_at = len(metrics(out))
    ended = running.result()
    assert ended.returncode == 128 + signal.SIGUSR1, ended.stderr
    assert latest_step(out) == len(metrics(out)) <= asked_at + 2
    assert f"stopped and saved at step {latest_step(out)} of 1000" in ended.stderr.splitlines()[-1]


def test_locked_image_tower_is_unchanged(trainings: Trainings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    trainings.run(out, "steps=3", "lock.image=all")
    before = clipkit.create("ViT-test", seed=0).state_dict()
    after = load_file(checkpoint(out, 3) / "model.safetensors")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("visual.")}


def test_config_file_is_found_among_settings_and_two_are_an_error(
    trainings: Trainings, tmp_path: Path
) -> None:
    first, other = tmp_path / "one.toml", tmp_path / "other.toml"
    first.write_text("seed = 77")
    ended = trainings.start(tmp_path / "run", str(first), "--dry-run").result()
    assert ended.returncode == 0 and "seed = 77" in ended.stdout.splitlines(), ended.stderr
    ended = trainings.start(tmp_path / "run", str(first), str(other), "--dry-run").result()
    assert error_of(ended.stderr).startswith(f"error: {first} and {other} are given: pass one config file")


def test_invalid_combinations_print_one_line_error(trainings: Trainings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = trainings.run(out, "lock.image=all", "lock.text=all", status=1)
    assert "lock.image = 'all' and lock.text = 'all' leave nothing to train" in error_of(said)
    assert not out.exists()
    error = error_of(trainings.run(out, "--replay", status=1))
    assert error == f"error: --replay requires a saved run: there is no checkpoint in {out}"
    assert not out.exists()
