"""The built-in dataset ``glyphs``: printed characters, distorted like handwriting and photographs, with captions.

Characters come from the fonts that matplotlib installs: mostly digits and Latin letters, also accented Latin,
Greek, Cyrillic, punctuation, mathematics, arrows and symbols. Whole families are held out (``HELD_OUT`` in
``data.corpora.fonts``); the test split consists of their 62 digits and letters.

Every image depends only on the seed and its position, so the files are the same for any number of processes.
"""

import os
import signal
import string
import struct
import sys
import time
import unicodedata
import zlib
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from clipkit.errors import DataError
from clipkit.files import CountProgress, end_with_parent
from data.corpora.fonts import FACES, HELD_OUT, LICENSES, PRUNED, Glyph, list_glyphs
from data.shards.writer import DatasetWriter, Record

# --------------------------------------------------------------------------------------------------------------
# Captions
#
# Captions use Unicode names in lower case, and shorter common names. Every digit occurs as a word and as a figure.
# Captions are short, because every token costs training time.

CLASS_CHARACTERS = (
    string.digits + string.ascii_lowercase + string.ascii_uppercase
)  # in the order of the labels
TEMPLATES = ("{c}", "the {c}", "a photo of the {c}", "a scan of the {c}", "a picture of the {c}")

# Letters that differ from their capitals only in size, so that an image cropped to the ink is ambiguous.
_SAME_IN_BOTH_CASES = frozenset("cosuvwxzCOSUVWXZ")

_DIGIT_NAMES = (
    *(("digit {w}", 7), ("number {w}", 4), ("{w}", 3), ("{f}", 3), ("digit {f}", 3)),
    *(("number {f}", 2), ("numeral {w}", 1), ("figure {w}", 1), ("figure {f}", 1)),
)
_SMALL_NAMES = (
    *(("latin small letter {l}", 6), ("small letter {l}", 4), ("lowercase letter {l}", 2)),
    *(("lowercase {l}", 2), ("small {l}", 1), ("letter {l}", 1), ("letter {l}, small", 1)),
)
_CAPITAL_NAMES = (
    *(("latin capital letter {l}", 6), ("capital letter {l}", 4), ("uppercase letter {l}", 2)),
    *(("uppercase {l}", 2), ("capital {l}", 1), ("letter {l}", 1), ("letter {l}, capital", 1)),
)
_CASELESS_NAMES = (("letter {l}", 3), ("latin letter {l}", 2), ("{l}", 1))
_PHRASES = (
    *(("{p}", 9), ("the {p}", 5), ("{a} {p}", 3), ("a photo of the {p}", 4), ("a photo of {a} {p}", 1)),
    *(("a scan of the {p}", 2), ("a picture of the {p}", 2), ("an image of {a} {p}", 1)),
    *(("a drawing of the {p}", 1), ("a close-up of {a} {p}", 1), ("this is the {p}", 1)),
)

_Choices: TypeAlias = tuple[tuple[str, int], ...]


def character_name(character: str) -> str:
    """Return the name of a character in lower case: "digit seven", "greek small letter alpha"."""
    return unicodedata.name(character).lower()


CLASS_NAMES = tuple(character_name(character) for character in CLASS_CHARACTERS)


def _pick(rng: np.random.Generator, choices: _Choices) -> str:
    ends = list(accumulate(weight for _, weight in choices))
    return choices[bisect(ends, rng.random() * ends[-1])][0]


def _name(rng: np.random.Generator, character: str, *, cropped: bool) -> str:
    name = character_name(character)
    if character in string.digits:
        return _pick(rng, _DIGIT_NAMES).format(w=name.split()[-1], f=character)
    if character in string.ascii_letters:
        names: _Choices = _SMALL_NAMES if character.islower() else _CAPITAL_NAMES
        if cropped and character in _SAME_IN_BOTH_CASES and rng.random() < 0.6:
            names = _CASELESS_NAMES
        return _pick(rng, names).format(l=character.lower() if rng.random() < 0.5 else character)
    if name.startswith("latin ") and rng.random() < 0.5:
        return name.removeprefix("latin ")
    if " letter " in name and rng.random() < 0.2:
        return name.replace(" letter ", " ")
    return name


