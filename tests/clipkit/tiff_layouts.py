"""TIFFs in all layouts: bits, byte order, compression, planes, photometric interpretation, extra samples, pages."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import tifffile

__all__ = ["Layout", "all_layouts"]

HEIGHT, WIDTH = 6, 9
# photometric interpretation, extra samples, and the numbers of channels
CONTENTS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("minisblack", "", (1, 2, 3, 4, 5)),
    ("miniswhite", "", (1,)),
    ("minisblack", "unassalpha", (2,)),
    ("rgb", "", (3, 4, 5)),
    ("rgb", "unassalpha", (4,)),
    ("rgb", "assocalpha", (4,)),
    ("rgb", "unspecified", (4,)),
    ("separated", "", (4, 5)),
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a TIFF stores an image; ``pages`` stores each channel as a page."""

    bits: int
    channels: int
    photometric: str
    extra: str = ""
    planes: bool = False
    big_endian: bool = False
    compression: str | None = None
    pages: bool = False

    def __str__(self) -> str:
        parts = [f"{self.channels}x{self.bits}", self.photometric, self.extra, self.compression or ""]
        flags = {"planes": self.planes, "big": self.big_endian, "pages": self.pages}
        parts += [name for name, value in flags.items() if value]
        return "-".join(part for part in parts if part)

    def values(self) -> npt.NDArray[Any]:
        """Return the values of the image, (H, W, C)."""
        shape = (HEIGHT, WIDTH, self.channels)
        values = np.random.default_rng(self.channels).integers(0, 2**self.bits, shape)
        dtype = {1: np.bool_, 8: np.uint8, 16: np.uint16}[self.bits]
        return values.astype(dtype)

    def encode(self) -> bytes:
        """Return the file."""
        values = self.values()
        options: dict[str, Any] = {}
        if self.extra:
            options["extrasamples"] = [self.extra]
        if self.channels == 1:
            values = values[..., 0]
        elif self.pages or self.planes:
            values = np.ascontiguousarray(np.moveaxis(values, 2, 0))
        if self.channels > 1 and not self.pages:
            options["planarconfig"] = "separate" if self.planes else "contig"
        file = io.BytesIO()
        tifffile.imwrite(
            file,
            values,
            byteorder=">" if self.big_endian else "<",
            photometric=self.photometric,
            compression=self.compression,
            metadata=None,
            **options,
        )
        return file.getvalue()


def all_layouts() -> Iterator[Layout]:
    for photometric in ("minisblack", "miniswhite"):
        yield Layout(bits=1, channels=1, photometric=photometric)
    for bits, channels in product((8, 16), (3, 4)):
        yield Layout(bits=bits, channels=channels, photometric="minisblack", pages=True)
    for bits, big_endian, compression, (photometric, extra, counts) in product(
        (8, 16), (False, True), (None, "deflate"), CONTENTS
    ):
        for channels, planes in product(counts, (False, True)):
            if planes and channels == 1:
                continue
            yield Layout(
                bits=bits,
                channels=channels,
                photometric=photometric,
                extra=extra,
                planes=planes,
                big_endian=big_endian,
                compression=compression,
            )
