"""Small files of text beside a dataset's pictures, which anybody may have written, here or in a store."""

from pathlib import Path

from clipkit.errors import DataError
from data.shard_file import is_remote

__all__ = ["beside", "lines_of", "text_of"]

_MAX_BYTES = 16 << 20


def beside(root: str | Path, *names: str) -> str | Path:
    """A file or folder in a folder of this machine, or in one of a store."""
    if isinstance(root, Path) or not is_remote(root):
        return Path(root, *names)
    return "/".join([root.rstrip("/"), *names])


def lines_of(place: str | Path) -> list[str]:
    """The lines, stripped. Blank ones stay, because their place has a meaning; a missing file has none."""
    text = (text_of(place) or "").removesuffix("\n").removesuffix("\r")
    return [line.strip() for line in text.split("\n")] if text else []


def text_of(place: str | Path, *, limit: int = _MAX_BYTES) -> str | None:
    """A file's text; None where there is none.

    Raises:
        DataError: it is longer than ``limit`` bytes or not UTF-8, or its store does not answer.
    """
    if isinstance(place, str) and is_remote(place):
        return _remote_text(place, limit)
    path = Path(place)
    if not path.is_file():
        return None
    if path.stat().st_size > limit:
        raise DataError(f"{path} is larger than {limit} bytes")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error


def _remote_text(url: str, limit: int) -> str | None:
    from data.remote import store

    text = store.read_text(url, limit=limit)
    if text is not None and "\ufffd" in text:  # what its bytes that are no UTF-8 were turned into
        raise DataError(f"{store.shown(url)} is not UTF-8 text")
    return None if text is None else text.removeprefix("\ufeff")
