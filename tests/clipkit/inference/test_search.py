"""Tests of exact search over embeddings, including growing folders."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

import clipkit
from clipkit.__main__ import dispatch
from clipkit.errors import ConfigError, DataError
from clipkit.formats.checkpoint import save_model
from clipkit.inference.inputs import Item, Stream, read_image
from clipkit.inference.search import (
    Embeddings,
    EmbeddingsChanged,
    Hit,
    combine_query,
    encode_query,
    stale_note,
    thumbnail,
)
from clipkit.inference.storage import STORAGE, content_digest

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")


def write(folder: Path, *parts: np.ndarray, first: int = 0) -> None:
    """Write parts as ``clipkit encode`` does; row 3 of part 1 is the image 1/3.png."""
    from pyarrow import parquet

    for kind in ("img_emb", "metadata"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(parts, start=first):
        np.save(folder / "img_emb" / f"img_emb_{number}.npy", rows)
        names = [f"{number}/{row}.png" for row in range(len(rows))]
        groups = ["Odd" if row % 2 else None for row in range(len(rows))]
        source = ["images"] * len(rows)
        table = pyarrow.table(
            {"image_path": names, "group": groups, "source": source, "raw": [b"\xff"] * len(rows)}
        )
        path = folder / "metadata" / f"metadata_{number}.parquet"
        parquet.write_table(table, path, row_group_size=7)


def unit(rng: np.random.Generator, rows: int, width: int = 16) -> np.ndarray:
    found = rng.standard_normal((rows, width)).astype(np.float32)
    normed: np.ndarray = found / np.linalg.norm(found, axis=1, keepdims=True)
    return normed


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.integers(1, 40),
    st.sampled_from([*STORAGE]),
)
@settings(max_examples=60, deadline=None)
def test_search_equals_comparison_with_all_rows(seed: int, sizes: list[int], k: int, dtype: str) -> None:
    import tempfile

    rng = np.random.default_rng(seed)
    close = unit(rng, 1) + 1e-3 * rng.standard_normal((sum(sizes), 16))  # closer than float16 resolves
    rows = np.where(rng.random((sum(sizes), 1)) < 0.5, close, unit(rng, sum(sizes)))
    rows[rng.random(len(rows)) < 0.2] = rows[0]
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    rows = STORAGE[dtype].pack(rows)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), *np.split(rows, np.cumsum(sizes)[:-1]))
        query = torch.from_numpy(unit(rng, 1)[0])
        hits = Embeddings(Path(folder)).search(query, k)
    numbers = np.where(np.unpackbits(rows, axis=1), 1, -1) if dtype == "binary" else rows
    full = torch.from_numpy(numbers).double()
    full = full if dtype.startswith("float") else torch.nn.functional.normalize(full, dim=1)
    scores = full @ query.double()
    names = [f"{part}/{row}.png" for part, size in enumerate(sizes) for row in range(size)]
    assert len(hits) == min(k, len(rows))
    assert [hit.similarity for hit in hits] == pytest.approx(scores.topk(len(hits)).values.tolist(), abs=1e-6)
    for hit in hits:
        assert hit.similarity == pytest.approx(float(scores[names.index(hit.path)]), abs=1e-6)
    assert len({hit.id for hit in hits}) == len(hits)


def test_filters_exclude_rows(tmp_path: Path) -> None:
    write(tmp_path, unit(np.random.default_rng(0), 30).astype(np.float16))
    embeddings, query = Embeddings(tmp_path), torch.from_numpy(unit(np.random.default_rng(1), 1)[0])
    odd = embeddings.search(query, 50, filters=[("group", "oDD")])
    assert len(odd) == 15 and all(hit.metadata == {"group": "Odd", "raw": "b'\\xff'"} for hit in odd)
    assert [hit.path for hit in embeddings.search(query, 50, filters=[("image_path", "/7.")])] == ["0/7.png"]
    both = [("image_path", "1"), ("image_path", "2")]
    assert {hit.path for hit in embeddings.search(query, 50, filters=both)} == {"0/12.png", "0/21.png"}
    assert embeddings.search(query, 5, filters=[("group", "none of them")]) == []
    with pytest.raises(DataError, match="no column colour: image_path, group, source, raw"):
        embeddings.search(query, 5, filters=[("colour", "red")])
    with pytest.raises(DataError, match="column raw has no text"):
        embeddings.search(query, 5, filters=[("raw", "x")])
    with pytest.raises(DataError, match="dimension 8, the embeddings have 16"):
        embeddings.search(torch.ones(8), 5)


@pytest.mark.parametrize("second", [unit(np.random.default_rng(1), 3), np.zeros((3, 8), np.float16)])
def test_files_of_different_dtypes_or_dimensions_are_rejected(tmp_path: Path, second: np.ndarray) -> None:
    write(tmp_path, unit(np.random.default_rng(0), 3).astype(np.float16), second)
    with pytest.raises(DataError, match="different dimensions or dtypes"):
        Embeddings(tmp_path)


@pytest.mark.parametrize("shape", [b"(-3, 16)", b"(True, 8)", b"(3, 16", b"(9999999999999999999, 16)"])
def test_damaged_headers_are_reported_in_one_line(tmp_path: Path, shape: bytes) -> None:
    write(tmp_path, unit(np.random.default_rng(0), 3))
    path = tmp_path / "img_emb" / "img_emb_0.npy"
    content = path.read_bytes()
    described = shape + b", }"
    path.write_bytes(content.replace(b"(3, 16), }".ljust(len(described)), described.ljust(10)))
    with pytest.raises(DataError, match="cannot read"):
        Embeddings(tmp_path)


def test_metadata_that_is_not_utf8_is_reported_in_one_line(tmp_path: Path) -> None:
    from pyarrow import parquet

    write(tmp_path, unit(np.random.default_rng(0), 3))
    names = pyarrow.array([b"\xff.png"] * 3).view("string")
    parquet.write_table(pyarrow.table({"image_path": names}), tmp_path / "metadata" / "metadata_0.parquet")
    with pytest.raises(DataError, match="has text that is not UTF-8"):
        Embeddings(tmp_path).search(torch.from_numpy(unit(np.random.default_rng(1), 1)[0]), 1)


def test_blocks_of_rows_are_compared_in_turn(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = STORAGE["int8"].pack(unit(rng, 2100, 256))
    write(tmp_path, rows)
    query = unit(rng, 1, 256)[0]
    hits = Embeddings(tmp_path).search(torch.from_numpy(query), len(rows))
    exact = rows.astype(np.float64) @ query / np.linalg.norm(rows.astype(np.float64), axis=1)
    found = {int(hit.path[2:-4]): hit.similarity for hit in hits}
    assert [found[row] for row in range(len(rows))] == pytest.approx([*exact], abs=1e-6)


def test_new_rows_are_found_and_replaced_ones_are_rejected(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write(tmp_path, unit(rng, 10).astype(np.float16))
    embeddings = Embeddings(tmp_path)
    new = unit(rng, 5)
    write(tmp_path, new.astype(np.float16), np.zeros((0, 16), np.float16), first=1)  # all of part 2 failed
    query = torch.from_numpy(new[3])
    assert embeddings.search(query, 1)[0].path != "1/3.png"
    embeddings.refresh()
    (hit,) = embeddings.search(query, 1)
    assert hit.path == "1/3.png" and len(embeddings) == 15
    again, vector = embeddings.row(hit.id)
    assert again.path == hit.path
    torch.testing.assert_close(vector, query, atol=1e-3, rtol=0)
    (tmp_path / "metadata" / "metadata_0.parquet").unlink()  # as while it is rewritten
    write(tmp_path, unit(rng, 5).astype(np.float16), first=1)
    embeddings.refresh()
    assert len(embeddings) == 5
    for name in (hit.id, "1-2", "1-99-00000000", "../etc", "-1-0-00000000", f"1-77-{hit.id[-8:]}"):
        with pytest.raises(DataError, match="search again"):
            embeddings.row(name)


def test_invalid_embedding_folders_are_rejected(tmp_path: Path) -> None:
    for damaged in (b"", b"\x93NUMPY", b"junk" * 100):
        write(tmp_path, unit(np.random.default_rng(0), 4).astype(np.float16))
        (tmp_path / "img_emb" / "img_emb_0.npy").write_bytes(damaged)
        with pytest.raises(DataError, match="cannot read"):
            Embeddings(tmp_path)
    write(tmp_path, np.zeros((4, 2, 2), np.float16))
    with pytest.raises(DataError, match="expected rows of float32, float16, int8, uint8"):
        Embeddings(tmp_path)
    write(tmp_path, np.full((4, 4), {}, dtype=object))  # a pickle
    with pytest.raises(DataError, match="cannot read"):
        Embeddings(tmp_path)
    with pytest.raises(DataError, match="contains no embeddings"):
        Embeddings(tmp_path / "missing")
    write(tmp_path, np.ones((4, 4), np.float16))
    (tmp_path / "metadata" / "metadata_0.parquet").unlink()
    with pytest.raises(DataError, match=r"img_emb_0\.npy lacks its metadata: expected as many rows"):
        Embeddings(tmp_path)


def test_files_without_their_metadata_are_noted(tmp_path: Path) -> None:
    rows = unit(np.random.default_rng(0), 8).astype(np.float16)
    write(tmp_path, rows[:4], rows[4:])
    (tmp_path / "metadata" / "metadata_1.parquet").unlink()
    embeddings = Embeddings(tmp_path)
    assert len(embeddings) == 4
    assert stale_note(embeddings).endswith(f"are left out, such as {tmp_path / 'img_emb' / 'img_emb_1.npy'}")
    shutil.rmtree(tmp_path / "img_emb")
    with pytest.raises(DataError, match="contains no embeddings"):
        embeddings.refresh()
    assert len(embeddings) == 4 and embeddings.width == 16  # as before


def write_table(folder: Path, rows: int, seed: int, **columns: Any) -> Embeddings:
    """Write rows with the given metadata columns."""
    write(folder, unit(np.random.default_rng(seed), rows).astype(np.float16))
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "metadata" / "metadata_0.parquet")
    return Embeddings(folder)


def hit_of(path: str, source: str = "", *, directory: str = "", **metadata: Any) -> Hit:
    return Hit(id="", similarity=1, path=path, source=source, metadata=metadata, directory=directory)


def index_of(embeddings: Embeddings, hit: Hit) -> int:
    """Number of the row that a hit of another folder is of."""
    rows = np.load(embeddings.folder / "img_emb" / "img_emb_0.npy").astype(np.float32)
    return int((torch.from_numpy(rows) @ embeddings.find_embedding(hit)).argmax())


def test_paths_may_be_of_any_type_or_missing(tmp_path: Path) -> None:
    embeddings = write_table(tmp_path, 3, 0, image_path=[7, 8, 9], url=["a", "b", "c"])
    assert all(hit.path in ("7", "8", "9") for hit in embeddings.search(torch.ones(16) / 4, 3))
    embeddings = write_table(tmp_path, 1, 0, image_path=[0], source=[0])
    assert [(hit.path, hit.source) for hit in embeddings.search(torch.ones(16) / 4, 1)] == [("0", "0")]
    embeddings = write_table(tmp_path, 3, 0, url=["a", "b", "c"])
    assert all(hit.path == "" for hit in embeddings.search(torch.ones(16) / 4, 3))
    embeddings = write_table(tmp_path, 3, 0, image_path=[None, None, None], source=[None, None, None])
    assert all((hit.path, hit.source) == ("", "") for hit in embeddings.search(torch.ones(16) / 4, 3))


def test_columns_that_python_cannot_represent_or_of_the_same_name(tmp_path: Path) -> None:
    columns = {
        "taken": pyarrow.array([1, 2], pyarrow.timestamp("ns")),
        "seen": pyarrow.array([[1], [2]], pyarrow.list_(pyarrow.timestamp("ns"))),
        "end": pyarrow.array([2**62, 2**62], pyarrow.timestamp("ms")),
    }
    embeddings = write_table(tmp_path, 2, 0, image_path=["0", "1"], **columns)
    hits = {hit.path: hit.metadata for hit in embeddings.search(torch.ones(16) / 4, 2)}
    for row in range(2):
        taken = f"1970-01-01 00:00:00.00000000{row + 1}"
        assert hits[str(row)]["taken"] == taken and taken in hits[str(row)]["seen"] and hits[str(row)]["end"]
    texts = [pyarrow.array(["0", "1"]), pyarrow.array(["a", "b"]), pyarrow.array(["c", "d"])]
    table = pyarrow.Table.from_arrays(texts, names=["image_path", "x", "x"])
    pyarrow.parquet.write_table(table, tmp_path / "metadata" / "metadata_0.parquet")
    embeddings.refresh()
    with pytest.raises(DataError, match="several columns x: image_path, x, x"):
        embeddings.search(torch.ones(16) / 4, 2, filters=[("x", "a")])


def test_files_of_the_other_kind_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, unit(np.random.default_rng(0), 4))
    np.save(tmp_path / "img_emb" / "text_emb_0.npy", unit(np.random.default_rng(1), 4))
    assert len(Embeddings(tmp_path)) == 4


def test_renamed_files_are_opened_again(tmp_path: Path) -> None:
    """As ``clipkit encode`` does when the number of files gains a digit."""
    rows = unit(np.random.default_rng(0), 4)
    write(tmp_path, rows)
    embeddings = Embeddings(tmp_path)
    (tmp_path / "img_emb" / "img_emb_0.npy").rename(tmp_path / "img_emb" / "img_emb_00.npy")
    (tmp_path / "metadata" / "metadata_0.parquet").rename(tmp_path / "metadata" / "metadata_00.parquet")
    with pytest.raises(EmbeddingsChanged):
        embeddings.search(torch.from_numpy(rows[2]), 1)
    embeddings.refresh()
    assert embeddings.search(torch.from_numpy(rows[2]), 1)[0].path == "0/2.png"


def test_files_changed_in_place_with_their_times_restored(tmp_path: Path) -> None:
    rows = STORAGE["int8"].pack(unit(np.random.default_rng(0), 8))
    write(tmp_path, rows)
    embeddings, path = Embeddings(tmp_path), tmp_path / "img_emb" / "img_emb_0.npy"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-rows.nbytes, os.SEEK_END)
        file.write(np.ascontiguousarray(rows[::-1]).tobytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    query = torch.nn.functional.normalize(torch.from_numpy(rows[0]).float(), dim=0)
    with pytest.raises(EmbeddingsChanged):
        embeddings.search(query, 1)
    embeddings.refresh()
    (hit,) = embeddings.search(query, 1)
    assert (hit.path, round(hit.similarity, 5)) == ("0/7.png", 1)


def test_more_files_than_a_process_may_usually_open(tmp_path: Path) -> None:
    """On Linux and macOS, the usual limit is 1,024 or less."""
    write(tmp_path, *np.split(unit(np.random.default_rng(0), 60), 60))
    program = f"""
