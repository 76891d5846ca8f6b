"""Tests of ``clipkit caption``: files equal the API's captions, resume after kill -9, one-line errors."""

import csv
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image

import clipkit
from clipkit.__main__ import dispatch
from clipkit.errors import ClipkitError, ConfigError
from clipkit.formats.checkpoint import save_model
from clipkit.inference import caption as captions
from clipkit.model.architectures import Decoder
from clipkit.model.clip import CLIP
from tests.forked import Forked

Run = Callable[..., int]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(23):
        Image.effect_noise((40, 30), 20 + 9 * number).convert("RGB").save(folder / f"{number:02}.png")
    (folder / "05 broken.png").write_bytes(b"no image")
    return folder


@pytest.fixture
def checkpoint(tiny: CLIP, tmp_path: Path) -> Path:
    tiny.set_decoder(Decoder(width=64, layers=1, heads=4, context_length=8), seed=1)
    assert tiny.text_decoder is not None
    tiny.text_decoder.text_projection.data *= 8  # makes captions depend on the image
    with torch.no_grad():
        save_model(tiny, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def run(checkpoint: Path, photos: Path) -> Run:
    def with_options(*options: str | Path) -> int:
        return dispatch(
            ["caption", str(photos), "--model", str(checkpoint), "--batch-size", "2", *map(str, options)]
        )

    return with_options


def test_files_equal_the_captions_of_the_api(
    run: Run, checkpoint: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [path for path in sorted(photos.iterdir()) if "broken" not in path.name]
    for options, settings in (
        ((), {}),
        (("--beams", "3"), {"beams": 3}),
        (("--prefix", "a"), {"prefix": "a"}),
    ):
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        assert run("--out", tmp_path / "out.jsonl", *options) == 0
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        wanted = clipkit.caption(good, clipkit.load(checkpoint), batch_size=2, **settings)
        assert [line["caption"] for line in lines] == wanted and len(set(wanted)) > 3
        assert [Path(line["image"]).name for line in lines] == [path.name for path in good]
    assert "1 of 24 images failed" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"out\.jsonl is complete already: name another file, or remove it"):
        run("--out", tmp_path / "out.jsonl", "--beams", "2")
    assert run("--out", tmp_path / "out.csv", *options) == 0
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        assert [row["caption"].removeprefix("'") for row in csv.DictReader(file)] == wanted
    capsys.readouterr()
    assert run(*options) == 0
    said = capsys.readouterr()
    shown = said.out.splitlines()
    assert max(map(len, shown)) <= 80 and sum(line.startswith("  ") for line in shown) >= len(good)
    assert "failed: " in said.err and "05 broken.png" in said.err
    broken = ["caption", str(photos / "05 broken.png"), "--model", str(checkpoint)]
    assert dispatch(broken) == 1 and "1 of 1 image failed" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_command_resumes_to_the_same_file(
    run: Run, checkpoint: Path, photos: Path, tmp_path: Path, forked: Forked
) -> None:
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    partial = tmp_path / ".killed.jsonl.partial"
    options = ["--top-p", "0.9", "--seed", "5"]
    assert run("--out", whole, *options) == 0
    command = ["caption", str(photos), "--model", str(checkpoint), "--batch-size", "2", "--out", str(killed)]
    folder = tmp_path / "process"
    folder.mkdir()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(forked.run, "clipkit/__main__.py", [*command, *options], {}, folder=folder)
        while not (partial.exists() and partial.read_bytes().count(b"\n") > 8):
            assert not running.done(), running.result().stderr
            time.sleep(0.001)
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    assert running.result().returncode == -signal.SIGKILL and partial.exists() and not killed.exists()
    with partial.open("ab") as file:
        file.write(b'{"image": "cut')
    assert run("--out", killed, *options) == 0
    assert killed.read_bytes() == whole.read_bytes() and not partial.exists()


def test_partial_file_of_other_settings_is_not_continued(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, convert = tmp_path / "out.jsonl", captions._convert
    monkeypatch.setattr(captions, "_convert", lambda *_: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
    with pytest.raises(ClipkitError, match=r"cannot write .*out.jsonl: No space left on device"):
        run("--out", out, "--length", "3")
    assert (tmp_path / ".out.jsonl.partial").exists()
    monkeypatch.setattr(captions, "_convert", convert)
    assert run("--out", out) == 0
    assert "has other settings or images: starting again" in capsys.readouterr().err
    assert run("--out", tmp_path / "again.jsonl") == 0
    assert out.read_bytes() == (tmp_path / "again.jsonl").read_bytes()


def test_invalid_options_raise_one_line_errors(run: Run, photos: Path, tmp_path: Path, tiny: CLIP) -> None:
    for options, said in (
        (("--out", tmp_path / "a.txt"), r"must be a file name ending in \.csv or \.jsonl"),
        (("--out", tmp_path / "none" / "a.csv"), "No such file or directory"),
        (("--top-p", "0.5", "--beams", "2"), "cannot be combined with beams"),
        (("--prefix", "one two three four five six seven eight"), "the prefix has 8 tokens"),
        (("--prefix", "one " * 40), "the prefix has 40 tokens"),
        (("--prefix", "a <end_of_text> dog"), "contains the start or the end of a text"),
        (("--prefix", "a <start_of_text>"), "contains the start or the end of a text"),
        (("--seed", "1"), "--seed has no effect without --top-p"),
        (("--beams", "0"), "is not a whole number from 1"),
    ):
        with pytest.raises(ClipkitError, match=said):
            run(*options)
    tiny.set_decoder(None)
    save_model(tiny, tmp_path / "plain")
    with pytest.raises(ClipkitError, match=r"was trained without caption\.weight"):
        dispatch(["caption", str(photos), "--model", str(tmp_path / "plain")])
