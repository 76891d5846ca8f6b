"""Tests of the loader: batches depend on (seed, step, rank, world_size), not on workers or the first step."""

import hashlib
import io
import multiprocessing
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

from clipkit.batch import BadSample, Batch
from clipkit.errors import ConfigError, DataError
from clipkit.model.tokenizer import END_OF_TEXT, ClipTokenizer, tokenize
from clipkit.samples.remote.cache import ShardCache
from clipkit.samples.traits import Decoding
from data.augment import Augmentation
from data.captions import CaptionRule
from data.loader import Loader, caption_hash, ids_and_identities, token_lengths
from data.order import Order
from data.shards.samples import Shards, find_shards
from data.shards.writer import DatasetWriter, Record
from tests.clipkit.deep_images import color_png

CPU = torch.device("cpu")
SAMPLES, BATCH = 40, 8  # five batches per epoch
MakeLoader = Callable[..., Loader]


def encoded(seed: int) -> bytes:
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (20 + seed % 9, 18 + seed % 13, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, ("png", "jpeg")[seed % 2])
    return file.getvalue()


def make_shards(folder: Path, broken: Sequence[int] = (), no_caption: Sequence[int] = ()) -> Shards:
    with DatasetWriter(folder, samples_per_shard=7) as writer:
        for number in range(SAMPLES):
            caption = " \n" if number in no_caption else "word " * (number % 6) + f"number {number}"
            image = encoded(number)[:60] if number in broken else encoded(number)
            extension = ("png", "jpg")[number % 2]
            writer.write(
                "train", Record(key=f"{number:04d}", image=image, extension=extension, caption=caption)
            )
        writer.finish({})
    return Shards.of(find_shards(str(folder)))


