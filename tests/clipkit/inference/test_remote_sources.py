"""Tests of encoding and classifying what training accepts: shards and Parquet files, in stores and from pipes."""

import io
import json
import os
import shlex
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import clipkit
from clipkit.__main__ import dispatch
from clipkit.formats.checkpoint import save_model
from clipkit.inference.inputs import Stream, read_caption, read_image
from tests.clipkit.samples.remote import servers
from tests.clipkit.samples.remote.servers import S3, Nginx

nginx = servers.nginx
s3 = servers.s3
impatient = servers.impatient
parquet = pytest.importorskip("pyarrow.parquet")
pyarrow = pytest.importorskip("pyarrow")

COUNT = 7


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def tar(seeds: range) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for seed in seeds:
            for extension, content in (("png", png(seed)), ("txt", f"image {seed}".encode())):
                info = tarfile.TarInfo(f"{seed:03d}.{extension}")
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def table(path: Path, seeds: range) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": png(seed), "path": None} for seed in seeds]
    parquet.write_table(pyarrow.table({"image": images, "text": [f"image {seed}" for seed in seeds]}), path)
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(clipkit.create("ViT-Ti-4-16", seed=0), tmp_path / "model")
    return tmp_path / "model"


def encode(source: str, out: Path, model: Path, *more: str) -> int:
    settings = [
        "--device",
        "cpu",
        "--batch-size",
        "2",
        "--rows-per-file",
        "3",
        "--dtype",
        "float32",
        "--quiet",
    ]
    return dispatch(["encode", source, "--model", str(model), "--out", str(out), *settings, *more])


def rows_of(out: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.concatenate([np.load(path) for path in sorted((out / "img_emb").glob("*.npy"))])


def column(out: Path, name: str) -> list[str]:
    tables = [parquet.read_table(path) for path in sorted((out / "metadata").glob("*.parquet"))]
    return [value for each in tables for value in each.column(name).to_pylist()]


def test_sources_of_training_give_the_same_embeddings(
    tmp_path: Path, nginx: Nginx, s3: S3, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    halves = (range(4), range(4, COUNT))
    for i, seeds in enumerate(halves):
        for folder in ("set/train", "set/test") if i == 0 else ("set/train",):
            nginx.put(f"{folder}/{i}.tar", tar(seeds))
            s3.put(f"{folder}/{i}.tar", tar(seeds))
        file = table(tmp_path / f"hub/data/train-{i:05d}-of-00002.parquet", seeds)
        nginx.put(f"hub/data/{file.name}", file.read_bytes())
    (tmp_path / "all.tar").write_bytes(tar(range(COUNT)))
    expected = None
    for number, source in enumerate(
        (
            str(tmp_path / "all.tar"),
            nginx.url("set/train"),
            nginx.url("set/train/{0..1}.tar"),
            "s3://pairs/set/train",
            f"pipe:cat {shlex.quote(str(tmp_path / 'all.tar'))}",
            str(tmp_path / "hub"),
            nginx.url("hub"),
        )
    ):
        out = tmp_path / f"out{number}"
        assert encode(source, out, model) == 0
        if expected is None:
            expected = rows_of(out)
        assert np.array_equal(rows_of(out), expected) and len(expected) == COUNT
        assert column(out, "caption") == [f"image {seed}" for seed in range(COUNT)]
        assert len(set(column(out, "source"))) == (1 if number in (0, 4) else 2)
        asked = sum(
            request.sent for request in nginx.requests() if request.name.endswith((".tar", ".parquet"))
        )
        capsys.readouterr()
        assert encode(source, out, model) == 0
        assert "nothing to do: 7 embeddings already complete" in capsys.readouterr().out
        again = sum(
            request.sent for request in nginx.requests() if request.name.endswith((".tar", ".parquet"))
        )
        assert again - asked < 4000  # sizes and versions, but no content
    assert encode("s3://pairs/set", tmp_path / "splits", model) == 0  # test and train
    assert len(rows_of(tmp_path / "splits")) == 4 + COUNT


def test_changed_and_broken_remote_shards(
    tmp_path: Path, nginx: Nginx, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(3):
        nginx.put(f"set/{i}.tar", tar(range(3 * i, 3 * i + 3)))
    source = nginx.url("set/{0..2}.tar")
    assert encode(source, tmp_path / "out", model) == 0
    before = rows_of(tmp_path / "out")
    nginx.put("set/1.tar", tar(range(30, 33)))
    os.utime(nginx.html / "set/1.tar", (0, 0))  # nginx's etag has the time in seconds
    capsys.readouterr()
    assert encode(source, tmp_path / "out", model) == 0
    assert "wrote 1 of 3 files; 1 file replaced because of changed sources" in capsys.readouterr().out
    after = rows_of(tmp_path / "out")
    assert np.array_equal(after[[0, 1, 2, 6, 7, 8]], before[[0, 1, 2, 6, 7, 8]])
    assert not np.array_equal(after[3:6], before[3:6])
    nginx.put("set/0.tar", b"no tar" * 1000)
    assert encode(source, tmp_path / "out", model) == 0
    [line] = (tmp_path / "out/failures.jsonl").read_text().splitlines()
    failure = json.loads(line)
    assert failure["source"] == nginx.url("set/0.tar") and "is not a tar file" in failure["cause"]
    assert len(rows_of(tmp_path / "out")) == 6


def test_remote_images_are_classified(
    tmp_path: Path, nginx: Nginx, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = nginx.put("0.tar", tar(range(3)))
    for gigabytes in ("100", "0"):
        arguments = ["classify", url, "--model", str(model), "--labels", "cat,dog", "--device", "cpu"]
        assert dispatch([*arguments, "--cache-gb", gigabytes]) == 0
        printed = capsys.readouterr().out
        assert all(f"{seed:03d}" in printed for seed in range(3))


def test_stream_reads_images_and_captions_of_a_store(nginx: Nginx) -> None:
    url = nginx.put("0.tar", tar(range(2)))
    items = list(Stream([url]))
    assert [(item.source, item.key) for item in items] == [(url, "000"), (url, "001")]
    assert [read_image(item) for item in items] == [png(0), png(1)]
    texts = Stream([url], kind="caption", cache_gb=0)
    assert [read_caption(item) for item in texts] == ["image 0", "image 1"]


def test_dataset_folder_without_counts_has_all_splits(tmp_path: Path) -> None:
    for split, seeds in (("val", range(2)), ("train", range(2, 5))):
        (tmp_path / split).mkdir()
        (tmp_path / split / "00000.tar").write_bytes(tar(seeds))
    assert [item.key for item in Stream([str(tmp_path)])] == ["002", "003", "004", "000", "001"]
