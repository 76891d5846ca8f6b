"""Tests of tables, image folders and Parquet as training data: they are packed into the cache once."""

import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clipkit.errors import DataError
from clipkit.samples import MissingSplit, decode_image
from clipkit.samples.remote.cache import cache_folder
from data.__main__ import main as pack_command
from data.selection import Selection
from data.shards.manifest import Manifest, make_manifest
from data.shards.samples import Shards, find_shards
from eval.readers import open_dataset
from tests.clipkit.format_images import bands_of, dicom_of, npy_of, npz_of
from tests.clipkit.samples.remote import servers

nginx = servers.nginx

FIND = "import sys; from data.shards.samples import find_shards; print(find_shards(sys.argv[1])[0].url)"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def images(folder: Path, count: int = 6, side: int = 9) -> list[tuple[str, str]]:
    """Write images and return their paths in the folder and their captions."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(count):
        name = f"{'inside/' if number % 2 else ''}{number:04d}.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (side, side + 1, 3), dtype=np.uint8)).save(folder / name)
        rows.append((name, f"caption, {number}"))
    return rows


def table(path: Path, rows: list[tuple[str, str]], folder: str) -> Path:
    path.write_text("image,caption\n" + "".join(f'{folder}/{name},"{text}"\n' for name, text in rows))
    return path


def parquet(path: Path, rows: list[tuple[str, str]], folder: Path, *, plain: bool = False) -> Path:
    """Write a table with encoded images as the hub stores them, or as plain bytes."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    content = [(folder / name).read_bytes() for name, _ in rows]
    encoded = content if plain else [{"bytes": one, "path": "x.png"} for one in content]
    write_table(arrow.table({"image": encoded, "text": [text for _, text in rows]}), path)
    return path


def samples(source: object, split: str = "train") -> list[tuple[str, bytes]]:
    """Return caption and image of each sample, in order of the captions."""
    shards = Shards(make_manifest([find_shards(str(source), split=split)], Selection()), Selection())
    read = [shards.read(place) for place in range(len(shards))]
    return sorted((str(one.fields.get("txt")), bytes(one.image)) for one in read)


