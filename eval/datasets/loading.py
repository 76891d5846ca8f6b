"""Reads cards and suites from their TOML files, and checks them."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any

from clipkit.errors import DataError, nearest
from clipkit.files.terminal import printable
from eval.datasets.card import (
    DATASETS,
    FOLDER,
    Card,
    Expected,
    Fields,
    MetricKind,
    Prompts,
    Published,
    Sources,
    Suite,
    caption_prompts_of,
    counts_of,
    expected_of,
    metric_and_further,
    paper_of,
    parse_fields,
    prompts_of,
    published_of,
    read_fields,
    sources_of,
    superclasses_of,
    words_by_key,
)
from eval.metrics import METRICS
from eval.tasks import TASKS

__all__ = ["card_names", "card_toml", "load_card", "load_suite", "parse_card", "read_card", "suite_names"]

_SUITES = "suites"
_SIMPLE = ("a photo of a {c}.",)


def card_names() -> tuple[str, ...]:
    """The datasets that clipkit has a card of."""
    return tuple(sorted(path.stem for path in DATASETS.glob("*.toml") if path.stem != _SUITES))


@cache
def load_card(name: str) -> Card:
    """A dataset's card.

    Raises:
        DataError: there is none.
    """
    if name not in card_names():
        raise DataError(f"there is no card of a dataset {name!r}: {nearest(name, card_names())}")
    return read_card(DATASETS / f"{name}.toml")


def read_card(path: Path, *, name: str = "") -> Card:
    """The card in a file, a user's own for instance; it is named like the file unless ``name`` is given.

    Raises:
        DataError: the file cannot be read, or something in it is wrong.
    """
    return _card(read_fields(path), name or path.stem)


def parse_card(text: str, *, name: str, file: str) -> Card:
    """The card in a text; ``file`` is what messages call it."""
    return _card(parse_fields(text, file=file), name)


def _card(fields: Fields, name: str) -> Card:
    classes, keys = fields.whole("classes"), _keys(fields)
    if keys and classes not in (None, len(keys)):
        raise fields.wrong("classes", f"{len(keys)}, as many as there are keys")
    if len(set(keys)) < len(keys):
        doubled = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise fields.wrong("keys", f"a list in which no key stands twice, but {doubled!r} does")
    sets, sources = fields.table("prompts"), fields.table("sources")
    prompt_sets = prompts_of(sets, keys) if sets else {}
    if (classes or keys) and "simple" not in prompt_sets:
        names = next(iter(prompt_sets), None) if keys else FOLDER
        prompt_sets["simple"] = Prompts(
            name="simple", names=names or {}, templates=_SIMPLE, source="the plainest prompt there is"
        )
    metadata, multilabel = fields.texts("metadata", ()), fields.flag("multilabel")
    superclasses = superclasses_of(fields, keys)
    kind = MetricKind(
        multilabel=multilabel,
        classes=len(keys) or classes,
        columns=metadata,
        superclasses=bool(superclasses),
    )
    tasks = () if fields.raw("tasks") == [] else fields.some_of("tasks", TASKS)
    if not tasks and fields.raw("metric") is not None:  # of a card that is known and not scored
        raise fields.wrong("tasks", "a list of those that the metric is for")
    metric, further = metric_and_further(fields, kind, tasks) if tasks else ("", ())
    card = Card(
        name=name,
        title=fields.text("title", name),
        tasks=tasks,
        metric=metric,
        further=further,
        classes=len(keys) or classes,
        keys=keys,
        aliases=words_by_key(fields, "aliases", keys),
        label_is_line=fields.flag("label_is_line"),
        superclasses=superclasses,
        multilabel=multilabel,
        splits=counts_of(fields, "splits"),
        captions=counts_of(fields, "captions"),
        items=counts_of(fields, "items"),
        prompt_sets=prompt_sets,
        caption_prompts=caption_prompts_of(fields.table("caption_prompts")),
        sources=sources_of(sources) if sources else Sources(),
        metadata=metadata,
        stand_in=fields.text("stand_in", ""),
        get=fields.text("get", ""),
        home=fields.text("home", ""),
        license=fields.text("license", ""),
        citation=fields.text("citation", ""),
        note=fields.text("note", ""),
        paper=paper_of(fields.table("paper")),
        published=tuple(published_of(one, kind) for one in fields.tables("published")),
        expected=tuple(one for table in fields.tables("expected") for one in expected_of(table, kind)),
    )
    fields.end()
    _check(card, fields)
    return card


def _keys(fields: Fields) -> tuple[str, ...]:
    """A list, or the name of the card whose keys these are too."""
    if not isinstance(fields.raw("keys"), str):
        return fields.texts("keys", ())
    return load_card(fields.one_of("keys", [name for name in card_names() if name != "suites"])).keys


def _check(card: Card, fields: Fields) -> None:
    for name in card.prompt_sets:
        _check_references(card, fields, name)
    stated: tuple[Published | Expected, ...] = (*card.published, *card.expected)
    for one in stated:
        of_captions = one.task == "retrieval"
        known = card.caption_prompts if of_captions else card.prompt_sets
        if one.prompts and one.prompts not in known:
            raise DataError(
                f"{fields.file}: published and expected scores {'of retrieval ' if of_captions else ''}are of the "
                f"card's {'caption_prompts' if of_captions else 'prompts'}, not {one.prompts!r}: "
                f"{nearest(one.prompts, known) if known else 'it has none'}"
            )
    if len(set(card.aliases) | set(card.keys)) > len(card.keys):
        raise fields.wrong("aliases", "of classes that stand in keys")


def _check_references(card: Card, fields: Fields, name: str) -> None:
    """A prompt set that takes names or templates of another must end at some."""
    for what in ("names", "templates"):
        seen = [name]
        while (
            isinstance(given := getattr(card.prompt_sets[seen[-1]], what), str) and given in card.prompt_sets
        ):
            if given in seen:
                raise DataError(f"{fields.file}: prompts.{name}.{what} goes in a circle: {', '.join(seen)}")
            seen.append(given)


def suite_names() -> tuple[str, ...]:
    """The suites that clipkit knows."""
    return tuple(_suites())


def load_suite(name: str) -> Suite:
    """A suite of cards.

    Raises:
        DataError: there is none.
    """
    suites = _suites()
    if name not in suites:
        raise DataError(f"there is no suite {name!r}: {nearest(name, suites)}")
    return suites[name]


@cache
def _suites() -> dict[str, Suite]:
    fields = read_fields(DATASETS / f"{_SUITES}.toml")
    found = {}
    for name in fields.names():
        table = fields.table(name)
        assert table is not None
        found[name] = Suite(
            name=name,
            title=table.text("title"),
            cards=table.some_of("cards", card_names()),
            prompts=table.text("prompts", ""),
            metric=table.one_of("metric", METRICS, ""),
            note=table.text("note", ""),
            source=table.text("source", ""),
        )
        table.end()
    return found


# --------------------------------------------------------------------------------------------------------------
# Writes a card as TOML, for ``python -m eval new`` to start a user's own with.

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
    return wrap(
        printable(text),  # TOML allows no control characters in comments
        _WIDE,
        initial_indent="# ",
        subsequent_indent="#   ",
        break_on_hyphens=False,
    )


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
