"""Tests of the corpus `glyphs`: images, captions, held-out fonts, reproducibility."""

import io
import json
import os
import re
import signal
import string
import subprocess
import sys
import tarfile
import time
import unicodedata
from collections import Counter
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from PIL import Image

from clipkit.errors import DataError
from data.corpora import glyphs
from data.corpora.distortion import Distortion, draw_distortions, draw_images
from data.corpora.fonts import (
    CANVAS,
    FACES,
    HELD_OUT,
    PRUNED,
    Glyph,
    list_glyphs,
    outline_field,
    rasterize,
    skeleton_fields,
)
from data.corpora.glyphs import CLASS_CHARACTERS, CLASS_NAMES, TEMPLATES, character_name, write_caption

SAMPLES = 700


def read(folder: Path) -> list[dict[str, bytes]]:
    """Read the samples of one split."""
    samples: dict[str, dict[str, bytes]] = {}
    for number in range(int((folder / "nshards.txt").read_text())):
        with tarfile.open(folder / f"{number}.tar") as tar:
            for member in tar:
                key, extension = member.name.split(".", 1)
                content = tar.extractfile(member)
                assert content is not None
                samples.setdefault(key, {})[extension] = content.read()
    return list(samples.values())


def pixels(sample: dict[str, bytes]) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(sample["png"])) as image:
        assert image.mode == "L"
        return np.asarray(image)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("glyphs") / "corpus"
    glyphs.make(out, samples=SAMPLES, processes=1, progress=False)
    return out


@pytest.fixture(scope="module")
def train(corpus: Path) -> list[dict[str, bytes]]:
    return read(corpus / "train")


@pytest.fixture(scope="module")
def test(corpus: Path) -> list[dict[str, bytes]]:
    return read(corpus / "test")


def meta(sample: dict[str, bytes]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sample["json"])
    return found


def glyph(file: str, character: str) -> Glyph:
    face = next(face for face in FACES if face.file == file)
    return next(g for g in list_glyphs(face) if g.character == character and g.styles == face.styles)


