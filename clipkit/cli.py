"""Settings declared as fields of dataclasses, command lines made of them, and programs with sub-commands.

The options of a command are a frozen dataclass whose fields are defined by ``setting``. ``add_options`` adds them
to a parser, and ``build_options`` creates an instance of the dataclass from the parsed values. This module does not
import torch.
"""

import argparse
import gc
import os
import signal
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from importlib import import_module
from inspect import get_annotations
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from clipkit.errors import ConfigError
from clipkit.files.writing import user_path

MODEL = "a run, a checkpoint, or anything else that clipkit.load takes"
MOST_BATCH = 65_536
MOST_SEED = 2**63 - 1
MOST_WORKERS = 512
REQUIRED: Any = MISSING
_SHOWN = 40  # characters of a value in a message

T = TypeVar("T")


# --------------------------------------------------------------------------------------------------------------
# Settings


@dataclass(frozen=True, kw_only=True)
class Within:
    """The valid values of a setting.

    Attributes:
        holds: whether a value is valid.
        names: all values, if they are a few strings.
        noun: a valid value as text, such as "a number from 0 to 1".
        convert: the type of values; raises ValueError for text that has none.
    """

    words: str
    holds: Callable[[Any], bool]
    names: tuple[str, ...] = ()
    noun: str = ""
    convert: Callable[[str], Any] = str

    def parse(self, text: str) -> Any:
        """Convert text of a command line; raises ArgumentTypeError if it is not valid."""
        with suppress(ValueError):
            value = self.convert(text)
            if self.holds(value):
                return value
        raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r} is not {self.noun}")


def integers(least: int, most: int) -> Within:
    """Whole numbers from ``least`` to ``most``."""
    return Within(
        words=f"{least} to {most}",
        holds=lambda value: least <= value <= most,
        noun=f"a whole number from {least:,} to {most:,}",
        convert=int,
    )


def numbers(least: float, most: float, *, above: bool = False) -> Within:
    """Numbers from ``least`` (or, if ``above``, greater than it) to ``most``."""
    if above:
        return Within(
            words=f"above {least:g} and at most {most:g}",
            holds=lambda value: least < value <= most,
            noun=f"a number above {least:,g} and at most {most:,g}",
            convert=float,
        )
    return Within(
        words=f"{least:g} to {most:g}",
        holds=lambda value: least <= value <= most,
        noun=f"a number from {least:,g} to {most:,g}",
        convert=float,
    )


def one_of(*names: str) -> Within:
    """A few strings."""
    *others, last = (name or '""' for name in names)
    return Within(words=f"{', '.join(others)} or {last}", holds=lambda value: value in names, names=names)


def setting(
    default: T,
    text: str,
    within: Within | None = None,
    *,
    registry: str = "",
    needs: str = "",
    flag: str = "",
    metavar: str = "",
    default_text: str = "",
    positional: bool = False,
    listed: bool = False,
    separated: bool = False,
    convert: Callable[[Any], Any] | None = None,
) -> T:
    """Define a field of a configuration, or of the options of a command.

    The type of the field decides how a command line states it: ``bool`` is a flag, ``bool | None`` a flag with its
    opposite, ``Path`` expands ``~``, and ``tuple`` has several values: an option that may be repeated, unless
    ``listed`` or ``separated``. Of ``bool | str`` or ``bool | tuple`` the value may be left out, which is True.

    Args:
        default: default value; ``REQUIRED`` for none.
        text: description, without the valid values and the default.
        within: the valid values; None for all values of the type.
        registry: "module:NAME" of a dict whose keys are the valid values; the entries' summaries are appended to
            the text.
        needs: a setting of the same section without which this one has no effect, such as "weight" or
            "sharding=full"; several alternatives are separated by " or ". If all of them are unset, another value
            than the default is an error. Only for configurations.
        flag: the option, if it is not the field's name with dashes.
        metavar: name of the value in ``--help``.
        default_text: describes the default in ``--help``, if its value does not.
        positional: an argument instead of an option; several ones if the type is a tuple.
        listed: the option is followed by all its values.
        separated: the values are one word, separated by commas.
        convert: converts the parsed value.
    """
    return field(
        default=default,
        metadata={
            "text": text,
            "within": within,
            "registry": registry,
            "needs": needs,
            "flag": flag,
            "metavar": metavar,
            "default_text": default_text,
            "positional": positional,
            "listed": listed,
            "separated": separated,
            "convert": convert,
        },
    )


def group(options: type[T], title: str, text: str = "") -> T:
    """Define a field that holds other options, which are a group with a title in ``--help``."""
    return field(default_factory=options, metadata={"title": title, "text": text})


