"""What the `glyphs` corpus says about a picture: names of characters, style words, and ways to put them.

Names are Unicode's, in small letters, and the shorter ones that people use. Every digit comes by word and by
figure. A caption is a few words, since every token costs time in training.
"""

import string
import unicodedata
from bisect import bisect
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import TypeAlias

import numpy as np

__all__ = ["CLASS_CHARACTERS", "CLASS_NAMES", "TEMPLATES", "character_name", "write_caption"]

#: The classes of the test split, in the order of their labels.
CLASS_CHARACTERS = string.digits + string.ascii_lowercase + string.ascii_uppercase

#: Prompts for the class names, which training captions use as well.
TEMPLATES = ("{c}", "the {c}", "a photo of the {c}", "a scan of the {c}", "a picture of the {c}")

# Letters whose small and capital forms differ in size alone: a picture cropped to the ink cannot tell them apart.
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
    """The name that a caption or a class gives a character: "digit seven", "greek small letter alpha"."""
    return unicodedata.name(character).lower()


#: The names of the classes, one for each of ``CLASS_CHARACTERS``.
CLASS_NAMES = tuple(character_name(character) for character in CLASS_CHARACTERS)


def _pick(rng: np.random.Generator, choices: _Choices) -> str:
    ends = _ends(choices)
    return choices[bisect(ends, rng.random() * ends[-1])][0]


@cache
def _ends(choices: _Choices) -> list[int]:
    return list(accumulate(weight for _, weight in choices))


def _called(rng: np.random.Generator, character: str, *, cropped: bool) -> str:
    """One of the names that a character goes by."""
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


def _article(phrase: str) -> str:
    # sounds, not letters: "an 8", "an uppercase a", but "a union"
    return "an" if phrase[0] in "aeio8" or phrase.startswith(("up", "un ")) else "a"


def write_caption(
    rng: np.random.Generator,
    character: str,
    *,
    styles: Sequence[str] = (),
    visible: Sequence[str] = (),
    cropped: bool = False,
) -> str:
    """A caption for one picture.

    Args:
        rng: where the choice among the ways to say it comes from.
        character: what the picture shows.
        styles: the words for the type ("bold", "serif"), named now and then.
        visible: what the picture went through ("blurred", "handwritten", "white on black"), named now and then.
        cropped: the picture is cropped to the ink, so that the size of the letter cannot be seen.
    """
    phrase = _called(rng, character, cropped=cropped)
    after = [word for word in visible if " on " in word and rng.random() < 0.12]
    before = [word for word in visible if " on " not in word and rng.random() < 0.35]
    if styles and rng.random() < 0.3:
        before += styles if rng.random() < 0.6 else [styles[int(rng.integers(len(styles)))]]
    phrase = " ".join([*before, phrase])
    caption = _pick(rng, _PHRASES).format(p=phrase, a=_article(phrase))
    return ", ".join([caption, *after])
