"""Configurations as TOML: reading a file with ``dotted.key=value`` overrides, writing one, comparing two.

A value comes from the defaults, then from the file, then from the command line. Nothing here loads torch.
"""

import re
import sys
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from clipkit import urls
from clipkit.config import Config
from clipkit.errors import ConfigError, nearest
from clipkit.setting import require, shown

__all__ = ["changes", "literal", "load_config", "nearest_key", "to_toml"]

# what may differ when a run is resumed: it changes neither the data's order nor the maths, but for ``steps``, which
# a run is extended by, and whose schedule of the rate train.py then tells of
RESUMABLE = (
    "out",
    "steps",
    "accumulate",
    "sharding",
    "reshard",
    "recompute",
    "compile",
    "model.weights",  # may be moved or gone: a checkpoint holds all weights
    "data.train",  # data may be moved; the manifest tells whether they are the same
    "data.workers",
    "data.max_bad",
    "data.truncated",  # the manifest tells whether it makes a difference
    "data.cache_gb",
    "checkpoint",
    "eval",
    "log",
)
_SHORT_FRACTION = re.compile(
    r"[+-]?(\.[0-9]+|[0-9]+\.)([eE][+-]?[0-9]+)?"
)  # .5 and 5. are no numbers of TOML


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply ``dotted.key=value`` overrides.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown or given twice, or a value does not fit.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # with or without a BOM
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # tomllib's own errors, no UTF-8, numbers of 5,000 digits
        raise ConfigError(f"config {path} is not TOML: {error}") from error
    _refuse_given_twice(overrides)
    for override in overrides:
        _set(values, override)
    config = _build(Config, values, "")
    assert isinstance(config, Config)
    return config if config.out else replace(config, out=str(Path("runs") / path.stem))


def to_toml(config: Config, *, differing_from: Config | None = None) -> str:
    """The configuration as a TOML file that ``load_config`` reads back: the whole, or what differs from another."""
    lines: list[str] = []
    sections: list[str] = []
    for name, value in _items(config):
        other = getattr(differing_from, name) if differing_from is not None else None
        if is_dataclass(value):
            settings = [(k, v) for k, v in _items(value) if other is None or v != getattr(other, k)]
            if settings:
                sections.append("\n".join([f"\n[{name}]", *(f"{k} = {literal(v)}" for k, v in settings)]))
        elif differing_from is None or value != other:
            lines.append(f"{name} = {literal(value)}")
    return "\n".join([*lines, *sections]) + "\n"


def changes(before: Config, after: Config) -> list[str]:
    """The settings that differ and may not when a run is resumed, as ``key: before → after``."""
    old, new = _flat(before), _flat(after)
    return [
        f"{key}: {literal(old[key])} → {literal(new[key])}"
        for key in old
        if old[key] != new[key] and key not in RESUMABLE and key.split(".")[0] not in RESUMABLE
    ]


def _items(config: Any) -> list[tuple[str, Any]]:
    return [(one.name, getattr(config, one.name)) for one in fields(config)]


def _flat(config: Config) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in _items(config):
        if is_dataclass(value):
            flat.update({f"{name}.{key}": inner for key, inner in _items(value)})
        else:
            flat[name] = value
    return flat


