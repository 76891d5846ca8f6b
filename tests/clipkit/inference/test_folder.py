"""Tests of re-encoding a folder of embeddings: only parts whose sources changed are written again."""

import errno
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import clipkit
from clipkit.errors import ConfigError, DataError
from clipkit.inference.classify import classify_images
from clipkit.inference.encode import Encoded, encode
from clipkit.inference.folder import only_writer
from clipkit.inference.inputs import Item, Stream
from clipkit.inference.stream import FeatureStream
from clipkit.model.clip import CLIP
from clipkit.options import EncodeOptions

parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def model() -> CLIP:
    return clipkit.create("ViT-test", seed=0).eval()


def png(number: int, side: int = 20) -> bytes:
    noise = np.random.default_rng(number).integers(0, 256, (side, 24, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve images of equal size and time, of which 04.png is broken; three per file make parts 0 to 3."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(12):
        file = folder / f"{number:02d}.png"
        file.write_bytes(b"broken" if number == 4 else png(number))
        os.utime(file, ns=(10**18, 10**18))
    return folder


def run(
    source: Path | list[Path],
    out: Path,
    model: CLIP,
    *,
    process: int = 0,
    processes: int = 1,
    **more: Any,
) -> Encoded:
    sources = [str(one) for one in (source if isinstance(source, list) else [source])]
    features = FeatureStream(model, batch_size=2, workers=0)
    settings: dict[str, Any] = {"rows_per_file": 3, "model": "", **more}
    options = EncodeOptions(sources=tuple(sources), out=out, quiet=True, **settings)
    return encode(Stream(sources), features, options, process=process, processes=processes)


def tree(out: Path) -> dict[str, bytes]:
    files = (path for path in out.rglob("*") if path.is_file() and not path.name.startswith(".lock-"))
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def inodes(out: Path) -> dict[int, tuple[int, int]]:
    """Inode and modification time by part number, which show whether a file was rewritten."""
    found = ((int(path.stem.rsplit("_", 1)[1]), path.stat()) for path in out.glob("img_emb/*.npy"))
    return {part: (status.st_ino, status.st_mtime_ns) for part, status in found}


def add_last(photos: Path) -> None:
    (photos / "98.png").write_bytes(png(98))


def add_second(photos: Path) -> None:
    (photos / "00a.png").write_bytes(png(99))


def replace_one(photos: Path) -> None:
    (photos / "07.png").write_bytes(png(70, side=21))


def mend_broken(photos: Path) -> None:
    (photos / "04.png").write_bytes(png(4))


def remove_last_part(photos: Path) -> None:
    for number in (9, 10, 11):
        (photos / f"{number:02d}.png").unlink()


def remove_one(photos: Path) -> None:
    (photos / "06.png").unlink()


def touch(photos: Path) -> None:
    """Change only the modification time."""
    for number in (2, 4):  # 04.png is broken and stays broken
        os.utime(photos / f"{number:02d}.png", ns=(1, 1))


def copy(photos: Path) -> None:
    """Copy to new inodes and times, as on another disk."""
    photos.rename(photos.with_name("old"))
    shutil.copytree(photos.with_name("old"), photos)


def break_one(photos: Path) -> None:
    """Replace an image by bytes of the same size and modification time that are no image."""
    file = photos / "07.png"
    found = file.stat()
    file.write_bytes(b"x" * found.st_size)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


def swap(photos: Path) -> None:
    """Swap two files of equal size and time."""
    exchange(photos / "01.png", photos / "10.png")


@pytest.mark.parametrize(
    ("change", "kept", "stale"),
    [
        (add_last, {0, 1, 2, 3}, 0),
        (add_second, set(), 4),
        (replace_one, {0, 1, 3}, 1),
        (mend_broken, {0, 2, 3}, 1),
        (remove_last_part, {0, 1, 2}, 0),
        (remove_one, {0, 1}, 2),
        (touch, {2, 3}, 2),
        (copy, set(), 4),
        (break_one, {0, 1, 3}, 1),
        (swap, {1, 2}, 2),
    ],
)
@pytest.mark.parametrize("processes", [1, 3])
def test_changed_parts_are_encoded_again_and_equal_a_fresh_run(
    photos: Path,
    model: CLIP,
    tmp_path: Path,
    change: Callable[[Path], None],
    kept: set[int],
    stale: int,
    processes: int,
) -> None:
    run(photos, tmp_path / "out", model)
    before = inodes(tmp_path / "out")
    change(photos)
    done = [
        run(photos, tmp_path / "out", model, process=number, processes=processes)
        for number in range(processes)
    ]
    after = inodes(tmp_path / "out")
    assert {part for part, node in after.items() if before.get(part) == node} == kept
    assert sum(one.folder.stale for one in done) == stale
    assert sum(one.written for one in done) == len(after) - len(kept)
    assert done[-1].totals is not None
    run(photos, tmp_path / "straight", model)
    assert tree(tmp_path / "out") == tree(tmp_path / "straight")


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of images of each batch that a model encodes."""
    sizes: list[int] = []
    encode_image = CLIP.encode_image

    def watched(self: CLIP, images: torch.Tensor) -> torch.Tensor:
        sizes.append(len(images))
        return encode_image(self, images)

    monkeypatch.setattr(CLIP, "encode_image", watched)
    return sizes


def insert_first(photos: Path) -> None:
    (photos / "0.png").write_bytes(png(99))


def remove_first(photos: Path) -> None:
    (photos / "00.png").unlink()


def rename_one(photos: Path) -> None:
    (photos / "00.png").rename(photos / "11a.png")


def insert_copy(photos: Path) -> None:
    (photos / "0.png").write_bytes((photos / "05.png").read_bytes())


def insert_three_and_change_one(photos: Path) -> None:
    for number in range(3):
        (photos / f"05{number}.png").write_bytes(png(50 + number))
    (photos / "10.png").write_bytes(png(60))


def insert_broken(photos: Path) -> None:
    (photos / "0.png").write_bytes(b"broken")


@pytest.mark.parametrize(
    ("change", "encoded"),
    [
        (insert_first, 1),
        (remove_first, 0),
        (rename_one, 0),
        (insert_copy, 0),
        (insert_three_and_change_one, 4),
        (insert_broken, 0),
        (touch, 0),
        (copy, 0),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "binary"])
def test_only_new_images_are_encoded_and_all_files_equal_a_fresh_run(
    photos: Path,
    model: CLIP,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    encoded: int,
    dtype: str,
) -> None:
    run(photos, tmp_path / "out", model, dtype=dtype)
    change(photos)
    sizes = counting(monkeypatch)
    done = run(photos, tmp_path / "out", model, dtype=dtype)
    assert done.done - done.failed - done.reused == encoded
    # each part with new images has a padded batch for every two of them
    assert set(sizes) <= {2} and encoded <= sum(sizes) <= 2 * encoded
    run(photos, tmp_path / "straight", model, dtype=dtype)
    assert tree(tmp_path / "out") == tree(tmp_path / "straight")
    assert not (tmp_path / "out/.former").exists()


def test_changed_captions_of_reused_rows_are_written(photos: Path, model: CLIP, tmp_path: Path) -> None:
    table = tmp_path / "t.jsonl"
    lines = [{"path": f"photos/{number:02d}.png", "caption": f"caption {number}"} for number in range(4)]
    table.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(table, tmp_path / "out", model)
    lines.insert(0, {"path": "photos/05.png", "caption": "five"})
    lines[1]["caption"] = "changed"
    table.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(table, tmp_path / "out", model).reused == 4
    run(table, tmp_path / "straight", model)
    assert tree(tmp_path / "out") == tree(tmp_path / "straight")


KILLED = """
import os, signal, sys
from pathlib import Path
import clipkit
import tests.forked  # the architecture
from clipkit.inference import folder
from clipkit.inference.encode import encode
from clipkit.inference.inputs import Stream
from clipkit.options import EncodeOptions
from clipkit.inference.stream import FeatureStream
photos, out, written = sys.argv[1:]
write = folder.EmbeddingFolder.write
remaining = int(written)

def killing(self, part):
    global remaining
    if remaining == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    remaining -= 1
    write(self, part)

folder.EmbeddingFolder.write = killing
features = FeatureStream(clipkit.create("ViT-test", seed=0).eval(), batch_size=2, workers=0)
options = EncodeOptions(sources=(photos,), model="", out=Path(out), rows_per_file=3, quiet=True)
encode(Stream([photos]), features, options)
"""


@pytest.mark.parametrize("written", [0, 2])
def test_update_that_was_killed_encodes_no_image_twice(
    photos: Path, model: CLIP, tmp_path: Path, written: int
) -> None:
    run(photos, tmp_path / "out", model)
    insert_first(photos)
    command = [sys.executable, "-c", KILLED, str(photos), str(tmp_path / "out"), str(written)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    done = run(photos, tmp_path / "out", model)
    assert (done.complete_files, done.written) == (written, 5 - written)
    assert done.done - done.failed - done.reused == (1 if written == 0 else 0)
    run(photos, tmp_path / "straight", model)
    assert tree(tmp_path / "out") == tree(tmp_path / "straight")


def test_rows_of_other_processes_are_reused(photos: Path, model: CLIP, tmp_path: Path) -> None:
    run(photos, tmp_path / "out", model, rows_per_file=2)
    insert_first(photos)
    settings: dict[str, Any] = {"rows_per_file": 2, "processes": 2}
    done = [run(photos, tmp_path / "out", model, process=number, **settings) for number in (1, 0)]
    # process 1 comes first and lacks the rows of the parts of process 0
    assert [one.reused for one in done] == [3, 5]
    run(photos, tmp_path / "straight", model, rows_per_file=2)
    assert tree(tmp_path / "out") == tree(tmp_path / "straight")


def test_incomplete_set_of_reusable_rows_is_ignored(photos: Path, model: CLIP, tmp_path: Path) -> None:
    """As after a kill between two renames, or a power failure."""
    run(photos, tmp_path / "out", model)
    former = tmp_path / "out/.former"
    former.mkdir()
    metadata = tmp_path / "out/metadata/metadata_0.parquet"
    shutil.copy(metadata, former / "a.parquet")  # without rows
    for name, rows in (("b", 2), ("c", 3), ("d", 3)):
        np.save(former / f"{name}.npy", np.zeros((rows, 64), np.float16))
    shutil.copy(metadata, former / "b.parquet")
    (former / "c.parquet").write_bytes(b"damaged")
    parquet.write_table(parquet.read_table(metadata).drop_columns("digest"), former / "e.parquet")
    (former / "e.npy").write_bytes(b"damaged")
    insert_first(photos)
    assert run(photos, tmp_path / "out", model).reused == 11
    run(photos, tmp_path / "straight", model)
    assert tree(tmp_path / "out") == tree(tmp_path / "straight")


def test_file_numbers_are_padded_for_more_files(photos: Path, model: CLIP, tmp_path: Path) -> None:
    for number in range(4):
        (photos / f"{number:02d}.png").rename(tmp_path / f"{number:02d}.png")
    run(photos, tmp_path / "out", model, rows_per_file=1)
    before = inodes(tmp_path / "out")
    for number in range(20, 24):
        (photos / f"{number}.png").write_bytes(png(number))
    assert run(photos, tmp_path / "out", model, rows_per_file=1).written == 4
    assert {part: inodes(tmp_path / "out")[part] for part in range(8)} == before
    run(photos, tmp_path / "straight", model, rows_per_file=1)
    assert tree(tmp_path / "out") == tree(tmp_path / "straight")
    for number in range(20, 24):
        (photos / f"{number}.png").unlink()
    assert run(photos, tmp_path / "out", model, rows_per_file=1).written == 0
    assert inodes(tmp_path / "out") == before


def test_sources_may_be_added_but_not_removed(photos: Path, model: CLIP, tmp_path: Path) -> None:
    shard = tmp_path / "0.tar"
    with tarfile.open(shard, "w") as tar:
        tar.add(photos / "00.png", "x/one.png")
    run(photos, tmp_path / "out", model)
    assert run([photos, shard], tmp_path / "out", model).written == 1
    assert run([photos, shard], tmp_path / "out", model).written == 0
    os.utime(shard, ns=(1, 1))
    done = run([photos, shard], tmp_path / "out", model)
    assert (done.folder.stale, done.written, done.reused) == (1, 1, 1)
    assert run([shard, photos / "."], tmp_path / "out", model).folder.stale == 5  # in another order
    before = tree(tmp_path / "out")
    with pytest.raises(
        ConfigError,
        match=r"0\.tar was one of the sources, which are now .*/photos; resume with the same settings",
    ):
        run(photos, tmp_path / "out", model)
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("kind", ["shards", "table", "folders", "captions"])
def test_swapped_files_of_equal_size_and_time_are_encoded_again(
    kind: str, model: CLIP, tmp_path: Path
) -> None:
    """Shards, files of a table, folders, captions in shards: 12 of 60 rows on each side are swapped."""
    root = tmp_path / "data"
    folders = [root / name for name in "abcde"]
    for place, folder in enumerate(folders):
        folder.mkdir(parents=True)
        for number in range(12):
            file = folder / f"{number:02d}.bmp"
            noise = np.random.default_rng(12 * place + number).integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(noise).save(file)
            file.with_suffix(".txt").write_text(f"noise {place} {number:02d}")
        with tarfile.open(folder.with_suffix(".tar"), "w") as tar:
            for file in sorted(folder.iterdir()):
                tar.add(file, f"{file.name}")
    files = [file for file in sorted(root.rglob("*")) if file.is_file()]
    for file in files:
        os.utime(file, ns=(10**18, 10**18))
    table = tmp_path / "table.csv"
    table.write_text("path\n" + "".join(f"{file}\n" for file in files if file.suffix == ".bmp"))
    source = {"shards": str(root / "*.tar"), "captions": str(root / "*.tar"), "table": str(table)}.get(
        kind, str(root / "{a,b,c,d,e}")
    )

    def encoded(out: Path) -> tuple[Encoded, np.ndarray[Any, Any]]:
        stream = Stream([source], kind="caption" if kind == "captions" else "image")
        features = FeatureStream(model, batch_size=4, workers=2)
        options = EncodeOptions(sources=(source,), model="", out=out, rows_per_file=10, quiet=True)
        done = encode(stream, features, options)
        return done, np.concatenate([np.load(path) for path in sorted(out.glob("*_emb/*.npy"))])

    encoded(tmp_path / "out")
    assert encoded(tmp_path / "out")[0].written == 0
    if kind == "table":  # twelve files, in pairs
        for number in range(6):
            exchange(folders[0] / f"{number:02d}.bmp", folders[2] / f"{number:02d}.bmp")
    else:  # with twelve images each
        exchange(folders[1], folders[3])
        exchange(folders[1].with_suffix(".tar"), folders[3].with_suffix(".tar"))
    done, rows = encoded(tmp_path / "out")
    _, wanted = encoded(tmp_path / "straight")
    assert len(rows) == 60
    assert int((rows != wanted).any(axis=1).sum()) == 0
    assert 0 < done.folder.stale < 6


def exchange(first: Path, second: Path) -> None:
    """Swap the names of two files or folders."""
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def test_folder_of_an_earlier_version_is_encoded_again(photos: Path, model: CLIP, tmp_path: Path) -> None:
    """Its records have another digest, and its rows none."""
    run(photos, tmp_path / "out", model)
    for path in (tmp_path / "out/metadata").iterdir():
        parquet.write_table(parquet.read_table(path).drop_columns("digest"), path)
    for path in (tmp_path / "out/.parts").iterdir():
        first, *failures = path.read_text().splitlines(keepends=True)
        stored = json.loads(first)
        path.write_text(json.dumps(stored | {"digest": "0" * 32}) + "\n" + "".join(failures))
    done = run(photos, tmp_path / "out", model)
    assert (done.folder.stale, done.written, done.reused) == (4, 4, 0)
    run(photos, tmp_path / "straight", model)
    assert tree(tmp_path / "out") == tree(tmp_path / "straight")


def test_captions_added_to_a_table_add_a_column_to_all_files(
    photos: Path, model: CLIP, tmp_path: Path
) -> None:
    table = tmp_path / "t.jsonl"
    lines = [json.dumps({"path": f"photos/{number:02d}.png"}) for number in range(3)]
    table.write_text("\n".join(lines) + "\n")
    run(table, tmp_path / "out", model, rows_per_file=1)
    lines.append(json.dumps({"path": "photos/03.png", "caption": "three"}))
    table.write_text("\n".join(lines) + "\n")
    assert run(table, tmp_path / "out", model, rows_per_file=1).folder.stale == 3
    names = {tuple(parquet.read_table(path).column_names) for path in (tmp_path / "out/metadata").iterdir()}
    assert names == {("image_path", "caption", "source", "digest")}


def test_failures_are_retried_on_request(photos: Path, model: CLIP, tmp_path: Path) -> None:
    run(photos, tmp_path / "out", model)
    whole = tree(tmp_path / "out")
    assert run(photos, tmp_path / "out", model).written == 0
    done = run(photos, tmp_path / "out", model, retry_failed=True)
    assert (done.written, done.folder.stale, done.failed) == (1, 1, 1)
    assert tree(tmp_path / "out") == whole


def test_damaged_record_is_written_again(photos: Path, model: CLIP, tmp_path: Path) -> None:
    run(photos, tmp_path / "out", model)
    whole = tree(tmp_path / "out")
    (tmp_path / "out/.parts/1.jsonl").write_bytes(b"")
    assert run(photos, tmp_path / "out", model).written == 1
    assert tree(tmp_path / "out") == whole


@pytest.mark.parametrize("size", [0, 150, -1])
@pytest.mark.parametrize("name", ["img_emb/img_emb_1.npy", "metadata/metadata_1.parquet"])
def test_damaged_files_are_written_again(
    name: str, size: int, photos: Path, model: CLIP, tmp_path: Path
) -> None:
    run(photos, tmp_path / "out", model)
    whole = tree(tmp_path / "out")
    content = (tmp_path / "out" / name).read_bytes()
    (tmp_path / "out" / name).write_bytes(content[:size])
    assert run(photos, tmp_path / "out", model).written == 1
    assert tree(tmp_path / "out") == whole


def test_processes_with_different_items_raise_an_error(photos: Path, model: CLIP, tmp_path: Path) -> None:
    class Growing(Stream):
        looks = 0

        def __iter__(self) -> Iterator[Item]:
            self.looks += 1
            if self.looks == 2:  # another process lists the items while this one encodes
                add_last(photos)
                run(photos, tmp_path / "out", model, process=1, processes=2)
                (photos / "98.png").unlink()
            return super().__iter__()

    features = FeatureStream(model, batch_size=2, workers=0)
    with pytest.raises(DataError, match="changed while they were being read: run the same command again"):
        encode(
            Growing([str(photos)]),
            features,
            EncodeOptions(
                sources=(str(photos),), model="", out=tmp_path / "out", rows_per_file=3, quiet=True
            ),
            processes=2,
        )


HOLD = """
import sys
from pathlib import Path
from clipkit.inference.folder import only_writer
with only_writer(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_only_one_process_of_each_number_writes_to_a_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out"), "1", "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with only_writer(tmp_path / "out", 0, 2):
            pass
        said = rf"another clipkit encode \(process {other.pid} on \S+\) is writing to {tmp_path}/out: wait for it"
        # processes of another number of processes would write the same parts
        for process, processes in ((1, 2), (0, 1), (0, 3), (1, 3), (2, 3), (11, 12)):
            with pytest.raises(ConfigError, match=said), only_writer(tmp_path / "out", process, processes):
                pass
        other.kill()
        other.wait()
    for process, processes in ((1, 2), (0, 1)):  # the lock of a killed process is released
        with only_writer(tmp_path / "out", process, processes):
            pass
    assert list((tmp_path / "out").iterdir()) == []


def test_processes_that_start_at_the_same_time_pass_the_lock_of_a_killed_one(tmp_path: Path) -> None:
    barrier = threading.Barrier(4)

    def start(process: int) -> None:
        barrier.wait()
        with only_writer(tmp_path, process, 4):
            barrier.wait()

    for _ in range(20):
        (tmp_path / ".lock-0-of-1").touch()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(start, range(4)))
        assert list(tmp_path.iterdir()) == []


def test_full_disk_raises_an_error_and_leaves_no_partial_files(
    photos: Path, model: CLIP, tmp_path: Path
) -> None:
    """Simulated by a limit on file sizes: the same call fails."""
    done = run(photos, tmp_path / "straight", model)
    assert done.totals is not None
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, before[1]))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            run(photos, tmp_path / "out", model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert not list((tmp_path / "out").rglob("*.partial"))
    run(photos, tmp_path / "out", model)
    assert tree(tmp_path / "out") == tree(tmp_path / "straight")


def test_array_files_equal_those_of_numpy(photos: Path, model: CLIP, tmp_path: Path) -> None:
    run(photos, tmp_path / "out", model)
    path = tmp_path / "out/img_emb/img_emb_1.npy"
    buffer = io.BytesIO()
    np.save(buffer, np.load(path))
    assert path.read_bytes() == buffer.getvalue()


def test_nonfinite_embeddings_raise_one_error(photos: Path, tmp_path: Path) -> None:
    broken = clipkit.create("ViT-test", seed=0).eval()
    with torch.no_grad():
        broken.positional_embedding.fill_(float("nan"))  # used by texts only
    labels = clipkit.zero_shot_classifier(broken, ["cat", "dog"])
    features = FeatureStream(broken, batch_size=2, workers=0)
    with pytest.raises(DataError, match="embeddings of the labels are not finite: its weights are damaged"):
        next(classify_images(Stream([str(photos)]), features, ["cat", "dog"], labels, top=1))
    assert run(photos, tmp_path / "out", broken).written == 4
    with torch.no_grad():
        for weights in broken.visual.parameters():
            weights.view(-1)[-1] = float("nan")
    with pytest.raises(
        DataError, match="the model's features are not finite in fp32: its weights are damaged"
    ):
        run(photos, tmp_path / "broken", broken)
    assert not list(tmp_path.glob("broken/img_emb/*"))