def make_loader(shards: Shards, seed: int = 3, groups: int = 1, **more: Any) -> Loader:
    order = Order(shards.counts, seed=seed, batch_size=BATCH, window=2, groups=groups)
    tokenizer = ClipTokenizer(context_length=20)
    return Loader(shards=shards, order=order, image_size=16, tokenize=tokenizer, **more)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Keep the indexes of temporary shards out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def shards(own_cache: object, tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """Write forty good samples in six shards."""
    return make_shards(tmp_path_factory.mktemp("good") / "set")


@pytest.fixture(scope="module")
def damaged(own_cache: object, tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """The same samples with three truncated images and two blank captions."""
    folder = tmp_path_factory.mktemp("damaged") / "set"
    return make_shards(folder, broken=(4, 17, 30), no_caption=(9, 22))


def signs(batches: Sequence[Batch]) -> list[tuple[str, ...]]:
    """Return a hash of each sample's number, pixels and tokens without padding."""
    rows = []
    for batch in batches:
        assert batch.images.dtype == torch.uint8 and batch.tokens.dtype == batch.ids.dtype == torch.int64
        content = (
            (number, image.numpy().tobytes(), np.trim_zeros(tokens.numpy(), "b").tobytes())
            for number, image, tokens in zip(batch.ids.tolist(), batch.images, batch.tokens, strict=True)
        )
        rows.append(tuple(hashlib.sha256(repr(one).encode()).hexdigest() for one in content))
    return rows


def test_batch_content(shards: Shards) -> None:
    loader = make_loader(shards)
    batch = loader.batch(7)
    assert batch.ids.tolist() == loader.order.batch(7).ids.tolist()
    assert batch.images.shape == (BATCH, 3, 16, 16) and batch.bad == ()
    captions = [shards.read(number).fields.get("txt", "") for number in batch.ids.tolist()]
    full = tokenize(captions, 20)
    longest = int((full != 0).sum(1).max())
    assert batch.tokens.shape == (BATCH, longest)
    assert torch.equal(batch.tokens, full[:, :longest])


def test_text_dropout_depends_on_epoch_and_sample_only_and_changes_no_identity(shards: Shards) -> None:
    def texts(batches: Sequence[Batch]) -> dict[tuple[int, int], bytes]:
        return {
            (int(sample_id), step * BATCH // SAMPLES): np.trim_zeros(tokens.numpy(), "b").tobytes()
            for step, batch in enumerate(batches)
            for sample_id, tokens in zip(batch.ids, batch.tokens, strict=True)
        }

    steps = 2 * SAMPLES // BATCH
    plain = [*make_loader(shards).batches(0, steps)]
    dropped = [*make_loader(shards, text_dropout=0.4, num_workers=2).batches(0, steps)]
    for before, after in zip(plain, dropped, strict=True):
        assert torch.equal(before.images, after.images) and torch.equal(before.identities, after.identities)
    ranks = [[*make_loader(shards, text_dropout=0.4, rank=i, world_size=2).batches(0, steps)] for i in (0, 1)]
    expected = texts(dropped)
    assert texts(ranks[0]) | texts(ranks[1]) == expected
    assert sum(expected[i, 0] != expected[i, 1] for i in range(SAMPLES)) > SAMPLES / 3
    assert expected != texts(plain)
    assert texts([*make_loader(shards, text_dropout=0.4, seed=4).batches(0, steps)]) != expected


def test_text_dropout_keeps_the_prefix_and_drops_words_of_every_caption(shards: Shards) -> None:
    rule = CaptionRule(prefix="a photo of ", count=2)
    selection = replace(shards.selection, captions=rule)
    tokenize = RecordingTokenizer()
    loader = replace(make_loader(Shards(shards.manifest, selection), text_dropout=0.5), tokenize=tokenize)
    for step in range(5):
        loader.batch(step)
    assert len(tokenize.texts) == 2 * SAMPLES and all(
        text.startswith("a photo of ") for text in tokenize.texts
    )
    words = [len(text.split()) - 3 for text in tokenize.texts]
    assert min(words) == 1 and max(words) > 3 and abs(sum(words) - 2.35 * 2 * SAMPLES) < 40


class RecordingTokenizer:
    """Tokenizes, and keeps the texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        self.texts += texts
        return tokenize(texts, 20)


@pytest.mark.parametrize("kind", ["shards", "damaged"])
def test_batches_do_not_depend_on_workers_ranks_or_start(kind: str, request: pytest.FixtureRequest) -> None:
    data = request.getfixturevalue(kind)
    steps = 12  # into the third epoch
    alone = list(make_loader(data).batches(0, steps))
    expected = signs(alone)
    assert len({one for row in expected for one in row}) > 2 * SAMPLES - 5  # another crop in each epoch
    for workers in (1, 3):
        with_workers = list(make_loader(data, num_workers=workers).batches(0, steps))
        assert signs(with_workers) == expected
        assert [batch.bad for batch in with_workers] == [batch.bad for batch in alone]
    for world in (2, 4):
        ranks = [
            list(make_loader(data, rank=rank, world_size=world).batches(0, steps)) for rank in range(world)
        ]
        assert all(len(batch.ids) == BATCH // world for batches in ranks for batch in batches)
        for step, parts in enumerate(zip(*map(signs, ranks), strict=True)):
            assert sum(parts, ()) == expected[step]
            assert sum((batches[step].bad for batches in ranks), ()) == alone[step].bad
    for start in range(1, steps, 3):
        assert signs(list(make_loader(data).batches(start, steps))) == expected[start:]
    assert signs(list(make_loader(data, num_workers=1, rank=1, world_size=2).batches(9, 11))) == [
        row[BATCH // 2 :] for row in expected[9:11]
    ]


def test_batches_are_split_unevenly_over_ranks(damaged: Shards) -> None:
    alone = list(make_loader(damaged).batches(0, 7))
    for world in (3, 5, 7):
        ranks = [
            list(make_loader(damaged, rank=rank, world_size=world).batches(0, 7)) for rank in range(world)
        ]
        assert {len(batches[0].ids) for batches in ranks} == {BATCH // world, BATCH // world + 1}
        for step, parts in enumerate(zip(*ranks, strict=True)):
            assert (
                sum(map(sum, map(signs, [[part] for part in parts]), [()] * world), ())
                == signs([alone[step]])[0]
            )
            for name in ("ids", "identities", "rows"):
                together = torch.cat([getattr(part, name) for part in parts])
                assert torch.equal(together, getattr(alone[step], name))
            assert sum((part.lengths for part in parts), ()) == alone[step].lengths
            assert sum((part.bad for part in parts), ()) == alone[step].bad
    assert alone[0].rows.tolist() == list(range(BATCH))


def test_more_ranks_than_batch_size_raise_error(shards: Shards) -> None:
    with pytest.raises(ConfigError, match="batch_size = 8 is less than the 9 processes"):
        make_loader(shards, world_size=9)


@pytest.mark.parametrize("workers", [0, 2])
def test_token_lengths_and_identities(workers: int, damaged: Shards) -> None:
    for batch in make_loader(damaged, num_workers=workers).batches(0, 5):
        assert batch.lengths == tuple((row != 0).sum().item() for row in batch.tokens)
        ends = batch.tokens[torch.arange(BATCH), torch.tensor(batch.lengths) - 1]
        assert ends.tolist() == [END_OF_TEXT] * BATCH
        assert batch.identities.dtype == torch.int64 and batch.identities.shape == (BATCH, 2)
        for number, (image, caption), tokens in zip(
            batch.ids.tolist(), batch.identities.tolist(), batch.tokens, strict=True
        ):
            assert (image == number) == (
                number not in (4, 17, 30, 9, 22)
            )  # replacements have their own identity
            text = damaged.read(image).fields.get("txt", "")
            assert caption == caption_hash(text)
            assert torch.equal(tokenize([text], 20, trim=True)[0], tokens[tokens != 0])


def test_names_are_shard_and_key(shards: Shards) -> None:
    loader = make_loader(shards)
    batch = loader.batch(3)
    names = loader.names(batch.ids)
    assert names == loader.names(batch.ids.tolist()) == [shards.locate(id_) for id_ in batch.ids.tolist()]
    assert [key for _, key in names] == [f"{number:04d}" for number in batch.ids.tolist()]


def test_seed_and_crop_scale_change_batches(shards: Shards) -> None:
    by_seed = [make_loader(shards, seed=seed).batch(0) for seed in (0, 1)]
    assert by_seed[0].ids.tolist() != by_seed[1].ids.tolist()
    centre, other = (make_loader(shards, augmentation=Augmentation(crop_scale=scale)) for scale in (1.0, 0.5))
    assert not torch.equal(centre.batch(0).images, other.batch(0).images)
    pixels = [dict(zip(batch.ids.tolist(), batch.images, strict=True)) for batch in centre.batches(0, 10)]
    first, second = ({k: v for one in half for k, v in one.items()} for half in (pixels[:5], pixels[5:]))
    assert len(first) == SAMPLES and all(
        torch.equal(first[k], second[k]) for k in first
    )  # crops are deterministic


def test_bad_samples_are_replaced_and_reported(damaged: Shards) -> None:
    epochs = [list(make_loader(damaged).batches(start, start + 5)) for start in (0, 5)]
    bad_numbers = {4: "image", 17: "image", 30: "image", 9: "empty caption", 22: "empty caption"}
    for batches in epochs:
        assert all(batch.images.shape == (BATCH, 3, 16, 16) for batch in batches)
        assert sorted(number for batch in batches for number in batch.ids.tolist()) == list(range(SAMPLES))
        reported = [bad for batch in batches for bad in batch.bad]
        for number, cause in bad_numbers.items():
            shard, key = damaged.locate(number)
            found = [bad for bad in reported if bad.key == key]
            assert found and all(bad.shard == shard and cause in bad.cause for bad in found)
        assert {bad.key for bad in reported} == {f"{number:04d}" for number in bad_numbers}
        for batch in batches:
            own = {damaged.locate(number)[1] for number in batch.ids.tolist() if number in bad_numbers}
            assert own <= {bad.key for bad in batch.bad}
    sign = dict[int, list[str]]()
    for batches in epochs:
        for batch, row in zip(batches, signs(batches), strict=True):
            for number, one in zip(batch.ids.tolist(), row, strict=True):
                sign.setdefault(number, []).append(one)
    tokens = [
        batch.tokens[batch.ids.tolist().index(4)].tolist() for e in epochs for batch in e if 4 in batch.ids
    ]
    assert len(tokens) == 2 and tokens[0] != tokens[1]  # other replacements in other epochs


LATIN = "caf\u00e9 number 5".encode("latin-1")


@pytest.mark.parametrize(
    ("members", "rule", "bad"),
    [
        ({"txt": LATIN}, CaptionRule(), True),
        ({"txt": "caf\u00e9 \ufffd".encode()}, CaptionRule(), False),  # a replacement character in the source
        ({"json": b'{"caption": "' + LATIN + b'"}'}, CaptionRule(), True),
        ({"txt": b"text", "json": b'{"alt": "' + LATIN + b'"}'}, CaptionRule(fields=("alt",)), True),
        ({"txt": b"text", "json": rb'{"alt": "half a pair \ud83d"}'}, CaptionRule(fields=("alt",)), True),
        ({"txt": b"text", "json": rb'{"alt": "a pair \ud83d\ude00"}'}, CaptionRule(fields=("alt",)), False),
        # texts that are not used as captions have no effect
        ({"txt": LATIN, "json": b'{"alt": "text"}'}, CaptionRule(fields=("alt",)), False),
        ({"txt": b"text", "json": b'{"note": "' + LATIN + b'"}'}, CaptionRule(fields=("alt", "txt")), False),
    ],
)
def test_caption_that_is_not_utf8_is_a_bad_sample(
    members: dict[str, bytes], rule: CaptionRule, bad: bool, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for number in range(SAMPLES):
            good = {"txt": b"text", "json": b'{"alt": "text"}'}
            for extension, content in {"jpg": encoded(1), **(members if number == 5 else good)}.items():
                info = tarfile.TarInfo(f"{number:04d}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    data = Shards.of(find_shards(str(tmp_path)), captions=rule)
    reported = []
    for loader in (make_loader(data), make_loader(data)):  # the result is reproducible
        batches = list(loader.batches(0, 5))
        reported.append((signs(batches), [one for batch in batches for one in batch.bad]))
    assert reported[0] == reported[1]
    expected = BadSample(shard=str(tmp_path / "0.tar"), key="0005", cause="caption is not UTF-8")
    assert reported[0][1] == [expected] * bad


def test_bad_samples_do_not_change_good_ones(shards: Shards, damaged: Shards) -> None:
    good, other = (list(make_loader(data).batches(0, 5)) for data in (shards, damaged))
    for one, two, own, theirs in zip(good, other, signs(good), signs(other), strict=True):
        assert one.ids.tolist() == two.ids.tolist()
        differing = {number for number, a, b in zip(one.ids.tolist(), own, theirs, strict=True) if a != b}
        assert differing == set(one.ids.tolist()) & {4, 9, 17, 22, 30}


def test_samples_of_a_deleted_shard_are_bad(own_cache: object, tmp_path: Path) -> None:
    data = make_shards(tmp_path / "set")
    (tmp_path / "set" / "train" / "2.tar").unlink()
    batches = list(make_loader(data).batches(0, 5))
    assert all(len(batch.images) == BATCH for batch in batches)
    assert {bad.key for batch in batches for bad in batch.bad} == {
        f"{number:04d}" for number in range(14, 21)
    }


def test_bad_samples_are_replaced_from_their_shard_with_groups(damaged: Shards, own_cache: object) -> None:
    loader = make_loader(damaged, groups=4)
    opened = []
    for step in range(10):
        for rank in range(4):
            data = Shards(damaged.manifest, damaged.selection)
            part = replace(loader, shards=data, rank=rank, world_size=4).batch(step)
            assert set(data._open) == {data._position(i)[0] for i in part.ids.tolist()}
            opened.append(len(part.bad))
    assert sum(opened) >= 8  # otherwise nothing was replaced


def test_samples_of_a_deleted_shard_are_replaced_with_groups(own_cache: object, tmp_path: Path) -> None:
    data = make_shards(tmp_path / "set")
    (tmp_path / "set" / "train" / "2.tar").unlink()
    batches = list(make_loader(data, groups=4).batches(0, 5))
    assert all(len(batch.images) == BATCH for batch in batches)
    assert {bad.key for batch in batches for bad in batch.bad} == {
        f"{number:04d}" for number in range(14, 21)
    }
    replaced = {row for batch in batches for row in range(BATCH) if 14 <= batch.ids[row] < 21}
    assert replaced and all(batch.images.any() for batch in batches)


def test_ranks_fetch_only_their_shards_ahead(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[list[int]] = []
    monkeypatch.setattr(Shards, "fetch_ahead", lambda self, ahead: fetched.append(list(ahead)))
    cached = Shards(shards.manifest, shards.selection, cache=ShardCache(Path("unused"), 1))
    for rank in range(4):
        loader = make_loader(cached, groups=4, rank=rank, world_size=4)
        fetched.clear()
        list(loader.batches(0, 5))
        now, following = loader.order.shards_ahead(0, rank=rank, world_size=4)
        assert sorted(set(fetched[0])) == sorted({*now, *following})
        assert len({shard for ahead in fetched for shard in ahead}) < len(shards.counts)


@settings(deadline=None)
@given(
    workers=st.integers(1, 16),
    image_size=st.integers(1, 600),
    memory=st.integers(0, 2**32),
    free=st.integers(0, 2**32),
    world=st.integers(1, BATCH),
)
def test_batches_ahead_are_bounded_by_bytes(
    workers: int, image_size: int, memory: int, free: int, world: int, shards: Shards
) -> None:
    loader = replace(make_loader(shards, num_workers=workers, world_size=world), image_size=image_size)
    one_of_each = BATCH // world * 3 * image_size**2 * workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.loader._AHEAD_BYTES", memory)
        patch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_frsize=1))
        if one_of_each > free:
            with pytest.raises(DataError, match="of shared memory") as caught:
                loader.batches_ahead()
            assert f"data.workers = {workers} with" in str(caught.value)
            return
        ahead = loader.batches_ahead()
    assert ahead == 1 or ahead * one_of_each <= min(memory, free)
    assert ahead == 4 or (ahead + 1) * one_of_each > min(memory, free)


@pytest.mark.parametrize(("batches", "expected"), [(100, 4 * 2), (2 * 3, 3 * 2), (1, 2)])
def test_workers_make_batches_ahead_that_fit_in_memory(
    batches: int, expected: int, shards: Shards, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The memory holds so many batches, and two workers make at least one each."""
    made = tmp_path / "made"
    made.touch()
    monkeypatch.setattr("data.loader._AHEAD_BYTES", batches * BATCH * 3 * 16**2)
    loader = make_loader(shards, num_workers=2)
    plain = loader.tokenize

    def count_and_tokenize(texts: Sequence[str]) -> torch.Tensor:
        with made.open("ab") as file:
            file.write(b".")
        return plain(texts)

    iterator = replace(loader, tokenize=count_and_tokenize).batches(0, 30)
    next(iterator)
    until = time.monotonic() + 20
    while made.stat().st_size < expected + 1 and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.2)  # more would be made
    del iterator
    assert made.stat().st_size == expected + 1  # the one taken, and those ahead


@pytest.mark.parametrize("workers", [0, 1])
def test_only_bad_samples_raise_error(workers: int, own_cache: object, tmp_path: Path) -> None:
    data = make_shards(tmp_path / "set", broken=range(SAMPLES))
    with pytest.raises(DataError) as caught:
        list(make_loader(data, num_workers=workers).batches(0, 5))
    assert "32 samples in a row are bad, the last is" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_global_random_state_is_unchanged(workers: int, shards: Shards) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    list(make_loader(shards, num_workers=workers).batches(0, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_deleting_the_iterator_stops_the_workers(shards: Shards) -> None:
    batches = make_loader(shards, num_workers=2).batches(0, 1000)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    del batches
    assert multiprocessing.active_children() == []


def test_dataclasses_are_comparable_and_frozen(shards: Shards) -> None:
    assert BadSample(shard="a", key="b", cause="c") == BadSample(shard="a", key="b", cause="c")
    with pytest.raises(AttributeError):
        make_loader(shards).batch(0).ids = torch.zeros(1)  # type: ignore[misc]


@pytest.mark.parametrize("decoding", [Decoding(), Decoding(background=(255, 255, 255), upright=True)])
def test_transparent_and_rotated_images_are_counted(tmp_path: Path, decoding: Decoding) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    with DatasetWriter(tmp_path / "set") as writer:
        for number in range(SAMPLES):
            image, extension = encoded(2 * number), "png"
            if number % 4 == 1:
                image = file_of(Image.new("RGBA", (20, 20), (9, 9, 9, number % 8)), "PNG")
            elif number % 4 == 2:
                image, extension = file_of(Image.new("RGB", (24, 20)), "JPEG", exif=exif), "jpg"
            elif number % 4 == 3:
                image = file_of(Image.new("RGBA", (20, 20), (9, 9, 9, 255)), "PNG")  # opaque
            writer.write("train", Record(key=f"{number:04d}", image=image, extension=extension, caption="x"))
        writer.finish({})
    shards = Shards.of(find_shards(str(tmp_path / "set")))
    epoch = {}
    for workers, later in ((0, False), (1, False), (0, True)):
        loader = make_loader(shards, num_workers=workers, decode_later=later, decoding=decoding)
        batches = [loader.on_device(batch, step, CPU) for step, batch in enumerate(loader.batches(0, 5))]
        counts = [batch.traits for batch in batches]
        assert sum(count.images for count in counts) == SAMPLES
        assert (
            sum(count.transparent for count in counts)
            == sum(count.rotated for count in counts)
            == SAMPLES // 4
        )
        epoch[workers, later] = torch.stack([batch.images for batch in batches])
    assert torch.equal(epoch[0, False], epoch[1, False])


@pytest.mark.parametrize("workers", [0, 1])
def test_deep_images_without_a_range_stop_instead_of_being_replaced(tmp_path: Path, workers: int) -> None:
    values = np.random.default_rng(0).integers(8000, 59000, (20, 20)).astype(np.uint16)
    with DatasetWriter(tmp_path / "set") as writer:
        for number in range(SAMPLES):
            image = file_of(Image.fromarray(values), "PNG") if number == 5 else encoded(2 * number)
            writer.write("train", Record(key=f"{number:04d}", image=image, extension="png", caption="x"))
        writer.finish({})
    shards = Shards.of(find_shards(str(tmp_path / "set")))
    with pytest.raises(DataError, match=r"0005 in .*\.tar: 16-bit grayscale image with values from 8"):
        list(make_loader(shards, num_workers=workers).batches(0, 5))
    ranged = make_loader(shards, num_workers=workers, decoding=Decoding(pixel_range=(9000.0, 59000.0)))
    batches = list(ranged.batches(0, 5))
    assert not any(batch.bad for batch in batches)
    assert sum(batch.traits.clamped for batch in batches) == 1


def test_deep_colors_are_counted(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (20, 20, 3))
    with DatasetWriter(tmp_path / "set") as writer:
        for number in range(SAMPLES):
            image = color_png(values) if number == 5 else encoded(2 * number)
            writer.write("train", Record(key=f"{number:04d}", image=image, extension="png", caption="x"))
        writer.finish({})
    batches = make_loader(Shards.of(find_shards(str(tmp_path / "set")))).batches(0, 5)
    assert sum(batch.traits.deep_colors for batch in batches) == 1


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


ROOT = Path(__file__).parents[2]
HASH, EMPTY = 6776802137977632137, 6510301506637419378


@given(st.text(), st.text())
def test_different_captions_have_different_hashes(one: str, other: str) -> None:
    same = " ".join(one.casefold().split()) == " ".join(other.casefold().split())
    assert (caption_hash(one) == caption_hash(other)) == same
    assert 0 <= caption_hash(one) < 2**63


def test_caption_hashes_are_stable() -> None:
    code = "from data.loader import caption_hash; print(caption_hash('A  photo\\n of Straße '), caption_hash(''))"
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60
    )
    assert list(map(int, printed.stdout.split())) == [HASH, EMPTY]
    assert caption_hash("a PHOTO of STRASSE") == HASH
    assert 0 <= caption_hash("half a pair \ud800") < 2**63


def test_identities_take_microseconds_per_sample() -> None:
    captions = [f"a photograph of the number {number} on a wall, in colour" for number in range(4096)]
    ids = np.arange(4096)
    best = 1.0
    for _ in range(5):
        began = time.perf_counter()
        hashes = [caption_hash(caption) for caption in captions]
        found, identities = ids_and_identities(ids, ids.tolist(), hashes)
        best = min(best, time.perf_counter() - began)
    assert best / 4096 < 20e-6
    assert found.tolist() == identities[:, 0].tolist() == list(range(4096))
    assert identities[:, 1].tolist() == [caption_hash(caption) for caption in captions]


def test_token_lengths_end_at_the_first_end_of_text() -> None:
    tokens = torch.tensor([[9, 1, 50, 0], [9, 50, 3, 50], [50, 0, 0, 0]])
    assert token_lengths(tokens) == (3, 2, 1)


def image_file(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), number, dtype=np.uint8)).save(file, "png")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write six images with three captions each, two of which differ only in white space and case."""
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "cache"))
    with DatasetWriter(tmp_path / "set", samples_per_shard=4) as writer:
        for number in range(6):
            meta = {"captions": [f"one {number}", f" One  {number}", "all the same"]}
            record = Record(
                key=f"{number}", image=image_file(number), extension="png", caption="x", meta=meta
            )
            writer.write("train", record)
        writer.finish({})
    yield tmp_path / "set"


def open_folder_loader(folder: Path, rule: CaptionRule, size: int, **more: Any) -> Loader:
    shards = Shards.of(find_shards(str(folder)), captions=rule)
    order = Order(shards.counts, seed=2, batch_size=size, **more)
    return Loader(shards=shards, order=order, image_size=8, tokenize=ClipTokenizer())


def test_captions_of_one_image_have_the_same_image_identity(folder: Path) -> None:
    loader = open_folder_loader(folder, CaptionRule(fields=("captions",), choice="all", prefix="see: "), 18)
    batch = loader.batch(0)
    image_ids, captions = batch.identities.T.tolist()
    assert len(set(image_ids)) == 6 and len(set(captions)) == 7
    for number, image, found, caption in zip(
        batch.ids.tolist(), batch.images, image_ids, captions, strict=True
    ):
        assert image[0, 0, 0] == number // 3 and found == number // 3 * 3
        texts = [f"see: one {number // 3}"] * 2 + ["see: all the same"]
        assert caption == caption_hash(texts[number % 3])


def test_repeated_sample_has_the_same_identities(folder: Path) -> None:
    loader = open_folder_loader(folder, CaptionRule(fields=("captions",)), 6, resample=True)
    for step in range(6):
        batch = loader.batch(step)
        ids, identities = batch.ids.tolist(), [tuple(identity) for identity in batch.identities.tolist()]
        assert len(set(ids)) < 6 or step  # some samples are drawn twice
        assert len(set(identities)) == len(set(ids)) == len(set(zip(ids, identities, strict=True)))


def test_batch_is_moved_to_a_device(folder: Path) -> None:
    batch = open_folder_loader(folder, CaptionRule(), 6).batch(0)
    moved = batch.to(torch.device("meta"))
    assert isinstance(moved, Batch) and moved.ids is batch.ids and moved.lengths == batch.lengths
    assert [tensor.device.type for tensor in moved.tensors()] == ["meta"] * 3


def test_words_are_tokens_without_start_end_and_padding(shards: Shards) -> None:
    loader = make_loader(shards, lists_words=True)
    texts = ["!% a a", "a longer text!", ""]
    tokens = loader.tokenize(texts)
    assert tokens[0, 1] == 0  # "!" before another sign
    words = [set(row) - {-1} for row in loader._list_words(tokens).tolist()]
    assert words == [set(tokenize([text], trim=True)[0, 1:-1].tolist()) for text in texts]
    batch = loader.batch(0)
    assert batch.words is not None and 0 < int(batch.words.max()) < END_OF_TEXT - 1
