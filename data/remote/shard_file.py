"""What identifies a shard, wherever it lies."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from clipkit.errors import DataError
from clipkit.files.terminal import shown

__all__ = ["ShardFile", "is_remote"]


def is_remote(source: str) -> bool:
    """Whether a source is no path of this machine: ``s3://…``, ``https://…``, ``hf://…``, ``pipe:…``."""
    return "://" in source or source.startswith("pipe:")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """One tar.

    Attributes:
        url: an absolute path, or a full URL.
        size: in bytes, -1 where nobody can tell.
        version: what changes when the content does: the store's etag; for a file of this machine its modification
            time, its change time (both in nanoseconds) and its inode; empty where nobody can tell.
    """

    url: str
    size: int
    version: str

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.partition("?")[0].rstrip("/").rpartition("/")[2]

    @property
    def shown(self) -> str:
        """The URL as messages may show it, without secrets."""
        return shown(self.url)

    @property
    def is_remote(self) -> bool:
        """Whether it has to be fetched."""
        return is_remote(self.url)

    @classmethod
    def at(cls, path: Path) -> "ShardFile":
        """A file of this machine.

        Raises:
            DataError: there is none.
        """
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"shard {path}: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise DataError(f"shard {path} is not a regular file")
        return cls.of_status(str(path.absolute()), status)

    @classmethod
    def of_status(cls, url: str, status: os.stat_result) -> "ShardFile":
        """A file of this machine, of which the status is known."""
        # copying and unpacking set the modification time to what they like
        version = f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
        return cls(url=url, size=status.st_size, version=version)

    def may_be_copy_of(self, other: "ShardFile") -> bool:
        """Whether both have the size and modification time that a copy of a file keeps."""
        times = (one.version.partition(" ")[0] for one in (self, other))
        return self.size == other.size and next(times) == next(times)