@pytest.mark.long
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_all_processes(stop: signal.Signals, tmp_path: Path) -> None:
    for attempt in range(3):
        command = [sys.executable, "-m", "data", "make", "glyphs", str(tmp_path / "out")]
        process = subprocess.Popen(
            command, cwd=Path(__file__).parents[3], start_new_session=True, stderr=subprocess.PIPE, text=True
        )
        until = time.monotonic() + 120
        while not list(tmp_path.glob(".out*/*/0.tar")):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        time.sleep(0.7 * attempt)
        os.killpg(process.pid, stop)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130 and said.splitlines()[-1] == "stopped; nothing was written"
        until = time.monotonic() + 20
        with suppress(ProcessLookupError):
            while time.monotonic() < until:
                os.killpg(process.pid, 0)
                time.sleep(0.02)
        assert time.monotonic() < until, "a process is left"
        assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_number_of_processes_does_not_change_files(corpus: Path, tmp_path: Path) -> None:
    glyphs.make(tmp_path / "again", samples=SAMPLES, processes=2, progress=False)
    files = [path.relative_to(corpus) for path in corpus.rglob("*") if path.is_file()]
    assert len(files) == 7
    for file in files:
        assert (corpus / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file


def test_chunks_are_reproducible_and_depend_on_the_seed() -> None:
    chunk = glyphs._Chunk(split="train", start=0, count=20, size=32, seed=0)
    again, other = (glyphs._make_chunk(replace(chunk, seed=seed)) for seed in (0, 1))
    assert again == glyphs._make_chunk(chunk)
    assert all(a.image != b.image for a, b in zip(again, other, strict=True))


def test_card_and_class_files(corpus: Path) -> None:
    card = json.loads((corpus / "card.json").read_text())
    assert card["samples"] == {"train": SAMPLES, "test": 10 * 5 * 62}
    assert card["license"] and card["how"] and card["seed"] == 0 and card["revision"] == glyphs.REVISION
    assert (corpus / "classnames.txt").read_text().splitlines() == list(CLASS_NAMES)
    templates = (corpus / "zeroshot_classification_templates.txt").read_text().splitlines()
    assert templates == list(TEMPLATES) and all("{c}" in template for template in templates)
    assert len({*CLASS_NAMES}) == 62
    assert CLASS_NAMES[CLASS_CHARACTERS.index("7")] == "digit seven"
    assert CLASS_NAMES[CLASS_CHARACTERS.index("Q")] == "latin capital letter q"


def test_held_out_families_are_not_in_the_training_split(
    train: list[dict[str, bytes]], test: list[dict[str, bytes]]
) -> None:
    assert not {meta(sample)["family"] for sample in train} & HELD_OUT
    assert {meta(sample)["family"] for sample in test} == HELD_OUT
    for pool in glyphs._pools().values():
        for ways in (*pool.plain.values(), *pool.ornate.values()):
            assert not {way.face.family for way in ways} & HELD_OUT


def test_held_out_shapes_are_not_training_shapes() -> None:
    pools = glyphs._pools()
    trained = {
        rasterize(way).tobytes()
        for share in ("digit", "letter")
        for pool in (pools[share].plain, pools[share].ornate)
        for ways in pool.values()
        for way in ways
    }
    assert len(trained) > 1000
    for held_out in glyphs._held_out():
        assert rasterize(held_out).tobytes() not in trained, held_out


def test_labels_of_the_test_split(test: list[dict[str, bytes]]) -> None:
    counts = Counter(int(sample["cls"]) for sample in test)
    assert counts == dict.fromkeys(range(62), 50)
    for sample in test:
        assert CLASS_CHARACTERS[int(sample["cls"])] == meta(sample)["character"]
        assert CLASS_NAMES[int(sample["cls"])] in sample["txt"].decode()


def test_images_are_grayscale_squares_with_ink(
    train: list[dict[str, bytes]], test: list[dict[str, bytes]]
) -> None:
    for sample in train + test:
        array = pixels(sample)
        assert array.shape == (32, 32)
        assert int(array.max()) - int(array.min()) >= 8, sample["json"]


def test_fractions_of_digits_and_letters(train: list[dict[str, bytes]]) -> None:
    characters = [meta(sample)["character"] for sample in train]
    digits = sum(character in string.digits for character in characters) / SAMPLES
    letters = sum(character in string.ascii_letters for character in characters) / SAMPLES
    assert 0.25 < digits < 0.35 and 0.35 < letters < 0.45
    assert len({*characters}) > 200


def test_captions_name_the_character(train: list[dict[str, bytes]]) -> None:
    lengths = []
    for sample in train:
        caption, character = sample["txt"].decode(), meta(sample)["character"]
        words = caption.replace(",", "").split()
        lengths.append(len(words))
        if character in string.digits:
            assert character in words or character_name(character).split()[-1] in words, caption
        elif character in string.ascii_letters:
            assert character.lower() in [word.lower() for word in words], caption
        else:
            name = character_name(character).removeprefix("latin ").replace(" letter ", " ")
            assert name in caption.replace(" letter ", " "), caption
    assert 4 < np.mean(lengths) < 8 and max(lengths) < 20


@pytest.mark.parametrize("figure", string.digits)
def test_captions_name_digits_by_word_and_by_figure(figure: str) -> None:
    rng = np.random.default_rng(0)
    word = unicodedata.name(figure).split()[-1].lower()
    said = [write_caption(rng, figure).split() for _ in range(100)]
    assert sum(figure in words for words in said) > 20
    assert sum(word in words for words in said) > 40


def test_glyphs_are_characters_of_the_font() -> None:
    for face in FACES:
        every = list_glyphs(face)
        assert every, face
        nothing = Glyph(face=face, draw="\U0010fff0", character="\U0010fff0", styles=())
        box = rasterize(nothing)  # the box drawn for missing characters
        for one in every[::5]:
            ink = rasterize(one)
            assert ink.any() and not np.array_equal(ink, box), one


def test_fonts_with_a_custom_encoding() -> None:
    assert glyph("cmmi10.ttf", "α").draw == "\u00ae"  # the code of the letter in TeX's math encoding
    calligraphic = list_glyphs(next(face for face in FACES if face.file == "cmsy10.ttf"))
    assert {g.character for g in calligraphic} & {*string.ascii_lowercase, *string.digits} == set()
    one = glyph("cmmi10.ttf", "3")  # an old-style three descends below the baseline
    assert (
        np.flatnonzero(rasterize(one).any(1))[-1]
        > np.flatnonzero(rasterize(glyph("cmr10.ttf", "3")).any(1))[-1]
    )


def clean(count: int) -> Distortion:
    """Return a distortion that only crops to the ink, dark on light."""
    drawn = draw_distortions(np.random.default_rng(0), pen=np.zeros(count, bool), crop=np.ones(count, bool))
    zero = {
        f.name: np.zeros_like(getattr(drawn, f.name))
        for f in fields(drawn)
        if f.name not in ("crop", "knots")
    }
    return replace(drawn, **{**zero, "contrast": np.ones(count, np.float32)})


def drawn(some: list[Glyph]) -> NDArray[np.uint8]:
    shape, reach, boxes = glyphs._measure_shapes(some, [-1] * len(some))
    return draw_images(np.random.default_rng(0), shape, reach, boxes, clean(len(some)), size=32)


def test_cropping_keeps_the_aspect_ratio() -> None:
    some = [glyph("DejaVuSans.ttf", c) for c in "il|I-mW1.8"] + [glyph("cmr10.ttf", c) for c in "il1-mW.8"]
    for one, array in zip(some, drawn(some), strict=True):
        ink = rasterize(one) > 127
        wide, high = (np.ptp(np.flatnonzero(ink.any(axis))) + 1 for axis in (0, 1))
        dark = array < 128
        seen_wide, seen_high = (np.ptp(np.flatnonzero(dark.any(axis))) + 1 for axis in (0, 1))
        assert max(seen_wide, seen_high) >= 28, one.character
        scale = max(seen_wide, seen_high) / max(wide, high)
        assert abs(min(seen_wide, seen_high) - min(wide, high) * scale) <= 2 + scale, one.character


def test_narrow_letters_are_distinguishable() -> None:
    i, l, bar, one = drawn([glyph("DejaVuSerif.ttf", c) for c in "il|1"]).astype(float)  # noqa: E741
    for a, b in ((i, l), (i, bar), (l, bar), (l, one), (bar, one)):
        assert np.abs(a - b).mean() > 10


@settings(max_examples=30, deadline=None)
@given(arrays.arrays(np.uint8, (2, 12, 12), elements=st.sampled_from([0, 0, 255])))
def test_distances_equal_their_definition(ink: NDArray[np.uint8]) -> None:
    field = outline_field(ink)
    for array, found in zip(ink, field, strict=True):
        places = np.argwhere(np.ones((12, 12)))
        for kind, sign in ((255, 1), (0, -1)):
            there = np.argwhere(array == kind)
            away = np.sqrt(((places[:, None] - there[None]) ** 2).sum(2)).min(1, initial=9).reshape(12, 12)
            other = array != kind
            assert np.allclose(found[other], sign * np.minimum(away[other], 9), atol=1e-3)


@settings(max_examples=30, deadline=None)
@given(arrays.arrays(np.uint8, (3, 16, 16), elements=st.sampled_from([0, 255, 255])))
def test_skeleton_is_inside_the_ink_and_not_empty(ink: NDArray[np.uint8]) -> None:
    for field in skeleton_fields(ink):
        for array, found in zip(ink, field, strict=True):
            lines = found == 0
            assert not (lines & (array == 0)).any()
            assert lines.any() == array.any()


def test_strokes_are_shortened_by_twice_the_pruned_pixels() -> None:
    ink = np.zeros((1, CANVAS, CANVAS), np.uint8)
    ink[0, 10:60, 30:34] = 255
    lengths = [int((field == 0).sum()) for field in skeleton_fields(ink)]
    assert [lengths[0] - length for length in lengths] == [2 * pixels for pixels in PRUNED]


def test_png_files_contain_the_images() -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 24, 24)).astype(np.uint8)
    for array, content in zip(images, glyphs._encode_pngs(images), strict=True):
        with Image.open(io.BytesIO(content)) as image:
            image.verify()
        with Image.open(io.BytesIO(content)) as image:
            assert np.array_equal(np.asarray(image), array)


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"size": 8}, {"seed": -1}])
def test_out_of_range_settings_raise_error(wrong: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot make"):
        glyphs.make(tmp_path / "glyphs", progress=False, **wrong)
    assert not (tmp_path / "glyphs").exists()


def test_progress_without_a_terminal_is_one_line_at_start_and_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chunks = [glyphs._Chunk(split="train", start=start, count=20, size=32, seed=0) for start in (0, 20)]
    assert list(glyphs._show_drawing(chunks, [[], []], progress=True)) == [(chunk, []) for chunk in chunks]
    output = capsys.readouterr()
    start, end = output.err.splitlines()
    assert start == "drawing 40 glyphs"
    assert re.fullmatch(r"drew 40 glyphs in \d+ s", end)
    assert output.out == ""
    assert len(list(glyphs._show_drawing(chunks, [[], []], progress=False))) == 2
    assert capsys.readouterr().err == ""
