"""The configuration of a run: frozen dataclasses, checked when they are made; nothing here loads torch.

A value comes from the defaults below, then from the TOML file, then from ``dotted.key=value`` on the command
line. It never changes after ``load_config``.
"""

import sys
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from clipkit.errors import ConfigError, nearest
from clipkit.family import check_names

__all__ = [
    "CheckpointConfig", "Config", "DataConfig", "EvalConfig", "LogConfig", "ModelConfig", "OptimConfig",
    "changes", "load_config", "to_toml",
]  # fmt: skip


_MOST = 2**40  # more than any count here can mean, and yet a number that an index can be computed with
_SHOWN = 200  # characters of a value in a message
_CAPTION_CHOICES = ("first", "random", "weighted", "all")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and where its weights come from at the start."""

    name: str = "ViT-B-32"  # one of clipkit's, or open_clip:NAME
    image: str = ""  # another image tower: timm:NAME
    text: str = ""  # another text tower: cbow, or transformers:FOLDER or NAME
    image_size: int = 0  # side of the pictures in pixels; 0: the one that belongs to the name
    context_length: int = 0  # longest caption in tokens; 0: the one that belongs to the name
    weights: str = ""  # train on from these: whatever clipkit.load takes

    def __post_init__(self) -> None:
        check_names(self.name, self.image, self.text)
        _require(self.image_size >= 0, "model.image_size", self.image_size, "at least 0")
        _require(self.context_length >= 0, "model.context_length", self.context_length, "at least 0")

    @property
    def label(self) -> str:
        """What the model is called."""
        return " + ".join(filter(None, (self.name, self.image, self.text)))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on, and how it is read."""

    train: str | tuple[str, ...] = (
        "glyphs"  # built-in corpus, folder, tar, brace pattern, URL; one or several
    )
    weights: tuple[float, ...] = ()  # of each source, its share of every batch; empty: all sources are one
    captions: tuple[str, ...] = ("txt",)  # where captions are: the caption file, or fields of the json
    caption_choice: str = "first"  # first, random, weighted, or all: each a sample of its own
    caption_weights: tuple[float, ...] = ()  # of each of ``captions``, for weighted
    caption_templates: tuple[str, ...] = ()  # what a caption is written into, such as "a photo of {}"
    caption_prefix: str = ""  # what is written before each caption
    filters: tuple[str, ...] = ()  # conditions on fields of the json that all must hold: "width >= 256"
    last: str = "drop"  # an epoch's last samples that fill no batch: drop, or wrap into the next epoch
    resample: bool = False  # draw with replacement, as some recipes do, instead of each sample once an epoch
    cache_gb: float = 100.0  # how much of remote shards each machine keeps; 0 reads samples over the network
    workers: int = 2  # loader processes of each rank; 0 reads in the training process
    window: int = 64  # how many shards are mixed at a time
    crop_scale: float = 0.9  # smallest share of the area that a random crop keeps; 1 cuts the centre
    flip: float = 0.0  # probability of the mirror image
    color_jitter: float = (
        0.0  # largest relative change of brightness, contrast and saturation; a quarter of it of hue
    )
    grayscale: float = 0.0  # probability that a picture loses its colours
    scaled_decode: bool = False  # decode large JPEGs at a part of their size; changes values by 0.3 of 255
    max_bad: float = 0.05  # share of samples that may be bad before the run stops; 0 stops at the first

    def __post_init__(self) -> None:
        _require(bool(self.train) and all(self.sources), "data.train", self.train, "name at least one source")
        self._check_captions()
        _require(self.last in ("drop", "wrap"), "data.last", self.last, "drop or wrap")
        _require(0 <= self.cache_gb <= _MOST, "data.cache_gb", self.cache_gb, f"0 to {_MOST}")
        _require(0 <= self.workers <= 512, "data.workers", self.workers, "0 to 512")
        _require(1 <= self.window <= _MOST, "data.window", self.window, f"1 to {_MOST}")
        _require(0 < self.crop_scale <= 1, "data.crop_scale", self.crop_scale, "above 0, at most 1")
        _require(0 <= self.flip <= 1, "data.flip", self.flip, "0 to 1")
        _require(0 <= self.color_jitter <= 2, "data.color_jitter", self.color_jitter, "0 to 2")
        _require(0 <= self.grayscale <= 1, "data.grayscale", self.grayscale, "0 to 1")
        _require(0 <= self.max_bad <= 1, "data.max_bad", self.max_bad, "0 to 1")

    def _check_captions(self) -> None:
        sources, places = len(self.sources), len(self.captions)
        for name, weights, of, count in (
            ("data.weights", self.weights, "data.train", sources),
            ("data.caption_weights", self.caption_weights, "data.captions", places),
        ):
            _require(len(weights) in (0, count), name, weights, f"one for each of {of}: {count}")
            _require(all(weight > 0 for weight in weights), name, weights, "each above 0")
        _require(bool(self.captions) and all(self.captions), "data.captions", self.captions, "name some")
        choice = self.caption_choice
        _require(choice in _CAPTION_CHOICES, "data.caption_choice", choice, ", ".join(_CAPTION_CHOICES))
        _require(
            (choice == "weighted") == bool(self.caption_weights),
            "data.caption_weights",
            self.caption_weights,
            "there if and only if data.caption_choice is weighted",
        )
        for template in self.caption_templates:
            _require("{}" in template, "data.caption_templates", template, "{} stands for the caption")

    @property
    def sources(self) -> tuple[str, ...]:
        """``train`` as a tuple, whichever way it was given."""
        return (self.train,) if isinstance(self.train, str) else self.train


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule: linear warm-up, half a cosine down to ``min_lr``."""

    lr: float = 5e-4
    min_lr: float = 0.0
    warmup: int = 2000  # steps
    weight_decay: float = 0.2
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-6
    clip_norm: float = 1.0  # of the whole gradient; 0 does not clip

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optim.lr", self.lr, "above 0")
        _require(0 <= self.min_lr <= self.lr, "optim.min_lr", self.min_lr, "0 to optim.lr")
        _require(self.warmup >= 0, "optim.warmup", self.warmup, "at least 0")
        _require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "at least 0")
        _require(0 <= self.beta1 < 1, "optim.beta1", self.beta1, "0 up to 1")
        _require(0 <= self.beta2 < 1, "optim.beta2", self.beta2, "0 up to 1")
        _require(self.eps > 0, "optim.eps", self.eps, "above 0")
        _require(self.clip_norm >= 0, "optim.clip_norm", self.clip_norm, "at least 0")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved; it is also saved at its end, and on Ctrl-C or SIGTERM."""

    every_steps: int = 1000  # 0: not by step
    every_minutes: float = 30.0  # 0: not by time
    keep: int = 3  # how many of the newest stay; 0 keeps all

    def __post_init__(self) -> None:
        _require(self.every_steps >= 0, "checkpoint.every_steps", self.every_steps, "at least 0")
        _require(self.every_minutes >= 0, "checkpoint.every_minutes", self.every_minutes, "at least 0")
        _require(self.keep >= 0, "checkpoint.keep", self.keep, "at least 0")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What the model is scored on while it trains and at the end."""

    data: tuple[str, ...] = ()  # built-in sets or dataset folders
    every_steps: int = 1000  # 0: only at the end
    batch_size: int = 256  # pictures encoded at a time on each rank

    def __post_init__(self) -> None:
        _require(self.every_steps >= 0, "eval.every_steps", self.every_steps, "at least 0")
        _require(1 <= self.batch_size <= _MOST, "eval.batch_size", self.batch_size, f"1 to {_MOST}")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where figures go besides the run folder's ``metrics.jsonl``."""

    every_steps: int = 10
    tensorboard: bool = True
    wandb: str = ""  # project name; WANDB_MODE=offline needs no account

    def __post_init__(self) -> None:
        _require(self.every_steps >= 1, "log.every_steps", self.every_steps, "at least 1")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    out: str = ""  # run folder; empty: runs/<name of the config file>
    seed: int = 0
    steps: int = 10_000
    batch_size: int = 256  # pairs of a step over all ranks
    accumulate: int = (
        1  # parts that a rank's share of the batch is computed in; the loss stays that of the whole
    )
    precision: str = "auto"  # fp32, bf16, or auto: bf16 where a GPU has it
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        _require("\0" not in self.out, "out", self.out, "a path holds no NUL")
        _require(0 <= self.seed < 2**63, "seed", self.seed, "0 to 2^63")
        _require(self.steps >= 1, "steps", self.steps, "at least 1")
        _require(
            self.batch_size >= 2,
            "batch_size",
            self.batch_size,
            "at least 2: a pair needs another to be told from",
        )
        _require(self.accumulate >= 1, "accumulate", self.accumulate, "at least 1")
        _require(self.precision in _PRECISIONS, "precision", self.precision, " or ".join(_PRECISIONS))
        _require(
            self.batch_size % self.accumulate == 0,
            "accumulate",
            self.accumulate,
            f"a divisor of batch_size = {self.batch_size}",
        )


