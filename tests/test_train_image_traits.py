"""Tests of training on transparent and rotated images: counts, notes and settings stored with the model.

Most tests run a real ``train.py``.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import clipkit
from clipkit.config import DataConfig, PixelsConfig
from clipkit.errors import CheckpointError
from clipkit.model.preprocess import Preprocess
from clipkit.samples.traits import Decoding
from clipkit.training.checkpoint import loop_state
from data.options import PackOptions
from data.order import Order
from data.pack import pack
from data.selection import Selection
from data.shards.manifest import make_manifest
from data.shards.samples import Shards, find_shards
from data.training_data import Packed, packed_images, resumed_preprocess, trained_preprocess
from tests.forked import Forked
from tests.small_trainings import (
    BATCH,
    SETTINGS,
    checkpoint,
    digests,
    error_of,
    go_back,
    metrics,
    write_pairs,
)

ROWS, STEPS = 16, 6
CLEAR = "transparent and without a background"
TURNED = "rotated by an EXIF tag that is not applied"
Train = Callable[..., str]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two classes with a table of captions: every fourth image is transparent, every fourth rotated."""
    folder = tmp_path_factory.mktemp("photos")
    exif = Image.Exif()
    exif[0x0112] = 6
    random = np.random.default_rng(0)
    lines = ["path,caption"]
    for number in range(ROWS):
        image = Image.fromarray(random.integers(0, 256, (20, 24, 4), dtype=np.uint8))
        path = folder / "raw" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number % 4 == 1:
            image.save(path)
        else:
            image.convert("RGB").save(path, exif=exif if number % 4 == 2 else Image.Exif())
        lines.append(f"{path.relative_to(folder)},noise {number}")
    (folder / "table.csv").write_text("\n".join(lines))
    pack(folder / "table.csv", folder / "as_is", PackOptions(keep_orientation=True), progress=False)
    pack(folder / "table.csv", folder / "upright", progress=False)
    for name, color in (("white", "white"), ("white2", "#fff"), ("black", "black")):
        pack(folder / "table.csv", folder / name, PackOptions(background=color), progress=False)
    return folder


@pytest.fixture
def train(forked: Forked, photos: Path, tmp_path: Path) -> Train:
    """Train on one or several of the packed sets and return stderr."""

    def run(name: str, *more: str, data: str = "as_is", status: int = 0) -> str:
        sources = json.dumps([str(photos / name) for name in data.split()])
        settings = [f"data.train={sources}", *SETTINGS, f"steps={STEPS}", f"out={tmp_path / name}"]
        names = {setting.partition("=")[0] for setting in more}
        settings = [setting for setting in settings if setting.partition("=")[0] not in names]
        environment = {"CLIPKIT_CACHE": str(photos / "cache")}
        done = forked.run("train.py", [*settings, *more], environment)
        assert done.returncode == status, done.stderr[-3000:]
        return done.stderr

    return run


def about_images(said: str) -> list[str]:
    return [line for line in said.splitlines() if CLEAR in line or TURNED in line]


def decoding(run: Path) -> Decoding:
    return clipkit.load(run).preprocess.decoding


def test_image_traits_are_counted_and_printed_at_first_and_at_the_end(train: Train, tmp_path: Path) -> None:
    lines = about_images(train("run"))
    state = json.loads((checkpoint(tmp_path / "run", STEPS) / "state.json").read_text())
    # 24 draws from 16 samples: one epoch and half of another
    assert 4 <= state["transparent"] <= 8 and 4 <= state["rotated"] <= 8
    last = metrics(tmp_path / "run")[-1]
    assert (last["transparent"], last["rotated"]) == (state["transparent"], state["rotated"])
    for count, what, option in (
        (state["transparent"], CLEAR, "pixels.background=white"),
        (state["rotated"], TURNED, "pixels.upright=true"),
    ):
        first, final = (line for line in lines if what in line)
        assert re.fullmatch(
            rf"note: drawn so far, repeats counted: \d of \d+ images? (is|are) {what}.*; set {option}", first
        )
        assert final.startswith(f"note: drawn in all, repeats counted: {count} of 24 images are {what}")
    assert len(lines) == 4
    assert decoding(tmp_path / "run") == Decoding()


@pytest.mark.long
def test_resume_restores_counts_and_weights(train: Train, tmp_path: Path) -> None:
    out, options = tmp_path / "run", ("pixels.background=white", "checkpoint.every_steps=2")
    assert [TURNED in line for line in about_images(train("run", *options))] == [True, True]
    whole, weights = json.loads((checkpoint(out, STEPS) / "state.json").read_text()), digests(out, STEPS)
    go_back(out, 2)
    train("run", *options)
    state = json.loads((checkpoint(out, STEPS) / "state.json").read_text())
    assert {**state, "seconds": 0} == {**whole, "seconds": 0} and state["rotated"] > 0
    assert digests(out, STEPS) == weights
    assert decoding(out) == Decoding(background=(255, 255, 255))
    refused = error_of(train("run", "checkpoint.every_steps=2", status=1))
    assert 'pixels.background: "white" → ""' in refused
    del state["transparent"], state["rotated"], state["format"]  # absent in checkpoints of earlier versions
    assert loop_state(state, origin=out).transparent == loop_state(state, origin=out).rotated == 0


