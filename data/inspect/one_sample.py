"""One sample read and made ready as a training would, with what is to be known of its picture on the way."""

import hashlib
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.decode import decode_image, jpeg_size, open_image, pillow_errors
from clipkit.errors import DataError
from clipkit.image_traits import Decoding, Traits
from clipkit.tokenizer import CONTEXT_LENGTH, MAX_CHARACTERS, tokenize
from data.augment import Augmentation, empty_batch, random_of, training_pixels
from data.captions import CaptionRule
from data.index import CAPTION, IMAGE, META
from data.inspect.duplicates import look_code
from data.inspect.look import OpenBeginning
from data.inspect.shard_findings import Place
from data.open_shard import OpenShard, meta_of, text_of

__all__ = ["EMPTY_CAPTION", "Making", "Picture", "Texts", "Trial", "read_all", "read_texts", "try_sample"]

EMPTY_CAPTION = "empty caption"
_GREY = ("1", "L", "LA", "I", "F")
_FORMATS = {"MPO": "JPEG", "JPEG2000": "JPEG 2000", "DIB": "BMP"}  # what Pillow calls them
_LEAST_SIDE = 64  # pixels that are enough to tell how a picture looks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Picture:
    """What is known of a decoded picture."""

    format: str
    extension: str
    width: int
    height: int
    file_bytes: int
    marks: tuple[str, ...]
    traits: Traits
    digest: bytes
    code: npt.NDArray[np.int8]


@dataclass(kw_only=True, slots=True, eq=False)
class Trial:
    """A sample that was tried.

    Attributes:
        place: where it is.
        shard, row: the same by numbers: of the shard in the list, of the sample in its index.
        cause: why it is bad; empty if it is good.
        caption: None where it was not read.
        meta: its json; None where it has none that can be read.
        has_text: whether it has a caption file.
        picture: None where it was not decoded.
        crop: (3, S, S) uint8 as the model sees it.
        make, text: seconds of a core's time for the picture, from file to crop, and for its caption.
    """

    place: Place
    shard: int = 0
    row: int = 0
    cause: str = ""
    caption: str | None = None
    meta: dict[str, Any] | None = None
    has_text: bool = False
    picture: Picture | None = None
    crop: Tensor | None = None
    make: float = 0.0
    text: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """All but the image of a sample.

    Attributes:
        place: where it is.
        caption: "" if it has none that can be used.
        meta: its json, None if it has none that can be read.
        cause: why the caption cannot be used; "" if it can.
    """

    place: Place
    caption: str
    meta: dict[str, Any] | None
    cause: str


def read_texts(shard: OpenShard | OpenBeginning, row: int, rule: CaptionRule) -> Texts:
    """All but the picture of a sample."""
    return read_all(shard, row, rule, columns=(CAPTION, META))[1]


def read_all(
    shard: OpenShard | OpenBeginning,
    row: int,
    rule: CaptionRule,
    *,
    columns: tuple[int, ...] = (CAPTION, META, IMAGE),
) -> tuple[bytes, Texts]:
    """A sample's picture, b"" where it cannot be read, and the rest of it."""
    caption, meta, picture, cause = "", None, b"", ""
    try:
        members = shard.read(row, columns)
        picture = b"".join(one or b"" for one in members[2:])
        meta = _meta(members[1])
        caption = _caption(rule, members)
    except DataError as error:
        cause = str(error)
    place = Place(shard=shard.file.shown, key=shard.index.key(row))
    return picture, Texts(place=place, caption=caption, meta=meta, cause=cause)


def _meta(data: bytes | None) -> dict[str, Any] | None:
    if data is not None:
        with suppress(DataError):
            return meta_of(data)
    return None


def _caption(rule: CaptionRule, members: list[bytes | None]) -> str:
    """The caption that a training would take of caption file and json; DataError if there is none."""
    text, meta = text_of(members[0]), {}
    if rule.reads_json or text is None:
        meta = meta_of(members[1])
    caption = rule.caption(text, meta, 0, None)
    if caption is None:
        raise DataError(EMPTY_CAPTION)
    if len(caption) > MAX_CHARACTERS:
        raise DataError(f"caption of {len(caption)} characters")
    return caption


@dataclass(frozen=True, kw_only=True)
class Making:
    """How samples are made: the side of the crop in pixels, decoding, where captions are, the seed of the crops."""

    image_size: int
    decoding: Decoding = field(default_factory=Decoding)
    captions: CaptionRule
    seed: int = 0


def try_sample(shard: OpenShard | OpenBeginning, row: int, how: Making, *, extension: str = "") -> Trial:
    """Read, decode, crop and tokenize one sample; what is wrong with it is told in ``cause``."""
    trial = Trial(place=Place(shard=shard.file.shown, key=shard.index.key(row)), row=row)
    try:
        data, *rest = shard.read(row, (IMAGE, CAPTION, META))
        _prepare(trial, data or b"", rest, how, extension)
    except DataError as error:
        trial.cause = str(error)
    return trial


def _prepare(trial: Trial, data: bytes, rest: list[bytes | None], how: Making, extension: str) -> None:
    """The sample's way through a loader, by steps whose time is taken; DataError where it ends."""
    trial.meta, trial.has_text, trial.caption = _meta(rest[1]), rest[0] is not None, ""
    begin = time.thread_time()
    trial.caption = _caption(how.captions, rest)
    tokenize([trial.caption], CONTEXT_LENGTH)
    trial.text = time.thread_time() - begin
    crop = empty_batch(1, how.image_size)[0]
    begin = time.thread_time()
    with torch.inference_mode():
        traits = training_pixels(
            data,
            image_size=how.image_size,
            augmentation=Augmentation(),
            random=random_of(how.seed, trial.row),
            out=crop,
            decoding=how.decoding,
        )
    trial.make = time.thread_time() - begin
    trial.crop = crop
    trial.picture = _picture(data, extension, traits)


def _picture(data: bytes, extension: str, traits: Traits) -> Picture:
    """What is known of a picture that decodes."""
    kind, size, marks = _header(data)
    reduce = next((by for by in (8, 4, 2) if min(size) >= by * _LEAST_SIDE), 1)
    return Picture(
        format=kind,
        extension=extension,
        height=size[0],
        width=size[1],
        file_bytes=len(data),
        marks=marks,
        traits=traits,
        digest=hashlib.blake2b(data, digest_size=16).digest(),
        code=look_code(decode_image(data, reduce=reduce)),
    )


def _header(data: bytes) -> tuple[str, tuple[int, int], tuple[str, ...]]:
    """A picture's format by its bytes, its height and width, and what is special about it."""
    try:
        with pillow_errors(), open_image(data) as image:
            kind = _FORMATS.get(image.format or "", image.format or "")
            mode, size = image.mode, (image.height, image.width)
    except DataError:  # simplejpeg reads some that Pillow does not
        return "JPEG", jpeg_size(data) or decode_image(data).shape[:2], ()
    grey16 = mode.startswith("I;16")
    told = {
        "grey": mode in _GREY or grey16,
        "CMYK": mode in ("CMYK", "YCCK"),
        "16 bits": grey16 or (kind == "PNG" and data[24:25] == b"\x10"),
    }
    return kind, size, tuple(mark for mark, there in told.items() if there)