def write_caption(
    rng: np.random.Generator,
    character: str,
    *,
    styles: Sequence[str] = (),
    visible: Sequence[str] = (),
    cropped: bool = False,
) -> str:
    """Return a random caption.

    Args:
        rng: random generator.
        character: the character in the image.
        styles: words for the type ("bold", "serif"), sometimes mentioned.
        visible: words for the distortion ("blurred", "handwritten", "white on black"), sometimes mentioned.
        cropped: whether the image is cropped to the ink, so that the size of the letter cannot be seen.
    """
    phrase = _name(rng, character, cropped=cropped)
    after = [word for word in visible if " on " in word and rng.random() < 0.12]
    before = [word for word in visible if " on " not in word and rng.random() < 0.35]
    if styles and rng.random() < 0.3:
        before += styles if rng.random() < 0.6 else [styles[int(rng.integers(len(styles)))]]
    phrase = " ".join([*before, phrase])
    # by sound: "an 8", "an uppercase a", but "a union"
    article = "a"
    if phrase[0] in "aeio8" or phrase.startswith(("up", "un ")):
        article = "an"
    caption = _pick(rng, _PHRASES).format(p=phrase, a=article)
    return ", ".join([caption, *after])


# --------------------------------------------------------------------------------------------------------------

REVISION = "3"  # changes whenever the same seed gives other images or captions

_CHUNK = 500
_PER_MINUTE = 60_000  # approximate, on two cores
_TEST_VIEWS = 10  # images per held-out glyph
_ORNATE = frozenset({"script", "fraktur", "double-struck"})
_STEPS = 14  # per pixel, so that a stored distance fits into a byte

# by kind of character: its fraction of the dataset, and the fractions of it drawn with a pen and cropped to the ink
_KINDS = {
    "digit": (0.30, 0.55, 0.75),
    "letter": (0.40, 0.4, 0.45),
    "latin": (0.06, 0.0, 0.4),
    "greek": (0.06, 0.0, 0.4),
    "cyrillic": (0.05, 0.0, 0.4),
    "punctuation": (0.05, 0.0, 0.4),
    "symbol": (0.08, 0.0, 0.6),
}


def make(
    out: Path,
    *,
    samples: int = 60_000,
    size: int = 32,
    seed: int = 0,
    processes: int | None = None,
    progress: bool = True,
) -> None:
    """Write the dataset: a training split, and a test split of held-out font families."""
    if samples < 1 or seed < 0 or not 16 <= size <= 512:
        raise DataError(
            f"cannot make {samples} glyphs of {size} pixels from seed {seed}: "
            "samples must be 1 or more, size 16 to 512, seed 0 or more"
        )
    chunks = []
    for split, total in (("train", samples), ("test", _TEST_VIEWS * len(_held_out()))):
        for start in range(0, total, _CHUNK):
            count = min(_CHUNK, total - start)
            chunks.append(_Chunk(split=split, start=start, count=count, size=size, seed=seed))
    with DatasetWriter(out) as writer:
        for chunk, records in _generate(chunks, processes or os.cpu_count() or 1, progress=progress):
            for record in records:
                writer.write(chunk.split, record)
        card = {
            "name": "glyphs",
            "revision": REVISION,
            "license": LICENSES,
            "source": "characters drawn with the fonts that matplotlib installs",
            "how": "rendered, warped, redrawn with a pen along the skeleton or with other stroke widths, framed by "
            "the em box or by the ink, then blurred, resampled, faded and made noisy at random strengths; the test "
            "split shows held-out families, framed by the em box, with mild distortion",
            "seed": seed,
            "size": size,
            "held_out_families": sorted(HELD_OUT),
            "families": sorted({face.family for face in FACES} - HELD_OUT),
            "metric": "accuracy",
        }
        writer.finish(card, class_names=CLASS_NAMES, templates=TEMPLATES)


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    split: str
    start: int
    count: int
    size: int
    seed: int


