"""``python -m eval``: score a model on datasets, or build the page of a run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import clipkit
from clipkit.checkpoint import resolve_checkpoint
from clipkit.errors import ConfigError, run_command
from clipkit.open_clip_run import newest_epoch
from eval import Score, append_results, check_tasks, evaluate, open_datasets, provenance, weights_id
from eval.results import check_appendable

_EPILOG = """examples:
  python -m eval zero-shot --model runs/quickstart --data digits --data glyphs
  python -m eval retrieval --model runs/icons --data icons --data my_folder
  python -m eval report runs/quickstart
"""

_MAX_BATCH = 65_536


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m eval",
        description="Score a model on datasets, or build the page of a run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for task, what in (
        ("zero-shot", "classify pictures by the prompts of their class names"),
        ("retrieval", "find captions by pictures and pictures by captions"),
    ):
        command = commands.add_parser(task, help=what, description=what[0].upper() + what[1:] + ".")
        command.add_argument(
            "--model", required=True, help="a run folder, a checkpoint, or what clipkit.load takes"
        )
        command.add_argument(
            "--name",
            default="",
            metavar="ARCHITECTURE",
            help="its architecture, where that is not stored with the weights; NAME-quickgelu with QuickGELU",
        )
        command.add_argument(
            "--data",
            required=True,
            action="append",
            metavar="NAME|FOLDER",
            help="glyphs, digits, icons, a dataset folder, or a folder of pictures by class; may be repeated",
        )
        command.add_argument(
            "--out",
            type=Path,
            metavar="FILE",
            help="where to append lines (default: results.jsonl in the run folder of the model, else here)",
        )
        command.add_argument("--batch-size", type=_positive, default=256, metavar="N", help="default: 256")
        command.add_argument(
            "--device", default="auto", help="auto (CUDA where there is one), cpu, cuda, cuda:1 …"
        )
    report = commands.add_parser(
        "report", help="build a run's report.html", description="Build a run's report.html."
    )
    report.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    report.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/report.html")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    options = _parser().parse_args(arguments)
    if options.command == "report":
        from eval.report import build_report

        print(f"wrote {build_report(options.run, options.out)}")
    else:
        _score(options)
    return 0


def _score(options: argparse.Namespace) -> None:
    """Score one model on every dataset in turn; results are written after each.

    Whatever ends it, the scores that there are stand on the terminal.
    """
    device = _device(options.device)
    datasets = open_datasets(options.data)
    for dataset in datasets:  # all of them before the first is scored
        check_tasks(dataset, [options.command])
    source, run = _checkpoint(options.model)
    model = clipkit.load(source, name=options.name, device=device)
    weights, step = weights_id(source)
    out = options.out or (run or Path()) / "results.jsonl"
    check_appendable(out)  # while nothing is lost yet
    scores: list[Score] = []
    try:
        with _progress() as progress:
            for dataset in datasets:
                bar = progress.add_task(dataset.name, total=len(dataset))

                def advance(pictures: int, bar: TaskID = bar) -> None:
                    progress.advance(bar, pictures)

                found = evaluate(
                    model,
                    dataset,
                    tasks=[options.command],
                    batch_size=options.batch_size,
                    progress=advance,
                )
                scores += found
                origin = provenance(model, dataset, weights=weights)
                append_results(out, found, step=step, provenance=origin)
    finally:
        if scores:
            Console(highlight=False).print(_table(scores))
    print(f"wrote {len(scores)} lines to {out.absolute()}")


def _checkpoint(source: str) -> tuple[str, Path | None]:
    """Settle on one checkpoint of a run, which may be writing another meanwhile; and that run's folder.

    A run is clipkit's or open_clip's.
    """
    try:
        path = Path(source).expanduser()
        if path.is_dir() and (path.name == "checkpoints" or (path / "checkpoints").is_dir()):
            path = newest_epoch(path) or resolve_checkpoint(path)
            source = str(path)
    except RuntimeError as error:
        raise ConfigError(f"no model at {source[:200]!r}: there is no such user") from error
    except OSError as error:
        raise ConfigError(f"no model at {source[:200]!r}: {error.strerror}") from error
    folder = path.absolute().parent
    return source, path.parent.parent if folder.name == "checkpoints" else None


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is not a device: give auto, cpu or cuda") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return name


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())


def _table(scores: Sequence[Score]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("dataset", overflow="fold")
    table.add_column("metric", no_wrap=True)
    for heading in ("value %", "95% interval", "chance %", "n"):
        table.add_column(heading, justify="right", no_wrap=True)
    before = ""
    for score in scores:
        if before and score.dataset != before:
            table.add_section()
        name = score.dataset if score.dataset != before else ""
        before = score.dataset
        interval = f"{100 * score.low:.1f}–{100 * score.high:.1f}"
        table.add_row(
            Text(name),  # it may look like markup
            score.metric,
            f"{100 * score.value:.1f}",
            interval,
            f"{100 * score.chance:.2f}",
            f"{score.n:,}",
        )
    return table


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() and len(text) < 10 else 0
    if not 1 <= value <= _MAX_BATCH:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 1 to {_MAX_BATCH}")
    return value


if __name__ == "__main__":
    run_command(main)
