"""Tests of a teacher's stored features: each sample gets its features, or an error names what is missing."""

import io
import json
import pickle
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import clipkit
from clipkit.batch import Batch
from clipkit.config import DistillConfig
from clipkit.errors import ConfigError, DataError
from clipkit.inference.encode import encode
from clipkit.inference.inputs import Stream
from clipkit.inference.stream import FeatureStream
from clipkit.model.clip import CLIP
from clipkit.model.tokenizer import ClipTokenizer
from clipkit.options import EncodeOptions
from data.captions import CaptionRule
from data.loader import Loader
from data.order import Order
from data.shards.samples import Shards, find_shards
from data.shards.teacher import StoredFeatures, StoredRows
from data.shards.writer import DatasetWriter, Record
from data.training_data import teacher_features

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

SAMPLES, BATCH, BROKEN = 14, 4, 5
Encode = Callable[..., Path]


@pytest.fixture(scope="module")
def teacher() -> CLIP:
    return clipkit.create("ViT-Ti-4-16", seed=1).eval()


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def write_pairs(folder: Path, *, samples: int = SAMPLES, first: int = 0) -> Path:
    """Write pairs in shards of five; image 5 is broken."""
    with DatasetWriter(folder, samples_per_shard=5) as writer:
        for number in range(first, first + samples):
            file = io.BytesIO()
            pixels = np.random.default_rng(number).integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file, "png")
            image = file.getvalue()[: 40 if number == BROKEN else None]
            record = Record(key=f"{number:04d}", image=image, extension="png", caption=f"number {number}")
            writer.write("train", record)
        writer.finish({})
    return folder


@pytest.fixture(scope="module")
def pairs(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "set")


def encode_with(model: CLIP, source: Path | list[Path], out: Path, **more: Any) -> Path:
    sources = list(map(str, source if isinstance(source, list) else [source]))
    kind = more.pop("kind", "image")
    features = FeatureStream(model, batch_size=4, workers=0)
    settings: dict[str, Any] = {"rows_per_file": 6, "model": "a teacher", **more}
    options = EncodeOptions(sources=tuple(sources), out=out, quiet=True, **settings)
    encode(Stream(sources, kind=kind), features, options)
    return out


