"""Tests of the search index: recall against exact search, changing folders, damaged indexes."""

import json
import os
import pickle
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from clipkit.__main__ import dispatch
from clipkit.errors import ConfigError, DataError
from clipkit.files.writing import FileLock
from clipkit.inference.index import ApproximateIndex
from clipkit.inference.search import Embeddings, EmbeddingsChanged
from clipkit.inference.storage import STORAGE
from tests.clipkit.inference.test_search import unit, write

pytest.importorskip("pyarrow")
pytest.importorskip("faiss")
WIDTH = 32


def rows_of(seed: int, count: int) -> np.ndarray:
    """Unit rows around eight directions."""
    centers = unit(np.random.default_rng(0), 8, WIDTH)
    rng = np.random.default_rng(seed)
    rows = centers[rng.integers(0, 8, count)] + 0.2 * rng.standard_normal((count, WIDTH))
    normed: np.ndarray = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return normed


def index(folder: Path) -> None:
    assert dispatch(["index", str(folder), "--quiet"]) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, *(rows_of(seed, 400).astype(np.float16) for seed in (1, 2)))
    index(tmp_path)
    return tmp_path


def recall(folder: Path, queries: np.ndarray, k: int = 10) -> float:
    exact, near = Embeddings(folder, exact=True), Embeddings(folder)
    found = []
    for query in torch.from_numpy(queries):
        want = {hit.id: hit.similarity for hit in exact.search(query, k)}
        hits = near.search(query, k)
        assert len(hits) == k and sorted(-hit.similarity for hit in hits) == [-hit.similarity for hit in hits]
        assert all(hit.similarity == pytest.approx(want[hit.id], abs=1e-6) for hit in hits if hit.id in want)
        found.append(np.mean([hit.id in want for hit in hits]))
    return float(np.mean(found))


def test_exchanged_files_of_equal_times_are_not_covered(tmp_path: Path) -> None:
    """As archives with fixed times give."""
    write(tmp_path, rows_of(1, 400), rows_of(2, 400))
    paths = [tmp_path / "img_emb" / f"img_emb_{number}.npy" for number in range(2)]
    for path in paths:
        os.utime(path, ns=(10**18, 10**18))
    index(tmp_path)
    assert Embeddings(tmp_path).unindexed == 0
    paths[0].rename(tmp_path / "other.npy")
    paths[1].rename(paths[0])
    (tmp_path / "other.npy").rename(paths[1])
    assert Embeddings(tmp_path).unindexed == 800
    assert Embeddings(tmp_path).search(torch.from_numpy(rows_of(1, 400)[7]), 1)[0].path == "1/7.png"


@pytest.mark.parametrize("dtype", [*STORAGE])
def test_index_recall_and_exact_similarities(
    tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, *(STORAGE[dtype].pack(rows_of(seed, 400)) for seed in (1, 2)))
    index(tmp_path)
    assert "added 800 rows of 800" in (said := capsys.readouterr().out)
    assert "recall@10 " in said and float(said.split("recall@10 ")[1].split()[0]) > 0.9
    assert recall(tmp_path, rows_of(3, 20)) > 0.95


@pytest.mark.parametrize("changed", ["img_emb/img_emb_0.npy", "metadata/metadata_0.parquet"])
def test_files_that_changed_since_they_were_opened_raise_an_error(folder: Path, changed: str) -> None:
    [path] = folder.glob(changed.replace("_0.", "_*0."))
    embeddings = Embeddings(folder)
    first = torch.from_numpy(rows_of(1, 400)[0])
    assert embeddings.search(first, 1)[0].id.startswith("0-0-")
    os.utime(path, ns=(1, 1))
    with pytest.raises(EmbeddingsChanged, match=f"{path.name} changed while it was read: search again"):
        embeddings.search(first, 1)


@pytest.mark.parametrize("width", [8, 100, 512])
def test_texts_find_their_nearest_images_at_any_width(tmp_path: Path, width: int) -> None:
    """Queries lie outside of the cloud of rows, whose uniform directions are the hardest to search."""
    rng = np.random.default_rng(0)
    rows = unit(rng, 20_000, width)
    write(tmp_path, rows.astype(np.float16))
    index(tmp_path)
    (codes,) = (tmp_path / "index").glob("*.faiss")
    content = codes.read_bytes()
    queries = rows[:20] + unit(rng, 1, width) + 0.5 * unit(rng, 20, width)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    assert recall(tmp_path, queries.astype(np.float32)) > 0.9
    shutil.rmtree(tmp_path / "index")
    index(tmp_path)
    (codes,) = (tmp_path / "index").glob("*.faiss")
    assert codes.read_bytes() == content


