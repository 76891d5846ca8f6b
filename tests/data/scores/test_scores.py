"""Tests of sample scores: their values, filters that use them, and errors if they are missing."""

import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

import clipkit
from clipkit.config import Config, DataConfig, OptimConfig
from clipkit.errors import CheckpointError, ConfigError, DataError
from clipkit.files import FileLock
from clipkit.inference.stream import closest
from clipkit.model.clip import CLIP
from clipkit.training.checkpoint import LoopState, save_checkpoint
from clipkit.training.optim import adamw
from data.__main__ import main
from data.scores.table import PRESETS, parse_scored_filters, scores_folder
from data.shards.samples import Shards
from data.shards.writer import DatasetWriter, Record
from data.training_data import open_training_data
from tests.data.published_tars import sample_of, write_published

CAPTIONS = (
    "a photo of a tabby cat in the garden",
    "ein Hund läuft durch den schönen Park",
    "red",
    "two words",
)
SAMPLES, PER_SHARD, BROKEN, SILENT = 26, 10, 5, 13


def photo(seed: int, size: tuple[int, int] = (24, 20)) -> Image.Image:
    """Return a smooth random image, as all thumbnails of noise are similar."""
    noise = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str = "png", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **how)
    return file.getvalue()


def write_pairs(folder: Path, *, first: int = 0, samples: int = SAMPLES) -> Path:
    """Write pairs in shards of ten; one image is broken and one sample has no caption."""
    with DatasetWriter(folder, samples_per_shard=PER_SHARD) as writer:
        for number in range(first, first + samples):
            image = encoded(photo(number, (24 + number % 7 * 24, 24)))[: 40 if number == BROKEN else None]
            caption = None if number == SILENT else f"{CAPTIONS[number % 4]} {number}"
            meta = {"original_width": 640, "original_height": 200} if number == 3 else {"n": number}
            record = Record(key=f"{number:04d}", image=image, extension="png", caption=caption, meta=meta)
            writer.write("train", record)
        writer.finish({})
    return folder


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def model() -> CLIP:
    return clipkit.create("ViT-test", seed=1).eval()


