"""Command lines: programs with sub-commands, and shared options. Does not import torch."""

import argparse
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from clipkit.errors import ConfigError

__all__ = [
    "MODEL",
    "MOST_BATCH",
    "MOST_SEED",
    "MOST_WORKERS",
    "Command",
    "Parser",
    "add_decoding_options",
    "add_dim",
    "add_model_options",
    "add_name",
    "chosen_command",
    "command_parser",
    "number",
    "whole",
]

MODEL = "a run, a checkpoint, or anything else that clipkit.load takes"
MOST_BATCH = 65_536
MOST_SEED = 2**63 - 1
MOST_WORKERS = 512
_SHOWN = 40  # characters of a value in a message


@dataclass(frozen=True, kw_only=True)
class Command:
    """A sub-command.

    Attributes:
        summary: one line for the program's ``--help``.
        arguments: adds its options to a parser.
        run: takes the parsed options and returns the exit status; given as "module:name", it is imported when run.
        description: the first paragraph of its ``--help``; by default the summary.
        stopped: state of the output after Ctrl-C, for the message.
        extra: the optional dependencies that its module imports; "" for none.
    """

    summary: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: str | Callable[[argparse.Namespace], int]
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
        """Parse a command line that may contain no other words."""
        parsed, words = self.parse_known_args(args, namespace)
        if words:
            self.refuse(parsed, words)
        return parsed

    def refuse(self, parsed: argparse.Namespace, words: Sequence[str]) -> NoReturn:
        """Raise ConfigError for unrecognized words, naming the ``--help`` of the sub-command."""
        program = f"{self.prog} {parsed.command}" if hasattr(parsed, "command") else self.prog
        raise ConfigError(f"unrecognized arguments: {' '.join(words)} (see {program} --help)")


def command_parser(commands: Mapping[str, Command], **program: Any) -> Parser:
    """Build the parser of a program with sub-commands; ``program`` is passed to ``Parser``."""
    parser = Parser(formatter_class=argparse.RawDescriptionHelpFormatter, **program)
    added = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, command in commands.items():
        plain = not (command.description or command.epilog)
        one = added.add_parser(
            name,
            help=command.summary,
            description=command.description or f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog=command.epilog,
            usage=command.usage,
            formatter_class=argparse.HelpFormatter if plain else argparse.RawDescriptionHelpFormatter,
        )
        command.arguments(one)
    return parser


def chosen_command(commands: Mapping[str, Command], parsed: argparse.Namespace) -> Callable[[], int]:
    """Import the selected command; return a function that runs it and returns the exit status.

    Raises:
        ConfigError: it requires a package that is not installed.
    """
    command = commands[parsed.command]
    run = command.run
    if isinstance(run, str):
        module, _, name = run.partition(":")
        try:
            with _exiting_on_interrupt(command.stopped or "nothing was done"):
                run = getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            if not command.extra:
                raise
            install = f"pip install -e '.[{command.extra}]'"
            raise ConfigError(f"{parsed.command} requires {error.name}: {install}") from error
    function: Callable[[argparse.Namespace], int] = run

    def start() -> int:
        try:
            return function(parsed)
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


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return an argparse type for integers from ``least`` to ``most``."""

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
    """Return an argparse type for numbers from ``least`` (or, if ``above``, greater than it) to ``most``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least < value if above else least <= value) or not value <= most:
            bounds = f"above {least:,g} and at most" if above else f"from {least:,g} to"
            raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r} is not a number {bounds} {most:,g}")
        return value

    return parse


def add_dim(parser: argparse.ArgumentParser) -> None:
    """Add ``--dim``."""
    parser.add_argument(
        "--dim",
        type=whole(1, 1_000_000),
        default=0,
        metavar="N",
        help="use the first N elements of each embedding, for models trained with loss.dims (default: all)",
    )


def add_decoding_options(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Add ``--background``, ``--upright`` and ``--pixel-range``; ``default`` is for ``--help``."""
    parser.add_argument(
        "--background",
        metavar="COLOR",
        help=f"background color for transparent images, such as white; none drops alpha (default: {default})",
    )
    parser.add_argument(
        "--upright",
        action=argparse.BooleanOptionalAction,
        help=f"apply or ignore the EXIF orientation of images (default: {default})",
    )
    parser.add_argument(
        "--pixel-range",
        metavar="LOW,HIGH",
        help="values of 16-bit, 32-bit and float grayscale images that become black and white; dtype: the full "
        f"range of 16 bits; auto: an error (default: {default})",
    )


def add_name(parser: argparse.ArgumentParser) -> None:
    """Add ``--name``."""
    help_text = (
        "architecture, for weights stored without one; open_clip:NAME/TAG also selects a preprocessing"
    )
    parser.add_argument("--name", metavar="NAME", default="", help=help_text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--model`` and the options of its execution, which ``FeatureStream.from_options`` reads."""
    parser.add_argument("--model", metavar="M", required=True, help=MODEL)
    add_name(parser)
    parser.add_argument(
        "--batch-size", metavar="N", type=whole(1, MOST_BATCH), help="(default: 32 on a CPU, else 256)"
    )
    parser.add_argument(
        "--device", metavar="D", help="cpu, cuda, cuda:1, mps, xpu (default: auto, an accelerator if any)"
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="precision of the towers (default: fp32)",
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=whole(0, MOST_WORKERS),
        help="threads that read and decode (default: one per core)",
    )
    add_dim(parser)
    add_decoding_options(parser, default="as in the model's training")
