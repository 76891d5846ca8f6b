"""Tests of options that are declared as fields of dataclasses."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from clipkit.cli import (
    REQUIRED,
    Command,
    Parser,
    add_options,
    build_options,
    build_parser,
    group,
    integers,
    numbers,
    one_of,
    setting,
)
from clipkit.errors import ConfigError
from clipkit.options import COMMANDS as CLIPKIT
from data.options import COMMANDS as DATA
from eval.options import COMMANDS as EVAL


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Options of a group."""

    ratio: float = setting(0.5, "a ratio", numbers(0, 1))


@dataclass(frozen=True, kw_only=True)
class Every:
    """One option of each kind."""

    first: str = setting(REQUIRED, "a word", positional=True)
    rest: tuple[str, ...] = setting((), "more words", positional=True)
    count: int = setting(3, "a count", integers(-5, 1000))
    limit: float | None = setting(None, "a limit", numbers(0, 1e6))
    text: str = setting("", "a text, 100% of it")
    choice: str = setting("one", "a choice", one_of("one", "two"))
    path: Path | None = setting(None, "a file")
    fast: bool = setting(False, "a flag")
    slow: bool = setting(True, "a flag", flag="--no-slow")
    upright: bool | None = setting(None, "a flag with an opposite")
    repeated: tuple[Path, ...] = setting((), "files")
    listed: tuple[int, ...] = setting((1, 2), "numbers", integers(0, 99), listed=True)
    separated: tuple[int, ...] | None = setting(None, "numbers", integers(0, 99), separated=True)
    layers: bool | tuple[int, ...] = setting(False, "numbers or none", integers(0, 99), listed=True)
    shown: bool | str = setting(False, "a word or none")
    inner: Inner = group(Inner, "a group")
    internal: int = 7


def parse(arguments: Sequence[str]) -> Every:
    parser = Parser(prog="every")
    add_options(parser, Every)
    return build_options(Every, vars(parser.parse_args(arguments)))


WORDS = st.text("abcdefghij é0", min_size=1).filter(lambda text: text.strip() == text)
PATHS = WORDS.map(Path)
NUMBERS = st.integers(0, 99)
OPTIONS: dict[str, st.SearchStrategy[tuple[Any, list[str]]]] = {
    "count": st.integers(-5, 1000).map(lambda value: (value, ["--count", str(value)])),
    "limit": st.floats(0, 1e6).map(lambda value: (value, ["--limit", repr(value)])),
    "text": st.text("ab -é%").filter("--".__ne__).map(lambda value: (value, [f"--text={value}"])),
    "choice": st.sampled_from(["one", "two"]).map(lambda value: (value, ["--choice", value])),
    "path": PATHS.map(lambda value: (value, ["--path", str(value)])),
    "fast": st.just((True, ["--fast"])),
    "slow": st.just((False, ["--no-slow"])),
    "upright": st.sampled_from([(True, ["--upright"]), (False, ["--no-upright"])]),
    "repeated": st.lists(PATHS, min_size=1).map(
        lambda values: (tuple(values), [word for value in values for word in ("--repeated", str(value))])
    ),
    "listed": st.lists(NUMBERS, min_size=1).map(
        lambda values: (tuple(values), ["--listed", *map(str, values)])
    ),
    "separated": st.lists(NUMBERS, unique=True).map(
        lambda values: (tuple(values), [f"--separated={','.join(map(str, values))}"])
    ),
    "layers": st.lists(NUMBERS).map(lambda values: (tuple(values) or True, ["--layers", *map(str, values)])),
    "shown": st.sampled_from([(True, ["--shown"]), ("word", ["--shown", "word"])]),
    "inner": st.floats(0, 1).map(lambda value: (Inner(ratio=value), ["--ratio", repr(value)])),
}


@given(WORDS, st.lists(WORDS), st.fixed_dictionaries({}, optional=OPTIONS))
def test_options_are_parsed(first: str, rest: list[str], options: dict[str, tuple[Any, list[str]]]) -> None:
    arguments = [first, *rest]
    values: dict[str, Any] = {"first": first, "rest": tuple(rest)}
    for name, (value, words) in options.items():
        values[name] = value
        arguments += words
    assert parse(arguments) == Every(**values)


# others take the words that follow them
SINGLE = {name: words for name, words in OPTIONS.items() if name not in ("listed", "layers", "shown")}