@pytest.fixture(scope="module")
def stored(pairs: Path, teacher: CLIP, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Encode the pairs and return the folders of image and text features."""
    out = tmp_path_factory.mktemp("stored")
    images = encode_with(teacher, pairs, out / "images")
    return images, encode_with(teacher, pairs, out / "texts", kind="caption")


def make_loader(folder: Path, features: StoredFeatures | None, **more: Any) -> Loader:
    shards = Shards.of(find_shards(str(folder)))
    order = Order(shards.counts, seed=4, batch_size=BATCH, wrap=True)
    return Loader(
        shards=shards, order=order, image_size=16, tokenize=ClipTokenizer(), teacher=features, **more
    )


def expected(teacher: CLIP, folder: Path) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return the teacher's features of every intact pair."""
    shards = Shards.of(find_shards(str(folder)))
    found = {}
    for number in set(range(len(shards))) - {BROKEN}:
        sample = shards.read(number)
        image = Image.open(io.BytesIO(sample.image)).convert("RGB")
        text = clipkit.encode_text([sample.fields["txt"]], teacher)
        found[number] = (clipkit.encode_image([image], teacher)[0], text[0])
    return found


def assert_taught(batch: Batch, truth: dict[int, tuple[torch.Tensor, torch.Tensor]], width: int) -> None:
    assert batch.teacher is not None and batch.teacher.texts is not None
    both = (batch.teacher.images, batch.teacher.texts)
    for features in both:
        assert features.dtype == torch.float16 and features.shape == (BATCH, width)
    seen = batch.identities[:, 0].tolist()  # for a replaced sample, the number of its replacement
    for number, image, text in zip(seen, *both, strict=True):
        for row, other in zip((image, text), truth[number], strict=True):
            assert torch.allclose(row.float(), other, atol=2e-3)


def test_features_without_their_scale_require_the_setting(
    pairs: Path, stored: tuple[Path, Path], tmp_path: Path
) -> None:
    images = tmp_path / "images"
    shutil.copytree(stored[0], images)
    manifest = json.loads((images / "manifest.json").read_text())
    del manifest["scale"]
    (images / "manifest.json").write_text(json.dumps(manifest))
    shards = Shards.of(find_shards(str(pairs)))
    settings = DistillConfig(features=str(images), text_features=str(stored[1]))
    with pytest.raises(ConfigError, match=r"distill.scale = 0: .*images was encoded by an earlier version"):
        teacher_features(settings, shards, rank0=False)
    assert teacher_features(replace(settings, scale=20.0), shards, rank0=False) is not None


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_have_their_features(
    workers: int, pairs: Path, stored: tuple[Path, Path], teacher: CLIP
) -> None:
    features = StoredFeatures(*stored)
    loader = make_loader(pairs, features, num_workers=workers)
    features.check(loader.shards)
    truth = expected(teacher, pairs)
    bad, seen = set(), set()
    for batch in loader.batches(0, 8):
        assert_taught(batch, truth, features.width)
        assert batch.teacher is not None and batch.teacher.scale == teacher.logit_scale.exp().item()
        bad |= {one.key for one in batch.bad}
        seen |= set(batch.ids.tolist())
    assert bad == {"0005"} and seen == set(range(SAMPLES))
    assert "13 stored features of images, 14 of texts, by a teacher from" in features.describe()


def test_features_do_not_change_batches_and_move_with_them(pairs: Path, stored: tuple[Path, Path]) -> None:
    for images, texts in (stored, (stored[0], None)):
        taught, plain = make_loader(pairs, StoredFeatures(images, texts)), make_loader(pairs, None)
        for batch, other in zip(taught.batches(0, 4), plain.batches(0, 4), strict=True):
            assert torch.equal(batch.images, other.images) and torch.equal(batch.ids, other.ids)
            assert other.teacher is None and batch.teacher is not None
            assert (batch.teacher.texts is None) == (texts is None)
            moved = batch.to(torch.device("meta"))
            assert len(moved.tensors()) == 4 + (texts is not None)
            assert all(tensor.device.type == "meta" for tensor in moved.tensors())


def test_features_match_moved_data(
    pairs: Path, stored: tuple[Path, Path], teacher: CLIP, tmp_path: Path
) -> None:
    shutil.copytree(pairs, tmp_path / "elsewhere" / "set")
    features = StoredFeatures(*stored)
    loader = make_loader(tmp_path / "elsewhere" / "set", features)
    features.check(loader.shards)
    assert_taught(loader.batch(0), expected(teacher, pairs), features.width)


def read_features(features: StoredFeatures, shards: Shards, number: int) -> torch.Tensor:
    sample = shards.read(number)
    return features.read([features.find(sample.image, sample.fields["txt"])]).images[0].float()


def test_datasets_with_equal_shard_names_are_distinguished(teacher: CLIP, tmp_path: Path) -> None:
    folders = [write_pairs(tmp_path / name, samples=6, first=first) for name, first in (("a", 0), ("b", 20))]
    features = StoredFeatures(encode_with(teacher, folders, tmp_path / "out"))
    for folder in [*folders, shutil.copytree(folders[0], tmp_path / "other")]:
        shards = Shards.of(find_shards(str(folder)))
        features.check(shards)
        for number in range(4):
            image = Image.open(io.BytesIO(shards.read(number).image))
            row = clipkit.encode_image([image], teacher)[0]
            assert torch.allclose(read_features(features, shards, number), row, atol=2e-3)


def test_missing_features_error_contains_a_working_command(
    pairs: Path, stored: tuple[Path, Path], teacher: CLIP, tmp_path: Path
) -> None:
    shards = Shards.of(find_shards(str(pairs)))
    first = encode_with(teacher, pairs / "train" / "0.tar", tmp_path / "part")
    with pytest.raises(DataError) as caught:
        StoredFeatures(first).check(shards)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert line.startswith(
        f"9 of 14 samples examined have no features in {first}, such as 0005 of {pairs}/train/1.tar: "
    )
    command = shlex.split(line.rpartition(": ")[2])
    assert command[:2] == ["clipkit", "encode"] and command[command.index("--out") + 1] == str(first)
    sources = list(map(Path, command[2 : command.index("--model")]))
    encode_with(teacher, sources, first)  # the same folder is continued with more sources
    StoredFeatures(first).check(shards)


def test_command_names_other_shards_of_the_same_name(pairs: Path, teacher: CLIP, tmp_path: Path) -> None:
    more = write_pairs(
        tmp_path / "more", samples=SAMPLES + 1
    )  # five samples in the last shard, four of them encoded
    features = encode_with(teacher, pairs, tmp_path / "features")
    shards = Shards.of(find_shards(str(more)))
    with pytest.raises(DataError, match="1 of 15 samples examined have no features") as caught:
        StoredFeatures(features).check(shards)
    command = shlex.split(str(caught.value).rpartition(": ")[2])
    sources = list(map(Path, command[2 : command.index("--model")]))
    assert sources == [pairs, more / "train" / "2.tar"]
    encode_with(teacher, sources, features)
    StoredFeatures(features).check(shards)


def test_incomplete_features_raise_error(pairs: Path, stored: tuple[Path, Path], tmp_path: Path) -> None:
    shards = Shards.of(find_shards(str(pairs)))
    copy = shutil.copytree(stored[0], tmp_path / "copy")
    (copy / ".parts" / "1.jsonl").unlink()  # files of an unlisted part may contain other items
    with pytest.raises(DataError, match="of 14 samples examined have no features"):
        StoredFeatures(copy).check(shards)
    with pytest.raises(DataError, match="no stored feature: its image is not among those encoded"):
        StoredFeatures(copy).find(shards.read(7).image, "")
    (copy / ".parts" / "0.jsonl").unlink()
    (copy / ".parts" / "2.jsonl").unlink()
    with pytest.raises(DataError, match="no complete embeddings"):
        StoredFeatures(copy)


def write_others(folder: Path, *, samples: int = SAMPLES, changed: int = SAMPLES) -> Path:
    """Write pairs with the same shard names and keys, of which the last ``changed`` have other images."""
    with DatasetWriter(folder, samples_per_shard=5) as writer:
        for number in range(samples):
            seed = number + 100 if number >= samples - changed else number
            file = io.BytesIO()
            pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file, "png")
            image = file.getvalue()[: 40 if seed == BROKEN else None]
            record = Record(key=f"{number:04d}", image=image, extension="png", caption=f"number {number}")
            writer.write("train", record)
        writer.finish({})
    return folder


