"""What all command lines share: mistakes in one line, and numbers that are checked where they are parsed."""

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from clipkit.errors import ConfigError

__all__ = ["MOST_BATCH", "MOST_SEED", "MOST_WORKERS", "Parser", "number", "whole"]

MOST_BATCH = 65_536
MOST_SEED = 2**63 - 1
MOST_WORKERS = 512
_SHOWN = 40  # characters of a value in a message


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line and exit status 1, like every other mistake of a user."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and leaving."""
        raise ConfigError(f"{message} (see {self.prog} --help)")


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of an option that takes a whole number from ``least`` to ``most``."""

    def parse(text: str) -> int:
        digits = text.removeprefix("-")
        value = int(text) if digits.isdecimal() and len(digits) < 20 else None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:_SHOWN]!r} is not a whole number from {least:,} to {most:,}"
            )
        return value

    return parse


def number(least: float, most: float, *, above: bool = False) -> Callable[[str], float]:
    """The type of an option that takes a number from ``least``, or only ``above`` it, to ``most``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least < value if above else least <= value) or not value <= most:
            bounds = f"above {least:,g} and up to" if above else f"from {least:,g} to"
            raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r} is not a number {bounds} {most:,g}")
        return value

    return parse