@pytest.fixture(scope="module")
def checkpoint(model: CLIP, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("model") / "run"
    save_checkpoint(run, model, adamw(model, OptimConfig()), LoopState(step=0, data=""), Config(), keep=1)
    return run


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs")


def scored(pairs: Path, checkpoint: Path, *options: str) -> str:
    """Score shards and return the name of the scores."""
    output = io.StringIO()
    with redirect_stdout(output):
        assert main(["score", str(pairs), "--model", str(checkpoint), "--quiet", *options]) == 0
    match = re.search(r"data\.scores=(\S+)", output.getvalue())
    assert match is not None
    return match[1]


@pytest.fixture(scope="module")
def name(pairs: Path, checkpoint: Path) -> str:
    return scored(pairs, checkpoint)


def rows_of(name: str) -> list[dict[str, Any]]:
    files = (scores_folder() / name).glob("*.parquet")
    return sorted(
        (row for file in files for row in pq.read_table(file).to_pylist()), key=lambda row: row["key"]
    )


def opened(pairs: Path, run: Path, *, resumed: bool = False, **data: Any) -> Shards:
    run.mkdir(exist_ok=True)
    return open_training_data(
        DataConfig(train=str(pairs), **data),
        run / "data.manifest",
        rank0=True,
        resumed=resumed,
        broadcast=lambda content: content,
    )


def keys_of(shards: Shards) -> list[str]:
    return [shards.read(number).key for number in range(len(shards))]


def test_every_row_has_scores_or_a_cause(name: str, model: CLIP) -> None:
    rows = rows_of(name)
    assert [row["key"] for row in rows] == [f"{number:04d}" for number in range(SAMPLES)]
    for number, row in enumerate(rows):
        if number == BROKEN:
            assert row["clip"] is None and row["width"] is None and row["duplicate"] is None and row["cause"]
            assert row["words"] == 8  # of the caption
        elif number == SILENT:
            assert row["clip"] is None and row["words"] is None and row["cause"] == "no caption"
            assert row["width"] and row["duplicate"] is False
        else:
            caption = f"{CAPTIONS[number % 4]} {number}"
            image = clipkit.encode_image(encoded(photo(number, (24 + number % 7 * 24, 24))), model)
            expected = float((image * clipkit.encode_text(caption, model)).sum())
            assert row["clip"] == pytest.approx(expected, abs=1e-5) and row["cause"] is None
            width, height = (640, 200) if number == 3 else (24 + number % 7 * 24, 24)
            assert (row["width"], row["height"], row["shorter_side"]) == (width, height, height)
            assert row["aspect_ratio"] == pytest.approx(width / height)
            assert (row["characters"], row["words"]) == (len(caption), len(caption.split()))
            assert row["imagenet"] is (number % 4 == 0)  # tabby cat
            assert number % 4 > 1 or row["language"] == ("en", "de")[number % 4]


@pytest.mark.parametrize(
    ("filters", "passes"),
    [
        (["score.language = de"], lambda row: row["language"] == "de"),
        (["score.words > 3", "score.aspect_ratio <= 3"],
         lambda row: (row["words"] or 0) > 3 and (row["aspect_ratio"] or 9) <= 3),
        (["score.imagenet = true", "n >= 8"], lambda row: row["imagenet"] and int(row["key"]) >= 8),
        (["score.duplicate = false", "score.clip > -2"], lambda row: row["clip"] is not None),
    ],
)  # fmt: skip
def test_training_uses_the_samples_that_pass(
    filters: list[str], passes: Any, pairs: Path, name: str, tmp_path: Path
) -> None:
    shards = opened(pairs, tmp_path / "run", filters=tuple(filters), scores=name)
    usable = [row for row in rows_of(name) if row["key"] != f"{SILENT:04d}"]
    assert keys_of(shards) == [row["key"] for row in usable if passes(row)]
    assert len(shards) + sum(shards.manifest.dropped.values()) == SAMPLES
    opened(pairs, tmp_path / "run", filters=tuple(filters), scores=name, resumed=True)


@given(permille=st.integers(1, 999))
@settings(max_examples=50)
def test_top_percent_selects_the_exact_number_of_samples(name: str, permille: int) -> None:
    (filter_,), _ = parse_scored_filters([f"score.clip >= top {permille / 10}%"], name)
    clips = [row["clip"] for row in rows_of(name) if row["clip"] is not None]
    kept = sum(bool(filter_.passes({"score": {"clip": clip}})) for clip in clips)
    assert kept == -(-permille * len(clips) // 1000)


def test_resume_rejects_other_scores(pairs: Path, checkpoint: Path, name: str, tmp_path: Path) -> None:
    run, select = tmp_path / "run", dict[str, Any](filters=("score.clip >= top 50%",))
    opened(pairs, run, scores=name, **select)
    other = scored(pairs, checkpoint, "--threshold", "0.5")
    assert other != name
    with pytest.raises(CheckpointError, match="or the scores, differ"):
        opened(pairs, run, resumed=True, scores=other, **select)
    assert scored(pairs, checkpoint) == name  # stored scores are reused
    opened(pairs, run, resumed=True, scores=name, **select)


def test_members_are_scored_by_name(checkpoint: Path, tmp_path: Path) -> None:
    write_published("rs5m", tmp_path / "pairs" / "0.tar", 6)
    members = ("--image", "img_content", "--captions", "caption")
    rows = rows_of(scored(tmp_path / "pairs", checkpoint, *members))
    assert [row["cause"] for row in rows] == [None] * 6
    assert [row["characters"] for row in rows] == [len(sample_of("rs5m", i)["caption"]) for i in range(6)]
    assert all(row["clip"] is not None and (row["width"], row["height"]) == (24, 20) for row in rows)


def test_shards_without_scores_are_reported(checkpoint: Path, name: str, tmp_path: Path) -> None:
    more = write_pairs(tmp_path / "more", first=100, samples=4)
    with pytest.raises(DataError, match=r"0\.tar has no scores in run-\w+, or has changed: score all shards"):
        opened(more, tmp_path / "run", filters=("score.clip > 0",), scores=name)
    with pytest.raises(DataError, match="none of 4 samples examined has"):
        opened(more, tmp_path / "run", filters=("score.clip > 0",))


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (["score.clap > 0"], "unknown column in filter 'score.clap > 0': did you mean 'clip'"),
        (["score.clip >= top 100%"], "expected more than 0% and less than 100%"),
        (["score.words >= top 10%"], "is not a number"),
        (
            ["preset:datacomp_basics"],
            "unknown preset 'preset:datacomp_basics': did you mean 'datacomp_basic'",
        ),
        (["width > 5"], "has no effect: no filter names a column such as score.clip"),
    ],
)
def test_wrong_filters_are_rejected(filters: list[str], message: str, name: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_scored_filters(filters, name)
    with pytest.raises(ConfigError, match="no such scores"):
        parse_scored_filters(["score.clip > 0"], "../features")
    with pytest.raises(ConfigError, match=r"needs data\.scores"):
        parse_scored_filters(["preset:datacomp_clip_score"], "")


def test_presets_are_valid(name: str) -> None:
    for preset in PRESETS:
        filters, scores = parse_scored_filters([f"preset:{preset}"], name)
        assert filters and scores is not None
        json.dumps([*map(str, filters)])


@pytest.mark.parametrize(
    ("filter_", "message"),
    [
        ("score.clipp > 0.2", "unknown column in filter 'score.clipp > 0.2': did you mean 'clip'"),
        ("score.clip >= top 100%", "expected more than 0% and less than 100%"),
        ("preset:datacomp", "unknown preset 'preset:datacomp'"),
        ("width > 100", "filter 'width > 100' is not on scores"),
        ("score.contaminated = false", "unknown column in filter 'score.contaminated = false'"),
        ("score.clip", "filter 'score.clip'"),
    ],
)
def test_filters_are_checked_before_anything_is_scored(
    filter_: str,
    message: str,
    pairs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(options: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("data.scores.command.PairEncoder", load)
    page = str(tmp_path / "page.html")
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        main(["score", str(pairs), "--model", "any", "--html", page, "--filters", filter_])
    assert len(str(caught.value).splitlines()) == 1


# --------------------------------------------------------------------------------------------------------------
# Near-duplicates and evaluation images.

DTYPE = np.dtype([("embedding", np.float16, (5,)), ("thumbnail", np.uint8, (256,))])


def features(random: np.random.Generator, count: int) -> Any:
    """Draw features from a few distinct ones, so that some are equal."""
    images = np.zeros(count, dtype=DTYPE)
    images["embedding"] = random.standard_normal((4, 5))[random.integers(4, size=count)]
    images["thumbnail"] = random.integers(0, 256, (3, 256))[random.integers(3, size=count)]
    return images


@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(0, 7), max_size=4), queries=st.integers(1, 6))
@settings(max_examples=60)
def test_closest_image_equals_brute_force(seed: int, sizes: list[int], queries: int) -> None:
    random = np.random.default_rng(seed)
    blocks, asked = [features(random, size) for size in sizes if size], features(random, queries)
    found, number = closest(asked, iter([*blocks, asked]), "cpu")
    everything = np.concatenate([*blocks, asked])
    for row in range(queries):
        before = everything[: len(everything) - queries + row]
        if not len(before):
            assert (found[row], number[row]) == (-1, -1)
            continue
        one = asked["embedding"][row].astype(np.float64)
        others = before["embedding"].astype(np.float64)
        cosine = others @ one / np.linalg.norm(others, axis=1) / np.linalg.norm(one)
        gray = before["thumbnail"].astype(np.float64)
        correlation = [np.corrcoef(asked["thumbnail"][row].astype(np.float64), other)[0, 1] for other in gray]
        expected = np.minimum(cosine, correlation)
        assert found[row] == pytest.approx(expected.max(), abs=2e-3)  # thumbnails of low contrast are damped
        assert expected[number[row]] == pytest.approx(expected.max(), abs=2e-3)


def reencoded(image: Image.Image) -> dict[str, tuple[str, bytes]]:
    half = image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC)
    return {
        "jpeg": ("jpg", encoded(image, "jpeg", quality=50)),
        "webp": ("webp", encoded(image, "webp", quality=40)),
        "half": ("png", encoded(half)),
    }


