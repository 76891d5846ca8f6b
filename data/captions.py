"""Captions of training samples, the fields of their json, and filters: conditions on fields and scores."""

import hashlib
import json
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from clipkit.errors import ConfigError, DataError, nearest
from clipkit.files import printable
from clipkit.samples import decode_text, is_json, parse_fields, value_at

Fields = Mapping[str, Any]


# --------------------------------------------------------------------------------------------------------------
# Fields of the samples' json by name: ``a.b`` is field b of the object in field a.

_MAX_DEPTH = 4  # levels of nested objects
_MAX_FIELDS = 200  # per json
_SHOWN = 20  # names in a message
_MAX_NAME = 40  # characters of a name in a message


def field_name(text: str) -> str:
    """Return a field name for filters and ``data.captions``; characters except letters, digits and - become _."""
    return re.sub(r"[^\w-]", "_", text.strip())


def leaf_fields(fields: Fields) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the fields that a filter or ``data.captions`` can refer to, except null values.

    Nested objects are flattened; at most ``_MAX_FIELDS`` fields are returned.
    """
    left = _MAX_FIELDS
    waiting = [("", fields, 0)]
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


def find_value(fields: Fields, name: str) -> Any:
    """Return the text member or the json field with this name; None if there is none."""
    value = fields.get(name)
    return value_at(fields, name) if value is None else value


def json_members(fields: Iterable[str], names: Collection[str]) -> list[str]:
    """Return those of a sample's members that may contain these json fields, see ``parse_fields``."""
    members = []
    for field in fields:
        member = f"{field.partition('.')[0]}.json"
        members.append(member if member in names else "json")
    return [name for name in dict.fromkeys(members) if name in names]


def field_hint(name: str, field_names: Iterable[str]) -> str:
    """Return the field closest to an unknown name, and the names of all fields, for a one-line message."""
    names = {printable(field, _MAX_NAME) for field in field_names}
    if not names:
        return "the samples have no json fields"
    same = [field for field in sorted(names) if field.lower() == name.lower()]
    hint = f"did you mean {same[0]!r}?" if same else nearest(name, names)
    fields = f"available fields: {join_names(names)}"
    if hint.startswith("did you mean"):
        return f"{hint} {fields}"
    return fields


def join_names(names: Iterable[str]) -> str:
    """Join field names in one line; only the first ones if there are many."""
    listed_names = sorted({printable(name, _MAX_NAME) for name in names})
    more = ""
    if len(listed_names) > _SHOWN:
        more = f" and {len(listed_names) - _SHOWN:,} more"
    return ", ".join(listed_names[:_SHOWN]) + more


# --------------------------------------------------------------------------------------------------------------
# Filters

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


# --------------------------------------------------------------------------------------------------------------
# Captions

NOT_UTF8 = "caption is not UTF-8"
TEXT = "txt"  # the caption file or, without one, the json field "caption"
CAPTIONS = "captions"  # the json field with all captions of an image that has several
DRAW_CAPTIONS = "data.captions=captions data.caption_choice=random"


