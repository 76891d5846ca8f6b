"""Names of classes whose images are in a folder per class: ``classnames.txt``, and names that are ids."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from clipkit.errors import DataError

__all__ = ["CLASS_NAMES", "are_ids", "read_class_names"]

CLASS_NAMES = "classnames.txt"
_NUMBER = re.compile(r"[0-9]+")
# WordNet ids, numbers, numbered classes, and hexadecimal ids such as UUIDs
_ID = re.compile(
    r"n[0-9]{8}|[0-9]+|(?:class|category|label|id)[ _-]*[0-9]+|(?=.*[0-9])[0-9a-f-]{8,}", re.IGNORECASE
)


def are_ids(names: Collection[str]) -> bool:
    """Whether all names of classes are ids or numbers, which mean nothing to a text encoder."""
    return bool(names) and all(map(_ID.fullmatch, names))


def read_class_names(folder: Path, subfolders: Sequence[str]) -> tuple[list[str], dict[str, int]] | None:
    """Read the names of classes from ``classnames.txt``, whose line numbers, counted from 0, are the labels.

    The subfolders have the names in the file; or they are numbers from 0, which are the labels; or ids or other
    numbers, as many as lines, in ascending order.

    Args:
        folder: the folder with the file.
        subfolders: names of the folders with the images of a class.

    Returns:
        The names by label, and the labels by subfolder; None if there is no file.

    Raises:
        DataError: the file cannot be read, or the subfolders do not match the lines.
    """
    file = folder / CLASS_NAMES
    if not file.is_file():
        return None
    try:
        names = [line.strip() for line in file.read_text(encoding="utf-8-sig").rstrip().split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as UTF-8 text: {error}") from error
    lines = {_plain(name): line for line, name in reversed([*enumerate(names)])}
    folders: dict[str, str] = {}
    for name in subfolders:
        if (other := folders.setdefault(_plain(name), name)) != name and _plain(name) in lines:
            raise DataError(
                f"the folders {other!r} and {name!r} in {folder} have the same name in {CLASS_NAMES}: rename one, "
                "or move the images into one folder"
            )
    if all(_plain(name) in lines for name in subfolders):
        return names, {name: lines[_plain(name)] for name in subfolders}
    if not are_ids(subfolders):
        unknown = next(name for name in subfolders if _plain(name) not in lines)
        raise DataError(f"{file} does not contain {unknown!r}, which is a folder: add it, or remove the file")
    numbered = all(map(_NUMBER.fullmatch, subfolders))
    if numbered and "0" in {name.lstrip("0") or "0" for name in subfolders}:
        labels = {name: int(name) for name in subfolders}
        if max(labels.values()) < len(names):
            return names, labels
    if len(names) != len(subfolders):
        raise DataError(
            f"{file} has {len(names)} lines, but there are {len(subfolders)} folders of classes: write one name "
            "for each, in their order"
        )
    ordered = sorted(subfolders, key=int) if numbered else sorted(subfolders)
    return names, {name: label for label, name in enumerate(ordered)}


def _plain(name: str) -> str:
    return " ".join(name.replace("_", " ").split()).casefold()
