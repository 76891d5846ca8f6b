"""Tests of encode: embeddings equal the model's, clip-retrieval's file layout, bit-exact resume."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import clipkit
from clipkit.config import Config, OptimConfig
from clipkit.errors import ConfigError, DataError
from clipkit.formats.checkpoint import model_hash
from clipkit.inference.encode import Encoded, encode
from clipkit.inference.inputs import Item, Stream
from clipkit.inference.storage import content_digest
from clipkit.inference.stream import FeatureStream
from clipkit.model.architectures import TextTower
from clipkit.model.clip import CLIP, create
from clipkit.options import EncodeOptions
from clipkit.training.checkpoint import LoopState, save_checkpoint
from clipkit.training.optim import adamw
from tests.forked import Forked

parquet = pytest.importorskip("pyarrow.parquet")

COUNT = 23


@pytest.fixture(scope="module")
def model() -> CLIP:
    return clipkit.create("ViT-test", seed=0).eval()


@pytest.fixture(scope="module")
def checkpoint(model: CLIP, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("model") / "run"
    optimizer = adamw(model, OptimConfig())
    save_checkpoint(run, model, optimizer, LoopState(step=0, data=""), Config(), keep=1)
    return run


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images in two folders, of which numbers 4, 12, 13 and 14 are broken."""
    folder = tmp_path_factory.mktemp("images") / "photos"
    (folder / "more").mkdir(parents=True)
    for number in range(COUNT):
        path = folder / ("more" if number > 15 else "") / f"{number:02d}.png"
        path.write_bytes(b"broken" if number in (4, 12, 13, 14) else png(number))
    return folder


def png(number: int) -> bytes:
    noise = np.random.default_rng(number).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()


def encode_folder(
    photos: Path | Sequence[Path],
    out: Path,
    model: CLIP,
    *,
    batch_size: int = 2,
    workers: int = 2,
    process: int = 0,
    processes: int = 1,
    **more: Any,
) -> Encoded:
    features = FeatureStream(model, batch_size=batch_size, workers=workers)
    settings = {"rows_per_file": 3, "sources": (), **more}
    settings["model"] = settings.pop("model_name", "")
    sources = [photos] if isinstance(photos, Path) else photos
    stream = Stream([str(source) for source in sources], kind=settings.pop("kind", "image"))
    options = EncodeOptions(out=out, **{"quiet": True, **settings})
    return encode(stream, features, options, process=process, processes=processes)


def tree(out: Path) -> dict[str, bytes]:
    files = (path for path in out.rglob("*") if path.is_file() and not path.name.startswith(".lock-"))
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def rows_of(out: Path, kind: str = "img") -> np.ndarray[Any, np.dtype[np.float16]]:
    """Concatenate files in the order of their names, as clip-retrieval's reader does."""
    return np.concatenate([np.load(path) for path in sorted((out / f"{kind}_emb").glob("*.npy"))])


def metadata_of(out: Path) -> dict[str, list[str | None]]:
    tables = [parquet.read_table(path) for path in sorted((out / "metadata").glob("*.parquet"))]
    assert len({str(table.schema) for table in tables}) == 1
    return {name: [v for t in tables for v in t.column(name).to_pylist()] for name in tables[0].column_names}


