"""Tests that batches are identical for any location of the shards, any number of readers, and after a kill.

The stores are local servers; the loaders read through the shard cache or, without one, sample by sample.
"""

import hashlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clipkit.batch import Batch
from clipkit.errors import DataError
from clipkit.model.tokenizer import ClipTokenizer
from clipkit.samples.remote.cache import ShardCache
from data.loader import Loader
from data.order import Order
from data.shards.samples import Shards, find_shards
from data.shards.writer import DatasetWriter, Record
from tests.clipkit.samples.remote import servers
from tests.clipkit.samples.remote.servers import Nginx

ROOT = Path(__file__).parents[3]
SAMPLES, BATCH, STEPS = 50, 8, 14  # six batches per epoch: into the third epoch

nginx, s3, impatient = servers.nginx, servers.s3, servers.impatient


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write fifty samples in eight shards."""
    made = tmp_path_factory.mktemp("made") / "set"
    random = np.random.default_rng(0)
    with DatasetWriter(made, samples_per_shard=7) as writer:
        for number in range(SAMPLES):
            file = io.BytesIO()
            pixels = random.integers(0, 256, (24 + number % 9, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file, "jpeg")
            caption = "word " * (number % 5) + str(number)
            writer.write(
                "train", Record(key=f"{number:04d}", image=file.getvalue(), extension="jpg", caption=caption)
            )
        writer.finish({})
    return made / "train"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "cache"))


def signs(batches: Iterator[Batch] | Sequence[Batch]) -> list[list[str]]:
    """Return a hash of each sample's number, pixels and tokens, by batch."""
    rows = []
    for batch in batches:
        assert batch.bad == ()
        content = zip(batch.ids.tolist(), batch.images, batch.tokens, strict=True)
        rows.append(
            [
                hashlib.sha256(
                    repr(
                        (number, image.numpy().tobytes(), np.trim_zeros(tokens.numpy(), "b").tobytes())
                    ).encode()
                ).hexdigest()[:16]
                for number, image, tokens in content
            ]
        )
    return rows


def loader(
    source: str, cache: ShardCache | None, *, workers: int = 0, rank: int = 0, world: int = 1
) -> Loader:
    shards = Shards.of(find_shards(source), cache=cache)
    order = Order(shards.counts, seed=4, batch_size=BATCH, window=3)
    return Loader(
        shards=shards,
        order=order,
        image_size=16,
        tokenize=ClipTokenizer(context_length=16),
        rank=rank,
        world_size=world,
        num_workers=workers,
    )


