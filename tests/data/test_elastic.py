"""Tests of batches with other numbers of ranks and workers, from shards of very different sizes."""

import hashlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import webdataset
from PIL import Image

from clipkit.batch import Batch
from clipkit.model.tokenizer import ClipTokenizer
from clipkit.samples.remote.store import ShardFile
from data.captions import CaptionRule
from data.loader import Loader
from data.order import Order
from data.selection import Selection
from data.shards.manifest import make_manifest
from data.shards.samples import Shards

COUNTS, BATCH = (1, 7, 400), 24
STEPS = {"plain": 19, "mixture": 8, "groups": 19}  # an epoch has 17
Setup = tuple[int, int]  # ranks, and workers per rank
ALONE, FEW, MANY = (1, 0), (2, 1), (4, 2)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the indexes of temporary shards out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def image_file(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (12 + number % 5, 14, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[ShardFile]:
    """Write three shards of 1, 7 and 400 samples; some images are broken."""
    folder = tmp_path_factory.mktemp("uneven")
    number = 0
    for shard, count in enumerate(COUNTS):
        with webdataset.TarWriter(str(folder / f"{shard}.tar"), encoder=False) as tar:
            for _ in range(count):
                image = image_file(number)[: 30 if number % 97 == 5 else None]
                caption = f"number {number}" + " word" * (number % 7)
                tar.write({"__key__": f"{number:04d}", "png": image, "txt": caption.encode()})
                number += 1
    return [ShardFile.at(folder / f"{shard}.tar") for shard in range(len(COUNTS))]


def make_loader(files: list[ShardFile], kind: str, **more: Any) -> Loader:
    mixture = kind == "mixture"
    captions = CaptionRule(choice="random", templates=("{}", "an image of {}", "{}!"))
    selection = Selection(captions=captions)
    shards = Shards(make_manifest([[file] for file in files], selection), selection)
    order = Order(
        shards.counts,
        seed=5,
        batch_size=BATCH,
        window=2,
        groups=6 if kind == "groups" else 1,
        sources=(1, 1, 1),
        weights=(0.02, 0.1, 1) if mixture else (),
    )
    tokenizer = ClipTokenizer(context_length=16)
    return Loader(shards=shards, order=order, image_size=8, tokenize=tokenizer, **more)


def signs(batch: Batch) -> list[str]:
    """Return a hash of each sample's number, pixels and tokens without padding."""
    content = (
        (number, image.numpy().tobytes(), np.trim_zeros(tokens.numpy(), "b").tobytes())
        for number, image, tokens in zip(batch.ids.tolist(), batch.images, batch.tokens, strict=True)
    )
    return [hashlib.sha256(repr(one).encode()).hexdigest()[:16] for one in content]


Seen = list[tuple[list[str], list[str]]]  # for each step: the samples, and the keys of bad samples


def global_batches(files: list[ShardFile], kind: str, setup: Setup, start: int, stop: int) -> Seen:
    """Return the samples of all ranks, in the order of ranks."""
    world, workers = setup
    of_ranks = [
        list(make_loader(files, kind, rank=rank, world_size=world, num_workers=workers).batches(start, stop))
        for rank in range(world)
    ]
    for rank, batches in enumerate(of_ranks):  # parts of ranks differ by at most one sample
        part = (rank + 1) * BATCH // world - rank * BATCH // world
        assert BATCH // world <= part <= -(-BATCH // world)
        assert [len(batch.ids) for batch in batches] == [part] * (stop - start)
        assert all(len(batch.images) == len(batch.tokens) == part for batch in batches)
    return [
        ([sign for part in parts for sign in signs(part)], [bad.key for part in parts for bad in part.bad])
        for parts in zip(*of_ranks, strict=True)
    ]


@pytest.fixture(scope="module")
def expected(files: list[ShardFile]) -> dict[str, Seen]:
    """Return the samples of a single process."""
    return {kind: global_batches(files, kind, ALONE, 0, steps) for kind, steps in STEPS.items()}


def test_each_sample_is_drawn_once_per_epoch(files: list[ShardFile], expected: dict[str, Seen]) -> None:
    loader = make_loader(files, "plain")
    ids = np.concatenate([loader.order.batch(step).ids for step in range(17)])
    assert len(np.unique(ids)) == len(ids) == 408 == sum(COUNTS)
    assert len({sign for row, _ in expected["plain"][:17] for sign in row}) == 408
    bad = {key for _, keys in expected["plain"][:17] for key in keys}
    assert bad == {f"{number:04d}" for number in range(5, 408, 97)}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("setup", [FEW, MANY], ids=["2x1", "4x2"])
def test_batches_do_not_depend_on_ranks_and_workers(
    setup: Setup, kind: str, files: list[ShardFile], expected: dict[str, Seen]
) -> None:
    assert global_batches(files, kind, setup, 0, STEPS[kind]) == expected[kind]


@pytest.mark.parametrize(
    ("kind", "stop", "setup"),
    [
        ("plain", 1, FEW),
        ("plain", 16, (3, 0)),
        ("plain", 17, (6, 0)),
        ("plain", 18, (5, 1)),
        ("groups", 16, (4, 1)),
        ("groups", 17, (24, 0)),
        ("mixture", 3, (3, 1)),
        ("mixture", 5, (7, 0)),
        ("mixture", 7, (24, 0)),
    ],
)
def test_run_continues_with_other_ranks_and_workers(
    kind: str, stop: int, setup: Setup, files: list[ShardFile], expected: dict[str, Seen]
) -> None:
    """Stop after any number of steps, also at the end of an epoch, and continue with other ranks and workers."""
    until = min(stop + 3, STEPS[kind])
    assert global_batches(files, kind, setup, stop, until) == expected[kind][stop:until]


@pytest.mark.parametrize("kind", STEPS)
def test_single_batches_of_any_step_are_the_same(
    kind: str, files: list[ShardFile], expected: dict[str, Seen]
) -> None:
    loaders = [make_loader(files, kind, rank=rank, world_size=4) for rank in range(4)]
    for step in range(STEPS[kind] - 1, -1, -3):
        rank = step % 4
        part = BATCH // 4
        assert signs(loaders[rank].batch(step)) == expected[kind][step][0][rank * part : (rank + 1) * part]


def test_mixture_repeats_small_sources(files: list[ShardFile]) -> None:
    order = make_loader(files, "mixture").order
    ids = np.concatenate([order.batch(step).ids for step in range(100)])
    taken = np.bincount(np.searchsorted(np.cumsum(COUNTS), ids, side="right"))
    assert np.abs(taken - np.array([0.02, 0.1, 1]) / 1.12 * len(ids)).max() <= 1
    assert set(range(8)) <= set(ids.tolist())
