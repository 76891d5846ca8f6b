"""Tests with a dataset in which a tenth of the samples is bad in every known way: loader and ``train.py``."""

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from clipkit.batch import BadSample, Batch
from clipkit.model.tokenizer import ClipTokenizer
from data.captions import CaptionRule
from data.loader import Loader
from data.order import Order
from data.selection import Selection
from data.shards.manifest import make_manifest
from data.shards.samples import Shards, find_shards
from tests.clipkit.hostile_images import HOSTILE, PIXELS, made
from tests.data.hostile_tars import tar_of

ROOT = Path(__file__).parents[2]
BATCH = 33
Member = tuple[bytes | str, bytes]


def jpeg(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (18, 18 + number % 7, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "jpeg")
    return file.getvalue()


@cache  # not when the tests are collected: it takes a second
def bad_samples() -> dict[str, tuple[list[Member], str]]:
    """Return members and cause of samples that are counted but cannot be used, by key."""
    samples: dict[str, tuple[list[Member], str]] = {}
    for number, (name, (_, cause)) in enumerate(HOSTILE.items()):
        if cause in (None, PIXELS) or len(data := made(name)) > 2 << 20:
            continue
        key = f"p{number}"
        samples[key] = [(f"{key}.jpg", data), (f"{key}.txt", b"a hostile image")], str(cause)
    captions = {"empty": b"", "blank": b" \n\t", "long": b"x" * 150_000, "huge": b"x" * (2 << 20)}
    causes = {"long": "caption of 150000 characters", "huge": "a member of 2097152 bytes is over the limit"}
    captions["latin"], causes["latin"] = b"caf\xe9 \xff\xfe", "caption is not UTF-8"
    for key, caption in captions.items():
        samples[key] = [(f"{key}.jpg", jpeg(1)), (f"{key}.txt", caption)], causes.get(key, "empty caption")
    for key, meta, cause in (
        ("j1", b"{", "json does not parse"), ("j2", b"[" * 90_000, "json does not parse"),
        ("j3", b"[1]", "empty caption"), ("j4", b'{"caption": 7}', "empty caption"),
        ("j5", b'{"caption": " "}', "empty caption"), ("j6", b"", "json does not parse"),
        ("j7", b"[" * (5 << 20), "over the limit"),
        ("j8", b'{"caption": "\\ud800 half a character"}', "caption is not UTF-8"),
        ("j9", b'{"caption": "caf\xe9"}', "caption is not UTF-8"),
    ):  # fmt: skip
        samples[key] = [(f"{key}.jpg", jpeg(2)), (f"{key}.json", meta)], cause
    return samples


def odd_samples() -> list[list[Member]]:
    """Return unusual but valid samples."""
    return [
        [("UPPER.JPG", jpeg(3)), ("UPPER.TXT", b"capitals")],
        [("folder.d/dots.jpeg", jpeg(4)), ("folder.d/dots.txt", b"dots in a folder")],
        [("broken.jpg", jpeg(5)), ("broken.txt", b"a text"), ("broken.json", b"{ broken")],
        [(b"\xff\xfe.jpg", jpeg(6)), (b"\xff\xfe.txt", b"a name that is no UTF-8")],
        [("png.jpg", made("alpha that hides everything")), ("png.txt", b"a png that is called jpg")],
        [("pair.json", b'{"caption": "\\ud83d\\ude00 a pair"}'), ("pair.jpg", jpeg(7))],
        [("new\nline.jpg", jpeg(8)), ("new\nline.txt", b"a name of two lines")],
        [("more.jpg", jpeg(9)), ("more.npy", b"12"), ("more.txt", b"more"), ("more.seg.png", b"no")],
    ]


def left_out() -> list[list[Member]]:
    """Return samples without image or caption."""
    return [
        [("alone.jpg", jpeg(1))], [("text.txt", b"text")], [("x.jpg.bak", jpeg(1)), ("x.txt", b"text")],
        [("a.b.jpg", jpeg(1)), ("a.b.txt", b"dots in a name")], [("empty.json", b"{}")], [(".hidden.jpg", jpeg(1))],
    ]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the indexes of temporary shards out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def corpus(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write seven shards in which one sample in ten is bad."""
    samples: list[list[Member]] = (
        [members for members, _ in bad_samples().values()] + odd_samples() + left_out()
    )
    samples += [
        [(f"{number:04d}.jpg", jpeg(number)), (f"{number:04d}.txt", b"good %d" % number)]
        for number in range(9 * len(bad_samples()) - len(odd_samples()))
    ]
    order = np.random.default_rng(0).permutation(len(samples)).tolist()
    folder = tmp_path_factory.mktemp("corpus")
    for shard in range(7):
        members = [member for number in order[shard::7] for member in samples[number]]
        (folder / f"{shard}.tar").write_bytes(tar_of(members))
    return folder


def start_training(data: Path, run: Path, *settings: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable, "train.py", f"data.train={data}", f"out={run}", "model.name=ViT-Ti-4-16", "eval.data=[]",
        f"batch_size={BATCH}", "log.tensorboard=false", "data.last=wrap", "checkpoint.every_steps=0", *settings,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def make_loader(corpus: Path, **more: Any) -> Loader:
    selection = Selection(captions=CaptionRule())
    shards = Shards(make_manifest([find_shards(str(corpus))], selection), selection)
    order = Order(shards.counts, seed=0, batch_size=BATCH, wrap=True)
    return Loader(
        shards=shards, order=order, image_size=16, tokenize=ClipTokenizer(context_length=16), **more
    )


def steps_of(loader: Loader) -> int:
    return -(-len(loader.shards) // BATCH)


def check_bad(found: Sequence[BadSample]) -> None:
    """Check that exactly the bad samples are reported, with shard and cause."""
    assert {bad.key for bad in found} == set(bad_samples())
    assert all(
        re.search(bad_samples()[bad.key][1], bad.cause) and bad.cause.isprintable() for bad in found
    ), found
    for bad in found:
        assert f"{bad.key}.jpg\0".encode() in Path(bad.shard).read_bytes()


def bad_of(batches: Sequence[Batch]) -> list[BadSample]:
    return [bad for batch in batches for bad in batch.bad]


@pytest.mark.long
def test_loader_and_training_replace_and_list_bad_samples(corpus: Path, tmp_path: Path) -> None:
    loader = make_loader(corpus)
    steps = steps_of(loader)
    with start_training(
        corpus, tmp_path / "run", f"steps={steps}", "data.workers=2", "data.max_bad=1"
    ) as training:
        try:
            alone = list(loader.batches(0, steps))
            with_workers = list(make_loader(corpus, num_workers=2).batches(0, steps))
            _, error = training.communicate(timeout=150)
        finally:
            training.kill()
    assert len(loader.shards) == 10 * len(bad_samples())
    dropped = loader.shards.manifest.dropped
    assert dropped == {"without image": 4, "without caption": 1}
    for batches in (alone, with_workers):
        assert all(
            batch.images.shape == (BATCH, 3, 16, 16) and len(batch.tokens) == BATCH for batch in batches
        )
    check_bad(bad_of(alone))
    for one, other in zip(alone, with_workers, strict=True):
        assert one.bad == other.bad
        assert (one.images == other.images).all() and one.tokens.tolist() == other.tokens.tolist()
    assert training.returncode == 0, error[-2000:]
    assert "Traceback" not in error and "samples, left out: 4 without image, 1 without caption; " in " ".join(
        error.split()
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "bad_samples.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": step, **asdict(bad)} for step, batch in enumerate(alone, start=1) for bad in batch.bad
    ]


@pytest.mark.long
def test_thousand_shards_without_pairs_fail_quickly(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(1000):
        members: list[Member] = [
            (f"{number}.jpg", b"x"),
            (f"{number}.capt\x1bion", b"x"),
            (f"{number}.vtt", b"x"),
        ]
        (tmp_path / "data" / f"{number:05d}.tar").write_bytes(tar_of(members))
    began = time.perf_counter()
    with pytest.raises(Exception, match="no sample with image and caption") as caught:
        make_loader(tmp_path / "data")
    assert time.perf_counter() - began < 30
    with start_training(tmp_path / "data", tmp_path / "run") as training:
        try:
            out, error = training.communicate(timeout=60)
        finally:
            training.kill()
    line = error.splitlines()[-1]
    assert training.returncode == 1 and out == "" and "Traceback" not in error
    assert line == f"error: {caught.value}" and "capt\\x1bion" in line and "vtt (" in line


def test_fewer_samples_than_loader_processes(own_cache: None, tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(tar_of([("a.jpg", jpeg(1)), ("a.txt", b"one")]))
    (tmp_path / "1.tar").write_bytes(
        tar_of([("b.jpg", jpeg(2)), ("b.txt", b""), ("c.jpg", b"no"), ("c.txt", b"x")])
    )
    selection = Selection()
    shards = Shards(make_manifest([find_shards(str(tmp_path))], selection), selection)
    order = Order(shards.counts, seed=0, batch_size=3)
    seen: list[int] = []
    for rank in range(3):
        loader = Loader(
            shards=shards, order=order, image_size=8, tokenize=ClipTokenizer(context_length=8), rank=rank,
            world_size=3, num_workers=2 if rank == 1 else 0,
        )  # fmt: skip
        batches = list(loader.batches(0, 4))
        assert [len(batch.images) for batch in batches] == [1] * 4
        seen += [number for batch in batches for number in batch.ids.tolist()]
    assert sorted(seen) == [0] * 4 + [1] * 4 + [2] * 4
