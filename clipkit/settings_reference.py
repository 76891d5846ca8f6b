"""Every setting with its default, what it does and which values fit, as ``train.py --settings`` prints it.

All of it is read from the dataclasses of clipkit/config.py; nothing here loads torch.
"""

import textwrap
import typing
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any

from clipkit.config import Config
from clipkit.config_file import literal, nearest_key
from clipkit.errors import ConfigError
from clipkit.setting import fits, text_of

__all__ = ["settings_reference"]

_WIDTH, _INDENT = 80, "    "


def settings_reference(prefix: str = "") -> list[str]:
    """Lines of at most 80 columns.

    Args:
        prefix: what the names begin with, such as "optim" or "optim.l"; or a name without its section, as "lr".

    Raises:
        ConfigError: no name does.
    """
    chosen: list[tuple[str, list[tuple[str, Field[Any]]]]] = []
    for heading, section in _sections():
        if kept := [one for one in section if _begins(one[0], prefix)]:
            chosen.append((heading, kept))
    if not chosen:
        raise ConfigError(f"--settings {prefix}: no setting begins so: {nearest_key(prefix)}")
    lines: list[str] = []
    for heading, section in chosen:
        lines += ["", *textwrap.wrap(heading, _WIDTH, break_long_words=False)] if heading else []
        for name, one in section:
            lines += ["", *_entry(name, one)]
    return lines[1:]


def _begins(name: str, prefix: str) -> bool:
    return name.startswith(prefix) or name.rpartition(".")[2] == prefix


def _sections() -> Iterator[tuple[str, list[tuple[str, Field[Any]]]]]:
    """The heading of each section and its settings, those of no section first."""
    hints = typing.get_type_hints(Config)
    yield "", [(one.name, one) for one in fields(Config) if not is_dataclass(hints[one.name])]
    for section in fields(Config):
        kind = hints[section.name]
        if is_dataclass(kind):
            assert kind.__doc__ is not None
            heading = f"[{section.name}] {' '.join(kind.__doc__.split())}"
            yield heading, [(f"{section.name}.{one.name}", one) for one in fields(kind)]


def _entry(name: str, one: Field[Any]) -> list[str]:
    within = fits(one)
    words = "true or false" if isinstance(one.default, bool) else "" if within is None else within.words
    text = text_of(one) + (f" ({words})" if words else "")
    wrapped = textwrap.wrap(
        text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False
    )
    return [f"{name} = {literal(one.default)}", *wrapped]