def _generate(
    chunks: list[_Chunk], processes: int, *, progress: bool
) -> Iterator[tuple[_Chunk, list[Record]]]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    if processes == 1:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield from _show_drawing(chunks, map(_make_chunk, chunks), progress=progress)
        finally:
            torch.set_num_threads(threads)
        return
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    try:
        pool = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_start_process)
        try:
            yield from _show_drawing(chunks, pool.map(_make_chunk, chunks), progress=progress)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    except BrokenProcessPool as error:  # spawned processes import the script, which must have a main guard
        raise DataError(
            "the processes that draw glyphs did not start: run 'python -m data make glyphs OUT' first, "
            "or put your script's code under if __name__ == '__main__'"
        ) from error


def _show_drawing(
    chunks: list[_Chunk], results: Iterable[list[Record]], *, progress: bool
) -> Iterator[tuple[_Chunk, list[Record]]]:
    count = sum(chunk.count for chunk in chunks)
    start = time.monotonic()
    drawn = 0
    lines = progress and sys.stderr is not None and not sys.stderr.isatty()
    if lines:
        minutes = round(count / _PER_MINUTE)
        long = f", about {minutes} min on two cores" if minutes else ""
        print(f"drawing {count:,} glyphs{long}", file=sys.stderr, flush=True)
    with CountProgress("glyphs drawn:", total=count, shown=progress) as bar:
        for chunk, result in zip(chunks, results, strict=True):
            yield chunk, result
            drawn += chunk.count
            bar.show(drawn)
    if lines:
        print(f"drew {count:,} glyphs in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def _start_process() -> None:
    """Ignore signals: the parent would wait forever for a process that died while sending glyphs."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    torch.set_num_threads(1)


@dataclass(kw_only=True)
class _Pool:
    """The glyphs of one kind by character; ornate alphabets are separate, because there are many."""

    plain: dict[str, list[Glyph]] = field(default_factory=dict)
    ornate: dict[str, list[Glyph]] = field(default_factory=dict)

    def add(self, glyph: Glyph) -> None:
        pool = self.ornate if _ORNATE & {*glyph.styles} else self.plain
        pool.setdefault(glyph.character, []).append(glyph)

    def draw(self, rng: np.random.Generator) -> Glyph:
        characters = list(self.plain)
        character = characters[int(rng.integers(len(characters)))]
        glyphs = self.plain[character]
        if character in self.ornate and rng.random() < 0.06:
            glyphs = self.ornate[character]
        return glyphs[int(rng.integers(len(glyphs)))]


@cache
def _pools() -> dict[str, _Pool]:
    pools = {kind: _Pool() for kind in _KINDS}
    for face in FACES:
        if face.family in HELD_OUT:
            continue
        for glyph in list_glyphs(face):
            kind = character_name(glyph.character).split()[0]
            if glyph.character in string.digits:
                kind = "digit"
            elif glyph.character in string.ascii_letters:
                kind = "letter"
            elif kind not in ("latin", "greek", "cyrillic"):
                kind = "symbol"
                if unicodedata.category(glyph.character)[0] == "P":
                    kind = "punctuation"
            pools[kind].add(glyph)
    return pools


@cache
def _held_out() -> tuple[Glyph, ...]:
    return tuple(
        glyph
        for face in FACES
        if face.family in HELD_OUT
        for glyph in list_glyphs(face)
        if glyph.character in CLASS_CHARACTERS and glyph.draw == glyph.character
    )


def _make_chunk(chunk: _Chunk) -> list[Record]:
    from data.corpora.distortion import draw_distortions, draw_images, soften_distortion, visible_words

    training = chunk.split == "train"
    rng = np.random.default_rng([chunk.seed, int(training), chunk.start])
    pen = np.zeros(chunk.count, bool)
    crop = np.zeros(chunk.count, bool)
    if training:
        pools = _pools()
        names = list(_KINDS)
        weights, pens, crops = (np.array(column) for column in zip(*_KINDS.values(), strict=True))
        kinds = rng.choice(len(names), size=chunk.count, p=weights / weights.sum())
        glyphs = [pools[names[kind]].draw(rng) for kind in kinds]
        ornate = np.array([bool(_ORNATE & {*glyph.styles}) for glyph in glyphs])
        pen = (rng.random(chunk.count) < pens[kinds]) & ~ornate
        crop = rng.random(chunk.count) < crops[kinds]
    else:
        held_out = _held_out()
        glyphs = [held_out[(chunk.start + index) % len(held_out)] for index in range(chunk.count)]
    distortion = draw_distortions(rng, pen=pen, crop=crop)
    if not training:
        distortion = soften_distortion(distortion)
    shortened = rng.choice(PRUNED, size=chunk.count, p=[0.5, 0.35, 0.15])
    fields, reach, boxes = _measure_shapes(glyphs, np.where(pen, shortened, -1).tolist())
    images = _encode_pngs(draw_images(rng, fields, reach, boxes, distortion, size=chunk.size))
    records = []
    for index, (glyph, image) in enumerate(zip(glyphs, images, strict=True)):
        visible = visible_words(distortion, index)
        # a pen keeps only the slant of the type
        styles = [style for style in glyph.styles if not pen[index] or style in ("italic", "oblique")]
        if training:
            label = None
            cropped = bool(crop[index])
            caption = write_caption(rng, glyph.character, styles=styles, visible=visible, cropped=cropped)
        else:
            label = CLASS_CHARACTERS.index(glyph.character)
            caption = f"a photo of the {CLASS_NAMES[label]}"
        meta = {
            "character": glyph.character,
            "name": character_name(glyph.character),
            "family": glyph.face.family,
            "styles": [*styles, *visible],
        }
        key = f"{chunk.start + index:08d}"
        records.append(Record(key=key, image=image, extension="png", caption=caption, label=label, meta=meta))
    return records


_Shape: TypeAlias = tuple[NDArray[np.int8], float, tuple[int, int, int, int]]
_shape_cache: dict[tuple[Glyph, int], _Shape] = {}


def _measure_shapes(
    glyphs: list[Glyph], shorten: list[int]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Distance fields (N, CANVAS, CANVAS), reach of the ink (N,) and ink boxes (N, 4).

    Fields are distances to the outline where ``shorten`` is -1, else to the skeleton with its ends shortened.
    """
    from data.corpora.fonts import outline_field, rasterize, skeleton_fields

    pairs = list(zip(glyphs, shorten, strict=True))
    new = [pair for pair in dict.fromkeys(pairs) if pair not in _shape_cache]
    for kinds in ((-1,), PRUNED):
        some = list(dict.fromkeys(glyph for glyph, kind in new if kind in kinds))
        if not some:
            continue
        ink = np.stack([rasterize(glyph) for glyph in some])
        fields = [outline_field(ink)] if kinds == (-1,) else skeleton_fields(ink)
        for kind, shapes in zip(kinds, fields, strict=True):
            stored = np.round(shapes * _STEPS).astype(np.int8)
            for glyph, inked, shape in zip(some, ink, stored, strict=True):
                rows = np.flatnonzero(inked.any(1))
                columns = np.flatnonzero(inked.any(0))
                box = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
                _shape_cache[glyph, kind] = (shape, -float(shape.min()) / _STEPS, box)
    results = [_shape_cache[pair] for pair in pairs]
    stacked = np.stack([shape for shape, _, _ in results]).astype(np.float32) / np.float32(_STEPS)
    reach = np.array([reach for _, reach, _ in results], np.float32)
    return stacked, reach, np.array([box for _, _, box in results], np.float32)


def _encode_pngs(images: NDArray[np.uint8]) -> list[bytes]:
    """Encode grayscale images (N, S, S) as PNG, four times as fast as Pillow."""
    count, size = images.shape[:2]
    lines = np.zeros((count, size, size + 1), np.uint8)  # each line starts with its filter type, 0
    lines[:, :, 1:] = images

    def part(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    start = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0))
    end = part(b"IEND", b"")
    return [start + part(b"IDAT", zlib.compress(image.tobytes(), 3)) + end for image in lines]