@dataclass(frozen=True, kw_only=True)
class CaptionRule:
    """How a sample's caption is chosen.

    Attributes:
        fields: where captions are: ``txt``, other text members such as ``sci.txt``, or json fields (``a.b`` is
            field b of the object in field a) that contain a string or a list of strings. A sample's member takes
            precedence over a field of the same name. ``captions`` alone also stands for ``txt`` in samples without
            this field: ``pack`` writes it only for images with several captions.
        choice: "first" takes the first caption of the first field that has one; "random" draws from all;
            "weighted" draws a field by ``weights``, then one of its captions; "all" treats each pair of image
            and caption as a sample.
        weights: weight of each field, for "weighted".
        templates: strings in which ``{}`` is replaced by the caption; one is drawn for each use.
        prefix: text before the caption.
        split: regular expression that separates several captions in one text; "" for none.
        count: number of captions of a sample that are used at once, for "first" and "random".
        negatives: a json field with wrong captions of the image, a string or a list of strings; "" for none.
    """

    fields: tuple[str, ...] = (TEXT,)
    choice: str = "first"
    weights: tuple[float, ...] = ()
    templates: tuple[str, ...] = ()
    prefix: str = ""
    split: str = ""
    count: int = 1
    negatives: str = ""

    def which(self) -> str:
        """Return a string that identifies the settings on which the number of captions per sample depends."""
        settings: dict[str, object] = {"fields": self.fields, "choice": self.choice}
        # earlier versions did not use samples without it
        if CAPTIONS in self.fields and TEXT not in self.fields:
            settings["captions"] = TEXT
        if self.split:
            settings["split"] = self.split
        return json.dumps(settings)

    @property
    def draws(self) -> bool:
        """Whether the caption is random."""
        return self.choice in ("random", "weighted") or len(self.templates) > 1

    def select_members(self, names: Collection[str]) -> list[str]:
        """Return those of a sample's members that may contain captions, or json fields with captions."""
        texts = []
        fields = []
        for field in self.fields:
            if field.lower() in names and not is_json(field.lower()):
                texts.append(field.lower())
            else:
                fields.append("caption" if field == TEXT else field)
        if CAPTIONS in self.fields and TEXT in names:
            texts.append(TEXT)
        return [*dict.fromkeys([*texts, *json_members(fields, names)])]

    def members_and_json(self, names: Collection[str]) -> list[str]:
        """Return ``select_members``, and all members with json."""
        return [*dict.fromkeys([*self.select_members(names), *filter(is_json, names)])]

    def parse(self, members: Mapping[str, bytes]) -> dict[str, Any]:
        """Return a sample's fields: those of its json, and text members under the names of the rule.

        Bytes that are not UTF-8 become lone surrogates, see ``is_utf8``.
        """
        texts = {}
        for member, data in members.items():
            name = self._texts.get(member)
            if name is not None:
                texts[name] = decode_text(data)
        if len(texts) == len(members):
            return texts
        return {**parse_fields(members), **texts}

    @cached_property
    def _texts(self) -> dict[str, str]:
        """Names of the rule by the text member that they may be."""
        return {name.lower(): name for name in (TEXT, *self.fields) if not is_json(name.lower())}

    def wrong_captions(self, fields: Fields) -> list[str]:
        """Return the wrong captions of an image, with the prefix, except empty ones and those not in UTF-8."""
        return [self.prefix + caption for caption in texts_at(fields, self.negatives)]

    def captions_by_field(self, fields: Fields) -> list[list[str]]:
        """Return the non-empty captions of each field."""
        text = fields.get(TEXT)
        if text is None and isinstance(fields.get("caption"), str):
            text = fields["caption"]
        captions = []
        for name in self.fields:
            value = find_value(fields, name)
            if value is None and (name == TEXT or (name == CAPTIONS and TEXT not in self.fields)):
                value = text
            values = value if isinstance(value, list) else [value]
            texts = [text for text in values if isinstance(text, str)]
            if self.split:
                texts = [part.strip() for text in texts for part in re.split(self.split, text)]
            captions.append([caption for caption in texts if caption.strip()])
        return captions

    def all_texts(self, fields: Fields) -> list[str]:
        """Return all texts that training may use as a caption of a sample or as a wrong one."""
        captions = [text for texts in self.captions_by_field(fields) for text in texts if is_utf8(text)]
        texts = [
            self.prefix + template.replace("{}", caption)
            for template in self.templates or ("{}",)
            for caption in captions
        ]
        return texts + (self.wrong_captions(fields) if self.negatives else [])

    def caption(self, fields: Fields, index: int, random: np.random.Generator | None) -> str | None:
        """Return the caption of a sample, None if it has none; only "all" uses ``index``."""
        captions_by_field = self.captions_by_field(fields)
        flat = []
        for captions in captions_by_field:
            flat += captions
        if self.choice == "random" and flat:
            assert random is not None
            index = int(random.integers(len(flat)))
        elif self.choice == "weighted" and flat:
            assert random is not None
            weights = np.array(self.weights) * list(map(bool, captions_by_field))
            flat = []
            if weights.any():
                flat = captions_by_field[int(random.choice(len(weights), p=weights / weights.sum()))]
                index = int(random.integers(len(flat)))
        elif self.choice == "first":
            index = 0
        if index >= len(flat):
            return None
        return self._apply_template(flat[index], random)

    def several(self, fields: Fields, random: np.random.Generator | None) -> list[str]:
        """Return ``count`` captions of a sample, repeated if it has fewer; none if it has none.

        Arguments are as for ``caption``.
        """
        flat = []
        for captions in self.captions_by_field(fields):
            flat += captions
        if self.choice == "random":
            assert random is not None
            flat = [flat[i] for i in random.permutation(len(flat))]
        if flat:
            return [self._apply_template(flat[i % len(flat)], random) for i in range(self.count)]
        return []

    def _apply_template(self, caption: str, random: np.random.Generator | None) -> str:
        if self.templates:
            drawn = 0
            if random and len(self.templates) > 1:
                drawn = int(random.integers(len(self.templates)))
            caption = self.templates[drawn].replace("{}", caption)
        if not is_utf8(caption):
            raise DataError(NOT_UTF8)
        return self.prefix + caption