import resource
from pathlib import Path
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
import torch
from clipkit.inference.search import Embeddings
resource.setrlimit(resource.RLIMIT_NOFILE, (50, hard))
print(len(Embeddings(Path({str(tmp_path)!r})).search(torch.ones(16) / 4, 60)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("60\n", "")


def test_digests_identify_rows_of_other_folders(tmp_path: Path) -> None:
    """Also if keys repeat within a shard, or files have moved."""
    digests = ["a" * 16, "b" * 16, "b" * 16, None]
    embeddings = write_table(tmp_path, 4, 0, image_path=["0", "0", "1", "2"], digest=digests)
    for row in (0, 1):
        assert index_of(embeddings, hit_of("moved", digest=digests[row])) == row
    with pytest.raises(DataError, match="no embedding of 1"):
        embeddings.find_embedding(hit_of("1", digest="c" * 16))
    with pytest.raises(
        DataError, match="does not record the content of images: write it with clipkit encode"
    ):
        embeddings.find_embedding(hit_of("0"))
    without = write_table(tmp_path / "clip-retrieval", 2, 0, image_path=["0", "1"])
    with pytest.raises(DataError, match="does not record the content of images"):
        without.find_embedding(hit_of("0", digest=digests[0]))


def test_query_that_cancels_out_is_rejected() -> None:
    one = torch.eye(4)
    half = combine_query([one[0]], [one[0]])
    torch.testing.assert_close(half, one[0])
    with pytest.raises(DataError, match="add up to zero"):
        combine_query([one[0], -one[0]])
    with pytest.raises(DataError, match="NaN or infinity"):
        combine_query([one[0] * torch.nan])
    mixed = combine_query([one[0], one[1]], [one[2]])
    torch.testing.assert_close(mixed, torch.tensor([0.5, 0.5, -0.5, 0]) / 0.75**0.5)


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, images, and their embeddings; two of the images are in a shard."""
    folder = tmp_path_factory.mktemp("search")
    save_model(clipkit.create("ViT-Ti-4-16", seed=0).eval(), folder / "model")
    (folder / "images").mkdir()
    for number in range(12):
        noise = np.random.default_rng(number).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / "images" / f"{number}.png")
    import webdataset

    with webdataset.TarWriter(str(folder / "pairs.tar")) as shard:
        for key in ("a", "b"):
            image = Image.effect_noise((20, 20), 50 + ord(key)).convert("RGB")
            shard.write({"__key__": key, "png": image, "txt": f"caption {key}"})
    arguments = ["--model", str(folder / "model"), "--out", str(folder / "embeddings"), "--quiet"]
    assert dispatch(["encode", str(folder / "images"), str(folder / "pairs.tar"), *arguments]) == 0
    return folder


def test_image_query_finds_the_same_image(
    encoded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, image = str(encoded / "embeddings"), encoded / "images" / "7.png"
    assert dispatch(["search", folder, "--image", str(image), "-k", "3"]) == 0
    header, first, *others = capsys.readouterr().out.splitlines()
    captions = (
        ["caption"] if any("  caption " in line for line in (first, *others)) else []
    )  # images are noise
    assert header.split() == ["rank", "similarity", "path", *captions] and len(others) == 2
    assert first.split()[0] == "1" and float(first.split()[1]) > 0.999 and first.endswith("7.png")
    page = tmp_path / "found.html"
    assert dispatch(["search", folder, "noise", "--not", "a cat", "--html", str(page)]) == 0
    assert page.read_text(encoding="utf-8").count("data:image/jpeg;base64,") == 14


def test_thumbnails_are_of_the_member_that_was_encoded(encoded: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for name, color in (
            ("a.png", "red"),
            ("a.seen", "blue"),
            ("a.txt", ""),
            ("b.seen", "blue"),
            ("b.txt", ""),
        ):
            content = io.BytesIO(b"text")
            if color:
                Image.new("RGB", (20, 20), color).save(content, "PNG")
            member = tarfile.TarInfo(name)
            member.size = len(content.getvalue())
            content.seek(0)
            tar.addfile(member, content)
    arguments = ["--model", str(encoded / "model"), "--out", str(tmp_path / "embeddings"), "--quiet"]
    assert dispatch(["encode", str(tmp_path / "0.tar"), "--image", "seen", *arguments]) == 0
    embeddings = Embeddings(tmp_path / "embeddings")
    hits = embeddings.search(torch.nn.functional.normalize(torch.ones(embeddings.width), dim=0), 20)
    assert sorted(hit.path for hit in hits) == ["a", "b"]
    for hit in hits:
        red, _, blue = np.asarray(Image.open(io.BytesIO(thumbnail(hit, 8)))).mean(axis=(0, 1))
        assert blue > red


def test_images_in_shards_have_thumbnails(encoded: Path) -> None:
    embeddings = Embeddings(encoded / "embeddings")
    hits = embeddings.search(torch.nn.functional.normalize(torch.ones(embeddings.width), dim=0), 20)
    shard = {hit.path: hit for hit in hits if hit.source.endswith(".tar")}
    assert shard["a"].metadata["caption"] == "caption a"
    assert thumbnail(shard["a"], 8).startswith(b"\xff\xd8\xff")
    twice = encoded / "twice.tar"
    with tarfile.open(twice, "w") as tar:
        members = [("a.png", "blue"), ("b.jpg", "red"), ("b.png", "blue"), ("a.png", "red")]
        for name, color in members:
            content = io.BytesIO()
            Image.new("RGB", (20, 20), color).save(content, "JPEG" if name.endswith("jpg") else "PNG")
            member = tarfile.TarInfo(name)
            member.size = content.tell()
            content.seek(0)
            tar.addfile(member, content)
    with pytest.raises(DataError, match=r"twice\.tar has several images a"):
        thumbnail(hit_of("a", str(twice)), 8)
    duplicates = [item.image for item in Stream([str(twice)]) if item.key == "a" and item.image is not None]
    second = read_image(Item(source="", key="", image=duplicates[1]))
    for hit in (hit_of("b", str(twice)), hit_of("a", str(twice), digest=content_digest(second))):
        red, _, blue = np.asarray(Image.open(io.BytesIO(thumbnail(hit, 8)))).mean(axis=(0, 1))
        assert red > blue
    with pytest.raises(DataError, match="a has changed since it was encoded"):
        thumbnail(hit_of("a", str(twice), digest=content_digest(b"other")), 8)
    missing = Hit(id="", similarity=1, path="c", source=shard["a"].source, metadata={})
    with pytest.raises(DataError, match="has no image c"):
        thumbnail(missing, 8)
    with pytest.raises(DataError, match="missing file"):
        thumbnail(Hit(id="", similarity=1, path="/nowhere.png", source="/", metadata={}), 8)


def test_embeddings_of_another_model_are_rejected(encoded: Path, tmp_path: Path) -> None:
    save_model(clipkit.create("ViT-Ti-4-16", seed=1).eval(), tmp_path / "other")
    with pytest.raises(ConfigError, match="other weights"):
        dispatch(["search", str(encoded / "embeddings"), "x", "--model", str(tmp_path / "other")])
    changed = shutil.copytree(encoded / "embeddings", tmp_path / "changed")
    recorded = json.loads((changed / "manifest.json").read_text())
    (changed / "manifest.json").write_text(json.dumps(recorded | {"model": str(tmp_path / "other")}))
    with pytest.raises(
        ConfigError, match=r"other has changed since .*changed was encoded: encode into a new folder"
    ):
        dispatch(["search", str(changed), "x"])
    with pytest.raises(ConfigError, match="give a text or --image"):
        dispatch(["search", str(encoded / "embeddings")])
    write(tmp_path / "foreign", unit(np.random.default_rng(0), 4).astype(np.float16))
    with pytest.raises(ConfigError, match="pass --model"):
        dispatch(["search", str(tmp_path / "foreign"), "x"])
    with pytest.raises(ConfigError, match="dimension 128"):
        dispatch(["search", str(tmp_path / "foreign"), "x", "--model", str(tmp_path / "other")])
    (tmp_path / "foreign" / "manifest.json").write_text(json.dumps(["no", "manifest"]))
    with pytest.raises(DataError, match=r"manifest\.json"):
        Embeddings(tmp_path / "foreign")


def test_relative_paths_are_found_from_other_folders(
    encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(encoded)
    assert dispatch(["encode", "images", "--model", "model", "--out", str(tmp_path / "out"), "--quiet"]) == 0
    monkeypatch.chdir(tmp_path)
    embeddings = Embeddings(tmp_path / "out")
    (hit,) = embeddings.search(torch.nn.functional.normalize(torch.ones(embeddings.width), dim=0), 1)
    assert not Path(hit.path).is_absolute() and thumbnail(hit, 8).startswith(b"\xff\xd8\xff")
    assert dispatch(["search", "out", "noise"]) == 0  # by the model


def test_model_that_was_moved_is_recorded_again(encoded: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(encoded / "model", tmp_path / "model")
    for model in (tmp_path / "model", moved):
        command = ["encode", str(encoded / "images"), "--model", str(model), "--out", str(tmp_path / "out")]
        assert dispatch([*command, "--quiet"]) == 0
        if model != moved:
            model.rename(moved)
    assert dispatch(["search", str(tmp_path / "out"), "noise"]) == 0


def test_text_embeddings_are_searchable(encoded: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("a cat\na dog\n")
    model, out = str(encoded / "model"), str(tmp_path / "out")
    assert (
        dispatch(["encode", "--text", str(tmp_path / "lines.txt"), "--model", model, "--out", out, "--quiet"])
        == 0
    )
    embeddings = Embeddings(Path(out))
    query = combine_query(encode_query(clipkit.load(model), texts=["a dog"]))
    first, second = embeddings.search(query, 5)
    assert (first.path, second.path) == ("a dog", "a cat") and not embeddings.has_images
    assert first.similarity == pytest.approx(1, abs=1e-3)


def test_nonfinite_rows_are_never_found(tmp_path: Path) -> None:
    rows = unit(np.random.default_rng(0), 10).astype(np.float16)
    rows[3] = np.nan
    write(tmp_path, rows)
    query = torch.from_numpy(unit(np.random.default_rng(1), 1)[0])
    assert {hit.path for hit in Embeddings(tmp_path).search(query, 20)} == {
        f"0/{row}.png" for row in range(10) if row != 3
    }


@pytest.mark.parametrize("name", ["img_emb/img_emb_1.npy", "metadata/metadata_1.parquet"])
def test_missing_file_of_a_complete_folder_is_an_error(
    encoded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = tmp_path / "out"
    encoding = [
        "encode",
        str(encoded / "images"),
        "--model",
        str(encoded / "model"),
        "--out",
        str(out),
        "--quiet",
    ]
    encoding += ["--rows-per-file", "5"]
    assert dispatch(encoding) == 0
    embeddings = Embeddings(out)
    (out / name).unlink()
    message = rf"{out} lacks {name}, which was complete: run its clipkit encode command again"
    for command in (["search", str(out), "noise"], ["index", str(out)]):
        with pytest.raises(DataError, match=message):
            dispatch(command)
    for _ in range(2):
        with pytest.raises(DataError, match=message):
            embeddings.refresh()
    assert dispatch(encoding) == 0
    assert dispatch(["search", str(out), "noise"]) == 0
    assert capsys.readouterr().err == ""
    table = pyarrow.parquet.read_table(out / "metadata" / "metadata_1.parquet")
    pyarrow.parquet.write_table(table[:2], out / "metadata" / "metadata_1.parquet")
    with pytest.raises(
        DataError, match=r"has different numbers of rows in img_emb/img_emb_1\.npy and metadata"
    ):
        embeddings.refresh()
    assert dispatch(encoding) == 0
    embeddings.refresh()
    (out / ".parts" / "1.jsonl").unlink()  # as while encode runs
    (out / name).unlink()
    assert dispatch(["search", str(out), "noise"]) == 0
    assert "note: " in capsys.readouterr().err


def test_incomplete_folder_is_reported(tmp_path: Path) -> None:
    write(tmp_path, unit(np.random.default_rng(0), 4), unit(np.random.default_rng(1), 4))
    write(tmp_path, np.zeros((0, 16), np.float32), first=2)  # all of its items failed
    for items, missing in ((8, 0), (12, 0), (13, 1), (24, 3), ("24", 0)):
        manifest = {"items": items, "rows_per_file": 4}
        (tmp_path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        embeddings = Embeddings(tmp_path)
        assert embeddings.missing == missing
        assert ("is running or was interrupted" in stale_note(embeddings)) == bool(missing)


@pytest.mark.parametrize("fewer", [False, True])
def test_rows_are_never_reported_with_the_metadata_of_a_later_file(tmp_path: Path, fewer: bool) -> None:
    """``clipkit encode`` replaces files while they are open."""
    rows = unit(np.random.default_rng(0), 10)
    write(tmp_path, rows.astype(np.float16))
    embeddings, query = Embeddings(tmp_path), torch.from_numpy(rows[9])
    later = np.delete(rows, 0, axis=0) if fewer else rows[::-1]
    shutil.rmtree(tmp_path / "metadata")
    with pytest.raises(
        EmbeddingsChanged, match=r"metadata_0\.parquet changed while it was read: search again"
    ):
        embeddings.search(query, 1)
    write(tmp_path, later.astype(np.float16))
    with pytest.raises(EmbeddingsChanged, match=r"img_emb_0\.npy changed while it was read: search again"):
        embeddings.search(query, 1)
    assert embeddings.columns == ["image_path", "group", "source", "raw"]
    embeddings.refresh()
    (hit,) = embeddings.search(query, 1)
    assert hit.path == ("0/8.png" if fewer else "0/0.png")


def test_file_replaced_during_a_search_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = unit(np.random.default_rng(0), 10)
    write(tmp_path, rows.astype(np.float16))
    embeddings, compared = Embeddings(tmp_path), Embeddings._compare_rows

    def compared_then_replaced(*arguments: Any) -> Any:
        ranked = compared(*arguments)
        write(tmp_path, rows[::-1].astype(np.float16))
        return ranked

    monkeypatch.setattr(Embeddings, "_compare_rows", staticmethod(compared_then_replaced))
    with pytest.raises(EmbeddingsChanged, match="changed while it was read: search again"):
        embeddings.search(torch.from_numpy(rows[9]), 1)


def test_file_replaced_while_it_is_opened_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = unit(np.random.default_rng(0), 10)
    write(tmp_path, rows[:5].astype(np.float16), rows[5:].astype(np.float16))
    opened = np.lib.format.open_memmap

    def opened_then_replaced(path: Path, **options: Any) -> Any:
        array = opened(path, **options)
        if path.name == "img_emb_1.npy":
            write(tmp_path, rows[5:][::-1].astype(np.float16), first=1)
        return array

    monkeypatch.setattr(np.lib.format, "open_memmap", opened_then_replaced)
    embeddings = Embeddings(tmp_path)
    assert len(embeddings) == 5 and embeddings.left_out == [tmp_path / "img_emb" / "img_emb_1.npy"]
    monkeypatch.undo()
    embeddings.refresh()
    assert embeddings.search(torch.from_numpy(rows[9]), 1)[0].path == "1/0.png"


def test_truncated_file_does_not_end_the_process(tmp_path: Path) -> None:
    rows = unit(np.random.default_rng(0), 5000)
    write(tmp_path, rows)
    embeddings = Embeddings(tmp_path)
    os.truncate(tmp_path / "img_emb" / "img_emb_0.npy", 128)
    with pytest.raises(EmbeddingsChanged, match=r"img_emb_0\.npy changed while it was read: search again"):
        embeddings.search(torch.from_numpy(rows[9]), 1)


def test_search_finds_files_that_were_replaced_while_the_model_was_loaded(
    encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images, out = tmp_path / "images", str(tmp_path / "out")
    shutil.copytree(encoded / "images", images)
    encoding = ["encode", str(images), "--model", str(encoded / "model"), "--out", out, "--quiet"]
    assert dispatch(encoding) == 0

    def encode_and_update(*arguments: Any, **parts: Any) -> list[torch.Tensor]:
        vectors = encode_query(*arguments, **parts)
        if parts.get("images"):
            (images / "0.png").unlink()
            assert dispatch(encoding) == 0
            capsys.readouterr()
        return vectors

    monkeypatch.setattr("clipkit.inference.search.encode_query", encode_and_update)
    assert dispatch(["search", out, "--image", str(images / "7.png"), "-k", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("7.png")


def test_folder_of_another_model_is_an_error_until_it_is_opened_again(tmp_path: Path) -> None:
    rows = unit(np.random.default_rng(0), 4)
    path, manifest = tmp_path / "manifest.json", {"weights": "a", "kind": "image", "items": 4}
    write(tmp_path, rows)
    path.write_text(json.dumps(manifest), encoding="utf-8")
    embeddings = Embeddings(tmp_path)
    for other in (manifest | {"weights": "b"}, manifest | {"kind": "caption"}, {}, None):
        path.unlink()
        if other is not None:
            path.write_text(json.dumps(other), encoding="utf-8")
        for _ in range(2):
            with pytest.raises(DataError, match="was encoded with another model or of another kind since"):
                embeddings.refresh()
        Embeddings(tmp_path).refresh()
        path.write_text(json.dumps(manifest), encoding="utf-8")
        embeddings.refresh()
    # what does not change the query is taken over
    write(tmp_path, STORAGE["int8"].pack(rows))
    path.write_text(json.dumps(manifest | {"dtype": "int8", "directory": "/photos"}), encoding="utf-8")
    embeddings.refresh()
    (hit,) = embeddings.search(torch.from_numpy(rows[2]), 1)
    assert (hit.path, hit.directory) == ("0/2.png", "/photos")


def test_folder_without_a_complete_file_says_that_encode_runs(encoded: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--model", str(encoded / "model"), "--out", str(out), "--quiet", "--rows-per-file", "5"]
    assert dispatch(["encode", str(encoded / "images"), *arguments]) == 0
    embeddings = Embeddings(out)
    shutil.rmtree(out / ".parts")
    message = (
        "has no complete embedding file: if clipkit encode is running, wait for it; if it was interrupted"
    )
    for folder in ("metadata", "img_emb"):  # as while they are written
        for file in (out / folder).iterdir():
            file.unlink()
        with pytest.raises(DataError, match=message):
            dispatch(["search", str(out), "noise"])
        with pytest.raises(DataError, match=message):
            embeddings.refresh()
    shutil.rmtree(out)
    with pytest.raises(DataError, match=message):
        embeddings.refresh()
    with pytest.raises(
        DataError, match="contains no embeddings: expected a folder written by clipkit encode"
    ):
        dispatch(["search", str(out), "noise"])