def test_rows_of_other_files_do_not_displace_candidates(tmp_path: Path) -> None:
    near, others = np.repeat(rows_of(1, 1), 290, axis=0), rows_of(2, 200)
    write(tmp_path, near, others)
    index(tmp_path)
    candidates = ApproximateIndex(tmp_path).near(near[0], 24, {1})
    assert {(1, row) for row in np.argsort(-(others @ near[0]))[:24].tolist()} <= {*candidates}
    assert {file_number for file_number, _ in candidates} == {1}


def test_equal_rows_and_an_index_that_outgrew_its_lists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, np.repeat(rows_of(1, 1), 30, axis=0))
    index(tmp_path)
    assert len(Embeddings(tmp_path).search(torch.from_numpy(rows_of(1, 1)[0]), 20)) == 20
    write(tmp_path, rows_of(2, 400), first=1)
    capsys.readouterr()
    index(tmp_path)
    assert "added 430 rows of 430" in capsys.readouterr().out


def test_only_candidates_of_the_index_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, query = Embeddings(folder), torch.from_numpy(rows_of(3, 1)[0])
    monkeypatch.setattr(Embeddings, "_compare_rows", lambda *_: pytest.fail("all rows were compared"))
    assert len(embeddings.search(query, 10)) == 10 and embeddings.unindexed == 0
    for arguments in ({"filters": [("group", "odd")], "k": 5}, {"k": 1001}):
        with pytest.raises(pytest.fail.Exception, match="all rows were compared"):
            embeddings.search(query, **arguments)
    with pytest.raises(pytest.fail.Exception, match="all rows were compared"):
        Embeddings(folder, exact=True).search(query, 5)


