"""The fields of samples' json by name: ``a.b`` is field b of the object in field a."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from clipkit.errors import nearest

__all__ = ["field_hint", "field_name", "json_value", "leaf_fields", "listed", "value_at"]

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
    plain = name if name.isprintable() else ascii(name)[1:-1]
    return plain if len(plain) <= _LONGEST else plain[:_LONGEST] + "…"
