"""Tests of ``python -m data speed`` with real shards and worker processes."""

import io
import json
import multiprocessing
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from clipkit.cli import build_options, build_parser
from clipkit.config import DataConfig
from clipkit.errors import ConfigError, run_command
from clipkit.samples.traits import Decoding
from data.__main__ import main
from data.augment import Augmentation
from data.inspect.speed import make_loader
from data.options import COMMANDS, SpeedOptions
from data.shards.writer import DatasetWriter, Record

REPOSITORY = Path(__file__).parents[3]


def parse(words: list[str]) -> SpeedOptions:
    return build_options(SpeedOptions, vars(build_parser(COMMANDS, prog="data").parse_args(words)))


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Keep the indexes of temporary shards out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def shards(own_cache: object, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write forty samples in four shards; ten images are broken."""
    folder = tmp_path_factory.mktemp("speed") / "set"
    with DatasetWriter(folder, samples_per_shard=10) as writer:
        for number in range(40):
            file = io.BytesIO()
            pixels = np.random.default_rng(number).integers(0, 256, (24, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file, "jpeg")
            image = b"broken" if number % 4 == 0 else file.getvalue()
            writer.write("train", Record(key=f"{number}", image=image, extension="jpg", caption="a thing"))
        writer.finish({})
    return str(folder)


def test_several_numbers_of_workers_in_one_call(shards: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--image-size", "16", "--batch-size", "8", "--seconds", "0.2", "--quiet"]
    assert main(["speed", shards, *options, "--workers", "0,2,0", "--json"]) == 0
    output = capsys.readouterr()
    assert output.err == "" and output.out.count("\n") == 1
    told = json.loads(output.out)
    assert (told["image_size"], told["batch_size"]) == (16, 8)
    assert [one["workers"] for one in told["measured"]] == [0, 2]
    for one in told["measured"]:
        assert one["samples"] >= 8 and one["samples"] % 8 == 0
        assert one["samples_per_second"] == pytest.approx(one["samples"] / one["seconds"])
        assert one["bytes_per_second"] > 24 * 24 * one["samples_per_second"]
        assert 0.15 < one["bad"] < 0.6  # a quarter, more if replacements are bad too
        assert one["first_batch"] > 0
    assert multiprocessing.active_children() == []


def test_table(shards: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--image-size", "16", "--seconds", "0.1", "--workers", "0"]
    assert main(["speed", shards, *options]) == 0
    output = capsys.readouterr()
    about, heading, row = output.out.splitlines()
    assert heading.split() == ["workers", "samples/s", "MB/s", "first", "batch", "bad"]
    assert len(heading) == len(row) <= 80
    assert about.startswith("16 pixels, batches of 40, ")  # limited by the number of samples
    assert "measuring with 0 workers for 0.1 s" in output.err


def test_user_errors_print_one_line(shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in [
        ([shards, "--workers", "two"], "--workers: 'two' is not a whole number"),
        ([shards, "--workers", "1,,2"], "'' is not a whole number"),
        ([shards, "--workers", "9999"], "from 0 to 512"),
        ([shards, "--workers", "0", "2"], "no data at '2'"),
        (["--workers", "0", "no-such-folder"], "no data at 'no-such-folder'"),
        (["--workers", "0"], "required: SOURCE"),
        ([shards, "--batch-size", "0"], "--batch-size: '0' is not a whole number from 1 to 65,536"),
        ([shards, "--image-size", "-1"], "--image-size: '-1' is not a whole number from 1"),
        ([shards, "--seconds", "nan"], "--seconds: 'nan' is not a number above 0"),
        ([str(tmp_path)], "no tar, table or Parquet file of split"),
    ]:
        with pytest.raises(SystemExit) as stop:
            run_command(partial(main, ["speed", *arguments]))
        output = capsys.readouterr()
        assert (stop.value.code, output.out) == (1, "") and message in output.err
        assert output.err.count("\n") == 1


def test_ctrl_c_prints_one_line(shards: str) -> None:
    command = [sys.executable, "-m", "data", "speed", shards, "--image-size", "16", "--workers", "1"]
    command += ["--seconds", "600", "--batch-size", "8"]
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "measuring" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1].startswith("stopped")


@pytest.mark.parametrize(
    ("word", "changed"),
    [
        ("data.crop_scale=0.3", {"crop_scale": 0.3}),
        ("data.flip=0.5", {"flip": 0.5}),
        ("data.color_jitter=0.4", {"color_jitter": 0.4}),
        ("data.grayscale=1", {"grayscale": 1.0}),
        ("data.scaled_decode=true", {"scaled_decode": True}),
    ],
)
def test_augmentation_settings_reach_the_loader(shards: str, word: str, changed: dict[str, Any]) -> None:
    loader, _ = make_loader(parse(["speed", "--quiet", shards, word]))
    assert loader.augmentation == replace(Augmentation.of(DataConfig()), **changed)
    assert {field.name for field in fields(Augmentation)} >= changed.keys()


@pytest.mark.parametrize(
    ("words", "decoding"),
    [
        ([], Decoding()),
        (["data.background=white"], Decoding(background=(255, 255, 255))),
        (["data.upright=true", "data.background=#000000"], Decoding(background=(0, 0, 0), upright=True)),
        (["data.upright=auto"], Decoding()),
    ],
)
def test_background_and_orientation_reach_the_loader(
    shards: str, words: list[str], decoding: Decoding
) -> None:
    loader, _ = make_loader(parse(["speed", "--quiet", shards, *words]))
    assert loader.decoding == decoding


def test_options_may_stand_between_sources_and_settings(shards: str) -> None:
    for command in ("speed", "inspect"):
        parsed = parse(
            [command, "data.flip=0.5", "--quiet", shards, "--image-size", "16", "data.upright=true"]
        )
        assert parsed.sources == ("data.flip=0.5", shards, "data.upright=true")
        assert parsed.quiet and parsed.image_size == 16
    for arguments in (["inspect", shards, "--quite"], ["make", "glyphs", "out", "more"]):
        with pytest.raises(ConfigError, match=f"unrecognized arguments: {arguments[-1]}"):
            parse(arguments)


def test_settings_without_effect_are_rejected(shards: str) -> None:
    for word, message in [
        ("data.window=3", "data.window has no effect here; settings with an effect: data.crop_scale, "),
        ("data.crop_scal=1", "data.crop_scal is unknown: did you mean 'data.crop_scale'"),
        ("data.flip=2", "data.flip"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(message)):
            main(["speed", shards, word, "--quiet"])
