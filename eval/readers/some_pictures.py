"""Some pictures of a dataset, in their order, as a set of their own."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from data.shards import Sample, Shards

__all__ = ["SomePictures"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SomePictures:
    """Random access to those samples of shards that are scored.

    Attributes:
        every: the shards' samples.
        numbers: of these, of the ones that are scored.
    """

    every: Shards
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
