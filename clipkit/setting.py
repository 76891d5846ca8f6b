"""What a setting is: a field of a dataclass with its explanation and what fits it, checked when it is made.

The one place where a setting is explained is its ``setting(…)`` in clipkit/config.py and clipkit/data_config.py:
checks, messages and ``train.py --settings`` all read it there. Nothing here loads torch.
"""

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar, cast

from clipkit.errors import ConfigError

__all__ = [
    "MOST", "Within", "above", "at_least", "between", "check", "default_of", "fits", "one_of", "require",
    "require_use", "setting", "shown", "text_of",
]  # fmt: skip

MOST = 2**40  # more than any count here can mean, and yet a number that an index can be computed with
_SHOWN = 200  # characters of a value in a message
_TEXT, _WITHIN = "text", "within"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Within:
    """Which values fit a setting, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def at_least(least: float) -> Within:
    """A number of at least so much."""
    return Within(words=f"at least {least}", holds=lambda value: value >= least)


def above(bound: float, *, at_most: float | None = None) -> Within:
    """A number above a bound, and at most another."""
    words = f"above {bound}" + ("" if at_most is None else f", at most {at_most:,}")
    return Within(words=words, holds=lambda value: bound < value and (at_most is None or value <= at_most))


def between(least: float, most: float, *, below: bool = False) -> Within:
    """A number from one bound to another, or ``below`` the other."""
    shown_most = "2^40" if most == MOST else str(most)
    if below:
        return Within(
            words=f"at least {least} and below {shown_most}", holds=lambda value: least <= value < most
        )
    return Within(words=f"{least} to {shown_most}", holds=lambda value: least <= value <= most)


def one_of(*names: str) -> Within:
    """One of these names."""
    words = " or ".join([", ".join(names[:-1]), names[-1]])
    return Within(words=words, holds=lambda value: value in names)


def setting(default: T, text: str, within: Within | None = None) -> T:
    """A field of a configuration.

    Args:
        default: its value where none is given.
        text: what it does, for ``train.py --settings``; without the values that fit.
        within: which values fit, if not all of its type do.
    """
    return field(default=default, metadata={_TEXT: text, _WITHIN: within})


def text_of(one: Field[Any]) -> str:
    """The explanation of a field; "" where it has none."""
    return cast(str, one.metadata.get(_TEXT, ""))


def fits(one: Field[Any]) -> Within | None:
    """Which values fit a field; None where all of its type do."""
    return cast(Within | None, one.metadata.get(_WITHIN))


def check(config: Any, section: str = "") -> None:
    """See that each setting of a section's dataclass fits.

    Raises:
        ConfigError: one does not; it is named with its value and what is wanted.
    """
    for one in fields(config):
        within = fits(one)
        if within is not None:
            value = getattr(config, one.name)
            require(within.holds(value), f"{section}{one.name}", value, within.words)


def require(holds: bool, name: str, value: object, wanted: str) -> None:
    """ConfigError unless a setting's value is what is wanted."""
    if not holds:
        raise ConfigError(f"{name} = {shown(value)} does not fit: {wanted}")


def require_use(name: str, value: object, other: str, used: bool = False) -> None:
    """ConfigError where a setting would do nothing for want of another."""
    require(used, name, value, f"it does nothing without {other}; leave it out, or set that")


def default_of(kind: type[Any], name: str) -> object:
    """What a setting of a section's dataclass is where it is not given."""
    return next(one.default for one in fields(kind) if one.name == name)


def shown(value: object) -> str:
    """A value in a message; Python writes no number of over 4,300 digits, which TOML may hold as 0xff…"""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
