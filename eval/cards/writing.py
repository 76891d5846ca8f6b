"""Writes a card as TOML, for ``python -m eval new`` to start a user's own with."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from eval.cards.card import Card

__all__ = ["card_toml"]

_WIDE = 100  # characters of a line
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SCORES = ("published", "expected")
_OWN_TABLES = ("splits", "captions", "items", "caption_prompts", "aliases", "superclasses", "paper")


def card_toml(card: Card, *, comments: Mapping[str, str] | None = None) -> str:
    """The text of a card's file: ``parse_card`` makes an equal card of it. What is empty is left out.

    Args:
        card: what it says.
        comments: for a reader, by the key or table above which each stands; that of "" stands first.
    """
    lines: list[str] = []
    rest = {name: getattr(card, name) for name in card.__dataclass_fields__ if name != "name"}
    tables = {name: rest.pop(name) for name in (*_OWN_TABLES, "prompt_sets", "sources", *_SCORES)}
    keys = rest.pop("keys")  # they are long, so last of the fields
    for name, value in {**rest, "keys": keys}.items():
        if value not in (None, "", (), False) or name == "tasks":
            lines.append(f"{name} = {_value(value)}")
    if tables["paper"] is not None:
        tables["paper"] = _filled(asdict(tables["paper"]))
    for name in _OWN_TABLES:
        lines += _table(name, tables[name] or {})
    lines += _sources(asdict(tables["sources"]))
    for name, prompts in tables["prompt_sets"].items():
        names = prompts.names
        flat = {"source": prompts.source, "templates": prompts.templates}
        lines += _table(
            f"prompts.{_key(name)}", _filled({**flat, "names": names} if isinstance(names, str) else flat)
        )
        lines += _table(f"prompts.{_key(name)}.names", {} if isinstance(names, str) else names)
    for one in tables["published"]:
        lines += _table("[published]", _filled({k: v for k, v in asdict(one).items() if k != "values"}))
        lines += _table("published.values", one.values)
    for one in tables["expected"]:
        flat = _filled({k: v for k, v in asdict(one).items() if k not in ("model", "value")})
        lines += [*_table("[expected]", flat), *_table("expected.values", {one.model: one.value})]
    return "\n".join(_with_comments(lines, comments or {})) + "\n"


def _with_comments(lines: Iterable[str], comments: Mapping[str, str]) -> Iterator[str]:
    left = dict(comments)  # each once: a class may be called like a key
    yield from _comment(left.pop("", ""))
    for line in lines:
        key = line.partition(" = ")[0] if " = " in line else line.strip("[]")
        yield from _comment(left.pop(key, ""))
        yield line


def _comment(text: str) -> list[str]:
    text = "".join(
        one if one.isprintable() else "?" for one in text
    )  # TOML takes no control characters there
    return wrap(text, _WIDE, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)


def _sources(sources: Mapping[str, Any]) -> list[str]:
    lines = _table(
        "sources", {name: value for name, value in sources.items() if value and isinstance(value, str)}
    )
    hub, library = sources["huggingface"], sources["torchvision"]
    if library is not None:
        lines += _table("sources.torchvision", {"class": library["name"]})
        for name in ("arguments", "splits"):
            lines += _table(f"sources.torchvision.{name}", library[name])
    return lines + (_table("sources.huggingface", hub) if hub is not None else [])


def _filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value != ""}


def _table(name: str, fields: Mapping[str, Any]) -> list[str]:
    if not fields:
        return []
    return ["", f"[{name}]", *(f"{_key(key)} = {_value(value)}" for key, value in fields.items())]


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Sequence):
        return _list([_value(one) for one in value])
    return repr(value)


def _text(text: str) -> str:
    """A TOML string: JSON's escapes are TOML's too, but for DEL, which JSON leaves as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _list(values: Iterable[str]) -> str:
    """In one line, or in as few as they take."""
    values = list(values)
    if len(short := f"[{', '.join(values)}]") < _WIDE:
        return short
    lines = ["   "]
    for value in values:
        if len(lines[-1]) + len(value) > _WIDE and lines[-1].strip():
            lines.append("   ")
        lines[-1] += f" {value},"
    return "\n".join(["[", *lines, "]"])
