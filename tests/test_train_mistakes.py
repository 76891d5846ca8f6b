"""Tests of user errors: each gives exit status 1 and one line that says what to do, and nothing hangs.

Each test runs a real ``train.py`` in a process of its own, two at a time.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.shards.writer import DatasetWriter, Record
from tests.forked import Forked

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SMALL = (
    "model.name=ViT-Ti-4-16", "steps=2", "batch_size=4", "data.workers=0", "log.tensorboard=false",
    "log.every_steps=1", "eval.data=[]", "optim.name=adamw", "shape.image_layers=1", "shape.image_width=64",
    "shape.text_layers=1", "shape.text_width=32",
)  # fmt: skip
SAMPLES = 8


def write_dataset(folder: Path, *, broken: tuple[int, ...] = (), no_caption: tuple[int, ...] = ()) -> None:
    random = np.random.default_rng(0)
    with DatasetWriter(folder, samples_per_shard=4) as writer:
        for number in range(SAMPLES):
            file = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file, "png")
            image = b"no image" if number in broken else file.getvalue()
            caption = "" if number in no_caption else f"caption {number}"
            writer.write("train", Record(key=f"{number}", image=image, extension="png", caption=caption))
        writer.finish({})


Ended = subprocess.CompletedProcess[str]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Datasets of all tests and the parent of the run folders."""

    root: Path
    forked: Forked

    @property
    def runs(self) -> Path:
        """Return the parent of the run folders."""
        return self.root / "runs"

    def start(self, *arguments: str, run: str) -> "subprocess.Popen[str]":
        command = [
            sys.executable,
            "-W",
            "error::ResourceWarning",
            "train.py",
            *self._settings(arguments, run),
        ]
        environment = {**os.environ, **self._environment}
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def train(self, *arguments: str, run: str) -> Ended:
        return self.forked.run("train.py", self._settings(arguments, run), self._environment)

    @property
    def _environment(self) -> dict[str, str]:
        return {"CLIPKIT_CACHE": str(self.root / "cache"), "OMP_NUM_THREADS": "1"}

    def _settings(self, arguments: Sequence[str], run: str) -> list[str]:
        settings = [argument.format(root=self.root) for argument in arguments]
        values = {word.partition("=")[0]: word for word in (*SMALL, *settings) if "=" in word}
        return [*(word for word in settings if "=" not in word), *values.values(), f"out={self.runs}/{run}"]


MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown key": (("data.train={root}/good", "optim.lrr=1"), "optim.lr"),
    "missing shards": (
        ("data.train={root}/good/train/{{0..3}}.tar",),
        "2 of 4 files are missing, the first is {root}/good/train/2.tar",
    ),
    "no pair": (
        ("data.train={root}/unpaired",),
        "shard {root}/unpaired/train/0.tar has no sample with image and caption; members: png (2)",
    ),
    "truncated": (("data.train={root}/truncated",), "shard {root}/truncated/train/1.tar is truncated"),
    "large batch": (
        ("data.train={root}/good", "batch_size=16"),
        "batch_size = 16, but the data have only 8 samples",
    ),
    "no config file": (("{root}/nothing.toml", "data.train={root}/good"), "{root}/nothing.toml"),
    "bad config file": (("{root}/bad.toml", "data.train={root}/good"), "{root}/bad.toml"),
    "a bad image": (
        ("data.train={root}/broken", "data.max_bad=0", "data.workers=1"),
        " samples drawn so far are bad, more than data.max_bad = 0 allows: see ",
    ),
    "an empty caption": (
        ("data.train={root}/no_caption", "data.max_bad=0"),
        " samples drawn so far are bad, more than data.max_bad = 0 allows: see ",
    ),
    "all bad": (("data.train={root}/all_bad", "data.workers=1"), "32 samples in a row are bad, the last is "),
}


TRAININGS = {name: arguments for name, (arguments, _) in MISTAKES.items()}
TRAININGS["few bad"] = ("data.train={root}/one_broken",)