def failures_of(out: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (out / "failures.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(photos: Path, model: CLIP, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    encode_folder(photos, out, model)
    return tree(out)


@pytest.mark.parametrize("image_tokens", [0, 12])
def test_embeddings_equal_the_model_in_image_order(
    photos: Path, model: CLIP, tmp_path: Path, image_tokens: int
) -> None:
    if image_tokens:
        model = create(model.architecture.replace_size(image_tokens=image_tokens), seed=0).eval()
    done = encode_folder(photos, tmp_path / "out", model)
    good = [path for path in sorted(photos.rglob("*.png"), key=str) if path.read_bytes() != b"broken"]
    rows = rows_of(tmp_path / "out")
    assert rows.dtype == np.float16
    want = clipkit.encode_image([str(path) for path in good], model)
    assert np.abs(rows.astype(np.float32) - want.numpy()).max() < 1e-3  # half precision
    assert np.abs(np.linalg.norm(rows.astype(np.float32), axis=1) - 1).max() < 1e-3
    assert metadata_of(tmp_path / "out") == {
        "image_path": [str(path) for path in good],
        "source": [str(photos)] * len(good),
        "digest": [content_digest(path.read_bytes()) for path in good],
    }
    assert failures_of(tmp_path / "out") == [
        {
            "source": str(photos),
            "key": str(photos / f"{number:02d}.png"),
            "cause": "not an image in a known format",
            "digest": content_digest(b"broken"),
        }
        for number in (4, 12, 13, 14)
    ]
    assert (done.folder.manifest.files, done.written, done.complete_files, done.done, done.failed) == (
        8,
        8,
        0,
        COUNT,
        4,
    )
    assert done.totals is not None
    assert (done.totals.rows, done.totals.width, done.totals.failures) == (COUNT - 4, rows.shape[1], 4)


def test_files_are_numbered_and_padded_as_by_clip_retrieval(
    photos: Path, model: CLIP, tmp_path: Path
) -> None:
    for rows_per_file, names in ((23, ["0"]), (3, list("01234567")), (2, [f"{n:02d}" for n in range(12)])):
        out = tmp_path / str(rows_per_file)
        encode_folder(photos, out, model, rows_per_file=rows_per_file)
        assert sorted(path.stem for path in (out / "img_emb").glob("*.npy")) == [
            f"img_emb_{n}" for n in names
        ]
        paths = sorted((out / "metadata").glob("*.parquet"))
        assert [path.stem for path in paths] == [f"metadata_{n}" for n in names]
        assert len(rows_of(out)) == COUNT - 4
    empty = np.load(tmp_path / "3/img_emb/img_emb_4.npy")  # images 12, 13 and 14 are broken
    assert (empty.shape, empty.dtype) == ((0, rows_of(tmp_path / "3").shape[1]), np.float16)


def test_reader_threads_do_not_change_the_files(
    photos: Path, model: CLIP, whole: dict[str, bytes], tmp_path: Path
) -> None:
    for workers in (0, 5):
        encode_folder(photos, tmp_path / str(workers), model, workers=workers)
        assert tree(tmp_path / str(workers)) == whole


def test_number_of_cores_does_not_change_the_files(
    photos: Path, model: CLIP, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[int, int]] = set()
    encode_image = CLIP.encode_image

    def watched(self: CLIP, images: torch.Tensor) -> torch.Tensor:
        seen.add((threading.get_ident(), torch.get_num_threads()))
        return encode_image(self, images)

    monkeypatch.setattr(CLIP, "encode_image", watched)
    torch.set_num_threads(4)
    try:
        encode_folder(photos, tmp_path / "out", model)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(1)
    assert tree(tmp_path / "out") == whole
    computing = {cores for thread, cores in seen if thread != threading.get_ident()}
    assert computing == {1}
    assert len(seen) > 2


@pytest.mark.parametrize(
    ("amx", "amd", "many", "notes"),
    [
        (True, False, 1, 1),
        (True, False, COUNT + 1, 0),
        (False, True, 1, 1),
        (False, False, 1, 0),
    ],
)
def test_faster_precision_of_this_cpu_is_noted(
    photos: Path, model: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], amx: bool, amd: bool, many: int, notes: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr("clipkit.model.processor.has_slow_mkl", lambda: amd)
    monkeypatch.setattr("clipkit.inference.encode._MANY", many)
    encode_folder(photos, tmp_path / "out", model, quiet=False)
    assert capsys.readouterr().err.count("note: --precision bf16 is much faster on this CPU") == notes


def test_several_processes_write_the_same_files(
    photos: Path, model: CLIP, whole: dict[str, bytes], tmp_path: Path
) -> None:
    done = [encode_folder(photos, tmp_path / "out", model, process=n, processes=3) for n in (2, 0)]
    (tmp_path / "out/.manifest.json.7.partial").touch()  # left by a killed process, one of another number
    done.append(encode_folder(photos, tmp_path / "out", model, process=1, processes=3))
    assert [one.written for one in done] == [2, 3, 3]
    assert [one.totals is None for one in done] == [True, True, False]
    assert tree(tmp_path / "out") == whole
    (tmp_path / "out/img_emb/img_emb_5.npy").unlink()  # written by process 2, and now by the only process
    assert encode_folder(photos, tmp_path / "out", model).written == 1
    assert tree(tmp_path / "out") == whole


class Killed(BaseException):
    """Simulates kill -9: nothing catches it."""


def test_kill_at_any_file_operation_does_not_change_the_files(
    photos: Path, tiny: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop at the first, second, … file system call, then resume; the files are the same."""
    text = tiny.architecture.text
    assert isinstance(text, TextTower)
    small = CLIP(replace(tiny.architecture, text=replace(text, vocab_size=100))).initialize()
    countdown = [0]

    def dying(call: Any) -> Any:
        def counted(*arguments: Any, **more: Any) -> Any:
            countdown[0] -= 1
            if countdown[0] == 0:
                raise Killed
            return call(*arguments, **more)

        return counted

    for owner, names in ((os, ("fsync", "link")), (Path, ("replace", "unlink", "mkdir"))):
        for name in names:
            monkeypatch.setattr(owner, name, dying(getattr(owner, name)))
    images = [photos / f"{number:02d}.png" for number in (3, 4, 5)]  # the second one is broken
    settings = {"rows_per_file": 2, "workers": 0}
    moment = 0
    while True:
        moment += 1
        out = tmp_path / str(moment)
        countdown[0] = moment
        try:
            encode_folder(images, out, small, **settings)
        except Killed:
            before = {path: path.stat().st_ino for path in out.rglob("*") if not path.name.startswith(".")}
            countdown[0] = -1
            complete = [int(path.stem) for path in out.glob(".parts/[0-9]*.jsonl")]
            done = encode_folder(images, out, small, **settings)
            assert (done.complete_files, done.written) == (len(complete), 2 - len(complete))
            for part in complete:
                for path in (out / f"img_emb/img_emb_{part}.npy", out / f"metadata/metadata_{part}.parquet"):
                    assert path.stat().st_ino == before[path]  # not written again
        else:
            break
    assert moment > 20
    trees = {number: tree(tmp_path / str(number)) for number in range(1, moment + 1)}
    assert all(one == trees[moment] for one in trees.values())
    assert not [name for name in trees[moment] if name.endswith(".partial")]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "clipkit", "encode", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.long
def test_killed_command_resumes_to_the_same_files(
    photos: Path, checkpoint: Path, tmp_path: Path, forked: Forked
) -> None:
    sources = [photos] * 8
    settings = ["--model", str(checkpoint), "--rows-per-file", "4", "--batch-size", "2", "--quiet"]
    files = -(-len(sources) * COUNT // 4)
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    at = random.SystemRandom().randint(1, files // 2)
    with subprocess.Popen(
        command(*sources, *settings, "--out", killed), env=environment(), stdout=subprocess.PIPE
    ) as process:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(OSError):
                if len(list((killed / ".parts").glob("*.jsonl"))) >= at:
                    process.kill()
                    break
            time.sleep(0.001)
    assert process.returncode == -signal.SIGKILL
    assert not (killed / "failures.jsonl").exists()
    for out in (killed, straight):
        given = ["encode", *map(str, sources), *settings, "--out", str(out)]
        done = forked.run("clipkit/__main__.py", given, {})
        assert (done.returncode, done.stderr) == (0, "")
        assert f"{4 * 8} failed, listed in {out / 'failures.jsonl'}" in done.stdout
    assert tree(killed) == tree(straight), f"killed at file {at}"


@pytest.mark.long
def test_torchrun_writes_the_same_files(photos: Path, checkpoint: Path, model: CLIP, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    settings = [str(photos), "--model", str(checkpoint), "--rows-per-file", "3", "--batch-size", "2"]
    arguments = [*launch, *command(*settings, "--out", tmp_path / "out")[1:]]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "process 1 of 2: 12 images in" in done.stdout
    assert "process 2 of 2: 11 images in" in done.stdout
    assert f"19 embeddings of dimension 64 in 8 files in {tmp_path / 'out/img_emb'}" in done.stdout
    subprocess.run(command(*settings, "--out", tmp_path / "one"), env=environment(), check=True)
    found = tree(tmp_path / "out")
    for one in (found, expected := tree(tmp_path / "one")):
        manifest = json.loads(one.pop("manifest.json"))
        assert manifest["weights"] == model_hash(model)
    assert found == expected


def test_texts_of_lines_tables_and_shards(model: CLIP, tmp_path: Path) -> None:
    texts = ["a cat", "", "two dogs and a very long walk", "a cat", "naïve 🐈"]
    (tmp_path / "lines.txt").write_text("\n".join(texts) + "\n")
    want = clipkit.encode_text(texts, model).numpy()
    encode_folder(tmp_path / "lines.txt", tmp_path / "a", model, kind="caption")
    assert np.abs(rows_of(tmp_path / "a", "text").astype(np.float32) - want).max() < 1e-3
    assert metadata_of(tmp_path / "a") == {
        "caption": texts,
        "key": ["1", "2", "3", "4", "5"],
        "source": [str(tmp_path / "lines.txt")] * 5,
        "digest": [content_digest(text.encode()) for text in texts],
    }
    assert not (tmp_path / "a/failures.jsonl").exists()
    assert not (tmp_path / "a/img_emb").exists()

    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        latin = "na\u00efve".encode("latin-1")
        for number, text in enumerate([*(text.encode() for text in texts), b"x" * 100_001, latin]):
            for suffix, content in (("png", png(number)), ("txt", text)):
                info = tarfile.TarInfo(f"{number}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    encode_folder(tmp_path / "0.tar", tmp_path / "b", model, kind="caption")
    kept = rows_of(tmp_path / "a", "text")[[0, 2, 3, 4]]  # without the empty one
    assert np.abs(rows_of(tmp_path / "b", "text").astype(np.float32) - kept).max() < 1e-3
    assert [one["cause"] for one in failures_of(tmp_path / "b")] == [
        "empty caption",
        "text of more than 100,000 characters",
        "caption is not UTF-8",
    ]
    # images come with their captions
    encode_folder(tmp_path / "0.tar", tmp_path / "c", model)
    assert metadata_of(tmp_path / "c")["caption"] == [text or None for text in texts] + [
        "x" * 100_001,
        None,
    ]
    assert metadata_of(tmp_path / "c")["image_path"] == ["0", "1", "2", "3", "4", "5", "6"]


def test_missing_captions_are_null(photos: Path, model: CLIP, tmp_path: Path) -> None:
    """All files have the same columns, because readers use those of the first file."""
    table = tmp_path / "t.jsonl"
    table.write_text(f'{{"path": "{photos}/00.png"}}\n{{"path": "{photos}/01.png", "caption": "one"}}\n')
    encode_folder(table, tmp_path / "out", model, rows_per_file=1)
    assert metadata_of(tmp_path / "out")["caption"] == [None, "one"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows_per_file": 4}, "--rows-per-file was 3 and is now 4"),
        ({"batch_size": 3}, "--batch-size was 2 and is now 3"),
        ({"kind": "caption"}, "contains texts|texts are read from"),
        ({"weights": 1}, r"the model was pets \([0-9a-f]{8}\) and is now pets \([0-9a-f]{8}\)"),
        (
            {"dim": 32},
            r"other settings: --dim was 0 and is now 32; the model was .*; resume with the same settings, or use",
        ),
        ({"dim": 32, "weights": 1}, "--dim was 0 and is now 32"),
        ({"preprocess": 1}, "the model was pets"),
        ({"other": 1}, "{0} was one of the sources, which are now {1}"),
        ({"spelled": 1}, r"{0} was one of the sources, which are now {0}/\.\./photos"),
    ],
)
def test_other_model_or_settings_in_the_same_folder_are_rejected(
    photos: Path, model: CLIP, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    source = tmp_path / "photos"
    source.mkdir()
    for path in photos.rglob("*.png"):
        (source / path.name).write_bytes(path.read_bytes())
    named: dict[str, Any] = {"sources": (str(source),), "model_name": "pets"}
    encode_folder(source, tmp_path / "out", model, **named)
    before = tree(tmp_path / "out")
    other = clipkit.create("ViT-test", seed=1 if change.pop("weights", 0) else 0).eval()
    if change.pop("preprocess", 0):
        other.preprocess = replace(other.preprocess, mean=(0.0, 0.0, 0.0))
    other.dim = change.pop("dim", other.dim)
    if change.pop("other", 0):
        named["sources"] = (str(photos),)
    if change.pop("spelled", 0):
        named["sources"] = (f"{source}/../photos",)
    message = message.replace("{0}", str(source)).replace("{1}", str(photos))
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        encode_folder(source, tmp_path / "out", other, **named, **change)
    assert "\n" not in str(caught.value)
    assert tree(tmp_path / "out") == before


def test_folder_without_a_valid_manifest_is_rejected(photos: Path, model: CLIP, tmp_path: Path) -> None:
    (tmp_path / "out/img_emb").mkdir(parents=True)
    with pytest.raises(DataError, match=r"contains embeddings but no manifest\.json"):
        encode_folder(photos, tmp_path / "out", model)
    for content in (b"", b"[]", b"{", b"\xff"):
        (tmp_path / "out/manifest.json").write_bytes(content)
        with pytest.raises((DataError, ConfigError), match=r"cannot read .*manifest\.json|another run"):
            encode_folder(photos, tmp_path / "out", model)


def test_sources_that_change_while_reading_raise_an_error(photos: Path, model: CLIP, tmp_path: Path) -> None:
    class Shrinking(Stream):
        looks = 0

        def __iter__(self) -> Iterator[Item]:
            self.looks += 1
            items = list(super().__iter__())
            return iter(items if self.looks == 1 else items[:10])

    features = FeatureStream(model, batch_size=2)
    with pytest.raises(DataError, match="changed while they were being read"):
        encode(
            Shrinking([str(photos)]),
            features,
            EncodeOptions(sources=(), model="", out=tmp_path / "out", rows_per_file=4, quiet=True),
        )


def test_model_hash_covers_weights_but_not_small_data(model: CLIP) -> None:
    assert model_hash(model) == model_hash(clipkit.create("ViT-test", seed=0))
    other = clipkit.create("ViT-test", seed=0)
    with torch.no_grad():
        other.logit_scale.add_(1e-3)
    assert model_hash(model) != model_hash(other)
    exported = clipkit.create("ViT-test", seed=0)  # other formats do not store small_data
    exported.architecture = replace(exported.architecture, small_data=False)
    assert model_hash(model) == model_hash(exported)
