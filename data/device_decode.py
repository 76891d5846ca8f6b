"""JPEGs that are decoded where the model is: by nvJPEG on a GPU, through torchcodec, all of a batch in one call.

Loader processes then only read, draw the crops and tokenize. What they leave over is plain JPEGs that are there to
their end; they decode everything else themselves. nvJPEG rounds in other places than libjpeg does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clipkit.errors import ConfigError, DataError
from data.augment import Recipe, follow_recipe

__all__ = ["JpegOfRow", "Undecoded", "decode_into", "jpeg_decoder", "require_nvjpeg"]


class JpegOfRow(NamedTuple):
    """A JPEG that is yet to be decoded.

    ``row`` is its place in the batch, ``size`` its height and width by its header.
    """

    row: int
    data: bytes
    size: tuple[int, int]
    recipe: Recipe


@dataclass(frozen=True, kw_only=True)
class Undecoded:
    """The JPEGs of a batch that are yet to be decoded.

    Attributes:
        content: uint8, the files one after the other: each tensor takes a file descriptor on its way from a loader
            process.
        ends: where each ends in ``content``.
        jpegs: what else is known of them, their data left out.
    """

    content: Tensor
    ends: tuple[int, ...]
    jpegs: tuple[JpegOfRow, ...]

    @classmethod
    def of(cls, jpegs: Sequence[JpegOfRow]) -> "Undecoded":
        """These JPEGs, their data together."""
        content = torch.frombuffer(bytearray().join(one.data for one in jpegs), dtype=torch.uint8)
        ends = np.cumsum([len(one.data) for one in jpegs]).tolist()
        return cls(content=content, ends=tuple(ends), jpegs=tuple(one._replace(data=b"") for one in jpegs))


def decode_into(images: Tensor, undecoded: Undecoded) -> None:
    """Decode on the device of ``images``, (B, 3, S, S) uint8, and write each picture into its row.

    Raises:
        DataError: one does not decode; which one is not told.
    """
    files = list(undecoded.content.tensor_split(undecoded.ends[:-1]))
    try:
        decoded = jpeg_decoder()(files, mode="RGB", device=images.device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise DataError(f"a picture does not decode on {images.device}: {error}") from error
    for pixels, one in zip(decoded, undecoded.jpegs, strict=True):
        if tuple(pixels.shape[1:]) != one.size:
            raise DataError("picture does not decode: it has two sizes")
        follow_recipe(pixels, one.recipe, images[one.row])


def require_nvjpeg(device: torch.device) -> None:
    """See before a training that nvJPEG is there.

    Raises:
        ConfigError: it is not, and what to do.
    """
    if device.type != "cuda":
        raise ConfigError("data.nvjpeg = true needs a GPU, and there is none here: leave it out")
    jpeg_decoder()


def jpeg_decoder() -> Callable[..., Any]:
    """torchcodec's decoder of JPEGs.

    Raises:
        ConfigError: it is not installed, or not for this torch.
    """
    try:
        from torchcodec import decoders
    except (ImportError, OSError, RuntimeError) as error:  # what a library of another torch's version raises
        raise ConfigError(
            'data.nvjpeg = true needs torchcodec, of a version for this torch: pip install -e ".[nvjpeg]"'
        ) from error
    decode: Callable[..., Any] = decoders.decode_jpeg
    return decode