@pytest.mark.long
def test_options_change_training_and_are_stored(train: Train, tmp_path: Path) -> None:
    plain, chosen = tmp_path / "plain", tmp_path / "chosen"
    assert about_images(train("plain", "pixels.background=none", "pixels.upright=false")) == []
    assert about_images(train("chosen", "pixels.background=#fff", "pixels.upright=true")) == []
    assert digests(plain, STEPS)["model.safetensors"] != digests(chosen, STEPS)["model.safetensors"]
    assert decoding(plain) == Decoding()
    assert decoding(chosen) == Decoding(background=(255, 255, 255), upright=True)
    assert about_images(train("next", f"model.weights={chosen}")) == []  # from the initial weights
    assert decoding(tmp_path / "next") == decoding(chosen)
    wrong = error_of(train("wrong", "pixels.background=wite", status=1))
    assert wrong == "error: pixels.background = 'wite' is not a color: use a color such as white or #ffffff"
    wrong = error_of(train("wrong", "pixels.upright=yes", status=1))
    assert wrong.endswith("pixels.upright = 'yes' is invalid: expected auto, true or false")


@pytest.mark.long
def test_settings_of_pack_are_stored_and_applied_to_raw_images(
    train: Train, forked: Forked, photos: Path, tmp_path: Path
) -> None:
    said = train("run", f"eval.data=[{json.dumps(str(photos / 'raw'))}]", data="white")
    assert (
        "transparent images get the background #ffffff and the EXIF orientation of images is applied" in said
    )
    assert about_images(said) == []
    run = tmp_path / "run"
    assert decoding(run) == Decoding(background=(255, 255, 255), upright=True)
    arguments = ["zero-shot", "--model", run, "--data", photos / "raw", "--features", ""]
    done = forked.run("eval/__main__.py", list(map(str, arguments)), {}, cwd=tmp_path)
    assert (done.returncode, TURNED in done.stderr or CLEAR in done.stderr) == (0, False)
    # a raw image and its packed copy have the same features
    shards = Shards.of(find_shards(str(photos / "white")))
    model = clipkit.load(run)
    packed = clipkit.encode_image([shards.read(number).image for number in range(ROWS)], model)
    raw = [photos / "raw" / f"class{number % 2}" / f"{number}.png" for number in range(ROWS)]
    assert np.array_equal(clipkit.encode_image(raw, model).numpy(), packed.numpy())


@pytest.mark.parametrize(
    ("sources", "wanted", "note"),
    [
        ("white", Decoding(background=(255, 255, 255), upright=True), ""),
        ("white/train", Decoding(background=(255, 255, 255), upright=True), ""),
        ("white/train/{0..0}.tar upright/train/0.tar", Decoding(upright=True), "different backgrounds"),
        ("{white,black,upright}/train/0.tar", Decoding(upright=True), "different backgrounds"),
        ("{white,black}/train/0.tar", Decoding(upright=True), "different backgrounds"),
        ("{white,white2}/train/0.tar", Decoding(background=(255, 255, 255), upright=True), ""),
        ("white*/train/*.tar", Decoding(background=(255, 255, 255), upright=True), ""),
        ("[bw]*/train/*.tar", Decoding(upright=True), "different backgrounds"),
        ("{upright,as_is}/train/0.tar", Decoding(), "some sources of data.train were packed upright"),
        ("as_is upright", Decoding(), "some sources of data.train were packed upright and others not"),
        ("plain upright", Decoding(), "some sources of data.train were packed upright and others not"),
        ("as_is plain", Decoding(), ""),
        ("plain", Decoding(), ""),
        ("glyphs upright", Decoding(upright=True), ""),
    ],
)
def test_settings_follow_packed_sets_that_agree(
    photos: Path, monkeypatch: pytest.MonkeyPatch, sources: str, wanted: Decoding, note: str
) -> None:
    if not (photos / "plain").exists():  # shards of another writer, in folders of the same names
        write_pairs(photos / "plain", samples=4)
    monkeypatch.chdir(photos)
    monkeypatch.setenv("CLIPKIT_CACHE", str(photos / "cache"))
    names = tuple(sources.split())
    # built-in sets need no setting; generating one is slow, so other shards replace it
    shards = [find_shards("plain" if name == "glyphs" else name) for name in names]
    manifest = make_manifest(shards, Selection())
    settings, pixels = DataConfig(train=names), PixelsConfig()
    packed = packed_images(settings, pixels, manifest, rank0=True, broadcast=bytes)
    assert trained_preprocess(Preprocess(image_size=8), pixels, packed).decoding == wanted
    assert [note in line for line in packed.notes] == [True] * bool(note)
    pixels = PixelsConfig(background="none", upright=False)
    packed = packed_images(settings, pixels, manifest, rank0=True, broadcast=bytes)
    assert trained_preprocess(Preprocess(image_size=8), pixels, packed).decoding == Decoding()
    assert not packed.notes


