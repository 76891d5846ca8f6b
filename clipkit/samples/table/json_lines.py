"""JSON Lines: objects, one or several per line."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TextIO

from clipkit.errors import DataError
from clipkit.samples.table.formats import ColumnRequest, Record, TextFormat
from clipkit.samples.table.text import LONGEST, open_text

_SEPARATORS = re.compile(r"[\s,]*")
NOT_AN_OBJECT = "not a JSON object"
_TOO_LONG = f"an object longer than {LONGEST:,} characters"
_DETECTED = 100  # objects whose keys are the columns


class JsonLines(TextFormat):
    """A file of JSON objects; later ones may have other keys than the first ones."""

    guesses: Mapping[str, str] = {}
    any_column = True

    def __init__(self, path: Path, requests: Sequence[ColumnRequest]) -> None:
        super().__init__(path)
        with open_text(path, newline="\n") as (text, _):
            self.names = keys_of(islice(_read_objects(text), _DETECTED))
        if not self.names:
            raise DataError(f"{path} has no JSON object in its first {_DETECTED} lines")

    def records(self, required: Sequence[str], others: Sequence[str]) -> Iterator[Record]:
        """Read all objects in order, see ``Format``."""
        with open_text(self.path, newline="\n") as (text, progress):
            for value in _read_objects(text):
                yield record_of(value, progress())


def keys_of(values: Iterator[object]) -> list[str]:
    """Return the keys of objects in the order in which they occur."""
    keys: dict[str, None] = {}
    for value in values:
        if isinstance(value, dict):
            keys.update(dict.fromkeys(value))
    return list(keys)


def record_of(value: dict[str, object] | str, progress: float) -> Record:
    """Return the row of an object, or of the cause why there is none."""
    if isinstance(value, str):
        return Record(cells={}, cause=value, progress=progress)
    return Record(cells=value, progress=progress)


def _read_objects(text: TextIO) -> Iterator[dict[str, object] | str]:
    """Yield the objects of each line, and a string with the cause where a line cannot be read."""
    decoder = json.JSONDecoder()
    buffer = ""
    while piece := text.readline(LONGEST):
        buffer += piece
        line_ends = piece.endswith("\n") or len(piece) < LONGEST
        position = 0
        while (position := _end_of_separators(buffer, position)) < len(buffer):
            try:
                value, end = decoder.raw_decode(buffer, position)
            except (ValueError, RecursionError):
                if line_ends:
                    yield "not JSON"
                    position = len(buffer)
                break
            if end - position > LONGEST:
                yield _TOO_LONG
            else:
                yield value if isinstance(value, dict) else NOT_AN_OBJECT
            position = end
        buffer = buffer[position:]
        if len(buffer) > LONGEST and not line_ends:
            yield f"{_TOO_LONG}, or not JSON: the rest of the line is not read"
            while piece and not piece.endswith("\n"):
                piece = text.readline(LONGEST)
            buffer = ""
    if buffer:
        yield "not JSON"


def _end_of_separators(text: str, position: int) -> int:
    match = _SEPARATORS.match(text, position)
    assert match is not None
    return match.end()
