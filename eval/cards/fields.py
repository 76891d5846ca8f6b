"""The fields of a TOML file, taken one by one, so that what is wrong is said with its file, key and value."""

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from clipkit.errors import DataError, nearest

__all__ = ["Fields", "parse_fields", "read_fields"]

_MAX_BYTES = 4 << 20
_SHOWN = 80  # characters of a value in a message


class Fields:
    """One table. ``end`` tells of the fields that nobody has asked for."""

    def __init__(self, table: Mapping[str, Any], *, file: str, at: str = "") -> None:
        self.file = file
        self._table = table
        self._at = at
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._table

    def raw(self, key: str) -> Any:
        """What stands there, whatever it is; None where nothing does."""
        self._asked.add(key)
        return self._table.get(key)

    def wrong(self, key: str, must: str) -> DataError:
        value = self._table.get(key)
        shown = "is missing" if value is None else f"= {repr(value)[:_SHOWN]}"
        return DataError(f"{self.file}: {self._at}{key} {shown}: it must be {must}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or (not value and default is None):
            raise self.wrong(key, "text")
        return value

    def one_of(self, key: str, known: Collection[str], default: str | None = None) -> str:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value not in known:
            raise self.wrong(key, f"a known one, {nearest(str(value or '')[:_SHOWN], known)}")
        return value

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value) or not value:
            raise self.wrong(key, "a list of texts")
        return tuple(value)

    def some_of(
        self, key: str, known: Collection[str], default: tuple[str, ...] | None = None
    ) -> tuple[str, ...]:
        values = self.texts(key, default)
        for value in values:
            if value not in known:
                raise self.wrong(key, f"of known ones, not {value!r}: {nearest(value, known)}")
        if len(set(values)) < len(values):
            raise self.wrong(key, "a list in which nothing stands twice")
        return values

    def whole(self, key: str) -> int | None:
        value = self.raw(key)
        if value is not None and (type(value) is not int or value < 1):
            raise self.wrong(key, "a whole number, 1 or more")
        return value

    def wholes(self, key: str) -> tuple[int, ...]:
        value = self.raw(key)
        if value is None:
            return ()
        if not isinstance(value, list) or any(type(one) is not int or one < 0 for one in value):
            raise self.wrong(key, "a list of whole numbers, 0 or more")
        return tuple(value)

    def number(self, key: str, low: float, high: float) -> float:
        value = self.raw(key)
        # the bounds also keep out what is not finite, and whole numbers that no float holds
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.wrong(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return bool(value)

    def names(self) -> tuple[str, ...]:
        """Of its fields, in the order of the file."""
        return tuple(self._table)

    def table(self, key: str) -> "Fields | None":
        """The table inside this one, or None where there is none."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "a table")
        return Fields(value, file=self.file, at=f"{self._at}{key}.")

    def tables(self, key: str) -> list["Fields"]:
        """Those of a list of tables; none where there is no list."""
        value = self.raw(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self.wrong(key, f"tables, each under [[{self._at}{key}]]")
        return [
            Fields(one, file=self.file, at=f"{self._at}{key}[{number}].") for number, one in enumerate(value)
        ]

    def end(self) -> None:
        """DataError if there are fields that were never asked for."""
        for key in self._table:
            if key not in self._asked:
                raise DataError(
                    f"{self.file}: unknown key {(self._at + key)[:_SHOWN]!r}, {nearest(key, self._asked)}"
                )


def read_fields(path: Path) -> Fields:
    """The whole of a TOML file.

    Raises:
        DataError: it cannot be read, is too large, or is no TOML.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise DataError(f"{path} is larger than {_MAX_BYTES} bytes, too large for a card")
    try:
        return parse_fields(data.decode("utf-8-sig"), file=str(path))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error


def parse_fields(text: str, *, file: str) -> Fields:
    """The whole of a TOML file's text; ``file`` is what messages call it."""
    try:
        return Fields(tomllib.loads(text), file=file)
    except (ValueError, RecursionError) as error:  # ValueError too of numbers with thousands of digits
        raise DataError(f"{file} is no TOML: {error}") from error
