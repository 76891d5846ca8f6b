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
    "format": "the format", "kind": "the kind (pictures or texts)", "background": "the background (--background)",
    "upright": "whether the EXIF orientation is applied (--upright)", "weights": "the model",
    "rows_per_file": "--rows-per-file", "batch_size": "--batch-size", "precision": "--precision",
    "device": "--device",
}  # fmt: skip
_EARLIER = {"background": "none", "upright": False}  # what a manifest without these was made with


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
    background: str = "none"  # that transparent images are laid on, as #rrggbb
    upright: bool = False  # whether the EXIF orientation is applied
    format: int = _FORMAT

    @property
    def files(self) -> int:
        """How many files the items fill."""
        return -(-self.items // self.rows_per_file)

    def items_of(self, part: int) -> int:
        """How many items a part has."""
        return min(self.rows_per_file, self.items - part * self.rows_per_file)


def difference(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Why encoding into an existing folder cannot continue with these settings, or ""."""
    changes = []
    for name, what in _SETTINGS.items():
        then, now = stored.get(name, _EARLIER.get(name)), wanted[name]
        if then == now:
            continue
        if name == "weights":
            then, now = (
                f"{values.get('model')} ({str(values.get(name))[:8]})" for values in (stored, wanted)
            )
        changes.append(f"{what} was {then}, now it is {now}")
    if changes:
        return "; ".join(changes)
    before, now = (list(map(_spelled, values.get("sources", []))) for values in (stored, wanted))
    missing = sorted((Counter(before) - Counter(now)).elements())
    if not missing:
        return ""
    places = {os.path.abspath(source): source for source in now}  # noqa: PTH100 (Path keeps "..")
    if other := places.get(os.path.abspath(missing[0])):  # noqa: PTH100
        return f"the source {missing[0]} was spelled so, now it is {other}, and so would be the paths"
    shown = ", ".join(now[:3]) + (", …" if len(now) > 3 else "")
    return f"{missing[0]} was among the sources, which now are {shown}"


def _spelled(source: object) -> str:
    """A source as paths below it begin: ``./photos/`` and ``photos`` are the same."""
    return str(user_path(str(source)))
