"""Captions of training samples, filters, and the selection of usable samples in a shard."""

import hashlib
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from clipkit.errors import ConfigError, DataError, nearest
from clipkit.files import printable
from clipkit.samples import CAPTION, IMAGE, LABEL, META, ShardIndex

if TYPE_CHECKING:
    from data.scores.table import Scores

__all__ = [
    "CAPTIONS",
    "CHOICES",
    "DRAW_CAPTIONS",
    "NOT_UTF8",
    "OUTSIDE",
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

Meta = Mapping[str, Any]
OUTSIDE = "outside data.fraction"  # why a sample is not used


# --------------------------------------------------------------------------------------------------------------
# Fields of the samples' json by name: ``a.b`` is field b of the object in field a.

_MAX_DEPTH = 4  # levels of nested objects
_MAX_FIELDS = 200  # per json
_SHOWN = 20  # names in a message
_MAX_NAME = 40  # characters of a name in a message


def field_name(text: str) -> str:
    """Return a field name for filters and ``data.captions``; characters except letters, digits and - become _."""
    return re.sub(r"[^\w-]", "_", text.strip())


def json_value(value: object) -> Any:
    """Convert a value to standard JSON.

    Non-finite numbers become None, dates and times ISO 8601 strings, durations seconds, and decimals floats.
    Characters that UTF-8 cannot encode become question marks. Other types become ``str(value)``.
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


def value_at(meta: Meta, name: str) -> Any:
    """Return the value of a field, None if it does not exist."""
    value: Any = meta
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def leaf_fields(meta: Meta) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the fields that a filter or ``data.captions`` can refer to, except null values.

    Nested objects are flattened; at most ``_MAX_FIELDS`` fields are returned.
    """
    left = _MAX_FIELDS
    waiting = [("", meta, 0)]
    while waiting:
        prefix, within, depth = waiting.pop()
        for name, value in within.items():
            if "." in name or value is None:  # cannot be named
                continue
            if isinstance(value, Mapping):
                if value and depth < _MAX_DEPTH:
                    waiting.append((f"{prefix}{name}.", value, depth + 1))
                continue
            if not left:
                return
            left -= 1
            yield prefix + name, value


def field_hint(name: str, known: Iterable[str]) -> str:
    """Return the field closest to an unknown name, and the names of all fields, for a one-line message."""
    names = {printable(one, _MAX_NAME) for one in known}
    if not names:
        return "the samples have no json fields"
    same = [one for one in sorted(names) if one.lower() == name.lower()]
    hint = f"did you mean {same[0]!r}?" if same else nearest(name, names)
    fields = f"available fields: {listed(names)}"
    return f"{hint} {fields}" if hint.startswith("did you mean") else fields


def listed(names: Iterable[str]) -> str:
    """Join field names in one line; only the first ones if there are many."""
    shown = sorted({printable(name, _MAX_NAME) for name in names})
    more = f" and {len(shown) - _SHOWN:,} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


# --------------------------------------------------------------------------------------------------------------

CHOICES = ("first", "random", "weighted", "all")
NOT_UTF8 = "caption is not UTF-8"
TEXT = "txt"  # the caption file or, without one, the json field "caption"
CAPTIONS = "captions"  # the json field with all captions of an image that has several
DRAW_CAPTIONS = "data.captions=captions data.caption_choice=random"


@dataclass(frozen=True, kw_only=True)
class CaptionRule:
    """How a sample's caption is chosen.

    Attributes:
        fields: where captions are: ``txt``, or json fields (``a.b`` is field b of the object in field a) that
            contain a string or a list of strings. ``captions`` alone also stands for ``txt`` in samples
            without this field: ``pack`` writes it only for images with several captions.
        choice: "first" takes the first caption of the first field that has one; "random" draws from all;
            "weighted" draws a field by ``weights``, then one of its captions; "all" treats each pair of image
            and caption as a sample.
        weights: weight of each field, for "weighted".
        templates: strings in which ``{}`` is replaced by the caption; one is drawn for each use.
        prefix: text before the caption.
        count: number of captions of a sample that are used at once, for "first" and "random".
        negatives: a json field with wrong captions of the image, a string or a list of strings; "" for none.
    """

    fields: tuple[str, ...] = (TEXT,)
    choice: str = "first"
    weights: tuple[float, ...] = ()
    templates: tuple[str, ...] = ()
    prefix: str = ""
    count: int = 1
    negatives: str = ""

    def which(self) -> str:
        """Return a string that identifies the settings on which the number of captions per sample depends."""
        settings: dict[str, object] = {"fields": self.fields, "choice": self.choice}
        if (
            CAPTIONS in self.fields and TEXT not in self.fields
        ):  # earlier versions did not use samples without it
            settings["captions"] = TEXT
        return json.dumps(settings)

    @property
    def draws(self) -> bool:
        """Whether the caption is random."""
        return self.choice in ("random", "weighted") or len(self.templates) > 1

    @property
    def reads_json(self) -> bool:
        """Whether captions depend on the json."""
        return self.fields != (TEXT,)

    def wrong_captions(self, meta: Meta) -> list[str]:
        """Return the wrong captions of an image, with the prefix, except empty ones and those not in UTF-8."""
        value = value_at(meta, self.negatives)
        values = value if isinstance(value, list) else [value]
        return [self.prefix + one for one in values if isinstance(one, str) and one.strip() and is_utf8(one)]

    def by_field(self, text: str | None, meta: Meta) -> list[list[str]]:
        """Return the non-empty captions of each field."""
        if text is None and isinstance(meta.get("caption"), str):
            text = meta["caption"]
        found = []
        for name in self.fields:
            value = text if name == TEXT else value_at(meta, name)
            if name == CAPTIONS and value is None and TEXT not in self.fields:
                value = text
            values = value if isinstance(value, list) else [value]
            found.append([one for one in values if isinstance(one, str) and one.strip()])
        return found

    def caption(
        self, text: str | None, meta: Meta, number: int, random: np.random.Generator | None
    ) -> str | None:
        """Return the caption of a sample, None if it has none.

        Args:
            text: content of the caption file, None without one.
            meta: the sample's json.
            number: index of the caption, for "all".
            random: random generator, required if ``draws``.

        Raises:
            DataError: the caption is not UTF-8.
        """
        by_field = self.by_field(text, meta)
        flat = [caption for captions in by_field for caption in captions]
        if self.choice == "random" and flat:
            assert random is not None
            number = int(random.integers(len(flat)))
        elif self.choice == "weighted" and flat:
            assert random is not None
            weights = np.array(
                [weight if of else 0 for weight, of in zip(self.weights, by_field, strict=True)]
            )
            flat = []
            if weights.any():
                flat = by_field[int(random.choice(len(weights), p=weights / weights.sum()))]
                number = int(random.integers(len(flat)))
        elif self.choice == "first":
            number = 0
        if number >= len(flat):
            return None
        return self._finished(flat[number], random)

    def several(self, text: str | None, meta: Meta, random: np.random.Generator | None) -> list[str]:
        """Return ``count`` captions of a sample, repeated if it has fewer; none if it has none.

        Arguments and errors are as for ``caption``.
        """
        flat = [caption for captions in self.by_field(text, meta) for caption in captions]
        if self.choice == "random":
            assert random is not None
            flat = [flat[number] for number in random.permutation(len(flat))]
        return (
            [self._finished(flat[number % len(flat)], random) for number in range(self.count)] if flat else []
        )

    def _finished(self, caption: str, random: np.random.Generator | None) -> str:
        """Apply a template and the prefix."""
        if self.templates:
            drawn = int(random.integers(len(self.templates))) if random and len(self.templates) > 1 else 0
            caption = self.templates[drawn].replace("{}", caption)
        if not is_utf8(caption):
            raise DataError(NOT_UTF8)
        return self.prefix + caption


def is_utf8(text: str) -> bool:
    """Return whether a string can be encoded as UTF-8; lone surrogates, which stand for invalid bytes, cannot."""
    if text.isascii():  # fast
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --------------------------------------------------------------------------------------------------------------
# Selecting the samples of a shard: required members, filters on the json, one or all captions.

_FORM = re.compile(r"\s*([\w.-]+)\s*(>=|<=|==|!=|=|>|<)\s*(.*?)\s*")
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
    "=": operator.eq, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_MEANT = {"=>": ">=", "=<": "<=", "=!": "!=", "<>": "!=", "===": "=", "!==": "!=", "<<": "<", ">>": ">"}
_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*")
_COLUMN = {"image": IMAGE, "caption": CAPTION, "label": LABEL}
_MAX_CAPTIONS = 2**16 - 1  # of one sample


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A condition on a field of a sample's json, such as ``width >= 256`` or ``language = en``.

    Numbers are compared as numbers, even if the json contains them as text; anything else as text. Two integers
    are compared exactly, other numbers as floats. A sample without the field does not pass.
    """

    name: str
    compare: str
    value: str

    @classmethod
    def of(cls, text: str) -> "Filter":
        """Parse ``FIELD OPERATOR VALUE``.

        Raises:
            ConfigError: the syntax is wrong, or an order comparison has a value that is not a number.
        """
        match = _FORM.fullmatch(text)
        if match is None or not match[3]:
            raise ConfigError(f"filter {text!r} is not of the form FIELD >= VALUE (or <=, >, <, =, !=)")
        name, compare, value = match.groups()
        if text[match.end(2)] in "<>=!":  # "width => 256" would compare with the text "> 256"
            typed = re.match(r"[<>=!]*", text[match.start(2) :])
            meant = _MEANT.get(typed[0]) if typed else None
            if typed is None or meant is None:
                raise ConfigError(f"filter {text!r} has no known operator: >=, <=, >, <, = or !=")
            right = f"{name} {meant} {value.lstrip('<>=! ') or 'VALUE'}"
            raise ConfigError(f"filter {text!r} has {typed[0]} instead of {meant}: write {right!r}")
        if compare in ("<", ">", "<=", ">=") and _number(value) is None:
            raise ConfigError(f"filter {text!r} compares with {value!r}, which is not a number")
        return cls(name=name, compare=compare, value=value.strip("\"'"))

    def __str__(self) -> str:
        return f"{self.name} {self.compare} {self.value}"

    def passes(self, meta: Meta) -> bool | None:
        """Return whether a sample passes, None if it has no such field."""
        value = value_at(meta, self.name)
        if value is None:
            return None
        wanted, found = _number(self.value), _number(value)
        if wanted is not None and found is not None:
            if not (isinstance(wanted, int) and isinstance(found, int)):
                with suppress(OverflowError):  # an integer too large for a float; Python compares it exactly
                    wanted, found = float(wanted), float(found)
            return _COMPARE[self.compare](found, wanted)
        if self.compare in ("<", ">", "<=", ">="):
            return None
        if isinstance(value, bool):  # lower case in JSON
            return _COMPARE[self.compare](str(value).lower(), self.value.lower())
        return _COMPARE[self.compare](str(value), self.value)


def _number(value: Any) -> int | float | None:
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen:
    """The samples of a shard that are used.

    Attributes:
        rows: (M,) uint32, rows of the shard's index.
        captions: (M,) uint16, index of each sample's caption; None unless each caption is a sample.
        dropped: number of unused samples by reason.
    """

    rows: npt.NDArray[np.uint32]
    captions: npt.NDArray[np.uint16] | None
    dropped: dict[str, int]

    def __len__(self) -> int:
        return len(self.rows)


def _draw(shard: str, key: str, occurrence: int) -> float:
    """Return a number from 0 to 1 for the n-th sample with a key in a shard."""
    sample = f"{shard}\0{key}\0{occurrence}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(sample, digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which samples are used.

    Attributes:
        need: members that a sample must have: any of "image", "caption" and "label".
        filters: conditions that must all hold.
        captions: where captions are, and whether each is a sample.
        truncated: "error", or "use" to use the samples of the intact part of truncated shards.
        scores: the scores that filters refer to as ``score.COLUMN``.
        fraction: of the samples with the members in ``need``, those used, by a hash of shard and key: keys may
            repeat between shards. The shard counts by its name without the folder, so data may be moved.
    """

    need: tuple[str, ...] = ("image", "caption")
    filters: tuple[Filter, ...] = ()
    captions: CaptionRule = field(default_factory=CaptionRule)
    truncated: str = "error"
    scores: "Scores | None" = None
    fraction: float = 1.0

    @property
    def reads_json(self) -> bool:
        """Whether the samples' json or scores decide which are used."""
        return bool(self.filters) or ("caption" in self.need and self.captions.choice == "all")

    @property
    def json_filters(self) -> tuple[Filter, ...]:
        """The filters on the json rather than on scores."""
        return tuple(one for one in self.filters if self.scores is None or not one.name.startswith("score."))

    @property
    def needs_content(self) -> bool:
        """Whether scores are not enough to decide which samples are used."""
        return bool(self.json_filters) or self.captions.choice == "all"

    @property
    def identity(self) -> str:
        """16 hexadecimal digits that change when the selection from a complete shard may change."""
        identity = [sorted(self.need), sorted(map(str, self.filters)), self.captions.which()]
        # Earlier versions compared these integers as floats; do not use the selections that they stored.
        large = [one for one in self.filters if isinstance(n := _number(one.value), int) and abs(n) >= 2**53]
        if large:
            identity.append(sorted(map(str, large)))
        if self.scores is not None:
            identity.append(self.scores.digest)
        if self.fraction < 1:
            identity.append([f"fraction {self.fraction} by shard and key"])  # earlier versions: by key
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

    def choose(
        self, index: ShardIndex, content: Callable[[int], tuple[str | None, Meta]], *, shard: str
    ) -> Chosen:
        """Choose the samples of one shard.

        Args:
            index: index of the shard.
            shard: its ``ShardFile.name``.
            content: returns the caption file and the json of a row; may raise DataError.
        """
        has = index.has()
        usable = np.ones(len(index), dtype=np.bool_)
        dropped: Counter[str] = Counter()
        for member in self.need:
            present = has[:, _COLUMN[member]]
            if member == "caption":  # the json may contain one
                in_file = {TEXT, CAPTIONS}.intersection(self.captions.fields)
                present = has[:, META] | present if in_file else has[:, META]
            dropped[f"without {member}"] += int((usable & ~present).sum())
            usable &= present
        rows = np.flatnonzero(usable).astype(np.uint32)
        if self.fraction < 1:
            drawn: list[bool] = []
            occurrences: Counter[str] = Counter()
            for row in rows.tolist():
                key = index.key(row)
                occurrences[key] += 1
                drawn.append(_draw(shard, key, occurrences[key]) < self.fraction)
            dropped[OUTSIDE] += drawn.count(False)
            rows = rows[np.array(drawn, dtype=np.bool_)]
        if not self.reads_json:
            return Chosen(rows=rows, captions=None, dropped=dict(+dropped))
        kept: list[int] = []
        captions: list[int] = []
        for row in rows.tolist():
            try:
                text, meta = content(row)
            except DataError:
                dropped["unreadable"] += 1
                continue
            if reason := self.refuses(meta):
                dropped[reason] += 1
                continue
            numbers: Sequence[int] = (0,)
            if self.captions.choice == "all":
                count = sum(map(len, self.captions.by_field(text, meta)))
                if not count:
                    dropped["without caption"] += 1
                numbers = range(min(count, _MAX_CAPTIONS))
            kept += [row] * len(numbers)
            captions += numbers
        separate = np.array(captions, dtype=np.uint16) if self.captions.choice == "all" else None
        return Chosen(rows=np.array(kept, dtype=np.uint32), captions=separate, dropped=dict(+dropped))

    def refuses(self, meta: Meta) -> str:
        """Return why a sample with this json fails the filters; empty if it passes."""
        for one in self.filters:
            if not (passes := one.passes(meta)):
                return f"without {one.name}" if passes is None else f"not {one}"
        return ""
