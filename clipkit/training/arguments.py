"""The command line of ``train.py``. Imports no torch, so --help and errors are printed at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clipkit.cli import Parser, add_options, build_options, group, number, setting, whole
from clipkit.config import settings_reference
from clipkit.errors import ConfigError

_DEFAULT_CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"
_MOST = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Target:
    """The machines that a dry run is for; by default this process's device and the processes of this job."""

    gpu: str | None = setting(None, "kind of GPU, such as H100 or A100-40GB", metavar="NAME")
    gpus: int = setting(0, "total number of GPUs", whole(1, _MOST), default_text="this machine's")
    gpus_per_host: int = setting(0, "for sharding=hybrid", whole(1, _MOST), default_text="8")
    mfu: float | None = setting(
        None,
        "fraction of the GPU's peak FLOP/s that the run reaches",
        number(0, 1, above=True),
        metavar="FRACTION",
        default_text="0.1, on a CPU 0.4",
    )


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The command line of ``train.py``; see its --help."""

    config: str = setting(
        str(_DEFAULT_CONFIG),
        "a complete configuration",
        metavar="CONFIG.toml",
        default_text="configs/quickstart.toml",
        positional=True,
    )
    overrides: tuple[str, ...] = setting(
        (),
        "settings that override the file's; --settings lists them all",
        metavar="key=value",
        positional=True,
    )
    settings: bool | str = setting(
        False,
        "print every setting, or those whose name starts with NAME (such as optim or optim.lr), with its default, "
        "meaning and valid values, and exit",
        metavar="NAME",
    )
    dry_run: bool = setting(False, "print the run's settings and estimated costs, and exit; data is not read")
    replay: bool = setting(
        False, "compute the next step without changing anything, and report values that are not finite"
    )
    profile: int = setting(0, "record N steps with torch's profiler", whole(0, _MOST))
    target: Target = group(Target, "with --dry-run", "default: this machine's processes and device")


def parse_arguments(arguments: Sequence[str] | None = None) -> Arguments:
    """Parse a command line, by default this process's; print --help or --settings and exit if asked."""
    parser = Parser(
        prog="train.py",
        description="Train a CLIP model. The same command again resumes a run that was stopped.",
        epilog="example: torchrun --nproc-per-node 8 train.py configs/vit_b_32.toml data.train=DIR",
    )
    add_options(parser, Arguments)
    parsed = build_options(Arguments, vars(parser.parse_intermixed_args(arguments)))
    target = parsed.target
    if not parsed.dry_run and (target.gpu or target.gpus or target.gpus_per_host):
        parser.error("--gpu, --gpus and --gpus-per-host require --dry-run")
    # the first word is a setting if there is no file
    words = list(parsed.overrides)
    if parsed.config != Arguments.config:
        words.insert(0, parsed.config)
    files = [word for word in words if "=" not in word and (word == words[0] or word.endswith(".toml"))]
    if len(files) > 1:
        raise ConfigError(
            f"{' and '.join(files)} are given: pass one config file, which is complete, and settings as key=value"
        )
    if parsed.settings:
        prefix = parsed.settings if isinstance(parsed.settings, str) else ""
        print(*settings_reference(prefix), sep="\n", flush=True)
        raise SystemExit(0)
    overrides = tuple(word for word in words if word not in files)
    return replace(parsed, config=files[0] if files else Arguments.config, overrides=overrides)