def test_evaluation_during_training_prints_image_traits_once(train: Train, photos: Path) -> None:
    data = f"eval.data=[{json.dumps(str(photos / 'raw'))}]"
    lines = about_images(train("run", data, "eval.every_steps=2", "pixels.background=white"))
    assert [line for line in lines if "dataset raw" in line] == [
        f"note: dataset raw, split test: 4 of 16 images are {TURNED}, as in open_clip; set pixels.upright=true"
    ]


@pytest.mark.long
def test_two_ranks_count_the_same_as_one(train: Train, forked: Forked, photos: Path, tmp_path: Path) -> None:
    train("one")
    given = [f"data.train={photos / 'as_is'}", *SETTINGS, f"steps={STEPS}", f"out={tmp_path / 'two'}"]
    ended = forked.ranks("train.py", *given, world=2)
    first, second = (
        json.loads((checkpoint(tmp_path / name, STEPS) / "state.json").read_text()) for name in ("one", "two")
    )
    assert (first["transparent"], first["rotated"]) == (second["transparent"], second["rotated"])
    assert sorted(len(about_images(rank.stderr)) for rank in ended) == [0, 4]


def test_training_stops_at_deep_images_until_a_range_is_given(forked: Forked, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    order = Order(np.array([ROWS]), seed=0, batch_size=BATCH, window=64)
    deep = int(order.batch(2).ids[0])  # drawn by the third step
    (tmp_path / "images").mkdir()
    lines = ["path,caption"]
    for number in range(ROWS):
        values = random.integers(0, 4096, (20, 24)).astype(np.uint16)
        Image.fromarray(values if number == deep else (values // 16).astype(np.uint8)).save(
            tmp_path / "images" / f"{number}.png"
        )
        lines.append(f"images/{number}.png,noise {number}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    assert pack(tmp_path / "table.csv", tmp_path / "pairs", progress=False).marks["deep"] == 1

    def train(out: Path, *more: str, status: int = 0) -> str:
        settings = [f"data.train={tmp_path / 'pairs'}", *SETTINGS, f"steps={STEPS}", f"out={out}", *more]
        done = forked.run("train.py", settings, {"CLIPKIT_CACHE": str(tmp_path / "cache")})
        assert done.returncode == status, done.stderr[-3000:]
        return done.stderr

    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    error = error_of(train(stopped, status=1))
    assert re.fullmatch(
        r"error: 0000000\d\d in .*: 16-bit grayscale image with values from \d+ to \d+, and no known .*"
        r"set pixels\.range \(training\).* such as 0,4095; .*; step 2 is saved; the same command resumes.*",
        error,
    )
    train(whole, "data.pixel_range=0,4000")  # the former name
    # the range may be added to the run, which gives the same weights, and may not change afterwards
    said = train(stopped, "pixels.range=0,4000")
    assert "values from 0 to 4000 of deep images become 0 to 255" in said
    assert "1 of 24 images has values outside the pixel range 0,4000" in said or "2 of 24" in said
    assert decoding(stopped).pixel_range == (0.0, 4000.0)
    assert digests(stopped, STEPS)["model.safetensors"] == digests(whole, STEPS)["model.safetensors"]
    error = error_of(train(stopped, "pixels.range=0,4095", status=1))
    assert 'pixels.range: "0,4000" → "0,4095"' in error
    error = error_of(train(tmp_path / "wrong", "pixels.range=4095", status=1))
    assert error.startswith("error: pixels.range = ") and "expected auto, dtype, or" in error


def test_resumed_runs_keep_their_range() -> None:
    plain = Preprocess(image_size=8)
    ranged = plain.replace_decoding(pixel_range="0,4095")
    assert resumed_preprocess(plain, PixelsConfig()) == plain
    assert resumed_preprocess(ranged, PixelsConfig()) == ranged  # from model.weights
    assert resumed_preprocess(plain, PixelsConfig(range=(0, 4095))) == ranged
    with pytest.raises(CheckpointError, match="but the run was trained with 0,4095: restore it"):
        resumed_preprocess(ranged, PixelsConfig(range="dtype"))
    assert trained_preprocess(ranged, PixelsConfig(), Packed()) == ranged
    assert trained_preprocess(ranged, PixelsConfig(range="dtype"), Packed()).pixel_range == "dtype"


def test_deep_images_of_an_evaluation_stop_a_training_before_the_first_step(
    train: Train, tmp_path: Path
) -> None:
    for number in range(2):
        (tmp_path / f"deep/class{number}").mkdir(parents=True)
        Image.new("I;16", (8, 8), 999).save(tmp_path / f"deep/class{number}/{number}.png")
    error = error_of(train("run", f"eval.data=[{json.dumps(str(tmp_path / 'deep'))}]", status=1))
    assert "0.png of" in error and "16-bit grayscale image with values from 999 to 999" in error
    assert not (tmp_path / "run").exists()
