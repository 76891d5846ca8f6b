"""What captions are like: their lengths in tokens, which come more than once, the longest."""

from collections import Counter

import numpy as np

from clipkit.tokenizer import END_OF_TEXT, tokenize
from data.captions import NOT_UTF8
from data.inspect.findings import Captions, Histogram
from data.inspect.shard_findings import Place

__all__ = ["CaptionSurvey", "token_counts"]

_MOST_TOKENS = 1024  # that are counted of one caption
_AT_ONCE = 256
_FREQUENT = 10
_EDGES = (0, 8, 16, 24, 32, 48, 64, 78, 128, 256)
_SHOWN_CHARACTERS = 200
_PLACES = 3  # examples of captions that are not UTF-8


def token_counts(texts: list[str]) -> list[int]:
    """Tokens of each, with start and end, up to a limit."""
    ids = tokenize(texts, _MOST_TOKENS, trim=True).numpy()
    # the last end of text ends it: a text may say "<end_of_text>" itself, and zeros stand for "!" too
    counts: list[int] = (ids.shape[1] - np.argmax(ids[:, ::-1] == END_OF_TEXT, axis=1)).tolist()
    return counts


class CaptionSurvey:
    """Takes captions one by one.

    Args:
        context_length: tokens that the model sees.
    """

    def __init__(self, context_length: int) -> None:
        self._context_length = context_length
        self._waiting: list[tuple[str, Place]] = []
        self._counts: list[int] = []
        self._texts: Counter[str] = Counter()
        self._empty = self._not_utf8 = 0
        self._not_utf8_at: list[Place] = []
        self._longest: tuple[int, int, Place | None] = (0, 0, None)

    def add(self, caption: str | None, place: Place, cause: str) -> None:
        """Take a sample's caption.

        Args:
            caption: "" if there is none that can be used, None if it was not read.
            place: where it is.
            cause: why the sample is bad; "" if it is not.
        """
        if caption is None:
            return
        if cause == NOT_UTF8:
            self._not_utf8 += 1
            self._not_utf8_at = [*self._not_utf8_at, place][:_PLACES]
            return
        if not caption.strip():
            self._empty += 1
            return
        self._texts[caption] += 1
        self._waiting.append((caption, place))
        if len(self._waiting) >= _AT_ONCE:
            self._count()

    def _count(self) -> None:
        if not self._waiting:
            return
        counts = token_counts([caption for caption, _ in self._waiting])
        self._counts += counts
        for count, (caption, place) in zip(counts, self._waiting, strict=True):
            if (count, len(caption)) > self._longest[:2]:
                self._longest = (count, len(caption), place)
        self._waiting.clear()

    def found(self) -> Captions:
        """What was found."""
        self._count()
        frequent = [(text, count) for text, count in self._texts.most_common(_FREQUENT) if count > 1]
        return Captions(
            read=len(self._counts),
            tokens=Histogram.of("tokens of a caption", self._counts, _EDGES),
            median=float(np.median(self._counts)) if self._counts else 0.0,
            cut=sum(count > self._context_length for count in self._counts),
            empty=self._empty,
            not_utf8=self._not_utf8,
            not_utf8_at=tuple(self._not_utf8_at),
            longest=self._longest[0],
            longest_at=self._longest[2],
            repeated=self._texts.total() - len(self._texts),
            frequent=tuple((text[:_SHOWN_CHARACTERS], count) for text, count in frequent),
        )
