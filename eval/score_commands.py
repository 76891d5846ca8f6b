"""``python -m eval run``, ``verify`` and a command for each task: models are scored on datasets."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import clipkit
from clipkit import CLIP, distributed
from clipkit.checkpoint import resolve_checkpoint
from clipkit.count_progress import counted
from clipkit.errors import ClipkitError, ConfigError, DataError, nearest
from clipkit.open_clip_run import newest_epoch
from data.cache import cache_folder
from eval.dataset import EvalDataset, Lacks
from eval.image_models import TIMM, load_image_model
from eval.ranks import Ranks
from eval.results import check_appendable, weights_id
from eval.run import Scored, run_model
from eval.score_options import PRECISIONS, add_data, add_model, add_prompts, add_task_options, task_options
from eval.targets import Missing, Target, find_named, find_suites
from eval.tasks import KNOWN_TASKS, check_image_tasks, check_tasks
from eval.terminal_table import printable, score_table
from eval.verify import (
    Check,
    checks_of,
    expected_of,
    find_known,
    known_tasks,
    nothing_checked,
    print_checks,
)

__all__ = ["add_score_commands"]


def add_score_commands(commands: Any) -> None:
    """Add them to the command line; each sets ``run``."""
    what = "score models on datasets and suites, each on its main task or on those named"
    run = commands.add_parser("run", help=what, description=_sentence(what))
    add_data(run)
    add_model(run)
    run.add_argument(
        "--task",
        action="append",
        default=[],
        choices=[*KNOWN_TASKS],
        metavar="TASK",
        help=f"{', '.join(KNOWN_TASKS)}; may be repeated (default: each dataset's own)",
    )
    add_prompts(run)
    add_task_options(run, [*KNOWN_TASKS])
    run.set_defaults(run=_started(_score))
    for name, task in KNOWN_TASKS.items():
        command = commands.add_parser(name, help=task.what, description=_sentence(task.what))
        add_data(command)
        add_model(command)
        if task.by_prompts:
            add_prompts(command)
        command.set_defaults(prompts="")
        add_task_options(command, [name])
        command.set_defaults(run=_started(_score))
    what = "check that a model reaches the scores that are known for it"
    verify = commands.add_parser("verify", help=what, description=_sentence(what))
    add_data(verify)
    add_model(verify, several=False)
    verify.add_argument(
        "--as",
        dest="known_as",
        default="",
        metavar="NAME",
        help="the name that its scores are known under (default: MODEL)",
    )
    verify.set_defaults(run=_started(_verify))


def _started(
    command: Callable[[argparse.Namespace, torch.device], int],
) -> Callable[[argparse.Namespace], int]:
    """A command among all ranks that torchrun has started."""

    def run(options: argparse.Namespace) -> int:
        device = distributed.start()
        try:
            return command(options, device)
        finally:
            distributed.stop()

    return run


def _sentence(what: str) -> str:
    return what[0].upper() + what[1:] + "."


def _score(options: argparse.Namespace, device: torch.device) -> int:
    """Score every model on every dataset; whatever ends it, the scores that there are stand on the terminal."""
    place = _device(options.device, device)
    tasks = tuple(options.task) if options.command == "run" else (options.command,)
    if not options.data and not options.suite:
        raise ConfigError("nothing to score on: name a dataset with --data or a suite with --suite")
    check_image_tasks(options.model, tasks)
    named, broken = find_named(options.data, root=options.data_root, prompts=options.prompts)
    if not named and not options.suite:
        _tell_trouble(broken[1:])
        raise broken[0]
    _tell_trouble(broken)
    if not options.suite:
        _check_something_fits(named, tasks)
    others, trouble = find_suites(options.suite, root=options.data_root, prompts=options.prompts)
    targets = _together(named, others, options.prompts)
    models = [_Model.of(name, options.out) for name in dict.fromkeys(options.model)]
    scored = Scored()
    for model in models:
        if len(models) > 1 and distributed.rank() == 0:
            print(f"\n{model.name}")
        before = len(scored.trouble)
        try:
            _score_model(model, targets, tasks, options, place, scored)
        except ClipkitError as error:  # of several models, one that does not load costs its own scores
            if len(models) == 1:
                raise
            scored.trouble.append(error)
        if len(models) > 1 and len(scored.trouble) > before and distributed.rank() == 0:
            print(f"{model.name} has not all of its scores:", file=sys.stderr)
        _tell_trouble(scored.trouble[before:])
    _tell_trouble(trouble)
    return _status([*broken, *trouble, *scored.trouble], scored)


def _check_something_fits(targets: Sequence[Target], tasks: Sequence[str]) -> None:
    """Fail before a model is loaded where nothing can be done; else what cannot is told later.

    Raises:
        DataError: why the first of them cannot.
        ConfigError: a task is unknown.
    """
    refused: list[ClipkitError] = []
    for target in targets:
        for task in tasks or target.dataset.tasks:
            try:
                check_tasks(target.dataset, [task])
            except DataError as error:
                refused.append(error)
            else:
                return
    if refused:
        raise refused[0]


def _together(named: Sequence[Target], others: Sequence[Target], prompts: str) -> list[Target]:
    """Datasets that are named and those of suites, each once.

    Raises:
        DataError: two would have one name.
        ConfigError: none of them has the prompt set that is asked for.
    """
    targets = {target.dataset.name: target for target in named}
    for target in others:
        there = targets.setdefault(target.dataset.name, target)
        if there.card is not target.card:
            raise DataError(
                f"two datasets would both be named {target.dataset.name}, yours and the suite's: rename the folder"
            )
    datasets = [one.dataset for one in targets.values()]
    given = {name for one in datasets for name in (one.prompt_set, one.caption_prompt_set)}
    if prompts and targets and prompts not in given:
        cards = [one.card for one in targets.values() if one.card]
        known = sorted({name for card in cards for name in (*card.prompt_sets, *card.caption_prompts)})
        how = "a card states prompts as [prompts.NAME], those of captions in [caption_prompts]"
        hint = nearest(prompts, known) if known else how
        raise ConfigError(f"--prompts {prompts}: none of the datasets has it ({hint})")
    return list(targets.values())


def _verify(options: argparse.Namespace, device: torch.device) -> int:
    """Measure what cards expect of a model, prompt set by prompt set, and hold it beside that."""
    place, options.skip_existing = _device(options.device, device), False  # what is checked is measured
    if len(options.model) > 1:
        raise ConfigError("verify checks one --model at a time")
    model = _Model.of(options.model[0], options.out)
    known_as = options.known_as or model.name
    check_image_tasks([model.source], known_tasks(options.data, known_as))
    known = find_known(options.data, known_as, root=options.data_root)
    scored, checks = Scored(), list[Check]()
    for target in known.targets:
        tasks = tuple(dict.fromkeys(one.task for one in expected_of(target, known_as)))
        before = len(scored.scores)
        _score_model(model, [target], tasks, options, place, scored)
        checks += checks_of(target, known_as, scored.scores[before:])
    _tell_trouble(everything := [*known.trouble, *scored.trouble])
    status = _status(everything, scored)
    if distributed.rank() == 0 and not checks:
        print(nothing_checked(known, known_as), file=sys.stderr)
    return max(status, print_checks(checks) if checks and distributed.rank() == 0 else 0)


@dataclass(frozen=True, kw_only=True)
class _Model:
    """A model as the user names it, the one checkpoint that is meant, and where its scores go."""

    name: str
    source: str
    out: Path

    @classmethod
    def of(cls, name: str, out: Path | None) -> "_Model":
        source, run = _checkpoint(name)
        return cls(name=name, source=source, out=out or (run or Path()) / "results.jsonl")


def _score_model(
    wanted: _Model,
    targets: Sequence[Target],
    tasks: Sequence[str],
    options: argparse.Namespace,
    device: str,
    scored: Scored,
) -> None:
    model = _load(wanted.source, options.name, device)
    model.preprocess = model.preprocess.with_decoding(background=options.background, upright=options.upright)
    check_appendable(wanted.out)  # while nothing is lost yet
    weights, step = weights_id(wanted.source)
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
                out=wanted.out,
                tasks=tasks,
                options=task_options(options),
                skip_existing=options.skip_existing,
                store=_store(options.features),
                ranks=ranks,
                batch_size=options.batch_size,
                origin={"model": wanted.name, "weights": weights},
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
        for (name, split), counts in own.counts.items():
            for line in counts.lines(
                model.preprocess.decoding,
                background="--background white" if options.background is None else "",
                upright="--upright" if options.upright is None else "",
            ).values():
                print(printable(f"dataset {name}, split {split}: {line}"), file=sys.stderr)
        there = f", {own.found} were there already" if options.skip_existing else ""
        print(f"wrote {counted(len(own.scores), 'line')} to {wanted.out.absolute()}{there}")


def _load(source: str, name: str, device: str) -> CLIP:
    if source.startswith(TIMM):
        return load_image_model(source, device=device)
    return clipkit.load(source, name=name, device=device)


def _tell_trouble(trouble: Sequence[ClipkitError]) -> None:
    """Every dataset, or task on one, without scores, a line each; what several tasks lack is one."""
    if distributed.rank() == 0:
        lines = (f"{'not here' if isinstance(one, Missing) else 'not scored'}: {one}" for one in trouble)
        for line in dict.fromkeys(lines):
            print(printable(line), file=sys.stderr)


def _status(trouble: Sequence[ClipkitError], scored: Scored) -> int:
    """The exit status: 1 where something was broken, or there is no score at all."""
    broken = any(not isinstance(one, Missing | Lacks) for one in trouble)
    return 1 if broken or not (scored.scores or scored.found) else 0


def _store(features: str | None) -> Path | None:
    if features is None:
        return cache_folder() / "features"
    return Path(features).expanduser() if features else None


def _autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    dtype = PRECISIONS[precision]
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