_PRECISIONS = ("auto", "fp32", "bf16")
# what may differ when a run is resumed: it changes neither the data's order nor the maths
RESUMABLE = (
    "out",
    "accumulate",
    "data.train",  # data may be moved; the manifest tells whether they are the same
    "data.workers",
    "data.max_bad",
    "data.cache_gb",
    "checkpoint",
    "eval",
    "log",
)


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply ``dotted.key=value`` overrides.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown, or a value does not fit.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # tomllib's own errors, no UTF-8, numbers of 5,000 digits
        raise ConfigError(f"config {path} is not TOML: {error}") from error
    for override in overrides:
        _set(values, override)
    config = _build(Config, values, "")
    assert isinstance(config, Config)
    return config if config.out else replace(config, out=str(Path("runs") / path.stem))


def to_toml(config: Config) -> str:
    """The whole configuration as a TOML file that ``load_config`` reads back."""
    lines: list[str] = []
    sections: list[str] = []
    for name, value in _items(config):
        if is_dataclass(value):
            sections.append("\n".join([f"\n[{name}]", *(f"{k} = {_literal(v)}" for k, v in _items(value))]))
        else:
            lines.append(f"{name} = {_literal(value)}")
    return "\n".join([*lines, *sections]) + "\n"


def changes(before: Config, after: Config) -> list[str]:
    """The settings that differ and may not when a run is resumed, as ``key: before → after``."""
    old, new = _flat(before), _flat(after)
    return [
        f"{key}: {_literal(old[key])} → {_literal(new[key])}"
        for key in old
        if old[key] != new[key] and key not in RESUMABLE and key.split(".")[0] not in RESUMABLE
    ]


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{name} = {_shown(value)} does not fit: {wanted}")


