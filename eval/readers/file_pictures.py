"""Pictures that are files, wherever they lie; some are parts of them, which a box cuts out."""

import hashlib
import os
import stat
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from clipkit.errors import DataError
from data.shards import Sample

__all__ = ["Box", "FilePictures", "png_of", "state_of", "written"]

Box = tuple[int, int, int, int]  # left, top, width, height in pixels
_MAX_BYTES = 256 << 20  # of one file, as of a member of a shard


class FilePictures:
    """Random access to a list of files, in which one may stand several times.

    Args:
        root: the folder that they are named from.
        files: of each picture.
        boxes: of each picture, which part of the file it is, as lossless PNG; None for all of it, as it is.

    Raises:
        DataError: one is missing or no file: a score is never of fewer pictures.
    """

    def __init__(self, root: Path, files: Sequence[Path], boxes: Sequence[Box | None] | None = None) -> None:
        self.root, self.files = root, tuple(files)
        self._boxes = tuple(boxes) if boxes is not None else (None,) * len(self.files)
        self._states = {file: state_of(file) for file in dict.fromkeys(self.files)}

    def __len__(self) -> int:
        return len(self.files)

    def locate(self, number: int) -> tuple[str, str]:
        """The folder, and the file's path in it."""
        file, box = self.files[number], self._boxes[number]
        key = file.relative_to(self.root).as_posix() if file.is_relative_to(self.root) else str(file)
        return str(self.root), key if box is None else f"{key} {list(box)}"

    def read(self, number: int) -> Sample:
        """One picture.

        Raises:
            DataError: the file cannot be read; or it must be cut, and does not decode or lacks that part.
        """
        file, box = self.files[number], self._boxes[number]
        folder, key = self.locate(number)
        try:
            image = file.read_bytes()
        except OSError as error:
            raise DataError(str(error.strerror)) from error
        return Sample(
            id=number,
            shard=folder,
            key=key,
            image=image if box is None else _part(image, box),
            caption=None,
            label=None,
            meta={},
            caption_number=0,
        )

    def fingerprint(self) -> str:
        """16 hexadecimal digits of paths, sizes and boxes; the folder may be moved."""
        digest = hashlib.sha256()
        for number, file in enumerate(self.files):
            digest.update(os.fsencode(f"{self.locate(number)[1]}\0{self._states[file][0]}\n"))
        return digest.hexdigest()[:16]

    def stamp(self) -> str:
        """Of the same and of each file's inode and times of change."""
        states = list(self._states.values())
        return hashlib.sha256(repr((self.fingerprint(), states)).encode()).hexdigest()[:16]


def state_of(file: Path) -> tuple[int, int, int, int]:
    """Bytes of a picture, and what tells that it was written anew: see ``written``.

    Raises:
        DataError: there is none, it is too large, or no file: reading a pipe, say, might wait for ever.
        OSError: its folder cannot be read.
    """
    try:
        found = file.stat()
    except FileNotFoundError as error:
        what = "a link to nothing: mend or remove it" if file.is_symlink() else "missing"
        raise DataError(f"picture {file} is {what}") from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"picture {file} is not a regular file: remove it")
    if found.st_size > _MAX_BYTES:
        raise DataError(f"picture {file} has {found.st_size} bytes, the limit is {_MAX_BYTES}")
    return found.st_size, *written(found)


def written(found: os.stat_result) -> tuple[int, int, int]:
    """When a file's content and its entry were last changed, in nanoseconds, and its inode.

    The first alone is not enough: copying and unpacking set it to what they like.
    """
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _part(image: bytes, box: Box) -> bytes:
    from PIL import Image, UnidentifiedImageError

    left, top, width, height = box
    try:
        with Image.open(BytesIO(image)) as opened:
            if width < 1 or height < 1 or left >= opened.width or top >= opened.height:
                raise DataError(
                    f"its box {list(box)} has no part of its {opened.width} x {opened.height} pixels"
                )
            return png_of(opened.convert("RGB").crop((left, top, left + width, top + height)))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, UnidentifiedImageError) as error:
        raise DataError(f"it does not decode: {' '.join(str(error).split())[:200]}") from error


def png_of(image: object) -> bytes:
    """A picture of Pillow as lossless PNG, as fast as may be."""
    from PIL import Image

    assert isinstance(image, Image.Image)
    file = BytesIO()
    image.save(file, "png", compress_level=1)
    return file.getvalue()
