"""Tests of resuming with changed settings: more bad samples, more steps, copied data; errors of two ranks.

Each test runs a real ``train.py``.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

from clipkit.config import load_config
from clipkit.samples.index import read_arrays, write_arrays
from clipkit.training import learning_rate
from data.shards.writer import DatasetWriter, Record
from tests.forked import Forked

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.toml"
SAMPLES, BATCH = 48, 4
BROKEN = (10, 30)
SETTINGS = (
    "model.name=ViT-Ti-4-16", "data.workers=0", "optim.warmup=2", "eval.data=[]", "log.tensorboard=false",
    "log.every_steps=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of noise with captions; two images are not decodable."""
    out = tmp_path_factory.mktemp("data") / "pairs"
    noise = np.random.default_rng(0)
    with DatasetWriter(out, samples_per_shard=20) as writer:
        for i in range(SAMPLES):
            pixels = np.ascontiguousarray(noise.integers(0, 256, (20, 24, 3), dtype=np.uint8))
            image = b"no image" if i in BROKEN else simplejpeg.encode_jpeg(pixels)
            writer.write("train", Record(key=f"{i:04d}", image=image, extension="jpg", caption=f"noise {i}"))
        writer.finish({"name": "pairs"})
    return out


Train = Callable[..., str]


@pytest.fixture
def train(pairs: Path, forked: Forked) -> Train:
    """Train and return stderr."""

    def run(out: Path, *more: str, status: int = 0) -> str:
        settings = [f"data.train={pairs}", f"out={out}", f"batch_size={BATCH}", *SETTINGS]
        names = {setting.partition("=")[0] for setting in more}
        settings = [setting for setting in settings if setting.partition("=")[0] not in names]
        done = forked.run("train.py", [*settings, *more], {})
        assert done.returncode == status, done.stderr[-3000:]
        return done.stderr

    return run


def weights(out: Path, step: int) -> bytes:
    return (out / "checkpoints" / f"step_{step:08d}" / "model.safetensors").read_bytes()


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_run_stopped_by_bad_samples_resumes_without_losing_steps(train: Train, tmp_path: Path) -> None:
    steps = SAMPLES // BATCH + 1
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(whole, f"steps={steps}", "data.max_bad=1")
    said = train(stopped, f"steps={steps}", "data.max_bad=0", status=1)
    at = int((stopped / "checkpoints" / "LATEST").read_text().removeprefix("step_"))
    assert metrics(stopped)[-1]["step"] == at < steps
    error = (
        f"error: 1 of {at * BATCH + 1} samples drawn so far are bad, more than data.max_bad = 0 allows: see "
    )
    assert said.count(error) == 1
    assert "the same command resumes" in said.partition(error)[2].partition("\n")[0]

    before = (stopped / "metrics.jsonl").read_text()
    assert error in train(stopped, f"steps={steps}", "data.max_bad=0", status=1)
    assert (stopped / "metrics.jsonl").read_text() == before  # no further step

    assert f"resuming {stopped} at step {at}" in train(stopped, f"steps={steps}", "data.max_bad=1")
    assert weights(stopped, steps) == weights(whole, steps)
    counted = metrics(stopped)[-1]["bad_samples"]
    assert counted == metrics(whole)[-1]["bad_samples"] >= len(BROKEN)
    listed = [path.read_text().splitlines() for path in stopped.glob("bad_samples*.jsonl")]
    assert sum(map(len, listed)) == counted


@pytest.mark.long
def test_finished_run_can_be_extended(train: Train, tmp_path: Path) -> None:
    out, optim = tmp_path / "run", replace(load_config(QUICKSTART).optim, warmup=2)
    train(out, "steps=4")
    said = train(out, "steps=8")
    rates = [learning_rate(step, 4, optim) for step in range(4)]
    rates += [learning_rate(step, 8, optim) for step in range(4, 8)]
    assert [line["lr"] for line in metrics(out)] == rates
    assert (
        f"resuming {out} at step 4\nsteps = 8 now, and was 4: from here on the learning rate follows the schedule "
        f"of the longer run, {rates[3]:.3g} at step 4 and {rates[4]:.3g} at step 5"
    ) in said
    assert load_config(out / "config.toml").steps == 8
    assert load_config(out / "checkpoints" / "step_00000008" / "config.toml").steps == 8
    assert load_config(out / "checkpoints" / "step_00000004" / "config.toml").steps == 4

    assert "now, and was" not in train(out, "steps=8")
    again = train(out, "steps=7", status=1).splitlines()[-1]
    assert again == f"error: steps = 7, but {out} has made 8: set steps=8 or more, or out=… for a new run"
    assert load_config(out / "config.toml").steps == 8