def test_all_forms_of_sources_give_the_same_pairs(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    rows = images(folder)
    expected = sorted((text, (folder / name).read_bytes()) for name, text in rows)
    assert samples(table(tmp_path / "pairs.csv", rows, "photos")) == expected
    assert samples(parquet(tmp_path / "plain.parquet", rows, folder, plain=True)) == expected
    plain = (tmp_path / "pairs.csv").read_bytes()
    (tmp_path / "pairs.csv.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "pairs.txt").write_bytes(plain)
    lines = [json.dumps({"path": f"photos/{name}", "caption": text}) for name, text in rows]
    (tmp_path / "pairs.json").write_text(f"[{', '.join(lines)}]")
    for name in ("pairs.csv.gz", "pairs.txt", "pairs.json"):
        assert samples(tmp_path / name) == expected
    hub = tmp_path / "hub"
    hub.mkdir()
    parquet(hub / "train-00000-of-00002.parquet", rows[:3], folder)
    parquet(hub / "train-00001-of-00002.parquet", rows[3:], folder)
    parquet(hub / "test-00000-of-00001.parquet", rows[:1], folder)
    assert samples(hub) == samples(f"{hub}/train-*.parquet") == expected
    assert samples(hub, split="test") == expected[:1]
    table(folder / "metadata.csv", rows, ".")
    assert samples(folder) == expected
    (folder / "metadata.csv").unlink()
    for name, text in rows:
        (folder / name).with_suffix(".txt").write_text(text)
    assert samples(folder) == expected
    for name, text in rows:
        (folder / name).with_suffix(".txt").unlink()
        (folder / name).with_suffix(".json").write_text(json.dumps({"caption": text, "url": "http://host/"}))
    # as img2dataset lists URLs
    (folder / "00000.csv").write_text(
        "url,caption,key\n" + "".join(f"http://host/,{text},0\n" for _, text in rows)
    )
    assert samples(folder) == expected
    table(folder / "00000.csv", rows[:2], ".")  # files of captions are preferred, as in pack
    assert samples(folder) == expected
    (folder / "00000.csv").rename(folder / "metadata.csv")
    assert len(samples(folder)) == 2
    shutil.copy(folder / rows[0][0], folder / "new.png")
    assert len(samples(folder)) == 2
    listings = cache_folder().glob("packed/photos-*/bad_rows.jsonl")
    assert sorted(listing.read_text().count("not listed in metadata.csv") for listing in listings) == [4, 5]


@pytest.mark.parametrize("column", ["filename", "image", "data"])
def test_column_of_bytes_has_the_images(tmp_path: Path, column: str) -> None:
    """Also beside a column of the names of the files, which are not on this disk."""
    pyarrow, library = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = images(tmp_path / "photos")
    content = [{"bytes": (tmp_path / "photos" / name).read_bytes(), "path": name} for name, _ in rows]
    names = {"id" if column != "image" else "filename": [name for name, _ in rows]}
    captions = [text for _, text in rows]
    columns = pyarrow.table({**names, column: content, "text": captions})
    library.write_table(columns, tmp_path / "set.parquet")
    assert [text for text, _ in samples(tmp_path / "set.parquet")] == sorted(captions)


def test_splits_have_separate_pairs(tmp_path: Path) -> None:
    rows = images(tmp_path / "photos")
    expected = sorted(text for text, _ in samples(table(tmp_path / "pairs.csv", rows, "photos")))
    hub = tmp_path / "repository" / "data"
    hub.mkdir(parents=True)
    for number, row in enumerate(rows[:4]):
        split = ("train", "test")[number // 2]
        parquet(hub / f"{split}-0000{number % 2}-of-00002.parquet", [row], tmp_path / "photos")
    for folder in (hub, hub.parent):
        assert [text for text, _ in samples(folder)] == expected[:2]
        assert [text for text, _ in samples(folder, split="test")] == expected[2:4]
    for split in ("train", "test"):
        for name, text in images(tmp_path / "splits" / split, 2):
            (tmp_path / "splits" / split / name).with_suffix(".txt").write_text(f"{split} {text}")
    assert {text[:4] for text, _ in samples(tmp_path / "splits", split="test")} == {"test"}
    shutil.rmtree(tmp_path / "splits" / "test")
    for one in hub.glob("test-*"):
        one.unlink()
    (hub / "train-00001-of-00002.parquet").unlink()  # one table is left, of the other split
    for folder in (hub, hub.parent, tmp_path / "splits"):
        with pytest.raises(DataError, match=r"no split 'test', only train|of split 'test'"):
            find_shards(str(folder), split="test")


def test_tables_of_arrays_need_no_setting(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    Image.fromarray(values).save(tmp_path / "0.png")
    contents = {
        "0.png": (tmp_path / "0.png").read_bytes(),
        "1.npy": npy_of(values),
        "2.npz": npz_of(values),
        "3.tif": bands_of(values, photometric="rgb"),
        "4.dcm": dicom_of(values),
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    rows = [(name, f"caption {name}") for name in contents]
    source = table(tmp_path / "t.csv", rows, str(tmp_path))
    read = samples(source)
    assert [text for text, _ in read] == [text for _, text in rows]
    for _, data in read:
        assert np.array_equal(decode_image(data), values)
    assert pack_command(["pack", str(source), str(tmp_path / "out"), "--test", "1", "--quiet"]) == 0
    tested = open_dataset(tmp_path / "out")
    assert [tested.images.read(i) for i in range(len(rows))] == [data for _, data in read]


LAYOUTS = ("tables", "Parquet", "folders with captions", "folders with tables")


def write_splits(folder: Path, layout: str) -> dict[str, list[str]]:
    """Write three splits of a dataset; return the captions of each."""
    captions: dict[str, list[str]] = {}
    for split, count in (("train", 3), ("val", 1), ("test", 2)):
        photos = folder / split if layout.startswith("folders") else folder / "photos" / split
        photos.mkdir(parents=True)
        rows = [(f"{i}.png", f"{split} {i}") for i in range(count)]
        for i, (name, _) in enumerate(rows):
            Image.new("RGB", (5, 4), (i, len(split), 0)).save(photos / name)
        captions[split] = [text for _, text in rows]
        if layout == "tables":
            table(folder / f"{split}.csv", rows, f"photos/{split}")
        elif layout == "Parquet":
            parquet(folder / f"{split}.parquet", rows, photos)
        elif layout == "folders with tables":
            table(photos / "metadata.csv", rows, ".")
        else:
            for name, text in rows:
                (photos / name).with_suffix(".txt").write_text(text)
    return captions


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_training_and_evaluation_choose_the_same_rows(
    tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = write_splits(tmp_path / "set", layout)
    assert pack_command(["pack", str(tmp_path / "set"), str(tmp_path / "out"), "--quiet"]) == 0
    assert "splits   train" in capsys.readouterr().out
    assert not (tmp_path / "out/bad_rows.jsonl").exists()
    for split, captions in expected.items():
        for source in (tmp_path / "set", tmp_path / "out"):
            assert [text for text, _ in samples(source, split)] == captions
            evaluated = open_dataset(source, split=split)
            assert sorted(evaluated.captions or ()) == [(text,) for text in captions]


def test_classes_of_each_split_are_packed(tmp_path: Path) -> None:
    for name in ("train/n01440764/1.png", "train/n01443537/2.png", "Validation/n01443537/3.png"):
        images((tmp_path / "set" / name).parent, 1)
    (tmp_path / "set/classnames.txt").write_text("a cat\na dog\n")
    images(tmp_path / "set/train", 1)
    images(tmp_path / "set", 1)
    assert pack_command(["pack", str(tmp_path / "set"), str(tmp_path / "out"), "--quiet"]) == 0
    assert [text for text, _ in samples(tmp_path / "out")] == ["a cat", "a dog"]
    assert [text for text, _ in samples(tmp_path / "out", "val")] == ["a dog"]
    listing = (tmp_path / "out/bad_rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["cause"] for line in listing] == [
        "outside the class folders",
        "not in train, Validation",
    ]


def test_training_reads_images_by_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train/n01440764/1.png", "train/n01443537/2.png", "test/n01443537/3.png"):
        images((tmp_path / "set" / name).parent, 1)
    images(tmp_path / "set/train", 1)
    assert [text for text, _ in samples(tmp_path / "set")] == ["n01440764", "n01443537"]
    said = capsys.readouterr().err
    assert "1 bad row left out" in said
    assert "warning: the captions are names of folders that look like ids, such as 'n01440764'" in said
    for names in (["a cat", "a dog"], ["a lion", "a fox"]):  # packed again if the names change
        (tmp_path / "set/classnames.txt").write_text("".join(f"{name}\n" for name in names))
        assert [text for text, _ in samples(tmp_path / "set")] == sorted(names)
        assert [text for text, _ in samples(tmp_path / "set", "test")] == names[1:]
        assert len(open_dataset(tmp_path / "set", split="test")) == 1
    assert "warning" not in capsys.readouterr().err
    images(tmp_path / "flat/cat", 1)
    images(tmp_path / "flat/dog", 1)
    assert [text for text, _ in samples(tmp_path / "flat")] == ["cat", "dog"]


def test_rows_of_another_split_than_their_file_are_bad(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        rows = images(tmp_path / split, 3)
        lines = [f"{tmp_path}/{split}/{name},{split} {i},{word}" for i, ((name, _), word) in
                 enumerate(zip(rows, (split, "", "val"), strict=True))]  # fmt: skip
        (tmp_path / "set" / f"{split}.csv").write_text("\n".join(["image,caption,split", *lines]))
    assert pack_command(["pack", str(tmp_path / "set"), str(tmp_path / "out"), "--quiet"]) == 0
    listing = [json.loads(line) for line in (tmp_path / "out/bad_rows.jsonl").read_text().splitlines()]
    assert [(row["split"], row["row"]) for row in listing] == [("train", 3), ("test", 3)]
    assert listing[0]["cause"] == "its split is 'val', and that of its file 'train'"
    for split in ("train", "test"):
        assert [text for text, _ in samples(tmp_path / "set", split)] == [f"{split} 0", f"{split} 1"]
        assert len(open_dataset(tmp_path / "set", split=split)) == 2


def test_column_split_decides_which_rows_of_a_table_are_read(tmp_path: Path) -> None:
    rows = images(tmp_path / "photos", 3)
    lines = [f"photos/{name},{text.replace(',', '')},{split}" for (name, text), split in
             zip(rows, ("train", "test", "train"), strict=True)]  # fmt: skip
    source = tmp_path / "t.csv"
    source.write_text("\n".join(["image,caption,split", *lines]))
    assert [len(samples(source, split)) for split in ("train", "test")] == [2, 1]
    with pytest.raises(MissingSplit, match=r"t\.csv has no split 'val', only test, train$"):
        find_shards(str(source), split="val")
    table(source, rows, "photos")  # rows that state no split are in every split
    assert len(samples(source, "val")) == 3


def test_source_is_packed_once_and_again_when_it_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = images(tmp_path / "photos")
    source = table(tmp_path / "pairs.csv", [*rows, ("gone.png", "nothing")], "photos")
    first = find_shards(str(source))
    said = capsys.readouterr().err
    assert "packed 6 pairs" in said and "1 bad row left out" in said
    assert find_shards(str(source)) == first and not capsys.readouterr().err
    recorded = make_manifest([first], Selection())
    os.utime(source, ns=(0, 0))  # as in a copy
    touched = find_shards(str(source))
    assert touched != first
    assert not _changes(make_manifest([touched], Selection()), recorded)
    table(source, rows[1:], "photos")
    assert _changes(make_manifest([find_shards(str(source))], Selection()), recorded)


def _changes(new: Manifest, old: Manifest) -> list[str]:
    return list(new.changes_since(old))


def test_processes_pack_a_source_once(tmp_path: Path) -> None:
    source = table(tmp_path / "pairs.csv", images(tmp_path / "photos", 300, side=60), "photos")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", FIND, str(source)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    outputs = [one.communicate(timeout=120) for one in started]
    assert len({out for out, _ in outputs}) == 1 and all(one.returncode == 0 for one in started)
    assert sum(error.count(b"packed 300 pairs") for _, error in outputs) == 1


def test_files_of_a_killed_process_are_removed(tmp_path: Path, cache: Path) -> None:
    source = table(tmp_path / "pairs.csv", images(tmp_path / "photos", 300, side=60), "photos")
    process = subprocess.Popen([sys.executable, "-c", FIND, str(source)], stderr=subprocess.DEVNULL)
    while not (left := list((cache / "packed").glob(".*.partial-*/train/0.tar"))):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert left[0].exists()
    assert len(samples(source)) == 300
    assert [one.name for one in (cache / "packed").iterdir()] == [
        Path(find_shards(str(source))[0].url).parents[1].name
    ]


@pytest.mark.parametrize("place", ["", "data/"])
def test_remote_parquet_is_downloaded_once_and_again_when_it_changes(
    nginx: servers.Nginx, tmp_path: Path, cache: Path, place: str
) -> None:
    rows = images(tmp_path / "photos")
    for number, some in enumerate((rows[:2], rows[2:])):
        file = parquet(tmp_path / f"train-{number:05d}-of-00002.parquet", some, tmp_path / "photos")
        nginx.put(f"set/{place}{file.name}", file.read_bytes())
    folder = nginx.url("set")
    wanted = [(text, (tmp_path / "photos" / name).read_bytes()) for name, text in rows]
    assert samples(folder) == wanted

    def downloads() -> int:
        return sum(
            request.name.endswith(".parquet") and request.sent > 500  # smaller responses are HEAD requests
            for request in nginx.requests()
        )

    assert downloads() == 2 and samples(folder) == wanted and downloads() == 2
    assert samples(nginx.url(f"set/{place}train-{{00000..00001}}-of-00002.parquet")) == wanted
    assert downloads() == 2
    changed = parquet(tmp_path / "train-00001-of-00002.parquet", rows[3:], tmp_path / "photos")
    nginx.put(f"set/{place}{changed.name}", changed.read_bytes())
    assert samples(folder) == [*wanted[:2], *wanted[3:]]
    assert not list((cache / "packed").glob(".*.tables"))
    with pytest.raises(DataError, match=r"/set has no split 'test', only train"):
        find_shards(folder, split="test")


def test_remote_table_of_urls_suggests_the_download_command(nginx: servers.Nginx) -> None:
    url = nginx.put("pairs.csv", b"url,caption\nhttp://there/1.jpg,one\n")
    with pytest.raises(
        DataError, match=rf"is a table in a store.*`python -m data download {url} OUT` downloads both"
    ):
        find_shards(url)


def test_invalid_sources_raise_one_line(tmp_path: Path) -> None:
    odd = tmp_path / "odd.csv"
    odd.write_text("a,b\n1,2\n")
    with pytest.raises(
        DataError, match=r"which column is the image\?.* a, b. Write shards with `python -m data pack"
    ):
        find_shards(str(odd))
    odd.write_text("image,caption\n")
    with pytest.raises(DataError, match=r"no row of .* can be packed: it has no rows"):
        find_shards(str(odd))
    images(tmp_path / "photos")
    with pytest.raises(DataError, match="has images without captions"):
        find_shards(str(tmp_path / "photos"))
    images(tmp_path / "flickr" / "Images")
    (tmp_path / "flickr" / "captions.txt").write_text("image,caption\n0000.png,a\n")
    with pytest.raises(DataError, match=r"captions\.txt is a table .*: name the table instead of the folder"):
        find_shards(str(tmp_path / "flickr"))
    (tmp_path / "photos" / "0000.txt").write_bytes(b"\xff")
    with pytest.raises(
        DataError,
        match=r"can be packed: 5 × no caption.*caption is not UTF-8.*expected a .txt file for each image",
    ):
        find_shards(str(tmp_path / "photos"))
    assert not list(cache_folder().glob("packed/*"))


def test_broken_and_empty_images_in_parquet_are_bad_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    image = io.BytesIO()
    Image.new("RGB", (4, 4)).save(image, "png")
    encoded = [image.getvalue(), b"GIF8", b"", None]
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    column = arrow.array([one if one is None else {"bytes": one, "path": None} for one in encoded], type=kind)
    write_table(arrow.table({"image": column, "caption": ["a", "b", "c", "d"]}), tmp_path / "t.parquet")
    assert [text for text, _ in samples(tmp_path / "t.parquet")] == ["a"]
    assert "3 bad rows left out" in capsys.readouterr().err


def test_missing_part_of_parquet_files_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    rows = images(folder)
    hub = tmp_path / "hub/data"
    hub.mkdir(parents=True)
    first = parquet(hub / "train-00000-of-00002.parquet", rows[:3], folder)
    parquet(hub / "test-00000-of-00001.parquet", rows[:1], folder)
    expected = f"part 1 of 2 is missing next to {first}; download it again"
    for source in (hub.parent, hub, f"{hub}/train-*.parquet"):
        with pytest.raises(DataError) as caught:
            find_shards(str(source))
        assert str(caught.value) == expected
    assert len(samples(first)) == 3  # a part that the user names
    assert pack_command(["pack", str(first), str(tmp_path / "part")]) == 0
    second = parquet(hub / "train-00001-of-00002.parquet", rows[3:], folder)
    assert len(samples(hub)) == 6
    assert len(samples(second)) == 3
    assert pack_command(["pack", str(hub.parent), str(tmp_path / "out"), "--quiet"]) == 0
    assert [len(samples(tmp_path / "out", split)) for split in ("train", "test")] == [6, 1]