_MAX_WEIGHT = 1e30  # of a pair; the sum over a batch is a float32


@dataclass(frozen=True, kw_only=True)
class PairFields:
    """Json fields of a sample that a training uses besides its captions; "" for none.

    Attributes:
        same: pairs with an equal value show the same thing.
        weight: weight of a pair in the loss.
        image: further texts of the image side.
        text: further texts of the text side.
    """

    same: str = ""
    weight: str = ""
    image: tuple[str, ...] = ()
    text: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The fields to read."""
        return [name for name in (self.same, self.weight, *self.image, *self.text) if name]

    @property
    def count_texts(self) -> int:
        """Number of further texts of both sides."""
        return len(self.image) + len(self.text)

    def group(self, fields: Fields) -> str:
        """Return the value of ``same`` as text; empty if the sample has none."""
        value = value_at(fields, self.same)
        if value in (None, [], {}) or value != value:  # NaN is an empty cell of a table
            return ""
        return (value if isinstance(value, str) else json.dumps(value, sort_keys=True)).strip()

    def further_texts(self, fields: Fields) -> list[str]:
        """Return the further texts of both sides, the first one of a list; DataError if the sample lacks one."""
        texts = []
        for name in (*self.image, *self.text):
            available = texts_at(fields, name)
            if not available:
                raise DataError(f"no text in {name}")
            texts.append(available[0])
        return texts

    def weigh(self, fields: Fields, rule: CaptionRule, index: int) -> float:
        """Return the weight of a sample; DataError if it has no valid one.

        A list is one weight for each caption, as tables have in which an image has several rows.

        Args:
            rule: how the caption is chosen.
            index: index of the caption, with the choice "all".
        """
        value = value_at(fields, self.weight)
        if isinstance(value, list):
            if rule.choice != "all":
                each = "data.captions=captions data.caption_choice=all"
                raise DataError(f"{self.weight} has {len(value)} values: set {each} if they are of captions")
            captions = sum(map(len, rule.captions_by_field(fields)))
            if len(value) != captions:
                raise DataError(f"{self.weight} has {len(value)} weights of {captions} captions")
            value = value[index]
        number = parse_number(value)
        if number is None or not 0 <= number <= _MAX_WEIGHT:
            raise DataError(f"{self.weight} = {printable(str(value), _MAX_NAME)} is no weight from 0")
        return float(number)


def drop_words(text: str, probability: float, random: np.random.Generator) -> str:
    """Leave out each word of a text with this probability, but not all; words are separated by white space."""
    words = text.split()
    mask = random.random(len(words)) >= probability  # of the words that stay
    if words and not mask.any():
        mask[random.integers(len(words))] = True
    return " ".join(word for word, stays in zip(words, mask, strict=True) if stays)


def hash_text(text: str) -> int:
    """Return 63 bits of a text, equal in every process."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def texts_at(fields: Fields, name: str) -> list[str]:
    """Return the texts of a field with a string or a list, except empty ones and those not in UTF-8."""
    value = value_at(fields, name)
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str) and text.strip() and is_utf8(text)]


def is_utf8(text: str) -> bool:
    """Return whether a string can be encoded as UTF-8; lone surrogates, which stand for invalid bytes, cannot."""
    if text.isascii():  # fast
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
