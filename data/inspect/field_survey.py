"""The json of samples: which fields it has and what is in them, and how many samples pass the filters."""

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from data.inspect.findings import Field, Fields, Filtered
from data.json_fields import field_hint, leaf_fields
from data.selection import Filter, Selection

__all__ = ["FieldSurvey"]

_MOST_FIELDS = 1000  # that are counted
_TOLD_FIELDS = 40
_MOST_VALUES = 500  # different ones of a field that are counted
_FEW = 8  # different values that are all told
_MOST_NUMBERS = 4096  # of a field that the median is taken of
_TOLD_VALUES, _LONGEST = 3, 40
_KINDS = {bool: "true or false", int: "number", float: "number", str: "text", list: "list"}


class _Numbers:
    """The range of numbers, and some of them, spread evenly."""

    def __init__(self) -> None:
        self.low, self.high = math.inf, -math.inf
        self.some = array("d")
        self._count, self._every = 0, 1

    def add(self, number: float) -> None:
        self.low, self.high = min(self.low, number), max(self.high, number)
        if self._count % self._every == 0:
            self.some.append(number)
            if len(self.some) >= _MOST_NUMBERS:
                self.some, self._every = self.some[::2], 2 * self._every
        self._count += 1


class _Seen:
    """What was seen of one field."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.numbers = _Numbers()
        self.lengths = _Numbers()
        self.values: Counter[str] = Counter()
        self.more = 0  # values beyond those that are counted

    def add(self, value: Any) -> None:
        self.kinds[_KINDS.get(type(value), "text")] += 1
        if isinstance(value, list):
            self.lengths.add(len(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if (
                abs(value) < 1e300
            ):  # JSON of Python also knows NaN and Infinity, and whole numbers of any length
                self.numbers.add(value)
        else:
            shown = str(value).lower() if isinstance(value, bool) else str(value)[: _LONGEST + 1]
            if shown in self.values or len(self.values) < _MOST_VALUES:
                self.values[shown] += 1
            else:
                self.more += 1

    def told(self) -> str:
        """In words."""
        parts = []
        if self.numbers.some:
            low, high, middle = self.numbers.low, self.numbers.high, float(np.median(self.numbers.some))
            parts.append(f"{low:,.6g} to {high:,.6g}, median {middle:,.6g}" if low < high else f"{low:,.6g}")
        if self.values:
            parts.append(self._texts())
        if self.lengths.some:
            least, most = int(self.lengths.low), int(self.lengths.high)
            parts.append(f"{least} to {most} items" if least < most else f"{least} items")
        return "; ".join(parts)

    def _texts(self) -> str:
        total = self.values.total() + self.more
        several = len(self.values) <= _FEW and not self.more and total > len(self.values)
        if len(self.values) == 1 and not self.more:
            return (
                f"always {_short(next(iter(self.values)))}" if total > 1 else _short(next(iter(self.values)))
            )
        if several:
            return ", ".join(f"{_short(one)} {100 * n / total:.0f}%" for one, n in self.values.most_common())
        some = ", ".join(_short(one) for one, _ in self.values.most_common(_TOLD_VALUES))
        return some if total <= _TOLD_VALUES else f"such as {some}"


def _short(value: str) -> str:
    return f'"{value[:_LONGEST]}{"…" * (len(value) > _LONGEST)}"'


class FieldSurvey:
    """Takes the json of samples one by one.

    Args:
        filters: which samples are to count.
    """

    def __init__(self, filters: Sequence[Filter]) -> None:
        self._selection = Selection(filters=tuple(filters))
        self._read = self._with_json = self._more = self._passed = 0
        self._fields: dict[str, _Seen] = {}
        self._left_out: Counter[str] = Counter()

    def add(self, meta: dict[str, Any] | None) -> None:
        """The json of a sample; None if it has none that can be read."""
        self._read += 1
        self._with_json += meta is not None
        if reason := self._selection.refuses(meta or {}):
            self._left_out[reason] += 1
        else:
            self._passed += 1
        for name, value in leaf_fields(meta or {}):
            if name in self._fields or len(self._fields) < _MOST_FIELDS:
                self._fields.setdefault(name, _Seen()).add(value)

    def found(self) -> Fields:
        """What was found."""
        by_count = sorted(self._fields.items(), key=lambda one: -one[1].kinds.total())
        fields = [
            Field(
                name=name,
                kind=" or ".join(kind for kind, _ in seen.kinds.most_common()),
                count=seen.kinds.total(),
                values=seen.told(),
            )
            for name, seen in by_count[:_TOLD_FIELDS]
        ]
        return Fields(
            read=self._read, with_json=self._with_json, fields=tuple(fields), more=len(by_count) - len(fields)
        )

    def unknown(self, names: Sequence[str]) -> tuple[str, ...]:
        """What is said of fields that no sample read has, a line each."""
        return tuple(
            f"no sample read has the json field {name!r}: {field_hint(name, self._fields)}"
            for name in dict.fromkeys(names)
            if name not in self._fields
        )

    def filtered(self) -> Filtered | None:
        """What the filters leave; None if there are none."""
        filters = self._selection.filters
        if not filters:
            return None
        return Filtered(
            filters=tuple(map(str, filters)),
            unknown=self.unknown([one.name for one in filters]),
            read=self._read,
            passed=self._passed,
            left_out=dict(self._left_out.most_common()),
        )