@given(st.data(), WORDS, st.lists(WORDS), st.fixed_dictionaries({}, optional=SINGLE))
def test_arguments_may_stand_between_options(
    data: st.DataObject, first: str, rest: list[str], options: dict[str, tuple[Any, list[str]]]
) -> None:
    ordered = data.draw(st.permutations([words for _, words in options.values()] + [None] * len(rest)))
    remaining = iter(rest)
    arguments = [first]
    for words in ordered:
        arguments += [next(remaining)] if words is None else words
    assert parse(arguments) == parse([first, *rest, *(word for words in ordered if words for word in words)])


@dataclass(frozen=True, kw_only=True)
class Optional:
    """The last argument can be left out."""

    first: str = setting(REQUIRED, "a word", positional=True)
    last: str = setting("", "another", positional=True)
    fast: bool = setting(False, "a flag")


def test_last_argument_may_follow_options() -> None:
    parser = Parser(prog="optional")
    add_options(parser, Optional)
    parsed = build_options(Optional, vars(parser.parse_args(["a", "--fast", "b"])))
    assert parsed == Optional(first="a", last="b", fast=True)
    with pytest.raises(ConfigError, match="unrecognized arguments: b c"):
        parser.parse_args(["a", "--fast", "b", "c"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: FIRST"),
        (["a", "--path", "b", "--path", "c"], r"--path is given twice: b and c \(see every --help\)"),
        (["--ratio", "0", "a", "--ratio=1"], "--ratio is given twice: 0.0 and 1.0"),
        (["--shown", "--shown", "x", "--", "a"], "--shown is given twice: True and x"),
        (["a", "--count", "1001"], "--count: '1001' is not a whole number from -5 to 1,000"),
        (["a", "--choice", "three"], r"invalid choice: 'three' \(choose from 'one', 'two'\)"),
        (["a", "--separated", "1,,2"], "--separated: '' is not a whole number"),
        (["a", "--path="], "--path: the path is empty"),
        (["a", "--listed"], "--listed: expected at least one argument"),
        (["a", "--ratio", "2"], "--ratio: '2' is not a number from 0 to 1"),
        (["a", "--internal", "1"], "unrecognized arguments"),
    ],
)
def test_invalid_options_raise_config_error(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(arguments)


def test_help_describes_values_and_defaults() -> None:
    parser = Parser(prog="every")
    add_options(parser, Every)
    text = " ".join(parser.format_help().split())
    for words in (
        "FIRST a word",
        "--count N a count (default: 3)",
        "--limit LIMIT a limit --text",
        "a text, 100% of it --choice {one,two} a choice (default: one)",
        "--path FILE a file",
        "--upright, --no-upright a flag with an opposite --repeated FILE files; may be repeated",
        "numbers (default: 1 2)",
        "a group: --ratio RATIO a ratio (default: 0.5)",
    ):
        assert words in text
    assert "internal" not in text


def test_a_switch_and_its_opposite_exclude_each_other() -> None:
    parser = build_parser(DATA, prog="data")
    for words in (["--upright", "--no-upright"], ["--no-upright", "--upright"]):
        with pytest.raises(ConfigError, match="--upright and --no-upright exclude each other"):
            parser.parse_args(["inspect", "pairs", *words])
    for words, is_on in ((["--upright"] * 2, True), (["--no-upright"], False)):
        assert parser.parse_args(["inspect", "pairs", *words]).upright is is_on


def test_fixed_and_omitted_options_are_not_offered() -> None:
    command = Command(options=Every, run="math:sqrt", without=frozenset({"text"}), fixed={"count": 5})
    parser = build_parser({"every": command}, prog="program")
    for option in ("--text", "--count"):
        with pytest.raises(ConfigError, match=r"unrecognized arguments: .* \(see program every --help\)"):
            parser.parse_args(["every", "a", f"{option}=1"])
    assert "one option of each kind\n" in parser.format_help()


@pytest.mark.parametrize("commands", [CLIPKIT, DATA, EVAL], ids=["clipkit", "data", "eval"])
def test_commands_name_functions_and_fields_that_exist(commands: dict[str, Command]) -> None:
    for command in commands.values():
        module, _, function = command.run.partition(":")
        path = Path(*module.split("."))
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(
            encoding="utf-8"
        )
        assert f"def {function}(options: {command.options.__name__})" in source
        names = {field.name for field in fields(command.options)}
        assert command.without <= names and command.fixed.keys() <= names
