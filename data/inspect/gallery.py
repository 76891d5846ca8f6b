"""Small whole pictures of samples to look at: bad ones, and those that are the same as others."""

import io
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from clipkit.decode import decode_image, jpeg_size
from clipkit.errors import DataError
from data.captions import CaptionRule
from data.inspect.findings import Thumbnail
from data.inspect.look import OpenBeginning
from data.inspect.one_sample import Trial, read_all
from data.open_shard import OpenShard

__all__ = ["some_of_each_cause", "thumbnail"]

_SIDE = 128  # pixels
_QUALITY = 75
_MOST_BAD, _OF_ONE_CAUSE = 16, 4
_BEGINNING = 60  # bytes
_CAPTION = 120  # characters
_PARTLY = 4 << 20, 1 << 24  # bytes and pixels of a broken picture whose beginning is shown


def some_of_each_cause(bad: Iterable[Trial]) -> list[Trial]:
    """A few bad samples to look at, not all of the most frequent cause."""
    taken: Counter[str] = Counter()
    some: list[Trial] = []
    for trial in bad:
        cause = re.sub(r"[0-9]+", "#", trial.cause)
        taken[cause] += 1
        if taken[cause] <= _OF_ONE_CAUSE and len(some) < _MOST_BAD:
            some.append(trial)
    return sorted(some, key=lambda trial: -taken[re.sub(r"[0-9]+", "#", trial.cause)])


def thumbnail(shard: OpenShard | OpenBeginning, row: int, rule: CaptionRule, *, cause: str = "") -> Thumbnail:
    """A sample's picture as far as it can be decoded, and its caption.

    Args:
        shard: where it is.
        row: of the shard's index.
        rule: where captions are.
        cause: why it is bad, if it is.
    """
    data, texts = read_all(shard, row, rule)
    pixels = _pixels(data, cause)
    return Thumbnail(
        picture=b"" if pixels is None else _webp(pixels),
        beginning="" if pixels is not None else data[:_BEGINNING].decode("utf-8", "replace"),
        size=len(data),
        caption=texts.caption[:_CAPTION] + "…" * (len(texts.caption) > _CAPTION),
        cause=cause,
        place=texts.place,
    )


def _pixels(data: bytes, cause: str) -> npt.NDArray[np.uint8] | None:
    size = jpeg_size(data)
    reduce = next((by for by in (8, 4, 2) if size and min(size) >= by * _SIDE), 1)
    with suppress(DataError):
        return decode_image(data, reduce=reduce)
    most_bytes, most_pixels = _PARTLY
    if size and "truncated" in cause and len(data) <= most_bytes and size[0] * size[1] <= most_pixels:
        import simplejpeg

        with suppress(ValueError):
            part: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, strict=False)  # the rest becomes grey
            return part
    return None


def _webp(pixels: npt.NDArray[np.uint8]) -> bytes:
    """(H, W, 3) uint8 → a WebP file of at most 128 pixels a side."""
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    image.save(file, "WEBP", quality=_QUALITY)
    return file.getvalue()
