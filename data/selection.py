"""Which samples of a shard are trained on: what they must have, filters on their json, and one or all captions."""

import hashlib
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from clipkit.errors import ConfigError, DataError
from data.captions import TEXT, CaptionRule
from data.index import CAPTION, IMAGE, LABEL, META, ShardIndex
from data.json_fields import value_at

__all__ = ["Chosen", "Filter", "Selection"]

_FORM = re.compile(r"\s*([\w.-]+)\s*(>=|<=|==|!=|=|>|<)\s*(.*?)\s*")
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
    "=": operator.eq, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_MEANT = {"=>": ">=", "=<": "<=", "=!": "!=", "<>": "!=", "===": "=", "!==": "!=", "<<": "<", ">>": ">"}
_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*")
_COLUMN = {"image": IMAGE, "caption": CAPTION, "label": LABEL}
_MOST_CAPTIONS = 2**16 - 1  # of one sample

Meta = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A condition on a field of a sample's json, such as ``width >= 256`` or ``language = en``.

    Numbers are compared as numbers, also where the json holds them as text; anything else as text. Two integers
    are compared exactly, other numbers as floats. A sample without the field does not pass.
    """

    name: str
    compare: str
    value: str

    @classmethod
    def of(cls, text: str) -> "Filter":
        """Read ``FIELD OPERATOR VALUE``.

        Raises:
            ConfigError: it has another form, or asks for more or less of what is no number.
        """
        match = _FORM.fullmatch(text)
        if match is None or not match[3]:
            raise ConfigError(f"filter {text!r} is not of the form FIELD >= VALUE (or <=, >, <, =, !=)")
        name, compare, value = match.groups()
        if text[match.end(2)] in "<>=!":  # as in "width => 256", which would ask for the text "> 256"
            raise ConfigError(_unknown_operator(text, name, value, text[match.start(2) :]))
        if compare in ("<", ">", "<=", ">=") and _number(value) is None:
            raise ConfigError(f"filter {text!r} compares with {value!r}, which is no number")
        return cls(name=name, compare=compare, value=value.strip("\"'"))

    def __str__(self) -> str:
        return f"{self.name} {self.compare} {self.value}"

    def passes(self, meta: Meta) -> bool | None:
        """Whether a sample passes; None if it lacks the field."""
        value = value_at(meta, self.name)
        if value is None:
            return None
        wanted, found = _number(self.value), _number(value)
        if wanted is not None and found is not None:
            if not (isinstance(wanted, int) and isinstance(found, int)):
                with suppress(OverflowError):  # an integer that no float can hold: Python compares it exactly
                    wanted, found = float(wanted), float(found)
            return _COMPARE[self.compare](found, wanted)
        if self.compare in ("<", ">", "<=", ">="):
            return None
        if isinstance(value, bool):  # which JSON writes in small letters
            return _COMPARE[self.compare](str(value).lower(), self.value.lower())
        return _COMPARE[self.compare](str(value), self.value)


def _unknown_operator(text: str, name: str, value: str, behind: str) -> str:
    """What to say of ``=>`` and its like."""
    typed = behind[: len(behind) - len(behind.lstrip("<>=!"))]
    if (meant := _MEANT.get(typed)) is not None:
        right = f"{name} {meant} {value.lstrip('<>=! ') or 'VALUE'}"
        return f"filter {text!r} has {typed} for {meant}: write {right!r}"
    return f"filter {text!r} has no known operator: >=, <=, >, <, = or !="


def _number(value: Any) -> int | float | None:
    """The number that a value is or spells; an integer in plain decimal notation stays an int."""
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen:
    """The samples of a shard that count.

    Attributes:
        rows: (M,) uint32, rows of the shard's index.
        captions: (M,) uint16, which of its captions each one has; None where it is not told apart.
        dropped: how many samples were left out for which reason.
    """

    rows: npt.NDArray[np.uint32]
    captions: npt.NDArray[np.uint16] | None
    dropped: dict[str, int]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which samples count.

    Attributes:
        need: which of "image", "caption" and "label" a sample must have.
        filters: conditions that all must hold.
        captions: where a caption may be, and whether each is a sample of its own.
        truncated: "error", or "use" for the samples of the intact part of truncated shards.
    """

    need: tuple[str, ...] = ("image", "caption")
    filters: tuple[Filter, ...] = ()
    captions: CaptionRule = field(default_factory=CaptionRule)
    truncated: str = "error"

    @property
    def reads_json(self) -> bool:
        """Whether the samples' json must be read to tell which count."""
        return bool(self.filters) or ("caption" in self.need and self.captions.choice == "all")

    @property
    def identity(self) -> str:
        """16 hexadecimal digits that change when it can choose other samples of a whole shard."""
        said = [sorted(self.need), sorted(map(str, self.filters)), self.captions.which()]
        # Earlier versions compared these integers as floats; do not use the selections that they stored.
        large = [one for one in self.filters if isinstance(n := _number(one.value), int) and abs(n) >= 2**53]
        if large:
            said.append(sorted(map(str, large)))
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    def choose(self, index: ShardIndex, content: Callable[[int], tuple[str | None, Meta]]) -> Chosen:
        """The samples of one shard that count.

        Args:
            index: of the shard.
            content: gives the caption file and the json of a row; DataError where they cannot be read.
        """
        has = index.has()
        usable = np.ones(len(index), dtype=np.bool_)
        dropped: Counter[str] = Counter()
        for what in self.need:
            there = self._has_caption(has) if what == "caption" else has[:, _COLUMN[what]]
            dropped[f"without {what}"] += int((usable & ~there).sum())
            usable &= there
        rows = np.flatnonzero(usable).astype(np.uint32)
        if not self.reads_json:
            return Chosen(rows=rows, captions=None, dropped=dict(+dropped))
        kept: list[int] = []
        captions: list[int] = []
        for row in rows.tolist():
            numbers = self._samples_of(row, content, dropped)
            kept += [row] * len(numbers)
            captions += numbers
        told_apart = np.array(captions, dtype=np.uint16) if self.captions.choice == "all" else None
        return Chosen(rows=np.array(kept, dtype=np.uint32), captions=told_apart, dropped=dict(+dropped))

    def _has_caption(self, has: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        there: npt.NDArray[np.bool_] = has[:, META]  # may hold one
        return there | has[:, CAPTION] if TEXT in self.captions.fields else there

    def refuses(self, meta: Meta) -> str:
        """Why the filters leave a sample of this json out; empty if they do not."""
        for one in self.filters:
            if not (passes := one.passes(meta)):
                return f"without {one.name}" if passes is None else f"not {one}"
        return ""

    def _samples_of(
        self, row: int, content: Callable[[int], tuple[str | None, Meta]], dropped: Counter[str]
    ) -> Sequence[int]:
        """The numbers of the captions with which a row counts."""
        try:
            text, meta = content(row)
        except DataError:
            dropped["unreadable"] += 1
            return ()
        if reason := self.refuses(meta):
            dropped[reason] += 1
            return ()
        if self.captions.choice != "all":
            return (0,)
        count = sum(map(len, self.captions.by_field(text, meta)))
        if not count:
            dropped["without caption"] += 1
        return range(min(count, _MOST_CAPTIONS))
