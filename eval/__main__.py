"""``python -m eval``: score models on datasets, and build the pages of what came out."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import clipkit
from clipkit import distributed
from clipkit.checkpoint import resolve_checkpoint
from clipkit.errors import ClipkitError, ConfigError, run_command
from clipkit.open_clip_run import newest_epoch
from data.cache import cache_folder
from eval.dataset import EvalDataset, Lacks
from eval.ranks import Ranks
from eval.results import check_appendable, weights_id
from eval.run import Scored, run_model
from eval.score_table import score_table
from eval.targets import Missing, Target, find_targets
from eval.tasks import KNOWN_TASKS, Options, check_tasks
from eval.tasks.few_shot import ESTIMATORS, SHOTS
from eval.tasks.knn import KS

_EPILOG = """examples:
  python -m eval zero-shot --model runs/quickstart --data digits --data glyphs
  python -m eval retrieval --model runs/icons --data icons --data my_folder
  python -m eval run --suite builtin --model runs/quickstart
  python -m eval run --suite clip27 --data-root hf://datasets/clip-benchmark \\
      --model open_clip:ViT-B-32/openai --model runs/mine --skip-existing
  python -m eval report runs/quickstart
"""

_MAX_BATCH = 65_536
_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m eval",
        description="Score models on datasets, and build the pages of what came out.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    what = "score models on datasets and suites, each on its main task or on those named"
    run = commands.add_parser("run", help=what, description=_sentence(what))
    _add_scoring(run)
    run.add_argument(
        "--task", action="append", default=[], choices=[*KNOWN_TASKS], help="may be repeated", metavar="TASK"
    )
    _add_task_options(run, [*KNOWN_TASKS])
    for name, task in KNOWN_TASKS.items():
        command = commands.add_parser(name, help=task.what, description=_sentence(task.what))
        _add_scoring(command)
        _add_task_options(command, [name])
    report = commands.add_parser(
        "report", help="build a run's report.html", description="Build a run's report.html."
    )
    report.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    report.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/report.html")
    return parser


def _sentence(what: str) -> str:
    return what[0].upper() + what[1:] + "."


def _add_scoring(command: argparse.ArgumentParser) -> None:
    """The options of all commands that score."""
    add = command.add_argument
    add(
        "--model",
        required=True,
        action="append",
        help="a run folder, a checkpoint, or what clipkit.load takes; may be repeated",
    )
    add(
        "--name",
        default="",
        metavar="ARCHITECTURE",
        help="its architecture, where that is not stored with the weights; NAME-quickgelu with QuickGELU",
    )
    add(
        "--data",
        action="append",
        default=[],
        metavar="NAME|FOLDER",
        help="a dataset's name, a dataset folder or URL, or a folder of pictures by class; may be repeated",
    )
    add(
        "--suite",
        action="append",
        default=[],
        metavar="SUITE",
        help="datasets by their suite's name; may be repeated",
    )
    add(
        "--data-root",
        metavar="FOLDER",
        help="where datasets are looked for by name; hf://datasets/clip-benchmark for the published ones",
    )
    add(
        "--prompts",
        default="",
        metavar="SET",
        help="prompt set, where a dataset has it (openai, clip_benchmark …)",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to append lines (default: results.jsonl in the run folder of the model, else here)",
    )
    add("--skip-existing", action="store_true", help="leave alone what FILE has scores of")
    add(
        "--features",
        metavar="FOLDER",
        help="where encoded pictures and texts are kept (default: features in the cache); '' keeps none",
    )
    add("--batch-size", type=_positive, default=256, metavar="N", help="default: 256")
    add("--device", default="auto", help="auto (CUDA where there is one), cpu, cuda, cuda:1 …")
    add("--precision", default="fp32", choices=[*_PRECISIONS], help="what the towers run in (default: fp32)")
    add("--seed", type=int, default=0, help="of whatever is drawn (default: 0)")


def _add_task_options(command: argparse.ArgumentParser, tasks: Sequence[str]) -> None:
    """Options that some tasks have."""
    add = command.add_argument
    if "linear-probe" in tasks:
        add(
            "--layers",
            nargs="*",
            type=_positive,
            metavar="K",
            help="linear-probe: probe the image tower behind these blocks too (all where none is named)",
        )
    if "few-shot" in tasks:
        shots = " ".join(map(str, SHOTS))
        add(
            "--shots",
            nargs="+",
            type=_positive,
            default=SHOTS,
            metavar="N",
            help=f"few-shot: default {shots}",
        )
        add(
            "--seeds",
            nargs="+",
            type=int,
            default=(0, 1, 2),
            metavar="S",
            help="few-shot: draws (default: 0 1 2)",
        )
        add("--estimators", nargs="+", choices=ESTIMATORS, default=ESTIMATORS, help="few-shot: default both")
    if "knn" in tasks:
        add("--neighbours", nargs="+", type=_positive, default=KS, metavar="K", help="knn: default 10 20")


def _options(options: argparse.Namespace) -> Options:
    """Of the command line, for the tasks that it has."""
    layers = getattr(options, "layers", None)
    return Options(
        seed=options.seed,
        layers=False if layers is None else tuple(layers) or True,
        shots=tuple(getattr(options, "shots", SHOTS)),
        seeds=tuple(getattr(options, "seeds", (0, 1, 2))),
        estimators=tuple(getattr(options, "estimators", ESTIMATORS)),
        neighbours=tuple(getattr(options, "neighbours", KS)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    options = _parser().parse_args(arguments)
    if options.command == "report":
        from eval.report import build_report

        print(f"wrote {build_report(options.run, options.out)}")
        return 0
    device = distributed.start()
    try:
        return _score(options, device)
    finally:
        distributed.stop()


def _score(options: argparse.Namespace, device: torch.device) -> int:
    """Score every model on every dataset; whatever ends it, the scores that there are stand on the terminal."""
    place = _device(options.device, device)
    tasks = tuple(options.task) if options.command == "run" else (options.command,)
    if not options.data and not options.suite:
        raise ConfigError("nothing to score on: name a dataset with --data or a suite with --suite")
    root = options.data_root
    named, _ = find_targets(options.data, root=root, prompts=options.prompts)
    for target in named:  # what was named one by one fails before anything is scored
        check_tasks(target.dataset, tasks or None)
    others, trouble = find_targets([], options.suite, root=root, prompts=options.prompts)
    names = {target.dataset.name for target in named}
    targets = [*named, *(target for target in others if target.dataset.name not in names)]
    sources = [_checkpoint(source) for source in options.model]
    scored = Scored()
    for source, run in sources:
        out = options.out or (run or Path()) / "results.jsonl"
        check_appendable(out)  # while nothing is lost yet
        if len(sources) > 1 and distributed.rank() == 0:
            print(f"\n{source}")
        _score_model(source, out, targets, tasks, options, place, scored)
    return _tell_trouble([*trouble, *scored.trouble], scored)


def _score_model(
    source: str,
    out: Path,
    targets: Sequence[Target],
    tasks: Sequence[str],
    options: argparse.Namespace,
    device: str,
    scored: Scored,
) -> None:
    model = clipkit.load(source, name=options.name, device=device)
    weights, step = weights_id(source)
    ranks = Ranks(rank=distributed.rank(), world=distributed.world_size(), gather=distributed.sum_over_ranks)
    own = Scored(trouble=scored.trouble)
    try:
        with _progress(ranks) as progress, _autocast(device, options.precision):

            def started(dataset: EvalDataset) -> Callable[[int], None]:
                bar = progress.add_task(dataset.name, total=len(dataset))
                return lambda pictures: progress.advance(bar, pictures * ranks.world)

            run_model(
                model,
                targets,
                out=out,
                tasks=tasks,
                options=_options(options),
                skip_existing=options.skip_existing,
                store=_store(options.features),
                ranks=ranks,
                batch_size=options.batch_size,
                origin={"model": source, "weights": weights},
                step=step,
                started=started,
                scored=own,
            )
    finally:
        scored.scores += own.scores
        scored.found += own.found
        if own.scores and ranks.rank == 0:
            Console(highlight=False).print(score_table(own.scores))
    if ranks.rank == 0:
        there = f", {own.found} were there already" if options.skip_existing else ""
        print(f"wrote {len(own.scores)} lines to {out.absolute()}{there}")


def _tell_trouble(trouble: Sequence[Missing | ClipkitError], scored: Scored) -> int:
    """Every dataset, or task on one, without scores, a line each; the exit status."""
    broken = [one for one in trouble if not isinstance(one, Missing | Lacks)]
    if distributed.rank() == 0:
        for one in trouble:
            if isinstance(one, Missing):
                print(f"not here: {one.name}: {one.how}", file=sys.stderr)
            else:
                print(f"not scored: {one}", file=sys.stderr)
    return 1 if broken or not (scored.scores or scored.found) else 0


def _store(features: str | None) -> Path | None:
    if features is None:
        return cache_folder() / "features"
    return Path(features).expanduser() if features else None


def _autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    dtype = _PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(torch.device(device).type, dtype)


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


def _device(name: str, started: torch.device) -> str:
    if name == "auto":
        return str(started)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is not a device: give auto, cpu or cuda") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return name


def _progress(ranks: Ranks) -> Progress:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    hidden = not sys.stderr.isatty() or ranks.rank > 0
    return Progress(*columns, console=console, transient=True, disable=hidden)


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() and len(text) < 10 else 0
    if not 1 <= value <= _MAX_BATCH:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 1 to {_MAX_BATCH}")
    return value


if __name__ == "__main__":
    run_command(distributed.together(main))
