"""Tests that all numeric command line options are validated: one-line error, exit status 1."""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from clipkit.__main__ import COMMANDS
from clipkit.cli import Parser, command_parser, number, whole
from clipkit.errors import ConfigError
from clipkit.files.patterns import user_path
from data.__main__ import make_parser as data_parser
from eval.__main__ import _parser as eval_parser

ABSURD = ("-1", "-9999999", "9" * 30, "nan", "inf", "1e400", "one", "", "0x10", "²")


def options_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """Yield the options of all subcommands, with the command's name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                assert isinstance(command, Parser)
                yield from ((command.prog, own) for own in command._actions)


@pytest.mark.parametrize(
    "parser",
    [command_parser(COMMANDS, prog="clipkit"), data_parser(), eval_parser()],
    ids=lambda one: one.prog,
)
def test_numeric_options_reject_invalid_values(parser: argparse.ArgumentParser) -> None:
    checked = 0
    for prog, action in options_of(parser):
        assert action.type not in (int, float), f"{prog} {action.option_strings} takes any number"
        if action.type is None or action.type is user_path:
            continue
        for text in ABSURD:
            with pytest.raises(argparse.ArgumentTypeError, match=r"is not a (whole )?number"):
                action.type(text)  # type: ignore[operator]
        default = action.default if isinstance(action.default, list | tuple) else [action.default]
        if isinstance(action.default, list) and action.nargs is None:  # one argument has all values
            default = []
            assert action.type(",".join(map(str, action.default))) == action.default  # type: ignore[operator]
        for one in default:
            assert one is None or one == 0 or action.type(str(one)) == one  # type: ignore[operator]
        checked += 1
    assert checked >= 5


@given(st.integers(), st.integers(-1000, 1000), st.integers(-1000, 1000))
def test_whole_accepts_only_integers_within_bounds(value: int, least: int, most: int) -> None:
    if least <= value <= most:
        assert whole(least, most)(str(value)) == value
    else:
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number from"):
            whole(least, most)(str(value))


@given(st.floats(), st.booleans())
def test_number_accepts_only_floats_within_bounds(value: float, above: bool) -> None:
    if 0 <= value <= 10 and not (above and value == 0):
        assert number(0, 10, above=above)(repr(value)) == value
    else:
        with pytest.raises(argparse.ArgumentTypeError, match="is not a number"):
            number(0, 10, above=above)(repr(value))


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