def add_options(parser: argparse._ActionsContainer, options: type, *, without: Collection[str] = ()) -> None:
    """Add the fields of a dataclass to a parser, except those named in ``without`` and those without a text.

    Required options come first, then the others of the class itself before those of its base classes.
    """
    types_by_name = typing.get_type_hints(options)
    depths: dict[str, int] = {}
    for i, base in enumerate(options.__mro__):
        for name in get_annotations(base):
            depths.setdefault(name, i)

    def order(declared: Field[Any]) -> tuple[bool, int]:
        return (False, 0) if _is_required(declared) else (True, depths[declared.name])

    for declared in sorted(fields(options), key=order):
        if declared.name in without or "text" not in declared.metadata:
            continue
        hint = types_by_name[declared.name]
        if is_dataclass(hint):
            titled = parser.add_argument_group(declared.metadata["title"], declared.metadata["text"] or None)
            add_options(titled, typing.cast(type, hint))
        else:
            _add_option(parser, declared, hint)


def _is_required(declared: Field[Any]) -> bool:
    return declared.default is MISSING and declared.default_factory is MISSING


def _add_option(parser: argparse._ActionsContainer, declared: Field[Any], hint: Any) -> None:
    option = declared.metadata
    kinds = list(typing.get_args(hint)) if isinstance(hint, types.UnionType) else [hint]
    if types.NoneType in kinds:
        kinds.remove(types.NoneType)
    kind = kinds[-1]
    takes_no_value = len(kinds) > 1
    several = typing.get_origin(kind) is tuple
    if several:
        kind = typing.get_args(kind)[0]
    is_required = _is_required(declared)
    is_repeated = several and not (option["listed"] or option["separated"] or option["positional"])
    # values that are not given are left to the dataclass
    keywords: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help_text(declared, is_repeated)}
    if kind is bool and declared.default is None:
        keywords["action"] = _SwitchOnce
    elif kind is bool:
        keywords["action"] = "store_false" if declared.default else "store_true"
    else:
        _add_values(keywords, declared, kind, several)
        if is_repeated:
            keywords["action"] = "append"
        elif several and option["listed"]:
            keywords |= {"nargs": "*" if takes_no_value else "+", "action": "extend"}
        elif several and option["separated"]:
            keywords["action"] = "extend"
        elif several:
            keywords["nargs"] = "+" if is_required else "*"
        elif option["positional"] and not is_required:
            assert "type" not in keywords, "argparse would convert the missing value"
            keywords["nargs"] = "?"
        elif takes_no_value:
            keywords |= {"nargs": "?", "const": True}
    if option["positional"]:
        parser.set_defaults(last_argument=parser.add_argument(declared.name, **keywords))
    else:
        flag = option["flag"] or f"--{declared.name.replace('_', '-')}"
        keywords.setdefault("action", _StoreOnce)
        parser.add_argument(flag, dest=declared.name, required=is_required, **keywords)


class _StoreOnce(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None
    ) -> None:
        if hasattr(namespace, self.dest):
            parser.error(f"{flag} is given twice: {getattr(namespace, self.dest)} and {values}")
        setattr(namespace, self.dest, values)


