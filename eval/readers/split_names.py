"""What the folders and files of a split may be called: the usual spellings, in capitals or not."""

from collections.abc import Callable, Iterable
from pathlib import Path

from clipkit.errors import DataError
from eval.dataset import TEST

__all__ = ["ACCEPTED", "SPLIT_NAMES", "folder_of_split", "names_of_split"]

SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    TEST: (TEST, "testing"),
}
ACCEPTED = "train (or training), val (valid, validation, dev) and test (testing)"  # for messages


def names_of_split(split: str) -> tuple[str, ...]:
    """What else a split goes by, in small letters; its own name first."""
    return SPLIT_NAMES.get(split, (split,))


def folder_of_split(
    folders: Iterable[Path], split: str, holds: Callable[[Path], object] = lambda _: True
) -> Path | None:
    """Of some folders the one that is called like a split and holds what it should; None where there is none.

    Raises:
        DataError: there are two.
    """
    called = [one for one in folders if one.name == split or one.name.lower() in names_of_split(split)]
    found = list(filter(holds, called))
    if len(found) > 1:
        raise DataError(f"{found[0]} and {found[1]} would both be the split {split!r}: rename or move one")
    return found[0] if found else None
