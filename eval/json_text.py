"""JSON that anybody may have written: what parses is small enough in every way to be worked with."""

import json
from typing import Any

__all__ = ["parse_json"]

_MAX_DEPTH = 64
_MAX_DIGITS = 300  # what is longer has no place in a float


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; whole numbers of more than 300 digits are infinite.

    Raises:
        ValueError: it is no JSON, is not UTF-8, or lists stand in lists more than 64 deep.
    """
    try:
        value = _decoder.decode(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    # whoever walks through the value may do so by recursion
    level = [value]
    for _ in range(_MAX_DEPTH):
        inside = [one for one in level if isinstance(one, list | dict)]
        if not inside:
            return value
        level = [child for one in inside for child in (one.values() if isinstance(one, dict) else one)]
    raise ValueError("it is nested too deeply")


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


_decoder = json.JSONDecoder(parse_int=_whole)  # to make one takes longer than a line of results
