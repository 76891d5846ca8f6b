"""Reads JSON Lines that a kill may have cut short or anybody may have written."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval.json_text import parse_json

__all__ = ["finite", "json_lines", "whole"]

_MAX_LINE = 1 << 20
_MAX_WHOLE = 2**53  # of those that a float tells apart


def json_lines(path: Path, notes: list[str], consequence: str) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file; lines that do not parse are counted and noted.

    A missing file is noted with its ``consequence``, if it has one.
    """
    if not path.is_file():
        if consequence:
            notes.append(f"{path.name} is missing, so {consequence}.")
        return
    broken = 0
    with path.open("rb") as file:
        while line := file.readline(_MAX_LINE):
            try:
                value = parse_json(line)
            except ValueError:
                broken += bool(line.strip())
                continue
            if isinstance(value, dict):
                yield value
            else:
                broken += 1
    if broken:
        notes.append(f"{path.name}: {_lines(broken)} cut short or broken, and left out.")


def _lines(count: int) -> str:
    return "one line" if count == 1 else f"{count} lines"


def finite(value: object) -> float | None:
    """A number that is one, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def whole(value: object) -> int | None:
    """A number cut to a whole one of at most 2⁵³, else None."""
    number = finite(value)
    return None if number is None or abs(number) > _MAX_WHOLE else int(number)
