"""Tests of sizes that grow with the steps: each batch has the sizes of its step and the same crops."""

import io
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from clipkit.batch import Batch
from clipkit.model.tokenizer import END_OF_TEXT, ClipTokenizer, tokenize
from data.augment import Augmentation
from data.loader import Loader, Stage, stage_at
from data.order import Order
from data.shards.samples import Shards, find_shards
from data.shards.writer import DatasetWriter, Record

BATCH, STEPS, FULL = 4, 7, 64
STAGES = (
    Stage(until_step=2, image_size=16, context_length=5),
    Stage(until_step=5, image_size=32, context_length=8),
)
SIZES = [16, 16, 32, 32, 32, FULL, FULL]
LONGEST = [5, 5, 8, 8, 8, 20, 20]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def shards(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """Write smooth images with captions of 1 to 14 words."""
    folder: Path = tmp_path_factory.mktemp("smooth") / "set"
    with DatasetWriter(folder, samples_per_shard=7) as writer:
        for number in range(20):
            coarse = np.random.default_rng(number).integers(0, 256, (4, 5, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(coarse).resize((120, 96), Image.Resampling.BICUBIC).save(file, "png")
            caption = "word " * (number % 14) + "end"
            writer.write(
                "train", Record(key=f"{number:02d}", image=file.getvalue(), extension="png", caption=caption)
            )
        writer.finish({})
    return Shards.of(find_shards(str(folder)))


def make_loader(shards: Shards, **more: Any) -> Loader:
    return Loader(
        shards=shards,
        order=Order(shards.counts, seed=8, batch_size=BATCH, window=2),
        image_size=FULL,
        tokenize=ClipTokenizer(context_length=20),
        augmentation=Augmentation(crop_scale=0.4, flip=0.5),
        **more,
    )


def same(one: Batch, other: Batch) -> bool:
    tensors = zip((*one.tensors(), one.ids), (*other.tensors(), other.ids), strict=True)
    return all(torch.equal(a, b) for a, b in tensors) and one.lengths == other.lengths


@pytest.mark.parametrize("workers", [0, 3])
def test_batches_have_the_sizes_of_their_step(workers: int, shards: Shards) -> None:
    staged = make_loader(shards, stages=STAGES, num_workers=workers)
    full = list(make_loader(shards).batches(0, STEPS))
    for start in (0, 4):  # from the beginning, and resumed just before a boundary
        for step, batch in enumerate(staged.batches(start, STEPS), start=start):
            assert batch.images.shape == (BATCH, 3, SIZES[step], SIZES[step])
            assert torch.equal(batch.ids, full[step].ids)
            assert torch.equal(batch.identities, full[step].identities)  # of the untruncated captions
            captions = [shards.read(number).fields.get("txt", "") for number in batch.ids.tolist()]
            assert torch.equal(batch.tokens, tokenize(captions, LONGEST[step], trim=True))
            assert max(batch.lengths) <= LONGEST[step]
            ends = batch.tokens[torch.arange(BATCH), torch.tensor(batch.lengths) - 1]
            assert ends.tolist() == [END_OF_TEXT] * BATCH
            smaller = F.interpolate(full[step].images.float(), batch.images.shape[2:], mode="area")
            assert (smaller - batch.images.float()).abs().mean() < 4  # the same crops and flips
            assert same(batch, make_loader(shards, stages=STAGES).batch(step))


def test_captions_cut_at_the_full_length_are_counted(shards: Shards) -> None:
    """Not those cut at the context length of a stage, which the user chose for it."""
    short = ClipTokenizer(context_length=9)
    loader, staged = (
        replace(make_loader(shards), tokenize=short, stages=stages)
        for stages in ((), (Stage(until_step=3, image_size=16, context_length=5),))
    )
    for step in range(STEPS):
        batch = loader.batch(step)
        words = [len((shards.read(number).fields.get("txt", "")).split()) for number in batch.ids.tolist()]
        assert batch.cut_captions == sum(count > 7 for count in words)
        assert staged.batch(step).cut_captions == (0 if step < 3 else batch.cut_captions)


def test_batches_after_all_stages_equal_those_without(shards: Shards) -> None:
    staged, plain = make_loader(shards, stages=STAGES), make_loader(shards)
    assert all(same(staged.batch(step), plain.batch(step)) for step in (5, 6))
    assert not same(staged.batch(4), plain.batch(4))


def test_stages_can_be_pickled_and_found_by_step() -> None:
    assert pickle.loads(pickle.dumps(STAGES)) == STAGES
    assert [stage_at(STAGES, step) for step in (0, 1, 2, 4, 5)] == [
        STAGES[0], STAGES[0], STAGES[1], STAGES[1], None,
    ]  # fmt: skip
    assert stage_at((), 0) is None
