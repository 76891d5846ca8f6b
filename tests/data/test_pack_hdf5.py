"""Tests of packing HDF5 files: arrays of all kinds, captions in the file or in a table, and bad files."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from clipkit.errors import ConfigError, DataError
from clipkit.samples import open_samples
from data.options import PackOptions
from data.pack import pack
from data.shards.samples import Shards, find_shards

h5py = pytest.importorskip("h5py")
pytest.importorskip("pyarrow")
TEXTS = ("no acute process", "cardiomegaly", "edema, both lungs", 'with "quotes"', "größer")
CHEST = PackOptions(image_column="cxr")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the indexes of temporary shards out of the user's cache."""
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "cache"))


def arrays(shape: Sequence[int], dtype: str, seed: int = 0) -> npt.NDArray[Any]:
    """Return random values, whole numbers up to 255 for floats."""
    most = {"uint8": 256, "uint16": 2**16, "int16": 3000}.get(dtype, 256)
    return np.random.default_rng(seed).integers(0, most, (len(TEXTS), *shape)).astype(dtype)


def write_hdf5(path: Path, **datasets: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in datasets.items():
            file[name] = values
    return path


def write_csv(path: Path, texts: Sequence[str] = TEXTS) -> Path:
    """Write impressions as CheXzero does, with the names of files that are not read."""
    rows = ['"' + text.replace('"', '""') + '"' for text in texts]
    path.write_text("filename,impression\n" + "".join(f"s{i}.jpg,{row}\n" for i, row in enumerate(rows)))
    return path


def packed(source: Path, out: Path, options: PackOptions = CHEST) -> list[tuple[str, npt.NDArray[Any]]]:
    """Return captions and pixels of a packed file."""
    pack(source, out, options, progress=False)
    shards = Shards.of(find_shards(str(out)))
    found = []
    for i in range(len(shards)):
        sample = shards.read(i)
        if sample.image.startswith(b"\x93NUMPY"):
            values = np.load(io.BytesIO(sample.image), allow_pickle=False)
        else:
            values = np.asarray(Image.open(io.BytesIO(sample.image)))
        found.append((sample.fields["txt"], values))
    return found


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64"])
def test_chexzero_is_packed_from_its_hdf5_and_csv(dtype: str, tmp_path: Path) -> None:
    values = arrays((32, 28), dtype)
    source = write_hdf5(tmp_path / "cxr.h5", cxr=values)
    options = PackOptions(captions=write_csv(tmp_path / "impressions.csv"))
    found = packed(source, tmp_path / "out", options)
    assert [text for text, _ in found] == [*TEXTS]
    for (_, pixels), expected in zip(found, values, strict=True):
        assert np.array_equal(pixels, expected)
        assert pixels.dtype == (np.uint16 if dtype == "uint16" else np.uint8)


@pytest.mark.parametrize(
    ("shape", "dtype", "stored"),
    [
        ((20, 24, 3), "uint8", (20, 24, 3)),
        ((3, 20, 24), "uint8", (20, 24, 3)),
        ((20, 24, 1), "uint8", (20, 24)),
        ((1, 20, 24), "uint16", (20, 24)),
        ((20, 24, 1), ">u2", (20, 24)),
        ((20, 24), "int16", (20, 24)),
        ((20, 24, 3), "uint16", (20, 24, 3)),
        ((12, 20, 24), "uint16", (12, 20, 24)),
        ((20, 24, 4), "uint8", (20, 24, 4)),
    ],
)
def test_arrays_of_all_layouts_lose_nothing(
    shape: tuple[int, ...], dtype: str, stored: tuple[int, ...], tmp_path: Path
) -> None:
    values = arrays(shape, dtype)
    texts = [text.encode() for text in TEXTS]
    source = write_hdf5(tmp_path / "a.hdf5", cxr=values, caption=texts)
    found = packed(source, tmp_path / "out")
    assert [text for text, _ in found] == [*TEXTS]
    for (_, pixels), expected in zip(found, values, strict=True):
        assert pixels.shape == stored
        if shape != stored and len(stored) == 3:
            expected = np.moveaxis(expected, 0, 2)
        assert np.array_equal(pixels, expected.reshape(stored))


def test_floats_that_are_no_bytes_are_stored_with_all_bits(tmp_path: Path) -> None:
    values = arrays((20, 24), "float32") / 255
    for name, images in (("normalized", values), ("ones", np.round(values)), ("wide", values * 300)):
        source = write_hdf5(tmp_path / f"{name}.h5", cxr=images, caption=[*TEXTS])
        found = packed(source, tmp_path / name)
        for (_, pixels), image in zip(found, images, strict=True):
            np.testing.assert_array_equal(pixels, image, name)
        assert {pixels.dtype for _, pixels in found} == {images.dtype}


def test_images_with_other_floats_than_examined_ones_are_bad_rows(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (40, 9, 9)).astype("float32")
    values[1] += 0.5
    values[3, 0, 0] = np.nan
    values[4, 0, 0] = 256
    source = write_hdf5(tmp_path / "a.h5", cxr=values, caption=[f"text {i}" for i in range(40)])
    report = pack(source, tmp_path / "out", CHEST, progress=False)
    assert report.packed == 37
    assert report.bad == {
        "values that are not whole numbers from 0 to 255, as in other images of the file": 3
    }


def test_encoded_images_groups_and_fields(tmp_path: Path) -> None:
    files = []
    for i in range(5):
        file = io.BytesIO()
        Image.fromarray(arrays((16, 12), "uint8")[i]).save(file, "png")
        files.append(np.frombuffer(file.getvalue(), dtype=np.uint8))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        images = file.create_dataset("train/jpegs", 5, dtype=h5py.vlen_dtype(np.uint8))
        for i, data in enumerate(files):
            images[i] = data
        file["train/text"] = [*TEXTS]
        file["train/labels"] = np.arange(10).reshape(5, 2)
        file["age"] = np.array([1.5, np.nan, 3, 4, 5])
        file["site"] = np.array([b"a", b"b", b"\xff", b"d", b"e"])
        file["other"] = np.arange(7)
        file["version"] = 3
    options = PackOptions(caption_column="train/text")
    report = pack(tmp_path / "a.h5", tmp_path / "out", options, progress=False)
    assert report.image_column == "train/jpegs" and report.bad == {"not UTF-8: column 'site'": 1}
    assert report.fields == {"train/labels": "train_labels", "age": "age", "site": "site"}
    shards = Shards.of(find_shards(str(tmp_path / "out")))
    assert [shards.read(i).image for i in range(4)] == [files[i].tobytes() for i in (0, 1, 3, 4)]


def test_compressed_chunks_are_read_once_and_equal_images_are_one_sample(tmp_path: Path) -> None:
    values = arrays((20, 24), "uint8")
    values[3] = values[1]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("cxr", data=values, chunks=(5, 20, 24), compression="gzip")
        file["caption"] = [*TEXTS]
    report = pack(tmp_path / "a.h5", tmp_path / "out", CHEST, progress=False)
    assert report.summary == "5 rows, 4 images with 1 to 2 captions"
    rows = pack(tmp_path / "a.h5", tmp_path / "rows", PackOptions(group=False), progress=False)
    assert rows.packed == 5


def external_link(path: Path) -> None:
    write_hdf5(path.with_name("other.h5"), cxr=arrays((8, 8), "uint8"), caption=[*TEXTS])
    with h5py.File(path, "w") as file:
        file["cxr"] = h5py.ExternalLink("other.h5", "/cxr")


def virtual(path: Path) -> None:
    write_hdf5(path.with_name("other.h5"), cxr=arrays((8, 8), "uint8"))
    layout = h5py.VirtualLayout((5, 8, 8), dtype="u1")
    layout[:] = h5py.VirtualSource(str(path.with_name("other.h5")), "cxr", (5, 8, 8))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("cxr", layout)


def external_storage(path: Path) -> None:
    secret = path.with_name("secret")
    secret.write_bytes(b"secret" * 100)
    with h5py.File(path, "w") as file:
        file.create_dataset("cxr", (5, 8, 8), "u1", external=[(str(secret), 0, 320)])


def no_images(path: Path) -> None:
    write_hdf5(path, features=np.zeros((5, 512)), caption=[*TEXTS])


def two_images(path: Path) -> None:
    write_hdf5(path, a=arrays((8, 8), "uint8"), b=arrays((8, 8), "uint8"), caption=[*TEXTS])


def fewer_captions(path: Path) -> None:
    write_hdf5(path, cxr=arrays((8, 8), "uint8"), caption=[*TEXTS[1:]])


def no_rows(path: Path) -> None:
    write_hdf5(path, cxr=np.zeros((0, 8, 8)), caption=np.zeros(0, dtype="S3"))


def truncated(path: Path) -> None:
    write_hdf5(path, cxr=arrays((80, 80), "uint8"), caption=[*TEXTS])
    path.write_bytes(path.read_bytes()[:9000])


def huge_image(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("cxr", (5, 100_000, 100_000), "u1", chunks=(1, 64, 64))


def huge_chunk(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("cxr", (2**18, 80, 80), "u1", chunks=(2**18, 80, 80), compression="gzip")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (external_link, "'cxr' is in another file, which is not read"),
        (virtual, "'cxr' is in another file, which is not read"),
        (external_storage, "'cxr' is in another file, which is not read"),
        (no_images, "which dataset has the images, as arrays"),
        (no_images, "the datasets are caption (5,), features (5, 512)"),
        (two_images, "Set --image-column; the datasets are a (5, 8, 8), b (5, 8, 8), caption (5,)"),
        (fewer_captions, "'caption' has 4 rows, and 'cxr' has 5 images"),
        (no_rows, "a.h5 can be packed: it has no rows"),
        (truncated, "a.h5 cannot be read as HDF5: "),
        (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(500)), "a.h5 cannot be read as HDF5: "),
        (lambda path: path.write_bytes(b""), "a.h5 cannot be read as HDF5: "),
        (huge_image, "'cxr' has rows or chunks of more than 1,024 MiB"),
        (huge_chunk, "'cxr' has rows or chunks of more than 1,024 MiB"),
    ],
)
def test_bad_files_are_one_line(write: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    write(tmp_path / "a.h5")
    with pytest.raises(DataError) as caught:
        pack(tmp_path / "a.h5", tmp_path / "out", progress=False)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("texts", [TEXTS[1:], (*TEXTS, "one more", "and one")])
def test_other_number_of_rows_is_an_error(texts: Sequence[str], tmp_path: Path) -> None:
    source = write_hdf5(tmp_path / "a.h5", cxr=arrays((8, 8), "uint8"))
    table = write_csv(tmp_path / "impressions.csv", texts)
    with pytest.raises(DataError) as caught:
        pack(source, tmp_path / "out", PackOptions(captions=table), progress=False)
    assert str(caught.value) == (
        f"{table} has {len(texts)} rows, and {source} has 5 images in 'cxr': expected one row for each image, in "
        "the same order"
    )


def test_bad_rows_of_the_table_are_listed_and_keep_the_order(tmp_path: Path) -> None:
    values = arrays((8, 8), "uint8")
    source = write_hdf5(tmp_path / "a.h5", cxr=values)
    table = write_csv(tmp_path / "impressions.csv", ["a", " ", "c", "d", "e"])
    table.write_bytes(table.read_bytes().replace(b'"d"', b'"\xff"'))
    found = packed(source, tmp_path / "out", PackOptions(captions=table))
    assert [text for text, _ in found] == ["a", "c", "e"]
    assert np.array_equal(found[1][1], values[2]) and np.array_equal(found[2][1], values[4])


def test_wrong_names_are_one_line(tmp_path: Path) -> None:
    source = write_hdf5(tmp_path / "a.h5", cxr=arrays((8, 8), "uint8"), caption=[*TEXTS])
    with pytest.raises(
        DataError, match=r"which dataset has .* the datasets are caption \(5,\), cxr \(5, 8, 8\)"
    ):
        pack(source, tmp_path / "out", PackOptions(image_column="cxx"), progress=False)
    with pytest.raises(DataError, match="has no column 'text'"):
        pack(source, tmp_path / "out", PackOptions(caption_column="text"), progress=False)
    table = write_csv(tmp_path / "impressions.csv")
    with pytest.raises(ConfigError, match=r"--captions .*impressions.csv: expected an HDF5 file"):
        pack(table, tmp_path / "out", PackOptions(captions=table), progress=False)
    with pytest.raises(DataError, match=r"missing\.csv is not a file"):
        pack(source, tmp_path / "out", PackOptions(captions=tmp_path / "missing.csv"), progress=False)


def test_fields_of_the_table_without_captions_of_it(tmp_path: Path) -> None:
    source = write_hdf5(tmp_path / "a.h5", cxr=arrays((8, 8), "uint8"), caption=[*TEXTS])
    (tmp_path / "labels.csv").write_text("Edema,Mass\n" + "1,\n-1,0\n0,1\n,\n1,1\n")
    options = PackOptions(captions=tmp_path / "labels.csv", caption_column="caption")
    report = pack(source, tmp_path / "out", options, progress=False)
    assert report.packed == 5 and report.fields == {"Edema": "Edema", "Mass": "Mass"}
    labels = [open_samples(str(tmp_path / "out")).fields(i) for i in range(5)]
    assert [label["Edema"] for label in labels] == ["1", "-1", "0", None, "1"]
    assert [label["Mass"] for label in labels] == [None, "0", "1", None, "1"]


def test_other_commands_name_the_command_that_packs(tmp_path: Path) -> None:
    source = write_hdf5(tmp_path / "a.h5", cxr=arrays((8, 8), "uint8"), caption=[*TEXTS])
    for open_source in (find_shards, open_samples):
        with pytest.raises(DataError) as caught:
            open_source(str(source))
        assert str(caught.value) == (
            f"{source} is an HDF5 file: write its images and captions into shards with `python -m data pack "
            f"{source} OUT`"
        )
