"""Tests of compact embeddings: accuracy and recall of each type, and folders that store them."""

import json
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
from clipkit.inference.storage import STORAGE, recall, storage_of, unpacked
from data.shards.teacher import StoredRows

pytest.importorskip("pyarrow")


def unit(seed: int, rows: int, width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    found = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    normed: np.ndarray[Any, Any] = found / np.linalg.norm(found, axis=1, keepdims=True)
    return normed


@given(st.integers(0, 2**32 - 1), st.integers(0, 20), st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_unpacked_rows_are_close_unit_vectors(seed: int, count: int, bytes_: int) -> None:
    rows = unit(seed, count, 8 * bytes_)
    for name, within in (("float32", 1e-6), ("float16", 2e-3), ("int8", 0.5 / 127)):
        stored = STORAGE[name].pack(rows)
        assert storage_of(stored) is STORAGE[name] and stored.dtype == name
        found = unpacked(stored)
        assert found.dtype == np.float32
        # rounding moves an int8 element by half a step of the largest, and changes the norm
        np.testing.assert_allclose(found, rows, atol=2 * within)
    signs = torch.nn.functional.normalize(torch.where(torch.from_numpy(rows) > 0, 1.0, -1.0), dim=1)
    np.testing.assert_allclose(unpacked(STORAGE["binary"].pack(rows)), signs.numpy(), atol=1e-6)


def test_binary_rows_equal_sentence_transformers() -> None:
    quantization = pytest.importorskip("sentence_transformers.quantization")
    rows = unit(0, 10, 24)
    theirs = quantization.quantize_embeddings(rows, precision="ubinary")
    np.testing.assert_array_equal(STORAGE["binary"].pack(rows), theirs)


def test_invalid_arrays_are_rejected() -> None:
    for array in (
        np.zeros(4, np.float32),
        np.zeros((2, 2, 2), np.int8),
        np.zeros((2, 2)),
        np.zeros((2, 0), "f2"),
    ):
        with pytest.raises(DataError, match="expected rows of float32, float16, int8, uint8"):
            storage_of(array)


def test_recall_equals_scikit_learn() -> None:
    neighbors = pytest.importorskip("sklearn.neighbors")
    rows = unit(0, 200, 32)
    for name in STORAGE:
        stored = unpacked(STORAGE[name].pack(rows))
        near = [
            neighbors.NearestNeighbors(n_neighbors=11, metric="cosine")
            .fit(fitted)
            .kneighbors(rows)[1]
            .tolist()
            for fitted in (rows, stored)
        ]
        others = [
            [[one for one in found if one != own][:10] for own, found in enumerate(rows_near)]
            for rows_near in near
        ]
        want = np.mean([len({*a} & {*b}) / 10 for a, b in zip(*others, strict=True)])
        assert recall(rows, stored) == pytest.approx(want, abs=1e-3)
    assert recall(rows, rows) == 1
    assert recall(np.repeat(rows[:1], 30, axis=0), rows[:30]) == 1  # all distances are equal
    assert 0.1 < recall(rows, unpacked(rows[:, :16].copy())) < 0.9


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and 30 images."""
    folder = tmp_path_factory.mktemp("storage")
    save_model(clipkit.create("ViT-Ti-4-16", seed=0).eval(), folder / "model")
    (folder / "images").mkdir()
    for number in range(30):
        noise = np.random.default_rng(number).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / "images" / f"{number:02d}.png")
    return folder


def encode(made: Path, out: Path, *options: str) -> None:
    arguments = [str(made / "images"), "--model", str(made / "model"), "--out", str(out), "--quiet"]
    assert dispatch(["encode", *arguments, "--rows-per-file", "8", *options]) == 0


def tree(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("dtype", [*STORAGE])
def test_encode_resume_search_and_read_with_each_type(
    made: Path, tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    encode(made, out, "--dtype", dtype, "--dim", "64")
    said = capsys.readouterr().out
    assert ("recall@10" in said) == (dtype != "float32")
    assert "30 embeddings of dimension 64 in 4 files" in said
    assert json.loads((out / "manifest.json").read_text())["dtype"] == dtype
    model = clipkit.load(made / "model", dim=64)
    images = sorted((made / "images").iterdir())
    want = clipkit.encode_image([str(path) for path in images], model).numpy()
    stored = [np.load(path) for path in sorted((out / "img_emb").iterdir())]
    tolerance = {"float32": 1e-6, "float16": 1e-3, "int8": 0.01}.get(dtype)
    if tolerance is None:
        np.testing.assert_array_equal(np.concatenate(stored), np.packbits(want > 0, axis=1))
    else:
        np.testing.assert_allclose(unpacked(np.concatenate(stored)), want, atol=tolerance)
    before = tree(out)
    for path in ("img_emb/img_emb_1.npy", ".parts/3.jsonl"):  # as after a kill
        (out / path).unlink()
    encode(made, out, "--dtype", dtype, "--dim", "64")
    assert tree(out) == before
    assert dispatch(["search", str(out), "--image", str(images[7]), "-k", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("07.png")
    rows = StoredRows(out, "image")
    row = rows.find(images[29].read_bytes())
    read = np.empty((1, rows.width), np.float16)
    rows.read([row], read)
    np.testing.assert_allclose(read[0], unpacked(stored[3][-1:])[0], atol=1e-3)
    assert ("--dtype" in rows.command([])) == (dtype != "float16")


def test_folder_keeps_its_type(made: Path, tmp_path: Path) -> None:
    encode(made, tmp_path / "out")
    manifest = tmp_path / "out" / "manifest.json"
    stored = json.loads(manifest.read_text())
    del stored["dtype"]  # as in manifests of earlier versions
    manifest.write_text(json.dumps(stored))
    before = tree(tmp_path / "out")
    encode(made, tmp_path / "out")
    assert tree(tmp_path / "out") == before
    with pytest.raises(
        ConfigError, match="--dtype was float16 and is now int8; resume with the same settings, or use"
    ):
        encode(made, tmp_path / "out", "--dtype", "int8")
    with pytest.raises(ConfigError, match=r"dimension 20 cannot be stored with 8 .*: use a multiple of 8"):
        encode(made, tmp_path / "new", "--dim", "20", "--dtype", "binary")
    assert not (tmp_path / "new").exists()