def literal(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
        return f'"{escaped}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    return repr(value)


def _refuse_given_twice(overrides: Sequence[str]) -> None:
    given: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or key not in given:
            given[key] = text
        elif key == "data.train":
            raise ConfigError(
                "data.train is given twice: quote a brace pattern, which the shell takes apart otherwise, and "
                f"write several sources as {_list_form(key, ['a', 'b'])}"
            )
        else:
            takes_list = isinstance(_flat(Config()).get(key), tuple)
            instead = f"give one list, {_list_form(key, ['a', 'b'])}" if takes_list else "leave one out"
            first, second = (shown(urls.shown(one)) for one in (given[key], text))
            raise ConfigError(f"{key} is given twice: {first} and {second}; {instead}")


def _list_form(key: str, values: Sequence[Any]) -> str:
    """How a list is written on a command line."""
    return f"{key}='[{','.join(map(literal, values))}]'"


def _set(values: dict[str, Any], override: str) -> None:
    """Apply one ``dotted.key=value``; the value is TOML, or else a plain string."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is not of the form key=value, such as optim.lr=1e-3")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        parsed = {}
    # what has more lines, or is a date, was meant as text
    is_value = parsed.keys() == {"value"} and isinstance(
        parsed["value"], bool | int | float | str | list | dict
    )
    if not is_value and text.startswith("[") and text.endswith("]"):
        raise ConfigError(
            f"{override!r} is no list: write its strings in quotes, as in {_list_form(key, ['a', 'b'])}, and its "
            "numbers as 0.5"
        )
    value = parsed["value"] if is_value else text
    *sections, name = key.strip().split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{key} is unknown: {section} is no section")
    values[name] = value


def _build(kind: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(kind)
    for key, value in values.items():
        if key not in hints:
            unknown = prefix + key
            while isinstance(value, Mapping) and value:  # of an unknown section, the setting that was meant
                inner, value = next(iter(value.items()))
                unknown += f".{inner}"
            raise ConfigError(f"{unknown} is unknown: {nearest_key(unknown)}")
    given = {key: _fit(hints[key], value, prefix + key) for key, value in values.items()}
    return kind(**given)


# what other trainers call the same
_ALSO_CALLED = {
    "learning_rate": "optim.lr", "wd": "optim.weight_decay", "warmup_steps": "optim.warmup",
    "num_workers": "data.workers", "train_data": "data.train", "max_steps": "steps", "epochs": "steps",
    "local_batch_size": "batch_size", "accum_freq": "accumulate", "amp": "precision", "output": "out",
    "output_dir": "out", "pretrained": "model.weights", "dataset_resampled": "data.resample",
}  # fmt: skip


def nearest_key(key: str) -> str:
    """A hint for an unknown setting: the one that may be meant."""
    known = list(_flat(Config()))
    if also := _ALSO_CALLED.get(key.rsplit(".", 1)[-1]):
        return f"did you mean {also!r}?"
    last = {one.rsplit(".", 1)[-1]: one for one in reversed(known)}
    name = key.rsplit(".", 1)[-1]
    hint = f"did you mean {last[name]!r}?" if name in last else nearest(key, known)
    return hint if hint.startswith("did") else "`train.py --settings` lists and explains them all"


def _fit(hint: Any, value: Any, key: str) -> Any:
    """A TOML value as the field's type wants it."""
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{key} = {shown(value)} does not fit: it is a section, set {key}.<name> instead"
            )
        return _build(typing.cast(type[Any], hint), value, key + ".")
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in kinds and isinstance(value, str) and _SHORT_FRACTION.fullmatch(value):
        value = float(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not abs(value) <= sys.float_info.max:  # infinite, not a number, or a giant whole one
        raise ConfigError(f"{key} = {shown(value)} does not fit: a finite number")
    if float in kinds and is_number:
        return float(value)
    if int in kinds and is_number and value == int(value):  # 1e4 is a whole number too
        require(abs(value) < 2**63, key, value, "less than 2^63")
        return int(value)
    for kind in (bool, str):
        if kind in kinds and isinstance(value, kind):
            return _text(value, key) if isinstance(value, str) else value
    if any(typing.get_origin(kind) is tuple for kind in kinds):
        of = float if any(typing.get_args(kind)[:1] == (float,) for kind in kinds) else str
        many = value if isinstance(value, list | tuple) else [value]
        if isinstance(value, str) and (several := _several(value, of, key)):
            raise ConfigError(
                f"{key} = {shown(value)} does not fit: write several as {_list_form(key, several)}"
            )
        if all(isinstance(one, str) for one in many) and of is str:
            return tuple(_text(one, key) for one in many)
        if of is float and not any(isinstance(one, str | Mapping | list | tuple) for one in many):
            return tuple(_fit(float, one, key) for one in many)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    lists = {tuple[str, ...]: "a list of strings", tuple[float, ...]: "a list of numbers"}
    wanted = " or ".join((names | lists)[kind] for kind in kinds)
    raise ConfigError(f"{key} = {shown(value)} does not fit: {wanted}")


def _several(value: str, of: type, key: str) -> list[Any]:
    """What a text lists with commas between, where that cannot be one value; empty otherwise."""
    parts = [part.strip() for part in value.split(",")]
    if len(parts) < 2 or not all(parts):
        return []
    if of is str:  # elsewhere commas are part of templates, filters and paths
        return parts if key == "data.captions" else []
    try:
        return [float(part) for part in parts]
    except ValueError:
        return []


def _text(value: str, key: str) -> str:
    """A string that can be written to a file: an argument of other bytes than UTF-8 cannot."""
    require(not any("\ud800" <= c <= "\udfff" for c in value), key, value, "valid Unicode")
    return value