def test_hidden_evaluation_images_and_duplicates_are_found(checkpoint: Path, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "eval") as writer:
        for number in range(50):
            writer.write(
                "test",
                Record(key=f"e{number:03d}", image=encoded(photo(number, (96, 96))), extension="png"),
            )
        writer.finish({})
    with DatasetWriter(
        tmp_path / "train", samples_per_shard=70
    ) as writer:  # 150 of 350 are copies of evaluation images
        for number in range(50):
            own = {
                f"own{part}": ("png", encoded(photo(1000 + number * 4 + part, (96, 96)))) for part in range(4)
            }
            for how, (form, data) in (own | reencoded(photo(number, (96, 96)))).items():
                writer.write(
                    "train", Record(key=f"{number:03d}-{how}", image=data, extension=form, caption="red")
                )
        writer.finish({})
    before = (tmp_path / "train" / "train" / "0.tar").stat()
    for path in (tmp_path / "train" / "train").iterdir():
        path.chmod(0o444)
    (tmp_path / "train" / "train").chmod(0o555)
    page = tmp_path / "page.html"
    name = scored(tmp_path / "train", checkpoint, "--against", str(tmp_path / "eval"), "--html", str(page))
    assert (tmp_path / "train" / "train" / "0.tar").stat().st_mtime_ns == before.st_mtime_ns
    rows = rows_of(name)
    assert len(rows) == 350
    for row in rows:
        number, how = row["key"].split("-")
        assert row["contaminated"] is not how.startswith("own"), row
        assert row["duplicate"] is (how in ("webp", "half")), row  # the first one, the JPEG, is kept
        if row["contaminated"]:
            assert row["contaminated_by"].endswith(f"eval/test/0.tar/e{number}")
        if row["duplicate"]:
            assert re.search(rf"/train/\d\.tar/{number}-(jpeg|webp)$", row["duplicate_of"])
    shards = opened(
        tmp_path / "train", tmp_path / "run", filters=("score.contaminated = false",), scores=name
    )
    assert len(shards) == 200
    text = page.read_text(encoding="utf-8")
    assert text.count("data:image/webp;base64,") >= 40 and not re.search("(src|href)=.http", text)
    assert "<td>200</td><td>57.1%</td>" in text


@pytest.mark.long
def test_killed_scoring_resumes_with_the_same_result(
    checkpoint: Path, pairs: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = json.loads((scores_folder() / name / "manifest.json").read_text())
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path))
    command = [sys.executable, "-m", "data", "score", str(pairs), "--model", str(checkpoint), "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob("scores/features/*/*.parquet")):
        time.sleep(0.005)
    process.kill()
    process.wait()
    (folder,) = tmp_path.glob("scores/features/*")
    lock = FileLock(folder / ".lock")
    assert lock.try_acquire()
    with pytest.raises(ConfigError, match=r"another process .* is writing to"):
        scored(pairs, checkpoint)
    lock.release()
    assert scored(pairs, checkpoint) == name
    found = json.loads((scores_folder() / name / "manifest.json").read_text())
    assert found == expected
