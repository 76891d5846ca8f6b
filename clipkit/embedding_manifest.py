"""What a folder of embeddings was made from and how, and whether another run may go on with it."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clipkit.picture_folder import user_path

__all__ = ["Manifest", "difference"]

_FORMAT = 2
# what must be the same for a run to be gone on with, and how an error names it
_SETTINGS = {
    "format": "the format", "kind": "the kind (pictures or texts)", "weights": "the model",
    "rows_per_file": "--rows-per-file", "batch_size": "--batch-size", "precision": "--precision",
    "device": "--device",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What embeddings were made from, and how."""

    kind: str  # "image" or "caption"
    model: str  # as it was named
    weights: str  # hash of the weights and of what else makes the model
    sources: Sequence[str]  # as they were named
    items: int
    digest: str  # of all parts' digests
    captions: bool  # whether the metadata of pictures have captions
    rows_per_file: int
    batch_size: int
    precision: str
    device: str  # its type: other devices round differently
    format: int = _FORMAT

    @property
    def files(self) -> int:
        """How many files the items fill."""
        return -(-self.items // self.rows_per_file)

    def items_of(self, part: int) -> int:
        """How many items a part has."""
        return min(self.rows_per_file, self.items - part * self.rows_per_file)


def difference(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Why a folder that is made so cannot be gone on with so, or ""."""
    for name, what in _SETTINGS.items():
        then, now = stored.get(name), wanted[name]
        if then == now:
            continue
        if name == "weights":
            then, now = (
                f"{values.get('model')} ({str(values.get(name))[:8]})" for values in (stored, wanted)
            )
        return f"{what} was {then}, now it is {now}"
    missing = sorted((Counter(map(str, stored.get("sources", []))) - Counter(wanted["sources"])).elements())
    if not missing:
        return ""
    places = {_place(source): source for source in wanted["sources"]}
    if other := places.get(_place(missing[0])):
        return f"the source {missing[0]} was spelled so, now it is {other}: paths would differ"
    return f"{missing[0]} was among the sources, now it is not"


def _place(source: str) -> str:
    return os.path.abspath(user_path(source))  # noqa: PTH100 (Path keeps "..")