class _SwitchOnce(argparse.BooleanOptionalAction):
    """Store whether ``--NAME`` or ``--no-NAME`` was given. Raises an error if both are given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None
    ) -> None:
        is_on = not flag.startswith("--no-")
        if getattr(namespace, self.dest, is_on) != is_on:
            parser.error(f"{' and '.join(self.option_strings)} exclude each other")
        setattr(namespace, self.dest, is_on)


def _add_values(keywords: dict[str, Any], declared: Field[Any], kind: type, several: bool) -> None:
    option = declared.metadata
    within = option["within"]
    assert within is not None or kind not in (int, float), f"{declared.name} takes any number"
    metavar = option["metavar"]
    if within is not None and within.names:
        keywords["choices"] = within.names
    elif kind is Path:
        keywords["type"] = parse_path
    elif within is not None:
        keywords["type"] = within.parse
    if several and option["separated"]:
        keywords["type"] = _make_list_parser(keywords.get("type", str), can_be_empty=declared.default is None)
    if metavar or "choices" not in keywords:
        keywords["metavar"] = metavar or _default_metavar(declared, kind, several)


def _default_metavar(declared: Field[Any], kind: type, several: bool) -> str:
    """Name a value by the last word of its option, except for numbers and files."""
    if kind is int:
        return "N"
    if kind is Path and not declared.metadata["positional"]:
        return "FILE"
    word = declared.name.rpartition("_")[2].upper()
    return word.removesuffix("S") if several else word


def parse_path(text: str) -> Path:
    if not text:  # would be the current folder
        raise argparse.ArgumentTypeError("the path is empty; the current folder is .")
    return user_path(text)


def _make_list_parser(parse: Callable[[str], Any], *, can_be_empty: bool) -> Callable[[str], tuple[Any, ...]]:
    def parse_all(text: str) -> tuple[Any, ...]:
        if can_be_empty and not text.strip():
            return ()
        words = list(dict.fromkeys(word.strip() for word in text.split(",")))
        if parse is str and "" in words:
            raise argparse.ArgumentTypeError("expected names separated by commas")
        return tuple(parse(word) for word in words)

    return parse_all


def _help_text(declared: Field[Any], is_repeated: bool) -> str:
    text = declared.metadata["text"]
    if is_repeated:
        text += "; may be repeated"
    default = declared.metadata["default_text"] or _default_words(declared.default)
    if default:
        text += f" (default: {default})"
    return str(text).replace("%", "%%")


def _default_words(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(map(_default_words, default))
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, int | str) and not isinstance(default, bool):
        return str(default)
    return ""


def build_options(options: type[T], values: Mapping[str, Any]) -> T:
    """Create the options of a command from the values that were given."""
    types_by_name = typing.get_type_hints(options)
    arguments: dict[str, Any] = {}
    for declared in fields(typing.cast(Any, options)):
        hint = types_by_name[declared.name]
        if is_dataclass(hint):
            arguments[declared.name] = build_options(typing.cast(type, hint), values)
        elif declared.name in values:
            value = values[declared.name]
            if value == [] and not declared.metadata["separated"]:
                value = True  # an option without values, of the type bool | tuple
            elif isinstance(value, list):
                value = tuple(value)
            convert = declared.metadata["convert"]
            arguments[declared.name] = value if convert is None else convert(value)
    return options(**arguments)


def import_attribute(path: str) -> Any:
    """Import "module:name".

    Registries are looked up each time a setting is checked: their modules are in higher layers than this one, and
    entries may be added at run time.
    """
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


# --------------------------------------------------------------------------------------------------------------
# Commands


@dataclass(frozen=True, kw_only=True)
class Command:
    """A sub-command.

    Attributes:
        options: the dataclass of its options, whose docstring is the summary.
        run: "module:name" of the function that takes an instance of ``options`` and returns the exit status; it is
            imported when the command is run.
        without: fields of ``options`` that keep their defaults.
        fixed: fields of ``options`` that have these values.
        summary: one sentence for ``--help``, if it is not the docstring.
        description: further paragraphs before the options.
        stopped: state of the output after Ctrl-C, for the message.
        extra: the optional dependencies that its module imports; "" for none.
    """

    options: type
    run: str
    without: frozenset[str] = frozenset()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    summary: str = ""
    description: str = ""
    epilog: str | None = None
    usage: str | None = None
    stopped: str = ""
    extra: str = ""


class Parser(argparse.ArgumentParser):
    """Argument parser that reports errors as other user errors: one line, exit status 1."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and exiting."""
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse a command line; the values of the last argument may stand between options."""
        parsed, words = self.parse_known_args(args, namespace)
        if not words:
            return parsed
        last: argparse.Action | None = getattr(parsed, "last_argument", None)
        if last is not None and not any(word.startswith("-") and word != "-" for word in words):
            if last.nargs in ("+", "*"):
                convert = last.type if callable(last.type) else str
                try:
                    values = [convert(word) for word in words]
                except argparse.ArgumentTypeError as error:
                    self.error(f"argument {last.dest}: {error}")
                setattr(parsed, last.dest, [*getattr(parsed, last.dest, []), *values])
                return parsed
            if last.nargs == "?" and len(words) == 1 and not hasattr(parsed, last.dest):
                setattr(parsed, last.dest, words[0])
                return parsed
        program = f"{self.prog} {parsed.command}" if hasattr(parsed, "command") else self.prog
        raise ConfigError(f"unrecognized arguments: {' '.join(words)} (see {program} --help)")


def build_parser(commands: Mapping[str, Command], **program: Any) -> Parser:
    """Build the parser of a program with sub-commands; ``program`` is passed to ``Parser``."""
    parser = Parser(formatter_class=argparse.RawDescriptionHelpFormatter, **program)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, command in commands.items():
        plain = not (command.description or command.epilog)
        summary = (command.summary or command.options.__doc__ or "").removesuffix(".")
        subparser = subparsers.add_parser(
            name,
            help=f"{summary[0].lower()}{summary[1:]}",
            description=f"{summary[0].upper()}{summary[1:]}.\n\n{command.description}".strip(),
            epilog=command.epilog,
            usage=command.usage,
            formatter_class=argparse.HelpFormatter if plain else argparse.RawDescriptionHelpFormatter,
        )
        add_options(subparser, command.options, without=command.without | command.fixed.keys())
    return parser


# On Linux: huge pages for large tensors, with which encoding images is 3 to 13% faster, and a tenth of the usual
# time in which torch's threads wait busily for work, because onnxruntime needs the cores. Read by torch's import.
ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1", "GOMP_SPINCOUNT": "30000"}


def select_command(commands: Mapping[str, Command], parsed: argparse.Namespace) -> Callable[[], int]:
    """Import the selected command; return a function that runs it and returns the exit status."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    command = commands[parsed.command]
    options: Any = build_options(command.options, {**vars(parsed), **command.fixed})
    imports_torch = "torch" not in sys.modules  # not for a second command of a process
    if imports_torch:
        gc.disable()  # collections would take a tenth of the time of imports
    try:
        with _exiting_on_interrupt(command.stopped or "nothing was done"):
            run: Callable[[Any], int] = import_attribute(command.run)
    except ModuleNotFoundError as error:
        if not command.extra:
            raise
        install = f"pip install -e '.[{command.extra}]'"
        raise ConfigError(f"{parsed.command} requires {error.name}: {install}") from error
    finally:
        if imports_torch:
            gc.freeze()  # otherwise the next collection would examine all objects of these modules
            gc.enable()

    def start() -> int:
        try:
            return run(options)
        except KeyboardInterrupt:
            if command.stopped:
                raise KeyboardInterrupt(command.stopped) from None
            raise

    return start


