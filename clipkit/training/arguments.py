"""The command line of ``train.py``. Imports no torch: --help, --settings and errors are answered at once."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from clipkit.cli import Parser, number, whole
from clipkit.config import settings_reference
from clipkit.errors import ConfigError

__all__ = ["Arguments", "parse_arguments"]

DEFAULT_CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"
_MOST = 1_000_000


class Arguments(argparse.Namespace):
    """What a command line of ``train.py`` says; see its --help."""

    config: Path
    overrides: list[str]
    dry_run: bool
    replay: bool
    profile: int  # steps
    gpu: str | None
    gpus: int  # 0: not given
    gpus_per_host: int  # 0: not given
    mfu: float | None


def parse_arguments(arguments: Sequence[str] | None = None) -> Arguments:
    """Parse a command line, by default this process's; print --help or --settings and exit where asked.

    Raises:
        ConfigError: an option is unknown, invalid or without effect, or two config files are given.
    """
    parser = Parser(
        prog="train.py",
        description="Train a CLIP model. The same command again resumes a run that was stopped.",
        epilog="example: torchrun --nproc-per-node 8 train.py configs/vit_b_32.toml data.train=DIR optim.lr=1e-3",
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="default: configs/quickstart.toml")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that override the file's; --settings lists them all",
    )
    parser.add_argument(
        "--settings",
        nargs="?",
        const="",
        metavar="NAME",
        help="print every setting, or those whose name starts with NAME (such as optim or optim.lr), with its "
        "default, meaning and valid values, and exit",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the run's settings and estimated costs, and exit; data is not read",
    )
    parser.add_argument(
        "--replay",
        action="store_true",
        help="compute the next step without changing anything, and report values that are not finite",
    )
    parser.add_argument(
        "--profile", type=whole(0, _MOST), default=0, metavar="N", help="record N steps with torch's profiler"
    )
    costs = parser.add_argument_group("with --dry-run", "default: this machine's processes and device")
    costs.add_argument("--gpu", metavar="NAME", help="kind of GPU, such as H100 or A100-40GB")
    costs.add_argument("--gpus", type=whole(1, _MOST), default=0, metavar="N", help="total number of GPUs")
    costs.add_argument(
        "--gpus-per-host",
        type=whole(1, _MOST),
        default=0,
        metavar="N",
        help="for sharding=hybrid; default: 8",
    )
    costs.add_argument(
        "--mfu",
        type=number(0, 1, above=True),
        metavar="FRACTION",
        help="fraction of the GPU's peak FLOP/s that the run reaches; default: 0.1, on a CPU 0.4",
    )
    options = parser.parse_intermixed_args(arguments, namespace=Arguments())
    if not options.dry_run and (options.gpu or options.gpus or options.gpus_per_host):
        parser.error("--gpu, --gpus and --gpus-per-host require --dry-run")
    first: str | None = vars(options)["config"]
    given = [one for one in (first, *options.overrides) if one is not None]
    files = [one for one in given if "=" not in one and (one == given[0] or one.endswith(".toml"))]
    if len(files) > 1:
        raise ConfigError(
            f"{' and '.join(files)} are given: pass one config file, which is complete, and settings as key=value"
        )
    if options.settings is not None:
        print(*settings_reference(options.settings), sep="\n", flush=True)
        raise SystemExit(0)
    options.overrides = [one for one in given if one not in files]
    options.config = Path(files[0]) if files else DEFAULT_CONFIG
    return options