def make_data(root: Path) -> None:
    write_dataset(root / "good")
    # shards of one batch each are read one after the other, so that each batch contains one bad sample
    write_dataset(root / "broken", broken=(1, 5))
    write_dataset(root / "one_broken", broken=(1,))
    write_dataset(root / "no_caption", no_caption=(1, 5))
    write_dataset(root / "all_bad", broken=tuple(range(SAMPLES)))
    write_dataset(root / "truncated")
    shard = root / "truncated" / "train" / "1.tar"
    os.truncate(shard, shard.stat().st_size // 2)
    with DatasetWriter(root / "unpaired") as writer:
        for key in "ab":
            writer.write("train", Record(key=key, image=b"x", extension="png"))
        writer.finish({})
    (root / "bad.toml").write_text("steps = = 2\n")


@pytest.fixture(scope="module")
def place(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Write the datasets of all tests."""
    root = tmp_path_factory.mktemp("mistakes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(root / "cache"))
        make_data(root)
    return Place(root=root, forked=forked)


# runs in folders of earlier runs: name of the earlier run, and the settings
AFTERWARDS = {
    "other configuration": ("few bad", ("data.train={root}/one_broken", "optim.lr=0.5")),
    "mended": ("missing shards", ("data.train={root}/good",)),
}


@pytest.fixture(scope="module")
def ended(place: Place, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Ended]]:
    """Return a function that waits for a training by name; if several tests run, start all trainings now."""
    pool = ThreadPoolExecutor(2)
    started: dict[str, Future[Ended]] = {}

    def start(name: str) -> Future[Ended]:
        if name not in started:
            folder, arguments = AFTERWARDS[name] if name in AFTERWARDS else (name, TRAININGS[name])
            before = start(folder) if folder != name else None  # and so it is queued before this one

            def train() -> Ended:
                if before is not None:
                    before.result()
                return place.train("data.window=1", *arguments, run=folder)

            started[name] = pool.submit(train)
        return started[name]

    if len([item for item in request.session.items if item.path == request.path]) > 1:
        for name in (*TRAININGS, *AFTERWARDS):
            start(name)
    yield lambda name: start(name).result()
    pool.shutdown(cancel_futures=True)


def error_of(ended: Ended) -> str:
    """Return the only error line, which must be the last line of stderr."""
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr and ended.stdout == ""
    assert [line for line in lines if line.startswith("error")] == lines[-1:], ended.stderr
    return lines[-1].removeprefix("error: ")


@pytest.mark.parametrize("name", MISTAKES)
def test_user_error_prints_one_line(name: str, place: Place, ended: Callable[[str], Ended]) -> None:
    message = error_of(ended(name))
    assert MISTAKES[name][1].format(root=place.root) in message
    if "max_bad" in message:
        lines = (place.runs / name / "bad_samples.jsonl").read_text().splitlines()
        assert message.startswith(f"{len(lines)} of {4 + len(lines)} samples ")
        assert all(json.loads(line)["step"] == 1 and json.loads(line)["key"] in ("1", "5") for line in lines)
    elif name == "all bad":  # of the batch that could not be filled
        assert len((place.runs / name / "bad_samples.jsonl").read_text().splitlines()) == 32
        assert not (place.runs / name / "checkpoints").exists()  # no step was made
    elif name != "missing shards":  # its folder is reused by another run
        assert not (place.runs / name).exists()  # an empty folder would look like a run


def test_few_bad_samples_are_replaced_counted_and_listed(place: Place, ended: Callable[[str], Ended]) -> None:
    training, run = ended("few bad"), place.runs / "few bad"
    assert training.returncode == 0, training.stderr
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2]
    listed = [json.loads(line) for line in (run / "bad_samples.jsonl").read_text().splitlines()]
    assert metrics[-1]["bad_samples"] == len(listed) >= 1  # two batches contain every sample once
    for bad in listed:
        assert bad["key"] == "1" and bad["shard"].endswith("one_broken/train/0.tar")
        assert bad["cause"] == "not an image in a known format" and bad["step"] in (1, 2)
    assert "bad sample replaced: 1 in " in training.stderr
    share = 100 * len(listed) / (8 + len(listed))
    assert training.stderr.splitlines()[-2] == (
        f"{share:.3g}% of the {8 + len(listed)} samples drawn were bad "
        "(limit: data.max_bad = 5% of at least 1,000 samples)"
    )
    assert "\n8 samples; " in training.stderr


def test_run_folder_rejects_another_configuration(place: Place, ended: Callable[[str], Ended]) -> None:
    message = error_of(ended("other configuration"))
    assert "holds a run of another configuration (optim.lr" in message
    assert (place.runs / "few bad" / "checkpoints" / "step_00000002").is_dir()


def test_run_folder_is_usable_after_a_corrected_error(ended: Callable[[str], Ended]) -> None:
    training = ended("mended")
    assert training.returncode == 0, training.stderr


@pytest.mark.long
def test_run_folder_rejects_a_second_training(place: Place) -> None:
    settings = ("data.train={root}/good", "steps=1000000")
    first = place.start(*settings, run="shared")
    try:
        until = time.monotonic() + 60
        while not (place.runs / "shared" / "config.toml").is_file() and time.monotonic() < until:
            time.sleep(0.05)
        message = error_of(place.train(*settings, run="shared"))
        assert f"another training (process {first.pid} on " in message
        assert (
            f") is writing to {place.runs}/shared: `kill -TERM {first.pid}` saves and stops it; " in message
        )
        figures = place.runs / "shared" / "metrics.jsonl"
        while not (figures.is_file() and figures.stat().st_size) and time.monotonic() < until:
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        _, stderr = first.communicate(timeout=60)
    finally:
        first.kill()
        first.communicate()
    assert first.returncode == 128 + signal.SIGTERM and "stopped and saved at step" in stderr


def test_ctrl_c_before_the_first_step_prints_one_line(place: Place) -> None:
    with place.start("data.train={root}/good", "steps=1000000", run="early") as early:
        until = time.monotonic() + 60
        while not (place.runs / "early" / "config.toml").is_file() and time.monotonic() < until:
            time.sleep(0.002)
        early.send_signal(signal.SIGINT)
        _, stderr = early.communicate(timeout=60)
    assert early.returncode == 130
    assert stderr.splitlines()[-1] == "stopped; no step was made; the same command starts again"
    # if the signal arrives in a finalizer, Python prints the KeyboardInterrupt that it ignores; if it arrives while
    # a file is opened, tests, in which warnings are errors, print that the file is not closed
    ignored = r"Exception ignored in: .*\nTraceback .*\n(?: .*\n)*(?:KeyboardInterrupt|ResourceWarning).*\n"
    assert "Traceback" not in re.sub(ignored, "", stderr)
