"""Thumbnails, and the panels made of them: example predictions, similarity matrices and nearest images.

Each distinct image is in a page once, as a rule of its style sheet. The markup is in ``templates/images.html``.
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.report.charts import TEMPLATES
from eval.results.records import Matrix, Picture, Snapshot

__all__ = ["Similarities", "Thumbnails", "rank_history", "similarities"]

_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_TINY = 16  # pixels; up to this size an image is enlarged without smoothing
_LEAST_RANGE = 0.2  # of cosines over the color scale, so that the noise of an untrained model stays pale


class Thumbnails:
    """The distinct images of a page."""

    def __init__(self) -> None:
        self._classes: dict[str, str] = {}

    def css_class(self, image: Picture | None) -> str:
        """Add an image, and give its CSS class; "none" where it is missing or not a PNG."""
        if image is None:
            return "none"
        # a base64 PNG and nothing else, since it goes into a style sheet as it is
        if image.png not in self._classes:
            try:
                data = base64.b64decode(image.png, validate=True) if _BASE64.fullmatch(image.png) else b""
            except binascii.Error:
                data = b""
            if len(data) < 24 or not data.startswith(b"\x89PNG\r\n\x1a\n"):
                return "none"
            tiny = max(int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) <= _TINY
            self._classes[image.png] = f"p{len(self._classes)}{' tiny' if tiny else ''}"
        return self._classes[image.png]

    @property
    def size(self) -> int:
        """The characters of all images."""
        return sum(map(len, self._classes))

    @property
    def rules(self) -> list[tuple[str, str]]:
        """CSS class and base64 PNG of every image."""
        return [(name.split()[0], png) for png, name in self._classes.items()]


def rank_history(image: str, snapshots: Sequence[Snapshot]) -> list[tuple[int, int]]:
    """List (step, rank of the true label) of one example."""
    return [
        (snapshot.step, one.rank)
        for snapshot in snapshots
        for one in snapshot.examples
        if one.picture == image and one.rank is not None
    ]


@dataclass(frozen=True, kw_only=True)
class _Similarity:
    """A similarity matrix; ``level`` is the mean cosine of images with the captions of others.

    The level drifts in training without any effect on the loss, so colors are relative to it.
    """

    step: int
    matrix: Matrix
    images: Mapping[str, Picture]
    level: float
    summary: str


@dataclass(frozen=True, kw_only=True)
class Similarities:
    """The matrices of the first and last snapshot; colors span cosines ``low`` … ``high`` above the level."""

    shown: Sequence[_Similarity]
    low: float
    high: float
    last: Snapshot


def similarities(snapshots: Sequence[Snapshot]) -> Similarities | None:
    """Prepare the first and the last similarity matrix; None if there are none."""
    having = [snapshot for snapshot in snapshots if snapshot.matrix]
    if not having:
        return None
    shown = []
    for snapshot in (having[:1] + having[-1:])[-len(having) :]:
        matrix = snapshot.matrix
        assert matrix
        cosines, size = matrix.cosines, len(matrix.pictures)
        others = [cosines[i][j] for i in range(size) for j in range(size) if i != j]
        level = sum(others) / len(others) if others else 0.0
        hits = sum(cosines[i][i] >= max(cosines[i]) for i in range(size))
        mean = sum(cosines[i][i] for i in range(size)) / size
        summary = f"{hits} of {size} images are nearest to their own caption; mean cosine {mean:.2f}"
        summary += f" for pairs, {level:.2f} for others" if size > 1 else ""
        shown.append(
            _Similarity(
                step=snapshot.step, matrix=matrix, images=snapshot.pictures, level=level, summary=summary
            )
        )
    values = [value - one.level for one in shown for row in one.matrix.cosines for value in row]
    low = min(values)
    return Similarities(shown=shown, low=low, high=max(*values, low + _LEAST_RANGE), last=having[-1])


def _percent(value: float) -> str:
    return "<0.1%" if 0 < value < 0.0005 else f"{value * 100:.1f}%"


TEMPLATES.filters |= {"percent": _percent, "minus": lambda text: text.replace("-", "−")}
