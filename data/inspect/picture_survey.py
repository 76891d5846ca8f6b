"""What pictures are like: formats, sizes, what is special about them, and which are the same."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from data.inspect.duplicates import MOST_COMPARED, groups_alike, groups_equal
from data.inspect.findings import Duplicates, Histogram, Pictures, WithTrait
from data.inspect.one_sample import Picture, Trial
from data.inspect.shard_findings import Place

__all__ = ["PictureSurvey"]

_EDGES = (0, 32, 64, 128, 224, 256, 384, 512, 768, 1024, 2048)
_SHOWN_GROUPS, _SHOWN_OF_GROUP = 6, 4
_SHOWN_OF_TRAIT = 3
_FORMATS = {
    "jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "bmp": "BMP", "tif": "TIFF",
    "tiff": "TIFF", "ppm": "PPM", "pgm": "PPM", "jp2": "JPEG 2000", "avif": "AVIF",
}  # fmt: skip


class PictureSurvey:
    """Takes samples that were tried, one by one.

    Args:
        image_size: of the model, in pixels.
    """

    def __init__(self, image_size: int) -> None:
        self._image_size = image_size
        self._pictures: list[Picture] = []
        self._at: list[tuple[Place, int, int]] = []  # with shard and row
        self._alike: list[list[int]] | None = None

    def add(self, trial: Trial) -> None:
        """A sample; one whose picture was not decoded is left out."""
        if trial.picture is not None:
            self._pictures.append(trial.picture)
            self._at.append((trial.place, trial.shard, trial.row))

    def digests(self) -> set[bytes]:
        """Of the pictures' bytes."""
        return {one.digest for one in self._pictures}

    def found(self) -> Pictures:
        """What was found."""
        many = self._pictures
        misnamed: Counter[str] = Counter()
        marks: Counter[str] = Counter()
        for one in many:
            marks.update(one.marks)
            if one.extension and _FORMATS.get(one.extension) != one.format:
                misnamed[f".{one.extension} is {one.format}"] += 1
        ratios = [one.width / one.height for one in many]
        widest = max(range(len(many)), key=ratios.__getitem__, default=None)
        tallest = min(range(len(many)), key=ratios.__getitem__, default=None)
        return Pictures(
            read=len(many),
            formats=dict(Counter(one.format for one in many).most_common()),
            misnamed=dict(misnamed.most_common()),
            width=Histogram.of("width in pixels", (one.width for one in many), _EDGES),
            height=Histogram.of("height in pixels", (one.height for one in many), _EDGES),
            median_bytes=int(np.median([one.file_bytes for one in many])) if many else 0,
            small=sum(min(one.width, one.height) < self._image_size for one in many),
            widest=0.0 if widest is None else ratios[widest],
            widest_at=None if widest is None else self._at[widest][0],
            tallest=0.0 if tallest is None else 1 / ratios[tallest],
            tallest_at=None if tallest is None else self._at[tallest][0],
            marks=dict(marks.most_common()),
            transparent=self._with_trait([one.traits.transparent for one in many]),
            rotated=self._with_trait([one.traits.rotated for one in many]),
            same_bytes=self._duplicates(groups_equal([one.digest for one in many])),
            same_look=self._duplicates(self._groups_alike()),
        )

    def _with_trait(self, has: Sequence[bool]) -> WithTrait:
        places = [place for (place, _, _), one in zip(self._at, has, strict=True) if one]
        return WithTrait(count=len(places), first=tuple(places[:_SHOWN_OF_TRAIT]))

    def same_shown(self) -> list[list[tuple[int, int]]]:
        """Shard and row of the pictures of a few groups that are the same file, to show them."""
        return self._shown(groups_equal([one.digest for one in self._pictures]))

    def alike_shown(self) -> list[list[tuple[int, int]]]:
        """The same of pictures that look the same."""
        return self._shown(self._groups_alike())

    def _shown(self, groups: list[list[int]]) -> list[list[tuple[int, int]]]:
        return [
            [self._at[number][1:] for number in group[:_SHOWN_OF_GROUP]] for group in groups[:_SHOWN_GROUPS]
        ]

    def _groups_alike(self) -> list[list[int]]:
        """Groups that look the same and are not all the same file."""
        if self._alike is None:
            groups = groups_alike([one.code for one in self._pictures[:MOST_COMPARED]])
            self._alike = [
                group for group in groups if len({self._pictures[number].digest for number in group}) > 1
            ]
        return self._alike

    def _duplicates(self, groups: list[list[int]]) -> Duplicates:
        shown = [
            tuple(self._at[number][0] for number in group[:_SHOWN_OF_GROUP])
            for group in groups[:_SHOWN_GROUPS]
        ]
        return Duplicates(groups=len(groups), pictures=sum(map(len, groups)), shown=tuple(shown))