@pytest.mark.long
def test_resume_accepts_copied_data_and_rejects_changed_data(
    train: Train, pairs: Path, tmp_path: Path
) -> None:
    """Captions of the same lengths are other data even if the shard keeps its modification time."""
    data, out = tmp_path / "data", tmp_path / "run"
    shutil.copytree(pairs, data)
    more = (f"data.train={data}", "data.max_bad=1")
    train(out, *more, "steps=2")
    shard = data / "train" / "1.tar"
    whole, before = shard.read_bytes(), shard.stat()
    assert whole.count(b"noise 2") == 10
    shard.write_bytes(whole.replace(b"noise 2", b"other 2"))
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    weights_before = weights(out, 2)
    said = train(out, *more, "steps=4", status=1)
    assert (
        f"error: {out} was trained on other data: 1.tar has other captions or images of the same names and "
        "sizes; restore the data, or set out=… for a new run"
    ) in said
    assert weights(out, 2) == weights_before and not (out / "checkpoints" / "step_00000004").exists()
    shard.write_bytes(whole)  # with another modification time
    data.rename(tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "elsewhere", data, copy_function=shutil.copyfile)
    said = train(out, *more, "steps=4")
    assert f"resuming {out} at step 2" in said and "note: " not in said
    stored = read_arrays(out / "data.manifest")
    assert stored is not None
    about, arrays = stored
    contents = {"contents.content", "contents.ends"}  # absent in runs of earlier versions
    arrays = {name: array for name, array in arrays.items() if name not in contents}
    write_arrays(out / "data.manifest", about, arrays)
    os.utime(shard)
    assert "note: 1 of 3 shards have a different or no modification time, inode or etag" in train(
        out, *more, "steps=4"
    )


def train_by_two(pairs: Path | str, out: Path, *more: str) -> tuple[list[str], str]:
    """Run a training that fails on two ranks; return the error lines and the last 1,000 characters."""
    settings = [f"data.train={pairs}", f"out={out}", f"batch_size={BATCH}", *SETTINGS, *more]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(ROOT / "train.py"), *settings], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Gloo" not in done.stderr and "[rank" not in done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("error")], done.stderr[-1000:]


@pytest.mark.long
def test_two_ranks_save_on_bad_samples_and_one_rank_resumes(
    train: Train, pairs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    errors, last = train_by_two(pairs, out, "steps=12", "data.max_bad=0")
    at = int((out / "checkpoints" / "LATEST").read_text().removeprefix("step_"))
    assert metrics(out)[-1]["step"] == at
    assert len(errors) == 1 and errors[0].startswith(
        f"error: 1 of {at * BATCH + 1} samples drawn so far are bad"
    )
    assert errors[0] in last.partition("Root Cause")[2]

    for name in ("bad_samples.jsonl", "bad_samples-1.jsonl"):  # as left by ranks that were killed later
        with (out / name).open("a") as file:
            file.write(json.dumps({"step": at + 1, "key": "drawn again"}) + "\n")
    said = train(out, "steps=12", "data.max_bad=1")
    listed = "".join(path.read_text() for path in out.glob("bad_samples*.jsonl"))
    assert listed.count("\n") == metrics(out)[-1]["bad_samples"] == 2 and "drawn again" not in listed
    assert "4% of the 50 samples drawn were bad (limit: data.max_bad = 100%" in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("data", "setting", "error"),
    [
        ("/nothing", "steps=2", "error: no data at '/nothing'"),  # found by rank 0 only
        (
            "glyphs",
            "accumulate=4",
            "error: batch_size = 4 cannot be split over 2 processes",
        ),  # found by all ranks
    ],
)
def test_two_ranks_print_one_error_line(data: str, setting: str, error: str, tmp_path: Path) -> None:
    errors, last = train_by_two(data, tmp_path / "run", setting)
    assert len(errors) == 1 and errors[0].startswith(error)
    assert errors[0] in last.partition("Root Cause")[2]
