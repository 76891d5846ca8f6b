"""Built-in datasets, created on first use and stored in the user's cache."""

import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipkit.errors import DataError, Unavailable, nearest
from clipkit.samples.remote import cache_folder, created_once
from data.options import MakeOptions


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """A built-in dataset.

    Attributes:
        make: called with the folder to create, and whether to show progress.
        revision: changes whenever its content does; each revision has its own folder.
    """

    make: Callable[[Path, bool], None]
    revision: str


def _make_glyphs(out: Path, progress: bool) -> None:
    from data.corpora import glyphs

    glyphs.make(out, progress=progress)


def _make_emoji(out: Path, progress: bool) -> None:
    from data.corpora import emoji

    emoji.make(out, progress=progress)


def _make_cues(out: Path, progress: bool) -> None:
    from data.corpora import cues

    cues.make(out)


_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_DIGIT_TEMPLATES = (
    "the digit {c}",
    "the number {c}",
    "a photo of the digit {c}",
    "a photo of the number {c}",
    "a scan of the digit {c}",
    "a handwritten digit {c}",
    "the handwritten number {c}",
)


def make_digits(out: Path, progress: bool = False) -> None:
    """Write the evaluation set ``digits``: real handwriting, for models trained on printed characters.

    It has the 1,797 digits of the UCI machine learning repository that scikit-learn ships, as 8 x 8 grayscale PNGs,
    light ink on black (E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", 1998, CC BY 4.0).
    There is only a test split.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise Unavailable(
            "the built-in dataset digits requires scikit-learn: pip install -e '.[eval]'", cause="missing"
        ) from error
    from PIL import Image

    from data.shards.writer import DatasetWriter, Record

    bunch = load_digits()
    images = (bunch.images * 255 / 16).round().astype("uint8")  # (1797, 8, 8)
    with DatasetWriter(out) as writer:
        for i, (image, label) in enumerate(zip(images, bunch.target.tolist(), strict=True)):
            file = io.BytesIO()
            Image.fromarray(image).save(file, "png")
            caption = f"a handwritten digit {_DIGITS[label]}"
            key = f"{i:08d}"
            writer.write(
                "test", Record(key=key, image=file.getvalue(), extension="png", caption=caption, label=label)
            )
        card = {
            "name": "digits",
            "revision": BUILTIN["digits"].revision,
            "license": "CC BY 4.0",
            "source": "UCI Optical Recognition of Handwritten Digits, test part, as scikit-learn ships it",
            "how": "8 x 8 counts of ink from 0 to 16, times 255 / 16; light ink on black",
            "metric": "accuracy",
        }
        writer.finish(card, class_names=_DIGITS, templates=_DIGIT_TEMPLATES)


BUILTIN: dict[str, BuiltIn] = {
    "glyphs": BuiltIn(make=_make_glyphs, revision="3"),
    "digits": BuiltIn(make=make_digits, revision="1"),
    "emoji": BuiltIn(make=_make_emoji, revision="3"),
    "cues": BuiltIn(make=_make_cues, revision="1"),
}


def built_in(name: str, *, progress: bool = True) -> Path:
    """Return the folder of a built-in dataset, creating it if needed; only one of several processes creates it."""
    if name not in BUILTIN:
        raise DataError(f"unknown built-in dataset {name!r}: {nearest(name, BUILTIN)}")
    chosen = BUILTIN[name]
    folder = cache_folder() / f"{name}-{chosen.revision}"
    created_once(folder, lambda out: chosen.make(out, progress), name=name)
    return folder


def run_make(options: MakeOptions) -> int:
    """Run ``python -m data make``."""
    if options.name not in BUILTIN:
        raise DataError(f"unknown built-in dataset {options.name!r}: {nearest(options.name, BUILTIN)}")
    start = time.monotonic()
    if options.packages is None:
        BUILTIN[options.name].make(options.out, not options.quiet)
    elif options.name == "emoji":
        from data.corpora import emoji

        emoji.make(options.out, packages=options.packages, progress=not options.quiet)
    else:
        raise DataError(f"--packages is for emoji only, not for {options.name}")
    card: dict[str, Any] = json.loads((options.out / "card.json").read_text(encoding="utf-8"))
    print(f"created {options.out} in {time.monotonic() - start:.1f} s")
    width = max(map(len, card["samples"]))
    for split, count in card["samples"].items():
        print(f"  {split:<{width}}  {count:,} samples")
    return 0
