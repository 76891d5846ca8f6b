"""The pictures of shards, and some of them, in their order, as a set of their own."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clipkit.errors import DataError
from data.shard_file import ShardFile
from data.shards import Sample, Shards
from eval.readers.file_pictures import written

__all__ = ["EveryPicture", "SomePictures", "versions_of"]


class EveryPicture(Shards):
    """All samples of shards."""

    def stamp(self) -> str:
        """16 hexadecimal digits that change with the samples, and when any shard was written anew."""
        states = versions_of([self.manifest.shard(number) for number in range(len(self.counts))])
        return hashlib.sha256(repr((self.fingerprint(), states)).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, eq=False)
class SomePictures:
    """Random access to those samples of shards that are scored.

    Attributes:
        every: the shards' samples.
        numbers: of these, of the ones that are scored.
    """

    every: EveryPicture
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, number: int) -> Sample:
        """One of them, with the number that it has here.

        Raises:
            DataError: as for ``Shards.read``.
        """
        return self.every.read(self.numbers[number])._replace(id=number)

    def locate(self, number: int) -> tuple[str, str]:
        """Its shard and key."""
        return self.every.locate(self.numbers[number])

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the shards, and with which of their samples are scored."""
        digest = hashlib.sha256(self.every.fingerprint().encode())
        digest.update(",".join(map(str, self.numbers)).encode())
        return digest.hexdigest()[:16]

    def stamp(self) -> str:
        """The same, which also changes with the shards' own stamp."""
        return hashlib.sha256(f"{self.fingerprint()} {self.every.stamp()}".encode()).hexdigest()[:16]


def versions_of(files: Sequence[ShardFile]) -> list[tuple[int | str, ...]]:
    """What tells that files were written anew: their etags, and of this machine's files what ``written`` says.

    Raises:
        DataError: one of this machine is gone.
    """
    return [(one.size, one.version, *(() if one.is_remote else _written(one))) for one in files]


def _written(file: ShardFile) -> tuple[int, int, int]:
    try:
        return written(Path(file.url).stat())
    except OSError as error:
        raise DataError(f"shard {file.shown}: {error.strerror}") from error
