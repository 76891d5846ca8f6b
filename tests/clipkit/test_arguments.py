"""Tests that all numeric command line options are validated: one-line error, exit status 1."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st

from clipkit.cli import Command, Parser, add_options, integers, numbers, parse_path
from clipkit.errors import ConfigError
from clipkit.options import COMMANDS as CLIPKIT
from data.options import COMMANDS as DATA
from eval.options import COMMANDS as EVAL

ABSURD = ("-1", "-9999999", "9" * 30, "nan", "inf", "1e400", "one", "", "0x10", "²")


def settings_of(options: type) -> dict[str, Field[Any]]:
    """Return the fields of options by name, with those of groups."""
    found: dict[str, Field[Any]] = {}
    for field in fields(options):
        if "title" in field.metadata:
            found |= settings_of(cast(type, field.default_factory))
        else:
            found[field.name] = field
    return found


@pytest.mark.parametrize("commands", [CLIPKIT, DATA, EVAL], ids=["clipkit", "data", "eval"])
def test_numeric_options_reject_invalid_values(commands: Mapping[str, Command]) -> None:
    checked = 0
    for name, command in commands.items():
        parser = Parser(prog=name)
        add_options(parser, command.options, without=command.without)
        options = settings_of(command.options)
        for action in parser._actions:
            assert action.type not in (int, float), f"{name} {action.option_strings} takes any number"
            if action.type is None or action.type is parse_path:
                continue
            parse = cast(Callable[[str], Any], action.type)
            default = options[action.dest].default
            if options[action.dest].metadata["separated"]:  # one argument has all values
                assert not default or parse(",".join(map(str, cast(Any, default)))) == default
                continue
            for text in ABSURD:
                with pytest.raises(argparse.ArgumentTypeError, match=r"is not a (whole )?number"):
                    parse(text)
            for value in default if isinstance(default, tuple) else [default]:
                assert not value or value is MISSING or parse(str(value)) == value
            checked += 1
    assert checked >= 5


@given(st.integers(), st.integers(-1000, 1000), st.integers(-1000, 1000))
def test_whole_accepts_only_integers_within_bounds(value: int, least: int, most: int) -> None:
    if least <= value <= most:
        assert integers(least, most).parse(str(value)) == value
    else:
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number from"):
            integers(least, most).parse(str(value))


@given(st.floats(), st.booleans())
def test_number_accepts_only_floats_within_bounds(value: float, above: bool) -> None:
    if 0 <= value <= 10 and not (above and value == 0):
        assert numbers(0, 10, above=above).parse(repr(value)) == value
    else:
        with pytest.raises(argparse.ArgumentTypeError, match="is not a number"):
            numbers(0, 10, above=above).parse(repr(value))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["-m", "eval", "zero-shot", "--model", "m", "--data", "d", "--seed", "-1"],
            "--seed: '-1' is not a whole",
        ),
        (
            ["-m", "data", "index", "somewhere", "--cache-gb", "-5"],
            "--cache-gb: '-5' is not a number from 0 to",
        ),
        (["-m", "data", "nonsense"], "invalid choice: 'nonsense'"),
        (
            ["-m", "clipkit", "encode", "x", "--model", "m", "--out", "o", "--workers", "999"],
            "--workers: '999'",
        ),
        (["-m", "clipkit", "encode", "x"], "the following arguments are required: --model, --out"),
        (["train.py", "--dry-run", "--gpus", "-4"], "--gpus: '-4' is not a whole number from 1 to"),
        (["-m", "clipkit", "index", "x", "--y"], "unrecognized arguments: --y (see clipkit index --help)"),
        (["-m", "clipkit", "interpolate"], "the following arguments are required: FIRST, SECOND, --out"),
        (["train.py", "--profile", "-1"], "--profile: '-1' is not a whole number from 0 to"),
    ],
)
def test_invalid_argument_prints_one_line_and_exits_1(command: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, *command], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: ") and message in done.stderr and "--help)" in done.stderr


def test_parser_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"unrecognized arguments: --x \(see prog --help\)"):
        Parser(prog="prog").parse_args(["--x"])
