"""The command line of ``train.py``. Imports no torch, so --help and errors are printed at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clipkit.cli import Parser, number, whole
from clipkit.config import settings_reference
from clipkit.errors import ConfigError

__all__ = ["Arguments", "Target", "parse_arguments"]

DEFAULT_CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"
_MOST = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Target:
    """The machines that a dry run is for.

    Attributes:
        gpu: name of a GPU, whose data sheet is used; None: this process's device, which is measured.
        gpus: total number of GPUs; 0: one for each process of this job.
        gpus_per_host: with sharding=hybrid; 0: ``gpus``, at most 8, or as many as this host has processes.
        mfu: fraction of the peak FLOP/s that is reached; None: a cautious default.
    """

    gpu: str | None = None
    gpus: int = 0
    gpus_per_host: int = 0
    mfu: float | None = None


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The command line of ``train.py``; see its --help."""

    config: Path
    overrides: tuple[str, ...]
    dry_run: bool
    replay: bool
    profile: int  # steps
    target: Target


def parse_arguments(arguments: Sequence[str] | None = None) -> Arguments:
    """Parse a command line, by default this process's; print --help or --settings and exit if asked.

    Raises:
        ConfigError: an option is unknown, invalid or without effect, or two config files are given.
    """
    parser = Parser(
        prog="train.py",
        description="Train a CLIP model. The same command again resumes a run that was stopped.",
        epilog="example: torchrun --nproc-per-node 8 train.py configs/vit_b_32.toml data.train=DIR",
    )
    add = parser.add_argument
    add("config", nargs="?", metavar="CONFIG.toml", help="default: configs/quickstart.toml")
    settings = "settings that override the file's; --settings lists them all"
    add("overrides", nargs="*", metavar="key=value", help=settings)
    reference = (
        "print every setting, or those whose name starts with NAME (such as optim or optim.lr), with its default, "
        "meaning and valid values, and exit"
    )
    add("--settings", nargs="?", const="", metavar="NAME", help=reference)
    dry_run = "print the run's settings and estimated costs, and exit; data is not read"
    add("--dry-run", action="store_true", help=dry_run)
    replay = "compute the next step without changing anything, and report values that are not finite"
    add("--replay", action="store_true", help=replay)
    profile = "record N steps with torch's profiler"
    add("--profile", type=whole(0, _MOST), default=0, metavar="N", help=profile)
    add = parser.add_argument_group(
        "with --dry-run", "default: this machine's processes and device"
    ).add_argument
    add("--gpu", metavar="NAME", help="kind of GPU, such as H100 or A100-40GB")
    add("--gpus", type=whole(1, _MOST), default=0, metavar="N", help="total number of GPUs")
    per_host = "for sharding=hybrid; default: 8"
    add("--gpus-per-host", type=whole(1, _MOST), default=0, metavar="N", help=per_host)
    mfu = "fraction of the GPU's peak FLOP/s that the run reaches; default: 0.1, on a CPU 0.4"
    add("--mfu", type=number(0, 1, above=True), metavar="FRACTION", help=mfu)
    options = parser.parse_intermixed_args(arguments)
    if not options.dry_run and (options.gpu or options.gpus or options.gpus_per_host):
        parser.error("--gpu, --gpus and --gpus-per-host require --dry-run")
    given = [one for one in (options.config, *options.overrides) if one is not None]
    files = [one for one in given if "=" not in one and (one == given[0] or one.endswith(".toml"))]
    if len(files) > 1:
        raise ConfigError(
            f"{' and '.join(files)} are given: pass one config file, which is complete, and settings as key=value"
        )
    if options.settings is not None:
        print(*settings_reference(options.settings), sep="\n", flush=True)
        raise SystemExit(0)
    return Arguments(
        config=Path(files[0]) if files else DEFAULT_CONFIG,
        overrides=tuple(one for one in given if one not in files),
        dry_run=options.dry_run,
        replay=options.replay,
        profile=options.profile,
        target=Target(
            gpu=options.gpu, gpus=options.gpus, gpus_per_host=options.gpus_per_host, mfu=options.mfu
        ),
    )