@contextmanager
def _exiting_on_interrupt(stopped: str) -> Iterator[None]:
    """Exit immediately on Ctrl-C while torch is imported: an interrupted import can raise any exception."""

    def leave(*_: object) -> None:
        os.write(2, f"stopped; {stopped}\n".encode())
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or another program's
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --------------------------------------------------------------------------------------------------------------
# Options that several commands share


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Which image of a sample is read."""

    image: str = setting(
        "",
        "member of samples with the image, as data.image",
        metavar="MEMBER",
        default_text="the first image",
        convert=str.lower,
    )


@dataclass(frozen=True, kw_only=True)
class CaptionOptions:
    """Which captions of a sample are read."""

    captions: tuple[str, ...] = setting(
        ("txt",),
        "sources of captions as in data.captions: txt, other members or json fields, separated by commas",
        metavar="NAMES",
        separated=True,
    )


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """How images become pixels."""

    background: str | None = setting(
        None,
        "background color for transparent images, such as white; none drops alpha",
        metavar="COLOR",
        default_text="as in training",
    )
    upright: bool | None = setting(
        None, "apply or ignore the EXIF orientation of images", default_text="as in training"
    )
    pixel_range: str | None = setting(
        None,
        "values of 16-bit, 32-bit and float grayscale images that become black and white; dtype: the full range of "
        "16 bits; auto: an error",
        metavar="LOW,HIGH",
        default_text="as in training",
    )


@dataclass(frozen=True, kw_only=True)
class NameOptions:
    """What weights stored without their architecture need."""

    name: str = setting(
        "",
        "architecture, for weights stored without one; open_clip:NAME/TAG also selects a preprocessing, and "
        "NAME-quickgelu QuickGELU",
    )


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Where a model runs."""

    device: str = setting("auto", "cpu, cuda, cuda:1, mps, xpu", default_text="auto, an accelerator if any")


@dataclass(frozen=True, kw_only=True)
class LoadOptions(DecodingOptions, DeviceOptions, NameOptions):
    """A model, and what replaces its settings."""

    model: str = setting(REQUIRED, MODEL)
    dim: int = setting(
        0,
        "use the first N elements of each embedding, for models trained with loss.dims",
        integers(1, 1_000_000),
        default_text="all",
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadOptions):
    """A model, and how it encodes."""

    batch_size: int | None = setting(
        None, "images or texts per batch", integers(1, MOST_BATCH), default_text="32 on a CPU, else 256"
    )
    precision: str = setting(
        "fp32",
        "precision of the towers; bf16 is much faster on CPUs with AMX, and on those of AMD with AVX-512",
        one_of("fp32", "bf16", "fp16"),
    )
    workers: int | None = setting(
        None, "threads that read and decode", integers(0, MOST_WORKERS), default_text="one per core"
    )
