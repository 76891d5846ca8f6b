"""Filters: conditions on the json fields and scores of samples."""

import math
import operator
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from clipkit.errors import ConfigError
from clipkit.samples import value_at
from data.captions import Fields

_FORM = re.compile(r"\s*([\w.-]+)\s*(>=|<=|==|!=|=|>|<)\s*(.*?)\s*")
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
    "=": operator.eq, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*")


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A condition on a field of a sample's json or scores, such as ``width >= 256`` or ``language = en``.

    Numbers are compared as numbers, even if the json contains them as text; anything else as text. Two integers
    are compared exactly, other numbers as floats. A sample without the field does not pass.
    """

    name: str
    compare: str
    value: str

    @classmethod
    def of(cls, text: str) -> "Filter":
        """Parse ``FIELD OPERATOR VALUE``."""
        match = _FORM.fullmatch(text)
        if match is None or not match[3]:
            raise ConfigError(f"filter {text!r} is not of the form FIELD >= VALUE (or <=, >, <, =, !=)")
        name, compare, value = match.groups()
        if text[match.end(2)] in "<>=!":  # "width => 256" would compare with the text "> 256"
            raise ConfigError(f"filter {text!r} has no known operator: >=, <=, >, <, = or !=")
        if compare in ("<", ">", "<=", ">=") and parse_number(value) is None:
            raise ConfigError(f"filter {text!r} compares with {value!r}, which is not a number")
        return cls(name=name, compare=compare, value=value.strip("\"'"))

    def __str__(self) -> str:
        return f"{self.name} {self.compare} {self.value}"

    def passes(self, fields: Fields) -> bool | None:
        """Return whether a sample passes, None if it has no such field."""
        value = value_at(fields, self.name)
        if value is None:
            return None
        expected = parse_number(self.value)
        actual = parse_number(value)
        if expected is not None and actual is not None:
            if not (isinstance(expected, int) and isinstance(actual, int)):
                with suppress(OverflowError):  # an integer too large for a float; Python compares it exactly
                    expected = float(expected)
                    actual = float(actual)
            return _COMPARE[self.compare](actual, expected)
        if self.compare in ("<", ">", "<=", ">="):
            return None
        if isinstance(value, bool):  # lower case in JSON
            return _COMPARE[self.compare](str(value).lower(), self.value.lower())
        return _COMPARE[self.compare](str(value), self.value)


def parse_number(value: Any) -> int | float | None:
    """Convert a value to a number, None if it is not one; decimal integers stay ints."""
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):  # float("1_000") is 1000
        return None
    if isinstance(value, int):
        return value
    try:
        if isinstance(value, str) and _INTEGER.fullmatch(value):
            with suppress(ValueError):  # too many digits for int()
                return int(value)
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number