def _shown(value: object) -> str:
    """A value in a message; Python writes no number of over 4,300 digits, which TOML may hold as 0xff…"""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


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


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
        return f'"{escaped}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)


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
        raise ConfigError(f'{override!r} is no list: write its strings in quotes, as in \'{key}=["a", "b"]\'')
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
            raise ConfigError(f"{unknown} is unknown: {_nearest_key(unknown)}")
    given = {key: _fit(hints[key], value, prefix + key) for key, value in values.items()}
    return kind(**given)


# what other trainers call the same
_ALSO_CALLED = {
    "learning_rate": "optim.lr", "wd": "optim.weight_decay", "warmup_steps": "optim.warmup",
    "num_workers": "data.workers", "train_data": "data.train", "max_steps": "steps", "epochs": "steps",
    "local_batch_size": "batch_size", "accum_freq": "accumulate", "amp": "precision", "output": "out",
    "output_dir": "out", "pretrained": "model.weights", "dataset_resampled": "data.resample",
}  # fmt: skip


def _nearest_key(key: str) -> str:
    known = list(_flat(Config()))
    if also := _ALSO_CALLED.get(key.rsplit(".", 1)[-1]):
        return f"did you mean {also!r}?"
    last = {one.rsplit(".", 1)[-1]: one for one in reversed(known)}
    name = key.rsplit(".", 1)[-1]
    return f"did you mean {last[name]!r}?" if name in last else nearest(key, known)


def _fit(hint: Any, value: Any, key: str) -> Any:
    """A TOML value as the field's type wants it."""
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{key} = {_shown(value)} does not fit: it is a section, set {key}.<name> instead"
            )
        return _build(typing.cast(type[Any], hint), value, key + ".")
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not abs(value) <= sys.float_info.max:  # infinite, not a number, or a giant whole one
        raise ConfigError(f"{key} = {_shown(value)} does not fit: a finite number")
    if float in kinds and is_number:
        return float(value)
    if int in kinds and is_number and value == int(value):  # 1e4 is a whole number too
        _require(abs(value) < 2**63, key, value, "less than 2^63")
        return int(value)
    for kind in (bool, str):
        if kind in kinds and isinstance(value, kind):
            return _text(value, key) if isinstance(value, str) else value
    if any(typing.get_origin(kind) is tuple for kind in kinds):
        of = float if any(typing.get_args(kind)[:1] == (float,) for kind in kinds) else str
        many = value if isinstance(value, list | tuple) else [value]
        if all(isinstance(one, str) for one in many) and of is str:
            return tuple(_text(one, key) for one in many)
        if of is float and not any(isinstance(one, str | Mapping | list | tuple) for one in many):
            return tuple(_fit(float, one, key) for one in many)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    lists = {tuple[str, ...]: "a list of strings", tuple[float, ...]: "a list of numbers"}
    wanted = " or ".join((names | lists)[kind] for kind in kinds)
    raise ConfigError(f"{key} = {_shown(value)} does not fit: {wanted}")


def _text(value: str, key: str) -> str:
    """A string that can be written to a file: an argument of other bytes than UTF-8 cannot."""
    _require(not any("\ud800" <= c <= "\udfff" for c in value), key, value, "valid Unicode")
    return value