def read(source: str, cache: ShardCache | None, *, workers: int, world: int) -> list[list[str]]:
    """Return the concatenated batches of all ranks."""
    ranks = [
        signs(loader(source, cache, workers=workers, rank=rank, world=world).batches(0, STEPS))
        for rank in range(world)
    ]
    return [[one for part in parts for one in part] for parts in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        return read(str(folder), None, workers=0, world=1)


@pytest.mark.parametrize(("world", "workers"), [(2, 3)])
def test_batches_from_disk_with_several_ranks(
    world: int, workers: int, folder: Path, expected: list[list[str]]
) -> None:
    assert read(str(folder), None, workers=workers, world=world) == expected


@pytest.mark.parametrize(("cached", "world", "workers"), [(True, 1, 0), (True, 2, 2), (False, 3, 1)])
def test_batches_from_a_web_server(
    cached: bool,
    world: int,
    workers: int,
    folder: Path,
    expected: list[list[str]],
    nginx: servers.Nginx,
    tmp_path: Path,
) -> None:
    for shard in folder.iterdir():
        nginx.put(f"pairs/{shard.name}", shard.read_bytes())
    cache = ShardCache(tmp_path / "shards", 10**9) if cached else None
    assert read(nginx.url("pairs"), cache, workers=workers, world=world) == expected
    if cached:
        sizes = {f"pairs/{shard.name}": shard.stat().st_size for shard in folder.glob("*.tar")}
        whole = [request.name for request in nginx.requests() if request.sent == sizes.get(request.name)]
        assert sorted(whole) == sorted(sizes)  # one download each, for all readers


@pytest.mark.parametrize(("cached", "world", "workers"), [(True, 2, 2), (False, 1, 0)])
def test_batches_from_s3(
    cached: bool,
    world: int,
    workers: int,
    folder: Path,
    expected: list[list[str]],
    s3: servers.S3,
    tmp_path: Path,
) -> None:
    for shard in folder.iterdir():
        s3.put(f"set/train/{shard.name}", shard.read_bytes())
    cache = ShardCache(tmp_path / "shards", 10**9) if cached else None
    assert read("s3://pairs/set", cache, workers=workers, world=world) == expected


def test_batches_from_a_command(folder: Path, expected: list[list[str]], tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "shards", 10**9)
    assert read(f"pipe:cat {folder}/{{0..7}}.tar", cache, workers=0, world=1) == expected


def test_batches_with_a_cache_smaller_than_the_data(
    folder: Path, expected: list[list[str]], nginx: servers.Nginx, tmp_path: Path
) -> None:
    for shard in folder.iterdir():
        nginx.put(f"pairs/{shard.name}", shard.read_bytes())
    largest = max(shard.stat().st_size for shard in folder.iterdir())
    cache = ShardCache(tmp_path / "shards", 3 * largest)
    assert read(nginx.url("pairs"), cache, workers=2, world=1) == expected


def test_batches_from_a_server_that_is_killed_repeatedly(
    folder: Path, expected: list[list[str]], nginx: servers.Nginx, tmp_path: Path
) -> None:
    for shard in folder.iterdir():
        nginx.put(f"pairs/{shard.name}", shard.read_bytes())
    started = loader(nginx.url("pairs"), ShardCache(tmp_path / "shards", 10**9), workers=2)
    batches = []
    for number, batch in enumerate(started.batches(0, STEPS)):
        batches.append(batch)
        if number in (0, 4, 9):
            nginx.close()  # after the last restart
            nginx.restart_after(0.3)
    assert signs(batches) == expected


PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
from tests.clipkit.samples.remote import test_same_batches as own
from clipkit.samples.remote.cache import ShardCache
from pathlib import Path
source, folder, start = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
for batch in own.loader(source, ShardCache(folder / "shards", 10**9), workers=2).batches(start, own.STEPS):
    with (folder / "seen").open("a") as file:
        file.write(" ".join(own.signs([batch])[0]) + "\\n")
    time.sleep(0.05)
"""


@pytest.mark.long
def test_batches_after_kills_of_the_loader(
    folder: Path, expected: list[list[str]], nginx: servers.Nginx, tmp_path: Path
) -> None:
    for shard in folder.iterdir():
        nginx.put(f"pairs/{shard.name}", shard.read_bytes())
    seen = tmp_path / "seen"
    seen.touch()
    code = PROGRAM.format(root=str(ROOT))
    for more in (2, 5, STEPS):
        start = len(seen.read_text().splitlines())
        command = [sys.executable, "-c", code, nginx.url("pairs"), str(tmp_path), str(start)]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until:
            if len(seen.read_text().splitlines()) >= min(start + more, STEPS) and more != STEPS:
                os.killpg(process.pid, signal.SIGKILL)
                break
            time.sleep(0.01)
        assert process.wait(timeout=60) == (0 if more == STEPS else -signal.SIGKILL)
    assert [line.split() for line in seen.read_text().splitlines()] == expected


def test_table_of_paths_in_a_store_is_refused(nginx: Nginx) -> None:
    url = nginx.put("pairs/table.csv", b"image,caption\n1.jpg,a cat\n")
    with pytest.raises(DataError, match="is a table in a store: download it, and the images that it lists"):
        find_shards(url)
