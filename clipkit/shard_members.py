"""The members of a WebDataset shard, as ``clipkit encode`` reads them.

Members belong to one sample while their key (the path up to the first dot of the file name) stays the same.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clipkit.errors import DataError
from clipkit.tar import sample_name, tar_files

__all__ = ["Member", "members"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """Where one member of a sample lies."""

    shard: Path
    offset: int
    size: int
    extension: str  # in lower case, without the dot

    def read(self, limit: int) -> bytes:
        """The bytes, by one read; any thread may.

        Raises:
            DataError: there are more than ``limit``, or the file cannot be read or has become shorter.
        """
        if self.size > limit:
            raise DataError(f"a member of more than {limit >> 20} MiB")
        try:
            descriptor = os.open(self.shard, os.O_RDONLY)
            try:
                data = os.pread(descriptor, self.size, self.offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataError(f"the shard cannot be read: {error.strerror}") from error
        if len(data) != self.size:
            raise DataError("the shard has become shorter since it was looked through")
        return data


def members(shard: Path) -> Iterator[tuple[str, Member]]:
    """The key and place of each file that belongs to a sample, in the order of the tar.

    Raises:
        DataError: as for ``tar_files``, and where the file cannot be read.
    """
    try:
        for name, offset, size in tar_files(shard):
            if (found := sample_name(name)) is not None:
                key, extension = found
                yield key, Member(shard=shard, offset=offset, size=size, extension=extension)
    except OSError as error:
        raise DataError(f"shard {shard}: {error.strerror}") from error
