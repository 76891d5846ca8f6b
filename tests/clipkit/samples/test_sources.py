"""Tests of recognizing sources: formats, and the files of a split, on this machine and in a store."""

import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

from clipkit.errors import DataError
from clipkit.samples import MissingSplit, find_source, find_split, open_samples
from clipkit.samples.sources import find_sources
from tests.clipkit.samples.remote import servers

nginx = servers.nginx
COUNT = 5


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    """Write the same images and captions in each format."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    photos = tmp_path / "photos"
    photos.mkdir()
    captions = [f"image {seed}" for seed in range(COUNT)]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for seed, caption in enumerate(captions):
            (photos / f"{seed}.png").write_bytes(png(seed))
            (photos / f"{seed}.txt").write_text(caption)
            for name in (f"{seed}.png", f"{seed}.txt"):
                tar.add(photos / name, name)
    rows = "".join(f"photos/{seed}.png,{caption}\n" for seed, caption in enumerate(captions))
    (tmp_path / "pairs.csv").write_text(f"image,caption\n{rows}")
    images = [png(seed) for seed in range(COUNT)]
    parquet.write_table(pyarrow.table({"image": images, "caption": captions}), tmp_path / "pairs.parquet")
    names = {"shards": "a.tar", "images": "photos", "table": "pairs.csv", "parquet": "pairs.parquet"}
    return {format: tmp_path / name for format, name in names.items()}


@pytest.mark.parametrize(
    "other", ["train-00000-of-00001", "train-00001-of-00002-4b1d", "train_00000-of-00002"]
)
def test_parts_of_different_datasets_are_refused(tmp_path: Path, other: str) -> None:
    for name in ("test-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002"):
        (tmp_path / f"{name}.parquet").touch()
    assert len(find_split(tmp_path, "train")[1]) == 2
    (tmp_path / f"{other}.parquet").touch()
    with pytest.raises(DataError, match=r"^\S+ and \S+ are parts of different datasets: remove one of them$"):
        find_split(tmp_path, "train")
    assert len(find_split(tmp_path, "test")[1]) == 1


def test_every_format_opens_the_same_samples(sources: dict[str, Path]) -> None:
    for format, path in sources.items():
        assert find_source(str(path)).format == format
        samples = open_samples(str(path))
        for opened in (samples, pickle.loads(pickle.dumps(samples))):
            assert [opened.read(i, "") for i in range(len(opened))] == [png(seed) for seed in range(COUNT)]
            assert opened.content_id == samples.content_id
        for i in range(COUNT):
            assert not samples.cause(i) and samples.locate(i)[1]
            captions = samples.fields(i) or {"caption": samples.read(i, "txt").decode()}
            [value] = captions.values()
            assert value in (f"image {i}", [f"image {i}"])


def test_formats_are_not_mixed_silently(sources: dict[str, Path]) -> None:
    folder = sources["shards"].parent
    with pytest.raises(DataError, match="has tars and tables: name them as separate sources"):
        find_source(f"{folder}/{{a.tar,pairs.csv}}")
    found = find_sources(f"{folder}/{{photos,a.tar,pairs.csv}}")
    assert [source.format for source in found] == ["shards", "table", "images"]
    with pytest.raises(DataError, match="is compressed: unpack it first"):
        (folder / "b.tar.gz").write_bytes(b"x")
        find_source(str(folder / "b.tar.gz"))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("training/0.tar", "train"), ("Validation/0.tar", "val"), ("dev/0.tar", "val"), ("testing/0.tar", "test"),
        ("extra/0.tar", "extra"), ("data/val-00000-of-00001.parquet", "val"), ("valid.parquet", "val"),
        ("data/TEST/0000.parquet", "test"), ("test_en.csv", "test"), ("extra-00000-of-00001.parquet", "extra"),
    ],
)  # fmt: skip
def test_names_of_splits(tmp_path: Path, name: str, split: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"x")
    stated, files = find_split(tmp_path, split)
    assert stated == split and [file.url for file in files] == [str(tmp_path / name)]
    for other in {"train", "val", "test"} - {split}:
        with pytest.raises(MissingSplit):
            find_split(tmp_path, other)


LAYOUT = st.sets(
    st.sampled_from(
        ["0.tar", "train/0.tar", "train/1.tar", "val/0.tar", "valid/0.tar", "data/train-0.parquet",
         "data/test-0.parquet", "train.parquet", "more.parquet", "data/more.parquet", "default/test/0.parquet"]
    )
)  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=LAYOUT, split=st.sampled_from(["train", "val", "test"]))
def test_splits_in_a_store_are_those_on_this_machine(
    tmp_path_factory: pytest.TempPathFactory, nginx: servers.Nginx, layout: set[str], split: str
) -> None:
    folder = tmp_path_factory.mktemp("set")
    for name in layout:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
        nginx.put(f"{folder.name}/{name}", b"x")

    def names(place: Path | str) -> tuple[str, list[str]] | None:
        try:
            stated, files = find_split(place, split)
        except MissingSplit:
            return None
        return stated, [file.url.rpartition(folder.name)[2] for file in files]

    if {"val/0.tar", "valid/0.tar"} <= layout and split == "val":
        for place in (folder, nginx.url(folder.name)):
            with pytest.raises(DataError, match="would both be the split 'val'"):
                find_split(place, split)
        return
    here = names(folder)
    there = names(nginx.url(folder.name)) if layout else None
    assert here == there


def test_missing_split_in_a_store_costs_few_requests(nginx: servers.Nginx) -> None:
    for name in ("set/train/0.tar", "set/train/1.tar", "set/photos/0.jpg"):
        nginx.put(name, b"x")
    nginx.put("unlisted/index.html", b"a page without links")
    for name, most in (("set", 3), ("unlisted", 7), ("none", 7)):
        before = len(nginx.requests())
        with pytest.raises(MissingSplit):
            find_split(nginx.url(name), "val")
        assert len(nginx.requests()) - before <= most
    nginx.put("unlisted/val/nshards.txt", b"2")
    for name in ("0.tar", "1.tar", "2.tar"):
        nginx.put(f"unlisted/val/{name}", b"x")
    stated, files = find_split(nginx.url("unlisted"), "val")
    assert stated == "val" and [file.name for file in files] == ["0.tar", "1.tar"]
    assert [file.size for file in files] == [1, 1]