def test_outdated_index_finds_new_rows_and_omits_removed_ones(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows missing in the index are compared exactly."""
    embeddings = Embeddings(folder)
    new, replaced = rows_of(4, 50), rows_of(5, 400)
    write(folder, new.astype(np.float16), first=2)
    write(folder, replaced.astype(np.float16), first=1)
    embeddings.refresh()
    assert embeddings.unindexed == 450
    for rows, part in ((new, 2), (replaced, 1)):
        (hit,) = embeddings.search(torch.from_numpy(rows[7]), 1)
        assert hit.path == f"{part}/7.png" and hit.similarity == pytest.approx(1, abs=1e-3)
    (hit,) = embeddings.search(torch.from_numpy(rows_of(2, 400)[7]), 1)  # of the replaced part
    assert hit.similarity < 0.999
    assert recall(folder, rows_of(6, 10)) > 0.95
    index(folder)
    assert "added 850 rows of 850" in capsys.readouterr().out  # the index is rebuilt without the old rows
    write(folder, rows_of(7, 30).astype(np.float16), first=3)
    index(folder)
    assert "added 30 rows of 880" in capsys.readouterr().out
    embeddings.refresh()  # the previously mapped files are removed
    assert embeddings.unindexed == 0 and len(list((folder / "index").iterdir())) == 2
    for part in (1, 2):  # nearly all rows are new
        write(folder, rows_of(8, 400).astype(np.float16), first=part)
    (folder / "img_emb" / "img_emb_0.npy").unlink()
    embeddings.refresh()
    assert len(embeddings.search(torch.from_numpy(new[0]), 100)) == 100


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf, 1e20])
def test_files_and_samples_without_a_valid_row_are_indexed(
    tmp_path: Path, bad: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such rows are left out, also if they are all of a file, or all that the centers would be computed from."""
    write(tmp_path, rows_of(1, 500))
    index(tmp_path)
    write(tmp_path, np.full((3, WIDTH), bad, np.float32), first=1)
    index(tmp_path)
    assert "added 0 rows of 503" in capsys.readouterr().out
    rows = rows_of(2, 60_000)
    rows[2::2] *= bad  # of those that the centers would be computed from, the first is left
    write(tmp_path, rows)
    index(tmp_path)
    assert "added 30,001 rows of 60,003" in (said := capsys.readouterr().out)
    if bad != 1e20:  # exact search compares such rows
        assert float(said.split("recall@10 ")[1].split()[0]) > 0.9


def test_exact_search_leaves_out_infinite_rows_as_the_index_does(tmp_path: Path) -> None:
    rows = rows_of(1, 60)
    rows[2, 0], rows[5, 1] = np.inf, -np.inf
    write(tmp_path, rows)
    query = torch.from_numpy(abs(rows_of(2, 1)[0]))
    exact = {hit.path for hit in Embeddings(tmp_path, exact=True).search(query, 60)}
    assert exact == {f"0/{row}.png" for row in range(60)} - {"0/2.png", "0/5.png"}
    index(tmp_path)
    assert {hit.path for hit in Embeddings(tmp_path).search(query, 58)} == exact


def test_number_of_a_file_beyond_the_keys_of_the_index(tmp_path: Path) -> None:
    write(tmp_path, rows_of(1, 60), first=2**31)
    (hit,) = Embeddings(tmp_path).search(torch.from_numpy(rows_of(2, 1)[0]), 1)
    assert Embeddings(tmp_path).row(hit.id)[0].path == hit.path
    with pytest.raises(DataError, match="the number of a file, 2147483648, is too large"):
        Embeddings(tmp_path).write_index(lambda _: None)


def test_nonfinite_rows_and_small_folders(tmp_path: Path) -> None:
    rows = rows_of(1, 12)
    rows[3], rows[4] = np.nan, 0
    write(tmp_path, rows)
    index(tmp_path)
    hits = Embeddings(tmp_path).search(torch.from_numpy(rows[0]), 20)
    assert hits[0].path == "0/0.png" and "0/3.png" not in {hit.path for hit in hits} and len(hits) >= 10
    write(tmp_path, np.zeros((3, rows.shape[1]), np.int8))
    with pytest.raises(DataError, match="no row to search: those sampled are zero"):
        index(tmp_path)


def test_damaged_indexes_are_rejected(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = folder / "index" / "index.json"
    stored = json.loads(described.read_text())
    (codes,) = (folder / "index").glob("*.faiss")
    content = codes.read_bytes()
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (ran,)

    def damage(content: bytes) -> None:
        """As a faulty disk does: with the same time."""
        codes.write_bytes(content)
        os.utime(codes, ns=(stored["time"], stored["time"]))

    other_rotation = content[:500] + b"\xff" * 8 + content[508:]
    for damaged in (b"", content[:-1000], other_rotation, content + b"1", pickle.dumps(Evil())):
        damage(damaged)
        with pytest.raises(
            DataError, match=r"cannot use the index in .*run clipkit index .* or pass --exact"
        ):
            Embeddings(folder)
    assert not ran.exists() and len(Embeddings(folder, exact=True)) == 800
    query = torch.from_numpy(rows_of(1, 1)[0])
    for number, row in ((7, 0), (0, 400), (-1, 0)):
        damage(content[:-8] + ((number << 32) + row).to_bytes(8, "little", signed=True))  # the last row's key
        if number < 0:  # as of no row
            assert len(Embeddings(folder).search(query, 799)) == 799
        else:
            with pytest.raises(DataError, match=rf"\(no row {row} in file {number}\): run clipkit index"):
                Embeddings(folder).search(query, 799)
    codes.write_bytes(content)
    with pytest.raises(DataError, match=r"rows-\w+\.faiss has changed\): run clipkit index"):
        Embeddings(folder)
    damage(content)
    wrong: list[object] = [[], {}, stored | {"format": 1}, stored | {"covers": {"0": [1]}}]
    for changed in [*wrong, stored | {"file": "../../etc/passwd"}, stored | {"rows": 1}]:
        described.write_text(json.dumps(changed))
        with pytest.raises(DataError, match="cannot use the index"):
            Embeddings(folder)
    described.write_text("{")
    with pytest.raises(DataError, match="cannot use the index"):
        Embeddings(folder)
    described.unlink()
    described.symlink_to(described.name)
    with pytest.raises(DataError, match=r"cannot read .*index\.json: .*; pass --exact"):
        Embeddings(folder)
    described.unlink()
    index(folder)  # repairs it
    assert Embeddings(folder).unindexed == 0
    lock = FileLock(folder / "index" / ".lock")
    assert lock.try_acquire()
    with pytest.raises(ConfigError, match="another clipkit index"):
        index(folder)
    lock.release()
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match=r"requires faiss.*: pip install -e '\.\[index\]', or pass --exact"):
        Embeddings(folder)
    shutil.rmtree(folder / "index")
    assert len(Embeddings(folder).search(torch.from_numpy(rows_of(1, 1)[0]), 3)) == 3


def test_full_disk_keeps_the_previous_index(folder: Path) -> None:
    """Simulated by a limit on file sizes."""
    write(folder, rows_of(4, 50).astype(np.float16), first=2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(DataError, match=r"cannot write .*index: is the disk full"):
            index(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert Embeddings(folder).unindexed == 50 and len(list((folder / "index").iterdir())) == 2