def test_features_of_other_images_with_equal_names_are_refused(
    pairs: Path, stored: tuple[Path, Path], teacher: CLIP, tmp_path: Path
) -> None:
    other = write_others(tmp_path / "set")
    shards = Shards.of(find_shards(str(other)))
    with pytest.raises(DataError, match=r"has features of other images: none of 14 samples") as caught:
        StoredFeatures(stored[0]).check(shards)
    line = str(caught.value)
    assert len(line.splitlines()) == 1 and f"such as 0000 of {other}/train/0.tar" in line
    command = shlex.split(line.rpartition(": ")[2])
    out = Path(command[command.index("--out") + 1])
    encode_with(teacher, list(map(Path, command[2 : command.index("--model")])), out)
    StoredFeatures(out).check(shards)
    # the captions are the same
    StoredFeatures(out, stored[1]).check(shards)


def test_image_replaced_in_place_is_refused_at_start_and_replaced_in_training(
    pairs: Path, stored: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = write_others(tmp_path / "set", changed=1)
    features = StoredFeatures(*stored)
    loader = make_loader(folder, features)
    with pytest.raises(DataError, match=r"1 of 14 samples examined have no features in .* such as 0013 of"):
        features.check(loader.shards)
    bad = [sample for batch in loader.batches(0, 8) for sample in batch.bad]
    assert {sample.key for sample in bad} == {"0005", "0013"}
    causes = {sample.cause for sample in bad if sample.key == "0013"}
    assert causes == {f"no stored feature: its image is not among those encoded in {stored[0]}"}


def test_changed_caption_has_no_feature(pairs: Path, stored: tuple[Path, Path], tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "set", samples_per_shard=5) as writer:
        shards = Shards.of(find_shards(str(pairs)))
        for number in range(SAMPLES):
            sample = shards.read(number)
            caption = "changed" if number == 3 else sample.fields["txt"]
            record = Record(key=sample.key, image=sample.image, extension="png", caption=caption)
            writer.write("train", record)
        writer.finish({})
    shards = Shards.of(find_shards(str(tmp_path / "set")))
    StoredFeatures(stored[0]).check(shards)
    with pytest.raises(DataError, match=r"1 of 14 samples .* in .*texts, such as 0003"):
        StoredFeatures(*stored).check(shards)


@pytest.mark.parametrize("samples_per_shard", [3, 100])
def test_features_follow_repacked_reordered_and_renamed_samples(
    samples_per_shard: int, pairs: Path, stored: tuple[Path, Path], teacher: CLIP, tmp_path: Path
) -> None:
    old = Shards.of(find_shards(str(pairs)))
    with DatasetWriter(tmp_path / "set", samples_per_shard=samples_per_shard) as writer:
        for number in reversed(range(6, SAMPLES)):  # the first shard is deleted
            sample = old.read(number)
            record = Record(
                key=f"new-{number}", image=sample.image, extension="png", caption=sample.fields["txt"]
            )
            writer.write("train", record)
        writer.finish({})
    features, shards = StoredFeatures(*stored), Shards.of(find_shards(str(tmp_path / "set")))
    features.check(shards)
    for number in range(len(shards)):
        image = Image.open(io.BytesIO(shards.read(number).image))
        row = clipkit.encode_image([image], teacher)[0]
        assert torch.allclose(read_features(features, shards, number), row, atol=2e-3)


def test_examined_samples_are_spread_over_all_shards(
    stored: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.shards.teacher._EXAMINED", 4)
    last = Shards.of(find_shards(str(write_others(tmp_path / "set", changed=1))))
    with pytest.raises(DataError, match="1 of 4 samples examined"):
        StoredFeatures(stored[0]).check(last)


def test_features_without_digests_name_the_command(
    pairs: Path, stored: tuple[Path, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(stored[0], tmp_path / "copy")
    path = copy / "metadata" / "metadata_1.parquet"
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.drop_columns("digest"), path)
    with pytest.raises(DataError, match=r"earlier version.*another folder: clipkit encode") as caught:
        StoredFeatures(copy)
    assert len(str(caught.value).splitlines()) == 1 and f"--out {copy}-2" in str(caught.value)


def test_drawn_captions_get_their_own_features(teacher: CLIP, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "set", samples_per_shard=5) as writer:
        for number in range(8):
            file = io.BytesIO()
            Image.new("RGB", (20, 20), (30 * number, 0, 0)).save(file, "png")
            captions = [f"number {number}", f"picture {number}", "the same"][: 1 + number % 3]
            meta = {"captions": captions} if len(captions) > 1 else {}
            image = Record(
                key=f"{number}", image=file.getvalue(), extension="png", caption=captions[0], meta=meta
            )
            writer.write("train", image)
        writer.finish({})
    images = encode_with(teacher, tmp_path / "set", tmp_path / "images")
    texts = tmp_path / "texts"
    stream = Stream([str(tmp_path / "set")], captions=("captions",), kind="caption")
    options = EncodeOptions(
        sources=(str(tmp_path / "set"),), out=texts, quiet=True, rows_per_file=6, model=""
    )
    assert encode(stream, FeatureStream(teacher, batch_size=4, workers=0), options).done == 15
    rule = CaptionRule(fields=("captions",), choice="random")
    shards = Shards.of(find_shards(str(tmp_path / "set")), captions=rule)
    features = StoredFeatures(images, texts)
    features.check(shards)
    order = Order(shards.counts, seed=4, batch_size=BATCH, wrap=True)
    loader = Loader(shards=shards, order=order, image_size=16, tokenize=ClipTokenizer(), teacher=features)
    drawn = set()
    for batch in list(loader.batches(0, 6)):
        assert batch.teacher is not None and batch.teacher.texts is not None
        drawn |= {tuple(row) for row in batch.tokens.tolist()}
        with torch.no_grad():
            found = torch.nn.functional.normalize(teacher.encode_text(batch.tokens), dim=1)
        assert torch.allclose(batch.teacher.texts.float(), found, atol=2e-3)
    assert len(drawn) > 8
    first = encode_with(teacher, tmp_path / "set", tmp_path / "first", kind="caption")
    with pytest.raises(DataError, match="5 of 8 samples examined have no features"):
        StoredFeatures(images, first).check(shards)


def test_changed_captions_are_rejected(pairs: Path, stored: tuple[Path, Path]) -> None:
    shards = find_shards(str(pairs))
    for rule in (CaptionRule(prefix="a "), CaptionRule(templates=("{}!",)), CaptionRule(split=" ")):
        changed = Shards.of(shards, captions=rule)
        with pytest.raises(ConfigError, match="are those of whole captions: remove"):
            StoredFeatures(*stored).check(changed)
        StoredFeatures(stored[0]).check(changed)


def test_shard_of_only_broken_images(teacher: CLIP, tmp_path: Path) -> None:
    file, (whole, broken) = io.BytesIO(), (tmp_path / "whole", tmp_path / "broken")
    Image.new("RGB", (20, 20), "red").save(file, "png")
    for folder, image in ((whole, file.getvalue()), (broken, b"no image")):
        with DatasetWriter(folder) as writer:
            for number in range(6):
                record = Record(key=f"{folder.name}{number}", image=image, extension="png", caption="red")
                writer.write("train", record)
            writer.finish({})
    features = StoredFeatures(encode_with(teacher, [broken, whole], tmp_path / "out"))
    for folder in (whole, broken):
        features.check(Shards.of(find_shards(str(folder))))
    assert features.find(file.getvalue(), "red") == (0, -1)
    with pytest.raises(DataError, match="no stored feature: its image could not be encoded"):
        features.find(b"no image", "red")


def test_features_of_two_teachers_are_rejected(
    pairs: Path, stored: tuple[Path, Path], tmp_path: Path
) -> None:
    other = clipkit.create("ViT-Ti-4-16", seed=2).eval()
    texts = encode_with(other, pairs, tmp_path / "texts", kind="caption")
    with pytest.raises(ConfigError, match="encoded by different models"):
        StoredFeatures(stored[0], texts)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: shutil.rmtree(out), "has no embeddings written by clipkit encode"),
        (lambda out: (out / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
        (lambda out: set_kind(out, "caption"), "has embeddings of texts, not of images"),
        (lambda out: (out / "img_emb" / "img_emb_1.npy").write_bytes(b"x"), "img_emb_1.npy is damaged"),
        (lambda out: np.save(out / "img_emb" / "img_emb_1.npy", np.zeros((5, 3), "f2")), "different widths"),
        (lambda out: cut_rows(out / "img_emb" / "img_emb_1.npy"), "has 6 rows for 2 embeddings"),
        (lambda out: np.save(out / "img_emb" / "img_emb_1.npy", np.zeros(5, "f2")), "has no rows"),
        (lambda out: (out / "metadata" / "metadata_0.parquet").write_bytes(b"x"), "cannot be read"),
        (lambda out: (out / "failures.jsonl").write_text("{}\n"), "failures.jsonl cannot be read"),
    ],
)
def test_damaged_features_raise_one_line(
    damage: Callable[[Path], Any], message: str, stored: tuple[Path, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(stored[0], tmp_path / "copy")
    damage(copy)
    with pytest.raises(DataError, match=message) as caught:
        StoredFeatures(copy)
    assert len(str(caught.value).splitlines()) == 1


def cut_rows(path: Path) -> None:
    np.save(path, np.load(path)[:2])


def set_kind(out: Path, kind: str) -> None:
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "kind": kind}))


def test_pickled_features_contain_no_embeddings(stored: tuple[Path, Path]) -> None:
    rows = StoredRows(stored[0], "image")
    copy = pickle.loads(pickle.dumps(rows))
    assert copy._arrays == [] and len(copy) == len(rows)
    own, other = (np.empty((2, rows.width), dtype=np.float16) for _ in range(2))
    rows.read([0, 12], own)
    copy.read([0, 12], other)
    assert np.array_equal(own, other) and own.any()
