"""Which caption a picture is trained with: where captions are, which is taken, and what is written around it."""

import hashlib
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from clipkit.errors import ConfigError, DataError, nearest
from clipkit.files.terminal import printable
from data.shards.index import CAPTION, IMAGE, LABEL, META, ShardIndex

__all__ = [
    "CHOICES",
    "NOT_UTF8",
    "TEXT",
    "CaptionRule",
    "Chosen",
    "Filter",
    "Selection",
    "field_hint",
    "field_name",
    "is_utf8",
    "json_value",
    "leaf_fields",
    "listed",
    "value_at",
]


# --------------------------------------------------------------------------------------------------------------
# The fields of samples' json by name: ``a.b`` is field b of the object in field a.

_DEEPEST = 4  # objects inside one another whose fields are named
_MOST_OF_ONE = 200  # fields of one json
_MOST_TOLD = 20
_LONGEST = 40  # characters of a name that are told


def field_name(text: str) -> str:
    """A name that filters and ``data.captions`` can use: characters other than letters, digits and - become _."""
    return re.sub(r"[^\w-]", "_", text.strip())


def json_value(value: object) -> Any:
    """A value as standard JSON holds it.

    Numbers that are not finite become None, dates and times ISO 8601 texts, durations seconds, decimals floats, and
    characters that UTF-8 cannot hold question marks. Anything else that JSON does not know becomes its text.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {json_value(str(name)): json_value(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(one) for one in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return json_value(float(value))
    return str(value).encode("utf-8", "replace").decode()


def value_at(meta: Mapping[str, Any], name: str) -> Any:
    """The value of a field; None if it is not there."""
    value: Any = meta
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def leaf_fields(meta: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields that a filter or ``data.captions`` could name, with their values; without those that are null.

    Of an object only its fields are told; of one with very many fields the first.
    """
    left = _MOST_OF_ONE
    waiting = [("", meta, 0)]
    while waiting:
        before, within, deep = waiting.pop()
        for name, value in within.items():
            if "." in name or value is None:  # no name reaches it
                continue
            if isinstance(value, Mapping):
                if value and deep < _DEEPEST:
                    waiting.append((f"{before}{name}.", value, deep + 1))
                continue
            if not left:
                return
            left -= 1
            yield before + name, value


def field_hint(name: str, known: Iterable[str]) -> str:
    """What to say where there is no such field: the nearest one, and which there are, as a line may show them."""
    names = {_shown(one) for one in known}
    if not names:
        return "they have no json with any field"
    same = [one for one in sorted(names) if one.lower() == name.lower()]
    hint = f"did you mean {same[0]!r}?" if same else nearest(name, names)
    told = f"their json has: {listed(names)}"
    return f"{hint} {told}" if hint.startswith("did you mean") else told


def listed(names: Iterable[str]) -> str:
    """Names of fields in one line, the first of many."""
    shown = sorted({_shown(one) for one in names})
    more = f" and {len(shown) - _MOST_TOLD:,} more" if len(shown) > _MOST_TOLD else ""
    return ", ".join(shown[:_MOST_TOLD]) + more


def _shown(name: str) -> str:
    return printable(name, _LONGEST)


# --------------------------------------------------------------------------------------------------------------

CHOICES = ("first", "random", "weighted", "all")
NOT_UTF8 = "caption is not UTF-8"
TEXT = "txt"  # the caption file; where a sample has none, the "caption" of its json


@dataclass(frozen=True, kw_only=True)
class CaptionRule:
    """How a sample's caption is made.

    Attributes:
        fields: where captions are: ``txt`` or a field of the sample's json, whose value is a text or a list of
            texts; ``a.b`` is field b of the object in field a.
        choice: "first" takes the first one of the first field that has any; "random" any of all, equally likely;
            "weighted" draws a field that has any by ``weights``, then one of it; "all" makes each pair of picture
            and caption a sample of its own.
        weights: of each field, for "weighted".
        templates: what the caption is written into, in place of ``{}``; one is drawn each time.
        prefix: what is written before it.
    """

    fields: tuple[str, ...] = (TEXT,)
    choice: str = "first"
    weights: tuple[float, ...] = ()
    templates: tuple[str, ...] = ()
    prefix: str = ""

    def which(self) -> str:
        """What decides how many captions a sample has, as a line that identifies it."""
        return json.dumps({"fields": self.fields, "choice": self.choice})

    @property
    def draws(self) -> bool:
        """Whether chance has a part in it."""
        return self.choice in ("random", "weighted") or len(self.templates) > 1

    @property
    def reads_json(self) -> bool:
        """Whether every sample's json is needed."""
        return self.fields != (TEXT,)

    def by_field(self, text: str | None, meta: Mapping[str, Any]) -> list[list[str]]:
        """The captions in each field, without empty ones."""
        if text is None and isinstance(meta.get("caption"), str):
            text = meta["caption"]
        return [
            [one for one in _texts(text if name == TEXT else value_at(meta, name)) if one.strip()]
            for name in self.fields
        ]

    def caption(
        self, text: str | None, meta: Mapping[str, Any], number: int, random: np.random.Generator | None
    ) -> str | None:
        """The caption of a sample, None if it has none.

        Args:
            text: of the caption file.
            meta: the sample's json.
            number: of "all", which one.
            random: needed where ``draws``.

        Raises:
            DataError: it is not UTF-8.
        """
        captions = self._chosen(self.by_field(text, meta), number, random)
        if captions is None:
            return None
        if self.templates:
            drawn = int(random.integers(len(self.templates))) if random and len(self.templates) > 1 else 0
            captions = self.templates[drawn].replace("{}", captions)
        if not is_utf8(captions):
            raise DataError(NOT_UTF8)
        return self.prefix + captions

    def _chosen(
        self, by_field: list[list[str]], number: int, random: np.random.Generator | None
    ) -> str | None:
        flat = [caption for captions in by_field for caption in captions]
        if not flat:
            return None
        if self.choice == "all":
            return flat[number] if number < len(flat) else None
        if self.choice == "first":
            return flat[0]
        assert random is not None
        if self.choice == "random":
            return flat[int(random.integers(len(flat)))]
        weights = np.array([weight if of else 0 for weight, of in zip(self.weights, by_field, strict=True)])
        if not weights.any():
            return None
        among = by_field[int(random.choice(len(weights), p=weights / weights.sum()))]
        return among[int(random.integers(len(among)))]

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def is_utf8(text: str) -> bool:
    """Whether a text is all of UTF-8: without the lone surrogates that stand for other bytes, or JSON may spell."""
    if text.isascii():  # known without looking at the characters
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


# --------------------------------------------------------------------------------------------------------------
# Which samples of a shard are trained on: what they must have, filters on their json, and one or all captions.

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
