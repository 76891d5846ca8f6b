"""Small files of text beside a dataset's pictures, which anybody may have written."""

from pathlib import Path

from clipkit.errors import DataError

__all__ = ["lines_of", "text_of"]

_MAX_BYTES = 16 << 20


def lines_of(path: Path) -> list[str]:
    """The lines, stripped. Blank ones stay, because their place has a meaning; a missing file has none."""
    text = text_of(path).removesuffix("\n").removesuffix("\r")
    return [line.strip() for line in text.split("\n")] if text else []


def text_of(path: Path) -> str:
    if not path.is_file():
        return ""
    if path.stat().st_size > _MAX_BYTES:
        raise DataError(f"{path} is larger than {_MAX_BYTES} bytes")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
